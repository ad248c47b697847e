"""LlamaIndex's nodes: ingesting them, and copies of them that carry a choice to the model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.base.llms.types import BaseContentBlock, TextBlock
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, ImageNode, IndexNode, MetadataMode, Node, NodeWithScore, TextNode

from kv_rag import Choice, Document, Engine, Ingested, with_reference
from kv_rag.errors import EmptyInput, InvalidSetting, KVRagError, StateMissing
from kv_rag.prompt import strip_leading_reference

logger = logging.getLogger(__name__)

ON_MISS = ("ingest", "prefill", "error")
NAMES = ("title", "file_name", "source")  # metadata that names a document


class ReferencedNode(TextNode):
    """A text node that tells the model how to use its document's state.

    Only what LlamaIndex hands to a model (``MetadataMode.LLM``) carries the reference; ``text``, embeddings, citations and
    evaluators see clean text. It is a plain TextNode once it is stored.
    """

    _choice: Choice = PrivateAttr(default_factory=Choice)

    @classmethod
    def of(cls, node: BaseNode, choice: Choice) -> ReferencedNode:
        """A copy of ``node``."""
        shared = {name: getattr(node, name) for name in TextNode.model_fields if hasattr(node, name)}
        copy = cls(**{**shared, "text": text_of(node), "metadata": dict(node.metadata)})
        copy._choice = choice
        return copy

    @property
    def choice(self) -> Choice:
        return self._choice

    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
        if metadata_mode != MetadataMode.LLM or not self.text.strip():
            return super().get_content(metadata_mode)
        # The reference has to stand right before the text: after the metadata that LlamaIndex puts in front.
        content = _with_reference(self.text, self._choice)
        metadata = self.get_metadata_str(metadata_mode).strip()
        return self.text_template.format(content=content, metadata_str=metadata).strip() if metadata else content

    def get_content_blocks(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> list[BaseContentBlock]:
        if metadata_mode != MetadataMode.LLM or not self.text.strip():
            return super().get_content_blocks(metadata_mode)
        content = TextBlock(text=_with_reference(self.text, self._choice))
        return [*self.get_metadata_content_blocks(metadata_mode), content]


def _with_reference(text: str, choice: Choice) -> str:
    """``text`` with its reference between the white space it begins with, which is no part of a document, and the rest."""
    clean = text.strip()
    begin = text.index(clean)
    return text[:begin] + with_reference(clean, choice) + text[begin + len(clean) :]


def text_of(node: BaseNode) -> str:
    """The node's clean text."""
    return strip_leading_reference(node.get_content(metadata_mode=MetadataMode.NONE))


def document_of(node: BaseNode) -> Document:
    """kv_rag's document, named by the node's title, file name or source.

    Raises:
        EmptyInput: the node has no text.

    """
    name = next((str(node.metadata[key]) for key in NAMES if node.metadata.get(key)), None)
    text = text_of(node)
    if not text.strip():
        raise EmptyInput(
            f"node {node.node_id!r} (metadata {node.metadata}) has no text; drop it before it gets here, for example with a "
            "node postprocessor"
        )
    return Document(text, name)


def ingest_nodes(
    engine: Engine, nodes: Iterable[BaseNode | str], choice: Choice, *, progress: bool, **settings: Any
) -> list[Ingested]:
    """Ingests ``nodes``; method and keep are those of ``choice`` where ``settings`` has none."""
    documents = [Document(node) if isinstance(node, str) else document_of(node) for node in nodes]
    return _ingest(engine, documents, choice, progress=progress, **settings)


def _ingest(
    engine: Engine, documents: list[Document], choice: Choice, *, progress: bool, **settings: Any
) -> list[Ingested]:
    usual = {"method": choice.method, "keep": choice.keep} if choice.mode == "compressed" else {}
    if settings.get("budget") is not None:
        usual.pop("keep", None)
    given = {name: value for name, value in {**usual, **settings}.items() if value is not None}
    return engine.ingest(documents, progress=progress, **given)


def miss_setting(on_miss: str | None, has_model: bool) -> str:
    """``on_miss`` checked, or its default: "ingest" where there is a model to do it, else "prefill".

    Raises:
        InvalidSetting: not one of ON_MISS, or one that needs a model.

    """
    setting = on_miss or ("ingest" if has_model else "prefill")
    if setting not in ON_MISS:
        raise InvalidSetting(f"on_miss must be one of {', '.join(ON_MISS)}, got {on_miss!r}")
    if setting != "prefill" and not has_model:
        raise InvalidSetting(f"on_miss={setting!r} needs the LLM's store: pass llm=KVRagLLM(…)")
    return setting


def referenced(
    nodes: Sequence[NodeWithScore], choice: Choice, on_miss: str, engine: Engine | None
) -> list[NodeWithScore]:
    """Copies of ``nodes`` that carry ``choice`` to the model; the originals are not changed.

    Index nodes and nodes with images, sound or video stand for more than their text and are handed on as they are.

    Args:
        nodes: as retrieved.
        choice: how the model is to use them.
        on_miss: what to do with documents whose state is not in the store: "ingest" them now, "error", or "prefill":
            leave it to the model, which reads them as any other text.
        engine: where states are; None for "prefill".

    Raises:
        EmptyInput: a node without text.
        StateMissing: with "error".

    """
    documents = [document_of(found.node) for found in nodes if _is_text(found.node)]
    if engine is not None and on_miss != "prefill":
        missing = [document for document in documents if not engine.serves(document.id, choice)]
        if missing and on_miss == "error":
            raise StateMissing(
                f"document {missing[0].name or missing[0].id!r} has no state in the store for mode={choice.mode!r}"
                f"{'' if choice.keep is None else f', keep={choice.keep:g}'}; ingest it with KVRagIngestion, or use "
                "on_miss='ingest' or 'prefill'"
            )
        if missing:
            # No more than the mode needs: a compressed state shrinks nothing while the full one lies beside it.
            retain = "compressed" if choice.mode == "compressed" else "full"
            _ingest(engine, missing, choice, progress=False, retain=retain)
    return [NodeWithScore(node=_copy(found.node, choice), score=found.score) for found in nodes]


def prefetch(engine: Engine, nodes: Sequence[NodeWithScore], choice: Choice) -> threading.Thread:
    """Starts reading the states of ``nodes`` from disk, while LlamaIndex still builds the prompt."""
    ids = [document_of(found.node).id for found in nodes if _is_text(found.node)]
    thread = threading.Thread(target=_read, args=(engine, ids, choice), name="kv_rag prefetch", daemon=True)
    thread.start()
    return thread


def _read(engine: Engine, ids: list[str], choice: Choice) -> None:
    try:
        engine.prefetch(ids, choice)
    except KVRagError:  # what is missing or damaged is the question's business, which says so or reads the text
        logger.debug("a state could not be read ahead", exc_info=True)


def _copy(node: BaseNode, choice: Choice) -> BaseNode:
    return ReferencedNode.of(node, choice) if _is_text(node) else node.model_copy()


def _is_text(node: BaseNode) -> bool:
    if isinstance(node, Node):
        return not (node.image_resource or node.audio_resource or node.video_resource)
    return isinstance(node, TextNode) and not isinstance(node, (IndexNode, ImageNode))
