"""Fault schedules on paper: what is refused, what a seed draws, and that the draw is one that the run survives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.support.runs import DEMO, SFT, config

from everstep.chaos import with_schedule
from everstep.config.check import check_plan
from everstep.config.schema import Fault
from everstep.errors import BadInput, ConfigError
from everstep.recovery.chaos import budget, draw, parse_kinds
from everstep.recovery.faults import DEADLY, ENGINE_PHASES, PHASES, STAGES, describe

KINDS = sorted(PHASES.keys() - {"error"})
PPO = ["recipe=ppo", "rl.advantage=gae", "rl.passes=2"]


@pytest.mark.parametrize(
    ("file", "faults", "says"),
    [
        (SFT, "{step: 3, kind: nan, phase: vote}", "kind=nan makes no sense with phase=vote; it can have compute"),
        (SFT, "{step: 3, kind: error, phase: reduce}", "kind=error makes no sense with phase=reduce; it can have compute, rollout"),
        (SFT, "{step: 3, kind: hang, phase: spare}", "kind=hang makes no sense with phase=spare"),
        (SFT, "{step: 3, kind: hang, delay_s: 0.1}", "delay_s=0.1: hang happens at a point of the program"),
        (SFT, "{step: 3, phase: spare, rank: 1}", "rank=1 does not exist; layout.spares=1"),
        (SFT, "{step: 3, phase: spare, replica: 1}", "replica=1: phase=spare strikes idle spares"),
        (SFT, "{step: 3, phase: rollout}", "no rollout precedes step 3, recipe=sft has none"),
        (DEMO, "{step: 12, phase: rollout}", "no rollout precedes step 12; those of 11, 13, 15, ... have one"),
        (SFT, "{step: 3, phase: save}", r"step 3 is not saved; steps 60 are \(checkpoint"),
        (SFT, "{step: 3, phase: heal}", "replica 0 heals only after it lost a rank"),
        (SFT, "{step: 3, phase: heal}, {step: 2, replica: 1}", "replica 0 heals only after it lost a rank"),
        (SFT, "{step: 61}", "step=61 never comes"),
        (SFT, "{step: 3, phase: salvage}, {step: 3, phase: apply, replica: 1}", "nobody else dies before the vote, so nothing is salvaged"),
        (SFT, "{step: 3, kind: exit, hold: true}", "hold=true: kind=exit in phase=compute cannot be held"),
        (SFT, "{step: 3, phase: commit, hold: true}", "hold=true: kind=kill in phase=commit cannot be held"),
    ],
)
def test_a_fault_that_could_never_happen_is_refused(tmp_path, file, faults, says):
    conf = config(file, tmp_path, f"faults=[{faults}]", "layout.spares=1", "warmup.steps=10", "rl.updates_per_pass=2")
    with pytest.raises(ConfigError, match=f"^faults.0.*{says}"):
        check_plan(conf, {})


def test_what_would_stop_the_one_replica_of_launcher_local_for_good_is_refused(tmp_path):
    for kind in ("partition", "gil", "hang"):
        conf = config(SFT, tmp_path, "layout.replicas=1", "launcher=local", f"faults=[{{step: 3, kind: {kind}}}]")
        with pytest.raises(ConfigError, match=f"kind={kind} would stop launcher=local for good"):
            check_plan(conf, {})


def test_deadlines_that_heartbeats_could_not_keep_are_refused(tmp_path):
    for key in ("progress_timeout_s", "fence_s"):
        with pytest.raises(ConfigError, match=f"recovery.{key}=1.5 must be more than twice recovery.heartbeat_s=1.0"):
            check_plan(config(SFT, tmp_path, f"recovery.{key}=1.5"), {})


def test_possible_faults_of_every_kind_and_phase_pass(tmp_path):
    layout = ["rollout.engines=1", "layout.spares=2", "layout.replicas=3", "warmup.samples_per_step=384", "rl.iterations=20", "warmup.steps=10", "checkpoint.every_steps=5"]
    plan = [{"step": 11, "phase": phase, "kind": kind} for kind, phases in PHASES.items() for phase in phases if phase not in ("save", "rollout", "logprobs", "values")]
    plan += [{"step": 11, "replica": 1}]  # somebody whose slots are salvaged
    plan += [{"step": 15, "phase": "save", "kind": kind} for kind, phases in PHASES.items() if "save" in phases]
    check_plan(config(DEMO, tmp_path, *layout, f"faults={plan}"), {})
    plan = [{"step": 11, "phase": "rollout", "kind": kind} for kind, phases in PHASES.items() if "rollout" in phases]
    check_plan(config(DEMO, tmp_path, *layout[1:], f"faults={plan}"), {})
    plan = [{"step": 11, "phase": phase, "kind": kind} for kind, phases in PHASES.items() for phase in phases & {"logprobs", "values"}]
    check_plan(config(DEMO, tmp_path, *layout[1:], *PPO, f"faults={plan}"), {})


def test_stages_that_only_some_recipes_have_are_struck_there(tmp_path):
    conf = config(DEMO, tmp_path, "layout.replicas=3", "layout.spares=4", "rl.iterations=20", "warmup.steps=10", "warmup.samples_per_step=384", *PPO)
    planned = [fault for seed in range(8) for fault in with_schedule(conf, seed, 2.0, KINDS, reckless=True).faults]
    assert {f.phase for f in planned} >= STAGES
    firsts = {11 + 4 * n for n in range(20)}  # two passes of the actor, two of the critic
    assert all(f.step in firsts for f in planned if f.phase in STAGES)


def test_a_seed_draws_the_same_schedule_and_another_one_another(tmp_path):
    conf = config(SFT, tmp_path, "layout.replicas=3", "layout.spares=3", "checkpoint.every_steps=10")
    first = draw(conf, 7, 0.3, KINDS)
    assert first and first == draw(conf, 7, 0.3, KINDS)
    assert first != draw(conf, 8, 0.3, KINDS)


def test_what_is_drawn_can_happen_and_is_survived(tmp_path):
    """For many seeds: one replica is never struck, no more die than the spares and the minimum allow, and every fault passes the check."""
    seen: Counter[tuple[str, str]] = Counter()
    conf = config(DEMO, tmp_path, "layout.replicas=3", "layout.tp=2", "layout.spares=4", "recovery.min_replicas=2", "warmup.steps=10", "warmup.samples_per_step=384",
                  "rl.iterations=20", "rl.kl_coef=0", "checkpoint.every_steps=5", "rollout.engines=2", "rollout.engine_restarts=3")
    assert budget(conf) == 5
    for seed in range(60):
        planned = with_schedule(conf, seed, 0.8, KINDS, reckless=False)
        assert sum(f.phase in ENGINE_PHASES for f in planned.faults) <= 3
        deadly = [f for f in planned.faults if f.kind in DEADLY and f.phase not in ENGINE_PHASES]
        assert len(deadly) <= 5
        assert len({f.replica for f in deadly if f.phase != "spare"}) < 3
        assert [f.step for f in planned.faults] == sorted(f.step for f in planned.faults)
        seen.update((f.kind, f.phase) for f in planned.faults)
    assert {kind for kind, _ in seen} == set(KINDS)
    assert {phase for _, phase in seen} == {phase for phases in PHASES.values() for phase in phases} - {"salvage", "rollout", "logprobs", "values"}


def test_several_faults_in_one_step_strike_in_salvage_too_and_some_victims_are_held(tmp_path):
    conf = config(SFT, tmp_path, "sft.steps=2", "optimizer.schedule=constant", "layout.replicas=4", "layout.spares=4")
    drawn = [with_schedule(conf, seed, 6.0, KINDS, reckless=False) for seed in range(40)]
    for planned in drawn:
        check_plan(planned, {})
    faults = [f for planned in drawn for f in planned.faults]
    assert any(f.phase == "salvage" for f in faults) and {f.hold for f in faults if f.kind == "kill"} == {True, False}


def test_reckless_draws_at_the_rate_that_was_asked_for(tmp_path):
    conf = config(SFT, tmp_path, "layout.spares=0", "sft.steps=2000")
    faults = draw(conf, 1, 0.5, ["kill"], reckless=True)
    assert 900 < len(faults) < 1100 and {f.replica for f in faults} == {0, 1}
    assert len(draw(conf, 1, 0.5, ["kill"])) == 1


@pytest.mark.parametrize(
    ("kinds", "rate", "overrides", "says"),
    [
        ("kill,explode", 0.1, [], "explode is no kind of fault; there are kill, stop, "),
        ("", 0.1, [], "nothing is no kind of fault"),
        ("kill,error", 0.1, [], "no run survives error"),
        ("kill", 0.0, [], "--rate 0 must be a number above 0"),
        ("kill", 0.1, ["layout.replicas=1"], "survive no death; raise layout"),
        ("kill", 0.1, ["recovery.min_replicas=2"], "survive no death; raise layout"),
        ("kill", 0.1, ["layout.replicas=1", "launcher=local"], "use launcher=ray"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_bad_input(tmp_path, kinds, rate, overrides, says):
    with pytest.raises(BadInput, match=says):
        with_schedule(config(SFT, tmp_path, *overrides), 0, rate, parse_kinds(kinds, False), False)


def test_a_fault_is_told_in_one_line():
    assert describe(Fault(step=3, kind="gil", phase="vote", replica=1, delay_s=0.5)) == "step 3: gil rank 1/0, in vote after 0.5 s"
    assert describe(Fault(step=3, phase="spare", rank=1)) == "step 3: kill spare 1, idle"


def test_the_command_line_refuses_before_anything_starts(tmp_path, capsys):
    from everstep import cli

    assert cli.run(["chaos", SFT, "--faults", "explode", f"run_dir={tmp_path}/run"]) == 2
    assert "explode is no kind of fault" in capsys.readouterr().err
    assert not Path(tmp_path / "run").exists()
