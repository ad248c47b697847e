"""Every method and keep on the same questions: how much of a document's use is left.

Protocols: ``context`` compresses first and asks afterwards; ``context+task`` reads the question together with the document
before compressing, which a cache that is to serve later questions cannot do. Methods whose rank depends on that column
are ranked by what they see of the question.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from kv_rag.document import DocumentCache, check_budget, text_digest
from kv_rag.errors import InvalidSetting
from kv_rag.evaluation.cases import Case
from kv_rag.evaluation.contestants import Contestant
from kv_rag.evaluation.runs import Bench, Scored
from kv_rag.selection import pairs_to_keep
from kv_rag.snapkv import SnapKV

PROTOCOLS = ("context", "context+task")
ALWAYS = "random"
_PER_QUERY = "per query"


@dataclass(frozen=True)
class Record:
    """One question answered from one state.

    Attributes:
        case, question: which, counted from 0.
        method: as asked for; "full" and "no document" are the ends of the scale.
        keep: fraction of the pairs.
        protocol: one of PROTOCOLS; "per query" for snapkv, which keeps the full state.
        nbytes: what is held of the documents between questions.
        pairs: pairs that the answer is generated from.
        ingest: seconds of reading and compressing the documents, as a multiple of a plain prefill; None without one.
        seconds, nll, predicted, agreement, f1: see ``runs.Measured``.

    """

    case: int
    question: int
    method: str
    keep: float
    protocol: str
    nbytes: int
    pairs: int
    ingest: float | None
    seconds: float
    nll: float
    predicted: float
    agreement: float | None
    f1: float | None


@dataclass(frozen=True)
class Comparison:
    """What is compared on what.

    Raises:
        InvalidSetting: no method, keep out of range, unknown protocol.

    """

    methods: tuple[str, ...]
    keeps: tuple[float, ...] = (0.5, 0.25, 0.1)
    protocols: tuple[str, ...] = ("context",)
    generate: bool = True

    def __post_init__(self) -> None:
        for keep in self.keeps:
            check_budget(keep, None)
        for protocol in self.protocols:
            if protocol not in PROTOCOLS:
                raise InvalidSetting(f"protocol must be one of {', '.join(PROTOCOLS)}, got {protocol!r}")
        if not self.methods or not self.keeps or not self.protocols:
            raise InvalidSetting("give at least one method, one keep and one protocol")

    def contestants(self) -> list[Contestant]:
        """Those asked for, and random."""
        return [Contestant.parse(text) for text in dict.fromkeys([*self.methods, ALWAYS])]

    def answers(self, cases: Sequence[Case]) -> int:
        """How many answers it takes: the two ends of the scale, and every method, keep and protocol."""
        conditions = sum(1 if entry.is_per_query else len(set(self.protocols)) for entry in self.contestants())
        return (2 + conditions * len(self.keeps)) * sum(len(case.questions) for case in cases)


def compare(
    bench: Bench,
    cases: Sequence[Case],
    comparison: Comparison,
    file: Path | None = None,
    on_answer: Callable[[], object] = lambda: None,
) -> list[Record]:
    """All records; with ``file`` they are written there case by case, and cases found there are not run again.

    Raises:
        InvalidSetting: ``file`` holds another comparison, or one with another model.

    """
    done = [] if file is None else _resume(file, bench, cases, comparison)
    records = list(done)
    for index, case in enumerate(cases):
        if any(record.case == index for record in done):
            for _ in range(comparison.answers([case])):
                on_answer()
            continue
        new = _case(bench, index, case, comparison, on_answer)
        records += new
        if file is not None:
            with file.open("a", encoding="utf-8") as out:
                out.write("".join(json.dumps(asdict(record)) + "\n" for record in new))
    return records


def _resume(file: Path, bench: Bench, cases: Sequence[Case], comparison: Comparison) -> list[Record]:
    """Records of finished cases; a new file gets its first line, which says what is compared."""
    compared = {
        "comparison": asdict(comparison), "cases": text_digest(repr(cases)), "model": bench.model.fingerprint(),
    }  # fmt: skip
    header = json.dumps(compared) + "\n"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if header.startswith(text) and text != header:  # nothing yet, or cut off within the first line
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(header, encoding="utf-8")
        return []
    if not text.startswith(header):
        raise InvalidSetting(f"{file} holds the results of another comparison; choose another folder or remove it")
    lines = text.removeprefix(header).splitlines()
    records = [Record(**json.loads(line)) for line in lines if line.endswith("}")]
    finished = {
        index for index, case in enumerate(cases)
        if sum(record.case == index for record in records) == comparison.answers([case])
    }  # fmt: skip
    kept = [record for record in records if record.case in finished]
    if len(kept) < len(lines) or not text.endswith("\n"):  # a case that was cut off is run again
        file.write_text(header + "".join(json.dumps(asdict(record)) + "\n" for record in kept), encoding="utf-8")
    return kept


def _case(bench: Bench, index: int, case: Case, comparison: Comparison, on_answer: Callable[[], object]) -> list[Record]:
    contestants = comparison.contestants()
    compressing = [entry for entry in contestants if not entry.is_per_query]
    read = [bench.read(text, compressing) for text in case.documents]
    full = [state for state, _, _ in read]
    plain = sum(seconds for _, seconds, _ in read)
    references = [bench.own_answer(asked, full) if comparison.generate else None for asked in case.questions]
    everyone = range(len(case.questions))
    records: list[Record] = []

    def ask(
        method: str, keep: float, protocol: str, states: Sequence[DocumentCache], ingest: float | None,
        questions: Iterable[int] = everyone, per_query: tuple[SnapKV, float] | None = None,
    ) -> None:  # fmt: skip
        pairs, nbytes = sum(state.pairs for state in states), sum(state.nbytes for state in states)
        used = pairs if per_query is None else _picked(states, *per_query)
        for number in questions:
            measured = bench.ask(
                case.questions[number], states, reference=references[number], generate=comparison.generate,
                per_query=per_query,
            )  # fmt: skip
            records.append(Record(
                index, number, method, keep, protocol, nbytes, used, ingest, measured.seconds, measured.nll,
                measured.predicted, measured.agreement, measured.f1,
            ))  # fmt: skip
            on_answer()

    def compressed(entry: Contestant, keep: float, scored: Sequence[dict[str, Scored]]) -> list[DocumentCache]:
        return [
            bench.compressed(state, scores[entry.label].scores, entry, keep)
            for state, scores in zip(full, scored, strict=True)
        ]

    ask("no document", 0.0, "context", [], None)
    ask("full", 1.0, "context", full, 1.0)
    for entry, keep in product(contestants, comparison.keeps):
        if entry.is_per_query:
            ask(entry.label, keep, _PER_QUERY, full, 1.0, per_query=(entry.snapkv(), keep))
    if "context" in comparison.protocols:  # one state for all questions
        unseen = [scored for _, _, scored in read]
        for entry, keep in product(compressing, comparison.keeps):
            ingest = _ingest(plain, [scored[entry.label] for scored in unseen])
            ask(entry.label, keep, "context", compressed(entry, keep, unseen), ingest)
    if "context+task" in comparison.protocols:  # one state for each question
        for number, asked in enumerate(case.questions):
            seen = [bench.read(text, compressing, asked.question)[2] for text in case.documents]
            for entry, keep in product(compressing, comparison.keeps):
                ask(entry.label, keep, "context+task", compressed(entry, keep, seen), None, [number])
    return records


def _picked(states: Sequence[DocumentCache], settings: SnapKV, keep: float) -> int:
    """How many pairs of full ``states`` SnapKV leaves."""
    return sum(
        pairs_to_keep(state.tokens, keep, None, settings.minimum) * state.pairs // state.tokens for state in states
    )


def _ingest(plain: float, scored: Sequence[Scored]) -> float:
    return (plain + sum(one.seconds for one in scored)) / plain


@dataclass(frozen=True)
class Row:
    """Means over all questions for one method, keep and protocol. ``share``: of the NLL gap between the full state and
    no document, how much is kept (1.0 as good as full, 0.0 as bad as no document).
    """

    method: str
    keep: float
    protocol: str
    questions: int
    nll: float
    share: float
    predicted: float
    agreement: float | None
    f1: float | None
    bytes: float
    bytes_share: float
    ingest: float | None
    seconds_to_first_token: float


def summarise(records: Sequence[Record]) -> list[Row]:
    """One row for each method, keep and protocol, best share first within a keep."""
    groups: dict[tuple[str, float, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.method, record.keep, record.protocol), []).append(record)
    none = _mean([r.nll for r in groups["no document", 0.0, "context"]])
    full = groups["full", 1.0, "context"]
    best, whole = _mean([r.nll for r in full]), _mean([r.nbytes for r in full])
    rows = []
    for (method, keep, protocol), group in groups.items():
        nll = _mean([r.nll for r in group])
        rows.append(Row(
            method, keep, protocol, len(group), nll, (none - nll) / (none - best), _mean([r.predicted for r in group]),
            _mean_of([r.agreement for r in group]), _mean_of([r.f1 for r in group]), _mean([r.nbytes for r in group]),
            _mean([r.nbytes for r in group]) / whole, _mean_of([r.ingest for r in group]), _mean([r.seconds for r in group]),
        ))  # fmt: skip
    return sorted(rows, key=lambda row: (row.protocol, -row.keep, -row.share))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _mean(known) if known else None
