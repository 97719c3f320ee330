"""The sharpest test of recovery: in exact mode the final weights are, to the last bit, those of a run in which nobody died.

Each schedule is a whole run of ``everstep train``: its recipe, controller, coordinator and workers in real processes, real signals
from outside. Most have workers forked from a process that has done the imports; the last tests go through Ray. With dropout on, and
gradients clipped. A row counts only if its fault fired, a survivor was inside the phase when the signal was sent, and survivors went
the way that was to be expected.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.launchers import trained
from tests.support.runs import ROOT, SFT, Finished, config, finish, gone
from tests.test_faults import assert_invariants

from everstep.cluster import namespaces
from everstep.cluster.forked import ForkedHost
from everstep.cluster.worker import worker as worker_module
from everstep.engine import step as engine_step
from everstep.recovery import transaction as transaction_module
from everstep.recovery.faults import HELD_KINDS, UNHELD_PHASES
from everstep.telemetry.events import epoch_key, seconds_between
from everstep.telemetry.recoveries import survivor_inside

pytestmark = [pytest.mark.timeout(300)]

SLOTS, STEP, STEPS = 8, 4, 24  # the fault comes in step STEP; the last steps give a spare time to join
BASE = ["recovery.exact=true", "train.micro_batch_size=4", f"sft.samples_per_step={4 * SLOTS}", "checkpoint.at_end=false",
        "train.verify_every=1000", "optimizer.clip_grad_norm=0.5", f"sft.steps={STEPS}", "recovery.heartbeat_s=0.2"]
SHAPES = {
    "": ["layout.replicas=3"],
    "tp2": ["layout.replicas=2", "layout.tp=2", "engine.sequence_parallel=true"],
    "pp2": ["layout.replicas=2", "layout.pp=2"],
    "dp2": ["layout.replicas=2", "layout.dp=2", "train.micro_batch_size=2"],
    "cp2": ["layout.replicas=2", "layout.cp=2"],
    "ep2": ["layout.replicas=2", "layout.dp=2", "layout.ep=2", "train.micro_batch_size=2"],  # experts, with an auxiliary loss
}
WAITED_FOR = {"stop": "recovery.silence_s=2", "gil": "recovery.silence_s=2", "partition": "recovery.silence_s=2",
              "hang": "recovery.progress_timeout_s=2"}  # how these are noticed
SALVAGED = frozenset({"compute", "exchange", "reduce", "salvage", "commit", "apply"})  # commit, apply: in the next step


@dataclasses.dataclass(frozen=True)
class Row:
    """One fault. ``hold``: the victim waits at the phase's entry for the signal, so that survivors are in the phase for sure."""

    phase: str
    replica: int
    kind: str = "kill"
    rank: int = 0
    hold: bool = True
    step: int = STEP

    @property
    def held(self) -> bool:
        return self.hold and self.kind in HELD_KINDS and self.phase not in UNHELD_PHASES

    @property
    def next_step(self) -> bool:
        """Whether what the dead one leaves undone is of the next step."""
        return self.phase in ("commit", "apply")

    def fault(self) -> str:
        # Survivors wait for a held victim; but in compute and salvage they are busy by themselves, for a few tens of milliseconds.
        delay_s = 0.0 if not self.held else 0.005 if self.phase in ("compute", "salvage") else 0.02
        return (f"{{step: {self.step}, phase: {self.phase}, kind: {self.kind}, replica: {self.replica}, rank: {self.rank}, "
                f"hold: {str(self.held).lower()}, delay_s: {delay_s}}}")

    def __str__(self) -> str:
        return f"{self.kind}-{self.phase}-{self.replica}.{self.rank}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    rows: tuple[Row, ...]
    spares: int = 1
    shape: str = ""
    more: tuple[str, ...] = ()
    steps: int = STEPS

    def overrides(self) -> list[str]:
        waited = {WAITED_FOR[row.kind] for row in self.rows if row.kind in WAITED_FOR}
        return [*SHAPES[self.shape], f"layout.spares={self.spares}", *sorted(waited), *self.more,
                f"faults=[{', '.join(row.fault() for row in self.rows)}]"]

    def __str__(self) -> str:
        return "-then-".join([*map(str, self.rows)]) + f"-{self.shape or 'dp1'}-{self.spares}spares"


