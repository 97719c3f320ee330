"""One run as a lighthouse serves it: coordinator, board and fault injection, for replicas that come and go by themselves.

A replica registers a life (its processes since torchrun started them), is told where to connect and what to start from, forms, and says
so. The first ones begin the run together; whoever comes later joins. The lives that the coordinator has as members are the run; this
process owns nothing that they could not tell its successor (:meth:`ServedRun.register` with ``resume``), but the commit record.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from everstep.checkpoint.choose import Chosen
from everstep.cluster import takeover
from everstep.cluster.agents import EXAMINE_S, Agents
from everstep.cluster.host import WorkerInfo
from everstep.cluster.local.pace import Pace
from everstep.cluster.post_mortem import PostMortem
from everstep.cluster.target import LaunchedTarget, coordinator_of, judge, judge_every_s
from everstep.config import derive
from everstep.config.alike import digest_of
from everstep.config.schema import Config
from everstep.errors import (
    BadInput,
    EverstepError,
    Fenced,
    InvariantViolated,
    NotEnoughReplicas,
    RunEnded,
    WorkerFailed,
)
from everstep.recovery.board import Board, Journal, Place, Result, Who, Work
from everstep.recovery.commitlog import CommitLog, Past
from everstep.recovery.coordinator import State
from everstep.recovery.desk import Listener
from everstep.recovery.faults import FaultInjector
from everstep.recovery.server import CoordinatorServer
from everstep.recovery.view import Kind, Member, Record
from everstep.run_dir import RunDir
from everstep.telemetry.diagnosis import Diagnosis
from everstep.telemetry.events import EventLog, read_events
from everstep.telemetry.watching import Watching

TICK_S = 0.1
LAST_WORDS_S = 2.0  # for ranks that are told the end, to hear it and go
ANSWER_WITHIN_S = 2.0  # a request that must wait longer is answered with "wait", and comes again


@dataclass
class Replica:
    """One life of a replica. ``nonce``: what its head calls this life."""

    member: Member
    nonce: str
    formed: bool = False
    gone: str = ""  # why


@dataclass
class Start:
    """How the run begins. ``expected``: the replicas that shall begin it together, as torchft's quorum has it; None: not known yet."""

    expected: frozenset[int] | None
    since: float = field(default_factory=time.monotonic)


