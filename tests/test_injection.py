"""Faults of every kind in real runs, and each detection with the fault that needs it. Every assertion reads the event log on disk."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.runs import DEMO, ROOT, SFT, Finished, command, config, finish, gone
from tests.test_faults import assert_invariants
from tests.test_recovery import serve, until

from everstep import chaos, cli
from everstep.cluster.forked import ForkedHost
from everstep.cluster.processes import ProcessWatch
from everstep.errors import CoordinatorLost, WorkerFailed
from everstep.recovery.control import Control
from everstep.recovery.proxy import Relay
from everstep.telemetry.events import Event, read_events
from everstep.telemetry.history import check

QUICK = ["recovery.heartbeat_s=0.2", "recovery.silence_s=3.0", "recovery.progress_timeout_s=3.0", "recovery.fence_s=1.5",
         "recovery.step_timeout_s=30", "recovery.heal_timeout_s=20", "recovery.link_timeout_s=15"]


def death_of(run: Finished, fault: Event) -> Event:
    """The death of the process that the fault struck."""
    (death,) = [e for e in run.kind("death") if e["worker"] == fault["worker"] and e.t_wall >= fault.t_wall]
    return death


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("ray_cluster")
def test_every_kind_of_fault_is_noticed_by_its_own_means(tmp_path):
    """3 replicas, 4 spares: six faults in one run, each noticed in its way, none costing a step or a sample."""
    run = finish(config(
        SFT, tmp_path / "run", *QUICK, "sft.steps=66", "checkpoint.at_end=false", "layout.replicas=3", "layout.spares=4",
        "sft.samples_per_step=60", "train.verify_every=5",
        "faults=[{step: 2, kind: nan, replica: 1}, {step: 3, kind: kill, phase: spare, rank: 1},"
        " {step: 6, kind: hang, phase: reduce, replica: 1}, {step: 22, kind: segv, phase: commit, replica: 0},"
        " {step: 36, kind: oom, replica: 1}, {step: 52, kind: partition, replica: 2}]",
    ))
    assert_invariants(run, steps=66)
    faults = {e["kind"]: e for e in run.kind("fault")}
    assert set(faults) == {"nan", "kill", "hang", "segv", "oom", "partition"}, "a fault did not fire"
    for kind, words in {
        "kill": ("process ended",), "hang": ("no progress: step 6, reduc",), "segv": ("process ended", "its process ended"), "oom": ("out of memory in train_step",), "partition": ("fenced itself",),
    }.items():
        death = death_of(run, faults[kind])
        assert death["cause"].startswith(words), (kind, death["cause"])
        assert death.t_wall - faults[kind].t_wall < 8.0, (kind, death["cause"])
    assert any("non-finite" in v["cause"] for v in run.kind("view")), "the NaN was not seen"
    assert not [e for e in run.kind("death") if e["worker"] == faults["nan"]["worker"] and e.t_wall < faults["hang"].t_wall]
    assert death_of(run, faults["kill"])["replica"] == -1
    assert faults["hang"]["found"] == "step 6, reduce" and faults["segv"]["done"] == "read from address 0"
    assert faults["segv"].who == faults["segv"]["worker"], "what happens inside is told by the victim"
    (fenced,) = run.kind("fenced")
    assert fenced.who == faults["partition"]["worker"] and 1.2 < fenced.t_wall - faults["partition"].t_wall < 5.0
    assert len(run.kind("death")) == 5
    assert gone(run.pids)


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("ray_cluster")
def test_of_two_ranks_of_a_replica_the_hung_one_is_replaced_and_its_mate_lives_on(tmp_path):
    """2 replicas x TP2: a rank hangs in compute while its mate waits for it in a collective; later one keeps its interpreter lock."""
    run = finish(config(
        SFT, tmp_path / "run", *QUICK, "sft.steps=40", "checkpoint.at_end=false", "layout.tp=2", "layout.spares=2",
        "faults=[{step: 4, kind: hang, replica: 1, rank: 1}, {step: 24, kind: gil, phase: reduce, replica: 0, rank: 0}]",
    ))
    assert_invariants(run, steps=40)
    hang, gil = run.kind("fault")
    assert death_of(run, hang)["cause"].startswith("no progress: step 4, compute")
    assert "silent for 3 s" in death_of(run, gil)["cause"] or "no progress" in death_of(run, gil)["cause"]
    assert len(run.kind("death")) == 2, "a healthy rank was taken for the culprit"
    assert run.kind("commit")[-1]["members"] == [0, 1]
    assert gone(run.pids)


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("ray_cluster")
def test_faults_in_rollout_and_in_save_and_user_code_that_raises(tmp_path):
    """A rank that owes the result of a call is replaced; an exception of user code is nobody's death and ends the run, typed."""
    conf = config(
        DEMO, tmp_path / "run", *QUICK, "recovery.call_timeout_s=12", "warmup.steps=2", "rl.iterations=14", "rl.prompts_per_step=8",
        "rl.samples_per_prompt=4", "train.micro_batch_size=8", "warmup.samples_per_step=32", "rl.eval_every=0", "data.eval_source=null",
        "layout.spares=2", "checkpoint.every_steps=8",
        "faults=[{step: 4, kind: hang, phase: rollout, replica: 1}, {step: 8, kind: hang, phase: save, replica: 0},"
        " {step: 15, kind: error, phase: rollout, replica: 1}]",
    )
    with pytest.raises(WorkerFailed, match="failed in generate: InjectedError: injected fault: an exception in user code"):
        finish(conf)
    run = Finished(tmp_path / "run", read_events(tmp_path / "run" / "events"))
    hang, alone, error = run.kind("fault")
    assert "owes the result of generate" in death_of(run, hang)["cause"]
    assert "save_shard took longer than 12 s" in death_of(run, alone)["cause"]  # one replica saves: there are no peers to judge by
    assert [e.step for e in run.kind("save")] == [8]
    assert len(run.kind("death")) == 2 and run.kind("commit")[-1].step == 14 and error["kind"] == "error"
    assert not [f for f in check(run.folder) if f.held is False]
    assert gone(run.pids)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("launcher", ["forked", pytest.param("ray", marks=pytest.mark.full)])