def path_of(model: Path, shape: str) -> str:
    return f"model.path={model.with_name('tiny-qwen3-moe') if shape == 'ep2' else model}"


@functools.cache
def undisturbed(model: Path, shape: str, *more: str) -> dict[str, str]:
    """Hashes by position of the final weights of a run in which nobody dies, on as many replicas as it takes: one."""
    folder = model.parent / f"calm-{shape}-{abs(hash(more))}"
    run = finish(config(SFT, folder, *BASE, *SHAPES[shape], *more, path_of(model, shape), "layout.replicas=1"), clean=True, host=ForkedHost)
    return by_position(run, 1)


def by_position(run: Finished, replicas: int) -> dict[str, str]:
    """Of the last comparison of all ranks."""
    last = run.kind("verify")[-1]
    assert last["equal"] and len({name.split("/")[0] for name in last["hashes"]}) == replicas
    return {name.split("/")[1]: digest for name, digest in last["hashes"].items()}


def check_rows(run: Finished, schedule: Schedule, whole: bool = False) -> None:
    """Every fault fired in its phase, and survivors did about the slots of the dead what they should: no more and no less. ``whole``: with a
    rank all of its replica dies."""
    faults = run.kind("fault")
    assert [(f["kind"], f["phase"], f["replica"], f["rank"]) for f in faults] == [(r.kind, r.phase, r.replica, r.rank) for r in schedule.rows]
    members = set(range(3 if not schedule.shape else 2))
    for row, fault in zip(schedule.rows, faults, strict=True):
        if row.held:
            assert survivor_inside(run.events, fault), row
    struck = {(r.replica, r.rank) for r in schedule.rows}
    deaths = [d for d in run.kind("death") if not whole or (d["replica"], d["rank"]) in struck]
    assert [(d["replica"], d["rank"]) for d in deaths] == [(r.replica, r.rank) for r in schedule.rows]
    if len(deaths) > 1:
        return  # what is left of each depends on the others; the hash and the checker speak for all
    (row,), (death,) = schedule.rows, deaths
    assert death.step == row.step + row.next_step
    computed = [e for e in run.kind("computed") if e.step == death.step and e["rank"] == 0]
    salvaged = sorted(s for e in computed if e["salvage"] for s in e["slots"])
    lost = [s for s in range(SLOTS) if s % len(members) == sorted(members).index(row.replica)]
    gave_all = row.kind == "partition" and not row.held  # cut off from the coordinator only, it computes and reduces with the others
    assert salvaged == (lost if row.phase in SALVAGED and not gave_all else []), salvaged
    assert not [e for e in computed if not e["salvage"] and e["deal"] != computed[0]["deal"]], "the step was dealt anew"
    used = [e for e in run.kind("link_used") if e.step == death.step and epoch_key(e.epoch) > epoch_key(death.epoch)]
    if salvaged and len(members) > 2:  # and by the standby, not a link made anew
        assert used and all(e["built"] for e in used)


def prove(schedule: Schedule, model: Path, folder: Path, launcher: str = "controller") -> Finished:
    length = () if schedule.steps == STEPS else (f"sft.steps={schedule.steps}",)
    # A process that torchrun starts does its imports in its first seconds, and says nothing meanwhile.
    patience = ("recovery.silence_s=10",) if launcher == "torchrun" and any("silence" in o for o in schedule.overrides()) else ()
    run = trained(launcher, SFT, folder, *BASE, path_of(model, schedule.shape), *schedule.overrides(), *patience, *length)
    assert_invariants(run, steps=schedule.steps)
    check_rows(run, schedule, whole=launcher != "controller")
    left = (3 if not schedule.shape else 2) - max(0, len(schedule.rows) - schedule.spares)
    if launcher == "controller":
        assert len(run.kind("commit")[-1]["members"]) == left, "all spares joined"
    else:  # who died comes back by itself, in the time of a start
        there = {name.split("/")[0] for name in run.kind("verify")[-1]["hashes"]}
        assert len(there) >= left
        left = len(there)
    assert by_position(run, left) == undisturbed(model, schedule.shape, *schedule.more, *length)
    assert gone(run.pids)
    return run


