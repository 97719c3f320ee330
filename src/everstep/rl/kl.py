r"""KL to a reference model: estimates per token, as a term of the loss or as a penalty in the reward, with a fixed or an
adaptive coefficient.

With x = log p(policy) - log p(reference) of a sampled token (J. Schulman, "Approximating KL divergence"; for the gradients
see "On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477):

    kind  value              gradient in a loss (with respect to the policy's log-probability)
    k1    x                  1: no pull towards the reference at all, in expectation; right in the reward
    abs   |x|                sign(x)
    k2    x^2 / 2            x: that of the reverse KL, on policy
    k3    exp(-x) + x - 1    1 - exp(-x): that of the forward KL; value unbiased, never negative (GRPO's choice)
    k1+   k1's value, k2's gradient
    k3+   k3's value, k2's gradient

Of a token far from the reference (``clamp``): ``k3`` clamps x of k3 to [-20, 20] and its value to [-10, 10], as verl does; ``all`` the
value of every estimator to [-10, 10], as OpenRLHF does; ``none``, as TRL, nothing, so that exp(-x) may overflow. Beyond a clamp
there is no gradient, but for k1+ and k3+, whose gradient is k2's everywhere.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from everstep.errors import ConfigError

KlKind = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]
KlClamp = Literal["k3", "all", "none"]

LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8: far beyond any clip range, far below overflow (verl's limit)
_VALUE_LIMIT = 10.0  # of one token's estimate (verl, OpenRLHF)

_LARGEST_ERROR = 0.2  # of the adaptive coefficient, relative to its target (arXiv 1909.08593, section 2.2)


def kl_terms(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: KlKind, clamp: KlClamp = "k3") -> Tensor:
    """Estimate of KL(policy || reference) per token, all (B, T); 0 where the mask is. ConfigError for an unknown kind."""
    x = torch.where(mask > 0, logprobs - ref_logprobs, 0.0)
    if kind in ("k1+", "k3+"):
        slope = 0.5 * x * x
        value = kl_terms(logprobs.detach(), ref_logprobs, mask, "k1" if kind == "k1+" else "k3", clamp)
        return value + slope - slope.detach()
    if kind == "k1":
        value = x
    elif kind == "abs":
        value = x.abs()
    elif kind == "k2":
        value = 0.5 * x * x
    elif kind == "k3":
        x = x if clamp == "none" else x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        value = (-x).exp() + x - 1.0
    else:
        raise ConfigError(f"rl.kl_kind={kind!r} is unknown; choose one of {', '.join(get_args(KlKind))}")
    return value.clamp(-_VALUE_LIMIT, _VALUE_LIMIT) if clamp in (kind, "all") else value


def token_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """One reward per completion (B,) -> one per token (B, T): all of it on the last token that counts.

    A completion without a token that counts has no place for its reward, and gets none.
    """
    counts = mask > 0
    column = torch.arange(mask.shape[1], device=mask.device).expand_as(counts)
    last = torch.where(counts, column, -1).amax(dim=1, keepdim=True) if mask.shape[1] else column.new_full((len(mask), 1), -1)
    return torch.where(column == last, scores.to(mask.device, torch.float32).unsqueeze(1), 0.0)


def mean_kl(kl: Tensor, mask: Tensor) -> float:
    """Mean over completions with a token that counts, of each one's mean over its tokens (as verl steers its adaptive coefficient).

    ``kl`` (B, T) is 0 where the mask is.
    """
    tokens = (mask > 0).sum(dim=1)
    used = tokens > 0
    if not used.any():
        return 0.0
    return float((kl.to(torch.float64).sum(dim=1)[used] / tokens[used]).mean())


def adapted(coef: float, kl: float, target: float, samples: int, horizon_samples: int) -> float:
    """The coefficient after ``samples`` completions whose KL was ``kl``: pushed so that KL approaches ``target``.

    coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(samples / horizon_samples, 1)). Source: arXiv 1909.08593, section 2.2; the
    bound of 1 is ours: it keeps the coefficient positive whatever the horizon.
    A pure function: the coefficient itself is state of the recipe, saved and resumed with it.
    """
    error = max(-_LARGEST_ERROR, min(_LARGEST_ERROR, kl / target - 1.0))
    return coef * (1.0 + error * min(samples / horizon_samples, 1.0))
