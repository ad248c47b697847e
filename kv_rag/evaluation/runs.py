"""Compress first, ask afterwards: the forward passes of an evaluation.

Everything goes the way the product goes (the same prefill, scores, selection, composition); only the order of work
differs, so that a document is read once for all methods.
"""

from __future__ import annotations

import re
import string
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_rag.compose import Piece, compose
from kv_rag.document import Compression, DocumentCache, text_digest
from kv_rag.engine import CHUNK, JOINT, QUESTION, prune_composed
from kv_rag.evaluation.cases import Asked
from kv_rag.evaluation.contestants import Contestant
from kv_rag.generation import decode_step
from kv_rag.ingest import gather, prefill, prefill_header, score, watcher_for
from kv_rag.kept import kept_for_question
from kv_rag.likelihood import answer_likelihood
from kv_rag.methods import AnyWatcher
from kv_rag.model import LanguageModel
from kv_rag.observation import LayerStep
from kv_rag.selection import select
from kv_rag.snapkv import SnapKV
from kv_rag.state import PromptState

ANSWER_TOKENS = 16  # longest generated answer
_MARK = "\u2060kv_rag question\u2060"


@dataclass(frozen=True)
class Measured:
    """One answer from one state.

    Attributes:
        nll: of the gold answer, nats per token.
        predicted: share of the gold answer's tokens that the argmax predicts.
        agreement: share of the tokens of the full state's own answer that the argmax predicts; None when not generated.
        f1: of the generated answer, best over the gold answers; None when not generated.
        seconds: from a resident state to the first token's logits.
        said: what was generated; None when not generated.

    """

    nll: float
    predicted: float
    agreement: float | None
    f1: float | None
    seconds: float
    said: str | None


@dataclass(frozen=True)
class Scored:
    """What a method says about a document: scores for each layer, and the seconds it took beside the plain prefill."""

    scores: list[Tensor]
    seconds: float


class _Stopwatch:
    """A watcher that notes how long another one takes, so that one prefill serves many."""

    def __init__(self, watched: AnyWatcher) -> None:
        self.watched, self.seconds = watched, 0.0

    def observe(self, step: LayerStep) -> None:
        started = time.perf_counter()
        self.watched.observe(step)
        self.seconds += time.perf_counter() - started


class _Together:
    def __init__(self, watchers: Sequence[_Stopwatch]) -> None:
        self._watchers = watchers

    def observe(self, step: LayerStep) -> None:
        for watcher in self._watchers:
            watcher.observe(step)


