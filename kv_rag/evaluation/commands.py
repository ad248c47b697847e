"""``kv-rag bench``: compare methods fairly, in one command.

torch and transformers take seconds to import, so whatever needs them is imported within a command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class _Spread(TyperCommand):
    """Lets an option be given several values in a row: ``--keep 0.5 0.25`` is ``--keep 0.5 --keep 0.25``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        spread: list[str] = []
        current: str | None = None
        waiting = False
        for argument in args:
            if argument.startswith("-"):
                current = argument if argument in repeatable else None
                waiting = True
            elif current is not None and not waiting:
                spread.append(current)
            if not argument.startswith("-"):
                waiting = False
            spread.append(argument)
        return super().parse_args(ctx, spread)


bench = typer.Typer(no_args_is_help=True, help="Compare compression methods: compress first, ask afterwards.")

Data = Annotated[
    Path | None, typer.Argument(metavar="[DATA.jsonl]", help="Documents with questions. Default: the packaged ones.")
]
Model = Annotated[str, typer.Option(help="bundled:NAME, a folder, or a hub id.")]
Methods = Annotated[
    list[str],
    typer.Option(help="NAME, NAME/ALLOCATION or NAME,SETTING=VALUE, several in a row. 'random' is always included."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="So many documents from the beginning.")]
Questions = Annotated[int | None, typer.Option(min=1, help="So many questions of each document.")]
MODEL = "bundled:smollm2-135m"
METHODS = ["snapkv", "blend", "kvzip", "keydiff_attention", "keydiff", "h2o", "streaming"]


@bench.command(
    cls=_Spread,
    epilog="Example: kv-rag bench quality DATA.jsonl --methods snapkv blend keydiff --keep 0.5 0.25 0.1 --limit 20",
)
def quality(
    data: Data = None,
    model: Model = MODEL,
    methods: Methods = METHODS,
    keep: Annotated[list[float], typer.Option(help="Fractions of the pairs, several in a row.")] = [0.5, 0.25, 0.1],  # noqa: B006
    protocol: Annotated[
        list[str], typer.Option(help="context (compress, then ask), context+task (the question is read first), or both.")
    ] = ["context"],  # noqa: B006
    limit: Limit = None,
    questions: Questions = None,
    answers: Annotated[bool, typer.Option(help="Also generate answers, for agreement and F1.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for results; a run that was stopped goes on there.")] = Path("bench"),
) -> None:
    """How much of a document's use each method keeps: NLL of the right answers, agreement, F1, bytes, seconds."""
    from kv_rag.evaluation.cases import load
    from kv_rag.evaluation.quality import Comparison, compare, summarise
    from kv_rag.evaluation.report import machine, table, write

    comparison = Comparison(tuple(methods), tuple(keep), tuple(protocol), answers)
    cases = load(data, limit=limit, questions=questions)
    about = machine(model)
    with _progress(comparison.answers(cases), "answer") as step:
        records = compare(_bench(model), cases, comparison, out / "records.jsonl", step)
    rows = summarise(records)
    _print(table(rows), about)
    for path in write(rows, out, about):
        typer.echo(f"written: {path}", err=True)


@bench.command(
    "two-place",
    cls=_Spread,
    epilog="Example: kv-rag bench two-place --methods snapkv blend h2o --keep 0.25 --limit 3",
)
def two_place(
    data: Data = None,
    model: Model = MODEL,
    methods: Methods = METHODS,
    keep: Annotated[float, typer.Option(help="Fraction of the pairs.")] = 0.25,
    limit: Limit = None,
    questions: Questions = 4,
) -> None:
    """One question after another from the same state: how much later questions find in what the first one saw."""
    from rich import box
    from rich.table import Table

    from kv_rag.evaluation.cases import load
    from kv_rag.evaluation.quality import Comparison
    from kv_rag.evaluation.report import machine
    from kv_rag.evaluation.two_place import two_places

    contestants = Comparison(tuple(methods), (keep,)).contestants()
    cases = load(data, limit=limit, questions=questions)
    with _progress(len(cases), "document") as step:
        places = two_places(_bench(model), cases, contestants, keep, on_case=step)
    shown = Table("method", "compressed with", box=box.SIMPLE_HEAD)
    for heading in ("question 1", "later questions", "lost"):
        shown.add_column(heading, justify="right")
    for place in sorted(places, key=lambda place: -place.later):
        seen = {"context": "no question", "context+task": "question 1 in sight", "per query": "each question its own"}
        lost = f"{place.first - place.later:+.1%}"
        shown.add_row(place.method, seen[place.protocol], f"{place.first:.1%}", f"{place.later:.1%}", lost)
    _print(shown, {**machine(model), "share of": "the NLL gap between full and no document"})


def _bench(model: str) -> Any:
    from kv_rag.evaluation.runs import Bench
    from kv_rag.model import LanguageModel

    return Bench(LanguageModel.from_pretrained(model))


class _progress:
    """A progress bar on stderr, for people only."""

    def __init__(self, total: int, unit: str) -> None:
        import sys

        from tqdm.auto import tqdm

        self._bar = tqdm(total=total, unit=unit, disable=not sys.stderr.isatty(), leave=False)

    def __enter__(self) -> Any:
        return lambda: self._bar.update(1)

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _print(shown: Any, about: dict[str, str]) -> None:
    import sys

    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), soft_wrap=True)
    console.print(shown)
