"""The LLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import ConfigDict, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.schema import BaseNode
from llama_index.core.types import Model, TokenAsyncGen, TokenGen

from kv_rag import Answer, AnswerStream, Choice, Engine, Generation, Ingested, strip_references
from kv_rag.engine import ON_MISSING, REPAIR
from kv_rag.errors import InvalidSetting
from kv_rag.lazy import LazyEngine, shared_engine
from kv_rag.threads import in_thread
from kv_rag.turns import acceptable
from llama_index_kv_rag.errors import not_swallowed
from llama_index_kv_rag.messages import turns_of
from llama_index_kv_rag.nodes import ingest_nodes

GENERATION = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop")
ANSWERING = ("mode", "keep", "method", "repair", "on_missing", "force")
_PER_CALL = (*GENERATION, *ANSWERING, "logits_processor", "stopping_criteria")


class KVRagLLM(CustomLLM):
    """A local model that answers from the stored states of the documents in its prompt.

    Documents are recognised by their text wherever they stand in the prompt; ``KVRagRetriever`` and
    ``KVModePostprocessor`` say in which mode each is to be used. What is not in the store is read as usual. The model is
    loaded when it is first needed, and shared by all objects of the same model and store. It calls no tools.

    LlamaIndex cuts the context with a tokenizer of its own; a document that is cut in the middle is no longer recognised.
    So give it the model's: ``Settings.tokenizer = llm.tokenizer_fn``.

    Settings from ``mode`` on can be given for one call as well: ``llm.complete(…, temperature=0.5)``.

    Args:
        model: "bundled:smollm2-135m", a folder or a hub id; not needed with ``engine``.
        store: folder for document states; belongs to one model.
        engine: an engine that is there already.
        device, dtype, system, resident_budget: as in ``Engine.from_pretrained``.
        mode: "compressed", "snapkv" or "full": for documents that no retriever chose a mode for.
        keep, method, repair: as in ``Engine.stream``.
        force: use ``mode`` for all documents, whatever the retriever chose.
        on_missing: what to do when a document's state for the mode was not retained: "prefill" it or "error".
        max_tokens: of the answer; LlamaIndex keeps so much of the context free.
        temperature: 0 for greedy.
        top_p, top_k, repetition_penalty, seed: of sampling.
        stop: strings that end the answer.
        **settings: LlamaIndex's own: ``callback_manager``, ``system_prompt``, ``messages_to_prompt``, …

    Raises:
        InvalidSetting: a setting out of range or unknown; no model, or two.

    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model: str | None = None
    store: str = "./kv"
    device: str = "auto"
    dtype: str = "auto"
    system: str | None = None
    resident_budget: int | None = None
    mode: str = "compressed"
    keep: float | None = None
    method: str | None = None
    repair: float = REPAIR
    force: bool = False
    on_missing: str = "prefill"
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None

    _lazy: LazyEngine = PrivateAttr()

    def __init__(
        self,
        model: str | Path | None = None,
        store: str | Path = "./kv",
        *,
        engine: Engine | None = None,
        **settings: Any,
    ) -> None:
        known = set(type(self).model_fields)
        unknown = sorted(set(settings) - known)
        if unknown:
            raise InvalidSetting(f"unknown setting {', '.join(unknown)}; KVRagLLM knows {', '.join(sorted(known))}")
        if (engine is None) == (model is None):
            raise InvalidSetting(
                f"give one of model and engine, got model={model!r} and engine={engine!r}: "
                "model='bundled:smollm2-135m', a folder or a hub id, or engine=Engine(…)"
            )
        if isinstance(settings.get("stop"), str):
            settings["stop"] = [settings["stop"]]
        # Checked here: an error raised in a validator would reach the caller as pydantic's.
        _check({name: value for name, value in settings.items() if name in _PER_CALL and value is not None})
        super().__init__(model=None if model is None else str(model), store=str(store), **settings)
        if engine is not None:
            self._lazy = LazyEngine(engine)
        else:
            self._lazy = shared_engine(
                str(model), self.store, device=self.device, dtype=self.dtype, system=self.system,
                resident_budget=self.resident_budget,
            )  # fmt: skip

    @classmethod
    def class_name(cls) -> str:
        return "KVRagLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Loads the model: only it knows its context."""
        return LLMMetadata(
            context_window=self.load().model.context,
            num_output=self.max_tokens,
            is_chat_model=True,
            is_function_calling_model=False,
            model_name=self._model_name,
        )

    @property
    def _model_name(self) -> str:
        return self.model or "kv_rag engine"

    def to_payload(self) -> dict[str, Any]:
        """What events say about this LLM; unlike the inherited one it does not load the model."""
        shown = ("store", "mode", "keep", "max_tokens", "temperature")
        return {
            "class_name": self.class_name(),
            "model_name": self._model_name,
            **{name: getattr(self, name) for name in shown},
        }

    def load(self) -> Engine:
        """The engine; loads the model if that has not happened yet.

        Raises:
            ModelNotFound, UnsupportedModel, StoreError, StoreMismatch: from opening it.

        """
        return self._lazy.get()

    @property
    def tokenizer_fn(self) -> Callable[[str], list[int]]:
        """For ``Settings.tokenizer``: the model's tokens of a text. Loads the model when it is first called."""
        return self._token_ids

    def _token_ids(self, text: str) -> list[int]:
        ids: list[int] = self.load().model.encode(strip_references(text), template=False).tolist()
        return ids

    def ingest_nodes(self, nodes: Iterable[BaseNode | str], *, progress: bool = True, **settings: Any) -> list[Ingested]:
        """Reads nodes (or texts) once and stores their states, so that later answers need not read them.

        Args:
            nodes: as a splitter or an index has them.
            progress: show a progress bar.
            **settings: ``method``, ``keep``, ``budget``, ``allocation``, ``retain``: as in ``Engine.ingest``.

        """
        choice = Choice(self.mode, self.keep, self.method)
        return ingest_nodes(self.load(), nodes, choice, progress=progress, **settings)

    # --- answers ---

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answers ``prompt``; ``formatted`` says that the chat template has been applied already."""
        with self._start_completion(prompt, formatted, kwargs) as stream:
            return _completion(stream.answer)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> Generator[CompletionResponse, None, None]:
        """As ``complete``, piece by piece; ``raw`` comes with the last piece."""
        return _growing(self._start_completion(prompt, formatted, kwargs), _completion)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The next turn after ``messages``."""
        with self._start_chat(messages, kwargs) as stream:
            return _chat(stream.answer)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generator[ChatResponse, None, None]:
        """As ``chat``, piece by piece; ``raw`` comes with the last piece."""
        return _growing(self._start_chat(messages, kwargs), _chat)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As ``complete``, in a thread; cancelling stops it after the token that is being made."""
        return _completion(await _answer(partial(self._start_completion, prompt, formatted, kwargs)))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncGenerator[CompletionResponse, None]:
        """As ``stream_complete``, in a thread."""
        return _growing_in_thread(partial(self._start_completion, prompt, formatted, kwargs), _completion)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As ``chat``, in a thread; cancelling stops it after the token that is being made."""
        return _chat(await _answer(partial(self._start_chat, messages, kwargs)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        """As ``stream_chat``, in a thread."""
        return _growing_in_thread(partial(self._start_chat, messages, kwargs), _chat)

    # What query engines call. They take a ValueError for an answer that could not be parsed: see AnswerFailed.

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        with not_swallowed():
            return super().predict(prompt, **prompt_args)

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        with not_swallowed():
            await self._loaded()
            return await super().apredict(prompt, **prompt_args)

    def stream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenGen:
        with not_swallowed():
            return super().stream(prompt, **prompt_args)

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        await self._loaded()
        return _tokens_not_swallowed(await super().astream(prompt, **prompt_args))

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        with not_swallowed():
            output: Model = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return output

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        with not_swallowed():
            await self._loaded()
            output: Model = await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return output

    async def _loaded(self) -> None:
        """Loads the model in a thread: LlamaIndex asks for ``metadata`` in the event loop."""
        await asyncio.to_thread(self.load)

    def _start_completion(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> AnswerStream:
        options = self._options(kwargs)
        own = self.completion_to_prompt
        if own is not None and own is not default_completion_to_prompt and not formatted:
            prompt, formatted = own(prompt), True
        return self.load().stream_complete(prompt, formatted=formatted, **options)

    def _start_chat(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> AnswerStream:
        options = self._options(kwargs)
        own = self.messages_to_prompt
        if own is not None and own is not generic_messages_to_prompt:
            return self.load().stream_complete(own(messages), formatted=True, **options)
        turns = turns_of(messages)
        engine = self.load()
        return engine.stream_chat(acceptable(engine, turns), **options)

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Settings of the constructor, those of this call over them, in the engine's words."""
        unknown = sorted(set(kwargs) - set(_PER_CALL))
        if unknown:
            raise InvalidSetting(
                f"unknown setting {', '.join(unknown)} for one call; a call knows {', '.join(sorted(_PER_CALL))}"
            )
        usual = {name: getattr(self, name) for name in (*GENERATION, *ANSWERING)}
        given = {name: value for name, value in kwargs.items() if value is not None}
        if given.get("mode", self.mode) != self.mode:  # keep and method belong to the constructor's mode
            usual = {**usual, "keep": None, "method": None}
        return _engine_names({name: value for name, value in {**usual, **given}.items() if value is not None})


def _check(settings: dict[str, Any]) -> None:
    """Raises InvalidSetting where a setting of answers is out of range."""
    Choice(settings.get("mode", "compressed"), settings.get("keep"), settings.get("method"))
    repair, on_missing = settings.get("repair", REPAIR), settings.get("on_missing", "prefill")
    if not isinstance(repair, (int, float)) or not 0 <= repair <= 1:
        raise InvalidSetting(f"repair must be a fraction in [0, 1], got {repair!r}")
    if on_missing not in ON_MISSING:
        raise InvalidSetting(f"on_missing must be one of {', '.join(ON_MISSING)}, got {on_missing!r}")
    Generation(**_engine_names({name: value for name, value in settings.items() if name in GENERATION}))


def _engine_names(settings: dict[str, Any]) -> dict[str, Any]:
    return {"max_new_tokens" if name == "max_tokens" else name: value for name, value in settings.items()}


# --- from the engine's answers to LlamaIndex's ---

Response = TypeVar("Response")
Build = Callable[["str | Answer", str], Response]  # from the text so far, or the finished answer, and the new piece


def _growing(stream: AnswerStream, build: Build[Response]) -> Generator[Response, None, None]:
    text = ""
    with stream:
        for piece in stream:
            text += piece
            yield build(text, piece)
        yield build(stream.answer, "")


async def _growing_in_thread(
    start: Callable[[], AnswerStream], build: Build[Response]
) -> AsyncGenerator[Response, None]:
    text = ""
    async with aclosing(in_thread(start)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Answer):
                yield build(piece, "")
            else:
                text += piece
                yield build(text, piece)


async def _tokens_not_swallowed(tokens: TokenAsyncGen) -> AsyncGenerator[str, None]:
    with not_swallowed():
        async for token in tokens:
            yield token


async def _answer(start: Callable[[], AnswerStream]) -> Answer:
    async with aclosing(in_thread(start)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Answer):
                return piece
    raise AssertionError("a stream ends in an answer")


def _completion(answer: str | Answer, delta: str | None = None) -> CompletionResponse:
    return CompletionResponse(text=str(answer), delta=delta, raw=_raw(answer))


def _chat(answer: str | Answer, delta: str | None = None) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=str(answer))
    return ChatResponse(message=message, delta=delta, raw=_raw(answer))


def _raw(answer: str | Answer) -> dict[str, Any] | None:
    """The answer's figures, and under "usage" those that LlamaIndex's token counter looks for."""
    if isinstance(answer, str):
        return None
    figures = answer.metadata.as_dict()
    usage = {
        "prompt_tokens": answer.metadata.prompt_tokens,
        "completion_tokens": answer.metadata.generated_tokens,
        "total_tokens": answer.metadata.prompt_tokens + answer.metadata.generated_tokens,
    }
    return {**figures, "usage": usage}
