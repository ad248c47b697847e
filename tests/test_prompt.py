"""Finding documents in prompts, and references."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from kv_rag.document import text_digest
from kv_rag.errors import InvalidSetting
from kv_rag.prompt import (
    ANCHOR,
    Choice,
    DocumentSegment,
    TextSegment,
    reference,
    split_prompt,
    strip_references,
    with_reference,
)
from kv_rag.store import TextShape
from tests.conftest import text_of


class Shelf:
    """Texts as a store would know them, counting look-ups."""

    def __init__(self, *texts: str) -> None:
        self.texts = {text_digest(text): text for text in texts}

    def candidates(self, anchors: Collection[str]) -> dict[str, list[TextShape]]:
        found: dict[str, list[TextShape]] = {}
        for document_id, text in self.texts.items():
            if len(text) >= ANCHOR and text[:ANCHOR] in anchors:
                found.setdefault(text[:ANCHOR], []).append(TextShape(document_id, len(text), text[-ANCHOR:]))
        return found

    def characters(self, document_id: str) -> int | None:
        return len(self.texts[document_id]) if document_id in self.texts else None

    def split(self, prompt: str) -> list[TextSegment | DocumentSegment]:
        return split_prompt(prompt, self.candidates, self.characters)


ONE, TWO = text_of(90, 1), text_of(120, 2)
SNAPKV = Choice("snapkv", 0.25)


def test_documents_are_found_by_their_text_in_order() -> None:
    found = Shelf(ONE, TWO).split(f"Read: {TWO}\n\n{ONE}\nQ?")
    assert found == [
        TextSegment("Read: "),
        DocumentSegment(text_digest(TWO), TWO),
        TextSegment("\n\n"),
        DocumentSegment(text_digest(ONE), ONE),
        TextSegment("\nQ?"),
    ]


def test_longest_of_the_documents_that_begin_alike_is_found() -> None:
    longer = ONE + " and more"
    assert Shelf(ONE, longer).split(longer + "\nQ?")[0] == DocumentSegment(text_digest(longer), longer)


def test_same_document_twice_is_found_twice() -> None:
    found = Shelf(ONE).split(f"{ONE}\n{ONE}\nQ?")
    assert [type(segment) for segment in found] == [DocumentSegment, TextSegment, DocumentSegment, TextSegment]


def test_changed_document_is_text() -> None:
    prompt = f"Read: {ONE[:-1]}!\nQ?"
    assert Shelf(ONE).split(prompt) == [TextSegment(prompt)]


def test_document_inside_a_word_is_text() -> None:
    prompt = f"abc{ONE}\nQ?"
    assert Shelf(ONE).split(prompt) == [TextSegment(prompt)]


def test_short_document_is_found_only_by_its_reference() -> None:
    shelf = Shelf("Yes")
    assert shelf.split("Is it Yes or no?") == [TextSegment("Is it Yes or no?")]
    found = shelf.split(f"Is it {reference('Yes', SNAPKV)}Yes or no?")
    assert found[1] == DocumentSegment(text_digest("Yes"), "Yes", SNAPKV)


@pytest.mark.parametrize("choice", [Choice("full"), Choice("snapkv", 0.25), Choice("compressed", 0.1, "knorm")])
def test_reference_carries_the_choice(choice: Choice) -> None:
    found = Shelf(ONE).split(f"Read: {with_reference(ONE, choice)}\nQ?")
    assert found == [TextSegment("Read: "), DocumentSegment(text_digest(ONE), ONE, choice), TextSegment("\nQ?")]


def test_reference_with_the_digest_of_another_document_is_removed_and_not_followed() -> None:
    forged = reference(TWO, SNAPKV) + ONE
    assert Shelf(ONE, TWO).split(forged + "\nQ?") == [DocumentSegment(text_digest(ONE), ONE), TextSegment("\nQ?")]


def test_reference_to_an_unknown_document_is_removed() -> None:
    assert Shelf(ONE).split(f"{with_reference(TWO, SNAPKV)}\nQ?") == [TextSegment(f"{TWO}\nQ?")]


@pytest.mark.parametrize("keep", ["0", "7", "1.2.3", "..."])
def test_reference_with_a_damaged_keep_leaves_the_document_to_the_callers_mode(keep: str) -> None:
    prompt = f"[[kv:snapkv:{keep}:{text_digest(ONE)}]]{ONE}\nQ?"
    assert Shelf(ONE).split(prompt)[0] == DocumentSegment(text_digest(ONE), ONE, None)


def test_document_that_writes_about_references_is_found_whole() -> None:
    text = f"How references look: {reference(TWO, SNAPKV)}{TWO} and that was one."
    found = Shelf(text, TWO).split(f"{with_reference(text, Choice('full'))}\nQ?")
    assert found == [DocumentSegment(text_digest(text), text, Choice("full")), TextSegment("\nQ?")]


def test_putting_a_second_reference_replaces_the_first() -> None:
    assert with_reference(with_reference(ONE, SNAPKV), Choice("full")) == with_reference(ONE, Choice("full"))


def test_stripping_references_gives_the_clean_text() -> None:
    assert strip_references(f"a {with_reference(ONE, SNAPKV)} b") == f"a {ONE} b"


@pytest.mark.parametrize(
    "text",
    [
        "Ein Text über Häuser, Straßen und Brücken in Köln.",
        "文書は一度だけ読まれ、その状態はディスクに保存されます。質問はそこから答えられます。",
        "Lines that end\r\nas Windows ends them,\r\nwith {braces} and {{more}}.",
    ],
)
def test_other_scripts_line_ends_and_braces_are_found(text: str) -> None:
    assert DocumentSegment(text_digest(text), text) in Shelf(text).split(f"Context:\n{text}\n\nQ?")


@pytest.mark.parametrize("mode", ["fast", "", None])
def test_unknown_mode_is_refused(mode: str) -> None:
    with pytest.raises(InvalidSetting, match="compressed, snapkv, full"):
        Choice(mode)
