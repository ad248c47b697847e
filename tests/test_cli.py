"""The command line as people and scripts meet it, over a tiny model in a folder."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kv_rag
from kv_rag import cli, hub
from kv_rag.errors import KVRagError
from kv_rag.search import rank
from kv_rag.selection import ALLOCATIONS
from kv_rag.textfiles import read_documents
from tests.conftest import text_of, tiny_model, tiny_tokenizer

MANUAL = "The crane needs graphite oil every ninety hours. Its cabin is yellow, and the alarm sounds at strong wind."
MINUTES = "The council met in March. The mayor spoke of a footbridge, and the market moves to Thursday."
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two documents; the store is ./kv, as by default."""
    monkeypatch.chdir(tmp_path)
    Path("manual.md").write_text(MANUAL)
    Path("minutes.md").write_text(MINUTES)
    return tmp_path


@pytest.fixture
def run(work: Path, model_folder: Path) -> Run:
    """Runs ``kv-rag``; the commands that load a model load the tiny one."""

    def run(*arguments: str) -> Any:
        model = ["--model", str(model_folder)] if arguments[0] in ("ingest", "ask") else []
        return CliRunner().invoke(cli.app, [*arguments, *model])

    return run


@pytest.fixture
def ingested(run: Run) -> Run:
    assert run("ingest", "manual.md", "minutes.md").exit_code == 0
    return run


# --- ingest ---


def test_ingest_names_what_it_read(run: Run) -> None:
    result = run("ingest", "manual.md")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"manual.md: {len(MANUAL)} tokens")


def test_ingesting_again_is_a_no_op_and_says_so(ingested: Run) -> None:
    assert ingested("ingest", "manual.md").stdout == "manual.md: stored already\n"


def test_ingest_prints_one_json_object(run: Run) -> None:
    result = run("ingest", "manual.md", "minutes.md", "--keep", "0.5", "--json")
    documents = json.loads(result.stdout)["documents"]
    assert [document["name"] for document in documents] == ["manual.md", "minutes.md"]


def test_ingest_keeps_the_fraction_asked_for(run: Run) -> None:
    document = json.loads(run("ingest", "manual.md", "--keep", "0.5", "--json").stdout)["documents"][0]
    assert document["pairs_kept"] / document["pairs_full"] == pytest.approx(0.5, abs=0.01)


def test_a_folder_is_searched_for_texts_and_everything_else_is_named(run: Run, work: Path) -> None:
    (work / "notes" / "deep").mkdir(parents=True)
    (work / "notes" / "deep" / "a.txt").write_text("A text deep in the folder, long enough to be read.")
    (work / "notes" / "photo.png").write_bytes(b"\x89PNG")
    result = run("ingest", "notes")
    assert (result.exit_code, result.stdout[:11]) == (0, "deep/a.txt:")
    assert "skipped notes/photo.png" in result.stderr


@pytest.mark.parametrize(
    ("content", "why"), [(b"\xff\xfe\x00", "not UTF-8"), (b"a\0b", "binary"), (b" \n ", "empty"), (b"", "empty")]
)
def test_a_file_that_is_not_text_is_skipped_and_the_others_are_read(run: Run, work: Path, content: bytes, why: str) -> None:
    (work / "odd.md").write_bytes(content)
    result = run("ingest", "odd.md", "manual.md")
    assert (result.exit_code, result.stdout[:9]) == (0, "manual.md")
    assert "skipped odd.md" in result.stderr and why in result.stderr


def test_a_document_that_is_too_long_does_not_stop_the_others(run: Run, work: Path) -> None:
    (work / "long.md").write_text(text_of(3000))
    result = run("ingest", "long.md", "manual.md")
    assert (result.exit_code, result.stdout[:9]) == (1, "manual.md")
    assert "long.md" in result.stderr and "2048" in result.stderr


