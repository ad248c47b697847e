"""The LLM on its own: its eight ways to answer, settings, events, threads, errors."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, ImageBlock, MessageRole
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index_kv_rag import KVRagLLM
from transformers import LogitsProcessor

from kv_rag import Choice, Engine, with_reference
from kv_rag.errors import (
    ContextOverflow,
    EmptyInput,
    InvalidSetting,
    ModelNotFound,
    StateMissing,
    StoreMismatch,
)
from tests.conftest import text_of
from tests.llama_index.conftest import Raw, served

TEXT = text_of(120, 1)
PROMPT = f"{TEXT}\n\nWhat?"
WAYS = ("complete", "stream_complete", "chat", "stream_chat")
AWAYS = tuple("a" + way for way in WAYS)
Response = ChatResponse | CompletionResponse


@pytest.fixture(autouse=True)
def _ingested(engine: Engine) -> None:
    engine.ingest(TEXT, keep=0.5)


def given(way: str, prompt: str = PROMPT) -> Any:
    return [ChatMessage(role="user", content=prompt)] if "chat" in way else prompt


def call(llm: KVRagLLM, way: str, prompt: str = PROMPT, **settings: Any) -> list[Response]:
    """All responses of a way to answer; one if it does not stream."""
    got = getattr(llm, way)(given(way, prompt), **settings)
    return list(got) if "stream" in way else [got]


async def acall(llm: KVRagLLM, way: str, prompt: str = PROMPT, **settings: Any) -> list[Response]:
    got = await getattr(llm, way)(given(way, prompt), **settings)
    return [one async for one in got] if "stream" in way else [got]


def text(response: Response) -> str:
    return response.text if isinstance(response, CompletionResponse) else response.message.content or ""


# --- eight ways ---


async def test_all_eight_ways_give_the_engines_answer_from_the_state(llm: KVRagLLM, engine: Engine) -> None:
    expected = engine.complete(PROMPT, max_new_tokens=6).text
    assert expected
    got = [call(llm, way) for way in WAYS] + [await acall(llm, way) for way in AWAYS]
    for responses in got:
        assert text(responses[-1]) == expected
        assert served(responses[-1].raw, engine) == ("compressed", 1)


async def test_streams_hand_out_new_pieces_and_the_whole_text(llm: KVRagLLM) -> None:
    for responses in (call(llm, "stream_chat"), await acall(llm, "astream_complete")):
        assert len(responses) > 2
        so_far = ""
        for response in responses:
            so_far += response.delta or ""
            assert text(response) == so_far
        assert [response.raw is None for response in responses] == [True] * (len(responses) - 1) + [False]


def test_the_template_is_applied_once_and_never_to_a_formatted_prompt(llm: KVRagLLM, engine: Engine) -> None:
    rendered = engine.model.render([{"role": "user", "content": PROMPT}])
    [once], [formatted] = call(llm, "complete"), call(llm, "complete", rendered, formatted=True)
    bare = call(llm, "complete", formatted=True)[0]
    assert once.raw["prompt_tokens"] == formatted.raw["prompt_tokens"] == engine.model.encode(rendered).numel()
    assert text(once) == text(formatted)
    assert bare.raw["prompt_tokens"] == len(PROMPT)
    assert call(llm, "chat")[0].raw["prompt_tokens"] == once.raw["prompt_tokens"]


def test_the_figures_are_plain_numbers(llm: KVRagLLM) -> None:
    raw: Raw = call(llm, "chat")[0].raw
    assert json.loads(json.dumps(raw))["usage"]["prompt_tokens"] == raw["prompt_tokens"]


async def test_every_way_fires_events(llm: KVRagLLM, answers: list[Raw]) -> None:
    debug, counter = LlamaDebugHandler(print_trace_on_end=False), TokenCountingHandler()
    llm.callback_manager = CallbackManager([debug, counter])
    for way in WAYS:
        call(llm, way)
    for way in AWAYS:
        await acall(llm, way)
    pairs = debug.get_event_pairs(CBEventType.LLM)
    assert [len(pair) for pair in pairs] == [2] * 8
    assert len(answers) == 8 and all(raw["generated_tokens"] == 6 for raw in answers)
    assert counter.completion_llm_token_count == 48
    assert counter.prompt_llm_token_count == sum(raw["prompt_tokens"] for raw in answers)


# --- settings ---


def test_settings_of_the_constructor_and_of_one_call_work(engine: Engine) -> None:
    llm = KVRagLLM(engine=engine, max_tokens=3, mode="full")
    assert call(llm, "complete")[0].raw["generated_tokens"] == 3
    raw = call(llm, "complete", max_tokens=5, mode="snapkv", keep=0.25)[0].raw
    assert (raw["generated_tokens"], raw["mode"]) == (5, "snapkv")
    assert 0.2 < raw["keep"] < 0.3
    assert call(llm, "chat", repair=1.0)[0].raw["repair"] == 1.0
    sampled = [text(call(llm, "chat", temperature=2.0, seed=seed, max_tokens=12)[0]) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_keep_belongs_to_its_mode(engine: Engine) -> None:
    llm = KVRagLLM(engine=engine, max_tokens=3, mode="compressed", keep=0.5)
    assert call(llm, "complete")[0].raw["keep"] == pytest.approx(0.5, abs=0.05)
    assert call(llm, "complete", mode="snapkv")[0].raw["keep"] < 0.4  # the default of snapkv, not 0.5


def test_stop_strings_end_the_answer_and_are_no_part_of_it(engine: Engine) -> None:
    llm = KVRagLLM(engine=engine, max_tokens=12, temperature=1.0, seed=3)
    whole = text(call(llm, "complete")[0])
    stop = whole[4]
    for settings in ({"stop": [stop]}, {"stop": stop}):
        assert text(call(llm, "complete", **settings)[0]) == whole[: whole.index(stop)]
        own = KVRagLLM(engine=engine, max_tokens=12, temperature=1.0, seed=3, **settings)
        assert text(call(own, "stream_chat")[-1]) == whole[: whole.index(stop)]


def test_a_forced_mode_wins_over_a_reference(llm: KVRagLLM, engine: Engine) -> None:
    prompt = with_reference(TEXT, Choice("full")) + "\n\nWhat?"
    assert served(call(llm, "chat", prompt)[0].raw, engine) == ("full", 1)
    assert served(call(llm, "chat", prompt, mode="snapkv", force=True)[0].raw, engine) == ("snapkv", 1)


def test_own_prompt_functions_replace_the_template(engine: Engine) -> None:
    llm = KVRagLLM(
        engine=engine, max_tokens=2,
        messages_to_prompt=lambda messages: "M" + str(messages[-1].content),
        completion_to_prompt=lambda prompt: "C" + prompt,
    )  # fmt: skip
    assert call(llm, "complete", "1234567")[0].raw["prompt_tokens"] == 8
    assert call(llm, "chat", "1234567")[0].raw["prompt_tokens"] == 8
    assert call(llm, "complete", "1234567", formatted=True)[0].raw["prompt_tokens"] == 7


def test_metadata_is_true(llm: KVRagLLM, engine: Engine) -> None:
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output) == (engine.model.context, 6)
    assert (metadata.is_chat_model, metadata.is_function_calling_model) == (True, False)


def test_what_describes_an_llm_loads_no_model(tmp_path: Path) -> None:
    llm = KVRagLLM("no/such/model", tmp_path, mode="full", max_tokens=9)
    assert llm.class_name() == "KVRagLLM"
    assert llm.to_payload()["model_name"] == "no/such/model"
    saved = json.loads(llm.to_json())
    assert (saved["class_name"], saved["mode"], saved["store"]) == ("KVRagLLM", "full", str(tmp_path))
    again = KVRagLLM.from_dict(saved)
    assert again.to_dict() == llm.to_dict()
    with pytest.raises(ModelNotFound, match="no/such/model"):
        llm.load()


def test_llms_of_the_same_model_and_store_share_an_engine(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setattr(Engine, "from_pretrained", lambda **settings: opened.append(settings) or engine)
    llms = [KVRagLLM("a", tmp_path), KVRagLLM("a", tmp_path, mode="full"), KVRagLLM("b", tmp_path)]
    assert all(llm.load() is engine for llm in [*llms, llms[0].model_copy(deep=True)])
    assert [settings["model"] for settings in opened] == ["a", "b"]


def test_references_cost_no_tokens_and_the_tokenizer_is_the_models(llm: KVRagLLM) -> None:
    assert len(llm.tokenizer_fn(with_reference(TEXT, Choice("full")))) == len(llm.tokenizer_fn(TEXT)) == 120


# --- structured output ---


class Person(BaseModel):
    name: str


class Spell(LogitsProcessor):
    """Makes random weights say ``text``."""

    def __init__(self, text: str, engine: Engine) -> None:
        self.ids, self.at = engine.model.encode(text).tolist(), 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self.ids[self.at]] = 0
        self.at += 1
        return forced


async def test_structured_predict_gives_the_object_that_the_model_spells(llm: KVRagLLM, engine: Engine) -> None:
    prompt, said = PromptTemplate("Name one of {topic}."), '{"name": "Ada"}'

    def forced() -> dict[str, Any]:
        return {"logits_processor": [Spell(said, engine)], "max_tokens": len(said)}

    assert llm.structured_predict(Person, prompt, forced(), topic="them") == Person(name="Ada")
    assert await llm.astructured_predict(Person, prompt, forced(), topic="them") == Person(name="Ada")


async def test_structured_predict_raises_llama_indexs_own_error_for_what_is_no_object(llm: KVRagLLM) -> None:
    with pytest.raises(ValueError, match="extract json"):
        llm.structured_predict(Person, PromptTemplate("Name one."))
    with pytest.raises(ValueError, match="extract json"):
        await llm.astructured_predict(Person, PromptTemplate("Name one."))


# --- event loops, threads ---


@pytest.fixture
def slow(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Forward passes that take long; the list holds when each began."""
    began: list[float] = []
    run = engine.model.run

    def slowly(*arguments: Any, **settings: Any) -> Any:
        began.append(time.perf_counter())
        time.sleep(0.05)
        return run(*arguments, **settings)

    monkeypatch.setattr(engine.model, "run", slowly)
    return began


