"""Generation settings against transformers' own generate, and stop strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kv_rag import Engine
from kv_rag.generation import TextAssembler
from tests.conftest import text_of, tiny_model

DOCUMENT = text_of(120, 5)


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    engine = make_engine()
    engine.ingest(DOCUMENT, retain="full")
    return engine


def ask(engine: Engine, **options: Any) -> Any:
    return engine.answer("What does the fox do?", documents=DOCUMENT, mode="full", **options)


def prompt_ids(engine: Engine) -> torch.Tensor:
    from kv_rag.engine import QUESTION

    question = QUESTION.format(joint="\n\n", question="What does the fox do?")
    return engine.model.encode(engine.model.render([{"role": "user", "content": DOCUMENT + question}]))


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_with_repetition_penalty_equals_generate(engine: Engine, penalty: float) -> None:
    ids = prompt_ids(engine)
    expected = tiny_model("llama").generate(
        ids[None], attention_mask=torch.ones_like(ids)[None], max_new_tokens=12, do_sample=False,
        repetition_penalty=penalty, pad_token_id=258,
    )[0, ids.numel() :]  # fmt: skip
    text = ask(engine, max_new_tokens=12, repetition_penalty=penalty).text
    assert text == engine.model.decode(expected.tolist())


def test_same_seed_gives_the_same_sample_and_another_seed_another(engine: Engine) -> None:
    texts = [ask(engine, temperature=1.0, seed=seed, max_new_tokens=20).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_top_k_one_is_greedy(engine: Engine) -> None:
    assert ask(engine, temperature=1.5, top_k=1, max_new_tokens=12).text == ask(engine, max_new_tokens=12).text


def test_tiny_top_p_is_greedy(engine: Engine) -> None:
    assert ask(engine, temperature=1.0, top_p=1e-6, max_new_tokens=12).text == ask(engine, max_new_tokens=12).text


def test_stop_string_ends_the_answer_and_is_not_in_it(engine: Engine) -> None:
    whole = ask(engine, temperature=1.0, seed=3, max_new_tokens=30).text
    stop = whole[8:11]
    stream = engine.stream("What does the fox do?", documents=DOCUMENT, mode="full", temperature=1.0, seed=3,
                           max_new_tokens=30, stop=[stop])  # fmt: skip
    assert "".join(stream) == whole[: whole.index(stop)]
    assert stream.answer.metadata.finish_reason == "stop"


def test_end_token_stops_and_is_not_in_the_text(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.ingest(DOCUMENT, retain="full")
    first = ask(engine, max_new_tokens=1)
    token = engine.model.encode(first.text).tolist()
    engine.model.model.generation_config.eos_token_id = [256, *token]
    answer = ask(engine, max_new_tokens=5)
    assert (answer.text, answer.metadata.finish_reason, answer.metadata.generated_tokens) == ("", "stop", 1)


class Letters:
    """A tokenizer whose tokens are single UTF-8 bytes."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["plain", "Grüße an Köln", "日本語のテキスト", "a🦊b🦊🦊"])
def test_characters_of_several_tokens_are_never_split(text: str) -> None:
    assembler = TextAssembler(Letters(), ())  # type: ignore[arg-type]
    pieces = [assembler.add(byte) for byte in text.encode()] + [assembler.finish()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["fox", "x j", "umps", "zzz"])
def test_no_piece_holds_any_part_of_a_stop_string(stop: str) -> None:
    text = "the fox jumps over"
    assembler = TextAssembler(Letters(), (stop,))  # type: ignore[arg-type]
    sent = ""
    for byte in text.encode():
        sent += assembler.add(byte)
        if assembler.stopped:
            break
    sent += assembler.finish()
    assert sent == text.split(stop)[0]
    assert assembler.stopped == (stop in text)


def test_what_only_looked_like_a_stop_string_is_sent_in_the_end() -> None:
    assembler = TextAssembler(Letters(), ("END!",))  # type: ignore[arg-type]
    sent = "".join(assembler.add(byte) for byte in b"the END")
    assert sent == "the "
    assert assembler.finish() == "END"
