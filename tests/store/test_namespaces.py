from __future__ import annotations

import stat

import pytest

from kv_rag.document import Document
from kv_rag.errors import InvalidSetting, StoreError, UnknownDocument
from kv_rag.store import open_store
from tests.store.random_states import FINGERPRINT, document, same, state

NAMES = [None, "acme", "Acme", "../acme", "a" * 500, "acme/x", "\ud800"]


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_found_in_its_own_namespace_only(tmp_path, name):
    saved = state(document())
    own = open_store(tmp_path / "kv", FINGERPRINT, namespace=name)
    own.put(document(0, "cranes.md"), saved)
    for other in NAMES:
        if other != name:
            elsewhere = open_store(tmp_path / "kv", FINGERPRINT, namespace=other)
            assert not elsewhere.has(document().id, saved.compression) and elsewhere.documents() == []
            assert elsewhere.candidates([document().text[:32]]) == {}
            with pytest.raises(UnknownDocument):
                elsewhere.resolve("cranes.md")
    assert same(own.get(document().id, saved.compression), saved)


def test_everything_stays_inside_the_folder(tmp_path):
    for name in NAMES:
        open_store(tmp_path / "kv", FINGERPRINT, namespace=name).put(document(), state(document()))
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def test_folders_of_namespaces_are_their_owners_alone(tmp_path):
    open_store(tmp_path / "kv", FINGERPRINT, namespace="acme").put(document(), state(document()))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]}
    assert {path for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == set()


def test_a_state_moved_into_another_namespace_is_refused(tmp_path):
    saved = state(document())
    one, other = (open_store(tmp_path / "kv", FINGERPRINT, namespace=name) for name in ("acme", "beta"))
    path, place = one.put(document(), saved).path, other.put(document(), saved).path
    assert path.name != place.name
    path.replace(place)
    with pytest.raises(StoreError):
        open_store(tmp_path / "kv", FINGERPRINT, namespace="beta").get(document().id, saved.compression)


def test_removing_from_one_namespace_leaves_the_others(tmp_path):
    saved = state(document())
    one, other = (open_store(tmp_path / "kv", FINGERPRINT, namespace=name) for name in ("acme", "beta"))
    for store in (one, other):
        store.put(document(), saved)
    one.remove(document().id)
    assert same(other.get(document().id, saved.compression), saved)


def test_a_namespace_can_be_looked_at_without_its_model(tmp_path):
    open_store(tmp_path / "kv", FINGERPRINT, namespace="acme").put(Document("Only here."), state(Document("Only here.")))
    assert len(open_store(tmp_path / "kv", None, read_only=True, namespace="acme").documents()) == 1


def test_a_namespace_that_is_not_there_is_an_error_to_look_at(tmp_path):
    open_store(tmp_path / "kv", FINGERPRINT)
    with pytest.raises(StoreError, match="no store"):
        open_store(tmp_path / "kv", None, read_only=True, namespace="acme")


@pytest.mark.parametrize("name", ["", 5, b"acme"])
def test_an_empty_namespace_is_refused(tmp_path, name):
    with pytest.raises(InvalidSetting, match="namespace"):
        open_store(tmp_path / "kv", FINGERPRINT, namespace=name)


def test_namespaces_of_a_remote_store_are_apart_too(tmp_path, monkeypatch):
    pytest.importorskip("fsspec")
    monkeypatch.setenv("KV_RAG_CACHE", str(tmp_path))
    url = f"memory://{tmp_path.name}"
    open_store(url, FINGERPRINT, namespace="acme").put(document(), state(document()))
    assert open_store(url, FINGERPRINT).documents() == []
    assert len(open_store(url, FINGERPRINT, namespace="acme").documents()) == 1
