"""What comes back from a question: the text, and plain numbers about how it was made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kv_rag import html


@dataclass(frozen=True)
class Prefilled:
    """A stretch of the prompt that ran through the model: what, how many tokens, and why no state served it."""

    what: str
    tokens: int
    why: str


@dataclass(frozen=True)
class AnswerMetadata:
    """Figures of one answer.

    Attributes:
        mode: the mode asked for; a mixture of modes is "mixed".
        keep: fraction of the documents' pairs the answer was generated from, or None without documents.
        repair: fraction of each document's tokens recomputed.
        documents: ids of the documents served from their states, in prompt order.
        prompt_tokens: tokens of the whole prompt, dropped pairs counted.
        cached_tokens: of these, tokens served from states (documents and the prompt's header) and not recomputed.
        cached_document_tokens: the same without the header, whose state every prompt finds.
        generated_tokens: tokens of the answer, the end token counted.
        seconds_to_first_token: from the call to the first token, reading states from disk included.
        seconds_per_token: mean over the later tokens; None for one token.
        pairs_kept: pairs of documents attended to while generating, over all layers and heads.
        pairs_full: pairs of these documents before anything was dropped.
        resident_bytes: bytes of the documents' states that have to be held for the next question.
        finish_reason: "stop" (end token or stop string), "length", or "closed" (the stream was dropped).
        prefilled: what ran through the model and why.

    """

    mode: str
    keep: float | None
    repair: float
    documents: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    cached_document_tokens: int
    generated_tokens: int
    seconds_to_first_token: float
    seconds_per_token: float | None
    pairs_kept: int
    pairs_full: int
    resident_bytes: int
    finish_reason: str
    prefilled: tuple[Prefilled, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists: safe for JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        speed = f", then {1 / self.seconds_per_token:.1f} tokens a second" if self.seconds_per_token else ""
        rows = [
            ("mode", self.mode if not self.repair else f"{self.mode}, repair {self.repair:g}"),
            ("first token", f"after {self.seconds_to_first_token:.2f} s{speed}"),
            ("prompt", f"{self.prompt_tokens:,} tokens, {self.cached_tokens:,} of them from stored states"),
            ("pairs", f"{self.pairs_kept:,} of {self.pairs_full:,} ({html.share(self.pairs_kept, self.pairs_full)})"),
            ("resident", html.size(self.resident_bytes)),
            ("answer", f"{self.generated_tokens} tokens, {_ENDS.get(self.finish_reason, self.finish_reason)}"),
        ]
        return html.facts(rows if self.documents else [row for row in rows if row[0] not in ("pairs", "resident")])


@dataclass(frozen=True)
class Answer:
    """An answer's ``text`` and its ``metadata``."""

    text: str
    metadata: AnswerMetadata

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return html.paragraph(self.text) + self.metadata._repr_html_()


_ENDS = {"stop": "ended by itself", "length": "cut at the most it may have", "closed": "stopped from outside"}


class AnswerStream(Iterator[str]):
    """Pieces of an answer as they are made; ``answer`` once it is finished.

    Work starts with the first ``next``. Dropping or closing the stream frees its state; other calls are not held up by
    a stream that nobody reads.
    """

    def __init__(self, pieces: Iterator[str | Answer]) -> None:
        self._pieces = pieces
        self._answer: Answer | None = None

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> str:
        for piece in self._pieces:
            if isinstance(piece, Answer):
                self._answer = piece
            elif piece:
                return piece
        raise StopIteration

    def close(self) -> None:
        """Stops generating and frees the state."""
        close = getattr(self._pieces, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def answer(self) -> Answer:
        """The whole answer; reads what is left of the stream.

        Raises:
            RuntimeError: the stream was closed before its end.

        """
        for _ in self:
            pass
        if self._answer is None:
            raise RuntimeError("the stream was closed before the answer was finished")
        return self._answer
