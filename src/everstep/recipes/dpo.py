"""Direct preference optimisation (arXiv 2305.18290): make the preferred one of two completions likelier than the other, measured
against the model that training began with. No rollout; a step is a transaction over pairs, as any other over samples."""

from __future__ import annotations

from typing import Any

from everstep.cluster.batch import TrainingBatch
from everstep.data import SampleStream
from everstep.engine.loss import LossSpec
from everstep.recipes.run import Run, Stopwatch, pace, step_metrics
from everstep.recipes.schedule import learning_rate
from everstep.rl.preference import dpo_terms


def train(run: Run) -> None:
    """One optimizer step per iteration, over ``dpo.pairs_per_step`` pairs."""
    config, group, data = run.config, run.group, run.data.train
    dpo, total = config.dpo, config.dpo.steps
    loss = LossSpec("everstep.rl.preference:dpo_loss", dict(beta=dpo.beta, label_smoothing=dpo.label_smoothing, kind=dpo.loss))
    pairs = SampleStream(len(data), config.seed, config.data.shuffle)
    if run.state:
        pairs.load_state_dict(run.state["pairs"])  # the reference model is in the checkpoint
    else:
        group.call("pass_through", "keep_reference")
    state = lambda: {"pairs": pairs.state_dict(), "best": run.best}
    run.start(total, "step", group.committed_step)

    while group.committed_step < total:
        watch = Stopwatch()
        batch = with_reference(run, data.batch(pairs.take(dpo.pairs_per_step)))
        watch.lap("timing_s/ref")
        lr = learning_rate(config.optimizer, group.committed_step + 1, total)
        result = group.train_step(batch, loss, lr, state=state() | {"pairs": pairs.state_dict(more=dpo.pairs_per_step)})
        pairs.mark_trained(dpo.pairs_per_step)
        tokens = sum(batch.token_counts())
        watch.lap("timing_s/step")
        metrics = step_metrics(result, "train") | {
            "training/pass": pairs.trained / pairs.size,
            **pace(config, result, tokens, watch.wall),
        }
        last = result.step == total
        if run.data.eval and (last or (dpo.eval_every and result.step % dpo.eval_every == 0)):
            metrics |= held_out(run, run.data.eval.first(dpo.eval_pairs))
            watch.lap("timing_s/testing")
        run.log(result.step, metrics | watch.seconds, show_at=result.step)
        run.verify_if_due()
        if "val/loss" in metrics:
            run.save_if_best(-metrics["val/loss"], state)
        run.save_if_due(state, last=last)

    run.save_if_due(state, last=True)


def with_reference(run: Run, batch: TrainingBatch) -> TrainingBatch:
    reference: Any = run.group.call("mesh", "logprobs", batch, 1.0, "reference")
    return batch.with_tensors(ref_logprobs=reference["ref_logprobs"])


def held_out(run: Run, batch: TrainingBatch) -> dict[str, float]:
    """Loss, margin and accuracy on held-out pairs."""
    scored: Any = run.group.call("mesh", "logprobs", with_reference(run, batch))
    dpo = run.config.dpo
    terms = dpo_terms(scored["logprobs"], scored["ref_logprobs"], scored["loss_mask"], dpo.beta, dpo.label_smoothing, dpo.loss)
    margin = terms.chosen - terms.rejected
    return {"val/loss": float(terms.loss.mean()), "val/reward_margin": float(margin.mean()), "val/accuracy": float((margin > 0).float().mean())}
