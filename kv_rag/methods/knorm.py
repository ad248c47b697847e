"""Keep the keys of small L2 norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.methods.base import LayerStates


@dataclass(frozen=True)
class KNorm:
    """Devoto, Zhao, Scardapane, Minervini (2024), "A Simple and Effective L2 Norm-Based Strategy for KV Cache
    Compression", arXiv 2406.11430: a key of low norm tends to receive much attention. Rotation keeps norms, so
    un-rotated keys give the same ranking.
    """

    def score(self, states: LayerStates) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(states.keys.float(), dim=-1)
        return -norms
