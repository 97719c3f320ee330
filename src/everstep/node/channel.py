"""An agent at work: its event file, its rounds, and its connection to the coordinator.

Messages are those of :mod:`everstep.recovery.wire`. The agent says hello with the run's token, ``{"agent": NODE}``; then it is told which ranks to
watch, asked to examine one, and told when the run is over. It says ``event`` (what it found), ``examined``, and ``alive`` after each round.

A coordinator that is gone is looked for where another one would be (:mod:`everstep.recovery.rendezvous`), and where it was: a lighthouse comes
back there. Until then the agent goes on as before, keeps what it found, and tells it in order once it is heard again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from hashlib import blake2b
from pathlib import Path
from typing import Any

from everstep.errors import BadInput
from everstep.node.agent import AgentSpec, NodeWatch
from everstep.node.senses import Senses
from everstep.recovery import rendezvous, wire
from everstep.telemetry.events import EventLog

LOG = logging.getLogger("everstep.node.channel")  # also where this is the main module
ANOTHER = 3          # exit status: this node has an agent for the run already
_CONNECT_S = 5.0
_SEND_S = 2
_FIRST_S = 5.0       # for the coordinator to be there at the start: it is it who wanted an agent
_RETRY_S = 0.2
_KEPT = 1000         # findings that wait for a coordinator


def serve(spec: AgentSpec, senses: Senses | None = None) -> int:
    """The agent's life. Returns 0 once the run is over or nobody is left, ANOTHER if the node has one."""
    name = _take_name(spec)
    if name is None:
        return ANOTHER
    with name, contextlib.closing(_Agent(spec, senses or Senses.of_this_machine([spec.run_dir]))) as agent:
        agent.run()
    return 0


def _take_name(spec: AgentSpec) -> socket.socket | None:
    """There is one agent for each run and node: whoever has this name, which the kernel gives back when its owner ends."""
    key = blake2b(f"{Path(spec.run_dir).resolve()}/{spec.attempt}/{spec.node}".encode(), digest_size=8).hexdigest()
    name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        name.bind(f"\0everstep-agent-{os.getuid()}-{key}")
    except OSError:
        name.close()
        return None
    return name


def is_taken(spec: AgentSpec) -> bool:
    """Whether the node has an agent for this run."""
    name = _take_name(spec)
    if name:
        name.close()
    return name is None


