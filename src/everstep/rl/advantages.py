r"""Advantages: GRPO, Dr.GRPO, RLOO, REINFORCE++ (with and without a baseline), and GAE for PPO with a critic.

Legend: B completions, T token columns, m the mask of tokens that count (1) in (B, T), g the group of a completion (the
completions of one prompt share one id, any hashable; they need not be adjacent), n_g its size, R_i the reward of a
completion, which is the sum of its token rewards. All functions are pure; they take and return float32 and compute in
float64, since in float32 the mean of equal rewards is not always that reward.

    grpo                          (R_i - mean_g) / (std_g + eps)         arXiv 2402.03300
    grpo_batch_std                (R_i - mean_g) / (std of all R + eps)
    dr_grpo                       R_i - mean_g                           arXiv 2503.20783
    rloo                          n_g / (n_g - 1) (R_i - mean_g)         arXiv 2402.14740
    reinforce_plus_plus           G_t = r_t + gamma G_{t+1}, whitened    arXiv 2501.03262
    reinforce_plus_plus_baseline  R_i - mean_g on each token, whitened   arXiv 2501.03262
    gae                           sum_k (gamma lam)^k delta_{t+k}        arXiv 1506.02438
                                  with delta_t = r_t + gamma V_{t+1} - V_t, and V = 0 after the last token

Where implementations differ, the choice has a name, and the configuration a key (``rl.*``) for it:

- A group whose rewards are all equal gets exactly 0, whatever the rounding: it says nothing about what is better.
- ``lone_completion``: a group of one gets ``zero`` (TRL), for the same reason, or its ``reward`` (verl: mean 0, std 1).
- ``eps`` is added to the standard deviation (divisor n - 1), not to the variance: verl 1e-6, TRL 1e-4, OpenRLHF 1e-9.
- ``whitening``: ``sample`` is (x - mean) / sqrt(var + 1e-8) with divisor N - 1 (verl), ``population`` is
  (x - mean) / sqrt(max(var, 1e-8)) with divisor N (OpenRLHF); over all tokens that count in the whole batch, on no rank's
  share of it. ``none`` leaves it out.
- ``gaps``, tokens inside a completion that do not count (what a tool wrote): ``skip`` takes the next token that counts as
  the next one (verl); ``zero`` sets their reward and value to 0 and lets the recursion, with its discounts, run through
  them (OpenRLHF).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from everstep.errors import EverstepError

Estimator = Literal[
    "grpo", "grpo_batch_std", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"
]
LoneCompletion = Literal["zero", "reward"]
Whitening = Literal["none", "sample", "population"]
Gaps = Literal["skip", "zero"]

ESTIMATORS: tuple[str, ...] = get_args(Estimator)
GROUPED = ("grpo", "grpo_batch_std", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")  # compare completions of one prompt
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")

_WHITENING_FLOOR = 1e-8


class AdvantageError(EverstepError, ValueError):
    """Rewards, groups, values and mask do not fit together, or a reward is not finite."""


# ------------------------------------------------------------------------------------------------ one number per completion


def grpo(
    rewards: Sequence[float] | Tensor,
    groups: Sequence[Hashable],
    eps: float = 1e-6,
    lone_completion: LoneCompletion = "zero",
) -> Tensor:
    """(R - mean of the group) / (std of the group + eps); B rewards and B group ids -> (B,)."""
    centred = _centre(rewards, groups, lone_completion)
    out = list(centred.values)
    for members in centred.groups:
        if len(members) == 1:
            out[members[0]] /= 1.0 + eps
            continue
        deviation = math.sqrt(math.fsum(centred.values[i] ** 2 for i in members) / (len(members) - 1))
        for i in members:
            out[i] /= deviation + eps
    return _scalars(out)


def grpo_batch_std(
    rewards: Sequence[float] | Tensor,
    groups: Sequence[Hashable],
    eps: float = 1e-4,
    lone_completion: LoneCompletion = "zero",
) -> Tensor:
    """(R - mean of the group) / (std of all B rewards + eps). (B,)."""
    centred = _centre(rewards, groups, lone_completion)
    numbers = centred.rewards
    mean = math.fsum(numbers) / max(len(numbers), 1)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / max(len(numbers) - 1, 1))
    return _scalars([value / (deviation + eps) for value in centred.values])


def dr_grpo(
    rewards: Sequence[float] | Tensor, groups: Sequence[Hashable], lone_completion: LoneCompletion = "zero"
) -> Tensor:
    """R - mean of the group. (B,). Meant for a loss that does not divide by length (``seq-mean-token-sum-norm``)."""
    return _scalars(_centre(rewards, groups, lone_completion).values)


def rloo(rewards: Sequence[float] | Tensor, groups: Sequence[Hashable], lone_completion: LoneCompletion = "zero") -> Tensor:
    """R - mean of the *other* completions of the group. (B,)."""
    centred = _centre(rewards, groups, lone_completion)
    out = list(centred.values)
    for members in centred.groups:
        for i in members:
            out[i] *= len(members) / max(len(members) - 1, 1)
    return _scalars(out)


def spread(scalars: Tensor, mask: Tensor) -> Tensor:
    """One advantage per completion (B,) -> one per token (B, T): the same number on each token that counts, else 0."""
    return scalars.to(mask.device, torch.float32).unsqueeze(1) * mask.to(torch.float32)


# ------------------------------------------------------------------------------------------------ one number per token


def returns_to_go(token_rewards: Tensor, mask: Tensor, gamma: float = 1.0, gaps: Gaps = "skip") -> Tensor:
    """G_t = r_t + gamma G_{t+1} on the tokens that count, else 0. All (B, T)."""
    rewards, counts = _tokens(token_rewards, mask, "token rewards")
    out, later = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        here = rewards[:, t] + gamma * later
        later = here if gaps == "zero" else torch.where(counts[:, t], here, later)
        out[:, t] = here
    return (out * counts).to(torch.float32)


def reinforce_plus_plus(
    token_rewards: Tensor, mask: Tensor, gamma: float = 1.0, whitening: Whitening = "sample", gaps: Gaps = "skip"
) -> tuple[Tensor, Tensor]:
    """(advantages, returns): whitened returns-to-go, and these before. All (B, T)."""
    returns = returns_to_go(token_rewards, mask, gamma, gaps)
    return whiten(returns, mask, whitening), returns


def reinforce_plus_plus_baseline(
    rewards: Sequence[float] | Tensor,
    groups: Sequence[Hashable],
    mask: Tensor,
    whitening: Whitening = "sample",
    lone_completion: LoneCompletion = "zero",
) -> Tensor:
    """R - mean of the group, spread over the tokens and then whitened: long completions weigh more in it. (B, T)."""
    return whiten(spread(dr_grpo(rewards, groups, lone_completion), mask), mask, whitening)


def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 1.0, gaps: Gaps = "skip"
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of generalized advantage estimation, not whitened; all (B, T), 0 where the mask is.

    A_t = delta_t + gamma lam A_{t+1}; returns = A + V, the target of the critic. Whiten the advantages, if at all, after this.
    """
    rewards, counts = _tokens(token_rewards, mask, "token rewards")
    estimates, _ = _tokens(values, mask, "values")
    if estimates.shape != rewards.shape:
        raise AdvantageError(f"values {tuple(estimates.shape)} and token rewards {tuple(rewards.shape)} must have one shape")
    out = torch.zeros_like(rewards)
    next_value, later = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - estimates[:, t]
        here = delta + gamma * lam * later
        taken = torch.ones_like(counts[:, t]) if gaps == "zero" else counts[:, t]
        later, next_value = torch.where(taken, here, later), torch.where(taken, estimates[:, t], next_value)
        out[:, t] = here
    return (out * counts).to(torch.float32), ((out + estimates) * counts).to(torch.float32)


