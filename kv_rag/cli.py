"""The command line: parse, call the engine, print. Results go to stdout, everything else to stderr.

torch and transformers take seconds to import, so whatever needs them is imported within a command.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from typer.core import TyperGroup

from kv_rag.errors import ContextOverflow, EmptyInput, InvalidSetting, KVRagError, UnknownDocument
from kv_rag.evaluation.commands import bench

if TYPE_CHECKING:
    from kv_rag import Answer, Engine, Ingested
    from kv_rag.store import DocumentRecord, StateRecord
    from kv_rag.store import Store as OpenedStore
    from kv_rag.textfiles import LeftOut

SHORT_ID = 12  # digits shown; any 6 or more that fit one document name it


class Mode(str, Enum):
    """Where the pairs that answer a question come from."""

    compressed = "compressed"
    snapkv = "snapkv"
    full = "full"


class Allocation(str, Enum):
    """How the heads of a document share its pairs."""

    uniform = "uniform"
    heads = "heads"
    model = "model"
    pyramid = "pyramid"


class Retain(str, Enum):
    """Which states ingest stores."""

    both = "both"
    compressed = "compressed"
    full = "full"


class StoredDtype(str, Enum):
    """How many bits a stored state has for a number."""

    model = "model"
    bfloat16 = "bfloat16"
    int8 = "int8"
    int4 = "int4"
    fp8 = "fp8"


class Evict(str, Enum):
    """Which states give way when the disk budget is used up."""

    lru = "lru"
    least_useful = "least_useful"


class OnMissing(str, Enum):
    """What to do when a mode needs a state that was not stored."""

    error = "error"
    prefill = "prefill"


class _Commands(TyperGroup):
    """Our own errors end a command with one line and exit status 1; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVRagError as error:
            _complain(str(error))
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Read documents once, keep their KV state on disk, answer every later question from it.",
    epilog='First steps: kv-rag ingest FOLDER, then kv-rag ask "a question". kv-rag COMMAND --help has an example of each.',
)