@pytest.mark.parametrize("way", AWAYS)
async def test_async_ways_leave_the_event_loop_free(way: str, llm: KVRagLLM, slow: list[float]) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await acall(llm, way)
    ticking.cancel()
    assert len(slow) >= 6
    assert ticks >= len(slow)  # a loop that is blocked through every pass ticks at most once between two


@pytest.mark.parametrize("way", AWAYS)
async def test_cancelling_frees_the_engine(way: str, llm: KVRagLLM, slow: list[float]) -> None:
    task = asyncio.create_task(acall(llm, way, max_tokens=1000))
    while len(slow) < 4:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    passes = len(slow)
    await asyncio.sleep(0.3)
    assert len(slow) <= passes + 1  # the pass that was running, and none after it
    assert text((await acall(llm, "acomplete"))[0])


async def test_a_stream_that_is_not_read_on_holds_nobody_up(llm: KVRagLLM) -> None:
    stream = await llm.astream_complete(PROMPT, max_tokens=1000)
    first = await anext(stream)
    assert first.delta and text((await acall(llm, "achat"))[0])
    await stream.aclose()


def test_tokens_counted_in_other_threads_change_no_prompt(llm: KVRagLLM, engine: Engine) -> None:
    """Control tokens count as such in a prompt and not in a document; a tokenizer keeps that setting to itself."""
    prompt = engine.model.render([{"role": "user", "content": "What?"}])
    expected, counted = engine.model.encode(prompt).numel(), len(llm.tokenizer_fn(prompt))
    assert expected < counted
    wrong, done = [], threading.Event()

    def count() -> None:
        while not done.is_set():
            wrong.append(len(llm.tokenizer_fn(prompt)) != counted)

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    lengths = {engine.model.encode(prompt).numel() for _ in range(1000)}
    done.set()
    for thread in threads:
        thread.join()
    assert lengths == {expected} and not any(wrong)


