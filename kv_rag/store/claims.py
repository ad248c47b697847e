"""Files that belong to a living process: held with a lock, which the system lets go of when the process ends.

Neither process ids (reused, and different in every container) nor file times (clocks jump) would tell as much.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCKS = fcntl is not None
STALE_SECONDS = 24 * 3600  # only where files cannot be locked: what is older is taken for left over


@contextlib.contextmanager
def claimed(folder: Path, prefix: str) -> Iterator[tuple[Path, BinaryIO]]:
    """A new private file that ``remove_if_abandoned`` leaves alone as long as this lasts. Whoever asked removes it."""
    while True:
        path = folder / f"{prefix}{secrets.token_hex(8)}"
        file = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")
        if _lock(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink:
            break
        file.close()  # swept between open and lock
    try:
        yield path, file
    finally:
        with contextlib.suppress(OSError):  # unwritten bytes of a write that failed already
            file.close()


def remove_if_abandoned(path: Path, first: Callable[[], object] = lambda: None) -> bool:
    """Calls ``first`` and removes the file, unless its process lives. Returns whether it did."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    except OSError:  # gone, or no file
        return False
    try:
        locked = _lock(descriptor)
        if locked is None:
            locked = time.time() - os.fstat(descriptor).st_mtime > STALE_SECONDS
        if not locked or not os.fstat(descriptor).st_nlink:
            return False
        first()
        with contextlib.suppress(OSError):
            path.unlink()
        return True
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """True when locked now, False when another process holds it, None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None