def test_a_missing_file_does_not_stop_the_others(run: Run) -> None:
    result = run("ingest", "nowhere.md", "manual.md", "--json")
    assert result.exit_code == 1
    assert [document["name"] for document in json.loads(result.stdout)["documents"]] == ["manual.md"]


def test_nothing_to_ingest_is_an_error(run: Run, work: Path) -> None:
    (work / "none").mkdir()
    result = run("ingest", "none")
    assert (result.exit_code, result.stderr[:26]) == (1, "kv-rag: nothing to ingest:")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", "25"], "--budget 25"),
        (["--method", "snapkv"], "--mode snapkv"),
        (["--keep", "1", "--budget", "9"], "either"),
    ],
)
def test_a_setting_out_of_range_is_one_line_and_status_1(run: Run, options: list[str], message: str) -> None:
    result = run("ingest", "manual.md", *options)
    assert result.exit_code == 1
    assert message in result.stderr and result.stderr.count("\n") == 1 and not Path("kv").exists()


def test_ingest_shares_pairs_between_heads_when_asked_to(run: Run) -> None:
    run("ingest", "manual.md", "--allocation", "heads")
    assert "allocation=heads" in run("show", "manual.md").stdout


def test_every_allocation_is_an_option() -> None:
    assert tuple(allocation.value for allocation in cli.Allocation) == ALLOCATIONS


# --- ask ---


@pytest.mark.parametrize("mode", ["compressed", "snapkv", "full"])
def test_ask_answers_on_stdout_and_gives_figures_on_stderr(ingested: Run, mode: str) -> None:
    result = ingested("ask", "Which oil?", "--doc", "manual.md", "--mode", mode, "--max-new-tokens", "4")
    assert result.exit_code == 0
    assert result.stderr.startswith(f"from manual.md | {mode} | first token") and result.stderr.count("\n") == 1


def test_ask_picks_the_document_that_shares_words_with_the_question(ingested: Run) -> None:
    result = ingested("ask", "When does the market move?", "--json", "--max-new-tokens", "4")
    assert [document["name"] for document in json.loads(result.stdout)["documents"]] == ["minutes.md"]


def test_ask_takes_as_many_documents_as_top_k_says(ingested: Run) -> None:
    result = ingested("ask", "Has the crane a footbridge?", "--top-k", "2", "--json", "--max-new-tokens", "4")
    assert len(json.loads(result.stdout)["metadata"]["documents"]) == 2


