"""From one score per completion to advantages per token, as section ``rl`` of the configuration says. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import RlConfig, RolloutConfig
from everstep.engine.loss import LossSpec
from everstep.rl import advantages
from everstep.rl.importance import importance_weights
from everstep.rl.kl import adapted, kl_terms, mean_kl, token_rewards


def assign(
    samples: TrainingBatch, scores: Tensor, rl: RlConfig, kl_coef: float
) -> tuple[TrainingBatch, dict[str, float]]:
    """(samples with ``advantages`` and what else the loss reads, metrics). ``scores``: (B,); ``kl_coef``: the present one.

    Reads ``loss_mask``, the column ``group``, ``old_logprobs`` if ``pipeline.needs_old_logprobs``, ``ref_logprobs`` if ``kl_coef`` > 0,
    ``rollout_logprobs`` if both are there to compare, ``values`` for rl.advantage=gae (which adds ``returns``). All (B, T).
    """
    mask = samples["loss_mask"]
    rewards, metrics = token_rewards(scores, mask), dict[str, float]()
    if kl_coef > 0 and rl.kl_in == "reward":
        kl = kl_terms(samples["old_logprobs"], samples["ref_logprobs"], mask, rl.kl_kind, rl.kl_clamp)
        rewards = rewards - kl_coef * kl
        metrics |= {"actor/reward_kl_penalty": mean_kl(kl, mask), "actor/reward_kl_penalty_coeff": kl_coef}
    elif kl_coef > 0:
        metrics["actor/kl_coef"] = kl_coef
    conventions = advantages.Conventions(
        eps=rl.advantage_eps, gamma=rl.gamma, lam=rl.lam, whitening=rl.whitening, lone_completion=rl.lone_completion, gaps=rl.gaps
    )
    values = samples.tensors.get("values")
    estimates, returns = advantages.estimate(rl.advantage, rewards, mask, samples.column("group"), conventions, values)
    samples = samples.with_tensors(advantages=estimates, **({} if returns is None else {"returns": returns}))
    if "old_logprobs" in samples and "rollout_logprobs" in samples:
        old, rollout = samples["old_logprobs"], samples["rollout_logprobs"]
        metrics["rollout_corr/kl"] = float(torch.where(mask > 0, rollout - old, 0.0).sum() / mask.sum().clamp(min=1.0))
        if rl.importance.level != "none":
            i = rl.importance
            weights = importance_weights(old, rollout, mask, i.level, i.upper, i.lower, i.normalise)  # type: ignore[arg-type]
            samples = samples.with_tensors(importance_weights=weights.weights)
            metrics["rollout_corr/rollout_is_mean"] = weights.mean
            metrics["rollout_corr/rollout_is_ratio_fraction_high"] = weights.beyond
    counted = (mask > 0).any(dim=1)  # a completion that was dropped has no reward
    spreads = [("rewards", rewards.sum(dim=1)[counted]), ("advantages", estimates[mask > 0])]
    if values is not None and returns is not None:
        spreads += [("values", values[mask > 0]), ("returns", returns[mask > 0])]
    for name, numbers in spreads:
        if len(numbers):
            metrics |= {f"critic/{name}/{how}": float(getattr(numbers, how)()) for how in ("mean", "max", "min")}
    return samples, metrics


def next_kl_coef(samples: TrainingBatch, rl: RlConfig, kl_coef: float) -> float:
    """The coefficient of the next iteration: another one with rl.kl_target. Part of the recipe's state, saved with its cursor."""
    if not rl.kl_target or kl_coef == 0:
        return kl_coef
    mask = samples["loss_mask"]
    kl = kl_terms(samples["old_logprobs"], samples["ref_logprobs"], mask, rl.kl_kind, rl.kl_clamp)
    return adapted(kl_coef, mean_kl(kl, mask), rl.kl_target, len(samples), rl.kl_horizon_samples)


def policy_loss(rl: RlConfig, rollout: RolloutConfig, on_policy: bool, kl_coef: float) -> LossSpec:
    """The loss that ``rl`` describes, to be sent to the workers."""
    return LossSpec(
        "everstep.rl.losses:policy_loss",
        dict(
            clip_low=rl.clip_low,
            clip_high=rl.clip_high,
            dual_clip=rl.dual_clip,
            ratio=rl.ratio,
            kl_coef=kl_coef if rl.kl_in == "loss" else 0.0,
            kl_kind=rl.kl_kind,
            kl_clamp=rl.kl_clamp,
            entropy_coef=rl.entropy_coef,
            aggregation=rl.loss_aggregation,
            horizon=rl.loss_horizon_tokens or rollout.max_response_tokens,
            empty_rows=rl.empty_rows,
            on_policy=on_policy,
            weighted=rl.importance.level != "none",
        ),
    )


def value_loss(rl: RlConfig, rollout: RolloutConfig, clip: float | None) -> LossSpec:
    """The critic's loss, aggregated as the policy's is."""
    horizon = rl.loss_horizon_tokens or rollout.max_response_tokens
    return LossSpec(
        "everstep.rl.losses:value_loss", dict(clip=clip, aggregation=rl.loss_aggregation, horizon=horizon, empty_rows=rl.empty_rows)
    )