# --- errors ---


class Breaks(LogitsProcessor):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("third token")
        return scores


async def test_an_error_inside_a_stream_reaches_the_reader(llm: KVRagLLM, engine: Engine) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm.callback_manager = CallbackManager([debug])
    for way in ("stream_complete", "stream_chat"):
        with pytest.raises(RuntimeError, match="third token"):
            call(llm, way, logits_processor=[Breaks()])
        with pytest.raises(RuntimeError, match="third token"):
            await acall(llm, "a" + way, logits_processor=[Breaks()])
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 4  # each has ended, with an exception
    assert text(call(llm, "complete")[0])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"mode": "fast"}, "mode must be one of"),
        ({"keep": 25}, "keep=0.25"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "at least 1"),
        ({"stop": [""]}, "stop"),
        ({"repair": 2}, "repair"),
        ({"on_missing": "skip"}, "on_missing"),
        ({"temprature": 1}, "unknown setting temprature"),
    ],
)
async def test_bad_settings_are_refused_when_made_and_for_one_call(
    settings: dict[str, Any], told: str, llm: KVRagLLM, engine: Engine
) -> None:
    with pytest.raises(InvalidSetting, match=told):
        KVRagLLM(engine=engine, **settings)
    for way in WAYS:
        with pytest.raises(InvalidSetting, match=told):
            call(llm, way, **settings)
        with pytest.raises(InvalidSetting, match=told):
            await acall(llm, "a" + way, **settings)


