"""The same model and tokens: what kvpress's presses keep and what this library's methods of the same name keep.

Set alike so that only the methods are compared:

- kvpress ranks everything that was read, P included; here P is never ranked. Either there is no P, or P is as long as
  the press's sinks, which are not ranked either.
- the number of kept pairs is given: kvpress cuts a fraction, this library rounds it.
- first tokens that every method here keeps (``sinks``) and the least a head keeps are set to none.

What then differs is rounding: kvpress scores keys after rotation in one pass, this library reads in chunks. Less than one
pair in a hundred; on the tiny models none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from kv_rag.compose import Piece, compose
from kv_rag.ingest import prefill, score
from kv_rag.kept import kept_for_question
from kv_rag.methods import Reading
from kv_rag.methods.keydiff import KeyDiff
from kv_rag.methods.kvzip import KVzip
from kv_rag.selection import Budget, select
from kv_rag.snapkv import SnapKV
from tests.peers.conftest import Read
from tests.peers.kept import (
    Kept,
    common,
    kept_by_kvzip_press,
    our_kept,
    our_scores,
    our_scores_of_rotated_keys,
    shares_of_same,
)

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress cannot be imported here; make test-peers has a place for it", exc_type=ImportError
)
KEEP = (0.5, 0.25, 0.1)
ALIKE = 0.99


def counts(tokens: int) -> list[int]:
    return [int(keep * tokens) for keep in KEEP]


def keep_best(scores: list[Tensor], sinks: int = 0) -> Callable[[int], Kept]:
    return lambda kept: our_kept(scores, kept, sinks)


def test_knorm_keeps_the_pairs_of_knorm_press(read: Read) -> None:
    """One token's keys have one length in the first layer: ties, which rounding breaks after rotation."""
    ours = keep_best(our_scores(read.alone, read.ids, "knorm"))
    shares = shares_of_same(read.alone, read.ids, counts(read.tokens), ours, kvpress.KnormPress)
    assert min(shares) >= ALIKE


def test_keydiff_keeps_the_pairs_of_keydiff_press_when_it_sees_rotated_keys(read: Read) -> None:
    """KeyDiff here looks at keys without position on purpose; a cache of transformers has them rotated."""
    ours = keep_best(our_scores_of_rotated_keys(read.alone, read.ids, KeyDiff()))
    shares = shares_of_same(read.alone, read.ids, counts(read.tokens), ours, kvpress.KeyDiffPress)
    assert min(shares) >= ALIKE


def test_tova_keeps_the_pairs_of_tova_press(read: Read) -> None:
    ours = keep_best(our_scores(read.alone, read.ids, "tova"))
    shares = shares_of_same(read.alone, read.ids, counts(read.tokens), ours, kvpress.TOVAPress)
    assert min(shares) >= ALIKE


def test_streaming_keeps_the_pairs_of_streaming_llm_press(read: Read) -> None:
    model, sinks = read.after_header, 4
    ours = keep_best(our_scores(model, read.ids, "streaming"), sinks)
    press = partial(kvpress.StreamingLLMPress, n_sink=read.before + sinks)
    assert min(shares_of_same(model, read.ids, counts(read.tokens), ours, press)) == 1


def test_expected_attention_keeps_the_pairs_of_expected_attention_press(read: Read) -> None:
    """The press leaves its sinks out of the softmax and of the queries' statistics, this library leaves P out."""
    model = read.after_header
    ours = keep_best(our_scores(model, read.ids, "expected", skip=0))
    press = partial(kvpress.ExpectedAttentionPress, n_sink=read.before)
    assert min(shares_of_same(model, read.ids, counts(read.tokens), ours, press)) >= ALIKE


def test_lagkv_keeps_the_pairs_of_lagkv_press(read: Read) -> None:
    """A part's scores are ranks, the same in every part: only budgets that take whole ranks leave nothing to ties."""
    model, lag = read.after_header, 32
    ours = keep_best(our_scores(model, read.ids, "lagkv", lag=lag, sinks=0))
    press = partial(kvpress.LagKVPress, n_sink=read.before, lag_size=lag)
    ranked_parts = read.tokens // lag - 1
    tail = read.tokens - ranked_parts * lag
    whole_ranks = [tail + ranked_parts * of_each for of_each in counts(lag)]
    assert min(shares_of_same(model, read.ids, whole_ranks, ours, press)) >= ALIKE


def test_snapkv_keeps_the_pairs_of_snapkv_press_whose_window_is_the_question(read: Read) -> None:
    """As in the paper: the mean over the question, pooled by the mean. The press counts its window as kept."""
    window, model = 20, read.alone
    document, question = read.ids[:-window], read.ids[-window:]
    tokens = document.numel()
    pieces = [Piece(document, prefill(model, "d", document, 64), exact=True, prunable=True), Piece(question)]
    asked = compose(model, pieces, repair=0.0, reserve=0, chunk=64, window=window)
    settings = SnapKV(pool=5, pooling="mean", vote="mean", diversity=0, allocation="uniform", minimum=1)

    def ours(kept: int) -> Kept:
        return [list(heads) for heads in kept_for_question(asked, 0, tokens, kept / tokens, settings)]

    press = partial(kvpress.SnapKVPress, window_size=window, kernel_size=5)
    assert min(shares_of_same(model, read.ids, counts(tokens), ours, press, window=window)) >= ALIKE


@pytest.mark.bundled
def test_kvzip_keeps_the_pairs_of_kvzip_press_when_asked_in_the_same_words(bundled_read: Read) -> None:
    """The press asks in a turn of its own that it then ends. It drops nothing, but says which pairs it would mask, ranked
    over the whole model. A head that it leaves without any pair keeps one here, which some other head gives.
    """
    model, ids = bundled_read.after_header, bundled_read.ids
    words = model.encode("\n\nRepeat the previous context exactly.<|im_end|>\n<|im_start|>assistant\n")

    class InTheSameWords(KVzip):
        def replays(self, reading: Reading) -> Iterator[Tensor]:
            yield torch.cat([words, reading.token_ids])

    scores = score(model, prefill(model, "d", ids, 64), InTheSameWords(), 64)
    for kept in counts(bundled_read.tokens):
        ours = select(scores, Budget(None, kept, allocation="model", sinks=0, minimum=1))
        theirs = kept_by_kvzip_press(model, ids, kept)
        without_any = sum(not head.numel() for heads in theirs for head in heads)
        assert common(ours, theirs) >= ALIKE * (kept * model.layers * model.kv_heads - without_any)
