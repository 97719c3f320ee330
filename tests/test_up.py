"""Several replicas through torchrun itself: `everstep up` with its lighthouse, agents and ranks, as a user starts it. Real kills of each.

In exact mode: whatever dies, the final weights are those of the undisturbed run to the last bit. Ranks that die in this and that phase
are in test_exact.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.launchers import WITHOUT_RAY, Up, committed
from tests.support.replicas import free_ports
from tests.support.runs import QUIET, ROOT, SFT, Finished, command
from tests.test_lighthouse import BASE, calm, check  # noqa: F401

from everstep.cluster.local.up import claim_ports
from everstep.cluster.processes import still_running
from everstep.telemetry import history
from everstep.telemetry.events import read_events

pytestmark = pytest.mark.timeout(600)
ARGUMENTS = [*QUIET, *BASE, *WITHOUT_RAY, "layout.replicas=2", "telemetry.progress=plain"]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts at most one; nothing of it is left afterwards."""
    with contextlib.ExitStack() as started:
        yield lambda *overrides, **env: started.enter_context(Up(tmp_path, SFT, *ARGUMENTS, *overrides, **env))


def test_two_that_start_at_once_take_different_ports() -> None:
    """Both find them free: their lighthouses listen seconds later."""
    first, claim = claim_ports(free_ports())
    second, other = claim_ports(first)
    assert second >= first + 3
    claim.close()
    third, again = claim_ports(first)
    assert third == first
    again.close()
    other.close()


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
@pytest.mark.parametrize("struck", [None, 2], ids=["with-its-rank", "above-its-rank"])
def test_a_whole_replica_is_killed(up, calm, struck: int | None) -> None:  # noqa: F811
    """A rank that is left behind ends by itself: else it would hold the place of the next life."""
    run = up("sft.steps=500")
    run.wait_for_commit(4)
    command_line = run.below("replica.id=1")[0]  # everstep train, above the agent and the rank
    processes = [command_line, *command_line.children(recursive=True)]
    assert len(processes) >= 3
    for process in processes[:struck]:
        process.kill()
    finished = run.finished()
    check(finished, calm(SFT, "sft.steps=500"), 2)
    assert "replica 1 was started anew" in run.err


@pytest.mark.full
@pytest.mark.parametrize("whom", [0, 1], ids=["its-command", "its-agent"])
def test_a_replica_that_is_sent_sigterm_is_started_anew_and_the_others_go_on(up, calm, whom: int) -> None:  # noqa: F811
    run = up("sft.steps=60")
    run.wait_for_commit(4)
    command_line = run.below("replica.id=1")[0]
    [command_line, *command_line.children()][whom].terminate()
    finished = run.finished()
    check(finished, calm(SFT, "sft.steps=60"), None)  # a cold start takes longer than the rest of so short a run
    assert "replica 1 has ended with status 130" in run.err and "replica 1 was started anew" in run.err
    assert {e["replica"] for e in finished.kind("death")} == {1}


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lighthouse_is_killed(up, calm, number: signal.Signals) -> None:  # noqa: F811
    run = up("sft.steps=150", RUST_LOGS="info", RUST_LOG="")
    run.wait_for_commit(4)
    run.below("everstep lighthouse")[0].send_signal(number)
    finished = run.finished()
    check(finished, calm(SFT, "sft.steps=150"), 2)
    assert "lighthouse was started anew" in run.err and not finished.kind("death")
    assert "torchft::lighthouse" in (finished.folder / "logs" / "latest" / "lighthouse.log").read_text(), "RUST_LOGS reaches torchft"


@pytest.mark.full
def test_managers_listen_where_they_are_told(up) -> None:
    port = free_ports()
    run = up("sft.steps=60", TORCHFT_MANAGER_PORT=str(port))
    run.wait_for_commit(2)
    for replica in range(2):
        socket.create_connection(("127.0.0.1", port + replica), timeout=10.0).close()
    run.finished()


@pytest.mark.full
def test_nothing_is_left_when_the_command_itself_is_killed(up) -> None:
    run = up("sft.steps=5000")
    run.wait_for_commit(3)
    pids = {p.pid for p in psutil.Process(run.process.pid).children(recursive=True)}
    run.process.kill()
    assert len(pids) >= 7 and not still_running(pids, 60.0)  # a lighthouse; for each replica a command, an agent and a rank


@pytest.mark.full
def test_an_interrupt_ends_everything(up) -> None:
    run = up("sft.steps=5000")
    run.wait_for_commit(3)
    pids = {p.pid for p in psutil.Process(run.process.pid).children(recursive=True)}
    run.process.send_signal(signal.SIGINT)
    assert run.finish(90) == 130 and "resume=auto" in run.err
    assert not still_running(pids, 5.0)


