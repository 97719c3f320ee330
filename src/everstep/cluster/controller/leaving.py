"""Planned leaves: ranks that are to be replaced while they live, between two steps, so that nothing is computed twice.

Who is to leave is told on any thread (``everstep drain``, a preemption notice); the controller's main thread lets them go where no call
and no step is in flight: their replica leaves the view, a spare takes the place, the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from everstep.cluster.host import WorkerInfo
from everstep.errors import BadInput


class Roster(Protocol):
    """What leaving needs of the controller."""

    def place(self, worker: str) -> tuple[int, int]:
        """(replica, rank); (-1, -1) for a spare."""

    def living(self) -> Mapping[str, WorkerInfo]: ...

    def takes_part(self, replica: int) -> bool:
        """Whether the replica is in the view."""

    def is_busy(self) -> bool:
        """Whether a repair is under way."""

    def let_go(self, replica: int, cause: str, spares: int) -> bool:
        """Take a replica out of the view; False if it cannot be spared now. ``spares``: processes that could take places at once."""

    def replace_living(self, workers: list[str]) -> None:
        """Their replicas are out of the view, or they are spares: spares take their places, and they end."""

    def idle_spares(self) -> list[str]: ...

    def note(self, event: str, **fields: Any) -> None: ...


class Leaving:
    def __init__(self, roster: Roster):
        self._roster = roster
        self._lock = threading.Lock()
        self._causes: dict[str, str] = {}  # worker -> why it is to leave
        self.nodes: set[str] = set()       # node ids on which no process is started any more
        self.workers: set[str] = set()     # all that were ever told to leave

    def tell(self, worker: str, cause: str, whole_node: bool = False) -> None:
        """A notice about one worker, or about the machine that it is on."""
        infos = self._roster.living()
        if worker not in infos:
            return
        if whole_node:
            self.nodes.add(infos[worker].node_id)
        self._add([worker], cause)

    def drain(self, target: str) -> list[str]:
        """``target``: a rank (``1/0``), a worker (``w3``), or a node (host name, or id or the beginning of one). The workers that are
        to leave now. BadInput if there is no such thing."""
        infos = self._roster.living()
        by_place = {"{}/{}".format(*self._roster.place(w)): w for w in infos}
        if target in infos or target in by_place:
            chosen = [target if target in infos else by_place[target]]
        else:
            nodes = {i.node_id for i in infos.values() if target and (i.host == target or i.node_id.startswith(target))}
            if len(nodes) != 1:
                known = ", ".join(sorted({f"{i.host} ({i.node_id[:12]})" if i.host != i.node_id else i.host for i in infos.values()}))
                ranks = ", ".join(sorted(place for place in by_place if not place.startswith("-1")))
                raise BadInput(f"{target!r} is {'several nodes' if nodes else 'no rank, worker or node of this run'}: ranks {ranks}; nodes {known}")
            self.nodes |= nodes
            chosen = sorted(w for w, i in infos.items() if i.node_id in nodes)
        self._add(chosen, f"drain {target}")
        return chosen

    def remaining(self) -> list[str]:
        """Those that were told to leave, and are still here."""
        with self._lock:
            asked = set(self._causes)
        return sorted(asked & set(self._roster.living()))

    def at_a_boundary(self) -> None:
        """No call and no step is in flight: let go whom we can. Called by the controller's main thread, often."""
        with self._lock:
            causes = dict(self._causes)
        living = self._roster.living()
        for worker in set(causes) - set(living):
            self._forget([worker])
            del causes[worker]
        if not causes:
            return
        idle = [w for w in causes if self._roster.place(w)[0] < 0]
        if idle and not self._roster.is_busy():  # a repair may be about to give one of them a place
            self._go(idle)
        for replica in sorted({self._roster.place(w)[0] for w in causes} - {-1}):
            ours = [w for w in causes if self._roster.place(w)[0] == replica]
            if self._roster.is_busy():
                return  # one after the other: a replica that is coming back may be needed for this one to go
            if not self._roster.takes_part(replica) or self._roster.let_go(replica, causes[ours[0]], len(self._roster.idle_spares()) - len(ours)):
                self._go(ours)

    def _go(self, workers: list[str]) -> None:
        self._roster.replace_living(workers)
        self._forget(workers)

    def _add(self, workers: list[str], cause: str) -> None:
        with self._lock:
            new = [w for w in workers if w not in self._causes and w not in self.workers]
            self._causes |= dict.fromkeys(new, cause)
            self.workers |= set(new)
        for worker in new:
            replica, rank = self._roster.place(worker)
            self._roster.note("leave", replica=replica, rank=rank, worker=worker, cause=cause)

    def _forget(self, workers: list[str]) -> None:
        with self._lock:
            for worker in workers:
                self._causes.pop(worker, None)
