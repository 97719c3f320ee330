"""Supervised fine-tuning: the next-token loss of the tokens that count (assistant turns, completions, or plain text)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.cluster.batch import TrainingBatch
from everstep.data import SampleStream
from everstep.engine.loss import LossSpec
from everstep.recipes.resize import step_size
from everstep.recipes.run import Run, Stopwatch, pace, step_metrics
from everstep.recipes.schedule import learning_rate

LOSS = LossSpec("everstep.rl.losses:sft_loss")


def train(run: Run) -> None:
    """One optimizer step per iteration, over ``sft.samples_per_step`` samples; semi-synchronous, one round of such steps."""
    config, group, data = run.config, run.group, run.data.train
    total, inner = config.sft.steps, run.inner_steps
    stream = SampleStream(len(data), config.seed, config.data.shuffle)
    if run.state:
        stream.load_state_dict(run.state["stream"])
    state: Callable[[], dict[str, Any]] = lambda: {"stream": stream.state_dict(), "best": run.best}
    if run.data.eval and config.sft.eval_before and group.committed_step == 0:
        run.log(0, {"val/loss": held_out_loss(run, run.data.eval.first(config.sft.eval_samples))})
    run.start(total // inner, "round" if inner > 1 else "step", group.committed_step)

    while (done := group.committed_step * inner) < total:
        watch = Stopwatch()
        lrs = [learning_rate(config.optimizer, done + i, total) for i in range(1, inner + 1)]
        sizes = [step_size(config, config.sft.samples_per_step, lr, group.dealt_replicas) for lr in lrs]
        batches = [data.batch(stream.take(size.samples)) for size in sizes]
        trained = sum(map(len, batches))
        result = run.train(batches, LOSS, [size.lr for size in sizes], state=state() | {"stream": stream.state_dict(more=trained)})
        done += inner
        stream.mark_trained(trained)
        tokens = sum(sum(batch.token_counts()) for batch in batches)
        metrics = step_metrics(result, "train", inner) | {
            "training/pass": stream.trained / stream.size,
            "training/inner_step": float(done),
            **pace(config, result, tokens, watch.lap("timing_s/step")),
        }
        every = config.sft.eval_every
        if run.data.eval and (done == total or (every and done // every > (done - inner) // every)):
            metrics["val/loss"] = held_out_loss(run, run.data.eval.first(config.sft.eval_samples))
            watch.lap("timing_s/testing")
        run.log(result.step, metrics | watch.seconds, show_at=result.step)
        run.verify_if_due()
        if "val/loss" in metrics:
            run.save_if_best(-metrics["val/loss"], state)
        run.save_if_due(state, last=done == total)

    run.save_if_due(state, last=True)


def held_out_loss(run: Run, batch: TrainingBatch) -> float:
    """Mean next-token loss of the tokens that count, nats."""
    scored: Any = run.group.call("mesh", "logprobs", batch)
    mask = scored["loss_mask"]
    return float(-(scored["logprobs"] * mask).sum() / mask.sum().clamp(min=1.0))
