"""Repair of broken replicas in the background, while the survivors train: spares take the places of the dead.

One thread handles one death at a time: confirm that the process is gone (rule 8), put a spare in its place, form the replica
anew, announce it to the coordinator as a joiner. Survivors wait for none of this.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol

from everstep.cluster.worker import Formation
from everstep.errors import EverstepError, WorkerFailed
from everstep.recovery.view import Member

LOG = logging.getLogger(__name__)


class Processes(Protocol):
    """What repair needs of the launcher."""

    def confirm_dead(self, worker: str) -> None:
        """Kill the worker's process and return once it is gone. Raises DeadlineExceeded."""

    def form(self, formations: list[tuple[str, Formation]]) -> dict[str, str]:
        """Let workers take their places; returns worker -> cause for those that failed. If any did, the others are called
        off: they live and can form again."""

    def expel(self, worker: str, cause: str) -> None: ...

    def announce(self, member: Member) -> None: ...

    def note(self, event: str, **fields: Any) -> None: ...


class Repair:
    def __init__(self, processes: Processes, members: dict[int, Member], spares: list[str], has_reference: Callable[[], bool]):
        self._processes, self._members, self._has_reference = processes, dict(members), has_reference
        self.spares = list(spares)          # warm, not placed
        self._dead: set[str] = set()
        self._broken: list[int] = []        # replicas out of the view, waiting for spares
        self._released: set[int] = set()    # broken ones whose living ranks became spares: every place is vacant
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._handled: set[str] = set()     # deaths that are done with: repaired, or no spare was left
        self._closed = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="repair", daemon=True)
        self._thread.start()

    def worker_died(self, worker: str) -> None:
        self._queue.put(worker)

    def place(self, worker: str) -> tuple[int, int]:
        """(replica, rank) of a worker; (-1, -1) for a spare."""
        for member in list(self._members.values()):
            if member.replica not in self._released and worker in member.workers:
                return member.replica, member.workers.index(worker)
        return -1, -1

    def hopeful(self, dead: Collection[str]) -> bool:
        """Whether one of these deaths is still being repaired, or will be."""
        return not self._handled.issuperset(dead)

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        self._thread.join(5.0)

    def _loop(self) -> None:
        while (worker := self._queue.get()) is not None and not self._closed:
            dead = {worker} | self._more()
            try:
                self._handle(dead)
            except EverstepError as error:
                self.failure = self.failure or error  # told to the recipe at its next call; survivors train on until then
            except Exception as error:  # the end of a thread: no death would be repaired any more
                self.failure = self.failure or WorkerFailed(
                    f"repair after the death of {', '.join(sorted(dead))} failed: {type(error).__name__}: {error}"
                )
            finally:
                self._handled |= dead

    def _more(self) -> set[str]:
        """Deaths that are known by now: of the ranks of a lost node, for one, all are replaced in one go."""
        more: set[str] = set()
        with contextlib.suppress(queue.Empty):
            while (worker := self._queue.get_nowait()) is not None:
                more.add(worker)
        return more

    def _handle(self, dead: set[str]) -> None:
        for worker in sorted(dead - self._dead):
            self._processes.confirm_dead(worker)
            self._dead.add(worker)
            replica, _ = self.place(worker)
            if worker in self.spares:
                self.spares.remove(worker)
            elif replica >= 0 and replica not in self._broken:
                self._broken.append(replica)
        for broken in list(self._broken):
            if self._rebuild(broken):
                self._broken.remove(broken)

    def _rebuild(self, replica: int) -> bool:
        """Form the replica around its living ranks and spares; False if there are too few."""
        while True:
            member = self._members[replica]
            vacant = replica in self._released
            gaps = [rank for rank, worker in enumerate(member.workers) if vacant or worker in self._dead]
            if len(gaps) > len(self.spares):
                self._release(member)
                return False
            workers = list(member.workers)
            for rank in gaps:
                workers[rank] = self.spares.pop(0)
                LOG.info("%s takes the place %d/%d of %s", workers[rank], replica, rank, member.workers[rank])
                self._processes.note("spare_used", replica=replica, rank=rank, spare=workers[rank])
            member = Member(replica, member.build + 1, tuple(workers))
            self._members[replica] = member
            self._released.discard(replica)
            failed = self._processes.form([
                (worker, Formation(replica, rank, member.build, member.workers, "peer", self._has_reference()))
                for rank, worker in enumerate(workers)
            ])
            if not failed:
                self._processes.announce(member)
                return True
            if self._closed:
                return False
            for worker, cause in failed.items():
                LOG.warning("replica %d could not be formed in life %d: %s: %s", replica, member.build, worker, cause)
                self._processes.expel(worker, cause)
                self._processes.confirm_dead(worker)
                self._dead.add(worker)

    def _release(self, member: Member) -> None:
        """Too few spares: what lives of the replica is itself a pool of spares for others."""
        if member.replica not in self._released:
            self._released.add(member.replica)
            self.spares += [w for w in member.workers if w not in self._dead]
