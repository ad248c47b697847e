"""What is compared when a state is read: checksums, and with a key who wrote it."""

from __future__ import annotations

import os

import pytest

from kv_rag.errors import DamagedState, InvalidSetting, StoreMismatch
from kv_rag.store import LocalStore
from kv_rag.store.seal import Seal
from tests.store.random_states import FINGERPRINT, document, flip, header_of, same, state, stored

KEY, OTHER = b"a secret of some length", "another secret of some length"


def kept(folder, key=KEY):
    with_key = LocalStore(folder, FINGERPRINT, hmac_key=key)
    return with_key, with_key.put(document(), state(document())).path


def test_a_state_written_with_a_key_is_read_with_it(tmp_path):
    kept(tmp_path / "kv")[0].close()
    again = LocalStore(tmp_path / "kv", FINGERPRINT, hmac_key=KEY)
    assert same(again.get(document().id, state(document()).compression), state(document()))


@pytest.mark.parametrize(("key", "word"), [(OTHER, "hmac key"), (None, "hmac key")])
def test_a_store_with_a_key_is_refused_without_it(tmp_path, key, word):
    kept(tmp_path / "kv")[0].close()
    with pytest.raises(StoreMismatch, match=word):
        LocalStore(tmp_path / "kv", FINGERPRINT, hmac_key=key)


@pytest.mark.parametrize("key", [OTHER, None])
def test_a_store_with_a_key_is_not_even_looked_at_without_it(tmp_path, key):
    kept(tmp_path / "kv")[0].close()
    with pytest.raises(StoreMismatch, match="hmac_key"):
        LocalStore(tmp_path / "kv", None, hmac_key=key)


def test_a_store_without_a_key_is_refused_with_one(tmp_path):
    stored(tmp_path / "kv")[0].close()
    with pytest.raises(StoreMismatch, match="hmac key"):
        LocalStore(tmp_path / "kv", FINGERPRINT, hmac_key=KEY)


@pytest.mark.parametrize("forger_key", [None, OTHER])
def test_a_state_by_somebody_without_the_key_is_refused(tmp_path, forger_key):
    store, path = kept(tmp_path / "kv")
    forger, forged = kept(tmp_path / "forged", forger_key)
    # The forger knows all but the key, the key's name in the store's description included.
    forger.fingerprint = dict(store.fingerprint)
    forger._digest = store._digest
    forged = forger.put(document(), state(document())).path
    assert forged.name == path.name
    path.write_bytes(forged.read_bytes())
    with pytest.raises(DamagedState, match="key"):
        LocalStore(tmp_path / "kv", FINGERPRINT, hmac_key=KEY).get(document().id, state(document()).compression)


def test_a_forged_state_is_left_out_of_a_rebuilt_index(tmp_path):
    store, path = kept(tmp_path / "kv")
    store.close()
    flip(path, path.stat().st_size // 3)
    flip(path, 300)
    (tmp_path / "kv" / "index.sqlite").unlink()
    assert LocalStore(tmp_path / "kv", FINGERPRINT, hmac_key=KEY).documents() == []


@pytest.mark.parametrize("key", [b"", "short", b"15 bytes, no mo", 16])
def test_a_key_that_is_too_short_is_refused(tmp_path, key):
    with pytest.raises(InvalidSetting, match="16 bytes"):
        LocalStore(tmp_path / "kv", FINGERPRINT, hmac_key=key)


def test_the_key_is_in_no_file_and_in_no_repr(tmp_path):
    kept(tmp_path / "kv")[0].close()
    secret = KEY if isinstance(KEY, bytes) else KEY.encode()
    content = b"".join(path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert secret not in content and secret.hex().encode() not in content and repr(secret)[2:-1] not in repr(Seal.of(KEY))


def test_large_states_are_compared_in_threads_with_the_same_result(monkeypatch):
    layer = state(document(), tokens=80_000).layers[0]
    tensors = {"keys": layer.keys, "values": layer.values}
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    many = Seal.of(KEY).tensors(tensors)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert many == Seal.of(KEY).tensors(tensors)


def test_the_check_can_be_switched_off(tmp_path):
    _store, saved, path = stored(tmp_path / "kv")
    header, begin = header_of(path)
    flip(path, begin + header["layers.000.keys"]["data_offsets"][0])
    loaded = LocalStore(tmp_path / "kv", FINGERPRINT, check=False).get(saved.document_id, saved.compression)
    assert not same(loaded, saved)


def test_a_state_is_compared_once_and_again_when_it_has_been_replaced(tmp_path):
    store, saved, path = stored(tmp_path / "kv")
    store.get(saved.document_id, saved.compression)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(DamagedState):
        store.get(saved.document_id, saved.compression)


def test_a_state_copied_from_a_store_of_other_settings_is_refused_with_every_difference(tmp_path):
    store, _, _ = stored(tmp_path / "kv")
    other = LocalStore(tmp_path / "other", {**FINGERPRINT, "dtype": "float16", "rotary": "yarn"})
    foreign = other.put(document(), state(document())).path
    place = store._folder.state_path(foreign.stem)
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(foreign.read_bytes())
    [problem] = store.verify()
    assert problem.file == place and "dtype: 'float16'" in problem.what and "rotary: 'yarn'" in problem.what
