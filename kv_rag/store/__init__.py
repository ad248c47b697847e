"""Document states on disk: written once, checked when read, never half there."""

from kv_rag.store.absent import AbsentStore
from kv_rag.store.index import LEAST_USEFUL, LRU
from kv_rag.store.local import LocalStore
from kv_rag.store.opening import Store, open_store
from kv_rag.store.records import ANCHOR, DocumentRecord, Problem, StateRecord, TextShape
from kv_rag.store.remote import RemoteStore

__all__ = [
    "ANCHOR",
    "LEAST_USEFUL",
    "LRU",
    "AbsentStore",
    "DocumentRecord",
    "LocalStore",
    "Problem",
    "RemoteStore",
    "StateRecord",
    "Store",
    "TextShape",
    "open_store",
]
