"""Hostile files, damage, and folders that change under the store."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from kv_rag.document import Document
from kv_rag.errors import DamagedState, InvalidSetting
from kv_rag.store import LocalStore
from tests.store.random_states import FINGERPRINT, document, flip, header_of, same, state, stored


def test_a_damaged_state_is_replaced_when_it_is_put_again(tmp_path):
    _store, saved, path = stored(tmp_path / "kv")
    header, begin = header_of(path)
    flip(path, begin + header["layers.000.keys"]["data_offsets"][0])
    fresh = LocalStore(tmp_path / "kv", FINGERPRINT)
    fresh.put(document(), saved)
    assert same(fresh.get(saved.document_id, saved.compression), saved)


def test_a_document_damaged_while_the_index_was_lost_can_be_ingested_again(tmp_path):
    store, saved, path = stored(tmp_path / "kv")
    store.close()
    flip(path, 20)
    (tmp_path / "kv" / "index.sqlite").unlink()
    fresh = LocalStore(tmp_path / "kv", FINGERPRINT)
    fresh.put(document(), saved)
    assert same(fresh.get(saved.document_id, saved.compression), saved)


def test_the_state_of_another_document_is_refused(tmp_path):
    store = LocalStore(tmp_path / "kv", FINGERPRINT)
    with pytest.raises(InvalidSetting):
        store.put(document(1), state(document(2)))


def test_lengths_that_do_not_fit_are_refused(tmp_path):
    _store, saved, _ = stored(tmp_path / "kv")
    wrong = replace(saved, layers=tuple(replace(layer, lengths=(30, -6)) for layer in saved.layers))
    with pytest.raises(InvalidSetting):
        LocalStore(tmp_path / "b", FINGERPRINT).put(document(), wrong)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: os.mkfifo(path)], ids=["folder", "fifo"])
def test_what_is_no_regular_file_is_damage(tmp_path, make):
    _store, saved, path = stored(tmp_path / "kv")
    path.unlink()
    make(path)
    with pytest.raises(DamagedState):
        LocalStore(tmp_path / "kv", FINGERPRINT).get(saved.document_id, saved.compression)


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path):
    _store, saved, path = stored(tmp_path / "kv")
    elsewhere = path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(elsewhere)
    with pytest.raises(DamagedState):
        LocalStore(tmp_path / "kv", FINGERPRINT).get(saved.document_id, saved.compression)


def test_lone_surrogates_in_text_and_name_survive(tmp_path):
    of = Document("\ud800 a text that begins with half a character", "\udfff.md")
    store = LocalStore(tmp_path / "kv", FINGERPRINT)
    store.put(of, state(of))
    assert (store.text(of.id), store.resolve("\udfff.md"), list(store.candidates([of.text[:32]]))) == (
        of.text, of.id, [of.text[:32]],
    )  # fmt: skip


def test_an_index_removed_while_the_store_is_open_loses_nothing(tmp_path):
    store, _, _ = stored(tmp_path / "kv")
    (tmp_path / "kv" / "index.sqlite").unlink()
    store.put(document(1), state(document(1)))
    assert len(LocalStore(tmp_path / "kv", FINGERPRINT).documents()) == 2


def test_a_rebuilt_index_says_what_the_first_one_said(tmp_path):
    store, saved, _ = stored(tmp_path / "kv")
    before = store.states(saved.document_id)[0].nbytes
    store.close()
    (tmp_path / "kv" / "index.sqlite").unlink()
    assert LocalStore(tmp_path / "kv", FINGERPRINT).states(saved.document_id)[0].nbytes == before


def test_nbytes_counts_keys_values_and_positions(tmp_path):
    store, saved, _ = stored(tmp_path / "kv")
    assert store.states(saved.document_id)[0].nbytes == sum(layer.nbytes for layer in saved.layers)


def test_verify_mends_the_index(tmp_path):
    store, _saved, path = stored(tmp_path / "kv")
    path.unlink()
    store.verify()
    assert store.verify() == []


def test_bytes_on_disk_of_an_unknown_document_are_an_error(tmp_path):
    with pytest.raises(KeyError):
        stored(tmp_path / "kv")[0].nbytes_on_disk("f" * 32)
