"""Who is slow: a rank's own work against that of its peers, step after step. Pure: times in, findings out.

Peers are the ranks of the same position in the other replicas: they do the same work. Compared is only work that waits for no other replica
(``compute``, per slot; ``apply``; ``begin``), because who is slow in those makes everybody else wait in the others. In each step a
rank's ratio is its time over the median of its peers'. It is a straggler if the median of its ratios has been above the limit for
the configured time, and if most single steps were too: one slow step (a page fault, a checkpoint on the same disk) is none.

Of a replica only the slowest rank is named: in a tensor- or pipeline-parallel replica the others wait for it inside the phase, and
look as slow.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: Phases in which a rank waits for no other replica, and whether the time is per slot.
OWN_WORK = {"compute": True, "apply": False, "begin": False}
LEAST_STEPS = 5        # that a finding rests on
MOST_STEPS = 0.75      # share of the steps looked at in which it must have been above the limit
LEAST_EXCESS_S = 0.002  # per step: below this a ratio is noise of the clock and the scheduler


@dataclass(frozen=True)
class Timed:
    """Where one rank spent a step. ``seconds``: by phase; ``slots``: how many it computed."""

    replica: int
    rank: int
    seconds: Mapping[str, float]
    slots: int


@dataclass(frozen=True)
class Straggler:
    worker: str
    replica: int
    rank: int
    phase: str
    ratio: float      # median over the steps looked at
    excess_s: float   # seconds of a step that it takes longer than its peers, median
    since_s: float    # how long this has been so
    steps: int


@dataclass
class _Past:
    ratios: deque[tuple[float, float, float]]  # when, ratio, excess
    above: int = 0  # of the ratios, how many are above the limit


class Stragglers:
    """``ratio``, ``for_s``: ``watch.straggler_ratio``, ``watch.straggler_for_s``."""

    def __init__(self, ratio: float, for_s: float):
        self._limit, self._for_s = ratio, for_s
        self._past: dict[tuple[str, str], _Past] = {}  # by worker and phase
        self._reported: set[str] = set()

    def step(self, now: float, ranks: Mapping[str, Timed]) -> list[Straggler]:
        """The times of one step, by worker. Returns those that have newly become stragglers, the worst phase of each."""
        for key in [key for key in self._past if key[0] not in ranks]:
            del self._past[key]  # dead, or out: a new process starts anew
        self._reported &= ranks.keys()
        slow: dict[str, Straggler] = {}
        compared: set[str] = set()
        for phase, per_slot in OWN_WORK.items():
            own = {worker: spent for worker, timed in ranks.items() if (spent := _own(timed, phase, per_slot)) is not None}
            places: dict[int, list[float]] = {}  # one rank of each replica at each
            for worker, spent in own.items():
                insort(places.setdefault(ranks[worker].rank, []), spent)
            for worker, spent in own.items():
                peers = places[ranks[worker].rank]
                if len(peers) < 2:
                    continue
                compared.add(worker)
                usual = _median_without(peers, spent)
                slots = ranks[worker].slots if per_slot else 1
                self._note(worker, phase, now, spent / max(usual, 1e-9), (spent - usual) * slots)
                found = self._judge(worker, phase, now, ranks[worker])
                if found and (worker not in slow or found.excess_s > slow[worker].excess_s):
                    slow[worker] = found
        worst: dict[int, Straggler] = {}
        for found in slow.values():
            if found.replica not in worst or found.excess_s > worst[found.replica].excess_s:
                worst[found.replica] = found
        self._reported -= compared - slow.keys()  # who has recovered may be reported again
        new = [found for found in worst.values() if not any(s.worker in self._reported for s in slow.values() if s.replica == found.replica)]
        self._reported |= {found.worker for found in new}
        return new

    def _note(self, worker: str, phase: str, now: float, ratio: float, excess_s: float) -> None:
        past = self._past.setdefault((worker, phase), _Past(deque()))
        past.ratios.append((now, ratio, excess_s))
        past.above += ratio > self._limit
        while len(past.ratios) > 4096 or (len(past.ratios) > LEAST_STEPS and now - past.ratios[1][0] >= self._for_s):
            past.above -= past.ratios.popleft()[1] > self._limit  # what is left spans the time that counts

    def _judge(self, worker: str, phase: str, now: float, timed: Timed) -> Straggler | None:
        past = self._past[worker, phase].ratios
        since_s = now - past[0][0]
        if len(past) < LEAST_STEPS or since_s < self._for_s or self._past[worker, phase].above < MOST_STEPS * len(past):
            return None
        ratio, excess = statistics.median(r for _, r, _ in past), statistics.median(e for _, _, e in past)
        if ratio <= self._limit or excess < LEAST_EXCESS_S:
            return None
        return Straggler(worker, timed.replica, timed.rank, phase, ratio, excess, since_s, len(past))


def _median_without(values: Sequence[float], one: float) -> float:
    """The median of sorted ``values`` without ``one`` of them."""
    at = bisect_left(values, one)
    others: Callable[[int], float] = lambda index: values[index if index < at else index + 1]
    count = len(values) - 1
    return (others((count - 1) // 2) + others(count // 2)) / 2


def _own(timed: Timed, phase: str, per_slot: bool) -> float | None:
    spent = timed.seconds.get(phase)
    if spent is None or (per_slot and not timed.slots):
        return None
    return spent / timed.slots if per_slot else spent
