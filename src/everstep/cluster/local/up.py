"""``everstep up``: a lighthouse and all replicas of a run on this machine, each started, watched, and started anew.

    everstep up CONFIG
      -> everstep lighthouse                                       logs/lighthouse.log
      -> everstep train CONFIG launcher=local replica.id=0 ...     logs/replica-0.log, devices of its own
         -> torchrun's agent -> the ranks
      -> everstep train CONFIG launcher=local replica.id=1 ...

Ranks that die are started anew by their replica's torchrun; what dies above them (an agent, the lighthouse) is started anew here, later
each time, also what was sent SIGTERM by somebody else. Who dies more often than that is worth is given up, with what it said last. A replica
that ends of something that would come again is left out, and the others go on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from everstep import scratch
from everstep.cluster import environment
from everstep.cluster.local.lighthouse import DEFAULT_PORT, Ports, listen
from everstep.cluster.local.torchrun import FINAL, check_port_free
from everstep.cluster.orphans import TOKEN, kill_all
from everstep.cluster.processes import die_with_parent
from everstep.config import derive
from everstep.config.schema import Config
from everstep.errors import BadInput, ConfigError, EverstepError, Interrupted, NotEnoughReplicas
from everstep.recovery import wire

_POLL_S = 0.1
_LONGEST_DELAY_S = 60.0
_CALM_S = 60.0     # a process that lived so long is not in a loop of crashes
_ANSWER_S = 60.0   # for the lighthouse to listen
_GRACE_S = 45.0    # for replicas to end after a signal; torchrun gives its ranks 30 s
#: Should this process be killed, the kernel tells its children, which end theirs.
_END_WITH_US = functools.partial(die_with_parent, signal.SIGTERM) if sys.platform == "linux" else None


@dataclass
class Child:
    """A process that is started anew when it dies of something that may not come again."""

    name: str
    command: list[str]
    env: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    deaths: int = 0
    due: float = 0.0            # when to start it (again)
    code: int | None = None     # of its end, if it is not started anew
    shown: int = 0              # bytes of the log that were relayed
    _out: IO[bytes] | None = field(default=None, repr=False)

    @property
    def final(self) -> Path:
        """Is there if it ended of something that would come again."""
        return self.log.with_suffix(".final")

    def start(self) -> None:
        self._out = self._out or self.log.open("ab")
        self.final.unlink(missing_ok=True)
        env = os.environ | self.env | {"EVERSTEP_RESTARTS": str(self.deaths), FINAL: str(self.final)}
        self.process = subprocess.Popen(self.command, env=env, stdout=self._out, stderr=self._out, stdin=subprocess.DEVNULL,
                                        start_new_session=True, preexec_fn=_END_WITH_US)
        self.started = time.monotonic()

    def died(self, delay_s: float) -> None:
        """Note the death, and when to start it anew."""
        calm = time.monotonic() - self.started > _CALM_S
        self.process, self.deaths = None, self.deaths + 1
        self.due = time.monotonic() + min(delay_s * (1 if calm else 2 ** min(self.deaths - 1, 10)), _LONGEST_DELAY_S)

    def signal(self, number: int) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)

    def new_lines(self) -> list[str]:
        """What it printed since the last call; whole lines only."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(self.shown)
            whole = log.read().rpartition(b"\n")[0]
        self.shown += len(whole) + 1 if whole else 0
        return whole.decode(errors="replace").splitlines()

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()] if self.log.exists() else []
        return lines[-1].removeprefix("everstep: ") if lines else "it said nothing"


def up(config: Config, program: Sequence[str], say: Callable[[str], None]) -> int:
    """Run all replicas to their end. ``program``: arguments of ``python`` that train, to which each replica's own overrides are added.

    Returns 0 once the run is done. Raises BadInput before anything is started; what a replica ended of, if that would come again and is nothing
    that others can go on without; NotEnoughReplicas if one died more than ``local.max_restarts`` times; Interrupted.
    """
    if config.replica.id is not None:
        raise ConfigError(f"everstep up starts all replicas: leave replica.id={config.replica.id} out")
    if environment.inside_torchrun():
        raise BadInput("this process is a rank of torchrun already (RANK is set) and must not start replicas")
    if (here := environment.machines(derive.layout(config).ranks_per_replica)).count > 1:
        raise BadInput(
            f"everstep up starts all replicas on one machine, but PET_NNODES or SLURM_NNODES says that this is one of {here.count} of a replica; "
            "run everstep lighthouse on one of them and everstep train launcher=local replica.id=I on all, or unset the variable"
        )
    own = config.lighthouse.address or os.environ.get("TORCHFT_LIGHTHOUSE", "")
    if not own:
        first, claim = claim_ports(DEFAULT_PORT)
        with claim:
            return _up_at(Ports("127.0.0.1", first), config, program, say)
    ports = Ports.parse(own)
    for port in range(ports.torchft, ports.torchft + 3):
        listen(ports.host, port, "of this machine with lighthouse.address or TORCHFT_LIGHTHOUSE").close()
    return _up_at(ports, config, program, say)


