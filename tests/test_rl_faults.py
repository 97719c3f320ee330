"""Reinforcement learning under faults: whatever dies in whatever stage or update, the iteration is finished with the same samples.

Whole runs of ``everstep train`` with recipe ppo (and grpo), as in test_exact.py: in exact mode the final weights of actor and critic
are, to the last bit, those of a run in which nobody died. The last tests stop a whole run, and go on.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.support.launchers import trained
from tests.support.runs import PPO, QUIET, Finished, command, config, finish, gone
from tests.test_exact import by_position
from tests.test_faults import assert_invariants
from transformers import AutoModelForTokenClassification

from everstep.checkpoint import manifest
from everstep.cluster.forked import ForkedHost
from everstep.config.check import check_plan
from everstep.errors import EverstepError
from everstep.rl.stages import advantages, reward
from everstep.telemetry.events import read_events

pytestmark = [pytest.mark.timeout(300)]

WARM, PER_ITERATION, ITERATIONS = 1, 4, 3  # an iteration: 2 steps of the actor, 2 of the critic
FIRST = WARM + PER_ITERATION + 1           # first step of the second iteration: 6, 7 are the actor's, 8, 9 the critic's
STEPS = WARM + PER_ITERATION * ITERATIONS
SMALL = [
    "recovery.exact=true", "layout.pp=1", "warmup.steps=1", "warmup.samples_per_step=32", "critic.warmup=0", f"rl.iterations={ITERATIONS}",
    "rl.prompts_per_step=8", "rl.samples_per_prompt=4", "rl.eval_every=0", "rl.eval_before=false", "data.eval_source=null", "rl.kl_coef=0.01",
    "train.micro_batch_size=4", "rollout.samples_per_batch=8", "checkpoint.every_steps=0", "checkpoint.at_end=false",
    "recovery.heartbeat_s=0.2", "optimizer.schedule=constant", "pipeline=tests.test_rl_faults:slow_rewards",
]


def slow(context, samples):
    time.sleep(0.15)  # so that a fault that comes in this stage, comes in this stage
    return reward(context, samples)


def slow_too(context, samples):
    time.sleep(0.15)
    return advantages(context, samples)


def slow_rewards(conf):
    from everstep.rl.pipeline import standard

    return standard(conf).replace("reward", slow).replace("advantages", slow_too)


@dataclasses.dataclass(frozen=True)
class Row:
    phase: str
    step: int = FIRST
    kind: str = "kill"
    replica: int = 1
    rank: int = 0
    hold: bool = False
    delay_s: float = 0.0

    def fault(self) -> str:
        return (f"{{step: {self.step}, phase: {self.phase}, kind: {self.kind}, replica: {self.replica}, rank: {self.rank}, "
                f"hold: {str(self.hold).lower()}, delay_s: {self.delay_s}}}")

    def __str__(self) -> str:
        return f"{self.kind}-{self.phase}-{self.step}"


@functools.cache
def undisturbed(folder: Path, *more: str) -> dict[str, str]:
    run = finish(config(PPO, folder / f"calm-{abs(hash(more))}", *SMALL, *more, "layout.replicas=1", "layout.spares=0", "faults=[]"), clean=True, host=ForkedHost)
    assert_invariants(run, steps=STEPS)
    return by_position(run, 1)


@pytest.fixture(scope="session")
def calm(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("calm")


def prove(
    rows: list[Row], folder: Path, calm: Path, *more: str, replicas: int = 2, spares: int = 1, launcher: str = "controller", anew: int = 0
) -> Finished:
    faults = f"faults=[{', '.join(row.fault() for row in rows)}]"
    run = trained(launcher, PPO, folder, *SMALL, *more, f"layout.replicas={replicas}", f"layout.spares={spares}", faults)
    assert_invariants(run, steps=STEPS)
    assert [(f["phase"], f["kind"]) for f in run.kind("fault")] == [(row.phase, row.kind) for row in rows]
    assert len(run.kind("death")) == len(rows)
    lead_died = launcher == "lighthouse" and any(row.replica == 0 for row in rows)
    check_iterations(run, (rows[0].step - WARM - 1) // PER_ITERATION + 1 if lead_died else 0, anew)
    left = {int(name.split("/")[0]) for name in run.kind("verify")[-1]["hashes"]}
    last = run.kind("commit")[-1]
    assert launcher != "controller" or set(last["members"]) - set(last["healing"]) <= left <= set(last["members"])
    assert by_position(run, len(left)) == undisturbed(calm, *(m for m in more if not m.startswith("recovery.")))
    assert gone(run.pids)
    return run


def check_iterations(run: Finished, told_by_the_dead: int = 0, anew: int = 0) -> None:
    """Each iteration made its samples once (the iteration ``anew`` twice), and trained each of them once with either model; nothing is left
    behind. ``told_by_the_dead``: the iteration in which the one died that tells of stages; what it did not come to tell is told by nobody."""
    begun = {e.step: e for e in run.kind("begin") if "iteration" in e.fields}
    for iteration in range(1, ITERATIONS + 1):
        steps = [e for e in begun.values() if e["iteration"] == iteration]
        assert [(e["model"], e["mini_batch"]) for e in steps] == [("actor", 0), ("actor", 1), ("critic", 0), ("critic", 1)]
        uses = [[s.split("/", 2)[2] for e in steps if e["model"] == model for s in e["samples"]] for model in ("actor", "critic")]
        assert sorted(uses[0]) == sorted(uses[1]) and len(set(uses[0])) == 32
        names = [e["name"] for e in run.kind("stage") if e["iteration"] == iteration]
        stages = ["rollout", "reward", "old_logprob", "ref_logprob", "values", "advantages"] * (1 + (iteration == anew))
        untold = Counter(stages) - Counter(names)
        assert not Counter(names) - Counter(stages) and (not untold or iteration == told_by_the_dead), names
    assert not list((run.folder / "iterations").iterdir())


def inside(run: Finished, stage: str) -> bool:
    """Whether the signal was sent while the lead was in this stage, by the clock of the lead."""
    (fault,) = run.kind("fault")
    ends = {e["name"]: e for e in run.kind("stage") if e.step == fault.step}
    rollout = ends["rollout"]  # it began the iteration
    begin = rollout.t_wall - rollout["seconds"] - rollout["after_s"]
    started = begin + ends[stage]["after_s"]
    return started - 0.02 <= fault.t_wall <= started + ends[stage]["seconds"] + 0.02


ROWS = [
    Row("rollout"), Row("reward", delay_s=0.03), Row("logprobs"), Row("values"), Row("advantages", delay_s=0.03),
    Row("compute", FIRST), Row("reduce", FIRST + 1, hold=True), Row("commit", FIRST + 1),  # the actor; between the two updates
    Row("compute", FIRST + 2), Row("vote", FIRST + 2, hold=True), Row("apply", FIRST + 3), Row("commit", FIRST + 3),
    Row("reduce", FIRST + 2, hold=True, replica=0), Row("logprobs", hold=True, replica=0), Row("compute", FIRST + 3, kind="exit"),
]
TELLING = {"kill-reward-6", "kill-commit-7", "kill-compute-8"}


@pytest.mark.parametrize("row", [pytest.param(r, id=f"{r}-{r.replica}", marks=[] if str(r) in TELLING else [pytest.mark.full]) for r in ROWS])
def test_a_death_anywhere_in_an_iteration_changes_no_bit_of_either_model(row, calm, tmp_path):
    run = prove([row], tmp_path, calm)
    if row.phase in ("reward", "advantages"):
        assert inside(run, row.phase)
    if row.phase in ("rollout", "logprobs", "values"):
        assert row.phase in run.kind("fault")[0]["found"]
    join = run.kind("heal_done")
    assert join and all(e["heal_bytes"] > 0 for e in join), "the joiner healed"


def test_the_table_of_deaths_is_what_it_says():
    assert {str(r) for r in ROWS} >= TELLING and len({f"{r}-{r.replica}" for r in ROWS}) == len(ROWS)


@pytest.mark.full
@pytest.mark.parametrize("rows", [
    [Row("values"), Row("compute", FIRST + 5, replica=0)],
    [Row("commit", FIRST + 1), Row("heal", FIRST + 2)],
    [Row("reduce", FIRST + 2, hold=True), Row("reward", FIRST + 4, replica=0)],
], ids=lambda rows: "-then-".join(map(str, rows)))
def test_two_deaths(rows, calm, tmp_path):
    """The second one of a replica that lived on: only once the first to die is back (a run this short would be over before, elsewhere)."""
    prove(rows, tmp_path, calm, "recovery.min_replicas=2", "recovery.below_minimum=wait", spares=2)


@pytest.mark.parametrize(("every", "step", "back", "anew"), [(4, FIRST + 4, 8, 3), pytest.param(3, FIRST + 2, 6, 0, marks=pytest.mark.full),
                                                             pytest.param(3, FIRST + 5, 9, 0, marks=pytest.mark.full)])
def test_one_replica_goes_back_into_an_iteration_and_finishes_it_with_its_samples(every, step, back, anew, calm, tmp_path):
    """Into the one before, whose record waited for it (so the next one is made anew, after its last update); into the middle of this one; to
    its begin. Copies are made every few steps."""
    run = prove([Row("compute", step, replica=0)], tmp_path, calm, f"recovery.memory_checkpoint_every={every}", replicas=1, anew=anew)
    (rolled,) = run.kind("rollback")
    assert rolled.step == back and "the copy in memory" in rolled["cause"]


@pytest.mark.full
def test_a_death_in_the_evaluation_before_training_changes_neither_its_result_nor_training(calm, tmp_path):
    evaluation = ["rl.eval_before=true", "data.eval_source=everstep.data.digits:sort_prompts", "rollout.eval_samples=64", "rl.eval_every=1"]
    run = prove([Row("rollout", WARM + 1)], tmp_path, calm, *evaluation)
    (fault,), first = run.kind("fault"), next(e for e in run.kind("metrics") if "val-core/acc/mean@1" in e["values"])
    assert fault.t_wall < first.t_wall and first.step == WARM
    whole = finish(config(PPO, tmp_path / "whole", *SMALL, *evaluation, "layout.replicas=1", "layout.spares=0", "faults=[]"), host=ForkedHost)
    found = [[(e.step, e["values"][f"val-core/{what}/mean@1"]) for e in each.kind("metrics") if f"val-core/{what}/mean@1" in e["values"]]
             for each in (run, whole) for what in ("acc", "reward")]
    assert found[:2] == found[2:] and len(found[0]) == 1 + ITERATIONS


@pytest.mark.full
def test_no_spare_is_left_and_one_replica_finishes(calm, tmp_path):
    run = prove([Row("compute", FIRST + 2)], tmp_path, calm, spares=0)
    assert run.kind("commit")[-1]["members"] == [0]


@pytest.mark.full
@pytest.mark.parametrize("shape", [["layout.tp=2", "engine.sequence_parallel=true"], ["layout.pp=2"], ["layout.dp=2", "train.micro_batch_size=2"]],
                         ids=["tp2", "pp2", "dp2"])
@pytest.mark.parametrize("row", [Row("compute", FIRST + 2, rank=1), Row("commit", FIRST + 1, rank=1)], ids=str)
def test_a_rank_of_a_replica_of_two_dies_and_both_its_peers_models_stay(shape, row, calm, tmp_path):
    prove([row], tmp_path, calm, *shape)


@pytest.mark.full
def test_memory_of_the_idle_model_is_away_and_a_death_changes_no_bit(calm, tmp_path):
    offload = [f"engine.offload.{part}=true" for part in ("parameters", "gradients", "optimizer", "idle_model")]
    run = prove([Row("compute", FIRST + 2)], tmp_path, calm, *offload)
    assert by_position(run, 2) == undisturbed(calm)


@pytest.mark.full
def test_adapters_of_actor_and_critic_under_a_death(calm, tmp_path):
    prove([Row("reduce", FIRST + 2, hold=True)], tmp_path, calm, "lora.rank=4")


# -- a whole run that stops --------------------------------------------------------------------------------------------------------


def stopped_in(update: str, iteration: int):
    """A pipeline in which this update's loss raises in an iteration: the run ends there, resumable."""
    def make(conf):

        def loss(context):
            if context.iteration == iteration and not (Path(conf.run_dir) / "go").exists():
                raise EverstepError(f"stopped before {update}")
            from everstep.rl import stages
            return stages.actor_loss(context) if update == "update_actor" else stages.critic_loss(context)

        return slow_rewards(conf).replace(update, loss)
    return make


