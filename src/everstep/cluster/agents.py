"""The lead's side of the nodes' agents (:mod:`everstep.node.agent`): starts them, hears them, asks them.

An agent is started on each machine from which a rank connects, by whoever can start processes there (``Host.run_agent``; without Ray the ranks
themselves, :func:`keep_here`), and another one when it ends, later and later. The run neither waits for one nor needs one: what no agent says is
missing in the events, nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everstep.config.schema import Config
from everstep.node.agent import AgentSpec, look_at, stacks
from everstep.recovery import wire
from everstep.run_dir import RunDir
from everstep.telemetry.events import EventLog
from everstep.telemetry.health import look, newest_stamp

LOG = logging.getLogger(__name__)
EXAMINE_S = 2.0  # for an agent to say what it knows of a death
_SILENT_ROUNDS, _SILENT_S = 5, 10.0  # an agent of which nothing was heard for so many rounds and seconds is frozen
_LEAVE_S = 1.0
_BACKOFF_S = 1.0
_LONGEST_S = 30.0
_TOLD = ("health", "stuck", "quarantine", "rank_end")


def agent_spec(config: Config, run_dir: Path, attempt: int, node: str, coordinator: tuple[str, int], token: str) -> AgentSpec:
    """It stays without a coordinator for as long as ranks do (the longest of grace and fence), and until they must have been noticed."""
    recovery, watch = config.recovery, config.watch
    grace_s = max(recovery.controller_grace_s, config.lighthouse.wait_s if config.launcher == "local" else 0.0)
    return AgentSpec(node, str(run_dir), attempt, coordinator, token, watch.agent_every_s, watch.stuck_after_s, recovery.progress_timeout_s,
                     max(recovery.fence_s, grace_s) + recovery.silence_s)


class Keeper:
    """Runs an agent, and another one whenever it ends. ``run()``: one life of it; returns, or raises, when that is over."""

    def __init__(self, node: str, run: Callable[[], object]):
        self._node, self._run, self._closed = node, run, threading.Event()
        threading.Thread(target=self._loop, name=f"agent-of-{node}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _loop(self) -> None:
        delay = _BACKOFF_S
        while not self._closed.is_set():
            begun = time.monotonic()
            try:
                self._run()
            except Exception as error:  # whatever keeps one from living: it is tried again, and the run does without
                LOG.info("the agent of %s: %s: %s", self._node, type(error).__name__, error)
            if time.monotonic() - begun > _LONGEST_S:
                delay = _BACKOFF_S
            self._closed.wait(delay)
            delay = min(_LONGEST_S, 2 * delay)


class _Session:
    def __init__(self, node: str, sock: socket.socket):
        self.node, self._sock, self._lock = node, sock, threading.Lock()
        self.ended = threading.Event()

    def put(self, message: dict[str, Any]) -> None:
        with self._lock, contextlib.suppress(wire.Closed):  # its end is seen where it is listened to
            wire.send(self._sock, message)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class Agents:
    """``on_end(worker)``: a process of a rank ended. ``on_quarantine(workers, cause)``: the device of these is sick. ``run_agent(spec, worker)``:
    an agent's life, on the machine that ``worker`` is on; None: somebody else starts them. ``end_agent(node)``: kill it, for it is frozen. ``address()``: (host, port)
    of the coordinator, and its token."""

    def __init__(
        self, config: Config, run_dir: RunDir, events: EventLog, on_end: Callable[[str], None] = lambda worker: None,
        on_quarantine: Callable[[list[str], str], None] = lambda workers, cause: None, run_agent: Callable[[AgentSpec, str], None] | None = None,
        end_agent: Callable[[str], None] = lambda node: None, address: Callable[[], tuple[tuple[str, int], str]] = lambda: (("", 0), ""),
    ):
        self._config, self._run_dir, self._events, self._address = config, run_dir, events, address
        self._on_end, self._on_quarantine, self._run_agent, self._end_agent = on_end, on_quarantine, run_agent, end_agent
        self._kernel_stamp = newest_stamp()  # what the kernel's log held before is not of this run
        self._ranks: dict[str, dict[str, int]] = {}      # node -> worker -> pid
        self._newest: dict[str, str] = {}                # node -> the worker that connected last from there
        self._sessions: dict[str, _Session] = {}
        self._keepers: dict[str, Keeper] = {}
        self._answers: dict[int, tuple[threading.Event, dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """They are told that the run is over, and end; that is waited for, a moment."""
        with self._lock:
            self._closed = True
            sessions, keepers = list(self._sessions.values()), list(self._keepers.values())
        for keeper in keepers:
            keeper.close()
        for session in sessions:
            session.put({"type": "over"})
        end = time.monotonic() + _LEAVE_S
        for session in sessions:
            session.ended.wait(max(0.0, end - time.monotonic()))
            session.close()

    # -- ranks -------------------------------------------------------------------------------------------------------------------------

    def rank(self, worker: str, pid: int, node: str) -> None:
        """A rank connected to the coordinator: the agent of its node watches it."""
        with self._lock:
            self._ranks.setdefault(node, {})[worker] = pid
            self._newest[node] = worker
            session = self._sessions.get(node)
            if self._run_agent and node not in self._keepers and self._config.watch.agent_every_s and not self._closed:
                run_agent, address = self._run_agent, self._address
                spec = lambda: agent_spec(self._config, self._run_dir.path, self._run_dir.attempt, node, *address())
                self._keepers[node] = Keeper(node, lambda: run_agent(spec(), self._newest[node]))
        if session:
            session.put({"type": "watch", "worker": worker, "pid": pid})

    def died(self, worker: str) -> None:
        """An agent that is started from now on is not told to watch it: its number may be another process's."""
        with self._lock:
            for pids in self._ranks.values():
                pids.pop(worker, None)

    # -- questions ---------------------------------------------------------------------------------------------------------------------

    def examine(self, node: str, worker: str, pid: int, timeout_s: float, spy: bool = False) -> dict[str, Any]:
        """What can be said of a rank, alive or dead, and of its machine: ``signs``, ``kernel``, ``page``, ``says``, ``stuck``, ``stacks``.

        Of this machine also without an agent; of another one nothing ("missing" says so) if its agent does not answer in time.
        """
        found = self._ask(node, worker, pid, timeout_s, spy)
        if found is None and node == socket.gethostname():
            found = look_at(pid) | {"signs": [asdict(sign) for sign in look([str(self._run_dir.path)], self._kernel_stamp)], "stacks": stacks(pid) if spy else ""}
        return found or {"missing": f"the agent of {node} did not answer in {timeout_s:g} s"}

    def _ask(self, node: str, worker: str, pid: int, timeout_s: float, spy: bool) -> dict[str, Any] | None:
        answered, answer = threading.Event(), dict[str, Any]()
        number = next(self._numbers)
        with self._lock:
            session = self._sessions.get(node)
            if session is None:
                return None
            self._answers[number] = answered, answer
        session.put({"type": "examine", "number": number, "worker": worker, "pid": pid, "spy": spy})
        came = answered.wait(timeout_s)
        with self._lock:
            del self._answers[number]
        return answer if came else None

    # -- what they say -----------------------------------------------------------------------------------------------------------------

    def attend(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """Listen to an agent until its connection ends."""
        node, session = str(hello["agent"]), _Session(str(hello["agent"]), sock)
        sock.settimeout(_SILENT_ROUNDS * self._config.watch.agent_every_s + _SILENT_S)  # also of what is sent to it: nobody waits for a frozen one
        with self._lock:
            if self._closed:
                session.put({"type": "over"})
                sock.close()
                return
            if before := self._sessions.pop(node, None):
                before.close()  # it was frozen, or its connection is lost
            self._sessions[node] = session
            ranks = dict(self._ranks.get(node, {}))
        for worker, pid in ranks.items():
            session.put({"type": "watch", "worker": worker, "pid": pid})
        self._note("agent", node=node, state="up", sees=list(hello["sees"]))
        try:
            while True:
                self._hear(node, wire.receive(sock))
        except TimeoutError:
            self._end_agent(node)  # it is frozen; whoever runs it starts another one
        except (wire.Closed, ValueError, KeyError, TypeError):
            pass
        finally:
            sock.close()
            session.ended.set()
            with self._lock:
                ours = self._sessions.get(node) is session
                if ours:
                    del self._sessions[node]
            if ours and not self._closed:
                self._note("agent", node=node, state="lost", sees=[])

    def _hear(self, node: str, message: dict[str, Any]) -> None:
        if message["type"] == "alive":
            return
        if message["type"] == "examined":
            with self._lock:
                waiting = self._answers.get(message["number"])
            if waiting:
                waiting[1].update(message["found"])
                waiting[0].set()
            return
        event, fields = str(message["event"]), dict(message["fields"])
        if event not in _TOLD:
            raise wire.Closed(f"unknown event {event!r} of an agent")
        if event == "rank_end":
            with self._lock:
                ours = self._ranks.get(node, {}).get(fields["worker"]) == fields["worker_pid"]
            if ours and not self._closed:
                self._on_end(fields["worker"])
            return
        self._note(event, **fields)
        if event == "quarantine" and not self._closed:
            self._on_quarantine(list(fields["workers"]), f"quarantine: device {fields['index']} of {node}: {fields['why']}")

    def _note(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(ValueError, OSError):  # the log is closed: the run ends
            self._events.emit(event, **fields)


def keep_here(config: Config, run_dir: RunDir, coordinator: tuple[str, int], token: str) -> Keeper | None:
    """An agent of this machine, started by one of its ranks (launcher=local); it outlives that rank. None if there shall be none."""
    if not config.watch.agent_every_s:
        return None
    from everstep.node.channel import is_taken, spawn

    node = socket.gethostname()
    spec = agent_spec(config, run_dir.path, run_dir.attempt, node, coordinator, token)
    return Keeper(node, lambda: is_taken(spec) or spawn(spec).wait())

