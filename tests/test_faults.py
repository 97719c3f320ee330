"""Real processes, real signals, through everstep's own launcher and recipes. Every assertion reads the event log on disk."""

from __future__ import annotations

import pytest
from tests.support.runs import DEMO, SFT, config, finish, gone

from everstep.cluster.forked import ForkedHost
from everstep.errors import NotEnoughReplicas
from everstep.telemetry.history import check
from everstep.telemetry.recoveries import account, recoveries

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("ray_cluster")]

SHORT_SFT = ["sft.steps=12", "checkpoint.at_end=false"]


def assert_invariants(run, steps: int) -> None:
    """What must hold of every run, by the history checker; and that it is this run's ``steps`` that it looked at."""
    findings = check(run.folder)
    assert not [f for f in findings if f.held is False], findings
    assert all(f.held for f in findings if f.number not in (7, 10)), findings  # some of these runs write no checkpoint, most have no engines
    books = account(run.events)
    assert (books.first_step, books.last_step, books.committed) == (1, steps, steps)
    assert books.exact and books.samples_dropped == 0


def test_the_demonstration_survives_a_kill_in_the_middle_of_a_step(tmp_path):
    """The demo's core: GRPO, 2 replicas and a spare, SIGKILL during compute of step 8."""
    run = finish(config(DEMO, tmp_path / "run", "warmup.steps=5", "rl.iterations=9", "rl.prompts_per_step=16", "rl.eval_every=0",
                        "train.verify_every=1", "faults=[{step: 8, phase: compute, kind: kill, replica: 1, rank: 0}]"))
    assert_invariants(run, steps=14)
    (fault,), (death,) = run.kind("fault"), recoveries(run.events)
    assert death.injected and (death.replica, death.rank, death.step) == (1, 0, 8)
    killed = next(e.pid for e in run.events if e.who == fault["worker"])
    after = [e for e in run.events if e.pid == killed and e.t_wall > fault.t_wall + 1.0]
    assert after == []  # the signal was real
    (used,) = run.kind("spare_used")
    (join,) = run.kind("join")
    assert join["members"] == [0, 1]
    assert any(e.who == used["spare"] and e.event == "apply" and e.step == 14 for e in run.events)
    assert death.stall_s is not None and death.stall_s < 5 and death.full_strength_s is not None
    assert len(run.kind("verify")) >= 14 and all(v["equal"] for v in run.kind("verify"))
    assert gone(run.pids)


@pytest.mark.parametrize(
    ("phase", "minimum", "split"),
    [("reduce", 1, ["layout.tp=2", "engine.sequence_parallel=true"]), ("vote", 2, ["layout.cp=2"])],
)
@pytest.mark.full
def test_a_rank_of_a_replica_of_two_dies_and_its_peer_keeps_its_memory(tmp_path, phase, minimum, split):
    """2 replicas x TP2 or CP2 and a spare: the whole replica leaves the view, its living rank re-forms around the spare.

    With both replicas needed, it comes back within the step: its living rank takes part in one step in two lives.
    """
    run = finish(config(SFT, tmp_path / "run", *SHORT_SFT, *split, "layout.spares=1", "train.verify_every=1",
                        f"recovery.min_replicas={minimum}",
                        f"faults=[{{step: 4, phase: {phase}, kind: kill, replica: 1, rank: 0}}]"))
    assert_invariants(run, steps=12)
    (death,) = recoveries(run.events)
    assert (death.replica, death.rank) == (1, 0) and death.full_strength_s is not None
    lived = next(e.who for e in run.kind("form") if (e["replica"], e["rank"], e["build"]) == (1, 1, 0))
    again = [e for e in run.kind("form") if e["build"] == 1]
    assert {(e["replica"], e["rank"]) for e in again} == {(1, 0), (1, 1)}
    assert any(e.who == lived for e in again)
    assert all(v["equal"] for v in run.kind("verify"))
    assert gone(run.pids)


@pytest.mark.full
def test_deaths_of_a_replica_of_its_successor_while_healing_and_of_a_frozen_rank(tmp_path):
    """3 replicas, 3 spares: a kill; the spare killed while it heals; a SIGSTOP that only silence gives away."""
    run = finish(config(SFT, tmp_path / "run", "sft.steps=60", "checkpoint.at_end=false", "layout.replicas=3", "layout.spares=3",
                        "recovery.heartbeat_s=0.2", "recovery.silence_s=2.0", "sft.samples_per_step=60",
                        "faults=[{step: 3, phase: compute, kind: kill, replica: 2}, {step: 30, phase: compute, kind: stop, replica: 0}]"))
    assert_invariants(run, steps=60)
    causes = [d.cause for d in recoveries(run.events)]
    assert len(causes) == 2 and "silent for 2 s" in causes[1]
    assert run.kind("join") and run.kind("commit")[-1]["members"] == [0, 1, 2]
    assert gone(run.pids)


@pytest.mark.full
def test_both_ranks_of_a_replica_die_at_once_and_two_spares_take_their_places(tmp_path):
    run = finish(config(SFT, tmp_path / "run", "sft.steps=40", "checkpoint.at_end=false", "layout.tp=2", "layout.spares=2",
                        "faults=[{step: 4, phase: compute, kind: kill, replica: 1}, {step: 4, phase: compute, kind: kill, replica: 1, rank: 1}]"))
    assert_invariants(run, steps=40)
    assert len(recoveries(run.events)) == 2
    assert run.kind("join") and run.kind("commit")[-1]["members"] == [0, 1]
    assert gone(run.pids)


@pytest.mark.full
def test_with_one_replica_left_and_no_spare_training_goes_on_and_with_none_it_ends_resumable(tmp_path):
    conf = config(SFT, tmp_path / "run", "sft.steps=30", "checkpoint.every_steps=5", "layout.spares=0",
                  "faults=[{step: 7, phase: compute, kind: kill, replica: 0}, {step: 13, phase: compute, kind: kill, replica: 1}]")
    with pytest.raises(NotEnoughReplicas, match="no living replica holds step 12") as error:
        finish(conf)
    assert error.value.exit_code == 3
    again = finish(config(SFT, tmp_path / "run", "sft.steps=30", "layout.spares=0", "resume=must", "faults=[]"))
    books = account(again.events)
    assert books.exact and books.committed == 30 and books.steps_rolled_back == [11, 12]
    assert gone(again.pids)


def test_without_recovery_the_first_death_ends_the_run_resumable(tmp_path):
    with pytest.raises(NotEnoughReplicas, match=r"recovery\.enabled=false") as error:
        finish(config(SFT, tmp_path / "run", *SHORT_SFT, "layout.spares=0", "recovery.enabled=false",
                      "faults=[{step: 3, phase: compute, kind: kill, replica: 1}]"), host=ForkedHost)
    assert error.value.exit_code == 3


def test_below_the_minimum_without_a_spare_the_run_stops_resumable(tmp_path):
    with pytest.raises(NotEnoughReplicas, match="min_replicas=2"):
        finish(config(SFT, tmp_path / "run", *SHORT_SFT, "layout.spares=0", "recovery.min_replicas=2",
                      "faults=[{step: 3, phase: compute, kind: kill, replica: 1}]"), host=ForkedHost)