def test_chaos_from_the_command_line_ends_with_the_proof(tmp_path, monkeypatch, capsys, launcher):
    given = ["chaos", SFT, "--seed", "5", "--rate", "0.2", "--faults", "kill,exit,nan", f"run_dir={tmp_path}/run", "device=cpu",
             "layout.spares=1", "sft.steps=15", "checkpoint.at_end=false", "telemetry.tensorboard=false", "telemetry.progress=none"]
    if launcher == "ray":
        process = command(given)
        out, err = process.communicate(timeout=170)
        code = process.returncode
    else:
        monkeypatch.setattr(chaos.driver, "run", functools.partial(chaos.driver.run, host=ForkedHost))
        code = cli.run(given)
        out, err = capsys.readouterr()
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("chaos: seed 5, ") and lines[0].endswith("2 deaths can be survived")
    planned = [line for line in lines if line.startswith("  step ")]
    assert planned and " 4  held    one membership per epoch" in out and "BROKEN" not in out
    fired = [e for e in read_events(tmp_path / "run" / "events") if e.event == "fault"]
    assert {f"step {e.step}: {e['kind']}" for e in fired} <= {" ".join(line.split()[:3]) for line in planned} and fired


# -- parts -------------------------------------------------------------------------------------------------------------------


def test_a_rank_behind_a_cut_fences_itself_within_its_deadline_and_one_that_is_only_idle_does_not(tmp_path):
    server, members = serve(tmp_path, heartbeat_s=0.1)
    relay = Relay(server.address)
    cut, fine = (Control(address, "secret", w, 0.1, fence_s=1.2) for address, w in ((relay.address, "w0"), (server.address, "w1")))
    told: list[str] = []
    cut.on_fenced = told.append
    server.open(members)
    assert cut.latest.view.replicas == fine.latest.view.replicas == (0, 1)
    time.sleep(2.5)
    assert cut.lost is None and fine.lost is None
    relay.cut()
    start = time.monotonic()
    with pytest.raises(CoordinatorLost, match=r"nothing was heard from it for 1\.2 s"):
        cut.after(10**6, 10.0, "a record that never comes")
    assert 0.8 < time.monotonic() - start < 5.0
    with pytest.raises(CoordinatorLost):
        cut.phase(1, "vote")  # nor does it say anything more
    assert cut.newer_than(10**6), "what polls must stop as well"
    assert until(lambda: len(told) == 1) and fine.lost is None and server.dead == {}
    relay.close()
    server.close()


def test_a_rank_that_was_suspended_itself_does_not_take_that_for_silence(tmp_path):
    server, _ = serve(tmp_path, heartbeat_s=0.1)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            control = Control(server.address, "secret", "w0", 0.1, fence_s=0.8)
            time.sleep(4.0)
            os._exit(7 if control.lost is None else 1)
        os._exit(2)
    assert until(lambda: server.connected("w0"))
    time.sleep(0.5)
    os.kill(child, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    server.close()


_HEIR = """
import os, sys, time
from everstep.recovery.control import Control
control = Control(("127.0.0.1", int(sys.argv[1])), "secret", "w0", 0.1)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_the_end_of_a_process_whose_child_keeps_its_connection_open_is_noticed(tmp_path):
    """The kernel closes nothing then: only the process table tells."""
    server, _ = serve(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", _HEIR, str(server.address[1])], stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    assert process.stdout is not None
    heir = int(process.stdout.readline())
    watch = ProcessWatch(lambda worker: server.expel(worker, "process ended (pidfd)"))
    try:
        assert until(lambda: server.connected("w0"))
        watch.add("w0", process.pid)
        process.kill()
        assert until(lambda: bool(server.dead), 10.0)
        assert server.dead == {"w0": "process ended (pidfd)"}
        watch.add("gone", process.pid)  # it ended before it was watched
        assert until(lambda: process.poll() is not None)
    finally:
        os.kill(heir, signal.SIGKILL)
        process.kill()
        process.wait()
        watch.close()
        server.close()


def test_a_relay_hands_on_what_it_hears_and_the_end_of_it(tmp_path):
    server, members = serve(tmp_path)
    relay = Relay(server.address)
    control = Control(relay.address, "secret", "w0", 0.1)
    server.open(members)
    assert control.latest.view.replicas == (0, 1)
    control.close()
    assert until(lambda: not server.connected("w0")) and server.dead == {}
    other = Control(relay.address, "secret", "w1", 0.1)
    assert until(lambda: server.connected("w1"))
    server.expel("w1", "test")
    assert until(lambda: other.lost is not None)
    relay.close()
    server.close()
    assert Path(tmp_path / "commits.log").exists()
