"""What the page shows, as one JSON object made from the files of a run: state of every rank, curves, faults and heals, goodput, events.

:class:`Reader` follows a run that goes on: it reads only what was appended, and works everything out again at most so often that
it takes a twentieth of one core.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.run_dir import open_run_dir
from everstep.telemetry.events import Event
from everstep.telemetry.goodput import PARTS, Goodput, goodput
from everstep.telemetry.metrics import read_metrics
from everstep.telemetry.recoveries import Account, Recovery, account, recoveries
from everstep.telemetry.report import marks
from everstep.telemetry.status import RunStatus, fold, read_pulse
from everstep.telemetry.tail import Tail
from everstep.telemetry.window import Mirror

COLUMNS = 800         # of the time line
POINTS = 600          # of one curve: more are thinned out
FEED = 400            # newest events of the stream
LEAST_PAUSE_S = 0.5   # between two readings
SHARE_OF_A_CORE = 0.05

#: Events that belong to every step; the stream leaves them out, the curves show them.
_EVERYDAY = frozenset({"begin", "compute", "computed", "link_used", "reduce", "reduced", "vote", "apply", "keep", "obey", "call", "metrics"})
_OF_AGENTS = frozenset({"agent", "health", "stuck", "quarantine"})  # which their agent writes down, and the lead as well
#: Curves, in this order, those that the run has: metric, title, unit.
CURVES = (
    ("critic/score/mean", "reward", ""),
    ("val-core/acc/mean@1", "accuracy, held out", ""),
    ("train/loss", "loss", "nats"),
    ("val/loss", "loss, held out", "nats"),
    ("dpo/loss", "loss", "nats"),
    ("actor/loss", "policy loss", ""),
    ("critic/vf_loss", "critic loss", ""),
    ("perf/throughput", "throughput of a device", "tokens/s"),
    ("train/grad_norm", "gradient norm", ""),
    ("actor/grad_norm", "gradient norm", ""),
    ("timing_s/step", "time of a step", "s"),
)


@dataclasses.dataclass(frozen=True)
class Story:
    status: RunStatus
    recoveries: Sequence[Recovery]
    account: Account
    goodput: Goodput
    rows: Sequence[Mapping[str, float]]  # of metrics.jsonl
    events: Sequence[Event]


def tell(folder: str | os.PathLike[str] | Mirror) -> Story:
    """Read a run's files once. Raises BadInput if the folder is none of a run, EventLogError if its log was damaged."""
    return Reader(folder).story()


class Reader:
    """Thread safe. ``story()`` is at most a moment old; see above."""

    def __init__(self, folder: str | os.PathLike[str] | Mirror, clock: Callable[[], float] = time.monotonic):
        self._mirror = folder if isinstance(folder, Mirror) else None
        self._run = open_run_dir(folder.path if isinstance(folder, Mirror) else Path(folder))
        self._clock = clock
        self._lock = threading.Lock()
        self._tail = Tail(self._run.events)
        self._story: Story | None = None
        self._again_at = 0.0
        self.version = 0  # grows whenever a story differs from the one before

    @property
    def folder(self) -> Path:
        return self._run.path

    def story(self) -> Story:
        with self._lock:
            begin = self._clock()
            if self._story is None or begin >= self._again_at:
                self._story = self._read()
                self.version += 1
                took = self._clock() - begin
                self._again_at = begin + max(LEAST_PAUSE_S, took / SHARE_OF_A_CORE)
            return self._story

    def _read(self) -> Story:
        mirror = self._mirror
        if mirror:
            mirror.sync()
        events = self._tail.events()
        metrics = self._run.path / "metrics.jsonl"
        now = mirror.now() if mirror else time.time()
        status = fold(mirror.shown if mirror else str(self._run.path), events, read_pulse(self._run.path), now, here=mirror is None)
        if mirror and mirror.trouble and status.live:
            status.cause = mirror.trouble
        return Story(
            status=status,
            recoveries=recoveries(events),
            account=account(events),
            goodput=goodput(events, until=now if status.live else None),
            rows=read_metrics(metrics) if metrics.is_file() else [],
            events=events,
        )


def as_page(story: Story) -> dict[str, Any]:
    """What ``page.html`` draws. Times are seconds since 1970, spans seconds."""
    good = story.goodput
    return {
        "status": story.status.as_json(),
        "account": dataclasses.asdict(story.account) | {"exact": story.account.exact},
        "recoveries": [dataclasses.asdict(recovery) | {"who": recovery.who} for recovery in story.recoveries],
        "goodput": {
            "wall_s": good.wall_s, "ettr": good.ettr, "goodput": good.goodput, "share": good.share, "total_s": good.total,
            "samples_per_second": good.samples_per_second,
            "by_place": [{"replica": r, "rank": k, "seconds": dict(parts)} for (r, k), parts in good.by_place.items()],
        },
        "curves": curves(story.rows),
        "marks": marks(story.events),
        "lanes": lanes(good),
        "timeline": timeline(story.events),
        "feed": feed(story.events),
        "events": len(story.events),
        "made": time.time(),
    }


