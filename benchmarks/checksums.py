"""What comparing checksums costs: its share of the time to the first token of a document's first question.

    python benchmarks/checksums.py --model bundled:smollm2-135m --tokens 4000

A document's first question in a process reads its state from the disk (or the system's cache of it) and compares its
checksums; later ones do not. The question of every round is a first one: the engine is opened anew.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers
from ttft import QUESTION, long_text

from kv_rag import Engine
from kv_rag.document import Document
from kv_rag.store.format import read_state
from kv_rag.store.seal import Seal

KEY = "a key for this benchmark only"


def first_answer(model: Engine, folder: Path, document: str, mode: str, key: str | None, check: bool) -> float:
    """Seconds to the first token, loading included."""
    with Engine(model.model, folder, hmac_key=key, check=check) as engine:
        engine.answer("Warm?", documents=[], max_new_tokens=1)  # P's own state is made by the first question
        metadata = engine.answer(QUESTION, documents=document, mode=mode, max_new_tokens=1).metadata
        return metadata.seconds_to_first_token


def seconds_to_compare(path: Path, key: str | None) -> float:
    state = read_state(path, Seal.of(key))
    started = time.perf_counter()
    state.check()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores ({torch.get_num_threads()} threads), Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, {asked.model}"
    )
    print("checksums      state             file    to compare  first token  of it  without comparing  difference")
    for name, key in (("CRC-32", None), ("HMAC key", KEY)):
        with tempfile.TemporaryDirectory() as folder, Engine.from_pretrained(
            asked.model, store=Path(folder) / "kv", hmac_key=key
        ) as engine:
            document = Document(long_text(engine.model, asked.tokens))
            engine.ingest(document, keep=0.25)
            for record in engine.states(document.id):
                mode = "full" if record.compression.is_full else "compressed"
                seconds_to_compare(record.path, key)  # whatever the disk needs is not the checksums'
                compare = statistics.median(seconds_to_compare(record.path, key) for _ in range(asked.rounds))
                place = engine.store.folder
                # Taken in turns: the machine's mood is the same for both.
                pairs = [
                    [first_answer(engine, place, document.id, mode, key, check) for check in (True, False)]
                    for _ in range(asked.rounds)
                ]
                checked, unchecked = (statistics.median(pair[at] for pair in pairs) for at in (0, 1))
                print(
                    f"{name:9} {record.compression!s:>20} {record.file_bytes / 1e6:6.1f} MB {1e3 * compare:8.1f} ms "
                    f"{1e3 * checked:9.0f} ms {compare / checked:6.1%} {1e3 * unchecked:15.0f} ms "
                    f"{(checked - unchecked) / checked:10.1%}"
                )


if __name__ == "__main__":
    main()
