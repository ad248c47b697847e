"""Reading a document once: prefill after the shared prefix P, then compression that has seen no question."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kv_rag.compose import cache_from_prefill
from kv_rag.document import Compression, DocumentCache, LayerPairs
from kv_rag.methods import LayerStates, Method
from kv_rag.model import LanguageModel
from kv_rag.selection import pairs_to_keep, select


class _KeyRecorder:
    """Observer that keeps every layer's keys without position: exact, where un-rotating would round once more."""

    def __init__(self, model: LanguageModel, tokens: int, skip: int) -> None:
        shape = (model.kv_heads, tokens, model.head_dim)
        self.keys = [torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(model.layers)]
        self._skip = skip
        self._seen = [0] * model.layers

    def observe(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        begin = self._seen[layer]
        end = self._seen[layer] = begin + keys.shape[1]
        first = max(begin, self._skip)
        if first < end:
            self.keys[layer][:, first - self._skip : end - self._skip] = keys[:, first - begin :]


def prefill(
    model: LanguageModel,
    document_id: str,
    token_ids: Tensor,
    chunk: int,
    on_chunk: Callable[[int], object] | None = None,
) -> DocumentCache:
    """The full state of ``token_ids`` ``[T]`` read after P, only the document's own rows.

    Memory for activations is bounded by ``chunk``; the state itself is held twice for keys (with and without position)
    until this returns.
    """
    header = model.header[1]
    everything = torch.cat([header, token_ids])
    tokens, before = token_ids.numel(), header.numel()
    state = model.new_state([everything.numel()] * model.layers)
    recorder = _KeyRecorder(model, tokens, before)
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


def compress(full: DocumentCache, method: Method, compression: Compression) -> DocumentCache:
    """The pairs of ``full`` that ``method`` ranks highest, within the budget of ``compression``."""
    count = pairs_to_keep(full.tokens, compression.keep, compression.budget)
    allocation = str(dict(compression.settings).get("allocation", "uniform"))
    layers = tuple(
        _compress_layer(index, layer, full, method, count, allocation) for index, layer in enumerate(full.layers)
    )
    return DocumentCache(full.document_id, full.token_ids, layers, compression)


def _compress_layer(
    index: int, layer: LayerPairs, full: DocumentCache, method: Method, count: int, allocation: str
) -> LayerPairs:
    heads, tokens = len(layer.lengths), full.tokens
    keys, values = layer.keys.view(heads, tokens, -1), layer.values.view(heads, tokens, -1)
    scores = method.score(LayerStates(index, keys, values, full.document_id))
    kept = select(scores, count, allocation)
    rows = torch.cat([head * tokens + positions for head, positions in enumerate(kept)])
    positions = torch.cat(kept).to("cpu", torch.int32)
    return LayerPairs(layer.keys[rows], layer.values[rows], positions, tuple(part.numel() for part in kept))
