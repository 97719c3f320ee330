"""Advantages from one reward per completion: GRPO, Dr.GRPO, RLOO.

All functions are pure: B rewards (float) and B group ids (any hashable; the completions of one prompt share one id, and
need not be adjacent) in, a float32 tensor (B,) out. The arithmetic is done in float64: it is a handful of numbers, and in
float32 the mean of equal rewards is not always that reward.

Choices (the literature leaves them open; ``tests/golden`` has the numbers):

- GRPO divides by ``std + eps``, the standard deviation with divisor n-1 (verl, TRL). ``eps`` is added to the std, not
  to the variance.
- A group whose rewards are all equal gets exactly 0, whatever the rounding: it says nothing about what is better.
- A group of one completion gets 0 as well, for the same reason (TRL's choice; verl takes the reward itself, which pushes
  every lone completion up or down by an arbitrary baseline).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from everstep.errors import EverstepError

ESTIMATORS = ("grpo", "dr_grpo", "rloo")


class AdvantageError(EverstepError, ValueError):
    """Rewards and groups do not fit together, or a reward is not finite."""


def grpo(rewards: Sequence[float] | Tensor, groups: Sequence[Hashable], eps: float = 1e-6) -> Tensor:
    """(R - mean of the group) / (std of the group + eps). Source: DeepSeekMath, arXiv 2402.03300."""
    centred = _centre(rewards, groups)
    out = [0.0] * len(centred.values)
    for members in centred.groups:
        variance = sum(centred.values[i] ** 2 for i in members) / max(len(members) - 1, 1)
        for i in members:
            out[i] = centred.values[i] / (math.sqrt(variance) + eps)
    return torch.tensor(out, dtype=torch.float32)


def dr_grpo(rewards: Sequence[float] | Tensor, groups: Sequence[Hashable]) -> Tensor:
    """R - mean of the group. Source: Dr.GRPO, arXiv 2503.20783 (use with a loss that does not divide by length)."""
    return torch.tensor(_centre(rewards, groups).values, dtype=torch.float32)


def rloo(rewards: Sequence[float] | Tensor, groups: Sequence[Hashable]) -> Tensor:
    """R - mean of the *other* completions of the group, = n/(n-1) * (R - mean). Source: RLOO, arXiv 2402.14740."""
    centred = _centre(rewards, groups)
    out = [0.0] * len(centred.values)
    for members in centred.groups:
        n = len(members)
        for i in members:
            out[i] = centred.values[i] * n / max(n - 1, 1)
    return torch.tensor(out, dtype=torch.float32)


def estimate(estimator: str, rewards: Sequence[float] | Tensor, groups: Sequence[Hashable], eps: float = 1e-6) -> Tensor:
    """The estimator called ``rl.advantage`` in the configuration. (B,) float32."""
    if estimator == "grpo":
        return grpo(rewards, groups, eps)
    if estimator == "dr_grpo":
        return dr_grpo(rewards, groups)
    if estimator == "rloo":
        return rloo(rewards, groups)
    raise AdvantageError(f"rl.advantage={estimator!r} is unknown; choose one of {', '.join(ESTIMATORS)}")


def spread(scalars: Tensor, loss_mask: Tensor) -> Tensor:
    """One advantage per completion (B,) -> one per token (B, T): the same number on each token that counts, else 0."""
    return scalars.to(loss_mask.device, torch.float32).unsqueeze(1) * loss_mask.to(torch.float32)


class _Centred:
    """Rewards minus the mean of their group (exactly 0 in groups without a difference), and the groups as index lists."""

    def __init__(self, values: list[float], groups: list[list[int]]):
        self.values, self.groups = values, groups


def _centre(rewards: Sequence[float] | Tensor, groups: Sequence[Hashable]) -> _Centred:
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
    return _Centred(values, list(members.values()))
