"""From scores and a budget to the pairs that stay. Pure tensor functions.

Dimension letters: H KV heads, T tokens, K kept tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A document's first tokens are kept by every method, and no head is left with fewer pairs than MINIMUM:
# below that a head has nothing to say about the document, and the bytes are negligible.
SINKS = 4
MINIMUM = 8


def pairs_to_keep(tokens: int, keep: float | None, budget: int | None, minimum: int = MINIMUM) -> int:
    """Pairs per head for a document of ``tokens`` tokens: ``keep`` of them, or ``budget``, at least ``minimum``."""
    wanted = round(keep * tokens) if keep is not None else budget
    assert wanted is not None
    return min(tokens, max(wanted, minimum))


ALLOCATIONS = ("uniform", "heads")


def select(scores: Tensor, count: int, allocation: str, sinks: int = SINKS, minimum: int = MINIMUM) -> list[Tensor]:
    """The pairs of one layer that stay.

    Args:
        scores: ``[H, T]``; higher stays. NaN counts as the lowest. Ties are won by the earlier token.
        count: pairs per head, 1 <= count <= T; H times as many stay in the layer.
        allocation: "uniform" keeps ``count`` in every head; "heads" ranks all heads of the layer together, so that
            heads keep different numbers (Feng et al. 2024, "Ada-KV", arXiv 2407.11550).
        sinks: how many first tokens every head keeps whatever their scores.
        minimum: pairs that every head keeps at least (fewer if the document has fewer).

    Returns:
        for each head the kept tokens, ``[kept]`` int64, ascending.
    """
    ranked = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).clone()
    ranked[:, : min(sinks, count)] = torch.inf
    # A stable sort: topk leaves the order of equal scores open, and float16 scores are often equal.
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    if allocation == "uniform":
        return list(order[:, :count].sort(dim=-1).values)
    heads, tokens = scores.shape
    certain = order[:, : min(minimum, count)]
    ranked.scatter_(1, certain, torch.inf)
    together = torch.sort(ranked.reshape(-1), descending=True, stable=True).indices[: count * heads]
    kept = torch.zeros(heads * tokens, dtype=torch.bool, device=scores.device)
    kept[together] = True
    return [row.nonzero()[:, 0] for row in kept.view(heads, tokens)]