def _up_at(ports: Ports, config: Config, program: Sequence[str], say: Callable[[str], None]) -> int:
    """As :func:`up`, with the lighthouse at ``ports``, which are free."""
    check_ports_of_replicas(config)
    launch = secrets.token_hex(16)
    secret = {environment.LIGHTHOUSE_TOKEN: os.environ.get(environment.LIGHTHOUSE_TOKEN) or secrets.token_hex(16)}
    with scratch.folder("up") as logs:
        devices = share_devices(config)
        children = [
            Child(
                f"replica {replica}",
                [sys.executable, *program, "launcher=local", f"replica.id={replica}", f"lighthouse.address={ports.url}",
                 *([f"local.port={config.local.port + replica}"] if config.local.port else [])],
                secret | {TOKEN: launch} | _of_replica(replica, mine), logs / f"replica-{replica}.log",
            )
            for replica, mine in enumerate(devices)
        ]
        lighthouse = Child("lighthouse", lighthouse_command(config, ports), secret | {TOKEN: launch}, logs / "lighthouse.log")
        supervisor = _Supervisor(config, lighthouse, children, ports, secret[environment.LIGHTHOUSE_TOKEN], say)
        try:
            return supervisor.run()
        finally:
            kill_all(launch)
            supervisor.keep_logs(Path(config.run_dir))


def check_ports_of_replicas(config: Config) -> None:
    """Of each its own: they follow the one that is given. BadInput."""
    for name, first in (("local.port", config.local.port), ("TORCHFT_MANAGER_PORT", environment.manager_port())):
        for port in range(first, first + config.layout.replicas) if first else ():
            if port > 65535:
                raise BadInput(f"{name}={first} is that of the first of {config.layout.replicas} replicas, and there is no port {port}; lower it")
            check_port_free(port, name, host="")


def _of_replica(replica: int, devices: str | None) -> dict[str, str]:
    """Variables in which replicas on one machine differ: ports of torchft's managers follow each other."""
    first = environment.manager_port()
    ports = {"TORCHFT_MANAGER_PORT": str(first + replica)} if first else {}
    return ports | ({"CUDA_VISIBLE_DEVICES": devices} if devices is not None else {})


