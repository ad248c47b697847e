"""Any score-based press of the package kvpress as a method: ``kvpress:KnormPress``.

kvpress 0.5 needs transformers below 5.3 and, when imported, wraps every attention function that transformers knows:
give it an environment of its own (``pip install 'kv_rag[kvpress]'``), and do not import it beside other work.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from kv_rag.document import Scalar
from kv_rag.errors import InvalidSetting, UnknownMethod
from kv_rag.methods.base import LayerStates, Reading
from kv_rag.observation import LayerStep
from kv_rag.rotary import angles

PREFIX = "kvpress:"
# They rank by the last tokens' attention, which stand for a question: at ingest there is none.
_QUERY_AWARE = {"SnapKVPress", "PyramidKVPress", "TOVAPress", "FinchPress"}


def create(name: str, settings: dict[str, Scalar], *, evaluate_only: bool = False) -> KVPress:
    """The press called ``name`` (with the prefix) with its own ``settings``.

    Raises:
        UnknownMethod: kvpress is not installed, has no such press, or the press does not score pairs.
        InvalidSetting: a setting that the press does not have.

    """
    try:
        import kvpress
        from kvpress.presses.scorer_press import ScorerPress
    except ImportError as error:
        raise UnknownMethod(
            f"{name!r} needs the package kvpress, which cannot be imported ({error}). It needs transformers below 5.3: "
            f"make an environment of its own and install 'kv_rag[kvpress]' there"
        ) from error
    press_name = name.removeprefix(PREFIX)
    if press_name in _QUERY_AWARE and not evaluate_only:
        raise UnknownMethod(
            f"{name!r} may not be an ingest method: it ranks pairs by the last tokens, which are to be a question, and at "
            f"ingest there is none. Use mode='snapkv' when asking, with retain='full' or 'both'."
        )
    press = getattr(kvpress, press_name, None)
    if not (inspect.isclass(press) and issubclass(press, ScorerPress) and is_dataclass(press)):
        raise UnknownMethod(f"kvpress has no press {press_name!r} that scores pairs")
    known = {entry.name for entry in fields(press) if entry.init} - {"compression_ratio"}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise InvalidSetting(f"{press_name} has no setting {', '.join(unknown)}; it has: {', '.join(sorted(known))}")
    return KVPress(press_name, press(**settings))


@dataclass(frozen=True)
class KVPress:
    """A press as a method: it is asked for scores; what stays is decided by this library."""

    press_name: str
    press: Any = field(repr=False)

    def watch(self, reading: Reading) -> _Recorded:
        return _Recorded(self.press, reading)


class _Recorded:
    """Keeps the document's queries without position: in a press's eyes they are the hidden states, already projected."""

    def __init__(self, press: Any, reading: Reading) -> None:
        self._press, self._reading = press, reading
        self._queries: list[list[Tensor]] = [[] for _ in range(reading.layers)]
        self._modules: list[Any] = [None] * reading.layers

    def observe(self, step: LayerStep) -> None:
        document = step.slots.index >= self._reading.before
        self._queries[step.layer].append(step.raw_queries[:, document])
        self._modules[step.layer] = step.module

    def score(self, states: LayerStates) -> Tensor:
        queries = torch.cat(self._queries[states.layer], dim=1)  # [Q, T, D]
        hidden = queries.transpose(0, 1).reshape(1, queries.shape[1], -1)
        actual = self._modules[states.layer]
        module = SimpleNamespace(
            config=actual.config, layer_idx=states.layer, head_dim=self._reading.head_dim, q_proj=nn.Identity(),
            o_proj=actual.o_proj, scaling=actual.scaling, num_key_value_groups=queries.shape[0] // states.keys.shape[0],
            rotary_emb=_Rotary(self._reading),
        )  # fmt: skip
        first = self._reading.before
        at = _Rotary(self._reading)(hidden, torch.arange(first, first + queries.shape[1])[None])
        keys, values = states.rotated_keys()[None], states.values[None]
        with torch.no_grad():
            scores = self._press.score(module, hidden, keys, values, None, {"position_embeddings": at})
        return torch.as_tensor(scores)[0].float()


class _Rotary:
    """Cosines and sines the way transformers' modules give them."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        at = angles(positions[0].to(like.device), self._reading.inverse_frequencies.to(like.device))
        return tuple(torch.cat([part, part], dim=-1)[None].to(like.dtype) for part in (at.cos, at.sin))  # type: ignore[return-value]
