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


def select_uniform(scores: Tensor, count: int, sinks: int = SINKS) -> Tensor:
    """The ``count`` best tokens of every head, sinks included, ties won by the earlier token.

    Args:
        scores: ``[H, T]``; higher stays. NaN counts as the lowest.
        count: K, 1 <= K <= T.
        sinks: how many first tokens are kept whatever their score.

    Returns:
        ``[H, K]`` int64, ascending in each head.

    """
    ranked = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).clone()
    ranked[:, : min(sinks, count)] = torch.inf
    # A stable sort: topk leaves the order of equal scores open, and float16 scores are often equal.
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=-1).values
