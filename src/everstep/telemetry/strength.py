"""What the time from a death to full strength is made of, read from the event log.

==========  ==========================================================================================
part        from ... to
==========  ==========================================================================================
notice      the kill (or nothing, if it was not injected) -> ``death``
confirm     -> ``expel``: the process is gone for certain
find        -> the last ``spare_used``: a process for every gap (a cold start, if there was no spare)
form        -> the last ``model_ready`` of the replica's new life: groups, model, optimizer
link        -> ``link_ready``: the link of the new members, built beside the survivors' steps
enter       -> the first ``heal_start``: the next commit, and the first step
heal        -> the last ``heal_done`` of its ranks; survivors train on
join        -> ``join``: the next commit
==========  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everstep.telemetry.events import Event, seconds_between

PARTS = ("notice", "confirm", "find", "form", "link", "enter", "heal", "join")


def parts_of_recoveries(events: Sequence[Event]) -> list[dict[str, float]]:
    """For each death of a rank whose replica came back undisturbed (no other death of a rank in between): seconds by part, and
    ``total``. ``events``: of one run, merged (``read_events``)."""
    deaths = [i for i, e in enumerate(events) if e.event == "death" and e["replica"] >= 0]
    found = []
    for number, index in enumerate(deaths):
        death = events[index]
        join = next((i for i in range(index, len(events)) if events[i].event == "join" and events[i]["replica"] == death["replica"]), None)
        if join is None or (number + 1 < len(deaths) and deaths[number + 1] < join):
            continue
        parts = _parts(death, [e for e in events[index : join + 1]], [e for e in events[:index] if e.event == "fault"])
        if parts:
            found.append(parts)
    return found


def _parts(death: Event, span: list[Event], faults: list[Event]) -> dict[str, float] | None:
    replica = death["replica"]
    of: Any = lambda kind: [e for e in span if e.event == kind and e.get("replica", replica) == replica]
    fault = next((f for f in reversed(faults) if f.get("worker") == death.get("worker")), None)
    expel = next((e for e in of("expel") if e.get("worker", death.get("worker")) == death.get("worker")), None)
    marks = [of("spare_used")[-1:], of("model_ready")[-1:], of("link_ready")[-1:], of("heal_start")[:1], of("heal_done")[-1:], span[-1:]]
    if expel is None or not all(marks):
        return None
    instants = [fault or death, death, expel, *(mark[0] for mark in marks)]
    parts = {name: max(0.0, seconds_between(a, b)) for name, a, b in zip(PARTS, instants, instants[1:], strict=False)}
    return parts | {"total": seconds_between(instants[0], instants[-1])}
