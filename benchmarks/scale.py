"""What deaths cost at sizes that nobody here can measure: a discrete-event simulation, fed with what was measured.

    python -m benchmarks.scale [--out FILE.json]              goodput for 64 to 100,000 GPUs
    python -m benchmarks.scale --reproduce RUN [RUN ...]      the same model against the event logs of real runs: wall time, within how much
        --constants-of RUN                                    what was measured is that of another run of the same job: a prediction

**The model.** A step takes ``fixed_s`` and ``slot_s`` for each slot of its busiest replica. A death in it adds what is noticed and agreed
(``noticed_s``, ``again_s``), a link if none is ready (``link_s``), and the dead replica's slots, shared out among the survivors. The replica is gone until a spare has
taken the place (``form_s``, its link being built beside), enters with a commit, and computes once it has healed (``heal_s``). Without a spare a process is
started where there is a device (``cold_s``), else when the device has been replaced (``replace_s``). If nobody is left, all go back to the last checkpoint.
Between two of these moments every step is alike, so it jumps from one to the next; nothing is drawn but when and where deaths come.

**Against a real run** the model is given that run's replicas, slots and spares, when somebody died, and the means of what was measured in it: an undisturbed
step for each number of replicas that compute, from a death to computing again, to full strength, and to a new spare. What comes out is the seconds of the whole run.

**The rival** is a restart of all from a checkpoint at each death: ``restart_s``, and the work since the checkpoint, which is written at the best interval
(Young, 1974; Daly, doi 10.1016/j.future.2004.11.016) and blocks for ``save_s``.

**Goodput** is the time that the committed steps would take undisturbed, over the time that they took.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.telemetry.events import Event, of_kind, read_events
from everstep.telemetry.recoveries import Recovery, recoveries

HOUR = 3600.0
#: Llama 3 405B (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions of 466 in 54 days on 16,384 H100.
LLAMA3_GPU_HOURS = 16_384 * 54 * 24 / 419
#: Meta's research clusters (arXiv 2410.21680): a mean time to failure of 7.9 hours for jobs of 1,024 GPUs.
RSC_GPU_HOURS = 1024 * 7.9


@dataclass(frozen=True)
class Constants:
    """Seconds. The defaults of the first block are measured on four H100 (docs/recovery.md), those of the second are assumed, and are said to be."""

    noticed_s: float = 0.0024
    again_s: float = 0.0137
    link_s: float = 1.3      # forming one after a death, with more replicas than recovery.standby_links_up_to
    form_s: float = 0.8      # a warm spare: groups, model, optimizer
    heal_bytes_per_s: float = 8.3e9 / 3.4

    cold_s: float = 30.0     # a process from nothing
    replace_s: float = 1800.0  # a device that is broken: until another one is there
    broken_share: float = 0.5  # of deaths that take the device along (the others are processes)
    restart_s: float = 300.0   # the rival: all processes from nothing, groups, checkpoint read
    save_s: float = 10.0       # the rival: a checkpoint blocks training


@dataclass(frozen=True)
class Job:
    """``slots`` of one step over all replicas; ``state_bytes`` of a rank. ``standbys_up_to``: recovery.standby_links_up_to."""

    replicas: int
    ranks: int  # of a replica
    spares: int
    slots: int
    fixed_s: float
    slot_s: float
    state_bytes: float
    standbys_up_to: int = 8

    @property
    def gpus(self) -> int:
        return self.replicas * self.ranks + self.spares

    def step_s(self, members: int) -> float:
        return self.fixed_s + self.slot_s * math.ceil(self.slots / members)

    def salvage_s(self, survivors: int) -> float:
        """The slots of one that died, by the others."""
        return self.slot_s * math.ceil(math.ceil(self.slots / (survivors + 1)) / survivors)


@dataclass(frozen=True)
class Outcome:
    goodput: float
    deaths: int
    all_lost: int
    mean_members: float
    seconds: float


@dataclass(frozen=True)
class Death:
    """After ``at_s`` seconds. ``of_member``: it strikes no spare. ``broken``: the device is gone. ``noticed_s``: if not the constant."""

    at_s: float
    of_member: bool = True
    broken: bool = False
    noticed_s: float | None = None


_NEVER = Death(math.inf)


def simulate(job: Job, c: Constants, deaths: Iterator[Death], until_s: float = math.inf, steps: float = math.inf) -> Outcome:
    """Until ``until_s`` seconds have passed, or ``steps`` are committed. ``deaths``: in order of time. ValueError if neither will ever be: nobody is left,
    and nobody comes."""
    now, committed, lost, all_lost, count, member_s = 0.0, 0.0, 0.0, 0, 0, 0.0
    members, spares = job.replicas, job.spares
    coming: list[tuple[float, str]] = []  # (when, what): a replica that contributes again, a spare that is warm
    waiting = 0  # replicas for which nobody was there
    death = next(deaths, _NEVER)

    def bring_back(at: float) -> None:
        heapq.heappush(coming, (at + c.form_s + job.state_bytes / c.heal_bytes_per_s + job.step_s(max(1, members)), "replica"))

    while now < until_s and committed < steps:
        if coming and coming[0][0] <= now:  # it enters between two steps
            at, what = heapq.heappop(coming)
            if what == "replica":
                members += 1
            elif waiting:
                waiting -= 1
                bring_back(now)
            else:
                spares += 1
            continue
        if not members:
            now = min(coming[0][0], until_s) if coming else until_s
            if now == math.inf:
                raise ValueError(f"nobody is left after {committed:g} of {steps:g} steps, and nobody comes")
            while death.at_s <= now:  # nobody is at work
                death = next(deaths, _NEVER)
            continue
        step = job.step_s(members)
        if death.at_s >= now + step:
            event = min(death.at_s, coming[0][0] if coming else math.inf, until_s)
            whole = min(steps - committed, max(1.0, (event - now) // step if event < math.inf else math.inf))
            committed, now, member_s = committed + whole, now + whole * step, member_s + whole * step * members
            continue
        struck, death = death, next(deaths, _NEVER)
        at = max(struck.at_s, now)
        count += 1
        heapq.heappush(coming, (at + (c.replace_s if struck.broken else 0.0) + c.cold_s, "spare"))
        if not struck.of_member:
            spares = max(0, spares - 1)
            continue
        members -= 1
        if spares:
            spares -= 1
            bring_back(at)
        else:
            waiting += 1
        if not members:  # the state is gone: back to a checkpoint, written at the rival's interval
            all_lost += 1
            lost += _interval(job, c, LLAMA3_GPU_HOURS) / 2
            now = at + c.restart_s
            continue
        # the step in which it dies is finished by the others
        link = c.link_s if members + 1 > job.standbys_up_to and members > 1 else 0.0
        noticed = c.noticed_s if struck.noticed_s is None else struck.noticed_s
        duration = max(step, at - now + noticed) + c.again_s + link + job.salvage_s(members)
        now += duration
        member_s += duration * members
        committed += 1
    ideal = committed * job.step_s(job.replicas) - lost
    return Outcome(max(0.0, ideal) / max(now, 1e-9), count, all_lost, member_s / max(now, 1e-9), now)


def drawn_deaths(job: Job, gpu_hours: float, c: Constants, seed: int) -> Iterator[Death]:
    """A Poisson process over all devices."""
    rng, now = random.Random(seed), 0.0
    while True:
        now += rng.expovariate(job.gpus / (gpu_hours * HOUR))
        yield Death(now, rng.random() < job.replicas * job.ranks / job.gpus, rng.random() < c.broken_share)


def _interval(job: Job, c: Constants, gpu_hours: float) -> float:
    return math.sqrt(2 * c.save_s * gpu_hours * HOUR / (job.replicas * job.ranks))


def restarting(job: Job, c: Constants, gpu_hours: float, seed: int, until_s: float) -> float:
    """Goodput of the rival under deaths of the same rate: it needs all devices, and has a hot spare for each that breaks, for nothing."""
    interval, rng = _interval(job, c, gpu_hours), random.Random(seed)
    rate = job.replicas * job.ranks / (gpu_hours * HOUR)
    now, saved, done = 0.0, 0.0, 0.0
    while now < until_s:
        alive = rng.expovariate(rate)
        periods = alive // (interval + c.save_s)
        saved += periods * interval
        now += alive + c.restart_s
        while (again := rng.expovariate(rate)) < c.restart_s:  # it dies while it starts
            now += again
        done = saved
    return done / now


# -- sizes ----------------------------------------------------------------------------------------------------------------------


def sizes(seeds: int, days: float, c: Constants) -> list[dict[str, Any]]:
    """A model of 70 billion parameters on replicas of 64 ranks, 14 bytes of state a parameter; 8 slots a replica, steps of 10 s, of which 1 s is fixed."""
    rows = []
    for gpus in (64, 128, 512, 1024, 4096, 16_384, 65_536, 100_000):
        replicas = max(1, gpus // 64)
        for source, gpu_hours in (("Llama 3", LLAMA3_GPU_HOURS), ("RSC", RSC_GPU_HOURS)):
            row: dict[str, Any] = {"gpus": gpus, "replicas": replicas, "rate": source, "mtbf_h": gpu_hours / (replicas * 64)}
            for spares in (0, 8, 64):
                job = Job(replicas, 64, spares, 8 * replicas, 1.0, 9.0 / 8, 70e9 * 14 / 64)
                found = [simulate(job, c, drawn_deaths(job, gpu_hours, c, seed), days * 24 * HOUR) for seed in range(seeds)]
                row[f"spares_{spares}"] = statistics.mean(outcome.goodput for outcome in found)
                row["deaths_per_day"] = statistics.mean(outcome.deaths for outcome in found) / days
            row["restart"] = statistics.mean(restarting(job, c, gpu_hours, seed, days * 24 * HOUR) for seed in range(seeds))
            rows.append(row)
    return rows


# -- against real runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured(Job):
    """A job whose steps were measured; ``table``: replicas that compute -> seconds."""

    table: dict[int, float] = dataclasses.field(default_factory=dict)

    def step_s(self, members: int) -> float:
        return self.table.get(members) or super().step_s(members)


@dataclass(frozen=True)
class Log:
    """What a run's event log says of it. ``refilled_s``: from a death to the next new spare."""

    begins: Sequence[Event]
    found: Sequence[Recovery]
    job: Measured
    constants: Constants
    full_strength_s: Sequence[float]
    refilled_s: Sequence[float]

    @property
    def start(self) -> float:
        return self.begins[0].t_wall

    @property
    def wall_s(self) -> float:
        return self.begins[-1].t_wall - self.start

    def deaths(self) -> Iterator[Death]:
        return iter([Death(r.t_wall - self.start, noticed_s=r.detect_s or 0.0) for r in self.found])


