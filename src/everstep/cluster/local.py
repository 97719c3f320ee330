"""Launcher local: torchrun started the ranks of one replica, and the recipe runs in each of them.

Every rank makes the same calls in the same order; each does its own part, and results are exchanged so that all see the same.
The coordinator runs in rank 0, and the step transaction is the one of launcher ray: one replica, votes of all ranks, a durable
commit record. If a rank dies, torchrun ends the others; the run resumes from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from everstep.checkpoint import memory, saving
from everstep.checkpoint.saving import RankOf, SavedRun, Saver
from everstep.checkpoint.storage import CheckpointError
from everstep.checkpoint.writer import Ticket
from everstep.cluster import environment
from everstep.cluster.batch import TrainingBatch
from everstep.cluster.device import choose_device
from everstep.cluster.dispatch import get_dispatch, mesh_of, ranks_of
from everstep.cluster.formation import Formation
from everstep.cluster.group import Role, StepResult
from everstep.cluster.island import Round
from everstep.cluster.results import combine, compare_hashes
from everstep.cluster.slots import ListSlots, cut_round, cut_slots, require_synchronous, sample_ids
from everstep.cluster.target import LaunchedTarget, judge, judge_every_s
from everstep.cluster.worker import Worker
from everstep.config import derive
from everstep.config.schema import Config
from everstep.engine import cpu
from everstep.engine.groups import NCCL_ENVIRONMENT
from everstep.engine.loss import LossSpec
from everstep.errors import BadInput
from everstep.recovery.commitlog import CommitLog
from everstep.recovery.control import Control
from everstep.recovery.coordinator import Coordinator
from everstep.recovery.desk import Listener
from everstep.recovery.faults import FaultInjector
from everstep.recovery.server import CoordinatorServer
from everstep.recovery.view import Kind, Member, Record
from everstep.rl.rollout import Sampling
from everstep.run_dir import RunDir
from everstep.telemetry import diagnosis, logs
from everstep.telemetry.diagnosis import Diagnosis
from everstep.telemetry.events import EventLog

T = TypeVar("T")


def join_world(config: Config) -> environment.RankEnvironment:
    """Join torchrun's world of this replica. Raises BadInput if the environment or the number of ranks does not fit."""
    env = environment.read_environment()
    layout = derive.layout(config)
    if env.world_size != layout.ranks_per_replica:
        raise BadInput(
            f"torchrun started {env.world_size} processes, but layout.tp*cp*dp*pp={layout.ranks_per_replica}; use "
            f"--nproc_per_node {layout.ranks_per_replica} or change layout.*"
        )
    device = choose_device(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        cpu.apply()
    os.environ.update(config.env)  # a plain torchrun knows nothing of it
    os.environ.update(NCCL_ENVIRONMENT)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=config.recovery.step_timeout_s))
    return env


