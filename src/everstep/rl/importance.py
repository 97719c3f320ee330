r"""Correction for the difference between the engine that generated and the one that trains.

Rollouts come from another implementation (kernels, precision, sometimes older weights), so a token that was drawn with
probability exp(rollout) has exp(old) in the trainer. Truncated importance sampling multiplies each token's policy loss (not
the KL and entropy terms) by a constant weight:

    token     w_t = exp(old_t - rollout_t)
    sequence  w   = exp(sum_t m_t (old_t - rollout_t)), the same for each token of a completion

capped at ``upper`` ("Your efficient RL framework secretly brings you off-policy RL training", F. Yao et al., 2025; truncation:
E. Ionides, 2008), or, with ``lower``, set to 0 outside [lower, upper] (IcePop, arXiv 2510.18855).
``normalise`` divides by the mean weight of the batch: over the tokens that count, or over completions (verl's option).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from everstep.rl.kl import LOG_RATIO_LIMIT

Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class Weights:
    """``weights`` (B, T), 0 where the mask is. ``mean``: over tokens, before normalisation; ``beyond``: share of tokens above
    ``upper``."""

    weights: Tensor
    mean: float
    beyond: float


def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    level: Level = "token",
    upper: float = 2.0,
    lower: float | None = None,
    normalise: bool = False,
) -> Weights:
    """Weights of the tokens of a whole batch; all tensors (B, T). To be computed before the batch is cut: means are global."""
    counts = mask > 0
    difference = torch.where(counts, old_logprobs - rollout_logprobs, 0.0).detach().to(torch.float32)
    if level == "sequence":
        difference = difference.sum(dim=1, keepdim=True).expand_as(difference)
    weights = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    above = weights > upper
    if lower is None:
        weights = weights.clamp(max=upper)
    else:
        weights = torch.where(above | (weights < lower), 0.0, weights)
    if not counts.any():
        return Weights(weights * counts, 1.0, 0.0)
    if normalise:
        divisor = _mean(weights[counts] if level == "token" else weights[:, 0][counts.any(dim=1)])
        used = weights / divisor if divisor > 0 else weights
    else:
        used = weights
    return Weights(used * counts, _mean(weights[counts]), _mean(above[counts]))


def _mean(values: Tensor) -> float:
    return float(values.to(torch.float64).mean())
