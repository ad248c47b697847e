"""The engine: documents in, answers out. The one class with state.

The story of a question: split the prompt into documents and text, look up each document's state, compose them, run what
no state covers, hand out the first token, prune if the mode is snapkv, generate.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kv_rag import html, methods
from kv_rag.answer import Answer, AnswerMetadata, AnswerStream, Prefilled
from kv_rag.compose import Composition, Piece, compose, computed_tokens
from kv_rag.document import MODEL, Compression, Document, DocumentCache, Scalar
from kv_rag.errors import (
    DamagedState,
    EmptyInput,
    InvalidSetting,
    RepeatedDocument,
    StateMissing,
    StoreError,
    StoreUnreachable,
    UnknownDocument,
)
from kv_rag.generation import Generation, TextAssembler, TokenPicker, generate
from kv_rag.ingest import compress, prefill, prefill_header, watcher_for
from kv_rag.kept import KeptTokens, kept_for_question, kept_in_state
from kv_rag.likelihood import Likelihood, answer_likelihood
from kv_rag.memory import DocumentMemory, MemoryReport, StateMemory
from kv_rag.model import LanguageModel, check_context
from kv_rag.prompt import Choice, DocumentSegment, Segment, TextSegment, split_prompt
from kv_rag.resident import ResidentStates
from kv_rag.selection import Budget, method_settings
from kv_rag.snapkv import Range, SnapKV, prune
from kv_rag.state import PromptState
from kv_rag.store import LRU, AbsentStore, DocumentRecord, Problem, StateRecord, Store, TextShape, open_store

logger = logging.getLogger(__name__)

RETAIN = ("compressed", "full", "both")
ON_MISSING = ("error", "prefill")
ON_DAMAGE = ("error", "reingest")
# kv-rag bench quality: the method that keeps most at every budget, and the smallest budget at which nothing measurable is
# lost (README). Reading a document takes it two prefills, once.
METHOD, KEEP = "blend", 0.25
# benchmarks/repair.py: composed without repair the documents keep the whole gap between a joint prefill and no document.
REPAIR = 0.0
SNAPKV_KEEP = 0.25
SNAPKV = SnapKV()
CHUNK = 512  # tokens per forward pass
JOINT = "\n\n"  # between documents
QUESTION = "{joint}Answer the question from the text above in a few words.{joint}Question: {question}"


@dataclass(frozen=True)
class Ingested:
    """What ingesting one document came to.

    Attributes:
        id: the document's id.
        name: its name, if it has one.
        tokens: its length.
        new: whether anything was added to the store; False costs no forward pass.
        pairs_kept: pairs in the compressed state (in the full one when only that is retained).
        pairs_full: pairs before compression.
        bytes_on_disk: of all its states.
        seconds: wall-clock time.

    """

    id: str
    name: str | None
    tokens: int
    new: bool
    pairs_kept: int
    pairs_full: int
    bytes_on_disk: int
    seconds: float

    def _repr_html_(self) -> str:
        return html.caption(self.name or self.id[:12]) + html.facts([
            ("id", self.id),
            ("read", f"{self.tokens:,} tokens " + (f"in {self.seconds:.1f} s" if self.new else "by an earlier call")),
            ("pairs", f"{self.pairs_kept:,} of {self.pairs_full:,} ({html.share(self.pairs_kept, self.pairs_full)})"),
            ("on disk", html.size(self.bytes_on_disk)),
        ])  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    """A prompt ready to run."""

    pieces: list[Piece]
    served: list[tuple[str, DocumentCache]]
    prefilled: list[Prefilled]
    mode: str


class Engine:
    """Reads documents once, keeps their KV state on disk, and answers questions from it.

    Safe to call from many threads: forward passes queue, every question has buffers of its own.

    Args:
        model: the language model.
        store: where states are kept; opened with the model's fingerprint. Where that is not possible now (no rights, a
            full disk) a warning is logged and every document is read for its question.
        resident_budget: bytes of document states held in memory between questions; None for no limit.
        disk_budget: bytes of state files; the states used least give way before more is written. None for no limit.
        evict: which those are: "lru", not used for longest, or "least_useful", sparing the fewest tokens per byte.
        namespace: a tenant's name: its states are found by nobody who gives another one, or none.
        hmac_key: a secret of 16 bytes or more; states that were not written by a holder of it are refused.
        check: compare a state with its checksums when it is first read. Costs a few per cent of the first answer.
        on_damage: what to do with a state that is not as it was written: "error" (or, where ``on_missing`` is "prefill",
            read the document for this question), or "reingest" it, if its text is still to be had.
        chunk: tokens per forward pass when reading documents and long prompts.

    """

    def __init__(
        self,
        model: LanguageModel,
        store: str | Path = "./kv",
        *,
        resident_budget: int | None = None,
        disk_budget: int | None = None,
        evict: str = LRU,
        namespace: str | None = None,
        hmac_key: bytes | str | None = None,
        check: bool = True,
        on_damage: str = "error",
        chunk: int = CHUNK,
    ) -> None:
        if on_damage not in ON_DAMAGE:
            raise InvalidSetting(f"on_damage must be one of {', '.join(ON_DAMAGE)}, got {on_damage!r}")
        if not isinstance(chunk, int) or chunk < 1:
            raise InvalidSetting(f"chunk must be a number of tokens, at least 1, got {chunk!r}")
        self.model = model
        self._warned: set[str] = set()
        self._resident = ResidentStates(resident_budget)
        self._on_damage = on_damage
        self.store: Store
        try:
            self.store = open_store(
                store, model.fingerprint(), namespace=namespace, hmac_key=hmac_key, disk_budget=disk_budget, evict=evict,
                check=check,
            )  # fmt: skip
        except StoreUnreachable as error:
            logger.warning("%s; until then documents are read for every question", error)
            self.store = AbsentStore(store, error)
        self._chunk = chunk
        self._ingest_lock = threading.Lock()
        self._header_lock = threading.Lock()
        self._header_state: DocumentCache | None = None

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | tuple[Any, Any],
        *,
        store: str | Path = "./kv",
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        system: str | None = None,
        resident_budget: int | None = None,
        disk_budget: int | None = None,
        evict: str = LRU,
        namespace: str | None = None,
        hmac_key: bytes | str | None = None,
        check: bool = True,
        on_damage: str = "error",
        chunk: int = CHUNK,
    ) -> Engine:
        """An engine over ``bundled:smollm2-135m``, a folder, a hub id, or a ``(model, tokenizer)`` pair.

        Args:
            model: see above. A pair keeps its own device and dtype and is not changed.
            store: folder for document states, made if missing, or a URL that fsspec knows (``s3://bucket/prefix``). It
                belongs to one model: opening it with another one is refused.
            device, dtype: see ``LanguageModel.from_pretrained``.
            system: text of the system message that stands before every document. Part of the store's identity.
            resident_budget, disk_budget, evict, namespace, hmac_key, check, on_damage, chunk: see the class.

        Raises:
            ModelNotFound, UnsupportedModel: from loading.
            StoreError, StoreMismatch: from opening the store.

        """
        if isinstance(model, tuple):
            language_model = LanguageModel(*model, system=system)
        else:
            language_model = LanguageModel.from_pretrained(model, device=device, dtype=dtype, system=system)
        return cls(
            language_model, store, resident_budget=resident_budget, disk_budget=disk_budget, evict=evict,
            namespace=namespace, hmac_key=hmac_key, check=check, on_damage=on_damage, chunk=chunk,
        )  # fmt: skip

    def close(self) -> None:
        """Frees what is held in memory and closes the store."""
        self._resident.clear()
        self.store.close()

    def _warn_once(self, error: StoreError) -> None:
        message = str(error)
        if message not in self._warned and not (isinstance(error, StoreUnreachable) and error.logged):
            self._warned.add(message)
            logger.warning("%s", message)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- documents ---

    def ingest(
        self,
        documents: str | Document | Iterable[str | Document],
        *,
        method: str = METHOD,
        keep: float | None = None,
        budget: int | None = None,
        allocation: str | None = None,
        retain: str = "both",
        stored_dtype: str = MODEL,
        progress: bool = False,
        settings: Mapping[str, Scalar] | None = None,
    ) -> list[Ingested]:
        """Reads documents and stores their states. What is stored already costs no forward pass.

        Args:
            documents: texts or ``Document`` objects; one or many.
            method: compression method, one of ``kv_rag.methods.METHODS``. It sees no question.
            keep: fraction of the pairs to keep, in (0, 1]; default 0.25.
            budget: pairs per head to keep, instead of ``keep``.
            allocation: "uniform" keeps the same number of pairs in every head; "heads" ranks the heads of a layer
                together, so that they keep different numbers, the same in sum; "model" ranks all heads of all layers
                together; "pyramid" keeps fewer pairs the later the layer. Default: what suits the method.
            retain: "compressed" keeps nothing but the chosen pairs; "full" keeps every pair (for the modes snapkv and
                full); "both".
            stored_dtype: how the states are stored: "model" to the bit as the model made them, or smaller and a little
                wrong as "bfloat16", "int8", "int4" or "fp8" (see ``kv_rag.store.quantise``). Part of what a state is:
                the same document in another dtype is another state, and questions use the newest one that fits. In
                memory a state always takes the model's dtype.
            progress: show a progress bar.
            settings: the method's own settings, and of the selection ``sinks``, ``recent`` (first and last tokens that
                every head keeps) and ``minimum`` (pairs that every head keeps at least), see ``selection.Budget``.

        Raises:
            EmptyInput, InvalidSetting, UnknownMethod: before any work is done.
            ContextOverflow: a document is longer than the model's context; nothing of this call is ingested.
            StoreError: the store cannot be written; documents stored before that are complete.

        """
        if retain not in RETAIN:
            raise InvalidSetting(f"retain must be one of {', '.join(RETAIN)}, got {retain!r}")
        compressor = methods.create(method, method_settings(settings))
        allocation = allocation or methods.allocation_of(compressor)
        wanted = Compression.of(
            method,
            keep=_default_keep(keep, budget, KEEP),
            budget=budget,
            settings={**(settings or {}), **({} if allocation == "uniform" else {"allocation": allocation})},
            stored_dtype=self._stored_dtype(stored_dtype),
        )
        Budget.of(wanted)  # refuses settings that are out of range
        batch = [(document, self.model.encode(document.text, template=False)) for document in _documents(documents)]
        for document, token_ids in batch:
            self._check_length(document, token_ids)
        total = sum(token_ids.numel() for _, token_ids in batch)
        results = []
        with tqdm(total=total, unit="token", desc="ingest", disable=not progress, leave=False) as bar:
            for document, token_ids in batch:
                bar.set_postfix_str((document.name or document.id)[:24], refresh=False)
                results.append(self._ingest_one(document, token_ids, compressor, wanted, retain, bar))
        return results

    def _stored_dtype(self, stored_dtype: str) -> str:
        """The model's own dtype asked for by name is the model's dtype: one state, not two with the same bits."""
        return MODEL if stored_dtype == str(self.model.dtype).removeprefix("torch.") else stored_dtype

    def _check_length(self, document: Document, token_ids: Tensor) -> None:
        header = self.model.header[1].numel()
        check_context(
            header + token_ids.numel() + 1,
            self.model.context,
            f"document {document.name or document.id!r} ({token_ids.numel()} tokens, {header} before it, 1 for an answer)",
            "split it into parts, or use a model with a longer context",
        )

    def _ingest_one(
        self,
        document: Document,
        token_ids: Tensor,
        compressor: methods.AnyMethod,
        wanted: Compression,
        retain: str,
        bar: Any,
    ) -> Ingested:
        started = time.perf_counter()
        whole = Compression.full(wanted.stored_dtype)
        targets = {"compressed": [wanted], "full": [whole], "both": [wanted, whole]}[retain]
        with self._ingest_lock:
            missing = [target for target in targets if not self.store.has(document.id, target)]
            records: dict[Compression, StateRecord] = {}
            if missing:
                self.store.must_be_writable()
                watcher = None if wanted not in missing else watcher_for(self.model, document.id, token_ids, compressor)
                full = self._full_state(document, token_ids, bar, watcher)
                for target in missing:
                    state = replace(full, compression=target)
                    if not target.is_full:
                        state = compress(self.model, full, compressor, target, self._chunk, watcher)
                    records[target] = self.store.put(document, state)
                    if not target.is_full and target.stored_dtype == MODEL:  # others are not yet as they will be read
                        self._resident.hold(state)
            else:
                bar.update(token_ids.numel())
                self._rename(document, targets[0])
        records |= {record.compression: record for record in self.store.states(document.id)}
        if targets[0] not in records:
            raise StateMissing(f"document {document.id} was removed while it was ingested; ingest it again")
        shown = records[targets[0]]
        return Ingested(
            document.id, document.name, shown.tokens, bool(missing), shown.pairs, shown.full_pairs,
            sum(record.file_bytes for record in records.values()), time.perf_counter() - started,
        )  # fmt: skip

    def _rename(self, document: Document, stored: Compression) -> None:
        """A document ingested again under another name is known by that name from then on."""
        if document.name is not None and self.store.document(document.id).name != document.name:
            self.store.put(document, self.store.get(document.id, stored))

    def _full_state(
        self, document: Document, token_ids: Tensor, bar: Any, watcher: methods.AnyWatcher | None
    ) -> DocumentCache:
        """From the store if it is there and nobody has to watch it being made."""
        if watcher is None and self.store.has(document.id, Compression.full()):
            bar.update(token_ids.numel())
            return self.store.get(document.id, Compression.full())
        header = self.model.header[1].numel()
        done = 0

        def on_chunk(tokens: int) -> None:
            nonlocal done
            bar.update(max(0, done + tokens - header) - max(0, done - header))
            done += tokens

        return prefill(self.model, document.id, token_ids, self._chunk, on_chunk, watcher)

    def documents(self) -> list[DocumentRecord]:
        """The store's documents, in order of ingestion."""
        return self.store.documents()

    def document(self, reference: str) -> DocumentRecord:
        """One document by id, beginning of an id (6 or more digits), name, or text.

        Raises:
            UnknownDocument, AmbiguousDocument.

        """
        return self.store.document(self.store.resolve(reference))

    def states(self, reference: str) -> list[StateRecord]:
        """The stored states of one document."""
        return self.store.states(self.store.resolve(reference))

    def remove(self, reference: str) -> int:
        """Removes a document with all its states, from memory and disk; returns the bytes freed on disk."""
        document_id = self.store.resolve(reference)
        self._resident.drop(document_id)
        self.store.pinned.discard(document_id)
        return self.store.remove(document_id)

    def pin(self, reference: str, choice: Choice | None = None) -> int:
        """Reads a document's state into memory and keeps it there; this engine does not evict it from the disk either.

        Args:
            reference: id, beginning of an id, name or text.
            choice: which state, as a question will ask for it; default the newest compressed one.

        Returns:
            the bytes held.

        Raises:
            UnknownDocument, AmbiguousDocument, StateMissing, DamagedState.
            InvalidSetting: it does not fit the resident budget beside what is pinned already.

        """
        document_id = self.store.resolve(reference)
        state = self._state(document_id, choice or Choice("compressed"))
        self._resident.pin(state)
        self.store.pinned.add(document_id)
        return state.nbytes

    def unpin(self, reference: str) -> None:
        """Lets a document give way again."""
        document_id = self.store.resolve(reference)
        self._resident.unpin(document_id)
        self.store.pinned.discard(document_id)

    def verify(self) -> list[Problem]:
        """Reads every file of the store and compares checksums; an empty list means all is well."""
        return self.store.verify()

    def memory(self) -> MemoryReport:
        """Bytes of every state, resident and on disk, and the budgets they are held to."""
        held = self._resident.by_state()
        by_document: Counter[str] = Counter()
        for (document_id, _), nbytes in held.items():
            by_document[document_id] += nbytes
        rows = []
        for record in self.store.documents():
            states = tuple(
                StateMemory(
                    str(state.compression), state.pairs, state.full_pairs, state.nbytes, state.file_bytes,
                    state.compression.is_full, held.get((record.id, state.compression), 0),
                )
                for state in record.states
            )  # fmt: skip
            pinned = record.id in self.store.pinned
            rows.append(
                DocumentMemory(record.id, record.name, record.tokens, by_document[record.id], states, pinned)
            )
        return MemoryReport(tuple(rows), self._resident.budget, self.store.disk_budget, self.store.nbytes_on_disk())

    def kept(
        self, document: str, *, question: str | None = None, keep: float | None = None, method: str | None = None
    ) -> KeptTokens:
        """Which tokens of ``document`` stayed in its compressed state, or which SnapKV picks for a ``question``.

        Args:
            document: id, beginning of an id, name or text.
            question: what SnapKV is to pick for, from the full state; None looks at the compressed state.
            keep: with a question, the fraction that SnapKV keeps, default 0.25; else picks among the stored states.
            method: picks among the stored states.

        """
        record = self.document(document)
        name = record.name or record.id
        if question is None:
            cache = self._state(record.id, Choice("compressed", keep, method))
            positions, chosen = kept_in_state(cache), str(cache.compression)
        elif method is not None:
            raise InvalidSetting(f"method={method!r} names a compressed state; with a question SnapKV picks: leave one out")
        else:
            fraction = SNAPKV_KEEP if keep is None else keep
            plan = self._plan(self._question_segments(question, record.id, "error"), Choice("snapkv", fraction), "error")
            composition = compose(
                self.model, plan.pieces, repair=0.0, reserve=0, chunk=self._chunk, window=plan.pieces[-1].tokens
            )
            [(index, cache)] = [(at, piece.cache) for at, piece in enumerate(plan.pieces) if piece.cache and piece.prunable]
            positions = kept_for_question(composition, index, cache.tokens, fraction, SNAPKV)
            chosen = f"SnapKV for \u201c{question.strip()}\u201d"
        return KeptTokens(name, chosen, tuple(self.model.token_texts(cache.token_ids.tolist())), positions)

    # --- questions ---

    def answer(self, question: str, *, documents: str | Sequence[str], **options: Any) -> Answer:
        """Answers ``question`` from ``documents``. As ``stream``, at once."""
        return self.stream(question, documents=documents, **options).answer

    def stream(
        self,
        question: str,
        *,
        documents: str | Sequence[str],
        mode: str = "compressed",
        keep: float | None = None,
        method: str | None = None,
        repair: float = REPAIR,
        on_missing: str = "error",
        snapkv: SnapKV = SNAPKV,
        **generation: Any,
    ) -> AnswerStream:
        """Answers ``question`` from ``documents`` piece by piece.

        Args:
            question: not empty.
            documents: ids, beginnings of ids, names or texts, in the order they are to stand in the prompt.
            mode: "compressed" (from the pairs chosen at ingest), "snapkv" (this question's attention picks the pairs from
                the full state) or "full".
            keep: compressed: picks among the stored states (default: the newest); snapkv: fraction of the pairs that the
                answer is generated from, default 0.25.
            method: compressed: picks among the stored states.
            repair: fraction of each document's tokens recomputed over the composed state, for the modes full and snapkv
                with several documents; 1.0 equals reading the whole prompt anew.
            on_missing: what to do when the mode needs a state that was not retained: "error", or "prefill" the document
                for this question (see ``metadata.prefilled``).
            snapkv: how mode "snapkv" picks pairs: budgets per head or layer, pooling.
            **generation: see ``Generation``.

        Raises:
            EmptyInput, InvalidSetting, UnknownDocument, AmbiguousDocument, RepeatedDocument, StateMissing,
            ContextOverflow: from this call, before any forward pass.

        """
        started = time.perf_counter()
        segments = self._question_segments(question, documents, on_missing)
        return self._start(segments, Choice(mode, keep, method), repair, on_missing, snapkv, generation, started)

    def likelihood(
        self,
        question: str,
        answer: str,
        *,
        documents: str | Sequence[str],
        mode: str = "compressed",
        keep: float | None = None,
        method: str | None = None,
        repair: float = REPAIR,
        on_missing: str = "error",
        snapkv: SnapKV = SNAPKV,
    ) -> Likelihood:
        """How likely the model finds ``answer`` (teacher-forced) where ``stream`` would generate: for evaluations.

        The same path as generation: with snapkv the first token comes from the full state, the rest from the pruned one.
        """
        segments = self._question_segments(question, documents, on_missing)
        plan = self._plan(segments, Choice(mode, keep, method), on_missing)
        answer_ids = self.model.encode(answer, template=False)
        if not answer_ids.numel():
            raise EmptyInput("the answer to score is empty")
        window = plan.pieces[-1].tokens if any(piece.prunable for piece in plan.pieces) else 0
        room = answer_ids.numel()
        composition = compose(
            self.model, plan.pieces, repair=repair, reserve=room, chunk=self._chunk, window=window
        )
        state = prune_composed(composition, plan.pieces, room, snapkv) if window else composition.state
        return answer_likelihood(self.model, composition.logits, state, answer_ids)

    def _question_segments(self, question: str, documents: str | Sequence[str], on_missing: str) -> list[Segment]:
        if not isinstance(question, str) or not question.strip():
            raise EmptyInput("the question is empty")
        chosen = self._named_documents(documents, on_missing)
        before, _, after = self.model.render([{"role": "user", "content": _MARK}]).partition(_MARK)
        asked = QUESTION.format(joint=JOINT, question=question.strip()) if chosen else question.strip()
        segments: list[Segment] = [TextSegment(before)] if before else []
        for index, segment in enumerate(chosen):
            segments += [TextSegment(JOINT), segment] if index else [segment]
        segments.append(TextSegment(asked + after))
        return segments

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Answer:
        """The model's next turn. As ``stream_chat``, at once."""
        return self.stream_chat(messages, **options).answer

    def stream_chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> AnswerStream:
        """The model's next turn after ``messages`` (``{"role": …, "content": …}``), documents in them recognised.

        Options as in ``stream``, but that ``on_missing`` is "prefill" unless given: text that no state serves is read as
        usual.
        """
        if not messages:
            raise EmptyInput("there are no messages to answer")
        turns = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise InvalidSetting(f"a message needs a role and a content, both str, got {dict(message)!r}")
            turns.append({"role": role, "content": content})
        return self._start_text(self.model.render(turns), **options)

    def complete(self, text: str, **options: Any) -> Answer:
        """Answers the prompt ``text``. As ``stream_complete``, at once."""
        return self.stream_complete(text, **options).answer

    def stream_complete(self, text: str, *, formatted: bool = False, **options: Any) -> AnswerStream:
        """Answers the prompt ``text``, documents in it recognised.

        Args:
            text: the prompt.
            formatted: the chat template has been applied already; otherwise ``text`` becomes the user's message.
            **options: as in ``stream_chat``.

        """
        if not isinstance(text, str) or not text.strip():
            raise EmptyInput("the prompt is empty")
        rendered = text if formatted else self.model.render([{"role": "user", "content": text}])
        return self._start_text(rendered, **options)

    # --- from a prompt to an answer ---

    def _start_text(
        self,
        prompt: str,
        *,
        mode: str = "compressed",
        keep: float | None = None,
        method: str | None = None,
        repair: float = REPAIR,
        on_missing: str = "prefill",
        snapkv: SnapKV = SNAPKV,
        force: bool = False,
        **generation: Any,
    ) -> AnswerStream:
        started = time.perf_counter()
        choice = Choice(mode, keep, method)
        segments = split_prompt(prompt, self._candidates, self._characters)
        if force:
            segments = [
                DocumentSegment(segment.document_id, segment.text) if isinstance(segment, DocumentSegment) else segment
                for segment in segments
            ]
        return self._start(segments, choice, repair, on_missing, snapkv, generation, started)

    def _candidates(self, anchors: Collection[str]) -> dict[str, list[TextShape]]:
        """A store that cannot be read now knows no document."""
        try:
            return self.store.candidates(anchors)
        except StoreUnreachable as error:
            self._warn_once(error)
            return {}

    def _characters(self, document_id: str) -> int | None:
        try:
            return self.store.document(document_id).characters
        except UnknownDocument:
            return None
        except StoreUnreachable as error:
            self._warn_once(error)
            return None

    def _named_documents(self, documents: str | Sequence[str], on_missing: str) -> list[DocumentSegment]:
        named = [documents] if isinstance(documents, str) else list(documents)
        found: dict[str, DocumentSegment] = {}
        for reference in named:
            text = reference.text if isinstance(reference, Document) else reference
            if not isinstance(text, str) or not text.strip():
                raise EmptyInput("a document is named by an id, a name or its text; got an empty one")
            try:
                document_id = self.store.resolve(text)
                segment = DocumentSegment(document_id, "")
            except (UnknownDocument, StoreUnreachable) as error:
                allowed = on_missing == "prefill" or isinstance(error, StoreUnreachable)
                if not allowed or not any(letter.isspace() for letter in text.strip()):
                    raise
                if isinstance(error, StoreUnreachable):
                    self._warn_once(error)
                document = Document(text)
                document_id, segment = document.id, DocumentSegment(document.id, document.text)
            if document_id in found:
                raise RepeatedDocument(f"document {document_id} is given twice; name each document once")
            found[document_id] = segment
        return list(found.values())

    def _start(
        self,
        segments: list[Segment],
        choice: Choice,
        repair: float,
        on_missing: str,
        snapkv: SnapKV,
        options: Mapping[str, Any],
        started: float,
    ) -> AnswerStream:
        """Everything that can be refused is refused here; forward passes start when the stream is read."""
        if not isinstance(repair, (int, float)) or not 0 <= repair <= 1:
            raise InvalidSetting(f"repair must be a fraction in [0, 1], got {repair!r}")
        if on_missing not in ON_MISSING:
            raise InvalidSetting(f"on_missing must be one of {', '.join(ON_MISSING)}, got {on_missing!r}")
        if not isinstance(snapkv, SnapKV):
            raise InvalidSetting(f"snapkv must be a kv_rag.snapkv.SnapKV, got {snapkv!r}")
        try:
            generation = Generation(**options)
        except TypeError as error:
            known = ", ".join(Generation.__dataclass_fields__)
            raise InvalidSetting(f"{str(error).split('__init__() ')[-1]}; generation settings are: {known}") from None
        plan = self._plan(segments, choice, on_missing)
        prompt_tokens = sum(piece.tokens for piece in plan.pieces)
        check_context(
            prompt_tokens + 1, self.model.context, "the prompt with 1 token for the answer",
            "use fewer or shorter documents, or a model with a longer context",
        )  # fmt: skip
        prepared = time.perf_counter() - started
        return AnswerStream(self._pieces_of_answer(plan, float(repair), snapkv, generation, prompt_tokens, prepared))

    def _plan(self, segments: list[Segment], choice: Choice, on_missing: str) -> _Plan:
        pieces: list[Piece] = []
        served: list[tuple[str, DocumentCache]] = []
        prefilled: list[Prefilled] = []
        modes = set()
        for index, segment in enumerate(segments):
            if isinstance(segment, TextSegment):
                text_pieces = self._text_pieces(segment.text, first=index == 0)
                pieces += text_pieces
                prefilled += [Prefilled("text", p.tokens, "not a document") for p in text_pieces if p.cache is None]
                continue
            use = segment.choice or choice
            modes.add(use.mode)
            try:
                cache = self._state(segment.document_id, use)
            except (StateMissing, StoreUnreachable, DamagedState) as error:
                # A reference is a hint from a retriever: what it asks for and is not there gives way to prefilling. So
                # does a store that cannot be reached, whatever was asked for.
                given_way = segment.choice is not None and isinstance(error, StateMissing)
                if on_missing == "error" and not given_way and not isinstance(error, StoreUnreachable):
                    raise
                if not isinstance(error, StateMissing):
                    self._warn_once(error)
                token_ids = self._token_ids(segment)
                pieces.append(Piece(token_ids))
                prefilled.append(Prefilled(f"document {segment.document_id}", token_ids.numel(), str(error)))
                continue
            only_header_before = len(pieces) == 1 and pieces[0].cache is not None and pieces[0].exact
            exact = cache.is_full and (only_header_before or (not pieces and not self.model.header[1].numel()))
            prunable = use.mode == "snapkv"
            keep = use.keep if use.keep is not None else SNAPKV_KEEP
            pieces.append(Piece(cache.token_ids, cache, exact, prunable, keep if prunable else 1.0))
            served.append((segment.document_id, cache))
        if not pieces or pieces[-1].cache is not None:
            raise EmptyInput("nothing follows the last document: the prompt must end in text (a question)")
        return _Plan(pieces, served, prefilled, modes.pop() if len(modes) == 1 else "mixed" if modes else choice.mode)

    def _token_ids(self, segment: DocumentSegment) -> Tensor:
        text = segment.text or self.store.text(segment.document_id)
        return self.model.encode(text, template=False)

    def _text_pieces(self, text: str, first: bool) -> list[Piece]:
        """Text as pieces; the header P, where the prompt begins with it, is served from its state."""
        token_ids = self.model.encode(text)
        if not first:
            return [Piece(token_ids)]
        header_text, header_ids = self.model.header
        token_ids = self.model.with_beginning(token_ids, text)
        size = header_ids.numel()
        # Compared as tokens: the header's last characters may have merged with what follows them here.
        if not size or not text.startswith(header_text) or not torch.equal(token_ids[:size], header_ids):
            return [Piece(token_ids)]
        rest = token_ids[size:]
        header = Piece(header_ids, self._header(), exact=True)
        return [header, Piece(rest)] if rest.numel() else [header]

    def _header(self) -> DocumentCache:
        with self._header_lock:
            if self._header_state is None:
                self._header_state = prefill_header(self.model, self._chunk)
        assert self._header_state is not None
        return self._header_state

    def _state(self, document_id: str, choice: Choice) -> DocumentCache:
        """The stored state that ``choice`` needs, held in memory from now on."""
        records = self.store.states(document_id)
        fitting = [record.compression for record in records if _fits(record.compression, choice)]
        if not fitting:
            raise StateMissing(_missing(document_id, choice, records))
        compression = fitting[-1]
        self.store.count_use(next(record for record in records if record.compression == compression))
        return self._resident.get(document_id, compression, lambda: self._load(document_id, compression))

    def _load(self, document_id: str, compression: Compression) -> DocumentCache:
        try:
            return self.store.get(document_id, compression)
        except DamagedState as error:
            if self._on_damage != "reingest" or self.store.read_only:
                raise
            logger.warning("%s; document %s is ingested again", error, document_id)
        document = Document(self.store.text(document_id), self.store.document(document_id).name)
        self.store.remove(document_id, compression)
        settings = dict(compression.settings)
        chosen: dict[str, Any] = {
            "method": compression.method, "keep": compression.keep, "budget": compression.budget, "retain": "compressed",
            "allocation": str(settings.pop("allocation", "uniform")), "settings": settings,
        }  # fmt: skip
        whole = {"retain": "full"}
        self.ingest(document, stored_dtype=compression.stored_dtype, **(whole if compression.is_full else chosen))
        return self.store.get(document_id, compression)

    def serves(self, document_id: str, choice: Choice) -> bool:
        """Whether the store has a state of the document (unknown ones included) that ``choice`` is answered from."""
        return any(_fits(record.compression, choice) for record in self.store.states(document_id))

    def prefetch(self, documents: Iterable[str], choice: Choice) -> None:
        """Reads the stored states that ``choice`` needs into memory, so that the next question finds them there.

        Args:
            documents: ids, names or texts.
            choice: as a question will ask for them.

        Raises:
            UnknownDocument, AmbiguousDocument, StateMissing, DamagedState.

        """
        for reference in documents:
            self._state(self.store.resolve(reference), choice)

    def _pieces_of_answer(
        self, plan: _Plan, repair: float, snapkv: SnapKV, generation: Generation, prompt_tokens: int, prepared: float
    ) -> Iterator[str | Answer]:
        started = time.perf_counter() - prepared
        room = min(generation.max_new_tokens, self.model.context - prompt_tokens)
        prunes = any(piece.prunable for piece in plan.pieces)
        window = plan.pieces[-1].tokens if prunes else 0
        composition = compose(
            self.model, plan.pieces, repair=repair, reserve=room, chunk=self._chunk, window=window
        )
        picker = TokenPicker(
            self.model, torch.cat([piece.token_ids for piece in plan.pieces]), _limited(generation, room)
        )
        assembler = TextAssembler(self.model, generation.stop)

        def state_after_first() -> PromptState:
            state = prune_composed(composition, plan.pieces, room, snapkv) if prunes else composition.state
            composition.state = state  # the full buffers are free to go
            return state

        text, first_token, last_token = "", 0.0, 0.0
        tokens = generate(self.model, composition.logits, picker, state_after_first)
        for token in tokens:
            last_token = time.perf_counter() - started
            first_token = first_token or last_token
            piece = assembler.add(token) if token not in self.model.end_ids else ""
            text += piece
            yield piece
            if assembler.stopped:
                break
        tail = assembler.finish()
        text += tail
        yield tail
        generated = len(picker.generated)
        pairs_kept = self._document_pairs(composition.state, plan.pieces, prompt_tokens)
        yield Answer(text, self._metadata(
            plan, repair, prompt_tokens, generated, first_token, last_token, pairs_kept,
            "stop" if assembler.stopped else picker.finish_reason or "stop",
        ))  # fmt: skip

    def _document_pairs(self, state: PromptState, pieces: list[Piece], prompt_tokens: int) -> int:
        """Pairs of documents in ``state``: all but those of P, text and generated tokens."""
        generated = state.tokens - prompt_tokens
        text = sum(piece.tokens for piece in pieces if piece.cache is None or piece.cache.document_id == "header")
        return state.pairs - (text + generated) * self.model.layers * self.model.kv_heads

    def _metadata(
        self,
        plan: _Plan,
        repair: float,
        prompt_tokens: int,
        generated: int,
        first_token: float,
        last_token: float,
        pairs_kept: int,
        finish_reason: str,
    ) -> AnswerMetadata:
        pairs_full = sum(cache.full_pairs for _, cache in plan.served)
        return AnswerMetadata(
            mode=plan.mode,
            keep=pairs_kept / pairs_full if pairs_full else None,
            repair=repair,
            documents=tuple(document_id for document_id, _ in plan.served),
            prompt_tokens=prompt_tokens,
            cached_tokens=_not_computed(plan.pieces, repair),
            cached_document_tokens=_not_computed([piece for piece in plan.pieces if _is_document(piece)], repair),
            generated_tokens=generated,
            seconds_to_first_token=first_token,
            seconds_per_token=(last_token - first_token) / (generated - 1) if generated > 1 else None,
            pairs_kept=pairs_kept,
            pairs_full=pairs_full,
            resident_bytes=sum({id(cache): cache.nbytes for _, cache in plan.served}.values()),
            finish_reason=finish_reason,
            prefilled=tuple(plan.prefilled),
        )


