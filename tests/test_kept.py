"""Which tokens stayed: counts that agree with the states, text that adds up, HTML that is safe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kv_rag import Document, Engine, html
from kv_rag.errors import InvalidSetting
from tests.conftest import text_of

TEXT = "<b>Ünïcode</b> & 世界 " + text_of(90, 3)


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    engine = make_engine()
    engine.ingest(Document(TEXT, "a<b"), keep=0.5, retain="both")
    return engine


def test_texts_add_up_to_the_document(engine: Engine) -> None:
    kept = engine.kept("a<b")
    assert "".join(kept.texts) == TEXT
    assert len(kept.texts) == len(kept.shares) == engine.document("a<b").tokens


def test_shares_of_a_state_count_its_pairs(engine: Engine) -> None:
    [state] = [state for state in engine.states("a<b") if not state.compression.is_full]
    kept = engine.kept("a<b")
    assert kept.keep == pytest.approx(state.pairs / state.full_pairs)
    cache = engine.store.get(state.document_id, state.compression)
    tenth = sum(int((layer.positions == 10).sum()) for layer in cache.layers)
    assert kept.shares[10] == pytest.approx(tenth / (3 * 2))


def test_shares_for_a_question_are_what_snapkv_generates_from(engine: Engine) -> None:
    kept = engine.kept("a<b", question="What?", keep=0.3)
    answer = engine.answer("What?", documents="a<b", mode="snapkv", keep=0.3, max_new_tokens=2)
    assert kept.keep == pytest.approx(answer.metadata.keep)


def test_another_question_keeps_other_tokens_and_a_state_does_not(engine: Engine) -> None:
    one, other = (torch.tensor(engine.kept("a<b", question=text, keep=0.3).shares) for text in ("Who?", "Zebras 9?"))
    assert not torch.equal(one, other)
    assert engine.kept("a<b").shares == engine.kept("a<b").shares


def test_a_method_with_a_question_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidSetting, match="leave one out"):
        engine.kept("a<b", question="What?", method="keydiff")


def test_values_show_themselves_escaped(engine: Engine) -> None:
    answer = engine.answer("What?", documents="a<b", max_new_tokens=3)
    [ingested] = engine.ingest(Document(TEXT, "a<b"), keep=0.5)
    shown = [Document(TEXT, "a<b"), ingested, engine.document("a<b"), engine.memory(), engine.kept("a<b")]
    for value in shown:
        assert "a&lt;b" in value._repr_html_() and "a<b" not in value._repr_html_()
    assert "<b>Ünï" not in Document(TEXT)._repr_html_() and "&lt;b&gt;Ünï" in Document(TEXT)._repr_html_()
    assert "compressed" in answer._repr_html_() and f"{answer.metadata.pairs_kept:,} of" in answer._repr_html_()


def test_an_answer_without_documents_shows_no_pairs(engine: Engine) -> None:
    assert "pairs" not in engine.complete("Hello", max_new_tokens=2)._repr_html_()


@pytest.mark.parametrize(
    ("nbytes", "shown"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (31_900_000, "31.9 MB")]
)
def test_bytes_are_shown_for_people(nbytes: int, shown: str) -> None:
    assert html.size(nbytes) == shown
