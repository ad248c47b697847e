"""The one attention function this library registers with transformers.

It rotates queries and keys itself (the model ran with every position zero), writes the new pairs into the prompt's
private buffers and attends over them. It needs no transformers cache and no transformers mask, so it does not depend
on how those change between versions: state reaches it as a keyword argument of the model's forward.

Dimension letters: Q query heads, H KV heads, T new tokens, S slots, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kv_rag.observation import LayerStep, Observer
from kv_rag.rotary import Angles, rotate
from kv_rag.state import LayerState, PromptState, Slots

NAME = "kv_rag"


@dataclass
class ForwardPass:
    """What one forward pass tells attention.

    Attributes:
        state: the buffers to write to and attend over.
        at: angles of the new tokens' positions.
        slots: one Slots for each layer; layers of one length share one object.
        observer: sees every layer.

    """

    state: PromptState
    at: Angles
    slots: list[Slots]
    observer: Observer | None = None
    _masks: dict[int, Tensor | None] = field(default_factory=dict)

    def causal(self, layer: int) -> Tensor | None:
        """True where a new token may look, ``[T, S]``; None when it may look anywhere."""
        slots = self.slots[layer]
        if id(slots) not in self._masks:
            self._masks[id(slots)] = _causal_mask(slots)
        return self._masks[id(slots)]


def _causal_mask(slots: Slots) -> Tensor | None:
    if slots.index.numel() == 1:  # one token, always the last slot in sight
        return None
    every_slot = torch.arange(slots.end, device=slots.index.device)
    return every_slot[None, :] <= slots.index[:, None]


def attend(queries: Tensor, layer: LayerState, slots: Slots, causal: Tensor | None, scaling: float) -> Tensor:
    """Attention of ``queries`` ``[Q, T, D]`` over the first ``slots.end`` slots: ``[Q, T, D]``."""
    if layer.empty is not None:
        ragged = _attend_token if causal is None else _attend_head_by_head
        return ragged(queries, layer, layer.empty[:, : slots.end], causal, scaling)
    keys, values = layer.keys[None, :, : slots.end], layer.values[None, :, : slots.end]
    whole = slots.start == 0 and causal is not None  # nothing before: the kernel skips what is masked
    mask = None if whole else causal
    return F.scaled_dot_product_attention(
        queries[None], keys, values, mask, is_causal=whole, scale=scaling, enable_gqa=queries.shape[0] > keys.shape[1]
    )[0]


def _attend_head_by_head(
    queries: Tensor, layer: LayerState, empty: Tensor, causal: Tensor | None, scaling: float
) -> Tensor:
    """Many tokens: each KV head's pairs are gathered, so that empty slots cost nothing."""
    assert causal is not None
    heads, end = empty.shape
    attended = torch.empty_like(queries)
    for head, group in enumerate(queries.chunk(heads)):  # [Q/H, T, D]
        filled = (~empty[head]).nonzero()[:, 0]
        keys = layer.keys[head, :end].index_select(0, filled)[None, None]
        values = layer.values[head, :end].index_select(0, filled)[None, None]
        size = group.shape[0]
        attended[head * size : (head + 1) * size] = F.scaled_dot_product_attention(
            group[None], keys, values, causal[:, filled], scale=scaling, enable_gqa=size > 1
        )[0]
    return attended


def _attend_token(queries: Tensor, layer: LayerState, empty: Tensor, causal: Tensor | None, scaling: float) -> Tensor:
    """One token: reading empty slots costs less than gathering the others, so they are masked.

    The query heads of a group share a mask, so they go into the token axis and nothing is repeated.
    """
    heads, end = empty.shape
    dim = queries.shape[-1]
    folded = queries.reshape(1, heads, -1, dim)
    mask = ~empty[None, :, None, :].expand(1, heads, folded.shape[2], end)
    keys, values = layer.keys[None, :, :end], layer.values[None, :, :end]
    return F.scaled_dot_product_attention(folded, keys, values, mask, scale=scaling).reshape(-1, 1, dim)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    kv_rag_pass: ForwardPass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in each layer: ``[1, Q or H, T, D]`` in, ``[1, T, Q, D]`` out."""
    assert kv_rag_pass is not None, "the kv_rag attention runs only inside LanguageModel.run"
    index: int = module.layer_idx
    layer, slots = kv_rag_pass.state.layers[index], kv_rag_pass.slots[index]
    queries = rotate(query[0], kv_rag_pass.at)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer.write(rotate(key[0], kv_rag_pass.at), value[0], slots)
    if kv_rag_pass.observer is not None:
        kv_rag_pass.observer.observe(LayerStep(index, query[0], queries, key[0], value[0], layer, slots, scale, module))
    attended = attend(queries, layer, slots, kv_rag_pass.causal(index), scale)
    return attended.transpose(0, 1)[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """The mask function that goes with it: ``ForwardPass.mask`` knows the slots, transformers does not."""


def register() -> None:
    """Makes the attention known to transformers under NAME. Changes nothing for models that do not ask for it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, no_mask)
