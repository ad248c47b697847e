"""Where the bytes are: every figure counted from tensors and files."""

from __future__ import annotations

from dataclasses import dataclass

from kv_rag import html


@dataclass(frozen=True)
class StateMemory:
    """One stored state: its compression, pairs kept and before, bytes of its tensors, bytes of its file."""

    compression: str
    pairs: int
    full_pairs: int
    nbytes: int
    bytes_on_disk: int


@dataclass(frozen=True)
class DocumentMemory:
    """One document: ``resident_bytes`` are held in memory now, ``states`` are on disk."""

    id: str
    name: str | None
    tokens: int
    resident_bytes: int
    states: tuple[StateMemory, ...]

    @property
    def bytes_on_disk(self) -> int:
        return sum(state.bytes_on_disk for state in self.states)


@dataclass(frozen=True)
class MemoryReport:
    """All documents of a store."""

    documents: tuple[DocumentMemory, ...]

    @property
    def resident_bytes(self) -> int:
        return sum(document.resident_bytes for document in self.documents)

    @property
    def bytes_on_disk(self) -> int:
        return sum(document.bytes_on_disk for document in self.documents)

    def _repr_html_(self) -> str:
        rows = [
            (document.name or document.id[:12], state.compression, f"{document.tokens:,}", f"{state.pairs:,}",
             html.share(state.pairs, state.full_pairs), html.size(state.nbytes), html.size(state.bytes_on_disk))
            for document in self.documents
            for state in document.states
        ]  # fmt: skip
        headings = ("document", "state", "tokens", "pairs", "kept", "in memory when used", "on disk")
        total = (
            f"{len(self.documents)} documents, {html.size(self.bytes_on_disk)} on disk, "
            f"{html.size(self.resident_bytes)} resident now"
        )
        return html.caption(total) + html.table(headings, rows, left=2)
