"""Learning rates: pure functions of the number of the step, so that there is no scheduler state to lose or to heal."""

from __future__ import annotations

import math

from everstep.config.schema import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 1) of ``total_steps``.

    Linear warm-up from 0 over ``warmup_steps``, then constant, or linear or half a cosine (arXiv 1608.03983) down to ``min_lr``
    at ``decay_steps`` (default: the last step), and ``min_lr`` after that.
    """
    peak, low = optimizer.lr, optimizer.min_lr
    if step <= optimizer.warmup_steps:
        return peak * step / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return peak
    end = optimizer.decay_steps or total_steps
    span = max(1, end - optimizer.warmup_steps)
    done = min(1.0, (step - optimizer.warmup_steps) / span)
    if optimizer.schedule == "linear":
        return peak + (low - peak) * done
    return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * done))
