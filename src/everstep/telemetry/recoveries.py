"""What faults cost, worked out from the event log alone: recoveries, and the account of steps and samples.

Which events give which number (all spans on one clock, ``seconds_between``):

======================  ========================================================================================
killed                  ``fault`` (an injected fault only): the instant before the signal
noticed                 ``death``; ``detect_s`` = noticed - killed
survivors compute again per surviving replica its first useful act in an epoch above that of ``death``: a ``compute`` with slots,
                        or the ``reduce`` of what it still holds. ``stall_s``: the longest time that a survivor did nothing of
                        use until then, from the kill (the detection, if nothing was injected), or from the end of the
                        computation it was in
the step is committed   first ``commit`` of the step in which it died; ``commit_s`` likewise
full strength           first later ``join`` or ``rollback`` whose ``members`` are all replicas of the run; ``full_strength_s``
redone                  slots of the step that survivors computed after the death although they had been dealt to somebody before:
                        those that the dead one held (salvaged), or all of them (dealt anew)
======================  ========================================================================================

Steps: a step is lost if it is missing between the first and the last commit, doubled if it was committed twice, or
applied twice by one process. Samples: lost if begun (``begin``) in a step that the run went past without committing
them (``commit``) or dropping them with a reason (``drop``); doubled if committed twice in the same ``rl_pass``.
A restart from a checkpoint (``run_start`` with a lower ``step``), and a ``rollback`` to a copy of an older step, take commits back:
those are counted apart, as rolled back, and their samples may be used again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from everstep.telemetry.events import ENGINES, Epoch, Event, epoch_key, of_kind, seconds_between

SampleKey = tuple[int, str]  # (rl_pass, sample id)


@dataclass(frozen=True)
class Recovery:
    """One death and what followed. Spans in seconds, from the kill if it was injected, else from its detection.

    None: it did not happen (yet), or it concerned nobody (``stall_s`` of a rank that took no part in the view).
    """

    replica: int
    rank: int
    cause: str
    step: int
    t_wall: float  # of the kill, or of the detection
    injected: bool = False
    detect_s: float | None = None
    stall_s: float | None = None
    commit_s: float | None = None
    full_strength_s: float | None = None
    slots_redone: int = 0
    t_full_strength: float | None = None  # wall clock

    @property
    def who(self) -> str:
        """Who died, in words."""
        if self.replica >= 0:
            return f"rank {self.replica}/{self.rank}"
        return f"rollout engine {self.rank}" if self.replica == ENGINES else "a spare"


@dataclass(frozen=True)
class Account:
    """The account of committed steps and samples over all attempts of a run."""

    first_step: int | None
    last_step: int | None
    committed: int
    skipped: int
    steps_missing: list[int] = field(default_factory=list)
    steps_doubled: list[int] = field(default_factory=list)
    steps_rolled_back: list[int] = field(default_factory=list)
    samples_committed: int = 0
    samples_dropped: int = 0
    samples_lost: list[str] = field(default_factory=list)
    samples_doubled: list[str] = field(default_factory=list)

    @property
    def steps_lost(self) -> int:
        return len(self.steps_missing)

    @property
    def exact(self) -> bool:
        """Every step once, every sample once."""
        return not (self.steps_missing or self.steps_doubled or self.samples_lost or self.samples_doubled)


def recoveries(events: Sequence[Event]) -> list[Recovery]:
    """All deaths of the log, in order. ``events``: merged by wall time (``read_events``)."""
    faults: list[Event] = []
    found: list[Recovery] = []
    computed: dict[int | None, list[Event]] = {}
    for event in events:
        if event.event == "computed":
            computed.setdefault(event.step, []).append(event)
    members: dict[tuple[int, ...], list[int]] = {}
    replicas = 0
    for index, event in enumerate(events):
        match event.event:
            case "run_start":
                replicas = int(event["replicas"])
            case "view":
                members[epoch_key(event.epoch)] = event["members"]
            case "commit" if event.get("next_epoch") is not None:
                members[epoch_key(_epoch(event["next_epoch"]))] = event["members"]
            case "fault":
                faults.append(event)
            case "death":
                fault = fault_of(event, faults)
                if fault is not None:
                    faults.remove(fault)
                view = members.get(epoch_key(event.epoch))
                attempts = computed.get(event.step, [])
                found.append(_recovery(event, fault, _Later(events, index), attempts, view, replicas))
    return found


#: Phase -> the events by which a rank says that it is inside, and that it has left (None: it is until the next step).
_SPANS: dict[str, tuple[str, str | None]] = {
    "compute": ("compute", "computed"), "salvage": ("compute", "computed"), "exchange": ("link_used", "reduce"), "reduce": ("reduce", "reduced"), "vote": ("vote", "apply"),
    "apply": ("apply", None),
}


def survivor_inside(events: Sequence[Event], fault: Event) -> bool:
    """Whether a rank of another replica was inside the fault's phase of that step when the fault happened, by its own events.

    Inside reduce means: the collectives that sum the gradients were issued and not complete. An apply event is written when all is
    applied, and says for how long that went on.
    """
    begun, left = _SPANS[fault["phase"]]
    salvage: bool | None = fault["phase"] == "salvage" if begun == "compute" else None  # both are told by the same events
    others = [
        e for e in events
        if e.step == fault.step and e.get("replica") not in (None, fault["replica"]) and e.get("salvage") in (None, salvage)
    ]
    for start in of_kind(others, begun):
        end = next((e for e in others if e.event == left and e.who == start.who and e.epoch == start.epoch), None)
        lasted = start["seconds"] if begun == "apply" else 0.0
        if seconds_between(start, fault) + lasted > 0 and (end is None or seconds_between(fault, end) > 0):
            return True
    return False


def account(events: Sequence[Event]) -> Account:
    """Steps and samples over the whole log. ``events``: merged by wall time (``read_events``)."""
    commits: dict[int, Event] = {}
    doubled_steps: set[int] = set()
    rolled_back: list[int] = []
    begun: dict[int, set[SampleKey]] = {}
    passes: dict[int, int] = {}  # of the steps begun: commits do not say theirs
    dropped: set[tuple[int | None, str]] = set()  # no step: of whichever
    applied: Counter[tuple[str, int, int]] = Counter()
    first: int | None = None
    finished = False
    for event in events:
        step = event.step
        match event.event:
            case "run_start" | "rollback":
                assert step is not None
                taken_back = sorted(k for k in commits if k > step)
                rolled_back.extend(taken_back)
                for k in taken_back:
                    del commits[k]
                begun = {k: samples for k, samples in begun.items() if k <= step}
                applied = Counter()  # whoever lives on applies the steps after it again
                doubled_steps -= set(taken_back)
                if event.event == "run_start":
                    first = step + 1 if first is None else min(first, step + 1)
                finished = False
            case "begin":
                assert step is not None
                passes[step] = int(event.get("rl_pass", 0))
                begun.setdefault(step, set()).update(_keys(event, passes[step]))
            case "commit":
                assert step is not None
                if step in commits:
                    doubled_steps.add(step)
                commits[step] = event
            case "apply":
                assert step is not None
                applied[event.who, event.pid, step] += 1
                if applied[event.who, event.pid, step] > 1:
                    doubled_steps.add(step)
            case "drop":
                dropped.update((step, sample) for sample in event["samples"])
            case "run_end":
                finished = event["status"] == "done"
    if first is None and commits:
        first = min(commits)
    last = max(commits, default=None)
    used = Counter(key for k, event in commits.items() for key in _keys(event, passes.get(k, 0)))
    over = {k for k in begun if finished or (last is not None and k <= last)}  # the step in progress is not lost
    lost = sorted({key for k in over for key in begun[k] if not {(k, key[1]), (None, key[1])} & dropped} - set(used))
    missing = [] if first is None or last is None else [k for k in range(first, last + 1) if k not in commits]
    return Account(
        first_step=first,
        last_step=last,
        committed=len(commits),
        skipped=sum(event["kind"] == "skip" for event in commits.values()),
        steps_missing=missing,
        steps_doubled=sorted(doubled_steps),
        steps_rolled_back=rolled_back,
        samples_committed=len(used),
        samples_dropped=len(dropped),
        samples_lost=[_name(key) for key in lost],
        samples_doubled=[_name(key) for key, count in sorted(used.items()) if count > 1],
    )


class _Later:
    """The events after one of them, up to the next start of the run: what a later attempt does is no recovery of this
    one. Iterated lazily: a search ends at what it finds."""

    def __init__(self, events: Sequence[Event], index: int):
        self._events, self._index = events, index

    def __iter__(self) -> Iterator[Event]:
        for index in range(self._index + 1, len(self._events)):
            if self._events[index].event == "run_start":
                return
            yield self._events[index]


def _recovery(
    death: Event, fault: Event | None, later: _Later, computed: list[Event], view: list[int] | None, replicas: int
) -> Recovery:
    origin = fault or death
    replica, step = int(death["replica"]), death.step
    assert step is not None
    concerned = replica >= 0 if view is None else replica in view  # not so: a spare, or a replica already out
    stall = _stall(death, origin, later, view) if concerned else None
    commit = next((e for e in later if e.event == "commit" and e.step == step), None)
    whole = replicas or len(view or ())
    full = next((e for e in later if e.event in ("join", "rollback") and len(e["members"]) == whole), None) if replica >= 0 else None
    return Recovery(
        replica=replica,
        rank=int(death["rank"]),
        cause=str(death["cause"]),
        step=step,
        t_wall=origin.t_wall,
        injected=fault is not None,
        detect_s=seconds_between(fault, death) if fault else None,
        stall_s=stall,
        commit_s=seconds_between(origin, commit) if commit and concerned else None,
        full_strength_s=seconds_between(origin, full) if full else None,
        slots_redone=_redone(death, later, computed) if concerned else 0,
        t_full_strength=full.t_wall if full else None,
    )


def _stall(death: Event, origin: Event, later: _Later, view: list[int] | None) -> float | None:
    """The longest time that a surviving replica did nothing of use. None if no survivor was seen at work again."""
    dead = {int(death["replica"])}
    waiting = None if view is None else set(view) - dead
    idle_since: dict[int, Event] = {}  # replicas that were computing when the other one died, and finished that
    longest: float | None = None
    for event in later:
        if waiting is not None and not waiting:
            break
        if event.event == "death" and waiting is not None:
            waiting.discard(int(event["replica"]))  # died before it could compute again
        elif event.event == "computed" and event["slots"] and epoch_key(event.epoch) <= epoch_key(death.epoch):
            idle_since[int(event["replica"])] = event
        elif event.event == "reduce" or (event.event == "compute" and event["slots"]):
            replica = int(event["replica"])
            if epoch_key(event.epoch) <= epoch_key(death.epoch) or replica in dead or (waiting is not None and replica not in waiting):
                continue
            idle = seconds_between(idle_since.get(replica, origin), event)
            longest = idle if longest is None else max(longest, idle)
            if waiting is None:  # the log does not say who the members were: the first one counts
                break
            waiting.discard(replica)
    return longest


def _redone(death: Event, later: _Later, computed: list[Event]) -> int:
    """Slots, each counted once however many ranks a replica has; up to the next death in the same step, which has its own."""
    until = next((epoch_key(e.epoch) for e in later if e.event == "death" and e.step == death.step), (math.inf,))
    first_deal = min((e["deal"] for e in computed), default=0)
    again: dict[tuple[tuple[int, ...], int], set[int]] = {}
    for event in computed:
        if epoch_key(death.epoch) < epoch_key(event.epoch) <= until and (event["salvage"] or event["deal"] > first_deal):
            again.setdefault((epoch_key(event.epoch), int(event["replica"])), set()).update(event["slots"])
    return sum(len(slots) for slots in again.values())


def fault_of(death: Event, faults: Sequence[Event]) -> Event | None:
    """The latest injected fault of that process, or rank, that no earlier death has claimed; `nan` and `error` kill nobody."""

    def same(fault: Event) -> bool:
        if "worker" in fault.fields and "worker" in death.fields:
            return bool(fault["worker"] == death["worker"])
        return (fault["replica"], fault["rank"]) == (death["replica"], death["rank"])

    return next((f for f in reversed(faults) if f["kind"] not in ("nan", "error") and same(f)), None)


def _keys(event: Event, rl_pass: int) -> list[SampleKey]:
    return [(rl_pass, sample) for sample in event["samples"]]


def _name(key: SampleKey) -> str:
    return key[1] if key[0] == 0 else f"{key[1]} (pass {key[0]})"


def _epoch(value: int | list[int] | tuple[int, ...]) -> Epoch:
    return value if isinstance(value, int) else tuple(value)
