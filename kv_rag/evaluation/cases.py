"""Documents and questions for evaluations, read from JSON Lines.

Two kinds of line:

- one document, many questions:
  ``{"title": …, "document": …, "questions": [{"q": …, "answers": [… , …], "yesno": false}]}``
- one question, many passages:
  ``{"question": …, "answers": […], "passages": [{"title": …, "text": …}]}``

``title`` and ``yesno`` may be missing. Of ``answers`` the first is the one whose likelihood is measured, and F1 is the
best over all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_rag import demo
from kv_rag.errors import EmptyInput, InvalidSetting


@dataclass(frozen=True)
class Asked:
    """A question and its accepted answers, the best first."""

    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """Documents that stand in one prompt, and questions about them."""

    name: str
    documents: tuple[str, ...]
    questions: tuple[Asked, ...]


def load(path: str | Path | None, *, limit: int | None = None, questions: int | None = None) -> list[Case]:
    """Cases of a file, or of the small data set that comes with the package.

    Args:
        path: a JSON Lines file; None for the package's own.
        limit: so many cases from the beginning.
        questions: so many questions of each case from the beginning. Yes-or-no questions are left out: their likelihood
            says little.

    Raises:
        EmptyInput: no case with a question.
        InvalidSetting: a line that is neither kind, with its number.

    """
    found = _packaged() if path is None else _read(Path(path))
    cases: list[Case] = []
    for case in found:
        if case.questions:
            cases.append(Case(case.name, case.documents, case.questions[:questions]))
        if len(cases) == limit:
            break
    if not cases:
        raise EmptyInput(f"no document with a question in {path or 'the packaged data'}")
    return cases


def _packaged() -> Iterator[Case]:
    for document in demo.documents():
        asked = tuple(
            Asked(question.question, (question.answer,))
            for question in demo.questions()
            if tuple(question.documents) == (document.name,)
        )
        yield Case(document.name or document.id, (document.text,), asked)


def _read(path: Path) -> Iterator[Case]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut texts at U+2028 and the like
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _case(json.loads(line), f"{path.name}:{number}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise InvalidSetting(
                f"{path}, line {number}: {why}. A line holds either document and questions, or "
                f"question, answers and passages; see kv_rag.evaluation.cases"
            ) from error


def _case(line: Any, name: str) -> Case:
    if not isinstance(line, dict):
        raise ValueError(f"it is no object but {line!r}")
    if "passages" in line:
        texts = tuple(dict.fromkeys(_text(passage, "text") for passage in line["passages"]))
        if not texts:
            raise ValueError("passages is empty")
        return Case(name, texts, _asked([{**line, "q": line["question"]}]))
    return Case(str(line.get("title") or name), (_text(line, "document"),), _asked(line["questions"]))


def _asked(questions: list[dict[str, Any]]) -> tuple[Asked, ...]:
    return tuple(
        Asked(_text(entry, "q"), _answers(entry["answers"]))
        for entry in questions
        if not entry.get("yesno") and entry["answers"]
    )


def _answers(answers: Any) -> tuple[str, ...]:
    if not isinstance(answers, list) or not str(answers[0]):
        raise ValueError(f"answers must be a list whose first entry is not empty, got {answers!r}")
    return tuple(str(answer) for answer in answers)


def _text(line: dict[str, Any], name: str) -> str:
    text = line[name]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name} must be a text that is not empty, got {text!r}")
    return text.strip()
