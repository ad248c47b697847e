"""The mode as a retriever setting."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_kv_rag.llm import KVRagLLM
from llama_index_kv_rag.postprocessor import KVModePostprocessor


class KVRagRetriever(BaseRetriever):
    """Any retriever, with the mode in which ``KVRagLLM`` is to use what it finds.

    Returns copies of the nodes; what people read of them is unchanged. ``with kv_mode(…)`` and ``KVQueryBundle`` override
    the mode for one query.

    Args:
        base: any retriever.
        llm: the LLM whose store is meant; needed to ingest.
        mode, keep, method, on_miss, prefetch: as in ``KVModePostprocessor``.
        callback_manager: as in every retriever.

    Raises:
        InvalidSetting: as ``KVModePostprocessor``.

    """

    def __init__(
        self,
        base: BaseRetriever,
        *,
        llm: KVRagLLM | None = None,
        mode: str = "compressed",
        keep: float | None = None,
        method: str | None = None,
        on_miss: str | None = None,
        prefetch: bool = False,
        callback_manager: CallbackManager | None = None,
        **options: Any,
    ) -> None:
        self._base = base
        self._mode = KVModePostprocessor(mode, keep, method=method, llm=llm, on_miss=on_miss, prefetch=prefetch)
        super().__init__(callback_manager=callback_manager, **options)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"base": self._base}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._mode.postprocess_nodes(self._base.retrieve(query_bundle), query_bundle)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await self._mode.apostprocess_nodes(await self._base.aretrieve(query_bundle), query_bundle)
