"""The store's folder: where things are, who may read them, and writing that leaves all or nothing.

``store.json``               format version and fingerprint
``index.sqlite``             derived from the files
``states/<aa>/<key>.safetensors``   one state; aa are the key's first two hex digits
``states/.tmp-*``            being written
``states/.mark-<key>-*``     the state is being written or removed, file and index

The last two are locked by the process that made them; what a killed one left over is removed, and a marked state's row in
the index made to fit its file, when the store is next opened.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from kv_rag.errors import DamagedState, StoreError, StoreMismatch, StoreUnreachable
from kv_rag.store.claims import LOCKS, claimed, remove_if_abandoned

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
TEMPORARY, MARK = ".tmp-", ".mark-"
SUFFIX = ".safetensors"

_KEY = re.compile(r"[0-9a-f]{40}")
LARGEST_STORE_JSON = 1 << 20
# What a description that is not as written can make the reader raise.
GARBLED_DESCRIPTION = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Folder:
    """Paths of one store and the rights to write there.

    Args:
        path: the store's folder; made when missing, unless ``read_only``.
        read_only: write nothing. Also set when there is no right to write.

    Raises:
        StoreError: not a folder, or no store where nothing may be written.
        StoreUnreachable: it cannot be made or may not be read.

    """

    def __init__(self, path: str | Path, *, read_only: bool) -> None:
        self.path = Path(path).expanduser().absolute()
        self.states = self.path / "states"
        self.index = self.path / "index.sqlite"
        self.description = self.path / "store.json"
        self.read_only = read_only or (self.path.is_dir() and not _may(self.path, os.W_OK | os.X_OK))
        if not read_only:
            self._make()
        self._check()

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.read_only:
                make_private(self.states)
        except (FileExistsError, NotADirectoryError) as error:
            raise StoreError(f"{self.path} cannot be a store: it is not a folder; name another folder") from error
        except OSError as error:
            raise StoreUnreachable(
                f"the store's folder {self.path} cannot be made: {error.strerror}; check the permissions, "
                "or name a folder you may write to"
            ) from error

    def _check(self) -> None:
        if not self.path.is_dir():
            raise StoreError(f"there is no store in {self.path}; ingest documents first or name the right folder")
        if not _may(self.path, os.R_OK | os.X_OK):
            raise StoreUnreachable(f"the store's folder {self.path} may not be read; ask for its rights or name another one")
        if self.read_only and not self.description.exists():
            raise StoreUnreachable(f"{self.path} holds no store and may not be written; name a folder you may write to")
        if self.states.is_symlink():
            raise StoreError(f"{self.states} is a symbolic link, which a store does not follow; make it a real folder")

    def state_path(self, key: str) -> Path:
        """Where a state lies. Raises ValueError for what is no key: it could point anywhere."""
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key[:60]!r} is not the key of a state")
        return self.states / key[:2] / f"{key}{SUFFIX}"

    def state_files(self) -> Iterator[Path]:
        """Every file that is named and placed as a state; whether it is one, reading it will show."""
        for path in self.everything():
            if path.suffix == SUFFIX and _KEY.fullmatch(path.stem) and self.state_path(path.stem) == path:
                yield path

    def everything(self) -> Iterator[Path]:
        """Everything in ``states`` that is not one of its folders, without following links."""
        with os.scandir(self.states) if self.states.is_dir() else contextlib.nullcontext(()) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)
                    continue
                with os.scandir(entry) as files:
                    yield from (Path(file.path) for file in files)

    def leftovers(self) -> list[Path]:
        """Temporary files and marks. They lie in two folders of few entries: looking costs the same for any store."""
        folders = [folder for folder in (self.path, self.states) if folder.is_dir()]
        return [path for folder in folders for begin in (TEMPORARY, MARK) for path in folder.glob(f"{begin}*")]

    def sweep(self, mend: Callable[[str], object]) -> None:
        """Removes what killed processes left; ``mend`` is called with the key of every state they were changing."""
        for path in self.leftovers():
            key = path.name[len(MARK) : len(MARK) + 40] if path.name.startswith(MARK) else ""
            if remove_if_abandoned(path, functools.partial(mend, key) if _KEY.fullmatch(key) else lambda: None):
                logger.info("removed %s, left over from an interrupted change", path)

    @contextlib.contextmanager
    def changing(self, key: str) -> Iterator[None]:
        """Marks a state while its file and its row in the index are changed, for the sweep to finish what was not."""
        with contextlib.ExitStack() as stack:
            try:
                mark, _ = stack.enter_context(claimed(self.states, f"{MARK}{key}-"))
            except OSError as error:
                raise _cannot_write(self.states, error) from error
            yield
            mark.unlink(missing_ok=True)  # only now: after an error there may be something to mend

    def write_state(self, key: str, blocks: Iterable[bytes | memoryview]) -> Path:
        """Writes one state file, whole or not at all, and returns its path."""
        path = self.state_path(key)
        try:
            make_private(path.parent)
            _write(self.states, path, blocks)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise _cannot_write(path, error) from error
        return path

    # --- store.json ---

    def describe(self, fingerprint: Mapping[str, str] | None) -> tuple[dict[str, str], bool]:
        """Writes ``store.json``, or compares it when there is one. None takes the store's own fingerprint.

        Returns:
            the store's fingerprint, and whether it was written now.

        Raises:
            StoreMismatch: the store has another format or fingerprint; every difference is listed.
            DamagedState: ``store.json`` cannot be read.

        """
        written = False
        if not self.description.exists():
            if fingerprint is None:
                raise StoreError(f"there is no store in {self.path}; ingest documents first or name the right folder")
            content = description(fingerprint)
            try:
                written = _write_if_absent(self.description, content)
            except OSError as error:
                raise _cannot_write(self.description, error) from error
        there = self._read_description()
        self._compare(there, fingerprint)
        return {name: value for name, value in there.items() if name != "format version"}, written

    def _compare(self, there: Mapping[str, str], fingerprint: Mapping[str, str] | None) -> None:
        compare_descriptions(self.path, there, fingerprint)

    def _read_description(self) -> dict[str, str]:
        try:
            with self.description.open("rb") as file:
                return parse_description(file.read(LARGEST_STORE_JSON))
        except PermissionError as error:
            raise StoreUnreachable(f"{self.description} may not be read; ask for its rights or name another one") from error
        except GARBLED_DESCRIPTION as error:
            raise DamagedState(
                f"{self.description} is damaged; remove it to open the store with the present settings "
                "(states made with others will not be used), or use another folder"
            ) from error


def description(fingerprint: Mapping[str, str]) -> bytes:
    """The content of ``store.json``."""
    return json.dumps({"format": FORMAT_VERSION, "fingerprint": dict(fingerprint)}, indent=1).encode()


def parse_description(content: bytes) -> dict[str, str]:
    """Reverses ``description``, the format version among the rest. Raises one of GARBLED_DESCRIPTION."""
    parsed = json.loads(content)
    fingerprint = {str(name): str(value) for name, value in parsed["fingerprint"].items()}
    return {"format version": str(parsed["format"]), **fingerprint}


def compare_descriptions(place: object, there: Mapping[str, str], fingerprint: Mapping[str, str] | None) -> None:
    """Raises StoreMismatch, listing every difference, unless the store is of this fingerprint (None: of any)."""
    own = {name: value for name, value in there.items() if name != "format version"}
    here = {"format version": str(FORMAT_VERSION), **(own if fingerprint is None else fingerprint)}
    found = differences(there, here)
    if found:
        raise StoreMismatch(
            f"the store in {place} was made with other settings ({found}); "
            "open it with the same settings, or use another folder"
        )


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Every setting that is not the same in what is stored and now; empty when all are."""
    return "; ".join(
        f"{name}: {_short(there.get(name))} in the store, {_short(here.get(name))} now"
        for name in [*here, *(name for name in there if name not in here)]
        if there.get(name) != here.get(name)
    )


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _cannot_write(path: Path, error: OSError) -> StoreUnreachable:
    return StoreUnreachable(f"{path} cannot be written: {error.strerror}; free space or name another folder")