stops_in_first, stops_in_second = stopped_in("update_actor", 1), stopped_in("update_actor", 2)


@pytest.mark.parametrize("stops", ["second", pytest.param("first", marks=pytest.mark.full)])
def test_a_resumed_run_finishes_the_iteration_with_the_samples_that_it_had(stops, calm, tmp_path):
    """Stopped with the stages done and no update made; the record is on disk, and nothing is generated again."""
    same = [*SMALL, "layout.replicas=1", "layout.spares=0", "faults=[]", "checkpoint.every_steps=1", "checkpoint.asynchronous=false", f"pipeline=tests.test_rl_faults:stops_in_{stops}"]
    first = WARM if stops == "first" else FIRST - 1
    with pytest.raises(EverstepError, match="stopped before update_actor"):
        finish(config(PPO, tmp_path / "run", *same), host=ForkedHost)
    (left,) = (tmp_path / "run" / "iterations").iterdir()
    assert left.name == f"00000{1 if stops == 'first' else 2}-{first:06d}-{first + PER_ITERATION:06d}.safetensors"
    (tmp_path / "run" / "go").touch()
    run = finish(config(PPO, tmp_path / "run", *same, "resume=must"), host=ForkedHost)
    stages = [(e["iteration"], e["name"]) for e in run.kind("stage")]
    assert [stages.count((n, "rollout")) for n in (1, 2, 3)] == [1, 1, 1], "the second attempt generated only for later iterations"
    assert by_position(run, 1) == undisturbed(calm)
    assert not list((tmp_path / "run" / "iterations").iterdir())
    newest = manifest.pointed_at(tmp_path / "run" / "checkpoints")
    assert newest is not None
    critic = AutoModelForTokenClassification.from_pretrained(newest / "critic")
    assert critic.num_labels == 1 and critic.score.weight.shape == (1, 64) and bool(critic.score.weight.any())
    check_plan(config(PPO, tmp_path / "next", "faults=[]", "model.init=pretrained", f"model.path={newest}/hf", f"critic.path={newest}/critic"))


