"""The chat model on its own: answers, settings, figures, streams, threads, event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError, ModelInvalidRequestError, ModelNotFoundError
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.runnables import ConfigurableField
from langchain_kv_rag import ChatKVRag
from langchain_kv_rag.messages import turns_of
from langchain_text_splitters import RecursiveCharacterTextSplitter
from pydantic import ValidationError

from kv_rag import Choice, Engine, with_reference
from kv_rag.errors import ContextOverflow, EmptyInput, InvalidSetting, KVRagError
from kv_rag.model import LanguageModel
from kv_rag.turns import acceptable
from tests.conftest import text_of, tiny_model, tiny_tokenizer
from tests.langchain.conftest import cache_read, served

DOCUMENT = text_of(150, 5)
ASK = DOCUMENT + "\n\nWhat?"


@pytest.fixture
def ready(llm: ChatKVRag) -> ChatKVRag:
    """With DOCUMENT in its store, in all modes."""
    llm.ingest_documents([DOCUMENT], progress=False)
    return llm


# --- answers ---


def test_an_answer_is_the_engines(ready: ChatKVRag, engine: Engine) -> None:
    expected = engine.chat([{"role": "user", "content": ASK}], max_new_tokens=6)
    message = ready.invoke(ASK)
    assert message.content == expected.text
    assert served(message) == ("compressed", 1)


def test_cache_read_counts_the_documents_tokens_only(ready: ChatKVRag) -> None:
    assert cache_read(ready.invoke(ASK)) == 150
    assert cache_read(ready.invoke(ASK + DOCUMENT, mode="full", repair=0.0)) == 300
    assert cache_read(ready.invoke([("system", "Other."), ("human", ASK)])) == 150
    assert cache_read(ready.invoke("What?")) == 0


def test_usage_adds_up_and_comes_once_in_a_stream(ready: ChatKVRag) -> None:
    whole = ready.invoke(ASK)
    chunks = list(ready.stream(ASK))
    added = chunks[0]
    for chunk in chunks[1:]:
        added = added + chunk
    assert added.content == whole.content
    assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
    assert added.usage_metadata == whole.usage_metadata
    assert whole.usage_metadata["total_tokens"] == sum(whole.usage_metadata[k] for k in ("input_tokens", "output_tokens"))
    assert added.response_metadata["model_name"] == whole.response_metadata["model_name"]
    assert chunks[-1].chunk_position == "last"


def test_response_metadata_names_what_happened(ready: ChatKVRag) -> None:
    figures = ready.invoke(ASK, mode="snapkv", keep=0.5).response_metadata
    assert figures["mode"] == "snapkv"
    assert 0.4 < figures["keep"] < 0.6
    assert figures["seconds_to_first_token"] > 0
    assert figures["resident_bytes"] > 0
    assert figures["model_name"] == ready.model_name
    assert figures["finish_reason"] in ("length", "stop")


class SeenTokens:
    """Stands where transformers' logits processors do: remembers the prompt's and the answer's token ids."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.ids = input_ids[0].tolist()
        return scores


def test_with_repair_1_the_tokens_are_those_of_the_same_model_without_a_cache(
    make_engine: Callable[..., Engine], engine: Engine
) -> None:
    plain = ChatKVRag(engine=make_engine(folder="empty"), max_tokens=12)
    cached = ChatKVRag(engine=engine, max_tokens=12, mode="full", repair=1.0)
    texts = [text_of(150, seed) for seed in range(4)]
    cached.ingest_documents(texts, progress=False)
    for first, second in pairwise(texts):
        messages = [SystemMessage("Be terse."), HumanMessage(f"{first}\n\n{second}\n\nWhich?")]
        ours, theirs = SeenTokens(), SeenTokens()
        message = cached.invoke(messages, logits_processor=(ours,))
        assert len(message.response_metadata["documents"]) == 2
        assert message.content == plain.invoke(messages, logits_processor=(theirs,)).content
        assert ours.ids == theirs.ids and len(ours.ids) > 300


def test_ingesting_shows_a_progress_bar_unless_told_not_to(llm: ChatKVRag, capsys: pytest.CaptureFixture[str]) -> None:
    splitter = RecursiveCharacterTextSplitter(chunk_size=80, chunk_overlap=0)
    parts = splitter.create_documents([text_of(150, 8).replace("_", " ")])
    assert len(llm.ingest_documents(parts)) == len(parts) > 1
    assert "ingest:" in capsys.readouterr().err
    llm.ingest_documents([DOCUMENT], progress=False)
    assert capsys.readouterr().err == ""


# --- settings ---


