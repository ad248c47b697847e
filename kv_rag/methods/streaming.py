"""Keep the beginning and the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.methods.base import LayerStates


@dataclass(frozen=True)
class Streaming:
    """Xiao, Tian, Chen, Han, Lewis (2023), "Efficient Streaming Language Models with Attention Sinks",
    arXiv 2309.17453: the first tokens (kept by every method here, see ``selection.SINKS``) and the most recent ones.
    Forgets the middle of a document by construction.
    """

    def score(self, states: LayerStates) -> Tensor:
        heads, tokens = states.keys.shape[:2]
        return torch.arange(tokens, dtype=torch.float32, device=states.keys.device).expand(heads, tokens)
