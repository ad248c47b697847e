"""The mode of one query: in its query bundle, or in a ``with kv_mode(…)`` block around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from llama_index.core.schema import QueryBundle

from kv_rag import Choice


@dataclass(frozen=True)
class _Override:
    mode: str | None = None
    keep: float | None = None
    method: str | None = None

    def over(self, usual: Choice) -> Choice:
        """``usual`` with what is given here in place of its own.

        Keep and method belong to a mode: with another mode they are the given ones or the engine's defaults.
        """
        if self.mode is not None and self.mode != usual.mode:
            return Choice(self.mode, self.keep, self.method)
        return Choice(
            usual.mode,
            usual.keep if self.keep is None else self.keep,
            usual.method if self.method is None else self.method,
        )


_active: ContextVar[_Override | None] = ContextVar("kv_mode", default=None)


@dataclass
class KVQueryBundle(QueryBundle):
    """A query that says in which mode its documents are to be used; wins over ``kv_mode`` and the retriever's setting."""

    mode: str | None = None
    keep: float | None = None
    method: str | None = None


@contextmanager
def kv_mode(mode: str | None = None, *, keep: float | None = None, method: str | None = None) -> Iterator[None]:
    """Overrides the mode of every ``KVRagRetriever`` and ``KVModePostprocessor`` that retrieves inside the block.

    It is resolved while retrieving, so an answer that is streamed after the block keeps its mode.

    Raises:
        InvalidSetting: unknown mode, keep out of range.

    """
    override = _Override(mode, keep, method)
    override.over(Choice())  # refused here rather than at the first query
    token = _active.set(override)
    try:
        yield
    finally:
        _active.reset(token)


def chosen(usual: Choice, query: QueryBundle | None) -> Choice:
    """The choice for ``query``: its own, else that of the ``kv_mode`` block, else ``usual``."""
    if isinstance(query, KVQueryBundle) and (query.mode, query.keep, query.method) != (None, None, None):
        return _Override(query.mode, query.keep, query.method).over(usual)
    override = _active.get()
    return usual if override is None else override.over(usual)