class LocalGroup:
    """The :class:`everstep.cluster.group.Group` of launcher local. The caller has joined the world (:func:`join_world`)."""

    def __init__(self, config: Config, run_dir: RunDir, events: EventLog | None):
        """``events``: the lead's log; None on the other ranks."""
        self.config, self._run_dir, self._lead_events = config, run_dir, events
        self.layout = derive.layout(config)
        self._rank = dist.get_rank()
        self._reference = False
        self._stage = ""
        self.recipe_state: dict[str, Any] = {}
        self.closing = contextlib.ExitStack()
        self.dispatch_bytes, self.dispatch_seconds = 0, 0.0  # every rank has the whole batch already: nothing is sent
        self._server: CoordinatorServer | None = None
        self._injector: FaultInjector | None = None
        if config.watch.diagnose:
            diagnosis.register(run_dir.rank_log(self._rank).with_suffix(".stacks"))
        workers = tuple(f"w{rank}" for rank in range(self.layout.ranks_per_replica))
        member = Member(0, 0, workers)
        address, token = self._start_coordinator(workers)
        fence_s = None if self.is_lead else config.recovery.fence_s  # the lead's coordinator lives and dies with it
        control = Control(address, token, workers[self._rank], config.recovery.heartbeat_s, fence_s=fence_s)
        store = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        own_events = EventLog(run_dir.events / f"{workers[self._rank]}.jsonl", workers[self._rank])
        self._worker = Worker(config, workers[self._rank], choose_device(config), control, store, own_events,
                              memory.folder_of(run_dir.path, run_dir.attempt))
        log = config.log
        self._log = logs.start(run_dir.logs / f"rank-{self._rank:03d}.jsonl", workers[self._rank], log.level, log.max_bytes, log.keep, self._worker.where)
        self._saver: Saver | None = None
        if self.is_lead:
            connect = lambda: dist.TCPStore(*store, is_master=False, timeout=timedelta(seconds=60))
            self._saver = Saver(config, self.layout, self._events, connect, lambda worker: None)
        self._worker.run("form", (Formation(0, self._rank, 0, workers, "weights", False),), {})
        dist.barrier()
        if self._server:
            self._server.open([member])
        self._control = control

    def _start_coordinator(self, workers: tuple[str, ...]) -> tuple[tuple[str, int], str]:
        """Rank 0 hosts the coordinator; everybody learns its address through torchrun's world."""
        shared: list[Any] = [None]
        if self.is_lead:
            place: Callable[[str], tuple[int, int]] = lambda worker: (0, workers.index(worker))
            log = CommitLog(self._run_dir.path / "commits.log")
            token = secrets.token_hex(16)
            pids: dict[str, int] = {}
            target = LaunchedTarget(
                lambda: server, place, lambda worker, number: os.kill(pids[worker], number), lambda worker: str(pids[worker]),
                lambda: [], {},
            )
            self._injector = injector = FaultInjector(self.config.faults, target, self._events)
            host, recovery = os.environ["MASTER_ADDR"], self.config.recovery
            on_record: Callable[[Record], None] = lambda record: (
                injector.on_commit(record.step) if record.kind is Kind.COMMIT else None
            )
            listener = Listener(
                place, injector.on_phase, on_record=on_record, on_word=injector.on_word,
                before_kill=lambda worker, cause: self._before_end(worker, cause, pids),
            )
            self._server = server = CoordinatorServer(
                Coordinator(log.incarnation, 0, 1), log, self._events, listener, token, recovery.silence_s,
                2 * recovery.link_timeout_s, host, recovery.heartbeat_s, judge(recovery), judge_every_s(recovery),
            )
            shared = [(server.address, token)]
            dist.broadcast_object_list(shared)
            gathered: list[Any] = [None] * len(workers)
            dist.all_gather_object(gathered, os.getpid())
            pids.update(zip(workers, gathered, strict=True))
        else:
            dist.broadcast_object_list(shared)
            dist.all_gather_object([None] * len(workers), os.getpid())
        address, token = shared[0]
        return (str(address[0]), int(address[1])), token

    def _before_end(self, worker: str, cause: str, pids: dict[str, int]) -> None:
        """A rank is silent or makes no progress: the run will end, and what all ranks did is written down."""
        assert self._server is not None
        server = self._server
        if self.config.watch.diagnose:
            found = Diagnosis(
                self._run_dir.path / "diagnosis", lambda w, number: os.kill(pids[w], number), lambda w, message: server.order(w, dict(message)),
                lambda: {w: (pid, socket.gethostname()) for w, pid in pids.items()}, lambda w: self._run_dir.rank_log(int(w.removeprefix("w"))).with_suffix(".stacks"),
                lambda folder, w: self._events.emit("diagnosis", step=server.coordinator.committed + 1, replica=0, rank=int(w.removeprefix("w")), worker=w, path=str(folder)),
            )
            found.take(worker, cause, server.coordinator.committed + 1, server.whereabouts())
            found.finish(worker)

    # -- verbs -----------------------------------------------------------------------------------------------------------------

    @property
    def is_lead(self) -> bool:
        return self._rank == 0

    @property
    def _events(self) -> EventLog:
        assert self._lead_events is not None, "only the lead writes the run's events"
        return self._lead_events

    @property
    def committed_step(self) -> int:
        return self._control.latest.view.committed

    @property
    def dealt_replicas(self) -> int:
        return 1

    @property
    def unfired_faults(self) -> list[str]:
        return self._injector.unfired if self._injector else []

    def call(self, dispatch: str, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._injector:
            self._injector.prepare(self.committed_step + 1)
        ranks = ranks_of(self.layout)
        how = get_dispatch(dispatch)
        how.validate(ranks, args, kwargs)
        my_args, my_kwargs = how.dispatch(ranks, args, kwargs)[self._rank]
        mine = self._worker.run(method, my_args, my_kwargs)
        if method == "keep_reference":
            self._reference = True
        return how.collect(ranks, self._exchange(mine))

    def rollout(self, prompts: TrainingBatch, sampling: Sampling) -> TrainingBatch:
        completed: TrainingBatch = self.call(
            mesh_of(self.config.recovery, sampling.samples_per_batch), "generate", prompts, sampling
        )
        return completed

    def rollout_ahead(self, prompts: TrainingBatch, sampling: Sampling) -> None:
        """There are no rollout engines: the ranks generate when they are asked for the samples."""

    def enter_stage(self, name: str) -> None:
        self._stage = name
        if self._injector:
            self._injector.on_stage(name, self.committed_step + 1)

    def train_step(
        self, batch: TrainingBatch, loss: LossSpec, lr: float, temperature: float = 1.0, role: Role = "actor",
        about: Mapping[str, Any] | None = None, state: dict[str, Any] | None = None,
    ) -> StepResult:
        require_synchronous(self.config)
        slots = cut_slots(batch, self.config.train, self.layout.dp)
        return self._step(slots, loss, lr, "train_step", lambda step: (step, ListSlots(slots), loss, lr, temperature, role), state, about)

    def train_round(
        self, batches: Sequence[TrainingBatch], loss: LossSpec, lrs: Sequence[float], temperature: float = 1.0, rollout: LossSpec | None = None,
        state: dict[str, Any] | None = None,
    ) -> StepResult:
        slots, bounds = cut_round(batches, self.config, rollout is not None)
        make: Callable[[int], Round] = lambda step: Round(step, bounds, tuple(lrs), temperature)
        return self._step(slots, loss, lrs[-1], "train_round", lambda step: (make(step), ListSlots(slots), loss, rollout), state)

    def _step(
        self, slots: list[tuple[TrainingBatch, ...]], loss: LossSpec, lr: float, method: str, arguments: Callable[[int], tuple[Any, ...]],
        state: dict[str, Any] | None, about: Mapping[str, Any] | None = None,
    ) -> StepResult:
        step = self.committed_step + 1
        if self._server and self._injector:
            self._injector.prepare(step)  # the others wait for this rank before they compute
            self._server.begin(step, sample_ids(slots), {"lr": lr} | dict(about or {}), state)
        report = self._worker.run(method, (*arguments(step), self._control.epoch.incarnation), {})
        reports = self._exchange(report)
        return combine(step, reports, reports[:1], loss, lr, len(slots), self._control.view)

    def once(self, function: Callable[..., T], *args: Any) -> T:
        """The lead computes; the others receive the result, or the exception."""
        shared: list[Any] = [None]
        if self.is_lead:
            try:
                shared = [(function(*args), None)]
            except Exception as error:  # handed to every rank, raised there and here
                shared = [(None, error)]
        dist.broadcast_object_list(shared)
        result, failure = shared[0]
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    def save(self, recipe_state: dict[str, Any], wait: bool = True) -> Path | None:
        if self._injector:
            self._injector.prepare(self.committed_step + 1)
        start = time.monotonic()
        ticket = self.once(self._begin_save, recipe_state, wait)
        if ticket is None:
            return self.once(lambda: self.saver.checkpoint(self.committed_step))
        self._worker.run("save_shard", (ticket,), {})
        self._exchange(None)  # everybody has taken it up
        if self.is_lead:
            self.saver.follow([RankOf(f"w{rank}", 0, rank) for rank in range(self.layout.ranks_per_replica)], time.monotonic() - start)
        return self.once(self._wait_saved) if wait else None

    def _begin_save(self, recipe_state: dict[str, Any], wait: bool) -> Ticket | None:
        with contextlib.suppress(CheckpointError):  # of the one on its way: it is told
            self.saver.wait()
        tickets = self.saver.begin(SavedRun(self.committed_step, self._reference, recipe_state), 1, patient=wait)
        return tickets[0] if tickets else None

    def _wait_saved(self) -> Path | None:
        return self.saver.wait()

    def save_wanted(self, due: bool) -> bool:
        return self.once(lambda: self.saver.wanted(due, self.committed_step))

    def finish_saves(self) -> None:
        self.once(self._wait_saved)

    def told_of_saves(self) -> list[str]:
        return self.saver.told() if self.is_lead else []

    @property
    def saver(self) -> Saver:
        assert self._saver is not None, "only the lead completes checkpoints"
        return self._saver

    def load(self, path: Path) -> dict[str, Any]:
        saved = saving.read(path)
        self._worker.run("load_shard", (str(path), saved.step, saved.reference), {})
        self._reference = saved.reference
        dist.barrier()
        if self._server:
            self._server.restart_at(saved.step)
        self._control.wait_for(
            lambda records: records[-1] if records[-1].view.committed == saved.step else None, 30.0, "the checkpoint's view"
        )
        self.recipe_state = saved.recipe_state
        return saved.recipe_state

    def interrupt(self, name: str) -> bool:
        return False

    def save_interrupted(self, saved_step: int) -> Path | None:
        """Refused by the configuration: torchrun ends every rank by itself."""
        return None

    def flush_copies(self) -> None:
        """There are none."""

    def verify(self) -> str:
        hashes = self._exchange(self._worker.run("state_hash", (), {}))
        return compare_hashes(ranks_of(self.layout), hashes, self.committed_step, self._lead_events)

    def status(self) -> dict[str, Any]:
        view = self._control.view
        return {"state": "voting", "stage": self._stage, "epoch": str(view.epoch), "committed_step": view.committed, "replicas": [0],
                "healing": [], "spares": 0, "deaths": 0, "ranks": self._server.whereabouts() if self._server else {}}

    def close(self) -> None:
        if self._saver:
            self._saver.give_up()
        self._worker.leave()
        self._control.close()
        if self._server:
            self._server.close()
        logs.stop(self._log)
        self.closing.close()

    def _exchange(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.layout.ranks_per_replica
        dist.all_gather_object(gathered, value)
        return gathered
