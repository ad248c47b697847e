"""Scores against what plain transformers' own attention weights say, and budgets against their definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kv_rag import methods
from kv_rag.document import Compression
from kv_rag.errors import InvalidSetting, UnknownMethod
from kv_rag.ingest import compress, prefill, reading, score, watcher_for
from kv_rag.methods.base import LayerStates
from kv_rag.model import LanguageModel
from kv_rag.observation import LayerStep
from kv_rag.rotary import angles, rotate
from kv_rag.selection import Budget, pyramid, select
from tests.conftest import text_of


def document(model: LanguageModel, length: int = 150) -> Tensor:
    return model.encode(text_of(length, 4), template=False)


def scores(model: LanguageModel, ids: Tensor, name: str, chunk: int, **settings: Any) -> list[Tensor]:
    method = methods.create(name, settings)
    watcher = watcher_for(model, "d", ids, method)
    full = prefill(model, "d", ids, chunk, observer=watcher)
    return score(model, full, method, chunk, watcher)


@torch.no_grad()
def plain_attention(model: LanguageModel, ids: Tensor) -> list[Tensor]:
    """Weights ``[kv_heads, group, tokens, tokens]`` of every layer, from plain transformers."""
    model.model.set_attn_implementation("eager")
    weights = model.model(ids[None], output_attentions=True, use_cache=False).attentions
    return [layer[0].unflatten(0, (model.kv_heads, -1)) for layer in weights]


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_scores_do_not_depend_on_how_the_document_is_cut_into_chunks(tiny: LanguageModel, name: str) -> None:
    ids = document(tiny)
    for small, whole in zip(scores(tiny, ids, name, 17), scores(tiny, ids, name, 4096), strict=True):
        assert small.shape == (tiny.kv_heads, ids.numel())
        same = small == whole  # infinite scores among them
        apart = (small - whole).abs()[~same] > 1e-3 * whole[whole.isfinite()].abs().max().clamp_min(1)
        assert apart.sum() < 0.01 * whole.numel()  # scissorhands counts, and a weight may lie on the line


@pytest.mark.parametrize("normalise", [True, False])
def test_h2o_sums_the_attention_of_plain_transformers(tiny: LanguageModel, normalise: bool) -> None:
    ids, before = document(tiny), tiny.header[1].numel()
    ours = scores(tiny, ids, "h2o", 40, normalise=normalise)
    for layer, weights in zip(ours, plain_attention(tiny, torch.cat([tiny.header[1], ids])), strict=True):
        expected = weights[..., before:].mean(dim=1).sum(dim=1)
        if normalise:
            expected = expected / torch.arange(ids.numel(), 0, -1)
        assert (layer - expected).abs().max() < 1e-4


def test_tova_is_the_last_tokens_mean_attention(tiny: LanguageModel) -> None:
    ids, before = document(tiny), tiny.header[1].numel()
    ours = scores(tiny, ids, "tova", 40)
    for layer, weights in zip(ours, plain_attention(tiny, torch.cat([tiny.header[1], ids])), strict=True):
        expected = weights[:, :, -1, before:].mean(dim=(0, 1))
        assert (layer[:, :-1] - expected[:-1]).abs().max() < 1e-5


def test_scissorhands_counts_attention_below_uniform(tiny: LanguageModel) -> None:
    ids, before, window = document(tiny), tiny.header[1].numel(), 60
    ours = scores(tiny, ids, "scissorhands", 40, window=window)
    everything = torch.cat([tiny.header[1], ids])
    total = everything.numel()
    sight = torch.ones(total, total, dtype=torch.bool).tril()
    uniform = 1 / torch.arange(1, total + 1)[:, None]
    for layer, weights in zip(ours, plain_attention(tiny, everything), strict=True):
        below = ((weights < uniform) & sight).float().mean(dim=1)[:, -window:, before:].sum(dim=1)
        expected = -below / sight[-window:, before:].sum(dim=0)
        assert (layer - expected).abs().mean() < 1e-3  # a weight may lie on the line, and rounding decides


def test_kvzip_is_the_most_attention_that_a_repetition_pays(tiny: LanguageModel) -> None:
    ids, before = document(tiny), tiny.header[1].numel()
    ours = scores(tiny, ids, "kvzip", 40)
    method = methods.create("kvzip")
    assert isinstance(method, methods.ReplayMethod)
    (replay,) = method.replays(reading(tiny, "d", ids))
    everything = torch.cat([tiny.header[1], ids, replay])
    for layer, weights in zip(ours, plain_attention(tiny, everything), strict=True):
        end = before + ids.numel()
        assert (layer - weights[:, :, end:, before:end].amax(dim=(1, 2))).abs().max() < 1e-4


def test_kvzip_covers_every_token_of_a_document_of_several_parts(tiny: LanguageModel) -> None:
    for layer in scores(tiny, document(tiny), "kvzip", 64, part=40):
        assert (layer > 0).all()


def test_expected_attention_is_the_mean_over_gaussian_queries(tiny: LanguageModel) -> None:
    """Against a sample: queries drawn from the document's own statistics, all at one coming position."""
    ids = document(tiny)
    settings = {"future": 1, "value_norm": False, "skip": 0}
    raw: dict[int, Tensor] = {}

    class Recorder:
        def observe(self, step: LayerStep) -> None:
            raw[step.layer] = step.raw_queries[:, step.slots.index >= tiny.header[1].numel()].double()

    full = prefill(tiny, "d", ids, 4096, observer=Recorder())
    ours = scores(tiny, ids, "expected", 4096, **settings)
    about = reading(tiny, "d", ids)
    for index, layer in enumerate(full.layers):
        states = LayerStates(index, layer.keys.view(tiny.kv_heads, ids.numel(), -1), layer.values, about)
        position = torch.tensor([about.before + about.tokens])
        turned = rotate(raw[index].float(), angles(position, tiny.inverse_frequencies)).double()
        mean = turned.mean(dim=1, keepdim=True)
        spread = (turned - mean).transpose(1, 2) @ (turned - mean) / turned.shape[1]
        keys = states.rotated_keys().double().repeat_interleave(tiny.heads // tiny.kv_heads, dim=0)
        scale = tiny.head_dim**-0.5
        logits = (keys * mean).sum(-1) * scale + ((keys @ spread) * keys).sum(-1) * scale**2 / 2
        expected = logits.softmax(-1).unflatten(0, (tiny.kv_heads, -1)).mean(dim=1)
        assert (ours[index] - expected).abs().max() < 1e-4


def test_document_scored_from_a_stored_state_gets_the_scores_of_its_first_reading(tiny: LanguageModel) -> None:
    ids = document(tiny)
    full = prefill(tiny, "d", ids, 64)
    for name in ("h2o", "kvzip", "keydiff_attention"):
        again = score(tiny, full, methods.create(name), 64)
        for one, other in zip(again, scores(tiny, ids, name, 64), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("allocation", ["uniform", "heads", "model", "pyramid"])
def test_bytes_are_those_of_the_pairs_kept(tiny: LanguageModel, allocation: str) -> None:
    ids = document(tiny, 200)
    full = prefill(tiny, "d", ids, 64)
    wanted = Compression.of("kvzip", keep=0.25, settings={"allocation": allocation})
    kept = compress(tiny, full, methods.create("kvzip"), wanted, 64)
    assert kept.pairs == round(0.25 * full.pairs)
    held = kept.nbytes - ids.numel() * 8
    assert held == sum(layer.nbytes for layer in full.layers) * kept.pairs / full.pairs


def test_sinks_last_tokens_and_minimum_stay_whatever_their_scores() -> None:
    torch.manual_seed(0)
    layers = [torch.randn(3, 100) - 50 * (index == 1) for index in range(4)]
    for allocation in ("uniform", "heads", "model", "pyramid"):
        budget = Budget(0.2, allocation=allocation, sinks=3, recent=5, minimum=12)
        for heads in select(layers, budget):
            for kept in heads:
                assert {0, 1, 2, 95, 96, 97, 98, 99} <= set(kept.tolist())
                assert kept.numel() >= 12
                assert torch.equal(kept, kept.unique())


def test_one_ranking_over_the_model_keeps_the_highest_scores_of_all_layers() -> None:
    torch.manual_seed(1)
    layers = [torch.rand(2, 50) + 0.1 * index for index in range(3)]
    kept = select(layers, Budget(0.3, allocation="model", sinks=0, minimum=1))
    everything = torch.cat([layer.reshape(-1) for layer in layers])
    threshold = everything.sort(descending=True).values[90 - 1]
    for layer, heads in zip(layers, kept, strict=True):
        for row, chosen in zip(layer, heads, strict=True):
            assert torch.equal((row >= threshold).nonzero()[:, 0], chosen)


def test_pyramid_falls_from_layer_to_layer_and_keeps_the_mean() -> None:
    counts = pyramid(25, 8, 100, 4)
    assert sum(counts) == 200
    assert counts[0] > counts[3] > counts[-1]
    assert max(pyramid(90, 8, 100, 4)) <= 100


@pytest.mark.parametrize("name", ["snapkv", "SnapKV", "pyramidkv", "tova_question"])
def test_methods_that_need_a_question_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UnknownMethod, match="at ingest there is none"):
        methods.create(name)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("kvzip", {"part": 3}), ("kvzip", {"weight": "x"}), ("expected", {"future": 0}), ("lagkv", {"lag": 1}),
     ("compactor", {"pool": 2}), ("critical", {"base": "keydiff"}), ("scissorhands", {"window": 0}), ("h2o", {"x": 1}),
     ("blend", {"diversity": -1}), ("keydiff_attention", {"attention": 0})],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(name: str, settings: dict[str, str | int]) -> None:
    with pytest.raises(InvalidSetting, match=name):
        methods.create(name, settings)
