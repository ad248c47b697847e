"""Keep the pairs that the document's last token attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.methods.attention import LayerScores, document_attention
from kv_rag.methods.base import LayerStates, Reading
from kv_rag.observation import LayerStep


@dataclass(frozen=True)
class Tova:
    """Oren, Hassid, Yarden, Adi, Schwartz (2024), "Transformers are Multi-State RNNs", arXiv 2401.06104: the attention
    of the last token, averaged over all heads of the layer, so that every head keeps the same tokens.
    """

    def watch(self, reading: Reading) -> _LastToken:
        return _LastToken(reading)


class _LastToken:
    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._weights = LayerScores(reading)

    def observe(self, step: LayerStep) -> None:
        reading = self._reading
        if step.slots.end != reading.before + reading.tokens:
            return
        for _, weights in document_attention(step, reading.before, reading.tokens):
            last = weights[:, :, -1]  # [H, G, T]
        self._weights.of(step)[:] = last.mean(dim=(0, 1))

    def score(self, states: LayerStates) -> Tensor:
        scores = self._weights[states.layer].clone()
        scores[:, -1] = torch.inf  # the token that attends stays
        return scores
