"""The run's store as a rank asks it: questions that are answered at once, over a connection that is opened again when it broke.

The store may come back empty at its address (a lighthouse that was restarted). Everything in it is named by a view's epoch or by a
formation, and is of use only while that lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RunStore:
    """``open_store``: a new connection; raises RuntimeError if there is no store."""

    def __init__(self, open_store: Callable[[], dist.Store]):
        self._open_store = open_store
        self._store: dist.Store | None = None

    def set(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._ask(lambda store: store.get(key))

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda store: bool(store.check(keys)))

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        if self._store is not None:
            try:
                return question(self._store)
            except RuntimeError:  # what the client raises when the other end is gone
                self._store = None
        self._store = self._open_store()
        return question(self._store)
