"""What the controller needs of whatever starts and reaches worker processes, and how such a process makes its worker.

:class:`everstep.cluster.ray.host.RayHost` has Ray actors on any number of nodes; :class:`everstep.cluster.forked.ForkedHost` forks children
of this machine from a process that has done the imports. Both run the same :class:`everstep.cluster.worker.worker.Worker`.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import Config
from everstep.errors import CoordinatorLost, EverstepError
from everstep.node.agent import AgentSpec
from everstep.recovery import rendezvous
from everstep.telemetry import diagnosis

if TYPE_CHECKING:
    from everstep.cluster.formation import Meant
    from everstep.cluster.worker.worker import Slots


_KILLED_S = 10.0  # for who expelled a worker to kill it: what it was doing is looked at before that


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process needs to start. ``coordinator`` and ``store``: (host, port). ``role``: a rank or spare, or a rollout engine."""

    worker_id: str
    config: Config
    coordinator: tuple[str, int]
    token: str
    store: tuple[str, int]
    events_dir: str
    log_path: str
    run_dir: str
    attempt: int
    role: Literal["rank", "engine"] = "rank"


@dataclass(frozen=True)
class WorkerInfo:
    worker_id: str
    pid: int
    host: str
    node_id: str


class ProcessEnded(Exception):
    """The worker that owes a result has no process any more. The message is the system's word on it."""


class NoRoom(EverstepError):
    """There was no place for one more process, so far."""


class Served(Protocol):
    """What a worker process runs calls on."""

    def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], meant: Meant | None = None) -> Any: ...


class Host(Protocol):
    """Workers by their ids. A *pending* is the promise of one call's result: hashable, of whatever kind the host likes."""

    address: str  # of this machine, as workers reach it

    @property
    def infos(self) -> Mapping[str, WorkerInfo]:
        """Of the workers that started."""

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """One process for each, imports done. Raises BadInput (no room), DeadlineExceeded, or what a worker raised."""

    def handle(self) -> dict[str, Any]:
        """What another controller needs to reach these workers if this one dies (JSON); empty if they end with it."""

    def attach(self, handle: Mapping[str, Any]) -> None:
        """In the place of ``start``: reach the workers of a dead controller, those that live. Raises BadInput if nobody can. Until
        :meth:`keep`, ``close`` leaves them as they are."""

    def keep(self) -> None:
        """The takeover stands: the workers that were reached are this host's, and end with it."""

    def add(self, spec: WorkerSpec, instead_of: str, avoid: Collection[str] = ()) -> None:
        """One more process once the run goes on: where the dead worker ``instead_of`` was, if that machine lives, else wherever there
        is room, but not on the nodes (ids) to ``avoid``. Returns when it is ready; called on threads of its own. Raises NoRoom if there
        was none for some time, or another EverstepError."""

    def has_place(self, worker: str) -> bool:
        """Whether the machine of a dead worker lives, so that ``add`` can start a process there at once."""

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call ``on_end(worker)`` on another thread as soon as a worker's process ends, from now on; of those of this machine. Other machines
        have agents for it."""

    def run_agent(self, spec: AgentSpec, worker: str) -> None:
        """An agent on the machine that ``worker`` is on; returns, or raises EverstepError, when it has ended."""

    def end_agent(self, node: str) -> None:
        """Kill the agent of a machine (its host name), which answers no more. Nothing happens if there is none."""

    def share(self, batch: TrainingBatch) -> Any:
        """What stands for a batch in ``submit``, sent once however many workers get it."""

    def slots(self, shared: list[list[Any]]) -> Slots:
        """A step's slots (micro-batches by inner data-parallel rank), of what ``share`` returned."""

    def submit(self, worker: str, meant: Meant | None, method: str, *args: Any, **kwargs: Any) -> Any:
        """Begin a public method of the worker; a worker does one call after the other. ``meant``: for whom; None: for
        the worker, whatever its place."""

    def wait(self, pending: Collection[Any], timeout_s: float) -> list[Any]:
        """Those that are done, as soon as one is; none after ``timeout_s``."""

    def result(self, pending: Any, worker: str, what: str) -> Any:
        """Of one that is done. Raises ProcessEnded, or an EverstepError: the worker's own if it was typed, else WorkerFailed."""

    def signal(self, worker: str, number: int) -> None:
        """Send a signal to the worker's process. Nothing happens if it is gone."""

    def cut(self, worker: str) -> str:
        """Cut the worker's process off the network, for good; says how. "" if this host has no way to."""

    def end(self, worker: str) -> None:
        """Kill the worker's process; returns once it can do no more harm (rule 8), however long that takes. Raises DeadlineExceeded if the host
        is closed first. Called on threads of its own."""

    def close(self) -> None:
        """End all processes, whatever state they are in; but for a dead controller's (see ``attach``)."""


