"""Several replicas through torchrun itself: `everstep up` with its lighthouse, agents and ranks, as a user starts it. Real kills of each.

In exact mode: whatever dies, the final weights are those of the undisturbed run to the last bit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.replicas import free_ports
from tests.support.runs import QUIET, ROOT, SFT, Finished, command
from tests.test_lighthouse import BASE, by_position, calm, check, replicas_at_end  # noqa: F401

from everstep.cluster.processes import still_running
from everstep.telemetry.events import read_events

pytestmark = pytest.mark.timeout(300)
ARGUMENTS = [*QUIET, *BASE, "layout.replicas=2", "local.restart_delay_s=0.1", "telemetry.progress=plain"]


class Up:
    """``everstep up`` and the processes below it."""

    def __init__(self, folder: Path, *overrides: str):
        self.folder = folder / "run"
        self.process = command(["up", SFT, *ARGUMENTS, f"run_dir={self.folder}", *overrides])
        self.out, self.err = "", ""

    def below(self, what: str) -> list[psutil.Process]:
        """Descendants whose command line has ``what`` in it, the oldest first."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if what in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda p: p.create_time())

    def committed(self) -> int:
        events = read_events(self.folder / "events") if (self.folder / "events").is_dir() else []
        return max((e.step for e in events if e.event == "commit"), default=0)

    def wait_for_commit(self, step: int, timeout_s: float = 120.0) -> None:
        end = time.monotonic() + timeout_s
        while self.committed() < step:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, f"step {step} was not committed in {timeout_s} s"
            time.sleep(0.05)

    def finish(self, timeout_s: float = 200.0) -> int:
        try:
            self.out, self.err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            self.out, self.err = self.process.communicate(timeout=60)
            raise AssertionError(f"it did not end in {timeout_s} s:\n{self.out[-6000:]}\n{self.err[-3000:]}") from None
        return self.process.returncode

    def finished(self) -> Finished:
        code = self.finish()
        assert code == 0, f"{code}\n{self.out[-6000:]}\n{self.err[-3000:]}"
        return Finished(self.folder, read_events(self.folder / "events"))


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts at most one; nothing of it is left afterwards."""
    started: list[Up] = []

    def start(*overrides: str) -> Up:
        started.append(Up(tmp_path, *overrides))
        return started[-1]

    yield start
    for one in started:
        below = psutil.Process(one.process.pid).children(recursive=True) if one.process.poll() is None else []
        one.process.kill()
        one.process.wait()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.full
def test_a_rank_is_killed(up, calm, tmp_path) -> None:  # noqa: F811
    run = up("faults=[{step: 3, phase: reduce, kind: kill, replica: 1}]", "sft.steps=40")
    finished = run.finished()
    check(finished, calm(SFT, "sft.steps=40"), None)  # a cold start takes longer than the rest of so short a run
    assert "replica 1 has registered" in run.out, "the lighthouse's words reach the terminal"
    assert [line for line in run.out.splitlines() if "step 40/40" in line], "so does the lead's progress"
    assert not still_running({e.pid for e in finished.events}, 10.0)
    assert (finished.folder / "logs" / "latest" / "replica-1.log").exists()


@pytest.mark.full
@pytest.mark.parametrize("fault", [
    "{step: 3, phase: compute, kind: kill, replica: 0}",
    "{step: 3, phase: vote, kind: exit, replica: 1}",
    "{step: 3, phase: apply, kind: segv, replica: 0}",
    "{step: 3, phase: compute, kind: stop, replica: 1}",
    "{step: 3, phase: compute, kind: gil, replica: 0}",
    "{step: 4, phase: save, kind: kill, replica: 0}",
])
def test_faults(up, calm, fault: str) -> None:  # noqa: F811
    """Stopped ones are ended by the warden in their agent."""
    run = up(f"faults=[{fault}]", "sft.steps=500", "recovery.silence_s=3", "checkpoint.every_steps=4").finished()
    check(run, calm(SFT, "sft.steps=500"), 2)
    assert len(run.kind("fault")) == 1 and run.kind("join")


@pytest.mark.full
@pytest.mark.parametrize("shape", [("layout.tp=2", "engine.sequence_parallel=true"), ("layout.pp=2",)])
def test_one_rank_of_two_in_a_replica(up, calm, shape: tuple[str, ...]) -> None:  # noqa: F811
    run = up("faults=[{step: 3, phase: compute, kind: kill, replica: 1, rank: 1}]", "sft.steps=500", *shape).finished()
    check(run, calm(SFT, "sft.steps=500", *shape), 2)
    assert len({e.pid for e in run.kind("form")}) == 6, "both ranks of the replica were started anew"


@pytest.mark.full
def test_a_whole_replica_is_killed(up, calm) -> None:  # noqa: F811
    run = up("sft.steps=500")
    run.wait_for_commit(4)
    command_line = run.below("replica.id=1")[0]  # everstep train, above the agent and the ranks
    for process in [command_line, *command_line.children(recursive=True)]:
        process.kill()
    finished = run.finished()
    check(finished, calm(SFT, "sft.steps=500"), 2)
    assert "replica 1 was started anew" in run.err


@pytest.mark.full
def test_the_lighthouse_is_killed(up, calm) -> None:  # noqa: F811
    run = up("sft.steps=60")
    run.wait_for_commit(4)
    run.below("everstep lighthouse")[0].kill()
    finished = run.finished()
    check(finished, calm(SFT, "sft.steps=60"), 2)
    assert "lighthouse was started anew" in run.err and not finished.kind("death")


@pytest.mark.full
def test_an_interrupt_ends_everything(up) -> None:
    run = up("sft.steps=5000")
    run.wait_for_commit(3)
    pids = {p.pid for p in psutil.Process(run.process.pid).children(recursive=True)}
    run.process.send_signal(signal.SIGINT)
    assert run.finish(90) == 130 and "resume=auto" in run.err
    assert not still_running(pids, 5.0)


@pytest.mark.full
def test_who_dies_too_often_is_given_up(up) -> None:
    faults = ", ".join(f"{{step: {step}, phase: compute, kind: exit, replica: 1}}" for step in range(2, 400))
    run = up(f"faults=[{faults}]", "sft.steps=5000", "local.max_restarts=1", "recovery.quarantine_after=0")
    assert run.finish() == 3
    assert "replica 1 died 2 times (local.max_restarts=1)" in run.err


@pytest.mark.full
def test_what_cannot_work_is_refused_at_once(up) -> None:
    run = up("layout.tp=3")
    assert run.finish(60) == 2
    assert "layout.tp" in run.err and not run.folder.exists()


@pytest.mark.full
def test_a_replica_over_two_machines(tmp_path: Path, calm) -> None:  # noqa: F811
    """Two torchruns for each replica, which find each other by PET_* and MASTER_*; one rank of one of them dies."""
    port, masters = free_ports(), [free_ports() + 100 * (i + 1) for i in range(2)]
    url = f"http://127.0.0.1:{port}"
    steps = "sft.steps=500"
    processes = [command(["lighthouse", "--port", str(port), "--min-replicas", "2"])]
    try:
        for replica in range(2):
            for machine in range(2):
                env = {"TORCHFT_LIGHTHOUSE": url, "REPLICA_GROUP_ID": str(replica), "PET_NNODES": "2", "PET_NODE_RANK": str(machine),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(masters[replica])}
                processes.append(command(
                    ["train", SFT, *ARGUMENTS, f"run_dir={tmp_path}/run", "launcher=local", "layout.tp=2", "engine.sequence_parallel=true", steps,
                     "faults=[{step: 3, phase: compute, kind: kill, replica: 1, rank: 1}]"], **env,
                ))
        for process in processes[1:]:
            out, err = process.communicate(timeout=200)
            assert process.returncode == 0, out + err
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate(timeout=60)
    run = Finished(tmp_path / "run", read_events(tmp_path / "run" / "events"))
    check(run, calm(SFT, steps, "layout.tp=2", "engine.sequence_parallel=true"), 2)


@pytest.mark.full
def test_the_example_runs_as_its_page_says(tmp_path: Path) -> None:
    port = free_ports()
    done = subprocess.run(
        ["examples/hsdp_two_replicas.sh", "sft.steps=10", "device=cpu"], cwd=ROOT, text=True, capture_output=True, timeout=250,
        env={**os.environ, "PORT": str(port), "PYTHON": psutil.Process().exe(), "RUN": f"{tmp_path}/run"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "held" in done.stdout and "BROKEN" not in done.stdout


@pytest.mark.full
def test_torchft_as_it_is_installed_works() -> None:
    """Torchft's own tests of the lighthouse and its clients, of the coordination interface, and of whole training loops under its manager
    (those that need no GPU and none of its optional packages)."""
    chosen = "not cuda and not torchcomms and not use_cuda_True"
    done = subprocess.run(
        [psutil.Process().exe(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "torchft.lighthouse_test", "torchft.coordination_test",
         "torchft.manager_integ_test", "-k", chosen], text=True, capture_output=True, timeout=280, cwd="/",
    )
    assert done.returncode == 0, done.stdout[-4000:]
