"""The demo's documents and questions, and what it takes to answer them, with and without kv_rag.

The documents are invented, so that no model can know the answers; the questions name the place where they stand.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kv_rag import Answer, Document, Engine
from kv_rag.engine import JOINT, QUESTION

FOLDER = Path(__file__).parent
MAX_NEW_TOKENS = 24


@dataclass(frozen=True)
class Question:
    """A question, the ``answer`` that must occur in what is said, the names of its documents, and where it stands."""

    question: str
    answer: str
    documents: tuple[str, ...]
    place: str

    def is_answered_by(self, text: str) -> bool:
        return self.answer.lower() in text.lower()


@dataclass(frozen=True)
class Reply:
    """An answer by plain transformers: its text and the seconds to its first token."""

    text: str
    seconds_to_first_token: float
    prompt_tokens: int


def documents() -> list[Document]:
    """The demo's documents, named by their file's stem."""
    return [Document(path.read_text("utf-8"), path.stem) for path in sorted((FOLDER / "documents").glob("*.md"))]


def questions() -> list[Question]:
    """All questions about them."""
    lines = (FOLDER / "questions.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return [Question(row["question"], row["answer"], tuple(row["documents"]), row["place"]) for row in rows]


def answer(engine: Engine, question: Question, mode: str) -> Answer:
    """The engine's answer in one mode."""
    return engine.answer(question.question, documents=question.documents, mode=mode, max_new_tokens=MAX_NEW_TOKENS)


def answered(engine: Engine, asked: Iterable[Question], mode: str = "full") -> list[Question]:
    """Those of ``asked`` that the engine answers right in ``mode``; their documents must have been ingested."""
    return [question for question in asked if question.is_answered_by(answer(engine, question, mode).text)]


def bytes_on_disk(engine: Engine, question: Question, mode: str) -> int:
    """Bytes of the files that ``mode`` reads for ``question``."""
    states = [state for name in question.documents for state in engine.states(name)]
    return sum(state.file_bytes for state in states if state.compression.is_full == (mode != "compressed"))


@torch.no_grad()
def plain_answer(engine: Engine, question: Question) -> Reply:
    """The same model over the same tokens without kv_rag: the whole prompt is read, then greedy steps."""
    model = engine.model.model
    started = time.perf_counter()
    prompt = prompt_tokens(engine, question)
    output = model(prompt[None].to(model.device), use_cache=True, logits_to_keep=1)
    cache_name = "cache" if "cache" in output else "past_key_values"  # renamed in newer transformers
    generated = [int(output.logits[0, -1].argmax())]
    seconds = time.perf_counter() - started
    while generated[-1] not in engine.model.end_ids and len(generated) < MAX_NEW_TOKENS:
        token = torch.tensor([[generated[-1]]], device=model.device)
        output = model(token, use_cache=True, **{cache_name: output[cache_name]})
        generated.append(int(output.logits[0, -1].argmax()))
    return Reply(engine.model.decode(generated), seconds, prompt.numel())


def prompt_tokens(engine: Engine, question: Question) -> Tensor:
    """The token ids ``[T]`` that the engine answers from: header, documents, question, each tokenised on its own."""
    model, mark = engine.model, "\u2060documents\u2060"
    before, _, after = model.render([{"role": "user", "content": mark}]).partition(mark)
    pieces = [model.with_beginning(model.encode(before), before)]
    for index, name in enumerate(question.documents):
        text = engine.store.text(engine.store.resolve(name))
        pieces += [model.encode(JOINT)] * (index > 0) + [model.encode(text, template=False)]
    pieces.append(model.encode(QUESTION.format(joint=JOINT, question=question.question) + after))
    return torch.cat(pieces)
