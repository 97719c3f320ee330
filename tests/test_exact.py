"""The sharpest test of recovery: in exact mode the final weights are, to the last bit, those of a run in which nobody died.

Each schedule is a whole run of ``everstep train``: its recipe, controller, coordinator and workers in real processes, real signals
from outside. Most have workers forked from a process that has done the imports; the last tests go through Ray. With dropout on, and
gradients clipped. A row counts only if its fault fired, a survivor was inside the phase when the signal was sent, and survivors went
the way that was to be expected.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import pytest
from tests.support.runs import ROOT, SFT, Finished, config, finish, gone
from tests.test_faults import assert_invariants

from everstep.cluster.forked import ForkedHost
from everstep.telemetry.events import epoch_key
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
        return self.hold and self.kind in ("kill", "stop") and self.phase not in ("commit", "heal")

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

    def overrides(self) -> list[str]:
        waited = {WAITED_FOR[row.kind] for row in self.rows if row.kind in WAITED_FOR}
        return [*SHAPES[self.shape], f"layout.spares={self.spares}", *sorted(waited), *self.more,
                f"faults=[{', '.join(row.fault() for row in self.rows)}]"]

    def __str__(self) -> str:
        return "-then-".join([*map(str, self.rows)]) + f"-{self.shape or 'dp1'}-{self.spares}spares"


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The examples' tiny model, with dropout in its attention."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(ROOT / "examples/models/tiny-qwen3", path)
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(described | {"attention_dropout": 0.1}))
    return path


@functools.cache
def undisturbed(model: Path, shape: str, *more: str) -> dict[str, str]:
    """Hashes by position of the final weights of a run in which nobody dies, on as many replicas as it takes: one."""
    folder = model.parent / f"calm-{shape}-{abs(hash(more))}"
    run = finish(config(SFT, folder, *BASE, *SHAPES[shape], *more, f"model.path={model}", "layout.replicas=1"), host=ForkedHost)
    return by_position(run, 1)


def by_position(run: Finished, replicas: int) -> dict[str, str]:
    """Of the last comparison of all ranks."""
    last = run.kind("verify")[-1]
    assert last["equal"] and len({name.split("/")[0] for name in last["hashes"]}) == replicas
    return {name.split("/")[1]: digest for name, digest in last["hashes"].items()}


def check_rows(run: Finished, schedule: Schedule) -> None:
    """Every fault fired in its phase, and survivors did about the slots of the dead what they should: no more and no less."""
    faults = run.kind("fault")
    assert [(f["kind"], f["phase"], f["replica"], f["rank"]) for f in faults] == [(r.kind, r.phase, r.replica, r.rank) for r in schedule.rows]
    members = set(range(3 if not schedule.shape else 2))
    for row, fault in zip(schedule.rows, faults, strict=True):
        if row.held:
            assert survivor_inside(run.events, fault), row
    deaths = [d for d in run.kind("death")]
    assert [(d["replica"], d["rank"]) for d in deaths] == [(r.replica, r.rank) for r in schedule.rows]
    if len(deaths) > 1:
        return  # what is left of each depends on the others; the hash and the checker speak for all
    (row,), (death,) = schedule.rows, deaths
    assert death.step == row.step + row.next_step
    computed = [e for e in run.kind("computed") if e.step == death.step and e["rank"] == 0]
    salvaged = sorted(s for e in computed if e["salvage"] for s in e["slots"])
    lost = [s for s in range(SLOTS) if s % len(members) == sorted(members).index(row.replica)]
    gave_all = row.kind == "partition"  # cut off from the coordinator only, it computes and reduces with the others
    assert salvaged == (lost if row.phase in SALVAGED and not gave_all else []), salvaged
    assert not [e for e in computed if not e["salvage"] and e["deal"] != computed[0]["deal"]], "the step was dealt anew"
    used = [e for e in run.kind("link_used") if e.step == death.step and epoch_key(e.epoch) > epoch_key(death.epoch)]
    if salvaged and len(members) > 2:  # and by the standby, not a link made anew
        assert used and all(e["built"] for e in used)


def prove(schedule: Schedule, model: Path, folder: Path) -> Finished:
    run = finish(config(SFT, folder / "run", *BASE, f"model.path={model}", *schedule.overrides()), host=ForkedHost)
    assert_invariants(run, steps=STEPS)
    check_rows(run, schedule)
    replicas = 3 if not schedule.shape else 2
    left = replicas - max(0, len(schedule.rows) - schedule.spares)
    assert len(run.kind("commit")[-1]["members"]) == left, "all spares joined"
    assert by_position(run, left) == undisturbed(model, schedule.shape, *schedule.more)
    assert gone(run.pids)
    return run


PHASES = ("compute", "exchange", "reduce", "vote", "apply")
ONE_DEATH = [Schedule((Row(phase, replica),), spares) for phase in PHASES for replica in range(3) for spares in (1, 0)]
AFTER_A_COMMIT = [Schedule((Row("commit", replica),), 1) for replica in range(3)]
OTHER_ENDS = [
    Schedule((Row(phase, replica, kind),))
    for replica, kind in enumerate(["stop", "exit", "segv", "gil", "oom", "hang", "partition"])
    for replica in [replica % 3] for phase in ("compute", "reduce")
]
TWO_RANKS = [Schedule((Row(phase, i % 2, rank=(i + j) % 2),), 1, shape) for j, shape in enumerate(["tp2", "pp2", "dp2", "cp2"])
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
    "kill-reduce-0.0-tp2-1spares", "kill-vote-1.0-pp2-1spares", "kill-reduce-0.0-dp2-1spares",
    "kill-reduce-2.0-then-kill-salvage-0.0-dp1-0spares", "kill-reduce-1.0-then-kill-heal-1.0-dp1-2spares",
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
