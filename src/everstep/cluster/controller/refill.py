"""Processes in the place of dead ones, started cold in the background: the pool of spares is filled up again, and a run without
spares gets its replica back.

Each place (a device) has its own thread while a process is being started there. What cannot start, or dies before it was of use, is
tried again later and later, and a limited number of times: a device that kills every process is given up, and no crash loop eats the
machine.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from everstep.cluster.host import NoRoom
from everstep.errors import EverstepError

LONGEST_DELAY_S = 60.0
LIVED_S = 300.0  # a process that lived this long has not died of its start


class Starter(Protocol):
    """What refilling needs of the launcher."""

    def start_in_place_of(self, worker: str) -> str:
        """One more worker process, where the dead ``worker`` was if that machine lives, else wherever there is room; returns its id
        once it is warm. Raises an EverstepError."""

    def spare_is_ready(self, worker: str, after: str) -> None: ...

    def was_of_use(self, worker: str) -> bool:
        """Whether a dead worker had taken part in a commit, or was struck on purpose."""

    def note(self, event: str, **fields: Any) -> None: ...


@dataclass
class _Place:
    """``tries`` that failed one after the other."""

    tries: int = 0
    since: float = field(default_factory=time.monotonic)  # its present process started


class Refill:
    """``attempts``: how often in a row a process may fail to start in a place, or die there before it was of use (0: nothing is
    started). ``backoff_s``: before the second try; doubled for each one after it."""

    def __init__(self, starter: Starter, attempts: int, backoff_s: float):
        self._starter, self._attempts, self._backoff_s = starter, attempts, backoff_s
        self._places: dict[str, _Place] = {}
        self._pending: set[str] = set()  # dead workers in whose place a process is being started
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def pending(self) -> frozenset[str]:
        """Dead workers in whose place a process is being started, or will be tried again."""
        with self._lock:
            return frozenset(self._pending)

    def replace(self, worker: str) -> None:
        """Start a process in the place of a worker that is confirmed dead. Returns at once."""
        with self._lock:
            if worker in self._pending or self._closed.is_set() or not self._attempts:
                return
            place = self._places.pop(worker, None) or _Place(since=0.0)
            if self._starter.was_of_use(worker) or time.monotonic() - place.since > LIVED_S:
                place.tries = 0
            self._pending.add(worker)
        threading.Thread(target=self._fill, args=(worker, place), name=f"refill-{worker}", daemon=True).start()

    def close(self) -> None:
        """No further process is started. A start that is under way is ended with the host."""
        self._closed.set()

    def _fill(self, dead: str, place: _Place) -> None:
        try:
            while place.tries < self._attempts:
                delay = min(LONGEST_DELAY_S, self._backoff_s * 2 ** (place.tries - 1)) if place.tries else 0.0
                if self._closed.wait(delay):
                    return
                place.tries += 1
                self._starter.note("restart", after=dead, attempt=place.tries)
                try:
                    worker = self._start_once_there_is_room(dead, max(delay, self._backoff_s))
                except EverstepError as error:
                    if not self._closed.is_set():
                        self._starter.note("error", error=type(error).__name__, message=f"no process in the place of {dead}: {error}")
                    continue
                except Exception as error:  # the end of a thread: the place would be lost without a word
                    self._starter.note("error", error=type(error).__name__, message=f"no process in the place of {dead}: {error}")
                    continue
                if worker is None:
                    return
                place.since = time.monotonic()
                with self._lock:
                    self._places[worker] = place
                if not self._closed.is_set():
                    self._starter.spare_is_ready(worker, dead)
                return
            self._starter.note("error", error="RestartsGivenUp", message=(
                f"{place.tries} processes in a row failed in the place of {dead} (recovery.restart_attempts={self._attempts}): the run "
                "goes on without it"
            ))
        finally:
            with self._lock:
                self._pending.discard(dead)

    def _start_once_there_is_room(self, dead: str, every_s: float) -> str | None:
        """For how long there is none is nobody's fault: that is one try. None if nothing is to be started any more."""
        told = False
        while True:
            try:
                return self._starter.start_in_place_of(dead)
            except NoRoom as none:
                if not told:
                    self._starter.note("no_room", after=dead, why=str(none))
                told = True
            if self._closed.wait(every_s):
                return None
