"""From scores and a budget to the pairs that stay. Pure tensor functions.

Dimension letters: L layers, H KV heads, T tokens or slots, K kept ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.document import Compression, Scalar
from kv_rag.errors import InvalidSetting

# Every method keeps a document's first tokens, and no head is left with fewer pairs than MINIMUM:
# below that a head has nothing to say about the document, and the bytes are negligible.
SINKS = 4
RECENT = 0
MINIMUM = 8

ALLOCATIONS = ("uniform", "heads", "model", "pyramid")
SETTINGS = ("allocation", "sinks", "recent", "minimum")  # beside a method's own settings

_PYRAMID = 20  # how many times fewer pairs than the mean the last layer keeps, as in the paper


@dataclass(frozen=True)
class Budget:
    """How many pairs stay, and which stay whatever their scores.

    Attributes:
        keep: fraction of the pairs; or
        budget: pairs per head.
        allocation: "uniform": the same number in every head of every layer. "heads": one ranking over the heads of a
            layer, so that they keep different numbers (Feng, Lv, Cao et al. 2024, "Ada-KV", arXiv 2407.11550). "model":
            one ranking over all heads of all layers (as KVzip does, arXiv 2505.23416). "pyramid": the same number in the
            heads of a layer, fewer the later the layer (Cai, Zhang, Gao et al. 2024, "PyramidKV", arXiv 2406.02069).
        sinks: how many first tokens every head keeps.
        recent: how many last tokens every head keeps.
        minimum: pairs that every head keeps at least (all, if there are fewer).

    """

    keep: float | None
    budget: int | None = None
    allocation: str = "uniform"
    sinks: int = SINKS
    recent: int = RECENT
    minimum: int = MINIMUM

    def __post_init__(self) -> None:
        if self.allocation not in ALLOCATIONS:
            raise InvalidSetting(f"allocation must be one of {', '.join(ALLOCATIONS)}, got {self.allocation!r}")
        for name in ("sinks", "recent", "minimum"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidSetting(f"{name} must be a number of pairs, at least 0, got {value!r}")
        if self.minimum < 1:
            raise InvalidSetting("minimum must be at least 1: a head without any pair of a document cannot attend to it")

    @classmethod
    def of(cls, compression: Compression) -> Budget:
        """The budget that ``compression`` names."""
        given = {name: value for name, value in compression.settings if name in SETTINGS}
        return cls(compression.keep, compression.budget, **given)  # type: ignore[arg-type]

    def pairs(self, tokens: int) -> int:
        """Pairs per head, on average, for a document of ``tokens`` tokens."""
        return pairs_to_keep(tokens, self.keep, self.budget, self.minimum)


def method_settings(settings: Mapping[str, Scalar] | None) -> dict[str, Scalar]:
    """Those of ``settings`` that are a method's own."""
    return {name: value for name, value in (settings or {}).items() if name not in SETTINGS}


def pairs_to_keep(tokens: int, keep: float | None, budget: int | None, minimum: int = MINIMUM) -> int:
    """Pairs per head for a document of ``tokens`` tokens: ``keep`` of them, or ``budget``, at least ``minimum``."""
    wanted = round(keep * tokens) if keep is not None else budget
    assert wanted is not None
    return min(tokens, max(wanted, minimum))


def select(scores: Sequence[Tensor], budget: Budget) -> list[list[Tensor]]:
    """The pairs of a document that stay.

    Args:
        scores: for each layer ``[H, T]``; higher stays. NaN counts as the lowest.
        budget: how many, and which in any case: first the sinks, then the last tokens, as far as the count allows.

    Returns:
        for each layer and head the kept tokens, ``[K]`` int64, ascending.

    """
    tokens = scores[0].shape[1]
    count = budget.pairs(tokens)
    counts = [count] * len(scores)
    if budget.allocation == "pyramid":
        counts = pyramid(count, len(scores), tokens, budget.minimum)
    ranked = []
    for layer, own in zip(scores, counts, strict=True):
        certain = finite(layer)
        sinks = min(budget.sinks, own)
        certain[:, :sinks] = torch.inf
        recent = min(budget.recent, own - sinks)
        certain[:, tokens - recent :] = torch.inf
        ranked.append(certain)
    return choose(ranked, counts, budget.allocation, [0] * len(ranked), budget.minimum)


def finite(scores: Tensor) -> Tensor:
    """A float32 copy of ``scores`` in which nothing outranks what is kept in any case, and NaN is the lowest."""
    lowest, highest = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    return scores.float().nan_to_num(nan=lowest, posinf=highest, neginf=lowest)


def choose(
    scores: Sequence[Tensor], counts: Sequence[int], allocation: str, certain: Sequence[int], minimum: int
) -> list[list[Tensor]]:
    """The highest scores.

    Args:
        scores: for each layer ``[H, T]`` float32; +inf stays in any case. Ties are won by the earlier place.
        counts: for each layer the pairs per head, on average over its heads (over all heads with "model"); at least as
            many as +inf scores.
        allocation: see ``Budget``.
        certain: for each layer, pairs of each head that ``minimum`` does not count (what is no document's).
        minimum: pairs that each head keeps beside those, at least.

    Returns:
        as ``select``.

    """
    if allocation in ("uniform", "pyramid"):
        # A stable sort: topk leaves the order of equal scores open, and float16 scores are often equal.
        orders = [torch.sort(layer, dim=-1, descending=True, stable=True).indices for layer in scores]
        return [list(order[:, :count].sort(dim=-1).values) for order, count in zip(orders, counts, strict=True)]
    assured = [
        _assure(layer, min(sure + minimum, count)) for layer, sure, count in zip(scores, certain, counts, strict=True)
    ]
    if allocation == "heads":
        return [_highest([layer], count * layer.shape[0])[0] for layer, count in zip(assured, counts, strict=True)]
    return _highest(assured, sum(count * layer.shape[0] for layer, count in zip(assured, counts, strict=True)))


def _assure(scores: Tensor, count: int) -> Tensor:
    """``scores`` with +inf for the ``count`` best of each head."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return scores.scatter(1, order[:, :count], torch.inf)


def _highest(layers: Sequence[Tensor], total: int) -> list[list[Tensor]]:
    """The ``total`` highest scores of ``layers`` ``[H, T]`` together."""
    flat = torch.cat([layer.reshape(-1) for layer in layers])
    kept = torch.zeros(flat.numel(), dtype=torch.bool, device=flat.device)
    kept[torch.sort(flat, descending=True, stable=True).indices[:total]] = True
    parts = torch.split(kept, [layer.numel() for layer in layers])
    return [
        [row.nonzero()[:, 0] for row in part.view(layer.shape)] for part, layer in zip(parts, layers, strict=True)
    ]


def pyramid(count: int, layers: int, tokens: int, minimum: int) -> list[int]:
    """Pairs per head for each layer: ``count`` on average, falling evenly from the first layer to the last."""
    last = max(count // _PYRAMID, min(minimum, count))
    first = 2 * count - last
    if first > tokens:
        first, last = tokens, 2 * count - tokens
    if layers == 1:
        return [count]
    total, counts = count * layers, []
    for layer in range(layers):
        counts.append(round(first + (last - first) * layer / (layers - 1)))
    counts[layers // 2] += total - sum(counts)  # what rounding took or gave
    return counts
