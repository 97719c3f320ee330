"""What the lead knows, while the run goes on, of what faults cost: the ``ft/*`` metrics of each logged step.

Cheap on purpose (no log is read for it); the exact account of the time of every rank is :mod:`everstep.telemetry.goodput`, from the
event log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from everstep.telemetry.events import Event
from everstep.telemetry.recoveries import Recovery


class Ongoing:
    """Thread safe: recoveries are told on the coordinator's thread, steps on the recipe's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._begun = clock()
        self._good_s = 0.0
        self._lock = threading.Lock()
        self._untold: dict[str, float] = {}

    def recovered(self, recovery: Recovery, events: Sequence[Event]) -> None:
        """A recovery is complete; its numbers go with the next logged step. Of several the worst is told."""
        heals = [e for e in events if e.event == "heal_done" and e["replica"] == recovery.replica and e.t_wall >= recovery.t_wall]
        told = {
            "ft/detect_s": recovery.detect_s, "ft/stall_s": recovery.stall_s, "ft/full_strength_s": recovery.full_strength_s,
            "ft/heal_s": max((float(e["seconds"]) for e in heals), default=None),
            "ft/heal_bytes": float(sum(e["heal_bytes"] for e in heals)) if heals else None,
        }
        with self._lock:
            for name, value in told.items():
                if value is not None:
                    self._untold[name] = max(value, self._untold.get(name, value))

    def metrics(self, logged: Mapping[str, float], deaths: int, spares: int) -> dict[str, float]:
        """``logged``: what the recipe logs of its step."""
        if logged.get("ft/attempts", 1.0) == 1.0 and not logged.get("ft/microbatches_redone"):
            self._good_s += logged.get("timing_s/step", 0.0)
        with self._lock:
            told, self._untold = self._untold, {}
        lived = max(self._clock() - self._begun, 1e-9)
        return {"ft/goodput": min(1.0, self._good_s / lived), "ft/deaths": float(deaths), "ft/spares": float(spares), **told}
