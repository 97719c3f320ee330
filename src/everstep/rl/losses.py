"""Token losses as sums with weights, so that any cut of a batch into micro-batches and ranks adds up to the same step.

Legend: B samples, T token columns; log-probabilities and masks are aligned with the target token (column t scores
``input_ids[:, t]``). Every aggregation is a pair (sum, weight); the loss of a step is the sum of sums over the sum of
weights, each taken over the *global* batch. Nothing here divides by a count that depends on how the batch was cut.

    aggregation              sum                                    weight
    token-mean               sum over tokens                        tokens
    seq-mean-token-mean      sum over rows of the row's token mean  rows
    seq-mean-token-sum       sum over tokens                        rows
    seq-mean-token-sum-norm  sum over tokens / horizon              rows      (Dr.GRPO, arXiv 2503.20783)
    token-sum                sum over tokens                        1: of a whole batch only, as it cannot be cut

Where implementations differ, the choice has a name, and the configuration a key (``rl.*``) for it: rows without a token are
left out of the count of rows (``empty_rows`` = skip: verl) or in it (count: TRL); ``horizon`` is a constant, by default
rollout.max_response_tokens (TRL; verl's default, the padded width, would let the loss depend on how a batch is cut); the
entropy has the aggregation of the policy loss (verl; TRL takes the token mean); log-ratios are clamped to [-20, 20].

``policy_loss``, ``value_loss`` and ``sft_loss`` are the factories a ``LossSpec`` names. Metric names are verl's where the
meaning is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.engine.loss import LossFn, LossOutput
from everstep.errors import ConfigError
from everstep.rl.kl import LOG_RATIO_LIMIT, KlClamp, KlKind, kl_terms

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
EmptyRows = Literal["skip", "count"]
RatioLevel = Literal["token", "sequence", "sequence_token"]


# ------------------------------------------------------------------------------------------------ pure parts


def aggregate(
    values: Tensor,
    mask: Tensor,
    how: Aggregation | Literal["token-sum"],
    horizon: float | None = None,
    empty_rows: EmptyRows = "skip",
) -> tuple[Tensor, Tensor]:
    """Values (B, T) and mask (B, T) of 0/1 -> (sum, weight), two scalars; see the table above.

    Entries where the mask is 0 have no influence, not even if they are infinite or NaN. ConfigError for an unknown
    aggregation, or one that lacks its horizon.
    """
    mask = mask.to(values.dtype)
    rows = torch.where(mask > 0, values, 0.0).mul(mask).sum(dim=1)
    tokens = mask.sum(dim=1)
    if how == "token-mean":
        return rows.sum(), tokens.sum()
    if how == "token-sum":
        return rows.sum(), torch.ones_like(rows.sum())
    count = (tokens >= 0 if empty_rows == "count" else tokens > 0).to(values.dtype).sum()
    if how == "seq-mean-token-mean":
        return (rows / tokens.clamp(min=1.0)).sum(), count
    if how == "seq-mean-token-sum":
        return rows.sum(), count
    if how == "seq-mean-token-sum-norm":
        if horizon is None or horizon <= 0:
            raise ConfigError(f"rl.loss_aggregation={how} divides by rl.loss_horizon_tokens, which is {horizon}; give a number above 0")
        return rows.sum() / horizon, count
    raise ConfigError(f"unknown aggregation {how!r}; choose one of {', '.join(get_args(Aggregation))}")


def log_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: RatioLevel = "token") -> Tensor:
    """Log of the probability ratio new / old of each token, all (B, T), in [-20, 20], beyond which there is no gradient; 0 where the mask is.

    token           new - old of the token (PPO, GRPO)
    sequence        the mean of these over the completion, on each of its tokens (GSPO, arXiv 2507.18071); its gradient goes
                    to every token of the completion
    sequence_token  the same value, but with the gradient of the token's own log-probability alone (GSPO-token, ibid.); equal
                    to ``sequence`` where the advantage is the same on all tokens, and right where it is not
    """
    # The mask comes first: padding may hold anything, and exp(inf) * 0 would be NaN in the gradient.
    difference = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    if level == "token":
        return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    tokens = (mask > 0).sum(dim=1, keepdim=True).clamp(min=1)
    mean = difference.sum(dim=1, keepdim=True) / tokens
    if level == "sequence_token":
        own = torch.where(mask > 0, logprobs, 0.0)
        mean = mean.detach() + (own - own.detach())
    if level in ("sequence", "sequence_token"):
        return torch.where(mask > 0, mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)
    raise ConfigError(f"rl.ratio={level!r} is unknown; choose one of {', '.join(get_args(RatioLevel))}")


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
    ratio: RatioLevel = "token",
) -> PolicyTerms:
    """PPO's clipped objective per token, all arguments (B, T); unaggregated.

    With r the ratio of ``log_ratios``: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (arXiv 1707.06347);
    ``clip_high`` > ``clip_low`` is DAPO's clip-higher (arXiv 2503.14476). ``dual_clip`` = c bounds the loss of a token
    with negative advantage by -A c (arXiv 1912.09729), which matters when r is huge. ``neg_log_ratio`` is of single tokens,
    whatever r is.
    """
    advantages = torch.where(mask > 0, advantages, 0.0)
    r = log_ratios(logprobs, old_logprobs, mask, ratio).exp()
    free = -advantages * r
    clamped = -advantages * r.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, clamped)
    beyond = ((advantages > 0) & (r > 1.0 + clip_high)) | ((advantages < 0) & (r < 1.0 - clip_low))
    lower = torch.zeros_like(beyond)
    if dual_clip is not None:
        lower = (advantages < 0) & (r > dual_clip)
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    moved = log_ratios(logprobs.detach(), old_logprobs, mask)
    return PolicyTerms(loss, -moved, beyond.to(loss.dtype), lower.to(loss.dtype))


@dataclass(frozen=True)
class ValueTerms:
    """Per-token (B, T) parts of the critic's loss; ``clipped`` holds 0 or 1."""

    loss: Tensor
    clipped: Tensor


