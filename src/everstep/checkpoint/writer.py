"""One rank's side of a save: copy what it is to write to host memory, while the next step computes; write that in the background.

Between two commits a rank's state does not change, so the copy runs beside forward and backward and must be done before the
optimizer is applied, or the state moves to other memory (``RankWriter.settle``). What was written, or why it could not be, the
rank says through the run's store, where the lead waits for it (``everstep.checkpoint.saving``).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Ticket:
    """One attempt to save. ``folder``: address to write into; ``replica`` of ``replicas`` numbers those that share the work, not
    the replicas of the view; ``retry_s`` (checkpoint.retry_s): how long a rank tries again what storage refuses."""

    id: str
    step: int
    folder: str
    replica: int
    replicas: int
    retry_s: float

    @property
    def void(self) -> str:
        """The store's key that says that nobody waits for this attempt any more."""
        return f"save/{self.id}/void"

    def receipt(self, rank: int, replica: int | None = None) -> str:
        """The store's key under which a rank says what it wrote (``Receipt``), or ``{"error": ...}``."""
        return f"save/{self.id}/{self.replica if replica is None else replica}/{rank}"


class RankWriter:
    """Saves of one rank, one at a time. ``store``: opens a connection to the run's store, for a thread of its own."""

    def __init__(self, store: Callable[[], dist.Store], device: torch.device, events: EventLog) -> None:
        self._open_store, self._device, self._events = store, device, events
        self._staged = threading.Event()
        self._staged.set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._buffers: list[Tensor] = []  # host memory of the save before, to be used again

    def begin(
        self, ticket: Ticket, rank: int, parts: Mapping[str, LogicalState], scalars: Mapping[str, Mapping[str, Any]],
        rng: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """Start to save ``parts`` (and their ``scalars``), of which this rank writes its share. An attempt before this one is over.

        The tensors must stay as they are until ``settle`` returns. CheckpointError if a scalar would not survive JSON.
        """
        for part, values in scalars.items():
            check_scalar(part, dict(values))
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self.settle(60.0)
            self._buffers = []  # the attempt before may still write from them
        share = my_share(parts, ticket.replica, ticket.replicas)
        share += [
            Fragment(f"rng/{ticket.replica}.{rank}/{library}", (len(state),), Box(0, len(state), 0, 1), state, 1, 0)
            for library, state in rng.items()
        ]
        files = staged_files(share, f"{ticket.id}-{ticket.replica}.{rank:03d}", self._allocator())
        self._buffers = [file.whole_buffer for file in files]
        ready: torch.cuda.Event | None = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device))
        self._staged, self._stop = threading.Event(), threading.Event()
        copied = {part: dict(values) for part, values in scalars.items()}
        self._thread = threading.Thread(
            target=self._run, args=(ticket, rank, files, copied, ready, self._staged, self._stop), name="checkpoint", daemon=True
        )
        self._thread.start()

    def settle(self, timeout_s: float) -> float:
        """Wait until nobody reads the state any more; returns the seconds waited. DeadlineExceeded after ``timeout_s``."""
        start = time.monotonic()
        if not self._staged.wait(timeout_s):
            raise DeadlineExceeded(f"the copy of this rank's state for a checkpoint is not done after {timeout_s:g} s")
        return time.monotonic() - start

    def _allocator(self) -> Callable[[int], Tensor]:
        """New memory is slow to get, page-locked memory most of all; so that of the save before is used again."""
        free = sorted(self._buffers, key=len)

        def allocate(nbytes: int) -> Tensor:
            for index, buffer in enumerate(free):
                if nbytes <= len(buffer) <= 2 * nbytes:
                    return free.pop(index)
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._device.type == "cuda")

        return allocate

    def _run(
        self, ticket: Ticket, rank: int, files: list[StagedFile], scalars: dict[str, dict[str, Any]], ready: torch.cuda.Event | None,
        staged: threading.Event, stop: threading.Event,
    ) -> None:  # fmt: skip
        said: str
        try:
            try:
                self._copy(files, ready)
            finally:
                staged.set()
            said = self._write(ticket, rank, files, scalars, stop).to_json()
        except Exception as error:  # the end of a thread: the lead is told, and decides what it means
            said = json.dumps({"error": f"rank {rank}: {error}" if str(error) else f"rank {rank}: {type(error).__name__}"})
        with contextlib.suppress(RuntimeError, OSError):  # without the store, and so without the lead, nobody waits
            self._open_store().set(ticket.receipt(rank), said)

    def _copy(self, files: Iterable[StagedFile], ready: torch.cuda.Event | None) -> None:
        if ready is None:
            for file in files:
                file.copy()
            return
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            for file in files:
                file.copy()
        stream.synchronize()

    def _write(
        self, ticket: Ticket, rank: int, files: list[StagedFile], scalars: dict[str, dict[str, Any]], stop: threading.Event
    ) -> Receipt:
        store = self._open_store()
        folder = place(ticket.folder)

        def write(file: StagedFile) -> tuple[FileEntry, list[dict[str, Any]]]:
            if stop.is_set() or store.check([ticket.void]):
                raise CheckpointError(f"the save of step {ticket.step} was given up")
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
            scalars,
        )  # fmt: skip
