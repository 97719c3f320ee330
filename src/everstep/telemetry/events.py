"""The event log: what happened, when, in which epoch and step, told by each process in its own words.

One append-only JSONL file per process, ``RUN/events/<who>.jsonl``. A line is one event, written by one
``write`` to a descriptor opened with ``O_APPEND``, so a process killed at any instant leaves whole lines and
at most one torn line at the very end. The reader tolerates exactly that and reports it; anything else
unreadable is an error, because a log that is silently incomplete proves nothing.

Every number that the report prints (recovery times, steps and samples lost) is computed from these files
alone. The registry ``EVENTS`` below is the contract between who writes them and who reads them: an event that
is not in it, or that lacks a field it promises, is refused where it is written.

Clocks: ``t_wall`` (seconds since 1970) orders events across machines, ``t_mono`` (seconds, arbitrary origin,
shared by all processes of one machine) measures spans; ``seconds_between`` picks the right one.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import BadInput
from everstep.telemetry.event_kinds import EVENTS as EVENTS
from everstep.telemetry.event_kinds import EventKind as EventKind

Epoch = int | tuple[int, ...]
"""A view's epoch: a counter, or (coordinator incarnation, counter). Compared with ``epoch_key``."""


#: In the place of a replica, for the position of a rollout engine; ``rank`` is its number then. An idle spare has -1, -1.
ENGINES = -2


HEADER = ("t_wall", "t_mono", "who", "pid", "host", "epoch", "step", "event")
_WHO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*\Z")


class EventLogError(BadInput):
    """An event file that cannot be trusted: unreadable before its last line, or written by something else."""


@dataclass(frozen=True)
class Event:
    """One event. ``fields`` holds what is particular to its kind; ``event["samples"]`` reads it."""

    t_wall: float
    t_mono: float
    who: str
    pid: int
    host: str
    epoch: Epoch | None
    step: int | None
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


class EventLog:
    """Appends events to one file. Thread safe; one per process (a forked child must open its own).

    Args:
        path: the file, usually ``RUN/events/<who>.jsonl``; its folder is created.
        who: name of this process in the run (``lead``, ``rank-0-1``, ``spare-2``); letters, digits, ``. _ @
        -``.
        listener: called with each event's row once it is written, on the thread that wrote it; must not wait or raise.

    A file left with a torn last line by an earlier process is sealed on opening (newline, then
    ``torn_tail``), so that the fragment can never be joined with a line of ours.
    """

    def __init__(self, path: str | os.PathLike[str], who: str, listener: Callable[[Mapping[str, Any]], None] | None = None):
        if not _WHO.match(who):
            raise ValueError(f"who={who!r} cannot name an event file: use letters, digits and . _ @ -")
        self.path = Path(path)
        self.who = who
        self._listener = listener
        self.bytes_written = 0
        self.events_written = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._host = socket.gethostname()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._torn_bytes = torn_bytes(self._fd)
        if self._torn_bytes:
            with self._lock:
                self._write(to_json(self._row("torn_tail", None, None, {"tail_bytes": self._torn_bytes})).encode() + b"\n")

    def emit(self, event: str, *, step: int | None = None, epoch: Epoch | None = None, **fields: Any) -> None:
        """Append one event. Once this returns it survives the death of this process (not of the machine).

        Raises ``ValueError`` for an event the registry does not know or a promised field that is missing,
        ``OSError`` when the disk refuses.
        """
        kind = EVENTS.get(event)
        if kind is None:
            near = difflib.get_close_matches(event, EVENTS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown event {event!r}{hint} (registry: everstep.telemetry.events.EVENTS)")
        missing = [name for name in kind.required if name not in fields]
        if kind.needs_step and step is None:
            missing.append("step")
        if kind.needs_epoch and epoch is None:
            missing.append("epoch")
        if missing:
            raise ValueError(f"event {event!r} lacks {', '.join(missing)}: {kind.meaning}")
        clash = [name for name in fields if name in HEADER]
        if clash:
            raise ValueError(f"event {event!r}: {', '.join(clash)} is set by the log itself")
        row = self._row(event, step, epoch, fields)
        with self._lock:
            self._write(to_json(row).encode() + b"\n")
        if self._listener:
            self._listener(row)

    def sync(self) -> None:
        """Force what was written to the disk (survives the machine, not only the process)."""
        os.fsync(self._fd)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _row(self, event: str, step: int | None, epoch: Epoch | None, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "t_wall": round(time.time(), 6),
            "t_mono": round(time.monotonic(), 6),
            "who": self.who,
            "pid": self._pid,
            "host": self._host,
            "epoch": epoch,
            "step": step,
            "event": event,
            **fields,
        }

    def _write(self, line: bytes) -> None:
        """One write per line. Called with the lock held."""
        if self._fd < 0:
            raise ValueError(f"the event log {self.path} is closed")
        if os.getpid() != self._pid:
            raise ValueError(f"{self.path} belongs to process {self._pid}: a forked child opens its own event log")
        if self._torn_bytes:  # a fragment stands at the end: seal it in the same write
            line = b"\n" + line
        done = os.write(self._fd, line)
        self.bytes_written += done
        if done < len(line):  # a full disk took a part of it; the next event seals the fragment
            self._torn_bytes = torn_bytes(self._fd)
            raise OSError(f"the event log {self.path} took {done} of {len(line)} bytes: is the disk full?")
        self._torn_bytes = 0
        self.events_written += 1


@dataclass(frozen=True)
class TornTail:
    """A last line that its writer did not live to finish."""

    path: Path
    tail_bytes: int


@dataclass(frozen=True)
class History:
    """All events of a run, in the order of their wall clocks, and the torn tails met on the way."""

    events: list[Event]
    torn: list[TornTail]


def read_history(folder: str | os.PathLike[str]) -> History:
    """Read every ``*.jsonl`` of an events folder.

    Order: wall clock, then file and position in it; events of one process keep their order even if its clock
    was set back. A torn last line is left out and reported; every other defect raises ``EventLogError`` with
    file and line.
    """
    root = Path(folder)
    if not root.is_dir():
        raise EventLogError(f"no event log: {root} is not a folder (is it the `events` folder of a run?)")
    torn: list[TornTail] = []
    keyed: list[tuple[float, str, int, Event]] = []
    for path in sorted(root.glob("*.jsonl")):
        events, tails = _read_file(path)
        torn.extend(tails)
        latest = -math.inf
        for index, event in enumerate(events):
            latest = max(latest, event.t_wall)  # a clock set back must not reorder a process's own events
            keyed.append((latest, path.name, index, event))
    keyed.sort(key=lambda item: item[:3])
    return History(events=[item[3] for item in keyed], torn=torn)


def read_events(folder: str | os.PathLike[str]) -> list[Event]:
    """All events of a run, merged by wall time. See ``read_history`` for torn tails and errors."""
    return read_history(folder).events


def seconds_between(first: Event, second: Event) -> float:
    """Seconds from one event to another: monotonic clock within one machine, wall clock across machines."""
    if first.host == second.host:
        return second.t_mono - first.t_mono
    return second.t_wall - first.t_wall


def epoch_key(epoch: Epoch | None) -> tuple[int, ...]:
    """A key under which epochs compare as they grow; no epoch comes before all."""
    if epoch is None:
        return ()
    return (epoch,) if isinstance(epoch, int) else tuple(epoch)


def of_kind(events: Iterable[Event], *kinds: str) -> list[Event]:
    """The events of these kinds, order kept."""
    for kind in kinds:
        if kind not in EVENTS:
            raise ValueError(f"unknown event {kind!r}")
    return [event for event in events if event.event in kinds]


def to_json(row: Mapping[str, Any]) -> str:
    """Compact strict JSON; numbers that are not finite become "NaN", "Infinity", "-Infinity" (strings)."""
    try:
        return json.dumps(row, separators=(",", ":"), default=_plain, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(row), separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    """Scalars of torch and numpy, sets and paths. Anything else is the caller's mistake."""
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"an event field of type {type(value).__name__} cannot be written as JSON")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, str | int | float) or value is None:
        return value
    return _finite(_plain(value))


