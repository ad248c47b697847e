"""How methods to compare are written, and what only a comparison may do with them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kv_rag import methods
from kv_rag.engine import SNAPKV, Engine
from kv_rag.errors import InvalidSetting, UnknownMethod
from kv_rag.evaluation.contestants import PER_QUERY, WINDOW, Contestant, SnapKVWindow
from kv_rag.evaluation.runs import Bench
from kv_rag.methods.h2o import H2O
from kv_rag.model import LanguageModel
from kv_rag.selection import ALLOCATIONS, Budget
from kv_rag.snapkv import SnapKV
from tests.conftest import text_of, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_a_name_alone_is_the_method_as_the_product_makes_it(name: str) -> None:
    contestant = Contestant.parse(name)
    method = methods.create(name)
    assert contestant.method() == method
    assert contestant.budget(0.5) == Budget(0.5, allocation=methods.allocation_of(method))


def test_methods_made_for_ragged_heads_have_them_unless_told_otherwise() -> None:
    alone = {name: Contestant.parse(name).allocation for name in ("blend", "kvzip", "keydiff_attention", "keydiff")}
    assert alone == {"blend": "model", "kvzip": "model", "keydiff_attention": "heads", "keydiff": "uniform"}
    assert Contestant.parse("blend/uniform").allocation == "uniform"


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_an_allocation_stands_after_a_slash(allocation: str) -> None:
    assert Contestant.parse(f"knorm/{allocation}").budget(0.25) == Budget(0.25, allocation=allocation)


def test_settings_stand_after_commas_in_the_type_they_are_written_in() -> None:
    contestant = Contestant.parse("h2o/heads,normalise=false,sinks=2,minimum=3")
    assert contestant.method() == H2O(normalise=False)
    assert contestant.budget(0.5) == Budget(0.5, allocation="heads", sinks=2, minimum=3)


def test_a_contestant_is_labelled_as_it_was_written() -> None:
    assert Contestant.parse("h2o/heads,normalise=false").label == "h2o/heads,normalise=false"


@pytest.mark.parametrize("name", ["kvsqueeze", "KNorm", "", "pyramidkv"])
def test_an_unknown_method_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownMethod, match=repr(name)):
        Contestant.parse(name)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("knorm/layers", "'layers'"), ("snapkv/layers", "'layers'"), ("snapkv-window/layers", "'layers'"),
        ("h2o,windows=3", "'windows'"), ("h2o,sinks=-1", "sinks"), ("knorm,sinks", "'sinks'"),
        ("knorm,allocation=heads", "knorm/heads"), ("snapkv,allocation=heads", "snapkv/heads"),
        ("snapkv,window=3", "'window'"), ("snapkv,pool=4", "pool"), ("snapkv,sinks=2", "'sinks'"),
        ("snapkv-window,pooling=max", "'pooling'"), ("snapkv-window,pool=4", "pool"), ("snapkv-window,window=0", "window"),
        ("snapkv-window,window=all", "'all'"),
    ],
)  # fmt: skip
def test_an_allocation_or_a_setting_that_there_is_not_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(InvalidSetting, match=named):
        Contestant.parse(text)


# --- snapkv, for every question again ---


def test_snapkv_is_set_as_the_product_sets_it() -> None:
    contestant = Contestant.parse("snapkv")
    assert (contestant.is_per_query, contestant.snapkv()) == (True, SNAPKV)


def test_snapkv_takes_an_allocation_and_settings_of_its_own() -> None:
    contestant = Contestant.parse("snapkv/uniform,vote=mean,pool=7,pooling=mean,minimum=2")
    assert contestant.snapkv() == SnapKV(7, "mean", "mean", allocation="uniform", minimum=2)


# --- snapkv-window, for evaluations alone ---


@pytest.mark.parametrize("name", [PER_QUERY, WINDOW])
def test_what_picks_by_a_window_is_no_ingest_method_of_the_product(engine: Engine, name: str) -> None:
    with pytest.raises(UnknownMethod, match=name):
        engine.ingest("A document.", method=name)
    assert engine.documents() == []


def test_snapkv_window_takes_its_settings() -> None:
    contestant = Contestant.parse("snapkv-window/heads,window=12,pool=3,sinks=0")
    assert contestant.method() == SnapKVWindow(window=12, pool=3)
    assert contestant.budget(0.1) == Budget(0.1, allocation="heads", sinks=0)


@torch.no_grad()
def plain_attention(model: LanguageModel, ids: Tensor) -> list[Tensor]:
    """Weights ``[kv_heads, group, tokens, tokens]`` of every layer, from plain transformers."""
    model.model.set_attn_implementation("eager")
    weights = model.model(ids[None], output_attentions=True, use_cache=False).attentions
    return [layer[0].unflatten(0, (model.kv_heads, -1)) for layer in weights]


@pytest.mark.parametrize("question", [None, "Who jumps?"])
def test_snapkv_window_is_the_pooled_attention_of_the_last_tokens_read(question: str | None) -> None:
    model = LanguageModel(tiny_model("qwen3"), tiny_tokenizer())
    bench, text, window = Bench(model), text_of(200, 5), 30
    entry = Contestant.parse(f"snapkv-window,window={window},pool=3")
    _, _, scored = bench.read(text, [entry], question)
    document, header = model.encode(text), model.header[1]
    asked = torch.empty(0, dtype=torch.int64) if question is None else bench.question_ids(question, True)
    weights = plain_attention(model, torch.cat([header, document, asked]))
    before, tokens = header.numel(), document.numel()
    for found, layer in zip(scored[entry.label].scores, weights, strict=True):
        expected = layer[:, :, -window:, before:].sum(dim=2).mean(dim=1)
        expected = F.max_pool1d(expected[None], 3, stride=1, padding=1)[0]
        expected[:, -window:] = torch.inf
        assert torch.allclose(found, expected[:, :tokens], atol=1e-4)
