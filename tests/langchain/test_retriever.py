"""The mode as a retriever setting: copies with references, ingesting, overrides for one call."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kv_rag import ChatKVRag, KVModeCompressor, KVRagRetriever, strip_references
from pydantic import ValidationError

from kv_rag.errors import EmptyInput, InvalidSetting, StateMissing
from tests.conftest import text_of
from tests.langchain.conftest import Fixed, format_docs, served


def modes(documents: list[Document]) -> list[str]:
    return [document.page_content.split(":")[1] for document in documents]


@pytest.fixture
def retriever(base: Fixed, llm: ChatKVRag) -> KVRagRetriever:
    return KVRagRetriever(base=base, llm=llm, mode="snapkv", keep=0.5)


def test_documents_come_back_as_copies_with_references(retriever: KVRagRetriever, documents: list[Document]) -> None:
    before = [document.model_dump() for document in documents]
    found = retriever.invoke("x")
    assert all(document.page_content.startswith("[[kv:snapkv:0.5:") for document in found)
    assert [document.model_dump() for document in documents] == before
    assert strip_references(found) == documents
    assert strip_references(found[0]) == documents[0]
    assert strip_references(format_docs(found)) == format_docs(documents)
    found[0].metadata["seen"] = True
    assert "seen" not in documents[0].metadata


def test_the_model_is_served_what_the_retriever_chose(retriever: KVRagRetriever, llm: ChatKVRag) -> None:
    message = llm.invoke(format_docs(retriever.invoke("x")) + "\n\nWhat?")
    assert served(message) == ("snapkv", 2)
    assert 0.4 < message.response_metadata["keep"] < 0.6


def test_on_miss_ingests_what_the_mode_needs_and_no_more(base: Fixed, llm: ChatKVRag, documents: list[Document]) -> None:
    KVRagRetriever(base=base, llm=llm, mode="compressed", keep=0.5).invoke("x")
    engine = llm.load()
    [state] = engine.states(documents[0].page_content)
    assert (state.compression.is_full, state.compression.keep) == (False, 0.5)
    KVRagRetriever(base=base, llm=llm, mode="full").invoke("x")
    assert len(engine.states(documents[0].page_content)) == 2
    assert engine.documents()[0].name == "file1"


def test_a_keep_that_is_no_round_number_is_served(base: Fixed, llm: ChatKVRag) -> None:
    found = KVRagRetriever(base=base, llm=llm, mode="compressed", keep=1 / 3).invoke("x")
    assert served(llm.invoke(format_docs(found) + "\n\nWhat?")) == ("compressed", 2)


def test_what_is_stored_costs_no_forward_pass(retriever: KVRagRetriever, llm: ChatKVRag, monkeypatch: Any) -> None:
    retriever.invoke("x")
    monkeypatch.setattr(llm.load().model, "run", None)
    retriever.invoke("x")


def test_on_miss_prefill_leaves_it_to_the_model_and_error_names_the_way_out(base: Fixed, llm: ChatKVRag) -> None:
    found = KVRagRetriever(base=base, llm=llm, on_miss="prefill").invoke("x")
    message = llm.invoke(format_docs(found) + "\n\nWhat?")
    assert message.response_metadata["documents"] == []
    with pytest.raises(StateMissing, match=r"'file1'.*ingest_documents"):
        KVRagRetriever(base=base, llm=llm, on_miss="error").invoke("x")


def test_without_a_chat_model_only_references_are_written(base: Fixed) -> None:
    assert modes(KVRagRetriever(base=base, mode="full").invoke("x")) == ["full", "full"]


def test_documents_of_a_vector_store_go_straight_in(retriever: KVRagRetriever, documents: list[Document]) -> None:
    from langchain_core.embeddings import DeterministicFakeEmbedding

    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    store.add_documents(documents)
    ingested = retriever.ingest_documents(store.similarity_search("x", k=2), progress=False)
    assert sorted(one.name or "" for one in ingested) == ["file1", "file2"]
    assert all(one.new for one in ingested)
    again = retriever.llm.ingest_documents(retriever.invoke("x"), progress=False) if retriever.llm else []
    assert {one.id for one in again} == {one.id for one in ingested}


# --- overrides for one call ---


async def test_the_mode_can_be_given_for_one_call(retriever: KVRagRetriever) -> None:
    config: Any = {"configurable": {"kv_mode": "full"}}
    assert modes(retriever.invoke("x", kv_mode="full")) == ["full", "full"]
    assert modes(retriever.invoke("x", config)) == ["full", "full"]
    assert modes(retriever.invoke("x", config, kv_mode="compressed")) == ["compressed", "compressed"]
    assert modes(retriever.with_config(config).invoke("x")) == ["full", "full"]
    assert modes(await retriever.ainvoke("x", config)) == ["full", "full"]
    assert modes(await retriever.ainvoke("x", kv_mode="full")) == ["full", "full"]
    assert [modes(found) for found in retriever.stream("x", config)] == [["full", "full"]]
    assert [modes(found) async for found in retriever.astream("x", config)] == [["full", "full"]]
    assert modes(retriever.invoke("x")) == ["snapkv", "snapkv"]


async def test_batches_keep_their_modes_apart(retriever: KVRagRetriever) -> None:
    wanted = ["full", "compressed", "snapkv"] * 2
    configs: Any = [{"configurable": {"kv_mode": mode}} for mode in wanted]
    assert [modes(found)[0] for found in retriever.batch(["x"] * 6, configs)] == wanted
    assert [modes(found)[0] for found in await retriever.abatch(["x"] * 6, configs)] == wanted


def test_other_arguments_and_the_config_reach_the_base_retriever(base: Fixed, llm: ChatKVRag) -> None:
    assert len(KVRagRetriever(base=base, llm=llm).invoke("x", k=1)) == 1
    flexible = base.configurable_fields(found=ConfigurableField(id="found"))
    found = KVRagRetriever(base=flexible, llm=llm).invoke("x", {"configurable": {"found": [Document(text_of(99))]}})
    assert len(found) == 1


def test_any_runnable_can_be_the_base(documents: list[Document], llm: ChatKVRag) -> None:
    base = RunnableLambda(lambda _: documents)
    assert modes(KVRagRetriever(base=base, llm=llm, mode="full").invoke("x")) == ["full", "full"]


def test_our_retriever_is_a_retriever(retriever: KVRagRetriever) -> None:
    assert isinstance(retriever, BaseRetriever)


# --- the compressor ---


async def test_the_compressor_does_the_same(base: Fixed, llm: ChatKVRag, documents: list[Document]) -> None:
    compressor = KVModeCompressor(mode="snapkv", keep=0.5, llm=llm)
    around = ContextualCompressionRetriever(base_compressor=compressor, base_retriever=base)
    found = around.invoke("x")
    assert modes(found) == ["snapkv", "snapkv"]
    assert strip_references(found) == documents
    assert modes(await around.ainvoke("x")) == ["snapkv", "snapkv"]
    assert served(llm.invoke(format_docs(found) + "\n\nWhat?")) == ("snapkv", 2)


async def test_the_compressor_follows_the_config_of_its_chain(base: Fixed) -> None:
    around = ContextualCompressionRetriever(base_compressor=KVModeCompressor(mode="full"), base_retriever=base)
    chain = around | RunnableLambda(modes)
    wanted = ["snapkv", "compressed", "full"]
    configs: Any = [{"configurable": {"kv_mode": mode}} for mode in wanted]
    for mode, config in zip(wanted, configs, strict=True):
        assert chain.invoke("x", config) == [mode] * 2
        assert await chain.ainvoke("x", config) == [mode] * 2
    chain_of_chains = RunnableLambda(lambda query: query) | {"documents": around}
    assert [modes(found["documents"])[0] for found in chain_of_chains.batch(["x"] * 3, configs)] == wanted


def test_a_compressor_after_our_retriever_replaces_its_choice(retriever: KVRagRetriever) -> None:
    found = KVModeCompressor(mode="full").compress_documents(retriever.invoke("x"), "x")
    assert modes(list(found)) == ["full", "full"]
    assert all(document.page_content.count("[[kv:") == 1 for document in found)


# --- bad input ---


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"mode": "fast"}, "mode must be one of"),
        ({"keep": 25}, "keep=0.25"),
        ({"on_miss": "skip"}, "on_miss must be one of"),
        ({"on_miss": "ingest"}, "needs the chat model's store"),
        ({"kept": 1}, "kept"),
    ],
)
def test_bad_settings_are_refused_when_made(base: Fixed, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        KVRagRetriever(base=base, **settings)
    with pytest.raises(ValidationError, match=told):
        KVModeCompressor(**settings)


def test_bad_settings_of_a_call_are_refused(retriever: KVRagRetriever, base: Fixed) -> None:
    with pytest.raises(InvalidSetting, match="mode must be"):
        retriever.invoke("x", kv_mode="fast")
    with pytest.raises(InvalidSetting, match="keep must be"):
        retriever.invoke("x", {"configurable": {"kv_keep": 25}})
    with pytest.raises(InvalidSetting, match="pass llm"):
        KVRagRetriever(base=base).ingest_documents(["x"])


def test_a_document_without_text_is_named(llm: ChatKVRag) -> None:
    base = Fixed(found=[Document(" ", metadata={"source": "blank.txt"})])
    with pytest.raises(EmptyInput, match=r"blank\.txt"):
        KVRagRetriever(base=base, llm=llm).invoke("x")
    with pytest.raises(EmptyInput, match=r"blank\.txt"):
        llm.ingest_documents(base.found, progress=False)