def whiten(values: Tensor, mask: Tensor, how: Whitening = "sample") -> Tensor:
    """``values`` (B, T) with mean 0 and variance 1 over all tokens that count in the batch, 0 elsewhere."""
    numbers, counts = _tokens(values, mask, "values to whiten")
    if how == "none" or not counts.any():
        return numbers.to(torch.float32)
    inside = numbers[counts]
    centred = inside - inside.mean()
    if how == "sample":
        deviation = (centred.square().sum() / max(len(inside) - 1, 1) + _WHITENING_FLOOR).sqrt()
    elif how == "population":
        deviation = centred.square().mean().clamp(min=_WHITENING_FLOOR).sqrt()
    else:
        raise AdvantageError(f"rl.whitening={how!r} is unknown; choose one of {', '.join(get_args(Whitening))}")
    out = torch.zeros_like(numbers)
    out[counts] = centred / deviation
    return out.to(torch.float32)


# ------------------------------------------------------------------------------------------------ by name


@dataclass(frozen=True)
class Conventions:
    """Numbers and choices of an estimator; the names are those of section ``rl`` of the configuration."""

    eps: float = 1e-6
    gamma: float = 1.0
    lam: float = 1.0
    whitening: Whitening = "sample"
    lone_completion: LoneCompletion = "zero"
    gaps: Gaps = "skip"


