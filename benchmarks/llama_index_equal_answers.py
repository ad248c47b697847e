"""How often mode full answers as the same model does without any cache, both through LlamaIndex.

    pip install ".[llama-index]"
    python benchmarks/llama_index_equal_answers.py DATA.jsonl --model FOLDER --limit 50 --max-tokens 16

DATA.jsonl: one question a line, {"question", "answers", "passages": [{"text"}]}. Greedy answers of a RetrieverQueryEngine
(response mode compact), the passages as nodes. Besides equal answers it prints for both sides how many hold a gold answer:
where they differ, neither need be the wrong one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from llama_index.core import Settings
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index_kv_rag import KVRagLLM, KVRagRetriever

from kv_rag import Engine


class Passages(BaseRetriever):
    """Finds the passages of one record."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in self._texts]


class _Raws(BaseEventHandler):
    """Collects the figures of every answer."""

    raws: list[dict[str, Any]]

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent):
            self.raws.append(event.response.raw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", default="bundled:smollm2-135m")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--repair", type=float, default=None, help="default: the library's")
    parser.add_argument("--show", action="store_true", help="print both answers of every question")
    arguments = parser.parse_args()
    records = [json.loads(line) for line in Path(arguments.data).read_text("utf-8").splitlines()][: arguments.limit]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "llama-index-core"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
          f"Python {platform.python_version()}, {packages}, {arguments.model}, {len(records)} questions")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        with Engine.from_pretrained(arguments.model, store=f"{folder}/kv") as engine:
            compare(engine, Engine(engine.model, f"{folder}/empty"), records, arguments)


def compare(cached: Engine, empty: Engine, records: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    settings: dict[str, Any] = {"max_tokens": arguments.max_tokens}
    plain = KVRagLLM(engine=empty, **settings)
    llm = KVRagLLM(engine=cached, **settings, **({} if arguments.repair is None else {"repair": arguments.repair}))
    Settings.tokenizer = llm.tokenizer_fn
    raws = _Raws(raws=[])
    get_dispatcher().add_event_handler(raws)
    equal, right, right_plain, seconds, seconds_plain = 0, 0, 0, 0.0, 0.0
    for number, record in enumerate(records, 1):
        texts = [passage["text"] for passage in record["passages"]]
        nodes = Passages(texts)
        retriever = KVRagRetriever(nodes, llm=llm, mode="full")
        retriever.retrieve(record["question"])  # reads the passages: what a user does once, ahead of questions
        answer, took = ask(RetrieverQueryEngine.from_args(retriever, llm=llm), record["question"])
        assert len(raws.raws.pop()["documents"]) == len(texts)  # or it would compare a prefill with a prefill
        expected, took_plain = ask(RetrieverQueryEngine.from_args(nodes, llm=plain), record["question"])
        assert not raws.raws.pop()["documents"]
        equal += answer == expected
        right += holds(answer, record["answers"])
        right_plain += holds(expected, record["answers"])
        seconds, seconds_plain = seconds + took, seconds_plain + took_plain
        if arguments.show:
            print(f"{number}: {answer!r} | without a cache: {expected!r}")
        print(f"\r{number} of {len(records)}: {equal} equal", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"equal answers, mode full, repair {llm.repair:g}: {equal} of {len(records)}")
    print(f"with a gold answer: {right} from states, {right_plain} without a cache")
    print(f"seconds a question, passages read before: {seconds / len(records):.2f} from states, "
          f"{seconds_plain / len(records):.2f} without a cache")  # fmt: skip


def ask(engine: RetrieverQueryEngine, question: str) -> tuple[str, float]:
    started = time.perf_counter()
    return str(engine.query(question)).strip(), time.perf_counter() - started


def holds(answer: str, gold: list[str]) -> bool:
    return any(text.casefold() in answer.casefold() for text in gold)


if __name__ == "__main__":
    main()
