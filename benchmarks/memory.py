"""Bytes counted from tensors against the process and the disk.

    python benchmarks/memory.py --model bundled:smollm2-135m --documents 6 --tokens 1500

Ingests documents with retain="compressed" and compares ``engine.memory()`` with the growth of the process's resident
set and with the files' sizes; then the same with the full states loaded.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import platform
import tempfile
from pathlib import Path

import psutil
import torch
import transformers
from ttft import long_text

from kv_rag import Engine


def resident_set() -> int:
    """Bytes of this process in memory, freed heap given back first where the system can."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except OSError:
        pass
    return int(psutil.Process().memory_info().rss)


def disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1500)
    arguments = parser.parse_args()
    print(f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}, {arguments.model}")
    with tempfile.TemporaryDirectory() as folder, Engine.from_pretrained(arguments.model, store=folder) as engine:
        text = long_text(engine.model, arguments.tokens)
        texts = [f"Register {number}.\n{text}" for number in range(arguments.documents + 2)]
        for keep in (0.5, 0.25):  # whatever the first passes allocate for good is not the documents'
            engine.ingest(texts[-2:], keep=keep, retain="compressed")
        before, counted_before = resident_set(), engine.memory().resident_bytes
        engine.ingest(texts[:-2], keep=0.5, retain="compressed")
        grown = resident_set() - before
        counted = engine.memory().resident_bytes - counted_before
        files = disk(Path(folder))
        print(f"resident: counted {counted / 1e6:.1f} MB, process grew by {grown / 1e6:.1f} MB ({grown / counted:.3f})")
        reported = engine.memory().bytes_on_disk
        print(f"disk: counted {reported / 1e6:.1f} MB, files hold {files / 1e6:.1f} MB ({files / reported:.3f})")


if __name__ == "__main__":
    main()
