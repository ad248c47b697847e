"""Any score-based press of the package kvpress as a method: ``kvpress:KnormPress``.

kvpress 0.5 needs transformers below 5.3 and, when imported, wraps every attention function that transformers knows:
give it an environment of its own (``pip install 'kv_rag[kvpress]'``), and do not import it beside other work.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kv_rag.document import Scalar
from kv_rag.errors import InvalidSetting, MissingExtra, UnknownMethod, UnsupportedModel
from kv_rag.methods.base import LayerStates, Reading
from kv_rag.observation import LayerStep
from kv_rag.rotary import angles

PREFIX = "kvpress:"
# They rank by the last tokens' attention, which stand for a question: at ingest there is none.
_QUERY_AWARE = {"SnapKVPress", "PyramidKVPress", "TOVAPress", "FinchPress"}
# Their scores are made for one share of dropped pairs, where others rank once for all; with the settings named here they
# do not ask for it.
_FOR_ONE_RATIO: dict[str, tuple[str, ...]] = {"StreamingLLMPress": (), "CompactorPress": ("blending",)}


def create(name: str, settings: dict[str, Scalar], *, evaluate_only: bool = False) -> KVPress:
    """The press called ``name`` (with the prefix) with its own ``settings``.

    Raises:
        MissingExtra: kvpress cannot be imported.
        UnknownMethod: it has no such press, or one that does more than score pairs, or needs a question.
        InvalidSetting: a setting that the press does not have, or a value it does not take.

    """
    try:
        import kvpress
        from kvpress.presses.base_press import BasePress
        from kvpress.presses.scorer_press import ScorerPress
    except ImportError as error:
        raise MissingExtra(
            f"{name!r} needs the package kvpress, which cannot be imported ({error}). It needs transformers below 5.3: "
            f"make an environment of its own and install 'kv_rag[kvpress]' there"
        ) from error
    press_name = name.removeprefix(PREFIX)
    if press_name in _QUERY_AWARE and not evaluate_only:
        raise UnknownMethod(
            f"{name!r} may not be an ingest method: it ranks pairs by the last tokens, which are to be a question, and at "
            f"ingest there is none. Use mode='snapkv' when asking, with retain='full' or 'both'."
        )
    found = getattr(kvpress, press_name, None)
    if not (inspect.isclass(found) and issubclass(found, BasePress)):
        raise UnknownMethod(f"kvpress has no press {press_name!r}")
    press: Any = found
    only_scores = issubclass(found, ScorerPress) and found is not ScorerPress and press.compress is ScorerPress.compress
    if not only_scores or press.post_init_from_model is not BasePress.post_init_from_model:
        raise UnknownMethod(f"{press_name} does more than score pairs by what a prefill shows: it needs the whole model")
    known = {entry.name for entry in fields(press) if entry.init and not entry.name.startswith("_")}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise InvalidSetting(f"{press_name} has no setting {', '.join(unknown)}; it has: {', '.join(sorted(known))}")
    instead = _FOR_ONE_RATIO.get(press_name)
    if instead is not None and not {"compression_ratio", *instead} & set(settings):
        raise InvalidSetting(
            f"{press_name} scores for one share of dropped pairs: give it compression_ratio "
            f"(0.75 with keep=0.25)" + "".join(f" or {other}" for other in instead)
        )
    try:
        return KVPress(press_name, press(**settings))
    except (AssertionError, TypeError, ValueError) as error:
        raise InvalidSetting(f"{press_name} does not take {settings}: {error}") from error


@dataclass(frozen=True)
class KVPress:
    """A press as a method: it is asked for scores; what stays is decided by this library."""

    press_name: str
    press: Any = field(repr=False)

    def watch(self, reading: Reading) -> _Recorded:
        if 2 * reading.inverse_frequencies.numel() != reading.head_dim:
            raise UnsupportedModel(f"{self.press_name} takes all of a head for rotated; this model rotates a part of it")
        return _Recorded(self, reading)


class _Recorded:
    """Keeps what the model projected, without position: in a press's eyes queries and keys, side by side, are the
    hidden states, and projecting them is to pick one of the two.
    """

    def __init__(self, method: KVPress, reading: Reading) -> None:
        self._method, self._reading = method, reading
        self._queries: list[list[Tensor]] = [[] for _ in range(reading.layers)]
        self._modules: list[Any] = [None] * reading.layers

    def observe(self, step: LayerStep) -> None:
        document = step.slots.index >= self._reading.before
        self._queries[step.layer].append(step.raw_queries[:, document])
        self._modules[step.layer] = step.module

    def score(self, states: LayerStates) -> Tensor:
        press, name = self._method.press, self._method.press_name
        queries = torch.cat(self._queries[states.layer], dim=1)  # [Q, T, D]
        hidden = torch.cat([_token_rows(queries), _token_rows(states.keys)], dim=-1)[None]  # [1, T, (Q + H) * D]
        at = _Rotary(self._reading)(hidden, torch.arange(queries.shape[1])[None])
        keys, values = states.rotated_keys()[None], states.values[None]
        module = self._module(states, queries.shape[0] * queries.shape[2])
        devices = [hidden.device] if hidden.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(states.layer)  # sketches of one document are the same in every ingest
            try:
                scores = press.score(module, hidden, keys, values, None, {"position_embeddings": at})
            except (AssertionError, AttributeError, NotImplementedError) as error:
                raise UnknownMethod(f"{name} cannot score this document from what a prefill shows: {error}") from error
        return torch.as_tensor(scores)[0].float()

    def _module(self, states: LayerStates, queries: int) -> SimpleNamespace:
        """What presses look at of an attention module."""
        actual, reading = self._modules[states.layer], self._reading
        return SimpleNamespace(
            config=actual.config, layer_idx=states.layer, head_dim=reading.head_dim, scaling=actual.scaling,
            q_proj=lambda hidden: hidden[..., :queries], k_proj=lambda hidden: hidden[..., queries:],
            o_proj=actual.o_proj, num_key_value_groups=reading.query_heads // reading.kv_heads,
            rotary_emb=_Rotary(reading),
        )  # fmt: skip


def _token_rows(states: Tensor) -> Tensor:
    """``[H, T, D]`` to ``[T, H * D]``."""
    return states.transpose(0, 1).flatten(1)


class _Rotary:
    """Cosines and sines the way transformers' modules give them. A press counts positions from the document's first
    token; the keys stand after P, so P's length is added.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        device, reading = like.device, self._reading
        at = angles(positions[0].to(device) + reading.before, reading.inverse_frequencies.to(device))
        cos, sin = (torch.cat([part, part], dim=-1)[None].to(like.dtype) for part in (at.cos, at.sin))
        return cos, sin
