"""The store's folder: where things are, who may read them, and writing that leaves all or nothing.

``store.json``               format version and fingerprint
``index.sqlite``             derived from the files
``states/<aa>/<key>.safetensors``   one state; aa are the key's first two hex digits
``states/.tmp-*``            being written; left over when a process was killed
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kv_rag.errors import DamagedState, StoreError, StoreMismatch

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
TEMPORARY = ".tmp-"
SUFFIX = ".safetensors"
STALE_SECONDS = 3600  # no write of one state takes this long; younger files may belong to a living process

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
        StoreError: not a folder, not readable, or to be made where nothing may be written.

    """

    def __init__(self, path: str | Path, *, read_only: bool) -> None:
        self.path = Path(path).expanduser().absolute()
        self.states = self.path / "states"
        self.index = self.path / "index.sqlite"
        self.description = self.path / "store.json"
        self.read_only = read_only or (self.path.is_dir() and not os.access(self.path, os.W_OK | os.X_OK))
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
            raise StoreError(
                f"the store's folder {self.path} cannot be made: {error.strerror}; check the permissions, "
                "or name a folder you may write to"
            ) from error

    def _check(self) -> None:
        if not self.path.is_dir():
            raise StoreError(f"there is no store in {self.path}; ingest documents first or name the right folder")
        if not os.access(self.path, os.R_OK | os.X_OK):
            raise StoreError(f"the store's folder {self.path} may not be read; ask for its rights or name another folder")
        if self.read_only and not self.description.exists():
            raise StoreError(f"{self.path} holds no store and may not be written; name a folder you may write to")
        if self.states.is_symlink():
            raise StoreError(f"{self.states} is a symbolic link, which a store does not follow; make it a real folder")

    def state_path(self, key: str) -> Path:
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
        """Temporary files. They lie in two folders of few entries, so that looking costs the same for any store."""
        folders = [folder for folder in (self.path, self.states) if folder.is_dir()]
        return [path for folder in folders for path in folder.glob(f"{TEMPORARY}*")]

    def sweep(self) -> None:
        """Removes leftovers that no living process can still be writing."""
        for path in self.leftovers():
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > STALE_SECONDS:
                    path.unlink()
                    logger.info("removed %s, left over from an interrupted write", path)

    def write_state(self, key: str, blocks: Iterable[bytes | memoryview]) -> Path:
        """Writes one state file, whole or not at all, and returns its path."""
        path = self.state_path(key)
        try:
            make_private(path.parent)
            _write(self._temporary(self.states), path, blocks)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{path} cannot be written: {error.strerror}; free space or name another folder") from error
        return path

    def _temporary(self, folder: Path) -> Path:
        return folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"

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
                written = _write_if_absent(self._temporary(self.path), self.description, content)
            except OSError as error:
                raise StoreError(
                    f"{self.description} cannot be written: {error.strerror}; free space or name another folder"
                ) from error
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
            raise StoreError(f"{self.description} may not be read; ask for its rights or name another folder") from error
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
    names = [*here, *(name for name in there if name not in here)]
    differences = [
        f"{name}: {_short(there.get(name))} in the store, {_short(here.get(name))} now"
        for name in names
        if there.get(name) != here.get(name)
    ]
    if differences:
        raise StoreMismatch(
            f"the store in {place} was made with other settings ({'; '.join(differences)}); "
            "open it with the same settings, or use another folder"
        )


def write_private(path: Path, content: bytes) -> None:
    """Writes a small file that only its owner may read, whole or not at all."""
    _write(path.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"), path, [content])


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


def _write(temporary: Path, path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    _write_temporary(temporary, blocks)
    try:
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write_if_absent(temporary: Path, path: Path, content: bytes) -> bool:
    """Of two processes that open a new folder at once, one writes and both compare. True for the one that wrote."""
    _write_temporary(temporary, [content])
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def _write_temporary(temporary: Path, blocks: Iterable[bytes | memoryview]) -> None:
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return repr(value if len(value) <= 40 else f"{value[:37]}...")