def test_one_of_model_and_engine_is_needed(engine: Engine) -> None:
    with pytest.raises(InvalidSetting, match="one of model and engine"):
        KVRagLLM()
    with pytest.raises(InvalidSetting, match="one of model and engine"):
        KVRagLLM("bundled:smollm2-135m", engine=engine)


def test_a_store_of_another_model_is_refused_by_name(engine: Engine, make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(StoreMismatch, match="weights"):
        make_engine("qwen2")  # in the folder of the llama


def test_prompts_that_cannot_be_answered(llm: KVRagLLM, engine: Engine) -> None:
    with pytest.raises(ContextOverflow, match="fewer or shorter documents"):
        call(llm, "complete", "x" * 3000)
    with pytest.raises(EmptyInput):
        call(llm, "complete", " ")
    with pytest.raises(EmptyInput):
        call(llm, "chat", "")
    with pytest.raises(EmptyInput, match="must end in text"):
        call(llm, "complete", TEXT, formatted=True)
    engine.remove(TEXT)
    engine.ingest(TEXT, retain="compressed")
    with pytest.raises(StateMissing, match="retain="):
        call(llm, "complete", mode="full", on_missing="error")


def test_messages_that_cannot_be_read_are_refused(llm: KVRagLLM) -> None:
    for message, told in (
        (ChatMessage(role=MessageRole.TOOL, content="x"), "tool"),
        (ChatMessage(role="assistant", content="x", additional_kwargs={"tool_calls": [1]}), "tool calls"),
        (ChatMessage(role="user", blocks=[ImageBlock(image=b"x")]), "image"),
    ):
        with pytest.raises(InvalidSetting, match=told):
            llm.chat([message])


def test_several_system_messages_and_turns_of_one_role_are_merged(llm: KVRagLLM, engine: Engine) -> None:
    messages = [("system", "A"), ("user", "B"), ("user", "C"), ("assistant", "D"), ("system", "E"), ("user", "F")]
    raw = llm.chat([ChatMessage(role=role, content=content) for role, content in messages]).raw
    merged = [("system", "A\n\nE"), ("user", "B\n\nC"), ("assistant", "D"), ("user", "F")]
    rendered = engine.model.render([{"role": role, "content": content} for role, content in merged])
    assert raw["prompt_tokens"] == engine.model.encode(rendered).numel()


def test_ingest_nodes_takes_nodes_and_texts(llm: KVRagLLM, engine: Engine) -> None:
    node = TextNode(text=text_of(90, 5), metadata={"file_name": "five.txt"})
    ingested = llm.ingest_nodes([node, text_of(80, 6)], progress=False, keep=0.5)
    assert [(one.name, one.tokens) for one in ingested] == [("five.txt", 90), (None, 80)]
