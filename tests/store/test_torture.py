"""Small counts of what ``benchmarks/store_torture.py`` does with large ones."""

from __future__ import annotations

import os

import pytest

from tests.store import torture

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked, to be killed by the hundred")


def wrong(found, *good):
    return {name: count for name, count in found.items() if count and not name.startswith(("tried", *good))}


@pytest.mark.parametrize("evicting", [False, True])
def test_a_killed_process_leaves_every_finished_document_intact(tmp_path, evicting):
    found = torture.kills(tmp_path / "kv", 12, evicting=evicting)
    assert found["stored"] and wrong(found, "stored") == {}


@pytest.mark.parametrize("hmac_key", [None, torture.KEY])
def test_a_changed_byte_is_detected_wherever_it_is(tmp_path, hmac_key):
    found = torture.flips(tmp_path / "kv", 320, hmac_key=hmac_key)
    assert found["tried"] == 320 and wrong(found) == {}


@pytest.mark.parametrize("hmac_key", [None, torture.KEY])
def test_a_hostile_file_is_an_error_and_no_more(tmp_path, hmac_key):
    found = torture.hostile(tmp_path / "kv", 102, hmac_key=hmac_key)
    assert found["tried"] == 102 and wrong(found) == {}


def test_many_processes_lose_and_mix_nothing(tmp_path):
    found = torture.crowd(tmp_path / "kv", 4, 30)
    assert found["tried"] == 120 and wrong(found, "read", "removed") == {}


def test_the_count_of_kills_sees_a_store_that_loses_documents(tmp_path, monkeypatch):
    put = torture.LocalStore.put

    def forgetful(store, of, cache):
        record = put(store, of, cache)
        record.path.unlink()
        return record

    monkeypatch.setattr(torture.LocalStore, "put", forgetful)
    assert torture.kills(tmp_path / "kv", 5)["lost"]


def test_the_count_of_flips_sees_a_store_that_does_not_look(tmp_path, monkeypatch):
    monkeypatch.setattr("kv_rag.store.format.StateFile.check", lambda state: None)
    assert torture.flips(tmp_path / "kv", 50)["not detected"]


def test_the_count_of_processes_sees_a_store_that_mixes_documents(tmp_path, monkeypatch):
    get = torture.LocalStore.get
    monkeypatch.setattr(torture.LocalStore, "get", lambda store, _, full: get(store, torture.document(0).id, full))
    assert torture.crowd(tmp_path / "kv", 2, 3)["mixed"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_full_disk_loses_nothing_and_leaves_nothing_half_written(tmp_path):
    with torture.small_disk(tmp_path / "disk") as disk:
        if disk is None:
            pytest.skip("no disk can be mounted here")
        found = torture.full_disk(disk / "kv")
    assert found["refused"] and wrong(found, "refused") == {}