class Bench:
    """A model and what its evaluations share: P's state and the text after a question."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._header = prefill_header(model, CHUNK)
        self._before, _, self._after = model.render([{"role": "user", "content": _MARK}]).partition(_MARK)

    def read(
        self, text: str, contestants: Sequence[Contestant], question: str | None = None
    ) -> tuple[DocumentCache, float, dict[str, Scored]]:
        """Reads ``text`` once and lets every method score it.

        Args:
            text: the document.
            contestants: those that compress (not the per-query mode).
            question: read right after the document, in every method's sight (protocol context+task); the scores are
                the document's alone.

        Returns:
            the document's full state, seconds of a plain prefill, and by label what each method says.

        """
        model, document_id = self.model, text_digest(text)
        document = model.encode(text, template=False)
        read = document
        if question is not None:
            read = torch.cat([document, self.question_ids(question, True)])
        ready = {contestant.label: contestant.method() for contestant in contestants}
        watchers = {}
        for label, method in ready.items():
            watcher = watcher_for(model, document_id, read, method)
            if watcher is not None:
                watchers[label] = _Stopwatch(watcher)
        started = time.perf_counter()
        state = prefill(model, document_id, read, CHUNK, observer=_Together(list(watchers.values())))
        plain = time.perf_counter() - started - sum(watch.seconds for watch in watchers.values())
        scored = {}
        for label, method in ready.items():
            watch = watchers.get(label)
            started = time.perf_counter()
            scores = score(model, state, method, CHUNK, watch.watched if watch else None)
            seconds = time.perf_counter() - started + (watch.seconds if watch else 0.0)
            scored[label] = Scored([layer[:, : document.numel()] for layer in scores], seconds)
        return _beginning(state, document), plain, scored

    def compressed(self, full: DocumentCache, scores: list[Tensor], contestant: Contestant, keep: float) -> DocumentCache:
        """The pairs of ``full`` that stay."""
        kept = select(scores, contestant.budget(keep))
        layers = tuple(gather(layer, full.tokens, heads) for layer, heads in zip(full.layers, kept, strict=True))
        compression = Compression.of("evaluation", keep=keep)
        return DocumentCache(full.document_id, full.token_ids, layers, compression)

    def question_ids(self, question: str, has_documents: bool) -> Tensor:
        """The prompt's text after the documents, as the product writes it."""
        asked = QUESTION.format(joint=JOINT, question=question) if has_documents else question
        return self.model.encode(asked + self._after)

    def ask(
        self,
        asked: Asked,
        documents: Sequence[DocumentCache],
        *,
        reference: Tensor | None = None,
        generate: bool = True,
        per_query: tuple[SnapKV, float] | None = None,
    ) -> Measured:
        """One question over ``documents``.

        Args:
            reference: the full state's own answer, token ids; its agreement is measured.
            generate: also generate an answer.
            per_query: settings and keep of the mode snapkv.

        """
        answer_ids = self.model.encode(asked.answers[0], template=False)
        pieces = self._pieces(asked.question, documents, per_query[1] if per_query else None)
        room = max(answer_ids.numel(), ANSWER_TOKENS + 1)
        window = pieces[-1].tokens if per_query else 0
        started = time.perf_counter()
        composed = compose(self.model, pieces, repair=0.0, reserve=room, chunk=CHUNK, window=window)
        composed.logits.argmax().item()
        seconds = time.perf_counter() - started
        state = prune_composed(composed, pieces, room, per_query[0]) if per_query else composed.state
        likelihood = self._score(composed.logits, state, answer_ids)
        agreement = f1 = said = None
        if reference is not None and reference.numel():
            agreement = self._score(composed.logits, state, reference)[1]
        if generate:
            said = self.model.decode(self._greedy(composed.logits, state).tolist()).strip()
            f1 = max(token_f1(said, answer) for answer in asked.answers)
        return Measured(*likelihood, agreement, f1, seconds, said)

    def own_answer(self, asked: Asked, documents: Sequence[DocumentCache]) -> Tensor:
        """What the model says from ``documents``, greedily: token ids."""
        pieces = self._pieces(asked.question, documents, None)
        composed = compose(self.model, pieces, repair=0.0, reserve=ANSWER_TOKENS + 1, chunk=CHUNK)
        return self._greedy(composed.logits, composed.state)

    def pruned_for(
        self, question: str, document: DocumentCache, keep: float, settings: SnapKV
    ) -> DocumentCache:
        """The pairs that SnapKV picks for ``question``, as a state that other questions are then asked from.

        The misuse that the product refuses, so that its failure can be measured.
        """
        pieces = self._pieces(question, [document], keep)
        composed = compose(self.model, pieces, repair=0.0, reserve=0, chunk=CHUNK, window=pieces[-1].tokens)
        index = next(at for at, piece in enumerate(pieces) if piece.prunable)
        kept = kept_for_question(composed, index, document.tokens, keep, settings)
        layers = [
            gather(layer, document.tokens, list(heads)) for layer, heads in zip(document.layers, kept, strict=True)
        ]
        compression = Compression.of("evaluation", keep=keep)
        return DocumentCache(document.document_id, document.token_ids, tuple(layers), compression)

    def _pieces(self, question: str, documents: Sequence[DocumentCache], keep: float | None) -> list[Piece]:
        """As ``Engine`` lays a question out."""
        pieces = [] if self._header is None else [Piece(self._header.token_ids, self._header, exact=True)]
        for index, cache in enumerate(documents):
            if index:
                pieces.append(Piece(self.model.encode(JOINT)))
            pieces.append(Piece(cache.token_ids, cache, index == 0, keep is not None, 1.0 if keep is None else keep))
        return [*pieces, Piece(self.question_ids(question, bool(documents)))]

    def _score(self, first: Tensor, state: PromptState, answer_ids: Tensor) -> tuple[float, float]:
        """As ``answer_likelihood``; the state is afterwards what it was."""
        lengths = [layer.length for layer in state.layers]
        likelihood = answer_likelihood(self.model, first, state, answer_ids)
        for layer, length in zip(state.layers, lengths, strict=True):
            layer.length = length
        return likelihood.nll, likelihood.predicted

    def _greedy(self, logits: Tensor, state: PromptState) -> Tensor:
        tokens: list[int] = []
        while len(tokens) < ANSWER_TOKENS:
            token = int(logits.argmax())
            if token in self.model.end_ids:
                break
            tokens.append(token)
            logits = decode_step(self.model, token, state)
        return torch.tensor(tokens, dtype=torch.int64)


def _beginning(state: DocumentCache, document: Tensor) -> DocumentCache:
    """The rows of the first tokens, ``document``'s own: what is read later changes nothing about them."""
    tokens = document.numel()
    everything = [torch.arange(tokens)]
    layers = tuple(gather(layer, state.tokens, everything * len(layer.lengths)) for layer in state.layers)
    return DocumentCache(state.document_id, document, layers, Compression.full())


def token_f1(said: str, gold: str) -> float:
    """Word overlap of two answers, as SQuAD counts it: case, punctuation and articles do not matter. 0 to 1."""
    ours, theirs = _words(said), _words(gold)
    common = sum((Counter(ours) & Counter(theirs)).values())
    if not common:
        return float(ours == theirs)
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()
