"""Against a real S3 server, which these tests start, and against fsspec's memory file system."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from kv_rag.document import Compression
from kv_rag.errors import (
    DamagedState,
    MissingExtra,
    StateMissing,
    StoreError,
    StoreMismatch,
    StoreUnreachable,
    UnknownDocument,
)
from kv_rag.store import LocalStore, RemoteStore, bucket, open_store
from tests.store.random_states import FINGERPRINT, document, same, state, stored

SECRETS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
FULL = Compression.full()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def s3_address():
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], env={**os.environ, **SECRETS},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{address}/moto-api/", timeout=1)
            break
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    yield address
    server.terminate()
    server.wait()


@pytest.fixture
def s3(s3_address, monkeypatch):
    """An empty bucket."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": s3_address})
    file_system = fsspec.filesystem("s3", skip_instance_cache=True)
    name = f"bucket-{time.monotonic_ns()}"
    file_system.mkdir(name)
    return f"s3://{name}/states/of/ours"


@pytest.fixture(params=["s3", "memory"])
def url(request):
    if request.param == "s3":
        return request.getfixturevalue("s3")
    return f"memory://kv-{time.monotonic_ns()}"


@pytest.fixture
def machine(tmp_path):
    """Stores of machines that share nothing but the bucket."""
    opened = []

    def make(url: str, name: str = "one", fingerprint: dict[str, str] | None = FINGERPRINT, **options) -> RemoteStore:
        store = RemoteStore(url, fingerprint, cache=tmp_path / name, **options)
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()


def objects(url: str) -> dict[str, bytes]:
    file_system, root = fsspec.core.url_to_fs(url)
    file_system.invalidate_cache()
    try:
        return {path.removeprefix(root).strip("/"): file_system.cat_file(path) for path in file_system.find(root)}
    except FileNotFoundError:
        return {}


def write(url: str, name: str, content: bytes) -> None:
    file_system, root = fsspec.core.url_to_fs(url)
    file_system.pipe_file(f"{root}/{name}", content)


def break_network(store: RemoteStore, monkeypatch) -> None:
    def fails(*_, **__):
        raise ConnectionError("no route to host")

    for name in ("find", "info", "cat_file", "cat_ranges", "put_file", "exists", "rm_file"):
        monkeypatch.setattr(store._bucket._fs, name, fails, raising=False)


def test_a_state_put_on_one_machine_is_read_on_another(machine, url):
    of = document(1, "one.md")
    machine(url, "one").put(of, state(of))
    other = machine(url, "two")
    assert same(other.get(of.id, FULL), state(of))
    assert (other.text(of.id), other.document(of.id).name) == (of.text, "one.md")


def test_the_bucket_holds_the_same_files_as_a_folder(machine, url, tmp_path):
    of = document()
    machine(url).put(of, state(of))
    path = LocalStore(tmp_path / "kv", FINGERPRINT).put(of, state(of)).path
    assert set(objects(url)) == {"store.json", str(path.relative_to(tmp_path / "kv"))}
    assert objects(url)["store.json"] == (tmp_path / "kv" / "store.json").read_bytes()


def test_opening_reads_no_pairs(machine, url):
    of = document()
    machine(url, "one").put(of, state(of))
    other = machine(url, "two")
    [record] = other.states(of.id)
    assert other.has(of.id, FULL) and not record.path.exists()


def test_records_are_the_same_on_every_machine(machine, url):
    of = document(1, "one.md")
    made = machine(url, "one").put(of, state(of, lengths=((5, 0), (12, 1))))
    [seen] = machine(url, "two").states(of.id)
    assert (seen.nbytes, seen.file_bytes, seen.pairs, seen.created) == (
        made.nbytes, made.file_bytes, made.pairs, made.created
    )  # fmt: skip


def test_documents_are_found_in_prompts_before_they_are_read(machine, url):
    of = document()
    machine(url, "one").put(of, state(of))
    found = machine(url, "two").candidates([of.text[:32]])
    assert [shape.document_id for shape in found[of.text[:32]]] == [of.id]


def test_a_document_put_later_is_found_by_name(machine, url):
    one, two = machine(url, "one"), machine(url, "two")
    of = document(5, "late.md")
    one.put(of, state(of))
    two._look_seconds = 0.0  # however slow the first look was
    assert two.resolve("late.md") == of.id


def test_a_document_removed_on_one_machine_is_gone_on_another(machine, url):
    of = document()
    one, two = machine(url, "one"), machine(url, "two")
    one.put(of, state(of))
    two.refresh()
    two.get(of.id, FULL)
    freed = one.remove(of.id)
    two.refresh()
    assert freed > 0 and set(objects(url)) == {"store.json"}
    with pytest.raises(UnknownDocument):
        two.document(of.id)
    with pytest.raises(StateMissing):
        two.get(of.id, FULL)


