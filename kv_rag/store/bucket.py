"""The few requests that a remote store makes of any fsspec file system, with one way to fail.

``store.json``                      format version and fingerprint, as in a local folder
``states/<aa>/<key>.safetensors``   one state; aa are the key's first two hex digits
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kv_rag.errors import MissingExtra, StateMissing, StoreError, StoreUnreachable

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0  # after a failure nothing is asked for so long: every question would wait for the network again
BLOCK = 16 << 20  # bytes per read of a state
# s3fs retries by itself; botocore's own defaults would wait minutes for a server that is not there.
S3_CONFIG = {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 1}}

_STATE = re.compile(r"(?:^|/)states/([0-9a-f]{2})/(\1[0-9a-f]{38})\.safetensors")


class Bucket:
    """A prefix of a bucket, or any folder that fsspec reaches.

    Args:
        url: such as ``s3://bucket/prefix``.
        options: for the file system, on top of fsspec's own configuration (files and ``FSSPEC_…`` variables).

    Raises:
        MissingExtra: fsspec, or the package for this kind of URL, is not installed.
        StoreError: no file system knows this kind of URL.

    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url.rstrip("/")
        self._fs, root = _file_system(self.url, dict(options or {}))
        self._root = root.rstrip("/")
        self._silent_until = 0.0
        self._warned = False

    def states(self) -> dict[str, int]:
        """Bytes of every state by key. Other files are left alone."""
        with self._asking("listed"):
            try:
                found = self._fs.find(f"{self._root}/states", detail=True)
            except FileNotFoundError:
                return {}
        matches = {path: _STATE.search(path) for path in found}
        return {match[2]: int(found[path]["size"]) for path, match in matches.items() if match}

    def size(self, name: str) -> int:
        """Bytes of a file. Raises FileNotFoundError."""
        with self._asking("read"):
            return int(self._fs.info(f"{self._root}/{name}")["size"])

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """A file's bytes, or some of them. Raises FileNotFoundError."""
        with self._asking("read"):
            return bytes(self._fs.cat_file(f"{self._root}/{name}", start=begin, end=end))

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """Parts of many files, asked for at once; None for files that are gone."""
        if not ranges:
            return []
        paths, begins, ends = zip(*((f"{self._root}/{name}", begin, end) for name, begin, end in ranges), strict=True)
        with self._asking("read"):
            parts = self._fs.cat_ranges(list(paths), list(begins), list(ends), on_error="return")
            for part in parts:
                if isinstance(part, Exception) and not isinstance(part, FileNotFoundError):
                    raise part
        return [None if isinstance(part, Exception) else bytes(part) for part in parts]

    def blocks(self, name: str) -> Iterator[bytes]:
        """A file's bytes, little by little. Raises StateMissing, which nobody takes for an error of the local disk."""
        try:
            size = self.size(name)
            for begin in range(0, size, BLOCK):
                yield self.read(name, begin, min(size, begin + BLOCK))
        except FileNotFoundError:
            raise StateMissing(f"{self.url}/{name} is gone; ingest its document again") from None

    def write_if_absent(self, name: str, file: Path) -> bool:
        """Copies ``file`` there unless the name is taken; False when it is, were it only this moment.

        S3 and others take part in this (``If-None-Match: *``): of two writers one wins and nothing is half-written. A
        file system without exclusive writes may write the same state twice.
        """
        path = f"{self._root}/{name}"
        with self._asking("written"):
            if self._exists(path):  # an upload that will be refused costs as much as one that is not
                return False
            try:
                self._fs.put_file(str(file), path, mode="create")
            except FileExistsError:
                return False
            except FileNotFoundError as error:
                raise StoreError(f"{self.url} cannot be written: there is no such bucket; make it first") from error
            except Exception:
                # "Precondition failed" and "conflict" are what losing a race looks like, under many names.
                if self._exists(path):
                    return False
                raise
        return True

    def remove(self, name: str) -> None:
        """Removes a file; one that is gone already is no error."""
        with self._asking("removed"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")

    def _exists(self, path: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(path))

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turns whatever a network can raise into StoreUnreachable, and says so once until it works again."""
        if time.monotonic() < self._silent_until:
            raise _logged(StoreUnreachable(f"{self.url} cannot be {what}: it did not answer a moment ago; try again later"))
        try:
            self._fs.invalidate_cache()  # others write there too
            yield
        except (FileNotFoundError, StoreError):
            raise
        except Exception as error:  # every file system has its own: OSError, botocore's, aiohttp's, asyncio's
            self._silent_until = time.monotonic() + RETRY_SECONDS
            if not self._warned:
                logger.warning(
                    "%s cannot be %s (%s: %s); until it answers, what is not in the local cache is read anew by the model",
                    self.url, what, type(error).__name__, error,
                )  # fmt: skip
            self._warned = True
            unreachable = StoreUnreachable(
                f"{self.url} cannot be {what}: {type(error).__name__}: {error}; check the network, the address and the "
                "credentials"
            )
            raise _logged(unreachable) from error
        self._warned = False


def _logged(error: StoreUnreachable) -> StoreUnreachable:
    error.logged = True
    return error


def _file_system(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    protocol = url.split("://")[0]
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtra(f"a store at {url} needs fsspec: pip install 'kv_rag[remote]'") from error
    if protocol in ("s3", "s3a") and "config_kwargs" not in fsspec.config.conf.get(protocol, {}):
        options.setdefault("config_kwargs", S3_CONFIG)
    try:
        file_system, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:  # fsspec names the package
        raise MissingExtra(f"a store at {url} needs another package: {error}") from error
    except ValueError as error:
        raise StoreError(f"{url} cannot be a store: {error}; give a folder, or a URL that fsspec knows") from error
    return file_system, str(root)
