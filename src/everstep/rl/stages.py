"""What the standard stages compute (:func:`everstep.rl.pipeline.standard` says when). Legend: B samples, T token columns."""

from __future__ import annotations

import functools
import operator
import time

from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.dispatch import mesh_of
from everstep.config import derive
from everstep.engine.loss import LossSpec
from everstep.rl import credit, dynamic
from everstep.rl.execute import Context
from everstep.rl.rewards import Scores, without_dropped
from everstep.rl.rollout import Sampling


def _forward(context: Context, samples: TrainingBatch) -> str:
    """How samples are dealt to the ranks that evaluate them."""
    train = context.config.train
    packed = train.tokens_per_micro_batch is not None  # then who shares a row depends on all of a rank's samples
    return mesh_of(context.config.recovery, max(1, len(samples)) if packed else derive.micro_batch_size(train))


def rollout(context: Context, prompts: TrainingBatch) -> TrainingBatch:
    """One completion for each row; see ``TransformersRollout.generate`` for its columns."""
    samples: TrainingBatch = context.group.rollout(prompts, Sampling.for_training(context.config))
    return samples


def reward(context: Context, samples: TrainingBatch) -> tuple[dict[str, Tensor], dict[str, float]]:
    """``scores`` (B,), and with reward.on_error=drop ``dropped`` (B,); the means of several terms as metrics."""
    found = context.reward(samples)
    return found.tensors(context.config.reward.on_error == "drop"), found.metrics


def scored_rollout(context: Context, prompts: TrainingBatch) -> tuple[TrainingBatch, dict[str, float]]:
    """Completions with ``scores`` and perhaps ``dropped`` (B,): groups without a difference are replaced (rl.dynamic_sampling_rounds).
    Means of several terms are over all that were scored, the dropped ones too; the seconds for rewards are a part of the stage's."""
    rounds: list[Scores] = []
    seconds = 0.0

    def scored(prompts: TrainingBatch) -> TrainingBatch:
        nonlocal seconds
        made = rollout(context, prompts)
        context.group.enter_stage("reward")
        begin = time.monotonic()
        rounds.append(context.group.once(context.reward, made, not rounds))  # a later one replaces a prompt or two
        seconds += time.monotonic() - begin
        context.group.enter_stage("rollout")
        return made.with_tensors(**rounds[-1].tensors(context.config.reward.on_error == "drop"))

    more = lambda count: scored(context.prompts(count))
    collected = dynamic.collect(scored(prompts), context.config.rl.dynamic_sampling_rounds, more)
    context.dropped(collected.dropped)
    return collected.samples, collected.metrics | functools.reduce(operator.add, rounds).metrics | {"timing_s/reward": seconds}


def old_logprob(context: Context, samples: TrainingBatch) -> dict[str, Tensor]:
    """``old_logprobs`` (B, T): of the policy that is about to be updated, which is the one that generated."""
    scored = context.group.call(_forward(context, samples), "logprobs", samples, context.config.rollout.temperature)
    return {"old_logprobs": scored["logprobs"]}


def ref_logprob(context: Context, samples: TrainingBatch) -> dict[str, Tensor]:
    """``ref_logprobs`` (B, T): of the reference model."""
    scored = context.group.call(_forward(context, samples), "logprobs", samples, context.config.rollout.temperature, "reference")
    return {"ref_logprobs": scored["ref_logprobs"]}


def values(context: Context, samples: TrainingBatch) -> dict[str, Tensor]:
    """``values`` (B, T): the critic's, of the state before each token."""
    return {"values": context.group.call(_forward(context, samples), "values", samples)["values"]}


def advantages(context: Context, samples: TrainingBatch) -> tuple[dict[str, Tensor], dict[str, float]]:
    """``advantages`` (B, T), as section ``rl`` says; with a critic also ``returns``; ``importance_weights`` if they are asked for."""
    credited, metrics = credit.assign(without_dropped(samples), samples["scores"], context.config.rl, context.kl_coef)
    return {name: tensor for name, tensor in credited.tensors.items() if name not in samples}, metrics


def actor_loss(context: Context) -> LossSpec:
    rl = context.config.rl
    return credit.policy_loss(rl, context.config.rollout, on_policy=rl.passes * rl.updates_per_pass == 1, kl_coef=context.kl_coef)


def critic_loss(context: Context) -> LossSpec:
    return credit.value_loss(context.config.rl, context.config.rollout, context.config.critic.value_clip)