def read(run: Path) -> Log:
    events = read_events(run / "events")
    start, begins = of_kind(events, "run_start")[0], of_kind(events, "begin")
    found = [r for r in recoveries(events) if r.replica >= 0 and begins[0].t_wall <= r.t_wall <= begins[-1].t_wall]
    table, slots = _steps(events, begins, [r.t_wall for r in found])
    most, least = max(table), min(table)
    more_slots = math.ceil(slots / least) - math.ceil(slots / most)
    slot_s = max(0.0, (table[least] - table[most]) / more_slots if more_slots else table[most] * most / slots)
    job = Measured(int(start["replicas"]), 1, int(start["spares"]), slots, max(0.0, table[most] - slot_s * math.ceil(slots / most)), slot_s, 0.0, table=table)

    back = [r.full_strength_s for r in found if r.full_strength_s is not None]
    ready = [e.t_wall for e in of_kind(events, "spare_ready")]
    refilled = [min(later) - r.t_wall for r in found if (later := [t for t in ready if t > r.t_wall])] if job.spares else []
    # The joiner's first step is in the time to full strength, and the model adds it; without a spare that time has a process's start in it.
    form_s = max(0.0, _mean(back) - job.step_s(max(1, job.replicas - 1))) if back else math.inf
    again_s = _mean([max(0.0, (r.stall_s or 0.0) - (r.detect_s or 0.0)) for r in found])
    cold_s = _mean(refilled) if refilled else math.inf if job.spares else 0.0
    return Log(begins, found, job, Constants(again_s=again_s, link_s=0.0, form_s=form_s, cold_s=cold_s), back, refilled)


