"""Supervised fine-tuning: the next-token loss of the tokens that count (assistant turns, completions, or plain text)."""

from __future__ import annotations

from typing import Any

from everstep.cluster.batch import TrainingBatch
from everstep.data import SampleStream
from everstep.engine.loss import LossSpec
from everstep.recipes.resize import step_size
from everstep.recipes.run import Run, Stopwatch, step_metrics
from everstep.recipes.schedule import learning_rate

LOSS = LossSpec("everstep.rl.losses:sft_loss")


def train(run: Run) -> None:
    """One optimizer step per iteration, over ``sft.samples_per_step`` samples."""
    config, group, data = run.config, run.group, run.data.train
    total = config.sft.steps
    stream = SampleStream(len(data), config.seed, config.data.shuffle)
    if run.state:
        stream.load_state_dict(run.state["stream"])
    state = lambda: {"stream": stream.state_dict()}
    run.start(total, "step", group.committed_step)

    while group.committed_step < total:
        watch = Stopwatch()
        lr = learning_rate(config.optimizer, group.committed_step + 1, total)
        size = step_size(config, config.sft.samples_per_step, lr, group.dealt_replicas)
        batch = data.batch(stream.take(size.samples))
        result = group.train_step(batch, LOSS, size.lr)
        stream.mark_trained(len(batch))
        tokens = sum(batch.token_counts())
        metrics = step_metrics(result, "train") | {
            "training/pass": stream.trained / stream.size,
            "perf/total_num_tokens": float(tokens),
            "perf/throughput": tokens / watch.lap("step"),
        }
        last = result.step == total
        if run.data.eval and (last or (config.sft.eval_every and result.step % config.sft.eval_every == 0)):
            metrics["val/loss"] = held_out_loss(run, run.data.eval.first(config.sft.eval_samples))
            watch.lap("testing")
        run.log(result.step, metrics | watch.seconds, show_at=result.step)
        run.verify_if_due()
        run.save_if_due(state, last=last)

    run.save_if_due(state, last=True)


def held_out_loss(run: Run, batch: TrainingBatch) -> float:
    """Mean next-token loss of the tokens that count, nats."""
    scored: Any = run.group.call("mesh", "logprobs", batch)
    mask = scored["loss_mask"]
    return float(-(scored["logprobs"] * mask).sum() / mask.sum().clamp(min=1.0))
