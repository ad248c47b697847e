"""What the engine promises of its store: budgets, tenants, damage, and disks that refuse."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_rag.document import Compression, Document, DocumentCache, LayerPairs
from kv_rag.engine import Engine
from kv_rag.errors import (
    DamagedState,
    InvalidSetting,
    StateMissing,
    StoreMismatch,
    StoreUnreachable,
    UnknownDocument,
)
from kv_rag.prompt import Choice
from tests.conftest import text_of

MakeEngine = Callable[..., Engine]
FULL = Compression.full()
TEXT = text_of(300)
CHAT = [{"role": "user", "content": f"{TEXT}\n\nWhat jumps?"}]
BRIEF = {"max_new_tokens": 4}


def large_state(engine: Engine, number: int, tokens: int = 4000) -> tuple[Document, DocumentCache]:
    """A state of about 9 MB: two layers of 4 heads with 32 channels."""
    document = Document(f"A large document, number {number}.")
    pairs = 4 * tokens
    layers = tuple(
        LayerPairs(
            torch.randn(pairs, 32), torch.randn(pairs, 32),
            torch.arange(tokens, dtype=torch.int32).repeat(4), (tokens,) * 4,
        )
        for _ in range(2)
    )  # fmt: skip
    return document, DocumentCache(document.id, torch.zeros(tokens, dtype=torch.int64), layers, FULL)


def damage(path: Path, at: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.unlink()
    path.write_bytes(content)


# --- budgets ---


def test_counted_bytes_are_those_of_the_folder_and_of_the_process(make_engine: MakeEngine) -> None:
    engine = make_engine()
    documents = []
    for number in range(6):
        document, state = large_state(engine, number)
        engine.store.put(document, state)
        documents.append(document)
        del state
    gc.collect()
    before = _resident_set()
    for document in documents:
        engine.pin(document.id, Choice("full"))
    grown, report = _resident_set() - before, engine.memory()
    on_disk = int(subprocess.run(["du", "-s", "-B1", engine.store.folder], capture_output=True).stdout.split()[0])
    assert report.resident_bytes > 100e6 / 2
    assert grown == pytest.approx(report.resident_bytes, rel=0.05)
    assert on_disk == pytest.approx(report.store_bytes_on_disk, rel=0.05)
    assert sum(document.resident_bytes for document in report.documents) == report.resident_bytes
    assert report.bytes_on_disk == report.full_bytes_on_disk <= report.store_bytes_on_disk


def _resident_set() -> int:
    if not sys.platform.startswith("linux"):
        pytest.skip("the resident set is read from /proc")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_tells_full_from_compressed_and_kept_from_original(make_engine: MakeEngine) -> None:
    engine = make_engine(resident_budget=10**9, disk_budget=10**9)
    engine.ingest(Document(TEXT, "fox"), keep=0.25)
    report = engine.memory()
    compressed, full = sorted(report.documents[0].states, key=lambda state: state.is_full)
    assert (compressed.pairs, full.pairs, full.full_pairs) == (full.pairs // 4, full.full_pairs, compressed.full_pairs)
    assert (report.compressed_bytes_on_disk, report.full_bytes_on_disk) == (compressed.bytes_on_disk, full.bytes_on_disk)
    assert (report.pairs, report.full_pairs) == (compressed.pairs + full.pairs, 2 * full.pairs)
    assert (report.resident_budget, report.disk_budget) == (10**9, 10**9)
    assert (compressed.resident_bytes > 0, full.resident_bytes) == (True, 0)


def test_states_in_memory_stay_within_their_budget(make_engine: MakeEngine) -> None:
    engine = make_engine(resident_budget=300_000)
    documents = engine.ingest([text_of(300, seed) for seed in range(5)])
    for document in documents:
        engine.answer("What?", documents=document.id, mode="full", **BRIEF)
        assert engine.memory().resident_bytes <= 300_000
    assert engine.memory().resident_bytes > 150_000


def test_the_state_used_longest_ago_leaves_memory_and_a_pinned_one_stays(make_engine: MakeEngine) -> None:
    engine = make_engine(resident_budget=550_000)
    ids = [document.id for document in engine.ingest([text_of(300, seed) for seed in range(4)], retain="full")]
    engine.pin(ids[0], Choice("full"))
    for document_id in ids[1:]:
        engine.answer("What?", documents=document_id, mode="full", **BRIEF)
    report = engine.memory()
    assert [document.resident_bytes > 0 for document in report.documents] == [True, False, False, True]
    assert [document.pinned for document in report.documents] == [True, False, False, False]
    engine.unpin(ids[0])
    engine.answer("What?", documents=ids[1], mode="full", **BRIEF)
    assert engine.memory().documents[0].resident_bytes == 0


def test_pinning_more_than_the_budget_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(resident_budget=300_000)
    ids = [document.id for document in engine.ingest([text_of(300, seed) for seed in range(2)], retain="full")]
    engine.pin(ids[0], Choice("full"))
    with pytest.raises(InvalidSetting, match="resident_budget"):
        engine.pin(ids[1], Choice("full"))


@pytest.mark.parametrize("budget", [-1, True, "1GB"])
def test_a_resident_budget_that_is_no_number_of_bytes_is_refused(make_engine: MakeEngine, budget: Any) -> None:
    with pytest.raises(InvalidSetting, match="resident_budget"):
        make_engine(resident_budget=budget)


def test_a_document_that_questions_use_is_not_evicted_from_the_disk(make_engine: MakeEngine) -> None:
    engine = make_engine(disk_budget=2_700_000)  # ten full states
    ids = [document.id for document in engine.ingest([text_of(300, seed) for seed in range(4)], retain="full")]
    for seed in range(4, 14):
        engine.answer("What?", documents=ids[1], mode="full", **BRIEF)
        engine.ingest(text_of(300, seed), retain="full")
    kept = {record.id for record in engine.documents()}
    assert ids[1] in kept and ids[0] not in kept and engine.memory().bytes_on_disk <= 2_700_000


# --- tenants and keys ---


def test_a_document_of_another_namespace_is_not_found_even_by_its_text(make_engine: MakeEngine) -> None:
    make_engine(namespace="acme").ingest(Document(TEXT, "fox"))
    other = make_engine(namespace="beta")
    for reference in ("fox", TEXT, Document(TEXT).id):
        with pytest.raises(UnknownDocument):
            other.answer("What?", documents=reference)
    assert other.chat(CHAT, **BRIEF).metadata.documents == ()
    assert make_engine(namespace="acme").chat(CHAT, **BRIEF).metadata.documents == (Document(TEXT).id,)


def test_a_store_with_a_key_answers_only_with_it(make_engine: MakeEngine) -> None:
    make_engine(hmac_key="a key of some length").ingest(TEXT)
    answered = make_engine(hmac_key="a key of some length").answer("What?", documents=TEXT, **BRIEF)
    assert answered.metadata.documents == (Document(TEXT).id,)
    with pytest.raises(StoreMismatch, match="hmac key"):
        make_engine()


# --- retain="compressed" ---

_written: list[str] | None = None


def _note_writes(event: str, arguments: tuple[Any, ...]) -> None:
    if _written is not None and event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        _written.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else str(arguments[0]))


def test_retain_compressed_writes_no_full_state_anywhere(make_engine: MakeEngine, tmp_path: Path) -> None:
    global _written
    engine = make_engine()
    whole = make_engine(folder="whole")
    whole.ingest(TEXT, retain="full")
    full = whole.store.get(Document(TEXT).id, FULL)
    sys.addaudithook(_note_writes)  # stays, as hooks do; does nothing once _written is None again
    _written = []
    try:
        engine.ingest(TEXT, retain="compressed", keep=0.25)
    finally:
        written, _written = _written, None
    kept = engine.store.get(Document(TEXT).id, engine.states(TEXT)[0].compression)
    names = [record.compression.method for record in engine.states(TEXT)]
    assert names == ["blend"] and kept.pairs * 4 == full.pairs
    folder = engine.store.folder
    named = [path for path in written if not path.isdigit()]  # digits: a file opened by name before
    assert named and all(Path(path).is_relative_to(folder) for path in named)
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for layer, chosen in zip(full.layers, kept.layers, strict=True):
        for whole_rows, kept_rows in ((layer.keys, chosen.keys), (layer.values, chosen.values)):
            of_kept = {row.numpy().tobytes() for row in kept_rows}  # equal tokens have equal keys in the first layer
            dropped = {row.numpy().tobytes() for row in whole_rows} - of_kept
            assert dropped and not any(row in content for row in dropped)
            assert all(row in content for row in of_kept)  # what is kept is found by the same search
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) < 0.5 * full.nbytes


# --- damage ---


def test_a_damaged_state_is_read_again_for_a_chat_and_named_once(make_engine: MakeEngine, caplog: Any) -> None:
    engine = make_engine()
    engine.ingest(TEXT, retain="compressed")
    good = engine.chat(CHAT, **BRIEF)
    path = engine.states(TEXT)[0].path
    damage(path)
    again = make_engine()
    answers = [again.chat(CHAT, **BRIEF) for _ in range(3)]
    assert [answer.metadata.documents for answer in answers] == [()] * 3 and good.metadata.documents
    assert [path.name in record.getMessage() for record in caplog.records] == [True]


def test_a_damaged_state_is_refused_when_no_other_way_was_allowed(make_engine: MakeEngine) -> None:
    make_engine().ingest(TEXT, retain="compressed")
    damage(make_engine().states(TEXT)[0].path)
    with pytest.raises(DamagedState, match="safetensors"):
        make_engine().answer("What?", documents=TEXT)


@pytest.mark.parametrize("mode", ["compressed", "full"])
def test_a_damaged_state_is_ingested_again_when_configured_so(make_engine: MakeEngine, mode: str, caplog: Any) -> None:
    engine = make_engine()
    engine.ingest(Document(TEXT, "fox"), keep=0.3, allocation="heads", settings={"sinks": 2})
    before = engine.answer("What?", documents="fox", mode=mode, **BRIEF)
    record = next(state for state in engine.states("fox") if state.compression.is_full == (mode == "full"))
    damage(record.path)
    again = make_engine(on_damage="reingest")
    answer = again.answer("What?", documents="fox", mode=mode, **BRIEF)
    assert answer.text == before.text and answer.metadata.documents == before.metadata.documents
    assert again.verify() == [] and len(again.states("fox")) == 2
    assert [record.path.name in message.getMessage() for message in caplog.records] == [True]


def test_a_damaged_state_without_its_text_cannot_be_ingested_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.ingest(Document(TEXT, "fox"), retain="full")
    record = engine.states("fox")[0]
    damage(record.path, record.file_bytes - 1)
    with pytest.raises(DamagedState, match="text"):
        make_engine(on_damage="reingest").answer("What?", documents="fox", mode="full")
    assert record.path.exists()


def test_an_unknown_way_with_damage_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidSetting, match="reingest"):
        make_engine(on_damage="ignore")


# --- disks that refuse ---


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_store_that_cannot_be_made_is_warned_of_once_and_questions_are_answered(
    make_engine: MakeEngine, caplog: Any
) -> None:
    there = make_engine()
    expected = there.chat(CHAT, **BRIEF)
    engine = Engine(there.model, "/proc/nowhere")
    for _ in range(3):
        assert engine.chat(CHAT, **BRIEF).text == expected.text
    assert engine.answer("What jumps?", documents=f"A fox. {TEXT}", on_missing="prefill", **BRIEF).metadata.prefilled
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    with pytest.raises(StoreUnreachable, match="permissions"):
        engine.ingest(TEXT)
    assert (engine.documents(), engine.memory().bytes_on_disk) == ([], 0)


def test_a_disk_that_is_full_stops_ingesting_and_no_question(make_engine: MakeEngine, monkeypatch: Any) -> None:
    engine = make_engine()
    engine.ingest(text_of(300, 1))
    before = engine.chat(CHAT, **BRIEF)
    with monkeypatch.context() as full:
        full.setattr("kv_rag.store.folder.os.fsync", no_space)
        with pytest.raises(StoreUnreachable, match="free space"):
            engine.ingest(TEXT)
        during = engine.chat(CHAT, **BRIEF)
        stored = engine.answer("What?", documents=text_of(300, 1), **BRIEF)
    assert during.text == before.text and stored.metadata.documents
    engine.close()
    again = make_engine()
    assert again.verify() == [] and len(again.documents()) == 1
    assert again.ingest(TEXT)[0].new


def test_an_index_that_cannot_be_read_is_warned_of_once_and_questions_are_answered(
    make_engine: MakeEngine, monkeypatch: Any, caplog: Any
) -> None:
    engine = make_engine()
    engine.ingest(TEXT)
    expected = engine.chat(CHAT, **BRIEF)

    def fails(*_: Any) -> Any:
        raise StoreUnreachable("the disk does not answer")

    monkeypatch.setattr(engine.store._index, "_run", fails)
    for _ in range(3):
        assert engine.chat(CHAT, **BRIEF).metadata.documents == () != expected.metadata.documents
    named = engine.answer("What?", documents=f"A fox. {TEXT}", **BRIEF)
    assert named.metadata.prefilled
    assert [record.getMessage() for record in caplog.records] == ["the disk does not answer"]


def test_a_read_only_store_answers_what_it_has_and_reads_the_rest(make_engine: MakeEngine, monkeypatch: Any) -> None:
    make_engine().ingest(TEXT)
    monkeypatch.setattr("kv_rag.store.folder._may", lambda path, mode: not mode & os.W_OK)
    engine = make_engine()
    assert engine.chat(CHAT, **BRIEF).metadata.documents
    unknown = [{"role": "user", "content": f"{text_of(200, 5)}\n\nWhat?"}]
    assert engine.chat(unknown, **BRIEF).metadata.documents == ()
    with pytest.raises(OSError, match="read-only"):
        engine.ingest(text_of(200, 5))
    assert engine.ingest(TEXT)[0].new is False


def test_a_document_removed_by_another_process_is_missing_and_a_chat_reads_it(make_engine: MakeEngine) -> None:
    engine, other = make_engine(), make_engine()
    engine.ingest(TEXT)
    used = engine.answer("What?", documents=TEXT, **BRIEF)
    other.remove(TEXT)
    with pytest.raises((StateMissing, UnknownDocument)):
        engine.answer("What?", documents=used.metadata.documents[0], **BRIEF)
    assert engine.chat(CHAT, **BRIEF).metadata.documents == ()
