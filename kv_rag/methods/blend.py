"""Keep the pairs the model needs to repeat the document, and those whose keys are unlike the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kv_rag.errors import InvalidSetting
from kv_rag.methods.base import LayerStates, ModelWatcher, Reading, Watcher
from kv_rag.methods.keydiff import KeyDiff
from kv_rag.methods.kvzip import KVzip
from kv_rag.observation import LayerStep
from kv_rag.scoring import rank, standardised


@dataclass(frozen=True)
class Blend:
    """The rank of KVzip's score (arXiv 2505.23416) among all pairs of the model, plus ``diversity`` times the rank of
    KeyDiff's (arXiv 2504.15364) among the pairs of the layer. Made for the allocation "model": KVzip tells how much each
    layer and head needs, KeyDiff fills what repetition leaves undecided, which matters most at small budgets.

    Args:
        diversity: weight of KeyDiff's rank; 0 gives KVzip's order.
        part, weight: as in ``KVzip``.

    """

    allocation: ClassVar[str] = "model"
    diversity: float = 0.25
    part: int = 2048
    weight: str = "none"

    def __post_init__(self) -> None:
        self._kvzip()
        if not isinstance(self.diversity, (int, float)) or self.diversity < 0:
            raise InvalidSetting(f"blend: diversity must be a weight, at least 0, got {self.diversity!r}")

    def _kvzip(self) -> KVzip:
        return KVzip(self.part, self.weight)

    def replays(self, reading: Reading) -> Iterator[Tensor]:
        return self._kvzip().replays(reading)

    def watch_replay(self, reading: Reading) -> ModelWatcher:
        return _Blended(self._kvzip().watch_replay(reading), self.diversity)


class _Blended:
    def __init__(self, repeated: Watcher, diversity: float) -> None:
        self._repeated, self._diversity = repeated, diversity

    def observe(self, step: LayerStep) -> None:
        self._repeated.observe(step)

    def score_layers(self, layers: list[LayerStates]) -> list[Tensor]:
        repeated = [self._repeated.score(states) for states in layers]
        everywhere = rank(torch.cat([scores.reshape(-1) for scores in repeated]))
        ranks = torch.split(everywhere, [scores.numel() for scores in repeated])
        blended = []
        for states, ranked in zip(layers, ranks, strict=True):
            unlike = standardised(KeyDiff().score(states))
            blended.append(ranked.view(unlike.shape) + self._diversity * rank(unlike.reshape(-1)).view(unlike.shape))
        return blended
