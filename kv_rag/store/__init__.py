"""Document states on disk: written once, checked when read, never half there."""

from kv_rag.store.local import LocalStore
from kv_rag.store.opening import Store, open_store
from kv_rag.store.records import ANCHOR, DocumentRecord, Problem, StateRecord, TextShape
from kv_rag.store.remote import RemoteStore

__all__ = [
    "ANCHOR",
    "DocumentRecord",
    "LocalStore",
    "Problem",
    "RemoteStore",
    "StateRecord",
    "Store",
    "TextShape",
    "open_store",
]
