"""Losses and gradient norms that jump. Pure: values in, findings out.

A value is a spike if it is above ``ratio`` times the median of the last ``steps`` values, above that median by six scaled median
absolute deviations (1.4826 MAD is the standard deviation of a normal distribution), and above all of them: what is wild by nature is
let be, and a level that stays is told once or twice, not in every step.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

#: Metrics that are looked at, where a run has them.
WATCHED = ("train/loss", "train/grad_norm", "dpo/loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm")
_DEVIATIONS = 6 * 1.4826
_LEAST = 8  # values before anything is judged


@dataclass(frozen=True)
class Spike:
    metric: str
    value: float
    usual: float  # median of what it was compared with


class Spikes:
    """``ratio``, ``steps``: ``watch.spike_ratio``, ``watch.spike_steps``."""

    def __init__(self, ratio: float, steps: int):
        self._ratio, self._steps = ratio, steps
        self._past: dict[str, deque[float]] = {}

    def step(self, metrics: dict[str, float]) -> list[Spike]:
        """The metrics of one step; those of them that jumped."""
        found = []
        for name in WATCHED if self._ratio else ():
            value = metrics.get(name, math.nan)
            if not math.isfinite(value):
                continue
            past = self._past.setdefault(name, deque(maxlen=self._steps))
            if len(past) >= _LEAST and value > max(past):
                usual = statistics.median(past)
                spread = statistics.median(abs(v - usual) for v in past)
                if value > self._ratio * usual and value - usual > _DEVIATIONS * spread:
                    found.append(Spike(name, value, usual))
            past.append(value)
        return found
