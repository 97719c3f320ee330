"""``launcher=local`` started by hand: run torchrun for the user, watch it, and end with the worker's own exit code.

    everstep train CONFIG launcher=local
      -> python -m everstep.cluster.local.torchrun --nproc_per_node N ... -m everstep train CONFIG ...   (the
      agent: torchrun itself)
         -> N ranks

torchrun ends with 1 whatever its workers ended with. So a worker leaves its exit code and its one sentence
in a small file (``report_exit``), the agent adds what it saw of those that died without a word, and the
worst of them is ours.

Nothing outlives this process: every process of the run carries a token in its environment by which it is
found and killed; should we be killed ourselves, the kernel tells the agent (Linux), which ends its workers.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from everstep import scratch
from everstep.cluster import environment
from everstep.cluster.environment import inside_torchrun, worker_environment
from everstep.cluster.orphans import TOKEN, kill_all
from everstep.cluster.processes import die_with_parent
from everstep.config import derive
from everstep.config.schema import Config
from everstep.errors import (
    BadInput,
    ConfigError,
    CoordinatorLost,
    DeadlineExceeded,
    EverstepError,
    Fenced,
    Interrupted,
    ReplicaBroken,
)

EXIT_DIR = "EVERSTEP_EXIT_DIR"  # where workers leave their exit codes
FINAL = "EVERSTEP_FINAL"  # names a file that is made for `everstep up` if the ranks ended of something that would come again
_DELAY = "EVERSTEP_RESTART_DELAY_S"  # the agent's: local.restart_delay_s
_LIGHTHOUSE = "EVERSTEP_LIGHTHOUSE"  # the agent's: where the lighthouse is, if there are several replicas
DEFAULT_MASTER_PORT = 29500
_LONGEST_DELAY_S = 60.0
#: Of one life of one replica only: another life may do better. Torchrun interrupts the ranks whose mate has died; if it was interrupted itself it
#: starts nobody anew.
RESTARTED = (ReplicaBroken, Fenced, DeadlineExceeded, Interrupted)
_HOST = "127.0.0.1"
_POLL_S = 0.05
_GRACE_S = 40.0  # torchrun gives its workers 30 s to end after a signal
# Of several exit codes the first of these is the cause: 3 is often only the echo of another rank's end, and 130 too (torchrun interrupts the
# others), unless the user did interrupt.
_WORST_FIRST = (4, 2, 1, 3, 130)
_WORST_FIRST_INTERRUPTED = (4, 2, 1, 130, 3)


def launch(config: Config, program: Sequence[str], say: Callable[[str], None] | None = None) -> int:
    """Run ``program`` (``["-m", "everstep", "train", CONFIG, ...]``) on every rank of one replica (of its part on this machine, if it has
    several); wait for its end.

    Returns the exit code that fits the cause: 0 if all ranks ended well, else the worst typed code of a
    rank; a rank that was killed counts as 3 (resumable), SIGINT or SIGTERM to us as 130. ``say`` gets the
    sentence of that cause (default: standard error). BadInput, before anything is started, if local.port is
    taken. Call it from the main thread.

    With several replicas (``replica.id``) torchrun starts the ranks anew after a death, up to ``local.max_restarts`` times; not if they
    ended of something that would come again.
    """
    if inside_torchrun():
        raise BadInput("this process is a rank of torchrun already (RANK is set) and must not start another torchrun")
    several = config.replica.id is not None
    if (config.layout.replicas != 1 and not several) or config.layout.spares:
        raise ConfigError(
            f"launcher=local runs one replica without spares, not layout.replicas={config.layout.replicas} "
            f"layout.spares={config.layout.spares}; say which replica this is with replica.id, use launcher=ray, or layout.replicas=1 layout.spares=0"
        )
    say = say or (lambda text: print(text, file=sys.stderr))
    ranks = derive.layout(config).ranks_per_replica
    machines = environment.machines(ranks)
    if ranks % machines.count:
        raise ConfigError(f"the {ranks} ranks of a replica cannot be shared evenly over {machines.count} machines (PET_NNODES)")
    if machines.count > 1:
        from everstep.cluster.environment import LIGHTHOUSE_TOKEN

        if not os.environ.get(LIGHTHOUSE_TOKEN):
            raise BadInput(
                f"this replica is spread over {machines.count} machines (PET_NNODES or SLURM_NNODES), whose ranks must know each other: set "
                f"{LIGHTHOUSE_TOKEN} to the same secret on all of them, and for the lighthouse"
            )
        rendezvous = [f"--nnodes={machines.count}", f"--node_rank={machines.index}", f"--master_addr={machines.master_addr}",
                      f"--master_port={machines.master_port or config.local.port or DEFAULT_MASTER_PORT}"]
    elif config.local.port:
        check_port_free(config.local.port, "local.port")
        rendezvous = ["--nnodes=1", "--node_rank=0", f"--master_addr={_HOST}", f"--master_port={config.local.port}"]
    else:
        rendezvous = ["--standalone", f"--local_addr={_HOST}"]
    restarts = config.local.max_restarts if several else 0
    port, restarted = environment.manager_port(), os.environ.get("EVERSTEP_RESTARTS", "0") != "0"
    if several and port and machines.index == 0 and not restarted:  # of what a former life left there the end is waited for
        check_port_free(port, "TORCHFT_MANAGER_PORT", host="")
    arguments = [*rendezvous, f"--nproc_per_node={ranks // machines.count}", f"--max_restarts={restarts}", *program]
    token = secrets.token_hex(16)
    with scratch.folder("exit") as exits:
        own = {"EVERSTEP_REPLICA": str(config.replica.id or 0), "EVERSTEP_EPOCH": "0", EXIT_DIR: str(exits), TOKEN: token,
               _DELAY: str(config.local.restart_delay_s)}
        if several:
            own[_LIGHTHOUSE] = environment.lighthouse_address(config)
        agent = subprocess.Popen(
            [sys.executable, "-m", "everstep.cluster.local.torchrun", *arguments],
            env=os.environ | worker_environment(config) | own,
            start_new_session=True,  # Ctrl-C reaches us alone; we pass it on once
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM) if sys.platform == "linux" else None,
        )
        try:
            with _forwarding(agent) as interrupted:
                agent.wait()
        finally:
            kill_all(token)
            agent.wait()
        code, message = _cause(exits, agent.returncode, bool(interrupted))
        if code and (final := os.environ.get(FINAL)) and final_report(exits):
            Path(final).touch()
    if message:
        say(message)
    return code


def check_port_free(port: int, name: str, host: str = _HOST) -> None:
    """BadInput if nobody can listen on ``port`` of this machine (of this ``host``, empty: of all its addresses), which ``name`` asks for."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that just closed do not matter
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            why = "is in use by another process" if error.errno == errno.EADDRINUSE else f"is refused: {error.strerror}"
            raise BadInput(f"{name}={port} {why}; choose another, or 0 for a free one") from error


