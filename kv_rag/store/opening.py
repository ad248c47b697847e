"""One way to open a store, wherever it is."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kv_rag.errors import InvalidSetting
from kv_rag.store.absent import AbsentStore
from kv_rag.store.folder import make_private
from kv_rag.store.identity import length_prefixed_digest
from kv_rag.store.index import LRU
from kv_rag.store.local import LocalStore
from kv_rag.store.remote import RemoteStore

Store = LocalStore | RemoteStore | AbsentStore

NAMESPACE = "namespace"  # in fingerprints


def open_store(
    place: str | Path,
    fingerprint: Mapping[str, str] | None,
    *,
    read_only: bool = False,
    check: bool = True,
    namespace: str | None = None,
    hmac_key: bytes | str | None = None,
    disk_budget: int | None = None,
    evict: str = LRU,
) -> LocalStore | RemoteStore:
    """A folder, or a URL that fsspec knows (``s3://bucket/prefix``). ``file://`` is a folder.

    Args:
        place: see above.
        fingerprint: what the states depend on, by name; None opens the store whatever wrote it.
        read_only: write nothing there.
        check: compare a state with its checksums when it is first read.
        namespace: a tenant's name. Each has a store of its own inside ``place``, where no other one's states are found.
        hmac_key, disk_budget, evict: see ``LocalStore``. For a URL the budget is that of the folder in front.

    Raises:
        MissingExtra, StoreError, StoreUnreachable, StoreMismatch, InvalidSetting: see the stores.

    """
    if namespace is not None:
        if not isinstance(namespace, str) or not namespace:
            raise InvalidSetting(f"a namespace is a name that is not empty, or None, got {namespace!r}")
        if fingerprint is not None:
            fingerprint = {**fingerprint, NAMESPACE: namespace}
    inside = "" if namespace is None else f"namespaces/{_digest(namespace)}"
    if isinstance(place, str) and "://" in place:
        if not place.startswith("file://"):
            return RemoteStore(
                f"{place.rstrip('/')}/{inside}" if inside else place, fingerprint, read_only=read_only, check=check,
                hmac_key=hmac_key, disk_budget=disk_budget, evict=evict,
            )  # fmt: skip
        place = unquote(urlsplit(place).path)  # a local folder needs no copy in front, and locks and links work there
    if inside and fingerprint is not None and not read_only:
        _make_private_folders(Path(place).expanduser())
    return LocalStore(
        Path(place) / inside, fingerprint, read_only=read_only, check=check, hmac_key=hmac_key, disk_budget=disk_budget,
        evict=evict,
    )  # fmt: skip


def _make_private_folders(folder: Path) -> None:
    """The folders around a namespace's. What goes wrong here goes wrong again, and is told, when the store is opened."""
    with contextlib.suppress(FileExistsError, NotADirectoryError, PermissionError, FileNotFoundError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(folder / "namespaces")


def _digest(namespace: str) -> str:
    """A folder's name that any namespace has, ``../`` and all."""
    return length_prefixed_digest(namespace.encode("utf-8", "surrogatepass"))[:32]
