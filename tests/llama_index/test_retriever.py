"""The mode as a retriever setting: copies of nodes, what is ingested when, overrides for one query, bad input."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from typing import Any

import pytest
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import (
    Document,
    ImageNode,
    IndexNode,
    MediaResource,
    MetadataMode,
    Node,
    NodeWithScore,
    TextNode,
)
from llama_index_kv_rag import (
    KVModePostprocessor,
    KVQueryBundle,
    KVRagIngestion,
    KVRagLLM,
    KVRagRetriever,
    kv_mode,
    strip_references,
)
from pydantic import ValidationError

from kv_rag import Engine
from kv_rag.errors import ContextOverflow, EmptyInput, InvalidSetting, StateMissing, UnknownMethod
from tests.conftest import text_of
from tests.llama_index.conftest import Fixed, served


def modes(found: list[NodeWithScore]) -> list[str]:
    return [one.node.get_content(MetadataMode.LLM).partition("[[kv:")[2].partition(":")[0] for one in found]


# --- copies ---


def test_only_what_the_model_reads_carries_the_reference(
    retriever: KVRagRetriever, nodes: list[TextNode], base: Fixed
) -> None:
    before = [node.to_dict() for node in nodes]
    found = retriever.retrieve("x")
    assert modes(found) == ["compressed", "compressed"]
    for one, node in zip(found, nodes, strict=True):
        copy = one.node
        assert copy is not node
        assert (copy.text, copy.hash, copy.node_id) == (node.text, node.hash, node.node_id)  # type: ignore[attr-defined]
        for mode in (MetadataMode.NONE, MetadataMode.EMBED, MetadataMode.ALL):
            assert copy.get_content(mode) == node.get_content(mode)
        assert strip_references(copy.get_content(MetadataMode.LLM)) == node.get_content(MetadataMode.LLM)
        [*head, content] = copy.get_content_blocks(MetadataMode.LLM)
        [*expected_head, expected] = node.get_content_blocks(MetadataMode.LLM)
        assert head == expected_head
        assert content.text.startswith("[[kv:compressed:0.5:")  # type: ignore[union-attr]
        assert strip_references(content.text) == expected.text  # type: ignore[union-attr]
        copy.metadata["new"] = 1
    assert [one.score for one in found] == [one.score for one in base.retrieve("x")]
    assert [node.to_dict() for node in nodes] == before


def test_a_copy_is_stored_as_a_plain_node(retriever: KVRagRetriever, nodes: list[TextNode]) -> None:
    saved = json.dumps([one.node.to_dict() for one in retriever.retrieve("x")])
    assert "[[kv:" not in saved
    assert [TextNode.from_dict(one) for one in json.loads(saved)] == nodes


def test_our_retriever_inside_ours_has_the_last_word(retriever: KVRagRetriever, llm: KVRagLLM) -> None:
    found = KVRagRetriever(retriever, llm=llm, mode="full").retrieve("x")
    assert modes(found) == ["full", "full"]
    assert all(one.node.get_content(MetadataMode.LLM).count("[[kv:") == 1 for one in found)


def test_what_stands_for_more_than_its_text_is_handed_on(llm: KVRagLLM, engine: Engine) -> None:
    resource = MediaResource(data=b"png", mimetype="image/png")
    others: list[Any] = [
        IndexNode(text="An index", index_id="1"),
        ImageNode(text="An image", image="x"),
        Node(text_resource=MediaResource(text="Both"), image_resource=resource),
    ]
    found = KVRagRetriever(Fixed(others), llm=llm).retrieve("x")
    assert [one.node for one in found] == others
    assert engine.documents() == []


def test_documents_and_multimodal_nodes_with_nothing_but_text_are_texts(llm: KVRagLLM, engine: Engine) -> None:
    several: list[Any] = [Document(text=text_of(60, 1)), Node(text_resource=MediaResource(text=text_of(60, 2)))]
    assert modes(KVRagRetriever(Fixed(several), llm=llm).retrieve("x")) == ["compressed"] * 2
    assert len(engine.documents()) == 2


# --- what is not in the store ---


def test_a_miss_ingests_what_the_mode_needs_and_no_more(base: Fixed, llm: KVRagLLM, nodes: list[TextNode]) -> None:
    KVRagRetriever(base, llm=llm, mode="compressed", keep=0.5).retrieve("x")
    engine = llm.load()
    [state] = engine.states(nodes[0].text)
    assert (state.compression.is_full, state.compression.keep) == (False, 0.5)
    KVRagRetriever(base, llm=llm, mode="snapkv").retrieve("x")
    assert len(engine.states(nodes[0].text)) == 2
    assert engine.documents()[0].name == "one.txt"


def test_a_keep_that_is_no_round_number_is_served(base: Fixed, llm: KVRagLLM, engine: Engine) -> None:
    found = KVRagRetriever(base, llm=llm, mode="compressed", keep=1 / 3).retrieve("x")
    text = "\n\n".join(one.node.get_content(MetadataMode.LLM) for one in found)
    assert served(llm.complete(text + "\n\nWhat?").raw, engine) == ("compressed", 2)


def test_what_is_stored_costs_no_forward_pass(
    retriever: KVRagRetriever, llm: KVRagLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever.retrieve("x")
    monkeypatch.setattr(llm.load().model, "run", None)
    assert len(retriever.retrieve("x")) == 2


def test_on_miss_prefill_leaves_it_to_the_model_and_error_names_the_way_out(
    base: Fixed, llm: KVRagLLM, engine: Engine
) -> None:
    found = KVRagRetriever(base, llm=llm, on_miss="prefill").retrieve("x")
    assert modes(found) == ["compressed"] * 2
    raw = llm.complete(found[0].node.get_content(MetadataMode.LLM) + "\n\nWhat?").raw
    assert raw["documents"] == () and engine.documents() == []
    with pytest.raises(StateMissing, match=r"'one.txt'.*KVRagIngestion"):
        KVRagRetriever(base, llm=llm, on_miss="error").retrieve("x")
    assert modes(KVRagRetriever(base, mode="full").retrieve("x")) == ["full", "full"]  # without an LLM


async def test_ingesting_in_an_event_loop_leaves_it_free(
    retriever: KVRagRetriever, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.model.run

    def slowly(*arguments: Any, **settings: Any) -> Any:
        time.sleep(0.3)
        return run(*arguments, **settings)

    monkeypatch.setattr(engine.model, "run", slowly)
    task = asyncio.create_task(retriever.aretrieve("x"))
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.02)
        ticks += 1
    assert len(await task) == 2 and ticks >= 5


def joined_prefetch() -> None:
    for thread in threading.enumerate():
        if thread.name == "kv_rag prefetch":
            thread.join()


@pytest.mark.parametrize("mode", ["compressed", "snapkv", "full"])
def test_prefetch_holds_the_states_in_memory_before_the_question(
    mode: str, base: Fixed, engine: Engine, nodes: list[TextNode]
) -> None:
    engine.ingest([node.text for node in nodes], keep=0.5)
    later = Engine(engine.model, engine.store.folder)  # as after a restart
    llm = KVRagLLM(engine=later)
    KVRagRetriever(base, llm=llm, mode=mode).retrieve("x")
    assert later.memory().resident_bytes == 0
    KVRagRetriever(base, llm=llm, mode=mode, prefetch=True).retrieve("x")
    joined_prefetch()
    pairs = (0.5 if mode == "compressed" else 1) * 2 * 120 * engine.model.layers * engine.model.kv_heads
    assert later.memory().resident_bytes >= pairs * 2 * 4 * engine.model.head_dim


def test_prefetch_leaves_what_is_missing_to_the_question(base: Fixed, llm: KVRagLLM, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG, "llama_index_kv_rag.nodes")
    assert len(KVRagRetriever(base, llm=llm, on_miss="prefill", prefetch=True).retrieve("x")) == 2
    joined_prefetch()
    assert "could not be read ahead" in caplog.text


# --- overrides for one query ---


async def test_the_mode_can_be_given_for_one_query(retriever: KVRagRetriever) -> None:
    bundle = KVQueryBundle("x", mode="full")
    assert modes(retriever.retrieve(bundle)) == ["full", "full"]
    assert modes(await retriever.aretrieve(bundle)) == ["full", "full"]
    with kv_mode("snapkv", keep=0.25):
        assert modes(retriever.retrieve("x")) == ["snapkv", "snapkv"]
        assert modes(await retriever.aretrieve("x")) == ["snapkv", "snapkv"]
        assert "[[kv:snapkv:0.25:" in retriever.retrieve("x")[1].node.get_content(MetadataMode.LLM)
        assert modes(retriever.retrieve(bundle)) == ["full", "full"]
        with kv_mode("full"):
            assert modes(retriever.retrieve("x")) == ["full", "full"]
        assert modes(retriever.retrieve(KVQueryBundle("x"))) == ["snapkv", "snapkv"]
    assert modes(retriever.retrieve("x")) == ["compressed", "compressed"]


def test_keep_belongs_to_its_mode(retriever: KVRagRetriever) -> None:
    with kv_mode("snapkv"):
        assert "[[kv:snapkv:*:" in retriever.retrieve("x")[1].node.get_content(MetadataMode.LLM)
    with kv_mode(keep=0.75):
        assert "[[kv:compressed:0.75:" in retriever.retrieve("x")[1].node.get_content(MetadataMode.LLM)


async def test_tasks_keep_their_modes_apart(retriever: KVRagRetriever) -> None:
    async def found(mode: str) -> str:
        with kv_mode(mode):
            await asyncio.sleep(0)
            return modes(await retriever.aretrieve("x"))[0]

    wanted = ["full", "compressed", "snapkv"] * 2
    assert await asyncio.gather(*map(found, wanted)) == wanted


# --- ingesting ahead ---


async def test_a_pipeline_ingests_the_nodes_it_makes(llm: KVRagLLM, engine: Engine, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "llama_index_kv_rag")
    step = KVRagIngestion(llm=llm, progress=False, keep=0.5)
    pipeline = IngestionPipeline(transformations=[SentenceSplitter(chunk_size=100, chunk_overlap=0), step])
    text = " ".join(text_of(60, seed) + "." for seed in range(4))
    nodes = pipeline.run(documents=[Document(text=text)])
    assert len(nodes) == len(engine.documents()) == len(step.ingested) > 1
    assert [engine.document(node.get_content()).tokens for node in nodes] == [one.tokens for one in step.ingested]
    assert f"{sum(one.bytes_on_disk for one in step.ingested)} bytes on disk" in caplog.text
    later = Document(text=text_of(90, 9))
    await pipeline.arun(documents=[later])
    assert engine.document(later.text).tokens == 90


def test_ingesting_shows_a_progress_bar_unless_told_not_to(llm: KVRagLLM, nodes: list[TextNode], capsys: Any) -> None:
    KVRagIngestion(llm=llm, progress=False)(nodes[:1])
    assert "ingest" not in capsys.readouterr().err
    KVRagIngestion(llm=llm)(nodes[1:])
    assert "ingest" in capsys.readouterr().err


def test_an_existing_index_is_ingested_in_one_line(llm: KVRagLLM, nodes: list[TextNode]) -> None:
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(4))
    ingested = KVRagIngestion(llm=llm, progress=False).ingest_index(index)
    assert sorted(one.tokens for one in ingested) == [120, 120] and all(one.bytes_on_disk > 0 for one in ingested)
    empty = VectorStoreIndex([], embed_model=MockEmbedding(4))
    with pytest.raises(EmptyInput, match="pass them yourself"):
        KVRagIngestion(llm=llm, progress=False).ingest_index(empty)


def test_the_transformation_can_be_described(llm: KVRagLLM) -> None:
    saved = json.loads(KVRagIngestion(llm=llm, keep=0.5).to_json())
    assert (saved["class_name"], saved["keep"], saved["llm"]["class_name"]) == ("KVRagIngestion", 0.5, "KVRagLLM")


# --- bad input ---


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"mode": "fast"}, "mode must be one of"),
        ({"keep": 25}, "keep=0.25"),
        ({"on_miss": "skip"}, "on_miss must be one of"),
        ({"on_miss": "ingest"}, "needs the LLM's store"),
        ({"prefetch": True}, "needs the LLM's store"),
    ],
)
def test_bad_settings_are_refused_when_made(base: Fixed, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSetting, match=told):
        KVRagRetriever(base, **settings)
    with pytest.raises(InvalidSetting, match=told):
        KVModePostprocessor(**settings)


def test_unknown_settings_are_refused(base: Fixed, llm: KVRagLLM) -> None:
    with pytest.raises(TypeError, match="kept"):
        KVRagRetriever(base, kept=1)
    with pytest.raises(ValidationError, match="kept"):
        KVModePostprocessor(kept=1)
    with pytest.raises(ValidationError, match="kept"):
        KVRagIngestion(llm=llm, kept=1)


def test_bad_settings_of_one_query_are_refused(retriever: KVRagRetriever) -> None:
    with pytest.raises(InvalidSetting, match="mode must be"), kv_mode("fast"):
        pass
    with pytest.raises(InvalidSetting, match="keep must be"):
        retriever.retrieve(KVQueryBundle("x", keep=25))


def test_nodes_that_cannot_be_ingested_are_named(llm: KVRagLLM) -> None:
    blank = TextNode(text=" ", metadata={"file_name": "blank.txt"})
    with pytest.raises(EmptyInput, match=r"blank\.txt"):
        KVRagRetriever(Fixed([blank]), llm=llm).retrieve("x")
    with pytest.raises(EmptyInput, match=r"blank\.txt"):
        KVRagIngestion(llm=llm, progress=False)([blank])
    long = TextNode(text="x" * 3000, metadata={"file_name": "long.txt"})
    with pytest.raises(ContextOverflow, match=r"long\.txt.*split it"):
        KVRagRetriever(Fixed([long]), llm=llm).retrieve("x")
    with pytest.raises(UnknownMethod):
        KVRagIngestion(llm=llm, progress=False, method="best")([TextNode(text="A text.")])
