"""The controller is killed, for real and at a chosen line; another one takes over from the commit record and the workers that wait.

Controllers and workers are forked from one process that has done the imports, so a takeover is what it costs and not an import.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.support.runs import QUIET, ROOT, SFT, Finished, config, gone, shared_memory
from tests.test_exact import BASE, SHAPES, by_position, undisturbed
from tests.test_faults import assert_invariants
from tests.test_plan_cli import TOKEN, survivors

from everstep.cluster import forked, takeover
from everstep.cluster.forked import ForkedHost
from everstep.config.check import check_plan
from everstep.config.schema import Config
from everstep.driver import run
from everstep.errors import BadInput, NotEnoughReplicas
from everstep.recovery import rendezvous
from everstep.recovery.commitlog import CommitLog
from everstep.recovery.desk import Desk
from everstep.recovery.view import Kind
from everstep.telemetry.events import EventLogError, read_events
from everstep.telemetry.status import status

pytestmark = [pytest.mark.timeout(200)]

STEPS, STEP = 12, 4
GRACE = ["recovery.controller_grace_s=20", f"sft.steps={STEPS}"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_the_record_is_durable(step: int) -> None:
    write = CommitLog.write
    CommitLog.write = lambda self, r: die() if r.kind is Kind.COMMIT and r.step == step else write(self, r)  # type: ignore[method-assign]


def after_the_record_before_anybody_is_told(step: int) -> None:
    write = CommitLog.write

    def killed(self, record):
        write(self, record)
        if record.kind is Kind.COMMIT and record.step == step:
            die()

    CommitLog.write = killed  # type: ignore[method-assign]


def after_one_rank_was_told(step: int) -> None:
    """Of the others each learns it from the next coordinator."""
    from everstep.recovery.server import _Session

    put, told = _Session.put, []

    def killed(self, message):
        record = message.get("record", {})
        if record.get("kind") == "commit" and record.get("step") == step:
            if told:
                time.sleep(0.3)  # until the first one has it
                die()
            told.append(self.worker)
        put(self, message)

    _Session.put = killed  # type: ignore[method-assign]


def between_two_steps(step: int) -> None:
    begin = Desk.begin
    Desk.begin = lambda self, k, *args: die() if k == step + 1 else begin(self, k, *args)  # type: ignore[method-assign]


def while_the_ranks_compute(step: int) -> None:
    from everstep.cluster.controller.controller import Controller

    entered = Controller._phase_entered

    def killed(self, worker, k, phase):
        if (k, phase) == (step, "compute"):
            die()
        entered(self, worker, k, phase)

    Controller._phase_entered = killed  # type: ignore[method-assign]


def in_the_middle_of_a_save(step: int) -> None:
    from everstep.checkpoint import manifest

    manifest.publish = lambda *args, **kwargs: die()  # type: ignore[assignment]


def while_a_spare_heals(step: int) -> None:
    from everstep.cluster.controller.controller import Controller

    entered = Controller._phase_entered

    def killed(self, worker, k, phase):
        if phase == "heal":
            die()
        entered(self, worker, k, phase)

    Controller._phase_entered = killed  # type: ignore[method-assign]


def _controller(conf: Config, moment: Callable[[int], None] | None, attach: bool) -> None:
    if moment:
        moment(STEP)
    os._exit(run(conf, host=ForkedHost, attach=attach))


def start(conf: Config, moment: Callable[[int], None] | None = None, attach: bool = False):
    """A controller in a process of its own."""
    process = forked.context().Process(target=_controller, args=(conf, moment, attach))
    process.start()
    return process


def end(process, within_s: float = 60.0) -> int:
    process.join(within_s)
    assert process.exitcode is not None, "the controller did not end"
    return int(process.exitcode)


def take_over(conf: Config, *moments: Callable[[int], None]) -> Finished:
    """A controller that is killed at each moment, and then one that finishes the run."""
    for attach, moment in enumerate(moments):
        assert end(start(conf, moment, bool(attach))) == -signal.SIGKILL, moment.__name__
    assert end(start(conf, attach=True)) == 0
    folder = Path(conf.run_dir)
    done = Finished(folder, read_events(folder / "events"))
    assert gone(done.pids) and rendezvous.find(folder) is None
    return done


MOMENTS = [before_the_record_is_durable, after_the_record_before_anybody_is_told, after_one_rank_was_told, between_two_steps, while_the_ranks_compute]


@pytest.mark.parametrize("moment", MOMENTS)
def test_no_committed_step_is_lost_and_no_sample_used_twice(moment, model, tmp_path):
    conf = config(SFT, tmp_path / "run", *BASE, *GRACE, f"model.path={model}", "layout.replicas=2", "layout.spares=0")
    done = take_over(conf, moment)
    assert_invariants(done, steps=STEPS)
    assert by_position(done, 2) == undisturbed(model, "", f"sft.steps={STEPS}")
    (takeover,) = done.kind("takeover")
    assert takeover["members"] == [0, 1] and takeover["seconds"] < 5
    assert takeover.step == STEP - (moment in (before_the_record_is_durable, while_the_ranks_compute))
    assert not done.kind("death") and len(done.kind("form")) == 2  # nobody was formed anew


@pytest.mark.full
@pytest.mark.parametrize("shape", ["tp2", "pp2"])
def test_replicas_of_two_ranks_and_two_controllers_one_after_the_other(shape, model, tmp_path):
    conf = config(SFT, tmp_path / "run", *BASE, *GRACE, *SHAPES[shape], f"model.path={model}", "layout.spares=0")
    done = take_over(conf, after_one_rank_was_told, while_the_ranks_compute_later)
    assert_invariants(done, steps=STEPS)
    assert by_position(done, 2) == undisturbed(model, shape, f"sft.steps={STEPS}")
    assert [t["incarnation"] for t in done.kind("takeover")] == [2, 3]
    assert not done.kind("death")
    again = len(done.kind("form")) - 4
    assert again in (0, 2), "who had its order while its partner had not waits for it inside a collective: that replica is formed anew"


def while_the_ranks_compute_later(step: int) -> None:
    while_the_ranks_compute(step + 3)


@pytest.mark.parametrize("moment", [in_the_middle_of_a_save, pytest.param(while_a_spare_heals, marks=pytest.mark.full)])
def test_in_the_middle_of_a_save_or_a_heal(moment, model, tmp_path):
    more = ["checkpoint.every_steps=5", "checkpoint.asynchronous=false"] if moment is in_the_middle_of_a_save else [
        "layout.spares=2", "faults=[{step: 2, phase: compute, kind: kill, replica: 1}]"]
    conf = config(SFT, tmp_path / "run", *BASE, *GRACE, f"model.path={model}", "layout.replicas=2", "layout.spares=0", *more)
    done = take_over(conf, moment)
    assert_invariants(done, steps=STEPS)
    assert by_position(done, len(done.kind("commit")[-1]["members"])) == undisturbed(model, "", f"sft.steps={STEPS}")
    if moment is in_the_middle_of_a_save:
        saved = [s.step for s in done.kind("save")]
        assert 5 < saved[0] < 10, "the one that was lost is made up for at once"
        assert not list(done.folder.glob("checkpoints/*.partial"))


def test_a_rank_that_dies_with_its_controller_is_replaced_by_a_spare(model, tmp_path):
    conf = config(SFT, tmp_path / "run", *BASE, *GRACE, f"model.path={model}", "layout.replicas=2", "layout.spares=1", "sft.steps=24")
    assert end(start(conf, before_the_record_is_durable)) == -signal.SIGKILL
    handle = rendezvous.find(Path(conf.run_dir)).host
    os.kill(handle["pids"]["w1"], signal.SIGKILL)
    assert end(start(conf, attach=True)) == 0
    done = Finished(Path(conf.run_dir), read_events(Path(conf.run_dir) / "events"))
    assert_invariants(done, steps=24)
    (takeover,), (death,), (used,) = done.kind("takeover"), done.kind("death"), done.kind("spare_used")
    assert takeover["members"] == [0] and death["worker"] == "w1" and used["spare"] == "w2"
    assert by_position(done, 2) == undisturbed(model, "", "sft.steps=24")
    assert gone(done.pids)


def while_a_process_is_started_in_the_place_of_a_dead_one(step: int) -> None:
    from everstep.cluster.controller.crew import Crew

    Crew.start_in_place_of = lambda self, worker: die()  # type: ignore[assignment, method-assign, misc, return-value]


@pytest.mark.full
def test_a_replica_that_was_out_already_is_formed_once_by_the_next_controller(model, tmp_path):
    """Its death is in the log, and its place is empty: the next controller hears of it twice, fills the place and forms the replica."""
    conf = config(SFT, tmp_path / "run", *BASE, *GRACE, f"model.path={model}", "layout.replicas=2", "layout.spares=0", "sft.steps=60",
                  "recovery.restart_attempts=3", "faults=[{step: 2, phase: compute, kind: kill, replica: 1}]")
    done = take_over(conf, while_a_process_is_started_in_the_place_of_a_dead_one)
    assert_invariants(done, steps=60)
    (takeover,), (death,) = done.kind("takeover"), done.kind("death")
    assert takeover["members"] == [0] and death["worker"] == "w1" and death.t_wall < takeover.t_wall
    assert done.kind("commit")[-1]["members"] == [0, 1]
    assert [e["build"] for e in done.kind("form") if e["replica"] == 1] == [0, 1]
    assert by_position(done, 2) == undisturbed(model, "", "sft.steps=60")


def test_a_commit_that_only_a_rank_remembers_stands(model, tmp_path):
    """The machine lost the tail of the record; the ranks, who applied the step, did not."""
    conf = config(SFT, tmp_path / "run", *BASE, *GRACE, f"model.path={model}", "layout.replicas=2", "layout.spares=0")
    assert end(start(conf, between_two_steps)) == -signal.SIGKILL
    log = Path(conf.run_dir) / "commits.log"
    lines = log.read_bytes().splitlines(keepends=True)
    last = next(i for i, line in enumerate(lines) if b'"kind":"commit"' in line and f'"step":{STEP},'.encode() in line)
    log.write_bytes(b"".join(lines[:last]) + lines[last][:-7])  # torn
    assert end(start(conf, attach=True)) == 0
    done = Finished(Path(conf.run_dir), read_events(Path(conf.run_dir) / "events"))
    assert_invariants(done, steps=STEPS)
    assert done.kind("takeover")[0].step == STEP
    assert by_position(done, 2) == undisturbed(model, "", f"sft.steps={STEPS}")


def test_without_another_controller_everything_ends_after_the_grace(model, tmp_path):
    conf = config(SFT, tmp_path / "run", *BASE, f"model.path={model}", "layout.replicas=2", "recovery.controller_grace_s=1.5")
    assert end(start(conf, while_the_ranks_compute)) == -signal.SIGKILL
    died = time.monotonic()
    assert "2 of its ranks live and wait" in status(conf.run_dir).cause
    who = {e.pid: e.who for e in read_events(Path(conf.run_dir) / "events") if e.who != "lead"}
    assert {"w0", "w1"} <= set(who.values()) and gone(set(who), within_s=10) and time.monotonic() - died > 0.5, "their agent too"
    told = read_events(Path(conf.run_dir) / "events")
    if any(e.who == "lead" and e.event == "agent" and e["state"] == "up" for e in told):  # on a busy machine it may come too late to be told of them
        ended = {e["worker"] for e in told if e.who.startswith("agent-") and e.event == "rank_end"}
        assert ended == {"w0", "w1"}, "it watched on, and wrote down their ends"
    assert status(conf.run_dir).cause.endswith("; continue with resume=auto")
    said = [e for e in read_events(Path(conf.run_dir) / "events") if e.event == "error"]
    assert len(said) == 2 and all("recovery.controller_grace_s" in e["message"] for e in said)
    with pytest.raises(NotEnoughReplicas, match="no living replica holds step 3"):
        run(conf, host=ForkedHost, attach=True)


def test_what_attach_refuses_leaves_the_workers_alone(model, tmp_path):
    conf = config(SFT, tmp_path / "run", *BASE, *GRACE, f"model.path={model}", "layout.replicas=2", "layout.spares=0")
    with pytest.raises(BadInput, match="there is no such folder"):
        run(conf, host=ForkedHost, attach=True)
    assert end(start(conf, between_two_steps)) == -signal.SIGKILL
    with pytest.raises(BadInput, match=r"started with another optimizer\.lr"):
        run(config(SFT, tmp_path / "run", *BASE, *GRACE, f"model.path={model}", "layout.replicas=2", "layout.spares=0", "optimizer.lr=0.5"),
            host=ForkedHost, attach=True)
    with pytest.raises(BadInput, match="give one of them"):
        run(conf, host=ForkedHost, attach=True, clean=True)
    first = start(conf, attach=True)
    while not read_kind(tmp_path, "takeover"):
        assert first.is_alive()
        time.sleep(0.01)
    with pytest.raises(BadInput, match="another coordinator runs in this folder"):
        run(conf, host=ForkedHost, attach=True)
    assert end(first) == 0


def refuses(step: int) -> None:
    """As if the commit record had no state of the recipe, which is found out once the workers obey the new controller."""

    def decide(*args):
        raise BadInput("--attach: refused")

    takeover.decide = decide  # type: ignore[assignment]


def test_a_takeover_that_is_refused_leaves_the_workers_waiting_for_another_one(model, tmp_path):
    conf = config(SFT, tmp_path / "run", *BASE, *GRACE, f"model.path={model}", "layout.replicas=2", "layout.spares=0", "recovery.memory_checkpoint_every=2")
    assert end(start(conf, between_two_steps)) == -signal.SIGKILL
    assert end(start(conf, refuses, attach=True)) == 1
    found = rendezvous.find(tmp_path / "run")
    assert found is not None and found.incarnation == 2 and shared_memory(tmp_path / "run"), "where they are found, and their copies"
    assert not read_kind(tmp_path, "run_end") and [e["message"] for e in read_kind(tmp_path, "error")] == ["--attach: refused"]
    assert end(start(conf, attach=True)) == 0
    done = Finished(tmp_path / "run", read_events(tmp_path / "run" / "events"))
    assert_invariants(done, steps=STEPS)
    assert by_position(done, 2) == undisturbed(model, "", f"sft.steps={STEPS}")
    assert not done.kind("death") and len(done.kind("form")) == 2 and gone(done.pids)


def read_kind(folder: Path, kind: str) -> list:
    with contextlib.suppress(EventLogError):  # not begun yet
        return [e for e in read_events(folder / "run" / "events") if e.event == kind]
    return []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["recovery.controller_restarts=1"], "with recovery.controller_grace_s=0 the workers end with their controller"),
        (["recovery.controller_grace_s=5", "recovery.enabled=false", "layout.spares=0"], "which recovery.enabled=false does not survive"),
        (["recovery.controller_grace_s=5", "rollout.engines=1"], "rollout engines end with their controller"),
        (["recovery.controller_grace_s=5", "launcher=local", "layout.replicas=1", "layout.spares=0"], "rank 0 is the controller"),
    ],
)
def test_what_cannot_work_is_refused(overrides, said, tmp_path):
    with pytest.raises(BadInput, match=re.escape(said)):
        check_plan(config(SFT, tmp_path / "run", *overrides))


# -- through Ray, as a user starts it ------------------------------------------------------------------------------------------------


def _commits(folder: Path) -> int:
    lead = folder / "events" / "lead.jsonl"
    return lead.read_text().count('"event":"commit"') if lead.exists() else 0


def _until(condition: Callable[[], bool], process: subprocess.Popen, within_s: float = 240.0) -> None:
    end_at = time.monotonic() + within_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_at
        time.sleep(0.02)


REFUSES = """
import sys
from everstep import cli
from everstep.cluster import takeover
from everstep.errors import BadInput
def decide(*args): raise BadInput("--attach: refused")
takeover.decide = decide
sys.exit(cli.run(sys.argv[1:]))
"""
LATE_KILLS = """
import sys, time
from everstep import cli
from everstep.cluster.ray.host import RayHost
end = RayHost.end
RayHost.end = lambda self, worker: (time.sleep(6.0), end(self, worker))[1]
sys.exit(cli.run(sys.argv[1:]))
"""


@contextlib.contextmanager
def training(*overrides: str, program: tuple[str, ...] = ("-m", "everstep")):
    """``everstep train`` in a session of its own, with a token by which whatever it leaves is found."""
    token = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, *program, "train", SFT, *QUIET, "checkpoint.at_end=false", *overrides], cwd=ROOT, text=True,
        env=os.environ | {TOKEN: token, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )
    try:
        yield process, token
    finally:
        for left in survivors(token, process.pid):
            os.kill(int(left.split()[0]), signal.SIGKILL)
        process.communicate(timeout=10)


@pytest.mark.full
def test_through_ray_a_killed_controller_is_followed_by_another_one_by_itself(tmp_path):
    steps = 60
    with training(f"run_dir={tmp_path}/run", f"sft.steps={steps}", "layout.replicas=2", "layout.spares=0", "train.verify_every=1000",
                  "recovery.controller_grace_s=60", "recovery.controller_restarts=1") as (process, token):
        _until(lambda: _commits(tmp_path / "run") >= 8, process)
        os.kill(rendezvous.find(tmp_path / "run").pid, signal.SIGKILL)
        assert process.wait(120) == 0, process.communicate()
        assert "killed by SIGKILL; another one takes over" in process.communicate()[1]
        done = Finished(tmp_path / "run", read_events(tmp_path / "run" / "events"))
        assert_invariants(done, steps=steps)
        assert len(done.kind("takeover")) == 1 and len(done.kind("form")) == 2
        assert survivors(token, process.pid) == [] and gone(done.pids)


@pytest.fixture
def heeds_hangups():
    """Also where these tests run under nohup, whose children ignore them, and a supervisor lets them be."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGHUP])