def curves(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    found = []
    for name, title, unit in CURVES:
        points = [[row["step"], row["t_wall"], row[name]] for row in rows if name in row and row[name] == row[name]]
        if points:
            found.append({"name": name, "title": title, "unit": unit, "points": thin(points)})
    return found


def lanes(good: Goodput) -> dict[str, Any]:
    """The line of every place, cut into its parts; no finer than :data:`COLUMNS`, of which each shows the first of its parts in the
    order of ``PARTS`` (so that a short stall is seen in a long run)."""
    pieces = [piece for spans in good.spans.values() for piece in spans]
    begin, end = min((p[0] for p in pieces), default=0.0), max((p[1] for p in pieces), default=0.0)
    width = (end - begin) / COLUMNS
    places = []
    for (replica, rank), spans in good.spans.items():
        columns: dict[int, str] = {}
        for since, until, part in spans if width else ():
            for column in range(int((since - begin) / width), min(COLUMNS - 1, int((until - begin) / width)) + 1):
                columns[column] = min(columns.get(column, part), part, key=PARTS.index)
        drawn: list[list[Any]] = []
        for column, part in sorted(columns.items()):
            if drawn and drawn[-1][2] == part:
                drawn[-1][1] = begin + (column + 1) * width
            else:
                drawn.append([begin + column * width, begin + (column + 1) * width, part])
        places.append({"replica": replica, "rank": rank, "spans": drawn})
    return {"begin": begin, "end": end, "places": places}


def thin(points: list[list[float]]) -> list[list[float]]:
    """At most about :data:`POINTS`: of each stretch the point with the least and the one with the greatest last value, and both ends."""
    if len(points) <= POINTS:
        return points
    stretch = -(-2 * len(points) // POINTS)
    kept = {0, len(points) - 1}
    for first in range(0, len(points), stretch):
        part = range(first, min(first + stretch, len(points)))
        kept |= {min(part, key=lambda i: points[i][-1]), max(part, key=lambda i: points[i][-1])}
    return [points[i] for i in sorted(kept)]


def timeline(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Faults, deaths, heals, joins, checkpoints, starts and ends: what happened when, where and why."""
    words: dict[str, Callable[[Event], str]] = {
        "run_start": lambda e: f"attempt {e['attempt']} starts from step {e.step}",
        "run_end": lambda e: f"the run ended: {e['status']}",
        "fault": lambda e: f"{e['kind']} in {e['phase']}: {e['done']}",
        "death": lambda e: str(e["cause"]),
        "spare_used": lambda e: f"{e['spare']} takes the place",
        "heal_start": lambda e: f"heals from replica {e['source']}",
        "heal_done": lambda e: f"healed: {e['heal_bytes']} bytes in {e['seconds']:.3f} s",
        "join": lambda e: f"takes part again; replicas {e['members']}",
        "save": lambda e: f"checkpoint in {e['seconds']:.2f} s",
        "no_room": lambda e: f"no process in the place of {e['after']} yet: {e['why']}",
        "drop": lambda e: f"{len(e['samples'])} samples dropped: {e['reason']}",
        "failure": lambda e: f"{e['failure_class']}: {'; '.join(e['evidence'])}",
        "diagnosis": lambda e: f"what every rank did: {e['path']}",
        "stuck": lambda e: f"stuck {e['what']}: {e['why']}",
        "quarantine": lambda e: f"device {e['index']} of {e['node']} is not used any more: {e['why']}",
        "health": lambda e: f"{e['node']}: {e['device'] + ': ' if e['device'] else ''}{e['what']}{' (over)' if e['severity'] == 'ok' else ''}",
        "error": lambda e: str(e["message"]),
        "straggler": lambda e: f"slow in {e['phase']}: {e['ratio']:.2f} times its peers",
        "corruption": lambda e: f"wrong, by {e.get('found', 'comparison')}: {e['action']}",
        "refused": lambda e: f"{e['worker']} on {e['node']} is unfit: {e['cause']}",
        "spike": lambda e: f"{e['metric']} is {e['value']:.4g}; usual is {e['usual']:.4g}",
    }
    return [
        {"t": e.t_wall, "kind": e.event, "step": e.step, "replica": e.get("replica"), "rank": e.get("rank"), "text": words[e.event](e)}
        for e in _once(events) if e.event in words
    ]


def feed(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The newest events, without those of every step."""
    told = [e for e in _once(events) if e.event not in _EVERYDAY and not (e.event == "commit" and e["kind"] == "apply")][-FEED:]
    return [
        {"t": e.t_wall, "who": e.who, "event": e.event, "step": e.step,
         "text": ", ".join(f"{name} {_short(value)}" for name, value in e.fields.items())}
        for e in told
    ]


def _once(events: Sequence[Event]) -> list[Event]:
    """Without what an agent wrote down and the lead as well, once it was told."""
    heard = {_said(e) for e in events if e.who == "lead" and e.event in _OF_AGENTS}
    return [e for e in events if e.event not in _OF_AGENTS or e.who == "lead" or _said(e) not in heard]


def _said(event: Event) -> str:
    return f"{event.event} {sorted(event.fields.items(), key=lambda item: item[0])}"


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
