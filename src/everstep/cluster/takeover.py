"""What a controller, or a lighthouse, makes of the log and the workers of a dead one (docs/protocol.md, rule 7). :func:`decide` is pure.

The new coordinator takes the maximum of the durable record and of what living ranks heard, sends the last commit again, and goes on
with the replicas of which every rank lives and holds that step, or the total of it. All other living workers of a
controller are repaired like the ranks of a broken replica; a lighthouse lets a replica that was healing heal anew, and others end.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.cluster.host import Host
from everstep.config.schema import Config, Fault
from everstep.errors import BadInput
from everstep.recovery import rendezvous
from everstep.recovery.commitlog import Past
from everstep.recovery.server import CoordinatorServer
from everstep.recovery.view import Member, Record
from everstep.run_dir import RunDir
from everstep.telemetry.events import Event, read_events

_POLL_S = 0.005


@dataclass(frozen=True)
class Told:
    """What a living rank said once it obeyed the new coordinator (:func:`everstep.cluster.worker.orphaned.describe`, and its newest records)."""

    last: Record | None
    commit: Record | None
    place: tuple[int, int, int] | None            # (replica, rank, build)
    version: int | None                           # the step that it holds; None: dirty, or none
    holds: tuple[int, tuple[int, int]] | None     # (step, epoch) of the total that it keeps
    reference: bool
    calls: int = 0                                # of former controllers that it has begun in this life

    @staticmethod
    def parse(said: Mapping[str, Any]) -> Told:
        record: Callable[[str], Record | None] = lambda key: Record.from_json(said[key]) if said[key] else None
        holds = said["holds"]
        return Told(
            record("last"), record("commit"), tuple(said["place"]) if said["place"] else None, said["version"],
            (holds[0], (holds[1], holds[2])) if holds else None, said["reference"], said["calls"],
        )

    def reaches(self, step: int, commit: Record | None) -> bool:
        """Whether the rank holds ``step``, or the total that ``commit`` makes final."""
        if self.version == step:
            return True
        return commit is not None and commit.epoch is not None and self.holds == (step, commit.epoch.key)


@dataclass(frozen=True)
class Decision:
    last: Record                  # the newest record that is known anywhere
    commit: Record | None         # of the last committed step
    members: list[Member]         # replicas that go on
    healing: list[Member]         # those that live as they were, but lack the state: they were healing
    lives: dict[int, Member]      # the newest life of every replica
    spares: list[str]
    reference: bool
    state: dict[str, Any] | None  # the recipe's, after the last committed step

    @property
    def broken(self) -> list[Member]:
        """The lives of the replicas that do not go on."""
        kept = {m.replica for m in self.members}
        return [life for replica, life in sorted(self.lives.items()) if replica not in kept]


def decide(past: Past, told: Mapping[str, Told], run_dir: Path) -> Decision:
    """Raises BadInput if there was never a view to go on from."""
    known = [past.last, past.commit, *(r for t in told.values() for r in (t.last, t.commit))]
    records = [record for record in known if record is not None]
    if not records:
        raise BadInput(f"{run_dir}: the controller died before its group was complete; start again with resume=auto or --clean")
    last = max(records, key=lambda r: r.number)
    step = last.view.committed
    commit = next((r for r in records if r.step == step and r.epoch is not None), None)
    lives = _lives(past.members | {m.replica: m for m in last.view.members}, told)
    there = [
        m for m in lives.values() if all(w in told and told[w].place == (m.replica, r, m.build) for r, w in enumerate(m.workers))
        and len({told[w].calls for w in m.workers}) == 1  # else some are in a call that the others will never be in
    ]
    members = [m for m in there if all(told[w].reaches(step, commit) for w in m.workers)]
    healing = [m for m in there if m not in members and m in last.view.members and m.replica in last.view.healing]
    placed = {w for m in lives.values() for w in m.workers}
    state = commit.state if commit and commit.state is not None else past.states.get(step)
    return Decision(
        last, commit, members, healing, lives, sorted(set(told) - placed), any(t.reference for t in told.values()), state if step else {}
    )


def _lives(recorded: Mapping[int, Member], told: Mapping[str, Told]) -> dict[int, Member]:
    """The newest life of each replica; one that was being formed is known from its ranks alone, by name or not at all."""
    lives = dict(recorded)
    for worker, said in told.items():
        if said.place is None:
            continue
        replica, rank, build = said.place
        life = lives.get(replica)
        if life is None or build > life.build:
            life = dataclasses.replace(life, build=build) if life else Member(replica, build, (worker,))
        if build == life.build and rank < len(life.workers):
            life = dataclasses.replace(life, workers=(*life.workers[:rank], worker, *life.workers[rank + 1 :]))
        lives[replica] = life
    return lives


def noted(events: Iterable[Event]) -> int:
    """The last step whose commit the dead coordinator could still write down as an event."""
    return max((e.step or 0 for e in events if e.event == "commit"), default=0)


def faults_left(faults: Iterable[Fault], events: Iterable[Event]) -> list[Fault]:
    """Of the fault schedule, what the dead coordinator did not do."""
    done = {(e.step, e["kind"], e["phase"], e["replica"], e["rank"]) for e in events if e.event == "fault"}
    return [f for f in faults if (f.step, f.kind, f.phase, f.replica, f.rank) not in done]


class Adopting:
    """One takeover, step by step: ``reach`` the workers; once they can find the new coordinator, ``decide`` from what they say.

    ``died``: workers whose end was noticed meanwhile. ``gone``: those without a process; ``missing``: those of whose end the log does
    not know, or that live but do not answer.
    """

    def __init__(self, config: Config, run_dir: RunDir, host: Host, server: CoordinatorServer):
        self._config, self._run_dir, self._host, self._server = config, run_dir, host, server
        self._written = read_events(run_dir.events)
        self.died: list[str] = []
        self.told: dict[str, Told] = {}
        self.gone: set[str] = set()
        self.missing: set[str] = set()

    def reach(self) -> None:
        """Raises BadInput if nobody waits for a controller."""
        before = rendezvous.find(self._run_dir.path)
        if before is None:
            raise BadInput(f"--attach: {self._run_dir.path} has no workers that wait for a controller; start again with resume=auto")
        self._host.attach(before.host)

    def decide(self, past: Past) -> Decision:
        """Waits for the living workers; one that says nothing for recovery.silence_s is killed (it may be frozen: rule 8)."""
        workers, server = set(self._host.infos), self._server
        end = time.monotonic() + self._config.recovery.silence_s
        while workers - set(server.told) - set(self.died) and time.monotonic() < end:
            time.sleep(_POLL_S)
        # Without those that the dead controller had started and could not write down any more: nobody can reach their processes.
        strangers = sorted(set(server.told) - set(self._host.infos))
        for worker in strangers:
            server.retire(worker, "its controller died before it was known")
        self.told = {w: Told.parse(said) for w, said in sorted(server.told.items()) if w not in self.died and w not in strangers}
        decided = decide(past, self.told, self._run_dir.path)
        if decided.state is None:
            raise BadInput(
                f"--attach: the commit record has no state of the recipe for step {decided.last.view.committed}; start again with resume=auto"
            )
        known = {e["worker"] for e in self._written if e.event == "death" and "worker" in e.fields}
        self.gone = {w for m in decided.lives.values() for w in m.workers if w not in self.told}
        self.missing = (self.gone - known) | (workers - set(self.told))
        server.dead |= {worker: "died before the takeover" for worker in self.gone & known}
        for worker in self.missing:
            self._host.end(worker)
        return decided

    @property
    def first_number(self) -> int:
        """Of the next worker that is started: no name is used twice in a run."""
        return 1 + max(int(e.who[1:]) for e in self._written if e.event == "process_start" and e.who[1:].isdecimal())

    @property
    def noted(self) -> int:
        """As :func:`noted`."""
        return noted(self._written)

    def faults_left(self) -> list[Fault]:
        """As :func:`faults_left`."""
        return faults_left(self._config.faults, self._written)