def test_who_stops_it_while_the_controller_comes_up_has_stopped_it(number, tmp_path, heeds_hangups):
    with training(f"run_dir={tmp_path}/run", "layout.replicas=2", "layout.spares=0", "recovery.controller_grace_s=60",
                  "recovery.controller_restarts=1") as (process, token):
        _until(lambda: psutil.Process(process.pid).children(), process)
        process.send_signal(number)
        assert process.wait(60) == 130 and survivors(token, process.pid) == []
        assert number == signal.SIGINT or f"interrupted by {number.name}" in process.communicate()[1]


@pytest.mark.full
def test_through_ray_who_stops_it_while_another_controller_comes_up_has_stopped_it(tmp_path):
    with training(f"run_dir={tmp_path}/run", "sft.steps=5000", "layout.replicas=2", "layout.spares=0", "recovery.controller_grace_s=10",
                  "recovery.controller_restarts=3") as (process, _):
        _until(lambda: _commits(tmp_path / "run") >= 4, process)
        first = rendezvous.find(tmp_path / "run").pid
        os.kill(first, signal.SIGKILL)
        _until(lambda: [p for p in psutil.Process(process.pid).children() if p.pid != first], process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        told = process.communicate()[1]
        assert told.count("another one takes over") == 1 and "interrupted by SIGTERM; the controller was killed by SIGTERM; its workers wait 10 s" in told


@pytest.mark.full
def test_through_ray_nothing_is_left_after_the_grace(tmp_path):
    before = {*shared_memory(tmp_path / "run"), *glob.glob("/tmp/evs-*")}
    with training(f"run_dir={tmp_path}/run", "sft.steps=5000", "layout.replicas=2", "layout.spares=1", "recovery.controller_grace_s=4") as (process, token):
        _until(lambda: _commits(tmp_path / "run") >= 3, process)
        pids = {e.pid for e in read_events(tmp_path / "run" / "events") if e.who != "lead"}
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        time.sleep(1)
        assert survivors(token, process.pid)
        end_at = time.monotonic() + 40
        while left := survivors(token, process.pid):
            assert time.monotonic() < end_at, left
            time.sleep(0.2)
        assert gone(pids, within_s=0) and rendezvous.find(tmp_path / "run") is None
    assert {*shared_memory(tmp_path / "run"), *glob.glob("/tmp/evs-*")} <= before


@pytest.mark.full
@pytest.mark.timeout(560)
def test_through_ray_a_rank_that_is_expelled_and_not_killed_yet_leaves_the_others_alone(tmp_path):
    """Its grace is over before it is killed (a diagnosis takes seconds). It shares a placement group with those who go on."""
    with training(f"run_dir={tmp_path}/run", "sft.steps=5000", "layout.replicas=3", "layout.spares=0", "train.verify_every=5",
                  "recovery.controller_grace_s=1.5", "recovery.heartbeat_s=0.2", "recovery.silence_s=2", "recovery.fence_s=1.5",
                  "faults=[{step: 5, phase: compute, kind: partition, replica: 1}]", program=("-c", LATE_KILLS)) as (process, token):
        _until(lambda: bool(read_kind(tmp_path, "expel")), process)
        before = _commits(tmp_path / "run")
        _until(lambda: _commits(tmp_path / "run") > before + 10, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, process.communicate()
        done = Finished(tmp_path / "run", read_events(tmp_path / "run" / "events"))
        (death,), (expel,), last = done.kind("death"), done.kind("expel"), done.kind("commit")[-1]
        assert expel.t_wall - death.t_wall > 4.0, "the grace was over before it was killed"
        assert last["members"] == [0, 2]
        assert_invariants(done, steps=last.step)
        assert survivors(token, process.pid) == [] and gone(done.pids)


@pytest.mark.full
@pytest.mark.timeout(560)
def test_through_ray_an_attempt_to_take_over_that_is_refused_ends_nobody(tmp_path):
    """Beside a living run, of which it writes down nothing; and after the controller's death, so that another one may come."""
    lead = tmp_path / "run" / "events" / "lead.jsonl"
    overrides = [f"run_dir={tmp_path}/run", "sft.steps=5000", "layout.replicas=2", "layout.spares=0", "train.verify_every=5", "recovery.controller_grace_s=150"]
    with training(*overrides) as (process, token):
        _until(lambda: _commits(tmp_path / "run") >= 3, process)
        with training(*overrides, "--attach") as (beside, _):
            assert beside.wait(120) == 2
            assert "another coordinator runs in this folder" in beside.communicate()[1]
        before = _commits(tmp_path / "run")
        _until(lambda: _commits(tmp_path / "run") >= before + 5, process)
        assert {e.pid for e in read_events(lead.parent) if e.who == "lead"} == {process.pid}
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        with training(*overrides, "--attach", program=("-c", REFUSES)) as (refused, _):
            assert refused.wait(120) == 2
            assert "--attach: refused" in refused.communicate()[1]
        with training(*overrides, "--attach") as (last, _):
            _until(lambda: bool(read_kind(tmp_path, "takeover")), last)
            before = _commits(tmp_path / "run")
            _until(lambda: _commits(tmp_path / "run") >= before + 5, last)
            last.send_signal(signal.SIGINT)
            assert last.wait(60) == 130, last.communicate()
        done = Finished(tmp_path / "run", read_events(lead.parent))
        assert_invariants(done, steps=done.kind("commit")[-1].step)
        assert len(done.kind("takeover")) == 1 and len(done.kind("form")) == 2 and not done.kind("death")
        assert survivors(token, process.pid) == [] and gone(done.pids)
