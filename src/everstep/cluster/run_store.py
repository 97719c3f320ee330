"""The run's store, through which ranks find each other: the controller's, and after a takeover the next one's."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch.distributed as dist


class RunStore:
    """Answers questions at once, over one connection; whoever waits in the store needs one of its own (``open``)."""

    def __init__(self, address: tuple[str, int], timeout_s: float):
        self._address, self._timeout_s = address, timeout_s
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
        return bool(self._now().check(keys))

    def get(self, key: str) -> bytes:
        return bytes(self._now().get(key))

    def set(self, key: str, value: str) -> None:
        self._now().set(key, value)

    def _now(self) -> dist.Store:
        client = self._client
        if client is None:
            client = self._client = self.open()
        return client
