from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kv_rag.document import Compression
from kv_rag.errors import StateMissing, UnknownDocument
from kv_rag.store import LocalStore
from tests.store.random_states import FINGERPRINT, document, same, state, stored

RAGGED = ((5, 0), (12, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", [None, ((6, 6), (6, 6)), RAGGED, ((0, 0), (3, 4))])
def test_a_state_is_loaded_as_it_was_saved(tmp_path, dtype, lengths):
    of = document()
    saved = state(of, dtype=dtype, lengths=lengths)
    LocalStore(tmp_path / "kv", FINGERPRINT).put(of, saved)
    assert same(LocalStore(tmp_path / "kv", FINGERPRINT).get(of.id, saved.compression), saved)


def test_saving_a_loaded_state_into_another_store_works(tmp_path):
    store, saved, _ = stored(tmp_path / "a")
    other = LocalStore(tmp_path / "b", FINGERPRINT)
    other.put(document(), store.get(saved.document_id, saved.compression))
    assert same(other.get(saved.document_id, saved.compression), saved)


def test_saving_the_same_state_again_leaves_one_untouched_file(tmp_path):
    store, saved, path = stored(tmp_path / "kv")
    before = path.stat().st_ino
    again = store.put(document(), saved)
    assert (again.path.stat().st_ino, len(store.states(saved.document_id))) == (before, 1)


def test_a_record_counts_pairs_and_bytes(tmp_path):
    of = document()
    saved = state(of, lengths=RAGGED)
    record = LocalStore(tmp_path / "kv", FINGERPRINT).put(of, saved)
    assert (record.pairs, record.full_pairs, record.file_bytes) == (18, 48, record.path.stat().st_size)


def test_states_are_listed_newest_last(tmp_path):
    store, full, _ = stored(tmp_path / "kv")
    compressed = state(document(), lengths=RAGGED)
    store.put(document(), compressed)
    listed = [record.compression for record in store.states(full.document_id)]
    assert listed == [full.compression, compressed.compression]


def test_documents_are_listed_in_order_of_ingestion(tmp_path):
    store = LocalStore(tmp_path / "kv", FINGERPRINT)
    for number in (3, 1, 2):
        store.put(document(number), state(document(number)))
    assert [record.id for record in store.documents()] == [document(number).id for number in (3, 1, 2)]


def test_text_is_given_back_with_all_its_characters(tmp_path):
    store, saved, _ = stored(tmp_path / "kv")
    assert store.text(saved.document_id) == document().text


def test_a_state_that_is_not_stored_is_missing(tmp_path):
    store, saved, _ = stored(tmp_path / "kv")
    with pytest.raises(StateMissing, match="knorm"):
        store.get(saved.document_id, Compression.of("knorm", keep=0.25))


def test_an_unknown_document_has_no_states(tmp_path):
    assert LocalStore(tmp_path / "kv", FINGERPRINT).states("0" * 32) == []


def test_removing_an_unknown_document_is_an_error(tmp_path):
    with pytest.raises(UnknownDocument):
        LocalStore(tmp_path / "kv", FINGERPRINT).remove("0" * 32)


def test_removing_one_state_leaves_the_other(tmp_path):
    store, full, _ = stored(tmp_path / "kv")
    compressed = state(document(), lengths=RAGGED)
    store.put(document(), compressed)
    store.remove(full.document_id, full.compression)
    assert [record.compression for record in store.states(full.document_id)] == [compressed.compression]


def test_removing_a_document_frees_its_files(tmp_path):
    store, saved, path = stored(tmp_path / "kv")
    size = path.stat().st_size
    assert (store.remove(saved.document_id), path.exists(), store.documents()) == (size, False, [])


def test_a_loaded_state_stays_usable_when_it_is_removed(tmp_path):
    store, saved, _ = stored(tmp_path / "kv")
    loaded = store.get(saved.document_id, saved.compression)
    store.remove(saved.document_id)
    assert same(loaded, saved)


def test_what_another_process_saves_is_found_and_stored_once(tmp_path):
    code = (
        "import sys; from tests.store.random_states import stored; from pathlib import Path; stored(Path(sys.argv[1]))"
    )
    root = Path(__file__).parents[2]
    others = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "kv")], cwd=root) for _ in range(2)]
    store, saved, _ = stored(tmp_path / "kv")
    assert [other.wait(60) for other in others] == [0, 0]
    assert len(list((tmp_path / "kv").rglob("*.safetensors"))) == len(store.states(saved.document_id)) == 1


def test_many_threads_use_one_store(tmp_path):
    store = LocalStore(tmp_path / "kv", FINGERPRINT)

    def save_and_load(number: int) -> bool:
        saved = state(document(number % 10))
        store.put(document(number % 10), saved)
        return same(store.get(saved.document_id, saved.compression), saved)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(save_and_load, range(40)))
