"""``kv-rag bench`` over a tiny model in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kv_rag import cli
from kv_rag.evaluation.quality import Row
from tests.conftest import tiny_model, tiny_tokenizer
from tests.evaluation.conftest import ONE, TWO

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> Run:
    """Runs ``kv-rag bench`` with the tiny model in a folder with ``data.jsonl``."""
    monkeypatch.chdir(tmp_path)
    questions = [{"q": asked.question, "answers": asked.answers} for asked in ONE.questions]
    [asked] = TWO.questions
    passages = [{"title": "", "text": text} for text in TWO.documents]
    lines = [
        {"title": ONE.name, "document": ONE.documents[0], "questions": questions},
        {"question": asked.question, "answers": asked.answers, "passages": passages},
    ]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def run(command: str, *arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["bench", command, "--model", str(model_folder), *arguments])

    return run


QUALITY = ("quality", "data.jsonl", "--limit", "1", "--questions", "1", "--no-answers")


def results(folder: str = "bench") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(folder, "results.json").read_text())["results"]
    return found


def test_quality_prints_a_table_and_writes_records_results_and_pictures(run: Run) -> None:
    result = run("quality", "data.jsonl", "--methods", "snapkv", "knorm/model", "--keep", "0.5", "--out", "new/out")
    assert result.exit_code == 0
    written = {path.name for path in Path("new/out").iterdir()}
    assert written == {"records.jsonl", "results.json", "results.csv", "frontier.png"}
    rows = [Row(**row) for row in results("new/out")]
    assert [row.method for row in rows if row.protocol == "per query"] == ["snapkv"]
    assert {row.method for row in rows} == {"snapkv", "knorm/model", "random", "full", "no document"}
    for row in rows:
        assert f"{row.method} " in result.stdout and f"{row.nll:.3f}" in result.stdout
        assert row.questions == 4 and row.f1 is not None
    assert result.stderr.count("written: new/out/") == 3


def test_quality_names_the_model_and_the_machine(run: Run, model_folder: Path) -> None:
    result = run(*QUALITY, "--methods", "knorm", "--keep", "0.5")
    about = json.loads(Path("bench/results.json").read_text())["about"]
    assert about["model"] == str(model_folder)
    assert f"model {model_folder}, machine " in result.stdout and {"torch", "transformers", "threads"} <= set(about)


def test_both_protocols_can_be_compared_at_once(run: Run) -> None:
    run(*QUALITY, "--methods", "knorm", "--keep", "0.5", "--protocol", "context", "context+task")
    assert [row["protocol"] for row in results() if row["method"] == "knorm"] == ["context", "context+task"]


def test_a_finished_comparison_is_not_run_again(run: Run) -> None:
    arguments = (*QUALITY, "--methods", "knorm", "--keep", "0.5")
    run(*arguments)
    first, records = results(), Path("bench/records.jsonl").read_bytes()
    assert run(*arguments).exit_code == 0
    assert (results(), Path("bench/records.jsonl").read_bytes()) == (first, records)  # seconds too


def test_a_stopped_comparison_goes_on(run: Run) -> None:
    arguments = ("quality", "data.jsonl", "--questions", "1", "--no-answers", "--methods", "knorm", "--keep", "0.5")
    run(*arguments)
    file, first = Path("bench/records.jsonl"), results()
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:6]) + lines[6][:20])
    assert run(*arguments).exit_code == 0
    assert file.read_text().splitlines()[:5] == [line.strip() for line in lines[:5]]
    assert [row["nll"] for row in results()] == [row["nll"] for row in first]


def test_values_in_a_row_are_the_same_as_the_option_repeated(run: Run) -> None:
    """So much so that the second command finds the first one's results."""
    run(*QUALITY, "--methods", "knorm", "streaming", "--keep", "0.5", "0.25")
    first = results()
    assert {row["keep"] for row in first} == {0.0, 0.25, 0.5, 1.0}
    again = run(*QUALITY, "--methods", "knorm", "--methods", "streaming", "--keep", "0.5", "--keep", "0.25")
    assert (again.exit_code, results()) == (0, first)


def test_values_in_a_row_end_at_the_next_option(run: Run) -> None:
    result = run("quality", "--methods", "knorm", "streaming", "--keep", "0.5", "--limit", "1", "--questions", "1",
                 "--no-answers", "--out", "there", "data.jsonl")  # fmt: skip
    assert result.exit_code == 0
    assert {row["method"] for row in results("there")} == {"knorm", "streaming", "random", "full", "no document"}


@pytest.mark.parametrize("command", ["quality", "two-place"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.jsonl", "--methods", "kvsqueeze"], "no compression method 'kvsqueeze'"),
        (["data.jsonl", "--methods", "knorm/layers"], "allocation must be one of"),
        (["data.jsonl", "--methods", "h2o,x=1"], "no setting 'x'"),
        (["data.jsonl", "--keep", "25"], "keep must be a fraction in (0, 1]"),
        (["nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["data.jsonl", "--model", "./nowhere"], "there is no such folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_one_line_and_status_1(
    run: Run, command: str, arguments: list[str], message: str
) -> None:
    result = run(command, *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert message in result.stderr and not Path("bench").exists()


def test_another_protocol_than_there_is_is_refused(run: Run) -> None:
    result = run(*QUALITY, "--protocol", "task")
    assert (result.exit_code, "protocol must be one of context, context+task, got 'task'" in result.stderr) == (1, True)


def test_another_comparison_does_not_go_where_results_are(run: Run) -> None:
    run(*QUALITY, "--methods", "knorm", "--keep", "0.5")
    before = results()
    result = run(*QUALITY, "--methods", "knorm", "--keep", "0.25")
    assert (result.exit_code, "choose another folder" in result.stderr) == (1, True)
    assert results() == before


@pytest.mark.parametrize("arguments", [["--limit", "0"], ["--questions", "0"], ["--keep", "half"]])
def test_wrong_usage_is_status_2(run: Run, arguments: list[str]) -> None:
    assert run("quality", "data.jsonl", *arguments).exit_code == 2


def test_two_place_prints_first_and_later_questions_of_documents_with_several(run: Run) -> None:
    result = run("two-place", "data.jsonl", "--methods", "snapkv", "knorm", "--keep", "0.5")
    assert result.exit_code == 0
    lines = [line.strip().split("  ")[0] for line in result.stdout.rpartition("─")[2].splitlines() if line.strip()]
    assert sorted(lines) == sorted(
        ["snapkv", "snapkv pruned for question 1, reused", "knorm", "knorm", "random", "random"]
    )
    for seen in ("no question", "question 1 in sight", "each question its own"):
        assert seen in result.stdout


@pytest.mark.parametrize("command", ["quality", "two-place"])
def test_every_command_has_an_example(command: str) -> None:
    assert f"Example: kv-rag bench {command}" in CliRunner().invoke(cli.app, ["bench", command, "--help"]).stdout


def test_rows_are_read_back_as_they_were_written(run: Run) -> None:
    run(*QUALITY, "--methods", "knorm", "--keep", "0.5")
    assert [asdict(Row(**row)) for row in results()] == results()
