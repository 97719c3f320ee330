"""The controller is killed, for real and at a chosen line; another one takes over from the commit record and the workers that wait.

Controllers and workers are forked from one process that has done the imports, so a takeover is what it costs and not an import.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.runs import SFT, Finished, config, gone
from tests.test_exact import BASE, SLOTS, by_position, model, undisturbed  # noqa: F401  (model is a fixture)
from tests.test_faults import assert_invariants

from everstep.cluster import forked
from everstep.cluster.forked import ForkedHost
from everstep.config.schema import Config
from everstep.driver import run
from everstep.recovery import rendezvous
from everstep.recovery.commitlog import CommitLog
from everstep.recovery.desk import Desk
from everstep.recovery.view import Kind
from everstep.telemetry.events import read_events

pytestmark = [pytest.mark.timeout(200)]

STEPS, STEP = 12, 4
GRACE = ["recovery.controller_grace_s=20", f"sft.steps={STEPS}"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_the_record_is_durable(step: int) -> None:
    write = CommitLog.write
    CommitLog.write = lambda self, r: die() if r.kind is Kind.COMMIT and r.step == step else write(self, r)  # type: ignore[method-assign]


def after_the_record_before_anybody_is_told(step: int) -> None:
    write = CommitLog.write

    def killed(self, record):
        write(self, record)
        if record.kind is Kind.COMMIT and record.step == step:
            die()

    CommitLog.write = killed  # type: ignore[method-assign]


def after_one_rank_was_told(step: int) -> None:
    """Of the others each learns it from the next coordinator."""
    from everstep.recovery.server import _Session

    put, told = _Session.put, []

    def killed(self, message):
        record = message.get("record", {})
        if record.get("kind") == "commit" and record.get("step") == step:
            if told:
                time.sleep(0.3)  # until the first one has it
                die()
            told.append(self.worker)
        put(self, message)

    _Session.put = killed  # type: ignore[method-assign]


def between_two_steps(step: int) -> None:
    begin = Desk.begin
    Desk.begin = lambda self, k, *args: die() if k == step + 1 else begin(self, k, *args)  # type: ignore[method-assign]


def while_the_ranks_compute(step: int) -> None:
    from everstep.cluster.controller import Controller

    entered = Controller._phase_entered

    def killed(self, worker, k, phase):
        if (k, phase) == (step, "compute"):
            die()
        entered(self, worker, k, phase)

    Controller._phase_entered = killed  # type: ignore[method-assign]


def in_the_middle_of_a_save(step: int) -> None:
    from everstep.checkpoint import manifest

    manifest.publish = lambda *args, **kwargs: die()  # type: ignore[assignment]


def while_a_spare_heals(step: int) -> None:
    from everstep.cluster.controller import Controller

    entered = Controller._phase_entered

    def killed(self, worker, k, phase):
        if phase == "heal":
            die()
        entered(self, worker, k, phase)

    Controller._phase_entered = killed  # type: ignore[method-assign]


def _controller(conf: Config, moment: Callable[[int], None] | None, attach: bool) -> None:
    if moment:
        moment(STEP)
    os._exit(run(conf, host=ForkedHost, attach=attach))


def start(conf: Config, moment: Callable[[int], None] | None = None, attach: bool = False):
    """A controller in a process of its own."""
    process = forked.context().Process(target=_controller, args=(conf, moment, attach))
    process.start()
    return process


def end(process, within_s: float = 60.0) -> int:
    process.join(within_s)
    assert process.exitcode is not None, "the controller did not end"
    return int(process.exitcode)


def take_over(conf: Config, *moments: Callable[[int], None]) -> Finished:
    """A controller that is killed at each moment, and then one that finishes the run."""
    for attach, moment in enumerate(moments):
        assert end(start(conf, moment, bool(attach))) == -signal.SIGKILL, moment.__name__
    assert end(start(conf, attach=True)) == 0
    folder = Path(conf.run_dir)
    done = Finished(folder, read_events(folder / "events"))
    assert gone(done.pids) and rendezvous.find(folder) is None
    return done


MOMENTS = [before_the_record_is_durable, after_the_record_before_anybody_is_told, after_one_rank_was_told, between_two_steps, while_the_ranks_compute]


@pytest.mark.parametrize("moment", MOMENTS)
def test_no_committed_step_is_lost_and_no_sample_used_twice(moment, model, tmp_path):  # noqa: F811
    conf = config(SFT, tmp_path / "run", *BASE, *GRACE, f"model.path={model}", "layout.replicas=2", "layout.spares=0")
    done = take_over(conf, moment)
    assert_invariants(done, steps=STEPS)
    assert by_position(done, 2) == undisturbed(model, "", f"sft.steps={STEPS}")
    (takeover,) = done.kind("takeover")
    assert takeover["members"] == [0, 1] and takeover["seconds"] < 5
    assert takeover.step == STEP - (moment in (before_the_record_is_durable, while_the_ranks_compute))
    assert not done.kind("death") and len(done.kind("form")) == 2  # nobody was formed anew