class Sharing:
    """Hands each batch to the host once, however many ranks get it."""

    def __init__(self, host: Host) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self._host = host
        self._shared: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, TrainingBatch):
            return value
        if id(value) not in self._shared:
            start = time.monotonic()
            self._shared[id(value)] = (value, self._host.share(value))
            self.seconds += time.monotonic() - start
            self.nbytes += value.nbytes
        return self._shared[id(value)][1]


def make_worker(spec: WorkerSpec, node: str, abandon: Callable[[str], None] | None = None) -> Served:
    """In the worker's own process: its output goes to its log from now on, its device is ready, its channel connected.

    ``node``: processes of one node share its memory. ``abandon``: called once its coordinator is gone and no other one came in time; ends the process.
    A worker that is expelled by a coordinator that lives ends alone: what the others share is not its to remove.
    """
    _redirect_output(Path(spec.log_path))
    if spec.config.watch.diagnose:  # first of all: a signal that nobody awaits ends a process
        diagnosis.register(Path(spec.log_path).with_suffix(".stacks"))
    warnings.filterwarnings("ignore", module=r"torch|megatron|transformers")  # advice to developers of those

    import torch

    from everstep.checkpoint import flushed, memory
    from everstep.cluster import janitor
    from everstep.cluster.device import choose_device
    from everstep.cluster.worker.preemption import Notices
    from everstep.engine import cpu
    from everstep.engine.groups import NCCL_ENVIRONMENT
    from everstep.node import beat
    from everstep.recovery.control import Control
    from everstep.telemetry import logs
    from everstep.telemetry.events import EventLog

    os.environ.update(NCCL_ENVIRONMENT)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = choose_device(spec.config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # the context is made now, not in the first step of a spare
    else:
        cpu.apply()
    beat.start(spec.worker_id, device)
    recovery = spec.config.recovery
    control = Control(
        spec.coordinator, spec.token, spec.worker_id, recovery.heartbeat_s, fence_s=recovery.fence_s, grace_s=recovery.controller_grace_s
    )
    events = EventLog(Path(spec.events_dir) / f"{spec.worker_id}.jsonl", spec.worker_id)
    run_dir = Path(spec.run_dir)
    control.find = lambda: rendezvous.find(run_dir)

    copies = memory.folder_of(spec.run_dir, spec.attempt)

    def abandoned(cause: str) -> None:
        janitor.abandon(copies)
        events.emit("error", error="CoordinatorLost", message=cause)
        (abandon or _exit)(cause)

    def refused(cause: str) -> None:
        time.sleep(_KILLED_S)
        _exit(cause)

    control.on_abandoned, control.on_refused = abandoned, refused
    log = spec.config.log
    start_log = functools.partial(logs.start, Path(spec.log_path).with_suffix(".jsonl"), spec.worker_id, log.level, log.max_bytes, log.keep)
    if spec.role == "engine":
        from everstep.rl.rollout.serving import EngineWorker

        start_log(lambda: dict(zip(("step", "phase"), control.where, strict=True)))
        return EngineWorker(spec.config, spec.worker_id, device, control, spec.store, events, run_dir)
    from everstep.cluster.worker.worker import Worker

    Notices(recovery.preemption_file, control.leaving)
    if recovery.memory_checkpoint_every and memory.ROOT.is_dir():  # else it is refused by whoever makes the first copy
        janitor.enter(copies, flushed.folder_of(run_dir, spec.attempt), recovery.controller_grace_s)
    worker = Worker(spec.config, spec.worker_id, device, control, spec.store, events, copies / node)
    start_log(worker.where)
    return worker


def _exit(cause: str) -> None:
    os._exit(CoordinatorLost.exit_code)  # without the interpreter's shutdown: groups of a broken world may wait in their destructors


def _redirect_output(path: Path) -> None:
    """Everything this process prints, from Python or from C++, goes to its own log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
