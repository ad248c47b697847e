"""Document states on disk: written once, checked when read, never half there."""

from kv_rag.store.local import LocalStore
from kv_rag.store.records import ANCHOR, DocumentRecord, Problem, StateRecord, TextShape

__all__ = ["ANCHOR", "DocumentRecord", "LocalStore", "Problem", "StateRecord", "TextShape"]
