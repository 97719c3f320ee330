"""After a death: ask its node, say what class of failure it was and on what evidence. On a thread of its own; nobody waits for it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.cluster.host import WorkerInfo
from everstep.telemetry.events import EventLog
from everstep.telemetry.health import Sign, classify

LOG = logging.getLogger(__name__)
_SETTLE_S = 0.2  # the kernel writes of a process that it killed a moment after the process is gone
_CLOSE_S = 3.0


@dataclass(frozen=True)
class _Death:
    info: WorkerInfo
    place: tuple[int, int]
    step: int
    cause: str
    suspected: bool


class PostMortem:
    """``examine(info)``: what the node of a process says of it and of itself (:meth:`everstep.cluster.agents.Agents.examine`)."""

    def __init__(self, events: EventLog, examine: Callable[[WorkerInfo], Mapping[str, Any]]):
        self._events, self._examine = events, examine
        self._queue: queue.SimpleQueue[_Death | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="post-mortem", daemon=True)
        self._thread.start()

    def died(self, info: WorkerInfo, place: tuple[int, int], step: int, cause: str, suspected: bool) -> None:
        """``suspected``: a slot that killed others is in quarantine in this step."""
        self._queue.put(_Death(info, place, step, cause, suspected))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _loop(self) -> None:
        while (death := self._queue.get()) is not None:
            time.sleep(_SETTLE_S)
            try:
                found = self._examine(death.info)
            except Exception as error:  # whatever is wrong with that node: the death is classified without it, and so are those that follow
                LOG.exception("what %s died of could not be examined", death.info.worker_id)
                found = {"missing": f"its node could not be examined ({type(error).__name__}: {error})"}
            stuck = found.get("stuck") or {}
            verdict = classify(death.cause, death.info.pid, [Sign(**sign) for sign in found.get("signs", ())], death.suspected, stuck.get("what", ""))
            more = [f"stuck {stuck['what']}: {stuck['why']}"] if stuck else []
            more += [f"its page: {found['says']}"] if found.get("says") else []
            more += [str(found["missing"])] if "missing" in found else []
            try:
                self._events.emit("failure", step=death.step, replica=death.place[0], rank=death.place[1], worker=death.info.worker_id,
                                  node=death.info.host, failure_class=verdict.kind, evidence=[*verdict.evidence, *more])
            except (OSError, ValueError) as error:  # the log is closed, or full: the run ends
                LOG.warning("what killed %s could not be written: %s", death.info.worker_id, error)
