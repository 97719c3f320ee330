"""Processes of this machine by their pid: signals, whether they run, and their ends as the kernel tells them.

A worker's death closes its connection to the coordinator, which notices within milliseconds. Not so if a child that it forked
still holds the socket; its end is noticed here, as quickly. What neither sees (a node that is gone) falls silent.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from everstep.errors import DeadlineExceeded

LOG = logging.getLogger(__name__)
T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.002
_TRY_S = 1.0   # for one attempt to end a process
_AGAIN_S = 0.2  # between two
_TELL_S = 30.0  # then it is told that one does not end


def signal_pid(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it is gone already, which is what a kill wants
        os.kill(pid, number)


def state_letter(of: str) -> str:
    """Of a process (``/proc/PID``) or a thread (``/proc/PID/task/TID``), by the kernel: R, S, D, T, Z, ... Raises OSError or IndexError if it is gone."""
    with open(f"{of}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]


def pid_runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return state_letter(f"/proc/{pid}") not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def die_with_parent(number: int) -> None:
    """The kernel sends this process ``number`` when its parent dies, even of SIGKILL. Of a child to come: call it there before exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def still_running(pids: Collection[int], within_s: float) -> list[int]:
    """Those that have not ended within this time (zombies count as ended); returns as soon as there is none."""
    end = time.monotonic() + within_s
    while (alive := [pid for pid in sorted(pids) if pid_runs(pid)]) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return alive


def wait_gone(worker: str, pid: int, timeout_s: float) -> None:
    """Returns once the process has ended. Raises DeadlineExceeded."""
    if still_running([pid], timeout_s):
        raise DeadlineExceeded(f"worker {worker} (process {pid} on {socket.gethostname()}) did not die within {timeout_s:g} s")


def end_pid(pid: int, within_s: float) -> bool:
    """Kill the process; whether it has ended within this time."""
    signal_pid(pid, signal.SIGKILL)
    return not still_running([pid], within_s)


def end_for_certain(who: str, attempt: Callable[[float], bool], closed: Callable[[], bool]) -> None:
    """Repeat ``attempt(seconds)``, which kills a process and says whether it has ended (or can do no more harm) within them, until it has: what
    is stuck in the kernel, or on a machine of which nobody says yet that it is lost, ends some time, and its place can wait. ``who``: for the
    log. Raises DeadlineExceeded once ``closed()``."""
    begun, told = time.monotonic(), False
    while not attempt(_TRY_S):
        if closed():
            raise DeadlineExceeded(f"{who} had not ended when the run did; look whether it is still there")
        if not told and time.monotonic() - begun > _TELL_S:
            told = True
            LOG.warning(
                "%s was killed %d s ago and is not known to have ended; the run goes on without it, and its place is filled once it is gone. On a "
                "machine that is lost it counts as gone recovery.fence_s after Ray calls the node dead; if it is stuck in the kernel (state D in "
                "`ps`), free the storage or the driver that it waits for, or restart its machine", who, _TELL_S,
            )
        time.sleep(_AGAIN_S)


class ProcessWatch(Generic[T]):
    """Calls ``on_end(name)`` once for each watched process of this machine that ends, on a thread of its own."""

    def __init__(self, on_end: Callable[[T], None]):
        self._on_end = on_end
        self._lock = threading.Lock()
        self._names: dict[int, T] = {}  # by pidfd
        self._poll = select.poll()
        self._wake, wakes = socket.socketpair()
        self._wakes = wakes
        self._poll.register(wakes, select.POLLIN)
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="process-watch", daemon=True)
        self._thread.start()

    def add(self, name: T, pid: int) -> None:
        """Raises OSError where the kernel has no pidfd (Linux before 5.3)."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_end(name)
            return
        with self._lock:
            self._names[fd] = name
            self._poll.register(fd, select.POLLIN)
        self._wake.send(b"x")

    def close(self) -> None:
        self._closed = True
        self._wake.send(b"x")
        self._thread.join(5.0)
        with self._lock:
            for fd in self._names:
                os.close(fd)
            self._names.clear()
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
                    ended.append(self._names.pop(fd))
                os.close(fd)
            for name in ended:
                if not self._closed:
                    self._on_end(name)


def out_of_memory(error: Exception) -> bool:
    """Host memory; torch's allocator on the CPU raises RuntimeError. A full GPU is no fault of the process: it stays a failure."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "std::bad_alloc" in str(error))
    )
