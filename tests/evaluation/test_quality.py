"""The comparison says of every method what the product does with it."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_rag import methods
from kv_rag.engine import Engine
from kv_rag.errors import InvalidSetting
from kv_rag.evaluation.cases import Asked, Case
from kv_rag.evaluation.contestants import Contestant
from kv_rag.evaluation.quality import ALWAYS, PROTOCOLS, Comparison, Record, Row, compare, summarise
from kv_rag.evaluation.report import table, write
from kv_rag.evaluation.runs import ANSWER_TOKENS, token_f1
from kv_rag.model import LanguageModel
from tests.conftest import text_of, tiny_model, tiny_tokenizer
from tests.evaluation.conftest import ONE, TWO, RememberingBench

CASES = [ONE, TWO]
METHODS = ("snapkv", "snapkv/heads,vote=mean", "h2o/heads", "keydiff", "kvzip/model", "streaming/pyramid,sinks=2")
KEEP = 0.25
QUICK = Comparison(("knorm", "snapkv"), (0.5, KEEP), generate=False)


def of(records: Sequence[Record], method: str, keep: float, protocol: str | None = None) -> list[Record]:
    found = [
        record for record in records
        if (record.method, record.keep) == (method, keep) and protocol in (None, record.protocol)
    ]  # fmt: skip
    assert found
    return found


def untimed(records: Sequence[Record]) -> list[Record]:
    return [replace(record, seconds=0.0, ingest=None) for record in records]


@pytest.fixture(scope="module")
def records(model: LanguageModel) -> list[Record]:
    return compare(RememberingBench(model), CASES, Comparison(METHODS, (KEEP,)))


def ingested(engine: Engine, case: Case, **options: Any) -> list[str]:
    return [one.id for one in engine.ingest(case.documents, **options)]


def product_nll(engine: Engine, record: Record, documents: list[str], **options: Any) -> float:
    asked = CASES[record.case].questions[record.question]
    return engine.likelihood(asked.question, asked.answers[0], documents=documents, **options).nll


# --- the same as the product ---


def test_full_is_the_products_mode_full(engine: Engine, records: list[Record]) -> None:
    for record in of(records, "full", 1.0):
        documents = ingested(engine, CASES[record.case], retain="full")
        assert record.nll == product_nll(engine, record, documents, mode="full")


def test_no_document_is_the_question_alone(engine: Engine, records: list[Record]) -> None:
    for record in of(records, "no document", 0.0):
        assert record.nll == product_nll(engine, record, [])
        assert (record.nbytes, record.pairs) == (0, 0)


@pytest.mark.parametrize("label", [*METHODS[2:], ALWAYS])
def test_a_method_is_what_the_product_ingests_with_it(engine: Engine, records: list[Record], label: str) -> None:
    entry = Contestant.parse(label)
    chosen = {"method": entry.name, "keep": KEEP}
    for record in of(records, label, KEEP):
        case = CASES[record.case]
        documents = ingested(engine, case, allocation=entry.allocation, settings=dict(entry.settings), **chosen)
        assert record.nll == product_nll(engine, record, documents, **chosen)


@pytest.mark.parametrize("label", METHODS[:2])
def test_snapkv_is_the_products_mode_snapkv(engine: Engine, records: list[Record], label: str) -> None:
    asked_for = {"mode": "snapkv", "keep": KEEP, "snapkv": Contestant.parse(label).snapkv()}
    for record in of(records, label, KEEP):
        documents = ingested(engine, CASES[record.case], retain="full")
        assert record.nll == product_nll(engine, record, documents, **asked_for)


def test_a_document_longer_than_a_chunk_is_what_the_product_ingests(engine: Engine, bench: RememberingBench) -> None:
    case = Case("long", (text_of(600, 8),), (Asked("Who?", ("a wizard",)),))
    found = compare(bench, [case], Comparison(("h2o",), (KEEP,), generate=False))
    documents = ingested(engine, case, method="h2o", keep=KEEP)
    asked = {"question": "Who?", "answer": "a wizard", "documents": documents}
    assert of(found, "h2o", KEEP)[0].nll == engine.likelihood(**asked, method="h2o").nll
    assert of(found, "full", 1.0)[0].nll == engine.likelihood(**asked, mode="full").nll


@pytest.mark.parametrize("mode", ["full", "compressed", "snapkv"])
def test_generated_answers_are_the_products(engine: Engine, bench: RememberingBench, mode: str) -> None:
    keydiff, snapkv = Contestant.parse("keydiff"), Contestant.parse("snapkv").snapkv()
    full, _, scored = bench.read(ONE.documents[0], [keydiff])
    state = bench.compressed(full, scored["keydiff"].scores, keydiff, KEEP) if mode == "compressed" else full
    documents = ingested(engine, ONE, method="keydiff", keep=KEEP)
    chosen = {"full": {}, "compressed": {"keep": KEEP, "method": "keydiff"}, "snapkv": {"keep": KEEP}}[mode]
    for asked in ONE.questions:
        said = bench.ask(asked, [state], per_query=(snapkv, KEEP) if mode == "snapkv" else None).said
        answer = engine.answer(asked.question, documents=documents, mode=mode, max_new_tokens=ANSWER_TOKENS, **chosen)
        assert said == answer.text.strip()


def test_f1_is_that_of_the_products_answer(engine: Engine, records: list[Record]) -> None:
    for record in of(records, "full", 1.0):
        asked = CASES[record.case].questions[record.question]
        documents = ingested(engine, CASES[record.case], retain="full")
        said = engine.answer(asked.question, documents=documents, mode="full", max_new_tokens=ANSWER_TOKENS).text
        assert record.f1 == max(token_f1(said.strip(), answer) for answer in asked.answers)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_keep_1_of_any_method_is_full(bench: RememberingBench, protocol: str) -> None:
    everything = ("snapkv", "snapkv-window", "kvzip/model", "h2o/heads", "knorm/pyramid", *sorted(methods.METHODS))
    case = replace(TWO, documents=(text_of(90, 2),))
    found = compare(bench, [case], Comparison(everything, (1.0,), (protocol,), generate=False))
    whole = of(found, "full", 1.0)[0]
    for record in found:
        if record.method != "no document":
            assert (record.nll, record.nbytes, record.pairs) == (whole.nll, whole.nbytes, whole.pairs), record.method


# --- bytes and pairs ---


@pytest.mark.parametrize("label", [*METHODS[2:], ALWAYS])
def test_bytes_are_those_of_the_tensors_held(engine: Engine, records: list[Record], label: str) -> None:
    entry = Contestant.parse(label)
    for record in of(records, label, KEEP):
        nbytes = pairs = 0
        for text in CASES[record.case].documents:
            [one] = engine.ingest(
                text, method=entry.name, keep=KEEP, allocation=entry.allocation, settings=dict(entry.settings)
            )
            compression = next(
                state.compression for state in engine.states(one.id)
                if state.compression.method == entry.name and state.compression.keep == KEEP
            )  # fmt: skip
            state = engine.store.get(one.id, compression)
            tensors = [tensor for layer in state.layers for tensor in (layer.keys, layer.values, layer.positions)]
            nbytes += sum(tensor.nbytes for tensor in [*tensors, state.token_ids])
            pairs += sum(layer.keys.shape[0] for layer in state.layers)
        assert (record.nbytes, record.pairs) == (nbytes, pairs)


def test_a_compressed_state_holds_no_memory_but_its_own(bench: RememberingBench) -> None:
    entry = Contestant.parse("kvzip/model")
    full, _, scored = bench.read(ONE.documents[0], [entry], ONE.questions[0].question)
    for state in (full, bench.compressed(full, scored[entry.label].scores, entry, KEEP)):
        held = [tensor for layer in state.layers for tensor in (layer.keys, layer.values, layer.positions)]
        assert sum(tensor.untyped_storage().nbytes() for tensor in [*held, state.token_ids]) == state.nbytes


def test_snapkv_holds_the_full_state_and_generates_from_the_pairs_it_picks(engine: Engine, records: list[Record]) -> None:
    whole = of(records, "full", 1.0)
    for label in METHODS[:2]:
        settings = Contestant.parse(label).snapkv()
        for record, full in zip(of(records, label, KEEP), whole, strict=True):
            documents = ingested(engine, CASES[record.case], retain="full")
            question = CASES[record.case].questions[record.question].question
            answer = engine.answer(
                question, documents=documents, mode="snapkv", keep=KEEP, snapkv=settings, max_new_tokens=2
            )
            assert (record.nbytes, record.pairs) == (full.nbytes, answer.metadata.pairs_kept)


# --- what is compared ---


def test_random_is_always_among_the_compared() -> None:
    assert [entry.label for entry in Comparison(("knorm",)).contestants()] == ["knorm", "random"]


def test_a_method_named_twice_is_compared_once() -> None:
    assert [entry.label for entry in Comparison(("knorm", "random", "knorm")).contestants()] == ["knorm", "random"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"methods": ()}, "at least one method"), ({"keeps": ()}, "one keep"), ({"protocols": ()}, "one protocol"),
        ({"keeps": (0.5, 25)}, "got 25"), ({"keeps": (0.0,)}, "got 0.0"), ({"protocols": ("task",)}, "got 'task'"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        replace(QUICK, **changed)


@pytest.mark.parametrize("protocols", [PROTOCOLS[:1], PROTOCOLS[1:], PROTOCOLS, (*PROTOCOLS, "context")])
def test_as_many_answers_are_counted_as_are_given(bench: RememberingBench, protocols: tuple[str, ...]) -> None:
    comparison, given = replace(QUICK, protocols=protocols, keeps=(0.5,)), []
    found = compare(bench, CASES, comparison, on_answer=partial(given.append, None))
    assert len(given) == len(found) == comparison.answers(CASES)


def test_without_answers_nothing_is_said_of_agreement_and_f1(bench: RememberingBench) -> None:
    found = compare(bench, [TWO], QUICK)
    assert {(record.agreement, record.f1) for record in found} == {(None, None)}


def test_the_full_state_agrees_with_its_own_answer_in_every_token(records: list[Record]) -> None:
    assert [record.agreement for record in of(records, "full", 1.0)] == [1.0] * 4


# --- protocols ---


def test_protocol_context_reads_each_document_once_and_no_question(bench: RememberingBench) -> None:
    compare(bench, CASES, QUICK)
    assert bench.reads == [(text, None) for case in CASES for text in case.documents]


def test_protocol_context_task_reads_each_document_again_before_each_question(bench: RememberingBench) -> None:
    compare(bench, [ONE], replace(QUICK, protocols=("context+task",)))
    [text] = ONE.documents
    assert bench.reads == [(text, None), *((text, asked.question) for asked in ONE.questions)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_else_is_asked_changes_nothing(bench: RememberingBench, protocol: str) -> None:
    comparison = Comparison(("snapkv-window", "h2o/heads"), (KEEP,), (protocol,), generate=False)
    among = compare(bench, [ONE], comparison)
    for number, asked in enumerate(ONE.questions):
        alone = compare(bench, [replace(ONE, questions=(asked,))], comparison)
        same = [replace(record, question=0) for record in among if record.question == number]
        assert untimed(same) == untimed(alone)


def kept(bench: RememberingBench, label: str, question: str | None) -> list[list[int]]:
    """Positions that each layer keeps."""
    entry = Contestant.parse(label)
    full, _, scored = bench.read(ONE.documents[0], [entry], question)
    state = bench.compressed(full, scored[label].scores, entry, KEEP)
    return [layer.positions.tolist() for layer in state.layers]


@pytest.mark.parametrize("label", ["snapkv-window", "h2o", "kvzip/model", "tova"])
def test_with_the_question_in_sight_what_attends_keeps_other_pairs_for_every_question(
    bench: RememberingBench, label: str
) -> None:
    unseen, first, second = (kept(bench, label, question) for question in (None, "Which fox jumps?", "Who judges?"))
    assert unseen != first != second != unseen


@pytest.mark.parametrize("label", ["knorm", "knorm/model", "streaming"])
def test_what_looks_at_a_pair_alone_keeps_the_same_pairs_with_any_question_in_sight(
    bench: RememberingBench, label: str
) -> None:
    unseen, first, second = (kept(bench, label, question) for question in (None, "Which fox jumps?", "Who judges?"))
    assert unseen == first == second


def test_a_question_read_after_a_document_changes_nothing_about_its_state(bench: RememberingBench) -> None:
    alone, _, _ = bench.read(ONE.documents[0], [])
    before, _, _ = bench.read(ONE.documents[0], [], "Which fox jumps?")
    assert (before.tokens, before.pairs) == (alone.tokens, alone.pairs)
    for one, other in zip(alone.layers, before.layers, strict=True):
        assert torch.equal(one.positions, other.positions)
        assert torch.allclose(one.keys, other.keys, atol=1e-5) and torch.allclose(one.values, other.values, atol=1e-5)


def test_documents_compressed_for_a_question_hold_no_pair_of_it(bench: RememberingBench) -> None:
    comparison = Comparison(("snapkv-window",), (KEEP,), PROTOCOLS, generate=False)
    found = compare(bench, CASES, comparison)
    seen, unseen = (of(found, "snapkv-window", KEEP, protocol) for protocol in ("context+task", "context"))
    assert [(record.nbytes, record.pairs) for record in seen] == [(record.nbytes, record.pairs) for record in unseen]


# --- going on where a run was stopped ---


class Stopped(Exception):
    """Someone pulled the plug."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "bench" / "records.jsonl"


