"""Prompts as segments: references, and finding ingested documents in a prompt by their text.

Frameworks hand a language model plain text, so a document is recognised by its text. A reference in front of it,
``[[kv:snapkv:0.25:<digest>]]``, carries what the retriever chose. A reference is only ever a hint: it is followed when
the digest is that of the text after it, and removed from what the model reads in any case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_rag.document import check_budget, text_digest
from kv_rag.errors import InvalidSetting

MODES = ("compressed", "snapkv", "full")
ANCHOR = 32  # characters; a shorter document is recognised only by a reference or by being named

_REFERENCE = re.compile(
    r"\[\[kv:(?P<mode>compressed|snapkv|full):(?P<keep>\*|[0-9.]{1,12})(?::(?P<method>[A-Za-z0-9_]{1,64}(?::[A-Za-z0-9_]{1,64})?))?"
    r":(?P<digest>[0-9a-f]{32})\]\]"
)


@dataclass(frozen=True)
class Choice:
    """How one document's state is to be used for a question.

    Args:
        mode: "compressed", "snapkv" or "full".
        keep: compressed: picks among the stored states; snapkv: fraction of the pairs kept for this question.
        method: compressed: picks among the stored states.

    Raises:
        InvalidSetting: unknown mode, keep out of range.

    """

    mode: str = "compressed"
    keep: float | None = None
    method: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidSetting(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.keep is not None:
            check_budget(self.keep, None)


def reference(text: str, choice: Choice) -> str:
    """The reference to put before ``text`` (stripped as documents are) so that ``choice`` reaches the model."""
    keep = "*" if choice.keep is None else f"{choice.keep:.10g}"
    method = f":{choice.method}" if choice.method else ""
    return f"[[kv:{choice.mode}:{keep}{method}:{text_digest(text.strip())}]]"


def with_reference(text: str, choice: Choice) -> str:
    """``text`` with its reference in front; one that stood there already is replaced."""
    clean = strip_leading_reference(text)
    return reference(clean, choice) + clean.strip()


def strip_leading_reference(text: str) -> str:
    """``text`` without the reference it begins with, if that reference is the text's own."""
    match = _REFERENCE.match(text)
    if match and text_digest(text[match.end() :].strip()) == match["digest"]:
        return text[match.end() :]
    return text


def strip_references(text: str) -> str:
    """``text`` without any references: for citations and everything else that people read."""
    return _REFERENCE.sub("", text)


@dataclass(frozen=True)
class TextSegment:
    """Prompt text that is no ingested document; references removed."""

    text: str


@dataclass(frozen=True)
class DocumentSegment:
    """An ingested document. ``choice`` is None where no reference stood before it."""

    document_id: str
    text: str
    choice: Choice | None = None


Segment = TextSegment | DocumentSegment


class Shape(Protocol):
    """What the store knows of a document's text without reading it."""

    @property
    def document_id(self) -> str: ...
    @property
    def characters(self) -> int: ...
    @property
    def tail(self) -> str: ...


FindCandidates = Callable[[Collection[str]], Mapping[str, Sequence[Shape]]]
FindLength = Callable[[str], int | None]


@dataclass(frozen=True)
class _Claim:
    begin: int  # where the reference begins, or the text when there is none
    text_begin: int
    end: int
    document_id: str
    choice: Choice | None


def split_prompt(prompt: str, find_candidates: FindCandidates, find_length: FindLength) -> list[Segment]:
    """Cuts ``prompt`` into text and ingested documents, in order, in time linear in the prompt.

    Args:
        prompt: what the model is to read, with or without references.
        find_candidates: ``store.candidates``: which documents begin with given ANCHOR characters.
        find_length: characters of the document with a given digest, or None when it is not in the store.

    """
    claims = list(_referenced(prompt, find_length))
    claims = sorted(claims + list(_recognised(prompt, claims, find_candidates)), key=lambda claim: claim.begin)
    segments: list[Segment] = []
    at = 0
    for claim in claims:
        _append_text(segments, prompt[at : claim.begin])
        segments.append(DocumentSegment(claim.document_id, prompt[claim.text_begin : claim.end], claim.choice))
        at = claim.end
    _append_text(segments, prompt[at:])
    return segments


def _append_text(segments: list[Segment], text: str) -> None:
    text = strip_references(text)
    if text:
        segments.append(TextSegment(text))


def _referenced(prompt: str, find_length: FindLength) -> Iterator[_Claim]:
    """References whose digest is that of the text after them."""
    end = 0
    for match in _REFERENCE.finditer(prompt):
        if match.start() < end:  # inside a document that has been claimed: part of its text
            continue
        length = find_length(match["digest"])
        if length is None:
            continue
        stop = match.end() + length
        if stop > len(prompt) or text_digest(prompt[match.end() : stop]) != match["digest"]:
            continue
        end = stop
        yield _Claim(match.start(), match.end(), stop, match["digest"], _choice(match))


def _choice(match: re.Match[str]) -> Choice | None:
    """A reference's choice; None when its keep makes no sense (a damaged reference costs time, never an error)."""
    try:
        keep = None if match["keep"] == "*" else float(match["keep"])
        return Choice(match["mode"], keep, match["method"])
    except (InvalidSetting, ValueError):
        return None


def _recognised(prompt: str, claims: list[_Claim], find_candidates: FindCandidates) -> Iterator[_Claim]:
    """Documents found by their text outside ``claims``: leftmost first, longest where several begin."""
    starts = [at for at in range(len(prompt) - ANCHOR + 1) if _may_begin(prompt, at)]
    by_anchor = find_candidates({prompt[at : at + ANCHOR] for at in starts})
    if not by_anchor:
        return
    taken = sorted((claim.begin, claim.end) for claim in claims)
    end = 0
    for at in starts:
        if at < end:
            continue
        limit = _free_until(at, taken, len(prompt))
        longest_first = sorted(by_anchor.get(prompt[at : at + ANCHOR], ()), key=lambda shape: -shape.characters)
        for shape in longest_first:
            stop = at + shape.characters
            # The tail is compared first: documents that share their beginning are told apart without reading them.
            if stop <= limit and prompt.endswith(shape.tail, at, stop):
                if text_digest(prompt[at:stop]) == shape.document_id:
                    end = stop
                    yield _Claim(at, at, stop, shape.document_id, None)
                    break


def _may_begin(prompt: str, at: int) -> bool:
    """Whether a document may begin here: not at white space (texts are stripped), not inside an ASCII word."""
    here = prompt[at]
    if here.isspace():
        return False
    before = prompt[at - 1] if at else " "
    return not (here.isascii() and here.isalnum() and before.isascii() and before.isalnum())


def _free_until(at: int, taken: list[tuple[int, int]], length: int) -> int:
    """How far a document that begins at ``at`` may reach before a claimed range; ``at`` itself when inside one."""
    for begin, end in taken:
        if begin <= at < end:
            return at
        if begin > at:
            return begin
    return length
