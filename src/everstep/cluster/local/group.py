"""Launcher local: torchrun started the ranks of a replica, and the recipe runs in each of them.

Every rank makes the same calls in the same order; each does its own part, and results are exchanged so that all see the same: inside a
replica over torchrun's world, between replicas over the board (:mod:`everstep.recovery.board`). Coordinator and board are in the
lighthouse, or, for one replica alone, in its rank 0. The step transaction is the one of launcher ray.

If a rank dies, all ranks of its replica end, and torchrun starts them anew (rule 23): the new life joins, heals from its peers, and runs
the recipe from the last bookmark with the results that are on the board until it is where the others are.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from everstep.checkpoint import memory, saving
from everstep.checkpoint.choose import Chosen
from everstep.checkpoint.saving import RankOf, SavedRun, Saver, WriterLost
from everstep.checkpoint.storage import CheckpointError
from everstep.checkpoint.writer import Ticket
from everstep.cluster import environment
from everstep.cluster.agents import keep_here
from everstep.cluster.device import choose_device
from everstep.cluster.dispatch import Rank, get_dispatch, ranks_of
from everstep.cluster.formation import Formation
from everstep.cluster.group import StepResult
from everstep.cluster.local.head import Head, Presence
from everstep.cluster.local.lighthouse import Lighthouse, Ports, read_result
from everstep.cluster.local.torchrun import EXIT_DIR, check_port_free, report_exit
from everstep.cluster.processes import die_with_parent
from everstep.cluster.results import combine, compare_hashes
from everstep.cluster.slots import ListSlots, sample_ids
from everstep.cluster.verbs import Arguments, Slots, Verbs
from everstep.cluster.worker import admission
from everstep.cluster.worker.exchange import broadcast_object, gather_objects, replica_secret
from everstep.cluster.worker.meeting import Meeting, open_store
from everstep.cluster.worker.worker import Worker
from everstep.config import derive
from everstep.config.schema import Config
from everstep.engine import cpu
from everstep.engine.groups import NCCL_ENVIRONMENT
from everstep.engine.loss import LossSpec
from everstep.errors import BadInput, EverstepError, ReplicaBroken, WorkerFailed, first_line
from everstep.node import beat
from everstep.recovery.board import Journal, Result, Who
from everstep.recovery.control import Control
from everstep.recovery.rendezvous import Announcement
from everstep.recovery.transaction import StepReport
from everstep.recovery.view import Member, Record
from everstep.run_dir import RunDir
from everstep.telemetry import diagnosis, logs
from everstep.telemetry.events import EventLog
from everstep.telemetry.watching import Watching

T = TypeVar("T")
_WORDS_S = 5.0  # that a rank has to end in order when the run ends for it


@dataclass
class Entry:
    """What the ranks of a replica know when they come into a run. ``join``: it goes on already. ``head``, ``lighthouse``: of rank 0; the
    latter only if it is the run's own, for one replica alone."""

    run_dir: RunDir
    chosen: Chosen
    explained: str
    member: Member
    join: bool
    reference: bool
    coordinator: tuple[str, int]
    store: tuple[str, int]
    nonce: str
    token: str
    run: str  # its name, as the lighthouse has it
    head: Head | None = None
    lighthouse: Lighthouse | None = None
    meeting: Meeting | None = None


def join_world(config: Config) -> tuple[environment.RankEnvironment, Meeting]:
    """Join torchrun's world of this replica. Raises BadInput if the environment or the number of ranks does not fit, DeadlineExceeded if not
    all ranks came. Should one of them be started anew, this process ends, until the meeting is closed."""
    env = environment.read_environment()
    if sys.platform == "linux" and EXIT_DIR in os.environ:
        die_with_parent(signal.SIGKILL)  # an agent that is killed can end nobody, and its replica is started anew elsewhere
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
    timeout = timedelta(seconds=config.recovery.step_timeout_s)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    meeting = Meeting(store, lambda: open_store(env.master_addr, env.master_port, config.recovery.step_timeout_s), rank, size)
    # torchrun's store outlives its ranks, and would hand one that is started anew the addresses of the dead.
    life = dist.PrefixStore(f"everstep/{meeting.agree(config.recovery.step_timeout_s)}", store)
    meeting.watch(lambda cause: end_process(ReplicaBroken(f"{cause}, while it was on its way into the run")))
    try:
        dist.init_process_group(backend, store=life, rank=rank, world_size=size, timeout=timedelta(seconds=_longest_wait_s(config)))
    except RuntimeError as error:  # torch's: another rank is gone
        raise ReplicaBroken(f"the ranks of this replica could not connect: {first_line(error)}") from error
    return env, meeting


