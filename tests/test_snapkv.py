"""What SnapKV makes of attention: pooling, ranks and the diversity of keys. tests/test_exactness.py has its equalities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kv_rag.errors import InvalidSetting
from kv_rag.ingest import reading
from kv_rag.methods import LayerStates
from kv_rag.methods.keydiff import KeyDiff
from kv_rag.model import LanguageModel
from kv_rag.scoring import standardised
from kv_rag.snapkv import Range, SnapKV, diversified, select, unlikeness
from kv_rag.state import LayerState

HEADS, SLOTS, DIM = 2, 40, 8
PARTS = [Range(3, 18, 0.4), Range(20, 36, 0.4)]


def layer(seed: int) -> LayerState:
    keys = torch.randn(HEADS, SLOTS, DIM, generator=torch.Generator().manual_seed(seed))
    return LayerState(keys, torch.zeros_like(keys), SLOTS)


def attention(seed: int) -> Tensor:
    return torch.rand(HEADS, SLOTS, generator=torch.Generator().manual_seed(seed))


def test_a_key_is_unlike_the_others_of_its_own_document_as_keydiff_says(tiny: LanguageModel) -> None:
    state, about = layer(1), reading(tiny, "d", torch.arange(SLOTS))
    found = unlikeness(state, PARTS)
    for part in PARTS:
        keys = state.keys[:, part.begin : part.end]
        expected = standardised(KeyDiff().score(LayerStates(0, keys, keys, about)))
        assert torch.allclose(found[:, part.begin : part.end], expected, atol=1e-5)
    assert not found[:, 18:20].any() and not found[:, :3].any() and not found[:, 36:].any()


def test_diversity_adds_ranks_and_leaves_what_stays_in_any_case() -> None:
    scores = [torch.tensor([[math.inf, 0.1, 0.5, 0.2]]), torch.tensor([[0.4, math.inf, 0.3, 0.0]])]
    unlike = [torch.tensor([[9.0, 2.0, 0.0, 1.0]]), torch.tensor([[0.0, 9.0, 1.0, 2.0]])]
    first, second = diversified(scores, unlike, 0.5)
    assert torch.allclose(first, torch.tensor([[math.inf, 0.2 + 0.5, 1.0, 0.4 + 0.25]]))
    assert torch.allclose(second, torch.tensor([[0.8, math.inf, 0.6 + 0.25, 0.0 + 0.5]]))


@pytest.mark.parametrize("allocation", ["uniform", "heads", "model", "pyramid"])
def test_without_diversity_the_pairs_are_those_of_the_pooled_attention(allocation: str) -> None:
    settings = SnapKV(pool=3, diversity=0, allocation=allocation, minimum=1)
    scores, ranges = [attention(1), attention(2)], [PARTS, PARTS]
    blind = [torch.zeros(HEADS, SLOTS)] * 2
    loud = [unlikeness(layer(seed), PARTS) * 1e6 for seed in (1, 2)]
    for one, other in zip(select(scores, blind, ranges, settings), select(scores, loud, ranges, settings), strict=True):
        assert all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


@pytest.mark.parametrize("allocation", ["uniform", "heads", "model", "pyramid"])
def test_with_much_diversity_the_pairs_are_those_of_the_unlike_keys(allocation: str) -> None:
    few = SnapKV(pool=1, diversity=1e4, allocation=allocation, minimum=1)
    ranges = [PARTS, PARTS]
    unlike = [attention(3), attention(4)]
    by_rank = [torch.full((HEADS, SLOTS), 0.5)] * 2
    one = select([attention(1), attention(2)], unlike, ranges, few)
    other = select(by_rank, unlike, ranges, few)
    for first, second in zip(one, other, strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def test_the_budget_is_the_documents_together_whatever_the_diversity() -> None:
    for diversity in (0, 0.25, 3.0):
        kept = select([attention(1)], [attention(2)], [PARTS], SnapKV(diversity=diversity, minimum=1))
        assert sum(head.numel() for head in kept[0]) == HEADS * (SLOTS - 31 + 6 + 6)


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan, "much"])
def test_diversity_that_is_no_weight_is_refused(value: object) -> None:
    with pytest.raises(InvalidSetting, match="diversity must be a weight"):
        SnapKV(diversity=value)  # type: ignore[arg-type]
