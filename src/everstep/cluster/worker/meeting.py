"""How the ranks of one replica find each other under torchrun, and notice that one of them was started anew before anybody else can.

Torchrun's store outlives the ranks that it starts, and each machine of a replica counts the starts of its own ranks: a torchrun that was
itself started again counts from 0. So no number that a rank is given tells whom it belongs with. Here every process says hello with a name
that nobody had before; rank 0 proposes the set of those that it read last, each of them agrees, and once all have, that set is a life of
the replica. A process that was said hello by in an earlier life is dead and never agrees; when its successor says hello, another set is proposed.

    KEY/hello/R      name of the process that is rank R now
    KEY/set          names of all ranks, by rank 0
    KEY/SET/R        rank R agrees to be in that set (SET: a digest of it)

From the agreement on, until the lighthouse knows all ranks, each looks whether another one has said hello anew: then the life is over.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from everstep.errors import DeadlineExceeded, first_line

_KEY = "everstep/meeting"
_LOOK_S = 0.05
_WATCH_S = 0.5


class Meeting:
    """``store``: of torchrun; ``open_store()``: a connection of its own. Every rank of the replica makes one, and calls :meth:`agree`."""

    def __init__(self, store: dist.Store, open_store: Callable[[], dist.Store], rank: int, size: int):
        self._store, self._open_store, self._rank, self._size = store, open_store, rank, size
        self._name = secrets.token_hex(8)
        self._names: list[str] = []
        self._over = threading.Event()

    def agree(self, within_s: float) -> str:
        """The name of this life, the same for all its ranks. DeadlineExceeded if not all came."""
        store, end = self._store, time.monotonic() + within_s
        store.set(_hello(self._rank), self._name)
        proposed: list[str] = []
        while True:
            if self._rank == 0 and (names := self._said(store)) and all(names) and names != proposed:
                proposed = names
                store.set(f"{_KEY}/set", " ".join(names))
            if store.check([f"{_KEY}/set"]):
                names = store.get(f"{_KEY}/set").decode().split()
                if len(names) == self._size and names[self._rank] == self._name:
                    life = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]
                    store.set(f"{_KEY}/{life}/{self._rank}", "agrees")
                    if store.check([f"{_KEY}/{life}/{rank}" for rank in range(self._size)]):
                        self._names = names
                        return life
            if time.monotonic() > end:
                raise DeadlineExceeded(f"after {within_s:g} s (recovery.step_timeout_s) the ranks of this replica had not met: {self._missing()}")
            time.sleep(_LOOK_S)

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call ``on_end(cause)``, on a thread of its own, once another process is in the place of one of this life; until :meth:`close`."""
        threading.Thread(target=self._watch, args=(on_end,), name="meeting-watch", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _watch(self, on_end: Callable[[str], None]) -> None:
        try:
            store = self._open_store()
            while not self._over.wait(_WATCH_S):
                changed = [rank for rank, (now, then) in enumerate(zip(self._said(store), self._names, strict=True)) if now != then]
                if changed and not self._over.is_set():
                    return on_end(f"rank {changed[0]} of this replica was started anew")
        except RuntimeError as error:  # torch's, when the torchrun that has the store is gone
            if not self._over.is_set():
                on_end(f"the store of this replica's torchrun is gone ({first_line(error)})")

    def _said(self, store: dist.Store) -> list[str]:
        """The name of each rank; empty: nothing was ever heard of it."""
        keys = [_hello(rank) for rank in range(self._size)]
        if store.check(keys):
            return [name.decode() for name in store.multi_get(keys)]
        return [store.get(key).decode() if store.check([key]) else "" for key in keys]

    def _missing(self) -> str:
        silent = [rank for rank, name in enumerate(self._said(self._store)) if not name]
        if silent:
            return f"nothing was heard of rank {', '.join(map(str, silent))}; is the replica's torchrun running on every machine?"
        return "of those that once were there some are gone, and were not started anew; is the replica's torchrun running on every machine?"


def _hello(rank: int) -> str:
    return f"{_KEY}/hello/{rank}"


def open_store(host: str, port: int, timeout_s: float) -> dist.Store:
    """A connection to torchrun's store."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
