"""The one error that is needed here; all others are kv_rag's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kv_rag import KVRagError


class AnswerFailed(KVRagError, RuntimeError):
    """A prompt of a query engine could not be answered; ``__cause__`` is kv_rag's error.

    LlamaIndex's refining synthesizers catch every ValueError of ``predict``, log it and answer "Empty Response". Most of
    kv_rag's errors are ValueErrors, so ``predict`` raises this one in their place.
    """


@contextmanager
def not_swallowed() -> Iterator[None]:
    """Turns kv_rag's ValueErrors into AnswerFailed."""
    try:
        yield
    except KVRagError as error:
        if not isinstance(error, ValueError):
            raise
        raise AnswerFailed(f"{type(error).__name__}: {error}") from error
