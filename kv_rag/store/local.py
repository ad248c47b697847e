"""A folder of document states, shared by threads and processes without a lock server."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kv_rag.document import Compression, Document, DocumentCache
from kv_rag.errors import (
    DamagedState,
    InvalidSetting,
    StateMissing,
    StoreError,
    StoreMismatch,
    StoreUnreachable,
)
from kv_rag.store import lookup
from kv_rag.store.folder import Folder, differences, logger, sync_folder
from kv_rag.store.format import Header, StateFile, damaged, file_blocks, new_state, read_state
from kv_rag.store.identity import fingerprint_digest, state_key
from kv_rag.store.index import LEAST_USEFUL, LRU, Index
from kv_rag.store.records import ANCHOR, DocumentRecord, IndexEntry, Problem, StateRecord, TextShape
from kv_rag.store.seal import KEY_NAME, Seal

EVICT = (LRU, LEAST_USEFUL)
_USES_AT_ONCE = 64  # uses written to the index together: a hint for eviction is not worth a disk write each


class LocalStore:
    """Document states in a folder. See ``kv_rag.store.folder`` and ``format`` for what lies there.

    Args:
        folder: made if missing, readable by its owner alone.
        fingerprint: what the states depend on, by name; None opens the store whatever wrote it.
        read_only: write nothing. A folder without the right to write is opened so anyway.
        check: compare a state with its checksums when this store first reads it.
        hmac_key: secret of 16 bytes or more; states not written by a holder of it are refused.
        disk_budget: bytes of state files; what is used least gives way before more is written. None for no limit.
        evict: "lru" (the state not used for longest) or "least_useful" (that spares the fewest tokens per byte, times
            its uses).
        spared: states that are never evicted.

    Raises:
        StoreError: the folder is not one, or holds no store.
        StoreUnreachable: it cannot be made, read or written now.
        StoreMismatch: it was made with another fingerprint, key or format; the message lists every difference.
        InvalidSetting: a key that is too short, a budget that is no number of bytes, an unknown order.

    """

    def __init__(
        self,
        folder: str | Path,
        fingerprint: Mapping[str, str] | None,
        *,
        read_only: bool = False,
        check: bool = True,
        hmac_key: bytes | str | None = None,
        disk_budget: int | None = None,
        evict: str = LRU,
        spared: Callable[[StateRecord], bool] = lambda record: False,
    ) -> None:
        self._seal = Seal.of(hmac_key)
        self.disk_budget, self._order = check_disk_budget(disk_budget, evict)
        # To look at whatever is there is no reason to make a folder.
        looking = fingerprint is None and not Path(folder).expanduser().is_dir()
        self._folder = Folder(folder, read_only=read_only or looking)
        self.fingerprint, is_new = self._folder.describe(with_key(fingerprint, self._seal))
        self._must_have_its_key()
        self._digest = fingerprint_digest(self.fingerprint)
        self._check = check
        self._checked: set[tuple[Path, tuple[int, ...]]] = set()
        self._lock = threading.Lock()
        self._uses: list[str] = []
        self._warned: set[str] = set()
        self._spared = spared
        self.pinned: set[str] = set()  # ids of documents that are not evicted
        if is_new:  # rows from before store.json was lost may be of another fingerprint
            self._folder.index.unlink(missing_ok=True)
        self._index = Index(self._folder, self._scan)
        if not self.read_only:
            self._folder.sweep(self._mend)
            self._make_room(0, spare=None)

    def _must_have_its_key(self) -> None:
        if self.fingerprint.get(KEY_NAME) != self._seal.key_id:
            its, ours = ("a key" if known else "no key" for known in (KEY_NAME in self.fingerprint, self._seal.key_id))
            raise StoreMismatch(
                f"the store in {self.folder} was written with {its} and opened with {ours if its != ours else 'another'}; "
                "give the hmac_key it was written with, or use another folder"
            )

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def read_only(self) -> bool:
        return self._folder.read_only

    def close(self) -> None:
        """Closes the index. States that were loaded stay usable."""
        with contextlib.suppress(StoreError):  # closed already, or a disk that is full: uses are hints
            self._write_uses()
        self._index.close()

    # --- states ---

    def must_be_writable(self) -> None:
        """Raises StoreError when nothing may be stored, before work is done for it."""
        if self.read_only:
            raise StoreError(f"the store in {self.folder} is read-only; open it with the right to write, or another one")

    def put(self, document: Document, cache: DocumentCache) -> StateRecord:
        """Stores a state. An intact one that is there already is left as it is, a damaged one replaced.

        Raises:
            StoreError: the store is read-only, or the state is larger than the disk budget.
            StoreUnreachable: the folder refuses; nothing is half-written.
            InvalidSetting: the cache is another document's, or its tensors do not fit each other.

        """
        self.must_be_writable()
        key = state_key(self._digest, document.id, cache.token_ids, cache.compression)
        record = self._put(key, document, cache)
        while not record.path.exists():  # removed by another process while this one thought it was there
            record = self._put(key, document, cache)
        self._make_room(0, spare=key)  # others may have written meanwhile
        return record

    def _put(self, key: str, document: Document, cache: DocumentCache) -> StateRecord:
        with self._folder.changing(key):
            state = self._intact(key)
            if state is None:
                header, tensors = new_state(document, cache, self.fingerprint, self._seal)
                blocks = file_blocks(header, tensors, self._seal)
                first = next(blocks)
                size = len(first) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
                self._make_room(size, spare=key)
                self._folder.write_state(key, itertools.chain([first], blocks))
            else:
                header, size = state.header, state.file_bytes
            nbytes = sum(layer.nbytes for layer in cache.layers)
            path = self._folder.state_path(key)
            entry = index_entry(path, replace(header, name=document.name), nbytes, size, document.text)
            try:
                replaced = self._index.add([entry])
            except StoreUnreachable:
                self._undo(key)
                raise
            for other in replaced:
                self._folder.state_path(other).unlink(missing_ok=True)
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
            with self._as_far_as_possible():
                self._index.drop([record.path.stem])
            raise StateMissing(f"{record.path}, state {compression!s}, is gone; ingest {document_id} again") from None
        if (state.header.document_id, state.header.compression) != (document_id, compression):
            raise damaged(record.path, "it is not the state that the index says")
        return state.cache()

    def count_use(self, record: StateRecord) -> None:
        """Notes that a state was used, for eviction. Not done by ``get``: states held in memory are used more often."""
        with self._lock:
            self._uses.append(record.path.stem)
            enough = len(self._uses) >= _USES_AT_ONCE
        if enough:
            with self._as_far_as_possible():
                self._write_uses()

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
            StoreError: the store is read-only.
            StoreUnreachable: the folder refuses.

        """
        self.must_be_writable()
        records = [
            state for state in self.document(document_id).states if compression is None or state.compression == compression
        ]
        if not records:
            raise StateMissing(f"document {document_id} has no state {compression!s} in {self.folder}")
        for record in records:
            self._remove(record)
        return sum(record.file_bytes for record in records)

    # --- documents ---

    def documents(self) -> list[DocumentRecord]:
        """All documents, in order of ingestion."""
        return self._index.documents()

    def document(self, document_id: str) -> DocumentRecord:
        """The document of exactly this id. Raises UnknownDocument."""
        return lookup.document(self._index, document_id, self.folder)

    def text(self, document_id: str) -> str:
        """A document's text, read from its newest state that is intact. Raises UnknownDocument, DamagedState."""
        paths = [record.path for record in reversed(self.document(document_id).states)]
        for path in paths:
            with contextlib.suppress(FileNotFoundError, DamagedState):
                return read_state(path, self._seal).text()
        raise damaged(paths[0], "its text cannot be read from any state")

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
        problems = [
            Problem(path, None, "being written, or left by a process that was killed: swept when the store is next opened")
            for path in self._folder.leftovers()
        ]
        states = set(self._folder.state_files())
        for path in self._folder.everything():
            if path not in states and not path.name.startswith((".tmp-", ".mark-")):
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
        self._make_room(0, spare=key)
        return entry.record

    # --- a budget of bytes ---

    def _make_room(self, size: int, spare: str | None) -> None:
        """Evicts until ``size`` more bytes fit the disk budget. ``spare`` is the key of the state being written."""
        if self.disk_budget is None:
            return
        if size > self.disk_budget:
            raise StoreError(
                f"a state of {size:,} bytes does not fit the disk budget of {self.disk_budget:,}; raise disk_budget, or "
                "keep less of the document"
            )
        over = self._index.file_bytes() + size - self.disk_budget
        if over <= 0:
            return
        self._write_uses()
        for record in self._index.giving_way(self._order):
            if over <= 0:
                return
            if record.path.stem != spare and record.document_id not in self.pinned and not self._spared(record):
                logger.info("evicting %s of document %s", record.compression, record.document_id)
                self._remove(record)
                over -= record.file_bytes
        if over > 0:
            self._warn(f"{self.folder} is {over:,} bytes over its disk budget: what is there is pinned, raise disk_budget")

    def _remove(self, record: StateRecord) -> None:
        # The file first: a row without a file is noticed, a file without a row could come back.
        with self._folder.changing(record.path.stem):
            try:
                record.path.unlink(missing_ok=True)
                if record.path.parent.is_dir():
                    sync_folder(record.path.parent)
            except OSError as error:
                raise StoreUnreachable(
                    f"{record.path} cannot be removed: {error.strerror}; check the folder's rights"
                ) from error
            self._index.drop([record.path.stem])

    def _write_uses(self) -> None:
        with self._lock:
            keys, self._uses = self._uses, []
        if keys:
            self._index.used(keys)

    # --- inside ---

    @contextlib.contextmanager
    def _as_far_as_possible(self) -> Iterator[None]:
        """For what a question does not depend on: a disk that refuses it is said to once."""
        try:
            yield
        except StoreUnreachable as error:
            self._warn(str(error))

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)

    def _mend(self, key: str) -> None:
        """Makes the index fit a state's file that a process was changing when it was killed."""
        with contextlib.suppress(DamagedState, StoreMismatch), self._as_far_as_possible():
            try:
                self._index.add([self._whole(self._folder.state_path(key))])
            except FileNotFoundError:
                self._index.drop([key])
            except StoreUnreachable:
                self._undo(key)
                raise

    def _undo(self, key: str) -> None:
        """Removes a file whose row cannot be written: nobody was told that it is stored, and its disk is full."""
        with contextlib.suppress(OSError):
            if not self._index.has(key):
                self._folder.state_path(key).unlink(missing_ok=True)

    def _read(self, path: Path) -> StateFile:
        state = read_state(path, self._seal)
        self._must_be_of_this_store(state)
        seen = (path, state.identity)
        if self._check and seen not in self._checked:
            state.check()
            self._checked.add(seen)
        return state

    def _must_be_of_this_store(self, state: StateFile) -> None:
        if state.header.fingerprint != self._digest:
            found = differences(state.header.settings, self.fingerprint)
            raise StoreMismatch(f"{state.path} was made with other settings ({found}); remove it and ingest again")

    def _intact(self, key: str) -> StateFile | None:
        with contextlib.suppress(FileNotFoundError, DamagedState, StoreMismatch):
            return self._read(self._folder.state_path(key))
        return None

    def _whole(self, path: Path) -> IndexEntry:
        state = read_state(path, self._seal)
        self._must_be_of_this_store(state)
        state.check()
        return index_entry(path, state.header, state.nbytes, state.file_bytes, state.text())

    def _scan(self) -> Iterator[IndexEntry]:
        """All states, for rebuilding the index: headers and texts are read, pairs are not."""
        for path in self._folder.state_files():
            try:
                state = read_state(path, self._seal)
                self._must_be_of_this_store(state)
                yield index_entry(path, state.header, state.nbytes, state.file_bytes, state.text())
            except (FileNotFoundError, StoreError) as error:
                logger.warning("left out of the index: %s", error)


def with_key(fingerprint: Mapping[str, str] | None, seal: Seal) -> Mapping[str, str] | None:
    """A fingerprint that also tells which key states are written with."""
    return fingerprint if fingerprint is None or seal.key_id is None else {**fingerprint, KEY_NAME: seal.key_id}


def check_disk_budget(budget: int | None, evict: str) -> tuple[int | None, str]:
    """Gives both back. Raises InvalidSetting unless they are a number of bytes (or None) and a known order."""
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise InvalidSetting(f"disk_budget must be a number of bytes, at least 1, or None for no limit, got {budget!r}")
    if evict not in EVICT:
        raise InvalidSetting(f"evict must be one of {', '.join(EVICT)}, got {evict!r}")
    return budget, evict


def index_entry(path: Path, header: Header, nbytes: int, file_bytes: int, text: str) -> IndexEntry:
    """What the index holds about a state file, from its header and text alone."""
    record = StateRecord(
        header.document_id, header.name, header.compression, header.tokens, header.pairs, header.full_pairs, nbytes,
        file_bytes, path, header.created,
    )  # fmt: skip
    return IndexEntry(path.stem, record, len(text), text[:ANCHOR], text[-ANCHOR:])