def _longest_wait_s(config: Config) -> float:
    """That rank 0 may wait for the lighthouse or for other replicas, and the others for what it is told. Groups inside the replica have
    deadlines of their own."""
    recovery = config.recovery
    return max(recovery.others_timeout_s, recovery.call_timeout_s, config.lighthouse.wait_s) + derive.held_s(config)


def enter(config: Config, clean: bool, watching: Watching) -> Entry:
    """Join torchrun's world, and come into the run: begin it, or find out that it goes on. Raises the same on every rank.

    ``watching``: of one replica alone, its rank 0 tells it of the run's events."""
    env, meeting = join_world(config)
    head: Head | None = None
    lighthouse: Lighthouse | None = None
    shared: Entry | EverstepError | None = None
    if env.rank == 0:
        try:
            entry = _register(config, clean, env, watching)
            if config.replica.id is None:  # else the lighthouse does
                watching.begin(entry.run_dir, own_log=False)
            head, lighthouse = entry.head, entry.lighthouse
            entry.head = entry.lighthouse = None  # of this process only
            shared = entry
        except EverstepError as error:
            shared = error
    came = broadcast_object(shared, replica_secret())
    if isinstance(came, EverstepError):
        raise came
    assert isinstance(came, Entry)
    came.head, came.lighthouse, came.meeting = head, lighthouse, meeting
    return came


