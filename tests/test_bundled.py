"""The real model: meaning, where tiny random models can only show equalities."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_rag import Engine, demo
from kv_rag.bundled import BUNDLED
from kv_rag.demo.__main__ import ASKED
from kv_rag.prompt import MODES

pytestmark = pytest.mark.bundled
QUESTIONS = {question.question: question for question in demo.questions()}
ONE_DOCUMENT = [text for text in ASKED if len(QUESTIONS[text].documents) == 1]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine.from_pretrained(f"bundled:{next(iter(BUNDLED))}", store=tmp_path_factory.mktemp("kv")) as engine:
        names = {name for text in ASKED for name in QUESTIONS[text].documents}
        engine.ingest([document for document in demo.documents() if document.name in names], retain="both")
        yield engine


@pytest.mark.parametrize("text", ASKED)
def test_facts_of_the_demo_are_found_in_full_mode(engine: Engine, text: str) -> None:
    answer = demo.answer(engine, QUESTIONS[text], "full")
    assert QUESTIONS[text].is_answered_by(answer.text), answer.text
    assert len(answer.metadata.documents) == len(QUESTIONS[text].documents)


@pytest.mark.parametrize("mode", MODES)
def test_second_question_about_another_place_is_answered_as_well_as_the_first(engine: Engine, mode: str) -> None:
    right = demo.answered(engine, [QUESTIONS[text] for text in ONE_DOCUMENT], mode)
    assert [question.question for question in right] == ONE_DOCUMENT


def test_full_mode_says_what_plain_transformers_says(engine: Engine) -> None:
    question = QUESTIONS[ONE_DOCUMENT[0]]
    assert demo.answer(engine, question, "full").text == demo.plain_answer(engine, question).text