PHASES = ("compute", "exchange", "reduce", "vote", "apply")
ONE_DEATH = [Schedule((Row(phase, replica),), spares) for phase in PHASES for replica in range(3) for spares in (1, 0)]
AFTER_A_COMMIT = [Schedule((Row("commit", replica),), 1) for replica in range(3)]
OTHER_ENDS = [
    Schedule((Row(phase, replica, kind, hold=kind != "partition"),))
    for replica, kind in enumerate(["stop", "exit", "segv", "gil", "oom", "hang", "partition"])
    for replica in [replica % 3] for phase in ("compute", "reduce")
]
TWO_RANKS = [Schedule((Row(phase, i % 2, rank=(i + j) % 2),), 1, shape) for j, shape in enumerate(["tp2", "pp2", "dp2", "cp2", "ep2"])
             for i, phase in enumerate(PHASES)]
TWO_DEATHS = [
    *(Schedule((Row(first, 1), Row("salvage", 2)), spares) for first in ("compute", "exchange", "reduce") for spares in (0, 2)),
    Schedule((Row("reduce", 2), Row("salvage", 0)), 0),
    Schedule((Row("reduce", 1), Row("reduce", 2, step=STEP + 1)), 0),
    Schedule((Row("reduce", 1), Row("compute", 2, step=STEP + 1)), 2),
    Schedule((Row("reduce", 1), Row("heal", 1, step=STEP + 1)), 2),                 # the joiner
    Schedule((Row("vote", 1), Row("heal", 1, kind="stop", step=STEP + 1)), 2),
]
ALL = [*ONE_DEATH, *AFTER_A_COMMIT, *OTHER_ENDS, *TWO_RANKS, *TWO_DEATHS]
TELLING = {
    "kill-compute-2.0-dp1-1spares", "kill-exchange-1.0-dp1-1spares", "kill-reduce-1.0-dp1-1spares", "kill-reduce-0.0-dp1-0spares",
    "kill-vote-0.0-dp1-1spares", "kill-apply-2.0-dp1-1spares", "kill-commit-1.0-dp1-1spares", "segv-compute-2.0-dp1-1spares",
    "kill-reduce-0.0-tp2-1spares", "kill-reduce-2.0-then-kill-salvage-0.0-dp1-0spares",
}


def test_the_schedules_are_what_they_say():
    names = [str(s) for s in ALL]
    assert len(set(names)) == len(names) >= 60
    assert set(names) >= TELLING, TELLING - set(names)


@pytest.mark.parametrize(
    "schedule", [pytest.param(s, id=str(s), marks=[] if str(s) in TELLING else [pytest.mark.full]) for s in ALL]
)
def test_the_final_bits_are_those_of_an_undisturbed_run(schedule, model, tmp_path):
    prove(schedule, model, tmp_path)


@pytest.mark.skipif(bool(namespaces.refusal()), reason=f"no network namespaces here: {namespaces.refusal()}")
@pytest.mark.parametrize("phase", ["reduce", pytest.param("compute", marks=pytest.mark.full), pytest.param("vote", marks=pytest.mark.full)])
def test_a_rank_whose_cable_is_pulled_leaves_the_bits(phase, model, tmp_path):
    """Nothing is reset: survivors' collectives hang with it until it has been silent for too long, and no timeout of theirs is waited
    for. The rank, alone, fences itself."""
    rows = [Row(phase, 1, "partition")]
    schedule = Schedule(tuple(rows), 1, more=("recovery.fence_s=3", "recovery.step_timeout_s=120", "recovery.heal_timeout_s=60", "recovery.link_timeout_s=60"))
    run = finish(config(SFT, tmp_path / "run", *BASE, f"model.path={model}", *schedule.overrides()),
                 host=functools.partial(ForkedHost, namespaces=True))
    assert_invariants(run, steps=STEPS)
    (fault,), (death,) = run.kind("fault"), run.kind("death")
    assert "interface" in fault["done"] and "silent" in death["cause"]
    again = next(e for e in run.events if e.step == STEP and e.t_wall > death.t_wall and e.event in ("obey", "apply"))
    assert seconds_between(death, again) < 15.0  # far below any collective's timeout
    assert by_position(run, 3) == undisturbed(model, "")
    assert gone(run.pids)


