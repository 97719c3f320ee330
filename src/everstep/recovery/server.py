"""The coordinator at work: the :class:`Desk` with a socket for every rank, and the deadlines that need a clock."""

from __future__ import annotations

import collections
import contextlib
import functools
import hmac
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from everstep.errors import DeadlineExceeded, WorkerFailed
from everstep.recovery import wire
from everstep.recovery.commitlog import CommitLog
from everstep.recovery.coordinator import Coordinator, State
from everstep.recovery.desk import Desk, Listener
from everstep.recovery.door import Door
from everstep.recovery.progress import Judge
from everstep.telemetry.events import EventLog

HELLO_TIMEOUT_S = 10.0
COMING_UP_S = 30.0  # a process that starts loads libraries and claims its device, and may hold its interpreter lock for seconds at a time


class _Session:
    """One rank's connection. What is put goes out at once, as much of it as the kernel takes; a thread writes the rest, so that a frozen rank delays
    nobody else. Before :meth:`start` nothing goes out, after a failure nothing any more: the reader sees the same, and reports it."""

    def __init__(self, worker: str, sock: socket.socket):
        self.worker, self.sock = worker, sock
        self._lock = threading.Lock()
        self._waiting: collections.deque[bytes] = collections.deque()
        self._held = True  # before the start, and while a thread writes
        self._broken = False

    def put(self, message: dict[str, Any]) -> None:
        with self._lock:
            if not self._broken:
                self._waiting.append(wire.packed(message))
                self._flush()

    def start(self) -> None:
        with self._lock:
            self._held = False
            self._flush()

    def _flush(self) -> None:
        while self._waiting and not self._held:
            data = self._waiting.popleft()
            try:
                sent = wire.send_what_fits(self.sock, data)
            except wire.Closed:
                self._broken = True
                return
            if sent < len(data):
                self._waiting.appendleft(data[sent:])
                self._held = True
                threading.Thread(target=self._write, name=f"coordinator-to-{self.worker}", daemon=True).start()

    def _write(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._held = False
                    return
                data = self._waiting.popleft()
            try:
                self.sock.sendall(data)
            except OSError:
                self._broken = True
                return

    def close(self) -> None:
        self._broken = True
        with contextlib.suppress(OSError):  # already closed by the other end
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class CoordinatorServer(Desk):
    """Owns the coordinator of one run.

    ``token``: what a rank must know to be heard. ``silence_s``: a rank of which nothing was heard for so long is expelled;
    while it comes up, and no view has it as a member, not before COMING_UP_S.
    ``build_timeout_s``: for a link to be acknowledged by everybody. ``heartbeat_s``: every rank hears something this often.
    ``address``: of whoever accepts connections for it and hands them over (:meth:`attend`); None: it does that itself.
    """

    def __init__(
        self, coordinator: Coordinator, log: CommitLog, events: EventLog, listener: Listener, token: str, silence_s: float,
        build_timeout_s: float, host: str = "127.0.0.1", heartbeat_s: float = 1.0, judge: Judge | None = None, judge_every_s: float = 1.0,
        address: tuple[str, int] | None = None,
    ):
        super().__init__(coordinator, log, events, listener, judge)
        self._commits = log
        self._heartbeat_s, self._judge_every_s, self.token = heartbeat_s, judge_every_s, token
        self._silence_s, self._build_timeout_s = silence_s, build_timeout_s
        self._build: tuple[str, float] = ("", 0.0)  # the link in construction and since when
        self._members: dict[str, float] = {}  # workers in the view, and since when
        self._door = Door(socket.create_server((host, 0), backlog=256), self._come, "coordinator") if address is None else None
        self.address: tuple[str, int] = (host, self._door.address[1]) if self._door else address  # type: ignore[assignment]
        loops = {self._silence_loop: "watching for silence", self._heartbeat_loop: "sending heartbeats"}
        for loop, what in loops.items():
            threading.Thread(target=self._guarded, args=(loop, what), name=f"coordinator-{what.split()[-1]}", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            sessions = list(self._sessions.values())
            self._sessions.clear()
        if self._door:
            self._door.close()
        for session in sessions:
            session.close()
        self._commits.close()

    # -- connections -----------------------------------------------------------------------------------------------------

    def _guarded(self, loop: Callable[[], None], what: str) -> None:
        """Run a thread's loop: whatever ends it unexpectedly ends the run."""
        try:
            loop()
        except Exception as error:  # the end of a thread: the run ends with its reason
            if not self._closed:
                self._fail(WorkerFailed(f"the coordinator failed while {what}: {type(error).__name__}: {error}"))

    def _come(self, sock: socket.socket) -> None:
        self._guarded(functools.partial(self._serve, sock), "listening to a rank")

    def _serve(self, sock: socket.socket) -> None:
        wire.tune(sock)
        sock.settimeout(HELLO_TIMEOUT_S)
        try:
            hello = wire.receive(sock)
        except (wire.Closed, TimeoutError, ValueError):
            sock.close()
            return
        if not hmac.compare_digest(str(hello.get("token", "")), self.token):
            sock.close()
            return
        sock.settimeout(None)
        if "agent" in hello:
            self._listener.on_agent(sock, hello)
        else:
            self.attend(sock, hello)

    def attend(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """Listen to a rank that introduced itself with ``hello`` until its connection ends."""
        worker = str(hello["worker"])
        session = _Session(worker, sock)
        if "orphan" in hello:  # it obeyed another coordinator before, and waits to know whether it is welcome
            ours = self.coordinator.view.epoch.incarnation
            if hello["orphan"] == ours and self.connected(worker):  # this one, which has not noticed: nobody can tell it what it missed
                self.expel(worker, "it had given this coordinator up when it came back")
            session.put({"type": "welcome", "incarnation": ours})
        if not self.connect(worker, session, hello["pid"], hello["host"]):
            if worker in self.dead:
                with contextlib.suppress(wire.Closed):
                    wire.send(sock, {"type": "over", "error": "ReplicaBroken", "message": f"worker {worker} was expelled: {self.dead[worker]}"})
            sock.close()
            return
        session.start()
        incoming = wire.Reader(sock)
        try:
            while True:
                self.receive(worker, incoming.receive())
        except wire.Closed as closed:
            with self._changed:
                ours = self._sessions.get(worker) is session
            if ours and self._over:
                self.receive(worker, {"type": "bye"})
            elif ours and not self._closed:
                self.expel(worker, f"process ended ({closed})", ended=True)

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
                self._members = {worker: self._members.get(worker, now) for worker in self.coordinator.view.workers}
                limits = {worker: self._silence_limit(worker, now) for worker in self._sessions}
                silent = {worker: limit for worker, limit in limits.items() if now - self.progress[worker].heard > limit}
                build = self.coordinator.build
                link = build.link_id if build else ""
                if link != self._build[0]:
                    self._build = (link, now)
                overdue = self._judge.overdue(now) if self._judge else []
                stalled = self._judge.stalled(now) if self._judge and not overdue else ""
            for worker, limit in silent.items():
                said = self.progress[worker]
                self.expel(worker, f"silent for {limit:g} s (last: step {said.step}, {said.phase})")
            for verdict in overdue:
                self.expel(verdict.worker, verdict.cause)
            if stalled:
                self._fail(DeadlineExceeded(
                    f"step {self.coordinator.committed + 1}: no replica goes on although every process is alive ({stalled}; "
                    "recovery.step_timeout_s); see the ranks' logs, then resume with resume=auto"
                ))
            if link and now - self._build[1] > self._build_timeout_s:
                self._event(self.coordinator.build_expired)

    def _silence_limit(self, worker: str, now: float) -> float:
        """Until its first step a member says no more than a process that comes up; but the others wait for it."""
        said, member_since = self.progress[worker], self._members.get(worker, now)
        begins = self.coordinator.state is State.FORMING or now - said.since < COMING_UP_S
        comes_up = (said.step, said.phase) == (0, "idle") and begins and now - member_since < self._silence_s
        return max(self._silence_s, COMING_UP_S) if comes_up else self._silence_s

    def _heartbeat_loop(self) -> None:
        """Silence of the coordinator means something to a rank only because it is never silent."""
        while not self._closed:
            heartbeat = wire.Shared(type="heartbeat")
            with self._changed:
                for session in self._sessions.values():
                    session.put(heartbeat)
            time.sleep(self._heartbeat_s)
