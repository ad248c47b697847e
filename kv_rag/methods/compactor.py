"""Keep keys that are hard to rebuild from the others, and pairs that their neighbours attend to from both sides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kv_rag.errors import InvalidSetting
from kv_rag.methods.base import LayerStates, Reading
from kv_rag.observation import LayerStep
from kv_rag.scoring import standardised


@dataclass(frozen=True)
class Compactor:
    """Chari, Van Durme (2025), "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage
    Scores", arXiv 2507.08143: statistical leverage of the un-rotated keys (how much of a key lies outside what the other
    keys span), plus attention without the causal mask inside chunks, each standardised over the document. The leverage
    is exact here (a Cholesky factor of head_dim x head_dim is cheap), where the paper sketches it.

    Args:
        chunk: tokens that attend to each other.
        leverage: weight of the leverage; 0 leaves the attention alone.
        attention: weight of the attention; 0 leaves the leverage alone, and nothing is watched.
        pool: neighbours the attention is averaged over, odd.

    """

    chunk: int = 256
    leverage: float = 0.3
    attention: float = 1.0
    pool: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 1:
            raise InvalidSetting(f"compactor: chunk must be a number of tokens, at least 1, got {self.chunk!r}")
        if self.leverage < 0 or self.attention < 0 or not self.leverage + self.attention:
            raise InvalidSetting("compactor: leverage and attention must be weights >= 0, not both 0")
        if not isinstance(self.pool, int) or self.pool < 1 or self.pool % 2 == 0:
            raise InvalidSetting(f"compactor: pool must be an odd number of neighbours, got {self.pool!r}")

    def watch(self, reading: Reading) -> ChunkAttention:
        return ChunkAttention(self, reading)


class ChunkAttention:
    """Collects a chunk's queries, attends when the chunk is complete, keeps the sums."""

    def __init__(self, settings: Compactor, reading: Reading) -> None:
        self._settings, self._reading = settings, reading
        self._queries: list[list[Tensor]] = [[] for _ in range(reading.layers)]
        self._sums: list[list[Tensor]] = [[] for _ in range(reading.layers)]

    def observe(self, step: LayerStep) -> None:
        if not self._settings.attention:
            return
        reading, chunk = self._reading, self._settings.chunk
        waiting = self._queries[step.layer]
        waiting.append(step.queries[:, step.slots.index >= reading.before])
        queries = torch.cat(waiting, dim=1)
        done = sum(part.shape[1] for part in self._sums[step.layer])
        read_to_end = step.slots.end == reading.before + reading.tokens
        while queries.shape[1] >= chunk or (read_to_end and queries.shape[1]):
            size = min(chunk, queries.shape[1])
            begin = reading.before + done
            keys = step.state.keys[:, begin : begin + size]
            self._sums[step.layer].append(_attention_without_mask(queries[:, :size], keys, step.scaling))
            done += size
            queries = queries[:, size:]
        self._queries[step.layer] = [queries] if queries.shape[1] else []

    def score(self, states: LayerStates) -> Tensor:
        settings = self._settings
        scores = torch.zeros(states.keys.shape[:2], device=states.keys.device)
        if settings.leverage:
            scores += settings.leverage * standardised(leverage(states.keys))
        if settings.attention:
            scores += settings.attention * standardised(self.local_attention(states))
        return scores

    def local_attention(self, states: LayerStates) -> Tensor:
        """Attention from both sides times the norm of the value: ``[H, T]`` float32."""
        sums, pool = torch.cat(self._sums[states.layer], dim=-1), self._settings.pool
        pooled = F.avg_pool1d(sums[None], pool, stride=1, padding=pool // 2, count_include_pad=False)[0]
        weighed: Tensor = pooled * torch.linalg.vector_norm(states.values.float(), dim=-1)
        return weighed


def _attention_without_mask(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Attention each key receives from all ``queries`` ``[Q, T, D]``, mean over queries and group: ``[H, T]``."""
    heads, tokens, dim = keys.shape
    folded = queries.reshape(heads, -1, dim) * scaling
    weights = torch.matmul(folded, keys.transpose(1, 2)).float().softmax(dim=-1)
    return weights.mean(dim=1) * tokens


def leverage(keys: Tensor) -> Tensor:
    """Statistical leverage of each row of ``[H, T, D]`` in its head, centred: ``[H, T]`` float32 in [0, 1]."""
    centred = keys.double() - keys.double().mean(dim=1, keepdim=True)
    gram = centred.transpose(1, 2) @ centred
    size = gram.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
    identity = torch.eye(keys.shape[-1], dtype=torch.float64, device=keys.device)
    factor = torch.linalg.cholesky(gram + (1e-6 * size + 1e-12) * identity)  # a ridge, where keys span less than D
    solved = torch.linalg.solve_triangular(factor, centred.transpose(1, 2), upper=False)
    score: Tensor = solved.square().sum(dim=1).float()
    return score
