"""Questions one after the other from one state: what the first one saw, and what is left for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kv_rag.engine import SNAPKV, Engine
from kv_rag.evaluation.cases import Asked, Case
from kv_rag.evaluation.contestants import Contestant
from kv_rag.evaluation.two_place import REUSED, Place, two_places
from kv_rag.kept import kept_in_state
from tests.conftest import text_of
from tests.evaluation.conftest import ONE, TWO, RememberingBench

KEEP = 0.25
OTHER = Case("another", (text_of(130, 6),), ONE.questions[:2])
CASES = [ONE, OTHER]


def places(bench: RememberingBench, cases: list[Case], *labels: str, **options: Any) -> dict[tuple[str, str], Place]:
    found = two_places(bench, cases, [Contestant.parse(label) for label in labels], KEEP, **options)
    return {(place.method, place.protocol): place for place in found}


def shares(loss: Callable[..., float], questions: slice, **options: Any) -> float:
    """Of the gap between no document and the full state, summed over the cases' ``questions``."""
    none, full, kept = (
        sum(loss(case, asked, **chosen) for case in CASES for asked in case.questions[questions])
        for chosen in ({"documents": []}, {"mode": "full"}, options)
    )
    return (none - kept) / (none - full)


@pytest.mark.parametrize(
    ("label", "protocol", "options"),
    [
        ("h2o", "context", {"mode": "compressed", "method": "h2o", "keep": KEEP}),
        ("snapkv", "per query", {"mode": "snapkv", "keep": KEEP}),
    ],
)  # fmt: skip
def test_first_and_later_are_shares_of_what_the_product_loses_without_the_document(
    engine: Engine, bench: RememberingBench, label: str, protocol: str, options: dict[str, Any]
) -> None:
    ids = {case.name: engine.ingest(case.documents, method="h2o", keep=KEEP)[0].id for case in CASES}

    def loss(case: Case, asked: Asked, **options: Any) -> float:
        return engine.likelihood(asked.question, asked.answers[0], **{"documents": [ids[case.name]], **options}).nll

    place = places(bench, CASES, label)[label, protocol]
    assert place.first == pytest.approx(shares(loss, slice(0, 1), **options), rel=1e-6)
    assert place.later == pytest.approx(shares(loss, slice(1, None), **options), rel=1e-6)
    assert (place.keep, place.documents) == (KEEP, 2)


def test_methods_stand_once_for_each_protocol_and_snapkv_as_it_is_meant_and_as_it_is_not(bench: RememberingBench) -> None:
    assert set(places(bench, [OTHER], "knorm", "snapkv")) == {
        ("knorm", "context"), ("knorm", "context+task"), ("snapkv", "per query"), (REUSED, "context+task"),
    }  # fmt: skip


def test_with_protocol_context_alone_no_question_is_read_with_a_document(bench: RememberingBench) -> None:
    places(bench, CASES, "knorm", protocols=("context",))
    assert bench.reads == [(case.documents[0], None) for case in CASES]


def test_with_protocol_context_task_the_first_question_alone_is_in_sight(bench: RememberingBench) -> None:
    places(bench, [ONE], "knorm")
    assert bench.reads == [(ONE.documents[0], None), (ONE.documents[0], ONE.questions[0].question)]


def test_the_reused_state_holds_the_pairs_that_the_product_picks_for_the_first_question(
    engine: Engine, bench: RememberingBench
) -> None:
    [text], [first, second, _] = ONE.documents, ONE.questions
    full, _, _ = bench.read(text, [])
    pruned = kept_in_state(bench.pruned_for(first.question, full, KEEP, SNAPKV))
    [document] = engine.ingest(text, retain="full")
    for asked, same in ((first, True), (second, False)):
        picked = engine.kept(document.id, question=asked.question, keep=KEEP).positions
        assert (_lists(pruned) == _lists(picked)) is same


def _lists(positions: Any) -> list[list[list[int]]]:
    return [[head.tolist() for head in layer] for layer in positions]


def test_every_question_is_asked_from_the_pairs_of_the_first(bench: RememberingBench) -> None:
    """The shares of the misuse, from the state itself."""
    full, _, _ = bench.read(ONE.documents[0], [])
    pruned = bench.pruned_for(ONE.questions[0].question, full, KEEP, SNAPKV)
    none, whole, kept = (
        [bench.ask(asked, states, generate=False).nll for asked in ONE.questions] for states in ([], [full], [pruned])
    )
    place = places(bench, [ONE], "snapkv")[REUSED, "context+task"]
    assert place.first == pytest.approx((none[0] - kept[0]) / (none[0] - whole[0]))
    assert place.later == pytest.approx((sum(none[1:]) - sum(kept[1:])) / (sum(none[1:]) - sum(whole[1:])))


def test_a_method_compressed_for_the_first_question_is_asked_the_others_from_the_same_state(bench: RememberingBench) -> None:
    other_first = replace(ONE, questions=(ONE.questions[1], ONE.questions[0], ONE.questions[2]))
    one, other = (places(bench, [case], "snapkv-window", "knorm") for case in (ONE, other_first))
    seen, unseen = ("snapkv-window", "context+task"), ("snapkv-window", "context")
    together = [  # what all three questions lose, whichever comes first
        _lost(bench, case, found[place]) for place in (seen, unseen) for case, found in ((ONE, one), (other_first, other))
    ]
    assert together[0] != pytest.approx(together[1], rel=1e-3)
    assert together[2] == pytest.approx(together[3], rel=1e-5)


def _lost(bench: RememberingBench, case: Case, place: Place) -> float:
    full, _, _ = bench.read(case.documents[0], [])
    gaps = [
        bench.ask(asked, [], generate=False).nll - bench.ask(asked, [full], generate=False).nll for asked in case.questions
    ]
    return place.first * gaps[0] + place.later * sum(gaps[1:])


def test_cases_with_one_question_or_several_documents_are_passed_over(bench: RememberingBench) -> None:
    several = replace(TWO, questions=ONE.questions)
    single = replace(ONE, questions=ONE.questions[:1])
    done: list[None] = []
    found = places(bench, [several, OTHER, single], "knorm", on_case=partial(done.append, None))
    assert {place.documents for place in found.values()} == {len(done)} == {1}
    assert {text for text, _ in bench.reads} == set(OTHER.documents)


def test_nothing_comes_of_cases_with_one_question(bench: RememberingBench) -> None:
    assert two_places(bench, [replace(ONE, questions=ONE.questions[:1]), TWO], [Contestant.parse("knorm")], KEEP) == []
