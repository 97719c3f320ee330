"""The one worker of both launchers: a process with a device that is a spare, or a rank of a replica.

A worker owns its engine, its links and its end of the coordinator's channel. The launcher tells it which place to take
(:meth:`Worker.form`) and calls its public methods; everything about membership it learns from the coordinator's log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from everstep.checkpoint import manifest, rng, saving, sharded
from everstep.checkpoint.index import Index
from everstep.checkpoint.memory import Stamp
from everstep.checkpoint.storage import place
from everstep.checkpoint.writer import RankWriter, Ticket
from everstep.cluster.batch import TrainingBatch
from everstep.cluster.device import memory_gb
from everstep.cluster.formation import Formation, Meant, called_off
from everstep.cluster.group import Role
from everstep.cluster.processes import out_of_memory
from everstep.cluster.slots import micro_batches, slot_seed, with_evaluated
from everstep.cluster.worker import admission, orphaned, rehearsal, world
from everstep.cluster.worker.exchange import gather_batches
from everstep.cluster.worker.island import Island, Round, RoundWork, without_participants
from everstep.cluster.worker.keeping import Keeping
from everstep.cluster.worker.rank_state import Kept, WholeState, with_digests_of
from everstep.cluster.worker.run_store import RunStore
from everstep.cluster.worker.step_work import Slots, StepWork
from everstep.config import derive
from everstep.config.schema import Config
from everstep.engine import cpu, source
from everstep.engine.groups import close_groups, forget_frames
from everstep.engine.loss import LossSpec
from everstep.engine.offload import Part
from everstep.engine.step import Engine
from everstep.errors import (
    CoordinatorLost,
    DeadlineExceeded,
    EverstepError,
    InvariantViolated,
    ReplicaBroken,
    Superseded,
    WorkerFailed,
    first_line,
)
from everstep.layout import Position
from everstep.node import page
from everstep.recovery.control import Control
from everstep.recovery.custody import Custody
from everstep.recovery.healing import Healing
from everstep.recovery.link import Link, Links
from everstep.recovery.replica import ReplicaWorld
from everstep.recovery.transaction import StepReport, Transaction
from everstep.recovery.victim import Victim
from everstep.recovery.view import Epoch, Kind, Record
from everstep.rl.rollout import Sampling, sync
from everstep.rl.rollout.transformers import TransformersRollout
from everstep.telemetry import diagnosis
from everstep.telemetry.events import EventLog

LOG = logging.getLogger(__name__)

#: What a rank says it does; other methods: "call".
CALL_PHASES = {"save_shard": "save", "generate": "rollout", "send_weights": "send", "form": "form", "logprobs": "logprobs", "values": "values"}
STEPS = ("train_step", "train_round")  # they tell their phases themselves
BROKEN_NOTICE_S = 5.0  # how long a failed collective waits for the coordinator to say that a rank is gone
OUT_OF_MEMORY_STATUS = 12  # ENOMEM


class Worker:
    """Public methods are what ``group.call`` can call; each raises ReplicaBroken if another rank of the replica is gone."""

    def __init__(
        self, config: Config, worker_id: str, device: torch.device, control: Control,
        store_address: tuple[str, int], events: EventLog, copies: Path,  # this node's folder of them (everstep.checkpoint.memory)
    ):
        self.config, self.worker_id, self.device, self.control, self.events = config, worker_id, device, control, events
        self.store = RunStore(store_address, config.recovery.link_timeout_s, comes_back=config.replica.id is not None)
        self._has_reference = False
        self._rollbacks = 0  # that this process has heard of
        self._void: WholeState | Island | None = None  # a state of steps that were taken back
        self._source = source.resolve(config.model)
        self._critic_source = source.resolve(derive.critic(config).model) if config.recipe == "ppo" else None
        self._tokenizer: Any = None
        self._rollout: TransformersRollout | None = None
        self._rounds_rollout: tuple[LossSpec | None, Any] | None = None
        self._rollout_weights: tuple[int | None, int] | None = None  # known to every rank: all decide alike whether to gather weights
        self._formation: Formation | None = None
        self._links: Links | None = None
        self._transaction: Transaction | None = None
        self._state: WholeState | Island | None = None
        self._kept: Kept | None = None
        self._world_store: dist.Store | None = None
        self._entered = threading.Event()  # a view has included this worker in its present formation
        self.layout = derive.layout(config)
        self.calls = orphaned.Calls()
        self.keeping = Keeping(config, self.layout, worker_id, copies, control, self.store, events)
        self.on_expelled: Callable[[], None] = self._abort_collectives  # this life is no member any more; on the control thread
        self._writer = RankWriter(self.store.open, device, events)
        self.victim = Victim(worker_id, events, control.fault_word, lambda: "step {}, {}".format(*control.where))
        control.on_record, control.on_fenced = self._on_record, self._fenced
        control.describe, control.on_adopted = lambda incarnation: orphaned.describe(self, incarnation), lambda found: orphaned.adopted(self, found)
        control.on_order, control.on_phase = self.victim.obey, self.victim.enter
        control.on_diagnose = lambda folder: diagnosis.answer(folder, worker_id)
        events.emit("process_start", device=str(device))

    # -- place in the group ------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        return self.state.engine

    @property
    def state(self) -> WholeState | Island:
        if self._state is None:
            raise WorkerFailed(f"worker {self.worker_id} has no place in a replica yet")
        return self._state

    @property
    def formation(self) -> Formation:
        if self._formation is None:
            raise WorkerFailed(f"worker {self.worker_id} has no place in a replica yet")
        return self._formation

    @property
    def position(self) -> Position:
        return self.layout.position(self.formation.rank)

    def where(self) -> dict[str, Any]:
        """Place, step and phase of this process, for its log."""
        place = (self._formation.replica, self._formation.rank) if self._formation else (None, None)
        return dict(zip(("replica", "rank", "step", "phase"), (*place, *self.control.where), strict=True))

    def form(self, formation: Formation) -> None:
        """Take a place: join the replica's world, build the engine. A rank that lived on brings its state along.

        Raises ReplicaBroken if another rank of the replica is gone meanwhile; this one keeps what it had and can form again.
        """
        LOG.info("takes place %d/%d in life %d, state from %s", formation.replica, formation.rank, formation.build, formation.start)
        self.leave()
        self._meet(formation)
        failure: Exception | None = None
        try:
            self._enter(formation)
        except Exception as error:  # of whatever library: told as what it means, once nothing of it is held any more
            failure = world.explained(error, formation.replica, lambda: self._look(formation)) if len(formation.workers) > 1 else error
            forget_frames(error)  # the engine's, and with them its groups
        if failure is not None:
            self._state = self._transaction = self._links = self._formation = self._world_store = None
            close_groups()
            raise failure
        self._kept = None  # not before: who could not enter still has what it had

    def _meet(self, formation: Formation) -> None:
        """Wait until all ranks of the replica are here. Nothing can interrupt torch.distributed once it waits for one that is
        dead; here the launcher can call the formation off."""
        name, store = formation.world_name, self.store
        store.set(f"{name}/here/{formation.rank}", "1")
        everybody = [f"{name}/here/{rank}" for rank in range(len(formation.workers))]
        end = time.monotonic() + self.config.recovery.reform_timeout_s
        while not store.check(everybody):
            self._look(formation)
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"replica {formation.replica}: its ranks did not meet in {self.config.recovery.reform_timeout_s:g} s "
                    "(recovery.reform_timeout_s)"
                )
            time.sleep(0.005)

    def _look(self, formation: Formation) -> None:
        """Raises ReplicaBroken if the formation was called off."""
        self.control.must_not_be_lost()
        if self.store.check([called_off(formation.life)]):
            raise ReplicaBroken(f"replica {formation.replica}: a rank is gone, before all had formed")

    def _enter(self, formation: Formation) -> None:
        self._formation, kept, rollbacks = formation, self._kept, self._rollbacks
        if kept and (kept.position != self.position or kept.scalars["has_reference"] != formation.reference):
            kept = None  # it is now another rank, or lacks the reference model: it heals whole
        if kept:
            kept.move_to_host(self.config.engine.offload)
        self._entered.clear()
        self.calls.renew()
        self._rollout_weights = None
        size = len(formation.workers)
        os.environ.update(RANK=str(formation.rank), WORLD_SIZE=str(size), EVERSTEP_REPLICA=str(formation.replica), EVERSTEP_EPOCH=str(self.control.epoch))
        page.place(formation.replica, formation.rank)
        timeout = timedelta(seconds=self.config.recovery.others_timeout_s)
        if not dist.is_initialized():  # torchrun's world is made by the launcher
            self._world_store = self.store.open()
            if self.device.type != "cuda":  # threads of NCCL ask the store when no Python may run
                self._world_store = world.WatchedStore(self._world_store, lambda: self._look(formation))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                store=dist.PrefixStore(formation.world_name, self._world_store), rank=formation.rank, world_size=size, timeout=timeout,
            )
        loads = formation.start == "weights" or (self.config.lora.rank and kept is None)
        engine = Engine(self.config, self._source.hf_config, self.position, self.layout, self.device)
        critic: Engine | None = None
        if self._critic_source:
            configured = derive.critic(self.config)
            critic = Engine(configured, self._critic_source.hf_config, self.position, self.layout, self.device, "value", beside=engine)
        for model, origin in ((engine, self._source), (critic, self._critic_source)):
            if loads and model and origin:
                if self.config.model.init == "random":
                    model.init_random(self.config.seed)
                else:
                    model.load_pretrained(origin)
        if formation.reference:
            engine.keep_reference()
        version = 0 if formation.start == "weights" else None
        if self.config.semisync.method == "none":
            self._state = WholeState(engine, critic, version)
        else:
            self._state = Island(engine, version, self.config, source.describe(self.config.model))
        self._state.before_change = self._settle_save
        if kept:
            self._state.load_scalars(kept.scalars)
            for name, tensor in self._state.tensors(frozen=True).items():
                tensor.copy_(kept.tensors[name])
            self._state.version = kept.version if self._rollbacks == rollbacks else None  # it may be void since
        replica, rank, recovery, control = formation.replica, formation.rank, self.config.recovery, self.control
        build: Callable[[str, Any], Link] = lambda name, replicas: Link(
            name, replicas, replica, rank, self.store.open(), self.device, recovery.link_timeout_s
        )
        self._links = Links(build, recovery.link_timeout_s)
        peers = ReplicaWorld(str(replica), size, recovery.others_timeout_s, self._is_broken)
        healing = Healing(replica, rank, self.store.as_store, control.local_host, self._state, recovery, self.events, control.wants_heal)
        self._transaction = Transaction(
            recovery, replica, formation.build, rank, self.worker_id, control, self._links, peers, healing, self._state, self.events,
            Custody(self.config.watch.check_state_every, self._state, self._corrupt), derive.held_s(self.config),
        )
        self.events.emit("form", epoch=self.control.epoch.key, replica=replica, rank=rank, build=formation.build, world_size=size)
        self._has_reference = formation.reference
        self.keeping.take_place(replica, rank, peers)
        if formation.start == "weights":
            self.keeping.copy(self._state)
        self.events.emit("model_ready", replica=replica, rank=rank, source="heal" if formation.start == "peer" else self.config.model.init)

    def rehearse(self) -> None:
        """Of a spare that nobody needs at present (:mod:`everstep.cluster.worker.rehearsal`)."""
        if self._formation is None and self._kept is None:
            rehearsal.rehearse(self.config, self._source.hf_config, self.device, self.events)

    def admit(self, link: str, end: int, alone: bool) -> list[dict[str, Any]]:
        """Examine this device by itself (``alone``), and with that of another process, if there is a ``link`` to it (:mod:`everstep.cluster.worker.admission`)."""
        connect: Callable[[str, int], Link] = lambda name, me: Link(name, (0, 1), me, 0, self.store.open(), self.device, admission.SUM_S)
        return admission.examine(self.device, self.config.watch.admission_s, (link, end) if link else None, connect, alone)

    def leave(self, after: BaseException | None = None) -> None:
        """Drop all groups, now: closed sockets are how ranks that still wait for this one learn that it left. A clean state is kept for the
        next formation. ``after``: what ended the call; its frames hold what this rank waited for, and with it the sockets."""
        if after is not None:
            forget_frames(after)
        state, links, formation, transaction = self._state, self._links, self._formation, self._transaction
        self._state = self._transaction = self._links = self._formation = None
        if links:
            links.drop_all()
        if transaction:
            transaction.close()
        if state is None or formation is None:
            return
        if state.version is not None and state is not self._void and not state.island:  # an island's ranks all begin where one other island is
            self._kept = Kept(self.layout.position(formation.rank), state.tensors(frozen=True), state.scalars(), state.version)
        state.close()
        page.place(-1, -1)
        self.events.emit("release", replica=formation.replica, rank=formation.rank)

    # -- the coordinator's log (on the control thread) -----------------------------------------------------------------------

    def _forget_what_is_void(self, record: Record) -> None:
        """A state beyond the committed step is of steps that were taken back: when they are made again its version will be that of another one."""
        back, kept, state = record.kind is Kind.ROLLBACK, self._kept, self._state
        void = lambda version: version > record.view.committed if version is not None else back
        self._rollbacks += back
        if kept and void(kept.version):
            self._kept = None
        if state is not None and self.worker_id not in record.view.workers and void(state.version):
            self._void = state

    def _on_record(self, record: Record) -> None:
        self._forget_what_is_void(record)
        formation = self._formation
        if formation is None:
            return
        member = record.view.member_of(self.worker_id)
        if record.kind is Kind.BUILD:
            links = self._links
            if member and links:
                name, number = record.view.link_id, record.number
                links.build_in_background(record, lambda: self.control.build_after(number), lambda: self.control.link_ready(name))
        elif member and (member.replica, member.build) == formation.life:
            self._entered.set()
        elif self._entered.is_set():
            self.on_expelled()

    def _abort_collectives(self) -> None:
        """A NCCL collective whose peer died spins for ever (gloo's raises). Not on the control thread: it must go on listening."""
        if self.device.type == "cuda" and self._state:
            threading.Thread(target=self._state.engine.abort, name="abort", daemon=True).start()

    def _fenced(self, cause: str) -> None:
        """The coordinator fell silent: whoever waits for it stops by itself; only a collective on a GPU must be ended."""
        if (formation := self._formation) is not None:
            self.events.emit("fenced", epoch=self.control.epoch.key, replica=formation.replica, rank=formation.rank, cause=cause)
        if self.device.type == "cuda" and self._state:
            self._state.engine.abort()

    def _is_broken(self) -> bool:
        """Raises CoordinatorLost if it cannot be known any more."""
        self.control.must_not_be_lost()
        formation = self._formation
        return formation is not None and self._entered.is_set() and not self.control.includes(self.worker_id, formation.build)

    # -- calls ---------------------------------------------------------------------------------------------------------------

    def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], meant: Meant | None = None) -> Any:
        """Call a public method; tells a broken replica (another rank is gone) from a failure of the method itself.

        ``meant``: which formation of which replica the call is for, and beside which coordinator it was made. One that was queued for a
        former life, or by a controller that is gone, is refused: no other rank makes it now.
        """
        cpu.enter_thread()
        if meant is not None:
            if self._formation is None or self._formation.life != meant[:2]:
                raise ReplicaBroken(f"replica {meant[0]}: {method} was called in its life {meant[1]}, which is over")
            self.calls.begin(method, meant[2])
        function = getattr(self, method, None)
        if method.startswith("_") or not callable(function):
            raise WorkerFailed(f"worker has no public method {method!r}")
        try:
            with self._telling(method):
                return function(*args, **kwargs)
        except ReplicaBroken as error:
            LOG.info("%s ended: %s", method, error)
            self.leave(error)
            raise
        except Superseded:
            raise
        except EverstepError as error:
            LOG.warning("%s ended: %s: %s", method, type(error).__name__, error)
            if self.control.orphaned:
                self.leave(error)
            raise
        except Exception as error:  # a fault boundary: told as what it means to the run
            formation = self._formation
            if out_of_memory(error):
                self._end(f"out of memory in {method}: {first_line(error)}")
            # RuntimeError and ValueError are what torch.distributed raises when a peer closed its connection.
            if formation and isinstance(error, RuntimeError | ValueError) and len(formation.workers) > 1 and self._wait_broken():
                self.leave(error)
                raise ReplicaBroken(f"replica {formation.replica}: {error} (in {method})") from error
            if self.control.orphaned:  # what a dead controller shared may be gone: the other ranks of the replica must not wait for me
                self.leave(error)
            who = f"rank {formation.replica}/{formation.rank}" if formation else f"spare {self.worker_id}"
            what = f"step {getattr(args[0], 'step', args[0])}" if method in STEPS else method
            LOG.exception("%s failed in %s", who, what)
            raise WorkerFailed(f"{who} failed in {what}: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _telling(self, method: str) -> Iterator[None]:
        """Say that this rank is in a call from outside, and afterwards, where it was before. A step tells its phases itself."""
        if method in STEPS:
            yield
            return
        before, phase = self.control.where, CALL_PHASES.get(method, "call")
        self.control.phase(self.control.committed + (phase != "save"), phase, method=method)
        try:
            yield
        finally:
            self.control.phase(*before)

    def _end(self, cause: str, status: int = OUT_OF_MEMORY_STATUS) -> NoReturn:
        """A process without memory can promise nothing: it ends, and its peers go on as after any death."""
        with contextlib.suppress(MemoryError, CoordinatorLost):  # even saying so takes memory
            self.control.dying(cause)
        os._exit(status)

    def _corrupt(self, cause: str) -> NoReturn:
        """What this rank holds is not what it was given: nothing it says counts any more."""
        evict, formation = self.config.watch.evict_corrupt and self.config.recovery.enabled, self.formation
        self.events.emit("corruption", step=self.state.version, replica=formation.replica, rank=formation.rank,
                         action="evicted" if evict else "none", found="at rest")
        if evict:
            self._end(cause, InvariantViolated.exit_code)
        raise InvariantViolated(f"rank {formation.replica}/{formation.rank}: {cause} (watch.evict_corrupt=false)")

    def _wait_broken(self) -> bool:
        end = time.monotonic() + BROKEN_NOTICE_S
        while time.monotonic() < end:
            if self._is_broken():
                return True
            if self.control.orphaned:  # nobody can say so at present
                return False
            time.sleep(0.01)
        return False

    def train_step(
        self, step: int, slots: Slots, loss: LossSpec, lr: float, temperature: float, role: Role, called: Epoch | None
    ) -> StepReport:
        """``called``: in which view. A call beside a coordinator that is dead is given up; None: the recipe that calls is in the ranks, and
        outlives coordinators."""
        assert self._transaction is not None
        engine = self._work_with(role)
        report = self._transaction.run(StepWork(self, step, slots, loss.build(), lr, temperature, engine), called)
        if self.keeping.is_due(step):
            self.keeping.copy(self.state, step)
        sums, metrics = engine.read_sums(report.sums)
        return dataclasses.replace(report, sums=sums, metrics=metrics, memory_gb=memory_gb(self.device))

    def train_round(self, round: Round, slots: Slots, loss: LossSpec, rollout: LossSpec | None, called: Epoch | None) -> StepReport:
        """A round of semi-synchronous training. ``rollout``: names what makes the samples (everstep.cluster.worker.island.Rollout)."""
        assert self._transaction is not None
        if self._rounds_rollout is None or self._rounds_rollout[0] != rollout:
            made: Any = rollout.build() if rollout else None
            self._rounds_rollout = rollout, made  # kept: it may hold processes
        report = self._transaction.run(RoundWork(self, round, slots, loss.build(), self._rounds_rollout[1]), called)
        sums, metrics = self.engine.read_sums(without_participants(report.sums))
        return dataclasses.replace(report, sums=sums, metrics=metrics, memory_gb=memory_gb(self.device))

    def seed_of(self, step: int, slot: int, dp: int) -> int:
        return slot_seed(self.config.seed, step, slot, dp)

    def generate(self, batch: TrainingBatch, sampling: Sampling) -> TrainingBatch:
        """Completions for prompts; the collecting rank generates, its model-parallel peers help to gather the weights."""
        room = self.config.engine.offload
        self._work_with("actor")
        self._make_room(gradients=room.gradients, optimizer=room.optimizer)
        self._refresh_rollout()
        self._make_room(parameters=room.parameters)
        return self._rollout.generate(batch, sampling) if self._rollout else batch.slice(0, 0)

    def make_room(self) -> None:
        """Rollout engines need the device (rollout.colocated): what engine.offload names goes to the host."""
        room = self.config.engine.offload
        self._make_room(room.parameters, room.gradients, room.optimizer)

    def from_collecting_rank(self, batch: TrainingBatch) -> TrainingBatch:
        """What the collecting rank of this rank's data-parallel coordinate gives, without the data's own records. Collective over the replica."""
        if self.layout.ranks_per_replica == 1:
            return batch
        mine = TrainingBatch(batch.tensors, {n: c for n, c in batch.columns.items() if n != "record"}, batch.sample_ids, batch.weight_versions)
        everybody = gather_batches(mine if self.formation.rank in self.layout.collect_ranks() else None)
        found = everybody[self.layout.collect_ranks()[self.position.dp]]
        assert found is not None
        return found

    def send_weights(self, streams: dict[str, str], version: int, kind: sync.Kind) -> dict[str, str]:
        """Serve rollout engines (engine -> the stream that it joins) the weights of committed step ``version``.

        A collective of the replica: every rank gathers, the first one sends. Returns, there, engine -> why it did not get all.
        """
        if self.state.version != version:
            raise WorkerFailed(f"weights of step {version} were asked for; worker {self.worker_id} is at {self.state.version}")
        export = {"full": self.engine.export_hf, "base": self.engine.export_frozen, "adapter": self.engine.export_adapter}[kind]
        mine = streams if self.formation.rank == min(self.layout.collect_ranks()) else {}
        failed = sync.serve(mine, self.store.as_store, self.config.rollout.sync_timeout_s, self.control.local_host, export(), version, self.device)
        if self.config.rollout.colocated:
            self._make_room(parameters=self.config.engine.offload.parameters)
        return failed

    def logprobs(
        self, batch: TrainingBatch, temperature: float = 1.0, model: Literal["policy", "reference"] = "policy"
    ) -> TrainingBatch:
        """Adds the tensor ``logprobs`` (``ref_logprobs`` for model="reference"), shape (B, T), float32."""
        name = "logprobs" if model == "policy" else "ref_logprobs"
        cut = micro_batches(batch, self.config.train)
        results = self._work_with("actor").logprobs([micro for _, micro in cut], temperature, model)
        return with_evaluated(batch, name, cut, results)

    def values(self, batch: TrainingBatch) -> TrainingBatch:
        """Adds the critic's ``values``, shape (B, T), float32: column t of the state in which token t is chosen."""
        cut = micro_batches(batch, self.config.train)
        results = self._work_with("critic").values([micro for _, micro in cut])
        return with_evaluated(batch, "values", cut, results)

    def keep_reference(self) -> None:
        """The current weights become the reference model."""
        self._settle_save()
        self.engine.keep_reference()
        self._has_reference = True
        self.keeping.copy(self.state)  # the one before lacks it

    def offload_to_cpu(self, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> dict[Part, int]:
        """Bytes freed on this rank's device, by part, their contents being in host memory now; see ``Engine.offload_to_cpu``.

        Whatever is called next brings back what it needs.
        """
        return self._of_all_models(lambda engine: self._offload(engine, parameters, gradients, optimizer))

    def backload_to_gpu(self, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> dict[Part, int]:
        """Bytes taken on this rank's device, by part: the inverse of ``offload_to_cpu``, ahead of the first use."""
        return self._of_all_models(lambda engine: engine.backload_to_gpu(parameters, gradients, optimizer))

    def _of_all_models(self, move: Callable[[Engine], dict[Part, int]]) -> dict[Part, int]:
        """Bytes moved, by part, of the actor and of its critic if there is one."""
        moved = [move(engine) for engine in (self.engine, self.state.critic) if engine]
        return {part: sum(one[part] for one in moved) for part in moved[0]}

    def _offload(self, engine: Engine, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> dict[Part, int]:
        if self._transaction is not None:
            self._transaction.settle()
        self._settle_save()
        return engine.offload_to_cpu(parameters, gradients, optimizer)

    def _work_with(self, role: Role) -> Engine:
        """The engine of this role, which brings back what it needs; with engine.offload.idle_model the other one leaves the device."""
        if self.config.engine.offload.idle_model:
            idle: Role = "critic" if role == "actor" else "actor"
            self._offload(self.state.of(idle))
        return self.state.of(role)

    def _make_room(self, parameters: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        if parameters or gradients or optimizer:
            self.offload_to_cpu(parameters, gradients, optimizer)

    def state_hash(self) -> tuple[int | None, str]:
        """(version, hash of every tensor and scalar of this rank's state; of an island, of what it has in common with the others)."""
        return self.state.version, self.state.hash()

    def save_shard(self, ticket: Ticket) -> None:
        """Begin to save this rank's share of step ``ticket.step``; the rest happens in the background (``RankWriter``)."""
        state, replica = self.state, self.formation.replica
        if state.version != ticket.step:
            raise WorkerFailed(f"worker {self.worker_id} is at step {state.version}, step {ticket.step} was to be saved")
        parts = {"model": state.scalars()} if not state.island else {"model": {}, f"island-{replica}": state.scalars()}
        self._writer.begin(ticket, self.formation.rank, state.logical(replica), parts, rng.capture(self.device))

    def _settle_save(self) -> None:
        """Wait until no save reads the state any more."""
        waited = self._writer.settle(self.config.checkpoint.timeout_s)
        if waited > 0.001:
            self.events.emit("save_awaited", seconds=waited)

    def load_shard(self, address: str, version: int, reference: bool) -> None:
        """Restore this rank from a checkpoint of any layout; an island from its own part, if that is there, else from another's."""
        folder = place(address)
        if self.keeping.load_flushed(folder, self.state):
            return
        if reference:
            self.keep_reference()
        index, rank, replica = Index(folder), self.formation.rank, self.formation.replica
        alike = manifest.read_manifest(folder).layout == saving.inner_layout(self.layout)
        self.state.version = None
        named = {f"island-{replica}": index.island(replica)} if self.state.island else {}
        scalars = index.scalars_of(named.get(f"island-{replica}", "model"))[rank if alike else 0]
        self.state.load_scalars(scalars if alike else with_digests_of(self.state.scalars(), scalars))
        for part, logical in self.state.logical(replica).items():
            sharded.load_part(index, named.get(part, part), logical())
        self.state.restore()
        self.state.version = version
        rng.restore(sharded.rng_states(index, replica, rank), self.device)
        self.events.emit("load", step=version, path=address)
        self.keeping.copy(self.state)

    def version(self) -> int | None:
        """The step whose state this rank holds."""
        return self.state.version

    def restore_copy(self, stamp: Stamp, source: tuple[str, int, str] | None) -> bool:
        """Go back to a copy in this node's memory, or in that of the node whose shelf is at ``source``; False if it is not there any more."""
        return self.keeping.restore(self.state, stamp, source)

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = source.load_tokenizer(self.config.model)
        return self._tokenizer

    def _refresh_rollout(self) -> None:
        """Give the rollout model the weights of this version; a no-op if it has them."""
        version = self.state.version
        if version is None:
            raise WorkerFailed(f"worker {self.worker_id} was asked to generate while its state is dirty")
        if self.formation.rank not in self.layout.collect_ranks():
            self._rollout = None
        elif self._rollout is None:
            dtype = getattr(torch, self.config.model.dtype)
            self._rollout = TransformersRollout(self._source.hf_config, self.tokenizer, self.device, dtype, self.config.rollout.cuda_graphs)
        if self._rollout_weights == self.state.weights_key:
            return
        weights = self.engine.export_hf()
        if self._rollout:
            self._rollout.load_weights(weights, version)
        else:
            for _ in weights:
                pass  # a collective: every rank of the replica takes part
        self._rollout_weights = self.state.weights_key