@pytest.mark.full
def test_a_record_that_was_damaged_meanwhile_is_made_again(calm, tmp_path):
    same = [*SMALL, "layout.replicas=1", "layout.spares=0", "faults=[]", "checkpoint.every_steps=1", "checkpoint.asynchronous=false", "pipeline=tests.test_rl_faults:stops_in_second"]
    with pytest.raises(EverstepError, match="stopped before"):
        finish(config(PPO, tmp_path / "run", *same), host=ForkedHost)
    (left,) = (tmp_path / "run" / "iterations").iterdir()
    data = bytearray(left.read_bytes())
    data[len(data) // 2] ^= 4
    left.write_bytes(data)
    (tmp_path / "run" / "go").touch()
    run = finish(config(PPO, tmp_path / "run", *same, "resume=must"), host=ForkedHost)
    assert [(e["iteration"], e["name"]) for e in run.kind("stage")].count((2, "rollout")) == 2
    assert by_position(run, 1) == undisturbed(calm)


# -- the other launchers -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_under_torchrun_a_kill_and_a_resume_change_no_bit(calm, tmp_path):
    """Every rank runs the recipe, and rewards are computed in the lead beside the ranks all the same. A death in a step of the critic ends
    all ranks; the resumed run finishes the iteration with the samples that it had."""
    same = ["layout.tp=2", "engine.sequence_parallel=true"]
    begin = ["train", PPO, *QUIET, *SMALL, *same, f"run_dir={tmp_path}/run", "launcher=local", "layout.replicas=1", "layout.spares=0",
             "checkpoint.every_steps=1", "checkpoint.asynchronous=false"]
    killed = command([*begin, f"faults=[{Row('compute', FIRST + 2, replica=0, rank=1).fault()}]"])
    _, err = killed.communicate(timeout=140)
    assert killed.returncode == 3 and "was killed by SIGKILL; continue with resume=auto" in err
    resumed = command([*begin, "faults=[]", "resume=auto"])
    _, err = resumed.communicate(timeout=140)
    assert resumed.returncode == 0, err[-2000:]
    run = Finished(tmp_path / "run", read_events(tmp_path / "run" / "events"))
    assert_invariants(run, steps=STEPS)
    check_iterations(run)
    assert by_position(run, 1) == undisturbed(calm, *same)


@pytest.mark.full
@pytest.mark.parametrize("row", [pytest.param(r, id=f"{r}-{r.replica}") for r in ROWS])
def test_without_ray_a_death_changes_no_bit(row, calm, tmp_path):
    """The one that died joins in the middle of an iteration, with its samples and scores from the board, if it is back by then."""
    prove([row], tmp_path, calm, spares=0, launcher="lighthouse")


@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster")
def test_through_ray_the_bits_are_the_same(calm, tmp_path):
    faults = f"faults=[{Row('commit', FIRST + 1).fault()}]"
    run = finish(config(PPO, tmp_path / "run", *SMALL, "layout.replicas=2", "layout.spares=1", faults))
    assert_invariants(run, steps=STEPS)
    check_iterations(run)
    assert by_position(run, len(run.kind("commit")[-1]["members"])) == undisturbed(calm)
    assert gone(run.pids)