class ServedRun:
    """``name``: tells it from other runs, before and after, in the same folder. ``address``: where ranks connect; ``store_port``: of the
    store for links and heals there, None: the one replica's own is used."""

    def __init__(
        self, name: str, config: Config, run_dir: RunDir, chosen: Chosen, token: str, address: tuple[str, int], store_port: int | None,
        min_replicas: int, start: Start, go_on: bool, send_signal: Callable[[int, str, int, int], None],
        offer: Callable[[Mapping[str, Any]], None] | None, say: Callable[[str], None],
    ):
        self.name, self.config, self.run_dir, self.chosen, self._store_port, self._say = name, config, run_dir, chosen, store_port, say
        self.layout = derive.layout(config)
        self.digest = digest_of(config)
        self._send_signal = send_signal        # replica, host, pid, number
        self.failure: EverstepError | None = None
        self.ended = ""                        # how
        self.board = Board()
        self._turn = threading.Condition(threading.RLock())
        self._prepare_lock = threading.Lock()
        self._replicas: dict[int, Replica] = {}
        self._finished: dict[int, str] = {}
        self._builds: dict[int, int] = {}      # newest life of each replica
        self._places: dict[str, tuple[int, int]] = {}
        self._stage = ""
        self._begun: tuple[int, str] = (0, "")  # step in progress, and a digest of its samples
        self._announced: dict[int, tuple[tuple[tuple[str, ...], ...], dict[str, Any]]] = {}  # steps that members say have begun under an earlier lighthouse
        self._held_since: float | None = None
        self._start, self._opened, self._opened_at = start, False, 0.0
        recovery = config.recovery
        self._log = CommitLog(run_dir.path / "commits.log", takeover=go_on, run=name)
        self._past = self._log.past if go_on else None
        written = read_events(run_dir.events) if go_on else []
        self._noted = takeover.noted(written)
        self._members_before: tuple[Member, ...] = ()  # under the lighthouse before
        self._watching = Watching(config) if store_port is not None else None  # of one replica alone its rank 0 does this
        self._events = EventLog(run_dir.events / "lead.jsonl", "lead", self._watching.alerts.offer if self._watching else offer)
        everybody = self.layout.replicas
        coordinator = coordinator_of(config, self._log.incarnation)
        self._minimum = everybody if recovery.mode == "wait" else min(max(coordinator.min_replicas, min_replicas), everybody)  # to begin
        self._post_mortem = PostMortem(self._events, lambda info: self.agents.examine(info.host, info.worker_id, info.pid, EXAMINE_S))
        self._diagnosis = Diagnosis(
            run_dir.path / "diagnosis", self._signal, lambda w, message: self.server.order(w, dict(message)), self._look_into, self._stacks_of,
            lambda folder, w, step: self._events.emit("diagnosis", step=step, replica=self._place_of(w)[0], rank=self._place_of(w)[1], worker=w, path=str(folder)),
        )
        self._pace = Pace(config.watch, self._events, self._place_of)
        self.agents = Agents(config, run_dir, self._events, lambda worker: self.server.process_ended(worker))
        listener = Listener(
            self._place_of, self._entered, self._died, self._recorded,
            lambda worker, number, word: self._injector.on_word(worker, number, word), lambda worker: self._injector.struck(worker),
            before_kill=self._before_kill, on_connect=self.agents.rank, on_agent=self.agents.attend,
        )
        self.server = CoordinatorServer(
            coordinator, self._log, self._events, listener, token, recovery.silence_s, 2 * recovery.link_timeout_s, address[0],
            recovery.heartbeat_s, judge(recovery), judge_every_s(recovery), address,
        )
        target = LaunchedTarget(lambda: self.server, self._place_of, self._signal, self._process, lambda: [], {})
        self._injector = FaultInjector(takeover.faults_left(config.faults, written), target, self._events)
        for member in self._past.members.values() if self._past else ():  # lives are never named again
            self._know(member)
        if not go_on:
            self._events.emit("run_start", step=chosen.step, attempt=run_dir.attempt, recipe=config.recipe, launcher="local",
                              replicas=everybody, spares=0)
        if self._watching:
            self._show(self._watching, address[0], go_on)
        self._thread = threading.Thread(target=self._watch, name="lighthouse-watch", daemon=True)
        self._thread.start()

    def _show(self, watching: Watching, host: str, go_on: bool) -> None:
        """A lighthouse that takes over waits for no dashboard, and needs none. Raises BadInput, at the start of a run, if it cannot listen."""
        def begin() -> None:
            watching.begin(self.run_dir, own_log=False)
            if watching.dashboard:
                self._say(f"dashboard: {watching.dashboard}")

        def begin_again() -> None:
            try:
                begin()
            except BadInput as error:
                self._say(str(error))

        if go_on:
            threading.Thread(target=begin_again, name="dashboard-again", daemon=True).start()
        else:
            begin()
        self._say(f"from elsewhere: everstep dashboard {watching.follow(self.run_dir, self.status, host)}")

    # -- requests of the replicas' heads ------------------------------------------------------------------------------------

    def register(self, replica: int, nonce: str, resume: dict[str, Any] | None, since: float) -> dict[str, Any] | None:
        """A life of a replica asks to take part, ``since`` then (monotonic). ``resume``: it is known to an earlier lighthouse, or from before
        its connection broke. None: not yet, come again."""
        if not 0 <= replica < self.layout.replicas:
            raise BadInput(f"replica.id={replica} is not below the number of replicas, {self.layout.replicas} (replica.count, layout.replicas)")
        with self._turn:
            self.check()
            if resume is None and self._finished.get(replica) == "done" and not self._is_known(replica, nonce):
                raise RunEnded(f"replica {replica} has come to the end of the run in {self.run_dir.path} already")
            if resume is None and not self._is_known(replica, nonce) and not self._place_is_free(replica, since):
                return None
            if not self._is_known(replica, nonce):
                if resume is not None:
                    self._take_back(replica, nonce, resume)
                else:
                    self._begin_life(replica, nonce)
                self._finished.pop(replica, None)
            life = self._replicas[replica]
            if not life.formed and not any(worker in self.server.dead for worker in life.member.workers):
                life.gone = ""  # it was only its connection that ended
            member = life.member
            self._turn.notify_all()
            return {
                "run": self.name, "build": member.build, "workers": list(member.workers), "run_dir": str(self.run_dir.path), "attempt": self.run_dir.attempt,
                "checkpoint": str(self.chosen.path) if self.chosen.path else "", "step": self.chosen.step,
                "explained": self.chosen.explain(), "join": self._opened or self._past is not None, "reference": self.board.has_reference,
                "store_port": self._store_port, "generation": self.board.generation,
            }

    def formed(self, member: Member) -> None:
        """All ranks of this life have formed it and are connected."""
        with self._turn:
            self.check()
            life = self._life(member)
            if life.formed:
                return
            life.formed = True
            if self._opened:
                self.server.joiner(member)
            self._turn.notify_all()

    def enter_stage(self, name: str, step: int) -> None:
        """The lead's recipe enters a stage of an iteration."""
        self._stage = name
        self._injector.on_stage(name, step)

    def hint(self, replicas: frozenset[int]) -> None:
        """Torchft's quorum at the start of a run. The first word counts: quorums of the same instant are one."""
        with self._turn:
            if self._start.expected is None:
                self._start.expected = replicas
                self._say(f"torchft's quorum: replicas {sorted(replicas)}")

    def begin(self, member: Member, step: int, slots: tuple[tuple[str, ...], ...], about: Mapping[str, Any]) -> bool:
        """A replica comes to a step with these samples. False: it was committed before, without this life of it."""
        digest = _digest(slots)
        self._await_opening()
        with self._prepare_lock:
            coordinator = self.server.coordinator
            if step == coordinator.committed + 1:
                self._injector.prepare(step)
                self._pace.begun(step, len(slots))
            with self._turn:
                self.check()
                if step <= coordinator.committed:
                    return False
                if step != coordinator.committed + 1:
                    raise InvariantViolated(f"replica {member.replica} comes to step {step}, but {coordinator.committed} is the last committed one")
                if coordinator.begun < step:
                    self._begun = (step, digest)
                    self.server.begin(step, slots, about)
                elif self._begun != (step, digest):
                    raise InvariantViolated(f"step {step}: replica {member.replica} has other samples for it than the others")
                return True

    def ask(self, member: Member, place: Place, what: str, who: Who) -> Result | Work | None:
        """None: not yet, come again."""
        with self._prepare_lock:
            if self._opened:
                self._injector.prepare(self.server.coordinator.committed + 1)
        end = time.monotonic() + ANSWER_WITHIN_S
        with self._turn:
            while True:
                self.check()
                self._life(member)
                answer = self.board.ask(place, what, who, self.server.coordinator.view, time.monotonic()) if self._opened else None
                if isinstance(answer, Result):
                    return answer
                if answer is not None and member in answer.members and not self.board.has_given(place, member):
                    return answer
                if not self._turn.wait(end - time.monotonic()):
                    return None

    def give(self, member: Member, place: Place, attempt: int, part: bytes, reference: bool) -> None:
        with self._turn:
            self.check()
            self.board.has_reference = self.board.has_reference or reference
            self.board.give(place, attempt, member, part, self.server.coordinator.view, time.monotonic())
            self._turn.notify_all()

    def mark(self, generation: int, bookmark: tuple[bytes, int]) -> None:
        with self._turn:
            self.check()
            self.board.mark(generation, bookmark)

    def restart_at(self, step: int) -> None:
        """The members have loaded a checkpoint of ``step``."""
        self._await_opening()
        with self._turn:
            self.check()
            if self.server.coordinator.committed < step:
                self.server.restart_at(step)

    def restore(self, journal: Journal, reference: bool) -> None:
        with self._turn:
            self.board.restore(journal, reference)
            self._turn.notify_all()

    def finish(self, member: Member, status: str) -> None:
        """A replica has come to the end of its program."""
        with self._turn:
            if (life := self._replicas.get(member.replica)) and life.member == member:
                self._finished[member.replica] = status
            self._turn.notify_all()

    def head_left(self, replica: int, nonce: str) -> None:
        """A head's connection ended. What has formed is judged by its ranks' connections."""
        with self._turn:
            life = self._replicas.get(replica)
            if life and life.nonce == nonce and not life.formed:
                life.gone = "it ended before it was formed"
                self._turn.notify_all()

    def status(self) -> dict[str, Any]:
        """As :meth:`everstep.cluster.group.Group.status`."""
        coordinator = self.server.coordinator
        view = coordinator.view
        return {"state": str(coordinator.state), "stage": self._stage, "epoch": str(view.epoch), "committed_step": coordinator.committed,
                "replicas": list(view.contributors), "healing": sorted(view.healing), "spares": 0, "deaths": len(self.server.dead),
                "ranks": self.server.whereabouts()}

    def is_left(self, within_s: float) -> bool:
        """Whether in this time it ends, or nobody is there any more that takes part in it (or may come back to a lighthouse that took over)."""
        def left() -> bool:
            there = any(not life.gone and replica not in self._finished for replica, life in self._replicas.items())
            return bool(self.ended) or not (there or (self._past is not None and not self._opened))

        with self._turn:
            return self._turn.wait_for(left, within_s)

    def close(self, status: str) -> None:
        """End the run; everybody still connected is told."""
        with self._turn:
            if self.ended:
                return
            self.ended = status
            self._turn.notify_all()
        if unfired := self.unfired_faults:
            self._say(f"faults that never fired: {'; '.join(unfired)}")
        self.server.tell_end(self._outcome())
        if self.failure:
            self._events.emit("error", error=type(self.failure).__name__, message=str(self.failure))
        self._events.emit("run_end", status=status)  # first: whoever ends us may not wait for the rest
        self._log.end()
        self.server.await_departures(LAST_WORDS_S)
        self._diagnosis.close()
        self._post_mortem.close()
        self._say(f"the run in {self.run_dir.path} is {status}" + (f": {self.failure}" if self.failure else ""))
        if self._watching:
            self._watching.close()
        self.agents.close()
        self.server.close()
        self._events.close()

    @property
    def unfired_faults(self) -> list[str]:
        return self._injector.unfired

    @property
    def over(self) -> EverstepError | None:
        """What to tell who comes now; None while the run goes on."""
        return self._outcome() if self.ended else None

    def _outcome(self) -> EverstepError:
        if self.failure or self.ended == "done":
            return self.failure or RunEnded(f"the run in {self.run_dir.path} is done")
        return NotEnoughReplicas(f"the run in {self.run_dir.path} has ended before it was done ({self.ended}); continue with resume=auto")

    # -- the watch -----------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self.ended:
            status = ""
            try:
                with self._turn:
                    self._turn.wait(TICK_S)
                    if self.ended:
                        return
                    status = self._look()
            except EverstepError as error:
                self._fail(error)
            except Exception as error:  # the end of a thread: nobody would be judged any more
                self._fail(WorkerFailed(f"the lighthouse failed while watching: {type(error).__name__}: {error}"))
            if self.failure or status:
                self.close("failed" if self.failure else status)

    def _look(self) -> str:
        """How the run has ended, if it has. Raises what it fails of."""
        recovery = self.config.recovery
        if self.server.failure:
            raise self.server.failure
        if not self._opened:
            self._open_if_due()
            return ""
        for member, why in self.board.overdue(time.monotonic(), recovery.progress_timeout_s, recovery.call_timeout_s).items():
            self.server.expel(member.workers[0], f"no progress: {why}")
        members = {m.replica for m in self.server.coordinator.view.members}
        if self._finished and members <= set(self._finished):  # also if the last member left because it failed
            statuses = {self._finished[replica] for replica in members or self._finished}
            return "done" if statuses == {"done"} else min(statuses - {"done"})
        self._must_have_members()
        return ""

    def _open_if_due(self) -> None:
        now, wait_s = time.monotonic(), self.config.lighthouse.wait_s
        if self._past:
            self._go_on_if_due(self._past, now)
            return
        expected = self._start.expected
        ready = [life.member for _, life in sorted(self._replicas.items()) if life.formed and not life.gone]
        pending = [r for r, life in self._replicas.items() if not life.formed and not life.gone]
        if expected is not None and len(ready) >= self._minimum and not set(pending) & expected:
            self._opened, self._opened_at = True, now
            self.server.open(ready)
            return
        if not any(not life.gone for life in self._replicas.values()) and self._replicas:
            causes = "; ".join(f"replica {r}: {life.gone}" for r, life in sorted(self._replicas.items()))
            raise NotEnoughReplicas(f"no replica that registered lives ({causes}); the run has not begun")
        if now - self._start.since > wait_s:
            raise NotEnoughReplicas(
                f"{len(ready)} of {self.layout.replicas} replicas were ready after {wait_s:g} s (lighthouse.wait_s), the run begins with "
                f"{self._minimum}; start the others, or lower recovery.min_replicas"
            )

    def _go_on_if_due(self, past: Past, now: float) -> None:
        """After a restart of the lighthouse: once the living members of the last view are here, and have said what they hold."""
        assert past.last is not None
        there = {w for life in self._replicas.values() if not life.gone for w in life.member.workers
                 if self.server.connected(w) and w in self.server.told}
        waited_for = [member for member in past.last.view.members if self._may_come(member) and not there.issuperset(member.workers)]
        if waited_for and now - self._start.since <= self.config.recovery.silence_s:
            return
        self._opened, self._opened_at = True, now
        self._turn.notify_all()
        told = {worker: takeover.Told.parse(said) for worker, said in list(self.server.told.items()) if worker in there}
        decided = takeover.decide(past, told, self.run_dir.path)
        begun = self._announced.get(decided.last.view.committed + 1)
        if begun is not None:
            self._begun = (decided.last.view.committed + 1, _digest(begun[0]))
        self.server.take_over(decided.last, decided.commit, decided.members, self.layout.replicas, self._noted, decided.healing, begun)
        view = self.server.coordinator.view
        self._events.emit("takeover", step=view.committed, epoch=view.epoch.key, incarnation=self._log.incarnation, members=list(view.replicas),
                          workers=sorted(told), seconds=now - self._start.since)
        self._say(f"going on after step {view.committed} with replicas {list(view.replicas)}")
        self._members_before = decided.last.view.members
        for worker in [w for m in self._members_before if m not in view.members for w in m.workers if not self.server.connected(w)]:
            self.server.expel(worker, "it did not come back to a lighthouse that was started anew", ended=True)
        for life in self._replicas.values():
            self._let_in(life)

    def _let_in(self, life: Replica) -> None:
        """After a restart of the lighthouse: a life that was on its way into the run goes on with that. One that was a member and came too
        late, or without the state, sees a view without it, and ends."""
        members = (*self.server.coordinator.view.members, *self._members_before)
        if self._opened and life.formed and not life.gone and life.member not in members:
            self.server.joiner(life.member)

    def _await_opening(self) -> None:
        """After a restart of the lighthouse: until it is known which step was the last one (the watch sees to it, in recovery.silence_s)."""
        with self._turn:
            self._turn.wait_for(lambda: self._opened or bool(self.failure or self.ended))
            self.check()

    def _may_come(self, member: Member) -> bool:
        """A member under the lighthouse before; one that is in a later life is dead for sure."""
        life = self._replicas.get(member.replica)
        return life is None or (life.member == member and not life.gone)

    def _must_have_members(self) -> None:
        coordinator, causes = self.server.coordinator, "; ".join(f"{w}: {c}" for w, c in sorted(self.server.dead.items()))
        if coordinator.state is State.LOST:
            raise NotEnoughReplicas(
                f"no living replica holds step {coordinator.committed} ({causes}); resume from the last checkpoint with resume=auto"
            )
        if coordinator.state is not State.HELD:
            self._held_since = None
            return
        self._held_since = self._held_since or time.monotonic()
        wait_s = derive.held_s(self.config)
        if time.monotonic() - self._held_since > wait_s:
            raise NotEnoughReplicas(
                f"{len(coordinator.view.members)} replicas live, {coordinator.min_replicas} are needed, and no other came in {wait_s:g} s "
                f"(lighthouse.wait_s, recovery.below_minimum_wait_s; {causes}); resume with resume=auto when there are machines"
            )

    # -- parts ------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises what the run fails of, or how it has ended."""
        if error := self.failure or self.over:
            raise error

    def _fail(self, error: EverstepError) -> None:
        with self._turn:
            self.failure = self.failure or error
            self._turn.notify_all()

    def _life(self, member: Member) -> Replica:
        life = self._replicas.get(member.replica)
        if life is None or life.member != member or life.gone:
            raise Fenced(f"replica {member.replica} is over in its life {member.build}" + (f": {life.gone}" if life and life.gone else ""))
        return life

    def _know(self, member: Member) -> None:
        self._builds[member.replica] = max(self._builds.get(member.replica, 0), member.build)
        for rank, worker in enumerate(member.workers):
            self._places[worker] = (member.replica, rank)

    def _take_back(self, replica: int, nonce: str, resume: dict[str, Any]) -> None:
        member = Member(replica, int(resume["build"]), tuple(resume["workers"]))
        if self._builds.get(replica, 0) > member.build:
            raise Fenced(f"replica {replica} is over in its life {member.build}: it has a later one")
        if causes := [self.server.dead[worker] for worker in member.workers if worker in self.server.dead]:
            raise Fenced(f"replica {replica} is over in its life {member.build}: {causes[0]}")
        self._know(member)
        self._replicas[replica] = Replica(member, nonce, formed=bool(resume["formed"]))
        if resume["begun"]:
            step, slots, about = resume["begun"]
            self._announced[step] = tuple(tuple(slot) for slot in slots), about
        self._let_in(self._replicas[replica])

    def _is_known(self, replica: int, nonce: str) -> bool:
        life = self._replicas.get(replica)
        return life is not None and life.nonce == nonce

    def _place_is_free(self, replica: int, since: float) -> bool:
        """A former life of the replica must have ended before there is a new one (rule 8). After a restart of the lighthouse that is known
        once those that lived under the one before had time to come back: before, any second process could take the place of a living one.
        Waits at most as long as one answer may take. Raises BadInput if the former life goes on."""
        limit = self.config.recovery.silence_s + 2 * self.config.recovery.heartbeat_s

        def free() -> bool:
            life = self._replicas.get(replica)
            return (self._opened or self._past is None) and (life is None or bool(life.gone))

        if self._turn.wait_for(lambda: free() or bool(self.failure or self.ended), ANSWER_WITHIN_S):
            self.check()
            return True
        life = self._replicas.get(replica)
        if life is not None and (self._opened or self._past is None) and time.monotonic() > max(since, self._opened_at) + limit:
            said = self.server.progress.get(life.member.workers[0])
            raise BadInput(
                f"replica.id={replica} takes part already (process {said.pid if said else '?'} on {said.host if said else '?'}); stop it, or give "
                "this one another replica.id"
            )
        return False

    def _begin_life(self, replica: int, nonce: str) -> None:
        build = self._builds.get(replica, -1) + 1
        first = replica * self.layout.ranks_per_replica
        names = [f"w{first + rank}" + (f"b{build}" if build else "") for rank in range(self.layout.ranks_per_replica)]
        self._replicas[replica] = Replica(Member(replica, build, tuple(names)), nonce)
        self._know(self._replicas[replica].member)
        self._say(f"replica {replica} has registered" + (f", in its life {build}" if build else ""))

    def _died(self, worker: str, cause: str, ended: bool) -> None:
        replica, _ = self._place_of(worker)
        self.agents.died(worker)
        if (said := self.server.progress.get(worker)) and not self.ended:
            step, suspected = self.server.coordinator.committed + 1, bool(self.server.coordinator.view.quarantined)
            self._post_mortem.died(WorkerInfo(worker, said.pid, said.host, said.host), self._place_of(worker), step, cause, suspected)
        if said and (said.host, said.pid) != (socket.gethostname(), os.getpid()):  # of one replica alone rank 0 is this process
            # Also of a life that is over already: of several frozen ranks none ends by itself. One that ends has last words to say.
            ending = threading.Timer(LAST_WORDS_S if ended else 0.0, self._signal, (worker, signal.SIGKILL))
            ending.daemon = True
            ending.start()
        with self._turn:
            life = self._replicas.get(replica)
            if life and worker in life.member.workers and not life.gone:
                life.gone = cause  # the others end by themselves, when they hear of it: all are started anew (rule 23)
                self._events.emit("expel", replica=replica, rank=self._place_of(worker)[1], worker=worker, cause=cause)
            self._turn.notify_all()

    def _before_kill(self, worker: str, cause: str) -> None:
        """A rank is silent or makes no progress: what all ranks do is written down."""
        if self.config.watch.diagnose:
            self._diagnosis.take(worker, cause, self.server.coordinator.committed + 1, self.server.whereabouts())
            self._diagnosis.finish(worker)

    def _look_into(self, worker: str, timeout_s: float, spy: bool) -> dict[str, Any]:
        said = self.server.progress.get(worker)
        return self.agents.examine(said.host, worker, said.pid, timeout_s, spy) if said else {}

    def _stacks_of(self, worker: str) -> Path:
        replica, rank = self._place_of(worker)
        return self.run_dir.rank_log(replica * self.layout.ranks_per_replica + rank).with_suffix(".stacks")

    def _entered(self, worker: str, step: int, phase: str) -> None:
        self._injector.on_phase(worker, step, phase)
        self._pace.entered(worker, step, phase)

    def _recorded(self, record: Record) -> None:
        self._pace.recorded(record)
        if record.kind is Kind.COMMIT:
            self._injector.on_commit(record.step)
        elif record.kind is Kind.VIEW:
            self._say(f"view {record.view.epoch}: replicas {list(record.view.replicas)} ({record.cause})")
        with self._turn:
            self.board.view_changed(self.server.coordinator.view, time.monotonic())
            self._turn.notify_all()

    def _place_of(self, worker: str) -> tuple[int, int]:
        return self._places.get(worker, (-1, -1))

    def _signal(self, worker: str, number: int) -> None:
        if said := self.server.progress.get(worker):
            self._send_signal(self._place_of(worker)[0], said.host, said.pid, number)

    def _process(self, worker: str) -> str:
        said = self.server.progress.get(worker)
        return f"{said.pid} on {said.host}" if said else "?"


def _digest(slots: tuple[tuple[str, ...], ...]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(slots).encode())
