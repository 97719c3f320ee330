"""The lighthouse: where replicas that were started one by one find each other (launcher local).

Two servers side by side in one process. Torchft's lighthouse tells, as everywhere, which replicas there are, and has its dashboard; its
quorum says who begins a run together. Everything that counts, epochs and commits, comes from our coordinator beside it, one port up
(docs/protocol.md, rule 23). One run at a time: the first replica that registers brings its configuration.

    PORT      torchft (gRPC, and the dashboard over HTTP)       TORCHFT_LIGHTHOUSE, lighthouse.address
    PORT + 1  coordinator and board
    PORT + 2  the store through which links and heals are arranged

It can be killed, or stopped in order: members wait (``lighthouse.wait_s``) for one at the same address, tell it who they are, and it goes
on from the commit record in the run's folder, which it must see under the same path as the replicas.

Whoever can reach the ports, and knows the secret if there is one (EVERSTEP_LIGHTHOUSE_TOKEN), can make the ranks run any code.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep import attempt
from everstep.checkpoint.choose import Chosen
from everstep.checkpoint.storage import local_folder
from everstep.cluster.environment import LIGHTHOUSE_TOKEN
from everstep.cluster.local.served_run import ANSWER_WITHIN_S, LAST_WORDS_S, ServedRun, Start
from everstep.cluster.processes import signal_pid
from everstep.config.alike import differing_keys, digest_of
from everstep.config.schema import Config
from everstep.errors import BadInput, EverstepError, Fenced, NotEnoughReplicas, WorkerFailed
from everstep.recovery import commitlog, wire
from everstep.recovery.board import Journal, Result, Who, Work
from everstep.recovery.door import Door
from everstep.recovery.view import Member
from everstep.run_dir import RunDir

DEFAULT_PORT = 29510  # torchft's
_HELLO_S = 10.0
_PORTS = 1 << 16  # a lighthouse has three, next to each other
_SURVIVORS_S = 10.0  # that a run begun anew in a folder waits for members of the last one, if that was not ended in order


@dataclass(frozen=True)
class Ports:
    """Where a lighthouse is."""

    host: str
    torchft: int

    @property
    def coordinator(self) -> tuple[str, int]:
        return self.host, self.torchft + 1

    @property
    def store(self) -> tuple[str, int]:
        return self.host, self.torchft + 2

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.torchft}"

    @staticmethod
    def parse(address: str) -> Ports:
        """From ``http://host:port`` (the scheme may be left out). BadInput."""
        host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
        if not re.fullmatch(r"[\w.-]+", host) or not port.isdecimal() or not 0 < int(port) < _PORTS - 2:
            raise BadInput(f"lighthouse address {address!r} is not of the form http://HOST:PORT (TORCHFT_LIGHTHOUSE, lighthouse.address)")
        return Ports(host, int(port))


