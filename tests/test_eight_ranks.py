"""Jobs of eight ranks, in the shapes for which people ask for a node of eight devices: replicas of four, of eight, seven of one and a spare.

Whole runs as in test_exact.py and test_rl_faults.py, with tiny models on the CPU: deaths of one rank, of two, and of a whole replica; in exact
mode the final weights are, to the last bit, those of a run in which nobody died. What such jobs take on devices is not asked here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.support.models import like_example
from tests.support.runs import DEMO, PPO, SFT, Finished, config, finish, gone
from tests.test_exact import BASE, Row, by_position
from tests.test_faults import assert_invariants

from everstep.cluster.forked import ForkedHost
from everstep.telemetry.recoveries import survivor_inside

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

STEPS = 16
FOUR = ("layout.tp=2", "layout.pp=2", "engine.sequence_parallel=true")
TWO = ("layout.tp=2", "engine.sequence_parallel=true")
LORA = ("layout.dp=2", "layout.tp=2", "layout.pp=2", "train.micro_batch_size=2", "lora.rank=4", "lora.alpha=8")
#: Who leaves is waited for before the next step: with more processes than cores a run this short would be over before a replica has formed again.
WAITS = "recovery.below_minimum=wait"
PATIENT = ("recovery.silence_s=20", "recovery.progress_timeout_s=60")  # more processes than cores


def also(replica: int, rank: int) -> Row:
    """Another one in the same step, whatever it does there."""
    return Row("compute", replica, rank=rank, hold=False)


@dataclasses.dataclass(frozen=True)
class Job:
    """``left``: replicas that contribute at the end."""

    name: str
    layout: tuple[str, ...]
    replicas: int
    spares: int
    faults: tuple[Row, ...]
    left: int

    def __str__(self) -> str:
        return self.name


JOBS = [
    Job("two-replicas-of-tp2-pp2-lose-one", FOUR, 2, 1, (Row("reduce", 1, rank=3),), 2),
    Job("two-replicas-of-tp2-pp2-lose-two-of-one", FOUR, 2, 2, (Row("compute", 0), also(0, 2)), 2),
    Job("two-replicas-of-tp2-pp2-lose-one-of-two", FOUR, 2, 0, (Row("compute", 1), *(also(1, rank) for rank in (1, 2, 3))), 1),
    Job("seven-replicas-and-a-spare-lose-one", (), 7, 1, (Row("reduce", 3),), 7),
    Job("seven-replicas-and-a-spare-lose-two", (), 7, 1, (Row("reduce", 0), Row("compute", 6, step=6)), 6),
    Job("three-replicas-of-tp2-and-two-spares-lose-one", TWO, 3, 2, (Row("vote", 1, rank=1),), 3),
    Job("three-replicas-of-tp2-and-two-spares-lose-one-of-each-of-two", TWO, 3, 2, (Row("compute", 0), also(2, 1)), 3),
    Job("three-replicas-of-tp2-and-two-spares-lose-a-whole-one", TWO, 3, 2, (Row("compute", 2), also(2, 1)), 3),
    Job("adapters-on-dp2-tp2-pp2-and-a-spare-lose-one", LORA, 1, 1, (Row("compute", 0, rank=5, hold=False),), 1),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_training_survives_and_no_bit_changes(job: Job, model: Path, tmp_path: Path) -> None:
    same = [*BASE, *PATIENT, *job.layout, f"sft.steps={STEPS}", f"model.path={model}", "recovery.memory_checkpoint_every=2"]
    run = finish(config(SFT, tmp_path / "run", *same, f"layout.replicas={job.replicas}", f"layout.spares={job.spares}",
                        f"recovery.min_replicas={job.left}", WAITS, f"faults=[{', '.join(row.fault() for row in job.faults)}]"), host=ForkedHost)
    assert_invariants(run, steps=STEPS)
    fired = {(f["replica"], f["rank"]): f for f in run.kind("fault")}
    assert sorted(fired) == sorted((d["replica"], d["rank"]) for d in run.kind("death")) == sorted((row.replica, row.rank) for row in job.faults)
    assert all(survivor_inside(run.events, fired[row.replica, row.rank]) for row in job.faults if row.held)
    last = run.kind("commit")[-1]
    assert len(set(last["members"]) - set(last["healing"])) == job.left
    calm = finish(config(SFT, tmp_path / "calm", *same, "layout.replicas=1"), host=ForkedHost)
    assert by_position(run, job.left) == by_position(calm, 1)
    assert gone(run.pids)


LEARNING = [
    "recovery.exact=true", "warmup.steps=1", "warmup.samples_per_step=32", "rl.iterations=3", "rl.prompts_per_step=8", "rl.samples_per_prompt=4",
    "rl.eval_every=0", "rl.eval_before=false", "data.eval_source=null", "train.micro_batch_size=4", "rollout.samples_per_batch=8",
    "checkpoint.every_steps=0", "checkpoint.at_end=false", "recovery.heartbeat_s=0.2", "optimizer.schedule=constant", "recovery.memory_checkpoint_every=1",
    *PATIENT,
]


def learn(file: str, steps: int, folder: Path, *overrides: str) -> Finished:
    run = finish(config(file, folder, *LEARNING, *overrides), host=ForkedHost)
    assert_invariants(run, steps)
    assert gone(run.pids)
    return run


def test_grpo_of_one_replica_of_tp2_pp4_survives_a_kill(tmp_path: Path) -> None:
    """It goes back to the last copy in memory, a rank behind; a spare reads the dead rank's from its buddy."""
    path = like_example(tmp_path / "model", num_hidden_layers=4, layer_types=["full_attention"] * 4)
    job = [f"model.path={path}", "layout.replicas=1", "layout.tp=2", "layout.pp=4", "engine.sequence_parallel=true", "rl.updates_per_pass=2"]
    run = learn(DEMO, 7, tmp_path / "run", *job, "layout.spares=1", f"faults=[{Row('compute', 0, rank=5, hold=False).fault()}]")
    assert [(d["replica"], d["rank"]) for d in run.kind("death")] == [(0, 5)]
    calm = learn(DEMO, 7, tmp_path / "calm", *job, "layout.spares=0", "faults=[]")
    assert by_position(run, 1) == by_position(calm, 1)


@pytest.mark.parametrize(("layout", "replicas", "victim"), [(FOUR, 1, (0, 2)), ((), 4, (2, 0))], ids=["one-of-tp2-pp2", "four-of-one"])
def test_ppo_with_four_spares_survives_two_kills(layout: tuple[str, ...], replicas: int, victim: tuple[int, int], tmp_path: Path) -> None:
    job = ["layout.pp=1", *layout, "critic.warmup=0"]
    replica, rank = victim
    faults = [row.fault() for row in (Row("compute", replica, rank=rank, hold=False, step=6), Row("compute", 0, hold=False, step=11))]
    run = learn(PPO, 13, tmp_path / "run", *job, f"layout.replicas={replicas}", "layout.spares=4", f"recovery.min_replicas={replicas}", WAITS,
                f"faults=[{', '.join(faults)}]")
    assert [(d["replica"], d["rank"]) for d in run.kind("death")] == [victim, (0, 0)]
    calm = learn(PPO, 13, tmp_path / "calm", *job, "layout.replicas=1", "layout.spares=0", "faults=[]")
    assert by_position(run, replicas) == by_position(calm, 1)
