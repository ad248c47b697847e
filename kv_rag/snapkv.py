"""SnapKV per query: the question's own attention picks the pairs. Retrieval, not compression.

Li, Huang, Yang et al. (2024), "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469.
It runs on the full state after the question has attended to all of it, so the first token is that of the full state;
what it picks is good for this question alone and is never stored.

Dimension letters: Q query heads, H KV heads, W window tokens, S slots, K kept slots, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kv_rag.selection import MINIMUM, pairs_to_keep
from kv_rag.state import LayerState, PromptState

POOL = 5  # positions, as in the paper; benchmarks/snapkv_window.py compares it with others
POOLING = "max"
_POOLINGS: dict[str, Any] = {"max": F.max_pool1d, "mean": F.avg_pool1d}
_BLOCK = 64  # window tokens scored at a time: bounds memory to Q x 64 x S floats


@dataclass(frozen=True)
class Range:
    """Slots ``begin`` to ``end`` of a document that may be pruned to ``keep`` of them."""

    begin: int
    end: int
    keep: float


def window_attention(queries: Tensor, layer: LayerState) -> Tensor:
    """Mean attention of the window to every slot, averaged over window tokens and the query heads of each KV head.

    Args:
        queries: ``[Q, W, D]`` rotated; they belong to the layer's last W slots in use.
        layer: with the window's own pairs written.

    Returns:
        ``[H, S]`` float32, S the slots in use; rows sum to 1.

    """
    heads, group = layer.keys.shape[0], queries.shape[0] // layer.keys.shape[0]
    window, dim = queries.shape[1:]
    slots = layer.length
    keys = layer.keys[:, :slots]
    every_slot = torch.arange(slots, device=keys.device)
    total = torch.zeros(heads, slots, dtype=torch.float32, device=keys.device)
    for begin in range(0, window, _BLOCK):
        block = queries[:, begin : begin + _BLOCK]
        size = block.shape[1]
        own = torch.arange(slots - window + begin, slots - window + begin + size, device=keys.device)
        folded = block.reshape(heads, group * size, dim) * dim**-0.5
        logits = torch.matmul(folded, keys.transpose(1, 2)).float()
        logits.view(heads, group, size, slots).masked_fill_(every_slot > own[:, None], -torch.inf)
        if layer.empty is not None:
            logits.masked_fill_(layer.empty[:, None, :slots], -torch.inf)
        total += logits.softmax(dim=-1).sum(dim=1)
    return total / (group * window)


def select(attention: Tensor, ranges: list[Range], pool: int = POOL, pooling: str = POOLING) -> Tensor:
    """Slots that stay: everything outside ``ranges``, and of those together the best ``keep``.

    Documents share one budget, the sum of theirs: a question is mostly about one of them.

    Args:
        attention: ``[H, S]`` float32.
        ranges: slots that may be dropped, apart from each other.
        pool: scores are pooled over so many neighbours, odd; answers are phrases, not single tokens.
        pooling: "max" or "mean".

    Returns:
        ``[H, K]`` int64, ascending in each head; ties won by the earlier slot.

    """
    slots = attention.shape[-1]
    scores = torch.full_like(attention, torch.inf)
    droppable = kept = 0
    for part in ranges:
        inside = attention[:, part.begin : part.end]
        pooled = _POOLINGS[pooling](inside[None], pool, stride=1, padding=pool // 2)[0]
        scores[:, part.begin : part.end] = pooled
        tokens = part.end - part.begin
        droppable += tokens
        kept += pairs_to_keep(tokens, part.keep, None, MINIMUM)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[:, : slots - droppable + kept].sort(dim=-1).values


def prune(
    state: PromptState, window: list[Tensor], ranges: list[list[Range]], reserve: int, pool: int = POOL
) -> PromptState:
    """A new state with the pairs the window attends to.

    Args:
        state: the prompt's state after its last token, nothing generated yet.
        window: one ``[Q, W, D]`` for each layer.
        ranges: for each layer, which slots may be dropped.
        reserve: slots to leave for generated tokens.

    """
    layers = []
    for layer, queries, droppable in zip(state.layers, window, ranges, strict=True):
        slots = select(window_attention(queries, layer), droppable, pool)
        layers.append(layer.keep_only(slots, reserve))
    return PromptState(layers, state.tokens)
