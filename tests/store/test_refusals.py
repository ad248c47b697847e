"""Disks that are full, folders that may not be written or read, clocks that jump."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from kv_rag.document import Compression
from kv_rag.errors import StateMissing, StoreError, StoreUnreachable
from kv_rag.store import LocalStore, claims, folder
from tests.store.random_states import FINGERPRINT, document, same, state, stored
from tests.store.torture import forked

FULL = Compression.full()


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["fsync", "replace", "open"])
def test_a_disk_that_is_full_is_an_error_and_leaves_nothing(tmp_path, monkeypatch, step):
    store, saved, _ = stored(tmp_path / "kv")
    with monkeypatch.context() as full:
        full.setattr(claims.os if step == "open" else folder.os, step, no_space)
        with pytest.raises(StoreUnreachable, match="free space"):
            store.put(document(1), state(document(1)))
    store.close()
    again = LocalStore(tmp_path / "kv", FINGERPRINT)
    assert [record.id for record in again.documents()] == [saved.document_id] and again.verify() == []
    assert again._folder.leftovers() == []


def test_a_full_disk_that_stops_the_index_leaves_no_file(tmp_path, monkeypatch):
    store, saved, path = stored(tmp_path / "kv")
    with monkeypatch.context() as full:
        full.setattr(store._index, "add", lambda entries: (_ for _ in ()).throw(StoreUnreachable("disk full")))
        for number in (0, 1):
            with pytest.raises(StoreUnreachable):
                store.put(document(number), state(document(number)))
    assert list((tmp_path / "kv").rglob("*.safetensors")) == [path] and same(store.get(saved.document_id, FULL), saved)
    store.close()
    assert LocalStore(tmp_path / "kv", FINGERPRINT).verify() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of this process would stay")
def test_a_file_larger_than_the_system_allows_is_an_error_and_leaves_nothing(tmp_path):
    stored(tmp_path / "kv")[0].close()

    def work(tell):
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        try:
            LocalStore(tmp_path / "kv", FINGERPRINT).put(document(1), state(document(1), tokens=5000))
        except StoreUnreachable as error:
            tell(f"refused {len(list((tmp_path / 'kv').rglob('*.safetensors')))} {'written' in str(error)}")

    child, pipe = forked(work)
    with os.fdopen(pipe) as told:
        assert told.read() == "refused 1 True\n"
    os.waitpid(child, 0)
    assert LocalStore(tmp_path / "kv", FINGERPRINT).verify() == []


def test_a_new_store_on_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(folder.os, "fsync", no_space)
    with pytest.raises(StoreUnreachable, match="space"):
        LocalStore(tmp_path / "kv", FINGERPRINT)
    assert [path.name for path in (tmp_path / "kv").rglob("*") if path.is_file()] == []


def test_a_row_of_a_file_that_is_gone_does_no_harm_when_it_cannot_be_removed(tmp_path, monkeypatch, caplog):
    store, saved, path = stored(tmp_path / "kv")
    path.unlink()
    monkeypatch.setattr(store._index, "drop", lambda keys: (_ for _ in ()).throw(StoreUnreachable("disk full")))
    for _ in range(3):
        with pytest.raises(StateMissing):
            store.get(saved.document_id, FULL)
    assert [record.message for record in caplog.records] == ["disk full"]


def test_uses_that_cannot_be_written_are_said_once_and_forgotten(tmp_path, monkeypatch, caplog):
    store, saved, _ = stored(tmp_path / "kv")
    monkeypatch.setattr(store._index, "used", lambda keys: (_ for _ in ()).throw(StoreUnreachable("disk full")))
    for _ in range(300):
        store.count_use(store.states(saved.document_id)[0])
    assert [record.message for record in caplog.records] == ["disk full"]


@contextmanager
def nobody():
    """As a user without rights, in a folder that user may reach."""
    place = Path(tempfile.mkdtemp(prefix="kv_rag-"))
    place.chmod(0o777)
    os.seteuid(65534)
    try:
        yield place
    finally:
        os.seteuid(0)
        shutil.rmtree(place)


needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become nobody")


@needs_root
def test_a_folder_that_may_not_be_written_is_read():
    with nobody() as place:
        _, saved, _ = stored(place / "kv")
        for path in [*(place / "kv").rglob("*"), place / "kv"]:
            path.chmod(0o500 if path.is_dir() else 0o400)
        store = LocalStore(place / "kv", FINGERPRINT)
        assert store.read_only and same(store.get(saved.document_id, FULL), saved)
        with pytest.raises(StoreError, match="read-only"):
            store.put(document(1), state(document(1)))
        for path in [place / "kv", *(place / "kv").rglob("*")]:
            path.chmod(0o700)


@needs_root
def test_a_folder_without_any_rights_is_unreachable():
    with nobody() as place:
        stored(place / "kv")
        (place / "kv").chmod(0)
        with pytest.raises(StoreUnreachable, match="may not be read"):
            LocalStore(place / "kv", FINGERPRINT)
        (place / "kv").chmod(0o700)


@needs_root
def test_a_state_without_rights_is_unreachable_and_not_damaged():
    with nobody() as place:
        store, saved, path = stored(place / "kv")
        path.chmod(0)
        with pytest.raises(StoreUnreachable, match="rights"):
            store.get(saved.document_id, FULL)


@needs_root
def test_a_folder_in_a_place_without_rights_cannot_be_made():
    with nobody() as place:
        (place / "kept").mkdir()
        (place / "kept").chmod(0o500)
        with pytest.raises(StoreUnreachable, match="permissions"):
            LocalStore(place / "kept" / "kv", FINGERPRINT)
        (place / "kept").chmod(0o700)


@pytest.mark.parametrize("seconds", [-3e9, -60.0, 60.0, 3e9])
def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch, seconds):
    import time

    store, saved, _ = stored(tmp_path / "kv")
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + seconds)
    store.put(document(1), state(document(1)))
    again = LocalStore(tmp_path / "kv", FINGERPRINT)
    assert same(again.get(saved.document_id, FULL), saved) and again.verify() == []
