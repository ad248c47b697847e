"""From what people call a document to its id: the same in every kind of store."""

from __future__ import annotations

import re

from kv_rag.document import text_digest
from kv_rag.errors import AmbiguousDocument, UnknownDocument
from kv_rag.store.index import Index
from kv_rag.store.records import DocumentRecord

_ID = re.compile(r"[0-9a-f]{32}")
_PREFIX = re.compile(r"[0-9a-f]{6,32}")


def document(index: Index, document_id: str, place: object) -> DocumentRecord:
    """The document of exactly this id. Raises UnknownDocument, which names the ``place``."""
    for record in index.documents(document_id):
        return record
    raise UnknownDocument(f"no document {_short(document_id)} in {place}; ingest it, or list the documents")


def resolve(index: Index, reference: str, place: object) -> str:
    """The id meant by an id, the beginning of one (6 digits or more), a name or a text.

    Raises:
        UnknownDocument, AmbiguousDocument: none or several fit.

    """
    if _ID.fullmatch(reference.strip()) and index.documents(reference.strip()):
        return reference.strip()
    found = {record.id for record in index.documents(text_digest(reference.strip()))}
    found.update(index.named(reference))
    if _PREFIX.fullmatch(reference.strip()):
        found.update(index.beginning_with(reference.strip()))
    if len(found) > 1:
        raise AmbiguousDocument(f"{_short(reference)} fits {', '.join(sorted(found))}; give one of these ids")
    if not found:
        raise UnknownDocument(
            f"no document {_short(reference)} in {place}: not an id, a name or an ingested text; ingest it first, "
            f"or list the documents to see what there is"
        )
    return found.pop()


def _short(reference: str) -> str:
    return repr(reference if len(reference) <= 60 else f"{reference[:57]}...")
