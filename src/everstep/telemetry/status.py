"""The state of a run at this moment: every rank, the link, the spares, and what is out of service and why.

    import everstep
    state = everstep.status("runs/demo")
    [(rank.replica, rank.rank, rank.phase, rank.step) for rank in state.ranks]

Folded from the event log alone, so it can be had of a run that died. Phases that leave no event while they last (a rollout, a
checkpoint) come from ``RUN/status.json``, which the lead of a run replaces every second while it lives (:class:`Pulse`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.cluster.processes import pid_runs
from everstep.run_dir import is_starting, open_run_dir
from everstep.telemetry import node_states
from everstep.telemetry.events import Epoch, Event, epoch_key, read_events

PULSE_S = 1.0
STALE_S = 5 * PULSE_S  # a pulse that is older says nothing of now
SILENT_S = 10 * PULSE_S  # of a lead that writes none for so long it is said

#: What a rank does after it wrote this event, until its next one.
_PHASE_AFTER = {
    "form": "idle", "obey": "begin", "heal_start": "heal", "heal_done": "exchange", "compute": "compute", "computed": "exchange",
    "link_used": "exchange", "reduce": "reduce", "reduced": "vote", "vote": "vote", "void": "begin", "apply": "idle", "skip": "idle", "keep": "idle",
    "release": "waits to be formed", "fenced": "fenced",
}
_EMPTY = ("dead", "vacant")  # phases of a place without a process
ENDED = ("done", "failed", "interrupted", "gone")


@dataclass
class RankStatus:
    """One place. ``state``: `in` (takes part), `heals`, `forms` (a spare was found), `out` (no process, or its replica is broken)."""

    replica: int
    rank: int
    worker: str
    pid: int
    host: str
    state: str = "in"
    phase: str = "idle"
    step: int | None = None
    since: float = 0.0  # seconds since 1970: when it entered the phase
    reason: str = ""    # why it is out


@dataclass
class Unavailable:
    """A replica that does not take part, and why."""

    replica: int
    rank: int  # that was lost first
    cause: str
    step: int
    since: float
    waits_for: str  # what must happen before it takes part again


@dataclass
class RunStatus:
    folder: str
    state: str = "starting"  # starting, running, or one of ENDED; gone: it ended without a word
    cause: str = ""          # of an end that was none
    recipe: str = ""
    launcher: str = ""
    attempt: int = 0
    replicas: int = 0
    started: float = 0.0
    updated: float = 0.0     # of the newest word of anybody
    ended: float | None = None
    committed_step: int = 0
    epoch: Epoch | None = None
    members: list[int] = field(default_factory=list)
    healing: list[int] = field(default_factory=list)
    link: str = ""           # taken last by a member
    link_building: str = ""
    standbys: list[str] = field(default_factory=list)  # links that are ready for those who would survive a death
    ranks: list[RankStatus] = field(default_factory=list)
    spares: list[str] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)   # rollout engines with processes of their own
    unavailable: list[Unavailable] = field(default_factory=list)
    nodes: list[node_states.NodeStatus] = field(default_factory=list)
    fresh: bool = False      # a pulse of the living lead was used
    dashboard: str = ""      # address, while the run serves one

    @property
    def live(self) -> bool:
        return self.state not in ENDED

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def status(run_dir: str | os.PathLike[str]) -> RunStatus:
    """The state of the run in this folder, or at the address of a live run or of a dashboard (:mod:`everstep.telemetry.window`). Raises
    BadInput if it is none, EventLogError if its log was damaged."""
    from everstep.telemetry import window

    if window.is_address(where := os.fspath(run_dir)):
        with contextlib.closing(window.Mirror(where, dict(os.environ))) as mirror:
            return fold(mirror.shown, read_events(mirror.path / "events"), read_pulse(mirror.path), mirror.now(), here=False)
    if is_starting(Path(run_dir)):
        return RunStatus(os.fspath(run_dir))
    folder = open_run_dir(Path(run_dir))
    return fold(str(folder.path), read_events(folder.events), read_pulse(folder.path))


def fold(
    folder: str, events: Sequence[Event], pulse: dict[str, Any] | None = None, now: float | None = None, here: bool = True
) -> RunStatus:
    """``events``: of all attempts, merged by wall time. ``pulse``: what the lead wrote last, if anything. ``now``: seconds since 1970.
    ``here``: the events are those of a folder of this machine, so that a lead of the same host name is a process of this one."""
    now = time.time() if now is None else now
    first = max((i for i, e in enumerate(events) if e.event == "run_start"), default=None)
    result = RunStatus(folder)
    if first is None:
        return result
    places: dict[tuple[int, int], RankStatus] = {}
    warm: dict[str, None] = {}  # in order of their names as they came
    out: dict[int, Unavailable] = {}
    lives: dict[int, str] = {}
    ready: list[str] = []
    lead = events[first]
    nodes = node_states.Nodes()
    for event in events[first:]:
        result.updated = max(result.updated, event.t_wall)
        nodes.take(event)
        replica = event.get("replica")
        match event.event:
            case "run_start":
                result.recipe, result.launcher, result.attempt = event["recipe"], event["launcher"], event["attempt"]
                result.replicas, result.started, result.committed_step = event["replicas"], event.t_wall, event.step or 0
            case "process_start":
                warm[event.who] = None
            case "form":
                warm.pop(event.who, None)
                for left in places.values():
                    if left.worker == event.who:  # its replica was given up, and it became a spare
                        left.state, left.phase, left.since, left.reason = "out", "vacant", event.t_wall, "its process went elsewhere"
                places[event["replica"], event["rank"]] = RankStatus(
                    event["replica"], event["rank"], event.who, event.pid, event.host, "in", "idle", None, event.t_wall
                )
                lives[event["replica"]] = f"{event['replica']}b{event['build']}"
                if event["replica"] in out:
                    out[event["replica"]].waits_for = "its link and its heal"
            case "takeover":
                lead = event  # another process than the one that began
            case "begin":
                result.state = "running"
                result.epoch = event.epoch
            case "view" | "commit":
                if event.event == "commit":
                    result.committed_step = event.step or 0
                result.epoch = event.get("next_epoch", event.epoch)
                result.members, result.healing = list(event["members"]), list(event.get("healing", ()))
            case "link_build":
                result.link_building = event["link"]
            case "link_ready":
                ready.append(event["link"])
            case "link_used":
                result.link = event["link"]
            case "death":
                warm.pop(event.get("worker", ""), None)
                if replica >= 0:
                    out.setdefault(replica, Unavailable(replica, event["rank"], event["cause"], event.step or 0, event.t_wall,
                                                       "a spare" if result.launcher == "ray" else "its processes to be started anew"))
                    if (place := places.get((replica, event["rank"]))) is not None and place.worker == event.get("worker", place.worker):
                        place.state, place.phase, place.since, place.reason = "out", "dead", event.t_wall, event["cause"]
            case "spare_used":
                warm.pop(event["spare"], None)
                if replica in out:
                    out[replica].waits_for = f"{event['spare']} to be formed in it"
            case "join":
                out.pop(replica, None)
            case "error" if event.who == "lead":
                result.cause = event["message"]
            case "run_end":
                result.state, result.ended = event["status"], event.t_wall
        if event.who != "lead" and replica is not None and event.event in _PHASE_AFTER:
            where = places.get((replica, event.get("rank", -1)))
            if where is not None and where.worker == event.who and where.phase not in _EMPTY:
                phase = "salvage" if event.get("salvage") and event.event == "compute" else _PHASE_AFTER[event.event]
                step = event.step + 1 if event.event.startswith("heal") and event.step is not None else event.step
                where.step = where.step if step is None else step
                if where.phase != phase:
                    where.phase, where.since = phase, event.t_wall
    for place in places.values():
        if (lost := out.get(place.replica)) is not None and place.phase not in _EMPTY:
            place.state = "heals" if place.phase == "heal" or place.replica in result.healing else "forms"
            place.reason = f"rank {lost.replica}/{lost.rank}: {lost.cause}"
    usable = {life for replica, life in lives.items() if replica not in out}
    result.standbys = [link for link in ready if link != result.link and usable >= set(link.partition("#")[0].split("+"))]
    if result.link_building in (result.link, *ready):
        result.link_building = ""
    result.ranks = [places[key] for key in sorted(places)]
    result.spares = [worker for worker in warm if not worker.startswith("e")]
    result.engines = [worker for worker in warm if worker.startswith("e")]
    result.unavailable = [out[replica] for replica in sorted(out)]
    result.nodes = nodes.now
    if not result.live:
        result.spares, result.engines = [], []
    _overlay(result, pulse, lead, now, here and lead.host == socket.gethostname())
    return result


def _overlay(result: RunStatus, pulse: dict[str, Any] | None, lead: Event, now: float, here: bool) -> None:
    """What the lead said last, if that was of this attempt; and whether it still lives."""
    if not result.live:
        for rank in result.ranks:
            if rank.state == "in":
                rank.phase = "ended"
        return
    ours = pulse is not None and pulse["pid"] == lead.pid and pulse["host"] == lead.host
    if ours and pulse is not None:
        result.updated = max(result.updated, pulse["t_wall"])
        result.dashboard = pulse.get("dashboard", "")
    silent_s = now - result.updated
    if (here and not pid_runs(lead.pid)) or (not here and ours and silent_s > 60 * PULSE_S):
        result.state, result.ended = "gone", result.updated
        waiting = sum(rank.state == "in" and rank.host == lead.host and pid_runs(rank.pid) for rank in result.ranks) if here else 0
        attach = f"{waiting} of its ranks live and wait for another one, for recovery.controller_grace_s: continue with --attach, or later " if waiting else "continue "
        result.cause = result.cause or f"the lead process ended without a word (killed?); {attach}with resume=auto"
        result.dashboard, result.spares, result.engines = "", [], []
        for rank in result.ranks:
            rank.phase = "ended" if rank.state == "in" else rank.phase
        return
    if here and ours and pulse is not None and now - pulse["t_wall"] > SILENT_S:
        result.cause = (f"nothing was heard of the lead (process {lead.pid} on {lead.host}) for {now - pulse['t_wall']:.0f} s: "
                        "it is stopped, or its machine is overloaded")
    if not ours or pulse is None or now - pulse["t_wall"] > STALE_S or pulse["attempt"] != result.attempt:
        return
    result.fresh = True
    for rank in result.ranks:
        said = pulse["ranks"].get(rank.worker)
        if said is None or rank.phase in _EMPTY or pulse["t_wall"] - said["since_s"] <= rank.since:
            continue  # the event log knows of something newer
        rank.phase, rank.step, rank.since = said["phase"], said["step"], pulse["t_wall"] - said["since_s"]


def read_pulse(run_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What the lead of the run wrote last; None if it never did (or something else wrote that file)."""
    try:
        pulse = json.loads((Path(run_dir) / "status.json").read_text())
    except (OSError, ValueError):
        return None
    return pulse if isinstance(pulse, dict) and {"t_wall", "pid", "host", "attempt", "ranks"} <= pulse.keys() else None


