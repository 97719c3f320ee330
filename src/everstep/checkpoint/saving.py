"""The lead's side of a save: hand out the work, wait for what the ranks say, complete the checkpoint; all in the background.

    begin -> every rank of every contributing replica copies its share (everstep.checkpoint.writer)
          -> the folder is ready -> they write -> receipts, through the run's store -> index, run state, Hugging Face weights
          -> manifest -> pointer -> retention

Training waits for nothing of this but for the ranks to have taken it up: storage is first asked on the thread of the save.

One save at a time: one that falls due while another is on its way is taken at the first step after that one has ended. A save that
fails is told and tried again with the state of the then newest step, after a pause that grows; unless checkpoint.on_failure=stop it
never ends the run. A rank that dies before it has said what it wrote voids the attempt, for the others hold a newer state by then.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from everstep.checkpoint import export, flushed, manifest, rng
from everstep.checkpoint.index import INDEX, Receipt, make_index
from everstep.checkpoint.storage import (
    CheckpointError,
    FileEntry,
    as_json,
    patiently,
    storage_errors,
    write_file,
)
from everstep.checkpoint.writer import Background, Ticket
from everstep.config.schema import Config
from everstep.errors import EverstepError
from everstep.layout import Layout
from everstep.run_dir import checkpoints_of
from everstep.telemetry.events import EventLog

INNER = ("tp", "cp", "ep", "dp", "pp")
_POLL_S = 0.02
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 600.0  # between saves that failed


class WriterLost(CheckpointError):
    """A rank died before it had said what it wrote. Without it the state of that step is not whole any more."""


@dataclass(frozen=True)
class SavedRun:
    """What belongs to the run rather than to a rank. ``recipe_state``: data cursor and counters of the recipe (JSON)."""

    step: int
    reference: bool
    recipe_state: dict[str, Any]


@dataclass(frozen=True)
class RankOf:
    """Who owes a receipt: ``worker`` writes as rank ``rank`` of ``replica`` (numbered among those that save)."""

    worker: str
    replica: int
    rank: int


def inner_layout(layout: Layout) -> dict[str, Any]:
    """How the ranks of a replica are arranged; how layers are cut only where it is not the default."""
    inner: dict[str, Any] = {name: getattr(layout, name) for name in INNER}
    if layout.vpp > 1:
        inner["vpp"] = layout.vpp
    if layout.layers_per_stage:
        inner["layers_per_stage"] = list(layout.layers_per_stage)
    return inner


class Saver:
    """Saves of a run. Its methods are called from one thread, that of the recipe.

    ``store``: opens a connection to the run's store. ``dead``: why a worker is gone, or None.
    """

    def __init__(
        self, config: Config, layout: Layout, events: EventLog, store: Callable[[], dist.Store], dead: Callable[[str], str | None]
    ) -> None:
        self._config, self._layout, self._events, self._open_store, self._dead = config, layout, events, store, dead
        self.checkpoints = checkpoints_of(config)
        self._background = Background("save")
        self._attempt: _Attempt | None = None
        self._described: dict[str, bytes] | None = None
        self._failures = 0
        self._again_at: float | None = None  # when the save that failed is tried again
        self._postponed = False
        self._told: list[str] = []

    # -- when -----------------------------------------------------------------------------------------------------------------

    def wanted(self, due: bool, step: int) -> bool:
        """Whether a save of ``step`` should begin now; ``due``: the recipe says so. Raises the failure of the save before, if
        checkpoint.on_failure=stop."""
        self._collect()
        again = self._again_at is not None and time.monotonic() >= self._again_at
        if not (due or again):
            return False
        if self._attempt is not None:
            if not self._postponed:
                self._postponed = True
                self._tell(f"the checkpoint of step {step} waits for the one before it, which is still being written")
                self._events.emit("save_postponed", step=step)
            return False
        return again or self._again_at is None

    def told(self) -> list[str]:
        """Lines for the user about saves that ended or were put off, each once."""
        self._collect(stop=False)
        told, self._told = self._told, []
        return told

    @property
    def attempt(self) -> str | None:
        """Name of the save that has begun and not ended."""
        return self._attempt.id if self._attempt else None

    # -- one save ---------------------------------------------------------------------------------------------------------------

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / manifest.folder_name(step)

    def begin(self, run: SavedRun, replicas: int, patient: bool) -> list[Ticket] | None:
        """A ticket for each of the ``replicas`` that share the work.

        ``patient``: storage is asked now, and not in the background. Then None if the step has a whole checkpoint already, and
        CheckpointError if storage refuses for checkpoint.retry_s.
        """
        self._collect(stop=False)
        assert self._attempt is None, "one save at a time"
        attempt = _Attempt(run, secrets.token_hex(4), manifest.working_folder(self.checkpoints, run.step))
        self._attempt, self._postponed = attempt, False
        if patient:
            try:
                self._prepare(attempt)
            except CheckpointError as error:
                attempt.failure = error
                self._collect(stop=False)
                raise
            if attempt.final is not None:
                self._collect(stop=False)
                return None
        return [self._ticket(attempt, replica, replicas) for replica in range(replicas)]

    def _ticket(self, attempt: _Attempt, replica: int = 0, replicas: int = 1) -> Ticket:
        keep = self._config.checkpoint
        return Ticket(attempt.id, attempt.run.step, str(attempt.folder), replica, replicas, keep.retry_s, keep.timeout_s)

    def _prepare(self, attempt: _Attempt) -> None:
        """An empty folder, or, as ``attempt.final``, the whole checkpoint that there is of this step already."""
        step = attempt.run.step
        attempt.final = self._patiently(attempt, self.checkpoints, partial(_existing, step=step))
        if attempt.final is None:
            self._patiently(attempt, self.checkpoints, lambda at: manifest.begin(at, step))
        attempt.prepared = True

    def void(self, cause: str) -> None:
        """The attempt that ``begin`` started was not taken up by all ranks."""
        assert self._attempt is not None
        self._say_void(self._attempt, cause)
        self._attempt = None

    def _say_void(self, attempt: _Attempt, cause: str) -> None:
        with contextlib.suppress(RuntimeError):  # without a store nobody waits for this
            self._open_store().set(self._ticket(attempt).void, cause)

    def follow(self, writers: Sequence[RankOf], blocked_s: float) -> None:
        """All ranks have taken up the attempt: complete it in the background. ``blocked_s``: what training waited for it so far."""
        attempt = self._attempt
        assert attempt is not None
        attempt.blocked_s = blocked_s
        attempt.rng = rng.capture()
        attempt.followed = True
        self._background.do(lambda: self._complete(attempt, list(writers)))

    def wait(self) -> Path | None:
        """Until the save on its way has ended; its checkpoint, None if there was none. Raises its failure, which is then told."""
        attempt, keep = self._attempt, self._config.checkpoint
        if attempt is None:
            return None
        if attempt.followed and not attempt.done.wait(keep.timeout_s + 5 * keep.retry_s + 60.0):
            attempt.failure = CheckpointError(f"the checkpoint of step {attempt.run.step} did not end (checkpoint.timeout_s)")
            attempt.followed = False  # its thread is left behind
            self._background.close()
            self._background = Background("save")
        self._collect(stop=False)
        if attempt.failure is not None:
            raise attempt.failure
        return attempt.final

    def give_up(self) -> None:
        """The run ends: nobody waits for the save on its way."""
        if self._attempt is not None and self._attempt.followed:
            self._attempt.abandoned.set()
            self._attempt.done.wait(5.0)
        self._background.close()

    def _collect(self, stop: bool = True) -> None:
        """Look at a save that has ended."""
        attempt = self._attempt
        if attempt is None or not attempt.ended:
            return
        self._attempt = None
        if attempt.failure is None:
            self._failures, self._again_at = 0, None
            if attempt.published:
                self._tell(f"saved {attempt.final}")
            return
        self._failures += 1
        lost = isinstance(attempt.failure, WriterLost)
        pause = 0.0 if lost else min(_FIRST_PAUSE_S * 2.0 ** (self._failures - 1), _LONGEST_PAUSE_S)
        self._again_at = time.monotonic() + pause
        self._events.emit("save_failed", step=attempt.run.step, cause=str(attempt.failure), again_in_s=pause)
        if stop and not lost and self._config.checkpoint.on_failure == "stop":
            raise attempt.failure
        self._tell(f"the checkpoint of step {attempt.run.step} failed ({attempt.failure}); it is tried again "
                   + ("at the next step" if lost else f"in {pause:g} s at the earliest"))

    def _tell(self, line: str) -> None:
        self._told.append(line)

    # -- in the background --------------------------------------------------------------------------------------------------------

    def _complete(self, attempt: _Attempt, writers: list[RankOf]) -> None:
        self._try_to_complete(attempt, writers)
        if attempt.failure is not None:
            self._say_void(attempt, str(attempt.failure))
        attempt.done.set()

    def _try_to_complete(self, attempt: _Attempt, writers: list[RankOf]) -> None:
        try:
            if not attempt.prepared:
                self._prepare(attempt)
            if attempt.final is not None:  # a run that went back to an older step makes this one again
                self._say_void(attempt, "the step has a whole checkpoint already")
                return
            self._events.emit("save_begin", step=attempt.run.step, path=str(attempt.folder), ranks=len(writers), seconds=attempt.blocked_s)
            store = self._open_store()
            store.set(self._ticket(attempt).ready, "")
            final = self._publish(attempt, self._receipts(attempt, writers, store))
            attempt.final, attempt.published = final, True
        except CheckpointError as error:
            attempt.failure = error
        except Exception as error:  # the end of a thread: the recipe's thread raises it or tells it
            attempt.failure = CheckpointError(
                f"completing the checkpoint of step {attempt.run.step} failed: {type(error).__name__}: {error}. Earlier checkpoints are "
                "untouched: resume=auto continues there"
            )

    def _receipts(self, attempt: _Attempt, writers: list[RankOf], store: dist.Store) -> list[Receipt]:
        ticket = self._ticket(attempt)
        limit = self._config.checkpoint.timeout_s
        end = time.monotonic() + limit
        owed = {ticket.receipt(writer.rank, writer.replica): writer for writer in writers}
        receipts = []
        while owed:
            for key, writer in list(owed.items()):
                if store.check([key]):
                    said = json.loads(store.get(key))
                    if "error" in said:
                        raise CheckpointError(f"replica {writer.replica}, {said['error']}")
                    receipts.append(Receipt.from_json(said))
                    del owed[key]
                    store.delete_key(key)
                elif cause := self._dead(writer.worker):
                    raise WriterLost(f"rank {writer.rank} of replica {writer.replica} ({writer.worker}) is gone while it saved: {cause}")
            if attempt.abandoned.is_set():
                raise CheckpointError("the run ended before all ranks had written")
            if owed and time.monotonic() > end:
                late = ", ".join(f"{w.replica}/{w.rank}" for w in owed.values())
                raise CheckpointError(f"ranks {late} have not written their share in {limit:g} s (checkpoint.timeout_s)")
            if owed:
                time.sleep(_POLL_S)
        return receipts

    def _publish(self, attempt: _Attempt, receipts: list[Receipt]) -> Path:
        config, run, folder = self._config, attempt.run, attempt.folder
        if self._described is None:
            self._described = export.described(config)
        written = {name: entry for receipt in receipts for name, entry in receipt.files.items()}
        for name, content in {INDEX: as_json(make_index(receipts)), **self._described}.items():
            written[name] = self._patiently(attempt, folder / name, partial(_write, content=content))
        if config.checkpoint.hf:
            written |= self._patiently(attempt, folder, partial(_export, config=config, described=self._described))
        state = {
            "step": run.step, "reference": run.reference, "recipe": run.recipe_state,
            "rng": {library: bytes(said.tolist()).hex() for library, said in attempt.rng.items()},
        }
        details = {"replicas": len({receipt.replica for receipt in receipts}), "ranks_per_replica": self._layout.ranks_per_replica}
        inner = inner_layout(self._layout)
        final = self._patiently(attempt, folder, lambda at: manifest.publish(at, run.step, inner, state, written, details))
        size = sum(entry.bytes for entry in written.values())
        seconds = time.monotonic() - attempt.since
        self._events.emit("save", step=run.step, path=str(final), checkpoint_bytes=size, seconds=seconds, blocked_s=attempt.blocked_s)
        keep = config.checkpoint
        try:
            for old in [*manifest.retire(final.parent, keep.keep_last, keep.keep_every), *manifest.sweep(final.parent)]:
                self._events.emit("delete", path=str(old))
        except EverstepError as error:  # the new one is complete; the next save deletes what this one could not
            self._events.emit("save_retried", step=run.step, rank=-1, cause=str(error))
        return final

    def _patiently(self, attempt: _Attempt, path: Path, action: Callable[[Path], Any]) -> Any:
        note = lambda text: self._events.emit("save_retried", step=attempt.run.step, rank=-1, cause=text)
        return patiently(action, path, self._config.checkpoint.retry_s, attempt.abandoned, note)


class _Attempt:
    """One try of one save."""

    def __init__(self, run: SavedRun, name: str, folder: Path) -> None:
        self.run, self.id, self.folder, self.since = run, name, folder, time.monotonic()
        self.prepared = self.followed = self.published = False
        self.done = threading.Event()
        self.final: Path | None = None
        self.failure: CheckpointError | None = None
        self.abandoned = threading.Event()
        self.blocked_s = 0.0
        self.rng: dict[str, Any] = {}

    @property
    def ended(self) -> bool:
        return self.done.is_set() if self.followed else self.final is not None or self.failure is not None


def _existing(checkpoints: Path, step: int) -> Path | None:
    """The whole checkpoint of ``step``, if there is one; ``latest`` names it then."""
    found = manifest.existing(checkpoints, step)
    if found is not None:
        with storage_errors("pointing at", found):
            manifest.set_pointer(found)
    return found


def _write(path: Path, content: bytes) -> FileEntry:
    with storage_errors("writing", path):
        return write_file(path, content)


def _export(folder: Path, config: Config, described: Iterable[str]) -> dict[str, FileEntry]:
    with storage_errors("writing", folder):
        return export.beside_state(folder, config, described)


# ---------------------------------------------------------------- reading


def read(path: Path) -> SavedRun:
    """The run's part of a checkpoint, or of copies that were flushed."""
    if flushed.is_flushed(path):
        kept = flushed.read(path)
        assert kept.state is not None
        return SavedRun(kept.step, kept.reference, kept.state)
    state = manifest.read_run_state(path)
    return SavedRun(int(state["step"]), bool(state["reference"]), dict(state["recipe"]))


def restore_rng(path: Path) -> None:
    """Give the random number generators of this process, the lead, the states that they had."""
    import torch

    if flushed.is_flushed(path):
        return  # what is drawn from them is not repeated after a rollback either
    said = manifest.read_run_state(path)["rng"]
    rng.restore({library: torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for library, state in said.items()})
