"""The index: an SQLite file derived from the state files, so that finding one costs the same in any store.

It may be removed at any time: it is rebuilt from the files when it is missing, damaged or of another version.
Texts are held as bytes (names as JSON), because SQLite refuses the lone surrogates that Python strings may hold.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kv_rag.document import Compression
from kv_rag.errors import StoreError, StoreUnreachable
from kv_rag.store.folder import Folder
from kv_rag.store.identity import compression_json, parse_compression
from kv_rag.store.records import ANCHOR, DocumentRecord, IndexEntry, StateRecord, TextShape

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

INDEX_VERSION = 2
BUSY_SECONDS = 30.0  # how long one process waits for another's write
_CHUNK = 500  # anchors per query

_SCHEMA = (
    """CREATE TABLE documents (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, tokens INTEGER NOT NULL,
        characters INTEGER NOT NULL, anchor BLOB, tail BLOB NOT NULL)""",
    """CREATE TABLE states (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, document_id TEXT NOT NULL,
        compression TEXT NOT NULL, pairs INTEGER NOT NULL, full_pairs INTEGER NOT NULL, nbytes INTEGER NOT NULL,
        file_bytes INTEGER NOT NULL, created TEXT NOT NULL, uses INTEGER NOT NULL DEFAULT 0, last_use INTEGER NOT NULL,
        UNIQUE (document_id, compression))""",
    "CREATE INDEX documents_by_anchor ON documents (anchor) WHERE anchor IS NOT NULL",
    "CREATE INDEX documents_by_name ON documents (name)",
    "CREATE INDEX states_by_use ON states (last_use, file_bytes)",
)
_STATES = """SELECT s.document_id, d.name, s.compression, d.tokens, s.pairs, s.full_pairs, s.nbytes, s.file_bytes, s.key,
    s.created FROM states s JOIN documents d ON d.id = s.document_id"""
_NEXT_USE = "(SELECT coalesce(max(last_use), 0) + 1 FROM states)"


# Orders in which states give way. last_use counts uses, not seconds: clocks jump.
LRU, LEAST_USEFUL = "lru", "least_useful"
_ORDERS = {
    LRU: "s.last_use",
    # Tokens that need no reading, for every byte: large states of short documents go first, those never asked for too.
    LEAST_USEFUL: "(s.uses + 1.0) * d.tokens / s.file_bytes, s.last_use",
}


class Index:
    """All rows of one store. One connection behind a lock, for any number of threads.

    Args:
        folder: the store's folder.
        scan: reads every state file; called only to rebuild the index.

    Raises:
        StoreUnreachable: SQLite cannot open or make the index.

    """

    def __init__(self, folder: Folder, scan: Callable[[], Iterable[IndexEntry]]) -> None:
        self._folder = folder
        self._scan = scan
        self._lock = threading.RLock()
        self._closed = False
        self._connection: sqlite3.Connection | None = None
        self._inode: int | None = None
        self._run(lambda connection: None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._disconnect()

    # --- reading ---

    def state(self, document_id: str, compression: Compression) -> StateRecord | None:
        wanted = (document_id, compression_json(compression))
        return next(iter(self._states("WHERE s.document_id = ? AND s.compression = ?", wanted)), None)

    def has(self, key: str) -> bool:
        return bool(self._rows("SELECT 1 FROM states WHERE key = ?", (key,), tuple))

    def states(self, document_id: str) -> list[StateRecord]:
        return self._states("WHERE s.document_id = ? ORDER BY s.seq", (document_id,))

    def every_state(self) -> list[StateRecord]:
        return self._states("ORDER BY s.seq", ())

    def documents(self, document_id: str | None = None) -> list[DocumentRecord]:
        """One document (or none, when unknown) or all, in order of ingestion."""
        where, arguments = ("WHERE id = ?", (document_id,)) if document_id is not None else ("", ())
        rows = self._rows(f"SELECT id, name, tokens, characters FROM documents {where} ORDER BY seq", arguments, _document)
        states: dict[str, list[StateRecord]] = {row.id: [] for row in rows}
        for record in self.every_state() if document_id is None else self.states(document_id):
            if record.document_id in states:
                states[record.document_id].append(record)
        return [replace(row, states=tuple(states[row.id])) for row in rows if states[row.id]]

    def named(self, name: str) -> list[str]:
        return [row[0] for row in self._rows("SELECT id FROM documents WHERE name = ?", (json.dumps(name),), tuple)]

    def beginning_with(self, prefix: str) -> list[str]:
        query = "SELECT id FROM documents WHERE id >= ? AND id < ?"
        return [row[0] for row in self._rows(query, (prefix, prefix + "g"), tuple)]

    def candidates(self, anchors: Collection[str]) -> dict[str, list[TextShape]]:
        wanted = [_blob(anchor) for anchor in anchors]
        found: dict[str, list[TextShape]] = {}
        for begin in range(0, len(wanted), _CHUNK):
            chunk = wanted[begin : begin + _CHUNK]
            marks = ",".join("?" * len(chunk))
            query = f"SELECT anchor, id, characters, tail FROM documents WHERE anchor IN ({marks})"
            for anchor, shape in self._rows(query, chunk, _shape):
                found.setdefault(anchor, []).append(shape)
        return found

    def giving_way(self, order: str) -> list[StateRecord]:
        """All states, the one to be evicted first before the others. ``order`` is LRU or LEAST_USEFUL."""
        return self._states(f"ORDER BY {_ORDERS[order]}", ())

    def file_bytes(self) -> int:
        return int(self._rows("SELECT coalesce(sum(file_bytes), 0) FROM states", (), tuple)[0][0])

    # --- writing ---

    def add(self, entries: Iterable[IndexEntry]) -> list[str]:
        """Adds or replaces rows. Returns the keys of states that were replaced by ones under another key."""

        def work(connection: sqlite3.Connection) -> list[str]:
            with _transaction(connection):
                return [key for entry in entries for key in _insert(connection, entry)]

        return self._run(work)

    def drop(self, keys: Iterable[str]) -> None:
        """Removes the rows of states whose files are gone, and the documents' that have none left.

        Looks at the files under the lock: one that another process has put there meanwhile keeps its row. Nothing happens
        in a read-only store.
        """
        if self._folder.read_only:
            return

        def work(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                for key in keys:
                    if os.path.lexists(self._folder.state_path(key)):
                        continue
                    owners = connection.execute("SELECT document_id FROM states WHERE key = ?", (key,)).fetchall()
                    connection.execute("DELETE FROM states WHERE key = ?", (key,))
                    left = "SELECT 1 FROM states WHERE document_id = id"
                    connection.executemany(f"DELETE FROM documents WHERE id = ? AND NOT EXISTS ({left})", owners)

        self._run(work)

    def used(self, keys: Iterable[str]) -> None:
        """Counts one use of each state, the last one used last. Nothing happens in a read-only store."""
        if self._folder.read_only:
            return

        def work(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                for key in keys:
                    connection.execute(f"UPDATE states SET uses = uses + 1, last_use = {_NEXT_USE} WHERE key = ?", (key,))

        self._run(work)

    # --- the connection ---

    def _states(self, where: str, arguments: Sequence[Any]) -> list[StateRecord]:
        return self._rows(f"{_STATES} {where}", arguments, self._state)

    def _state(self, row: Sequence[Any]) -> StateRecord:
        return StateRecord(
            row[0], json.loads(row[1]), parse_compression(row[2]), row[3], row[4], row[5], row[6], row[7],
            self._folder.state_path(row[8]), row[9],
        )  # fmt: skip

    def _rows(self, query: str, arguments: Sequence[Any], parse: Callable[[Sequence[Any]], Result]) -> list[Result]:
        def work(connection: sqlite3.Connection) -> list[Result]:
            try:
                return [parse(row) for row in connection.execute(query, arguments)]
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise sqlite3.DatabaseError(f"a row that was not written here: {error}") from error

        return self._run(work)

    def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Runs ``work``; when SQLite finds its file damaged, once more after rebuilding it."""
        with self._lock:
            try:
                return work(self._connected())
            except sqlite3.DatabaseError as error:
                if not _is_damage(error) or self._folder.read_only:
                    raise self._failure(error) from error
                logger.warning("%s is damaged (%s) and is rebuilt from the state files", self._folder.index, error)
            try:
                self._discard()
                return work(self._connected())
            except sqlite3.DatabaseError as error:
                raise self._failure(error) from error

    def _failure(self, error: sqlite3.Error) -> StoreUnreachable:
        return StoreUnreachable(
            f"the index {self._folder.index} cannot be used: {error}; if no other process holds it and there is space, "
            "remove it: it is rebuilt from the state files"
        )

    def _connected(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreError(f"the store in {self._folder.path} has been closed; open it again")
        if self._connection is not None and self._inode is not None and self._inode != _inode(self._folder.index):
            self._disconnect()  # removed or rebuilt by somebody else: rows written here would be lost
        if self._connection is None:
            self._connection = self._open_to_read() if self._folder.read_only else self._open_to_write()
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._inode = None

    def _open_to_write(self) -> sqlite3.Connection:
        path = self._folder.index
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o600))
        except OSError as error:
            raise StoreUnreachable(f"{path} cannot be opened: {error.strerror}; it must be a file to write to") from error
        connection = _connect(str(path))
        try:
            self._inode = _inode(path)
            connection.execute("PRAGMA synchronous = NORMAL")  # the states are the data; an index can be rebuilt
            if not _is_ours(connection):
                self._fill(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _open_to_read(self) -> sqlite3.Connection:
        """The index file as it is, or one built in memory where that cannot be used and may not be mended."""
        path = self._folder.index
        if path.is_file() and not path.is_symlink():
            connection = _connect(f"{path.as_uri()}?mode=ro")
            try:
                if _is_ours(connection):
                    self._inode = _inode(path)
                    return connection
            except sqlite3.DatabaseError:
                logger.info("%s cannot be used; indexing in memory", path)
            connection.close()
        connection = _connect(":memory:")
        self._fill(connection)
        return connection

    def _fill(self, connection: sqlite3.Connection) -> None:
        """Builds the index from the files in one transaction: other processes see nothing or all of it."""
        with _transaction(connection):
            if _is_ours(connection):  # another process was faster
                return
            for statement in _SCHEMA:
                connection.execute(statement)
            for entry in sorted(self._scan(), key=lambda entry: (entry.record.created, entry.key)):
                _insert(connection, entry)
            connection.execute(f"PRAGMA user_version = {INDEX_VERSION}")

    def _discard(self) -> None:
        """Removes a damaged index file, unless another process has already put a new one in its place."""
        inode = self._inode
        self._disconnect()
        path = self._folder.index
        if inode is None or inode == _inode(path):
            for name in (path, path.with_name(f"{path.name}-journal")):
                with contextlib.suppress(FileNotFoundError):
                    name.unlink()


def _insert(connection: sqlite3.Connection, entry: IndexEntry) -> list[str]:
    """Adds one state and its document. Returns the key of the state whose place it takes, if that is another one."""
    record, compression = entry.record, compression_json(entry.record.compression)
    connection.execute(
        "INSERT INTO documents (id, name, tokens, characters, anchor, tail) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET tokens = excluded.tokens, characters = excluded.characters, "
        "anchor = excluded.anchor, tail = excluded.tail, "
        "name = CASE excluded.name WHEN 'null' THEN name ELSE excluded.name END",
        (record.document_id, json.dumps(record.name), record.tokens, entry.characters,
         _blob(entry.head) if len(entry.head) >= ANCHOR else None, _blob(entry.tail)),
    )  # fmt: skip
    replaced = connection.execute(
        "SELECT key FROM states WHERE document_id = ? AND compression = ? AND key != ?",
        (record.document_id, compression, entry.key),
    ).fetchall()
    connection.execute("DELETE FROM states WHERE document_id = ? AND compression = ? AND key != ?",
                       (record.document_id, compression, entry.key))  # fmt: skip
    connection.execute(
        "INSERT INTO states (key, document_id, compression, pairs, full_pairs, nbytes, file_bytes, created, last_use) "
        f"VALUES (?, ?, ?, ?, ?, ?, ?, ?, {_NEXT_USE}) ON CONFLICT (key) DO UPDATE SET document_id = excluded.document_id, "
        "compression = excluded.compression, pairs = excluded.pairs, full_pairs = excluded.full_pairs, "
        "nbytes = excluded.nbytes, file_bytes = excluded.file_bytes, created = excluded.created",
        (entry.key, record.document_id, compression, record.pairs, record.full_pairs, record.nbytes,
         record.file_bytes, record.created),
    )  # fmt: skip
    return [row[0] for row in replaced]


def _connect(database: str) -> sqlite3.Connection:
    return sqlite3.connect(
        database, timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None, uri=database.startswith("file:")
    )


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    # IMMEDIATE: waits for the other writer now; a read lock upgraded later could only fail.
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _is_ours(connection: sqlite3.Connection) -> bool:
    """True for our tables, False for an empty file. Anything else, such as a view that never ends, is not used."""
    connection.execute("PRAGMA trusted_schema = OFF")
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    query = "SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite!_%' ESCAPE '!'"
    schema = sorted(str(row[0]) for row in connection.execute(query))
    if version == INDEX_VERSION and schema == sorted(_SCHEMA):
        return True
    if schema or version:
        raise sqlite3.DatabaseError("it has other tables")
    return False


def _document(row: Sequence[Any]) -> DocumentRecord:
    return DocumentRecord(row[0], json.loads(row[1]), row[2], row[3], ())


def _shape(row: Sequence[Any]) -> tuple[str, TextShape]:
    return _text(row[0]), TextShape(row[1], row[2], _text(row[3]))


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    # "Malformed" and "not a database" come as the base class itself; locked, full and read-only as OperationalError.
    return type(error) is sqlite3.DatabaseError or "no such" in str(error)


def _inode(path: os.PathLike[str]) -> int | None:
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None


def _blob(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(blob: bytes) -> str:
    return blob.decode("utf-8", "surrogatepass")