def test_settings_of_a_call_win_over_those_of_the_constructor(ready: ChatKVRag) -> None:
    assert ready.invoke(ASK, max_tokens=3).usage_metadata["output_tokens"] <= 3
    assert served(ready.bind(mode="full").invoke(ASK)) == ("full", 1)
    assert served(ready.with_config(configurable={"kv_mode": "snapkv"}).invoke(ASK)) == ("snapkv", 1)
    assert served(ready.invoke(ASK, {"configurable": {"kv_mode": "snapkv"}}, kv_mode="full")) == ("full", 1)


def test_stop_cuts_the_answer_in_the_call_and_in_the_constructor(ready: ChatKVRag, engine: Engine) -> None:
    whole = str(ready.invoke(ASK, max_tokens=40).content)
    stop = whole[3:5]
    expected = whole[: whole.index(stop)]
    assert ready.invoke(ASK, stop=[stop], max_tokens=40).content == expected
    assert ready.bind(stop=[stop]).invoke(ASK, max_tokens=40).content == expected
    assert ChatKVRag(engine=engine, stop=stop, max_tokens=40).invoke(ASK).content == expected


def test_a_seed_makes_sampling_repeatable(ready: ChatKVRag) -> None:
    def sample(seed: int) -> Any:
        return ready.invoke(ASK, temperature=1.5, top_p=0.95, seed=seed, max_tokens=8).content

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(3)}) > 1


def test_configurable_fields_share_the_loaded_model(ready: ChatKVRag) -> None:
    flexible = ready.configurable_fields(mode=ConfigurableField(id="which"))
    assert served(flexible.invoke(ASK, {"configurable": {"which": "full"}})) == ("full", 1)


def test_models_of_the_same_settings_share_one_engine_that_is_opened_late(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def open_tiny(model: str, store: Any, **_: Any) -> Engine:
        opened.append(model)
        return Engine(LanguageModel(tiny_model("llama"), tiny_tokenizer()), store)

    monkeypatch.setattr(Engine, "from_pretrained", open_tiny)
    first = ChatKVRag(model="some/model", store=tmp_path / "kv")
    second = ChatKVRag(model="some/model", store=tmp_path / "kv", temperature=0.5)
    assert not opened
    engines: list[Engine] = []
    threads = [threading.Thread(target=lambda one=one: engines.append(one.load())) for one in (first, second) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == ["some/model"]
    assert len({id(engine) for engine in engines}) == 1


def test_langchains_cache_tells_modes_apart(ready: ChatKVRag, engine: Engine) -> None:
    cached = ChatKVRag(engine=engine, max_tokens=6, cache=InMemoryCache())
    assert served(cached.invoke(ASK)) == ("compressed", 1)
    assert served(cached.invoke(ASK, {"configurable": {"kv_mode": "full"}})) == ("full", 1)
    assert served(ChatKVRag(engine=engine, max_tokens=6, mode="snapkv", cache=cached.cache).invoke(ASK)) == ("snapkv", 1)
    assert served(cached.invoke(ASK)) == ("compressed", 1)


def test_force_wins_over_a_retrievers_choice(ready: ChatKVRag) -> None:
    asked = with_reference(DOCUMENT, Choice("snapkv", 0.5)) + "\n\nWhat?"
    assert served(ready.invoke(asked)) == ("snapkv", 1)
    assert served(ready.invoke(asked, mode="full")) == ("snapkv", 1)
    assert served(ready.invoke(asked, mode="full", force=True)) == ("full", 1)


def test_tokens_are_counted_with_the_models_own_tokenizer(llm: ChatKVRag) -> None:
    assert llm.get_num_tokens("héllo") == 6


# --- messages ---


def test_what_strict_templates_refuse_is_merged(ready: ChatKVRag) -> None:
    messages = [
        HumanMessage("one", name="ann"), SystemMessage("first"), HumanMessage(ASK), AIMessage("yes"),
        AIMessage([{"type": "text", "text": "and "}, "no"]), ChatMessage("more", role="user"), SystemMessage("second"),
    ]  # fmt: skip
    turns = turns_of(messages)
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    assert turns[0]["content"] == "first\n\nsecond"
    assert turns[1]["content"] == "ann: one\n\n" + ASK
    assert turns[2]["content"] == "yes\n\nand no"
    assert served(ready.invoke(messages)) == ("compressed", 1)


STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
)


def test_a_template_without_system_and_with_alternating_roles_is_served(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = STRICT
    with Engine.from_pretrained((tiny_model("llama"), tokenizer), store=tmp_path / "kv") as engine:
        strict = ChatKVRag(engine=engine, max_tokens=4)
        strict.ingest_documents([DOCUMENT], progress=False)
        for messages in (
            [("system", "Be brief."), ("human", ASK)],
            [("ai", "Hello!"), ("human", ASK)],
            [("human", "a"), ("human", ASK), ("system", "b")],
        ):
            assert served(strict.invoke(messages)) == ("compressed", 1)
        assert acceptable(engine, [{"role": "user", "content": "a"}]) == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "messages",
    [
        [HumanMessage("a"), ToolMessage("b", tool_call_id="1")],
        [HumanMessage([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}])],
        [HumanMessage("a"), AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}]), HumanMessage("b")],
        [ChatMessage("a", role="critic")],
    ],
)
def test_messages_it_cannot_read_are_refused_by_name(llm: ChatKVRag, messages: Any) -> None:
    with pytest.raises(ModelInvalidRequestError, match="cannot be read") as caught:
        llm.invoke(messages)
    assert isinstance(caught.value, InvalidSetting)


