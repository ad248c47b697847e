"""Models read by both: tiny ones of several families, and the bundled one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kv_rag import demo
from kv_rag.model import LanguageModel
from tests.conftest import tiny_model, tiny_tokenizer

BUNDLED = "bundled:smollm2-135m"
# Of the families kvpress supports; partial rotation it does not.
FAMILIES = ["llama", "mistral", "phi3", "qwen2", "qwen2-yarn", "qwen3"]
TOKENS = 240


@dataclass(frozen=True)
class Read:
    """One model and one document.

    Attributes:
        alone: the model without chat template: P is empty, the document is all that is read.
        after_header: the model with one: the document is read after P.
        ids: ``[T]`` int64, the document.

    """

    alone: LanguageModel
    after_header: LanguageModel
    ids: Tensor

    @property
    def tokens(self) -> int:
        return self.ids.numel()

    @property
    def before(self) -> int:
        """P's length."""
        return self.after_header.header[1].numel()


@pytest.fixture(params=[*FAMILIES, pytest.param(BUNDLED, marks=pytest.mark.bundled)])
def read(request: pytest.FixtureRequest) -> Read:
    return _read(str(request.param))


@pytest.fixture(params=FAMILIES)
def tiny_read(request: pytest.FixtureRequest) -> Read:
    return _read(str(request.param))


@pytest.fixture
def bundled_read() -> Read:
    return _read(BUNDLED)


@cache
def _read(name: str) -> Read:
    if name == BUNDLED:
        bundled = LanguageModel.from_pretrained(BUNDLED)
        alone = _with_template(bundled.model, bundled.tokenizer, None)
        return Read(alone, bundled, alone.encode(next(iter(demo.documents())).text, template=False)[:TOKENS])
    model = tiny_model(name)
    if name == "qwen3":  # its new norms leave all keys with one length, and KNorm with nothing to rank by
        for layer in model.model.layers:
            torch.nn.init.uniform_(layer.self_attn.k_norm.weight, 0.5, 1.5)
    # No token twice: in the first layer one token's keys have one length wherever they stand.
    ids = torch.randperm(256, generator=torch.Generator().manual_seed(1))[:TOKENS]
    tokenizer = tiny_tokenizer()
    template = "Here: {{ messages[0]['content'] }}"
    return Read(_with_template(model, tokenizer, None), _with_template(model, tokenizer, template), ids)


def _with_template(model: Any, tokenizer: Any, template: str | None) -> LanguageModel:
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    return LanguageModel(model, own)