def stopped_in_the_second_case(bench: RememberingBench, file: Path) -> None:
    left = QUICK.answers(CASES[:1]) + 2

    def on_answer() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Stopped

    with pytest.raises(Stopped):
        compare(bench, CASES, QUICK, file, on_answer)
    bench.reads.clear()


def test_a_stopped_run_goes_on_with_the_case_it_was_stopped_in(bench: RememberingBench, file: Path) -> None:
    stopped_in_the_second_case(bench, file)
    found = compare(bench, CASES, QUICK, file)
    assert bench.reads == [(text, None) for text in TWO.documents]
    assert untimed(found) == untimed(compare(bench, CASES, QUICK))


def test_a_finished_run_is_read_and_not_run_again(bench: RememberingBench, file: Path) -> None:
    found = compare(bench, CASES, QUICK, file)
    bench.reads.clear()
    given: list[None] = []
    assert compare(bench, CASES, QUICK, file, partial(given.append, None)) == found
    assert (bench.reads, len(given)) == ([], QUICK.answers(CASES))


def test_wherever_the_file_was_cut_off_the_run_goes_on_and_can_be_read_again(bench: RememberingBench, file: Path) -> None:
    expected = untimed(compare(bench, CASES, QUICK, file))
    whole = file.read_bytes()
    header, last = whole.index(b"\n") + 1, whole.rindex(b"\n", 0, -1) + 1
    first_of_two = header + len(b"".join(whole[header:].splitlines(keepends=True)[: QUICK.answers(CASES[:1])]))
    for size in (0, 10, header - 1, header, header + 30, first_of_two - 1, first_of_two, last, last + 30, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert untimed(compare(bench, CASES, QUICK, file)) == expected, size
        bench.reads.clear()
        assert (untimed(compare(bench, CASES, QUICK, file)), bench.reads) == (expected, []), size


@pytest.mark.parametrize(
    ("changed", "cases"),
    [
        ({"methods": ("knorm",)}, CASES), ({"keeps": (0.5,)}, CASES), ({"protocols": PROTOCOLS}, CASES),
        ({"generate": True}, CASES), ({}, [ONE]), ({}, [TWO, ONE]),
    ],
)  # fmt: skip
def test_another_comparison_in_the_same_file_is_refused_and_changes_nothing(
    bench: RememberingBench, file: Path, changed: dict[str, Any], cases: list[Case]
) -> None:
    compare(bench, CASES[1:], QUICK, file)
    before = file.read_bytes()
    with pytest.raises(InvalidSetting, match=r"records\.jsonl holds the results of another comparison"):
        compare(bench, cases, replace(QUICK, **changed), file)
    assert (file.read_bytes(), bench.reads) == (before, [(text, None) for text in TWO.documents])


def test_another_models_results_are_refused(bench: RememberingBench, file: Path) -> None:
    compare(bench, [TWO], QUICK, file)
    other = RememberingBench(LanguageModel(tiny_model("qwen2"), tiny_tokenizer()))
    with pytest.raises(InvalidSetting, match="another comparison"):
        compare(other, [TWO], QUICK, file)


def test_a_file_of_something_else_is_refused_and_kept(bench: RememberingBench, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("Dear diary,\n")
    with pytest.raises(InvalidSetting, match="another comparison"):
        compare(bench, [TWO], QUICK, file)
    assert file.read_text() == "Dear diary,\n"


# --- in sum ---


def record_of(question: int, method: str, keep: float, nll: float, **other: Any) -> Record:
    usual = {"protocol": "context", "nbytes": 100, "pairs": 10, "ingest": None, "seconds": 1.0, "predicted": 0.5}
    return Record(0, question, method, keep, **{**usual, "nll": nll, "agreement": None, "f1": None, **other})


ENDS = [
    record_of(0, "no document", 0.0, 6.0, nbytes=0), record_of(1, "no document", 0.0, 4.0, nbytes=0),
    record_of(0, "full", 1.0, 2.0, nbytes=400), record_of(1, "full", 1.0, 1.0, nbytes=200),
]  # fmt: skip


def test_a_share_is_the_part_of_the_mean_gap_that_is_kept() -> None:
    rows = summarise([*ENDS, record_of(0, "a", 0.5, 3.0), record_of(1, "a", 0.5, 3.5)])
    shares = {row.method: (row.nll, row.share, row.bytes, row.bytes_share) for row in rows}
    assert shares == {
        "full": (1.5, 1.0, 300, 1.0), "no document": (5.0, 0.0, 0, 0.0), "a": (3.25, 0.5, 100, pytest.approx(1 / 3)),
    }  # fmt: skip


def test_means_leave_out_what_is_not_known() -> None:
    answers = [record_of(0, "a", 0.5, 3.0, agreement=0.25, f1=1.0, ingest=1.5), record_of(1, "a", 0.5, 3.0, f1=0.5)]
    [row] = [row for row in summarise([*ENDS, *answers]) if row.method == "a"]
    assert (row.questions, row.agreement, row.f1, row.ingest) == (2, 0.25, 0.75, 1.5)


def test_the_best_share_comes_first_within_a_protocol_and_a_keep() -> None:
    others = [record_of(0, name, keep, nll) for name, keep, nll in [("a", 0.1, 3), ("b", 0.5, 4), ("c", 0.5, 3)]]
    task = record_of(0, "c", 0.9, 2.5, protocol="context+task")
    found = [(row.method, row.protocol) for row in summarise([*ENDS, *others, task])]
    order = ["full", "c", "b", "a", "no document"]
    assert found == [*((name, "context") for name in order), ("c", "context+task")]


def test_full_keeps_all_of_the_gap_and_no_document_nothing(records: list[Record]) -> None:
    shares = {row.method: row.share for row in summarise(records) if row.method in ("full", "no document")}
    assert shares == {"full": 1.0, "no document": 0.0}


def test_every_method_keep_and_protocol_is_one_row_over_all_questions(records: list[Record]) -> None:
    rows = summarise(records)
    assert {row.method for row in rows} == {"full", "no document", ALWAYS, *METHODS}
    assert (len(rows), {row.questions for row in rows}) == (3 + len(METHODS), {4})


@pytest.fixture
def rows(records: list[Record]) -> list[Row]:
    return summarise(records)


def test_json_holds_the_rows_and_what_they_were_measured_with(rows: list[Row], tmp_path: Path) -> None:
    write(rows, tmp_path / "out", {"model": "tiny"})
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert content == {"about": {"model": "tiny"}, "results": [asdict(row) for row in rows]}


def test_csv_holds_the_rows(rows: list[Row], tmp_path: Path) -> None:
    write(rows, tmp_path, {})
    with (tmp_path / "results.csv").open(newline="") as lines:
        found = list(csv.DictReader(lines))
    assert found == [{key: "" if value is None else str(value) for key, value in asdict(row).items()} for row in rows]


def test_every_file_named_as_written_is_there(rows: list[Row], tmp_path: Path) -> None:
    written = write(rows, tmp_path, {})
    assert sorted(written) == sorted(tmp_path.iterdir()) and len(written) >= 2


def test_the_table_shows_the_rows(rows: list[Row]) -> None:
    columns = {str(column.header): list(column.cells) for column in table(rows).columns}
    for heading, cells in {
        "method": [row.method for row in rows], "keep": [f"{row.keep:g}" for row in rows],
        "protocol": [row.protocol for row in rows], "NLL": [f"{row.nll:.3f}" for row in rows],
        "of the gap": [f"{row.share:.1%}" for row in rows],
    }.items():  # fmt: skip
        assert columns[heading] == cells


@pytest.mark.parametrize(
    ("said", "gold", "f1"),
    [
        ("The Oil.", "oil", 1.0), ("graphite oil", "oil", 2 / 3), ("oil oil", "oil", 2 / 3), ("grease", "oil", 0.0),
        ("", "oil", 0.0), ("a", "the", 1.0),
    ],
)  # fmt: skip
def test_f1_counts_words_without_case_punctuation_and_articles(said: str, gold: str, f1: float) -> None:
    assert token_f1(said, gold) == pytest.approx(f1)
