"""Who is slow, without a controller: a rank's report of its step stays with it, but the lighthouse hears of every phase that a rank enters.

What lies between two such words is what the rank spent in the first. It takes as long as it takes to be said, and that is the same for
peers; what :mod:`everstep.telemetry.stragglers` calls slow is far more.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from everstep.config.watch_schema import WatchConfig
from everstep.recovery.coordinator import TAKEOVER
from everstep.recovery.view import Kind, Record, View
from everstep.telemetry.events import EventLog
from everstep.telemetry.stragglers import Stragglers, Timed

#: Of a rank's own work what is told by its phases alone: in ``begin`` it also waits for the lighthouse.
_PHASES = ("compute", "apply")


@dataclass(frozen=True)
class _Step:
    """One that nothing disturbed. ``view``: under which it was made."""

    number: int
    view: View
    slots: int


class Pace:
    """``place(worker)``: (replica, rank). Called on the threads of the coordinator's connections; emits ``straggler`` events."""

    def __init__(self, config: WatchConfig, events: EventLog, place: Callable[[str], tuple[int, int]]):
        self._stragglers = Stragglers(config.straggler_ratio, config.straggler_for_s)
        self._events, self._place, self._lock = events, place, threading.Lock()
        self._now: dict[str, tuple[int, str, float]] = {}  # worker -> step and phase that it is in, and since when
        self._spent: dict[int, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))  # step -> worker -> phase
        self._slots: tuple[int, int] = (0, 0)  # step in progress, and how many it has
        self._view: View | None = None
        self._disturbed = False
        self._last: _Step | None = None

    def begun(self, step: int, slots: int) -> None:
        """A step with so many slots begins; called for every replica that comes to it."""
        self._slots = step, slots

    def entered(self, worker: str, step: int, phase: str) -> None:
        now = time.monotonic()
        with self._lock:
            before = self._now.get(worker)
            self._now[worker] = step, phase, now
            if before and before[1] in _PHASES:
                self._spent[before[0]][worker][before[1]] += now - before[2]

    def recorded(self, record: Record) -> None:
        """With the commit of a step everybody has left the one before: that is judged."""
        if record.kind is Kind.BUILD:
            return
        with self._lock:
            if record.kind is Kind.COMMIT and record.cause != TAKEOVER:
                if self._last and self._last.number == record.step - 1:
                    self._judge(self._last)
                undisturbed = self._view is not None and not self._disturbed and not self._view.healing and self._slots[0] == record.step
                self._last = _Step(record.step, self._view, self._slots[1]) if undisturbed and self._view else None
                self._disturbed = False
                for step in [step for step in self._spent if step < record.step]:
                    del self._spent[step]
            else:
                self._disturbed = True
            self._view = record.view

    def _judge(self, step: _Step) -> None:
        timed = {
            worker: Timed(member.replica, rank, dict(spent), len(step.view.deal.share(member, step.slots)))
            for member in step.view.members for rank, worker in enumerate(member.workers) if (spent := self._spent[step.number].get(worker))
        }
        for slow in self._stragglers.step(time.monotonic(), timed):
            self._events.emit("straggler", step=step.number, replica=slow.replica, rank=slow.rank, phase=slow.phase, ratio=slow.ratio,
                              excess_s=slow.excess_s, since_s=slow.since_s, worker=slow.worker, action="reported")