def test_ask_in_json_prints_the_same_answer(ingested: Run) -> None:
    arguments = ("ask", "Which oil?", "--doc", "manual.md", "--max-new-tokens", "8")
    result = ingested(*arguments, "--json")
    assert result.stderr == ""
    assert json.loads(result.stdout)["answer"] == ingested(*arguments).stdout.removesuffix("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", " "], "the question is empty"),
        (["ask", "Xylophone?"], "name one with --doc"),
        (["ask", "What?", "--doc", "nobody.md"], "no document 'nobody.md'"),
        (["ask", "What?", "--doc", "manual.md", "--doc", "manual.md"], "given twice"),
        (["ask", "What?", "--doc", "manual.md", "--keep", "0.7"], "--on-missing prefill"),
        (["ask", "What?", "--doc", "manual.md", "--keep", "0"], "keep must be"),
        (["ask", "What?", "--store", "elsewhere"], "there is no store in"),
        (["show", "nobody.md"], "no document 'nobody.md'"),
        (["remove", "nobody.md"], "no document 'nobody.md'"),
        (["list", "--store", "elsewhere"], "there is no store in"),
        (["remove", "x", "--store", "elsewhere"], "there is no store in"),
        (["verify", "--store", "elsewhere"], "there is no store in"),
    ],
)
def test_an_error_is_one_clear_line_and_status_1(ingested: Run, arguments: list[str], message: str) -> None:
    result = ingested(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("kv-rag: ") and message in result.stderr and result.stderr.count("\n") == 1
    assert not Path("elsewhere").exists()


def test_a_state_that_was_not_stored_is_read_for_this_question_when_asked_to(run: Run) -> None:
    run("ingest", "manual.md", "--retain", "compressed")
    asked = ("ask", "Which oil?", "--mode", "full", "--max-new-tokens", "4")
    assert run(*asked).exit_code == 1
    assert run(*asked, "--on-missing", "prefill").exit_code == 0


def test_a_missing_state_is_told_in_options(run: Run) -> None:
    run("ingest", "manual.md", "--retain", "compressed")
    told = run("ask", "Which oil?", "--mode", "full").stderr
    assert "for --mode full" in told and "holds blend keep=0.25 allocation=model;" in told
    assert "kv-rag ingest PATH --retain both or full" in told and "or pass --on-missing prefill" in told
    assert "='" not in told and "engine" not in told


def test_a_hub_that_cannot_be_reached_is_told_at_once(ingested: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "reachable", lambda: False)
    result = CliRunner().invoke(cli.app, ["ask", "Which oil?", "--model", "nobody/nothing"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "cannot be reached, and no earlier download has it" in result.stderr


def test_the_first_use_of_the_bundled_model_is_announced(
    ingested: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KV_RAG_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(kv_rag.Engine, "from_pretrained", failing)
    assert "used for the first time" in CliRunner().invoke(cli.app, ["ask", "Which oil?"]).stderr
    (tmp_path / "none" / "models" / "smollm2-135m").mkdir(parents=True)
    (tmp_path / "none" / "models" / "smollm2-135m" / "config.json").write_text("{}")
    assert "first time" not in CliRunner().invoke(cli.app, ["ask", "Which oil?"]).stderr


def failing(*_: Any, **__: Any) -> None:
    raise KVRagError("not in this test")


def test_another_models_store_is_refused(ingested: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    tiny_model("qwen2").save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    result = CliRunner().invoke(cli.app, ["ask", "Which oil?", "--model", str(other)])
    assert (result.exit_code, "made with other settings" in result.stderr) == (1, True)


def test_a_model_that_cannot_be_loaded_is_one_line_and_status_1(ingested: Run) -> None:
    result = CliRunner().invoke(cli.app, ["ask", "Which oil?", "--model", "bundled:nothing"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "no bundled model" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [["ask"], ["ask", "What?", "--mode", "fast"], ["ask", "What?", "--top-k", "0"], ["ingest"], ["fly"], ["show"]],
)
def test_wrong_usage_is_status_2(run: Run, arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


# --- list, show, remove, verify ---


def test_list_shows_every_document(ingested: Run) -> None:
    *lines, total = ingested("list").stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["name", "manual.md", "minutes.md"]
    assert total.startswith("total") and "2 documents" in total


def test_list_prints_one_json_object(ingested: Run) -> None:
    documents = json.loads(ingested("list", "--json").stdout)["documents"]
    assert [(document["name"], len(document["states"])) for document in documents] == [("manual.md", 2), ("minutes.md", 2)]


def test_show_takes_the_beginning_of_an_id(ingested: Run) -> None:
    document = json.loads(ingested("show", "manual.md", "--json").stdout)
    assert document["characters"] == len(MANUAL)
    assert ingested("show", document["id"][:8]).stdout.startswith("manual.md\n")


def test_remove_takes_the_document_and_its_files(ingested: Run) -> None:
    result = ingested("remove", "manual.md", "--json")
    assert json.loads(result.stdout)["bytes_freed"] > 0
    assert "manual.md" not in ingested("list").stdout and ingested("verify").exit_code == 0


def test_verify_finds_no_problem_in_a_sound_store(ingested: Run) -> None:
    result = ingested("verify")
    assert (result.exit_code, result.stdout) == (0, "2 documents, no problems\n")


def test_verify_names_a_damaged_file_with_status_1(ingested: Run, work: Path) -> None:
    victim = sorted((work / "kv" / "states").rglob("*.safetensors"))[0]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(bytes(content))
    result = ingested("verify", "--json")
    assert result.exit_code == 1
    assert [problem["file"] for problem in json.loads(result.stdout)["problems"]] == [str(victim)]


def test_looking_at_a_store_loads_no_model(ingested: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_rag.Engine, "from_pretrained", None)
    for arguments in (["list"], ["show", "manual.md"], ["verify"], ["remove", "manual.md"]):
        assert ingested(*arguments).exit_code == 0


# --- the program ---


def test_the_program_prints_no_traceback_and_nothing_else_on_stdout(ingested: Run, model_folder: Path) -> None:
    program = [sys.executable, "-c", "from kv_rag.cli import main; main()"]
    asked = [*program, "ask", "Which oil?", "--model", str(model_folder), "--json", "--max-new-tokens", "4"]
    environment = {**os.environ, "PYTHONPATH": str(Path(kv_rag.__file__).parent.parent)}
    good = subprocess.run(asked, capture_output=True, text=True, env=environment, check=False)
    bad = subprocess.run([*program, "show", "nobody"], capture_output=True, text=True, env=environment, check=False)
    assert (good.returncode, good.stderr, list(json.loads(good.stdout))[:2]) == (0, "", ["question", "answer"])
    assert (bad.returncode, bad.stdout, "Traceback" in bad.stderr) == (1, "", False)


def test_the_shell_completes_commands() -> None:
    asked = {"_KV_RAG_COMPLETE": "complete_bash", "COMP_WORDS": "kv-rag in", "COMP_CWORD": "1"}
    program = [sys.executable, "-c", "from kv_rag.cli import main; main()"]
    environment = {**os.environ, **asked, "PYTHONPATH": str(Path(kv_rag.__file__).parent.parent)}
    result = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert result.stdout.split() == ["ingest"]


@pytest.mark.parametrize("command", ["ingest", "ask", "list", "show", "remove", "verify"])
def test_every_command_has_an_example(run: Run, command: str) -> None:
    assert f"Example: kv-rag {command}" in CliRunner().invoke(cli.app, [command, "--help"]).stdout


def test_help_waits_for_no_heavy_import() -> None:
    tree = ast.parse(Path(cli.__file__).read_text())
    names = {
        name.split(".")[0] if not name.startswith("kv_rag") else name
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name
    }
    light = {"rich", "typer", "kv_rag.errors", "kv_rag.evaluation.commands"}
    assert {name for name in names if name not in sys.stdlib_module_names} == light


# --- picking and reading ---


def test_rank_puts_the_best_first_and_leaves_out_what_shares_no_word() -> None:
    texts = {"a": "the market in town", "b": "the crane and the crane oil", "c": "the crane in the harbour of the old town"}
    assert rank("Which oil does the crane need?", texts) == ["b", "c"]


def test_rank_keeps_equally_good_documents_in_order() -> None:
    assert rank("crane", {"b": "a crane", "a": "the crane"}) == ["b", "a"]


@pytest.mark.parametrize(("question", "texts"), [("the?", {"a": "crane"}), ("crane", {"a": "the"}), ("crane", {})])
def test_rank_is_empty_when_nothing_can_match(question: str, texts: dict[str, str]) -> None:
    assert rank(question, texts) == []


def test_the_same_text_in_two_files_is_one_document(work: Path) -> None:
    Path("copy.md").write_text(MANUAL + "\n")
    documents, left_out = read_documents([Path("manual.md"), Path("copy.md")])
    assert ([document.name for document in documents], left_out[0].why) == (["manual.md"], "same text as manual.md")


def test_a_pipe_is_left_out_unread(work: Path) -> None:
    os.mkfifo("pipe.md")
    assert read_documents([Path("pipe.md")])[1][0].why == "not a regular file"


def test_hidden_files_of_a_folder_are_passed_over(work: Path) -> None:
    Path(".git").mkdir()
    Path(".git", "HEAD.txt").write_text("ref")
    documents, left_out = read_documents([Path(".")])
    assert ([document.name for document in documents], left_out) == (["manual.md", "minutes.md"], [])