def share_devices(config: Config, environ: Mapping[str, str] | None = None) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each replica: disjoint parts of what is visible here; None on the CPU. ConfigError if they do not suffice."""
    given = os.environ if environ is None else environ
    layout = derive.layout(config)
    if derive.device(config, given) != "cuda":
        return [None] * layout.replicas
    visible = given.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(derive.cuda_devices(given))]
    size = layout.ranks_per_replica
    if len(devices) < size * layout.replicas:
        raise ConfigError(
            f"{layout.replicas} replicas of {size} ranks need {size * layout.replicas} devices, {len(devices)} are visible here "
            "(CUDA_VISIBLE_DEVICES): lower layout.replicas or the layout inside a replica, or start the replicas on several machines"
        )
    return [",".join(devices[r * size : (r + 1) * size]) for r in range(layout.replicas)]


def lighthouse_command(config: Config, ports: Ports) -> list[str]:
    wanted = config.lighthouse
    return [
        sys.executable, "-m", "everstep", "lighthouse", "--bind", ports.host, "--port", str(ports.torchft), "--min-replicas",
        str(wanted.min_replicas or config.layout.replicas), "--quorum-tick-ms", str(wanted.quorum_tick_ms), "--join-timeout-ms",
        str(wanted.join_timeout_ms), "--heartbeat-timeout-ms", str(wanted.heartbeat_timeout_ms),
    ]


def claim_ports(first: int) -> tuple[int, socket.socket]:
    """The first of three free ports, from ``first`` on, and what keeps others who call this from them until it is closed: free they are until the
    lighthouse is up, which takes seconds. BadInput if there are none."""
    for base in range(first, first + 3000, 3):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0everstep-up-{base}")  # a name as ports are: of this network namespace, and gone with its process
            for port in range(base, base + 3):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            claim.close()
            continue
        return base, claim
    raise BadInput(f"no three free ports follow each other from {first} on; name some with lighthouse.address")


class _Supervisor:
    def __init__(self, config: Config, lighthouse: Child, replicas: list[Child], ports: Ports, token: str, say: Callable[[str], None]):
        self._config, self._lighthouse, self._replicas, self._ports, self._token, self._say = config, lighthouse, replicas, ports, token, say
        self._received: list[int] = []
        self._over = threading.Event()

    def run(self) -> int:
        old = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._lighthouse.start()
            self._await_lighthouse()
            threading.Thread(target=self._watch_lighthouse, name="lighthouse-watch", daemon=True).start()
            for child in self._replicas if not self._received else ():
                child.start()
                self._say(f"{child.name} has started (process {child.process.pid if child.process else 0})")
            while any(child.code is None for child in self._replicas) and not self._received:
                self._look()
                time.sleep(_POLL_S)
        finally:
            self._over.set()
            self._end()
            self._relay()
            for number, handler in old.items():
                signal.signal(number, handler)
        if self._received:
            raise Interrupted(f"interrupted by {signal.Signals(self._received[0]).name}; the processes were stopped; continue with resume=auto")
        if all(child.code for child in self._replicas):
            first = self._replicas[0]
            raise EverstepError(f"{first.name}: {first.last_words()}")
        return 0

    def _look(self) -> None:
        self._relay()
        self._revive(self._lighthouse)
        for child in self._replicas:
            if child.code is not None:
                continue
            ended = self._revive(child)
            if ended == 0:
                child.code = 0
                self._say(f"{child.name} is done")
            elif ended == 3:
                child.code = 3
                self._say(f"{child.name} has ended and is not started anew: {child.last_words()}")
            elif ended in (2, 4):
                raise _as_error(ended, f"{child.name}: {child.last_words()}")

    def _relay(self) -> None:
        for child in [self._lighthouse, *self._replicas]:
            for line in child.new_lines():
                print(f"[{child.name}] {line}", flush=True)

    def _revive(self, child: Child) -> int | None:
        """Its exit status if it ended for good; a death is followed by a new start when that is due."""
        if child.process is None:
            if time.monotonic() >= child.due:
                child.start()
                self._say(f"{child.name} was started anew (process {child.process.pid if child.process else 0})")
            return None
        status = child.process.poll()
        if status is None:
            return None
        if child in self._replicas and (status in (0, 2, 4) or (status == 3 and child.final.exists())):
            return status
        if self._received:  # it may have been told to stop, too, by whoever told us
            return None
        self._say(f"{child.name} has ended with status {status}: {child.last_words()}")
        if child.deaths >= self._config.local.max_restarts:
            raise NotEnoughReplicas(
                f"{child.name} died {child.deaths + 1} times (local.max_restarts={self._config.local.max_restarts}), at last of: "
                f"{child.last_words()}; continue with resume=auto"
            )
        child.died(self._config.local.restart_delay_s)
        return None

    def _await_lighthouse(self) -> None:
        """Until it listens, or we are told to stop."""
        end = time.monotonic() + _ANSWER_S
        while not self._received:
            with contextlib.suppress(OSError), socket.create_connection(self._ports.coordinator, timeout=1.0):
                return
            if self._lighthouse.process and self._lighthouse.process.poll() is not None:
                raise BadInput(f"the lighthouse could not be started: {self._lighthouse.last_words()}")
            if time.monotonic() > end:
                raise NotEnoughReplicas(f"the lighthouse did not answer at {self._ports.url} in {_ANSWER_S:g} s")
            time.sleep(_POLL_S)

    def _watch_lighthouse(self) -> None:
        """One that is frozen is killed, and another one started, before the ranks would give it up (recovery.fence_s)."""
        within_s = self._config.recovery.fence_s / 2
        while not self._over.wait(min(1.0, within_s)):
            process = self._lighthouse.process
            try:
                with socket.create_connection(self._ports.coordinator, timeout=within_s) as sock:
                    wire.send(sock, {"token": self._token, "head": True})
                    wire.receive(sock)
            except TimeoutError:
                if process is not None and process is self._lighthouse.process:
                    self._say(f"the lighthouse has not answered for {within_s:g} s (half of recovery.fence_s), and is killed")
                    process.kill()
            except (OSError, wire.Closed):
                pass  # it is on its way, again

    def _end(self) -> None:
        """Replicas first: their last words are for the lighthouse."""
        for child in [*self._replicas, self._lighthouse]:
            if child is self._lighthouse:
                self._await_ends(_GRACE_S)
            child.signal(signal.SIGTERM)
        if self._lighthouse.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._lighthouse.process.wait(10.0)

    def _await_ends(self, within_s: float) -> None:
        end = time.monotonic() + within_s
        while any(c.process and c.process.poll() is None for c in self._replicas) and time.monotonic() < end and len(self._received) < 2:
            time.sleep(_POLL_S)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)

    def keep_logs(self, run_dir: Path) -> None:
        """Move what the processes printed to the run's logs, if it came to have any."""
        latest = run_dir / "logs" / "latest"
        for child in [self._lighthouse, *self._replicas]:
            if child.log.exists() and latest.is_dir():
                (latest / child.log.name).write_bytes(child.log.read_bytes())


def _as_error(code: int, message: str) -> Exception:
    from everstep.errors import InvariantViolated

    return {2: BadInput, 4: InvariantViolated}[code](message)
