"""GRPO (arXiv 2402.03300) and its relatives: sample groups of completions, score them, push the better ones up.

    rollout -> reward -> [reference log-probs] -> [old log-probs] -> advantages -> updates

An iteration makes ``rl.passes * rl.updates_per_pass`` optimizer steps. With one, the policy that is updated is the one that
generated, and its own log-probabilities are the old ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import Config
from everstep.data import SampleStream, pass_order
from everstep.errors import BadInput
from everstep.recipes import sft
from everstep.recipes.run import Run, Stopwatch, step_metrics
from everstep.recipes.schedule import learning_rate
from everstep.rl import credit, island
from everstep.rl.rewards import resolve, score
from everstep.rl.rollout import Sampling, repeat_prompts
from everstep.telemetry.console import Completion


def train(run: Run) -> None:
    config, group, rl = run.config, run.group, run.config.rl
    reward = resolve(config.reward, config.data.source, config.data.source_args)
    prompts = SampleStream(len(run.data.train), config.seed, config.data.shuffle)
    iteration, has_reference, kl_coef = 0, False, rl.kl_coef
    if run.state:
        prompts.load_state_dict(run.state["prompts"])
        iteration, has_reference = int(run.state["iteration"]), bool(run.state["reference"])
        kl_coef = float(run.state["kl_coef"]) if rl.kl_target else rl.kl_coef
        if iteration and rl.kl_coef > 0 and not has_reference:
            raise BadInput(
                f"rl.kl_coef={rl.kl_coef}: the checkpoint has no reference model, because rl.kl_coef was 0 when the run began; "
                "resume with rl.kl_coef=0, or start a new run from the checkpoint's folder hf"
            )
    state = lambda: {"prompts": prompts.state_dict(), "iteration": iteration, "reference": has_reference, "kl_coef": kl_coef}

    warm_up(run, state)
    if rl.kl_coef > 0 and iteration == 0:
        group.call("pass_through", "keep_reference")
        has_reference = True
    if run.data.eval and iteration == 0:
        run.summary["accuracy_before"] = evaluate(run, reward)

    if config.semisync.method != "none":
        islands(run, prompts, reward, iteration, has_reference)
        return
    updates = rl.passes * rl.updates_per_pass
    run.start(rl.iterations, "iteration", iteration)
    while iteration < rl.iterations:
        iteration += 1
        watch = Stopwatch()

        taken = run.data.train.batch(prompts.take(rl.prompts_per_step))
        samples = repeat_prompts(taken, rl.samples_per_prompt)
        samples = group.rollout(samples, Sampling.for_training(config))
        watch.lap("gen")

        scores = torch.tensor(group.once(score, reward, samples))
        watch.lap("reward")

        if rl.kl_coef > 0:
            reference = group.call("mesh", "logprobs", samples, config.rollout.temperature, "reference")
            samples = samples.with_tensors(ref_logprobs=reference["ref_logprobs"])
            watch.lap("ref")
        if credit.needs_old_logprobs(rl):
            old = group.call("mesh", "logprobs", samples, config.rollout.temperature)
            samples = samples.with_tensors(old_logprobs=old["logprobs"])
            watch.lap("old_log_prob")

        samples, credited = credit.assign(samples, scores, rl, kl_coef)
        watch.lap("adv")

        loss = credit.policy_loss(rl, config.rollout, on_policy=updates == 1, kl_coef=kl_coef)
        batches = [batch for rl_pass in range(rl.passes) for batch in mini_batches(samples, config, iteration, rl_pass)]
        for update, batch in enumerate(batches, 1):
            lr = learning_rate(config.optimizer, group.committed_step + 1 - config.warmup.steps, rl.iterations * updates)
            result = group.train_step(batch, loss, lr, config.rollout.temperature)
            if update < updates:  # the last one is logged with the iteration, below
                run.log(result.step, step_metrics(result, "actor"))
        prompts.mark_trained(len(taken))
        kl_coef = credit.next_kl_coef(samples, rl, kl_coef)  # moves with the iteration's last commit, and is saved with it
        watch.lap("update_actor")

        metrics = step_metrics(result, "actor") | credited | rollout_metrics(samples, config)
        metrics |= {"training/iteration": float(iteration), "training/pass": prompts.trained / prompts.size}
        metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / watch.total
        metrics["timing_s/step"] = watch.total
        if run.data.eval and (iteration == rl.iterations or (rl.eval_every and iteration % rl.eval_every == 0)):
            run.summary["accuracy_after"] = metrics["val-core/acc/mean@1"] = evaluate(run, reward)
            watch.lap("testing")
        run.log(result.step, metrics | watch.seconds, show_at=iteration)
        run.completions(some_completions(samples, scores, config.telemetry.show_completions))
        run.verify_if_due()
        run.save_if_due(state, last=iteration == rl.iterations)


def islands(run: Run, prompts: SampleStream, reward: Any, iteration: int, has_reference: bool) -> None:
    """Semi-synchronous: each replica makes rollouts of its own prompts with its own weights, and an update from them, some iterations
    long; then weights are synchronised. Metrics are means over the iterations of a round."""
    config, rl, inner = run.config, run.config.rl, run.inner_steps
    state = lambda: {"prompts": prompts.state_dict(), "iteration": iteration, "reference": has_reference, "kl_coef": rl.kl_coef}
    run.start(rl.iterations, "iteration", iteration)
    while iteration < rl.iterations:
        watch = Stopwatch()
        taken = [run.data.train.batch(prompts.take(rl.prompts_per_step)) for _ in range(inner)]
        lrs = [learning_rate(config.optimizer, iteration + i, rl.iterations) for i in range(1, inner + 1)]
        asked = [repeat_prompts(batch, rl.samples_per_prompt) for batch in taken]
        result = run.train(asked, island.loss_spec(config), lrs, config.rollout.temperature, island.ROLLOUT)
        prompts.mark_trained(sum(map(len, taken)))
        iteration += inner
        watch.lap("step")
        metrics = step_metrics(result, "actor", inner) | {
            "training/iteration": float(iteration), "training/inner_step": float(iteration), "training/pass": prompts.trained / prompts.size,
        }  # fmt: skip
        if run.data.eval and (iteration == rl.iterations or (rl.eval_every and iteration // rl.eval_every > (iteration - inner) // rl.eval_every)):
            run.summary["accuracy_after"] = metrics["val-core/acc/mean@1"] = evaluate(run, reward)
            watch.lap("testing")
        run.log(result.step, metrics | watch.seconds, show_at=iteration)
        run.verify_if_due()
        run.save_if_due(state, last=iteration == rl.iterations)


def warm_up(run: Run, state: Callable[[], dict[str, Any]]) -> None:
    """``warmup.steps`` steps of SFT through the same step transaction; a resumed run does those that are left."""
    config, group, data, inner = run.config, run.group, run.data.warmup, run.inner_steps
    if data is None or (done := group.committed_step * inner) >= config.warmup.steps:
        return
    stream = SampleStream(len(data), config.seed, config.data.shuffle, "warmup")
    stream.take(done * config.warmup.samples_per_step)  # a checkpoint in the warm-up: its steps are done
    stream.mark_trained(stream.read)
    run.start(config.warmup.steps // inner, "warm-up step", group.committed_step)
    while group.committed_step * inner < config.warmup.steps:
        watch = Stopwatch()
        batches = [data.batch(stream.take(config.warmup.samples_per_step)) for _ in range(inner)]
        result = run.train(batches, sft.LOSS, [config.warmup.lr] * inner)
        stream.mark_trained(sum(map(len, batches)))
        tokens = sum(sum(batch.token_counts()) for batch in batches)
        metrics = step_metrics(result, "train", inner) | {"perf/total_num_tokens": float(tokens)}
        run.log(result.step, metrics | {"perf/throughput": tokens / watch.lap("step")} | watch.seconds, show_at=result.step)
        run.verify_if_due()
        run.save_if_due(state)


def mini_batches(samples: TrainingBatch, config: Config, iteration: int, rl_pass: int) -> list[TrainingBatch]:
    """The optimizer steps of one pass over an iteration's samples, in an order that the seed fixes.

    Each use of a sample has its own id, ``ITERATION/PASS/SAMPLE``, so that the account of samples is exact over passes.
    """
    order = pass_order(len(samples), config.seed, iteration * config.rl.passes + rl_pass)
    chosen = samples.select(order)
    named = TrainingBatch(
        chosen.tensors, {}, [f"{iteration}/{rl_pass}/{sample}" for sample in chosen.sample_ids], chosen.weight_versions
    )
    return named.chunk(config.rl.updates_per_pass)


def evaluate(run: Run, reward: Any) -> float:
    """Share of held-out prompts whose (greedy) completion is right: a reward of at least 1."""
    assert run.data.eval is not None
    prompts = run.data.eval.first(run.config.rollout.eval_samples)
    answered = run.group.rollout(repeat_prompts(prompts, 1), Sampling.for_evaluation(run.config))
    scores = run.group.once(score, reward, answered)
    return sum(s >= 1.0 for s in scores) / len(scores)


def rollout_metrics(samples: TrainingBatch, config: Config) -> dict[str, float]:
    lengths = samples["loss_mask"].sum(dim=1)
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float((lengths >= config.rollout.max_response_tokens).float().mean()),
        "perf/total_num_tokens": float(samples["attention_mask"].sum()),
    }


def some_completions(samples: TrainingBatch, scores: torch.Tensor, count: int) -> list[Completion]:
    rows = range(0, len(samples), max(1, len(samples) // max(count, 1)))[:count]
    return [Completion(str(samples.column("prompt")[i]), samples.column("completion")[i], float(scores[i])) for i in rows]
