"""Offload as recipes and programs use it: real workers, memory that goes during a rollout, and a rank that dies meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.runs import DEMO, config, finish
from tests.test_faults import assert_invariants

import everstep
from everstep.data import check
from everstep.rl.rollout import Sampling, repeat_prompts

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]

ALL = [f"engine.offload.{part}=true" for part in ("parameters", "gradients", "optimizer", "reference")]
SMALL = ["faults=[]", "warmup.steps=2", "warmup.samples_per_step=64", "rl.prompts_per_step=8", "rl.samples_per_prompt=8",
         "train.micro_batch_size=16", "rollout.eval_samples=8", "rl.kl_coef=0.05"]


def test_a_program_moves_memory_and_a_rollout_has_moved_it_already(tmp_path: Path) -> None:
    conf = config(DEMO, tmp_path / "run", *SMALL, "layout.replicas=1", "layout.spares=0", "layout.tp=2", ALL[0], ALL[2])
    prompts = repeat_prompts(check(conf).train.first(4), 2)
    group = everstep.launch(conf)
    try:
        digests = group.call("pass_through", "state_hash")
        group.call("mesh", "generate", prompts, Sampling.for_training(conf))
        freed = group.call("pass_through", "offload_to_cpu")
        assert len(freed) == 2 and all(one["gradients"] > 0 for one in freed)
        assert all(one["parameters"] == one["optimizer"] == 0 for one in freed), "the rollout left nothing of these"
        assert group.call("pass_through", "state_hash") == digests
        taken = group.call("pass_through", "backload_to_gpu", gradients=False)
        assert [set(one) for one in taken] == [{"parameters", "optimizer"}] * 2 and all(min(one.values()) > 0 for one in taken)
        assert group.call("pass_through", "offload_to_cpu") == [{**one, "gradients": 0} for one in taken]
        assert group.call("pass_through", "state_hash") == digests
    finally:
        group.close()


@pytest.mark.full
def test_a_rank_that_dies_while_memory_is_away_changes_no_bit(tmp_path: Path) -> None:
    """Its peer in the replica lives on, its state in host memory, and builds again around a spare."""
    same = [*SMALL, "layout.replicas=2", "layout.tp=2", "rl.iterations=6", "rl.updates_per_pass=2", "recovery.exact=true",
            "checkpoint.at_end=false"]
    calm = finish(config(DEMO, tmp_path / "calm", *same, "layout.spares=0"))
    # Step 5 is the first of the second iteration.
    deaths = "{step: 5, phase: rollout, kind: kill, replica: 1, rank: 0}"
    # Nothing is committed until the replica is whole: so what the survivor kept is what it needs.
    run = finish(config(DEMO, tmp_path / "run", *same, *ALL, "layout.spares=1", "recovery.mode=wait", f"faults=[{deaths}]"))
    assert_invariants(run, steps=14)
    assert [f["phase"] for f in run.kind("fault")] == ["rollout"]
    survivor = [e for e in run.kind("form") if e["replica"] == 1 and e["rank"] == 1]
    assert len(survivor) == 2 and len({e.pid for e in survivor}) == 1, "the other rank lived on"
    healed = {e["rank"]: e["heal_bytes"] for e in run.kind("heal_done")}
    assert healed[0] > 0 and healed[1] == 0, "the survivor needs nothing but its own host copy"
    assert run.final_hashes == calm.final_hashes
