"""Following the event log of a run that goes on."""

from __future__ import annotations

import math
import os
from pathlib import Path

from everstep.telemetry.events import Event, EventLogError, parse_line, parse_lines


class Tail:
    """Follows the events of a run that goes on: each call reads only what was appended since the one before.

    A line that is still being written is left for the next call. Other damage raises ``EventLogError``, as in ``read_history``. A file
    that became shorter was made anew (``--clean``): all is read again.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = Path(folder)
        self._files: dict[Path, tuple[int, int, float]] = {}  # bytes and events read, the latest wall clock
        self._keyed: list[tuple[float, str, int, Event]] = []

    def events(self) -> list[Event]:
        """All so far, merged by wall time as ``read_events`` does."""
        if not self._folder.is_dir():
            raise EventLogError(f"no event log: {self._folder} is not a folder (is it the `events` folder of a run?)")
        paths = sorted(self._folder.glob("*.jsonl"))
        if any(path not in paths or path.stat().st_size < done for path, (done, _, _) in self._files.items()):
            self._files, self._keyed = {}, []
        fresh = len(self._keyed)
        for path in paths:
            done, count, latest = self._files.get(path, (0, 0, -math.inf))
            with path.open("rb") as file:
                file.seek(done)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            begin = whole.rfind(b"\n", 0, len(whole) - 1) + 1
            if parse_line(whole[begin:]) is None:
                whole = whole[:begin]  # a fragment whose seal has not arrived
            for event in parse_lines(whole, path)[0]:
                latest = max(latest, event.t_wall)
                self._keyed.append((latest, path.name, count, event))
                count += 1
            self._files[path] = (done + len(whole), count, latest)
        if len(self._keyed) > fresh:
            self._keyed.sort(key=lambda item: item[:3])
        return [item[3] for item in self._keyed]