@pytest.mark.full
def test_an_interrupt_is_obeyed_before_the_lighthouse_answers(up) -> None:
    run = up("sft.steps=5000")
    end = time.monotonic() + 240.0
    while not (found := run.below("everstep lighthouse")):
        assert run.process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    found[0].suspend()
    run.process.send_signal(signal.SIGINT)
    assert run.finish(50) == 130 and "interrupted by SIGINT" in run.err and "replica 0 has started" not in run.err
    assert not found[0].is_running()


@pytest.mark.full
def test_who_dies_too_often_is_given_up(up) -> None:
    run = up("sft.steps=20000", "local.max_restarts=1", "recovery.quarantine_after=0")
    run.wait_for_commit(4)
    dead = kill_whole(run, besides=set())
    dead |= kill_whole(run, besides=dead)
    assert run.finish() == 3
    assert "replica 1 died 2 times (local.max_restarts=1)" in run.err and run.err.count("replica 1 was started anew") == 1
    assert not still_running(dead, 10.0)


def kill_whole(run: Up, besides: set[int]) -> set[int]:
    """Every process of replica 1, once it has one that is not among these; their pids."""
    end = time.monotonic() + 60.0
    while not (found := [process for process in run.below("replica.id=1") if process.pid not in besides]):
        assert run.process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    whole = [found[0], *found[0].children(recursive=True)]
    for process in whole:
        process.kill()
    return {process.pid for process in whole}


@pytest.mark.full
def test_a_lighthouse_that_is_frozen_is_replaced(up, calm) -> None:  # noqa: F811
    run = up("sft.steps=60", "recovery.fence_s=16")
    run.wait_for_commit(4)
    run.below("everstep lighthouse")[0].suspend()
    finished = run.finished()
    check(finished, calm(SFT, "sft.steps=60"), 2)
    assert "has not answered for 8 s" in run.err and "lighthouse was started anew" in run.err and not finished.kind("death")


@pytest.mark.full
def test_code_of_the_user_that_fails_everywhere_ends_the_run_at_once(up) -> None:
    both = ", ".join(f"{{step: 3, phase: compute, kind: error, replica: {replica}}}" for replica in range(2))
    run = up(f"faults=[{both}]")
    assert run.finish(120) == 3
    assert run.err.count("is not started anew") == 2 and "replica 0: " in run.err.splitlines()[-1] and "was started anew" not in run.err
    assert [e["status"] for e in read_events(run.folder / "events") if e.event == "run_end"] == ["failed"]


@pytest.mark.full
def test_what_cannot_work_is_refused_at_once(up) -> None:
    run = up("layout.tp=3")
    assert run.finish(60) == 2
    assert "layout.tp" in run.err and not run.folder.exists()


def by_torchruns_names(machine: int) -> dict[str, str]:
    return {"PET_NNODES": "2", "PET_NODE_RANK": str(machine), "MASTER_ADDR": "127.0.0.1"}


def by_slurms_names(machine: int) -> dict[str, str]:
    return {"SLURM_NNODES": "2", "SLURM_NODEID": str(machine), "SLURM_JOB_NODELIST": "localhost,another"}


@pytest.fixture
def by_hand() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``everstep`` commands, of which nothing is left afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, module: str = "everstep", **env: str) -> subprocess.Popen[str]:
        started.append(command(arguments, module, **env))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
    for process in started:
        process.communicate(timeout=60)


def end_well(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0, out + err


@pytest.mark.full
@pytest.mark.timeout(1200)  # hundreds of steps of four ranks, on a machine that may be busy
@pytest.mark.parametrize("names", [by_torchruns_names, by_slurms_names])
def test_a_replica_over_two_machines(tmp_path: Path, calm, by_hand, names: Callable[[int], dict[str, str]]) -> None:  # noqa: F811
    """Two torchruns for each replica, which find each other by variables; one rank of one of them dies."""
    port, masters = free_ports(), [free_ports() + 100 * (i + 1) for i in range(2)]
    steps = "sft.steps=250"
    secret = {"EVERSTEP_LIGHTHOUSE_TOKEN": "a secret of all machines"}
    by_hand("lighthouse", "--port", str(port), "--min_replicas", "2", **secret)
    end_well(*(
        by_hand("train", SFT, *ARGUMENTS, f"run_dir={tmp_path}/run", "layout.tp=2", "engine.sequence_parallel=true", steps,
                "faults=[{step: 3, phase: compute, kind: kill, replica: 1, rank: 1}]", TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}",
                REPLICA_GROUP_ID=str(replica), MASTER_PORT=str(masters[replica]), **secret, **names(machine))
        for replica in range(2) for machine in range(2)
    ))  # fmt: skip
    run = Finished(tmp_path / "run", read_events(tmp_path / "run" / "events"))
    check(run, calm(SFT, steps, "layout.tp=2", "engine.sequence_parallel=true"), 2)
    assert [e["replica"] for e in run.kind("join")] == [1], "it died, and came back"