def says_reduce_late() -> None:
    """Replica 1 says that it reduces only when it has heard of the view in which it should not; there it hangs."""
    reduce = transaction_module.Transaction._reduce

    def late(self, work, view, *rest):
        end = time.monotonic() + 30.0
        while (self._replica, work.step) == (1, STEP) and self._control.epoch == view.epoch and time.monotonic() < end:
            time.sleep(0.001)
        return reduce(self, work, view, *rest)

    transaction_module.Transaction._reduce = late  # type: ignore[method-assign]


def test_a_rank_that_hangs_in_an_attempt_that_a_death_has_ended_is_the_one_that_is_replaced(model, tmp_path):
    """Not the one that waits for it at an earlier point of the next attempt."""
    rows = [Row("reduce", 0), Row("reduce", 1, "hang")]
    schedule = Schedule(tuple(rows), 0)
    run = finish(config(SFT, tmp_path / "run", *BASE, f"model.path={model}", *schedule.overrides()),
                 host=functools.partial(ForkedHost, prepare=says_reduce_late))
    assert_invariants(run, steps=STEPS)
    assert [d["replica"] for d in run.kind("death")] == [0, 1]
    assert run.kind("death")[1]["cause"].startswith(f"no progress: step {STEP}, reduce of an attempt that has ended, ")
    assert by_position(run, 1) == undisturbed(model, "")
    assert gone(run.pids)


# -- our own code, broken on purpose: the bits must tell -------------------------------------------------------------------------


def a_slot_dropped() -> None:
    compute = worker_module.StepWork.compute
    worker_module.StepWork.compute = lambda self, slots: compute(self, tuple(s for s in slots if s != 3))  # type: ignore[method-assign]


def a_slot_doubled() -> None:
    compute = worker_module.StepWork.compute

    def doubled(self, slots):
        contribution = compute(self, slots)
        if 3 in slots:
            for gradient in contribution.gradients:
                gradient *= 2
        return contribution

    worker_module.StepWork.compute = doubled  # type: ignore[method-assign]


def random_numbers_of_the_replica() -> None:
    """Not of the slot: whoever computes it draws others."""
    seed = worker_module.slot_seed
    worker_module.slot_seed = lambda base, step, slot, dp: seed(base, step, slot, dp) + int(os.environ["EVERSTEP_REPLICA"])  # type: ignore[assignment]


def gradients_finalised_twice() -> None:
    finalise = engine_step._finalize_sums

    def twice(model, num_tokens, **kwargs):
        finalise(model, num_tokens, **kwargs)
        finalise(model, num_tokens, **kwargs)

    engine_step._finalize_sums = twice  # type: ignore[assignment]


