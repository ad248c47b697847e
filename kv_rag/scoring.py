"""Attention weights as scores, without ever holding all of them. Pure tensor functions.

Dimension letters: Q query heads, H KV heads, G query heads of a KV head (Q / H), T queries, B queries of a block,
S slots, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Attention weights held at a time. On a CPU 4 MiB of float32 stay in its caches from the product to the softmax, and are
# done in half the time of 64 MiB; elsewhere few large blocks are better than many small ones.
_BLOCK_ELEMENTS, _CPU_BLOCK_ELEMENTS = 1 << 24, 1 << 20


def attention_blocks(
    queries: Tensor, keys: Tensor, visible: Tensor, scaling: float, empty: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Softmax attention of a few queries at a time.

    Args:
        queries: ``[Q, T, D]`` rotated.
        keys: ``[H, S, D]`` rotated.
        visible: ``[T]`` int64, each query sees the slots before this one.
        scaling: factor of the logits.
        empty: ``[H, S]`` bool, slots in which a head has no pair.

    Yields:
        which queries, and their weights ``[H, G, B, S]`` float32; rows sum to 1.

    """
    heads, slots, dim = keys.shape
    group, total = queries.shape[0] // heads, queries.shape[1]
    elements = _CPU_BLOCK_ELEMENTS if queries.device.type == "cpu" else _BLOCK_ELEMENTS
    size = max(1, elements // (queries.shape[0] * slots))
    every_slot = torch.arange(slots, device=keys.device)
    for begin in range(0, total, size):
        block = slice(begin, min(begin + size, total))
        count = block.stop - block.start
        folded = queries[:, block].reshape(heads, group * count, dim) * scaling
        logits = torch.matmul(folded, keys.transpose(1, 2)).float().view(heads, group, count, slots)
        if int(visible[block].min()) < slots:
            logits.masked_fill_(every_slot >= visible[block][:, None], -torch.inf)
        if empty is not None:
            logits.masked_fill_(empty[:, None, None, :], -torch.inf)
        yield block, logits.softmax(dim=-1)


def standardised(scores: Tensor) -> Tensor:
    """``[..., T]`` float32 with mean 0 and standard deviation 1 in each row, so that two kinds of score can be added."""
    wide = scores.float()
    return (wide - wide.mean(dim=-1, keepdim=True)) / wide.std(dim=-1, keepdim=True).clamp_min(1e-12)


def rank(scores: Tensor) -> Tensor:
    """``[N]``: 0 for the lowest score to 1 for the highest; equal scores in order of their place."""
    order = torch.sort(scores, stable=True).indices
    ranks = torch.empty_like(scores)
    ranks[order] = torch.linspace(0, 1, scores.numel(), device=scores.device)
    return ranks


def output_norms(values: Tensor, output_weight: Tensor, order: int) -> Tensor:
    """How much each value can move the layer's output: the norm of the value after the output projection.

    Args:
        values: ``[H, T, D]``.
        output_weight: ``[hidden, Q * D]``, the layer's output projection.
        order: 1 or 2, which norm.

    Returns:
        ``[H, T]`` float32, the mean over the query heads of each KV head.

    """
    heads, _, dim = values.shape
    weight = output_weight.float().view(output_weight.shape[0], heads, -1, dim)  # [hidden, H, G, D]
    norms = []
    for head in range(heads):
        projected = torch.einsum("hgd,td->gth", weight[:, head], values[head].float())
        norms.append(torch.linalg.vector_norm(projected, ord=order, dim=-1).mean(dim=0))
    return torch.stack(norms)
