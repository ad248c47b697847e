"""The store killed, damaged, attacked, shared and filled up: large counts of what tests/store/test_torture.py does.

    python benchmarks/store_torture.py

From a checkout, on a system with fork; the full disk is a small one in memory, which only root can mount. Prints the
machine, the versions and every count; exit status 1 when anything was lost, wrong or not detected.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.store import torture

GOOD = ("tried", "stored", "read", "removed", "refused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of ingest, and as many of eviction")
    parser.add_argument("--flips", type=int, default=2000, help="without an HMAC key, and as many with one")
    parser.add_argument("--files", type=int, default=1000, help="hostile ones, without an HMAC key and with one")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--documents", type=int, default=200, help="of each process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be tested; default: for temporary files")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # thousands of damaged files are named there
    print(
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, safetensors {safetensors.__version__}, seed {asked.seed}"
    )
    seed = asked.seed
    counts: list[tuple[str, Callable[[Path], Counter[str]]]] = [
        ("kill -9 while storing and removing", lambda at: torture.kills(at, asked.kills, seed=seed)),
        ("kill -9 while storing and evicting", lambda at: torture.kills(at, asked.kills, evicting=True, seed=seed)),
        ("changed bytes", lambda at: torture.flips(at, asked.flips, seed=seed)),
        ("changed bytes, HMAC key", lambda at: torture.flips(at, asked.flips, hmac_key=torture.KEY, seed=seed)),
        ("hostile files", lambda at: torture.hostile(at, asked.files, seed=seed)),
        ("hostile files, HMAC key", lambda at: torture.hostile(at, asked.files, hmac_key=torture.KEY, seed=seed)),
        ("processes on one store", lambda at: torture.crowd(at, asked.processes, asked.documents, seed=seed)),
    ]
    failed = False
    for name, count in counts:
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            failed |= report(name, count, Path(folder) / "kv")
    with tempfile.TemporaryDirectory() as folder, torture.small_disk(Path(folder) / "disk") as disk:
        if disk is None:
            print("a full disk: not tried, no small disk can be mounted here")
        else:
            failed |= report("a full disk (2 MB)", torture.full_disk, disk / "kv")
    sys.exit(failed)


def report(name: str, count: Callable[[Path], Counter[str]], folder: Path) -> bool:
    started = time.monotonic()
    found = {what: number for what, number in count(folder).items() if number}
    wrong = {what: number for what, number in found.items() if not what.startswith(GOOD)}
    good = ", ".join(f"{number:,} {what}" for what, number in found.items() if what not in wrong)
    bad = ", ".join(f"{number:,} {what}" for what, number in wrong.items()) or "nothing lost, wrong or not noticed"
    print(f"{name}: {good}: {bad} ({time.monotonic() - started:.0f} s)", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    main()
