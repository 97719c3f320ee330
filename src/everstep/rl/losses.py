"""Token losses as sums with weights, so that any cut of a batch into micro-batches and ranks adds up to the same step.

Legend: B samples, T token columns; log-probabilities and masks are aligned with the target token (column t scores
``input_ids[:, t]``). Every aggregation is a pair (sum, weight); the loss of a step is the sum of sums over the sum of
weights, each taken over the *global* batch. Nothing here divides by a count that depends on how the batch was cut.

    aggregation            sum                                    weight
    token-mean             sum over tokens                        tokens
    seq-mean-token-mean    sum over rows of the row's token mean  rows with at least one token
    seq-mean-token-sum     sum over tokens                        rows with at least one token

Rows without a token are left out of the row count (verl's choice; TRL counts them).

``policy_loss`` and ``sft_loss`` are the factories a ``LossSpec`` names. Metric names are verl's where the meaning is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.engine.loss import LossFn, LossOutput
from everstep.errors import ConfigError

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
KlKind = Literal["k1", "k2", "k3"]

_LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8: far beyond any clip range, far below overflow (verl's limit)
_K3_LIMIT = 10.0  # verl's limit of one token's k3; a token beyond it has no gradient


# ------------------------------------------------------------------------------------------------ pure parts


def aggregate(values: Tensor, mask: Tensor, how: Aggregation) -> tuple[Tensor, Tensor]:
    """Values (B, T) and mask (B, T) of 0/1 -> (sum, weight), two scalars; see the table above.

    Entries where the mask is 0 have no influence, not even if they are infinite or NaN.
    """
    mask = mask.to(values.dtype)
    rows = torch.where(mask > 0, values, 0.0).mul(mask).sum(dim=1)
    tokens = mask.sum(dim=1)
    if how == "token-mean":
        return rows.sum(), tokens.sum()
    count = (tokens > 0).to(values.dtype).sum()
    if how == "seq-mean-token-mean":
        return (rows / tokens.clamp(min=1.0)).sum(), count
    if how == "seq-mean-token-sum":
        return rows.sum(), count
    raise ConfigError(f"unknown aggregation {how!r}; choose one of {', '.join(get_args(Aggregation))}")


@dataclass(frozen=True)
class PolicyTerms:
    """Per-token (B, T) parts of the clipped policy loss; ``clipped`` and ``clipped_lower`` hold 0 or 1."""

    loss: Tensor
    neg_log_ratio: Tensor
    clipped: Tensor
    clipped_lower: Tensor


def clipped_policy_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """PPO's clipped objective per token, all arguments (B, T); unaggregated.

    With r = exp(logprobs - old_logprobs): max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (arXiv 1707.06347);
    ``clip_high`` > ``clip_low`` is DAPO's clip-higher (arXiv 2503.14476). ``dual_clip`` = c bounds the loss of a token
    with negative advantage by -A c (arXiv 1912.09729), which matters when r is huge.
    """
    # The mask comes first: padding may hold anything, and exp(inf) * 0 would be NaN in the gradient.
    difference = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    advantages = torch.where(mask > 0, advantages, 0.0)
    difference = difference.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    ratio = difference.exp()
    free = -advantages * ratio
    clamped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, clamped)
    beyond = ((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low))
    lower = torch.zeros_like(beyond)
    if dual_clip is not None:
        lower = (advantages < 0) & (ratio > dual_clip)
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return PolicyTerms(loss, -difference.detach(), beyond.to(loss.dtype), lower.to(loss.dtype))


def kl_terms(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: KlKind) -> Tensor:
    """Estimate of KL(policy || reference) per token, (B, T). Source: J. Schulman, "Approximating KL divergence".

    With x = logprobs - ref_logprobs: k1 is x, k2 is x^2/2, k3 is exp(-x) + x - 1. k3 clamps x to [-20, 20] and its value
    to [-10, 10] as verl does.
    """
    x = torch.where(mask > 0, logprobs - ref_logprobs, 0.0)
    if kind == "k1":
        return x
    if kind == "k2":
        return 0.5 * x * x
    if kind == "k3":
        x = x.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
        return ((-x).exp() + x - 1.0).clamp(-_K3_LIMIT, _K3_LIMIT)
    raise ConfigError(f"rl.kl_kind={kind!r} is unknown; choose one of {', '.join(get_args(KlKind))}")


# ------------------------------------------------------------------------------------------------ loss functions


@dataclass
class PolicyLoss:
    """Clipped policy loss - entropy_coef * entropy + kl_coef * KL, all with one aggregation. See ``policy_loss``."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coef: float
    kl_kind: KlKind
    entropy_coef: float
    aggregation: Aggregation
    on_policy: bool
    needs_entropy: bool
    metric_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = ["actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"]
        names += ["actor/kl_loss"] if self.kl_coef > 0 else []
        names += ["actor/entropy"] if self.needs_entropy else []
        self.metric_names = tuple(names)

    def weight(self, batch: TrainingBatch) -> Tensor:
        return aggregate(torch.zeros_like(batch["loss_mask"]), batch["loss_mask"], self.aggregation)[1]

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: TrainingBatch) -> LossOutput:
        mask = batch["loss_mask"]
        old = logprobs.detach() if self.on_policy else batch["old_logprobs"]
        terms = clipped_policy_terms(logprobs, old, batch["advantages"], mask, self.clip_low, self.clip_high, self.dual_clip)
        loss_sum, weight = aggregate(terms.loss, mask, self.aggregation)
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            "actor/pg_loss": (loss_sum.detach(), weight),
            "actor/ppo_kl": aggregate(terms.neg_log_ratio, mask, "token-mean"),
            "actor/pg_clipfrac": aggregate(terms.clipped, mask, "token-mean"),
            "actor/pg_clipfrac_lower": aggregate(terms.clipped_lower, mask, "token-mean"),
        }
        if self.kl_coef > 0:
            kl_sum, _ = aggregate(kl_terms(logprobs, batch["ref_logprobs"], mask, self.kl_kind), mask, self.aggregation)
            loss_sum = loss_sum + self.kl_coef * kl_sum
            metrics["actor/kl_loss"] = (kl_sum.detach(), weight)
        if self.needs_entropy:
            if entropy is None:
                raise ValueError("PolicyLoss.needs_entropy is set, but the engine gave no entropy")
            if self.entropy_coef == 0:
                entropy = entropy.detach()
            entropy_sum, _ = aggregate(entropy, mask, self.aggregation)
            if self.entropy_coef > 0:
                loss_sum = loss_sum - self.entropy_coef * entropy_sum
            metrics["actor/entropy"] = (entropy_sum.detach(), weight)
        return LossOutput(loss_sum, weight, metrics)


