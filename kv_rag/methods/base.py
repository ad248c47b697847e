"""What a compression method is given and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class LayerStates:
    """One layer of one document after its prefill.

    Attributes:
        layer: index of the layer, from 0.
        keys: ``[kv_heads, tokens, head_dim]`` without rotary position, in the model's dtype.
        values: ``[kv_heads, tokens, head_dim]``.
        seed_text: the document's id; a method that draws numbers seeds itself with it, so that the same document gives
            the same state on every machine.

    """

    layer: int
    keys: Tensor
    values: Tensor
    seed_text: str


class Method(Protocol):
    """A query-agnostic ranking of pairs. Implemented by frozen dataclasses whose fields are the settings."""

    def score(self, states: LayerStates) -> Tensor:
        """``[kv_heads, tokens]`` float32 on the device of the keys; the pair with the higher score stays."""