def clipped_by_the_last_norm() -> None:
    """The norm of the step before: an apply that depends on more than the total."""
    apply = worker_module.StepWork.apply

    def late(self, total):
        known = getattr(self._worker, "last", total)
        self._worker.last = total
        apply(self, dataclasses.replace(total, grad_norm=known.grad_norm))

    worker_module.StepWork.apply = late  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("mutation", "shape"),
    [(a_slot_dropped, ""), (a_slot_doubled, ""), (random_numbers_of_the_replica, ""), pytest.param(gradients_finalised_twice, "tp2", marks=pytest.mark.full), (clipped_by_the_last_norm, "")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_mutation_of_our_code_changes_the_bits(mutation, shape, model, tmp_path):
    host = functools.partial(ForkedHost, prepare=mutation)
    run = finish(config(SFT, tmp_path / "run", *BASE, *SHAPES[shape], f"model.path={model}", "layout.replicas=2", "layout.spares=0"), host=host)
    assert by_position(run, 2) != undisturbed(model, shape)


@pytest.mark.full
def test_packed_steps_that_differ_in_their_number_of_slots_keep_the_bits(tmp_path):
    """Chats of different lengths in rows of a token budget: one replica of three dies, and survivors cut the same slots."""
    same = ["recovery.exact=true", "train.micro_batch_size=null", "train.tokens_per_micro_batch=180", "engine.logprob_chunk_tokens=50",
            "sft.samples_per_step=40", "sft.steps=12", "checkpoint.at_end=false", "train.verify_every=1000"]
    chat = str(ROOT / "examples" / "sft_chat.yaml")
    run = finish(config(chat, tmp_path / "run", *same, "layout.replicas=3", f"faults=[{Row('reduce', 1).fault()}]"), host=ForkedHost)
    assert_invariants(run, steps=12)
    (fault,) = run.kind("fault")
    assert survivor_inside(run.events, fault)
    slots = {e.step: set() for e in run.kind("computed")}
    for event in run.kind("computed"):
        slots[event.step] |= set(event["slots"])
    assert len(slots) == 12 and len({len(numbers) for numbers in slots.values()}) > 1
    assert any(e["salvage"] and e["slots"] for e in run.kind("computed"))
    calm = finish(config(chat, tmp_path / "calm", *same, "layout.replicas=1"), host=ForkedHost)
    assert by_position(run, len(run.kind("commit")[-1]["members"])) == by_position(calm, 1)


# -- without exact mode ------------------------------------------------------------------------------------------------------------


def test_waiting_for_a_spare_is_bitwise_the_same_too(model, tmp_path):
    same = ["recovery.exact=false", "layout.replicas=2", "recovery.mode=wait", "layout.spares=2", f"model.path={model}"]
    calm = finish(config(SFT, tmp_path / "calm", *BASE, *same), host=ForkedHost)
    rows = [Row("reduce", 1), Row("compute", 0, step=STEP + 9)]
    run = finish(config(SFT, tmp_path / "run", *BASE, *same, f"faults=[{', '.join(r.fault() for r in rows)}]"), host=ForkedHost)
    assert_invariants(run, steps=STEPS)
    assert len(run.kind("fault")) == 2 and not [e for e in run.kind("computed") if e["salvage"]]
    assert by_position(run, 2) == by_position(calm, 2)
    assert all(c["members"] == [0, 1] for c in run.kind("commit") if c["kind"] == "apply" and c.step not in {r.step for r in rows})


@pytest.mark.parametrize("mode", ["salvage", pytest.param("retry", marks=pytest.mark.full)])
def test_losses_under_faults_are_those_without_to_rounding(mode, model, tmp_path):
    same = ["layout.replicas=3", "recovery.exact=false", f"recovery.mode={mode}", "layout.spares=0", f"model.path={model}"]
    calm = finish(config(SFT, tmp_path / "calm", *BASE, *same), host=ForkedHost)
    run = finish(config(SFT, tmp_path / "run", *BASE, *same, f"faults=[{Row('reduce', 1).fault()}]"), host=ForkedHost)
    assert_invariants(run, steps=STEPS)
    redone = [e for e in run.kind("computed") if e.step == STEP and epoch_key(e.epoch) > epoch_key(run.kind("death")[0].epoch)]
    assert sum(len(e["slots"]) for e in redone) == (3 if mode == "salvage" else SLOTS)
    assert run.losses.keys() == calm.losses.keys()
    assert all(abs(run.losses[k] - calm.losses[k]) <= 1e-5 * abs(calm.losses[k]) for k in calm.losses)


# -- through Ray ---------------------------------------------------------------------------------------------------------------------


APART = 40  # steps between the faults of one run: a spare is formed and healed in between


@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "shift"), [("kill", 0), ("stop", 1)])
def test_through_ray_in_one_run_with_a_fault_in_every_phase(kind, shift, model, tmp_path):
    rows = [Row(phase, (i + shift) % 3, kind, step=10 + APART * i) for i, phase in enumerate(PHASES)]
    steps = 10 + APART * len(rows)
    base = [*BASE, "layout.replicas=3", f"sft.steps={steps}", f"model.path={model}"]
    run = finish(config(SFT, tmp_path / "run", *base, f"layout.spares={len(rows)}", f"faults=[{', '.join(r.fault() for r in rows)}]",
                        f"recovery.silence_s={2 if kind == 'stop' else 30}"))
    assert_invariants(run, steps=steps)
    faults = run.kind("fault")
    assert [(f.step, f["kind"], f["phase"], f["replica"]) for f in faults] == [(r.step, r.kind, r.phase, r.replica) for r in rows]
    assert all(survivor_inside(run.events, f) for f in faults)
    calm = finish(config(SFT, tmp_path / "calm", *base, "layout.replicas=1"), host=ForkedHost)
    assert by_position(run, 3) == by_position(calm, 1)
    assert gone(run.pids)


