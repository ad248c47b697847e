"""Presses as ingest methods: ``kvpress:KnormPress``."""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kv_rag import methods
from kv_rag.attention import NAME, attention_forward
from kv_rag.engine import Engine
from kv_rag.errors import InvalidSetting, UnknownMethod, UnsupportedModel
from kv_rag.evaluation.contestants import Contestant
from kv_rag.ingest import prefill, score, watcher_for
from kv_rag.model import LanguageModel
from tests.conftest import tiny_model, tiny_tokenizer
from tests.peers.conftest import Read
from tests.peers.kept import our_kept, our_scores, shares_of_same

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress cannot be imported here; make test-peers has a place for it", exc_type=ImportError
)
TEXT = string.ascii_letters + string.digits + string.punctuation  # no letter twice, see conftest


def adapted_scores(model: LanguageModel, ids: Tensor, name: str, chunk: int = 64, **settings: Any) -> list[Tensor]:
    """As ``our_scores``, of presses that only an evaluation may use too."""
    text = ",".join([f"kvpress:{name}", *(f"{setting}={value}" for setting, value in settings.items())])
    method = Contestant.parse(text).method()
    watcher = watcher_for(model, "d", ids, method)
    full = prefill(model, "d", ids, chunk, observer=watcher)
    return score(model, full, method, chunk, watcher)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("KnormPress", {}), ("KeyDiffPress", {}), ("LagKVPress", {"lag_size": 32}), ("ExpectedAttentionPress", {}),
        ("NonCausalAttnPress", {"chunk_size": 64}), ("CURPress", {}), ("CapPress", {}),
        ("StreamingLLMPress", {"compression_ratio": 0.75}), ("SnapKVPress", {"window_size": 20}), ("TOVAPress", {}),
    ],
)  # fmt: skip
def test_press_as_a_method_keeps_what_it_keeps_in_the_models_own_prefill(
    tiny_read: Read, name: str, settings: dict[str, Any]
) -> None:
    model, kept = tiny_read.alone, tiny_read.tokens // 4
    if name == "LagKVPress":
        kept = tiny_read.tokens - 6 * 24  # a whole rank of each of the six parts that are ranked
    scores = adapted_scores(model, tiny_read.ids, name, **settings)
    press = partial(getattr(kvpress, name), **{key: value for key, value in settings.items() if "ratio" not in key})
    [share] = shares_of_same(model, tiny_read.ids, [kept], partial(our_kept, scores), press)
    assert share >= 0.99


@pytest.mark.parametrize(
    ("name", "settings", "ours", "our_settings"),
    [
        ("KnormPress", {}, "knorm", {}),
        ("LagKVPress", {"lag_size": 16}, "lagkv", {"lag": 16}),
        ("ExpectedAttentionPress", {"n_sink": 0}, "expected", {"skip": 0}),
        ("StreamingLLMPress", {"compression_ratio": 0.5}, "streaming", {}),
    ],
)
def test_document_ingested_with_a_press_keeps_the_pairs_of_our_method(
    make_engine: Callable[..., Engine], name: str, settings: dict[str, Any], ours: str, our_settings: dict[str, Any]
) -> None:
    engine = make_engine("qwen2")
    engine.ingest(TEXT, method=f"kvpress:{name}", keep=0.5, settings=settings)
    engine.ingest(TEXT, method=ours, keep=0.5, settings=our_settings)
    theirs = engine.kept(TEXT, method=f"kvpress:{name}").positions
    for our_heads, their_heads in zip(engine.kept(TEXT, method=ours).positions, theirs, strict=True):
        assert all(torch.equal(our_head, their_head) for our_head, their_head in zip(our_heads, their_heads, strict=True))


def test_answer_comes_from_the_pairs_a_press_kept(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine("llama")
    engine.ingest(TEXT, method="kvpress:KeyDiffPress", keep=0.5)
    answer = engine.answer("Which letters?", documents=TEXT, method="kvpress:KeyDiffPress", max_new_tokens=3)
    assert answer.metadata.pairs_kept == answer.metadata.pairs_full / 2


@pytest.mark.parametrize("name", ["CompactorPress", "LeverageScorePress"])
def test_sketches_are_the_same_whenever_a_document_is_read(tiny_read: Read, name: str) -> None:
    settings = {"blending": 0.3} if name == "CompactorPress" else {}
    one = adapted_scores(tiny_read.after_header, tiny_read.ids, name, chunk=64, **settings)
    other = adapted_scores(tiny_read.after_header, tiny_read.ids, name, chunk=64, **settings)
    assert all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["SnapKVPress", "TOVAPress", "PyramidKVPress", "FinchPress"])
def test_press_that_needs_a_question_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UnknownMethod, match="at ingest there is none"):
        methods.create(f"kvpress:{name}")


def test_press_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(UnknownMethod, match="kvpress has no press 'NoPress'"):
        methods.create("kvpress:NoPress")


@pytest.mark.parametrize("name", ["KVzipPress", "AdaKVPress", "CriticalKVPress", "KVzapPress", "QFilterPress"])
def test_press_that_does_more_than_score_is_refused(name: str) -> None:
    with pytest.raises(UnknownMethod, match=f"{name} does more than score"):
        methods.create(f"kvpress:{name}")


def test_press_that_needs_attention_weights_is_refused_when_it_asks(tiny_read: Read) -> None:
    with pytest.raises(UnknownMethod, match="ObservedAttentionPress cannot score this document"):
        adapted_scores(tiny_read.alone, tiny_read.ids, "ObservedAttentionPress")


def test_setting_that_a_press_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(InvalidSetting, match="LagKVPress has no setting lag; it has: compression_ratio, cross"):
        methods.create("kvpress:LagKVPress", {"lag": 16})


def test_value_that_a_press_does_not_take_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="KnormPress does not take"):
        methods.create("kvpress:KnormPress", {"compression_ratio": 2.0})


@pytest.mark.parametrize("name", ["StreamingLLMPress", "CompactorPress"])
def test_press_that_scores_for_one_ratio_must_be_told_it(name: str) -> None:
    with pytest.raises(InvalidSetting, match="give it compression_ratio"):
        methods.create(f"kvpress:{name}")
    methods.create(f"kvpress:{name}", {"compression_ratio": 0.75})


def test_model_that_rotates_a_part_of_each_head_is_refused() -> None:
    model = LanguageModel(tiny_model("phi3-partial"), tiny_tokenizer())
    with pytest.raises(UnsupportedModel, match="rotates a part"):
        our_scores(model, model.encode(TEXT), "kvpress:KnormPress")


def test_our_attention_is_right_inside_the_wrapper_that_kvpress_puts_around_it(
    tiny_read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is in a process that imports kvpress once an engine is there: every registered function is wrapped."""
    from kvpress.attention_patch import attention_patch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, ids = tiny_read.after_header, tiny_read.ids
    with torch.no_grad():
        plain = model.model(torch.cat([model.header[1], ids])[None], use_cache=True).past_key_values
    identity = model.fingerprint()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, NAME, attention_patch(attention_forward))
    ours = prefill(model, "d", ids, 64)
    for layer, cached in zip(ours.layers, plain.layers, strict=True):
        values = cached.values[0, :, tiny_read.before :]
        assert (layer.values.view(values.shape) - values).abs().max() < 1e-4
    assert model.fingerprint() == identity
