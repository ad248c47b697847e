"""Errors that are kv_rag's and LangChain's at once, so that code which catches either keeps working."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langchain_core import exceptions

from kv_rag import errors


def _langchain(name: str) -> Any:
    """LangChain's class of that name; older releases of langchain-core 1 know only the base."""
    return getattr(exceptions, name, exceptions.LangChainException)


class PromptTooLong(errors.ContextOverflow, _langchain("ContextOverflowError")):  # type: ignore[misc]
    """More tokens than the model's context holds."""


class InvalidRequest(errors.InvalidSetting, _langchain("ModelInvalidRequestError")):  # type: ignore[misc]
    """A setting out of range or unknown, or a message this model cannot read."""


class EmptyRequest(errors.EmptyInput, _langchain("ModelInvalidRequestError")):  # type: ignore[misc]
    """Messages or a document without text."""


class ModelMissing(errors.ModelNotFound, _langchain("ModelNotFoundError")):  # type: ignore[misc]
    """The model cannot be loaded from where it was asked for."""


_TWINS: dict[type[errors.KVRagError], type[errors.KVRagError]] = {
    errors.ContextOverflow: PromptTooLong,
    errors.InvalidSetting: InvalidRequest,
    errors.EmptyInput: EmptyRequest,
    errors.ModelNotFound: ModelMissing,
}


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Turns kv_rag's errors into their twins where LangChain has a class for them; others pass unchanged."""
    try:
        yield
    except errors.KVRagError as error:
        twin = _TWINS.get(type(error))
        if twin is None:
            raise
        raise twin(str(error)) from error
