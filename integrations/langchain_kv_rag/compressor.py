"""The mode as a document compressor: for ``ContextualCompressionRetriever``, or after any retriever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, model_validator

from kv_rag import Choice
from langchain_kv_rag.chat import ChatKVRag
from langchain_kv_rag.choice import chosen, configured
from langchain_kv_rag.documents import miss_setting, referenced
from langchain_kv_rag.errors import langchain_errors


class KVModeCompressor(BaseDocumentCompressor):
    """Hands documents on as copies whose text tells ``ChatKVRag`` how to use their states. Put it last.

    Inside a chain ``config={"configurable": {"kv_mode": …}}`` overrides the mode. ``ContextualCompressionRetriever`` does
    not pass its own config on, so outside of a chain give the compressor its mode, or use ``KVRagRetriever``.

    Args:
        mode: "compressed", "snapkv" or "full".
        keep: compressed: picks among the stored states; snapkv: fraction of the pairs kept for the question.
        method: compressed: picks among the stored states.
        llm: the chat model whose store is meant; needed to ingest.
        on_miss: "ingest" (default with an ``llm``), "prefill" (default without) or "error".

    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    mode: str = "compressed"
    keep: float | None = None
    method: str | None = None
    llm: ChatKVRag | None = None
    on_miss: str | None = None

    @model_validator(mode="after")
    def _check(self) -> KVModeCompressor:
        Choice(self.mode, self.keep, self.method)
        self.on_miss = miss_setting(self.on_miss, self.llm is not None)
        return self

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Copies of ``documents`` with references."""
        return self.refer(documents)

    def refer(self, documents: Sequence[Document], **settings: Any) -> list[Document]:
        """As ``compress_documents``, with ``kv_mode``, ``kv_keep`` and ``kv_method`` for this call."""
        with langchain_errors():
            choice = chosen(Choice(self.mode, self.keep, self.method), {**configured(None), **settings})
            engine = self.llm.load() if self.llm is not None and self.on_miss != "prefill" else None
            return referenced(documents, choice, str(self.on_miss), engine)
