"""Text files and folders as documents; everything else is named with the reason why it is left out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kv_rag.document import Document
from kv_rag.errors import EmptyInput

SUFFIXES = (".txt", ".md", ".markdown", ".rst", ".text")


@dataclass(frozen=True)
class LeftOut:
    """A path that became no document, and why. ``missing``: there is nothing, or nothing that may be read."""

    path: str
    why: str
    missing: bool = False


def read_documents(paths: Iterable[Path]) -> tuple[list[Document], list[LeftOut]]:
    """Documents of ``paths`` in order, each text once.

    A file becomes a document whatever its suffix, if it is UTF-8 text; its name is the path as given. Of a folder, files
    with one of ``SUFFIXES`` do, at any depth; their names are paths within the folder. Hidden files and folders in it are
    passed over.
    """
    documents: dict[str, Document] = {}
    left_out: list[LeftOut] = []
    for path, name, why_not in _files(paths):
        found = why_not or _read(path, name)
        if isinstance(found, LeftOut):
            left_out.append(found)
        elif found.id in documents:
            left_out.append(LeftOut(str(path), f"same text as {documents[found.id].name}"))
        else:
            documents[found.id] = found
    return list(documents.values()), left_out


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, str, LeftOut | None]]:
    for path in paths:
        if path.is_dir():
            for file in _walk(path):
                wanted = file.suffix.lower() in SUFFIXES
                reason = None if wanted else LeftOut(str(file), f"not one of {' '.join(SUFFIXES)}; give the file itself")
                yield file, str(file.relative_to(path)), reason
        else:
            yield path, str(path), None


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(files) if not name.startswith("."))


def _read(path: Path, name: str) -> Document | LeftOut:
    try:
        if not path.exists():
            return LeftOut(str(path), "no such file or folder", missing=True)
        if not path.is_file():  # reading a pipe or a device might never end
            return LeftOut(str(path), "not a regular file")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        return LeftOut(str(path), f"not UTF-8 text (byte {error.start}); convert it to UTF-8")
    except OSError as error:
        return LeftOut(str(path), f"cannot be read: {error.strerror}", missing=True)
    if "\0" in text:
        return LeftOut(str(path), "binary, not text")
    try:
        return Document(text, name=printable(name))
    except EmptyInput:
        return LeftOut(str(path), "empty")


def printable(name: str) -> str:
    """``name`` with bytes that are no UTF-8 replaced, so that it can be stored and printed."""
    return os.fsencode(name).decode("utf-8", "replace")