def estimate(
    estimator: str,
    token_rewards: Tensor,
    mask: Tensor,
    groups: Sequence[Hashable],
    conventions: Conventions = Conventions(),
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(advantages (B, T), returns (B, T) or None) of the estimator that ``rl.advantage`` names.

    Args:
        token_rewards: (B, T), 0 where the mask is; the sum of a row is the reward of the completion (``rl.kl.token_rewards``).
        mask: (B, T), 1 for tokens that count.
        groups: B ids. A completion without a token that counts (a dropped one) belongs to no group: it gets 0, and the
            mean and the deviation of its group are those of the others.
        values: (B, T), for ``gae`` only, which is also the only one that returns returns.

    Raises AdvantageError.
    """
    c = conventions
    if estimator == "gae":
        if values is None:
            raise AdvantageError("rl.advantage=gae needs the values of a critic (recipe=ppo)")
        advantages, returns = gae(token_rewards, values, mask, c.gamma, c.lam, c.gaps)
        return whiten(advantages, mask, c.whitening), returns
    if estimator == "reinforce_plus_plus":
        return reinforce_plus_plus(token_rewards, mask, c.gamma, c.whitening, c.gaps)[0], None
    if estimator not in GROUPED:
        raise AdvantageError(f"rl.advantage={estimator!r} is unknown; choose one of {', '.join(ESTIMATORS)}")
    if len(groups) != len(mask):
        raise AdvantageError(f"{len(mask)} completions for {len(groups)} group ids; there must be one id for each")
    used = [i for i, counted in enumerate((mask > 0).any(dim=1).tolist()) if counted]
    rewards = token_rewards.to(torch.float64).sum(dim=1)[used]
    ids = [groups[i] for i in used]
    if estimator == "grpo":
        scalars = grpo(rewards, ids, c.eps, c.lone_completion)
    elif estimator == "grpo_batch_std":
        scalars = grpo_batch_std(rewards, ids, c.eps, c.lone_completion)
    elif estimator == "rloo":
        scalars = rloo(rewards, ids, c.lone_completion)
    else:
        scalars = dr_grpo(rewards, ids, c.lone_completion)
    whole = torch.zeros(len(mask), dtype=torch.float32)
    whole[used] = scalars
    advantages = spread(whole, mask)
    return (whiten(advantages, mask, c.whitening) if estimator in WHITENED else advantages), None


class _Centred:
    """Rewards, these minus the mean of their group (exactly 0 in groups without a difference), the groups as index lists."""

    def __init__(self, rewards: list[float], values: list[float], groups: list[list[int]]):
        self.rewards, self.values, self.groups = rewards, values, groups


def _centre(rewards: Sequence[float] | Tensor, groups: Sequence[Hashable], lone_completion: LoneCompletion) -> _Centred:
    numbers = [float(r) for r in (rewards.tolist() if isinstance(rewards, Tensor) else rewards)]
    if len(numbers) != len(groups):
        raise AdvantageError(f"{len(numbers)} rewards for {len(groups)} group ids; there must be one id per reward")
    for i, number in enumerate(numbers):
        if not math.isfinite(number):
            raise AdvantageError(f"reward {i} (group {groups[i]!r}) is {number}; advantages need finite rewards")
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    values = [0.0] * len(numbers)
    for indices in members.values():
        if len({numbers[i] for i in indices}) > 1:
            mean = math.fsum(numbers[i] for i in indices) / len(indices)
            for i in indices:
                values[i] = numbers[i] - mean
        elif len(indices) == 1 and lone_completion == "reward":
            values[indices[0]] = numbers[indices[0]]
    return _Centred(numbers, values, list(members.values()))


def _scalars(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _tokens(values: Tensor, mask: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """(float64 values, 0 where the mask is 0; the mask as bool). AdvantageError for another shape, or a value not finite."""
    if values.shape != mask.shape or values.dim() != 2:
        raise AdvantageError(f"{what} {tuple(values.shape)} and mask {tuple(mask.shape)} must both be (completions, tokens)")
    counts = mask > 0
    numbers = torch.where(counts, values.detach().to(torch.float64), 0.0)
    if not torch.isfinite(numbers).all():
        row = int((~torch.isfinite(numbers)).any(dim=1).nonzero()[0])
        raise AdvantageError(f"{what} of completion {row} are not finite; advantages need finite numbers")
    return numbers, counts
