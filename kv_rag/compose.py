"""Several documents' states -> one state for one question.

Documents are copied into the prompt's private buffers, keys rotated to where the document stands; everything that is
not served from a state (text around documents, tokens to repair, the question) then runs in one forward pass.

Dimension letters: Q query heads, H KV heads, T tokens, S slots, W window tokens, D head_dim, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.document import DocumentCache, LayerPairs
from kv_rag.model import LanguageModel
from kv_rag.observation import LayerStep
from kv_rag.rotary import Angles, angles, rotate, rotate_into
from kv_rag.state import LayerState, PromptState


@dataclass(frozen=True)
class Piece:
    """A stretch of the prompt.

    Attributes:
        token_ids: ``[T]`` int64.
        cache: its stored state; None when it has to run through the model.
        exact: the state is what a prefill here would give (nothing but P stands before), so it needs no repair.
        prunable: SnapKV may drop pairs of it, down to ``keep`` of its tokens.
        keep: see above.

    """

    token_ids: Tensor
    cache: DocumentCache | None = None
    exact: bool = False
    prunable: bool = False
    keep: float = 1.0

    @property
    def tokens(self) -> int:
        return int(self.token_ids.numel())

    def slots(self, layer: int) -> int:
        """Slots it takes in a layer: heads with fewer pairs than the longest leave some empty."""
        return self.tokens if self.cache is None else self.cache.layers[layer].longest


@dataclass
class Composition:
    """What composing gives.

    Attributes:
        state: ready for the first generated token.
        logits: ``[V]`` after the last prompt token.
        window: rotated queries ``[Q, W, D]`` of the observation window, one a layer (empty unless recorded).
        begins: begins[layer][i] is the first slot of piece i.

    """

    state: PromptState
    logits: Tensor
    window: list[Tensor]
    begins: list[list[int]]


class QueryRecorder:
    """Observer that keeps the rotated queries of a prompt's last ``window`` tokens."""

    def __init__(self, layers: int, window: int) -> None:
        self._parts: list[list[Tensor]] = [[] for _ in range(layers)]
        self._window = window

    def observe(self, step: LayerStep) -> None:
        self._parts[step.layer].append(step.queries)

    def queries(self) -> list[Tensor]:
        return [torch.cat(parts, dim=1)[:, -self._window :] for parts in self._parts]


def compose(
    model: LanguageModel,
    pieces: list[Piece],
    *,
    repair: float,
    reserve: int,
    chunk: int,
    window: int = 0,
    repaired: list[Tensor] | None = None,
) -> Composition:
    """Puts ``pieces`` one after the other and runs what no state covers.

    Args:
        pieces: in prompt order; the last one has no cache (it holds the question).
        repair: fraction of every document's first tokens to recompute over the composed state, 0 to 1. Only documents
            with their full state that are not exact already.
        reserve: slots to leave for generated tokens.
        chunk: tokens per forward pass.
        window: record the queries of so many last tokens, for SnapKV.
        repaired: instead of ``repair``: for each piece, which of its tokens to recompute (ascending int64).

    """
    begins = _layout(model.layers, pieces)
    ends = [begins[layer][-1] + pieces[-1].slots(layer) for layer in range(model.layers)]
    state = model.new_state([end + reserve for end in ends])
    offset, offsets = 0, []
    for piece in pieces:
        offsets.append(offset)
        offset += piece.tokens
    for index, piece in enumerate(pieces):
        if piece.cache is not None:
            copy_in(model, piece.cache, state, [begins[layer][index] for layer in range(model.layers)], offsets[index])
    computed = repaired or [computed_tokens(piece, repair) for piece in pieces]
    token_ids = torch.cat([piece.token_ids[chosen] for piece, chosen in zip(pieces, computed, strict=True)])
    positions = torch.cat([start + chosen for start, chosen in zip(offsets, computed, strict=True)])
    recorder = QueryRecorder(model.layers, window) if window else None
    logits = model.run_in_chunks(
        token_ids, positions, state, _slots(begins, computed, model.device), chunk, observer=recorder
    )
    assert logits is not None
    state.tokens = offset
    return Composition(state, logits[0], recorder.queries() if recorder else [], begins)


