"""LangChain's documents: ingesting them, and copies of them that carry a choice to the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

from langchain_core.documents import Document

import kv_rag
from kv_rag import Choice, Engine, Ingested
from kv_rag.errors import EmptyInput, InvalidSetting, StateMissing
from kv_rag.prompt import strip_leading_reference
from langchain_kv_rag.choice import carried

ON_MISS = ("ingest", "prefill", "error")


@overload
def strip_references(text: str) -> str: ...
@overload
def strip_references(text: Document) -> Document: ...
@overload
def strip_references(text: Iterable[Document]) -> list[Document]: ...
def strip_references(text: str | Document | Iterable[Document]) -> str | Document | list[Document]:
    """A text, a document or documents without references: for citations and everything else that people read.

    Documents are copied, not changed.
    """
    if isinstance(text, str):
        return kv_rag.strip_references(text)
    if isinstance(text, Document):
        return _copy(text, kv_rag.strip_references(text.page_content))
    return [strip_references(document) for document in text]


def ingest_documents(
    engine: Engine, documents: Iterable[Document | str], choice: Choice, *, progress: bool, **settings: Any
) -> list[Ingested]:
    """Ingests ``documents``; method and keep are those of ``choice`` where ``settings`` has none."""
    return _ingest(engine, [_document(one) for one in documents], choice, progress=progress, **settings)


def _ingest(
    engine: Engine, documents: list[kv_rag.Document], choice: Choice, *, progress: bool, **settings: Any
) -> list[Ingested]:
    usual = {"method": choice.method, "keep": choice.keep} if choice.mode == "compressed" else {}
    if "budget" in settings:
        usual.pop("keep", None)
    wanted = {**{name: value for name, value in usual.items() if value is not None}, **settings}
    if isinstance(wanted.get("keep"), float):
        wanted["keep"] = carried(wanted["keep"])
    return engine.ingest(documents, progress=progress, **wanted)


def miss_setting(on_miss: str | None, has_model: bool) -> str:
    """``on_miss`` checked, or its default: "ingest" where there is a model to do it, else "prefill".

    Raises:
        InvalidSetting: not one of ON_MISS, or one that needs a model.

    """
    setting = on_miss or ("ingest" if has_model else "prefill")
    if setting not in ON_MISS:
        raise InvalidSetting(f"on_miss must be one of {', '.join(ON_MISS)}, got {on_miss!r}")
    if setting != "prefill" and not has_model:
        raise InvalidSetting(f"on_miss={setting!r} needs the chat model's store: pass llm=ChatKVRag(…)")
    return setting


def referenced(
    documents: Sequence[Document], choice: Choice, on_miss: str, engine: Engine | None
) -> list[Document]:
    """Copies of ``documents`` whose text begins with the reference of ``choice``; the originals are not changed.

    Args:
        documents: as retrieved.
        choice: how the model is to use them.
        on_miss: what to do with documents whose state is not in the store: "ingest" them now, "error", or "prefill":
            leave it to the model, which reads them as any other text.
        engine: where states are; None for "prefill".

    Raises:
        EmptyInput: a document without text.
        StateMissing: with "error".

    """
    known = [_document(document) for document in documents]
    missing = [] if engine is None or on_miss == "prefill" else [one for one in known if not engine.serves(one.id, choice)]
    if missing and on_miss == "error":
        raise StateMissing(
            f"document {missing[0].name or missing[0].id!r} has no state in the store for mode={choice.mode!r}"
            f"{'' if choice.keep is None else f', keep={choice.keep:g}'}; ingest it with ingest_documents, or use "
            "on_miss='ingest' or 'prefill'"
        )
    if missing and engine is not None:
        # No more than the mode needs: a compressed state shrinks nothing while the full one lies beside it.
        retain = "compressed" if choice.mode == "compressed" else "full"
        _ingest(engine, missing, choice, progress=False, retain=retain)
    return [_copy(document, kv_rag.with_reference(document.page_content, choice)) for document in documents]


def _document(document: Document | str) -> kv_rag.Document:
    """kv_rag's document, named by its title or source."""
    if isinstance(document, str):
        return kv_rag.Document(document)
    names = (document.metadata.get("title"), document.metadata.get("source"))
    name = next((str(name) for name in names if name), None)
    text = strip_leading_reference(document.page_content)
    if not text.strip():
        raise EmptyInput(
            f"document {name or document.id or ''!r} (metadata {document.metadata}) has no text; drop it before it gets here"
        )
    return kv_rag.Document(text, name)


def _copy(document: Document, text: str) -> Document:
    return document.model_copy(update={"page_content": text, "metadata": dict(document.metadata)})
