"""Repair of broken replicas in the background, while the survivors train: spares take the places of the dead.

One thread handles what happened, in order: of a death it confirms that the process is gone (rule 8), puts a spare in its place, forms
the replica anew, announces it to the coordinator as a joiner, and asks for a process in the place of the dead one
(:mod:`everstep.cluster.controller.refill`), which comes back as a spare. Without spares a replica waits for such a one. Survivors wait for none
of this.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from typing import Any, Protocol

from everstep.cluster.formation import Formation
from everstep.errors import EverstepError, WorkerFailed
from everstep.recovery.view import Member

LOG = logging.getLogger(__name__)
_TOGETHER_S = 1.0  # for processes that are ended together to be gone together, before repairs that need none of the others go on


class Processes(Protocol):
    """What repair needs of the launcher."""

    def confirm_dead(self, worker: str) -> None:
        """Kill the worker's process and return once it is gone. Raises DeadlineExceeded."""

    def retire(self, worker: str) -> None:
        """End the process of a worker that leaves as planned; returns once it is gone. Raises DeadlineExceeded."""

    def form(self, formations: list[tuple[str, Formation]]) -> dict[str, str]:
        """Let workers take their places; returns worker -> cause for those that failed. If any did, the others are called
        off: they live and can form again."""

    def expel(self, worker: str, cause: str) -> None: ...

    def announce(self, member: Member) -> None: ...

    def replace(self, worker: str) -> None:
        """Start another process in the place of this dead one, in the background; it comes back as a spare, or never."""

    def node(self, worker: str) -> str:
        """On which node a worker is, or was."""

    def settle(self) -> None:
        """What happened by now is dealt with, as far as there are spares."""

    def note(self, event: str, **fields: Any) -> None: ...


def _settle(future: Future[None], act: Callable[[str], None], worker: str) -> None:
    try:
        act(worker)
        future.set_result(None)
    except BaseException as error:  # raised where the result is taken
        future.set_exception(error)


