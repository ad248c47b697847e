"""What the store tells about its contents: small immutable values, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kv_rag import html
from kv_rag.document import Compression

ANCHOR = 32  # characters at a text's beginning and end by which it is found in a prompt


@dataclass(frozen=True)
class StateRecord:
    """One stored state.

    Attributes:
        document_id: the document's digest.
        name: the document's name, the one it was given last.
        compression: how the pairs were chosen.
        tokens: the document's original length.
        pairs: kept pairs, over all layers and heads.
        full_pairs: pairs before compression.
        nbytes: bytes of all keys, values and positions in memory, where they have the model's dtype.
        file_bytes: size of the state's file.
        path: the state's file.
        created: when it was written, UTC, ISO 8601.

    """

    document_id: str
    name: str | None
    compression: Compression
    tokens: int
    pairs: int
    full_pairs: int
    nbytes: int
    file_bytes: int
    path: Path
    created: str


@dataclass(frozen=True)
class DocumentRecord:
    """One stored document.

    Attributes:
        id: the document's digest.
        name: the name it was given last.
        tokens: its length in tokens.
        characters: its length in characters, white space at its ends not counted.
        states: its states, newest last.

    """

    id: str
    name: str | None
    tokens: int
    characters: int
    states: tuple[StateRecord, ...]

    def _repr_html_(self) -> str:
        title = f"{self.name or self.id[:12]} ({self.tokens:,} tokens, {self.characters:,} characters)"
        rows = [
            (str(state.compression), f"{state.pairs:,}", html.share(state.pairs, state.full_pairs),
             html.size(state.file_bytes), state.created)
            for state in self.states
        ]  # fmt: skip
        return html.caption(title) + html.table(("state", "pairs", "kept", "on disk", "written"), rows)


@dataclass(frozen=True)
class TextShape:
    """A document's text as seen from outside: enough to tell quickly that a prompt does NOT hold it.

    Attributes:
        document_id: the document's digest, which only the whole text can confirm.
        characters: length of the text.
        tail: its last ``ANCHOR`` characters.

    """

    document_id: str
    characters: int
    tail: str


@dataclass(frozen=True)
class Problem:
    """Something ``verify`` found.

    Attributes:
        file: the file it is about.
        document_id: the document it belongs to, None when that cannot be told.
        what: what is wrong, and what was done or is to be done about it.

    """

    file: Path
    document_id: str | None
    what: str


@dataclass(frozen=True)
class IndexEntry:
    """What the index holds about one state file."""

    key: str
    record: StateRecord
    characters: int
    head: str  # the text's first ANCHOR characters, fewer when it is shorter
    tail: str  # and its last
