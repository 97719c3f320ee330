"""After a death: look at its node, say what class of failure it was and on what evidence. On a thread of its own; nobody waits for it."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from dataclasses import dataclass

from everstep.cluster.host import WorkerInfo
from everstep.telemetry.events import EventLog
from everstep.telemetry.health import Sign, classify, look

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
    def __init__(self, events: EventLog, folder: str):
        self._events, self._folder = events, folder
        self._since_s = time.clock_gettime(time.CLOCK_MONOTONIC)  # as the kernel's log counts
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
                verdict = classify(death.cause, death.info.pid, self._signs(death.info), death.suspected)
                self._events.emit("failure", step=death.step, replica=death.place[0], rank=death.place[1], worker=death.info.worker_id,
                                  node=death.info.host, failure_class=verdict.kind, evidence=list(verdict.evidence))
            except (OSError, ValueError) as error:  # the log is closed, or full: the run ends
                LOG.warning("what killed %s could not be written: %s", death.info.worker_id, error)

    def _signs(self, info: WorkerInfo) -> list[Sign]:
        """Of the node that the process was on. Of another node only what the cause says: its agent is Ray's, not ours."""
        return look([self._folder], self._since_s) if info.host == socket.gethostname() else []
