from __future__ import annotations

import pytest

from kv_rag.document import Document
from kv_rag.errors import AmbiguousDocument, UnknownDocument
from kv_rag.store import LocalStore
from tests.store.random_states import FINGERPRINT, document, state, stored


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path / "kv", FINGERPRINT)
    for number, name in enumerate(["cranes.md", "twice.md", "twice.md"]):
        store.put(document(number, name), state(document(number, name)))
    return store


@pytest.mark.parametrize("reference", [document(0).id, document(0).id[:6], "cranes.md", f"\n {document(0).text} "])
def test_a_document_is_found_by_id_prefix_name_or_text(store, reference):
    assert store.resolve(reference) == document(0).id


@pytest.mark.parametrize("reference", ["unknown.md", document(0).id[:5], "f" * 32, ""])
def test_what_fits_no_document_is_unknown(store, reference):
    with pytest.raises(UnknownDocument):
        store.resolve(reference)


def test_a_name_given_twice_is_ambiguous_and_both_ids_are_listed(store):
    with pytest.raises(AmbiguousDocument, match=rf"(?s)(?=.*{document(1).id})(?=.*{document(2).id})"):
        store.resolve("twice.md")


def test_a_document_given_another_name_is_found_by_it(store):
    store.put(document(0, "new.md"), state(document(0)))
    assert store.resolve("new.md") == document(0).id


def test_an_unknown_id_is_an_unknown_document(store):
    with pytest.raises(UnknownDocument):
        store.document("f" * 32)


def test_candidates_are_the_documents_beginning_with_an_anchor(store):
    text = document(1).text
    found = store.candidates([text[:32], "x" * 32])
    shapes = [(shape.document_id, shape.characters, shape.tail) for shape in found[text[:32]]]
    assert (list(found), shapes) == ([text[:32]], [(document(1).id, len(text), text[-32:])])


def test_documents_that_share_their_beginning_are_all_candidates(tmp_path):
    store = LocalStore(tmp_path / "kv", FINGERPRINT)
    for ending in "ab":
        of = Document("the same thirty-two characters first, then " + ending)
        store.put(of, state(of))
    assert len(store.candidates([of.text[:32]])[of.text[:32]]) == 2


def test_a_text_shorter_than_an_anchor_is_no_candidate(tmp_path):
    store = LocalStore(tmp_path / "kv", FINGERPRINT)
    store.put(Document("short"), state(Document("short")))
    assert store.candidates(["short"]) == {}


def test_thousands_of_anchors_are_looked_up_at_once(store):
    anchors = [f"{number:032d}" for number in range(5000)]
    assert list(store.candidates([*anchors, document(0).text[:32]])) == [document(0).text[:32]]


def test_bytes_on_disk_of_a_document_are_those_of_its_file(tmp_path):
    store, saved, path = stored(tmp_path / "kv")
    assert store.nbytes_on_disk(saved.document_id) == path.stat().st_size