@dataclass
class SftLoss:
    """Negative log-likelihood of the tokens that count. See ``sft_loss``."""

    aggregation: Aggregation
    needs_entropy: bool = False
    metric_names: tuple[str, ...] = ("train/loss",)

    def weight(self, batch: TrainingBatch) -> Tensor:
        return aggregate(torch.zeros_like(batch["loss_mask"]), batch["loss_mask"], self.aggregation)[1]

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: TrainingBatch) -> LossOutput:
        loss_sum, weight = aggregate(-logprobs, batch["loss_mask"], self.aggregation)
        return LossOutput(loss_sum, weight, {"train/loss": (loss_sum.detach(), weight)})


def policy_loss(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    kl_coef: float = 0.0,
    kl_kind: KlKind = "k3",
    entropy_coef: float = 0.0,
    aggregation: Aggregation = "token-mean",
    on_policy: bool = False,
    report_entropy: bool = True,
) -> LossFn:
    """The loss of GRPO and its relatives; the arguments are those of section ``rl`` of the configuration.

    The batch must hold ``advantages`` and ``loss_mask`` (B, T), ``old_logprobs`` unless ``on_policy`` (then the ratio is
    1 by construction, right when each batch is used for one step only), and ``ref_logprobs`` if ``kl_coef`` > 0.
    ``report_entropy`` asks the engine for the entropy as a metric even when it is not in the loss.
    ConfigError for values that make no loss.
    """
    _check_choice("rl.loss_aggregation", aggregation, get_args(Aggregation))
    _check_choice("rl.kl_kind", kl_kind, get_args(KlKind))
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ConfigError(f"rl.clip_low={clip_low} must lie in 0..1 and rl.clip_high={clip_high} must not be negative")
    if dual_clip is not None and dual_clip <= 1 + clip_high:
        raise ConfigError(f"rl.dual_clip={dual_clip} must be greater than 1 + rl.clip_high = {1 + clip_high}, or null")
    if kl_coef < 0 or entropy_coef < 0:
        raise ConfigError(f"rl.kl_coef={kl_coef} and rl.entropy_coef={entropy_coef} must not be negative")
    return PolicyLoss(
        clip_low,
        clip_high,
        dual_clip,
        kl_coef,
        kl_kind,
        entropy_coef,
        aggregation,
        on_policy,
        needs_entropy=report_entropy or entropy_coef > 0,
    )


def sft_loss(aggregation: Aggregation = "token-mean") -> LossFn:
    """Cross-entropy over the tokens where ``loss_mask`` is 1. ConfigError for an unknown aggregation."""
    _check_choice("aggregation", aggregation, get_args(Aggregation))
    return SftLoss(aggregation)


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value!r} is unknown; choose one of {', '.join(choices)}")
