"""Keep the pairs that future queries are expected to attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.errors import InvalidSetting
from kv_rag.methods.base import LayerStates, Reading
from kv_rag.observation import LayerStep
from kv_rag.rotary import angles, rotate


@dataclass(frozen=True)
class ExpectedAttention:
    """Devoto, Jeblick, Jégou (2025), "Expected Attention: KV Cache Compression by Estimating Attention from Future
    Queries Distribution", arXiv 2510.00636: un-rotated queries are taken as Gaussian with the document's own mean and
    covariance and rotated to the average of the coming positions; the expectation of exp(q k) has a closed form. The
    softmax over the keys is multiplied by the norm of the value.

    Args:
        future: positions after the document that queries may come from.
        covariance: use the covariance, not the mean alone.
        value_norm: multiply by the norm of the value.
        skip: first document tokens whose queries are left out of the statistics.
        epsilon: added to the attention before it is multiplied by the norm.

    """

    future: int = 512
    covariance: bool = True
    value_norm: bool = True
    skip: int = 4
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.future, int) or self.future < 1:
            raise InvalidSetting(f"expected: future must be a number of positions, at least 1, got {self.future!r}")

    def watch(self, reading: Reading) -> _QueryStatistics:
        return _QueryStatistics(self, reading)


class _QueryStatistics:
    """Sums of queries and of their products, float64: chunks add up to what one pass would give."""

    def __init__(self, settings: ExpectedAttention, reading: Reading) -> None:
        self._settings, self._reading = settings, reading
        self._first: list[Tensor | None] = [None] * reading.layers  # [Q, D]
        self._second: list[Tensor | None] = [None] * reading.layers  # [Q, D, D]
        self._count = [0] * reading.layers
        self._scaling = [0.0] * reading.layers

    def observe(self, step: LayerStep) -> None:
        skip = self._settings.skip if self._reading.tokens > self._settings.skip else 0
        document = step.slots.index >= self._reading.before + skip
        queries = step.raw_queries[:, document].float()
        self._scaling[step.layer] = step.scaling
        if not queries.shape[1]:
            return
        first, second = queries.double().sum(dim=1), torch.matmul(queries.transpose(1, 2), queries).double()
        old_first, old_second = self._first[step.layer], self._second[step.layer]
        self._first[step.layer] = first if old_first is None else old_first + first
        self._second[step.layer] = second if old_second is None else old_second + second
        self._count[step.layer] += queries.shape[1]

    def score(self, states: LayerStates) -> Tensor:
        first, second, count = self._first[states.layer], self._second[states.layer], self._count[states.layer]
        assert first is not None
        assert second is not None
        mean = first / count
        covariance = (second / count - mean[:, :, None] * mean[:, None, :]).float()
        turn = self._average_rotation(states)  # [D, D]
        mean = mean.float() @ turn.T
        covariance = turn @ covariance @ turn.T
        return self._expectation(states, mean, covariance)

    def _average_rotation(self, states: LayerStates) -> Tensor:
        reading, device = self._reading, states.keys.device
        begin = reading.before + reading.tokens
        positions = torch.arange(begin, begin + self._settings.future, device=device)
        at = angles(positions, reading.inverse_frequencies.to(device))
        identity = torch.eye(reading.head_dim, device=device)
        rotated = rotate(identity[:, None, :].expand(-1, positions.numel(), -1), at)  # rows: unit vectors at positions
        return rotated.mean(dim=1).T

    def _expectation(self, states: LayerStates, mean: Tensor, covariance: Tensor) -> Tensor:
        heads, _, dim = states.keys.shape
        keys, scaling = states.rotated_keys().float(), self._scaling[states.layer]
        mean = mean.view(heads, -1, dim)
        logits = torch.einsum("hgd,htd->hgt", mean, keys) * scaling
        if self._settings.covariance:
            spread = covariance.view(heads, -1, dim, dim)
            for group in range(spread.shape[1]):
                logits[:, group] += (torch.matmul(keys, spread[:, group]) * keys).sum(dim=-1) * scaling**2 / 2
        scores = logits.softmax(dim=-1).mean(dim=1)
        if self._settings.value_norm:
            scores = (scores + self._settings.epsilon) * torch.linalg.vector_norm(states.values.float(), dim=-1)
        return scores