def value_terms(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = None) -> ValueTerms:
    """Half the squared error of the critic per token, all arguments (B, T); unaggregated.

    With ``clip`` = c the value may gain nothing by moving farther than c from what it was at the rollout:
    max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2 (as in OpenAI's baselines; arXiv 2005.12729).
    """
    values, old_values, returns = (torch.where(mask > 0, x, 0.0) for x in (values, old_values, returns))
    free = (values - returns).square()
    if clip is None:
        return ValueTerms(0.5 * free, torch.zeros_like(free))
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    held = (near - returns).square()
    return ValueTerms(0.5 * torch.maximum(free, held), (held > free).to(free.dtype))


# ------------------------------------------------------------------------------------------------ loss functions


@dataclass
class PolicyLoss:
    """Clipped policy loss - entropy_coef * entropy + kl_coef * KL, all with one aggregation. See ``policy_loss``."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    ratio: RatioLevel
    kl_coef: float
    kl_kind: KlKind
    kl_clamp: KlClamp
    entropy_coef: float
    aggregation: Aggregation
    horizon: float | None
    empty_rows: EmptyRows
    on_policy: bool
    weighted: bool
    needs_entropy: bool
    metric_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = ["actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"]
        names += ["actor/kl_loss"] if self.kl_coef > 0 else []
        names += ["actor/entropy"] if self.needs_entropy else []
        self.metric_names = tuple(names)

    def weight(self, batch: TrainingBatch) -> Tensor:
        return self._aggregate(torch.zeros_like(batch["loss_mask"]), batch["loss_mask"])[1]

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: TrainingBatch) -> LossOutput:
        mask = batch["loss_mask"]
        old = logprobs.detach() if self.on_policy else batch["old_logprobs"]
        terms = clipped_policy_terms(
            logprobs, old, batch["advantages"], mask, self.clip_low, self.clip_high, self.dual_clip, self.ratio
        )
        losses = terms.loss * batch["importance_weights"] if self.weighted else terms.loss
        loss_sum, weight = self._aggregate(losses, mask)
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            "actor/pg_loss": (loss_sum.detach(), weight),
            "actor/ppo_kl": aggregate(terms.neg_log_ratio, mask, "token-mean"),
            "actor/pg_clipfrac": aggregate(terms.clipped, mask, "token-mean"),
            "actor/pg_clipfrac_lower": aggregate(terms.clipped_lower, mask, "token-mean"),
        }
        if self.kl_coef > 0:
            kl_sum, _ = self._aggregate(kl_terms(logprobs, batch["ref_logprobs"], mask, self.kl_kind, self.kl_clamp), mask)
            loss_sum = loss_sum + self.kl_coef * kl_sum
            metrics["actor/kl_loss"] = (kl_sum.detach(), weight)
        if self.needs_entropy:
            if entropy is None:
                raise ValueError("PolicyLoss.needs_entropy is set, but the engine gave no entropy")
            if self.entropy_coef == 0:
                entropy = entropy.detach()
            entropy_sum, _ = self._aggregate(entropy, mask)
            if self.entropy_coef > 0:
                loss_sum = loss_sum - self.entropy_coef * entropy_sum
            metrics["actor/entropy"] = (entropy_sum.detach(), weight)
        return LossOutput(loss_sum, weight, metrics)

    def _aggregate(self, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return aggregate(values, mask, self.aggregation, self.horizon, self.empty_rows)


@dataclass
class ValueLoss:
    """Half the squared error of a critic, clipped. See ``value_loss``."""

    clip: float | None
    aggregation: Aggregation
    horizon: float | None
    empty_rows: EmptyRows
    needs_entropy: bool = False
    metric_names: tuple[str, ...] = ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")

    def weight(self, batch: TrainingBatch) -> Tensor:
        return self._aggregate(torch.zeros_like(batch["loss_mask"]), batch["loss_mask"])[1]

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: TrainingBatch) -> LossOutput:
        values, mask = logprobs, batch["loss_mask"]  # what an engine with a value head gives in the place of log-probabilities
        terms = value_terms(values, batch["values"], batch["returns"], mask, self.clip)
        loss_sum, weight = self._aggregate(terms.loss, mask)
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            "critic/vf_loss": (loss_sum.detach(), weight),
            "critic/vf_clipfrac": aggregate(terms.clipped, mask, "token-mean"),
            "critic/vpred_mean": aggregate(values.detach(), mask, "token-mean"),
        }
        return LossOutput(loss_sum, weight, metrics)

    def _aggregate(self, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return aggregate(values, mask, self.aggregation, self.horizon, self.empty_rows)


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
    ratio: RatioLevel = "token",
    kl_coef: float = 0.0,
    kl_kind: KlKind = "k3",
    kl_clamp: KlClamp = "k3",
    entropy_coef: float = 0.0,
    aggregation: Aggregation = "token-mean",
    horizon: float | None = None,
    empty_rows: EmptyRows = "skip",
    on_policy: bool = False,
    weighted: bool = False,
    report_entropy: bool = True,
) -> LossFn:
    """The loss of GRPO, PPO and their relatives; the arguments are those of section ``rl`` of the configuration.

    The batch must hold ``advantages`` and ``loss_mask`` (B, T), ``old_logprobs`` unless ``on_policy`` (then the ratio is
    1 by construction, right when each batch is used for one step only), ``ref_logprobs`` if ``kl_coef`` > 0, and
    ``importance_weights`` if ``weighted`` (they multiply the policy loss, not KL and entropy; see ``rl/importance.py``).
    ``report_entropy`` asks the engine for the entropy as a metric even when it is not in the loss.
    ConfigError for values that make no loss.
    """
    _check_choice("rl.loss_aggregation", aggregation, get_args(Aggregation))
    _check_choice("rl.kl_kind", kl_kind, get_args(KlKind))
    _check_choice("rl.kl_clamp", kl_clamp, get_args(KlClamp))
    _check_choice("rl.ratio", ratio, get_args(RatioLevel))
    _check_choice("rl.empty_rows", empty_rows, get_args(EmptyRows))
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
        ratio,
        kl_coef,
        kl_kind,
        kl_clamp,
        entropy_coef,
        aggregation,
        horizon,
        empty_rows,
        on_policy,
        weighted,
        needs_entropy=report_entropy or entropy_coef > 0,
    )


def value_loss(
    clip: float | None = 0.5,
    aggregation: Aggregation = "token-mean",
    horizon: float | None = None,
    empty_rows: EmptyRows = "skip",
) -> LossFn:
    """The critic's loss. In the place of log-probabilities the engine gives the critic's values (B, T).

    The batch must hold ``values`` (those of the critic before the first update of the iteration), ``returns`` (see
    ``advantages.gae``) and ``loss_mask``, all (B, T). ConfigError for values that make no loss.
    """
    _check_choice("critic.loss_aggregation", aggregation, get_args(Aggregation))
    if clip is not None and clip <= 0:
        raise ConfigError(f"critic.value_clip={clip} must be greater than 0, or null")
    return ValueLoss(clip, aggregation, horizon, empty_rows)


def sft_loss(aggregation: Aggregation = "token-mean") -> LossFn:
    """Cross-entropy over the tokens where ``loss_mask`` is 1. ConfigError for an unknown aggregation."""
    _check_choice("aggregation", aggregation, get_args(Aggregation))
    return SftLoss(aggregation)


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value!r} is unknown; choose one of {', '.join(choices)}")
