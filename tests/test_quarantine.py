"""A sample that kills whoever computes it: after two deaths the step goes on without its slot, and says so."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import pytest
from tests.support.replicas import Replicas
from tests.support.runs import SFT, config, finish

from everstep.cluster.forked import ForkedHost
from everstep.cluster.worker import worker as worker_module
from everstep.errors import NonFinite
from everstep.telemetry.events import read_events
from everstep.telemetry.history import check
from everstep.telemetry.recoveries import account

pytestmark = pytest.mark.timeout(120)
STEP, SLOT = 3, 4


def poisoned(step: int = STEP) -> None:
    """As an image decoder or a kernel that crashes on one input would."""
    compute = worker_module.StepWork.compute

    def deadly(self, slots):
        if self.step == step and SLOT in slots:
            os.kill(os.getpid(), signal.SIGSEGV)
        return compute(self, slots)

    worker_module.StepWork.compute = deadly  # type: ignore[method-assign]


@pytest.mark.parametrize("more", [["recovery.exact=true"], ["layout.spares=1"]], ids=["exact", "spare"])
def test_two_replicas_die_of_a_slot_and_the_third_goes_on_without_it(more, tmp_path: Path):
    run = finish(
        config(SFT, tmp_path / "run", "layout.replicas=3", "layout.spares=0", "sft.steps=8", "train.micro_batch_size=4", "sft.samples_per_step=32",
               "checkpoint.at_end=false", "faults=[]", *more),
        host=functools.partial(ForkedHost, prepare=poisoned),
    )
    assert not [f for f in check(run.folder) if f.held is False]
    books = account(run.events)
    assert books.exact and books.committed == 8
    deaths = run.kind("death")
    assert [d.step for d in deaths] == [STEP, STEP] and len({d["replica"] for d in deaths}) == 2
    commit = next(c for c in run.kind("commit") if c.step == STEP)
    (drop,) = run.kind("drop")
    assert drop["samples"] == commit["dropped"] and "quarantine" in drop["reason"]
    vote = next(v for v in run.kind("vote") if v.step == STEP and v.epoch == commit.epoch)
    left_out = sorted(set(range(8)) - set(vote["ledger"]))
    assert SLOT in left_out and len(drop["samples"]) == 4 * len(left_out) and books.samples_dropped == len(drop["samples"])
    assert left_out == [SLOT] or (not run.kind("view")[0]["quarantined"] and more[0] != "recovery.exact=true")  # slot by slot nobody else suffers


@pytest.mark.parametrize("step", [STEP, STEP + 1], ids=["the-next-step", "a-later-step"])
def test_one_replica_that_goes_back_to_a_copy_does_not_die_of_the_slot_for_ever(step, tmp_path: Path):
    """The view of the step comes with the rollback, or with the commit before it."""
    run = finish(
        config(SFT, tmp_path / "run", "layout.replicas=1", "layout.spares=2", "sft.steps=6", "train.micro_batch_size=4", "sft.samples_per_step=32",
               "checkpoint.at_end=false", "faults=[]", "recovery.exact=true", "recovery.memory_checkpoint_every=2"),
        host=functools.partial(ForkedHost, prepare=functools.partial(poisoned, step)),
    )
    assert not [f for f in check(run.folder) if f.held is False]
    assert [r.step for r in run.kind("rollback")] == [2, 2] and len(run.kind("death")) == 2
    (drop,) = run.kind("drop")
    assert drop.step == step and len(drop["samples"]) == 4 and "quarantine" in drop["reason"]
    assert any(c["quarantined"] for c in run.kind("commit")) == (step > STEP)


def not_a_number() -> None:
    """The data: whoever computes this slot."""
    compute = worker_module.StepWork.compute

    def spoiled(self, slots):
        contribution = compute(self, slots)
        if self.step == STEP and SLOT in slots:
            contribution.gradients[0].view(-1)[0] = float("nan")
        return contribution

    worker_module.StepWork.compute = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("exact", ["false", pytest.param("true", marks=pytest.mark.full)])
@pytest.mark.parametrize("then", ["skip", "stop"])
def test_bad_data_is_told_from_a_fault_and_skipped_or_the_run_stops(then, exact, tmp_path: Path):
    conf = config(SFT, tmp_path / "run", "layout.replicas=2", "layout.spares=0", "sft.steps=6", "train.micro_batch_size=4", "sft.samples_per_step=32",
                  "checkpoint.at_end=false", "faults=[]", f"recovery.exact={exact}", f"recovery.non_finite={then}")
    host = functools.partial(ForkedHost, prepare=not_a_number)
    if then == "stop":
        with pytest.raises(NonFinite, match=rf"step {STEP}: .*slots \[{SLOT}\]"):
            finish(conf, host=host)
    else:
        run = finish(conf, host=host)
        assert not [f for f in check(run.folder) if f.held is False]
        assert [c["kind"] for c in run.kind("commit")] == ["apply"] * 2 + ["skip"] + ["apply"] * 3
    again, found = [e for e in read_events(tmp_path / "run" / "events") if e.event == "non_finite"]
    assert (again["verdict"], found["verdict"], found.step) == ("again", "data", STEP)
    assert found["slots"] == [SLOT] and len(found["samples"]) == 4 and found["ranks"] == ["1/0"]  # dealt to 0 the first time
    assert again["ranks"] == ["0/0"] and set(again["slots"]) == ({SLOT} if exact == "true" else {0, 2, 4, 6})


@pytest.mark.full
def test_without_ray_bad_data_stops_the_run_too(tmp_path: Path):
    conf = config(SFT, tmp_path / "run", "launcher=local", "layout.replicas=2", "layout.spares=0", "sft.steps=6", "train.micro_batch_size=4",
                  "sft.samples_per_step=32", "checkpoint.at_end=false", "faults=[]", "recovery.non_finite=stop")
    with Replicas(conf, tmp_path, prepare=not_a_number) as replicas:
        replicas.start(0, 1)
        replicas.join()
        assert set(replicas.codes.values()) == {3} and f"slots [{SLOT}]" in replicas.logs() and len(list(tmp_path.glob("exits-*"))) == 2
        assert [e.step for e in replicas.events() if e.event == "commit"] == list(range(1, STEP))


@pytest.mark.full
def test_a_transient_fault_names_the_rank_and_costs_one_attempt(tmp_path: Path):
    run = finish(config(SFT, tmp_path / "run", "layout.replicas=2", "layout.spares=0", "sft.steps=6", "checkpoint.at_end=false",
                        "recovery.non_finite=stop", f"faults=[{{step: {STEP}, kind: nan, replica: 1}}]"), host=ForkedHost)
    assert [(e["verdict"], e["ranks"]) for e in run.kind("non_finite")] == [("again", ["1/0"]), ("transient", ["1/0"])]
    assert all(c["kind"] == "apply" for c in run.kind("commit"))


def test_without_a_limit_the_slot_takes_everybody(tmp_path: Path):
    from everstep.errors import NotEnoughReplicas

    with pytest.raises(NotEnoughReplicas):
        finish(config(SFT, tmp_path / "run", "layout.replicas=2", "layout.spares=0", "sft.steps=8", "train.micro_batch_size=4",
                      "sft.samples_per_step=32", "recovery.quarantine_after=0", "faults=[]"),
               host=functools.partial(ForkedHost, prepare=poisoned))
