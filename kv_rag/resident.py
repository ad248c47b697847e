"""States held in memory between questions: least recently used first out, within a budget of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from kv_rag.document import Compression, DocumentCache

Key = tuple[str, Compression]


class ResidentStates:
    """Document states in memory, keyed by document id and compression. Safe for many threads.

    Args:
        budget: bytes held at most; a single state larger than that is used and not held. None for no limit.

    """

    def __init__(self, budget: int | None) -> None:
        self._budget = budget
        self._states: OrderedDict[Key, DocumentCache] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, document_id: str, compression: Compression, load: Callable[[], DocumentCache]) -> DocumentCache:
        """The state held, or what ``load`` gives, which is held from then on."""
        key = (document_id, compression)
        with self._lock:
            if key in self._states:
                self._states.move_to_end(key)
                return self._states[key]
        state = load()
        self.hold(state)
        return state

    def hold(self, state: DocumentCache) -> None:
        with self._lock:
            self._states[(state.document_id, state.compression)] = state
            self._states.move_to_end((state.document_id, state.compression))
            while self._budget is not None and self._states and self._nbytes() > self._budget:
                self._states.popitem(last=False)

    def drop(self, document_id: str, compression: Compression | None = None) -> None:
        with self._lock:
            for key in list(self._states):
                if key[0] == document_id and compression in (None, key[1]):
                    del self._states[key]

    def nbytes(self, document_id: str | None = None) -> int:
        """Bytes held, of one document or of all."""
        with self._lock:
            return self._nbytes(document_id)

    def _nbytes(self, document_id: str | None = None) -> int:
        return sum(state.nbytes for (owner, _), state in self._states.items() if document_id in (None, owner))

    def clear(self) -> None:
        with self._lock:
            self._states.clear()
