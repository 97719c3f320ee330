"""The coordinator at work: takes the ranks' messages, lets the pure :class:`Coordinator` decide, makes it durable, publishes.

Order of one event: decide -> fsync the commit record -> hand the records to every connection, all under one lock, so that
every rank sees the same log. The single line that makes a step durable is ``self._log.write(record)``.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from everstep.errors import DeadlineExceeded, EverstepError, WorkerFailed
from everstep.recovery import wire
from everstep.recovery.commitlog import CommitLog
from everstep.recovery.coordinator import Coordinator
from everstep.recovery.progress import Judge
from everstep.recovery.view import Kind, Member, Record, Vote
from everstep.telemetry.events import EventLog

HELLO_TIMEOUT_S = 10.0


@dataclass
class Progress:
    """What a rank last said of itself. ``heard`` is this machine's monotonic clock."""

    heard: float
    step: int = 0
    phase: str = "idle"
    pid: int = 0
    host: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


class _Session:
    """One rank's connection: a reader thread and a writer thread, so that a frozen rank delays nobody else."""

    def __init__(self, worker: str, sock: socket.socket):
        self.worker, self.sock = worker, sock
        self.outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def write_loop(self) -> None:
        while (message := self.outbox.get()) is not None:
            try:
                wire.send(self.sock, message)
            except wire.Closed:
                return  # the reader sees the same and reports it

    def close(self) -> None:
        self.outbox.put(None)
        with contextlib.suppress(OSError):  # already closed by the other end
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class CoordinatorServer:
    """Owns the coordinator of one run.

    ``on_phase(worker, step, phase)`` is called when a rank enters a phase (fault injection listens here), ``on_death(worker,
    cause)`` once for every worker that is expelled (its process must then be killed and confirmed dead: rule 8), ``on_record``
    for every record published, ``on_word(worker, number, word)`` when a rank answers an order of fault injection. They run on the
    server's threads, outside its lock, and must not block.

    ``heartbeat_s``: every rank hears something this often. ``judge``: finds ranks that make no progress (None: nobody does).
    """

    def __init__(
        self, coordinator: Coordinator, log: CommitLog, events: EventLog, token: str, silence_s: float, build_timeout_s: float,
        place: Callable[[str], tuple[int, int]], on_phase: Callable[[str, int, str], None],
        on_death: Callable[[str, str], None], on_record: Callable[[Record], None], host: str = "127.0.0.1",
        heartbeat_s: float = 1.0, judge: Judge | None = None, judge_every_s: float = 1.0,
        on_word: Callable[[str, int, str], None] = lambda worker, number, word: None,
    ):
        self._heartbeat_s, self._judge, self._judge_every_s, self._on_word = heartbeat_s, judge, judge_every_s, on_word
        self.coordinator, self._log, self._events, self._token = coordinator, log, events, token
        self._place, self._build_timeout_s = place, build_timeout_s
        self._build: tuple[str, float] = ("", 0.0)  # the link in construction and since when
        self._silence_s, self._on_phase, self._on_death, self._on_record = silence_s, on_phase, on_death, on_record
        self._changed = threading.Condition(threading.RLock())
        self._sessions: dict[str, _Session] = {}
        self._latest: dict[str, Any] | None = None  # the last view or commit, for a rank that connects later
        self._healing: frozenset[int] = frozenset()
        self.progress: dict[str, Progress] = {}
        self.dead: dict[str, str] = {}
        self.failure: EverstepError | None = None
        self._closed = False
        self._socket = socket.create_server((host, 0), backlog=256)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        threading.Thread(target=self._accept_loop, name="coordinator-accept", daemon=True).start()
        threading.Thread(
            target=self._guarded, args=(self._silence_loop, "watching for silence"), name="coordinator-silence", daemon=True
        ).start()
        threading.Thread(
            target=self._guarded, args=(self._heartbeat_loop, "sending heartbeats"), name="coordinator-heartbeat", daemon=True
        ).start()

    # -- for the controller ---------------------------------------------------------------------------------------------

    def open(self, members: list[Member]) -> None:
        with self._changed:
            self._event(lambda: self.coordinator.open(members))
            for worker in [w for m in members for w in m.workers if w in self.dead]:  # it died after it was formed
                self._event(lambda dead=worker: self.coordinator.death(dead, self.dead[dead]))  # type: ignore[misc]

    def restart_at(self, step: int) -> None:
        """The members hold step ``step`` of a checkpoint; only before the first step of this run."""
        self._event(lambda: self.coordinator.restart_at(step))

    def begin(self, step: int, samples: tuple[str, ...]) -> None:
        with self._changed:
            self.coordinator.begin(step, samples)
        view = self.coordinator.view
        self._events.emit("begin", step=step, epoch=view.epoch.key, members=list(view.replicas), samples=list(samples))

    def joiner(self, member: Member) -> None:
        """Announce a formed replica. One that lost a rank again in the meantime is not announced: its repair is under way."""
        with self._changed:
            if not any(worker in self.dead for worker in member.workers):
                self._event(lambda: self.coordinator.joiner(member))

    def expel(self, worker: str, cause: str) -> None:
        """Take a worker out of every view. Idempotent; returns after the new view is published."""
        with self._changed:
            if worker in self.dead or self._closed:
                return
            self.dead[worker] = cause
            session = self._sessions.pop(worker, None)
        replica, rank = self._place(worker)
        self._events.emit("death", step=self.coordinator.committed + 1, epoch=self.coordinator.view.epoch.key,
                          replica=replica, rank=rank, worker=worker, cause=cause)
        self._event(lambda: self.coordinator.death(worker, cause))
        if session:
            session.close()
        self._on_death(worker, cause)

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
                session.outbox.put(message)
            return session is not None

    def connected(self, worker: str) -> bool:
        return worker in self._sessions

    def close(self) -> None:
        with self._changed:
            self._closed = True
            sessions = list(self._sessions.values())
            self._sessions.clear()
        with contextlib.suppress(OSError):  # not connected, says the kernel; but it wakes accept(), which close() does not
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for session in sessions:
            session.close()
        self._log.close()

    # -- the order of an event --------------------------------------------------------------------------------------------

    def _event(self, decide: Callable[[], list[Record]]) -> None:
        with self._changed:
            if self._closed or self.failure:
                return
            try:
                records = decide()
                for record in records:
                    message = {"type": "record", "record": record.to_json()}
                    if record.kind is not Kind.BUILD:
                        self._log.write(record)
                        self._latest = message
                    self._note(record)
                    for session in self._sessions.values():
                        session.outbox.put(message)
            except EverstepError as error:
                return self._fail(error)
            except OSError as error:
                return self._fail(WorkerFailed(
                    f"step {self.coordinator.committed}: the commit record or event log could not be written ({error}); nobody "
                    "was told of it. Free space, then resume with resume=auto"
                ))
            self._changed.notify_all()
        for record in records:
            self._on_record(record)

    def _fail(self, error: EverstepError) -> None:
        """Nothing is decided any more; the recipe raises ``error`` at its next look."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _guarded(self, loop: Callable[[], None], what: str) -> None:
        """Run a thread's loop: whatever ends it unexpectedly ends the run."""
        try:
            loop()
        except Exception as error:
            if not self._closed:
                self._fail(WorkerFailed(f"the coordinator failed while {what}: {type(error).__name__}: {error}"))

    def _note(self, record: Record) -> None:
        view, members = record.view, list(record.view.replicas)
        if self._judge and record.kind is not Kind.BUILD:
            self._judge.view(view.members, view.healing, time.monotonic())
        match record.kind:
            case Kind.COMMIT:
                assert record.epoch is not None
                self._events.emit("commit", step=record.step, epoch=record.epoch.key, kind=str(record.outcome),
                                  members=members, samples=list(record.samples), divisor=record.divisor,
                                  next_epoch=view.epoch.key, healing=sorted(view.healing), deal=view.deal.number,
                                  dealt=list(view.deal.replicas))
                for replica in sorted(self._healing - view.healing):
                    if view.member(replica):
                        self._events.emit("join", step=record.step, epoch=view.epoch.key, replica=replica,
                                          members=list(view.contributors))
                self._healing = view.healing
            case Kind.VIEW:
                self._events.emit("view", step=view.committed, epoch=view.epoch.key, members=members,
                                  healing=sorted(view.healing), cause=record.cause, deal=view.deal.number,
                                  dealt=list(view.deal.replicas))
                self._healing = view.healing
            case Kind.BUILD:
                self._events.emit("link_build", link=view.link_id, members=members)

    # -- connections -----------------------------------------------------------------------------------------------------

    def _accept_loop(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return  # closed
            serve = functools.partial(self._serve, sock)
            threading.Thread(
                target=self._guarded, args=(serve, "listening to a rank"), name="coordinator-session", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        wire.tune(sock)
        sock.settimeout(HELLO_TIMEOUT_S)
        try:
            hello = wire.receive(sock)
        except (wire.Closed, TimeoutError, ValueError):
            sock.close()
            return
        if not hmac.compare_digest(str(hello.get("token", "")), self._token):
            sock.close()
            return
        sock.settimeout(None)
        worker = str(hello["worker"])
        session = _Session(worker, sock)
        with self._changed:
            if self._closed or worker in self.dead or worker in self._sessions:
                sock.close()
                return
            if self._latest:
                session.outbox.put(self._latest)
            self._sessions[worker] = session
            self.progress[worker] = Progress(time.monotonic(), pid=hello["pid"], host=hello["host"])
            self._changed.notify_all()
        threading.Thread(target=session.write_loop, name=f"coordinator-to-{worker}", daemon=True).start()
        try:
            while True:
                self._receive(worker, wire.receive(sock))
        except wire.Closed as closed:
            with self._changed:
                ours = self._sessions.get(worker) is session
            if ours and not self._closed:
                self.expel(worker, f"process ended ({closed})")

    def _receive(self, worker: str, message: dict[str, Any]) -> None:
        progress = self.progress[worker]
        progress.heard = time.monotonic()
        match message["type"]:
            case "progress":
                entered = (message["step"], message["phase"]) != (progress.step, progress.phase)
                progress.step, progress.phase = message["step"], message["phase"]
                progress.detail = message.get("detail", {})
                self._judge_hears(worker, progress.step, progress.phase, bool(message.get("waits")))
                if entered:
                    self._on_phase(worker, progress.step, progress.phase)
            case "vote":
                vote = Vote.from_json(message["vote"])
                self._judge_hears(worker, vote.step, "voted", True)
                self._event(lambda: self.coordinator.vote(vote))
            case "link_ready":
                self._event(lambda: self.coordinator.link_ready(worker, message["link_id"]))
            case "link_failed":
                self._event(lambda: self.coordinator.link_failed(message["link_id"], message["cause"], message["void"]))
            case "bye":
                with self._changed:
                    self._sessions.pop(worker, None)  # it leaves in order; what follows is no death
            case "dying":
                self.expel(worker, message["cause"])
            case "fault":
                self._on_word(worker, message["number"], message["word"])
            case other:
                raise wire.Closed(f"unknown message type {other!r}")

    def _silence_loop(self) -> None:
        """A rank that said nothing for ``silence_s`` is frozen, cut off, or has its interpreter lock stuck: expel it."""
        interval = min(1.0, self._silence_s / 4, self._judge_every_s)
        now = time.monotonic()
        while not self._closed:
            time.sleep(interval)
            before, now = now, time.monotonic()
            late = now - before - interval
            with self._changed:
                if late > interval:  # this process was suspended itself, or starved: it could not have heard anybody
                    for said in self.progress.values():
                        said.heard += late
                    if self._judge:
                        self._judge.excuse(late)
                silent = [w for w in self._sessions if now - self.progress[w].heard > self._silence_s]
                build = self.coordinator.build
                link = build.link_id if build else ""
                if link != self._build[0]:
                    self._build = (link, now)
                overdue = self._judge.overdue(now) if self._judge else []
                stalled = self._judge.stalled(now) if self._judge and not overdue else ""
            for worker in silent:
                said = self.progress[worker]
                self.expel(worker, f"silent for {self._silence_s:g} s (last: step {said.step}, {said.phase})")
            for verdict in overdue:
                self.expel(verdict.worker, verdict.cause)
            if stalled:
                self._fail(DeadlineExceeded(
                    f"step {self.coordinator.committed + 1}: no replica goes on although every process is alive ({stalled}; "
                    "recovery.step_timeout_s); see the ranks' logs, then resume with resume=auto"
                ))
            if link and now - self._build[1] > self._build_timeout_s:
                self._event(self.coordinator.build_expired)

    def _judge_hears(self, worker: str, step: int, phase: str, waits: bool) -> None:
        if self._judge:
            with self._changed:
                self._judge.entered(worker, step, phase, time.monotonic(), waits)

    def _heartbeat_loop(self) -> None:
        """Silence of the coordinator means something to a rank only because it is never silent."""
        while not self._closed:
            with self._changed:
                for session in self._sessions.values():
                    session.outbox.put({"type": "heartbeat"})
            time.sleep(self._heartbeat_s)