Store = Annotated[str, typer.Option(help="Folder of the document states, or a URL such as s3://bucket/prefix.")]
Model = Annotated[str, typer.Option(help="bundled:NAME, a folder, or a hub id. A store belongs to one model.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
DocumentArgument = Annotated[str, typer.Argument(metavar="DOC", help="Name, id, or the beginning of an id.")]
STORE, MODEL = "./kv", "bundled:smollm2-135m"
_of_the_store: dict[str, Any] = {}  # options given before the command, of the one command that this process runs


@app.callback()
def common(
    namespace: Annotated[
        str | None, typer.Option(envvar="KV_RAG_NAMESPACE", help="A tenant's name; each has a store of its own.")
    ] = None,
    hmac_key_file: Annotated[
        Path | None,
        typer.Option(envvar="KV_RAG_HMAC_KEY_FILE", help="File with a secret: states others wrote are refused."),
    ] = None,
) -> None:
    """Options of the store, before the command."""
    secret = None if hmac_key_file is None else _secret(hmac_key_file)
    _of_the_store.update(namespace=namespace, hmac_key=secret)


@app.command(epilog="Example: kv-rag ingest notes/ manual.md --keep 0.25 --retain both")
def ingest(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Text or Markdown files, or folders of them.")],
    store: Store = STORE,
    model: Model = MODEL,
    method: Annotated[
        str | None, typer.Option(help="Compression method, default blend. A name that does not exist lists all.")
    ] = None,
    keep: Annotated[float | None, typer.Option(help="Fraction of the pairs to keep, in (0, 1]. Default 0.25.")] = None,
    budget: Annotated[int | None, typer.Option(help="Pairs per head to keep, instead of --keep.")] = None,
    allocation: Annotated[
        Allocation | None,
        typer.Option(help="The same number of pairs in every head, or shared by heads and layers. Default: the method's."),
    ] = None,
    retain: Annotated[Retain, typer.Option(help="States to store; modes snapkv and full need the full one.")] = Retain.both,
    stored_dtype: Annotated[
        StoredDtype, typer.Option(help="As the model made them, or in fewer bits and a little wrong.")
    ] = StoredDtype.model,
    disk_budget: Annotated[
        int | None, typer.Option(min=1, help="Bytes of state files; what is used least gives way to what is new.")
    ] = None,
    evict: Annotated[Evict, typer.Option(help="What gives way: unused for longest, or useful least.")] = Evict.lru,
    as_json: Json = False,
) -> None:
    """Read documents and store their states. What is stored already costs nothing."""
    from kv_rag.textfiles import read_documents

    settings = {
        **_ingest_settings(method, keep, budget), "allocation": allocation.value if allocation else None,
        "stored_dtype": stored_dtype.value,
    }  # fmt: skip
    documents, left_out = read_documents(paths)
    for item in left_out:
        _complain(f"{'cannot ingest' if item.missing else 'skipped'} {item.path}: {item.why}")
    if not documents:
        raise EmptyInput("nothing to ingest: give text files, or folders that hold .txt, .md or .rst files")
    progress = sys.stderr.isatty() and not as_json
    done: list[Ingested] = []
    failed: list[dict[str, str]] = []
    with _engine(model, store, disk_budget=disk_budget, evict=evict.value) as engine:
        for document in documents:  # one by one, so that a document that is too long does not stop the others
            try:
                done += engine.ingest(document, retain=retain.value, progress=progress, **settings)
            except (ContextOverflow, EmptyInput) as error:
                _complain(str(error))
                failed.append({"name": str(document.name), "error": str(error)})
                continue
            if not as_json:
                typer.echo(_ingested_line(done[-1]))
    if as_json:
        _print_ingested(done, left_out, failed)
    if failed or any(item.missing for item in left_out):
        raise typer.Exit(1)


@app.command(epilog='Example: kv-rag ask "Which oil does the crane need?" --doc manual.md --mode snapkv')
def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What you want to know.")],
    store: Store = STORE,
    model: Model = MODEL,
    doc: Annotated[
        list[str] | None,
        typer.Option(metavar="DOC", help="Answer from this document; may be repeated. Default: BM25 picks."),
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="How many documents BM25 picks.")] = 1,
    mode: Annotated[Mode, typer.Option(help="Pairs chosen at ingest, chosen by this question, or all.")] = Mode.compressed,
    keep: Annotated[float | None, typer.Option(help="snapkv: fraction of pairs to use; compressed: which state.")] = None,
    method: Annotated[str | None, typer.Option(help="compressed: the state made by this method.")] = None,
    repair: Annotated[
        float | None, typer.Option(min=0, max=1, help="Fraction of each document to recompute, for several documents.")
    ] = None,
    on_missing: Annotated[OnMissing, typer.Option(help="When the mode's state was not stored.")] = OnMissing.error,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    as_json: Json = False,
) -> None:
    """Answer a question from ingested documents."""
    from kv_rag.prompt import Choice

    if not question.strip():
        raise EmptyInput("the question is empty")
    Choice(mode.value, keep, method)  # refused here rather than after the model is loaded
    chosen = _choose(store, question, doc or [], top_k)
    options: dict[str, Any] = {} if repair is None else {"repair": repair}
    with _engine(model, store) as engine:
        stream = engine.stream(
            question, documents=[record.id for record in chosen], mode=mode.value, keep=keep, method=method,
            on_missing=on_missing.value, max_new_tokens=max_new_tokens, **options,
        )  # fmt: skip
        if not as_json:
            for piece in stream:
                typer.echo(piece, nl=False)
            typer.echo()
        answer = stream.answer
    if as_json:
        _print_json(
            question=question, answer=answer.text, documents=[{"id": record.id, "name": record.name} for record in chosen],
            metadata=answer.metadata.as_dict(),
        )  # fmt: skip
    else:
        typer.echo(_figures(answer, chosen), err=True)


@app.command("list", epilog="Example: kv-rag list --store ./kv")
def list_documents(store: Store = STORE, as_json: Json = False) -> None:
    """List the documents of a store."""
    with _opened(store) as opened:
        documents = opened.documents()
        in_folder = opened.nbytes_on_disk()
    if as_json:
        _print_json(
            documents=[_as_dict(record) for record in documents], bytes_on_disk=sum(map(_bytes_on_disk, documents)),
            store_bytes_on_disk=in_folder,
        )  # fmt: skip
        return
    rows = [
        (record.id[:SHORT_ID], f"{record.tokens:,}", *_sizes(list(record.states)), str(len(record.states)), _name(record))
        for record in documents
    ]
    states = [state for record in documents for state in record.states]
    total = ("total", f"{sum(record.tokens for record in documents):,}", *_sizes(states), str(len(states)),
             f"{len(documents)} documents, {decimal(in_folder)} with the index")  # fmt: skip
    heading = ("id", "tokens", "pairs", "of", "compressed", "full", "on disk", "in memory", "states", "name")
    for line in columns([heading, *rows, total], right=tuple(range(1, 9))):
        typer.echo(line)