def torn_bytes(fd: int) -> int:
    """Length of the unfinished last line of an open file; 0 if it is empty or ends with a newline."""
    end = os.fstat(fd).st_size
    tail = 0
    while end > 0:
        start = max(0, end - 65536)
        block = os.pread(fd, end - start, start)
        cut = block.rfind(b"\n")
        if cut >= 0:
            return tail + len(block) - cut - 1
        tail += len(block)
        end = start
    return tail


def _read_file(path: Path) -> tuple[list[Event], list[TornTail]]:
    return parse_lines(path.read_bytes(), path)


def parse_lines(data: bytes, path: Path) -> tuple[list[Event], list[TornTail]]:
    whole, _, rest = data.rpartition(b"\n")
    torn = [TornTail(path, len(rest))] if rest else []
    lines = whole.split(b"\n") if whole else []
    events: list[Event] = []
    fragment: tuple[int, int] | None = None  # line number, length
    for number, line in enumerate(lines, start=1):
        event = parse_line(line)
        if fragment is not None:
            if event is None or event.event != "torn_tail" or event.get("tail_bytes") != fragment[1]:
                raise EventLogError(
                    f"{path}:{fragment[0]}: not an event, and no torn_tail follows: the file was changed or "
                    "mixed with other output; the history it tells cannot be trusted"
                )
            torn.append(TornTail(path, fragment[1]))
            fragment = None
        if event is None:
            fragment = (number, len(line))
        else:
            events.append(event)
    if fragment is not None:
        raise EventLogError(f"{path}:{fragment[0]}: a complete line that is no event: the file was changed")
    return events, torn


def parse_line(line: bytes) -> Event | None:
    """One event, or None if the line is none. Unknown event names are kept: a newer version may write
    them."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or any(name not in row for name in HEADER):
        return None
    epoch = row["epoch"]
    return Event(
        t_wall=row["t_wall"],
        t_mono=row["t_mono"],
        who=row["who"],
        pid=row["pid"],
        host=row["host"],
        epoch=tuple(epoch) if isinstance(epoch, list) else epoch,
        step=row["step"],
        event=row["event"],
        fields={name: value for name, value in row.items() if name not in HEADER},
    )