def _layout(layers: int, pieces: list[Piece]) -> list[list[int]]:
    begins = []
    for layer in range(layers):
        at, row = 0, []
        for piece in pieces:
            row.append(at)
            at += piece.slots(layer)
        begins.append(row)
    return begins


def computed_tokens(piece: Piece, repair: float) -> Tensor:
    """Which tokens of a piece run through the model: all without a state, else the first ``repair`` of it."""
    if piece.cache is None:
        return torch.arange(piece.tokens)
    if piece.exact or not piece.cache.is_full:  # a pruned state has no slot for a token that was dropped
        return torch.arange(0)
    return torch.arange(math.ceil(repair * piece.tokens))


def _slots(begins: list[list[int]], computed: list[Tensor], device: torch.device) -> list[Tensor]:
    """Slots of the computed tokens in each layer; layers laid out alike share one tensor, and so one mask."""
    shared: dict[tuple[int, ...], Tensor] = {}
    slots = []
    for row in begins:
        key = tuple(row)
        if key not in shared:
            shared[key] = torch.cat([begin + chosen for begin, chosen in zip(row, computed, strict=True)]).to(device)
        slots.append(shared[key])
    return slots


def copy_in(model: LanguageModel, cache: DocumentCache, state: PromptState, begins: list[int], offset: int) -> None:
    """Copies a document's pairs to slot ``begins[layer]`` on, keys rotated to position ``offset`` on."""
    everywhere = torch.arange(offset, offset + cache.tokens, device=model.device)
    table = angles(everywhere, model.inverse_frequencies.to(model.device))  # [T, R/2], shared by all layers and heads
    for pairs, layer, begin in zip(cache.layers, state.layers, begins, strict=True):
        if pairs.is_uniform:
            _copy_uniform(pairs, layer, begin, table)
        else:
            _copy_ragged(pairs, layer, begin, table)
        layer.length = max(layer.length, begin + pairs.longest)


def _copy_uniform(pairs: LayerPairs, layer: LayerState, begin: int, table: Angles) -> None:
    heads, count, device = len(pairs.lengths), pairs.longest, layer.keys.device
    place = slice(begin, begin + count)
    at = table
    if count < table.cos.shape[0]:
        at = table.at(pairs.positions.to(device).view(heads, count))
    rotate_into(layer.keys[:, place], pairs.keys.to(device).view(heads, count, -1), at)
    layer.values[:, place] = pairs.values.to(device).view(heads, count, -1)


def _copy_ragged(pairs: LayerPairs, layer: LayerState, begin: int, table: Angles) -> None:
    """Each head's pairs end where the longest head ends; slots before them stay empty."""
    longest, device = pairs.longest, layer.keys.device
    if layer.empty is None:
        layer.empty = torch.zeros(layer.keys.shape[:2], dtype=torch.bool, device=device)
    rotated = rotate(pairs.keys.to(device), table.at(pairs.positions.to(device)))
    values = pairs.values.to(device)
    done = 0
    for head, count in enumerate(pairs.lengths):
        first, end = begin + longest - count, begin + longest
        rows = slice(done, done + count)
        layer.keys[head, first:end] = rotated[rows]
        layer.values[head, first:end] = values[rows]
        # Empty slots are masked, but a NaN in memory that was never written would still spoil the sum.
        layer.keys[head, begin:first] = 0
        layer.values[head, begin:first] = 0
        layer.empty[head, begin:first] = True
        done += count


def cache_from_prefill(
    model: LanguageModel, raw_keys: list[Tensor], state: PromptState, begin: int, tokens: int
) -> tuple[LayerPairs, ...]:
    """The full state of slots ``begin`` to ``begin + tokens`` as stored pairs.

    Args:
        raw_keys: each layer's ``[H, T, D]`` keys without position, for exactly those tokens.

    """
    positions = torch.arange(tokens, dtype=torch.int32).repeat(model.kv_heads)
    return tuple(
        LayerPairs(
            keys=raw.reshape(-1, model.head_dim),
            values=layer.values[:, begin : begin + tokens].reshape(-1, model.head_dim),
            positions=positions,
            lengths=(tokens,) * model.kv_heads,
        )
        for raw, layer in zip(raw_keys, state.layers, strict=True)
    )
