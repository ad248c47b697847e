"""Reading a document once: prefill after the shared prefix P, then compression that has seen no question."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kv_rag.compose import cache_from_prefill, copy_in
from kv_rag.document import Compression, DocumentCache, LayerPairs
from kv_rag.errors import ContextOverflow
from kv_rag.methods import AnyMethod, AnyWatcher, LayerStates, ModelWatcher, PrefillMethod, Reading, ReplayMethod
from kv_rag.model import LanguageModel
from kv_rag.observation import LayerStep, Observer
from kv_rag.selection import Budget, select


class _KeyRecorder:
    """Observer that keeps every layer's keys without position: exact, where un-rotating would round once more."""

    def __init__(self, model: LanguageModel, tokens: int, skip: int, observer: Observer | None = None) -> None:
        shape = (model.kv_heads, tokens, model.head_dim)
        self.keys = [torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(model.layers)]
        self._skip = skip
        self._seen = [0] * model.layers
        self._observer = observer

    def observe(self, step: LayerStep) -> None:
        begin = self._seen[step.layer]
        end = self._seen[step.layer] = begin + step.raw_keys.shape[1]
        first = max(begin, self._skip)
        if first < end:
            self.keys[step.layer][:, first - self._skip : end - self._skip] = step.raw_keys[:, first - begin :]
        if self._observer is not None:
            self._observer.observe(step)


def reading(model: LanguageModel, document_id: str, token_ids: Tensor) -> Reading:
    """What methods may know about the document and the model."""
    return Reading(
        document_id, token_ids, model.header[1].numel(), model.layers, model.heads, model.kv_heads, model.head_dim,
        model.context, model.inverse_frequencies, lambda text: model.encode(text, template=False), model.output_weight,
    )  # fmt: skip


def watcher_for(model: LanguageModel, document_id: str, token_ids: Tensor, method: AnyMethod) -> AnyWatcher | None:
    """What ``method`` wants to see of the document's prefill; None when it needs nothing of it."""
    if isinstance(method, PrefillMethod):
        return method.watch(reading(model, document_id, token_ids))
    return None


def prefill(
    model: LanguageModel,
    document_id: str,
    token_ids: Tensor,
    chunk: int,
    on_chunk: Callable[[int], object] | None = None,
    observer: Observer | None = None,
) -> DocumentCache:
    """The full state of ``token_ids`` ``[T]`` read after P, only the document's own rows.

    Memory for activations is bounded by ``chunk``; the state itself is held twice for keys (with and without position)
    until this returns.
    """
    header = model.header[1]
    everything = torch.cat([header, token_ids])
    tokens, before = token_ids.numel(), header.numel()
    state = model.new_state([everything.numel()] * model.layers)
    recorder = _KeyRecorder(model, tokens, before, observer)
    slots = torch.arange(everything.numel(), device=model.device)
    model.run_in_chunks(
        everything, slots, state, [slots] * model.layers, chunk, logits=0, observer=recorder, on_chunk=on_chunk
    )
    layers = cache_from_prefill(model, recorder.keys, state, before, tokens)
    return DocumentCache(document_id, token_ids, layers, Compression.full())


def prefill_header(model: LanguageModel, chunk: int) -> DocumentCache | None:
    """P's own state; None for a model whose prompts begin with the user's words."""
    ids = model.header[1]
    if not ids.numel():
        return None
    state = model.new_state([ids.numel()] * model.layers)
    recorder = _KeyRecorder(model, ids.numel(), 0)
    slots = torch.arange(ids.numel(), device=model.device)
    model.run_in_chunks(ids, slots, state, [slots] * model.layers, chunk, logits=0, observer=recorder)
    return DocumentCache("header", ids, cache_from_prefill(model, recorder.keys, state, 0, ids.numel()), Compression.full())


def compress(
    model: LanguageModel,
    full: DocumentCache,
    method: AnyMethod,
    compression: Compression,
    chunk: int,
    watcher: AnyWatcher | None = None,
    on_chunk: Callable[[int], object] | None = None,
) -> DocumentCache:
    """The pairs of ``full`` that ``method`` ranks highest, within the budget of ``compression``.

    Args:
        watcher: of the document's prefill, for a method that has one; without it the document is read once more.
        on_chunk: called with the number of tokens of each further forward pass.

    """
    scores = score(model, full, method, chunk, watcher, on_chunk)
    kept = select(scores, Budget.of(compression))
    layers = tuple(gather(layer, full.tokens, heads) for layer, heads in zip(full.layers, kept, strict=True))
    return DocumentCache(full.document_id, full.token_ids, layers, compression)


def score(
    model: LanguageModel,
    full: DocumentCache,
    method: AnyMethod,
    chunk: int,
    watcher: AnyWatcher | None = None,
    on_chunk: Callable[[int], object] | None = None,
) -> list[Tensor]:
    """What ``method`` says about every pair of ``full``: one ``[H, T]`` float32 a layer."""
    about = reading(model, full.document_id, full.token_ids)
    if isinstance(method, ReplayMethod):
        watcher = method.watch_replay(about)
        _replay(model, full, method, about, watcher, chunk, on_chunk)
    elif isinstance(method, PrefillMethod) and watcher is None:
        watcher = method.watch(about)
        prefill(model, full.document_id, full.token_ids, chunk, on_chunk, watcher)
    states = [_layer_states(index, layer, about) for index, layer in enumerate(full.layers)]
    scorer: Any = watcher if watcher is not None else method
    return scorer.score_layers(states) if isinstance(scorer, ModelWatcher) else [scorer.score(layer) for layer in states]


def _layer_states(index: int, layer: LayerPairs, about: Reading) -> LayerStates:
    shape = (len(layer.lengths), about.tokens, -1)
    return LayerStates(index, layer.keys.view(shape), layer.values.view(shape), about)


def _replay(
    model: LanguageModel,
    full: DocumentCache,
    method: ReplayMethod,
    about: Reading,
    watcher: AnyWatcher,
    chunk: int,
    on_chunk: Callable[[int], object] | None,
) -> None:
    """Runs each piece of text of ``method`` after P and the document, each in the place of the one before."""
    pieces = list(method.replays(about))
    first = about.before + about.tokens
    longest = max(piece.numel() for piece in pieces)
    if first + longest > model.context:
        raise ContextOverflow(
            f"the method reads {longest} tokens after the document of {about.tokens}: {first + longest} tokens, the "
            f"model's context holds {model.context}; split the document, or use a method that reads nothing after it, "
            "such as keydiff"
        )
    state = model.new_state([first + longest] * model.layers)
    header = prefill_header(model, chunk)
    if header is not None:
        copy_in(model, header, state, [0] * model.layers, 0)
    copy_in(model, full, state, [about.before] * model.layers, about.before)
    for piece in pieces:
        slots = torch.arange(first, first + piece.numel(), device=model.device)
        model.run_in_chunks(
            piece, slots, state, [slots] * model.layers, chunk, logits=0, observer=watcher, on_chunk=on_chunk
        )


def gather(layer: LayerPairs, tokens: int, kept: list[Tensor]) -> LayerPairs:
    """The pairs ``kept`` (one ``[K]`` int64 a head, ascending) of a layer with ``tokens`` pairs in every head."""
    rows = torch.cat([head * tokens + positions for head, positions in enumerate(kept)])
    positions = torch.cat(kept).to("cpu", torch.int32)
    return LayerPairs(layer.keys[rows], layer.values[rows], positions, tuple(part.numel() for part in kept))
