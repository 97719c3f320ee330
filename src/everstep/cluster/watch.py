"""The ends of processes, told by the kernel: a pidfd for each worker of a node.

A worker's death closes its connection to the coordinator, which notices within milliseconds. Not so if a child that it forked
still holds the socket; its end is noticed here, as quickly. What neither sees (a node that is gone) falls silent.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    from everstep.cluster.actor import ActorInfo

_ASK_S = 10.0

class ProcessWatch:
    """Calls ``on_end(worker)`` once for each watched process of this machine that ends, on a thread of its own."""

    def __init__(self, on_end: Callable[[str], None]):
        self._on_end = on_end
        self._lock = threading.Lock()
        self._workers: dict[int, str] = {}  # pidfd -> worker
        self._poll = select.poll()
        self._wake, wakes = socket.socketpair()
        self._wakes = wakes
        self._poll.register(wakes, select.POLLIN)
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="process-watch", daemon=True)
        self._thread.start()

    def add(self, worker: str, pid: int) -> None:
        """Raises OSError where the kernel has no pidfd (Linux before 5.3)."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_end(worker)
            return
        with self._lock:
            self._workers[fd] = worker
            self._poll.register(fd, select.POLLIN)
        self._wake.send(b"x")

    def close(self) -> None:
        self._closed = True
        self._wake.send(b"x")
        self._thread.join(5.0)
        with self._lock:
            for fd in self._workers:
                os.close(fd)
            self._workers.clear()
        self._wake.close()
        self._wakes.close()

    def _loop(self) -> None:
        while not self._closed:
            ended = []
            for fd, _ in self._poll.poll():
                if fd == self._wakes.fileno():
                    self._wakes.recv(64)
                    continue
                with self._lock:
                    self._poll.unregister(fd)
                    ended.append(self._workers.pop(fd))
                os.close(fd)
            for worker in ended:
                if not self._closed:
                    self._on_end(worker)


class _NodeWatch:
    """A :class:`ProcessWatch` as an actor on another node: the controller asks it for deaths, and waits for the answer."""

    def __init__(self, pids: dict[str, int]):
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._watch = ProcessWatch(self._ended.put)
        for worker, pid in pids.items():
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

    def __init__(self, infos: Mapping[str, ActorInfo], on_end: Callable[[str], None], here: str | None = None):
        here = here or socket.gethostname()
        self._on_end, self._closed = on_end, False
        self._local = ProcessWatch(on_end)
        self._remote: list[Any] = []
        elsewhere: dict[str, dict[str, int]] = {}
        for worker, info in infos.items():
            if info.host == here:
                self._local.add(worker, info.pid)
            else:
                elsewhere.setdefault(info.node_id, {})[worker] = info.pid
        for node_id, pids in elsewhere.items():
            where = NodeAffinitySchedulingStrategy(node_id, soft=False)
            actor = ray.remote(num_cpus=0)(_NodeWatch).options(scheduling_strategy=where).remote(pids)
            self._remote.append(actor)
            threading.Thread(target=self._ask, args=(actor,), name=f"node-watch-{node_id[:8]}", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._local.close()
        for actor in self._remote:
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