def report_exit(error: EverstepError | None) -> bool:
    """A worker's last words, called when it knows its end: ``error``, or None if all is done.

    Returns True if a parent started by ``launch`` will show the sentence, so that the worker need not print
    it too.
    """
    folder = os.environ.get(EXIT_DIR)
    if not folder:
        return False
    code = error.exit_code if error else 0
    path = Path(folder) / f"rank-{os.environ['RANK']}"
    temporary = path.with_suffix(".tmp")
    report = {"code": code, "message": str(error) if error else "", "wall_time": time.time(), "final": not _may_be_restarted(error)}
    temporary.write_text(json.dumps(report))
    os.replace(temporary, path)
    return True


def _may_be_restarted(error: EverstepError | None) -> bool:
    return isinstance(error, RESTARTED) and not isinstance(error, CoordinatorLost)


def final_report(folder: Path) -> bool:
    """Whether a worker said that it ended of something that would come again if it were started anew."""
    return any(json.loads(path.read_text()).get("final") for path in folder.glob("rank-*") if path.suffix != ".tmp")


@contextlib.contextmanager
def _forwarding(agent: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to torchrun; a second one, or the end of the grace, kills it. Yields those
    received.
    """
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            agent.kill()
            return
        agent.send_signal(number)
        signal.setitimer(signal.ITIMER_REAL, _GRACE_S)

    handlers = {
        number: signal.signal(number, handler)
        for number, handler in (
            (signal.SIGINT, forward),
            (signal.SIGTERM, forward),
            (signal.SIGALRM, lambda number, frame: agent.kill()),
        )
    }
    try:
        yield received
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _cause(exits: Path, agent_code: int, interrupted: bool) -> tuple[int, str]:
    """(exit code, sentence) from what workers and agent left behind."""
    reports = [json.loads(path.read_text()) for path in exits.iterdir() if path.suffix != ".tmp"]
    reports.sort(key=lambda report: report["wall_time"])
    for code in _WORST_FIRST_INTERRUPTED if interrupted else _WORST_FIRST:
        for report in reports:
            if report["code"] == code:
                return code, report["message"]
    if interrupted:
        return Interrupted.exit_code, ""
    if agent_code == 0:
        return 0, ""
    return 3, f"torchrun ended unexpectedly (status {agent_code}); continue with resume=auto"


# ---------------------------------------------------------------- the agent process


def _agent(arguments: list[str]) -> int:
    """torchrun itself; notes how workers ended that could not say it themselves."""
    with _interrupted_afterwards():
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher import api

    logging.disable(logging.ERROR)  # its account of a failed worker is a page long; ours is one sentence
    api.LocalElasticAgent = _patient_agent(Path(os.environ[EXIT_DIR]), float(os.environ[_DELAY]))  # type: ignore[misc]
    if address := os.environ.get(_LIGHTHOUSE):
        from everstep.cluster.environment import LIGHTHOUSE_TOKEN
        from everstep.cluster.local import warden
        from everstep.cluster.local.lighthouse import Ports

        replica = int(os.environ["EVERSTEP_REPLICA"])
        warden.watch(Ports.parse(address).coordinator, os.environ.get(LIGHTHOUSE_TOKEN, ""), replica, os.environ[TOKEN])
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        folder = Path(os.environ[EXIT_DIR])
        for rank, failure in error.failures.items():
            if (folder / f"rank-{rank}").exists():
                continue
            if failure.exitcode < 0:
                name = signal.Signals(-failure.exitcode).name
                code, message = 3, f"rank 0/{rank} (process {failure.pid}) was killed by {name}; continue with resume=auto"
            else:
                code = failure.exitcode if failure.exitcode in _WORST_FIRST else 1
                message = f"rank 0/{rank} (process {failure.pid}) ended with status {failure.exitcode}"
            report = {"code": code, "message": message, "wall_time": failure.timestamp}
            (folder / f"agent-{rank}").write_text(json.dumps(report))
        return 1
    except SignalException:
        return 1
    return 0


@contextlib.contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """An interrupt in this block is raised at its end: libraries that are being imported try this and that, and would swallow it."""
    noted: list[int] = []
    old = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
    if noted:
        raise KeyboardInterrupt


def _patient_agent(exits: Path, delay_s: float) -> Any:
    """Torchrun's agent, which does not start ranks anew that ended of something that would come again, waits longer the more often they
    die, and forgets what former lives left as their exit codes."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class PatientAgent(LocalElasticAgent):
        _delay_s, _restarted = delay_s, 0.0

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed() and final_report(exits):
                self._remaining_restarts = 0
            return result

        def _restart_workers(self, worker_group: Any) -> None:
            self._stop_workers(worker_group)
            for path in exits.iterdir():
                path.unlink()
            now = time.monotonic()
            self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S) if now - self._restarted < 60.0 else delay_s
            time.sleep(self._delay_s)
            self._restarted = time.monotonic()
            super()._restart_workers(worker_group)

    return PatientAgent


if __name__ == "__main__":
    try:
        sys.exit(_agent(sys.argv[1:]))
    except KeyboardInterrupt:  # before torchrun had its own handlers
        sys.exit(1)
