"""The controller: the process that runs the recipe, owns the coordinator, sends work to the workers, and collects results.

How processes are started and reached is the host's business (:mod:`everstep.cluster.host`). Training itself, commits and deaths
included, goes over the coordinator's channel.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from everstep.checkpoint import saving
from everstep.checkpoint.saving import RankOf, SavedRun, Saver, WriterLost
from everstep.checkpoint.storage import CheckpointError
from everstep.cluster.batch import TrainingBatch
from everstep.cluster.controller import succession
from everstep.cluster.controller.copies import Copies
from everstep.cluster.controller.crew import Crew
from everstep.cluster.controller.owed import POLL_S, Owed, all_done, gather
from everstep.cluster.controller.rollback import Rollback
from everstep.cluster.controller.rollouts import Rollouts
from everstep.cluster.controller.watch import Watch
from everstep.cluster.dispatch import get_dispatch, ranks_of
from everstep.cluster.endpoint import Endpoint
from everstep.cluster.formation import Formation
from everstep.cluster.group import InOnePlace, StepResult
from everstep.cluster.host import Host, ProcessEnded, Sharing, WorkerSpec
from everstep.cluster.results import combine, compare_hashes
from everstep.cluster.slots import sample_ids
from everstep.cluster.target import LaunchedTarget, coordinator_of, judge, judge_every_s, partition_victims
from everstep.cluster.verbs import Arguments, Slots, Verbs
from everstep.cluster.worker.run_store import serve_store
from everstep.config import derive
from everstep.config.schema import Config, Fault
from everstep.engine.loss import LossSpec
from everstep.errors import (
    BelowMinimum,
    CoordinatorLost,
    DeadlineExceeded,
    EverstepError,
    Fenced,
    NotEnoughReplicas,
    ReplicaBroken,
    RolledBack,
)
from everstep.recovery import rendezvous
from everstep.recovery.commitlog import CommitLog
from everstep.recovery.coordinator import Coordinator, State
from everstep.recovery.desk import Listener
from everstep.recovery.faults import FaultInjector
from everstep.recovery.proxy import Relay
from everstep.recovery.server import CoordinatorServer
from everstep.recovery.view import Kind, Member, Record
from everstep.rl.rollout import Response, Sampling
from everstep.rl.rollout.pool import RolloutPool
from everstep.run_dir import RunDir
from everstep.telemetry.events import ENGINES, EventLog

T = TypeVar("T")
_DEATH_CONFIRM_S = 30.0


class Controller(InOnePlace, Verbs):
    """The :class:`everstep.cluster.group.Group` of a run that has one controller. Closes ``host``, also if it cannot start.

    ``attach``: in the place of starting workers, take over those of the dead controller that left this log (recovery.controller_grace_s). If
    that is refused they are left as they were: another one may take over.
    """

    def __init__(
        self, config: Config, run_dir: RunDir, events: EventLog, host: Host, on_record: Callable[[Record], None] | None = None,
        attach: CommitLog | None = None,
    ):
        self.config, self._run_dir, self._events, self._host = config, run_dir, events, host
        self.layout = derive.layout(config)
        self.address = host.address
        self._on_record = on_record or (lambda record: None)
        self._reference = False
        self._watch = Watch(config, run_dir, events, host, lambda: self._server, self._place_of, lambda: len(self._crew.idle_spares()),
                            lambda worker, cause: self._crew.leaving.tell(worker, cause), lambda workers, cause: self._crew.quarantine(workers, cause))
        self._stage = ""
        self.recipe_state: dict[str, Any] = {}
        self._closed, self._ours = False, attach is None  # whether the workers end with us
        self._in_step, self._interrupted = False, ""
        self._went_back: RolledBack | None = None  # not told to the recipe yet
        self._copies = Copies(config, run_dir, lambda: host.infos, lambda worker: worker in self.server.dead, lambda: self._crew.spares)
        self._rollback = Rollback(host, config, self._copies, lambda worker: worker in self.server.dead, lambda member: self.server.meant_for(member))
        self.closing = contextlib.ExitStack()
        self._crew = Crew(config, host, events, lambda: self.server, self._spec, self._struck, self._is_engine, self._watch.finish_diagnosis)
        self._endpoint: Endpoint | None = None
        self._crew.on_lost = lambda member: succession.go_back(self, member)
        self._store: dist.TCPStore | None = None
        self._injector: FaultInjector | None = None
        self._relays: dict[str, Relay] = {}
        self._server: CoordinatorServer | None = None
        self._saver: Saver | None = None
        self._rollouts: Rollouts | None = None
        self.dispatch_bytes, self.dispatch_seconds = 0, 0.0
        try:
            self._start(attach)
        except BaseException:  # Ctrl-C, too: processes are not left behind
            self.close()
            raise

    # -- start and end -------------------------------------------------------------------------------------------------------

    def _start(self, attach: CommitLog | None) -> None:
        config, recovery = self.config, self.config.recovery
        host = self._host.address
        log = attach or CommitLog(self._run_dir.path / "commits.log")
        coordinator = coordinator_of(config, log.incarnation)
        token = self._token = secrets.token_hex(16)
        listener = Listener(
            self._place_of, self._phase_entered, self._worker_died, self._recorded, self._answered,
            self._struck, self._crew.leaving.tell, self._watch.before_kill, self._watch.agents.rank, self._watch.agents.attend,
        )
        self._server = CoordinatorServer(
            coordinator, log, self._events, listener, token, recovery.silence_s, 2 * recovery.link_timeout_s, host,
            recovery.heartbeat_s, judge(recovery), judge_every_s(recovery),
        )
        self._store = store = serve_store(host)
        self._copies.open(store)
        connect = lambda: dist.TCPStore(host, store.port, is_master=False, timeout=timedelta(seconds=60))
        self._saver = Saver(self.config, self.layout, self._events, connect, lambda worker: self.server.dead.get(worker))
        if attach:
            succession.take_over(self, log)
            self._ours = True
            self._host.keep()
            self._endpoint = self._open_endpoint()
            return
        if config.rollout.engines:
            self._rollouts = Rollouts(self)
            self._crew.before_form = self._rollouts.make_way
        workers = self._start_workers(host, self._store.port, token)
        self._crew.admission.admit_all(workers)
        succession.announce(self, log.incarnation)
        self._crew.on_start = lambda: succession.announce(self, log.incarnation)
        per_replica = self.layout.ranks_per_replica
        members = [
            Member(replica, 0, tuple(workers[replica * per_replica : (replica + 1) * per_replica]))
            for replica in range(self.layout.replicas)
        ]
        spares = workers[self.layout.world_size :]
        self._crew.open(members, spares, lambda: self._reference, self._store)
        self._host.watch(self._process_ended)
        self._injector = self._make_injector(config.faults)
        if self._rollouts:
            self._rollouts.pool.open()
        self._events.emit("spare_ready", spares=len(spares))
        failed = self._crew.form([
            (worker, Formation(m.replica, rank, 0, m.workers, "weights", False))
            for m in members for rank, worker in enumerate(m.workers)
        ])
        if failed:
            raise NotEnoughReplicas("; ".join(f"worker {w} could not start: {cause}" for w, cause in sorted(failed.items())))
        self._server.open(members)
        self._endpoint = self._open_endpoint()

    def _open_endpoint(self) -> Endpoint:
        leaving = self._crew.leaving
        orders: dict[str, Callable[..., Any]] = {"drain": leaving.drain, "draining": leaving.remaining}
        return Endpoint(self._run_dir.path, self._host.address, orders | ({"engines": self._rollouts.pool.resize} if self._rollouts else {}))

    def _make_injector(self, faults: Sequence[Fault]) -> FaultInjector:
        infos = self._host.infos
        target = LaunchedTarget(
            lambda: self.server, self._place_of, self._host.signal, lambda w: f"{infos[w].pid} on {infos[w].host}",
            lambda: self._crew.spares, self._relays, self._host.cut,
            lambda number: self._rollouts.pool.engine_at(number) if self._rollouts else None,
        )
        return FaultInjector(faults, target, self._events)

    def _process_ended(self, worker: str) -> None:
        self.server.expel(worker, "process ended (pidfd)", ended=True)

    def _start_workers(self, host: str, port: int, token: str) -> list[str]:
        """All ranks, replica after replica, then the spares."""
        workers = [f"w{i}" for i in range(self.layout.devices)]
        for index in partition_victims(self.config, self.layout.ranks_per_replica, self.layout.world_size):
            self._relays[workers[index]] = Relay(self._coordinator_address)
        self._store_address = host, port
        self._host.start([self._spec(worker) for worker in workers])
        return workers

    def _spec(self, worker: str) -> WorkerSpec:
        relay = self._relays.get(worker)
        return WorkerSpec(
            worker, self.config, relay.address if relay else self._coordinator_address, self._token, self._store_address,
            str(self._run_dir.events), str(self._run_dir.rank_log(int(worker[1:]))), str(self._run_dir.path), self._run_dir.attempt,
        )

    @property
    def _coordinator_address(self) -> tuple[str, int]:
        assert self._server is not None
        return self._server.address

    def close(self, status: str = "done") -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as last_first:  # all of it happens, whatever fails
            if self._server and self._ours:
                last_first.callback(rendezvous.withdraw, self._run_dir.path)
            last_first.callback(self._copies.closed if self._ours else self._copies.leave)
            last_first.callback(self.closing.close)
            last_first.callback(self._host.close)
            last_first.callback(self._watch.close)
            for relay in self._relays.values():
                last_first.callback(relay.close)
            if self._rollouts:
                last_first.callback(self._rollouts.pool.close)
            last_first.callback(self._crew.close)
            if self._endpoint:
                last_first.callback(self._endpoint.close)
            if self._server:
                last_first.callback(self._server.close)
            if self._saver:
                last_first.callback(self._saver.give_up)
            if self._ours:
                last_first.callback(self._copies.close)
            last_first.callback(self._watch.finish)
            self._store = None

    # -- verbs ---------------------------------------------------------------------------------------------------------------

    @property
    def committed_step(self) -> int:
        return self.server.coordinator.committed

    @property
    def dealt_replicas(self) -> int:
        return self.server.coordinator.dealt

    @property
    def server(self) -> CoordinatorServer:
        assert self._server is not None
        return self._server

    @property
    def saver(self) -> Saver:
        assert self._saver is not None
        return self._saver

    def call(self, dispatch: str, method: str, *args: Any, **kwargs: Any) -> Any:
        start, sent = time.monotonic(), 0
        if self._rollouts:
            self._rollouts.turns.ranks()
        while True:
            self._check_alive()
            self._crew.leaving.at_a_boundary()
            self._prepare_faults(self.committed_step + 1)
            view = self.server.coordinator.view
            ranks = ranks_of(self.layout, view.contributors)
            how = get_dispatch(dispatch)
            how.validate(ranks, args, kwargs)
            share = Sharing(self._host)
            pending: dict[Any, int] = {}
            called: list[tuple[str, Member]] = []
            for index, (rank, (a, kw)) in enumerate(zip(ranks, how.dispatch(ranks, args, kwargs), strict=True)):
                member = view.member(rank.replica)
                assert member is not None
                worker, life = member.workers[rank.rank], self.server.meant_for(member)
                call = self._host.submit(worker, life, method, *[share(x) for x in a], **{k: share(x) for k, x in kw.items()})
                pending[call] = index
                called.append((worker, member))
            sent += share.nbytes
            results = self._results(pending, called, method)
            if results is not None:
                seconds = time.monotonic() - start
                self.dispatch_bytes, self.dispatch_seconds = self.dispatch_bytes + sent, self.dispatch_seconds + share.seconds
                self._events.emit("call", method=method, dispatch=dispatch, sent_bytes=sent, seconds=seconds)
                if method == "keep_reference":
                    self._reference = True
                return how.collect(ranks, results)

    def rollout(self, prompts: TrainingBatch, sampling: Sampling) -> TrainingBatch:
        return self._rollouts.rollout(prompts, sampling) if self._rollouts else super().rollout(prompts, sampling)

    def rollout_ahead(self, prompts: TrainingBatch, sampling: Sampling, made: Mapping[str, Response] | None = None) -> None:
        if self._rollouts:
            self._rollouts.ahead(prompts, sampling, made)

    def rollout_so_far(self, prompts: TrainingBatch) -> dict[str, Response]:
        return self._rollouts.pool.so_far(prompts.sample_ids) if self._rollouts else {}

    def _results(self, calls: dict[Any, int], called: list[tuple[str, Member]], method: str) -> list[Any] | None:
        return gather(self._host, self.server, self.config.recovery, self._is_death, calls, called, method)

    def enter_stage(self, name: str) -> None:
        self._stage = name
        if self._injector:
            self._injector.on_stage(name, self.committed_step + 1)

    def _transact(
        self, slots: Slots, loss: LossSpec, lr: float, method: str, arguments: Arguments, state: dict[str, Any] | None,
        about: Mapping[str, Any],
    ) -> StepResult:
        if self._rollouts:
            self._rollouts.turns.ranks()
        step = self.committed_step + 1
        share = Sharing(self._host)
        shared = self._host.slots([[share(micro) for micro in slot] for slot in slots])
        self.dispatch_bytes, self.dispatch_seconds = self.dispatch_bytes + share.nbytes, self.dispatch_seconds + share.seconds
        self._crew.leaving.at_a_boundary()
        self._prepare_faults(step)
        self._in_step = True
        self.server.begin(step, sample_ids(slots), about, state)
        if self._injector:
            self._injector.begins(step)
        coordinator = self.server.coordinator
        owed = Owed(self.server, self.config.recovery, f"its report of step {step}")
        pending: dict[Any, tuple[str, Member]] = {}
        called: set[Member] = set()  # a replica that comes back within the step is called in its new life
        reports: dict[tuple[str, Member], Any] = {}
        while True:
            try:
                self._check_alive()
            except BelowMinimum:
                all_done(self._host, pending, _DEATH_CONFIRM_S)  # ranks leave the step, which was given up
                raise
            view = coordinator.view
            if coordinator.committed < step:
                for member in view.members:
                    if member not in called:
                        called.add(member)
                        life = self.server.meant_for(member)
                        for worker in member.workers:
                            call = self._host.submit(worker, life, method, *arguments(step, shared), view.epoch)
                            pending[call] = worker, member
            else:
                owing = [(worker, member) for worker, member in pending.values() if view.member(member.replica) == member]
                if not owing:
                    break
                owed.expel_overdue(owing)
                if owed.waited(self.config.recovery.step_timeout_s):
                    raise DeadlineExceeded(
                        f"step {step} was committed, but workers {sorted(w for w, _ in owing)} did not report it in "
                        f"{self.config.recovery.step_timeout_s:g} s (recovery.step_timeout_s); resume with resume=auto"
                    )
            if not pending:
                time.sleep(0.01)  # the coordinator holds the step until a replica joins
                continue
            for call in self._host.wait(pending, POLL_S):
                worker, member = pending.pop(call)
                owed.gave(worker, member)
                try:
                    reports[worker, member] = self._host.result(call, worker, f"step {step}")
                except (ProcessEnded, EverstepError) as error:
                    if not self._is_death(worker, member, error):
                        raise
        self._in_step = False
        if self._interrupted:
            raise KeyboardInterrupt(self._interrupted)
        view = coordinator.view
        finished = {w: r for (w, member), r in reports.items() if view.member(member.replica) == member}
        if not finished:
            raise NotEnoughReplicas(f"step {step} was committed but no rank that applied it is left; resume from the last checkpoint")
        self._watch.step(step, reports, view)
        first_ranks = {self._place_of(w)[0]: r for w, r in finished.items() if self._place_of(w)[1] == 0}
        return combine(step, list(finished.values()), list(first_ranks.values()), loss, lr, len(slots), view.contributors)

    def once(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    def save(self, recipe_state: dict[str, Any], wait: bool = True) -> Path | None:
        """Every rank of every contributor takes up its share; if one dies before all have, or, with ``wait``, before the end, those
        that are left share the work anew: they hold the same state still."""
        with contextlib.suppress(CheckpointError):  # of the one on its way: it is told
            self.saver.wait()
        run = SavedRun(self.committed_step, self._reference, recipe_state)
        while True:
            self._check_alive()
            self._prepare_faults(self.committed_step + 1)
            view, start = self.server.coordinator.view, time.monotonic()
            tickets = self.saver.begin(run, len(view.contributors), patient=wait)
            if tickets is None:
                return self.saver.checkpoint(run.step)
            members = [member for replica in view.contributors if (member := view.member(replica))]
            called = [(worker, member) for member in members for worker in member.workers]
            writers = [RankOf(w, replica, rank) for replica, member in enumerate(members) for rank, w in enumerate(member.workers)]
            calls = {
                self._host.submit(worker, self.server.meant_for(member), "save_shard", tickets[writer.replica]): index
                for index, ((worker, member), writer) in enumerate(zip(called, writers, strict=True))
            }
            if self._results(calls, called, "save_shard") is None:
                self.saver.void("a rank died")
                continue
            self.saver.follow(writers, time.monotonic() - start)
            if not wait:
                return None
            with contextlib.suppress(WriterLost):
                return self.saver.wait()

    def save_wanted(self, due: bool) -> bool:
        return self.saver.wanted(due, self.committed_step)

    def finish_saves(self) -> None:
        self.saver.wait()

    def told_of_saves(self) -> list[str]:
        return self.saver.told()

    def load(self, path: Path) -> dict[str, Any]:
        """Before the first step only: every rank reads its part; the coordinator continues from the checkpoint's step."""
        saved = saving.read(path)
        self.call("pass_through", "load_shard", str(path), saved.step, saved.reference)
        saving.restore_rng(path)
        self._reference = saved.reference
        self.server.restart_at(saved.step, saved.recipe_state)
        self.recipe_state = saved.recipe_state
        return saved.recipe_state

    def interrupt(self, name: str) -> bool:
        again, self._interrupted = bool(self._interrupted), name
        return self._in_step and not again and self.server.coordinator.state is State.VOTING

    def save_interrupted(self, saved_step: int) -> Path | None:
        return succession.save_interrupted(self, saved_step)

    def flush_copies(self) -> None:
        self._copies.flush()

    def verify(self) -> str:
        while True:
            view = self.server.coordinator.view
            hashes = self.call("pass_through", "state_hash")
            if view.contributors != self.server.coordinator.view.contributors:
                continue
            ranks = ranks_of(self.layout, view.contributors)
            if not self._watch.evict_corrupt(view, ranks, hashes):
                return compare_hashes(ranks, hashes, self.committed_step, self._events)

    def status(self) -> dict[str, Any]:
        return self.server.summary() | {"stage": self._stage, "spares": len(self._crew.spares), "ranks": self.server.whereabouts()}

    # -- deaths ----------------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        """Raise if the run cannot go on."""
        server = self.server
        if server.failure:
            raise server.failure
        coordinator = server.coordinator
        causes = "; ".join(f"{w}: {cause}" for w, cause in sorted(server.dead.items()))
        if coordinator.state is State.HALTED:
            return  # what is left to do is to save
        while coordinator.state is State.LOST and self._crew.may_go_back():
            time.sleep(0.01)  # the replica is formed anew, and goes back to a copy
        back, self._went_back = self._went_back, None
        if back:
            if self._rollouts:
                self._rollouts.pool.void()
            raise back
        if coordinator.state is State.LOST and not self._crew.failure:
            raise NotEnoughReplicas(
                f"no living replica holds step {coordinator.committed} ({causes}); resume from the last checkpoint with resume=auto"
            )
        if self._crew.failure:
            raise self._crew.failure
        if coordinator.state is State.HELD and not self.config.recovery.enabled:
            raise NotEnoughReplicas(f"recovery.enabled=false, and a rank died ({causes}); resume from the last checkpoint")
        if self._crew.has_too_few():
            cause = (
                f"{len(coordinator.view.members)} replicas live, recovery.min_replicas={self.config.recovery.min_replicas} and no "
                f"spare is left ({causes})"
            )
            server.halt(cause)
            raise BelowMinimum(f"{cause}; resume with resume=auto when there are devices")

    def _is_death(self, worker: str, member: Member, error: ProcessEnded | EverstepError) -> bool:
        """Whether this error tells of a death (the worker's own, or one in its replica) rather than of a failed call.

        ``member``: the life of its replica in which the worker was called.
        """
        over: Callable[[Coordinator], bool] = lambda c: c.view.member(member.replica) != member
        if isinstance(error, ProcessEnded):
            self.server.expel(worker, f"its process ended ({error})", ended=True)
            return True
        if isinstance(error, ReplicaBroken):
            return self.server.wait(over, _DEATH_CONFIRM_S)
        if isinstance(error, CoordinatorLost):
            self.server.expel(worker, f"fenced itself ({error})")
            return True
        return isinstance(error, Fenced) and over(self.server.coordinator)

    def _struck(self, worker: str) -> bool:
        return self._injector is not None and self._injector.struck(worker)

    def _worker_died(self, worker: str, cause: str, ended: bool) -> None:
        if not self._closed:
            self._watch.died(worker, cause)
        if self._rollouts and self._is_engine(worker):
            self._rollouts.pool.died(worker, cause, self._struck(worker))
            return
        if not self._closed:
            self._crew.died(worker)

    def _phase_entered(self, worker: str, step: int, phase: str) -> None:
        if self._injector:
            self._injector.on_phase(worker, step, phase)

    def _recorded(self, record: Record) -> None:
        self._rollback.remember(record)
        self._copies.recorded(record)
        if record.kind is Kind.COMMIT:
            self._crew.served |= record.view.workers
            if self._injector:
                self._injector.on_commit(record.step)
        self._on_record(record)

    def _answered(self, worker: str, number: int, word: str) -> None:
        if self._injector:
            self._injector.on_word(worker, number, word)

    def _prepare_faults(self, step: int) -> None:
        if self._injector:
            self._injector.prepare(step)

    def _place_of(self, worker: str) -> tuple[int, int]:
        if self._is_engine(worker):
            return ENGINES, RolloutPool.number_of(worker)
        return self._crew.place(worker)

    def _is_engine(self, worker: str) -> bool:
        return self._rollouts is not None and self._rollouts.pool.knows(worker)

    @property
    def unfired_faults(self) -> list[str]:
        return self._injector.unfired if self._injector else []
