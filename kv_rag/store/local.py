"""A folder of document states: safe to kill at any moment, shared by threads and processes without a lock server."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sqlite3
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from kv_rag.document import Compression, Document, DocumentCache, text_digest
from kv_rag.errors import (
    AmbiguousDocument,
    DamagedState,
    StateMissing,
    StoreError,
    StoreMismatch,
    UnknownDocument,
)
from kv_rag.store.format import (
    FORMAT,
    TEMPORARY,
    Header,
    compression_from_json,
    compression_json,
    damaged,
    read_header,
    read_state,
    read_text,
    state_key,
    write_state,
)
from kv_rag.store.index import DocumentRow, Index, StateRow, TextShape

logger = logging.getLogger(__name__)

_LEFTOVER_AGE = 3600.0  # seconds after which a temporary file has no writer any more
_PREFIX = re.compile(r"[0-9a-f]{6,32}")


@dataclass(frozen=True)
class StateRecord:
    """One stored state. ``nbytes`` counts its tensors, ``file_bytes`` its file."""

    document_id: str
    compression: Compression
    pairs: int
    full_pairs: int
    tokens: int
    nbytes: int
    file_bytes: int
    path: Path
    created: str


@dataclass(frozen=True)
class DocumentRecord:
    """One stored document; lengths in tokens and characters."""

    id: str
    name: str | None
    tokens: int
    characters: int


@dataclass(frozen=True)
class Problem:
    """Something ``verify`` found: the file, the document where known, what is wrong."""

    file: Path
    document_id: str | None
    what: str


class LocalStore:
    """Document states in a folder: ``store.json``, ``states/<aa>/<key>.safetensors``, and a derived ``index.sqlite``.

    Args:
        folder: made if missing, readable by its owner alone.
        fingerprint: what the states depend on, by name; None opens the store whatever wrote it, to list and remove.
        read_only: never write. A folder without write permission is opened so anyway.
        check: compare a state with its checksums when it is first read by this process.

    Raises:
        StoreError: the folder cannot be made, read, or is not a folder.
        StoreMismatch: it was written with another fingerprint or format; the message lists what differs.
    """

    def __init__(
        self, folder: str | Path, fingerprint: Mapping[str, str] | None, *, read_only: bool = False, check: bool = True
    ) -> None:
        self.folder = Path(folder)
        self._states = self.folder / "states"
        self._check = check
        self._checked: set[str] = set()
        try:
            if not read_only:
                self._make_folders()
            self.read_only = read_only or not os.access(self.folder, os.W_OK)
            self.fingerprint = self._agree_on_fingerprint(fingerprint)
            self._fingerprint_digest = hashlib.blake2b(
                json.dumps(self.fingerprint, sort_keys=True).encode(), digest_size=16
            ).hexdigest()
            self._index = self._open_index()
        except StoreError:
            raise
        except (OSError, sqlite3.Error) as error:
            raise self._refused("opened", error) from error
        if not self.read_only:
            self._sweep()

    def close(self) -> None:
        self._index.close()

    # --- opening ---

    def _make_folders(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise StoreError(f"store {self.folder} is a file, not a folder; name another folder")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._states.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            if not self.folder.is_dir():  # a readable folder without write permission is opened read-only
                raise

    def _agree_on_fingerprint(self, fingerprint: Mapping[str, str] | None) -> dict[str, str]:
        place = self.folder / "store.json"
        ours = {"format": FORMAT, "fingerprint": dict(fingerprint or {})}
        if not place.exists():
            if fingerprint is None:
                raise StoreError(f"there is no store in {self.folder}; ingest a document first, or name another folder")
            if not self.read_only:
                temporary = self.folder / f"{TEMPORARY}{os.getpid()}-{time.time_ns()}.json"
                temporary.write_text(json.dumps(ours, indent=1))
                temporary.chmod(0o600)
                try:
                    os.link(temporary, place)  # fails if another process was first: then its word counts
                except FileExistsError:
                    pass
                finally:
                    temporary.unlink()
            if not place.exists():
                return dict(fingerprint)
        try:
            theirs = json.loads(place.read_text())
            written, version = dict(theirs["fingerprint"]), str(theirs["format"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedState(f"{place} cannot be read ({error}); restore it, or use another folder") from error
        differing = [] if version == FORMAT else [f"format version ({version}, this library writes {FORMAT})"]
        if fingerprint is not None:
            names = sorted(set(written) | set(fingerprint))
            differing += [
                f"{name} ({_short(written.get(name))}, now {_short(fingerprint.get(name))})"
                for name in names
                if written.get(name) != fingerprint.get(name)
            ]
        if differing:
            raise StoreMismatch(
                f"store {self.folder} was written with another {', '.join(differing)}; "
                f"open it with the model and settings it was made with, or use another folder"
            )
        return written

    def _open_index(self) -> Index:
        place = self.folder / "index.sqlite"
        if self.read_only:
            try:
                index = Index(place, read_only=True)
                if not index.is_new:
                    return index
            except sqlite3.Error:
                pass
            index = Index(None)
        else:
            try:
                index = Index(place)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                logger.warning("the index of store %s is damaged (%s); rebuilding it from the files", self.folder, error)
                place.unlink(missing_ok=True)
                index = Index(place)
            place.chmod(0o600)
        if index.is_new:
            self._rebuild(index)
        return index

    def _rebuild(self, index: Index) -> None:
        headers = []
        for path in self._files():
            try:
                headers.append((path, read_header(path)))
            except (DamagedState, FileNotFoundError) as error:
                logger.warning("left out of the index: %s", error)
        for path, header in sorted(headers, key=lambda item: item[1].created):
            self._index_file(index, path, header)

    def _index_file(self, index: Index, path: Path, header: Header) -> None:
        try:
            text = read_text(path)
        except (DamagedState, FileNotFoundError) as error:
            logger.warning("left out of the index: %s", error)
            return
        document = DocumentRow(header.document_id, header.name, header.tokens, header.characters)
        nbytes = path.stat().st_size
        state = StateRow(
            path.stem, header.document_id, compression_json(header.compression), header.pairs, header.full_pairs,
            nbytes, nbytes, header.created,
        )  # fmt: skip
        index.add(document, text, state)

    def _files(self) -> list[Path]:
        return [
            path
            for path in self._states.glob("??/*.safetensors")
            if not path.name.startswith(TEMPORARY) and not path.is_symlink() and not path.parent.is_symlink()
        ]

    def _sweep(self) -> None:
        """Removes what writers that were killed left behind."""
        now = time.time()
        for path in [*self.folder.glob(f"{TEMPORARY}*"), *self._states.glob(f"??/{TEMPORARY}*")]:
            try:
                if now - path.lstat().st_mtime > _LEFTOVER_AGE:
                    path.unlink(missing_ok=True)
            except OSError as error:
                logger.debug("leftover %s stays: %s", path, error)

    # --- states ---

    def put(self, document: Document, cache: DocumentCache) -> StateRecord:
        """Stores a state; one that is there already is left as it is.

        Raises:
            StoreError: the folder cannot be written; nothing is half-written.
        """
        if self.read_only:
            raise StoreError(f"store {self.folder} is read-only; make the folder writable, or use another one")
        key = state_key(self._fingerprint_digest, document.id, cache.token_ids, cache.compression)
        path = self._path(key)
        created = datetime.now(timezone.utc).isoformat()
        try:
            if not path.exists():
                write_state(path, document, cache, self._fingerprint_digest, created)
            row = StateRow(
                key, document.id, compression_json(cache.compression), cache.pairs, cache.full_pairs, cache.nbytes,
                path.stat().st_size, created,
            )  # fmt: skip
            self._index.add(
                DocumentRow(document.id, document.name, cache.tokens, len(document.text)), document.text, row
            )
        except (OSError, sqlite3.Error) as error:
            raise self._refused("written", error) from error
        self._checked.add(key)
        return self._record(row, cache.tokens)

    def get(self, document_id: str, compression: Compression) -> DocumentCache:
        """A state, mapped from its file.

        Raises:
            StateMissing: no such state.
            DamagedState: the file is not what was written.
        """
        row = self._row(document_id, compression)
        if row is None:
            raise StateMissing(f"document {document_id} has no state {compression} in store {self.folder}")
        path = self._path(row.key)
        try:
            header, cache = read_state(path, check=self._check and row.key not in self._checked)
        except FileNotFoundError:
            if not self.read_only:
                self._index.drop(row.key)
            raise StateMissing(
                f"the file of document {document_id}, state {compression}, is gone from store {self.folder}; ingest it again"
            ) from None
        if (header.document_id, header.compression) != (document_id, compression) or (
            header.fingerprint != self._fingerprint_digest
        ):
            raise damaged(path, "it holds another document, state or model than its name says")
        self._checked.add(row.key)
        return cache

    def has(self, document_id: str, compression: Compression) -> bool:
        """Whether the state is stored: known to the index and its file there."""
        row = self._row(document_id, compression)
        return row is not None and self._path(row.key).is_file()

    def states(self, document_id: str) -> list[StateRecord]:
        """Stored states of a document, oldest first; empty for an unknown document."""
        document = self._index.document(document_id)
        return [self._record(row, document.tokens) for row in self._index.states(document_id)] if document else []

    def remove(self, document_id: str, compression: Compression | None = None) -> int:
        """Removes a document, or one of its states; returns bytes freed. States in use stay readable until let go.

        Raises:
            UnknownDocument, StateMissing: there is nothing to remove.
            StoreError: the folder cannot be written.
        """
        self.document(document_id)
        rows = [
            row
            for row in self._index.states(document_id)
            if compression is None or compression_from_json(row.compression) == compression
        ]
        if compression is not None and not rows:
            raise StateMissing(f"document {document_id} has no state {compression} in store {self.folder}")
        if self.read_only:
            raise StoreError(f"store {self.folder} is read-only; nothing was removed")
        freed = 0
        try:
            for row in rows:
                self._path(row.key).unlink(missing_ok=True)
                self._index.drop(row.key)
                freed += row.file_bytes
        except (OSError, sqlite3.Error) as error:
            raise self._refused("written", error) from error
        return freed

    # --- documents ---

    def documents(self) -> list[DocumentRecord]:
        """All documents, in order of ingestion."""
        return [DocumentRecord(row.id, row.name, row.tokens, row.characters) for row in self._index.documents()]

    def document(self, document_id: str) -> DocumentRecord:
        """The document with exactly this id.

        Raises:
            UnknownDocument.
        """
        row = self._index.document(document_id)
        if row is None:
            raise UnknownDocument(f"no document {document_id} in store {self.folder}; kv-rag list shows what there is")
        return DocumentRecord(row.id, row.name, row.tokens, row.characters)

    def text(self, document_id: str) -> str:
        """A document's text.

        Raises:
            UnknownDocument, DamagedState.
        """
        self.document(document_id)
        problem: Exception | None = None
        for row in self._index.states(document_id):
            try:
                return read_text(self._path(row.key))
            except (DamagedState, FileNotFoundError) as error:
                problem = error
        raise DamagedState(f"no readable state file holds the text of document {document_id}: {problem}")

    def resolve(self, reference: str) -> str:
        """The id that ``reference`` means: an id, the beginning of one (6 or more digits), a name, or a text.

        Raises:
            UnknownDocument, AmbiguousDocument.
        """
        reference = reference.strip()
        if self._index.document(reference) is not None:
            return reference
        by_text = text_digest(reference)
        if self._index.document(by_text) is not None:
            return by_text
        found = self._index.by_name(reference)
        if not found and _PREFIX.fullmatch(reference):
            found = self._index.by_prefix(reference)
        if len(found) > 1:
            raise AmbiguousDocument(
                f"{_shown(reference)} fits several documents: {', '.join(found)}; give one of these ids"
            )
        if not found:
            raise UnknownDocument(
                f"no document {_shown(reference)} in store {self.folder}: not an id, a name or an ingested text; "
                f"ingest it first, or see kv-rag list"
            )
        return found[0]

    def candidates(self, anchors: Collection[str]) -> dict[str, list[TextShape]]:
        """Documents that begin with one of ``anchors``, by anchor; see ``kv_rag.prompt``."""
        return self._index.candidates(anchors)

    def nbytes_on_disk(self, document_id: str | None = None) -> int:
        """Bytes of state files, of one document or of all."""
        ids = [document_id] if document_id is not None else [row.id for row in self._index.documents()]
        return sum(row.file_bytes for each in ids for row in self._index.states(each))

    def verify(self) -> list[Problem]:
        """Reads every file, compares every checksum, and holds the index against the files. Changes nothing."""
        problems = []
        on_disk = set()
        for path in self._files():
            on_disk.add(path.stem)
            document_id = None
            try:
                document_id = read_header(path).document_id
                read_state(path, check=True)
                read_text(path)
            except FileNotFoundError:
                continue
            except DamagedState as error:
                problems.append(Problem(path, document_id, str(error)))
        known = self._index.keys()
        problems += [Problem(self._path(key), None, "in the index, but the file is gone") for key in known - on_disk]
        problems += [Problem(self._path(key), None, "a state file the index lacks") for key in on_disk - known]
        problems += [
            Problem(path, None, "left behind by a writer that did not finish")
            for path in self._states.glob(f"??/{TEMPORARY}*")
            if time.time() - path.lstat().st_mtime > _LEFTOVER_AGE
        ]
        return problems

    # --- inside ---

    def _path(self, key: str) -> Path:
        return self._states / key[:2] / f"{key}.safetensors"

    def _row(self, document_id: str, compression: Compression) -> StateRow | None:
        wanted = compression_json(compression)
        return next((row for row in self._index.states(document_id) if row.compression == wanted), None)

    def _record(self, row: StateRow, tokens: int) -> StateRecord:
        return StateRecord(
            row.document_id, compression_from_json(row.compression), row.pairs, row.full_pairs, tokens, row.nbytes,
            row.file_bytes, self._path(row.key), row.created,
        )  # fmt: skip

    def _refused(self, what: str, error: Exception) -> StoreError:
        return StoreError(
            f"store {self.folder} cannot be {what} ({error}); check the folder's permissions and the free space, "
            f"or use another folder"
        )


def _short(value: str | None) -> str:
    return "none" if value is None else value if len(value) <= 12 else f"{value[:8]}…"


def _shown(reference: str) -> str:
    return repr(reference if len(reference) <= 60 else reference[:57] + "…")
