"""Acts upon a run at the very moment when its log says something: real signals to real processes, from outside.

    with Strikes(folder, [Strike("heal_start", "source", lambda e: True)]) as strikes: ...
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Strike:
    """Once, at the first event of this kind for which ``when`` holds (and not before the strike before it): a signal to ``whom``.

    ``whom``: `writer` of the event; `spare` that it names; `source`, rank 0 of the replica that it names as one; `R/K`, a rank.
    ``act``: what to do instead, with the run's folder.
    """

    event: str
    whom: str = ""
    when: Callable[[Row], bool] = lambda row: True
    number: int = signal.SIGKILL
    delay_s: float = 0.0
    act: Callable[[Path], None] | None = None


class Strikes:
    """``done``: what each strike hit: the event that set it off, and a pid."""

    def __init__(self, folder: Path, strikes: Sequence[Strike]):
        self._events, self._folder, self._todo = folder / "events", folder, list(strikes)
        self.done: list[tuple[Row, int]] = []
        self._offsets: dict[Path, int] = {}
        self._pids: dict[str, int] = {}               # worker -> its process
        self._holders: dict[tuple[int, int], str] = {}  # (replica, rank) -> worker
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Strikes:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(10.0)

    def _watch(self) -> None:
        while not self._over.is_set() and self._todo:
            for row in self._new():
                if row["event"] == "process_start":
                    self._pids[row["who"]] = row["pid"]
                if row["event"] == "form":
                    self._holders[row["replica"], row["rank"]] = row["who"]
                while self._todo and row["event"] == self._todo[0].event and self._todo[0].when(row):
                    self._strike(self._todo.pop(0), row)
                    break
            time.sleep(0.002)

    def _strike(self, strike: Strike, row: Row) -> None:
        time.sleep(strike.delay_s)
        if strike.act:
            strike.act(self._folder)
            self.done.append((row, 0))
            return
        if strike.whom == "writer":
            pid = row["pid"]
        elif strike.whom == "spare":
            pid = self._pids[row["spare"]]
        else:
            place = (row["source"], 0) if strike.whom == "source" else tuple(map(int, strike.whom.split("/")))
            pid = self._pids[self._holders[place]]  # type: ignore[index]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, strike.number)
            self.done.append((row, pid))

    def _new(self) -> list[Row]:
        rows: list[Row] = []
        for path in self._events.glob("*.jsonl") if self._events.is_dir() else ():
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text.rpartition(b"\n")[0]
            self._offsets[path] = self._offsets.get(path, 0) + (len(whole) + 1 if whole else 0)
            rows += [json.loads(line) for line in whole.splitlines()]
        return sorted(rows, key=lambda row: row["t_wall"])
