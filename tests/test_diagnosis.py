"""What is written down before a rank is killed: real hangs, frozen processes and stuck interpreter locks, told from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.runs import SFT, Finished, config, finish
from tests.test_faults import assert_invariants

from everstep.cluster.forked import ForkedHost
from everstep.telemetry import diagnosis
from everstep.telemetry.diagnosis import behind, kernel_view

#: Worker, replica, step. The run of 30 steps is over long before the last one, which is stopped, could be read from outside: it is waited for.
VICTIMS = {"hang": ("w1", 1, 6), "gil": ("w2", 2, 14), "stop": ("w0", 0, 30)}


@pytest.fixture(scope="module")
def struck(tmp_path_factory) -> Finished:
    """One run in which three ranks stop to work in three ways, each in its compute. A virtual machine may stand still for a second: nobody is to be called
    stuck for that."""
    faults = ", ".join(f"{{step: {step}, phase: compute, kind: {kind}, replica: {replica}}}" for kind, (_, replica, step) in VICTIMS.items())
    return finish(config(
        SFT, tmp_path_factory.mktemp("struck") / "run", "layout.replicas=3", "layout.spares=3", "sft.steps=30", "recovery.heartbeat_s=0.2",
        "recovery.silence_s=4.5", "watch.agent_every_s=0.1", "watch.stuck_after_s=2.5", "recovery.progress_timeout_s=7", "checkpoint.at_end=false", f"faults=[{faults}]",
    ), host=ForkedHost)


def of(run: Finished, worker: str) -> Path:
    (event,) = [e for e in run.kind("diagnosis") if e["worker"] == worker]
    return Path(event["path"])


@pytest.mark.parametrize("kind", VICTIMS)
def test_each_is_diagnosed_before_it_is_killed(struck: Finished, kind: str) -> None:
    worker, replica, step = VICTIMS[kind]
    folder = of(struck, worker)
    assert folder.name == f"step-{step:06d}-{worker}"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["worker"] == worker and summary["ranks"][worker]["phase"] == "compute"
    assert [text.split(" for ")[0] for text in summary["behind"]] == [f"{replica}/0 in compute of step {step}"]
    death = next(e for e in struck.kind("death") if e["worker"] == worker)
    assert summary["cause"] == death["cause"] and ("no progress" in death["cause"]) == (kind == "hang")
    told = next(e for e in struck.kind("diagnosis") if e["worker"] == worker)
    killed = next(e for e in struck.kind("expel") if e["worker"] == worker)
    assert told.t_mono <= killed.t_mono, "it must be written before the process is gone"
    assert json.loads((folder / f"{worker}.kernel.json").read_text())["threads"]


def test_the_stacks_show_where_each_stood(struck: Finished) -> None:
    """The one that hangs: in the injected wait. The one with the stuck lock: its other thread in the C call that keeps it."""
    hung = (of(struck, "w1") / "w1.stacks").read_text()
    assert "victim.py" in hung and "most recent call first" in hung and "train_step" in hung
    stuck = (of(struck, "w2") / "w2.stacks").read_text()
    assert "victim.py" in stuck
    peers = [path.read_text() for path in of(struck, "w1").glob("*.stacks") if path.stem != "w1"]
    assert len(peers) >= 2 and any("link.py" in text or "transaction.py" in text for text in peers)


def test_only_who_is_killed_and_does_not_answer_gets_the_signal(struck: Finished) -> None:
    """A dump in C has killed healthy ranks: it reads frames of threads that run."""
    asked = {path.stem for path in (struck.folder / "logs" / "attempt-1").glob("*.stacks") if path.stat().st_size}
    assert asked == {"rank-002"}, "the one that keeps its interpreter lock"
    assert all("control" in path.read_text() for path in of(struck, "w2").glob("*.stacks") if path.stem != "w2"), "the others wrote theirs by themselves"


def test_a_stopped_process_is_seen_from_outside(struck: Finished) -> None:
    folder = of(struck, "w0")
    assert json.loads((folder / "w0.kernel.json").read_text())["State"].startswith("T")
    if shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable)):
        assert "train_step" in (folder / "w0.stacks").read_text()


def test_the_agent_of_the_node_tells_what_each_is_stuck_in_before_it_is_given_up(struck: Finished) -> None:
    """Of a process that is stopped or has its lock stuck it is sure; of one whose main thread waits its peers had to tell."""
    for kind, says in (("gil", "interpreter lock"), ("stop", "is stopped")):
        worker, replica, step = VICTIMS[kind]
        (told,) = [e for e in struck.kind("stuck") if e.who == "lead" and e["worker"] == worker and e["sure"]]
        assert (told["what"], told["replica"], told.step) == ("process", replica, step) and says in told["why"]
        assert told["says"].startswith(f"in compute of step {step}")
        (fault,) = [e for e in struck.kind("fault") if e["replica"] == replica and e.step == step]
        death = next(e for e in struck.kind("death") if e["worker"] == worker)
        assert fault.t_mono < told.t_mono < death.t_mono, "it is told before the silence is long enough"
        assert told.t_mono - fault.t_mono < 4.0
    for kind, (worker, _, step) in VICTIMS.items():
        paged = json.loads((of(struck, worker) / f"{worker}.page.json").read_text())
        assert (paged["page"]["phase"], paged["page"]["step"], paged["stuck"]["what"]) == ("compute", step, "process"), kind
        failure = next(e for e in struck.kind("failure") if e["worker"] == worker)
        assert failure["failure_class"] == "software" and any(line.startswith("stuck process: ") for line in failure["evidence"])
        assert any(line.startswith(f"its page: in compute of step {step}") for line in failure["evidence"])
    assert {e["worker"] for e in struck.kind("stuck") if e["sure"]} == {"w0", "w2"}, "nobody else is accused"


def test_the_flight_recorder_of_a_living_peer_is_there(struck: Finished) -> None:
    records = [json.loads(path.read_text()) for path in of(struck, "w1").glob("*.collectives.json")]
    assert records and any(entry["profiling_name"].startswith("gloo:") for record in records for entry in record["entries"])
    assert (of(struck, "w1") / "w1.collectives.json").exists(), "a rank that hangs still answers on its control thread"


def test_nothing_is_lost_by_it(struck: Finished) -> None:
    assert_invariants(struck, steps=30)
    assert any(str(of(struck, "w1")) in line for line in diagnosis.report(struck.folder))


def test_a_process_that_serves_no_interpreter_still_writes_its_stacks(tmp_path: Path) -> None:
    """faulthandler answers in C: the interpreter lock is held by a call that never returns."""
    code = ("import ctypes, sys, threading; from pathlib import Path; from everstep.telemetry import diagnosis; "
            "diagnosis.register(Path(sys.argv[1])); print('up', flush=True); mutex = ctypes.create_string_buffer(64); "
            "lock = ctypes.PyDLL(None).pthread_mutex_lock; lock(mutex); lock(mutex)")  # for ever; a signal ends a sleep, but not this
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "p.stacks")], stdout=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(diagnosis.SIGNAL)
        until = time.monotonic() + 5
        while not (text := (tmp_path / "p.stacks").read_text()).endswith("\n") and time.monotonic() < until:
            time.sleep(0.02)
        assert "most recent call first" in text and process.poll() is None, "and it lives on"
        process.send_signal(signal.SIGSTOP)
        while not kernel_view(process.pid)["State"].startswith("T") and time.monotonic() < until:
            time.sleep(0.01)
        assert kernel_view(process.pid)["State"].startswith("T")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert kernel_view(process.pid) == {}


def test_a_run_that_ends_waits_for_what_is_being_read_from_outside(tmp_path: Path) -> None:
    told = []

    def examine(worker: str, timeout_s: float, spy: bool) -> dict[str, str]:
        time.sleep(1.5 if spy else 0.0)  # py-spy on a machine that is busy
        return {"stacks": "all of them"} if spy else {}

    diagnosis_of = diagnosis.Diagnosis(tmp_path, lambda w, n: None, lambda w, m: True, examine, lambda w: tmp_path / "none", lambda *what: told.append(what))
    diagnosis_of.take("w0", "silent", 3, {"w0": {"replica": 0, "rank": 0, "step": 3, "phase": "compute", "since_s": 2.0}})
    assert not told
    diagnosis_of.close()
    assert told == [(tmp_path / "step-000003-w0", "w0", 3)] and (tmp_path / "step-000003-w0" / "w0.stacks").read_text() == "all of them"


def test_who_is_behind() -> None:
    def at(replica: int, step: int, phase: str) -> dict[str, object]:
        return {"replica": replica, "rank": 0, "step": step, "phase": phase, "since_s": 2.0}

    assert behind({"a": at(0, 5, "reduce"), "b": at(1, 5, "compute"), "c": at(-1, 0, "idle")}) == ["1/0 in compute of step 5 for 2.0 s"]
    assert behind({"a": at(0, 5, "idle"), "b": at(1, 5, "apply")}) == ["1/0 in apply of step 5 for 2.0 s"]
    assert behind({"a": at(0, 5, "reduce"), "b": at(1, 0, "idle")}) == ["0/0 in reduce of step 5 for 2.0 s"]
    assert behind({}) == []
