"""The private KV buffers of one prompt: documents are copied in once, then the question and the answer follow.

A slot is a place in a layer's buffer. Order of slots is order of the prompt, so causality is "slot <= own slot"
whatever was pruned; positions matter only to the rotation, which has been done when a key is written.

Dimension letters: L layers, H KV heads, S slots, T tokens, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LayerState:
    """One layer's buffers.

    Attributes:
        keys: ``[H, S, D]``, rotated, in the model's dtype. S is the capacity.
        values: ``[H, S, D]``.
        length: slots in use.
        empty: ``[H, S]`` bool, True where a head has no pair in a slot (heads that keep fewer pairs than the longest
            head of their document), or None when no slot is empty.

    """

    keys: Tensor
    values: Tensor
    length: int
    empty: Tensor | None = None

    @classmethod
    def allocate(cls, heads: int, capacity: int, head_dim: int, like: Tensor) -> LayerState:
        keys = torch.empty(heads, capacity, head_dim, dtype=like.dtype, device=like.device)
        return cls(keys, torch.empty_like(keys), 0)

    def write(self, keys: Tensor, values: Tensor, slots: Slots) -> None:
        """Puts ``[H, T, D]`` keys (rotated) and values into ``slots``."""
        if slots.start is not None:
            place = slice(slots.start, slots.start + keys.shape[1])
            self.keys[:, place] = keys
            self.values[:, place] = values
        else:
            self.keys.index_copy_(1, slots.index, keys)
            self.values.index_copy_(1, slots.index, values)
        self.length = max(self.length, slots.end)

    def keep_only(self, slots: list[Tensor], reserve: int) -> LayerState:
        """A new layer with only ``slots`` (one ``[K]`` a head, ascending) and room for ``reserve`` more.

        Heads with fewer slots than the longest have empty ones before theirs.
        """
        heads, longest = len(slots), max(part.numel() for part in slots)
        pruned = LayerState.allocate(heads, longest + reserve, self.keys.shape[-1], self.keys)
        pruned.length = longest
        if self.empty is not None or any(part.numel() < longest for part in slots):
            pruned.empty = torch.zeros(heads, longest + reserve, dtype=torch.bool, device=self.keys.device)
        for head, kept in enumerate(slots):
            first = longest - kept.numel()
            pruned.keys[head, first:longest] = self.keys[head].index_select(0, kept)
            pruned.values[head, first:longest] = self.values[head].index_select(0, kept)
            if pruned.empty is not None:
                # Empty slots are masked, but a NaN in memory that was never written would still spoil the sum.
                pruned.keys[head, :first] = 0
                pruned.values[head, :first] = 0
                pruned.empty[head, :first] = True
                if self.empty is not None:
                    pruned.empty[head, first:longest] = self.empty[head].index_select(0, kept)
        return pruned


@dataclass(frozen=True)
class Slots:
    """Where the tokens of one forward pass go in a layer: ``index`` ``[T]`` int64, ascending."""

    index: Tensor
    start: int | None  # first slot when the slots are consecutive, else None
    end: int  # one past the last slot

    @classmethod
    def of(cls, index: Tensor) -> Slots:
        first, last = int(index[0]), int(index[-1])
        return cls(index, first if last - first + 1 == index.numel() else None, last + 1)

    @classmethod
    def after(cls, length: int, tokens: int, device: torch.device) -> Slots:
        """The next ``tokens`` slots after ``length`` used ones."""
        return cls(torch.arange(length, length + tokens, device=device), length, length + tokens)


@dataclass
class PromptState:
    """All layers of one prompt. Belongs to one question; nothing of it is stored."""

    layers: list[LayerState]
    tokens: int  # tokens seen so far, dropped pairs counted: the next token's position

    @property
    def pairs(self) -> int:
        """Pairs attended to, over all layers and heads."""
        total = 0
        for layer in self.layers:
            total += layer.length * layer.keys.shape[0]
            if layer.empty is not None:
                total -= int(layer.empty[:, : layer.length].sum())
        return total

    @property
    def nbytes(self) -> int:
        return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in self.layers)
