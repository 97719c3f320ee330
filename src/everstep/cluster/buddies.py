"""Who keeps whose copies on another node, and where: what the controller writes into the run's store, and ranks read there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from everstep.checkpoint.shelf import Address

BUDDIES = "copies/buddies"  # key in the run's store: {worker: the worker that keeps its copies}


class Store(Protocol):
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...


def announce(store: Store, worker: str, address: Address) -> None:
    """Where a worker's shelf is (:mod:`everstep.checkpoint.shelf`)."""
    store.set(f"copies/at/{worker}", json.dumps(address))


def shelf_of(store: Store, worker: str) -> Address | None:
    if not store.check([key := f"copies/at/{worker}"]):
        return None
    host, port, secret = json.loads(store.get(key))
    return host, port, secret


def buddy_of(store: Store, worker: str) -> str | None:
    """Who keeps copies of this worker on another node; None if there is no other node."""
    buddy: str | None = json.loads(store.get(BUDDIES)).get(worker) if store.check([BUDDIES]) else None
    return buddy


def choose_buddies(ranks: Sequence[str], spares: Sequence[str], nodes: Mapping[str, str]) -> dict[str, str]:
    """For each rank a worker of another node: the ones that keep the fewest, and of these spares first, which have nothing else to do."""
    keeps: Counter[str] = Counter()
    chosen: dict[str, str] = {}
    candidates = [*spares, *ranks]
    for rank in ranks:
        others = [worker for worker in candidates if nodes[worker] != nodes[rank]]
        if others:
            chosen[rank] = buddy = min(others, key=lambda worker: (keeps[worker], candidates.index(worker)))
            keeps[buddy] += 1
    return chosen