def without_spares(schedule: Schedule, **changes: Any) -> Schedule:
    return dataclasses.replace(schedule, spares=0, **changes)


#: Launcher local: the same deaths, where nobody is warm to take a place, and a replica dies with any of its ranks. No cable is pulled there.
WITHOUT_RAY = {str(without_spares(s)): without_spares(s) for s in [*ONE_DEATH, *AFTER_A_COMMIT, *OTHER_ENDS, *TWO_RANKS, *TWO_DEATHS]
               if not any(row.kind == "partition" or row.phase == "heal" for row in s.rows)}
THROUGH_TORCHRUN = [Schedule((Row(phase, 2 * i % 3),), 0) for i, phase in enumerate((*PHASES, "commit"))] + [
    Schedule((Row("compute", 1, "stop"),), 0), Schedule((Row("compute", 0, "gil"),), 0), Schedule((Row("compute", 1, "exit"),), 0),
    Schedule((Row("compute", 1, "segv", rank=1),), 0, "tp2"), Schedule((Row("reduce", 0, rank=1),), 0, "pp2"), Schedule((Row("reduce", 1),), 0, "dp2"),
]  # fmt: skip
#: With as many steps as it takes a replica to come back from a cold start: steps of two ranks take longer.
COMES_BACK = [dataclasses.replace(THROUGH_TORCHRUN[1], steps=300), Schedule((Row("compute", 1, rank=1),), 0, "tp2", steps=250)]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "kill-vote-0.0-dp1-0spares" else [pytest.mark.full]) for n in WITHOUT_RAY])
def test_without_ray_the_final_bits_are_the_same(name, model, tmp_path):
    prove(WITHOUT_RAY[name], model, tmp_path, "lighthouse")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", THROUGH_TORCHRUN, ids=str)
def test_through_torchrun_the_final_bits_are_the_same(schedule, model, tmp_path):
    """Who died is started anew meanwhile; most runs are over before it is back."""
    prove(schedule, model, tmp_path, "torchrun")


@pytest.mark.full
@pytest.mark.timeout(1000)  # a cold start and hundreds of steps, on a machine that may be busy
@pytest.mark.parametrize("schedule", COMES_BACK, ids=str)
def test_through_torchrun_who_died_comes_back_with_the_same_bits(schedule, model, tmp_path):
    run = prove(schedule, model, tmp_path, "torchrun")
    (row,) = schedule.rows
    assert [e["replica"] for e in run.kind("join")] == [row.replica]
    assert str(row.replica) in {name.split("/")[0] for name in run.kind("verify")[-1]["hashes"]}
    ranks = 2 if schedule.shape else 1
    assert len({e.pid for e in run.kind("form")}) == ranks * ((2 if schedule.shape else 3) + 1), "all ranks of the replica were started anew"


@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster")
def test_through_ray_two_deaths_in_one_step_and_down_to_one_replica(model, tmp_path):
    rows = [Row("reduce", 2), Row("salvage", 0)]
    run = finish(config(SFT, tmp_path / "run", *BASE, "layout.replicas=3", "layout.spares=0", f"model.path={model}",
                        f"faults=[{', '.join(r.fault() for r in rows)}]"))
    assert_invariants(run, steps=STEPS)
    assert [f["phase"] for f in run.kind("fault")] == ["reduce", "salvage"]
    assert run.kind("commit")[-1]["members"] == [1]
    assert by_position(run, 1) == undisturbed(model, "")


@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster")
def test_through_ray_a_rank_of_a_tensor_parallel_replica(model, tmp_path):
    schedule = Schedule((Row("reduce", 0, rank=1),), 1, "tp2")
    run = finish(config(SFT, tmp_path / "run", *BASE, f"model.path={model}", *schedule.overrides()))
    assert_invariants(run, steps=STEPS)
    check_rows(run, schedule)
    assert by_position(run, len(run.kind("commit")[-1]["members"])) == undisturbed(model, "tp2")
