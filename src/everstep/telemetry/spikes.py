"""Losses and gradient norms that jump. Pure: values in, findings out.

A value is a spike if it is above ``ratio`` times the median of the last ``steps`` values, and above that median by six scaled median
absolute deviations (1.4826 MAD is the standard deviation of a normal distribution), so that what is noisy by nature is let be. A
spike does not enter the values that later ones are compared with, unless it stays: after as many in a row as make half the window, the
new level is the usual one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

#: Metrics that are looked at, where a run has them.
WATCHED = ("train/loss", "train/grad_norm", "actor/grad_norm")
_DEVIATIONS = 6 * 1.4826
_LEAST = 8  # values before anything is judged


@dataclass(frozen=True)
class Spike:
    metric: str
    value: float
    usual: float  # median of what it was compared with


@dataclass
class _Series:
    values: deque[float]
    pending: list[float] = field(default_factory=list)


class Spikes:
    """``ratio``, ``steps``: ``watch.spike_ratio``, ``watch.spike_steps``."""

    def __init__(self, ratio: float, steps: int):
        self._ratio, self._steps = ratio, steps
        self._series: dict[str, _Series] = {}

    def step(self, metrics: dict[str, float]) -> list[Spike]:
        """The metrics of one step; those of them that jumped."""
        if not self._ratio:
            return []
        found = []
        for name in WATCHED:
            if name in metrics and math.isfinite(metrics[name]):
                series = self._series.setdefault(name, _Series(deque(maxlen=self._steps)))
                if (usual := self._judge(series, metrics[name])) is not None:
                    found.append(Spike(name, metrics[name], usual))
        return found

    def _judge(self, series: _Series, value: float) -> float | None:
        if len(series.values) >= _LEAST:
            usual = statistics.median(series.values)
            spread = statistics.median(abs(v - usual) for v in series.values)
            if value > self._ratio * usual and value - usual > _DEVIATIONS * spread:
                series.pending.append(value)
                if len(series.pending) * 2 >= self._steps:
                    series.values.extend(series.pending)
                    series.pending = []
                return usual
        series.pending = []
        series.values.append(value)
        return None
