"""One rank's side of a save: copy what it is to write to host memory, while the next step computes; write that in the background.

Between two commits a rank's state does not change, so the copy runs beside forward and backward and must be done before the
optimizer is applied, or the state moves to other memory (``RankWriter.settle``). The rank writes once the lead has said that the
folder is ready. What was written, or why it could not be, it says through the run's store, where the lead waits for it
(``everstep.checkpoint.saving``).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everstep.checkpoint.index import Receipt, check_scalar
from everstep.checkpoint.sharded import StagedFile, my_share, staged_files
from everstep.checkpoint.storage import CheckpointError, FileEntry, patiently, place, storage_errors, write_file
from everstep.engine.logical import Box, Fragment, LogicalState
from everstep.errors import DeadlineExceeded
from everstep.telemetry.events import EventLog

WRITERS = 4  # files of one rank that are written at a time
_POLL_S = 0.02


@dataclass(frozen=True)
class Ticket:
    """One attempt to save. ``folder``: address to write into; ``replica`` of ``replicas`` numbers those that share the work, not
    the replicas of the view; ``retry_s`` (checkpoint.retry_s): how long a rank tries again what storage refuses; ``timeout_s``
    (checkpoint.timeout_s): how long it waits until the folder is ready."""

    id: str
    step: int
    folder: str
    replica: int
    replicas: int
    retry_s: float
    timeout_s: float

    @property
    def ready(self) -> str:
        """The store's key that says that the folder is there, and ranks may write into it."""
        return f"save/{self.id}/ready"

    @property
    def void(self) -> str:
        """The store's key that says that nobody waits for this attempt any more."""
        return f"save/{self.id}/void"

    def receipt(self, rank: int, replica: int | None = None) -> str:
        """The store's key under which a rank says what it wrote (``Receipt``), or ``{"error": ...}``."""
        return f"save/{self.id}/{self.replica if replica is None else replica}/{rank}"