@pytest.mark.full
@pytest.mark.parametrize("machine", [0, 1], ids=["with-the-store", "without"])
def test_a_machine_of_a_replica_is_lost_and_comes_back(tmp_path: Path, calm, by_hand, machine: int) -> None:  # noqa: F811
    """Everything on it is killed; its torchrun, started again, counts its starts from 0, the other machine's from 1."""
    port, steps = free_ports(), "sft.steps=250"
    shape = ["layout.tp=2", "engine.sequence_parallel=true"]
    secret = {"EVERSTEP_LIGHTHOUSE_TOKEN": "a secret of all machines"}
    by_hand("lighthouse", "--port", str(port), "--min_replicas", "2", **secret)

    def start(replica: int, **env: str) -> subprocess.Popen[str]:
        return by_hand("train", SFT, *ARGUMENTS, f"run_dir={tmp_path}/run", *shape, steps, "lighthouse.wait_s=240",
                       TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}", REPLICA_GROUP_ID=str(replica), **secret, **env)

    def start_on(machine: int) -> subprocess.Popen[str]:
        return start(1, MASTER_PORT=str(port + 100), **by_torchruns_names(machine))

    whole, halves = start(0), [start_on(i) for i in range(2)]
    while committed(tmp_path / "run") < 4:
        assert all(process.poll() is None for process in (whole, *halves)), [p.communicate() for p in (whole, *halves) if p.poll() is not None]
        time.sleep(0.1)
    lost = psutil.Process(halves[machine].pid)
    for process in [lost, *lost.children(recursive=True)]:
        process.kill()
    halves[machine].wait()
    begun = time.monotonic()
    halves[machine] = start_on(machine)
    while not any(e.event == "join" for e in read_events(tmp_path / "run" / "events")):
        assert time.monotonic() < begun + 200, "they wait for each other"
        if halves[1 - machine].poll() is not None:  # its torchrun lost the store, and whoever started it starts it again
            halves[1 - machine] = start_on(1 - machine)
        time.sleep(0.1)
    end_well(whole, *halves)
    check(Finished(tmp_path / "run", read_events(tmp_path / "run" / "events")), calm(SFT, steps, *shape), 2)


@pytest.mark.full
def test_a_replica_that_comes_late_is_waited_for_by_nobody(tmp_path: Path, calm, by_hand) -> None:  # noqa: F811
    """The first one is started by ``everstep train``, the late one by torchrun itself."""
    port, steps = free_ports(), "sft.steps=500"
    by_hand("lighthouse", "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "60000")
    train = ["train", SFT, *ARGUMENTS, f"run_dir={tmp_path}/run", steps, "replica.count=2", f"lighthouse.address=http://127.0.0.1:{port}"]
    first = by_hand(*train, "replica.id=0")
    while committed(tmp_path / "run") < 5:
        assert first.poll() is None, first.communicate()
        time.sleep(0.1)
    torchrun = ["--standalone", "--nproc_per_node", "1", "--max_restarts", "3", "-m", "everstep"]
    end_well(first, by_hand(*torchrun, *train, "replica.id=1", module="torch.distributed.run"))
    run = Finished(tmp_path / "run", read_events(tmp_path / "run" / "events"))
    check(run, calm(SFT, steps), 2)
    assert [e["replica"] for e in run.kind("join")] == [1]
    times = sorted(e.t_wall for e in run.kind("commit"))
    assert max(b - a for a, b in itertools.pairwise(times)) < 10, "the join timeout was waited for"


def on_the_page() -> list[str]:
    """The commands that the page of the examples has in its block of shell."""
    return (ROOT / "examples" / "README.md").read_text().split("```sh\n")[1].split("```")[0].splitlines()


@pytest.mark.full
def test_the_examples_run_as_their_page_says(tmp_path: Path) -> None:
    """One after the other, in a folder where only the examples are."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    python = sys.executable
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHON": python, "PORT": str(free_ports())}
    for line in on_the_page():
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, text=True, capture_output=True, timeout=250, env=env)
        assert done.returncode == 0, line + done.stdout[-3000:] + done.stderr[-3000:]
        assert "BROKEN" not in done.stdout
    runs = {folder.name for folder in (tmp_path / "runs").iterdir()}
    assert runs == {"diloco", "hsdp_two_replicas"}
    for name in runs:
        findings = history.check(tmp_path / "runs" / name)
        assert findings and not [finding for finding in findings if finding.held is False]


@pytest.mark.full
def test_torchft_as_it_is_installed_works() -> None:
    """Torchft's own tests of the lighthouse and its clients, of the coordination interface, and of whole training loops under its manager
    (those that need no GPU and none of its optional packages)."""
    chosen = "not cuda and not torchcomms and not use_cuda_True"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "torchft.lighthouse_test", "torchft.coordination_test",
         "torchft.manager_integ_test", "-k", chosen], text=True, capture_output=True, timeout=500, cwd="/",
    )
    assert done.returncode == 0, done.stdout[-4000:]
