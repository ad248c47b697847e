"""The mode as a retriever setting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config, run_in_executor
from pydantic import ConfigDict, model_validator

from kv_rag import Choice, Ingested
from kv_rag.errors import InvalidSetting
from langchain_kv_rag.chat import ChatKVRag
from langchain_kv_rag.choice import SETTINGS, chosen, configured
from langchain_kv_rag.documents import ingest_documents, miss_setting, referenced
from langchain_kv_rag.errors import langchain_errors


class KVRagRetriever(BaseRetriever):
    """Any retriever, with the mode in which ``ChatKVRag`` is to use what it finds.

    Returns copies of the documents whose ``page_content`` begins with a reference, because that is all of a document that
    reaches the model; ``strip_references`` takes it off again for citations. ``kv_mode``, ``kv_keep`` and ``kv_method``
    override the settings for one call, as arguments of ``invoke`` or in ``config["configurable"]``. Other arguments of
    ``invoke`` go to the base retriever.

    Args:
        base: a retriever, or any runnable from a query to documents.
        llm: the chat model whose store is meant; needed to ingest.
        mode: "compressed", "snapkv" or "full".
        keep: compressed: picks among the stored states; snapkv: fraction of the pairs kept for the question.
        method: compressed: picks among the stored states.
        on_miss: what to do with documents whose state is not in the store: "ingest" them when they are first retrieved
            (default with an ``llm``), "prefill" (default without): the model reads them as any text; or "error".

    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    base: Runnable[Any, Any]
    llm: ChatKVRag | None = None
    mode: str = "compressed"
    keep: float | None = None
    method: str | None = None
    on_miss: str | None = None

    @model_validator(mode="after")
    def _check(self) -> KVRagRetriever:
        Choice(self.mode, self.keep, self.method)
        self.on_miss = miss_setting(self.on_miss, self.llm is not None)
        return self

    def ingest_documents(
        self, documents: Iterable[Document | str], *, progress: bool = True, **settings: Any
    ) -> list[Ingested]:
        """As ``ChatKVRag.ingest_documents``, with this retriever's ``keep`` and ``method``."""
        if self.llm is None:
            raise InvalidSetting("ingesting needs a model: pass llm=ChatKVRag(…) to the retriever")
        choice = Choice(self.mode, self.keep, self.method)
        with langchain_errors():
            return ingest_documents(self.llm.load(), documents, choice, progress=progress, **settings)

    # BaseRetriever keeps the config to itself, so what it holds for us goes on as arguments.

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        return super().invoke(input, config, **_from_config(config, kwargs))

    async def ainvoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        return await super().ainvoke(input, config, **_from_config(config, kwargs))

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        settings, config, rest = _taken_apart(kwargs)
        found = self.base.invoke(query, {**config, "callbacks": run_manager.get_child()}, **rest)
        return self._refer(found, settings)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        settings, config, rest = _taken_apart(kwargs)
        found = await self.base.ainvoke(query, {**config, "callbacks": run_manager.get_child()}, **rest)
        return await run_in_executor(None, self._refer, found, settings)

    def _refer(self, documents: Sequence[Document], settings: dict[str, Any]) -> list[Document]:
        with langchain_errors():
            choice = chosen(Choice(self.mode, self.keep, self.method), settings)
            engine = self.llm.load() if self.llm is not None and self.on_miss != "prefill" else None
            return referenced(documents, choice, str(self.on_miss), engine)


_CONFIGURABLE = "kv_configurable"


def _from_config(config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    configurable = ensure_config(config).get("configurable") or {}
    return {**configured(config), **kwargs, _CONFIGURABLE: configurable}


def _taken_apart(kwargs: dict[str, Any]) -> tuple[dict[str, Any], RunnableConfig, dict[str, Any]]:
    """Our settings, the config for the base retriever, and its other arguments."""
    settings = {name: value for name, value in kwargs.items() if name in SETTINGS}
    rest = {name: value for name, value in kwargs.items() if name not in (*SETTINGS, _CONFIGURABLE)}
    return settings, RunnableConfig(configurable=kwargs.get(_CONFIGURABLE) or {}), rest
