"""Which pairs kvpress keeps when it runs for real, and which this library keeps of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kv_rag import methods
from kv_rag.ingest import prefill, reading, score, watcher_for
from kv_rag.methods.base import LayerStates, Method
from kv_rag.model import LanguageModel
from kv_rag.selection import Budget, select

Kept = list[list[Tensor]]  # for each layer and KV head the kept tokens, ascending


def kept_by_presses(model: LanguageModel, ids: Tensor, presses: Iterable[Any]) -> Iterator[Kept]:
    """Each press hooked into the model's own prefill of ``ids`` ``[T]``; its pairs found again among all of them."""
    from transformers import DynamicCache

    @torch.no_grad()
    def prefilled() -> Any:
        cache = DynamicCache(config=model.model.config)
        model.model.get_decoder()(input_ids=ids[None], past_key_values=cache)
        return cache.layers

    whole = prefilled()
    for press in presses:
        with press(model.model):
            pruned = prefilled()
        yield [_places(full.keys[0], few.keys[0]) for full, few in zip(whole, pruned, strict=True)]


@torch.no_grad()
def kept_by_kvzip_press(model: LanguageModel, ids: Tensor, kept: int) -> Kept:
    """The document's pairs that KVzipPress does not mask when it keeps all of P and ``kept`` pairs a head on average."""
    from kvpress import KVzipPress
    from transformers import DynamicCache

    before, everything = model.header[1].numel(), torch.cat([model.header[1], ids])
    pairs = model.layers * model.kv_heads * everything.numel()
    dropped = model.layers * model.kv_heads * (ids.numel() - kept)
    with KVzipPress((dropped + 0.5) / pairs, n_sink=before)(model.model):
        model.model.get_decoder()(input_ids=everything[None], past_key_values=DynamicCache(config=model.model.config))
    left = []
    for layer in model.model.get_decoder().layers:
        _, head, token = layer.self_attn.masked_key_indices
        layer.self_attn.masked_key_indices = None  # the model goes on to others
        stays = torch.ones(model.kv_heads, everything.numel(), dtype=torch.bool)
        stays[head, token] = False
        left.append([row.nonzero()[:, 0] for row in stays])
    return within(left, before, everything.numel())


def _places(full: Tensor, few: Tensor) -> list[Tensor]:
    """Where in ``[H, T, D]`` the rows of ``[H, K, D]`` are: ascending, where kvpress leaves them in order of score."""
    found = []
    for everything, kept in zip(full, few, strict=True):
        place = (everything[None] == kept[:, None]).all(dim=-1)  # [K, T]
        assert (place.sum(dim=1) == 1).all(), "keys carry their position: no two are the same"
        found.append(place.int().argmax(dim=1).sort().values)
    return found


def ratio(kept: int, tokens: int) -> float:
    """The compression ratio at which kvpress, which cuts tokens * (1 - ratio) to an int, keeps ``kept``."""
    return 1 - (kept + 0.5) / tokens


def our_scores(model: LanguageModel, ids: Tensor, name: str, **settings: Any) -> list[Tensor]:
    """What the method ``name`` says of the document ``ids``, read after P in chunks: ``[H, T]`` a layer."""
    method = methods.create(name, settings)
    watcher = watcher_for(model, "d", ids, method)
    full = prefill(model, "d", ids, 64, observer=watcher)
    return score(model, full, method, 64, watcher)


def our_scores_of_rotated_keys(model: LanguageModel, ids: Tensor, method: Method) -> list[Tensor]:
    """As ``our_scores``, but the method sees keys with their position in the place of those without."""
    full, about = prefill(model, "d", ids, 64), reading(model, "d", ids)
    shape = (model.kv_heads, ids.numel(), -1)
    states = [LayerStates(at, pair.keys.view(shape), pair.values.view(shape), about) for at, pair in enumerate(full.layers)]
    return [method.score(replace(layer, keys=layer.rotated_keys())) for layer in states]


def our_kept(scores: list[Tensor], kept: int, sinks: int = 0) -> Kept:
    """What this library's selection makes of ``scores``, nothing kept for other reasons but the first ``sinks``."""
    return select(scores, Budget(None, kept, sinks=sinks, minimum=1))


def within(kept: Kept, begin: int, end: int) -> Kept:
    """The tokens from ``begin`` to ``end``, counted from ``begin``."""
    return [[head[(head >= begin) & (head < end)] - begin for head in heads] for heads in kept]


def shares_of_same(
    model: LanguageModel,
    ids: Tensor,
    counts: Sequence[int],
    ours: Callable[[int], Kept],
    press: Callable[[float], Any],
    *,
    window: int = 0,
) -> list[float]:
    """For each number of kept pairs the share that both keep of the document ``ids`` read after P.

    Args:
        counts: pairs per head.
        ours: from such a number to what this library keeps.
        press: from a compression ratio to a press, which keeps all of P and of the window.
        window: last tokens of ``ids`` that are a question, not the document.

    """
    before, tokens = model.header[1].numel(), ids.numel() - window
    presses = [press(ratio(before + kept + window, before + tokens + window)) for kept in counts]
    everything = torch.cat([model.header[1], ids])
    theirs = kept_by_presses(model, everything, presses)
    return [
        same(ours(kept), within(pairs, before, before + tokens)) for kept, pairs in zip(counts, theirs, strict=True)
    ]


def same(ours: Kept, theirs: Kept) -> float:
    """The share of pairs that both keep, who keep as many in every head."""
    lengths = [[head.numel() for head in heads] for heads in ours]
    assert lengths == [[head.numel() for head in heads] for heads in theirs]
    return common(ours, theirs) / sum(map(sum, lengths))


def common(ours: Kept, theirs: Kept) -> int:
    """How many pairs both keep."""
    return sum(
        int(torch.isin(our_head, their_head).sum())
        for our_heads, their_heads in zip(ours, theirs, strict=True)
        for our_head, their_head in zip(our_heads, their_heads, strict=True)
    )
