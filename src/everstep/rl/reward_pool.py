"""Processes that call reward functions, so that one which hangs, even in C code, can be killed, and one that crashes takes no
other with it. Without torch.

Invariants: every task is answered, by its value or by why it has none; a task waits at most reward.timeout_s from the moment
it is given to a process (coroutines that share one: if that hangs, once more, alone); a process that is killed or dies is
replaced.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from everstep.config.rl_schema import RewardConfig
from everstep.errors import WorkerFailed
from everstep.rl.reward_functions import Term
from everstep.rl.reward_worker import Answer, Setup, Task

_START_S = 120.0  # imports of the user's module included
_GRACE_S = 2.0  # for a coroutine whose own time limit should have ended it
_STARTS = 3  # without one process that becomes ready
_LONGEST_WAIT_S = 3600.0  # at a time: poll counts milliseconds in 32 bits, and reward.timeout_s may be anything


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    connection: Connection
    deadline: float  # until it is ready
    ready: bool = False
    shares: bool = False  # whether what it was given are coroutines that may be joined by others
    given: dict[int, float] = field(default_factory=dict)  # number of a task -> its deadline

    @property
    def next_deadline(self) -> float:
        return min(self.given.values(), default=float("inf")) if self.ready else self.deadline


class RewardPool:
    """``reward.workers`` processes, started with the first ``score``. Close it, or they end with this process.

    ``terms`` are those of ``reward``, as ``reward_functions.terms`` made them here.
    """

    def __init__(self, reward: RewardConfig, source: str, source_args: dict[str, Any], terms: Sequence[Term]):
        self._reward, self._terms = reward, terms
        self._setup = (reward.model_dump(), source, source_args)
        self._processes: list[_Process] = []
        self._failed_starts = 0  # one after the other
        self._closed = False
        # One thread starts all of them and lives as long as the pool: the kernel ends them with the thread that did.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "reward-pool")

    def score(self, tasks: Sequence[Task]) -> list[Answer]:
        """One answer for each task, in their order. Their numbers must be 0, 1, 2, ...

        WorkerFailed if no process can be started.
        """
        try:
            return self._thread.submit(self._score, tasks).result()
        except WorkerFailed:
            with contextlib.suppress(RuntimeError):  # closed meanwhile: there is no next call
                self._thread.submit(self._drop_all).result()  # tasks of this call must not answer the next
            raise

    def close(self) -> None:
        self._closed = True
        for process in list(self._processes):
            process.popen.kill()  # so that a call in another thread ends now
        self._thread.submit(self._drop_all).result()
        self._thread.shutdown()

    # ---------------------------------------------------------------- on the pool's thread

    def _score(self, tasks: Sequence[Task]) -> list[Answer]:
        todo = _Round(tasks)
        while not todo.done:
            self._must_be_open()
            while len(self._processes) < min(self._reward.workers, len(todo.waiting) + sum(bool(p.given) for p in self._processes)):
                self._processes.append(self._start())
            for process in self._processes:
                self._give(process, todo)
            timeout_s = min(p.next_deadline for p in self._processes) - time.monotonic()
            for ready in wait([p.connection for p in self._processes], min(max(timeout_s, 0.0), _LONGEST_WAIT_S)):
                process = next(p for p in self._processes if p.connection is ready)
                try:
                    self._hear(process, todo)
                except (EOFError, OSError):
                    self._lost(process, todo, "its process died")
            for process in [p for p in self._processes if p.next_deadline <= time.monotonic()]:
                self._lost(process, todo, f"no answer within reward.timeout_s={self._reward.timeout_s:g} s, killed")
        self._must_be_open()  # whose functions did not fail: they were ended
        return [todo.answers[i] for i in range(len(tasks))]

    def _must_be_open(self) -> None:
        if self._closed:
            raise WorkerFailed("the pool of reward functions was closed while it was scoring")

    def _start(self) -> _Process:
        mine, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # half a message, and then nothing
            mine.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(min(self._reward.timeout_s, _LONGEST_WAIT_S)) + 1, 0))
        with theirs:
            popen = subprocess.Popen(
                [sys.executable, "-m", "everstep.rl.reward_worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
            )
        process = _Process(popen, Connection(mine.detach()), time.monotonic() + _START_S)
        with contextlib.suppress(OSError):  # it is dead already; its end is noticed as any other's
            process.connection.send(Setup(list(sys.path), os.getcwd(), *self._setup))
        return process

    def _give(self, process: _Process, todo: _Round) -> None:
        """As many tasks as the process may hold: coroutines together, all else alone."""
        while process.ready and todo.waiting:
            task = todo.waiting[0]
            is_async = self._terms[task.term].is_async
            shares = is_async and task.number not in todo.suspects
            if process.given and not (shares and process.shares and len(process.given) < self._reward.concurrency):
                return
            todo.waiting.popleft()
            process.shares = shares
            process.given[task.number] = time.monotonic() + self._reward.timeout_s + (_GRACE_S if is_async else 0.0)
            try:
                process.connection.send(task)
            except OSError:
                return  # its end, or its silence, is noticed as any other's

    def _hear(self, process: _Process, todo: _Round) -> None:
        message = process.connection.recv()
        if process.ready:
            todo.answers[message.number] = message
            del process.given[message.number]
        elif message is None:
            process.ready, self._failed_starts = True, 0
        else:
            raise WorkerFailed(f"the reward functions cannot be loaded in a process of their own: {message}")

    def _lost(self, process: _Process, todo: _Round, cause: str) -> None:
        """The process hangs or is dead: end it, and say so of its task, or, if it had several, find out of which."""
        self._processes.remove(process)
        process.popen.kill()
        code = process.popen.wait()
        process.connection.close()
        if not process.ready:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS:
                raise WorkerFailed(f"{_STARTS} processes for reward functions did not become ready; the last ended with {code}")
        several = len(process.given) > 1
        for number in process.given:
            if several:
                todo.suspects.add(number)
                todo.waiting.append(todo.tasks[number])
            else:
                name = self._terms[todo.tasks[number].term].name
                how = f" (exit status {code})" if cause.endswith("died") else ""
                todo.answers[number] = Answer(number, None, f"{name}: {cause}{how}")

    def _drop_all(self) -> None:
        for process in self._processes:
            process.popen.kill()
            process.popen.wait()
            process.connection.close()
        self._processes.clear()


class _Round:
    """What one call of ``score`` has to do still. ``suspects`` shared a process that hung or died, and go alone."""

    def __init__(self, tasks: Sequence[Task]):
        self.tasks = tasks
        self.waiting = collections.deque(tasks)
        self.answers: dict[int, Answer] = {}
        self.suspects: set[int] = set()

    @property
    def done(self) -> bool:
        return len(self.answers) == len(self.tasks)
