"""Compression methods by name. A new method is one file with one class, and one line here.

A method is a frozen dataclass: its fields are its settings, ``score`` ranks the pairs of one layer. It has seen no
question. What stays for a given ranking and budget is decided in ``kv_rag.selection``, the same for all; a class attribute
``allocation`` says how heads and layers share the budget unless the user does, default "uniform".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kv_rag.document import Scalar
from kv_rag.errors import InvalidSetting, UnknownMethod
from kv_rag.methods import peers
from kv_rag.methods.base import (
    AnyMethod,
    AnyWatcher,
    LayerStates,
    Method,
    ModelWatcher,
    PrefillMethod,
    Reading,
    ReplayMethod,
    Watcher,
)
from kv_rag.methods.blend import Blend
from kv_rag.methods.compactor import Compactor
from kv_rag.methods.critical import Critical
from kv_rag.methods.expected import ExpectedAttention
from kv_rag.methods.h2o import H2O
from kv_rag.methods.keydiff import KeyDiff
from kv_rag.methods.keydiff_attention import KeyDiffAttention
from kv_rag.methods.knorm import KNorm
from kv_rag.methods.kvzip import KVzip
from kv_rag.methods.lagkv import LagKV
from kv_rag.methods.random import Random
from kv_rag.methods.scissorhands import Scissorhands
from kv_rag.methods.streaming import Streaming
from kv_rag.methods.tova import Tova

METHODS: dict[str, type[AnyMethod]] = {
    "blend": Blend,
    "compactor": Compactor,
    "critical": Critical,
    "expected": ExpectedAttention,
    "h2o": H2O,
    "keydiff": KeyDiff,
    "keydiff_attention": KeyDiffAttention,
    "knorm": KNorm,
    "kvzip": KVzip,
    "lagkv": LagKV,
    "random": Random,
    "scissorhands": Scissorhands,
    "streaming": Streaming,
    "tova": Tova,
}

_QUERY_AWARE = {"snapkv", "snap_kv", "pyramidkv", "adakv", "tova_question", "tova-question"}

__all__ = [
    "METHODS",
    "AnyMethod",
    "AnyWatcher",
    "LayerStates",
    "Method",
    "ModelWatcher",
    "PrefillMethod",
    "Reading",
    "ReplayMethod",
    "Watcher",
    "allocation_of",
    "create",
    "register",
]


def create(name: str, settings: Mapping[str, Scalar] | None = None) -> AnyMethod:
    """The method called ``name`` with its own ``settings``.

    Raises:
        UnknownMethod: no such method, or a query-aware one.
        InvalidSetting: a setting that the method does not have, or a value it does not take.

    """
    if not isinstance(name, str) or name.lower() in _QUERY_AWARE:
        raise UnknownMethod(
            f"{name!r} may not be an ingest method: it ranks pairs by a question, and at ingest there is none. A cache "
            f"pruned for one question is useless for the next. Use mode='snapkv' when asking, with retain='full' or 'both'."
        )
    if name.startswith(peers.PREFIX):
        return peers.create(name, dict(settings or {}))
    if name not in METHODS:
        raise UnknownMethod(f"no compression method {name!r}; there are: {', '.join(sorted(METHODS))}")
    method = METHODS[name]
    known = {field.name for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    unknown = sorted(set(settings or {}) - known)
    if unknown:
        has = f"it has: {', '.join(sorted(known))}" if known else "it has none"
        raise InvalidSetting(f"method {name!r} has no setting {', '.join(map(repr, unknown))}; {has}")
    return method(**(settings or {}))


def allocation_of(method: AnyMethod) -> str:
    """How heads and layers share the pairs when the user does not say: the method's class attribute ``allocation``."""
    return str(getattr(method, "allocation", "uniform"))


def register(name: str, method: type[AnyMethod]) -> None:
    """Adds a method of your own under ``name`` for this process.

    Raises:
        InvalidSetting: the name is taken or reserved.

    """
    if name in METHODS or name in _QUERY_AWARE or name == "full":
        raise InvalidSetting(f"the method name {name!r} is taken; choose another")
    METHODS[name] = method