def reproduce(run: Path, constants_of: Path | None = None) -> dict[str, Any]:
    """The seconds from a run's first step to its last, as they were and as the model has them, with what was measured in that run or in another one."""
    log = read(run)
    measured = read(constants_of) if constants_of else log
    predicted = simulate(measured.job, measured.constants, log.deaths(), steps=len(log.begins) - 1).seconds
    return {"run": str(run), "constants_of": str(constants_of or run), "steps": len(log.begins), "deaths": len(log.found), "wall_s": log.wall_s,
            "predicted_s": predicted, "error": predicted / log.wall_s - 1.0, "step_s": measured.job.table, "slot_s": measured.job.slot_s,
            "constants": dataclasses.asdict(measured.constants), "full_strength_s": list(log.full_strength_s), "refilled_s": list(log.refilled_s)}


def _steps(events: Sequence[Event], begins: Sequence[Event], deaths: Sequence[float]) -> tuple[dict[int, float], int]:
    """(replicas that computed -> mean seconds of a step, what the lead does before the next one included; slots of a step). Steps in which somebody died do
    not count."""
    computing: dict[int, dict[int, int]] = {}  # step -> replica -> slots
    for event in of_kind(events, "computed"):
        if event.step is not None and event["rank"] == 0 and event["slots"]:
            mine = computing.setdefault(event.step, {})
            mine[event["replica"]] = mine.get(event["replica"], 0) + len(event["slots"])
    samples: dict[int, list[float]] = {}
    for one, following in itertools.pairwise(begins):
        if one.step in computing and following.step == one.step + 1 and not any(one.t_wall <= t <= following.t_wall for t in deaths):
            samples.setdefault(len(computing[one.step]), []).append(following.t_wall - one.t_wall)
    return {count: _mean(seconds) for count, seconds in samples.items()}, max(sum(step.values()) for step in computing.values())


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reproduce", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--constants-of", type=Path, metavar="RUN")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--days", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.reproduce:
        result: Any = [reproduce(run, given.constants_of) for run in given.reproduce]
        for row in result:
            print(f"{row['run']}: {row['steps']} steps, {row['deaths']} deaths: {row['wall_s']:.2f} s, the model {row['predicted_s']:.2f} s ({row['error']:+.1%})")
    else:
        constants = Constants()
        rows = sizes(given.seeds, given.days, constants)
        result = {"constants": dataclasses.asdict(constants), "rows": rows}
        print("   GPUs  replicas  rate     MTBF of the job  deaths/day  no spare  8 spares  64 spares  restart from checkpoint")
        for row in rows:
            print(f"{row['gpus']:7,d}  {row['replicas']:8d}  {row['rate']:7s}  {row['mtbf_h']:13.2f} h  {row['deaths_per_day']:10.1f}  {row['spares_0']:8.1%}"
                  f"  {row['spares_8']:8.1%}  {row['spares_64']:9.1%}  {row['restart']:8.1%}")
    if given.out:
        given.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
