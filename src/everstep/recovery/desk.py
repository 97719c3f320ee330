"""The coordinator's desk: takes the ranks' messages, lets the pure :class:`Coordinator` decide, makes it durable, publishes.

Order of one event: decide -> fsync the commit record -> hand the records to every connection, all under one lock, so that
every rank sees the same log. The single line that makes a step durable is ``self._log.write(record)``. How messages come and go is
not known here: :mod:`everstep.recovery.server` has sockets.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from everstep.errors import EverstepError, WorkerFailed
from everstep.recovery import wire
from everstep.recovery.coordinator import TAKEOVER, Coordinator
from everstep.recovery.progress import Judge
from everstep.recovery.view import Kind, Member, Record, View, Vote
from everstep.telemetry.events import EventLog

LOG = logging.getLogger(__name__)


@dataclass
class Progress:
    """What a rank last said of itself. ``heard`` is this machine's monotonic clock."""

    heard: float
    since: float  # when it entered the phase, on the same clock
    step: int = 0
    phase: str = "idle"
    pid: int = 0
    host: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


class Session(Protocol):
    """One rank's connection. Messages that are put arrive in that order; nothing here waits for them."""

    def put(self, message: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class DurableLog(Protocol):
    def write(self, record: Record) -> None:
        """Returns once the record is on disk. Raises OSError."""


@dataclass(frozen=True)
class Listener:
    """Who is told what. Called outside the desk's lock, on whatever thread the event came; must not block.

    ``place(worker)``: (replica, rank), (-1, -1) for a spare, (-2, number) for a rollout engine. ``on_phase(worker, step, phase)`` when a rank enters a phase (fault
    injection listens here), ``on_death(worker, cause, ended)`` once for every worker that is expelled (its process must then be killed and
    confirmed dead: rule 8; ``ended``: it ends by itself, and may have last words to say), ``on_record`` for every record published, ``on_word(worker, number, word)`` when a rank answers an order
    of fault injection. ``injected(worker)``: whether it was struck by fault injection. ``on_leaving(worker, cause, whole_node)`` when a
    rank was told that it, or its machine, is about to be taken away. ``before_kill(worker, cause)``: it lives, and will be expelled and killed next.
    ``on_connect(worker, pid, host)``: a process is there. ``on_agent(sock, hello)``: a node's agent said ``hello``; returns when that connection ends.
    """

    place: Callable[[str], tuple[int, int]]
    on_phase: Callable[[str, int, str], None] = lambda worker, step, phase: None
    on_death: Callable[[str, str, bool], None] = lambda worker, cause, ended: None
    on_record: Callable[[Record], None] = lambda record: None
    on_word: Callable[[str, int, str], None] = lambda worker, number, word: None
    injected: Callable[[str], bool] = lambda worker: False
    on_leaving: Callable[[str, str, bool], None] = lambda worker, cause, whole_node: None
    before_kill: Callable[[str, str], None] = lambda worker, cause: None
    on_connect: Callable[[str, int, str], None] = lambda worker, pid, host: None
    on_agent: Callable[[socket.socket, dict[str, Any]], None] = lambda sock, hello: sock.close()


class Desk:
    """``sessions`` are added by whoever accepts connections. ``judge``: finds ranks that make no progress (None: nobody does)."""

    def __init__(
        self, coordinator: Coordinator, log: DurableLog, events: EventLog, listener: Listener, judge: Judge | None = None
    ):
        self.coordinator, self._log, self._events, self._listener, self._judge = coordinator, log, events, listener, judge
        self._changed = threading.Condition(threading.RLock())
        self._sessions: dict[str, Session] = {}
        self._latest: Record | None = None  # the last view or commit: what every rank that is connected has, and who connects later is told
        self._healing: frozenset[int] = frozenset()
        self._noted = 0  # the last step whose commit event is written already
        self.progress: dict[str, Progress] = {}
        self.dead: dict[str, str] = {}
        self.told: dict[str, dict[str, Any]] = {}  # by ranks that obeyed another coordinator before, once they obey this one
        self.failure: EverstepError | None = None
        self._closed = self._over = False

    # -- for the controller ---------------------------------------------------------------------------------------------

    def open(self, members: list[Member]) -> None:
        with self._changed:
            self._event(lambda: self.coordinator.open(members))
            for worker in [w for m in members for w in m.workers if w in self.dead]:  # it died after it was formed
                self._event(lambda dead=worker: self.coordinator.death(dead, self.dead[dead]))  # type: ignore[misc]

    def take_over(
        self, last: Record, commit: Record | None, members: list[Member], replicas: int, noted: int, healing: Sequence[Member] = (),
        begun: tuple[tuple[tuple[str, ...], ...], Mapping[str, Any]] | None = None,
    ) -> None:
        """As :meth:`Coordinator.take_over`. ``noted``: the last step whose commit the dead coordinator's event log has. ``begun``: what
        begin() is told of the next step, if somebody has come to it already."""
        with self._changed:
            self._noted, self._healing = noted, last.view.healing
            self._event(lambda: self.coordinator.take_over(last, commit, members, replicas, healing))
            if begun is not None and self.failure is None:
                self.begin(self.coordinator.committed + 1, *begun)
            for worker in [w for m in (*members, *healing) for w in m.workers if w in self.dead]:  # it died since it said what it holds
                self._event(lambda dead=worker: self.coordinator.death(dead, self.dead[dead]))  # type: ignore[misc]

    def rollback(self, step: int, members: list[Member], cause: str, state: dict[str, Any] | None) -> None:
        """As :meth:`Coordinator.rollback`."""
        with self._changed:
            self._event(lambda: self.coordinator.rollback(step, members, cause, state))
            for worker in [w for m in members for w in m.workers if w in self.dead]:
                self._event(lambda dead=worker: self.coordinator.death(dead, self.dead[dead]))  # type: ignore[misc]

    def restart_at(self, step: int, state: dict[str, Any] | None = None) -> None:
        """The members hold step ``step`` of a checkpoint; only before the first step of this run."""
        self._event(lambda: self.coordinator.restart_at(step, state))

    def begin(
        self, step: int, slots: tuple[tuple[str, ...], ...], about: Mapping[str, Any] | None = None, state: dict[str, Any] | None = None
    ) -> None:
        """Step ``step`` begins, with the samples (ids) of each of its slots. ``about``: further fields of its event; ``state``: the
        recipe's once it is committed."""
        with self._changed:
            self.coordinator.begin(step, slots, state)
        view = self.coordinator.view
        self._events.emit("begin", step=step, epoch=view.epoch.key, members=list(view.replicas),
                          samples=[sample for slot in slots for sample in slot], **(about or {}))

    def joiner(self, member: Member) -> None:
        """Announce a formed replica. One that lost a rank again in the meantime is not announced: its repair is under way."""
        with self._changed:
            if not any(worker in self.dead for worker in member.workers):
                self._event(lambda: self.coordinator.joiner(member))

    def leave(self, replica: int, cause: str, replaceable: bool) -> bool:
        """A replica leaves the view between two steps (:meth:`Coordinator.leave`); whether it did."""
        with self._changed:
            self._event(lambda: self.coordinator.leave(replica, cause, replaceable))
            return self.coordinator.view.member(replica) is None

    def retire(self, worker: str, cause: str) -> None:
        """A worker that belongs to no member leaves for good; that is no death. One that became a member since that was decided is missed there."""
        with self._changed:
            if worker in self.dead or self._closed:
                return
            self.dead[worker] = cause
            session = self._sessions.pop(worker, None)
        replica, rank = self._listener.place(worker)
        self._events.emit("retire", replica=replica, rank=rank, worker=worker, cause=cause)
        self._event(lambda: self.coordinator.death(worker, cause))
        if session:
            session.close()

    def halt(self, cause: str) -> None:
        """Too few members, for good: the step in progress is given up (:meth:`Coordinator.halt`)."""
        self._event(lambda: self.coordinator.halt(cause))

    def expel(self, worker: str, cause: str, ended: bool = False) -> None:
        """Take a worker out of every view. Idempotent; returns after the new view is published. ``ended``: its process ended by
        itself, maybe of what it was computing."""
        with self._changed:
            if worker in self.dead or self._closed:
                return
        if not ended:
            self._listener.before_kill(worker, cause)
        with self._changed:
            if worker in self.dead or self._closed:
                return
            self.dead[worker] = cause
            session = self._sessions.pop(worker, None)
        replica, rank = self._listener.place(worker)
        self._events.emit("death", step=self.coordinator.committed + 1, epoch=self.coordinator.view.epoch.key,
                          replica=replica, rank=rank, worker=worker, cause=cause)
        LOG.warning("%s (%d/%d) is expelled: %s", worker, replica, rank, cause)
        computing = self._computing(worker) if ended else ()
        self._event(lambda: self.coordinator.death(worker, cause, computing))
        if session:
            session.close()
        self._listener.on_death(worker, cause, ended)

    def process_ended(self, worker: str) -> None:
        """The agent of its node says so. What left in order is no member of anything any more, and once the run is over nobody dies of it."""
        if self.connected(worker) and not self._over:
            self.expel(worker, "process ended (pidfd)", ended=True)

    def _computing(self, worker: str) -> tuple[int, ...]:
        """Slots of the step in progress that a dead worker was in the middle of by its last word, unless it was struck on purpose."""
        said = self.progress.get(worker)
        if said is None or said.step != self.coordinator.committed + 1 or self._listener.injected(worker):
            return ()
        return tuple(said.detail.get("computing", ()))

    def wait(self, condition: Callable[[Coordinator], bool], timeout_s: float) -> bool:
        """Wait until ``condition`` holds after some event; False at the deadline. Raises the stored failure."""
        with self._changed:
            held = self._changed.wait_for(lambda: self.failure is not None or condition(self.coordinator), timeout_s)
            if self.failure:
                raise self.failure
            return held

    def order(self, worker: str, message: dict[str, Any]) -> bool:
        """Send a message to one rank; False if it is not connected."""
        with self._changed:
            session = self._sessions.get(worker)
            if session:
                session.put(message)
            return session is not None

    def tell_end(self, error: EverstepError) -> None:
        """The run is over: every rank is told how. Whoever goes from now on has not died."""
        message = {"type": "over", "error": type(error).__name__, "message": str(error)}
        with self._changed:
            self._over = True
            for session in self._sessions.values():
                session.put(message)

    def await_departures(self, timeout_s: float) -> None:
        """Wait until nobody is connected any more, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._sessions, timeout_s)

    def meant_for(self, member: Member) -> tuple[int, int, int]:
        """What a call of a member's ranks says it is for: this life of the replica, beside this coordinator."""
        return member.replica, member.build, self.coordinator.view.epoch.incarnation

    def connected(self, worker: str) -> bool:
        return worker in self._sessions

    def summary(self) -> dict[str, Any]:
        """Who takes part, and how far they are."""
        coordinator, view = self.coordinator, self.coordinator.view
        return {
            "state": str(coordinator.state), "epoch": str(view.epoch), "committed_step": coordinator.committed,
            "replicas": list(view.contributors), "healing": sorted(view.healing), "deaths": len(self.dead),
        }  # fmt: skip

    def whereabouts(self) -> dict[str, dict[str, Any]]:
        """Of every living worker by its own last word: place, step, phase, and for how many seconds it has been there."""
        now = time.monotonic()
        with self._changed:
            said = [(worker, dataclasses.replace(p)) for worker, p in self.progress.items() if worker not in self.dead]
        found: dict[str, dict[str, Any]] = {}
        for worker, p in said:
            replica, rank = self._listener.place(worker)
            found[worker] = {"replica": replica, "rank": rank, "step": p.step, "phase": p.phase, "since_s": now - p.since,
                             "pid": p.pid, "host": p.host}
        return found

    # -- the order of an event --------------------------------------------------------------------------------------------

    def _event(self, decide: Callable[[], list[Record]]) -> None:
        with self._changed:
            if self._closed or self.failure:
                return
            try:
                try:
                    records = decide()
                finally:
                    for finding in self.coordinator.take_findings():
                        self._events.emit("non_finite", step=finding.step, epoch=finding.epoch, **finding.fields())
                for record in records:
                    message = wire.Shared(type="record", record=record.to_json(self._latest))
                    if record.kind is not Kind.BUILD:
                        self._log.write(record)
                        self._latest = record
                    self._note(record)
                    for session in self._sessions.values():
                        session.put(message)
            except EverstepError as error:
                return self._fail(error)
            except OSError as error:
                return self._fail(WorkerFailed(
                    f"step {self.coordinator.committed}: the commit record or event log could not be written ({error}); nobody "
                    "was told of it. Free space, then resume with resume=auto"
                ))
            self._changed.notify_all()
        for record in records:
            self._listener.on_record(record)
        for found in self.coordinator.reruns.take_culprits():
            self._events.emit("corruption", step=self.coordinator.committed + 1, replica=found.replica, rank=found.rank, action="evicted", found="rerun")
            self.expel(found.worker, found.cause)

    def _fail(self, error: EverstepError) -> None:
        """Nothing is decided any more; the recipe raises ``error`` at its next look."""
        LOG.error("nothing is decided any more: %s", error)
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _note(self, record: Record) -> None:
        view, members = record.view, list(record.view.replicas)
        if self._judge and record.kind is not Kind.BUILD:
            anew = record.kind in (Kind.VIEW, Kind.ROLLBACK) or record.cause == TAKEOVER  # else the attempt in progress goes on, or is committed
            self._judge.view(view.members, view.healing, time.monotonic(), view.epoch.key if anew else None)
        if record.cause == TAKEOVER:
            self._events.emit("view", step=view.committed, epoch=view.epoch.key, members=members, healing=sorted(view.healing), cause=record.cause,
                              deal=view.deal.number, dealt=list(view.deal.replicas), quarantined=[])
        match record.kind:
            case Kind.COMMIT if record.cause == TAKEOVER and record.step <= self._noted:
                self._note_joins(record.step, view)  # sent again, for those that did not hear it
            case Kind.COMMIT:
                assert record.epoch is not None
                self._events.emit("commit", step=record.step, epoch=record.epoch.key, kind=str(record.outcome),
                                  members=members, samples=list(record.samples), divisor=record.divisor,
                                  next_epoch=view.epoch.key, healing=sorted(view.healing), deal=view.deal.number,
                                  dealt=list(view.deal.replicas), dropped=list(record.dropped), quarantined=list(view.quarantined))
                if record.dropped:
                    self._events.emit("drop", step=record.step, samples=list(record.dropped),
                                      reason="their slot was in quarantine: replicas died while they computed it")
                self._note_joins(record.step, view)
            case Kind.VIEW if record.cause == TAKEOVER:
                self._note_joins(view.committed, view)
            case Kind.VIEW | Kind.ROLLBACK:
                if record.kind is Kind.ROLLBACK:
                    self._events.emit("rollback", step=record.step, epoch=view.epoch.key, members=members, cause=record.cause)
                self._events.emit("view", step=view.committed, epoch=view.epoch.key, members=members,
                                  healing=sorted(view.healing), cause=record.cause, deal=view.deal.number,
                                  dealt=list(view.deal.replicas), shift=view.deal.shift, quarantined=list(view.quarantined))
                self._healing = view.healing
            case Kind.HALT:
                self._events.emit("halt", step=view.committed, epoch=view.epoch.key, members=members, cause=record.cause)
            case Kind.BUILD:
                self._events.emit("link_build", link=view.link_id, members=members)

    def _note_joins(self, step: int, view: View) -> None:
        """Replicas that healed until ``step`` contribute from now on."""
        for replica in sorted(self._healing - view.healing):
            if view.member(replica):
                self._events.emit("join", step=step, epoch=view.epoch.key, replica=replica, members=list(view.contributors))
        self._healing = view.healing

    # -- what ranks say ---------------------------------------------------------------------------------------------------

    def connect(self, worker: str, session: Session, pid: int, host: str) -> bool:
        """A rank's connection; False if it is refused: the worker is expelled, or has one already."""
        with self._changed:
            if self._closed or worker in self.dead or worker in self._sessions:
                return False
            if self._latest:
                session.put({"type": "record", "record": self._latest.to_json()})
            self._sessions[worker] = session
            self.progress[worker] = Progress(now := time.monotonic(), now, pid=pid, host=host)
            self._changed.notify_all()
        self._listener.on_connect(worker, pid, host)
        return True

    def receive(self, worker: str, message: dict[str, Any]) -> None:
        progress = self.progress[worker]
        progress.heard = time.monotonic()
        match message["type"]:
            case "progress":
                entered = (message["step"], message["phase"]) != (progress.step, progress.phase)
                progress.step, progress.phase = message["step"], message["phase"]
                progress.detail = message.get("detail", {})
                incarnation, counter = message.get("epoch", (0, 0))
                self._judge_hears(worker, progress.step, progress.phase, bool(message.get("waits")), (incarnation, counter))
                if entered:
                    progress.since = progress.heard
                    self._listener.on_phase(worker, progress.step, progress.phase)
            case "vote":
                vote = Vote.from_json(message["vote"])
                self._judge_hears(worker, vote.step, "voted", True, vote.epoch.key)
                self._event(lambda: self.coordinator.vote(vote))
            case "link_ready":
                self._event(lambda: self._acknowledged(worker, message["link_id"]))
            case "link_failed":
                self._event(lambda: self.coordinator.link_failed(message["link_id"], message["cause"], message["void"]))
            case "heal_failed":
                self._event(lambda: self.coordinator.heal_failed(message["number"], message["cause"]))
            case "bye":
                with self._changed:
                    self._sessions.pop(worker, None)  # it leaves in order; what follows is no death
                    self._changed.notify_all()
            case "state":
                with self._changed:
                    self.told[worker] = message["state"]
                    self._changed.notify_all()
            case "leaving":
                self._listener.on_leaving(worker, message["cause"], message["whole_node"])
            case "dying" if self._over:
                pass  # it ends because the run has
            case "dying":
                self.expel(worker, message["cause"], ended=True)
            case "fault":
                self._listener.on_word(worker, message["number"], message["word"])
            case other:
                raise wire.Closed(f"unknown message type {other!r}")

    def _acknowledged(self, worker: str, link_id: str) -> list[Record]:
        build = self.coordinator.build
        records = self.coordinator.link_ready(worker, link_id)
        if build and build.link_id == link_id and build.ready:
            self._events.emit("link_ready", link=link_id, members=[member.replica for member in build.members])
        return records

    def _judge_hears(self, worker: str, step: int, phase: str, waits: bool, epoch: tuple[int, int]) -> None:
        if self._judge:
            with self._changed:
                self._judge.entered(worker, step, phase, time.monotonic(), waits, epoch)
