"""Which observation window and pooling SnapKV wants: gold-answer NLL from the pruned state.

    python benchmarks/snapkv_window.py DATA.jsonl --model FOLDER --documents 10 --questions 5

DATA.jsonl: either documents with questions ({"document", "questions": [{"q", "answers"}]}) or questions with passages
({"question", "answers", "passages"}). "all" is every prompt token after the last document, "words" the question's own.
Shares are of the gap between the full state and no document.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from kv_rag import Engine
from kv_rag.compose import compose
from kv_rag.likelihood import answer_likelihood
from kv_rag.prompt import Choice
from kv_rag.snapkv import Range, SnapKV, select, window_attention
from kv_rag.state import PromptState

# window, pool, pooling, vote, allocation
VARIANTS = [
    ("all", 5, "max", "mean", "uniform"), ("all", 7, "max", "mean", "uniform"), ("all", 5, "mean", "mean", "uniform"),
    ("words", 5, "max", "mean", "uniform"), ("all", 5, "max", "max", "uniform"), ("all", 5, "max", "max", "heads"),
    ("all", 5, "max", "max", "model"), ("all", 5, "max", "mean", "model"), ("all", 5, "max", "max", "pyramid"),
]  # fmt: skip
KEEPS = (0.25, 0.1)


def cases(path: str, documents: int, questions: int) -> Iterator[tuple[list[str], list[tuple[str, str]]]]:
    for line in list(open(path))[:documents]:
        record = json.loads(line)
        if "passages" in record:
            yield [entry["text"] for entry in record["passages"]], [(record["question"], record["answers"][0])]
        else:
            asked = [(entry["q"], entry["answers"][0]) for entry in record["questions"] if not entry.get("yesno")]
            yield [record["document"]], asked[:questions]


def measure(engine: Engine, ids: list[str], question: str, answer: str) -> dict[str, float]:
    model = engine.model
    answer_ids = model.encode(answer, template=False)
    plan = engine._plan(engine._question_segments(question, ids, "error"), Choice("snapkv"), "error")
    after = plan.pieces[-1].tokens
    words = model.encode(question).numel()
    tail = model.encode(model.render([{"role": "user", "content": "x"}]).split("x")[-1]).numel()
    room = answer_ids.numel()
    nll = {"no document": engine.likelihood(question, answer, documents=[]).nll}
    composed = compose(model, plan.pieces, repair=0, reserve=room, chunk=512, window=after)
    full = engine.likelihood(question, answer, documents=ids, mode="full", repair=0)
    nll["full"] = full.nll
    for window, pool, pooling, vote, allocation in VARIANTS:
        scores = []
        for queries, layer in zip(composed.window, composed.state.layers, strict=True):
            if window == "words":  # the question's own words stand before the template's tail
                queries = queries[:, -(words + tail) : -tail]
                trimmed = type(layer)(layer.keys, layer.values, layer.length - tail)
                scores.append(torch.nn.functional.pad(window_attention(queries, trimmed, vote), (0, tail)))
            else:
                scores.append(window_attention(queries, layer, vote))
        for keep in KEEPS:
            ranges = [
                [Range(at, at + p.tokens, keep) for at, p in zip(row, plan.pieces, strict=True) if p.prunable]
                for row in composed.begins
            ]
            kept = select(scores, ranges, SnapKV(pool=pool, pooling=pooling, vote=vote, allocation=allocation))
            layers = [layer.keep_only(slots, room) for layer, slots in zip(composed.state.layers, kept, strict=True)]
            state = PromptState(layers, composed.state.tokens)
            name = f"{window} {pooling} {pool} vote {vote} {allocation} keep {keep}"
            nll[name] = answer_likelihood(model, composed.logits, state, answer_ids).nll
    return nll


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", default="bundled:smollm2-135m")
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--questions", type=int, default=5)
    arguments = parser.parse_args()
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, Engine.from_pretrained(arguments.model, store=folder) as engine:
        for texts, asked in cases(arguments.data, arguments.documents, arguments.questions):
            ids = [entry.id for entry in engine.ingest(texts, retain="full")]
            for question, answer in asked:
                for name, value in measure(engine, ids, question, answer).items():
                    results.setdefault(name, []).append(value)
            for document_id in ids:
                engine.remove(document_id)
    report(arguments, results)


def report(arguments: Any, results: dict[str, list[float]]) -> None:
    print(f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}, "
          f"{arguments.model}, {len(results['full'])} questions")  # fmt: skip
    mean = {name: statistics.mean(values) for name, values in results.items()}
    for name, value in mean.items():
        share = 100 * (mean["no document"] - value) / (mean["no document"] - mean["full"])
        print(f"{name:44}{value:8.4f} nats {share:7.1f}% of the gap")


if __name__ == "__main__":
    main()
