"""Two places of one document, asked one after the other from the same compressed state.

A cache that was pruned for the first question answers the first question. What the later ones find in it tells
compression from retrieval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_rag.document import DocumentCache
from kv_rag.evaluation.cases import Asked, Case
from kv_rag.evaluation.contestants import Contestant
from kv_rag.evaluation.runs import Bench

REUSED = "snapkv pruned for question 1, reused"


@dataclass(frozen=True)
class Place:
    """One method and keep.

    Attributes:
        method: as asked for; REUSED is the misuse that the product refuses.
        keep: fraction of the pairs.
        protocol: see ``quality.PROTOCOLS``; with context+task question 1 was in sight when the state was compressed.
        first: share of the NLL gap between the full state and no document that question 1 keeps.
        later: the same for all questions after it.
        documents: how many first questions.

    """

    method: str
    keep: float
    protocol: str
    first: float
    later: float
    documents: int


def two_places(
    bench: Bench,
    cases: Sequence[Case],
    contestants: Sequence[Contestant],
    keep: float,
    protocols: Sequence[str] = ("context", "context+task"),
    on_case: Callable[[], object] = lambda: None,
) -> list[Place]:
    """Every method on every case with one document and at least two questions."""
    losses: dict[tuple[str, str], list[list[float]]] = {}
    for case in cases:
        if len(case.documents) != 1 or len(case.questions) < 2:
            continue
        for key, nll in _case(bench, case, contestants, keep, protocols).items():
            losses.setdefault(key, []).append(nll)
        on_case()
    if not losses:
        return []
    none, full = losses.pop(("no document", "")), losses.pop(("full", ""))
    return [
        Place(method, keep, protocol, _kept(none, full, nll, slice(0, 1)), _kept(none, full, nll, slice(1, None)), len(nll))
        for (method, protocol), nll in losses.items()
    ]


def _case(
    bench: Bench, case: Case, contestants: Sequence[Contestant], keep: float, protocols: Sequence[str]
) -> dict[tuple[str, str], list[float]]:
    text, questions = case.documents[0], case.questions
    compressing = [entry for entry in contestants if not entry.is_per_query]
    full, _, unseen = bench.read(text, compressing)

    def losses(states: Sequence[DocumentCache], asked: Sequence[Asked] = questions) -> list[float]:
        return [bench.ask(one, states, generate=False).nll for one in asked]

    found = {("no document", ""): losses([]), ("full", ""): losses([full])}
    for protocol in protocols:
        scored = unseen if protocol == "context" else bench.read(text, compressing, questions[0].question)[2]
        for entry in compressing:
            state = bench.compressed(full, scored[entry.label].scores, entry, keep)
            found[entry.label, protocol] = losses([state])
    for entry in contestants:
        if entry.is_per_query:
            found[entry.label, "per query"] = [
                bench.ask(one, [full], generate=False, per_query=(entry.snapkv(), keep)).nll for one in questions
            ]
            pruned = bench.pruned_for(questions[0].question, full, keep, entry.snapkv())
            found[REUSED, "context+task"] = losses([pruned])
    return found


def _kept(none: list[list[float]], full: list[list[float]], nll: list[list[float]], which: slice) -> float:
    top, bottom = (sum(sum(case[which]) for case in losses) for losses in (none, full))
    return (top - sum(sum(case[which]) for case in nll)) / (top - bottom)