class Repair:
    def __init__(self, processes: Processes, members: dict[int, Member], spares: list[str], has_reference: Callable[[], bool]):
        self._processes, self._members, self._has_reference = processes, dict(members), has_reference
        self.spares = list(spares)          # warm, not placed
        self._former = {w: (m.replica, rank) for m in members.values() for rank, w in enumerate(m.workers)}  # where each was last
        self._dead: set[str] = set()
        self._ends: dict[str, Future[None]] = {}  # of processes that are being ended, or are gone
        self._broken: list[int] = []        # replicas out of the view, waiting for spares
        self._released: set[int] = set()    # broken ones whose living ranks became spares: every place is vacant
        self._queue: queue.SimpleQueue[tuple[str, str | Member] | None] = queue.SimpleQueue()  # (what happened, to whom)
        self._handled: set[str] = set()     # deaths that are done with: repaired, or no spare was left
        self._lock = threading.Lock()
        self._open = 0                      # of what was told, not dealt with yet
        self._closed = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="repair", daemon=True)
        self._thread.start()

    def adopt(self, gone: set[str], broken: list[Member]) -> None:
        """Workers that are known to be gone (after a takeover), and replicas that must be formed anew unless they have been since, by the lives
        that they had."""
        for worker in sorted(gone):
            self._tell("died", worker)
        for member in broken:
            self._tell("broken", member)

    def worker_died(self, worker: str) -> None:
        self._tell("died", worker)

    def spare_is_ready(self, worker: str) -> None:
        """A process was started in the place of a dead one."""
        self._tell("ready", worker)

    def worker_leaves(self, worker: str) -> None:
        """A living worker, a spare or of a replica that is out of the view, is to be replaced."""
        self._tell("leaves", worker)

    def _tell(self, what: str, whom: str | Member) -> None:
        with self._lock:
            self._open += 1
        self._queue.put((what, whom))

    def place(self, worker: str) -> tuple[int, int]:
        """(replica, rank) of a worker; (-1, -1) for a spare."""
        for member in list(self._members.values()):
            if member.replica not in self._released and worker in member.workers:
                return member.replica, member.workers.index(worker)
        return -1, -1

    def hopeful(self, dead: Collection[str]) -> bool:
        """Whether one of these deaths, or anything else that was told, is still being dealt with, or will be."""
        with self._lock:
            return self._open > 0 or not self._handled.issuperset(dead)

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        self._thread.join(5.0)

    def _loop(self) -> None:
        while (first := self._queue.get()) is not None and not self._closed:
            happened = [first, *self._more()]
            of = lambda *kinds: [whom for what, whom in happened if what in kinds and isinstance(whom, str)]  # noqa: B023 - used in this turn
            dead, leaving = set(of("died", "leaves")), set(of("leaves"))
            try:
                self._handle(dead, leaving, of("ready"), [whom for _, whom in happened if isinstance(whom, Member)])
                self._processes.settle()
            except EverstepError as error:
                self.failure = self.failure or error  # told to the recipe at its next call; survivors train on until then
            except Exception as error:  # the end of a thread: no death would be repaired any more
                names = ", ".join(sorted(str(whom) for _, whom in happened))
                self.failure = self.failure or WorkerFailed(f"repair after what happened to {names} failed: {type(error).__name__}: {error}")
            finally:
                with self._lock:
                    self._handled |= dead
                    self._open -= len(happened)

    def _more(self) -> list[tuple[str, str | Member]]:
        """What happened besides by now: of the ranks of a lost node, for one, all are replaced in one go."""
        more: list[tuple[str, str | Member]] = []
        with contextlib.suppress(queue.Empty):
            while (next_one := self._queue.get_nowait()) is not None:
                more.append(next_one)
        return more

    def _handle(self, dead: set[str], leaving: set[str], ready: list[str], broken: list[Member]) -> None:
        buried = []
        for worker in self._ended(sorted(dead - self._dead), leaving):
            self._bury(worker)
            buried.append(worker)
        for worker in ready:
            if worker not in self._dead:
                self.spares.append(worker)
                self._processes.note("spare_ready", spares=len(self.spares))
        for member in broken:
            if member.replica not in self._broken and self._members[member.replica].build == member.build:
                self._broken.append(member.replica)
        for replica in list(self._broken):
            if not self._is_ending(self._members[replica]) and self._rebuild(replica):
                self._broken.remove(replica)
        for worker in buried:  # last: a start takes processor time from the replicas that form
            self._processes.replace(worker)

    def _ended(self, workers: list[str], leaving: set[str]) -> Iterator[str]:
        """Those that are gone, each ended on a thread of its own: of a lost node that takes a minute and more, of a process that is stuck in the
        kernel nobody knows how long, and nobody else's repair waits for it. Who is not gone soon is told again once it is."""
        for worker in workers:
            if worker not in self._ends:
                self._ends[worker] = Future()
                end = self._processes.retire if worker in leaving else self._processes.confirm_dead
                threading.Thread(target=_settle, args=(self._ends[worker], end, worker), name=f"end-{worker}", daemon=True).start()
        wait([self._ends[worker] for worker in workers], _TOGETHER_S)
        for worker in workers:
            if self._ends[worker].done():
                self._ends[worker].result()
                yield worker
                continue
            if worker in self.spares:
                self.spares.remove(worker)  # it fills no gap meanwhile
            with self._lock:
                self._open += 1
            self._ends[worker].add_done_callback(lambda _, worker=worker: self._queue.put(("died", worker)))  # type: ignore[misc]

    def _is_ending(self, member: Member) -> bool:
        """Whether a process of this life is being ended: one of its gaps cannot be filled yet."""
        return any(worker in self._ends and worker not in self._dead for worker in member.workers)

    def _bury(self, worker: str) -> None:
        self._dead.add(worker)
        replica, _ = self.place(worker)
        if worker in self.spares:
            self.spares.remove(worker)
        elif replica >= 0 and replica not in self._broken:
            self._broken.append(replica)

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
                workers[rank] = self._spare_for(replica, rank)
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
            gone = list(self._ended(sorted(failed), set()))
            for worker in gone:
                self._dead.add(worker)
                self._processes.replace(worker)
            if len(gone) < len(failed):
                return False  # its turn comes again once they are

    def _spare_for(self, replica: int, rank: int) -> str:
        """A rank of a released replica goes back to where it was, and is left for that place: it has the state of it. Else a spare of the
        dead one's node, where its copies are, or of a node of its replica: tensor parallelism is fast there."""
        workers, node = self._members[replica].workers, self._processes.node
        near, former = {node(worker) for worker in workers}, lambda w: self._former.get(w, (-1, -1))
        chosen = min(self.spares, key=lambda w: (
            former(w) != (replica, rank), former(w)[0] == replica, node(w) != node(workers[rank]), node(w) not in near,
        ))
        self.spares.remove(chosen)
        self._former[chosen] = (replica, rank)
        return chosen

    def _release(self, member: Member) -> None:
        """Too few spares: what lives of the replica is itself a pool of spares for others."""
        if member.replica not in self._released:
            self._released.add(member.replica)
            self.spares += [w for w in member.workers if w not in self._dead]
