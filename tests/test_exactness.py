"""The equalities that make answers trustworthy, on tiny random-weight models of every supported family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kv_rag import methods
from kv_rag.compose import Piece, compose
from kv_rag.document import Compression, DocumentCache, LayerPairs
from kv_rag.generation import decode_step
from kv_rag.ingest import compress, prefill, prefill_header
from kv_rag.model import LanguageModel
from kv_rag.snapkv import Range, SnapKV, prune, select, unlikeness, window_attention
from kv_rag.state import PromptState
from tests.conftest import text_of, tiny_model, tiny_tokenizer

TOLERANCE = 1e-4  # logits, float32; they span about +-5


class Documents:
    """Three documents, their full states, a header and a question for one model."""

    def __init__(self, model: LanguageModel, chunk: int = 64) -> None:
        self.model = model
        header = prefill_header(model, chunk)
        assert header is not None
        self.header = Piece(header.token_ids, header, exact=True)
        self.ids = [model.encode(text_of(length, seed), template=False) for seed, length in enumerate((100, 37, 60))]
        self.full = [prefill(model, str(index), ids, chunk) for index, ids in enumerate(self.ids)]
        self.question = Piece(model.encode("\n\nWhat does the fox do?<|end|>\n<|start|>assistant\n"))
        self.between = Piece(model.encode("\n\nAnd then:\n\n"))

    def one(self, cache: DocumentCache | None = None, **options: Any) -> list[Piece]:
        return [self.header, Piece(self.ids[0], cache or self.full[0], exact=True, **options), self.question]

    def several(self, **options: Any) -> list[Piece]:
        first, second, third = (
            Piece(ids, full, exact=index == 0, **options)
            for index, (ids, full) in enumerate(zip(self.ids, self.full, strict=True))
        )
        return [self.header, first, self.between, second, self.between, third, self.question]


def token_ids(pieces: list[Piece]) -> Tensor:
    return torch.cat([piece.token_ids for piece in pieces])


@torch.no_grad()
def plain_logits(model: LanguageModel, ids: Tensor) -> Tensor:
    """Plain transformers, as installed: ``[tokens, vocabulary]``."""
    return model.model(ids[None], use_cache=False).logits[0]


def greedy(model: LanguageModel, logits: Tensor, state: PromptState, count: int) -> list[int]:
    tokens = [int(logits.argmax())]
    while len(tokens) < count:
        tokens.append(int(decode_step(model, tokens[-1], state).argmax()))
    return tokens


def plain_greedy(model: LanguageModel, ids: Tensor, count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        everything = torch.cat([ids, torch.tensor(tokens, dtype=torch.int64)])
        tokens.append(int(plain_logits(model, everything)[-1].argmax()))
    return tokens


def test_one_document_in_full_mode_equals_plain_transformers(tiny: LanguageModel) -> None:
    documents = Documents(tiny)
    pieces = documents.one()
    composed = compose(tiny, pieces, repair=0, reserve=6, chunk=16)
    assert (composed.logits - plain_logits(tiny, token_ids(pieces))[-1]).abs().max() < TOLERANCE
    assert greedy(tiny, composed.logits, composed.state, 6) == plain_greedy(tiny, token_ids(pieces), 6)


def test_repair_one_equals_plain_transformers_on_the_whole_prompt(tiny: LanguageModel) -> None:
    pieces = Documents(tiny).several()
    composed = compose(tiny, pieces, repair=1.0, reserve=6, chunk=50)
    assert (composed.logits - plain_logits(tiny, token_ids(pieces))[-1]).abs().max() < TOLERANCE
    assert greedy(tiny, composed.logits, composed.state, 6) == plain_greedy(tiny, token_ids(pieces), 6)


def test_repair_zero_differs_from_plain_transformers_for_several_documents(tiny: LanguageModel) -> None:
    """So that the test above can fail."""
    pieces = Documents(tiny).several()
    composed = compose(tiny, pieces, repair=0.0, reserve=0, chunk=50)
    assert (composed.logits - plain_logits(tiny, token_ids(pieces))[-1]).abs().max() > 100 * TOLERANCE


@torch.no_grad()
def test_document_composed_at_an_offset_equals_its_own_keys_prefilled_at_that_offset(tiny: LanguageModel) -> None:
    """Layer 0, whose keys depend on the token and its position alone, against plain transformers run there."""
    documents = Documents(tiny)
    pieces = documents.several()
    composed = compose(tiny, pieces, repair=0.0, reserve=0, chunk=50)
    offset, ids = sum(piece.tokens for piece in pieces[:3]), documents.ids[1]
    positions = torch.arange(offset, offset + ids.numel())
    begin = composed.begins[0][3]
    ours = composed.state.layers[0].keys[:, begin : begin + ids.numel()]
    assert (ours - plain_keys(tiny, ids, positions, layer=0)).abs().max() < 1e-5


@torch.no_grad()
def test_every_layer_composed_at_an_offset_equals_a_prefill_whose_positions_are_shifted_there(
    tiny: LanguageModel,
) -> None:
    """All layers: rotary positions are relative, so P and the document shifted together give the same state moved."""
    documents = Documents(tiny)
    shift = 301
    header, ids = documents.header.token_ids, documents.ids[1]
    filler = Piece(torch.full((shift,), 65))
    pieces = [filler, Piece(header, documents.header.cache), Piece(ids, documents.full[1]), documents.question]
    composed = compose(tiny, pieces, repair=0.0, reserve=0, chunk=512)
    positions = torch.arange(shift, shift + header.numel() + ids.numel())
    for layer in range(tiny.layers):
        expected = plain_keys(tiny, torch.cat([header, ids]), positions, layer)
        ours = composed.state.layers[layer].keys[:, shift : shift + positions.numel()]
        assert (ours - expected).abs().max() < TOLERANCE


def plain_keys(model: LanguageModel, ids: Tensor, positions: Tensor, layer: int) -> Tensor:
    """Rotated keys ``[kv_heads, tokens, head_dim]`` that plain transformers computes, from its own cache."""
    output = model.model(ids[None], position_ids=positions[None], use_cache=True)
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    return cache.layers[layer].keys[0]


@torch.no_grad()
def test_every_layer_at_the_ingest_position_equals_the_keys_and_values_of_plain_transformers(
    tiny: LanguageModel,
) -> None:
    documents = Documents(tiny)
    pieces = documents.one()
    composed = compose(tiny, pieces, repair=0.0, reserve=0, chunk=50)
    before = token_ids(pieces[:2])
    output = tiny.model(before[None], use_cache=True)
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    for ours, theirs in zip(composed.state.layers, cache.layers, strict=True):
        assert (ours.keys[:, : before.numel()] - theirs.keys[0]).abs().max() < TOLERANCE
        assert (ours.values[:, : before.numel()] - theirs.values[0]).abs().max() < TOLERANCE


def test_chunked_prefill_equals_one_pass(tiny: LanguageModel) -> None:
    ids = tiny.encode(text_of(150, 3), template=False)
    chunked, whole = prefill(tiny, "d", ids, 17), prefill(tiny, "d", ids, 4096)
    for one, other in zip(chunked.layers, whole.layers, strict=True):
        assert (one.keys - other.keys).abs().max() < 1e-5
        assert (one.values - other.values).abs().max() < 1e-5


@pytest.mark.parametrize("method", sorted(methods.METHODS))
def test_keep_one_equals_full_for_every_method(tiny: LanguageModel, method: str) -> None:
    documents = Documents(tiny)
    kept = compress(tiny, documents.full[0], methods.create(method), Compression.of(method, keep=1.0), 64)
    for one, other in zip(kept.layers, documents.full[0].layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.positions, other.positions)
    pieces, whole = documents.one(kept), documents.one()
    composed = compose(tiny, pieces, repair=0, reserve=0, chunk=64)
    assert torch.equal(composed.logits, compose(tiny, whole, repair=0, reserve=0, chunk=64).logits)


@torch.no_grad()
def masked_reference(model: LanguageModel, ids: Tensor, seen: list[Tensor]) -> Tensor:
    """Logits ``[vocabulary]`` of a plain forward in which every later token is blind to dropped pairs.

    Args:
        seen: for each layer ``[kv_heads, tokens, tokens]`` bool: whether a token (row) may see another (column).
    """
    group = model.heads // model.kv_heads
    masks = [
        torch.zeros(layer.shape).masked_fill(~layer, -torch.inf).repeat_interleave(group, 0)[None] for layer in seen
    ]
    hooks = []
    for index, layer in enumerate(model.model.get_decoder().layers):

        def set_mask(module: Any, args: Any, kwargs: Any, mask: Tensor = masks[index]) -> Any:
            return args, {**kwargs, "attention_mask": mask}

        hooks.append(layer.self_attn.register_forward_pre_hook(set_mask, with_kwargs=True))
    try:
        return model.model(ids[None], use_cache=False).logits[0, -1]
    finally:
        for hook in hooks:
            hook.remove()


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def test_pruned_decoding_equals_a_plain_forward_that_masks_the_dropped_pairs(tiny: LanguageModel) -> None:
    documents = Documents(tiny)
    compression = Compression.of("random", keep=0.3)
    pruned = compress(tiny, documents.full[0], methods.create("random"), compression, 64)
    pieces = documents.one(pruned)
    composed = compose(tiny, pieces, repair=0, reserve=5, chunk=16)
    ids, begin = token_ids(pieces), documents.header.tokens
    end = begin + documents.ids[0].numel()
    tokens = [int(composed.logits.argmax())]
    for _ in range(4):
        everything = torch.cat([ids, torch.tensor(tokens, dtype=torch.int64)])
        seen = []
        for layer in pruned.layers:
            mask = causal(everything.numel()).repeat(tiny.kv_heads, 1, 1)
            kept = torch.zeros(tiny.kv_heads, end - begin, dtype=torch.bool)
            kept.scatter_(1, layer.positions.view(tiny.kv_heads, -1).long(), True)
            mask[:, end:, begin:end] &= kept[:, None, :]  # the document itself was read whole
            seen.append(mask)
        expected = masked_reference(tiny, everything, seen)
        logits = decode_step(tiny, tokens[-1], composed.state)
        assert (logits - expected).abs().max() < TOLERANCE
        tokens.append(int(logits.argmax()))


def snapkv_state(documents: Documents, pieces: list[Piece], reserve: int) -> tuple[Any, PromptState, list[list[Range]]]:
    model = documents.model
    composed = compose(model, pieces, repair=0, reserve=reserve, chunk=16, window=pieces[-1].tokens)
    ranges = [
        [Range(at, at + piece.tokens, 0.2) for at, piece in zip(row, pieces, strict=True) if piece.prunable]
        for row in composed.begins
    ]
    return composed, prune(composed.state, composed.window, ranges, reserve, SnapKV()), ranges


def test_first_token_of_snapkv_is_that_of_full(tiny: LanguageModel) -> None:
    documents = Documents(tiny)
    composed, _, _ = snapkv_state(documents, documents.several(prunable=True, keep=0.2), 2)
    full = compose(tiny, documents.several(), repair=0, reserve=0, chunk=16)
    assert torch.equal(composed.logits, full.logits)


def test_snapkv_at_keep_one_generates_what_full_generates(tiny: LanguageModel) -> None:
    documents = Documents(tiny)
    pieces = documents.one(prunable=True)
    composed = compose(tiny, pieces, repair=0, reserve=6, chunk=16, window=pieces[-1].tokens)
    begin = composed.begins[0][1]
    ranges = [[Range(begin, begin + pieces[1].tokens, 1.0)]] * tiny.layers
    state = prune(composed.state, composed.window, ranges, 6, SnapKV())
    assert greedy(tiny, composed.logits, state, 6) == plain_greedy(tiny, token_ids(pieces), 6)


@torch.no_grad()
def test_question_over_the_stored_state_keeps_the_pairs_that_a_joint_prefill_would_keep(tiny: LanguageModel) -> None:
    documents = Documents(tiny)
    pieces = documents.one(prunable=True, keep=0.2)
    composed, _, ranges = snapkv_state(documents, pieces, 0)
    whole = [Piece(token_ids(pieces))]
    joint = compose(tiny, whole, repair=0, reserve=0, chunk=4096, window=pieces[-1].tokens)
    ours, theirs = (
        select(
            [window_attention(q, layer, "max") for q, layer in zip(one.window, one.state.layers, strict=True)],
            [unlikeness(layer, parts) for layer, parts in zip(one.state.layers, ranges, strict=True)],
            ranges,
            SnapKV(),
        )
        for one in (composed, joint)
    )
    for layer, expected in zip(ours, theirs, strict=True):
        assert all(torch.equal(head, other) for head, other in zip(layer, expected, strict=True))


@torch.no_grad()
def test_window_attention_equals_the_attention_weights_of_plain_transformers(tiny: LanguageModel) -> None:
    documents = Documents(tiny)
    pieces = documents.one()
    window = pieces[-1].tokens
    composed = compose(tiny, pieces, repair=0, reserve=0, chunk=16, window=window)
    tiny.model.set_attn_implementation("eager")
    weights = tiny.model(token_ids(pieces)[None], output_attentions=True, use_cache=False).attentions
    group = tiny.heads // tiny.kv_heads
    for queries, layer, expected in zip(composed.window, composed.state.layers, weights, strict=True):
        mean = expected[0, :, -window:].unflatten(0, (tiny.kv_heads, group)).mean(dim=(1, 2))
        assert (window_attention(queries, layer) - mean).abs().max() < 1e-5


def test_cache_used_for_a_hundred_questions_is_bit_identical_afterwards() -> None:
    model = LanguageModel(tiny_model("llama"), tiny_tokenizer())
    documents = Documents(model)
    copies = [(layer.keys.clone(), layer.values.clone(), layer.positions.clone()) for layer in documents.full[1].layers]
    for repair in [0.0, 0.15, 1.0, 0.3] * 25:
        pieces = documents.several(prunable=True, keep=0.2)
        composed = compose(model, pieces, repair=repair, reserve=3, chunk=50, window=pieces[-1].tokens)
        decode_step(model, 5, composed.state)
    for layer, (keys, values, positions) in zip(documents.full[1].layers, copies, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
        assert torch.equal(layer.positions, positions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_have_no_nan_and_follow_plain_transformers(dtype: torch.dtype) -> None:
    model = LanguageModel(tiny_model("qwen2", dtype), tiny_tokenizer())
    documents = Documents(model)
    pieces = documents.one()
    composed = compose(model, pieces, repair=0, reserve=2, chunk=16)
    expected = plain_logits(model, token_ids(pieces))[-1].float()
    assert (composed.logits.float() - expected).abs().max() < 0.15  # bfloat16 keeps 8 bits
    assert not composed.state.layers[0].keys[:, : composed.state.layers[0].length].isnan().any()


def test_the_users_model_is_not_changed() -> None:
    model = tiny_model("llama")
    ids = torch.arange(50)[None] % 250
    with torch.no_grad():
        before = model(ids).logits
        Documents(LanguageModel(model, tiny_tokenizer()))
        after = model(ids).logits
    assert model.config._attn_implementation != "kv_rag"
    assert torch.equal(before, after)


def test_ragged_heads_equal_a_plain_forward_that_masks_the_dropped_pairs(tiny: LanguageModel) -> None:
    """Heads that keep different numbers of pairs, in different layers different ones."""
    documents = Documents(tiny)
    generator = torch.Generator().manual_seed(3)
    kept = [
        [torch.rand(documents.ids[0].numel(), generator=generator) < 0.2 + 0.2 * head + 0.1 * layer
         for head in range(tiny.kv_heads)]
        for layer in range(tiny.layers)
    ]  # fmt: skip
    ragged = ragged_cache(documents.full[0], kept)
    pieces = documents.one(ragged)
    composed = compose(tiny, pieces, repair=0, reserve=2, chunk=16)
    ids, begin = token_ids(pieces), documents.header.tokens
    end = begin + documents.ids[0].numel()
    seen = []
    for layer in kept:
        mask = causal(ids.numel()).repeat(tiny.kv_heads, 1, 1)
        mask[:, end:, begin:end] &= torch.stack(layer)[:, None, :]
        seen.append(mask)
    expected = masked_reference(tiny, ids, seen)
    assert (composed.logits - expected).abs().max() < TOLERANCE


def ragged_cache(full: DocumentCache, kept: list[list[Tensor]]) -> DocumentCache:
    layers = []
    for layer, heads in zip(full.layers, kept, strict=True):
        rows = torch.cat([head * full.tokens + mask.nonzero()[:, 0] for head, mask in enumerate(heads)])
        lengths = tuple(int(mask.sum()) for mask in heads)
        layers.append(LayerPairs(layer.keys[rows], layer.values[rows], layer.positions[rows], lengths))
    return DocumentCache(full.document_id, full.token_ids, tuple(layers), Compression.of("random", keep=0.5))
