"""Seconds to the first token and decode speed: plain transformers against the three modes, in one run.

    python benchmarks/ttft.py --model bundled:smollm2-135m --tokens 4000

Prints the machine, the versions and both sides. The text is made here, so nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from kv_rag import Engine
from kv_rag import engine as engine_module
from kv_rag.document import Compression
from kv_rag.model import LanguageModel

QUESTION = "Which colour was painted on the door of house number forty, and who lived there at that time?"


def long_text(model: LanguageModel, tokens: int) -> str:
    """A text of about ``tokens`` tokens: a register of invented houses."""
    colours = ["red", "green", "blue", "white", "black", "yellow", "grey", "brown"]
    names = ["Ada", "Bo", "Carl", "Dina", "Egon", "Frida", "Gustav", "Hilde", "Ivo", "Jana"]
    lines: list[str] = []
    while model.encode("\n".join(lines)).numel() < tokens:
        for _ in range(10):
            n = len(lines)
            lines.append(
                f"House number {n} has a {colours[n * 7 % 8]} door. {names[n * 3 % 10]} has lived there since "
                f"{1900 + n * 13 % 100} and keeps {n * 5 % 17} chickens in the yard behind it."
            )
    return "\n".join(lines)


def median(action: Callable[[], float], repeats: int) -> float:
    action()
    return statistics.median(action() for _ in range(repeats))


def plain(engine: Engine, prompt: str, decode: int) -> tuple[float, float]:
    """Plain transformers: seconds to first token of the whole prompt, then tokens a second."""
    model, ids = engine.model.model, engine.model.encode(prompt)[None]
    with torch.no_grad():
        started = time.perf_counter()
        output = model(ids, use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        first = time.perf_counter() - started
        name = "cache" if "cache" in output else "past_key_values"  # renamed in newer transformers
        cache = output[name]
        started = time.perf_counter()
        for _ in range(decode):
            output = model(token, use_cache=True, **{name: cache})
            token = output.logits[:, -1].argmax(-1, keepdim=True)
        return first, decode / (time.perf_counter() - started)


def plain_prefill(engine: Engine, ids: torch.Tensor) -> float:
    """Seconds for plain transformers to read ``ids`` and keep their state."""
    started = time.perf_counter()
    with torch.no_grad():
        engine.model.model.get_decoder()(ids[None], use_cache=True)
    return time.perf_counter() - started


def ours(engine: Engine, decode: int, **options: Any) -> dict[str, float]:
    # Without documents the engine adds no instruction; the floor is to read exactly what follows the document.
    question = QUESTION if options["documents"] else engine_module.QUESTION.format(joint="", question=QUESTION)
    answer = engine.answer(question, max_new_tokens=decode, **options)
    metadata = answer.metadata
    return {
        "first": metadata.seconds_to_first_token,
        "rate": 1 / metadata.seconds_per_token if metadata.seconds_per_token else float("nan"),
        "resident_bytes": metadata.resident_bytes,
        "pairs": metadata.pairs_kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--method", default="keydiff")
    parser.add_argument("--allocation", default="uniform")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, Python "
          f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Engine.from_pretrained(arguments.model, store=folder) as engine:
        rows = measure(engine, arguments)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


def measure(engine: Engine, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    text = long_text(engine.model, arguments.tokens)
    entry = engine.ingest(text, method=arguments.method, allocation=arguments.allocation, keep=0.5, retain="both")[0]
    document_id = entry.id
    for keep in (0.25, 0.1):
        engine.ingest(text, method=arguments.method, allocation=arguments.allocation, keep=keep)
    ids = torch.cat([engine.model.header[1], engine.model.encode(text, template=False)])
    ingest_seconds, prefill_seconds = [], []
    for _ in range(2):  # in turn, so that a drift of the machine's speed meets both
        prefill_seconds.append(plain_prefill(engine, ids))
        engine.remove(document_id)
        started = time.perf_counter()
        engine.ingest(text, method=arguments.method, allocation=arguments.allocation, keep=0.25, retain="compressed")
        ingest_seconds.append(time.perf_counter() - started)
    engine.ingest(text, retain="full")
    for keep in (0.5, 0.1):
        engine.ingest(text, method=arguments.method, allocation=arguments.allocation, keep=keep)

    def report(name: str, first: float, rate: float, **more: Any) -> dict[str, Any]:
        ratio = "" if not rows else f"{first / rows[0]['first']:8.2f} x floor"
        print(f"{name:32}{first:9.3f} s {rate:8.1f} tokens/s {ratio}  {more or ''}")
        return {"name": name, "first": first, "rate": rate, **more}

    rows: list[dict[str, Any]] = []
    print(f"document {ids.numel()} tokens, question {engine.model.encode(QUESTION).numel()} tokens, "
          f"median of {arguments.repeats}")  # fmt: skip
    floor = [ours(engine, arguments.decode, documents=[]) for _ in range(arguments.repeats + 1)][1:]
    rows.append(report("question alone (floor)", *(statistics.median(r[k] for r in floor) for k in ("first", "rate"))))
    variants: list[tuple[str, dict[str, Any]]] = [("full", {"mode": "full"})]
    variants += [(f"snapkv keep {keep}", {"mode": "snapkv", "keep": keep}) for keep in (0.5, 0.25, 0.1)]
    variants += [(f"compressed keep {keep}", {"mode": "compressed", "keep": keep}) for keep in (0.5, 0.25, 0.1)]
    for name, options in variants:
        runs = [ours(engine, arguments.decode, documents=document_id, **options) for _ in range(arguments.repeats + 1)]
        first, rate = (statistics.median(run[key] for run in runs[1:]) for key in ("first", "rate"))
        rows.append(report(name, first, rate, resident_mb=round(runs[-1]["resident_bytes"] / 1e6, 2)))
    prompt = engine.model.render([{"role": "user", "content": f"{text}\n\n{QUESTION}"}])
    first, rate = plain(engine, prompt, arguments.decode)
    rows.append(report("plain transformers, whole prompt", first, rate))
    full_bytes = engine.store.get(document_id, Compression.full()).nbytes
    for keep in (0.5, 0.25, 0.1):
        settings = {} if arguments.allocation == "uniform" else {"allocation": arguments.allocation}
        state = engine.store.get(document_id, Compression.of(arguments.method, keep=keep, settings=settings))
        print(f"bytes at keep {keep}: {state.nbytes / full_bytes:.4f} of full ({full_bytes / 1e6:.1f} MB)")
    print(f"ingest {min(ingest_seconds):.2f} s, plain prefill {min(prefill_seconds):.2f} s: "
          f"ratio {min(ingest_seconds) / min(prefill_seconds):.3f}")  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
