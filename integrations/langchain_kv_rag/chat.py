"""The chat model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from kv_rag import Answer, AnswerMetadata, AnswerStream, Choice, Engine, Generation, Ingested, strip_references
from kv_rag.engine import REPAIR
from kv_rag.errors import InvalidSetting
from kv_rag.lazy import LazyEngine, shared_engine
from kv_rag.threads import in_thread
from kv_rag.turns import acceptable
from langchain_kv_rag.choice import SETTINGS, configured
from langchain_kv_rag.documents import ingest_documents
from langchain_kv_rag.errors import langchain_errors
from langchain_kv_rag.messages import turns_of

Config = RunnableConfig | None
Configs = RunnableConfig | list[RunnableConfig] | None

PROVIDER = "kv_rag"
GENERATION = ("temperature", "top_p", "top_k", "repetition_penalty", "seed", "max_tokens", "stop")
ANSWERING = ("mode", "keep", "method", "repair", "on_missing", "force")
_PER_CALL = {*GENERATION, *ANSWERING, *SETTINGS, "logits_processor", "stopping_criteria"}
_NO_NETWORK = {"timeout", "max_retries"}  # LangChain's standard settings that mean nothing for a local model


class ChatKVRag(BaseChatModel):
    """A local chat model that answers from the stored states of the documents in its prompt.

    Documents are recognised by their text wherever they stand in the messages; ``KVRagRetriever`` and ``KVModeCompressor``
    say in which mode each is to be used. What is not in the store is read as usual. The model is loaded when it is first
    needed, and shared by all chat models of the same model and store. It calls no tools.

    Every setting below the first five can be given for one call as well (``invoke(…, temperature=0.5)``, ``bind``), and
    ``kv_mode``, ``kv_keep`` and ``kv_method`` in ``config["configurable"]``.

    Args:
        model: "bundled:smollm2-135m", a folder or a hub id; not needed with ``engine``.
        store: folder for document states; belongs to one model.
        engine: an engine that is there already.
        device, dtype, system, resident_budget: as in ``Engine.from_pretrained``.
        mode: "compressed", "snapkv" or "full": for documents that no retriever chose a mode for.
        keep, method, repair: as in ``Engine.stream``.
        force: use ``mode`` for all documents, whatever the retriever chose.
        on_missing: what to do when a document's state for the mode was not retained: "prefill" it or "error".
        temperature: 0 for greedy.
        top_p, top_k, repetition_penalty, seed: of sampling.
        max_tokens: of the answer; None for the engine's default.
        stop: strings that end the answer.
        streaming: whether ``invoke`` takes the streaming path.

    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str | Path | None = None
    store: str | Path = "./kv"
    engine: Engine | None = Field(default=None, exclude=True, repr=False)
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
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] | str | None = None
    streaming: bool = False

    _lazy: LazyEngine = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _known_settings(cls, settings: Any) -> Any:
        """LangChain drops what it does not know in silence; a misspelt setting should be told."""
        unknown = sorted(set(settings) - set(cls.model_fields) - _NO_NETWORK)
        if unknown:
            raise InvalidSetting(f"unknown setting {', '.join(unknown)}; ChatKVRag knows {', '.join(cls.model_fields)}")
        return settings

    @model_validator(mode="after")
    def _check(self) -> ChatKVRag:
        Choice(self.mode, self.keep, self.method)
        Generation(**_engine_names(_given({name: getattr(self, name) for name in GENERATION})))
        if self.engine is not None:
            if self.model is not None:
                raise InvalidSetting(f"give either model or engine, got model={str(self.model)!r} and an engine")
            self._lazy = LazyEngine(self.engine)
        elif self.model is not None:
            self._lazy = shared_engine(
                self.model, self.store, device=self.device, dtype=self.dtype, system=self.system,
                resident_budget=self.resident_budget,
            )  # fmt: skip
        else:
            raise InvalidSetting("no model: pass model='bundled:smollm2-135m', a folder or a hub id, or engine=Engine(…)")
        return self

    def load(self) -> Engine:
        """The engine; loads the model if that has not happened yet.

        Raises:
            ModelNotFound, UnsupportedModel, StoreError, StoreMismatch: from opening it.

        """
        with langchain_errors():
            return self._lazy.get()

    def ingest_documents(
        self, documents: Iterable[Document | str], *, progress: bool = True, **settings: Any
    ) -> list[Ingested]:
        """Reads documents once and stores their states, so that later answers need not read them.

        Args:
            documents: of a splitter, loader or vector store; or texts.
            progress: show a progress bar.
            **settings: ``method``, ``keep``, ``budget``, ``allocation``, ``retain``: as in ``Engine.ingest``.

        """
        with langchain_errors():
            choice = Choice(self.mode, self.keep, self.method)
            return ingest_documents(self.load(), documents, choice, progress=progress, **settings)

    # --- what LangChain asks of a chat model ---

    @property
    def _llm_type(self) -> str:
        return "kv-rag"

    @property
    def model_name(self) -> str:
        """The model's name as it was given; an injected engine's from its config."""
        if self.engine is None:
            return str(self.model)
        config = self.engine.model.model.config
        return str(config.name_or_path or config.model_type)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """LangChain keys its own caches with these. The store stands for the model's weights: it belongs to one model."""
        store = self.store if self.engine is None else self.engine.store.folder
        settings = {name: getattr(self, name) for name in (*ANSWERING, *GENERATION)}
        return {"model_name": self.model_name, "store": str(Path(store).resolve()), "device": self.device,
                "dtype": self.dtype, "system": self.system, **settings}  # fmt: skip

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        stop = stop or ([self.stop] if isinstance(self.stop, str) else self.stop)
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = str(kwargs.get("model") or self.model_name)
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own tokens of ``text``; loads the model."""
        return [int(token) for token in self.load().model.encode(strip_references(text), template=False)]

    # LangChain hands the config on to callbacks only, so what it holds for us goes on as arguments. These are also part
    # of the key of LangChain's own caches.

    def invoke(
        self, input: LanguageModelInput, config: Config = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> AIMessage:
        return super().invoke(input, config, stop=stop, **{**configured(config), **kwargs})

    async def ainvoke(
        self, input: LanguageModelInput, config: Config = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> AIMessage:
        return await super().ainvoke(input, config, stop=stop, **{**configured(config), **kwargs})

    def stream(
        self, input: LanguageModelInput, config: Config = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        return super().stream(input, config, stop=stop, **{**configured(config), **kwargs})

    def astream(
        self, input: LanguageModelInput, config: Config = None, *, stop: list[str] | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        return super().astream(input, config, stop=stop, **{**configured(config), **kwargs})

    def batch(
        self, inputs: list[LanguageModelInput], config: Configs = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[AIMessage]:
        return super().batch(inputs, _one_by_one(config, inputs), return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self, inputs: list[LanguageModelInput], config: Configs = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[AIMessage]:
        return await super().abatch(inputs, _one_by_one(config, inputs), return_exceptions=return_exceptions, **kwargs)

    # --- answers ---

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self._start(messages, stop, kwargs) as stream:
            for piece in stream:
                if run_manager:
                    run_manager.on_llm_new_token(piece, chunk=_chunk(piece))
            return self._result(stream.answer)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with self._start(messages, stop, kwargs) as stream:
            for piece in stream:
                chunk = _chunk(piece)
                if run_manager:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            yield self._last_chunk(stream.answer)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async with aclosing(in_thread(partial(self._start, messages, stop, kwargs))) as pieces:
            async for piece in pieces:
                if isinstance(piece, Answer):
                    return self._result(piece)
                if run_manager:
                    await run_manager.on_llm_new_token(piece, chunk=_chunk(piece))
        raise AssertionError("a stream ends in an answer")

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(in_thread(partial(self._start, messages, stop, kwargs))) as pieces:
            async for piece in pieces:
                chunk = self._last_chunk(piece) if isinstance(piece, Answer) else _chunk(piece)
                if run_manager and isinstance(piece, str):
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk

    def _start(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> AnswerStream:
        with langchain_errors():
            options = self._options(stop, kwargs)
            turns = turns_of(messages)
            engine = self.load()
            return engine.stream_chat(acceptable(engine, turns), **options)

    def _options(self, stop: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Settings of the constructor, those of this call over them, in the engine's words."""
        unknown = sorted(set(kwargs) - _PER_CALL - {"stream"})  # "stream" is LangChain's own
        if unknown:
            raise InvalidSetting(
                f"unknown setting {', '.join(unknown)} for one call; a call knows {', '.join(sorted(_PER_CALL))}"
            )
        usual = {name: getattr(self, name) for name in (*ANSWERING, *GENERATION)}
        configurable = {SETTINGS[name]: value for name, value in kwargs.items() if name in SETTINGS}
        direct = {name: value for name, value in kwargs.items() if name not in SETTINGS and name != "stream"}
        return _engine_names({**_given(usual), **_given(configurable), **_given(direct), **_given({"stop": stop})})

    def _result(self, answer: Answer) -> ChatResult:
        message = AIMessage(
            content=answer.text,
            usage_metadata=_usage(answer.metadata),
            response_metadata=_response_metadata(self.model_name, answer.metadata),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _last_chunk(self, answer: Answer) -> ChatGenerationChunk:
        """An empty piece with the figures: chunks are added up, so they may come only once."""
        message = AIMessageChunk(
            content="",
            usage_metadata=_usage(answer.metadata),
            response_metadata=_response_metadata(self.model_name, answer.metadata),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)


def _one_by_one(config: Configs, inputs: list[LanguageModelInput]) -> list[RunnableConfig]:
    """Configs for a batch without concurrency, unless the caller asks for it.

    Forward passes queue for the model anyway; handing it from thread to thread for every token cost a fifth (16 prompts,
    tiny model, one CPU thread).
    """
    return [{"max_concurrency": 1, **each} for each in get_config_list(config, len(inputs))]


def _chunk(piece: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=piece))


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _engine_names(settings: dict[str, Any]) -> dict[str, Any]:
    return {"max_new_tokens" if name == "max_tokens" else name: value for name, value in settings.items()}


def _usage(figures: AnswerMetadata) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=figures.prompt_tokens,
        output_tokens=figures.generated_tokens,
        total_tokens=figures.prompt_tokens + figures.generated_tokens,
        # Of documents only: the prompt's header has a state too; counted, it would hide a miss.
        input_token_details=InputTokenDetails(cache_read=figures.cached_document_tokens),
    )


def _response_metadata(model_name: str, figures: AnswerMetadata) -> dict[str, Any]:
    """Plain values only: they go into caches, traces and JSON."""
    return {
        "model_name": model_name,
        "model_provider": PROVIDER,
        "finish_reason": figures.finish_reason,
        "mode": figures.mode,
        "keep": figures.keep,
        "repair": figures.repair,
        "documents": list(figures.documents),
        "seconds_to_first_token": figures.seconds_to_first_token,
        "seconds_per_token": figures.seconds_per_token,
        "pairs_kept": figures.pairs_kept,
        "pairs_full": figures.pairs_full,
        "resident_bytes": figures.resident_bytes,
        "prefilled": [asdict(stretch) for stretch in figures.prefilled],
    }