class Background:
    """A thread that does one job after the other. It is there before the first one comes: whoever starts a thread waits until it runs,
    which is as long as others please to keep the interpreter, or the cores."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        while job := self._jobs.get():
            job()

    def do(self, job: Callable[[], None]) -> None:
        """After those before it. ``job`` raises nothing."""
        self._jobs.put(job)

    def close(self) -> None:
        """The thread ends after its last job; nobody waits for that."""
        self._jobs.put(None)


@dataclass
class _Job:
    """A save as its thread has it. ``buffers``: host memory to be used; ``next_buffers``: what was, for the next save."""

    ticket: Ticket
    rank: int
    parts: dict[str, Callable[[], LogicalState]]
    scalars: dict[str, dict[str, Any]]
    rng: dict[str, Tensor]
    computed: torch.cuda.Event | None  # of the stream that made the state
    buffers: list[Tensor]
    next_buffers: list[Tensor] = field(default_factory=list)
    staged: threading.Event = field(default_factory=threading.Event)  # nothing reads the state any more
    stop: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)  # nothing reads the buffers any more


class RankWriter:
    """Saves of one rank, one at a time. ``store``: opens a connection to the run's store, for a thread of its own."""

    def __init__(self, store: Callable[[], dist.Store], device: torch.device, events: EventLog) -> None:
        self._open_store, self._device, self._events = store, device, events
        self._background = Background("checkpoint")
        self._job: _Job | None = None  # the newest, over or not

    def begin(
        self, ticket: Ticket, rank: int, parts: Mapping[str, Callable[[], LogicalState]], scalars: Mapping[str, Mapping[str, Any]],
        rng: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """Start to save ``parts`` (and their ``scalars``), of which this rank writes its share. An attempt before this one is over.

        The tensors must stay as they are until ``settle`` returns. CheckpointError if a scalar would not survive JSON.
        """
        for part, values in scalars.items():
            check_scalar(part, dict(values))
        before, buffers = self._job, []
        if before is not None and before.done.is_set():
            buffers = before.next_buffers
        elif before is not None:  # it may hang in storage, and write from its buffers still
            before.stop.set()
            self.settle(60.0)
            self._background.close()
            self._background = Background("checkpoint")
        computed: torch.cuda.Event | None = None
        if self._device.type == "cuda":
            computed = torch.cuda.Event()
            computed.record(torch.cuda.current_stream(self._device))
        job = _Job(ticket, rank, dict(parts), {part: dict(values) for part, values in scalars.items()}, dict(rng), computed, buffers)
        self._job = job
        self._background.do(lambda: self._run(job))

    def settle(self, timeout_s: float) -> float:
        """Wait until nobody reads the state any more; returns the seconds waited. DeadlineExceeded after ``timeout_s``."""
        start = time.monotonic()
        if self._job is not None and not self._job.staged.wait(timeout_s):
            raise DeadlineExceeded(f"the copy of this rank's state for a checkpoint is not done after {timeout_s:g} s")
        return time.monotonic() - start

    def _allocator(self, free: list[Tensor]) -> Callable[[int], Tensor]:
        """New memory is slow to get, page-locked memory most of all; so that of the save before is used again."""
        free = sorted(free, key=len)

        def allocate(nbytes: int) -> Tensor:
            for index, buffer in enumerate(free):
                if nbytes <= len(buffer) <= 2 * nbytes:
                    return free.pop(index)
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._device.type == "cuda")

        return allocate

    def _run(self, job: _Job) -> None:
        said: str
        try:
            try:
                files = self._stage(job)
            finally:
                job.parts.clear()  # a replica that breaks now needs the memory of its state for another one
                job.staged.set()
            said = self._write(job, files).to_json()
        except Exception as error:  # the end of a thread: the lead is told, and decides what it means
            said = json.dumps({"error": f"rank {job.rank}: {str(error) or type(error).__name__}"})
        job.done.set()
        with contextlib.suppress(RuntimeError, OSError):  # without the store, and so without the lead, nobody waits
            self._open_store().set(job.ticket.receipt(job.rank), said)

    def _stage(self, job: _Job) -> list[StagedFile]:
        """The files that this rank is to write, their data copied."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins with the first one, and page-locked memory belongs to the present one
        ticket = job.ticket
        share = my_share({part: make() for part, make in job.parts.items()}, ticket.replica, ticket.replicas)
        share += [
            Fragment(f"rng/{ticket.replica}.{job.rank}/{library}", (len(state),), Box(0, len(state), 0, 1), state, 1, 0)
            for library, state in job.rng.items()
        ]
        files = staged_files(share, f"{ticket.id}-{ticket.replica}.{job.rank:03d}", self._allocator(job.buffers))
        job.next_buffers += [file.whole_buffer for file in files]
        self._copy(files, job.computed)
        for file in files:
            file.release()
        return files

    def _copy(self, files: Iterable[StagedFile], computed: torch.cuda.Event | None) -> None:
        if computed is None:
            for file in files:
                file.copy()
            return
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(computed)
        with torch.cuda.stream(stream):
            for file in files:
                file.copy()
        stream.synchronize()

    def _write(self, job: _Job, files: list[StagedFile]) -> Receipt:
        store, ticket, rank, stop = self._open_store(), job.ticket, job.rank, job.stop
        _await_folder(store, ticket, stop)
        folder = place(ticket.folder)

        def write(file: StagedFile) -> tuple[FileEntry, list[dict[str, Any]]]:
            _unless_given_up(store, ticket, stop)
            content, rectangles = file.finish()
            note = lambda text: self._events.emit("save_retried", step=ticket.step, rank=rank, cause=text)

            def act(path: Any) -> FileEntry:
                with storage_errors("writing", path):
                    return write_file(path, content)

            return patiently(act, folder / file.name, ticket.retry_s, stop, note), rectangles

        with ThreadPoolExecutor(WRITERS, thread_name_prefix="checkpoint-write") as pool:
            written = list(pool.map(write, files))
        return Receipt(
            rank, ticket.replica,
            {file.name: entry for file, (entry, _) in zip(files, written, strict=True)},
            {file.name: rectangles for file, (_, rectangles) in zip(files, written, strict=True)},
            job.scalars,
        )  # fmt: skip


def _await_folder(store: dist.Store, ticket: Ticket, stop: threading.Event) -> None:
    end = time.monotonic() + ticket.timeout_s
    while not store.check([ticket.ready]):
        _unless_given_up(store, ticket, stop)
        if time.monotonic() > end:
            raise CheckpointError(f"{ticket.folder} was not ready after {ticket.timeout_s:g} s (checkpoint.timeout_s)")
        stop.wait(_POLL_S)


def _unless_given_up(store: dist.Store, ticket: Ticket, stop: threading.Event) -> None:
    if stop.is_set() or store.check([ticket.void]):
        raise CheckpointError(f"the save of step {ticket.step} was given up")
