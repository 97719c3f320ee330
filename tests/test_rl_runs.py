"""Whole runs of the algorithms: their state goes on where it was, samples are accounted for, and a death changes no bit."""

from __future__ import annotations

import functools
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.support.runs import DEMO, ROOT, Finished, config, finish, gone
from tests.test_faults import assert_invariants

from everstep.checkpoint import manifest
from everstep.cluster.forked import ForkedHost
from everstep.telemetry.history import check, worst
from everstep.telemetry.metrics import read_metrics
from everstep.telemetry.recoveries import account

pytestmark = [pytest.mark.timeout(300)]

REWARD = """
from everstep.rl.reward_functions import position_match

def odd(prompt, completion, record):
    if prompt.startswith("0"): raise RuntimeError("no zeros, please")
    return position_match(prompt, completion, record)
"""
SHORT = ["recovery.exact=true", "warmup.steps=6", "rl.prompts_per_step=8", "rl.samples_per_prompt=8", "train.micro_batch_size=16",
         "warmup.samples_per_step=64", "rl.eval_every=0", "optimizer.schedule=constant", "train.verify_every=1000", "layout.spares=0"]
EVERYTHING = ["rl.dynamic_sampling_rounds=2", "rl.kl_coef=0.05", "rl.kl_in=reward", "rl.kl_kind=k1", "rl.kl_target=0.02", "rl.kl_horizon_samples=300",
              "rl.importance.level=token", "rl.ratio=sequence_token", "rl.advantage=reinforce_plus_plus_baseline", "reward.on_error=drop",
              "telemetry.sample_table_every=2", "reward.timeout_s=60"]


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "odd_reward_for_runs.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    return "reward.function=odd_reward_for_runs:odd"


def rows(run: Finished) -> dict[int, dict[str, float]]:
    return {int(row["step"]): row for row in read_metrics(run.folder / "metrics.jsonl")}


def test_a_run_that_was_interrupted_goes_on_with_the_same_prompts_and_the_same_coefficient(reward: str, tmp_path: Path) -> None:
    """Dynamic sampling, the adaptive coefficient and dropped samples; in one go, and with a stop, after which a rank dies while the first
    completions are scored."""
    same = [*SHORT, *EVERYTHING, reward, "faults=[]"]
    whole = finish(config(DEMO, tmp_path / "whole", *same, "rl.iterations=4", "layout.replicas=2", "checkpoint.at_end=false"), host=ForkedHost)
    parts = functools.partial(config, DEMO, tmp_path / "parts", *same, "layout.replicas=2")
    finish(parts("rl.iterations=2"), host=ForkedHost)
    fault = "faults=[{step: 9, phase: reward, kind: kill, replica: 1}]"
    run = finish(parts("rl.iterations=4", "resume=must", "checkpoint.at_end=false", fault), host=ForkedHost)
    assert run.final_hashes == whole.final_hashes
    (struck,) = run.kind("fault")
    scored = next(e for e in run.kind("reward_failed") if e.t_wall > run.kind("run_start")[-1].t_wall)
    assert len(run.kind("death")) == 1 and struck.t_wall < scored.t_wall, "the processes that score were being started"
    books = account(run.events)
    assert books.exact and books.committed == 10 and books.samples_dropped == sum(len(e["samples"]) for e in run.kind("drop"))
    assert worst(check(run.folder)) == 0

    dropped = [(e["samples"], e["reason"]) for e in run.kind("drop")]
    assert dropped == [(e["samples"], e["reason"]) for e in whole.kind("drop")] and len(dropped) > 3
    reasons = {reason for _, reason in dropped}
    assert "0 of 8 rewards did not fail" in reasons and any(reason.startswith("all rewards are") for reason in reasons)
    failed = run.kind("reward_failed")
    assert failed and {e["action"] for e in failed} == {"drop"} and "RuntimeError: no zeros, please" in failed[0]["reasons"][0]

    coefs = [row["actor/reward_kl_penalty_coeff"] for step, row in sorted(rows(run).items()) if step > 6]
    assert coefs == [row["actor/reward_kl_penalty_coeff"] for step, row in sorted(rows(whole).items()) if step > 6]
    assert coefs[0] == 0.05 and len(set(coefs)) == 4
    assert all(row["timing_s/gen"] > row["timing_s/reward"] > 0 for step, row in rows(run).items() if step > 6)
    assert rows(run)[10]["train/num_gen_batches"] > 1 and rows(run)[10]["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=0.01)
    table = pq.read_table(run.folder / "samples" / "step-000010.parquet").to_pylist()
    assert len(table) == 8 and table[0].keys() == {"sample_id", "prompt", "completion", "reward"}
    assert gone(run.pids)


def test_preferences_margin_grows_and_a_death_changes_no_bit(tmp_path: Path) -> None:
    """DPO: pairs packed into rows and not; a rank dies in the middle of a step."""
    file = str(ROOT / "examples" / "dpo_sort.yaml")
    same = ["recovery.exact=true", "dpo.steps=16", "dpo.pairs_per_step=32", "train.micro_batch_size=8", "dpo.eval_every=8", "checkpoint.at_end=false",
            "train.verify_every=1000", "optimizer.schedule=constant"]
    calm = finish(config(file, tmp_path / "calm", *same, "layout.replicas=1", "checkpoint.keep_best=true"), host=ForkedHost)
    margins = [row["dpo/reward_margin"] for _, row in sorted(rows(calm).items())]
    assert abs(margins[0]) < 1e-6 and margins[-1] > 0.05 and rows(calm)[1]["dpo/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert rows(calm)[16]["val/accuracy"] > max(0.6, rows(calm)[8]["val/accuracy"] - 0.05) and rows(calm)[16]["val/loss"] < 0.69
    best = min((8, 16), key=lambda step: rows(calm)[step]["val/loss"])
    assert manifest.pointed_at(calm.folder / "checkpoints", manifest.BEST) == calm.folder / "checkpoints" / manifest.folder_name(best)
    fault = "faults=[{step: 5, phase: reduce, kind: kill, replica: 1}]"
    run = finish(config(file, tmp_path / "run", *same, "layout.replicas=3", "layout.spares=0", fault), host=ForkedHost)
    assert_invariants(run, steps=16)
    assert len(run.kind("fault")) == 1 and run.final_hashes == calm.final_hashes
    assert {s.rpartition("#")[2] for s in run.kind("commit")[-1]["samples"]} == {"chosen", "rejected"}


@pytest.mark.full
def test_preferences_packed_and_resumed(tmp_path: Path) -> None:
    file = str(ROOT / "examples" / "dpo_sort.yaml")
    same = ["recovery.exact=true", "dpo.pairs_per_step=32", "train.micro_batch_size=null", "train.tokens_per_micro_batch=60", "dpo.eval_every=0",
            "train.verify_every=1000", "optimizer.schedule=constant", "layout.spares=0"]
    whole = finish(config(file, tmp_path / "whole", *same, "layout.replicas=1", "dpo.steps=8"), host=ForkedHost)
    parts = functools.partial(config, file, tmp_path / "parts", *same, "layout.replicas=2")
    finish(parts("dpo.steps=4"), host=ForkedHost)
    run = finish(parts("dpo.steps=8", "resume=must"), host=ForkedHost)
    assert run.final_hashes == whole.final_hashes
    assert_invariants(run, steps=8)
