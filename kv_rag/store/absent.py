"""In place of a store that cannot be used: it holds nothing, so that every document is read for its question."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

from kv_rag.document import Compression, Document, DocumentCache
from kv_rag.errors import StateMissing, StoreUnreachable, UnknownDocument
from kv_rag.store.records import DocumentRecord, Problem, StateRecord, TextShape


class AbsentStore:
    """Used as ``LocalStore`` is.

    Args:
        place: where the store should be.
        why: what is wrong there and what can be done.

    """

    read_only = True
    disk_budget: int | None = None

    def __init__(self, place: str | Path, why: StoreUnreachable) -> None:
        self.place, self.why = place, why
        self.pinned: set[str] = set()

    @property
    def folder(self) -> Path:
        return Path(self.place)

    def close(self) -> None:
        """Nothing is open."""

    def must_be_writable(self) -> None:
        """Raises StoreUnreachable, with what was met when the store was opened."""
        raise StoreUnreachable(f"nothing can be stored: {self.why}")

    def put(self, document: Document, cache: DocumentCache) -> NoReturn:
        raise StoreUnreachable(f"document {document.id} cannot be stored: {self.why}")

    def get(self, document_id: str, compression: Compression) -> NoReturn:
        raise StateMissing(f"document {document_id} has no state {compression!s}: {self.why}")

    def count_use(self, record: StateRecord) -> None:
        """There is nothing to evict."""

    def has(self, document_id: str, compression: Compression) -> bool:
        return False

    def states(self, document_id: str) -> list[StateRecord]:
        return []

    def remove(self, document_id: str, compression: Compression | None = None) -> int:
        raise self._unknown(document_id)

    def documents(self) -> list[DocumentRecord]:
        return []

    def document(self, document_id: str) -> DocumentRecord:
        raise self._unknown(document_id)

    def text(self, document_id: str) -> str:
        raise self._unknown(document_id)

    def resolve(self, reference: str) -> str:
        raise self._unknown(reference)

    def candidates(self, anchors: Collection[str]) -> dict[str, list[TextShape]]:
        return {}

    def nbytes_on_disk(self, document_id: str | None = None) -> int:
        if document_id is not None:
            raise self._unknown(document_id)
        return 0

    def verify(self) -> list[Problem]:
        raise self.why

    def _unknown(self, reference: str) -> UnknownDocument:
        return UnknownDocument(f"no document {reference[:60]!r}: {self.why}")
