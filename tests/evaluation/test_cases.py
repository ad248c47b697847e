"""What a file of documents and questions may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kv_rag import demo
from kv_rag.errors import EmptyInput, InvalidSetting
from kv_rag.evaluation.cases import Asked, Case, load

SINGLE: dict[str, Any] = {
    "title": "Crane", "document": " The crane needs oil. ",
    "questions": [{"q": " What does it need? ", "answers": ["oil", "some oil"]}, {"q": "Who?", "answers": ["it"]}],
}  # fmt: skip
MULTI: dict[str, Any] = {
    "question": "Where is the market?", "answers": ["in town"],
    "passages": [{"title": "A", "text": "The market is in town. "}, {"title": "B", "text": "The town is small."}],
}  # fmt: skip


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_line_with_a_document_is_a_case_with_all_its_questions(tmp_path: Path) -> None:
    [case] = load(written(tmp_path, SINGLE))
    questions = (Asked("What does it need?", ("oil", "some oil")), Asked("Who?", ("it",)))
    assert case == Case("Crane", ("The crane needs oil.",), questions)


def test_a_line_with_passages_is_a_case_with_one_question(tmp_path: Path) -> None:
    [case] = load(written(tmp_path, MULTI))
    texts = ("The market is in town.", "The town is small.")
    assert case == Case("data.jsonl:1", texts, (Asked("Where is the market?", ("in town",)),))


def test_both_kinds_of_line_may_stand_in_one_file_with_empty_lines_between(tmp_path: Path) -> None:
    cases = load(written(tmp_path, SINGLE, "", MULTI, "  "))
    assert [len(case.documents) for case in cases] == [1, 2]


def test_a_document_without_a_title_is_named_by_its_line(tmp_path: Path) -> None:
    untitled = {**SINGLE, "title": None}
    assert [case.name for case in load(written(tmp_path, SINGLE, "", untitled))] == ["Crane", "data.jsonl:3"]


def test_the_same_passage_twice_is_one_document(tmp_path: Path) -> None:
    passages = [*MULTI["passages"], {"title": "C", "text": "The town is small."}]
    [case] = load(written(tmp_path, {**MULTI, "passages": passages}))
    assert len(case.documents) == 2


def test_a_line_separator_within_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    text = "One line.\u2028Another.\x85A third."
    [case] = load(written(tmp_path, json.dumps({**SINGLE, "document": text}, ensure_ascii=False)))
    assert case.documents == (text,)


def test_numbers_are_taken_as_answers_in_their_digits(tmp_path: Path) -> None:
    [case] = load(written(tmp_path, {**MULTI, "answers": [42]}))
    assert case.questions[0].answers == ("42",)


# --- what is left out ---


def test_questions_to_answer_with_yes_or_no_are_left_out(tmp_path: Path) -> None:
    questions = [{"q": "Is it yellow?", "answers": ["yes"], "yesno": True}, SINGLE["questions"][1]]
    [case] = load(written(tmp_path, {**SINGLE, "questions": questions}))
    assert [asked.question for asked in case.questions] == ["Who?"]


def test_questions_without_an_answer_are_left_out(tmp_path: Path) -> None:
    [case] = load(written(tmp_path, {**SINGLE, "questions": [{"q": "Why?", "answers": []}, SINGLE["questions"][1]]}))
    assert [asked.question for asked in case.questions] == ["Who?"]


def test_the_limit_counts_cases_that_have_questions(tmp_path: Path) -> None:
    path = written(tmp_path, {**SINGLE, "questions": []}, MULTI, SINGLE, SINGLE)
    assert [case.name for case in load(path, limit=2)] == ["data.jsonl:2", "Crane"]


def test_questions_are_limited_for_each_case_apart(tmp_path: Path) -> None:
    cases = load(written(tmp_path, SINGLE, SINGLE), questions=1)
    assert [[asked.question for asked in case.questions] for case in cases] == [["What does it need?"]] * 2


# --- what is refused ---


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"document": "cut off', "Unterminated string"),
        ("17", "it is no object but 17"),
        (["document", "questions"], "it is no object but"),
        ({"title": "Crane"}, "'document' is missing"),
        ({"document": "No questions."}, "'questions' is missing"),
        ({**SINGLE, "questions": [{"answers": ["oil"]}]}, "'q'"),
        ({**SINGLE, "questions": [{"q": "What?"}]}, "'answers'"),
        ({**SINGLE, "document": 3}, "document must be a text that is not empty, got 3"),
        ({**SINGLE, "document": " "}, "document must be a text that is not empty"),
        ({**SINGLE, "questions": [{"q": " ", "answers": ["oil"]}]}, "q must be a text that is not empty"),
        ({**MULTI, "answers": "in town"}, "answers must be a list"),
        ({**MULTI, "answers": [""]}, "answers must be a list"),
        ({**MULTI, "passages": [{"title": "A"}]}, "'text'"),
        ({**MULTI, "passages": []}, "passages is empty"),
        ({"passages": MULTI["passages"], "answers": ["x"]}, "'question'"),
    ],
)  # fmt: skip
def test_a_line_that_is_neither_kind_is_refused_with_its_number(tmp_path: Path, line: Any, why: str) -> None:
    with pytest.raises(InvalidSetting, match=r"data\.jsonl, line 3: ") as refused:
        load(written(tmp_path, MULTI, "", line))
    assert why in str(refused.value)


def test_a_line_behind_the_limit_is_not_looked_at(tmp_path: Path) -> None:
    assert len(load(written(tmp_path, MULTI, "not JSON"), limit=1)) == 1


@pytest.mark.parametrize("lines", [[], ["", " "], [{**SINGLE, "questions": []}]])
def test_a_file_without_any_question_is_refused_by_name(tmp_path: Path, lines: list[Any]) -> None:
    with pytest.raises(EmptyInput, match=r"no document with a question in .*data\.jsonl"):
        load(written(tmp_path, *lines))


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"title": "caf\xe9"}')
    for name in ("nowhere.jsonl", "latin.jsonl"):
        with pytest.raises(InvalidSetting, match=f"cannot read .*{name}"):
            load(tmp_path / name)


# --- the packaged data ---


def test_without_a_file_the_demos_documents_are_read_each_with_the_questions_about_it_alone() -> None:
    cases = load(None)
    assert [(case.name, case.documents) for case in cases] == [(one.name, (one.text,)) for one in demo.documents()]
    asked = [question.question for question in demo.questions() if len(question.documents) == 1]
    assert sorted(one.question for case in cases for one in case.questions) == sorted(asked)


def test_packaged_answers_stand_in_their_document() -> None:
    for case in load(None):
        for asked in case.questions:
            assert asked.answers[0].lower() in case.documents[0].lower()
