"""GRPO (arXiv 2402.03300) and its relatives: sample groups of completions, score them, push the better ones up.

    rollout -> reward -> [reference log-probs] -> [old log-probs] -> advantages -> updates

What happens in an iteration is the pipeline's (:mod:`everstep.rl.pipeline`), and another one can be put in its place; this is the loop
around it, which recipe ppo has too. Everything that the stages make is complete and on disk before the first update.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from everstep.cluster.batch import TrainingBatch
from everstep.config import derive
from everstep.config.schema import Config
from everstep.data import SampleStream
from everstep.errors import BadInput
from everstep.recipes import sft
from everstep.recipes.run import Run, Stopwatch, pace, step_metrics
from everstep.recipes.schedule import learning_rate
from everstep.recipes.updates import transactions
from everstep.rl import ahead as ahead_files
from everstep.rl import credit, island, pipeline
from everstep.rl.execute import Context, execute, loss_of
from everstep.rl.record import IterationRecord, IterationRecords, settings_digest
from everstep.rl.rewards import Scorer, without_dropped
from everstep.rl.rollout import Response, Sampling, repeat_prompts
from everstep.run_dir import checkpoints_of
from everstep.telemetry.console import Completion

#: Metrics of the standard stages' seconds (verl's names); those of others are ``stage_s/NAME``.
TIMINGS = {"rollout": "gen", "reward": "reward", "ref_logprob": "ref", "old_logprob": "old_log_prob", "values": "values", "advantages": "adv",
           "update_actor": "update_actor", "update_critic": "update_critic"}
#: Of an evaluation, and which of them says what is best (``checkpoint.best_by``).
ACCURACY, REWARD = "val-core/acc/mean@1", "val-core/reward/mean@1"
BEST_BY = {"accuracy": ACCURACY, "reward": REWARD}


def train(run: Run) -> None:
    with Scorer(run.config, run.events, run.note) as reward:
        iterate(run, reward)


def iterate(run: Run, reward: Scorer) -> None:
    config, group, rl = run.config, run.group, run.config.rl
    stages, sizes = pipeline.resolve(config), derive.sizes(config)
    records = IterationRecords(run.folder / "iterations", checkpoints_of(config))
    prompts = SampleStream(len(run.data.train), config.seed, config.data.shuffle)
    iteration, has_reference, kl_coef = 0, False, rl.kl_coef  # iteration: those that are complete
    began_at = group.committed_step  # where the one in progress began
    if run.state:
        prompts.load_state_dict(run.state["prompts"])
        iteration, has_reference = int(run.state["iteration"]), bool(run.state["reference"])
        began_at = int(run.state.get("began_at", began_at))
        kl_coef = float(run.state["kl_coef"]) if rl.kl_target else rl.kl_coef
        if iteration and rl.kl_coef > 0 and not has_reference:
            raise BadInput(
                f"rl.kl_coef={rl.kl_coef}: the checkpoint has no reference model, because rl.kl_coef was 0 when the run began; "
                "resume with rl.kl_coef=0, or start a new run from the checkpoint's folder hf"
            )
    state: Callable[[], dict[str, Any]] = lambda: {
        "prompts": prompts.state_dict(), "iteration": iteration, "reference": has_reference, "kl_coef": kl_coef, "best": run.best,
        "began_at": max(began_at, min(group.committed_step, sizes.warmup_transactions)),  # within the warm-up none is in progress
    }  # fmt: skip

    if group.committed_step * run.inner_steps < config.warmup.steps:
        warm_up(run, state)
        began_at = group.committed_step
    record = interrupted(run, records, iteration + 1, began_at)
    if rl.kl_coef > 0 and not has_reference:
        group.call("pass_through", "keep_reference")
        has_reference = True
    if run.data.eval and rl.eval_before and iteration == 0 and record is None:
        before = evaluate(run, reward)
        run.summary["accuracy_before"] = before[ACCURACY]
        run.log(group.committed_step, before)

    if config.semisync.method != "none":
        islands(run, prompts, reward, iteration, has_reference)
        return

    ahead: deque[TrainingBatch] = deque()  # prompts of the iterations after this one, whose samples are being generated
    folder, digest = run.folder / "iterations", settings_digest(config)
    saved: list[dict[str, Response]] = []
    if config.rollout.max_staleness and record is None:  # else the next samples are complete, and prompts go on after them
        saved = group.once(ahead_files.read, folder, group.committed_step, digest, run.note)
    for begun in saved[: rl.iterations - iteration]:  # a run that resumes goes on with what engines had made when it was saved
        ahead.append(next_prompts(run, prompts, rl.prompts_per_step))
        group.rollout_ahead(ahead[-1], Sampling.for_training(config), begun)
    run.start(rl.iterations, "iteration", iteration)
    while iteration < rl.iterations:
        watch = Stopwatch()
        context = Context(config, iteration + 1, reward, kl_coef, functools.partial(next_prompts, run, prompts), run.dropped)
        if record is None:
            drawn = prompts.read
            made = execute(stages, context, group, ahead.popleft() if ahead else context.prompts(rl.prompts_per_step), run.events)
            taken = prompts.read - drawn or rl.prompts_per_step  # those whose samples were generated ahead had been drawn before
            record = IterationRecord(
                iteration + 1, began_at, sizes.updates_of(iteration + 1), taken, settings_digest(config), without_dropped(made.samples), made.metrics
            )
            watch.seconds |= {timing(name): spent for name, spent in made.seconds.items()}
            watch.skip()
            group.once(records.write, record)
            watch.lap("timing_s/record")
        else:
            prompts.take(record.prompts_taken)

        metrics = rollout_metrics(record.samples, config, began_at) | record.metrics
        watch.skip()
        for _ in range(min(config.rollout.max_staleness, rl.iterations - iteration - 1) - len(ahead)):
            ahead.append(context.prompts(rl.prompts_per_step))
            group.rollout_ahead(ahead[-1], Sampling.for_training(config))
        watch.lap("timing_s/rollout_ahead")
        for step in transactions(config, stages, record, done=group.committed_step - began_at):
            loss = loss_of(step.update, context)
            after = state()  # for whoever goes on from the commit record: with this iteration's record, or after it
            if group.committed_step + 1 == began_at + sizes.updates_of(iteration + 1):
                after |= {"prompts": prompts.state_dict(more=record.prompts_taken), "iteration": iteration + 1,
                          "began_at": group.committed_step + 1, "kl_coef": kl_coef_after(config, record, kl_coef)}  # fmt: skip
            result = group.train_step(step.batch, loss, step.lr, config.rollout.temperature, step.update.role, step.about, after)
            if step.last:
                metrics |= step_metrics(result, step.update.role)  # logged with the iteration, below
                watch.lap(timing(step.update.name))
            else:
                run.log(result.step, step_metrics(result, step.update.role))
        prompts.mark_trained(record.prompts_taken)
        kl_coef = kl_coef_after(config, record, kl_coef)  # moves with the iteration's last commit, and is saved with it
        samples, record = record.samples, None
        iteration, began_at = iteration + 1, group.committed_step

        metrics |= {"training/iteration": float(iteration), "training/pass": prompts.trained / prompts.size}
        metrics["timing_s/step"] = watch.wall
        metrics |= pace(config, result, float(samples["attention_mask"].sum()), watch.wall)
        held_out: dict[str, float] = {}
        if run.data.eval and (iteration == rl.iterations or (rl.eval_every and iteration % rl.eval_every == 0)):
            held_out = evaluate(run, reward)
            run.summary["accuracy_after"] = held_out[ACCURACY]
            watch.lap("timing_s/testing")
        run.log(began_at, metrics | held_out | watch.seconds, show_at=iteration)
        run.completions(some_completions(samples, config.telemetry.show_completions))
        run.sample_table(began_at, iteration, samples)
        run.verify_if_due()
        if held_out:
            run.save_if_best(held_out[BEST_BY[config.checkpoint.best_by]], state)
        if config.rollout.max_staleness:
            group.once(ahead_files.write, folder, began_at, digest, [group.rollout_so_far(batch) for batch in ahead])
        run.save_if_due(state, last=iteration == rl.iterations)
        group.once(records.retire, iteration + 1, may_go_back_to(run))
        if config.rollout.max_staleness:
            group.once(ahead_files.retire, folder, checkpoints_of(config), began_at)
    if config.recovery.memory_checkpoint_every:  # else nothing is left
        run.when_done = lambda: group.once(records.retire, rl.iterations + 1, group.committed_step)


def kl_coef_after(config: Config, record: IterationRecord, kl_coef: float) -> float:
    """The coefficient once the iteration is trained. While the critic warms up the actor stands still, so its KL says nothing."""
    rl = derive.sizes(config).rl
    assert rl is not None
    return kl_coef if record.iteration <= rl.critic_warmup else credit.next_kl_coef(record.samples, config.rl, kl_coef)


def next_prompts(run: Run, prompts: SampleStream, count: int) -> TrainingBatch:
    """The next ``count`` prompts, each for all of its completions."""
    return repeat_prompts(run.data.train.batch(prompts.take(count)), run.config.rl.samples_per_prompt)


def timing(part: str) -> str:
    return f"timing_s/{TIMINGS[part]}" if part in TIMINGS else f"stage_s/{part}"


def interrupted(run: Run, records: IterationRecords, iteration: int, began_at: int) -> IterationRecord | None:
    """The record of the iteration that this run goes on with; None if the iteration begins anew."""
    if run.group.bookmarked and iteration > 1:  # this life joins others that are behind an iteration, and looked long ago
        if run.config.semisync.method == "none":
            run.group.once(records.retire, iteration, may_go_back_to(run))  # what comes next in the loop that they are in
        return None
    record: IterationRecord | None = run.group.once(records.find, iteration, began_at, settings_digest(run.config), run.note)
    run.group.once(records.retire, iteration, may_go_back_to(run))
    done = run.group.committed_step - began_at
    if record:
        run.note(f"iteration {iteration} goes on with its {len(record.samples)} samples, after {done} of its updates")
    elif done:
        raise BadInput(
            f"the run stands {done} updates inside iteration {iteration}, but {run.folder / 'iterations'} has no record of that iteration under these "
            "settings; resume from an earlier checkpoint (resume=STEP), or with the settings it had"
        )
    return record


def may_go_back_to(run: Run) -> int:
    """A step before the oldest that a death may lead back to: of the two copies that a rank has, one may have been cut short by it."""
    return run.group.committed_step - 2 * run.config.recovery.memory_checkpoint_every


def islands(run: Run, prompts: SampleStream, reward: Scorer, iteration: int, has_reference: bool) -> None:
    """Semi-synchronous: each replica makes rollouts of its own prompts with its own weights, and an update from them, some iterations
    long; then weights are synchronised. Metrics are means over the iterations of a round."""
    config, rl, inner = run.config, run.config.rl, run.inner_steps
    state = lambda: {"prompts": prompts.state_dict(), "iteration": iteration, "reference": has_reference, "kl_coef": rl.kl_coef, "best": run.best}
    run.start(rl.iterations, "iteration", iteration)
    while iteration < rl.iterations:
        watch = Stopwatch()
        taken = [run.data.train.batch(prompts.take(rl.prompts_per_step)) for _ in range(inner)]
        lrs = [learning_rate(config.optimizer, iteration + i, rl.iterations) for i in range(1, inner + 1)]
        asked = [repeat_prompts(batch, rl.samples_per_prompt) for batch in taken]
        used = sum(map(len, taken))
        after = state() | {"prompts": prompts.state_dict(more=used), "iteration": iteration + inner}
        result = run.train(asked, island.loss_spec(config), lrs, config.rollout.temperature, island.ROLLOUT, after)
        prompts.mark_trained(used)
        iteration += inner
        watch.lap("timing_s/step")
        metrics = step_metrics(result, "actor", inner) | {
            "training/iteration": float(iteration), "training/inner_step": float(iteration), "training/pass": prompts.trained / prompts.size,
        }  # fmt: skip
        held_out: dict[str, float] = {}
        if run.data.eval and (iteration == rl.iterations or (rl.eval_every and iteration // rl.eval_every > (iteration - inner) // rl.eval_every)):
            held_out = evaluate(run, reward)
            run.summary["accuracy_after"] = held_out[ACCURACY]
            watch.lap("timing_s/testing")
        run.log(result.step, metrics | held_out | watch.seconds, show_at=iteration)
        run.verify_if_due()
        if held_out:
            run.save_if_best(held_out[BEST_BY[config.checkpoint.best_by]], state)
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
        result = run.train(batches, sft.LOSS, [config.warmup.lr] * inner, state=state() | {"began_at": group.committed_step + 1})
        stream.mark_trained(sum(map(len, batches)))
        tokens = sum(sum(batch.token_counts()) for batch in batches)
        metrics = step_metrics(result, "train", inner) | pace(config, result, tokens, watch.lap("timing_s/step"))
        run.log(result.step, metrics | watch.seconds, show_at=result.step)
        run.verify_if_due()
        run.save_if_due(state)


def evaluate(run: Run, reward: Scorer) -> dict[str, float]:
    """Of the completions (greedy unless rollout.eval_temperature) of the held-out prompts: the share that is right, which means a reward of
    at least 1, and the mean reward, both without the punishment of length: that shapes training, and a long answer may be right."""
    assert run.data.eval is not None
    prompts = run.data.eval.first(run.config.rollout.eval_samples)
    answered = run.group.rollout(repeat_prompts(prompts, 1), Sampling.for_evaluation(run.config))
    scores = run.group.once(functools.partial(reward, shaped=False), answered).values
    return {ACCURACY: float((scores >= 1.0).float().mean()), REWARD: float(scores.mean())}


def rollout_metrics(samples: TrainingBatch, config: Config, began_at: int) -> dict[str, float]:
    """``began_at``: the committed step before the iteration's first update. Only completions that count are counted: one that was dropped
    has no token that does."""
    assert samples.weight_versions is not None
    metrics = {"rollout/staleness": sum(began_at - version for version in samples.weight_versions) / max(len(samples), 1)}
    counted = samples["loss_mask"].sum(dim=1) > 0
    if not counted.any():
        return metrics
    counts = samples["loss_mask"][counted] > 0
    lengths, prompts = counts.sum(dim=1).float(), counts.float().argmax(dim=1).float()  # rows begin with the prompt, without padding
    scores = samples["scores"][counted]
    for how in ("mean", "max", "min"):
        metrics[f"critic/score/{how}"] = float(getattr(scores, how)())
        metrics[f"response_length/{how}"] = float(getattr(lengths, how)())
        metrics[f"prompt_length/{how}"] = float(getattr(prompts, how)())
    return metrics | {"response_length/clip_ratio": float((lengths >= config.rollout.max_response_tokens).float().mean())}


def some_completions(samples: TrainingBatch, count: int) -> list[Completion]:
    rows = range(0, len(samples), max(1, len(samples) // max(count, 1)))[:count]
    return [Completion(str(samples.column("prompt")[i]), samples.column("completion")[i], float(samples["scores"][i])) for i in rows]
