"""What the standard stages compute (:func:`everstep.rl.pipeline.standard` says when). Legend: B samples, T token columns."""

from __future__ import annotations

import torch
from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.config import derive
from everstep.engine.loss import LossSpec
from everstep.rl import advantages as estimators
from everstep.rl.execute import Context
from everstep.rl.rewards import score
from everstep.rl.rollout import Sampling


def rollout(context: Context, prompts: TrainingBatch) -> TrainingBatch:
    """One completion for each row; see ``TransformersRollout.generate`` for its columns."""
    samples: TrainingBatch = context.group.call("mesh", "generate", prompts, Sampling.for_training(context.config))
    return samples


def reward(context: Context, samples: TrainingBatch) -> dict[str, Tensor]:
    """``scores`` (B,)."""
    return {"scores": torch.tensor(score(context.reward, samples), dtype=torch.float32)}


def old_logprob(context: Context, samples: TrainingBatch) -> dict[str, Tensor]:
    """``old_logprobs`` (B, T): of the policy that is about to be updated, which is the one that generated."""
    scored = context.group.call("mesh", "logprobs", samples, context.config.rollout.temperature)
    return {"old_logprobs": scored["logprobs"]}


def ref_logprob(context: Context, samples: TrainingBatch) -> dict[str, Tensor]:
    """``ref_logprobs`` (B, T): of the reference model."""
    scored = context.group.call("mesh", "logprobs", samples, context.config.rollout.temperature, "reference")
    return {"ref_logprobs": scored["ref_logprobs"]}


def values(context: Context, samples: TrainingBatch) -> dict[str, Tensor]:
    """``values`` (B, T): the critic's, of the state before each token."""
    return {"values": context.group.call("mesh", "values", samples)["values"]}


def advantages(context: Context, samples: TrainingBatch) -> dict[str, Tensor]:
    """``advantages`` (B, T), as ``rl.advantage`` says."""
    rl = context.config.rl
    estimates = estimators.estimate(rl.advantage, samples["scores"], samples.column("group"), rl.advantage_eps)
    return {"advantages": estimators.spread(estimates, samples["loss_mask"])}


def actor_loss(context: Context) -> LossSpec:
    rl = context.config.rl
    sizes = derive.sizes(context.config).rl
    assert sizes is not None
    return LossSpec(
        "everstep.rl.losses:policy_loss",
        dict(
            clip_low=rl.clip_low, clip_high=rl.clip_high, dual_clip=rl.dual_clip, kl_coef=rl.kl_coef, kl_kind=rl.kl_kind,
            entropy_coef=rl.entropy_coef, aggregation=rl.loss_aggregation, on_policy=sizes.updates_per_iteration == 1,
        ),
    )  # fmt: skip
