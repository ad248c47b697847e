"""Document states on disk."""

from kv_rag.store.index import TextShape
from kv_rag.store.local import DocumentRecord, LocalStore, Problem, StateRecord

__all__ = ["DocumentRecord", "LocalStore", "Problem", "StateRecord", "TextShape"]
