"""One run, started in each of the ways that there are; all leave the same logs, so that the same can be asked of them.

    controller   launcher=ray without Ray: a controller, its workers forked from a process that has done the imports
    ray          launcher=ray
    lighthouse   launcher=local without torchrun: ranks and lighthouse forked likewise (tests/support/replicas.py)
    torchrun     `everstep up`, as a user starts it
"""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from tests.support.replicas import Replicas
from tests.support.runs import QUIET, Finished, command, config, finish

from everstep.cluster.forked import ForkedHost
from everstep.telemetry.events import read_events

#: Without Ray there are no spares: who dies is started anew.
WITHOUT_RAY = ["launcher=local", "layout.spares=0", "lighthouse.wait_s=60", "local.restart_delay_s=0.1"]


def trained(launcher: str, file: str, folder: Path, *overrides: str, prepare: Callable[[], None] | None = None) -> Finished:
    """``file`` to its end in ``folder/run``. ``prepare()``: in every process that is forked, before it does anything."""
    if launcher == "torchrun":
        assert prepare is None
        with Up(folder, file, *overrides) as up:
            return up.finished(800.0)
    if launcher == "lighthouse":
        conf = config(file, folder / "run", *overrides, *WITHOUT_RAY)
        with Replicas(conf, folder, prepare=prepare) as replicas:
            replicas.start(*range(conf.layout.replicas))
            return replicas.finished()
    host = {"ray": None, "controller": functools.partial(ForkedHost, prepare=prepare)}[launcher]
    return finish(config(file, folder / "run", *overrides), host=host)


def committed(folder: Path) -> int:
    """The last step that a run in ``folder`` has committed so far."""
    events = read_events(folder / "events") if (folder / "events").is_dir() else []
    return max((e.step for e in events if e.event == "commit"), default=0)


class Up:
    """``everstep up`` and the processes below it. Use as a context manager; nothing outlives it."""

    def __init__(self, folder: Path, file: str, *overrides: str, **env: str):
        self.folder = folder / "run"
        self.process = command(["up", file, *QUIET, f"run_dir={self.folder}", *overrides, *WITHOUT_RAY], **env)
        self.out, self.err = "", ""

    def __enter__(self) -> Up:
        return self

    def __exit__(self, *error: object) -> None:
        below = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def below(self, what: str) -> list[psutil.Process]:
        """Descendants whose command line has ``what`` in it, the oldest first."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if what in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda p: p.create_time())

    def wait_for_commit(self, step: int, timeout_s: float = 240.0) -> None:
        end = time.monotonic() + timeout_s
        while committed(self.folder) < step:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, f"step {step} was not committed in {timeout_s} s"
            time.sleep(0.05)

    def finish(self, timeout_s: float = 400.0) -> int:
        try:
            self.out, self.err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            self.out, self.err = self.process.communicate(timeout=60)
            raise AssertionError(f"it did not end in {timeout_s} s:\n{self.out[-6000:]}\n{self.err[-3000:]}") from None
        return self.process.returncode

    def finished(self, timeout_s: float = 400.0) -> Finished:
        code = self.finish(timeout_s)
        assert code == 0, f"{code}\n{self.out[-6000:]}\n{self.err[-3000:]}"
        return Finished(self.folder, read_events(self.folder / "events"))
