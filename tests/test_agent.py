"""Agents in whole runs: a device that falls sick, an agent that is killed, a node that is not the lead's."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.support.launchers import Up
from tests.support.runs import SFT, command, config, finish
from tests.test_faults import assert_invariants
from tests.test_lost_node import NODE, QUICK_NOTICE, cluster, ended_by_interrupt, events, interrupt, until  # noqa: F401
from tests.test_node import NamedNvml, Quiet

from everstep.cluster.forked import ForkedHost
from everstep.cluster.processes import still_running
from everstep.node import beat
from everstep.node.senses import Senses
from everstep.telemetry import status
from everstep.telemetry.events import read_events


class _Sickening(NamedNvml):
    """Its second GPU gets memory errors once there is a file that says so."""

    sick = Path()

    def nvmlDeviceGetTotalEccErrors(self, gpu: dict, kind: int, counter: int) -> int:
        return 3 if gpu["number"] == 1 and self.sick.exists() else 0


def _on_gpus(sick: Path) -> None:
    """In each process of the run: rank N computes on the CPU, and says that it was GPU N; the agent sees those GPUs."""
    _Sickening.sick = sick
    beat.name_of = lambda device: f"GPU-{_number()}"  # type: ignore[assignment]
    Senses.of_this_machine = staticmethod(lambda folders: Senses(folders, _Sickening(*({"number": n} for n in range(4))), Quiet()))  # type: ignore[method-assign]


def _number() -> int:
    import multiprocessing

    return int(multiprocessing.current_process().name.removeprefix("w"))


def _helper(folder: Path, sick: Path, kill: bool, done: list[str]) -> None:
    """Beside the run: makes a device fall sick; before that, kills its agent."""
    def seen(event: str, **wanted: object) -> list:
        return [e for e in read_events(folder / "events") if e.event == event and all(e.get(k) == v for k, v in wanted.items())]

    if until(lambda: (folder / "events" / "lead.jsonl").exists() and bool(seen("agent", state="up")) and len(seen("commit")) > 3, 60):
        if kill:
            os.kill(next(e.pid for e in seen("agent") if e.who.startswith("agent-")), signal.SIGKILL)
            done.append("agent killed")
        if until(lambda: len([e for e in seen("agent", state="up") if e.who == "lead"]) == 1 + kill, 60):
            time.sleep(0.5)  # its first look
            sick.touch()
            done.append("device sick")


@pytest.mark.parametrize(("kill", "steps"), [(False, 100), pytest.param(True, 400, marks=pytest.mark.full)])
def test_a_sick_device_leaves_the_run_and_an_agent_that_dies_is_started_again(tmp_path: Path, kill: bool, steps: int) -> None:
    sick, done = tmp_path / "sick", list[str]()
    helper = threading.Thread(target=_helper, args=(tmp_path / "run", sick, kill, done))
    helper.start()
    run = finish(config(
        SFT, tmp_path / "run", "layout.spares=1", f"sft.steps={steps}", "train.verify_every=1000", "checkpoint.at_end=false", "watch.agent_every_s=0.1",
        "recovery.restart_attempts=2",
    ), host=lambda conf: ForkedHost(conf, prepare=functools.partial(_on_gpus, sick)))
    helper.join()
    assert done == ["agent killed"] * kill + ["device sick"]
    assert [e["state"] for e in run.kind("agent") if e.who == "lead"] == ["up", *["lost", "up"] * kill]
    (told,) = [e for e in run.kind("quarantine") if e.who == "lead"]
    assert (told["device"], told["index"], told["workers"]) == ("GPU-1", "1", ["w1"]) and "3 uncorrectable" in told["why"]
    (leave,) = run.kind("leave")
    assert (leave["worker"], leave["replica"]) == ("w1", 1) and leave["cause"].startswith("quarantine: device 1 of ")
    assert run.kind("death") == [] and [e["worker"] for e in run.kind("retire")] == ["w1"], "between two steps: nothing is redone"
    assert [e["spare"] for e in run.kind("spare_used")] == ["w2"] and run.kind("restart") == [], "and no process is started there"
    assert run.kind("join")[-1]["members"] == [0, 1]
    assert_invariants(run, steps=steps)
    (node,) = status.status(tmp_path / "run").nodes
    assert [text for text in node.quarantined] == ["device 1: 3 uncorrectable memory errors since the driver was loaded"]
    assert any("3 uncorrectable" in text for text in node.signs)


@pytest.mark.full
@pytest.mark.timeout(280)
def test_what_happens_on_another_node_is_told_by_the_agent_there(tmp_path, cluster):  # noqa: F811
    """Its rank is stopped: found stuck by the agent before it is silent for long enough, diagnosed there, and its death has that node's
    evidence. Then the node's agent is killed, and another one started."""
    address, _ = cluster
    run = command(["train", SFT, f"run_dir={tmp_path}/run", f"ray.address={address}", "device=cpu", "telemetry.tensorboard=false",
                   "telemetry.progress=none", "layout.spares=1", "sft.steps=4000", "checkpoint.at_end=false", "train.verify_every=50",
                   "recovery.heartbeat_s=0.2", "recovery.silence_s=4", "watch.agent_every_s=0.2", "watch.stuck_after_s=1", "env.GLOO_SOCKET_IFNAME=lo"],
                  **QUICK_NOTICE)
    kinds = lambda *names, who="lead": [e for e in events(tmp_path) if e.event in names and (not who or e.who.startswith(who))]
    try:
        assert until(lambda: len(kinds("commit")) > 10 or run.poll() is not None, 120) and run.poll() is None, run.communicate()
        (there,) = [e for e in events(tmp_path) if e.event == "process_start" and e.host == NODE]
        assert until(lambda: any(e["node"] == NODE for e in kinds("agent")), 60)
        (agent,) = [e for e in kinds("agent", who="agent-") if e["node"] == NODE]
        os.kill(agent.pid, signal.SIGKILL)
        assert until(lambda: [e["state"] for e in kinds("agent") if e["node"] == NODE] == ["up", "lost", "up"], 60)
        time.sleep(1.0)
        os.kill(there.pid, signal.SIGSTOP)
        stopped = time.time()
        assert until(lambda: bool(kinds("failure")) and bool(kinds("join")), 120)
    finally:
        interrupt(run)
    done = ended_by_interrupt(run, tmp_path)
    (stuck,) = [e for e in kinds("stuck") if e["sure"] and e["worker"] == there.who]
    assert (stuck["node"], stuck["what"]) == (NODE, "process") and stuck.t_wall - stopped < 2.0
    (failure,) = kinds("failure")
    assert failure["node"] == NODE and failure["failure_class"] == "software"
    assert any("stuck process: its process is stopped" in line for line in failure["evidence"]) and any("its page: " in line for line in failure["evidence"])
    folder = next((tmp_path / "run" / "diagnosis").glob(f"*-{there.who}"))
    assert '"T (stopped)"' in (folder / f"{there.who}.kernel.json").read_text(), "seen there"
    assert_invariants(done, steps=done.kind("commit")[-1].step)
    assert {e["node"] for e in done.kind("agent")} == {NODE, os.uname().nodename}


