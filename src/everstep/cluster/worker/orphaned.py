"""What a rank says to, and takes from, a coordinator that takes over from a dead one (on the control thread)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from everstep.errors import Superseded
from everstep.recovery.rendezvous import Announcement

if TYPE_CHECKING:
    from everstep.cluster.worker.worker import Worker


class Calls:
    """How many calls of its controllers a rank has begun in this life. If a controller dies while it makes one, some ranks of a replica
    may be in it, and wait for the others, whom nobody calls any more: by the counts the next controller knows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun, self._obeys = 0, 0

    def renew(self) -> None:
        """Another life begins."""
        with self._lock:
            self._begun = 0

    def begin(self, method: str, incarnation: int) -> None:
        """Raises Superseded if another controller has been told by now what there was before this call."""
        with self._lock:
            if incarnation < self._obeys:
                raise Superseded(f"{method} was called beside coordinator {incarnation}, which is gone")
            self._begun += 1

    def tell(self, incarnation: int) -> int:
        """Those that were begun before this coordinator's controller; of the ones before it none begins any more."""
        with self._lock:
            self._obeys = max(self._obeys, incarnation)
            return self._begun


def describe(worker: Worker, incarnation: int) -> dict[str, Any]:
    """To the coordinator ``incarnation``. What a coordinator that takes over must know: my place, and which step I hold or, with the total that I keep, can reach."""
    formation, state, transaction = worker._formation, worker._state, worker._transaction
    holds = transaction.holds if transaction else None  # before the version: it is given up once that one is set
    return {
        "place": [formation.replica, formation.rank, formation.build] if formation and state else None,
        "version": state.version if state and state is not worker._void else None,
        "holds": [holds[0], *holds[1].key] if holds else None,
        "reference": worker._has_reference,
        "calls": worker.calls.tell(incarnation),
    }


def adopted(worker: Worker, announcement: Announcement) -> None:
    """The dead controller's store is gone with it."""
    worker.store.move(announcement.store)
    worker.keeping.announce()
    worker.events.emit("adopted", incarnation=announcement.incarnation)
