"""``python -m kv_rag.demo``: six documents in, three questions, every mode, one table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from transformers.utils import logging

from kv_rag import Engine, KVRagError, demo
from kv_rag.prompt import MODES

# Two places of one document, and one question that needs two documents. SmolLM2-135M answers them right in full mode:
# see demo.answered().
ASKED = (
    "What is the maximum load of the Merlin 40?",
    "What is the name of the outside inspector who carries out the inspection?",
    "Which clock in the museum was built by the clockmaker whose workshop stands in Tanner Lane?",
)

TITLE = "Plain transformers, which reads the whole prompt, and kv_rag in its three modes"
WIDTH = 120  # in files and pipes, which have none of their own


def main(
    model: Annotated[str, typer.Option(help="bundled:NAME, a folder, or a hub id.")] = "bundled:smollm2-135m",
    store: Annotated[Path, typer.Option(help="Folder for the document states; made if missing.")] = Path("demo-store"),
) -> None:
    """Read six documents once, ask three questions in every mode, compare with plain transformers."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        console.print(f"Loading {model} …")
        with Engine.from_pretrained(model, store=store) as engine:
            ingest(engine, console)
            with console.status("Asking three questions, each without kv_rag and in three modes …"):
                answers = table(engine)
            console.print(answers)
            next_steps(engine, console, model)
    except KVRagError as error:
        print(f"kv_rag.demo: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def ingest(engine: Engine, console: Console) -> None:
    """Reads the documents, or finds that they were read by an earlier run."""
    results = engine.ingest(demo.documents(), retain="both", progress=sys.stderr.isatty())
    read = [result for result in results if result.new]
    tokens, seconds = sum(result.tokens for result in read), sum(result.seconds for result in read)
    if read:
        console.print(f"Read {len(read)} documents, {tokens:,} tokens, in {seconds:.0f} s.")
    else:
        console.print("All documents were read by an earlier run: nothing to do.")
    console.print(
        f"Their states, compressed and full, are in {engine.store.folder}: {decimal(engine.store.nbytes_on_disk())}.\n",
        soft_wrap=True,
    )


def table(engine: Engine) -> Table:
    """Every question with plain transformers and in every mode."""
    shown = Table("mode", "answer", title=TITLE, box=box.SIMPLE_HEAD)
    for heading in ("first\ntoken", "pairs\nkept", "bytes\nresident", "bytes\non disk"):
        shown.add_column(heading, justify="right")
    by_text = {question.question: question for question in demo.questions()}
    for text in ASKED:
        question = by_text[text]
        shown.add_row("", f"[bold]{text}[/bold] [dim]({question.place}: {' + '.join(question.documents)})[/dim]")
        plain = demo.plain_answer(engine, question)
        shown.add_row(
            "transformers", said(question, plain.text), f"{plain.seconds_to_first_token:.2f} s",
            "-", "-", "-",
        )  # fmt: skip
        for mode in reversed(MODES):
            shown.add_row(mode, *figures(engine, question, mode))
        shown.add_section()
    return shown


def figures(engine: Engine, question: demo.Question, mode: str) -> tuple[str, ...]:
    """A row's cells after the mode."""
    answer = demo.answer(engine, question, mode)
    metadata = answer.metadata
    return (
        said(question, answer.text),
        f"{metadata.seconds_to_first_token:.2f} s",
        f"{metadata.pairs_kept:,} ({metadata.pairs_kept / metadata.pairs_full:.0%})",
        decimal(metadata.resident_bytes),
        decimal(demo.bytes_on_disk(engine, question, mode)),
    )


def said(question: demo.Question, text: str) -> str:
    """An answer on one line, marked by whether the fact is in it."""
    return f"{'[green]✓[/green]' if question.is_answered_by(text) else '[red]✗[/red]'} {escape(' '.join(text.split()))}"


def next_steps(engine: Engine, console: Console, model: str) -> None:
    """Where to go from here."""
    store = engine.store.folder
    lines = (
        f'Ask:     kv-rag ask "{ASKED[0]}" --store {store} --model {model}',
        f'Python:  kv_rag.Engine.from_pretrained("{model}", store="{store}").answer("…", documents="museum-guide").text',
        f"Read on: README.md; kv-rag --help; your own texts: kv-rag ingest FOLDER. When done: rm -r {store}",
    )
    console.print("\n".join(("", "What to do next", *lines)), markup=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