def test_a_state_removed_before_it_was_read_is_missing(machine, url):
    of = document()
    one = machine(url, "one")
    one.put(of, state(of))
    two = machine(url, "two")
    one.remove(of.id)
    with pytest.raises(StateMissing, match="ingest"):
        two.get(of.id, FULL)
    assert not two.has(of.id, FULL)


def test_a_state_in_use_outlives_its_removal(machine, url):
    of = document()
    store = machine(url)
    store.put(of, state(of))
    used = store.get(of.id, FULL)
    store.remove(of.id)
    assert same(used, state(of))


def test_of_many_writers_one_writes_and_all_succeed(machine, s3):
    of = document()
    stores = [machine(s3, f"machine-{number}") for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda store: store.put(of, state(of)), stores))
    assert len(objects(s3)) == 2 and not any(list((store.folder / "waiting").iterdir()) for store in stores)
    assert same(machine(s3, "reader").get(of.id, FULL), state(of))


def test_a_lost_race_is_a_success_and_the_first_file_stays(machine, s3, tmp_path, monkeypatch):
    """The server itself refuses the second write: the check before it saw nothing."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"first")
    two.write_bytes(b"second")
    assert bucket.Bucket(s3).write_if_absent("states/x", one)
    late = bucket.Bucket(s3)
    answers = iter([False])
    real = late._exists
    monkeypatch.setattr(late, "_exists", lambda path: next(answers, None) is not False and real(path))
    assert not late.write_if_absent("states/x", two)
    assert objects(s3)["states/x"] == b"first"


def test_a_damaged_local_copy_is_read_from_the_bucket_again(machine, url):
    of = document()
    machine(url, "one").put(of, state(of))
    path = machine(url, "one").states(of.id)[0].path
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    assert same(machine(url, "one").get(of.id, FULL), state(of))


@pytest.mark.parametrize("at", [-1, -150, -400, 3, 40])
def test_a_damaged_state_in_the_bucket_is_never_used(machine, url, at):
    of = document()
    store = machine(url, "one")
    name = f"states/{store.put(of, state(of)).path.stem[:2]}/{store.states(of.id)[0].path.name}"
    two = machine(url, "two")
    content = bytearray(objects(url)[name])
    content[at] ^= 1
    write(url, name, bytes(content))
    with pytest.raises(DamagedState, match=name):
        two.get(of.id, FULL)
    assert not two.states(of.id)[0].path.exists()
    problems = two.verify()
    assert len(problems) == 1 and name in problems[0].what


def test_objects_that_are_no_states_are_left_out(machine, url, caplog):
    of = document()
    machine(url, "one").put(of, state(of))
    write(url, "states/aa/" + "a" * 40 + ".safetensors", b"\xff" * 64)
    write(url, "states/bb/" + "b" * 40 + ".safetensors", b"")
    write(url, "states/readme.txt", b"hello")
    assert [record.id for record in machine(url, "two").documents()] == [of.id]
    assert "left out of the index" in caplog.text


def test_a_store_of_another_model_is_refused_with_what_differs(machine, url):
    machine(url, "one")
    with pytest.raises(StoreMismatch, match=f"{url}.*dtype: 'float32' in the store, 'bfloat16' now"):
        machine(url, "one", FINGERPRINT | {"dtype": "bfloat16"})


def test_a_store_is_opened_without_its_model(machine, url):
    of = document()
    machine(url, "one").put(of, state(of))
    assert [record.id for record in machine(url, "two", None, read_only=True).documents()] == [of.id]


def test_looking_makes_no_store(machine, url):
    with pytest.raises(StoreError, match="there is no store"):
        machine(url, "one", None, read_only=True)
    assert not objects(url)


def test_a_read_only_store_writes_nothing_there(machine, url):
    machine(url, "one")
    store, of = machine(url, "two", read_only=True), document()
    with pytest.raises(StoreError, match="read-only"):
        store.put(of, state(of))
    assert set(objects(url)) == {"store.json"}


def test_an_intact_store_has_no_problems(machine, url):
    of = document()
    machine(url, "one").put(of, state(of))
    assert machine(url, "two").verify() == machine(url, "one").verify() == []


def test_local_files_are_private(machine, url):
    of = document()
    store = machine(url)
    store.put(of, state(of))
    modes = {path: path.stat().st_mode & 0o777 for path in [store.folder, *store.folder.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file() and path.suffix != ".sqlite-journal"} == {0o600}


def test_a_bucket_that_does_not_exist_is_named(machine, s3):
    with pytest.raises(StoreError, match="no such bucket; make it first"):
        machine("s3://nobody-made-this-bucket/kv")


# --- without network ---


def test_what_cannot_be_written_waits_and_is_written_later(machine, url, monkeypatch):
    of = document()
    store = machine(url)
    with monkeypatch.context() as broken:
        break_network(store, broken)
        store.put(of, state(of))
        assert same(store.get(of.id, FULL), state(of))
    assert set(objects(url)) == {"store.json"}
    machine(url)  # as after a restart
    assert len(objects(url)) == 2 and not list((store.folder / "waiting").iterdir())


def test_a_state_that_waits_is_not_taken_for_one_that_was_removed(machine, url, monkeypatch):
    of = document()
    store = machine(url)
    with monkeypatch.context() as broken:
        break_network(store, broken)
        store.put(of, state(of))
    store._bucket._silent_until = 0.0
    store.refresh()
    assert store.has(of.id, FULL) and len(objects(url)) == 2


def test_a_state_that_is_not_here_cannot_be_read_and_that_is_said_once(machine, url, monkeypatch, caplog):
    of = document()
    machine(url, "one").put(of, state(of))
    store = machine(url, "two")
    break_network(store, monkeypatch)
    for _ in range(3):
        store._bucket._silent_until = 0.0
        with pytest.raises(StoreUnreachable, match="no route to host"):
            store.get(of.id, FULL)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert store.text(of.id) == of.text


def test_after_a_failure_the_network_is_left_alone_for_a_while(machine, url, monkeypatch):
    of = document()
    machine(url, "one").put(of, state(of))
    store = machine(url, "two")
    with monkeypatch.context() as broken:
        break_network(store, broken)
        with pytest.raises(StoreUnreachable):
            store.get(of.id, FULL)
    with pytest.raises(StoreUnreachable, match="did not answer a moment ago"):
        store.get(of.id, FULL)
    monkeypatch.setattr(bucket.time, "monotonic", lambda: store._bucket._silent_until + 1)
    assert same(store.get(of.id, FULL), state(of))


def test_removing_without_network_is_an_error_and_removes_nothing(machine, url, monkeypatch):
    of = document()
    store = machine(url)
    store.put(of, state(of))
    break_network(store, monkeypatch)
    with pytest.raises(StoreUnreachable):
        store.remove(of.id)
    assert store.has(of.id, FULL)


def test_a_server_that_is_not_there_leaves_what_is_in_the_local_folder(machine, s3, monkeypatch):
    of = document()
    machine(s3).put(of, state(of))
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": f"http://127.0.0.1:{free_port()}"})
    for fingerprint in (FINGERPRINT, None):
        offline = machine(s3, fingerprint=fingerprint)
        assert same(offline.get(of.id, FULL), state(of))


# --- how it is opened ---


def test_a_folder_and_a_file_url_are_local_stores(tmp_path):
    _, saved, _ = stored(tmp_path / "a store")
    for place in (tmp_path / "a store", str(tmp_path / "a store"), f"file://{tmp_path}/a%20store"):
        store = open_store(place, FINGERPRINT)
        assert isinstance(store, LocalStore) and same(store.get(saved.document_id, FULL), saved)


def test_a_kind_of_url_that_nobody_knows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_RAG_CACHE", str(tmp_path))
    with pytest.raises(StoreError, match="give a folder, or a URL that fsspec knows"):
        open_store("carrier-pigeon://loft/kv", FINGERPRINT)


def test_without_fsspec_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtra, match=r"pip install 'kv_rag\[remote\]'"):
        RemoteStore("s3://bucket/kv", FINGERPRINT, cache=tmp_path)


# --- in the engine ---

TEXT = "The crane in the north yard needs oil of grade forty six, and it is greased on Mondays."


def engine_over(url: str, cache: Path, monkeypatch):
    from kv_rag.engine import Engine
    from tests.conftest import tiny_model, tiny_tokenizer

    monkeypatch.setenv("KV_RAG_CACHE", str(cache))
    return Engine.from_pretrained((tiny_model("llama"), tiny_tokenizer()), store=url)


def test_a_document_ingested_on_one_machine_is_answered_on_another(url, tmp_path, monkeypatch):
    [entry] = engine_over(url, tmp_path / "one", monkeypatch).ingest(TEXT, keep=0.5)
    other = engine_over(url, tmp_path / "two", monkeypatch)
    answer = other.answer("Which oil?", documents=entry.id, max_new_tokens=3)
    assert answer.metadata.documents == (entry.id,) and not other.ingest(TEXT, keep=0.5)[0].new


def test_without_network_the_question_is_answered_by_prefilling(url, tmp_path, monkeypatch, caplog):
    [entry] = engine_over(url, tmp_path / "one", monkeypatch).ingest(TEXT, retain="full")
    other = engine_over(url, tmp_path / "two", monkeypatch)
    expected = engine_over(url, tmp_path / "one", monkeypatch).likelihood("Which?", "oil", documents=entry.id, mode="full")
    break_network(other.store, monkeypatch)
    caplog.clear()
    for _ in range(2):
        answer = other.answer("Which oil?", documents=entry.id, mode="full", max_new_tokens=3)
        assert any(item.what == f"document {entry.id}" for item in answer.metadata.prefilled)
    assert sum("cannot be read" in record.getMessage() for record in caplog.records) == 1
    found = other.likelihood("Which?", "oil", documents=entry.id, mode="full")
    assert found.nll == pytest.approx(expected.nll, abs=1e-4)
