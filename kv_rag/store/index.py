"""The index: what is stored, found in one lookup. Derived from the state files, and rebuilt from them when lost."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ANCHOR = 32  # characters; see kv_rag.prompt
VERSION = 1
_BATCH = 500  # anchors a query: 3,000 anchors take 4 ms, with 10 documents or with 20,000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents(
    id TEXT PRIMARY KEY, name TEXT, tokens INTEGER, characters INTEGER, anchor TEXT, tail TEXT, number INTEGER);
CREATE INDEX IF NOT EXISTS documents_by_anchor ON documents(anchor);
CREATE INDEX IF NOT EXISTS documents_by_name ON documents(name);
CREATE INDEX IF NOT EXISTS documents_by_number ON documents(number);
CREATE TABLE IF NOT EXISTS states(
    key TEXT PRIMARY KEY, document TEXT, compression TEXT, pairs INTEGER, full_pairs INTEGER, nbytes INTEGER,
    file_bytes INTEGER, created TEXT, number INTEGER);
CREATE INDEX IF NOT EXISTS states_by_document ON states(document);
"""


@dataclass(frozen=True)
class TextShape:
    """What recognising a document by its text needs: its length in characters and its last ANCHOR characters."""

    document_id: str
    characters: int
    tail: str


@dataclass(frozen=True)
class DocumentRow:
    id: str
    name: str | None
    tokens: int
    characters: int


@dataclass(frozen=True)
class StateRow:
    key: str
    document_id: str
    compression: str
    pairs: int
    full_pairs: int
    nbytes: int
    file_bytes: int
    created: str


class Index:
    """A SQLite file, one connection for all threads.

    Args:
        path: the file, or None for an index in memory (a folder that cannot be written and has no index).
    """

    def __init__(self, path: Path | None, *, read_only: bool = False) -> None:
        self._lock = threading.Lock()
        if path is None:
            self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        elif read_only:
            address = f"{path.absolute().as_uri()}?mode=ro"
            self._connection = sqlite3.connect(address, uri=True, timeout=30, check_same_thread=False)
        else:
            self._connection = sqlite3.connect(path, timeout=30, check_same_thread=False)
        try:
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            self.is_new = version != VERSION
            if self.is_new:
                self._connection.executescript(f"{_SCHEMA} PRAGMA user_version={VERSION};")
        except sqlite3.Error:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            # IMMEDIATE: take the write lock before reading, so that two processes cannot both plan on the same rows.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.commit()
            except BaseException:
                self._connection.rollback()
                raise

    def _rows(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def add(self, document: DocumentRow, text: str | None, state: StateRow) -> None:
        """Adds a state and its document; a name given later replaces an older one.

        Args:
            text: the document's text; None when the document is known to be indexed.
        """
        with self._writing() as connection:
            if text is not None:
                anchor = text[:ANCHOR] if len(text) >= ANCHOR else None
                row = (document.id, document.name, document.tokens, document.characters, anchor, text[-ANCHOR:])
                connection.execute(
                    "INSERT INTO documents SELECT ?,?,?,?,?,?, (SELECT COALESCE(MAX(number), 0) + 1 FROM documents) "
                    "WHERE true ON CONFLICT(id) DO UPDATE SET name = COALESCE(excluded.name, name)",
                    row,
                )
            connection.execute(
                "INSERT OR REPLACE INTO states SELECT ?,?,?,?,?,?,?,?, "
                "(SELECT COALESCE(MAX(number), 0) + 1 FROM states WHERE document = ?)",
                (state.key, state.document_id, state.compression, state.pairs, state.full_pairs, state.nbytes,
                 state.file_bytes, state.created, state.document_id),
            )  # fmt: skip

    def rename(self, document_id: str, name: str) -> None:
        with self._writing() as connection:
            connection.execute("UPDATE documents SET name = ? WHERE id = ?", (name, document_id))

    def drop(self, key: str) -> None:
        """Drops a state, and its document when that was the last one."""
        with self._writing() as connection:
            found = connection.execute("SELECT document FROM states WHERE key = ?", (key,)).fetchone()
            connection.execute("DELETE FROM states WHERE key = ?", (key,))
            if found:
                connection.execute(
                    "DELETE FROM documents WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM states WHERE document = ?1)",
                    found,
                )

    def document(self, document_id: str) -> DocumentRow | None:
        rows = self._rows("SELECT id, name, tokens, characters FROM documents WHERE id = ?", document_id)
        return DocumentRow(*rows[0]) if rows else None

    def documents(self) -> list[DocumentRow]:
        return [DocumentRow(*row) for row in self._rows(
            "SELECT id, name, tokens, characters FROM documents ORDER BY number")]  # fmt: skip

    def by_prefix(self, prefix: str) -> list[str]:
        query = "SELECT id FROM documents WHERE id >= ? AND id < ? LIMIT 10"
        return [row[0] for row in self._rows(query, prefix, prefix + "g")]

    def by_name(self, name: str) -> list[str]:
        return [row[0] for row in self._rows("SELECT id FROM documents WHERE name = ? LIMIT 10", name)]

    def states(self, document_id: str) -> list[StateRow]:
        columns = "key, document, compression, pairs, full_pairs, nbytes, file_bytes, created"
        return [StateRow(*row) for row in self._rows(
            f"SELECT {columns} FROM states WHERE document = ? ORDER BY number", document_id)]  # fmt: skip

    def keys(self) -> set[str]:
        return {row[0] for row in self._rows("SELECT key FROM states")}

    def candidates(self, anchors: Collection[str]) -> dict[str, list[TextShape]]:
        """Documents whose text begins with one of ``anchors``; the cost does not grow with the documents stored."""
        found: dict[str, list[TextShape]] = {}
        wanted = list(anchors)
        for begin in range(0, len(wanted), _BATCH):
            batch = wanted[begin : begin + _BATCH]
            marks = ",".join("?" * len(batch))
            query = f"SELECT anchor, id, characters, tail FROM documents WHERE anchor IN ({marks})"
            for anchor, document_id, characters, tail in self._rows(query, *batch):
                found.setdefault(anchor, []).append(TextShape(document_id, characters, tail))
        return found
