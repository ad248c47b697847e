"""The disk budget: what gives way, and what never does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_rag.document import Compression
from kv_rag.errors import InvalidSetting, StoreError
from kv_rag.store import LEAST_USEFUL, LocalStore
from tests.store.random_states import FINGERPRINT, document, state, stored


def size(tmp_path):
    return stored(tmp_path / "measure")[2].stat().st_size


def filled(folder, states, budget, evict="lru"):
    store = LocalStore(folder, FINGERPRINT, disk_budget=budget, evict=evict)
    for number in range(states):
        store.put(document(number), state(document(number)))
    return store


def numbers(store):
    names = {document(number).id: number for number in range(20)}
    return sorted(names[record.id] for record in store.documents())


def files(store):
    return sum(path.stat().st_size for path in store.folder.rglob("*.safetensors"))


def test_files_stay_within_the_budget(tmp_path):
    budget = 3 * size(tmp_path) + 100
    store = LocalStore(tmp_path / "kv", FINGERPRINT, disk_budget=budget)
    for number in range(8):
        store.put(document(number), state(document(number)))
        assert files(store) <= budget


def test_the_oldest_gives_way_when_nothing_was_used(tmp_path):
    assert numbers(filled(tmp_path / "kv", 5, 3 * size(tmp_path) + 100)) == [2, 3, 4]


def test_what_was_used_last_stays(tmp_path):
    store = filled(tmp_path / "kv", 3, 3 * size(tmp_path) + 100)
    store.count_use(store.states(document(0).id)[0])
    store.put(document(3), state(document(3)))
    assert numbers(store) == [0, 2, 3]


def test_uses_are_remembered_when_the_store_is_opened_again(tmp_path):
    store = filled(tmp_path / "kv", 3, None)
    store.count_use(store.states(document(0).id)[0])
    store.close()
    assert numbers(filled(tmp_path / "kv", 0, 2 * size(tmp_path) + 100)) == [0, 2]


def test_a_clock_that_jumps_back_changes_no_order(tmp_path, monkeypatch):
    store = filled(tmp_path / "kv", 2, 2 * size(tmp_path) + 100)
    monkeypatch.setattr("time.time", lambda: 0.0)
    store.count_use(store.states(document(0).id)[0])
    store.put(document(2), state(document(2)))
    assert numbers(store) == [0, 2]


def test_a_pinned_document_stays(tmp_path):
    store = filled(tmp_path / "kv", 2, 2 * size(tmp_path) + 100)
    store.pinned.add(document(0).id)
    for number in (2, 3):
        store.put(document(number), state(document(number)))
    assert numbers(store) == [0, 3]


def test_least_useful_gives_way_large_states_first(tmp_path):
    store = LocalStore(tmp_path / "kv", FINGERPRINT, evict=LEAST_USEFUL)
    store.put(document(0), state(document(0), lengths=((2, 2), (2, 2))))
    store.put(document(1), state(document(1), tokens=400, lengths=((400, 400), (400, 400))))
    store.put(document(2), state(document(2), lengths=((2, 2), (2, 2))))
    big = replace(state(document(3), tokens=12), compression=Compression.of("knorm", keep=0.9))
    store.put(document(3), big)
    store.close()
    total = files(store)
    again = LocalStore(tmp_path / "kv", FINGERPRINT, evict=LEAST_USEFUL, disk_budget=total - 1)
    assert numbers(again) == [0, 1, 2]  # document 3 takes most bytes for each token that is not read again


def test_least_useful_spares_what_is_asked_for(tmp_path):
    store = filled(tmp_path / "kv", 3, 3 * size(tmp_path) + 100, LEAST_USEFUL)
    for number in (0, 0, 2):
        store.count_use(store.states(document(number).id)[0])
    store.put(document(3), state(document(3)))
    assert numbers(store) == [0, 2, 3]


def test_a_state_larger_than_the_budget_is_refused_before_anything_gives_way(tmp_path):
    store = filled(tmp_path / "kv", 2, 2 * size(tmp_path) + 100)
    with pytest.raises(StoreError, match="disk_budget"):
        store.put(document(3), state(document(3), tokens=500))
    assert numbers(store) == [0, 1]


def test_a_smaller_budget_holds_from_opening_on(tmp_path):
    filled(tmp_path / "kv", 4, None).close()
    budget = 2 * size(tmp_path) + 100
    assert files(filled(tmp_path / "kv", 0, budget)) <= budget


def test_a_store_opened_read_only_evicts_nothing(tmp_path):
    filled(tmp_path / "kv", 4, None).close()
    assert len(LocalStore(tmp_path / "kv", FINGERPRINT, read_only=True, disk_budget=1).documents()) == 4


def test_a_state_in_use_stays_usable_when_it_is_evicted(tmp_path):
    store = filled(tmp_path / "kv", 1, size(tmp_path) + 100)
    loaded = store.get(document(0).id, Compression.full())
    store.put(document(1), state(document(1)))
    assert loaded.layers[0].keys.equal(state(document(0)).layers[0].keys)


@pytest.mark.parametrize("budget", [0, -5, True, 1.5, "1GB"])
def test_a_budget_that_is_no_number_of_bytes_is_refused(tmp_path, budget):
    with pytest.raises(InvalidSetting, match="disk_budget"):
        LocalStore(tmp_path / "kv", FINGERPRINT, disk_budget=budget)


def test_an_unknown_order_is_refused(tmp_path):
    with pytest.raises(InvalidSetting, match="least_useful"):
        LocalStore(tmp_path / "kv", FINGERPRINT, disk_budget=1000, evict="oldest")
