"""One structured log for each process, rotated: ``RUN/logs/attempt-N/<who>.jsonl``; and the merged view of a run, ``everstep logs``.

A line is a JSON object: ``t_wall`` (seconds since 1970), ``who``, ``pid``, ``level``, ``module``, ``message``, and where the process
was: ``replica``, ``rank``, ``step``, ``phase``; an exception comes with its ``traceback``. What libraries print stays in ``rank-NNN.log``.

Levels, from the weakest: ``log.level``, ``EVERSTEP_LOG``. Both have the form of :mod:`everstep.config.levels`.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.config.levels import LEVELS, ROOT, parse_levels
from everstep.config.schema import Config
from everstep.errors import BadInput
from everstep.run_dir import open_run_dir
from everstep.telemetry.events import Event, read_events, to_json

ENVIRONMENT = "EVERSTEP_LOG"


def chosen_levels(level: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What EVERSTEP_LOG says, else ``level`` (``log.level``). Raises BadInput."""
    try:
        return parse_levels(environ.get(ENVIRONMENT) or level)
    except ValueError as error:
        raise BadInput(f"{ENVIRONMENT}: {error}") from error


def with_environment(config: Config, environ: Mapping[str, str]) -> Config:
    """``config`` with the levels that EVERSTEP_LOG asks for here: ranks on other machines do not have this environment."""
    level = environ.get(ENVIRONMENT)
    return config.model_copy(update={"log": config.log.model_copy(update={"level": level})}) if level else config


def start(
    path: Path, who: str, level: str, max_bytes: int, keep: int, where: Callable[[], Mapping[str, Any]] = dict
) -> logging.Handler:
    """Log this process's ``everstep`` loggers to ``path``. ``where``: what is added to each line. The caller stops it with :func:`stop`."""
    levels = parse_levels(level)
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=max_bytes, backupCount=keep, delay=True)
    handler.setFormatter(_Lines(who, where))
    root = logging.getLogger(ROOT)
    root.propagate = False
    root.addHandler(handler)
    for module, chosen in levels.items():
        logging.getLogger(f"{ROOT}.{module}" if module else ROOT).setLevel(chosen.upper())
    return handler


def stop(handler: logging.Handler) -> None:
    logging.getLogger(ROOT).removeHandler(handler)
    handler.close()


class _Lines(logging.Formatter):
    def __init__(self, who: str, where: Callable[[], Mapping[str, Any]]):
        super().__init__()
        self._who, self._where = who, where

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "t_wall": round(record.created, 6), "who": self._who, "pid": record.process, "level": record.levelname.lower(),
            "module": record.name.removeprefix(ROOT + "."), "message": record.getMessage(), **self._where(),
        }
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return to_json(row)


# -- the merged view -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One line of the view, from a log or from the event log."""

    t_wall: float
    who: str
    level: str
    text: str
    replica: int | None = None
    rank: int | None = None
    step: int | None = None
    more: str = ""  # a traceback


_EVENT_LEVELS = {"death": "warning", "expel": "warning", "fault": "warning", "fenced": "warning", "error": "error", "void": "warning",
                 "straggler": "warning", "stuck": "warning", "quarantine": "error", "corruption": "error", "refused": "warning", "spike": "warning",
                 "drop": "warning", "no_room": "warning"}
_EVERY_STEP = frozenset({"begin", "compute", "computed", "link_used", "reduce", "reduced", "vote", "apply", "obey", "call", "metrics", "commit"})


def lines(run_dir: str | os.PathLike[str], rank: str | None = None, around: int | None = None, level: str = "info") -> Iterator[Line]:
    """Logs and events of all attempts of a run, merged by wall clock.

    ``rank``: ``R/K`` (replica/rank), a number (counted through all replicas), or the name of a process (``w3``, ``lead``).
    ``around``: from the first event of this step until the begin of the next one. ``level``: the least; events of every step are of
    level debug. Raises BadInput.
    """
    run = open_run_dir(Path(run_dir))
    if level not in LEVELS:
        raise BadInput(f"--level {level}: use {', '.join(LEVELS)}")
    events = read_events(run.events)
    wanted = _selection(rank, events)
    since, until = _span(around, events)
    found = [line for line in _all(run.path, events) if since <= line.t_wall <= until]
    for line in sorted(found, key=lambda line: line.t_wall):
        if LEVELS.index(line.level) >= LEVELS.index(level) and wanted(line):
            yield line


def _all(folder: Path, events: list[Event]) -> Iterator[Line]:
    for path in sorted((folder / "logs").glob("attempt-*/*.jsonl*")):
        for text in path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(text)
                yield Line(row["t_wall"], row["who"], row["level"], f"{row['module']}: {row['message']}", row.get("replica"), row.get("rank"),
                           row.get("step"), row.get("traceback", ""))
            except (ValueError, KeyError, TypeError):
                continue  # the line that a process was writing when it was killed
    for event in events:
        level = "debug" if event.event in _EVERY_STEP else _EVENT_LEVELS.get(event.event, "info")
        told = ", ".join(f"{name} {_short(value)}" for name, value in event.fields.items() if name not in ("replica", "rank"))
        yield Line(event.t_wall, event.who, level, f"{event.event}: {told}" if told else event.event, event.get("replica"), event.get("rank"), event.step)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _selection(rank: str | None, events: list[Event]) -> Callable[[Line], bool]:
    if rank is None:
        return lambda line: True
    places = sorted({(int(e["replica"]), int(e["rank"])) for e in events if e.event == "form"})
    processes = {event.who for event in events}
    if rank in processes:
        return lambda line: line.who == rank
    parts = rank.split("/")
    place: tuple[int, int] | None = None
    if len(parts) == 2 and all(part.isdigit() for part in parts):
        place = (int(parts[0]), int(parts[1]))
    elif rank.isdigit() and int(rank) < len(places):
        place = places[int(rank)]
    if place is None or place not in places:
        known = ", ".join(f"{replica}/{k}" for replica, k in places)
        raise BadInput(f"--rank {rank}: the run has the ranks {known or '(none)'} and the processes {', '.join(sorted(processes))}")
    return lambda line: (line.replica, line.rank) == place


def _span(around: int | None, events: list[Event]) -> tuple[float, float]:
    if around is None:
        return float("-inf"), float("inf")
    of_step = [e.t_wall for e in events if e.step == around and e.event not in ("run_start", "heal_start", "heal_done", "join")]
    begun = [e.t_wall for e in events if e.event == "begin" and e.step == around] or of_step
    if not begun:
        steps = [e.step for e in events if e.event == "begin" and e.step is not None]
        raise BadInput(f"--around {around}: the log has no such step" + (f"; it has {min(steps)} to {max(steps)}" if steps else ""))
    after = [e.t_wall for e in events if e.event == "begin" and e.step == around + 1 and e.t_wall >= begun[-1]]
    return min(begun), after[0] if after else max(of_step)


def render(line: Line) -> str:
    from datetime import datetime

    when = datetime.fromtimestamp(line.t_wall).strftime("%H:%M:%S.%f")[:-3]
    place = f"{line.replica}/{line.rank}" if line.replica is not None and line.rank is not None else ""
    step = "" if line.step is None else f"step {line.step}"
    text = f"{when} {line.who:<6} {place:<5} {step:<9} {line.level:<7} {line.text}"
    return text + ("\n" + line.more if line.more else "")
