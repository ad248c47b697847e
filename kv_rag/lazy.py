"""Engines that are opened when first needed, and shared by all objects that ask for the same one.

Frameworks make copies of a model freely (LangChain's ``configurable_fields`` makes a new one for every call). If each copy
opened an engine, each would load the weights again.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from kv_rag.engine import Engine


class LazyEngine:
    """An engine that is opened by the first ``get``; or one that is there already."""

    def __init__(self, engine: Engine | None = None, **settings: Any) -> None:
        self._engine, self._settings = engine, settings
        self._lock = threading.Lock()

    def get(self) -> Engine:
        """The engine; the first call loads the model, other threads wait for it."""
        with self._lock:
            if self._engine is None:
                self._engine = Engine.from_pretrained(**self._settings)
            return self._engine

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyEngine:
        """Copies share their model."""
        return self


# Weak: an engine lives as long as an object that uses it.
_shared: WeakValueDictionary[Hashable, LazyEngine] = WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_engine(model: str | Path, store: str | Path, **settings: Any) -> LazyEngine:
    """The engine of these settings, not opened yet or opened by another object."""
    key = (str(model), Path(store).resolve(), tuple(sorted(settings.items())))
    with _shared_lock:
        lazy = _shared.get(key)
        if lazy is None:
            lazy = _shared[key] = LazyEngine(model=model, store=store, **settings)
        return lazy
