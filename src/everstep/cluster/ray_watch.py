"""The ends of processes on every node of a Ray cluster: a pidfd for each worker (:class:`everstep.cluster.processes.ProcessWatch`)."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from everstep.cluster.processes import ProcessWatch

if TYPE_CHECKING:
    from everstep.cluster.host import WorkerInfo

_ASK_S = 10.0


class _NodeWatch:
    """A :class:`ProcessWatch` as an actor on another node: the controller asks it for deaths, and waits for the answer."""

    def __init__(self, pids: dict[str, int]):
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._watch = ProcessWatch(self._ended.put)
        for worker, pid in pids.items():
            self._watch.add(worker, pid)

    def add(self, worker: str, pid: int) -> None:
        self._watch.add(worker, pid)

    def ended(self, timeout_s: float) -> list[str]:
        """Workers that ended since the last question; waits up to ``timeout_s`` for the first."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._ended.get(timeout=timeout_s))
            while True:
                found.append(self._ended.get_nowait())
        return found


class NodeWatches:
    """One watch for each node that has workers: in this process for this machine, a Ray actor on every other one.

    ``infos``: worker -> where it runs. ``here``: the host name that counts as this machine.
    """

    def __init__(self, infos: Mapping[str, WorkerInfo], on_end: Callable[[str], None], here: str | None = None):
        self._here = here or socket.gethostname()
        self._on_end, self._closed = on_end, False
        self._local = ProcessWatch(on_end)
        self._remote: dict[str, Any] = {}  # node id -> its actor
        for worker, info in infos.items():
            self.add(worker, info)

    def add(self, worker: str, info: WorkerInfo) -> None:
        """Watch one more worker."""
        if info.host == self._here:
            self._local.add(worker, info.pid)
        elif (actor := self._remote.get(info.node_id)) is None or not _is_told(actor, worker, info.pid):
            where = NodeAffinitySchedulingStrategy(info.node_id, soft=False)
            remote: Any = ray.remote(_NodeWatch)
            made = remote.options(num_cpus=0, max_concurrency=2, scheduling_strategy=where).remote({worker: info.pid})  # one waits in `ended`
            self._remote[info.node_id] = made
            threading.Thread(target=self._ask, args=(made,), name=f"node-watch-{info.node_id[:8]}", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._local.close()
        for actor in list(self._remote.values()):
            ray.kill(actor)

    def _ask(self, actor: Any) -> None:
        while not self._closed:
            try:
                ended = ray.get(actor.ended.remote(_ASK_S), timeout=10 * _ASK_S)
            except (RayError, GetTimeoutError):
                return  # the node is gone or cut off: its ranks fall silent, which is noticed
            for worker in ended:
                if not self._closed:
                    self._on_end(worker)


def _is_told(actor: Any, worker: str, pid: int) -> bool:
    """Whether the node's watch took it; if the node was gone in between, and came back, it is gone too."""
    try:
        ray.get(actor.add.remote(worker, pid), timeout=_ASK_S)
    except (RayError, GetTimeoutError):
        return False
    return True