# --- bad input ---


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"mode": "fast"}, "mode must be one of"),
        ({"keep": 25}, "keep=0.25"),
        ({"temprature": 1.0}, "unknown setting temprature"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"max_tokens": 0}, "max_new_tokens must be"),
    ],
)
def test_bad_settings_are_refused_when_made_and_when_called(llm: ChatKVRag, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ChatKVRag(engine=llm.engine, **settings)
    with pytest.raises(ModelInvalidRequestError, match=told):
        llm.invoke("Hello", **settings)
    with pytest.raises(ModelInvalidRequestError, match=told):
        list(llm.stream("Hello", **settings))


async def test_bad_settings_are_refused_asynchronously(llm: ChatKVRag) -> None:
    with pytest.raises(ModelInvalidRequestError, match="mode must be"):
        await llm.ainvoke("Hello", mode="fast")
    with pytest.raises(ModelInvalidRequestError, match="mode must be"):
        [chunk async for chunk in llm.astream("Hello", config={"configurable": {"kv_mode": "fast"}})]


def test_neither_or_both_of_model_and_engine_are_refused(engine: Engine) -> None:
    with pytest.raises(ValidationError, match="no model"):
        ChatKVRag()
    with pytest.raises(ValidationError, match="either model or engine"):
        ChatKVRag(model="a", engine=engine)


def test_empty_prompts_are_refused(llm: ChatKVRag) -> None:
    for messages in ("", " \n", [SystemMessage("")]):
        with pytest.raises(EmptyInput):
            llm.invoke(messages)


def test_a_prompt_too_long_raises_langchains_error_and_ours(llm: ChatKVRag) -> None:
    with pytest.raises(ContextOverflowError, match="the model's context holds 2048") as caught:
        llm.invoke("a" * 3000)
    assert isinstance(caught.value, ContextOverflow)
    with pytest.raises(ContextOverflowError):
        llm.ingest_documents(["a" * 3000], progress=False)


def test_a_model_that_is_not_there_raises_langchains_error_when_first_used(tmp_path: Any) -> None:
    absent = ChatKVRag(model=str(tmp_path / "nothing"), store=tmp_path / "kv")
    with pytest.raises(ModelNotFoundError) as caught:
        absent.invoke("Hello")
    assert isinstance(caught.value, OSError)


def test_a_store_of_another_model_is_refused(ready: ChatKVRag, make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(KVRagError):
        make_engine("qwen2")  # the same folder


def test_no_tools_and_no_structured_output_are_claimed(llm: ChatKVRag) -> None:
    with pytest.raises(NotImplementedError):
        llm.bind_tools([])
    with pytest.raises(NotImplementedError):
        llm.with_structured_output({"title": "a", "type": "object", "properties": {}})
    with pytest.raises(ModelInvalidRequestError, match="unknown setting tools"):
        llm.invoke("Hello", tools=[])


# --- streams, threads, event loops ---


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.text, self.ended = "", 0

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.text += token

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ended += 1


class AsyncTokens(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.text = ""

    async def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.text += token


async def test_callbacks_get_every_token_once(ready: ChatKVRag) -> None:
    expected = ready.invoke(ASK).content
    invoked, streamed, awaited, iterated = Tokens(), Tokens(), AsyncTokens(), AsyncTokens()
    ready.invoke(ASK, {"callbacks": [invoked]})
    list(ready.stream(ASK, {"callbacks": [streamed]}))
    await ready.ainvoke(ASK, {"callbacks": [awaited]})
    [chunk async for chunk in ready.astream(ASK, {"callbacks": [iterated]})]
    assert [invoked.text, streamed.text, awaited.text, iterated.text] == [expected] * 4
    assert invoked.ended == streamed.ended == 1


async def test_all_ways_to_call_agree(ready: ChatKVRag) -> None:
    expected = ready.invoke(ASK)
    assert (await ready.ainvoke(ASK)).content == expected.content
    pieces: list[AIMessageChunk] = [chunk async for chunk in ready.astream(ASK)]
    assert "".join(str(piece.content) for piece in pieces) == expected.content
    assert [cache_read(piece) for piece in pieces if piece.usage_metadata] == [150]
    events = [event async for event in ready.astream_events(ASK, version="v2")]
    streamed = [event["data"]["chunk"].content for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(streamed) == expected.content
    assert served(events[-1]["data"]["output"]) == ("compressed", 1)


def test_two_streams_interleaved_keep_apart(ready: ChatKVRag) -> None:
    first, second = ready.stream(ASK, mode="full"), ready.stream(ASK, mode="snapkv", keep=0.1)
    texts = ["", ""]
    for one, other in zip(first, second, strict=False):
        texts[0] += str(one.content)
        texts[1] += str(other.content)
    assert str(ready.invoke(ASK, mode="full").content).startswith(texts[0])
    assert str(ready.invoke(ASK, mode="snapkv", keep=0.1).content).startswith(texts[1])
    assert texts[0]


def test_batches_keep_their_configs_apart(ready: ChatKVRag) -> None:
    modes = ["full", "snapkv", "compressed"] * 3
    configs = [{"configurable": {"kv_mode": mode}} for mode in modes]
    messages = ready.batch([ASK + str(index % 3) for index in range(9)], configs)
    assert [served(message) for message in messages] == [(mode, 1) for mode in modes]
    alone = [ready.invoke(ASK + str(index % 3), configs[index]).content for index in range(9)]
    assert [message.content for message in messages] == alone


async def test_batches_queue_for_the_model_unless_told_otherwise(ready: ChatKVRag) -> None:
    running, most = 0, 0

    class Watched(ChatKVRag):
        def _start(self, messages: Any, stop: Any, kwargs: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            return super()._start(messages, stop, kwargs)

        def _result(self, answer: Any) -> Any:
            nonlocal running
            running -= 1
            return super()._result(answer)

    watched = Watched(engine=ready.engine, max_tokens=3)
    watched.batch([ASK] * 4)
    await watched.abatch([ASK] * 4)
    assert most == 1
    watched.batch([ASK] * 4, {"max_concurrency": 4})


async def test_asynchronous_batches_keep_their_configs_apart(ready: ChatKVRag) -> None:
    modes = ["full", "snapkv", "compressed"] * 2
    messages = await ready.abatch([ASK] * 6, [{"configurable": {"kv_mode": mode}} for mode in modes])
    assert [served(message)[0] for message in messages] == modes


def test_threads_with_different_modes_agree_with_calls_one_by_one(ready: ChatKVRag) -> None:
    modes = ["full", "snapkv", "compressed", "full"]
    expected = [ready.invoke(ASK, mode=mode).content for mode in modes]
    results: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda at=at: results.update({at: ready.invoke(ASK, mode=modes[at])})) for at in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[at].content for at in range(4)] == expected
    assert [served(results[at])[0] for at in range(4)] == modes


async def test_the_event_loop_stays_free(ready: ChatKVRag, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ready.load().model.run

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return run(*args, **kwargs)

    monkeypatch.setattr(ready.load().model, "run", slow)
    task = asyncio.create_task(ready.ainvoke(ASK, max_tokens=2))
    longest, last = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.001)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    assert served(await task)[1] == 1
    assert longest < 0.2  # a call blocks for 0.3 at a time


async def test_cancelling_stops_the_work_and_frees_the_engine(ready: ChatKVRag, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    run = ready.load().model.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        time.sleep(0.01)
        return run(*args, **kwargs)

    monkeypatch.setattr(ready.load().model, "run", counted)
    for call in (ready.ainvoke(ASK, max_tokens=500), _collect(ready.astream(ASK, max_tokens=500))):
        task = asyncio.create_task(call)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)
        stopped_at = steps
        await asyncio.sleep(0.1)
        assert steps == stopped_at
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv_rag")]
    monkeypatch.undo()
    assert served(await ready.ainvoke(ASK))[1] == 1


async def _collect(chunks: Any) -> list[Any]:
    return [chunk async for chunk in chunks]


async def test_a_stream_left_early_is_closed(ready: ChatKVRag) -> None:
    stream = ready.astream(ASK, max_tokens=500)
    async for _ in stream:
        break
    await stream.aclose()
    await asyncio.sleep(0.05)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv_rag")]