@pytest.mark.full
@pytest.mark.timeout(280)
def test_under_torchrun_the_ranks_have_an_agent_that_outlives_them(tmp_path: Path) -> None:
    """One for the machine, of two replicas; one rank is stopped, and the agent says so before it is silent for long enough."""
    with Up(tmp_path, SFT, "layout.replicas=2", "sft.steps=60", "faults=[]", "checkpoint.at_end=false", "train.verify_every=100", "recovery.heartbeat_s=0.2",
            "recovery.silence_s=6", "watch.agent_every_s=0.2", "watch.stuck_after_s=1") as up:
        up.wait_for_commit(4)
        kinds = lambda name, who="lead": [e for e in read_events(up.folder / "events") if e.event == name and e.who.startswith(who)]
        assert until(lambda: bool(kinds("agent")), 60)
        victim = next(e for e in kinds("process_start", "w") if e.who == "w0")  # of the replica whose rank started it, or not: either will do
        os.kill(victim.pid, signal.SIGSTOP)
        stopped = time.time()
        run = up.finished()
    (stuck,) = [e for e in run.kind("stuck") if e.who == "lead" and e["sure"] and e["worker"] == "w0"]
    assert (stuck["what"], stuck["replica"]) == ("process", 0) and stuck.t_wall - stopped < 2.0
    failure = run.kind("failure")[0]
    assert failure["worker"] == "w0" and any("stuck process: its process is stopped" in line for line in failure["evidence"])
    assert [e["state"] for e in run.kind("agent") if e.who == "lead"] == ["up"], "it outlived the rank that started it"
    assert not still_running(run.pids, 15.0), "and ended with the run"
    assert_invariants(run, steps=60)
