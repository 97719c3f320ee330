"""A sample that kills whoever computes it: after two deaths the step goes on without its slot, and says so."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import pytest
from tests.support.runs import SFT, config, finish

from everstep.cluster import worker as worker_module
from everstep.cluster.forked import ForkedHost
from everstep.telemetry.history import check
from everstep.telemetry.recoveries import account

pytestmark = pytest.mark.timeout(120)
STEP, SLOT = 3, 4


def poisoned() -> None:
    """As an image decoder or a kernel that crashes on one input would."""
    compute = worker_module.StepWork.compute

    def deadly(self, slots):
        if self.step == STEP and SLOT in slots:
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


def test_without_a_limit_the_slot_takes_everybody(tmp_path: Path):
    from everstep.errors import NotEnoughReplicas

    with pytest.raises(NotEnoughReplicas):
        finish(config(SFT, tmp_path / "run", "layout.replicas=2", "layout.spares=0", "sft.steps=8", "train.micro_batch_size=4",
                      "sft.samples_per_step=32", "recovery.quarantine_after=0", "faults=[]"),
               host=functools.partial(ForkedHost, prepare=poisoned))
