"""A tiny model, an engine and a bench over it, and documents with questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kv_rag.engine import Engine
from kv_rag.evaluation.cases import Asked, Case
from kv_rag.evaluation.contestants import Contestant
from kv_rag.evaluation.runs import Bench
from kv_rag.model import LanguageModel
from tests.conftest import text_of, tiny_model, tiny_tokenizer

QUESTIONS = (
    Asked("Which fox jumps?", ("the quick one", "quick")),
    Asked("What do seven wizards judge at noon?", ("my vow",)),
    Asked("How lazy are dogs?", ("very",)),
)
ONE = Case("one document", (text_of(151, 1),), QUESTIONS)
TWO = Case("two documents", (text_of(90, 2), text_of(120, 3)), QUESTIONS[1:2])


@pytest.fixture(scope="session")
def model() -> LanguageModel:
    return LanguageModel(tiny_model("llama"), tiny_tokenizer())


@pytest.fixture(scope="session")
def engine(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(model, tmp_path_factory.mktemp("kv")) as opened:
        yield opened


@pytest.fixture
def bench(model: LanguageModel) -> RememberingBench:
    return RememberingBench(model)


class RememberingBench(Bench):
    """Remembers which documents it read, and with which question in sight."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.reads: list[tuple[str, str | None]] = []

    def read(self, text: str, contestants: Sequence[Contestant], question: str | None = None) -> Any:
        self.reads.append((text, question))
        return super().read(text, contestants, question)