class _Agent:
    def __init__(self, spec: AgentSpec, senses: Senses):
        self._spec = spec
        self._events = EventLog(Path(spec.run_dir) / "events" / f"agent-{_plain(spec.node)}.jsonl", f"agent-{_plain(spec.node)}")
        self._watch = NodeWatch(spec.node, senses, self._tell, spec.stuck_after_s, spec.suspect_s)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._untold: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._lost_since: float | None = time.monotonic()
        self._heard = False  # the coordinator, at any time
        self._sees = senses.sees
        self._events.emit("agent", node=spec.node, state="up", sees=self._sees)

    def run(self) -> None:
        threading.Thread(target=self._listen, name="agent-channel", daemon=True).start()
        while not self._over.is_set():
            self._watch.round()
            self._beat()
            began = time.monotonic()
            self._over.wait(self._spec.every_s)
            self._watch.excuse(time.monotonic() - began - self._spec.every_s)
            if self._is_alone():
                return

    def close(self) -> None:
        self._over.set()
        self._watch.close()
        with contextlib.suppress(ValueError, OSError):
            self._events.emit("agent", node=self._spec.node, state="down", sees=self._sees)
        self._events.close()
        with self._lock:  # last: the lead waits for it, and then nothing of this run is open here any more
            if self._socket:
                self._socket.close()

    def _is_alone(self) -> bool:
        """Without a coordinator, and with nobody to look at or for too long: nothing comes of this any more."""
        since = self._lost_since
        if since is None:
            return False
        lost_s = time.monotonic() - since
        return lost_s > (self._spec.lost_s if self._heard else _FIRST_S) or (self._heard and lost_s > 2 * _RETRY_S and not self._watch.somebody_lives)

    # -- what is found -----------------------------------------------------------------------------------------------------------------

    def _tell(self, event: str, **fields: Any) -> None:
        """First written down here, then told. A disk that refuses is no reason not to tell."""
        try:
            self._events.emit(event, **fields)
        except (OSError, ValueError) as error:
            LOG.warning("%s could not be written: %s", event, error)
        self._say({"type": "event", "event": event, "fields": fields})

    def _say(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._untold.append(message)
            self._flush()

    def _beat(self) -> None:
        """A frozen agent is known by its silence."""
        with self._lock:
            if self._socket is not None and not self._untold:
                self._untold.append({"type": "alive"})
                self._flush()

    def _flush(self) -> None:
        while self._socket is not None and self._untold:
            try:
                wire.send(self._socket, self._untold[0])
            except wire.Closed:
                with contextlib.suppress(OSError):  # half a message may be on its way: the listener shall look for another connection
                    self._socket.shutdown(socket.SHUT_RDWR)
                return
            self._untold.popleft()

    # -- the coordinator ---------------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                sock = self._connect()
            except (OSError, wire.Closed, BadInput):
                time.sleep(_RETRY_S)
                continue
            try:
                with self._lock:
                    self._socket, self._lost_since, self._heard = sock, None, True
                    self._flush()
                while True:
                    self._obey(wire.receive(sock))
            except (wire.Closed, KeyError, ValueError, TypeError) as error:
                if not self._over.is_set():
                    LOG.warning("the coordinator is gone: %s", error)
            if self._over.is_set():
                return  # the connection ends with this process's work
            with self._lock:
                self._socket, self._lost_since = None, time.monotonic()
            sock.close()

    def _connect(self) -> socket.socket:
        found = rendezvous.find(Path(self._spec.run_dir))
        address, token = (found.coordinator, found.token) if found else (self._spec.coordinator, self._spec.token)
        sock = socket.create_connection(address, timeout=_CONNECT_S)
        try:
            wire.tune(sock)
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))  # a frozen coordinator stops no look
            wire.send(sock, {"token": token, "agent": self._spec.node, "pid": os.getpid(), "sees": self._sees})
        except BaseException:  # no connection is left open behind whatever went wrong
            sock.close()
            raise
        return sock

    def _obey(self, order: dict[str, Any]) -> None:
        match order["type"]:
            case "watch":
                self._watch.add(str(order["worker"]), int(order["pid"]))
            case "examine":  # on a thread: py-spy takes its time
                threading.Thread(target=self._examine, args=(order,), name="agent-examines", daemon=True).start()
            case "over":
                self._watch.over()
                self._over.set()
                raise wire.Closed("the run is over")
            case other:
                raise wire.Closed(f"unknown order {other!r}")

    def _examine(self, order: dict[str, Any]) -> None:
        found = self._watch.examine(str(order["worker"]), int(order["pid"]), bool(order["spy"]))
        self._say({"type": "examined", "number": order["number"], "found": found})


def _plain(node: str) -> str:
    """A host's name as part of a file's name."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in node) or "node"


# -- processes -------------------------------------------------------------------------------------------------------------------------------


def spawn(spec: AgentSpec) -> subprocess.Popen[str]:
    """An agent as a process of its own. It gets its specification, a secret in it, by its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-m", "everstep.node.channel"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,  # a Ctrl-C in the terminal is not for it
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(spec.dump())
    return process


def main(spec: AgentSpec) -> int:
    """Of a process that does nothing else: signals that end a run in order are the lead's business."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from everstep.telemetry import logs

    logs.start(Path(spec.run_dir) / "logs" / f"attempt-{spec.attempt}" / f"agent-{_plain(spec.node)}.jsonl", f"agent-{_plain(spec.node)}", "info", 1 << 20, 1, dict)
    try:
        return serve(spec)
    except Exception:  # nobody reads its standard error; whoever keeps it starts another one
        LOG.exception("the agent of %s ends", spec.node)
        return 1


if __name__ == "__main__":
    sys.exit(main(AgentSpec.load(sys.stdin.read())))
