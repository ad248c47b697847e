"""Read documents once, keep their KV state, answer every later question from it."""

from kv_rag.answer import Answer, AnswerMetadata, AnswerStream, Prefilled
from kv_rag.document import Compression, Document, DocumentCache
from kv_rag.engine import Engine, Ingested
from kv_rag.errors import KVRagError
from kv_rag.generation import Generation
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
    "MemoryReport",
    "Prefilled",
    "strip_references",
    "with_reference",
]
