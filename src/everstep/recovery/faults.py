"""Fault injection from outside: an external process sends a real signal when the victim is inside the named phase.

The victim reports the phase it enters over its channel, as it always does; nothing in the worker knows of faults.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence

from everstep.config.schema import Fault
from everstep.telemetry.events import EventLog

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class FaultInjector:
    """``send(worker, signal)`` delivers a signal to a worker's process on its node."""

    def __init__(
        self, faults: Sequence[Fault], place: Callable[[str], tuple[int, int]], send: Callable[[str, int], None], events: EventLog
    ):
        self._pending = list(faults)
        self._place, self._send, self._events = place, send, events
        self._lock = threading.Lock()

    def on_phase(self, worker: str, step: int, phase: str) -> None:
        """Called when a worker enters a phase; each fault of the schedule fires once."""
        with self._lock:
            place = self._place(worker)
            due = [f for f in self._pending if (f.step, f.phase) == (step, phase) and (f.replica, f.rank) == place]
            for fault in due:
                self._pending.remove(fault)
        for fault in due:
            timer = threading.Timer(fault.delay_s, self._fire, (worker, fault))
            timer.daemon = True
            timer.start()

    def _fire(self, worker: str, fault: Fault) -> None:
        self._events.emit("fault", step=fault.step, replica=fault.replica, rank=fault.rank, kind=fault.kind, phase=fault.phase,
                          worker=worker)
        self._send(worker, SIGNALS[fault.kind])

    @property
    def unfired(self) -> list[Fault]:
        return list(self._pending)