@app.command(epilog="Example: kv-rag show manual.md")
def show(document: DocumentArgument, store: Store = STORE, as_json: Json = False) -> None:
    """Show one document and its states."""
    with _opened(store) as opened:
        record = opened.document(opened.resolve(document))
    if as_json:
        _print_json(**_as_dict(record))
        return
    typer.echo(_name(record))
    for line in columns([("id", record.id), ("tokens", f"{record.tokens:,}"), ("characters", f"{record.characters:,}")]):
        typer.echo(line)
    typer.echo()
    rows = [
        (
            str(state.compression), f"{state.pairs:,}", f"{state.pairs / state.full_pairs:.1%}", decimal(state.file_bytes),
            state.created,
        )
        for state in record.states
    ]  # fmt: skip
    for line in columns([("state", "pairs", "kept", "on disk", "written"), *rows], right=(1, 2, 3)):
        typer.echo(line)


@app.command(epilog="Example: kv-rag remove manual.md")
def remove(document: DocumentArgument, store: Store = STORE, as_json: Json = False) -> None:
    """Remove a document with all its states."""
    with _opened(store, writing=True) as opened:
        record = opened.document(opened.resolve(document))
        freed = opened.remove(record.id)
    if as_json:
        _print_json(removed=record.id, name=record.name, bytes_freed=freed)
    else:
        typer.echo(f"removed {_name(record)}: {decimal(freed)} freed")


@app.command(epilog="Example: kv-rag verify --store ./kv")
def verify(store: Store = STORE, as_json: Json = False) -> None:
    """Read every file of a store and compare checksums. Exit status 1 when something is wrong."""
    with _opened(store, writing=True) as opened:
        problems = opened.verify()
        documents = len(opened.documents())
    if as_json:
        _print_json(
            documents=documents,
            problems=[{"file": str(p.file), "document": p.document_id, "what": p.what} for p in problems],
        )
    else:
        for problem in problems:
            typer.echo(f"{problem.file}: {problem.what}")
        typer.echo(f"{documents} documents, {len(problems) or 'no'} problem{'' if len(problems) == 1 else 's'}")
    if problems:
        raise typer.Exit(1)


app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of ``kv-rag``."""
    app(prog_name="kv-rag")


# --- opening ---


def _engine(model: str, store: str, **options: Any) -> Engine:
    from kv_rag import Engine, bundled

    _quiet_transformers()
    name = model.removeprefix(bundled.PREFIX)
    if model.startswith(bundled.PREFIX) and name in bundled.BUNDLED and not bundled.is_unpacked(name):
        _complain(
            f"welcome; {model} is used for the first time: its weights are unpacked to {bundled.cache_folder()}, once, "
            "in under a minute"
        )
    return Engine.from_pretrained(model, store=store, **_of_the_store, **options)


def _secret(path: Path) -> bytes:
    try:
        return path.read_bytes().strip()
    except OSError as error:
        raise InvalidSetting(f"the HMAC key file {path} cannot be read: {error.strerror}") from error


def _quiet_transformers() -> None:
    """No progress bars, advice or retries on stderr: they are no news to people who ask about documents."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


@contextmanager
def _opened(folder: str, *, writing: bool = False) -> Iterator[OpenedStore]:
    """A store without its model, whatever model wrote it."""
    from kv_rag.store import open_store

    # Refuses a folder without a store, where writing would make one.
    store = open_store(folder, None, read_only=True, **_of_the_store)
    if writing:
        store.close()
        store = open_store(folder, None, **_of_the_store)
    try:
        yield store
    finally:
        store.close()


def _choose(folder: str, question: str, named: list[str], top_k: int) -> list[DocumentRecord]:
    """The documents to answer from: the named ones, or those that BM25 ranks highest."""
    from kv_rag.search import rank

    with _opened(folder) as store:
        if named:
            return [store.document(store.resolve(name)) for name in named]
        records = {record.id: record for record in store.documents()}
        if not records:
            raise UnknownDocument(f"the store in {folder} holds no documents; ingest some: kv-rag ingest PATH")
        if len(records) == 1:
            return list(records.values())
        found = rank(question, {document_id: store.text(document_id) for document_id in records})
    if not found:
        raise UnknownDocument("no ingested document has a word of the question; name one with --doc (see kv-rag list)")
    return [records[document_id] for document_id in found[:top_k]]


