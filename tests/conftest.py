"""Tiny random-weight models of every supported family, with a byte-level tokenizer and a chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from kv_rag.engine import Engine
from kv_rag.model import LanguageModel

torch.set_num_threads(1)  # for tiny models threads cost more than they give
TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|start|>system\nBe brief.<|end|>\n{% endif %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "vocab_size": 260,
    "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 258, "initializer_range": 0.15,
}  # fmt: skip


def rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **scaling}}


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-linear": lambda: LlamaConfig(**SIZES, **rope(rope_type="linear", factor=2.0)),
    "llama-llama3": lambda: LlamaConfig(
        **SIZES,
        **rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=256),
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2-yarn": lambda: Qwen2Config(
        **SIZES, **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=512)
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "phi3": lambda: Phi3Config(**SIZES),
    "phi3-partial": lambda: Phi3Config(**SIZES, partial_rotary_factor=0.75, **rope(partial_rotary_factor=0.75)),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that any text can be encoded and token counts are easy to see."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", additional_special_tokens=["<|start|>"]
    )
    tokenizer.add_special_tokens({"eos_token": "<|end|>", "pad_token": "<|pad|>"})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(7)
    config = FAMILIES[family]()
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Engines over tiny models; each call with another ``folder`` has a store of its own."""
    engines = []

    def make(family: str = "llama", folder: str = "kv", dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
        pair = (tiny_model(family, dtype), tiny_tokenizer())
        engine = Engine.from_pretrained(pair, store=tmp_path / folder, **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def tiny(family: str) -> LanguageModel:
    return LanguageModel(tiny_model(family), tiny_tokenizer())


LETTERS = "The quick brown fox jumps over lazy dogs while seven wizards judge my big quartz vow at noon. "


def text_of(length: int, seed: int = 0) -> str:
    """A text of ``length`` characters (so many tokens), different for every seed, without white space at its ends."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(LETTERS), (length,), generator=generator).tolist()
    return ("".join(LETTERS[pick] for pick in picks)).replace(" ", "_")
