"""What a compression method is given and what it answers.

Three kinds, by what they look at. All end in a score for every pair; none sees a question.

- ``Method``: keys and values of a finished state. Costs next to nothing.
- ``PrefillMethod``: watches the document being read (its queries, its attention).
- ``ReplayMethod``: has the model read more text after the document, and watches that.

Dimension letters: Q query heads, H KV heads, T document tokens, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kv_rag.observation import LayerStep
from kv_rag.rotary import angles, rotate


@dataclass(frozen=True)
class Reading:
    """A document and the model that reads it, as far as a method may know them.

    Attributes:
        document_id: the document's digest; a method that draws numbers seeds itself with it.
        token_ids: ``[T]`` int64, the document's own tokens.
        before: tokens of P, the prefix every document is read after: token t stands at position before + t.
        layers, query_heads, kv_heads, head_dim: of the model.
        context: the most tokens the model can read.
        inverse_frequencies: ``[R/2]`` float32 of the rotary positions.
        encode: text to token ids ``[n]``.
        output_weight: layer to its output projection ``[hidden, Q * D]``.

    """

    document_id: str
    token_ids: Tensor
    before: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    context: int
    inverse_frequencies: Tensor
    encode: Callable[[str], Tensor]
    output_weight: Callable[[int], Tensor]

    @property
    def tokens(self) -> int:
        return int(self.token_ids.numel())


@dataclass(frozen=True)
class LayerStates:
    """One layer of one document after its prefill.

    Attributes:
        layer: index of the layer, from 0.
        keys: ``[H, T, D]`` without rotary position, in the model's dtype.
        values: ``[H, T, D]``.
        reading: the document and the model.

    """

    layer: int
    keys: Tensor
    values: Tensor
    reading: Reading

    def rotated_keys(self) -> Tensor:
        """``[H, T, D]`` at the positions of the prefill, as the model itself attends to them."""
        first = self.reading.before
        positions = torch.arange(first, first + self.keys.shape[1], device=self.keys.device)
        return rotate(self.keys, angles(positions, self.reading.inverse_frequencies.to(self.keys.device)))


class Method(Protocol):
    """A query-agnostic ranking of pairs. Implemented by frozen dataclasses whose fields are the settings."""

    def score(self, states: LayerStates) -> Tensor:
        """``[H, T]`` float32 on the device of the keys; the pair with the higher score stays."""


class Watcher(Protocol):
    """What a method gathers from one document while the model reads. Made for one document, used once."""

    def observe(self, step: LayerStep) -> None:
        """Called for each layer of each forward pass."""

    def score(self, states: LayerStates) -> Tensor:
        """As ``Method.score``, from what was seen."""


@runtime_checkable
class ModelWatcher(Protocol):
    """A watcher whose scores of one layer depend on the other layers."""

    def observe(self, step: LayerStep) -> None:
        """As in ``Watcher``."""

    def score_layers(self, layers: list[LayerStates]) -> list[Tensor]:
        """One ``[H, T]`` float32 for each layer."""


@runtime_checkable
class PrefillMethod(Protocol):
    """A method that watches the document being read."""

    def watch(self, reading: Reading) -> Watcher | ModelWatcher:
        """A watcher for this document's prefill (P's tokens included)."""


@runtime_checkable
class ReplayMethod(Protocol):
    """A method that watches the model read further text, each piece anew after P and the whole document."""

    def replays(self, reading: Reading) -> Iterable[Tensor]:
        """Token ids ``[n]`` of each piece."""

    def watch_replay(self, reading: Reading) -> Watcher | ModelWatcher:
        """A watcher for those pieces; it scores after the last."""


AnyMethod = Method | PrefillMethod | ReplayMethod
AnyWatcher = Watcher | ModelWatcher