def _ingest_settings(method: str | None, keep: float | None, budget: int | None) -> dict[str, Any]:
    """Settings that were given; wrong ones are refused here rather than after the model is loaded."""
    from kv_rag import methods
    from kv_rag.document import check_budget

    if method is not None:
        methods.create(method)
    if keep is not None or budget is not None:
        check_budget(keep, budget)
    given = {"method": method, "keep": keep, "budget": budget}
    return {name: value for name, value in given.items() if value is not None}


# --- printing ---


def _complain(message: str) -> None:
    typer.echo(f"kv-rag: {' '.join(_in_options(message).split())}", err=True)


# Errors speak of Python; here people type options. What a store holds is left as it is.
_PYTHON = re.compile(
    r"the store holds [^;]*"
    r"|engine\.ingest\(text, (?P<call>[^)]*)\)"
    r"|\b(?P<name>keep|budget|mode|method|retain|on_missing|repair|allocation)=(?P<value>'[^']*'|[\w.…]+)"
)


def _in_options(message: str) -> str:
    """``message`` with ``keep=0.25`` as ``--keep 0.25``, ``engine.ingest(text, …)`` as the command."""

    def option(match: re.Match[str]) -> str:
        if match["call"]:
            return f"kv-rag ingest PATH {_in_options(match['call']).replace(',', '').replace(chr(39), '')}"
        if match["name"]:
            return f"--{match['name'].replace('_', '-')} {match['value'].strip(chr(39))}"
        return match[0]

    return _PYTHON.sub(option, message)


def _print_json(**content: Any) -> None:
    typer.echo(json.dumps(content, ensure_ascii=False))


def _print_ingested(done: list[Ingested], left_out: list[LeftOut], failed: list[dict[str, str]]) -> None:
    _print_json(
        documents=[asdict(item) for item in done],
        skipped=[{"path": item.path, "why": item.why} for item in left_out],
        failed=failed,
    )


def _ingested_line(item: Ingested) -> str:
    if not item.new:
        return f"{item.name}: stored already"
    return (
        f"{item.name}: {item.tokens:,} tokens, {item.pairs_kept:,} of {item.pairs_full:,} pairs kept, "
        f"{decimal(item.bytes_on_disk)} on disk, {item.seconds:.1f} s"
    )


def _figures(answer: Answer, documents: list[DocumentRecord]) -> str:
    m = answer.metadata
    parts = [
        f"from {', '.join(_name(record) for record in documents)}",
        m.mode,
        f"first token {m.seconds_to_first_token:.2f} s",
        f"{m.cached_tokens:,} of {m.prompt_tokens:,} tokens not read again",
        f"{m.pairs_kept:,} of {m.pairs_full:,} pairs",
        f"{decimal(m.resident_bytes)} resident",
    ]
    if m.seconds_per_token:
        parts.insert(3, f"then {1 / m.seconds_per_token:.0f} tokens/s")
    if m.finish_reason == "length":
        parts.append(f"cut at {m.generated_tokens} tokens")
    return " | ".join(parts)


def _as_dict(record: DocumentRecord) -> dict[str, Any]:
    states = [
        {
            "compression": str(state.compression), "pairs": state.pairs, "full_pairs": state.full_pairs,
            "bytes_on_disk": state.file_bytes, "bytes_in_memory": state.nbytes, "created": state.created,
            "path": str(state.path),
        }
        for state in record.states
    ]  # fmt: skip
    return {
        "id": record.id, "name": record.name, "tokens": record.tokens, "characters": record.characters,
        "bytes_on_disk": _bytes_on_disk(record), "states": states,
    }  # fmt: skip


def _name(record: DocumentRecord) -> str:
    return record.name or record.id[:SHORT_ID]


def _sizes(states: list[StateRecord]) -> tuple[str, ...]:
    """Pairs kept and before; bytes of compressed, full and all files; bytes in memory when used."""
    full = sum(state.file_bytes for state in states if state.compression.is_full)
    on_disk = sum(state.file_bytes for state in states)
    return (
        f"{sum(state.pairs for state in states):,}", f"{sum(state.full_pairs for state in states):,}",
        decimal(on_disk - full), decimal(full), decimal(on_disk), decimal(sum(state.nbytes for state in states)),
    )  # fmt: skip


def _bytes_on_disk(record: DocumentRecord) -> int:
    return sum(state.file_bytes for state in record.states)


def columns(rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    """Lines with the cells of ``rows`` under each other; the columns in ``right`` flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
