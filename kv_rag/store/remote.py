"""States in a bucket, shared by any number of machines, with a folder on the local disk in front.

The bucket is the store; the folder holds what was read from it or not yet written to it, the text of every document
and an index of all states, so that finding documents costs no request and a question can be answered without network:

``<cache>/<url>/store.json``                 the bucket's description when it was last read
``<cache>/<url>/<fingerprint>/states``       states, as in any local store; may be removed at any time but for:
``<cache>/<url>/<fingerprint>/waiting``      empty files named after states that the bucket does not have yet
``<cache>/<url>/<fingerprint>/texts``        documents' texts
``<cache>/<url>/<fingerprint>/remote.sqlite``  what the bucket holds
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kv_rag.document import Compression, Document, DocumentCache, text_digest
from kv_rag.errors import DamagedState, StateMissing, StoreError, StoreUnreachable, UnknownDocument
from kv_rag.store import lookup
from kv_rag.store.bucket import Bucket
from kv_rag.store.folder import (
    GARBLED_DESCRIPTION,
    Folder,
    compare_descriptions,
    description,
    make_private,
    parse_description,
    write_private,
)
from kv_rag.store.format import StateFile, header_bytes, read_beginning, read_state
from kv_rag.store.identity import fingerprint_digest
from kv_rag.store.index import LRU, Index
from kv_rag.store.local import LocalStore, index_entry, with_key
from kv_rag.store.records import DocumentRecord, IndexEntry, Problem, StateRecord, TextShape
from kv_rag.store.seal import Seal

logger = logging.getLogger(__name__)

BEGINNING = 64 << 10  # bytes of a state read at first: the header of most models
AT_ONCE = 64  # states whose headers and texts are asked for together
# A document that is not known may have come from another machine, but listing a large bucket takes long: looking again
# may take a twentieth of the time.
SHARE_OF_TIME = 20


class RemoteStore:
    """Document states at any URL that fsspec knows. Used as ``LocalStore`` is.

    A state that cannot be written to the bucket now waits in the local folder and is written when the bucket answers
    again. A state that cannot be read raises StoreUnreachable.

    Args:
        url: such as ``s3://bucket/prefix``.
        fingerprint: what the states depend on, by name; None opens the store whatever wrote it.
        cache: folder in front; default ``$KV_RAG_CACHE/remote``, else ``~/.cache/kv_rag/remote``.
        read_only: write nothing to the bucket. The local folder is written to all the same.
        check: compare a state with its checksums when it is first read from the local folder. What comes from the
            bucket is always compared.
        hmac_key: as in ``LocalStore``, for the bucket and the local folder.
        disk_budget, evict: of the local folder; what it evicts stays in the bucket.
        options: for fsspec, on top of its own configuration (files and variables such as ``FSSPEC_S3_ENDPOINT_URL``).

    Raises:
        MissingExtra: fsspec, or its package for this kind of URL, is not installed.
        StoreError: there is no store and none may be made, or the local folder cannot be used.
        StoreMismatch: it was made with another fingerprint or format; the message lists every difference.

    """

    def __init__(
        self,
        url: str,
        fingerprint: Mapping[str, str] | None,
        *,
        cache: str | Path | None = None,
        read_only: bool = False,
        check: bool = True,
        hmac_key: bytes | str | None = None,
        disk_budget: int | None = None,
        evict: str = LRU,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._seal = Seal.of(hmac_key)
        fingerprint = with_key(fingerprint, self._seal)
        self.read_only = read_only
        self._bucket = Bucket(url, options)
        self._home = (Path(cache) if cache is not None else _default_cache()).expanduser().absolute() / _digest(self.url)
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._described = False
        self._lock = threading.RLock()
        self.fingerprint = self._describe(fingerprint)
        self._digest = fingerprint_digest(self.fingerprint)
        folder = self._home / self._digest[:16]
        self._local = LocalStore(
            folder, self.fingerprint, check=check, hmac_key=hmac_key, disk_budget=disk_budget, evict=evict,
            spared=lambda record: (folder / "waiting" / record.path.stem).exists(),
        )  # fmt: skip
        self._files = Folder(self._local.folder, read_only=False)
        self._files.index = self._local.folder / "remote.sqlite"
        self._index = Index(self._files, lambda: ())
        self._waiting, self._texts = self.folder / "waiting", self.folder / "texts"
        make_private(self._waiting)
        make_private(self._texts)
        self._foreign: set[str] = set()  # states of other fingerprints, and damaged ones: not to be read again
        self._looked, self._look_seconds = 0.0, 0.0
        with contextlib.suppress(StoreUnreachable):  # said once, by the bucket
            self.refresh()

    @property
    def url(self) -> str:
        return self._bucket.url

    @property
    def folder(self) -> Path:
        """The local folder in front of the bucket."""
        return self._local.folder

    def close(self) -> None:
        """Closes the indexes. States that were loaded stay usable."""
        self._local.close()
        self._index.close()

    # --- states ---

    def must_be_writable(self) -> None:
        """Raises StoreError when nothing may be stored, before work is done for it."""
        if self.read_only:
            raise StoreError(f"the store at {self.url} is read-only; open it with the right to write, or another one")

    def put(self, document: Document, cache: DocumentCache) -> StateRecord:
        """Stores a state in the local folder and, unless it is there, in the bucket; it waits when that does not answer.

        Raises:
            StoreError: the store is read-only, or the local folder refuses.
            StoreMismatch: the bucket, which did not answer before, is of another model.
            InvalidSetting: the cache is another document's, or its tensors do not fit each other.

        """
        self.must_be_writable()
        record = self._local.put(document, cache)
        self._keep_text(document.id, document.text)
        known = self._index.state(document.id, cache.compression)
        if known is None or known.path != record.path:
            write_private(self._waiting / record.path.stem, b"")
        nbytes = sum(layer.nbytes for layer in cache.layers)
        header = replace(read_state(record.path, self._seal).header, name=document.name)
        self._index.add([index_entry(record.path, header, nbytes, record.file_bytes, document.text)])
        with contextlib.suppress(StoreUnreachable):
            self._write_waiting()
        return record

    def get(self, document_id: str, compression: Compression) -> DocumentCache:
        """A state, from the local folder or brought there first.

        Raises:
            StateMissing: it is not stored.
            DamagedState: what the bucket holds is not what was written.
            StoreUnreachable: the bucket does not answer, and the state is not in the local folder.

        """
        record = self._index.state(document_id, compression)
        if record is None:
            raise StateMissing(f"document {document_id} has no state {compression!s} in {self.url}; ingest it")
        try:
            return self._local.get(document_id, compression)
        except StateMissing:
            pass
        except DamagedState as error:
            logger.warning("%s; it is read from %s again", error, self.url)
        self._bring(record)
        return self._local.get(document_id, compression)

    @property
    def pinned(self) -> set[str]:
        """Ids of documents that the local folder does not evict."""
        return self._local.pinned

    @property
    def disk_budget(self) -> int | None:
        return self._local.disk_budget

    def count_use(self, record: StateRecord) -> None:
        """Notes that a state was used, for eviction from the local folder."""
        self._local.count_use(record)

    def has(self, document_id: str, compression: Compression) -> bool:
        """Whether the state was in the bucket when that was last looked at, or waits to be written there."""
        record = self._index.state(document_id, compression)
        return record is not None and (record.path.is_file() or not (self._waiting / record.path.stem).exists())

    def states(self, document_id: str) -> list[StateRecord]:
        """A document's states, newest last; empty when it is unknown."""
        return self._index.states(document_id)

    def remove(self, document_id: str, compression: Compression | None = None) -> int:
        """Removes a document or one of its states from the bucket and here; returns the bytes freed there.

        Raises:
            UnknownDocument, StateMissing: there is nothing to remove.
            StoreUnreachable: the bucket does not answer; what it still holds is still known.
            StoreError: the store is read-only.

        """
        self.must_be_writable()
        states = self.document(document_id).states
        records = [state for state in states if compression is None or state.compression == compression]
        if not records:
            raise StateMissing(f"document {document_id} has no state {compression!s} in {self.url}")
        for record in records:
            self._bucket.remove(_name(record.path.stem))
            self._forget(record)
        if len(records) == len(states):
            self._text_file(document_id).unlink(missing_ok=True)
        return sum(record.file_bytes for record in records)

    # --- documents ---

    def documents(self) -> list[DocumentRecord]:
        """All documents of the bucket when it was last looked at, and those that wait to be written there."""
        return self._index.documents()

    def document(self, document_id: str) -> DocumentRecord:
        """The document of exactly this id. Raises UnknownDocument."""
        try:
            return lookup.document(self._index, document_id, self.url)
        except UnknownDocument:
            if not self._look_again():
                raise
        return lookup.document(self._index, document_id, self.url)

    def text(self, document_id: str) -> str:
        """A document's text, which needs no network. Raises UnknownDocument, DamagedState, StoreUnreachable."""
        record = self.document(document_id)
        with contextlib.suppress(FileNotFoundError, ValueError):
            text = self._text_file(document_id).read_bytes().decode("utf-8", "surrogatepass")
            if text_digest(text) == document_id:
                return text
            self._text_file(document_id).unlink()
        self.get(document_id, record.states[-1].compression)
        return self._local.text(document_id)

    def resolve(self, reference: str) -> str:
        """The id meant by an id, the beginning of one (6 digits or more), a name or a text.

        Raises:
            UnknownDocument, AmbiguousDocument: none or several fit.

        """
        try:
            return lookup.resolve(self._index, reference, self.url)
        except UnknownDocument:
            if not self._look_again():
                raise
        return lookup.resolve(self._index, reference, self.url)

    def candidates(self, anchors: Collection[str]) -> dict[str, list[TextShape]]:
        """The documents that begin with each of ``anchors`` (``ANCHOR`` characters); the rest are left out."""
        return self._index.candidates(anchors)

    # --- the whole ---

    def nbytes_on_disk(self, document_id: str | None = None) -> int:
        """Bytes of the states of one document (UnknownDocument) or of all, in the bucket or on the way there."""
        if document_id is not None:
            return sum(state.file_bytes for state in self.document(document_id).states)
        return self._index.file_bytes()

    def refresh(self) -> None:
        """Looks at what the bucket holds now, and writes to it what waits here.

        Raises:
            StoreUnreachable: it does not answer.

        """
        started = time.monotonic()
        # Known and waiting are read before the bucket: what another process adds meanwhile is then not taken for gone.
        known = {record.path.stem: record for record in self._index.every_state()}
        waiting = self._waiting_keys()
        self._must_be_described()
        there = self._bucket.states()
        for key in known.keys() - there.keys() - waiting:
            self._forget(known[key])
        new = sorted(there.keys() - known.keys() - self._foreign)
        for begin in range(0, len(new), AT_ONCE):
            entries = list(self._read_entries({key: there[key] for key in new[begin : begin + AT_ONCE]}))
            self._index.add(entries)  # a transaction, which should not wait for the network
        if not self.read_only:
            self._write_waiting()
        self._looked, self._look_seconds = time.monotonic(), time.monotonic() - started

    def verify(self) -> list[Problem]:
        """Reads everything, in the local folder and in the bucket. Raises StoreUnreachable."""
        problems = [problem for problem in self._local.verify() if problem.file.exists()]
        self.refresh()
        for key, _ in sorted(self._bucket.states().items()):
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".tmp-") as folder:
                copy = Path(folder) / f"{key}.safetensors"
                try:
                    with copy.open("xb") as file:
                        file.writelines(self._bucket.blocks(_name(key)))
                    read_state(copy, self._seal).check()
                except StateMissing:  # removed meanwhile
                    continue
                except DamagedState as error:
                    what = str(error).replace(str(copy), f"{self.url}/{_name(key)}")
                    owner = next((state.document_id for state in self._index.every_state() if state.path.stem == key), None)
                    problems.append(Problem(self._files.state_path(key), owner, what))
        return problems

    # --- inside ---

    def _describe(self, fingerprint: Mapping[str, str] | None) -> dict[str, str]:
        """Makes or compares the bucket's description. When it does not answer, the one it had when last read counts."""
        copy = self._home / "store.json"
        try:
            there = self._described_there(fingerprint)
        except StoreUnreachable:
            if fingerprint is not None:
                return dict(fingerprint)
            if not copy.exists():
                raise
            there = self._parsed(copy.read_bytes())
        compare_descriptions(self.url, there, fingerprint)
        return {name: value for name, value in there.items() if name != "format version"}

    def _described_there(self, fingerprint: Mapping[str, str] | None) -> dict[str, str]:
        """The bucket's description, written first if it has none."""
        for _ in range(2):
            try:
                content = self._bucket.read("store.json")
            except FileNotFoundError:
                if fingerprint is None or self.read_only:
                    raise StoreError(f"there is no store at {self.url}; ingest documents first or name another") from None
                with tempfile.NamedTemporaryFile(dir=self._home, prefix=".tmp-") as file:
                    file.write(description(fingerprint))
                    file.flush()
                    self._bucket.write_if_absent("store.json", Path(file.name))
                continue
            there = self._parsed(content)
            write_private(self._home / "store.json", content)
            self._described = True
            return there
        raise StoreError(f"{self.url}/store.json is gone as soon as it is written; see whether somebody removes it")

    def _parsed(self, content: bytes) -> dict[str, str]:
        try:
            return parse_description(content)
        except GARBLED_DESCRIPTION as error:
            raise DamagedState(
                f"{self.url}/store.json is damaged; remove it to open the store with the present settings (states made "
                "with others will not be used), or use another place"
            ) from error

    def _must_be_described(self) -> None:
        """A bucket that did not answer when the store was opened has yet to show what it is."""
        if not self._described:
            compare_descriptions(self.url, self._described_there(self.fingerprint), self.fingerprint)

    def _look_again(self) -> bool:
        """Whether the bucket was looked at once more."""
        if time.monotonic() - self._looked < SHARE_OF_TIME * self._look_seconds:
            return False
        with contextlib.suppress(StoreUnreachable):
            self.refresh()
            return True
        return False

    def _read_entries(self, sizes: Mapping[str, int]) -> Iterator[IndexEntry]:
        """What the index holds about states in the bucket, from their headers and texts alone."""
        states: list[tuple[str, StateFile, tuple[int, int]]] = []
        first = self._bucket.read_ranges([(_name(key), 0, min(size, BEGINNING)) for key, size in sizes.items()])
        for (key, size), beginning in zip(sizes.items(), first, strict=True):
            with self._left_out(key):
                if beginning is None:
                    continue
                length = 8 + _header_length(beginning, size)
                if length > len(beginning):
                    beginning = self._bucket.read(_name(key), 0, length)
                state, place = read_beginning(f"{self.url}/{_name(key)}", beginning, size, self._seal)
                if state.header.fingerprint != self._digest:
                    self._foreign.add(key)
                    continue
                states.append((key, state, place))
        texts = self._bucket.read_ranges([(_name(key), *place) for key, _, place in states])
        for (key, state, _), content in zip(states, texts, strict=True):
            with self._left_out(key):
                if content is None:
                    continue
                text = content.decode("utf-8", "surrogatepass")
                if text_digest(text) != state.header.document_id:
                    raise DamagedState(f"{state.path} is damaged: its text is not the document's; remove it")
                self._keep_text(state.header.document_id, text)
                yield index_entry(self._files.state_path(key), state.header, state.nbytes, state.file_bytes, text)

    @contextlib.contextmanager
    def _left_out(self, key: str) -> Iterator[None]:
        try:
            yield
        except (DamagedState, FileNotFoundError, UnicodeDecodeError) as error:
            self._foreign.add(key)
            logger.warning("left out of the index: %s", error)

    def _bring(self, record: StateRecord) -> None:
        """Copies a state from the bucket to the local folder, where it is checked."""
        key = record.path.stem
        try:
            self._files.write_state(key, self._bucket.blocks(_name(key)))
            self._local.adopt(key)
        except StateMissing:
            self._forget(record)
            raise
        except DamagedState as error:
            raise DamagedState(str(error).replace(str(record.path), f"{self.url}/{_name(key)}")) from error

    def _forget(self, record: StateRecord) -> None:
        """Drops a state from the local folder and from what the bucket is said to hold."""
        with contextlib.suppress(UnknownDocument, StateMissing):
            self._local.remove(record.document_id, record.compression)
        record.path.unlink(missing_ok=True)
        self._index.drop([record.path.stem])
        (self._waiting / record.path.stem).unlink(missing_ok=True)

    def _waiting_keys(self) -> set[str]:
        return {name for name in os.listdir(self._waiting) if len(name) == 40}

    def _write_waiting(self) -> None:
        """Writes to the bucket what it does not have yet."""
        with self._lock:
            for key in self._waiting_keys():
                self._must_be_described()
                with contextlib.suppress(FileNotFoundError):  # removed, or evicted: there is nothing left to write
                    self._bucket.write_if_absent(_name(key), self._files.state_path(key))
                (self._waiting / key).unlink(missing_ok=True)

    def _text_file(self, document_id: str) -> Path:
        return self._texts / document_id[:2] / document_id

    def _keep_text(self, document_id: str, text: str) -> None:
        path = self._text_file(document_id)
        if not path.exists():
            make_private(path.parent)
            write_private(path, text.encode("utf-8", "surrogatepass"))


def _name(key: str) -> str:
    return f"states/{key[:2]}/{key}.safetensors"


def _digest(url: str) -> str:
    return hashlib.blake2b(url.encode(), digest_size=8).hexdigest()


def _default_cache() -> Path:
    home = os.environ.get("KV_RAG_CACHE")
    return (Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kv_rag") / "remote"


def _header_length(beginning: bytes, file_bytes: int) -> int:
    try:
        return header_bytes(beginning[:8], file_bytes)
    except ValueError as error:
        raise DamagedState(f"not a state: {error}") from error
