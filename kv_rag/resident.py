"""States held in memory between questions: least recently used first out, within a budget of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from kv_rag.document import Compression, DocumentCache
from kv_rag.errors import InvalidSetting

Key = tuple[str, Compression]


class ResidentStates:
    """Document states in memory, keyed by document id and compression. Safe for many threads.

    Args:
        budget: bytes held at most; a state that does not fit beside the pinned ones is used and not held. None for no limit.

    """

    def __init__(self, budget: int | None) -> None:
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise InvalidSetting(f"resident_budget must be a number of bytes, or None for no limit, got {budget!r}")
        self.budget = budget
        self._states: OrderedDict[Key, DocumentCache] = OrderedDict()
        self._pinned: set[Key] = set()
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
            self._hold(state)

    def pin(self, state: DocumentCache) -> None:
        """Holds a state until it is unpinned or dropped.

        Raises:
            InvalidSetting: it does not fit the budget beside what is pinned already.

        """
        key = (state.document_id, state.compression)
        with self._lock:
            pinned = sum(self._states[other].nbytes for other in self._pinned if other != key)
            if self.budget is not None and pinned + state.nbytes > self.budget:
                raise InvalidSetting(
                    f"pinning document {state.document_id} takes {state.nbytes:,} bytes beside {pinned:,} pinned ones, "
                    f"resident_budget is {self.budget:,}; raise it, or unpin another document"
                )
            self._pinned.add(key)
            self._hold(state)

    def unpin(self, document_id: str) -> None:
        with self._lock:
            self._pinned = {key for key in self._pinned if key[0] != document_id}

    def drop(self, document_id: str, compression: Compression | None = None) -> None:
        with self._lock:
            for key in list(self._states):
                if key[0] == document_id and compression in (None, key[1]):
                    del self._states[key]
                    self._pinned.discard(key)

    def nbytes(self, document_id: str | None = None) -> int:
        """Bytes held, of one document or of all."""
        with self._lock:
            return sum(state.nbytes for (owner, _), state in self._states.items() if document_id in (None, owner))

    def by_state(self) -> dict[Key, int]:
        """Bytes of every state held."""
        with self._lock:
            return {key: state.nbytes for key, state in self._states.items()}

    def clear(self) -> None:
        with self._lock:
            self._states.clear()
            self._pinned.clear()

    def _hold(self, state: DocumentCache) -> None:
        key = (state.document_id, state.compression)
        self._states[key] = state
        self._states.move_to_end(key)
        if self.budget is None:
            return
        over = sum(held.nbytes for held in self._states.values()) - self.budget
        for other in list(self._states):  # the one used least recently first
            if over <= 0:
                return
            if other not in self._pinned:
                over -= self._states.pop(other).nbytes
