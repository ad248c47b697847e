from __future__ import annotations

import os
import time

import pytest

from kv_rag.errors import DamagedState, StateMissing
from kv_rag.store import LocalStore
from kv_rag.store.claims import claimed
from tests.store.random_states import FINGERPRINT, flip, header_of, same, stored, write_header

TENSORS = ["token_ids", "text", *(f"layers.00{i}.{part}" for i in (0, 1) for part in ("keys", "values", "positions"))]


@pytest.mark.parametrize("name", TENSORS)
def test_a_changed_byte_in_a_tensor_is_damage(tmp_path, name):
    _, saved, path = stored(tmp_path / "kv")
    header, begin = header_of(path)
    flip(path, begin + header[name]["data_offsets"][0])
    with pytest.raises(DamagedState, match=path.name):
        LocalStore(tmp_path / "kv", FINGERPRINT).get(saved.document_id, saved.compression)


@pytest.mark.parametrize("name", TENSORS)
def test_verify_names_the_file_with_a_changed_byte(tmp_path, name):
    store, _, path = stored(tmp_path / "kv")
    header, begin = header_of(path)
    flip(path, begin + header[name]["data_offsets"][0])
    assert [problem.file for problem in store.verify()] == [path]


def test_any_changed_byte_of_the_header_is_damage(tmp_path):
    _store, saved, path = stored(tmp_path / "kv")
    whole = path.read_bytes()
    end = len(whole[: header_of(path)[1]].rstrip(b" "))
    undetected = []
    for at in range(0, end, 7):
        flip(path, at)
        try:
            LocalStore(tmp_path / "kv", FINGERPRINT).get(saved.document_id, saved.compression)
            undetected.append((at, whole[at]))
        except DamagedState:
            pass
        path.write_bytes(whole)
    assert undetected == []


@pytest.mark.parametrize("length", [0, 5, 8, 200, -1])
def test_a_truncated_file_is_damage(tmp_path, length):
    _store, saved, path = stored(tmp_path / "kv")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamagedState):
        LocalStore(tmp_path / "kv", FINGERPRINT).get(saved.document_id, saved.compression)


@pytest.mark.parametrize("shape", [[-1, 8], [2**62, 2**62], [1 << 40, 8], [], [192]])
def test_absurd_shapes_are_damage(tmp_path, shape):
    _store, saved, path = stored(tmp_path / "kv")
    header, begin = header_of(path)
    header["layers.000.keys"]["shape"] = shape
    write_header(path, header, path.read_bytes()[begin:])
    with pytest.raises(DamagedState):
        LocalStore(tmp_path / "kv", FINGERPRINT).get(saved.document_id, saved.compression)


@pytest.mark.parametrize("content", [b"\xff" * 64, b"\x02" + bytes(7) + b"{}", b"\x02" + bytes(7) + b"[]", bytes(4096)])
def test_a_file_of_something_else_is_damage(tmp_path, content):
    _store, saved, path = stored(tmp_path / "kv")
    path.write_bytes(content)
    with pytest.raises(DamagedState):
        LocalStore(tmp_path / "kv", FINGERPRINT).get(saved.document_id, saved.compression)


def test_a_damaged_document_can_be_removed_and_ingested_again(tmp_path):
    store, saved, path = stored(tmp_path / "kv")
    flip(path, path.stat().st_size - 1)
    store = LocalStore(tmp_path / "kv", FINGERPRINT)
    store.remove(saved.document_id)
    fresh, saved, _ = stored(tmp_path / "kv")
    assert same(fresh.get(saved.document_id, saved.compression), saved)


def test_a_link_in_place_of_a_state_is_not_followed(tmp_path):
    _store, saved, path = stored(tmp_path / "kv")
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    with pytest.raises(DamagedState):
        LocalStore(tmp_path / "kv", FINGERPRINT).get(saved.document_id, saved.compression)


def test_a_state_whose_file_is_gone_is_missing(tmp_path):
    store, saved, path = stored(tmp_path / "kv")
    path.unlink()
    with pytest.raises(StateMissing):
        store.get(saved.document_id, saved.compression)


def test_verify_finds_nothing_wrong_with_a_good_store(tmp_path):
    assert stored(tmp_path / "kv")[0].verify() == []


def test_verify_names_a_state_whose_file_is_gone(tmp_path):
    store, _, path = stored(tmp_path / "kv")
    path.unlink()
    assert [problem.file for problem in store.verify()] == [path]


def test_a_lost_index_is_rebuilt_from_the_files(tmp_path):
    store, _saved, _ = stored(tmp_path / "kv")
    before = store.documents()
    store.close()
    (tmp_path / "kv" / "index.sqlite").unlink()
    assert LocalStore(tmp_path / "kv", FINGERPRINT).documents() == before


@pytest.mark.parametrize("content", [b"", b"no database" * 100])
def test_a_damaged_index_is_rebuilt_from_the_files(tmp_path, content):
    store, saved, _ = stored(tmp_path / "kv")
    store.close()
    (tmp_path / "kv" / "index.sqlite").write_bytes(content)
    assert LocalStore(tmp_path / "kv", FINGERPRINT).has(saved.document_id, saved.compression)


@pytest.mark.parametrize("age", [0, 7200, -7200])
def test_what_a_killed_process_left_is_swept_whatever_the_clock_says(tmp_path, age):
    stored(tmp_path / "kv")[0].close()
    leftover = tmp_path / "kv" / "states" / ".tmp-killed"
    leftover.touch()
    os.utime(leftover, (time.time() - age,) * 2)
    LocalStore(tmp_path / "kv", FINGERPRINT)
    assert not leftover.exists()


@pytest.mark.parametrize("age", [0, 10**9, -(10**9)])
def test_what_is_being_written_is_not_swept_whatever_the_clock_says(tmp_path, age):
    stored(tmp_path / "kv")[0].close()
    with claimed(tmp_path / "kv" / "states", ".tmp-") as (path, _):
        os.utime(path, (max(0, time.time() - age),) * 2)
        LocalStore(tmp_path / "kv", FINGERPRINT)
        assert path.exists()
