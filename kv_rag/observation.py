"""What one layer of a forward pass shows to whoever asked to see it: recorders and compression methods.

Dimension letters: Q query heads, H KV heads, T new tokens, S slots, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kv_rag.state import LayerState, Slots


@dataclass(frozen=True)
class LayerStep:
    """One layer's part in one forward pass. References, not copies: read them now, change nothing.

    Attributes:
        layer: index of the layer, from 0.
        raw_queries: ``[Q, T, D]`` WITHOUT rotary position.
        queries: ``[Q, T, D]`` rotated.
        raw_keys: ``[H, T, D]`` WITHOUT rotary position, of the new tokens alone.
        values: ``[H, T, D]``.
        state: the layer's buffers, the new pairs already written.
        slots: where they were written.
        scaling: factor of the attention logits.
        module: the attention module, for methods of other packages.

    """

    layer: int
    raw_queries: Tensor
    queries: Tensor
    raw_keys: Tensor
    values: Tensor
    state: LayerState
    slots: Slots
    scaling: float
    module: Any


class Observer(Protocol):
    """Sees every layer of a forward pass, before the layer attends."""

    def observe(self, step: LayerStep) -> None:
        """Called once a layer and forward pass, in order."""
