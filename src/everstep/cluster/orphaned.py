"""What a rank says to, and takes from, a coordinator that takes over from a dead one (on the control thread)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.recovery.rendezvous import Announcement

if TYPE_CHECKING:
    from everstep.cluster.worker import Worker


def describe(worker: Worker) -> dict[str, Any]:
    """What a coordinator that takes over must know: my place, and which step I hold or, with the total that I keep, can reach."""
    formation, state, transaction = worker._formation, worker._state, worker._transaction
    holds = transaction.holds if transaction else None  # before the version: it is given up once that one is set
    return {
        "place": [formation.replica, formation.rank, formation.build] if formation and state else None,
        "version": state.version if state else None,
        "holds": [holds[0], *holds[1].key] if holds else None,
        "reference": worker._has_reference,
    }


def adopted(worker: Worker, announcement: Announcement) -> None:
    """The dead controller's store is gone with it."""
    worker.store.move(announcement.store)
    worker.keeping.announce()
    worker.events.emit("adopted", incarnation=announcement.incarnation)
