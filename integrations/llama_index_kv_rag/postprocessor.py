"""The mode as a node postprocessor."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import ConfigDict, Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from kv_rag import Choice
from kv_rag.errors import InvalidSetting
from llama_index_kv_rag.choice import chosen
from llama_index_kv_rag.llm import KVRagLLM
from llama_index_kv_rag.nodes import miss_setting, prefetch, referenced


class KVModePostprocessor(BaseNodePostprocessor):
    """Hands nodes on as copies that tell ``KVRagLLM`` how to use their states. Put it last.

    ``with kv_mode(…)`` and ``KVQueryBundle`` override the settings for one query.

    Args:
        mode: "compressed", "snapkv" or "full".
        keep: compressed: picks among the stored states; snapkv: fraction of the pairs kept for the question.
        method: compressed: picks among the stored states.
        llm: the LLM whose store is meant; needed to ingest.
        on_miss: what to do with documents whose state is not in the store: "ingest" them when they are first retrieved
            (default with an ``llm``), "prefill" (default without): the model reads them as any text; or "error".
        prefetch: read the states from disk while LlamaIndex still builds the prompt; needs an ``llm``.

    Raises:
        InvalidSetting: unknown mode, keep out of range, ``on_miss`` or ``prefetch`` that needs an ``llm``.

    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    mode: str = "compressed"
    keep: float | None = None
    method: str | None = None
    llm: KVRagLLM | None = Field(default=None, exclude=True)
    on_miss: str | None = None
    prefetch: bool = False

    def __init__(self, mode: str = "compressed", keep: float | None = None, **settings: Any) -> None:
        # Checked here: an error raised in a validator would reach the caller as pydantic's.
        Choice(mode, keep, settings.get("method"))
        settings["on_miss"] = miss_setting(settings.get("on_miss"), settings.get("llm") is not None)
        if settings.get("prefetch") and settings.get("llm") is None:
            raise InvalidSetting("prefetch=True needs the LLM's store: pass llm=KVRagLLM(…)")
        super().__init__(**{"mode": mode, "keep": keep, **settings})

    @classmethod
    def class_name(cls) -> str:
        return "KVModePostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        choice = chosen(Choice(self.mode, self.keep, self.method), query_bundle)
        needed = self.on_miss != "prefill" or self.prefetch
        engine = self.llm.load() if self.llm is not None and needed else None
        found = referenced(nodes, choice, str(self.on_miss), engine)
        if engine is not None and self.prefetch:
            prefetch(engine, found, choice)
        return found
