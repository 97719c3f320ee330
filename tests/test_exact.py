"""The sharpest test of recovery: in exact mode the final weights are, to the last bit, those of a run in which nobody died.

Whole runs of ``everstep train`` through Ray, real signals from outside. One run carries several schedules one after the other, each
with its own victim and phase; a row counts only if its survivors were inside that phase when the signal was sent.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
from tests.support.runs import ROOT, SFT, Finished, config, finish, gone
from tests.test_faults import assert_invariants

from everstep.telemetry.events import epoch_key
from everstep.telemetry.recoveries import survivor_inside

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("ray_cluster")]

BASE = ["layout.replicas=3", "recovery.exact=true", "train.micro_batch_size=10", "sft.samples_per_step=80", "checkpoint.at_end=false",
        "train.verify_every=1000"]
APART = 40  # steps: a spare is formed and healed in between


@dataclasses.dataclass(frozen=True)
class Row:
    """One fault. ``path``: what survivors do about the dead one's slots. ``hold``: the victim waits at the phase's entry."""

    phase: str
    replica: int
    path: str          # salvage; total: every survivor held it already, and the step commits with the dead one's part
    kind: str = "kill"
    rank: int = 0
    hold: bool = True

    def fault(self, step: int) -> str:
        # Survivors wait for a held victim; but in compute they are busy by themselves, for a few tens of milliseconds.
        delay_s = 0.0 if not self.hold else 0.005 if self.phase == "compute" else 0.02
        return (f"{{step: {step}, phase: {self.phase}, kind: {self.kind}, replica: {self.replica}, rank: {self.rank}, "
                f"hold: {str(self.hold).lower()}, delay_s: {delay_s}}}")


ROWS = [
    Row("reduce", 1, "salvage"),
    Row("compute", 2, "salvage"),
    Row("vote", 0, "total"),
    Row("exchange", 1, "salvage"),
    Row("apply", 2, "salvage"),  # of the next step
]


@functools.cache
def undisturbed(folder: Path, steps: int, *extra: str) -> str:
    """The hash of the final weights of a run in which nobody dies, on as many replicas as it takes: one."""
    run = finish(config(SFT, folder / f"undisturbed-{steps}-{len(extra)}", *BASE, "layout.replicas=1", f"sft.steps={steps}", *extra))
    (digest,) = run.final_hashes
    return digest


def check_rows(run: Finished, rows: dict[int, Row], replicas: int = 3) -> None:
    faults = {f.step: f for f in run.kind("fault")}
    assert faults.keys() == rows.keys()  # each fired
    for step, row in rows.items():
        fault = faults[step]
        assert (fault["replica"], fault["kind"], fault["phase"]) == (row.replica, row.kind, row.phase)
        assert survivor_inside(run.events, fault), (step, row)
        (death,) = [d for d in run.kind("death") if d.step in (step, step + 1) and d["replica"] == row.replica and d["rank"] == row.rank]
        computed = [e for e in run.kind("computed") if e.step == death.step and e["rank"] == 0]
        salvaged = sorted(s for e in computed if e["salvage"] for s in e["slots"])
        lost = [s for s in range(8) if s % replicas == sorted(range(replicas)).index(row.replica)]
        assert salvaged == (lost if row.path == "salvage" else []), (step, row, salvaged)
        if row.path == "salvage":  # and by the standby, not a link made anew
            used = [e for e in run.kind("link_used") if e.step == death.step and epoch_key(e.epoch) > epoch_key(death.epoch)]
            assert used and all(e["built"] for e in used)


full = functools.partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.parametrize(("shift", "kind"), [(0, "kill"), full(1, "kill"), full(2, "kill"), full(0, "stop"), full(1, "stop")])
def test_faults_in_every_phase_leave_the_bits_of_an_undisturbed_run(tmp_path, shift, kind):
    """With spares: shrinking and growing on the way, signals inside the collectives included."""
    rows = {10 + APART * i: dataclasses.replace(row, replica=(row.replica + shift) % 3, kind=kind) for i, row in enumerate(ROWS)}
    steps = 10 + APART * len(ROWS)
    faults = ", ".join(row.fault(step) for step, row in rows.items())
    run = finish(config(SFT, tmp_path / "run", *BASE, f"sft.steps={steps}", f"layout.spares={len(rows)}", f"faults=[{faults}]",
                        "recovery.heartbeat_s=0.3", f"recovery.silence_s={2 if kind == 'stop' else 30}"))
    assert_invariants(run, steps=steps)
    check_rows(run, rows)
    assert run.final_hashes == {undisturbed(tmp_path, steps)}
    assert gone(run.pids)


@pytest.mark.full
@pytest.mark.parametrize("second", ROWS, ids=lambda row: row.phase)
@pytest.mark.parametrize("first", ROWS, ids=lambda row: row.phase)
def test_two_faults_in_a_row_without_spares_leave_the_bits(tmp_path, first, second):
    """Three replicas, two, one: the last one computes everything."""
    second = dataclasses.replace(second, replica=(first.replica + 1) % 3)
    run = finish(config(SFT, tmp_path / "run", *BASE, "sft.steps=12", "layout.spares=0", f"faults=[{first.fault(3)}, {second.fault(8)}]"))
    assert_invariants(run, steps=12)
    assert [(f["replica"], f["phase"]) for f in run.kind("fault")] == [(first.replica, first.phase), (second.replica, second.phase)]
    assert all(survivor_inside(run.events, f) for f in run.kind("fault"))
    assert run.kind("commit")[-1]["members"] == [3 - first.replica - second.replica]
    assert run.final_hashes == {undisturbed(tmp_path, 12)}


@pytest.mark.full
@pytest.mark.parametrize("split", ["layout.tp=2", "layout.pp=2", "layout.dp=2"])
def test_a_rank_of_a_replica_of_two_dies_in_every_phase_and_the_bits_stay(tmp_path, split):
    """Two replicas of two ranks: the other rank of the broken one keeps its memory. The undisturbed run has the same replicas' shape."""
    rows = {10 + APART * i: dataclasses.replace(row, replica=row.replica % 2, rank=i % 2) for i, row in enumerate(ROWS)}
    steps = 10 + APART * len(ROWS)
    same = [split, "layout.replicas=2", "train.micro_batch_size=5", f"sft.steps={steps}"]
    faults = ", ".join(row.fault(step) for step, row in rows.items())
    run = finish(config(SFT, tmp_path / "run", *BASE, *same, f"layout.spares={len(rows)}", f"faults=[{faults}]"))
    assert_invariants(run, steps=steps)
    assert {(f.step, f["replica"], f["rank"]) for f in run.kind("fault")} == {(s, r.replica, r.rank) for s, r in rows.items()}
    assert all(survivor_inside(run.events, f) for f in run.kind("fault"))
    calm = finish(config(SFT, tmp_path / "calm", *BASE, *same, "layout.replicas=1"))
    assert run.final_hashes == calm.final_hashes


