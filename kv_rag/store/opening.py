"""One way to open a store, wherever it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kv_rag.store.local import LocalStore
from kv_rag.store.remote import RemoteStore

Store = LocalStore | RemoteStore


def open_store(place: str | Path, fingerprint: Mapping[str, str] | None, *, read_only: bool = False) -> Store:
    """A folder, or a URL that fsspec knows (``s3://bucket/prefix``). ``file://`` is a folder.

    Args:
        place: see above.
        fingerprint: what the states depend on, by name; None opens the store whatever wrote it.
        read_only: write nothing there.

    Raises:
        MissingExtra, StoreError, StoreMismatch: see the stores.

    """
    if isinstance(place, str) and "://" in place:
        if not place.startswith("file://"):
            return RemoteStore(place, fingerprint, read_only=read_only)
        place = unquote(urlsplit(place).path)  # a local folder needs no copy in front, and locks and links work there
    return LocalStore(place, fingerprint, read_only=read_only)
