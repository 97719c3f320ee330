"""The broken replica and everything around it: whatever dies while it is being repaired, with spares, without, and below the minimum.

Each row is a whole run of ``everstep train`` in real processes under real signals, in exact mode: the final weights must be, to the last
bit, those of a run in which nobody died; the history checker must be content; and no survivor may have waited long.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from tests.support.runs import SFT, Finished, config, finish, gone
from tests.test_exact import BASE, SHAPES, by_position, path_of, undisturbed
from tests.test_faults import assert_invariants

from everstep.checkpoint import manifest
from everstep.cluster.forked import ForkedHost
from everstep.cluster.refill import Refill
from everstep.errors import BelowMinimum, WorkerFailed
from everstep.telemetry.events import read_events
from everstep.telemetry.recoveries import recoveries

pytestmark = [pytest.mark.timeout(240)]

STEPS = 48
STALL_S = 5.0  # far below every deadline that a survivor could be waiting for; an ordinary stall is some tens of milliseconds
RESTART = "recovery.restart_attempts=5"


@dataclasses.dataclass(frozen=True)
class Case:
    """``faults``: as in the configuration. ``left``: replicas that contribute at the end."""

    name: str
    faults: tuple[str, ...]
    left: int
    replicas: int = 3
    spares: int = 1
    shape: str = ""
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def kill(step: int, phase: str, replica: int, rank: int = 0, kind: str = "kill", hold: bool = False, delay_s: float = 0.0) -> str:
    return f"{{step: {step}, phase: {phase}, kind: {kind}, replica: {replica}, rank: {rank}, hold: {str(hold).lower()}, delay_s: {delay_s}}}"


CASES = [
    Case("no-spare-restarted", (kill(4, "reduce", 1),), 3, spares=0, more=(RESTART,)),
    Case("no-spare-rank0-of-tp2-restarted", (kill(4, "compute", 0),), 2, 2, 0, "tp2", (RESTART,)),
]
TELLING = {"no-spare-restarted", "no-spare-rank0-of-tp2-restarted"}


def prove(case: Case, model: Path, folder: Path, host=ForkedHost) -> Finished:
    shape = [*SHAPES[case.shape], f"layout.replicas={case.replicas}"]
    run = finish(config(SFT, folder / "run", *BASE, f"sft.steps={STEPS}", *shape, f"layout.spares={case.spares}", path_of(model, case.shape),
                        *case.more, f"faults=[{', '.join(case.faults)}]"), host=host)
    assert_invariants(run, steps=STEPS)
    assert len(run.kind("fault")) == len(case.faults)
    assert len(run.kind("commit")[-1]["members"]) == case.left and run.kind("commit")[-1]["healing"] == []
    assert by_position(run, case.left) == undisturbed(model, case.shape, f"sft.steps={STEPS}")
    stalls = [r.stall_s for r in recoveries(run.events) if r.stall_s is not None]
    assert not stalls or max(stalls) < STALL_S, stalls
    assert gone(run.pids)
    return run


@pytest.mark.parametrize("case", [pytest.param(c, id=str(c), marks=[] if str(c) in TELLING else [pytest.mark.full]) for c in CASES])
def test_whatever_dies_in_a_repair_the_bits_are_those_of_an_undisturbed_run(case, model, tmp_path):
    prove(case, model, tmp_path)


# -- below the minimum ------------------------------------------------------------------------------------------------------------


def test_below_the_minimum_the_run_stops_with_a_checkpoint_of_the_committed_step_and_goes_on_from_it(model, tmp_path):
    same = [*BASE, f"model.path={model}", "layout.replicas=2", "layout.spares=0", "recovery.min_replicas=2", "sft.steps=24"]
    with pytest.raises(BelowMinimum, match=r"saved .*step-0*3\b") as stopped:
        finish(config(SFT, tmp_path / "run", *same, f"faults=[{kill(4, 'reduce', 1)}]"), host=ForkedHost)
    assert stopped.value.exit_code == 3
    saved = manifest.pointed_at(tmp_path / "run" / "checkpoints")
    assert saved is not None and not manifest.damage(saved)
    assert [e["members"] for e in read_events(tmp_path / "run" / "events") if e.event == "halt"] == [[0]]
    run = finish(config(SFT, tmp_path / "run", *same, "resume=must", "faults=[]"), host=ForkedHost)
    assert_invariants(run, steps=24)
    assert by_position(run, 2) == undisturbed(model, "", "sft.steps=24")
    assert gone(run.pids)


def no_room_for(seconds: float) -> type[ForkedHost]:
    """A host on which a lost place cannot be filled for some time, as in a cluster that has lost a machine."""
    from everstep.cluster.host import NoRoom

    class Full(ForkedHost):
        asked = 0.0

        def has_place(self, worker: str) -> bool:
            return False

        def add(self, spec, instead_of):
            self.asked = self.asked or time.monotonic()
            if time.monotonic() - self.asked < seconds:
                raise NoRoom("no room")
            super().add(spec, instead_of)

    return Full


def test_below_the_minimum_a_run_that_waits_goes_on_when_there_is_room_again(model, tmp_path):
    case = Case("waits", (kill(4, "vote", 0),), 2, 2, 0, more=(
        "recovery.min_replicas=2", "recovery.below_minimum=wait", RESTART, "recovery.restart_backoff_s=0.2"))
    shape = [f"layout.replicas={case.replicas}"]
    run = finish(config(SFT, tmp_path / "run", *BASE, "sft.steps=24", *shape, "layout.spares=0", f"model.path={model}", *case.more,
                        f"faults=[{case.faults[0]}]"), host=no_room_for(1.0))
    assert_invariants(run, steps=24)
    (death,) = recoveries(run.events)
    assert death.commit_s is not None and death.commit_s > 1.0
    assert by_position(run, 2) == undisturbed(model, "", "sft.steps=24")


def test_below_the_minimum_a_run_that_waited_long_enough_stops(model, tmp_path):
    with pytest.raises(BelowMinimum, match="saved"):
        finish(config(SFT, tmp_path / "run", *BASE, "layout.replicas=2", "layout.spares=0", f"model.path={model}", "recovery.min_replicas=2",
                      "recovery.below_minimum=wait", "recovery.below_minimum_wait_s=1", RESTART, f"faults=[{kill(4, 'vote', 0)}]"),
               host=no_room_for(1000.0))


# -- refilling: back-off and limits -------------------------------------------------------------------------------------------------


class Starter:
    """A place in which the first ``fails`` processes cannot start, and the others die at once when ``doomed``."""

    def __init__(self, fails: int):
        self.fails, self.starts, self.ready, self.notes = fails, [], [], []

    def start_in_place_of(self, worker: str) -> str:
        self.starts.append(time.monotonic())
        if len(self.starts) <= self.fails:
            raise WorkerFailed("no")
        return f"w{len(self.starts)}"

    def spare_is_ready(self, worker: str, after: str) -> None:
        self.ready.append(worker)

    def was_of_use(self, worker: str) -> bool:
        return worker == "useful"

    def note(self, event: str, **fields: object) -> None:
        self.notes.append((event, fields))


def settled(refill: Refill, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while refill.pending and time.monotonic() < end:
        time.sleep(0.002)
    return not refill.pending


def test_a_process_that_cannot_start_is_tried_again_later_and_later_and_not_for_ever():
    starter = Starter(fails=100)
    refill = Refill(starter, attempts=4, backoff_s=0.05)
    refill.replace("w1")
    assert settled(refill) and starter.ready == [] and len(starter.starts) == 4
    waits = [b - a for a, b in zip(starter.starts, starter.starts[1:], strict=False)]
    assert waits[0] >= 0.05 and waits[1] >= 0.1 and waits[2] >= 0.2
    assert starter.notes[-1][1]["error"] == "RestartsGivenUp"


def test_processes_that_die_young_in_one_place_are_a_crash_loop_and_useful_ones_are_not():
    starter = Starter(fails=0)
    refill = Refill(starter, attempts=3, backoff_s=0.01)
    refill.replace("w1")
    for number in range(1, 4):
        assert settled(refill) and len(starter.ready) == number
        refill.replace(starter.ready[-1])  # it died idle
    assert settled(refill) and len(starter.starts) == 3 and starter.notes[-1][1]["error"] == "RestartsGivenUp"
    useful = Starter(fails=0)
    useful.was_of_use = lambda worker: True  # type: ignore[method-assign]
    refill = Refill(useful, attempts=3, backoff_s=0.01)
    refill.replace("w1")
    for _ in range(5):
        assert settled(refill)
        refill.replace(useful.ready[-1])
    assert settled(refill) and len(useful.starts) == 6


def test_with_no_attempts_nothing_is_started():
    starter = Starter(fails=0)
    Refill(starter, attempts=0, backoff_s=0.01).replace("w1")
    assert starter.starts == []
