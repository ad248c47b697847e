"""How much of a joint prefill composed documents keep, at several fractions of repaired tokens.

    python benchmarks/repair.py DATA.jsonl --model FOLDER --limit 20

DATA.jsonl: one question a line, {"question", "answers", "passages": [{"text"}]}. Figures: gold-answer NLL in nats per
token, and the share of the gap between joint prefill and no document. Two choices of tokens to repair: the first ones
of each document, and those that the question attends to most (which costs a second pass over the question).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import tempfile

import torch
import transformers

from kv_rag import Engine
from kv_rag.compose import Piece, compose, computed_tokens
from kv_rag.likelihood import answer_likelihood
from kv_rag.prompt import Choice
from kv_rag.snapkv import window_attention

FRACTIONS = (0.0, 0.05, 0.15, 0.3, 1.0)


def attended_tokens(engine: Engine, pieces: list[Piece], repair: float) -> list[torch.Tensor]:
    """For each piece the tokens to compute, the repaired ones chosen by the question's attention over all layers."""
    first = compose(engine.model, pieces, repair=0, reserve=1, chunk=512, window=pieces[-1].tokens)
    total = sum(
        window_attention(queries, layer).sum(dim=0)
        for queries, layer in zip(first.window, first.state.layers, strict=True)
    )
    chosen = []
    for begin, piece in zip(first.begins[0], pieces, strict=True):
        if piece.cache is None or piece.exact:
            chosen.append(computed_tokens(piece, 0))
            continue
        scores = total[begin : begin + piece.tokens]
        chosen.append(scores.topk(math.ceil(repair * piece.tokens)).indices.sort().values)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", default="bundled:smollm2-135m")
    parser.add_argument("--limit", type=int, default=50)
    arguments = parser.parse_args()
    records = [json.loads(line) for line in open(arguments.data)][: arguments.limit]
    print(f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}, "
          f"{arguments.model}, {len(records)} questions")  # fmt: skip
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, Engine.from_pretrained(arguments.model, store=folder) as engine:
        for record in records:
            for name, nll in measure(engine, record).items():
                results.setdefault(name, []).append(nll)
            print(".", end="", file=sys.stderr, flush=True)
    mean = {name: statistics.mean(values) for name, values in results.items()}
    joint, none = mean["first 1.0"], mean["no document"]
    print()
    for name, value in mean.items():
        print(f"{name:24}{value:8.4f} nats   {100 * (none - value) / (none - joint):6.1f}% of the gap")


def measure(engine: Engine, record: dict) -> dict[str, float]:
    texts = [passage["text"] for passage in record["passages"]]
    ids = [entry.id for entry in engine.ingest(texts, retain="full")]
    question, answer = record["question"], record["answers"][0]
    answer_ids = engine.model.encode(answer, template=False)
    plan = engine._plan(engine._question_segments(question, ids, "error"), Choice("full"), "error")
    nll = {"no document": engine.likelihood(question, answer, documents=[]).nll}
    for repair in FRACTIONS:
        for policy in ("first", "attended"):
            if policy == "attended" and repair in (0.0, 1.0):
                continue
            repaired = attended_tokens(engine, plan.pieces, repair) if policy == "attended" else None
            composed = compose(
                engine.model, plan.pieces, repair=repair, reserve=answer_ids.numel(), chunk=512, repaired=repaired
            )
            likelihood = answer_likelihood(engine.model, composed.logits, composed.state, answer_ids)
            nll[f"{policy} {repair}"] = likelihood.nll
    for document_id in ids:
        engine.remove(document_id)
    return nll


if __name__ == "__main__":
    main()
