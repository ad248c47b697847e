"""LLMs over tiny random weights, nodes for them, and what every answer is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import llama_index.core
import llama_index.core.instrumentation as instrumentation
import pytest
import torch
from llama_index.core import Settings
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle, TextNode
from llama_index_kv_rag import KVRagLLM, KVRagRetriever

from kv_rag import Engine
from tests.conftest import text_of

Raw = dict[str, Any]


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
def llm(engine: Engine) -> KVRagLLM:
    return KVRagLLM(engine=engine, max_tokens=6)


@pytest.fixture(autouse=True)
def _tokenizer_of_the_model(llm: KVRagLLM) -> Iterator[None]:
    """LlamaIndex counts tokens in a global tokenizer."""
    Settings.tokenizer = llm.tokenizer_fn
    yield
    Settings._tokenizer = None
    llama_index.core.global_tokenizer = None


class Fixed(BaseRetriever):
    """Finds the same nodes whatever is asked."""

    def __init__(self, nodes: list[BaseNode]) -> None:
        self.nodes = nodes
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1 / at) for at, node in enumerate(self.nodes, 1)]


@pytest.fixture
def nodes() -> list[TextNode]:
    """Two nodes of 120 tokens each, and LlamaIndex puts metadata before the text of one."""
    return [
        TextNode(text=text_of(120, 1), id_="one", metadata={"file_name": "one.txt", "page": 3}),
        TextNode(text=text_of(120, 2), id_="two"),
    ]


@pytest.fixture
def base(nodes: list[TextNode]) -> Fixed:
    return Fixed(nodes)


@pytest.fixture
def retriever(base: Fixed, llm: KVRagLLM) -> KVRagRetriever:
    return KVRagRetriever(base, llm=llm, mode="compressed", keep=0.5)


class _Figures(BaseEventHandler):
    raws: list[Raw]

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, (LLMChatEndEvent, LLMCompletionEndEvent)):
            self.raws.append(event.response.raw)


@pytest.fixture
def answers() -> Iterator[list[Raw]]:
    """Figures of every answer since the test began, for engines that hand out only text."""
    handler = _Figures(raws=[])
    dispatcher = instrumentation.get_dispatcher()
    dispatcher.add_event_handler(handler)
    yield handler.raws
    dispatcher.event_handlers.remove(handler)


def served(raw: Raw | None, engine: Engine) -> tuple[str, int]:
    """The mode, and how many documents came from states; a document that was read instead fails here."""
    assert raw is not None
    read = [stretch["what"] for stretch in raw["prefilled"] if stretch["what"] != "text"]
    assert not read, raw["prefilled"]
    tokens = sum(engine.document(document_id).tokens for document_id in raw["documents"])
    header = engine.model.header[1].numel()
    assert raw["cached_tokens"] in (tokens, tokens + header), raw
    return raw["mode"], len(raw["documents"])
