"""Learning rates: pure functions of the number of the step, so that there is no scheduler state to lose or to heal."""

from __future__ import annotations

import math

from everstep.config.schema import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 1) of ``total_steps``.

    Linear warm-up from 0 over ``warmup_steps``, then constant, or down to ``min_lr`` at ``decay_steps`` (default: the
    last step), and ``min_lr`` after that: along a line or half a cosine (arXiv 1608.03983), or, for ``wsd``
    (arXiv 2404.06395), constant first and falling only in the last ``wsd_decay_steps`` (default: a tenth of the steps).
    """
    peak, low = optimizer.lr, optimizer.min_lr
    if step <= optimizer.warmup_steps:
        return peak * step / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return peak
    end = optimizer.decay_steps or total_steps
    if optimizer.schedule == "wsd":
        decay = optimizer.wsd_decay_steps or max(1, end // 10)
        start, form = max(optimizer.warmup_steps, end - decay), optimizer.wsd_decay
    else:
        start, form = optimizer.warmup_steps, optimizer.schedule
    done = min(1.0, max(0, step - start) / max(1, end - start))
    return low + (peak - low) * _left(form, done)


def _left(form: str, done: float) -> float:
    """What is left of the way down, 1 to 0, when the part ``done`` of the steps is over."""
    if form == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if form == "sqrt":
        return 1.0 - math.sqrt(done)  # arXiv 2405.18392
    return 1.0 - done
