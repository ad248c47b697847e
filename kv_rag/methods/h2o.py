"""Keep the pairs that received most attention while the document was read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.methods.attention import LayerScores, document_attention
from kv_rag.methods.base import LayerStates, Reading
from kv_rag.observation import LayerStep


@dataclass(frozen=True)
class H2O:
    """Zhang, Sheng, Zhou et al. (2023), "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
    Models", arXiv 2306.14048: attention accumulated over the prefill. The sum is kept, never the weights themselves.

    Args:
        normalise: divide by the number of queries that could see the key. Plain sums favour early tokens, which more
            queries see.

    """

    normalise: bool = True

    def watch(self, reading: Reading) -> _Accumulated:
        return _Accumulated(reading, self.normalise)


class _Accumulated:
    def __init__(self, reading: Reading, normalise: bool) -> None:
        self._reading, self._normalise = reading, normalise
        self._sums = LayerScores(reading)

    def observe(self, step: LayerStep) -> None:
        reading, sums = self._reading, self._sums.of(step)
        for _, weights in document_attention(step, reading.before, reading.tokens):
            sums[:, : weights.shape[-1]] += weights.sum(dim=2).mean(dim=1)

    def score(self, states: LayerStates) -> Tensor:
        sums = self._sums[states.layer]
        if not self._normalise:
            return sums
        tokens = states.reading.tokens
        return sums / torch.arange(tokens, 0, -1, device=sums.device)
