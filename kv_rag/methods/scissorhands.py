"""Keep the pairs that were least often attended to below average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.errors import InvalidSetting
from kv_rag.methods.attention import LayerScores, document_attention
from kv_rag.methods.base import LayerStates, Reading
from kv_rag.observation import LayerStep


@dataclass(frozen=True)
class Scissorhands:
    """Liu, Desai, Liao et al. (2023), "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache
    Compression at Test Time", arXiv 2305.17118: over a window of the document's last queries, count how often a key got
    less than uniform attention (1 / keys in sight); the keys with the smallest share of such queries stay.

    Args:
        window: how many last queries vote.

    """

    window: int = 400

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or self.window < 1:
            raise InvalidSetting(f"scissorhands: window must be a number of queries, at least 1, got {self.window!r}")

    def watch(self, reading: Reading) -> _Counted:
        return _Counted(reading, self.window)


class _Counted:
    def __init__(self, reading: Reading, window: int) -> None:
        self._reading = reading
        self._first = reading.before + max(0, reading.tokens - window)  # slot of the first voting query
        self._counts = LayerScores(reading)

    def observe(self, step: LayerStep) -> None:
        reading = self._reading
        if step.slots.end <= self._first:
            return
        counts = self._counts.of(step)
        for visible, weights in document_attention(step, reading.before, reading.tokens):
            votes = (visible > self._first)[:, None] & _in_sight(visible - reading.before, weights.shape[-1])
            below = (weights < 1 / visible[:, None]) & votes
            counts[:, : weights.shape[-1]] += below.float().mean(dim=1).sum(dim=1)

    def score(self, states: LayerStates) -> Tensor:
        counts = self._counts[states.layer]
        tokens = states.reading.tokens
        voters = tokens - torch.arange(tokens, device=counts.device)
        return -counts / voters.clamp_max(tokens - (self._first - states.reading.before))


def _in_sight(visible: Tensor, tokens: int) -> Tensor:
    return torch.arange(tokens, device=visible.device) < visible[:, None]
