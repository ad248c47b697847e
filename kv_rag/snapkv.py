"""SnapKV per query: the question's own attention picks the pairs. Retrieval, not compression.

Li, Huang, Yang et al. (2024), "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469.
It runs on the full state after the question has attended to all of it, so the first token is that of the full state;
what it picks is good for this question alone and is never stored.

Dimension letters: Q query heads, H KV heads, W window tokens, S slots, K kept slots, D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kv_rag.errors import InvalidSetting
from kv_rag.scoring import attention_blocks, rank, standardised
from kv_rag.selection import ALLOCATIONS, MINIMUM, choose, finite, pairs_to_keep, pyramid
from kv_rag.state import LayerState, PromptState

_POOLINGS: dict[str, Any] = {"max": F.max_pool1d, "mean": F.avg_pool1d}


@dataclass(frozen=True)
class SnapKV:
    """How the pairs are picked.

    Args:
        pool: scores are pooled over so many neighbours, odd; answers are phrases, not single tokens.
            benchmarks/snapkv_window.py compares it with others.
        pooling: "max" or "mean".
        vote: "mean" averages attention over the window's tokens and the query heads of a KV head, as in the paper; "max"
            takes the most that any of them pays, so that one word of the question can save a pair.
        diversity: weight of how unlike the other keys of its head a key is, KeyDiff's score (Park, Jones, Morse et al.
            2025, arXiv 2504.15364), against attention: ranks are added. What the question does not look at is needed by
            the words of the answer, and of it the unlike pairs say most. 0 is the paper's order.
        allocation: how heads and layers share the pairs, see ``selection.Budget``.
        minimum: pairs of documents that each head keeps at least.

    Raises:
        InvalidSetting: unknown allocation or pooling, pool even, diversity negative.

    """

    pool: int = 13
    pooling: str = "max"
    vote: str = "max"
    diversity: float = 0.25
    allocation: str = "model"
    minimum: int = MINIMUM

    def __post_init__(self) -> None:
        if self.allocation not in ALLOCATIONS:
            raise InvalidSetting(f"allocation must be one of {', '.join(ALLOCATIONS)}, got {self.allocation!r}")
        if self.pooling not in _POOLINGS:
            raise InvalidSetting(f"pooling must be one of {', '.join(_POOLINGS)}, got {self.pooling!r}")
        if self.vote not in ("mean", "max"):
            raise InvalidSetting(f"vote must be 'mean' or 'max', got {self.vote!r}")
        if not isinstance(self.pool, int) or self.pool < 1 or self.pool % 2 == 0:
            raise InvalidSetting(f"pool must be an odd number of neighbours, got {self.pool!r}")
        if not isinstance(self.diversity, (int, float)) or not 0 <= self.diversity < math.inf:
            raise InvalidSetting(f"diversity must be a weight, at least 0, got {self.diversity!r}")


@dataclass(frozen=True)
class Range:
    """Slots ``begin`` to ``end`` of a document that may be pruned to ``keep`` of them."""

    begin: int
    end: int
    keep: float


def window_attention(queries: Tensor, layer: LayerState, vote: str = "mean") -> Tensor:
    """Attention of the window to every slot: the mean or the most over its tokens and the query heads of a KV head.

    Args:
        queries: ``[Q, W, D]`` rotated; they belong to the layer's last W slots in use.
        layer: with the window's own pairs written.
        vote: "mean" or "max".

    Returns:
        ``[H, S]`` float32, S the slots in use; with "mean" rows sum to 1.

    """
    window, slots = queries.shape[1], layer.length
    visible = torch.arange(slots - window + 1, slots + 1, device=queries.device)
    empty = None if layer.empty is None else layer.empty[:, :slots]
    total = torch.zeros(layer.keys.shape[0], slots, dtype=torch.float32, device=queries.device)
    for _, weights in attention_blocks(queries, layer.keys[:, :slots], visible, queries.shape[-1] ** -0.5, empty):
        if vote == "max":
            total = torch.maximum(total, weights.amax(dim=(1, 2)))
        else:
            total += weights.sum(dim=2).mean(dim=1) / window
    return total


def slot_scores(attention: Tensor, ranges: list[Range], settings: SnapKV) -> tuple[Tensor, int, int]:
    """What each slot is worth.

    Args:
        attention: ``[H, S]`` float32.
        ranges: slots that may be dropped, apart from each other. Documents share one budget, the sum of theirs: a
            question is mostly about one of them.
        settings: see ``SnapKV``.

    Returns:
        ``[H, S]`` float32, +inf outside ``ranges``; how many slots lie in ranges; and how many of those may stay.

    """
    scores = torch.full_like(attention, torch.inf)
    droppable = kept = 0
    for part in ranges:
        inside = attention[:, part.begin : part.end]
        pooled = _POOLINGS[settings.pooling](inside[None], settings.pool, stride=1, padding=settings.pool // 2)[0]
        scores[:, part.begin : part.end] = finite(pooled)
        tokens = part.end - part.begin
        droppable += tokens
        kept += pairs_to_keep(tokens, part.keep, None, settings.minimum)
    return scores, droppable, kept


def unlikeness(layer: LayerState, ranges: list[Range]) -> Tensor:
    """How unlike the other keys of its document and head each key is, as ``keydiff`` scores, in standard deviations.

    Returns:
        ``[H, S]`` float32, 0 outside ``ranges``.

    """
    scores = torch.zeros(layer.keys.shape[0], layer.length, device=layer.keys.device)
    for part in ranges:
        directions = F.normalize(layer.keys[:, part.begin : part.end].float(), dim=-1)
        similarity = F.cosine_similarity(directions, directions.mean(dim=1, keepdim=True), dim=-1)
        scores[:, part.begin : part.end] = -standardised(similarity)
    return scores


def diversified(scores: list[Tensor], unlike: list[Tensor], weight: float) -> list[Tensor]:
    """The rank of a pair's score among those of all layers, plus ``weight`` times its rank within the layer in ``unlike``.

    Args:
        scores: for each layer ``[H, S]`` float32; +inf stays +inf and is not ranked.
        unlike: for each layer ``[H, S]`` float32.
        weight: at least 0.

    """
    droppable = [layer.isfinite() for layer in scores]
    values = [layer[where] for layer, where in zip(scores, droppable, strict=True)]
    ranks = torch.split(rank(torch.cat(values)), [part.numel() for part in values])
    mixed = []
    for layer, where, ranked, other in zip(scores, droppable, ranks, unlike, strict=True):
        both = layer.clone()
        both[where] = ranked + weight * rank(other[where])
        mixed.append(both)
    return mixed


def select(
    attention: list[Tensor], unlike: list[Tensor], ranges: list[list[Range]], settings: SnapKV
) -> list[list[Tensor]]:
    """Slots that stay: everything outside ``ranges``, and of those together the best.

    Args:
        attention: for each layer ``[H, S]`` float32, see ``window_attention``.
        unlike: for each layer ``[H, S]`` float32, see ``unlikeness``.
        ranges: for each layer, which slots may be dropped.
        settings: see ``SnapKV``.

    Returns:
        for each layer and head ``[K]`` int64, ascending; ties won by the earlier slot.

    """
    scores, certain, kept = [], [], []
    for layer, parts in zip(attention, ranges, strict=True):
        layer_scores, droppable, count = slot_scores(layer, parts, settings)
        scores.append(layer_scores)
        certain.append(layer.shape[1] - droppable)
        kept.append(count)
    if settings.diversity:
        scores = diversified(scores, unlike, settings.diversity)
    if settings.allocation == "pyramid":
        kept = pyramid(kept[0], len(kept), attention[0].shape[1] - certain[0], settings.minimum)
    counts = [sure + count for sure, count in zip(certain, kept, strict=True)]
    return choose(scores, counts, settings.allocation, certain, settings.minimum)


def attended(
    state: PromptState, window: list[Tensor], ranges: list[list[Range]], settings: SnapKV
) -> list[list[Tensor]]:
    """The slots of ``state`` that the window's attention picks. Arguments as in ``prune``, answer as of ``select``."""
    attention = [
        window_attention(queries, layer, settings.vote) for queries, layer in zip(window, state.layers, strict=True)
    ]
    unlike = [unlikeness(layer, parts) for layer, parts in zip(state.layers, ranges, strict=True)]
    return select(attention, unlike, ranges, settings)


def prune(
    state: PromptState, window: list[Tensor], ranges: list[list[Range]], reserve: int, settings: SnapKV
) -> PromptState:
    """A new state with the pairs the window attends to.

    Args:
        state: the prompt's state after its last token, nothing generated yet.
        window: one ``[Q, W, D]`` for each layer.
        ranges: for each layer, which slots may be dropped.
        reserve: slots to leave for generated tokens.
        settings: see ``SnapKV``.

    """
    kept = attended(state, window, ranges, settings)
    layers = [layer.keep_only(slots, reserve) for layer, slots in zip(state.layers, kept, strict=True)]
    return PromptState(layers, state.tokens)
