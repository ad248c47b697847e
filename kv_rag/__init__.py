"""Read documents once, keep their KV state, answer every later question from it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_rag.answer import Answer, AnswerMetadata, AnswerStream, Prefilled
    from kv_rag.document import Compression, Document, DocumentCache
    from kv_rag.engine import Engine, Ingested
    from kv_rag.errors import KVRagError
    from kv_rag.generation import Generation
    from kv_rag.kept import KeptTokens
    from kv_rag.memory import MemoryReport
    from kv_rag.prompt import Choice, strip_references, with_reference

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AnswerMetadata",
    "AnswerStream",
    "Choice",
    "Compression",
    "Document",
    "DocumentCache",
    "Engine",
    "Generation",
    "Ingested",
    "KVRagError",
    "KeptTokens",
    "MemoryReport",
    "Prefilled",
    "strip_references",
    "with_reference",
]

_MODULES = {
    "Answer": "answer",
    "AnswerMetadata": "answer",
    "AnswerStream": "answer",
    "Prefilled": "answer",
    "Compression": "document",
    "Document": "document",
    "DocumentCache": "document",
    "Engine": "engine",
    "Ingested": "engine",
    "KVRagError": "errors",
    "Generation": "generation",
    "KeptTokens": "kept",
    "MemoryReport": "memory",
    "Choice": "prompt",
    "strip_references": "prompt",
    "with_reference": "prompt",
}


def __getattr__(name: str) -> Any:
    """Public names on first use: torch takes seconds to import, and ``kv-rag --help`` does not need it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
