"""What storing states in fewer bits costs: gold-answer likelihood and bytes on disk, per stored dtype.

    python benchmarks/quantised.py DATA.jsonl --model FOLDER --documents 40 --questions 3

DATA.jsonl: one document a line, {"document", "questions": [{"q", "answers"}]}. Figures: mean negative log-likelihood of
the gold answer in nats per token, its difference from the same pairs in the model's dtype (mean over the questions with
its standard error, which is what chance alone moves it), and bytes on disk per token of the documents. The text and the
token ids of a document are in its file too, so that the bytes shrink a little less than the pairs do.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import tempfile
from typing import Any

import torch
import transformers

from kv_rag import Engine
from kv_rag.document import MODEL, STORED_DTYPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", default="bundled:smollm2-135m")
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--questions", type=int, default=3, help="of each document")
    parser.add_argument("--method", default="keydiff")
    parser.add_argument("--keep", type=float, default=0.3)
    parser.add_argument("--allocation", default="uniform")
    parser.add_argument("--dtype", default="auto", help="of the model")
    arguments = parser.parse_args()
    with open(arguments.data) as lines:
        records = [json.loads(line) for line in lines][: arguments.documents]
    compression = {"method": arguments.method, "keep": arguments.keep, "allocation": arguments.allocation}
    kept = f"{arguments.method} {arguments.keep:g} {arguments.allocation}"
    losses: dict[tuple[str, str], list[float]] = {}
    nbytes: dict[tuple[str, str], int] = {}
    tokens = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine.from_pretrained(arguments.model, store=folder, dtype=arguments.dtype) as engine,
    ):
        print(f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}, "
              f"{arguments.model} in {engine.model.dtype}")  # fmt: skip
        for record in records:
            questions = record["questions"][: arguments.questions]
            for pairs, options in (("all", {"retain": "full"}), (kept, {"retain": "compressed", **compression})):
                for stored_dtype in STORED_DTYPES:
                    [entry] = engine.ingest(record["document"], stored_dtype=stored_dtype, **options)
                    if not entry.new and stored_dtype != MODEL:
                        continue  # the model's own dtype
                    key = (pairs, stored_dtype)
                    nbytes[key] = nbytes.get(key, 0) + engine.states(entry.id)[-1].file_bytes
                    losses.setdefault(key, []).extend(measure(engine, entry.id, questions, options["retain"]))
            tokens += entry.tokens
            engine.remove(entry.id)
            print(".", end="", file=sys.stderr, flush=True)
    print(f"{len(records)} documents, {len(next(iter(losses.values())))} questions")
    print(f"{'pairs':24}{'stored as':12}{'NLL':>8}{'difference':>22}{'bytes a token':>16}")
    for (pairs, stored_dtype), nll in losses.items():
        difference = [one - other for one, other in zip(nll, losses[pairs, MODEL], strict=True)]
        error = statistics.stdev(difference) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
        print(
            f"{pairs:24}{stored_dtype:12}{statistics.mean(nll):8.4f}"
            f"{statistics.mean(difference):+12.4f} ± {error:.4f}{nbytes[pairs, stored_dtype] / tokens:14,.0f}"
        )


def measure(engine: Engine, document_id: str, questions: list[dict[str, Any]], retain: str) -> list[float]:
    """Of the newest state, which is the one just stored."""
    mode = "full" if retain == "full" else "compressed"
    return [engine.likelihood(item["q"], item["answers"][0], documents=document_id, mode=mode).nll for item in questions]


if __name__ == "__main__":
    main()
