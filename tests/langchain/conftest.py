"""Chat models over tiny random weights, documents for them, and what every answer is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.retrievers import BaseRetriever
from langchain_kv_rag import ChatKVRag

from kv_rag import Engine
from tests.conftest import text_of


@pytest.fixture(autouse=True, scope="package")
def _one_cpu_thread() -> Iterator[None]:
    """Tiny models gain nothing from several, and lose tenfold on a busy machine."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


@pytest.fixture
def llm(engine: Engine) -> ChatKVRag:
    return ChatKVRag(engine=engine, max_tokens=6)


class Fixed(BaseRetriever):
    """Finds the same documents whatever is asked."""

    found: list[Document]

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return self.found[:k]


@pytest.fixture
def documents() -> list[Document]:
    """Two documents of 120 tokens each."""
    return [Document(text_of(120, seed), metadata={"source": f"file{seed}"}, id=str(seed)) for seed in (1, 2)]


@pytest.fixture
def base(documents: list[Document]) -> Fixed:
    return Fixed(found=documents)


def format_docs(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def cache_read(message: BaseMessage) -> int:
    """Tokens of documents that came from states."""
    return int(message.usage_metadata["input_token_details"]["cache_read"])  # type: ignore[attr-defined]


def served(message: BaseMessage) -> tuple[str, int]:
    """The mode, and how many documents came from states; a document that was read instead fails here."""
    figures: dict[str, Any] = message.response_metadata
    read = [stretch["what"] for stretch in figures["prefilled"] if stretch["what"] != "text"]
    assert not read, figures["prefilled"]
    assert bool(figures["documents"]) == (cache_read(message) > 0)
    return figures["mode"], len(figures["documents"])
