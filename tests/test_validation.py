"""Evaluation before, within and after training, and the checkpoint of the best of them, which retention keeps."""

from __future__ import annotations

import pytest
from tests.support.runs import DEMO, SFT, config, finish

from everstep.checkpoint import listing, manifest
from everstep.cluster.forked import ForkedHost
from everstep.config.check import check_plan
from everstep.errors import ConfigError
from everstep.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.timeout(300)]

ONE = ["layout.replicas=1", "layout.spares=0", "faults=[]"]
HELD_OUT = ["data.eval_source=everstep.data.digits:sort_prompts", "data.eval_source_args={split: held_out}"]


def test_the_best_needs_something_to_be_found_by(tmp_path):
    for overrides, says in (
        (["checkpoint.keep_best=true"], r"checkpoint\.keep_best=true needs held-out data"),
        (["sft.eval_every=2"], r"sft\.eval_every=2 needs held-out data"),
        (["checkpoint.best_by=reward"], r"checkpoint\.best_by=reward says what checkpoint\.keep_best=true keeps in RL"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_plan(config(SFT, tmp_path, "data.eval_source=null", *overrides))


def test_the_best_checkpoint_outlives_newer_ones_and_a_resume_knows_how_good_it_was(tmp_path):
    """A learning rate that spoils the model after some steps: the best is in the middle."""
    conf = config(SFT, tmp_path / "run", *ONE, "sft.steps=8", "sft.eval_every=2", "data.eval_source=${data.source}",
                  "sft.eval_samples=32", "checkpoint.keep_best=true", "checkpoint.asynchronous=false", "checkpoint.keep_last=1", "checkpoint.every_steps=2", "optimizer.lr=0.3",
                  "optimizer.schedule=constant", "optimizer.warmup_steps=0")
    run = finish(conf, host=ForkedHost)
    losses = {int(row["step"]): row["val/loss"] for row in read_metrics(run.folder / "metrics.jsonl") if "val/loss" in row}
    assert sorted(losses) == [0, 2, 4, 6, 8] and losses.pop(0) > 0
    best = min(losses, key=lambda step: losses[step])
    assert best < 8, "the learning rate is to spoil the model"
    checkpoints = run.folder / "checkpoints"
    named = manifest.pointed_at(checkpoints, manifest.BEST)
    assert named == checkpoints / manifest.folder_name(best) and manifest.damage(named) is None
    assert {path.name for path in manifest.checkpoint_folders(checkpoints)} == {named.name, manifest.folder_name(8)}
    assert manifest.read_run_state(manifest.pointed_at(checkpoints))["recipe"]["best"] == -losses[best]
    assert [row.pointers for row in listing.rows(checkpoints, verify=False)] == [("latest",), ("best",)]


@pytest.mark.full
@pytest.mark.parametrize("before", [True, False])
def test_evaluations_come_before_within_and_after(before, tmp_path):
    conf = config(DEMO, tmp_path / "run", *ONE, *HELD_OUT, "warmup.steps=2", "warmup.samples_per_step=32", "rl.iterations=5", "rl.prompts_per_step=4",
                  "rl.samples_per_prompt=4", "train.micro_batch_size=16", "rl.eval_every=2", "rollout.eval_samples=8", f"rl.eval_before={before}".lower(),
                  "checkpoint.at_end=false", "checkpoint.keep_best=true", "checkpoint.best_by=reward")
    run = finish(conf, host=ForkedHost)
    rows = {int(row["step"]): row for row in read_metrics(run.folder / "metrics.jsonl")}
    assert [step for step, row in rows.items() if "val-core/acc/mean@1" in row] == [*([2] if before else []), 4, 6, 7]
    assert "train/loss" in rows[2], "the last step of the warm-up is logged all the same"
    rewards = {step: rows[step]["val-core/reward/mean@1"] for step in (4, 6, 7)}
    best = manifest.pointed_at(run.folder / "checkpoints", manifest.BEST)
    assert best is not None and best.name == manifest.folder_name(max(rewards, key=lambda step: (rewards[step], -step)))
