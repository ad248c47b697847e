"""Opening a store and finding documents in a prompt: does it depend on how many documents are stored?

    python benchmarks/store_size.py --documents 10 10000
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from kv_rag.document import Compression, Document, DocumentCache, LayerPairs
from kv_rag.errors import UnknownDocument
from kv_rag.prompt import DocumentSegment, split_prompt
from kv_rag.store import LocalStore

FINGERPRINT = {"weights": "none: these states are made up"}


def made_up(number: int) -> tuple[Document, DocumentCache]:
    """A document of about 1,500 characters with a state of one pair: only the store is measured."""
    sentence = f"Entry {number} of the register names the owner, the year {1900 + number % 100} and the street. "
    document = Document(f"Register, volume {number}. " + sentence * 20)
    layer = LayerPairs(torch.zeros(1, 8), torch.zeros(1, 8), torch.zeros(1, dtype=torch.int32), (1,))
    cache = DocumentCache(document.id, torch.tensor([number]), (layer,), Compression.of("random", keep=1.0))
    return document, cache


def median_ms(action: Callable[[], object], repeats: int = 30) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[10, 10_000])
    arguments = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}")
    for count in arguments.documents:
        with tempfile.TemporaryDirectory() as folder:
            store = LocalStore(folder, FINGERPRINT)
            for number in range(count):
                store.put(*made_up(number))
            prompt = "\n\n".join(made_up(number)[0].text for number in range(5)) + "\n\nWho owns the house?"
            found = find(store, prompt)
            assert found == 5, found
            opening = median_ms(lambda folder=folder: LocalStore(folder, FINGERPRINT).close())
            finding = median_ms(lambda store=store, prompt=prompt: find(store, prompt))
            print(f"{count:7} documents: open {opening:6.2f} ms, find 5 in {len(prompt)} characters {finding:6.2f} ms")
            store.close()


def find(store: LocalStore, prompt: str) -> int:
    def characters(document_id: str) -> int | None:
        try:
            return store.document(document_id).characters
        except UnknownDocument:
            return None

    return sum(isinstance(part, DocumentSegment) for part in split_prompt(prompt, store.candidates, characters))


if __name__ == "__main__":
    main()
