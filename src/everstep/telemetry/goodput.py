"""Where the time of a run went: a pure function of its events, whose parts add up to the whole.

The unit is a *place*: one rank of one replica, whichever process holds it at the moment. From the first ``run_start`` to the last
event every instant of a place belongs to exactly one part, the first of these that applies:

==============  ====================================================================================================
``restart``     the run starts, or starts again: from the last event before ``run_start`` until the first ``begin``; and the place is
                being formed again: from ``spare_used`` of its replica until its ``heal_start``
``vacant``      its replica lost a rank, and no spare has been found: from ``death`` until ``spare_used``
``healing``     from its ``heal_start`` until its replica takes part (``join``)
``checkpoint``  a checkpoint is written (``save``)
``stalled``     another replica lost a rank, and this place did nothing of use since: until its first ``compute`` with slots, or its
                ``reduce``, in a newer epoch; what it was computing at that moment it finishes first. In the replica that lost it:
                from the injected fault, or from the rank's last word, until ``death``
``redone``      work that had been done, or dealt to somebody, before: salvage, a step dealt anew; and whole steps that never came to
                be, or that a restart from a checkpoint took back
``productive``  steps from ``begin`` to the place's ``apply``, rollouts and other calls of worker methods
``idle``        the rest: the lead prepares a batch, computes rewards, compares hashes
==============  ====================================================================================================

Waiting for a slower peer inside a step counts as productive here; who is slow is told by :mod:`everstep.telemetry.stragglers`.

``goodput`` is the productive share of the time of all places. ``ettr`` (effective training time ratio, as in arXiv 2410.21680, without
the time in a scheduler's queue) is the share of wall time in which at least one place was productive: a death that stalls nobody
lowers the former, not the latter.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.telemetry.events import Event, epoch_key
from everstep.telemetry.recoveries import account, fault_of

PARTS = ("restart", "vacant", "healing", "checkpoint", "stalled", "redone", "productive", "idle")  # the first that applies counts
_NO_WORK = frozenset({"state_hash", "save_shard"})  # calls that bring training no further; writing a checkpoint is told by `save`

Place = tuple[int, int]  # (replica, rank)
Span = tuple[float, float, str]  # from, until (seconds since 1970), part


@dataclass(frozen=True)
class Goodput:
    """Seconds. ``by_place``: place -> part -> seconds, and its sum over parts is ``wall_s`` for every place."""

    wall_s: float
    by_place: Mapping[Place, Mapping[str, float]]
    ettr: float
    samples_committed: int
    spans: Mapping[Place, Sequence[Span]] = field(default_factory=dict)  # what `by_place` sums up, gapless from begin to end

    @property
    def total(self) -> dict[str, float]:
        """Seconds of all places together, by part."""
        return {part: sum(parts[part] for parts in self.by_place.values()) for part in PARTS}

    @property
    def share(self) -> dict[str, float]:
        """Share of the time of all places, by part; they sum to 1 (nothing, before there is any time)."""
        total = self.total
        whole = sum(total.values())
        return {part: seconds / whole for part, seconds in total.items()} if whole else {}

    @property
    def goodput(self) -> float:
        return self.share.get("productive", 0.0)

    @property
    def samples_per_second(self) -> float:
        return self.samples_committed / self.wall_s if self.wall_s else 0.0


def goodput(events: Sequence[Event], until: float | None = None) -> Goodput:
    """``events``: merged by wall time (``read_events``). ``until``: the end of the account (seconds since 1970) of a run that goes on;
    default: the last event."""
    starts = [e for e in events if e.event == "run_start"]
    if not starts:
        return Goodput(0.0, {}, 0.0, 0)
    begin = starts[0].t_wall
    end = max(begin, max(e.t_wall for e in events) if until is None else until)
    attempts = _attempts(events)
    painted: dict[Place, list[Span]] = {place: [] for place in _places(events)}
    for index, attempt in enumerate(attempts):
        over = attempt[0].t_wall if index == 0 else max(e.t_wall for e in attempts[index - 1])
        after = attempts[index + 1] if index + 1 < len(attempts) else None
        last = end if after is None else max(e.t_wall for e in attempt)
        running = after is None and not any(e.event == "run_end" for e in attempt)
        kept = None if after is None else min(int(a[0].step or 0) for a in attempts[index + 1:])
        _paint(painted, attempt, over, last, kept, running)
    cut = {place: _cut(spans, begin, end) for place, spans in painted.items()}
    by_place = {place: {part: sum(b - a for a, b, p in spans if p == part) for part in PARTS} for place, spans in cut.items()}
    productive = _union((a, b) for spans in cut.values() for a, b, part in spans if part == "productive")
    wall = end - begin
    return Goodput(wall, by_place, productive / wall if wall else 0.0, account(events).samples_committed, cut)


def _attempts(events: Sequence[Event]) -> list[list[Event]]:
    """The events from each ``run_start`` to the next."""
    parts: list[list[Event]] = []
    for event in events:
        if event.event == "run_start":
            parts.append([])
        if parts:
            parts[-1].append(event)
    return parts


def _places(events: Iterable[Event]) -> list[Place]:
    return sorted({(int(e["replica"]), int(e["rank"])) for e in events if e.event == "form"})


def _paint(painted: dict[Place, list[Span]], events: Sequence[Event], over: float, end: float, kept: int | None, running: bool) -> None:
    """Spans of one attempt, in any order and overlapping. ``over``: when the attempt before ended. ``kept``: the last step that a later
    attempt did not take back. ``running``: it goes on, so the step in progress counts as if it were to be committed."""
    first_begin = next((e.t_wall for e in events if e.event == "begin"), end)
    committed = {e.step for e in events if e.event == "commit" and (kept is None or (e.step or 0) <= kept)}
    begun: dict[int | None, float] = {}
    deals: dict[int | None, int] = {}
    ends: dict[int | None, float] = {}  # when the attempt left the step, without an `apply` of the place
    for event in events:
        if event.event == "begin":
            begun.setdefault(event.step, event.t_wall)
        elif event.event == "compute":
            deals[event.step] = min(event["deal"], deals.get(event.step, event["deal"]))
        elif event.event == "commit":
            ends[event.step] = event.t_wall
    for step in begun:
        ends.setdefault(step, end)
    everywhere: list[Span] = [(over, first_begin, "restart")]
    for event in events:
        if event.event == "save":
            everywhere.append((event.t_wall - event["seconds"], event.t_wall, "checkpoint"))
        elif event.event == "call" and event["method"] not in _NO_WORK:
            part = "productive" if kept is None or _step_at(event.t_wall, ends) <= kept else "redone"
            everywhere.append((event.t_wall - event["seconds"], event.t_wall, part))
    absent = _absences(events, end)
    own: dict[Place, list[Event]] = defaultdict(list)
    for event in events:
        place = _place(event)
        if place is not None and event.who != "lead" and not event.who.startswith("agent-"):  # of the rank itself
            own[place].append(event)
    deaths = _deaths(events)
    for place, spans in painted.items():
        spans += everywhere
        spans += _away(absent.get(place[0], ()), own[place])
        left = dict(ends)
        for event in own[place]:
            if event.event in ("apply", "skip") and event.step in begun:
                left[event.step] = max(event.t_wall, ends[event.step])
        for step, since in begun.items():
            part = "productive" if step in committed or (running and step == max(begun, key=_number)) else "redone"
            spans.append((since, left[step], part))
        spans += _again(own[place], deals)
        spans += _stalls(place[0], own[place], deaths, end)


def _number(step: int | None) -> int:
    return step or 0


def _step_at(t_wall: float, ends: Mapping[int | None, float]) -> int:
    """The step that a call at this moment prepared: the first one that ended later."""
    later = [_number(step) for step, t in ends.items() if t >= t_wall]
    return min(later, default=1 + max(map(_number, ends), default=0))


def _place(event: Event) -> Place | None:
    replica, rank = event.get("replica"), event.get("rank")
    return None if replica is None or rank is None else (int(replica), int(rank))


def _absences(events: Sequence[Event], end: float) -> dict[int, list[tuple[float, list[float], float]]]:
    """Replica -> when it lost a rank, when spares were found for it, when it took part again."""
    found: dict[int, list[tuple[float, list[float], float]]] = defaultdict(list)
    out: dict[int, tuple[float, list[float]]] = {}
    for event in events:
        replica = event.get("replica")
        if event.event == "death" and event["replica"] >= 0:
            out.setdefault(int(event["replica"]), (event.t_wall, []))
        elif event.event == "spare_used" and replica in out:
            out[replica][1].append(event.t_wall)
        elif event.event == "join" and replica in out:
            since, spares = out.pop(replica)
            found[replica].append((since, spares, event.t_wall))
    for replica, (since, spares) in out.items():
        found[replica].append((since, spares, end))
    return found


def _away(absences: Iterable[tuple[float, list[float], float]], own: Sequence[Event]) -> list[Span]:
    spans: list[Span] = []
    for since, spares, back in absences:
        formed = spares[0] if spares else back
        heals = next((e.t_wall for e in own if e.event == "heal_start" and since < e.t_wall <= back), back)
        spans += [(since, min(formed, heals), "vacant"), (formed, heals, "restart"), (heals, back, "healing")]
    return spans


def _again(own: Sequence[Event], deals: Mapping[int | None, int]) -> list[Span]:
    """Computing what had been computed, or dealt, before in the same step."""
    spans: list[Span] = []
    for event in own:
        if event.event == "computed" and event["slots"] and (event["salvage"] or event["deal"] > deals.get(event.step, event["deal"])):
            spans.append((event.t_wall - event["seconds"], event.t_wall, "redone"))
    return spans


def _stalls(replica: int, own: Sequence[Event], deaths: Sequence[tuple[Event, float, float]], end: float) -> list[Span]:
    """From a death (its injection, if it was injected) until this place does something of use under a newer view."""
    spans: list[Span] = []
    times = [e.t_wall for e in own]
    for death, since, silent in deaths:
        if int(death["replica"]) == replica:
            spans.append((silent, death.t_wall, "stalled"))
            continue
        at = bisect_right(times, death.t_wall)
        if at == 0 or own[at - 1].event in ("apply", "skip"):
            continue  # it had nothing to do in that moment: the step was over
        until = end
        for event in own[at:]:
            if event.event in ("apply", "skip"):  # the step was complete, and was committed under the view that it died in
                until = since
                break
            if (event.event == "reduce" or (event.event == "compute" and event["slots"])) and epoch_key(event.epoch) > epoch_key(death.epoch):
                until = event.t_wall
                break
        for event in own[bisect_right(times, since) : bisect_right(times, until)]:  # what it was still computing is no stall
            if event.event == "computed" and event["slots"]:
                since = event.t_wall
        spans.append((since, until, "stalled"))
    return spans


def _deaths(events: Sequence[Event]) -> list[tuple[Event, float, float]]:
    """Each death of a replica's rank, when it was struck (if that was injected, else when it was noticed), and since when it did
    nothing any more, as far as is known."""
    found = []
    faults: list[Event] = []
    heard: dict[str, float] = {}
    for event in events:
        if event.event == "fault":
            faults.append(event)
        elif event.event == "death" and event["replica"] >= 0:
            if (fault := fault_of(event, faults)) is not None:
                faults.remove(fault)
            silent = fault.t_wall if fault else heard.get(event.get("worker", ""), event.t_wall)
            found.append((event, fault.t_wall if fault else event.t_wall, silent))
        else:
            heard[event.who] = event.t_wall
    return found


def _cut(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """The line from ``begin`` to ``end`` cut so that each piece has one part: the first of ``PARTS`` whose spans cover it."""
    changes: dict[float, list[tuple[int, int]]] = defaultdict(list)
    for since, until, part in spans:
        since, until = max(begin, since), min(end, until)
        if until > since:
            changes[since].append((PARTS.index(part), 1))
            changes[until].append((PARTS.index(part), -1))
    moments = sorted({begin, end, *changes})
    open_spans = [0] * len(PARTS)
    pieces: list[Span] = []
    for moment, following in itertools.pairwise(moments):
        for index, change in changes.get(moment, ()):
            open_spans[index] += change
        part = PARTS[next((index for index, count in enumerate(open_spans) if count), len(PARTS) - 1)]
        if pieces and pieces[-1][2] == part:
            pieces[-1] = (pieces[-1][0], following, part)
        else:
            pieces.append((moment, following, part))
    return pieces


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what at least one span covers."""
    length, reached = 0.0, float("-inf")
    for since, until in sorted(spans):
        length += max(0.0, until - max(since, reached))
        reached = max(reached, until)
    return length
