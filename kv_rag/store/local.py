"""A folder of document states, shared by threads and processes without a lock server."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kv_rag.document import Compression, Document, DocumentCache
from kv_rag.errors import (
    DamagedState,
    StateMissing,
    StoreError,
    StoreMismatch,
)
from kv_rag.store import lookup
from kv_rag.store.folder import Folder, logger, sync_folder
from kv_rag.store.format import Header, StateFile, damaged, file_blocks, new_state, read_state
from kv_rag.store.identity import fingerprint_digest, state_key
from kv_rag.store.index import Index
from kv_rag.store.records import ANCHOR, DocumentRecord, IndexEntry, Problem, StateRecord, TextShape


class LocalStore:
    """Document states in a folder. See ``kv_rag.store.folder`` and ``format`` for what lies there.

    Args:
        folder: made if missing, readable by its owner alone.
        fingerprint: what the states depend on, by name; None opens the store whatever wrote it.
        read_only: write nothing. A folder without the right to write is opened so anyway.
        check: compare a state with its checksums when this store first reads it.

    Raises:
        StoreError: the folder cannot be made, read or used.
        StoreMismatch: it was made with another fingerprint or format; the message lists every difference.

    """

    def __init__(
        self, folder: str | Path, fingerprint: Mapping[str, str] | None, *, read_only: bool = False, check: bool = True
    ) -> None:
        # To look at whatever is there is no reason to make a folder.
        looking = fingerprint is None and not Path(folder).expanduser().is_dir()
        self._folder = Folder(folder, read_only=read_only or looking)
        self.fingerprint, is_new = self._folder.describe(fingerprint)
        self._digest = fingerprint_digest(self.fingerprint)
        self._check = check
        self._checked: set[tuple[Path, tuple[int, ...]]] = set()
        if is_new:  # rows from before store.json was lost may be of another fingerprint
            self._folder.index.unlink(missing_ok=True)
        if not self.read_only:
            self._folder.sweep()
        self._index = Index(self._folder, self._scan)

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def read_only(self) -> bool:
        return self._folder.read_only

    def close(self) -> None:
        """Closes the index. States that were loaded stay usable."""
        self._index.close()

    # --- states ---

    def put(self, document: Document, cache: DocumentCache) -> StateRecord:
        """Stores a state. An intact one that is there already is left as it is, a damaged one replaced.

        Raises:
            StoreError: the store is read-only or the folder refuses; nothing is half-written.
            InvalidSetting: the cache is another document's, or its tensors do not fit each other.

        """
        self._must_be_writable()
        key = state_key(self._digest, document.id, cache.token_ids, cache.compression)
        header = self._intact(key)
        if header is None:
            header, tensors = new_state(document, cache, self._digest)
            self._folder.write_state(key, file_blocks(header, tensors))
        path = self._folder.state_path(key)
        nbytes = sum(layer.nbytes for layer in cache.layers)
        entry = index_entry(path, replace(header, name=document.name), nbytes, path.stat().st_size, document.text)
        for replaced in self._index.add([entry]):
            self._folder.state_path(replaced).unlink(missing_ok=True)
        return entry.record

    def get(self, document_id: str, compression: Compression) -> DocumentCache:
        """A state, its tensors mapped from its file.

        Raises:
            StateMissing: it is not stored.
            DamagedState: its file is not what was written.

        """
        record = self._index.state(document_id, compression)
        if record is None:
            raise StateMissing(f"document {document_id} has no state {compression!s} in {self.folder}; ingest it")
        try:
            state = self._read(record.path)
        except FileNotFoundError:
            self._index.drop([record.path.stem])
            raise StateMissing(f"{record.path}, state {compression!s}, is gone; ingest {document_id} again") from None
        if (state.header.document_id, state.header.compression) != (document_id, compression):
            raise damaged(record.path, "it is not the state that the index says")
        return state.cache()

    def has(self, document_id: str, compression: Compression) -> bool:
        """Whether the state is indexed and its file there."""
        record = self._index.state(document_id, compression)
        return record is not None and record.path.is_file()

    def states(self, document_id: str) -> list[StateRecord]:
        """A document's states, newest last; empty when it is unknown."""
        return self._index.states(document_id)

    def remove(self, document_id: str, compression: Compression | None = None) -> int:
        """Removes a document or one of its states; returns bytes freed. States in use stay usable.

        Raises:
            UnknownDocument, StateMissing: there is nothing to remove.
            StoreError: the store is read-only or the folder refuses.

        """
        self._must_be_writable()
        records = [
            state for state in self.document(document_id).states if compression is None or state.compression == compression
        ]
        if not records:
            raise StateMissing(f"document {document_id} has no state {compression!s} in {self.folder}")
        try:
            for record in records:  # files first: a row without a file is noticed, a file without a row could come back
                record.path.unlink(missing_ok=True)
                sync_folder(record.path.parent)
        except OSError as error:
            raise StoreError(f"{record.path} cannot be removed: {error.strerror}; check the folder's rights") from error
        self._index.drop([record.path.stem for record in records])
        return sum(record.file_bytes for record in records)

    # --- documents ---

    def documents(self) -> list[DocumentRecord]:
        """All documents, in order of ingestion."""
        return self._index.documents()

    def document(self, document_id: str) -> DocumentRecord:
        """The document of exactly this id. Raises UnknownDocument."""
        return lookup.document(self._index, document_id, self.folder)

    def text(self, document_id: str) -> str:
        """A document's text, read from its newest state. Raises UnknownDocument, DamagedState."""
        path = self.document(document_id).states[-1].path
        try:
            return read_state(path).text()
        except FileNotFoundError:
            raise damaged(path, "it is gone") from None

    def resolve(self, reference: str) -> str:
        """The id meant by an id, the beginning of one (6 digits or more), a name or a text.

        Raises:
            UnknownDocument, AmbiguousDocument: none or several fit.

        """
        return lookup.resolve(self._index, reference, self.folder)

    def candidates(self, anchors: Collection[str]) -> dict[str, list[TextShape]]:
        """The documents that begin with each of ``anchors`` (``ANCHOR`` characters); the rest are left out."""
        return self._index.candidates(anchors)

    # --- the whole ---

    def nbytes_on_disk(self, document_id: str | None = None) -> int:
        """Bytes of one document's files (UnknownDocument), or of the store with its index."""
        if document_id is not None:
            return sum(state.file_bytes for state in self.document(document_id).states)
        others = [path for path in (self._folder.index, self._folder.description) if path.exists()]
        return self._index.file_bytes() + sum(path.stat().st_size for path in others)

    def verify(self) -> list[Problem]:
        """Reads everything, and makes the index fit the files unless the store is read-only."""
        known = {record.path: record for record in self._index.every_state()}
        problems = [Problem(path, None, "an unfinished write; swept once an hour old") for path in self._folder.leftovers()]
        states = set(self._folder.state_files())
        for path in self._folder.everything():
            if path not in states and path.name[:5] != ".tmp-":
                problems.append(Problem(path, None, "not a state file; move it away"))
        for path in sorted(states):
            record = known.get(path)
            try:
                entry = self._whole(path)
            except FileNotFoundError:
                continue
            except StoreError as error:
                problems.append(Problem(path, record.document_id if record else None, str(error)))
                continue
            if record is None or replace(record, name=None) != replace(entry.record, name=None):
                problems.append(Problem(path, entry.record.document_id, "the index did not fit this file; mended"))
                if not self.read_only:
                    self._index.add([entry])
        gone = [record for path, record in known.items() if not path.exists()]
        problems += [Problem(record.path, record.document_id, "the file is gone; ingest it again") for record in gone]
        if gone:
            self._index.drop([record.path.stem for record in gone])
        return problems

    def adopt(self, key: str) -> StateRecord:
        """Takes in a state file that came from elsewhere to its place. A bad one is removed, and DamagedState raised."""
        path = self._folder.state_path(key)
        try:
            entry = self._whole(path)
        except (DamagedState, StoreMismatch):
            path.unlink(missing_ok=True)
            raise
        self._index.add([entry])
        return entry.record

    # --- inside ---

    def _must_be_writable(self) -> None:
        if self.read_only:
            raise StoreError(f"the store in {self.folder} is read-only; open it with the right to write, or another one")

    def _read(self, path: Path) -> StateFile:
        state = read_state(path)
        if state.header.fingerprint != self._digest:
            raise StoreMismatch(f"{path} was made with other settings than its store; remove it and ingest again")
        seen = (path, state.identity)
        if self._check and seen not in self._checked:
            state.check()
            self._checked.add(seen)
        return state

    def _intact(self, key: str) -> Header | None:
        with contextlib.suppress(FileNotFoundError, DamagedState):
            return self._read(self._folder.state_path(key)).header
        return None

    def _whole(self, path: Path) -> IndexEntry:
        state = read_state(path)
        if state.header.fingerprint != self._digest:
            raise StoreMismatch(f"{path} was made with other settings than its store; remove it")
        state.check()
        return index_entry(path, state.header, state.nbytes, state.file_bytes, state.text())

    def _scan(self) -> Iterator[IndexEntry]:
        """All states, for rebuilding the index: headers and texts are read, pairs are not."""
        for path in self._folder.state_files():
            try:
                state = read_state(path)
                if state.header.fingerprint == self._digest:
                    yield index_entry(path, state.header, state.nbytes, state.file_bytes, state.text())
            except (FileNotFoundError, StoreError) as error:
                logger.warning("left out of the index: %s", error)


def index_entry(path: Path, header: Header, nbytes: int, file_bytes: int, text: str) -> IndexEntry:
    """What the index holds about a state file, from its header and text alone."""
    record = StateRecord(
        header.document_id, header.name, header.compression, header.tokens, header.pairs, header.full_pairs, nbytes,
        file_bytes, path, header.created,
    )  # fmt: skip
    return IndexEntry(path.stem, record, len(text), text[:ANCHOR], text[-ANCHOR:])
