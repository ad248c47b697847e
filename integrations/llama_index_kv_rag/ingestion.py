"""Reading documents ahead of time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import ConfigDict, PrivateAttr
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, TransformComponent

from kv_rag import Choice, Ingested
from kv_rag.errors import EmptyInput
from llama_index_kv_rag.llm import KVRagLLM
from llama_index_kv_rag.nodes import ingest_nodes

logger = logging.getLogger(__name__)


class KVRagIngestion(TransformComponent):
    """Stores the state of every node that passes through an ``IngestionPipeline``; the nodes go on unchanged.

    Put it after the splitter: what is ingested has to be the text that is retrieved later. For an index that is there
    already: ``KVRagIngestion(llm=llm).ingest_index(index)``.

    Args:
        llm: the LLM whose store is meant.
        method, keep, budget, allocation, retain: as in ``Engine.ingest``; keep and method default to those of ``llm``.
        progress: show a progress bar.

    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    llm: KVRagLLM
    method: str | None = None
    keep: float | None = None
    budget: int | None = None
    allocation: str | None = None
    retain: str = "both"
    progress: bool = True

    _ingested: list[Ingested] = PrivateAttr(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "KVRagIngestion"

    @property
    def ingested(self) -> list[Ingested]:
        """What the last call came to: tokens, pairs and ``bytes_on_disk`` of every document."""
        return list(self._ingested)

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        self._ingested = ingest_nodes(
            self.llm.load(), nodes, Choice(self.llm.mode, self.llm.keep, self.llm.method), progress=self.progress,
            method=self.method, keep=self.keep, budget=self.budget, allocation=self.allocation, retain=self.retain,
        )  # fmt: skip
        size = sum(one.bytes_on_disk for one in self._ingested)
        new = sum(one.new for one in self._ingested)
        logger.info("%d documents, %d of them new, %d bytes on disk", len(self._ingested), new, size)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def ingest_index(self, index: BaseIndex[Any]) -> list[Ingested]:
        """Ingests all nodes of ``index``.

        Raises:
            EmptyInput: the index does not hold its nodes, as with some vector stores.

        """
        nodes = list(index.docstore.docs.values())
        if not nodes:
            raise EmptyInput(
                "the index's document store is empty: its vector store keeps the nodes; pass them yourself, "
                "KVRagIngestion(llm=llm)(nodes)"
            )
        self(nodes)
        return self.ingested