class Lighthouse:
    """Serves one run after the other on ``listener``.

    ``store_port``: of a store that it has for links and heals; None: the one replica's own is used. ``quorum``: whether replicas bring
    torchft's quorum along; else all replicas are expected. ``offer``: is told of the run's events (alerts).
    """

    def __init__(
        self, listener: socket.socket, host: str, token: str = "", min_replicas: int = 1, store_port: int | None = None,
        quorum: bool = True, offer: Callable[[Mapping[str, Any]], None] | None = None, say: Callable[[str], None] = lambda text: None,
    ):
        self._token, self._min_replicas, self._store_port, self._quorum, self._offer, self._say = (
            token, min_replicas, store_port, quorum, offer, say
        )
        self.address = (host, int(listener.getsockname()[1]))
        self.run: ServedRun | None = None
        self._asked: dict[str, float] = {}  # lives that wait to take part, and since when
        self._wardens: list[tuple[int, str, socket.socket]] = []  # replica, host; a replica may have several on a host
        self._turn = threading.Condition(threading.RLock())
        self._door = Door(listener, self._serve, "lighthouse")

    def close(self, status: str = "interrupted") -> None:
        """End the run that it serves, if any."""
        self._door.close()
        if self.run:
            self.run.close(status)

    def is_needed(self) -> bool:
        """Whether replicas take part in a run that it serves. Those that are stopped together with it are given a moment to leave."""
        return self.run is not None and not self.run.is_left(LAST_WORDS_S)

    def await_end(self, timeout_s: float) -> bool:
        """Wait until the run that it serves is over; whether it is."""
        end = time.monotonic() + timeout_s
        while self.run and not self.run.ended and time.monotonic() < end:
            time.sleep(0.01)
        return not self.run or bool(self.run.ended)

    # -- connections -----------------------------------------------------------------------------------------------------

    def _serve(self, sock: socket.socket) -> None:
        wire.tune(sock)
        sock.settimeout(_HELLO_S)
        try:
            hello = wire.receive(sock)
            if not hmac.compare_digest(str(hello.get("token", "")), self._token):
                wire.send(sock, {"type": "over", "error": "BadInput", "message": f"the lighthouse has another secret ({LIGHTHOUSE_TOKEN})"})
                sock.close()
                return
            sock.settimeout(None)
            if "warden" in hello:
                self._serve_warden(sock, int(hello["warden"]), str(hello["host"]))
            elif "worker" in hello:
                self._serve_rank(sock, hello)
            elif "agent" in hello:
                self._serve_agent(sock, hello)
            else:
                wire.send(sock, {"type": "welcome"})
                self._serve_head(sock)
        except (wire.Closed, TimeoutError, ValueError, KeyError):
            sock.close()  # whoever it was: a member's end is noticed by its coordinator

    def _serve_rank(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        with self._turn:  # after a restart ranks may be here before their head has said which run they are of
            self._turn.wait_for(lambda: self.run is not None and not self.run.ended, _HELLO_S)
            run = self.run
        if run is None or run.ended or hello["run"] != run.name:
            error = None if run is None else run.over if hello["run"] == run.name else _begun_anew(run.run_dir.path)
            if error is not None:
                wire.send(sock, {"type": "over", "error": type(error).__name__, "message": str(error)})
            sock.close()
            return
        run.server.attend(sock, hello)

    def _serve_agent(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        run = self.run
        if run is None or run.ended:
            sock.close()  # it comes again, and ends by itself once nobody is left
            return
        run.agents.attend(sock, hello)

    def _serve_warden(self, sock: socket.socket, replica: int, host: str) -> None:
        """A warden says nothing more; it is here until its connection ends."""
        place = replica, host, sock
        with self._turn:
            self._wardens.append(place)
        try:
            wire.receive(sock)
        finally:
            with self._turn:
                self._wardens.remove(place)
            sock.close()

    def signal(self, replica: int, host: str, pid: int, number: int) -> None:
        """Send a signal to a rank's process, through the wardens of its replica there, of which each knows its own; without one (plain
        torchrun) if it is here."""
        with self._turn:
            wardens = [sock for r, h, sock in self._wardens if (r, h) == (replica, host)]
        for warden in wardens:
            with contextlib.suppress(wire.Closed):  # the agent is gone, and its ranks with it
                wire.send(warden, {"type": "signal", "pid": pid, "number": number})
        if not wardens and host == socket.gethostname():
            signal_pid(pid, number)

    def _serve_head(self, sock: socket.socket) -> None:
        session: _HeadSession | None = None
        try:
            while True:
                request, payload = wire.receive_with(sock)
                reply, answer = {}, b""  # type: dict[str, Any], bytes
                try:
                    if request["type"] == "register":
                        session, reply = self._register(request)
                    elif session is None:
                        raise BadInput("the first request must be to register")
                    else:
                        reply, answer = session.handle(request, payload)
                except EverstepError as error:
                    reply = {"error": type(error).__name__, "message": str(error)}
                except Exception as error:  # else whoever asked would ask again until lighthouse.wait_s is over
                    reply = {"error": "WorkerFailed", "message": f"the lighthouse could not answer {request['type']}: {type(error).__name__}: {error}"}
                wire.send_with(sock, reply, answer)
        finally:
            sock.close()
            if session:
                session.run.head_left(session.replica, session.nonce)

    # -- runs ---------------------------------------------------------------------------------------------------------------

    def _register(self, request: dict[str, Any]) -> tuple[_HeadSession | None, dict[str, Any]]:
        """Whoever must wait longer than one answer may take is told to come again."""
        try:
            config = Config.model_validate(request["config"])
        except ValueError as error:
            raise BadInput(f"the lighthouse does not understand this replica's configuration ({error}); use one version of everstep") from error
        replica, nonce, resume = int(request["replica"]), str(request["nonce"]), request.get("resume")
        since = self._asked.get(nonce, time.monotonic())
        run = self._run_for(config, bool(request["clean"]), int(request["restarts"]), resume, since)
        reply = run.register(replica, nonce, resume, since) if run else None
        if run is None or reply is None:
            if nonce not in self._asked:
                self._asked[nonce] = since
                self._say(f"replica {replica} asks to take part; whether its former life has ended is not known yet")
            return None, {"answer": "wait"}
        self._asked.pop(nonce, None)
        session = _HeadSession(run, replica, nonce, Member(replica, reply["build"], tuple(reply["workers"])))
        return session, reply

    def _run_for(self, config: Config, clean: bool, restarts: int, resume: dict[str, Any] | None, since: float) -> ServedRun | None:
        """None: maybe members of the run live that have not come back yet."""
        folder = local_folder(config.run_dir)
        with self._turn:
            if resume is None and not self._serves() and self._may_have_survivors(folder, restarts):
                limit = config.recovery.silence_s if restarts else min(_SURVIVORS_S, config.recovery.silence_s)
                if not self._turn.wait_for(self._serves, min(limit, ANSWER_WITHIN_S)) and time.monotonic() < since + limit:
                    return None
            run = self.run
            if run is not None and not run.ended:
                if run.digest != digest_of(config):
                    raise BadInput(
                        f"the lighthouse serves another run, in {run.run_dir.path}: this replica's configuration differs in "
                        f"{', '.join(differing_keys(run.config, config)[:5])}; start all replicas with one configuration, or another lighthouse"
                    )
                if resume and resume["run"] != run.name:
                    raise _begun_anew(run.run_dir.path)
                return run
            if run is not None and (restarts or resume) and run.run_dir.path == folder and (error := run.over):
                raise error
            if restarts and resume is None:
                raise NotEnoughReplicas(
                    f"replica.id={config.replica.id} died, and no living replica of the run in {folder} was found; resume with resume=auto"
                )
            self.run = run = self._begin(config, clean, folder, resume)
            self._turn.notify_all()
            return run

    def _begin(self, config: Config, clean: bool, folder: Path, resume: dict[str, Any] | None) -> ServedRun:
        go_on, name = False, secrets.token_hex(8)
        if resume is not None:
            name = str(resume["run"])
            go_on = commitlog.is_open(folder / "commits.log")
            if go_on and commitlog.past(folder / "commits.log").run != name:
                raise _begun_anew(folder)
            if resume["began"] and not go_on:
                raise Fenced(
                    f"{folder}/commits.log knows of no run that goes on; is the lighthouse on a machine that sees run_dir={config.run_dir}?"
                )
            run_dir = RunDir(folder, int(resume["attempt"]))
            chosen = Chosen(config.resume, Path(resume["checkpoint"]) if resume["checkpoint"] else None, int(resume["step"]))
        else:
            run_dir, chosen = attempt.prepare(config, clean)
        expected = None if self._quorum and resume is None else frozenset(range(config.layout.replicas))
        self._say(f"{'going on with' if resume else 'serving'} the run in {run_dir.path}")
        return ServedRun(
            name, config, run_dir, chosen, self._token, self.address, self._store_port, self._min_replicas, Start(expected), go_on, self.signal,
            self._offer, self._say,
        )

    def _serves(self) -> bool:
        return self.run is not None and not self.run.ended

    def _may_have_survivors(self, folder: Path, restarts: int) -> bool:
        """A lighthouse that was restarted knows of no run until a member of it has come back."""
        if self.run is not None and self.run.run_dir.path == folder:
            return False
        return bool(restarts) or commitlog.is_open(folder / "commits.log")


def _begun_anew(folder: Path) -> Fenced:
    return Fenced(f"the run in {folder} was begun anew while this replica was away from it")


@dataclass
class _HeadSession:
    """One head's requests."""

    run: ServedRun
    replica: int
    nonce: str
    member: Member

    def handle(self, request: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        run, member = self.run, self.member
        match request["type"]:
            case "ping":
                run.check()
            case "formed":
                run.formed(member)
            case "stage":
                run.enter_stage(request["name"], request["step"])
            case "hint":
                run.hint(frozenset(request["replicas"]))
            case "begin":
                return {"live": run.begin(member, request["step"], tuple(tuple(slot) for slot in request["slots"]), request["about"])}, b""
            case "ask":
                return _reply(run.ask(member, tuple(request["place"]), request["what"], Who(request["who"])))
            case "give":
                run.give(member, tuple(request["place"]), request["attempt"], payload, request["reference"])
            case "mark":
                run.mark(request["generation"], (payload, request["step"]))
            case "bookmark":
                state, step = run.board.bookmark
                return {"generation": run.board.generation, "step": step}, state
            case "restart_at":
                run.restart_at(request["step"])
            case "restore":
                run.restore(*unpack_journal(request, payload))
            case "finish":
                run.finish(member, request["status"])
            case other:
                raise WorkerFailed(f"unknown request {other!r}")
        return {}, b""


def _reply(answer: Result | Work | None) -> tuple[dict[str, Any], bytes]:
    if isinstance(answer, Result):
        return describe_result(answer), b"".join(answer.parts)
    if answer is None:
        return {"answer": "wait"}, b""
    return {"answer": "work", "attempt": answer.attempt, "members": [[m.replica, m.build, list(m.workers)] for m in answer.members]}, b""


def describe_result(result: Result) -> dict[str, Any]:
    return {"answer": "result", "replicas": list(result.replicas), "contributors": list(result.contributors),
            "sizes": [len(part) for part in result.parts]}


def read_result(described: dict[str, Any], payload: bytes) -> Result:
    """The inverse of ``describe_result`` and the parts one after the other."""
    return Result(tuple(described["replicas"]), tuple(described["contributors"]), tuple(_cut(payload, described["sizes"])))


def pack_journal(journal: Journal, reference: bool) -> tuple[dict[str, Any], bytes]:
    """As a request."""
    state, step = journal.bookmark
    calls = [{"index": i, "what": what, "who": str(who), **describe_result(result)} for i, (what, who, result) in journal.results.items()]
    payload = state + b"".join(part for _, _, result in journal.results.values() for part in result.parts)
    return {"type": "restore", "generation": journal.generation, "step": step, "state_bytes": len(state), "calls": calls,
            "reference": reference}, payload


def unpack_journal(request: dict[str, Any], payload: bytes) -> tuple[Journal, bool]:
    sizes = [request["state_bytes"], *(sum(call["sizes"]) for call in request["calls"])]
    state, *blobs = _cut(payload, sizes)
    results = {
        call["index"]: (call["what"], Who(call["who"]), read_result(call, blob)) for call, blob in zip(request["calls"], blobs, strict=True)
    }
    return Journal(request["generation"], (state, request["step"]), results), bool(request["reference"])


def _cut(payload: bytes, sizes: list[int]) -> Iterator[bytes]:
    start = 0
    for size in sizes:
        yield payload[start : start + size]
        start += size


def quieten_torchft() -> None:
    """Before torchft is loaded: it obeys RUST_LOG and would tell every heartbeat. RUST_LOGS is the name in its documentation."""
    os.environ["RUST_LOG"] = os.environ.get("RUST_LOG") or os.environ.get("RUST_LOGS") or "warn"


# -- the process -------------------------------------------------------------------------------------------------------------


def serve(
    bind: str, port: int, min_replicas: int, quorum_tick_ms: int, join_timeout_ms: int, heartbeat_timeout_ms: int,
    say: Callable[[str], None], until: threading.Event,
) -> None:
    """Run torchft's lighthouse and ours until ``until`` is set. BadInput if a port is taken, or if others could command the ranks.

    A run that replicas take part in then is not ended: this process goes at once, and leaves what a killed one leaves, for another one."""
    if not 0 < port < _PORTS - 2:
        raise BadInput(f"--port {port}: this one and the two after it must be port numbers, below {_PORTS}")
    if min_replicas < 1:
        raise BadInput(f"--min-replicas {min_replicas}: a run begins with one replica at least")
    token = os.environ.get(LIGHTHOUSE_TOKEN, "")
    if not token and bind not in ("127.0.0.1", "localhost", "::1"):
        raise BadInput(
            f"--bind {bind}: whoever reaches the lighthouse's ports can make the ranks run any code; set {LIGHTHOUSE_TOKEN} to a secret, here "
            "and for every replica"
        )
    quieten_torchft()
    from torchft.coordination import LighthouseServer

    from everstep.cluster.worker.run_store import serve_store  # torch takes seconds to come

    listener = listen(bind, port + 1)
    listen(bind, port).close()
    torchft = LighthouseServer(
        bind=f"{bind}:{port}", min_replicas=min_replicas, join_timeout_ms=join_timeout_ms, quorum_tick_ms=quorum_tick_ms,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )
    listen(bind, port + 2).close()
    store = serve_store(bind, port + 2)
    lighthouse = Lighthouse(listener, bind, token, min_replicas, store.port, say=say)
    say(f"torchft's lighthouse and dashboard at http://{bind}:{port}, coordinator at {bind}:{port + 1}, store at {bind}:{port + 2}")
    try:
        until.wait()
        if lighthouse.run and lighthouse.is_needed():
            say(f"the run in {lighthouse.run.run_dir.path} waits for another lighthouse at this address (lighthouse.wait_s)")
            os._exit(0)  # whoever asks on the way out would get an answer that is none
    finally:
        lighthouse.close()
        torchft.shutdown()


def listen(host: str, port: int, choose: str = "with --port") -> socket.socket:
    """BadInput if it cannot be done; ``choose``: how to name another port."""
    try:
        return socket.create_server((host, port), backlog=256)
    except OSError as error:
        raise BadInput(f"port {port} of {host} cannot be used: {error.strerror}; choose another {choose} (it and the two after it)") from error
