"""The run's store, through which ranks find each other: the controller's, and after a takeover the next one's; or the lighthouse's.

A new one begins empty: everything in it is named by a view's epoch or by a formation, and is of use only while that lasts.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")

_TIMEOUT_S = 60.0


def serve_store(host: str, port: int = 0) -> dist.TCPStore:
    """A store that listens on ``host`` alone: left to itself it would on all interfaces. ``port`` 0: a free one. Raises OSError."""
    listener = socket.create_server((host, port), backlog=256)
    number = listener.getsockname()[1]
    return dist.TCPStore(
        host, number, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_TIMEOUT_S), master_listen_fd=listener.detach()
    )


class RunStore:
    """Answers questions at once, over one connection; whoever waits in the store needs one of its own (``open``).

    ``comes_back``: the one that is gone is replaced at its address (a lighthouse's), and waited for there at most ``timeout_s``.
    """

    def __init__(self, address: tuple[str, int], timeout_s: float, comes_back: bool = False):
        self._address, self._timeout_s, self._comes_back = address, timeout_s, comes_back
        self._client: dist.Store | None = None

    def move(self, address: tuple[str, int]) -> None:
        """The one before ended with its controller."""
        self._address, self._client = address, None

    def open(self) -> dist.Store:
        """A connection of its own: the client serves one call at a time."""
        host, port = self._address
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self._timeout_s))

    @property
    def as_store(self) -> dist.Store:
        """For whoever only checks, gets and sets."""
        return cast(dist.Store, self)

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda store: bool(store.check(keys)))

    def get(self, key: str) -> bytes:
        return self._ask(lambda store: bytes(store.get(key)))

    def set(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        client = self._client
        if client is not None:
            try:
                return question(client)
            except RuntimeError:  # what the client raises when the other end is gone
                if not self._comes_back:
                    raise
        client = self._client = self.open()
        return question(client)