def _restarts() -> int:
    """How often this replica was started anew: by torchrun, and by ``everstep up``."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(os.environ.get("EVERSTEP_RESTARTS", "0"))


def _register(config: Config, clean: bool, env: environment.RankEnvironment, watching: Watching) -> Entry:
    restarts = _restarts()
    lighthouse: Lighthouse | None = None
    if config.replica.id is None:
        token = secrets.token_hex(16)
        listener = socket.create_server((env.master_addr, 0), backlog=256)
        lighthouse = Lighthouse(listener, env.master_addr, token, quorum=False, offer=watching.alerts.offer)
        address, wait_s = lighthouse.address, 60.0
    else:
        token = os.environ.get(environment.LIGHTHOUSE_TOKEN, "")
        address, wait_s = Ports.parse(environment.lighthouse_address(config)).coordinator, config.lighthouse.wait_s
        if (port := environment.manager_port()) and not restarts:  # of what a former life left there the end is waited for
            check_port_free(port, "TORCHFT_MANAGER_PORT", host="")
    replica, nonce = config.replica.id or 0, secrets.token_hex(8)
    head = Head(address, token, wait_s, {
        "replica": replica, "nonce": nonce, "config": config.model_dump(mode="json"), "clean": clean, "restarts": restarts,
    })
    try:
        said = head.register()
    except BaseException:  # Ctrl-C, too: the others learn that this one does not come
        if lighthouse:
            lighthouse.close("failed")
        raise
    store = (address[0], said["store_port"]) if said["store_port"] else (env.master_addr, env.master_port)
    checkpoint = Path(said["checkpoint"]) if said["checkpoint"] else None
    return Entry(
        RunDir(Path(said["run_dir"]), said["attempt"]), Chosen(config.resume, checkpoint, said["step"]), said["explained"],
        Member(replica, said["build"], tuple(said["workers"])), said["join"], said["reference"], address, store, nonce, token, said["run"], head, lighthouse,
    )


class LocalGroup(Verbs):
    """The :class:`everstep.cluster.group.Group` of launcher local."""

    def __init__(self, config: Config, entry: Entry):
        self.config, self._run_dir, self._member = config, entry.run_dir, entry.member
        self.layout = derive.layout(config)
        self.dispatch_bytes, self.dispatch_seconds = 0, 0.0  # every rank has the whole batch already: nothing is sent
        self._head, self._lighthouse = entry.head, entry.lighthouse
        self._rank, self._reference = dist.get_rank(), entry.reference
        self._several = config.replica.id is not None
        self._caught_up = not entry.join  # whether the recipe is where the other replicas are, and not on its way there
        self._lead = False
        self._presence: Presence | None = None
        self.closing, self.address = contextlib.ExitStack(), "127.0.0.1"
        replica, workers = entry.member.replica, entry.member.workers
        # The coordinator of one replica alone lives and dies with its rank 0.
        fence_s = None if self._head and not self._several else config.recovery.fence_s
        self._control = Control(
            entry.coordinator, entry.token, workers[self._rank], config.recovery.heartbeat_s, fence_s=fence_s,
            grace_s=config.lighthouse.wait_s if self._several else 0.0, grace_key="lighthouse.wait_s",
            run=entry.run,
        )
        self._control.find = lambda: Announcement(None, entry.coordinator, entry.store, entry.token)
        own_log = entry.run_dir.rank_log(replica * self.layout.ranks_per_replica + self._rank)
        if config.watch.diagnose:
            diagnosis.register(own_log.with_suffix(".stacks"))
        self.events = EventLog(entry.run_dir.events / f"{workers[self._rank]}.jsonl", workers[self._rank])
        beat.start(workers[self._rank], choose_device(config))
        admission.admit_replica(config.watch, choose_device(config), workers[self._rank], entry.join or _restarts() > 0, self.events.emit, replica_secret())
        if os.environ["LOCAL_RANK"] == "0" and (agent := keep_here(config, entry.run_dir, entry.coordinator, entry.token)):
            self.closing.callback(agent.close)
        self._worker = Worker(config, workers[self._rank], choose_device(config), self._control, entry.store, self.events,
                              memory.folder_of(entry.run_dir.path, entry.run_dir.attempt))
        log = config.log
        self._log = logs.start(own_log.with_suffix(".jsonl"), workers[self._rank], log.level, log.max_bytes, log.keep, self._worker.where)
        if self._several:
            self._control.on_fenced = lambda cause: None  # a lighthouse that is gone comes back: what is inside the replica goes on
            self._control.on_abandoned = self._control.on_refused = self._end_soon
            self._worker.on_expelled = lambda: end_process(ReplicaBroken(f"replica {replica} lost a rank, and is started anew"))
        if self._several and self._head:
            self._presence = Presence(
                Ports.parse(environment.lighthouse_address(config)), replica, entry.nonce, environment.manager_port(),
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", config.lighthouse.wait_s, lambda: self._control.committed,
                lambda replicas: self._said_by_torchft(replicas),
            )
        connect = lambda: dist.TCPStore(*entry.store, is_master=False, timeout=timedelta(seconds=60))
        self._saver = Saver(config, self.layout, self.events, connect, self._is_gone) if self._head else None
        start = "peer" if entry.join else "weights"
        self._worker.run("form", (Formation(replica, self._rank, entry.member.build, workers, start, entry.reference),), {})
        dist.barrier()
        if self._head:
            self._head.began = lambda: self._control.epoch.counter > 0
            self._head.formed()
        first = self._control.wait_for(
            lambda records: records[-1] if records[-1].view.member(replica) == self._member else None,
            self.config.lighthouse.wait_s, f"a view with replica {replica}",
        )
        if entry.meeting:
            entry.meeting.close()  # from here on the lighthouse sees it
        self._go_to_bookmark(first)

    def _said_by_torchft(self, replicas: frozenset[int]) -> None:
        assert self._head is not None
        self._head.request("hint", replicas=sorted(replicas))

    def _go_to_bookmark(self, first: Record) -> None:
        """Where the recipe begins: at the last point from which it says that it can go on."""
        def ask(head: Head) -> tuple[int, int, bytes]:
            reply, state = head.request("bookmark")
            head.journals[-1] = Journal(reply["generation"], (state, reply["step"]))
            return reply["generation"], reply["step"], state

        self._generation, self._step, state = self._from_head(ask)
        self._dealt = len(first.view.deal.lives)
        self._index, self._marked_step = 0, self._step
        self.bookmarked: dict[str, Any] = json.loads(state) if state else {}
        self.recipe_state: dict[str, Any] = self.bookmarked.get("recipe", {})
        if self.bookmarked:
            self._dealt = int(self.bookmarked["dealt"])
        self._lead = self._caught_up and self._head is not None and self._member.replica == min(first.view.contributors or (0,))
        if not self.bookmarked:  # a life that comes late, without a bookmark, goes through all of it and was dealt to otherwise
            _, (self._dealt, *_), _ = self._shared("start", Who.REPORTS, lambda ranks: self._dealt)

    # -- verbs -----------------------------------------------------------------------------------------------------------------

    @property
    def is_lead(self) -> bool:
        """Rank 0 of the living replica with the smallest number: another one after a death. Nobody is it twice for the same result."""
        return self._lead

    @property
    def committed_step(self) -> int:
        return self._step

    @property
    def dealt_replicas(self) -> int:
        return self._dealt

    @property
    def unfired_faults(self) -> list[str]:
        return self._lighthouse.run.unfired_faults if self._lighthouse and self._lighthouse.run else []

    def call(self, dispatch: str, method: str, *args: Any, **kwargs: Any) -> Any:
        get_dispatch(dispatch).validate(ranks_of(self.layout), args, kwargs)

        def part(ranks: Sequence[Rank]) -> Any:
            calls = get_dispatch(dispatch).dispatch(ranks, args, kwargs)
            mine = next(i for i, rank in enumerate(ranks) if (rank.replica, rank.rank) == (self._member.replica, self._rank))
            return self._worker.run(method, *calls[mine])

        if method == "keep_reference":
            self._reference = True
        ranks, results, _ = self._shared(f"call {dispatch} {method}", Who.CONTRIBUTORS, part)
        how = get_dispatch(dispatch)
        how.dispatch(ranks, args, kwargs)  # what it notes of the division, it may need to collect
        return how.collect(ranks, results)

    def enter_stage(self, name: str) -> None:
        if self._head and self._lead:
            self._head.request("stage", name=name, step=self._step + 1)

    def _transact(
        self, slots: Slots, loss: LossSpec, lr: float, method: str, arguments: Arguments, state: dict[str, Any] | None,
        about: Mapping[str, Any],
    ) -> StepResult:
        """What the recipe says of its state then is not needed: it outlives the coordinator itself, and who joins begins at the bookmark."""
        step = self._step + 1
        live = self._from_head(lambda head: head.begin(step, [list(slot) for slot in sample_ids(slots)], about))
        report: tuple[StepReport, int] | None = None
        if live:
            done = self._worker.run(method, (*arguments(step, ListSlots(slots)), None), {})
            commit = self._control.wait_for(lambda records: next((r for r in records if r.step == step), None), 30.0, f"the commit of step {step}")
            report, self._caught_up = (done, len(commit.view.deal.lives)), True
        _, reported, contributors = self._shared(f"report of step {step}", Who.REPORTS, lambda ranks: report)
        self._step, self._dealt = step, reported[0][1]
        reports = [said for said, _ in reported]
        first_ranks = reports[:: self.layout.ranks_per_replica]
        return combine(step, reports, first_ranks, loss, lr, len(slots), contributors)

    def once(self, function: Callable[..., T], *args: Any) -> T:
        """One rank of all computes; the others receive the result, or the exception."""
        def part(ranks: Sequence[Rank]) -> tuple[Any, Exception | None] | None:
            if self._rank != 0:
                return None
            try:
                return function(*args), None
            except Exception as error:  # handed to every rank, raised there and here
                return None, error if _travels(error) else WorkerFailed(f"{type(error).__name__}: {error}")

        _, results, _ = self._shared("once", Who.ONE, part)
        result, failure = results[0]
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    def save(self, recipe_state: dict[str, Any], wait: bool = True) -> Path | None:
        """Every rank of every contributor takes up its share; if one dies before all have, or, with ``wait``, before the end, those
        that are left share the work anew: they hold the same state still. The lead completes it; if that one dies the attempt is void."""
        while True:
            start = time.monotonic()
            begun = self.once(self._begin_save, recipe_state, wait)
            if begun is None:
                return self.once(lambda: self.saver.checkpoint(self._step))
            tickets, members = begun

            def part(ranks: Sequence[Rank], tickets: list[Ticket] = tickets, members: list[Member] = members) -> bool:
                if self._member not in members or {rank.replica for rank in ranks} != {m.replica for m in members}:
                    return False  # somebody died since the work was shared out
                self._worker.run("save_shard", (tickets[members.index(self._member)],), {})
                return True

            _, taken_up, _ = self._shared(f"save step {self._step}", Who.CONTRIBUTORS, part)
            outcome = self.once(self._complete_save, tickets[0].id, members, all(taken_up), wait, start)
            if outcome is not None or (not wait and all(taken_up)):
                return outcome

    def _begin_save(self, recipe_state: dict[str, Any], wait: bool) -> tuple[list[Ticket], list[Member]] | None:
        with contextlib.suppress(CheckpointError):  # of the one on its way: it is told
            self.saver.wait()
        view = self._control.view
        members = [member for member in view.members if member.replica not in view.healing]
        tickets = self.saver.begin(SavedRun(self._step, self._reference, recipe_state), len(members), patient=wait)
        return None if tickets is None else (tickets, members)

    def _complete_save(self, attempt: str, members: list[Member], taken_up: bool, wait: bool, start: float) -> Path | None:
        """None if it is on its way, or void."""
        if self.saver.attempt != attempt:
            return None  # whoever began it is dead
        if not taken_up:
            self.saver.void("a rank died")
            return None
        writers = [RankOf(w, replica, rank) for replica, member in enumerate(members) for rank, w in enumerate(member.workers)]
        self.saver.follow(writers, time.monotonic() - start)
        with contextlib.suppress(WriterLost):
            return self.saver.wait() if wait else None
        return None

    def save_wanted(self, due: bool) -> bool:
        return self.once(lambda: self.saver.wanted(due, self._step))

    def finish_saves(self) -> None:
        self.once(lambda: self.saver.wait())

    def told_of_saves(self) -> list[str]:
        return self.saver.told() if self._lead else []

    @property
    def saver(self) -> Saver:
        assert self._saver is not None, "only heads complete checkpoints"
        return self._saver

    def _is_gone(self, worker: str) -> str | None:
        return None if self._control.view.member_of(worker) else "its replica is no member any more"

    def load(self, path: Path) -> dict[str, Any]:
        if self._generation > 0:
            return self.recipe_state  # this life joined when the run had left the checkpoint behind
        saved = saving.read(path)
        self._shared(
            f"load step {saved.step}", Who.CONTRIBUTORS,
            lambda ranks: self._worker.run("load_shard", (str(path), saved.step, saved.reference), {}),
        )
        self._reference = saved.reference
        self._from_head(lambda head: head.request("restart_at", step=saved.step)[0])
        self._control.wait_for(
            lambda records: records[-1] if records[-1].view.committed >= saved.step else None, 30.0, "the checkpoint's view"
        )
        self._step = saved.step
        self.recipe_state = saved.recipe_state
        return saved.recipe_state

    def interrupt(self, name: str) -> bool:
        return False

    def save_interrupted(self, saved_step: int) -> Path | None:
        """Refused by the configuration: torchrun ends every rank by itself."""
        return None

    def flush_copies(self) -> None:
        """There are none."""

    def mark(self, state: dict[str, Any]) -> None:
        if self._step == self._marked_step:
            return  # without a step in between, a slow replica could be two bookmarks behind, and its calls forgotten
        self._generation, self._index, self._marked_step = self._generation + 1, 0, self._step
        if self._head:
            self._head.mark(self._generation, (json.dumps(state | {"dealt": self._dealt}, sort_keys=True).encode(), self._step))

    def verify(self) -> str:
        ranks, hashes, _ = self._shared("verify", Who.CONTRIBUTORS, lambda ranks: self._worker.run("state_hash", (), {}))
        return compare_hashes(ranks, hashes, self._step, self.events if self._lead else None)

    def status(self) -> dict[str, Any]:
        if self._lighthouse and self._lighthouse.run:
            return self._lighthouse.run.status()
        view = self._control.view
        return {"state": "voting", "stage": "", "epoch": str(view.epoch), "committed_step": view.committed, "replicas": list(view.contributors),
                "healing": sorted(view.healing), "spares": 0, "deaths": sum(member.build for member in view.members), "ranks": {}}

    def close(self, status: str = "done") -> None:
        """Without ``done`` this replica's end is a death for the others."""
        if self._saver:
            self._saver.give_up()
        self._worker.leave()
        if self._presence:
            self._presence.close()
        if self._head:
            self._finish(status)
        if self._several and status != "done":
            self._control.drop()
        else:
            self._control.close()
        if self._lighthouse:
            self._lighthouse.await_end(_WORDS_S)
            self._lighthouse.close(status)
        if self._head:
            self._head.close()
        logs.stop(self._log)
        self.closing.close()

    def _finish(self, status: str) -> None:
        assert self._head is not None
        try:
            self._head.finish(status)
        except EverstepError as error:  # the run has ended before: that is why we are here, or does not matter any more
            self.events.emit("error", error=type(error).__name__, message=f"while leaving: {error}")

    # -- one call, the same everywhere --------------------------------------------------------------------------------------------

    def _shared(self, what: str, who: Who, part: Callable[[Sequence[Rank]], Any]) -> tuple[list[Rank], list[Any], tuple[int, ...]]:
        """The ranks that computed it, their results, and the contributors when it was complete.

        ``part`` computes this rank's, given all ranks that compute; it may be called again, when one of them died. Whoever comes later
        gets what was computed then.
        """
        place, self._index = (self._generation, self._index), self._index + 1
        computed: tuple[Member, ...] = ()
        values: list[Any] = []
        while True:
            answer = self._from_head(lambda head: self._ask(head, place, what, who))
            if isinstance(answer, Result):
                break
            attempt, members = answer
            if members != computed:
                values = self._inside(part(ranks_of(self.layout, [m.replica for m in members])))
                computed = members
            self._from_head(lambda head, attempt=attempt, values=values: head.request(  # type: ignore[misc]
                "give", pickle.dumps(values), place=place, attempt=attempt, reference=self._reference
            )[0])
        self._lead = self._head is not None and self._caught_up and self._member.replica == min(answer.contributors or answer.replicas)
        results = [value for blob in answer.parts for value in pickle.loads(blob)]
        return ranks_of(self.layout, answer.replicas), results, answer.contributors

    def _ask(self, head: Head, place: tuple[int, int], what: str, who: Who) -> Result | tuple[int, tuple[Member, ...]]:
        while True:
            reply, payload = head.request("ask", place=place, what=what, who=str(who))
            if reply["answer"] == "result":
                result = read_result(reply, payload)
                head.journals[-1].results[place[1]] = (what, who, result)
                head.has_reference = self._reference
                return result
            if reply["answer"] == "work":
                return reply["attempt"], tuple(Member(replica, build, tuple(workers)) for replica, build, workers in reply["members"])

    def _from_head(self, ask: Callable[[Head], T]) -> T:
        """What the head is told, known to all ranks of the replica; or its error, raised by all."""
        shared: Any = None
        if self._head:
            try:
                shared = (ask(self._head), None)
            except EverstepError as error:
                shared = (None, error)
        value, failure = broadcast_object(shared, replica_secret())
        if failure is not None:
            raise failure
        return value  # type: ignore[no-any-return]

    def _inside(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks of this replica."""
        return gather_objects(value, replica_secret())

    # -- the end of this life ----------------------------------------------------------------------------------------------------

    def _end_soon(self, cause: str) -> None:
        """The coordinator said that it is over, or is lost: the main thread finds out, unless it is stuck in a collective."""
        def end() -> None:
            time.sleep(_WORDS_S)
            try:
                self._control.must_not_be_lost()
            except EverstepError as error:
                end_process(error)

        threading.Thread(target=end, name="end-soon", daemon=True).start()


def end_process(error: EverstepError) -> None:
    """Whatever its main thread does. Whoever started it starts it anew."""
    if not report_exit(error):
        print(f"everstep: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def _travels(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class that was never meant to be pickled does
        return False
    return True
