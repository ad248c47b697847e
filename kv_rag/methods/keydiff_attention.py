"""Keep keys unlike the others, and pairs that their neighbours attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kv_rag.errors import InvalidSetting
from kv_rag.methods.base import LayerStates, Reading, Watcher
from kv_rag.methods.compactor import ChunkAttention, Compactor
from kv_rag.methods.keydiff import KeyDiff
from kv_rag.observation import LayerStep
from kv_rag.scoring import standardised


@dataclass(frozen=True)
class KeyDiffAttention:
    """KeyDiff's score (arXiv 2504.15364) plus Compactor's attention inside chunks (arXiv 2507.08143), each standardised
    over the head. KeyDiff in the place of leverage: both reward keys that the others do not stand for.

    Args:
        attention: weight of the attention.
        chunk, pool: as in ``Compactor``.

    """

    allocation: ClassVar[str] = "heads"
    attention: float = 1.0
    chunk: int = 256
    pool: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.attention, (int, float)) or self.attention <= 0:
            raise InvalidSetting(f"keydiff_attention: attention must be a weight above 0, got {self.attention!r}")
        self._compactor()

    def _compactor(self) -> Compactor:
        return Compactor(chunk=self.chunk, leverage=0.0, pool=self.pool)

    def watch(self, reading: Reading) -> Watcher:
        return _Both(ChunkAttention(self._compactor(), reading), self.attention)


class _Both:
    def __init__(self, local: ChunkAttention, weight: float) -> None:
        self._local, self._weight = local, weight

    def observe(self, step: LayerStep) -> None:
        self._local.observe(step)

    def score(self, states: LayerStates) -> Tensor:
        unlike = standardised(KeyDiff().score(states))
        return unlike + self._weight * standardised(self._local.local_attention(states))