def test_two_deaths_in_one_step_and_down_to_one_replica_without_spares(tmp_path):
    """The second one while what the first one left is computed; nobody takes their places."""
    faults = "{step: 6, phase: reduce, kind: kill, replica: 2, hold: true, delay_s: 0.02}, {step: 6, phase: salvage, kind: kill, replica: 0, hold: true}"
    run = finish(config(SFT, tmp_path / "run", *BASE, "sft.steps=12", "layout.spares=0", f"faults=[{faults}]"))
    assert_invariants(run, steps=12)
    assert [f["phase"] for f in run.kind("fault")] == ["reduce", "salvage"]
    assert run.kind("commit")[-1]["members"] == [1]
    assert run.final_hashes == {undisturbed(tmp_path, 12)}


@pytest.mark.full
def test_packed_steps_that_differ_in_their_number_of_slots_keep_the_bits(tmp_path):
    """Chats of different lengths in rows of a token budget: one replica of three dies, and survivors cut the same slots."""
    same = ["recovery.exact=true", "train.micro_batch_size=null", "train.tokens_per_micro_batch=180", "engine.logprob_chunk_tokens=50",
            "sft.samples_per_step=40", "sft.steps=12", "checkpoint.at_end=false", "train.verify_every=1000"]
    chat = str(ROOT / "examples" / "sft_chat.yaml")
    run = finish(config(chat, tmp_path / "run", *same, "layout.replicas=3", f"faults=[{Row('reduce', 1, 'salvage').fault(4)}]"))
    assert_invariants(run, steps=12)
    (fault,) = run.kind("fault")
    assert survivor_inside(run.events, fault)
    slots = {e.step: set() for e in run.kind("computed")}
    for event in run.kind("computed"):
        slots[event.step] |= set(event["slots"])
    assert len(slots) == 12 and len({len(numbers) for numbers in slots.values()}) > 1
    assert any(e["salvage"] and e["slots"] for e in run.kind("computed"))
    calm = finish(config(chat, tmp_path / "calm", *same, "layout.replicas=1"))
    assert run.final_hashes == calm.final_hashes


def test_waiting_for_a_spare_is_bitwise_the_same_too_without_exact_mode(tmp_path):
    same = ["sft.steps=20", "recovery.exact=false", "layout.replicas=2", "recovery.mode=wait", "layout.spares=2"]
    calm = finish(config(SFT, tmp_path / "calm", *BASE, *same))
    faults = ", ".join(Row(phase, replica, "", hold=phase != "compute").fault(step) for step, phase, replica in [(4, "reduce", 1), (12, "compute", 0)])
    run = finish(config(SFT, tmp_path / "run", *BASE, *same, f"faults=[{faults}]"))
    assert_invariants(run, steps=20)
    assert len(run.kind("fault")) == 2 and not [e for e in run.kind("computed") if e["salvage"]]
    assert run.final_hashes == calm.final_hashes
    assert all(c["members"] == [0, 1] for c in run.kind("commit") if c["kind"] == "apply" and c.step not in (4, 12))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["salvage", "retry"])
def test_losses_under_faults_are_those_without_to_rounding(tmp_path, mode):
    same = ["sft.steps=12", "recovery.exact=false", f"recovery.mode={mode}", "layout.spares=0"]
    calm = finish(config(SFT, tmp_path / "calm", *BASE, *same))
    run = finish(config(SFT, tmp_path / "run", *BASE, *same, f"faults=[{Row('reduce', 1, 'salvage').fault(4)}]"))
    assert_invariants(run, steps=12)
    redone = [e for e in run.kind("computed") if e.step == 4 and (e["salvage"] or epoch_key(e.epoch) > epoch_key(run.kind("death")[0].epoch))]
    assert sum(len(e["slots"]) for e in redone) == (3 if mode == "salvage" else 8)
    assert run.losses.keys() == calm.losses.keys()
    assert all(abs(run.losses[k] - calm.losses[k]) <= 1e-5 * abs(calm.losses[k]) for k in calm.losses)
