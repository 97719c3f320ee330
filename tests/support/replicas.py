"""Runs of several replicas under a lighthouse, in seconds: ranks and lighthouse are children of a process that has done the imports.

Everything is as under torchrun (`everstep.driver.run` in every rank, a real lighthouse with torchft's server, real signals), but for its
agent, whose part a thread for each replica plays here: when a rank ends, the others are killed, and all are started anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.support.runs import Finished

from everstep.cluster.forked import context
from everstep.cluster.local.torchrun import EXIT_DIR, final_report
from everstep.cluster.local.up import claim_ports
from everstep.config.schema import Config
from everstep.telemetry.events import read_events


def free_ports() -> int:
    """The first of three free ports, outside what the kernel gives to others."""
    first, claim = claim_ports(20000 + os.getpid() % 9000)
    claim.close()
    return first


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _lighthouse(port: int, min_replicas: int, join_timeout_ms: int, log: Path, moment: Callable[[], None] | None) -> None:
    from everstep.cluster.local.lighthouse import serve

    _log_to(log)
    if moment:
        moment()
    until = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: until.set())
    serve("127.0.0.1", port, min_replicas, 50, join_timeout_ms, 5000, lambda text: print(f"{time.monotonic():.3f} {text}", flush=True), until)


def _rank(config: Config, env: dict[str, str], log: Path, clean: bool, prepare: Callable[[], None] | None) -> None:
    from everstep import driver
    from everstep.cluster.local.torchrun import report_exit
    from everstep.errors import EverstepError

    _log_to(log)
    os.environ.update(env)
    os.chdir(Path(__file__).parents[2])
    if prepare:
        prepare()
    try:
        driver.run(config, clean=clean)
    except EverstepError as error:
        report_exit(error)
        print(f"{time.monotonic():.3f} {type(error).__name__}: {error}", flush=True)
        sys.exit(error.exit_code)


class Replicas:
    """``config`` has no replica.id. ``moment()``: is called in the first lighthouse, to have it killed at a chosen line; ``prepare()`` in every
    rank. ``apart``: each rank is on a machine of its own, where nobody ends it when another one of its replica has ended. Use as a context
    manager; nothing outlives it."""

    def __init__(self, config: Config, folder: Path, min_replicas: int = 0, join_timeout_ms: int = 5000, max_restarts: int = 5,
                 clean: bool = False, moment: Callable[[], None] | None = None, prepare: Callable[[], None] | None = None, apart: bool = False):
        self.port = free_ports()
        self.config = config.model_copy(update={
            "lighthouse": config.lighthouse.model_copy(update={"address": f"http://127.0.0.1:{self.port}"}),
        })
        self.folder, self.max_restarts, self.clean, self._prepare = folder, max_restarts, clean, prepare
        self._min_replicas, self._join_timeout_ms = min_replicas or config.layout.replicas, join_timeout_ms
        self._stopped, self._apart = False, apart
        self.lighthouse: Any = None
        self.ranks: dict[tuple[int, int], Any] = {}
        self.codes: dict[int, int] = {}
        self._threads: dict[int, threading.Thread] = {}
        self.start_lighthouse(moment)

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *error: object) -> None:
        self.lighthouse.kill()
        self.end()
        self.lighthouse.join(10)

    def end(self) -> None:
        """All ranks, whatever they do."""
        self._stopped = True
        for process in self.ranks.values():
            process.kill()
        for thread in self._threads.values():
            thread.join(10)

    def start_lighthouse(self, moment: Callable[[], None] | None = None) -> None:
        self.lighthouse = context().Process(
            target=_lighthouse, args=(self.port, self._min_replicas, self._join_timeout_ms, self.folder / "lighthouse.log", moment), daemon=True
        )
        self.lighthouse.start()

    def kill_lighthouse(self) -> None:
        self.lighthouse.kill()
        self.lighthouse.join()

    def start(self, *replicas: int) -> None:
        for replica in replicas:
            thread = threading.Thread(target=self._supervise, args=(replica,), daemon=True)
            self._threads[replica] = thread
            thread.start()

    def _supervise(self, replica: int) -> None:
        config = self.config.model_copy(update={"replica": self.config.replica.model_copy(update={"id": replica})})
        sizes = config.layout
        world = sizes.tp * sizes.cp * sizes.pp * sizes.dp
        for restart in range(self.max_restarts + 1):
            exits = self.folder / f"exits-{replica}-{restart}"
            exits.mkdir(parents=True)
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            ranks = {}
            for rank in range(world):
                env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": str(restart), EXIT_DIR: str(exits),
                       "EVERSTEP_REPLICA": str(replica)}
                log = self.folder / f"rank-{replica}.{rank}.log"
                process = context().Process(target=_rank, args=(config, env, log, self.clean, self._prepare), daemon=True)
                process.start()
                ranks[rank] = self.ranks[replica, rank] = process
            waiting = list(ranks.values())
            while waiting and (self._apart or all(not p.exitcode for p in ranks.values())):
                ended = connection.wait([p.sentinel for p in waiting])
                waiting = [p for p in waiting if p.sentinel not in ended]
            failed = [p for p in ranks.values() if p.exitcode]
            for process in ranks.values():
                process.kill()
                process.join()
            self.codes[replica] = failed[0].exitcode if failed else 0
            if not failed or self._stopped or final_report(exits):
                return

    def kill(self, replica: int, rank: int = 0, number: int = signal.SIGKILL) -> None:
        os.kill(self.ranks[replica, rank].pid, number)

    def join(self, timeout_s: float = 200.0) -> None:
        end = time.monotonic() + timeout_s
        for replica, thread in self._threads.items():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise AssertionError(f"replica {replica} has not ended after {timeout_s} s:\n{self.logs()}")

    def events(self) -> list[Any]:
        return read_events(Path(self.config.run_dir) / "events")

    def wait_for(self, what: Any, timeout_s: float = 60.0) -> None:
        """Until ``what(events)``."""
        end = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(FileNotFoundError):
                if what(self.events() if (Path(self.config.run_dir) / "events").is_dir() else []):
                    return
            if time.monotonic() > end:
                raise AssertionError(f"it did not come in {timeout_s} s:\n{self.logs()}")
            time.sleep(0.02)

    def wait_for_commit(self, step: int, timeout_s: float = 60.0) -> None:
        self.wait_for(lambda events: any(e.event == "commit" and e.step >= step for e in events), timeout_s)

    def finished(self, timeout_s: float = 240.0) -> Finished:
        """All replicas ended well; what the run left."""
        self.join(timeout_s)
        assert set(self.codes.values()) == {0}, f"{self.codes}\n{self.logs()}"
        self.lighthouse.terminate()
        self.lighthouse.join(10)
        return Finished(Path(self.config.run_dir), self.events())

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))