_MARK = "\u2060kv_rag documents\u2060"


def prune_composed(composition: Composition, pieces: Sequence[Piece], room: int, settings: SnapKV) -> PromptState:
    """The composed state with the pairs that the prompt's last piece attends to, and ``room`` slots for the answer."""
    ranges = [
        [Range(begin, begin + piece.tokens, piece.keep) for begin, piece in zip(row, pieces, strict=True) if piece.prunable]
        for row in composition.begins
    ]
    return prune(composition.state, composition.window, ranges, room, settings)


def _is_document(piece: Piece) -> bool:
    return piece.cache is not None and piece.cache.document_id != "header"


def _not_computed(pieces: list[Piece], repair: float) -> int:
    return sum(piece.tokens - computed_tokens(piece, repair).numel() for piece in pieces)


def _limited(generation: Generation, room: int) -> Generation:
    return replace(generation, max_new_tokens=room)


def _default_keep(keep: float | None, budget: int | None, default: float) -> float | None:
    return default if keep is None and budget is None else keep


def _documents(documents: str | Document | Iterable[str | Document]) -> list[Document]:
    """Checked documents, each text once."""
    if isinstance(documents, (str, Document)):
        documents = [documents]
    unique: dict[str, Document] = {}
    for document in documents:
        checked = document if isinstance(document, Document) else Document(document)
        unique.setdefault(checked.id, checked)
    return list(unique.values())


def _fits(stored: Compression, choice: Choice) -> bool:
    if choice.mode != "compressed":
        return stored.is_full
    return not stored.is_full and choice.method in (None, stored.method) and _same_keep(choice.keep, stored.keep)


def _same_keep(asked: float | None, stored: float | None) -> bool:
    """A reference carries ten digits of keep."""
    return asked is None or (stored is not None and math.isclose(asked, stored, rel_tol=1e-9))


def _missing(document_id: str, choice: Choice, records: list[StateRecord]) -> str:
    stored = ", ".join(str(record.compression) for record in records) or "nothing"
    if choice.mode == "compressed":
        asked = "a compressed state"
        if choice.method:
            asked += f" by {choice.method}"
        if choice.keep is not None:
            asked += f" with keep={choice.keep:g}"
        way_out = "ingest it so: engine.ingest(text, method=…, keep=…, retain='compressed' or 'both')"
    else:
        asked = f"its full state for mode={choice.mode!r}"
        way_out = "ingest it so: engine.ingest(text, retain='both' or 'full')"
    return (
        f"document {document_id} was asked for {asked}, but the store holds {stored}; {way_out}, "
        f"or pass on_missing='prefill' to read it for this question"
    )
