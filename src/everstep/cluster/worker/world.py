"""The replica's ``torch.distributed`` world while it is made: nobody in it waits for a rank that is gone.

Once torch waits in a store for what a dead rank never wrote, nothing interrupts it. So it waits in one that looks, meanwhile, whether the
launcher has called the formation off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from everstep.cluster.processes import out_of_memory
from everstep.engine.groups import broken_replica
from everstep.errors import EverstepError, ReplicaBroken, first_line

_LOOK_S = 0.005
CALLED_OFF_S = 5.0  # how long an error that may be a peer's death waits for the launcher to say that one is gone


class WatchedStore(dist.Store):
    """``store``, in which whoever waits calls ``look`` again and again: what it raises ends the wait. To be referenced as long as a world
    uses it: torch keeps the C++ half alone."""

    def __init__(self, store: dist.Store, look: Callable[[], None]):
        super().__init__()
        self._store: Any = store  # torch's stubs lack half of it
        self._look = look

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        limit = timeout or self._store.timeout
        end = time.monotonic() + limit.total_seconds()
        while not self._store.check(list(keys)):
            self._look()
            if time.monotonic() > end:
                raise dist.DistStoreError(f"wait timeout after {limit.total_seconds():g} s, keys: {', '.join(keys)}")
            time.sleep(_LOOK_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:  # type: ignore[override]
        self.wait(keys)
        return self._store.multi_get(list(keys))

    @property
    def timeout(self) -> timedelta:  # type: ignore[override]
        return self._store.timeout

    def set_timeout(self, timeout: timedelta) -> None:  # type: ignore[override]
        self._store.set_timeout(timeout)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:  # type: ignore[override]
        return self._store.check(list(keys))

    def append(self, key: str, value: Any) -> None:
        self._store.append(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:  # type: ignore[override]
        self._store.multi_set(list(keys), list(values))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def clone(self) -> dist.Store:
        return self._store.clone()


def explained(error: Exception, replica: int, look: Callable[[], None]) -> Exception:
    """What an error while the replica formed means: ReplicaBroken if a peer is gone, as its text or, a moment later, the launcher says
    (``look`` raises that); else the error itself."""
    if isinstance(error, EverstepError) or out_of_memory(error):
        return error
    if broken := broken_replica(error):
        return broken
    if isinstance(error, RuntimeError | ValueError):  # what torch.distributed raises when a peer closed its connection
        end = time.monotonic() + CALLED_OFF_S
        while time.monotonic() < end:
            try:
                look()
            except ReplicaBroken:
                return ReplicaBroken(f"replica {replica}: {first_line(error)} (while it formed)")
            except EverstepError as lost:
                return lost
            time.sleep(0.01)
    return error