class Pulse:
    """Replaces ``RUN/status.json`` every :data:`PULSE_S` seconds, on a thread of its own, until it is closed.

    ``ask``: where every rank is, as :meth:`everstep.cluster.group.Group.status` says. A disk that refuses is noted in
    ``refused`` and asked again a second later: looking at a run must not end it.
    """

    def __init__(self, run_dir: Path, attempt: int, ask: Callable[[], dict[str, Any]], dashboard: Callable[[], str] = lambda: ""):
        self._path, self._attempt, self._ask, self._dashboard = run_dir / "status.json", attempt, ask, dashboard
        self._over = threading.Event()
        self.refused = ""
        self._thread = threading.Thread(target=self._loop, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(5.0)

    def _loop(self) -> None:
        while True:
            said = self._ask()
            row = {"t_wall": time.time(), "pid": os.getpid(), "host": socket.gethostname(), "attempt": self._attempt,
                   "dashboard": self._dashboard(), **said}
            try:
                replace_file(self._path, json.dumps(row))
                self.refused = ""
            except OSError as error:
                self.refused = str(error)
            if self._over.wait(PULSE_S):
                return


def replace_file(path: Path, text: str) -> None:
    """Whoever reads ``path`` meanwhile finds the old text or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def headline(state: RunStatus) -> str:
    """The first line of it."""
    epoch = ".".join(map(str, epoch_key(state.epoch))) or "none"
    return (f"{state.state}: {state.recipe}, launcher {state.launcher}, attempt {state.attempt}; step {state.committed_step} committed, "
            f"epoch {epoch}, {len([m for m in state.members if m not in state.healing])} of {state.replicas} replicas")


def describe(state: RunStatus, now: float | None = None) -> Any:
    """What ``everstep status`` prints: a renderable of ``rich``."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    now = (time.time() if now is None else now) if state.live else state.updated
    if not state.attempt:
        return Text(f"{state.state}: nothing was told yet")
    lines: list[Any] = [Text(headline(state))]
    if state.state == "starting":
        lines.append(Text(f"for {_ago(now - state.started)}: {len(state.ranks)} of its ranks have taken their places, {len(state.spares)} processes wait for one"))
    if state.cause:
        lines.append(Text(state.cause))
    table = Table(expand=False)
    for name in ("rank", "state", "phase", "step", "for", "process", "host"):
        table.add_column(name, no_wrap=True)
    for rank in state.ranks:
        table.add_row(f"{rank.replica}/{rank.rank}", rank.state, rank.phase, "–" if rank.step is None else str(rank.step),
                      _ago(now - rank.since), f"{rank.worker} ({rank.pid})", rank.host)
    lines.append(table)
    lines.append(Text(f"link {state.link or 'none'}" + (f", standbys {', '.join(state.standbys)}" if state.standbys else "") + (f", building {state.link_building}" if state.link_building else "")))
    lines.append(Text(f"spares: {', '.join(state.spares) or 'none'}"))
    if state.engines:
        lines.append(Text(f"rollout engines: {', '.join(state.engines)}"))
    lines += [Text(line) for node in state.nodes for line in node_states.describe(node)]
    for lost in state.unavailable:
        since = f"is out for {_ago(now - lost.since)}, since step {lost.step}" if state.live else f"was out from step {lost.step} on"
        waits = f"; waits for {lost.waits_for}" if state.live else ""
        lines.append(Text(f"replica {lost.replica} {since}: rank {lost.replica}/{lost.rank}: {lost.cause}{waits}"))
    if state.dashboard:
        lines.append(Text(f"dashboard: {state.dashboard}"))
    return Group(*lines)


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
