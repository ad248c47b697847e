"""Keep pairs at random: the control every other method must beat."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.methods.base import LayerStates


@dataclass(frozen=True)
class Random:
    """Uniformly random scores, drawn apart for every head.

    Args:
        seed: another seed, another draw. The same document and seed give the same pairs on every machine.

    """

    seed: int = 0

    def score(self, states: LayerStates) -> Tensor:
        text = f"{self.seed}/{states.layer}/{states.reading.document_id}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(states.keys.shape[:2], generator=generator).to(states.keys.device)
