"""Where the bytes are: every figure counted from tensors and files."""

from __future__ import annotations

from dataclasses import dataclass

from kv_rag import html


@dataclass(frozen=True)
class StateMemory:
    """One stored state.

    Attributes:
        compression: how its pairs were chosen.
        pairs: pairs kept, over all layers and heads.
        full_pairs: pairs before compression.
        nbytes: bytes of its tensors when they are used.
        bytes_on_disk: bytes of its file.
        is_full: whether it has every pair.
        resident_bytes: bytes held in memory now, between questions.

    """

    compression: str
    pairs: int
    full_pairs: int
    nbytes: int
    bytes_on_disk: int
    is_full: bool = False
    resident_bytes: int = 0


@dataclass(frozen=True)
class DocumentMemory:
    """One document: ``resident_bytes`` are held in memory now, ``states`` are on disk."""

    id: str
    name: str | None
    tokens: int
    resident_bytes: int
    states: tuple[StateMemory, ...]
    pinned: bool = False

    @property
    def bytes_on_disk(self) -> int:
        return sum(state.bytes_on_disk for state in self.states)

    @property
    def full_bytes_on_disk(self) -> int:
        return sum(state.bytes_on_disk for state in self.states if state.is_full)

    @property
    def compressed_bytes_on_disk(self) -> int:
        return self.bytes_on_disk - self.full_bytes_on_disk


@dataclass(frozen=True)
class MemoryReport:
    """All documents of a store.

    Attributes:
        documents: in order of ingestion.
        resident_budget: bytes that may be held in memory, None for any number.
        disk_budget: bytes that state files may take, None for any number.
        store_bytes_on_disk: state files, index and description: what the folder takes.

    """

    documents: tuple[DocumentMemory, ...]
    resident_budget: int | None = None
    disk_budget: int | None = None
    store_bytes_on_disk: int = 0

    @property
    def resident_bytes(self) -> int:
        return sum(document.resident_bytes for document in self.documents)

    @property
    def bytes_on_disk(self) -> int:
        return sum(document.bytes_on_disk for document in self.documents)

    @property
    def full_bytes_on_disk(self) -> int:
        return sum(document.full_bytes_on_disk for document in self.documents)

    @property
    def compressed_bytes_on_disk(self) -> int:
        return self.bytes_on_disk - self.full_bytes_on_disk

    @property
    def pairs(self) -> int:
        """Pairs kept, in all states."""
        return sum(state.pairs for document in self.documents for state in document.states)

    @property
    def full_pairs(self) -> int:
        """Pairs that these states would have uncompressed."""
        return sum(state.full_pairs for document in self.documents for state in document.states)

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
        ) + "".join(
            f", at most {html.size(budget)} {where}"
            for budget, where in ((self.disk_budget, "on disk"), (self.resident_budget, "resident"))
            if budget is not None
        )
        return html.caption(total) + html.table(headings, rows, left=2)