def write_private(path: Path, content: bytes) -> None:
    """Writes a small file that only its owner may read, whole or not at all."""
    _write(path.parent, path, [content])


def make_private(folder: Path) -> None:
    """Makes a folder only its owner may enter, and refuses a symbolic link in its place."""
    try:
        folder.mkdir(mode=0o700)
        sync_folder(folder.parent)
    except FileExistsError:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise StoreError(f"{folder} is not a folder (the store follows no links); move it away") from None


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder last; systems that cannot open folders do so by themselves."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(folder: Path, path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    """Writes to a temporary file in ``folder``, of the same disk as ``path``, and renames it."""
    with _temporary(folder) as (temporary, file):
        _write_and_sync(file, blocks)
        if not LOCKS:  # Windows renames no open file; elsewhere it stays claimed until it has its name
            file.close()
        os.replace(temporary, path)
    sync_folder(path.parent)


def _write_if_absent(path: Path, content: bytes) -> bool:
    """Of two processes that open a new folder at once, one writes and both compare. True for the one that wrote."""
    with _temporary(path.parent) as (temporary, file):
        _write_and_sync(file, [content])
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            os.replace(temporary, path)
    sync_folder(path.parent)
    return True


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    with claimed(folder, TEMPORARY) as (path, file):
        try:
            yield path, file
        finally:
            path.unlink(missing_ok=True)


def _write_and_sync(file: BinaryIO, blocks: Iterable[bytes | memoryview]) -> None:
    for block in blocks:
        file.write(block)
    file.flush()
    os.fsync(file.fileno())


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return repr(value if len(value) <= 40 else f"{value[:37]}...")
