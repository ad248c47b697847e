from __future__ import annotations

import os
import stat

import pytest

from kv_rag.errors import DamagedState, StoreError, StoreMismatch
from kv_rag.store import LocalStore
from tests.store.random_states import FINGERPRINT, document, same, state, stored


def test_another_fingerprint_is_refused_with_every_difference(tmp_path):
    stored(tmp_path / "kv")[0].close()
    with pytest.raises(StoreMismatch, match=r"(?s)(?=.*weights)(?=.*dtype)(?=.*system)"):
        LocalStore(tmp_path / "kv", {"weights": "x", "dtype": "bfloat16", "system": "s"})


def test_a_file_is_no_store(tmp_path):
    (tmp_path / "kv").touch()
    with pytest.raises(StoreError, match="another folder"):
        LocalStore(tmp_path / "kv", FINGERPRINT)


def test_a_damaged_description_is_named(tmp_path):
    stored(tmp_path / "kv")[0].close()
    (tmp_path / "kv" / "store.json").write_text("{")
    with pytest.raises(DamagedState, match=r"store\.json"):
        LocalStore(tmp_path / "kv", FINGERPRINT)


def test_a_closed_store_opens_again(tmp_path):
    store, saved, _ = stored(tmp_path / "kv")
    store.close()
    assert same(LocalStore(tmp_path / "kv", FINGERPRINT).get(saved.document_id, saved.compression), saved)


def test_folders_and_files_are_their_owners_alone(tmp_path):
    stored(tmp_path / "kv")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]}
    assert {path for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == set()


def test_a_store_opened_read_only_is_not_written(tmp_path):
    stored(tmp_path / "kv")[0].close()
    store = LocalStore(tmp_path / "kv", FINGERPRINT, read_only=True)
    with pytest.raises(StoreError, match="read-only"):
        store.put(document(1), state(document(1)))


def test_a_store_opened_read_only_without_its_index_is_read(tmp_path):
    store, saved, _ = stored(tmp_path / "kv")
    store.close()
    (tmp_path / "kv" / "index.sqlite").unlink()
    store = LocalStore(tmp_path / "kv", FINGERPRINT, read_only=True)
    assert same(store.get(saved.document_id, saved.compression), saved)


def test_a_folder_without_rights_to_write_opens_read_only(tmp_path):
    _, saved, _ = stored(tmp_path / "kv")
    (tmp_path / "kv").chmod(0o500)
    try:
        if os.access(tmp_path / "kv", os.W_OK):
            pytest.skip("this user may write everywhere (root): rights cannot be taken away")
        store = LocalStore(tmp_path / "kv", FINGERPRINT)
        assert store.read_only and same(store.get(saved.document_id, saved.compression), saved)
    finally:
        (tmp_path / "kv").chmod(0o700)
