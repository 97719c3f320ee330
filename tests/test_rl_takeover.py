"""The controller is killed inside an iteration of reinforcement learning: while ranks generate or evaluate, while it computes rewards itself,
between the updates of actor and critic, before and after the iteration's record is on disk. Another one goes on; both models' bits tell."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.runs import Finished, config
from tests.test_controller_death import die, end, start
from tests.test_exact import by_position
from tests.test_faults import assert_invariants
from tests.test_rl_faults import FIRST, ITERATIONS, PPO, SMALL, STEPS, calm, undisturbed

from everstep.cluster.controller.controller import Controller
from everstep.cluster.forked import ForkedHost
from everstep.cluster.processes import still_running
from everstep.recovery import rendezvous
from everstep.recovery.desk import Desk
from everstep.rl.record import IterationRecords
from everstep.telemetry.events import read_events

__all__ = ["calm"]  # the fixture
pytestmark = [pytest.mark.timeout(300)]


def when_ranks_enter(phase: str, at: int) -> None:
    entered = Controller._phase_entered

    def killed(self, worker, step, entering):
        if (step, entering) == (at, phase):
            die()
        entered(self, worker, step, entering)

    Controller._phase_entered = killed  # type: ignore[method-assign]


def in_rollout(step: int) -> None:
    when_ranks_enter("rollout", FIRST)


def in_logprobs(step: int) -> None:
    when_ranks_enter("logprobs", FIRST)


def in_values(step: int) -> None:
    when_ranks_enter("values", FIRST)


def in_the_first_rollout(step: int) -> None:
    """Only the warm-up is committed."""
    when_ranks_enter("rollout", 2)


def in_rewards(step: int) -> None:
    from everstep.rl import stages

    reward = stages.reward

    def killed(context, samples):
        if context.iteration == 2:
            die()
        return reward(context, samples)

    import tests.test_rl_faults as faults

    faults.reward = killed  # what its pipeline computes rewards with


def before_the_record_is_written(step: int) -> None:
    write = IterationRecords.write
    IterationRecords.write = lambda self, record: die() if record.iteration == 2 else write(self, record)  # type: ignore[method-assign]


def after_the_record_is_written(step: int) -> None:
    write = IterationRecords.write

    def killed(self, record):
        write(self, record)
        if record.iteration == 2:
            die()

    IterationRecords.write = killed  # type: ignore[method-assign]


def at_begin(step: int) -> Callable[[int], None]:
    begin = Desk.begin

    def moment(_: int) -> None:
        Desk.begin = lambda self, k, *args, **kwargs: die() if k == step else begin(self, k, *args, **kwargs)  # type: ignore[method-assign]

    return moment


def between_two_updates_of_the_actor(step: int) -> None:
    at_begin(FIRST + 1)(step)


def between_actor_and_critic(step: int) -> None:
    at_begin(FIRST + 2)(step)


def in_an_update_of_the_critic(step: int) -> None:
    when_ranks_enter("compute", FIRST + 3)


def before_the_next_iteration(step: int) -> None:
    """The last update is committed, and the record not deleted yet."""
    retire, asked = IterationRecords.retire, []

    def killed(self, *args):
        asked.append(args)
        if len(asked) == 3:  # at the start, after the first iteration, after the second
            die()
        retire(self, *args)

    IterationRecords.retire = killed  # type: ignore[method-assign]


def while_it_calls_the_ranks(step: int) -> None:
    """One rank of the second replica has been called, its peer not: by itself it would wait for it for ever."""
    submit = ForkedHost.submit

    def killed(self, worker, meant, method, *args, **kwargs):
        pending = submit(self, worker, meant, method, *args, **kwargs)
        if method == "logprobs" and worker == "w2":
            time.sleep(0.5)  # it is in the call by now
            die()
        return pending

    ForkedHost.submit = killed  # type: ignore[method-assign]


MOMENTS = [in_rollout, in_the_first_rollout, in_rewards, in_logprobs, in_values, before_the_record_is_written, after_the_record_is_written,
           between_two_updates_of_the_actor, between_actor_and_critic, in_an_update_of_the_critic, before_the_next_iteration]
TELLING = {in_rewards, between_actor_and_critic}


@pytest.mark.parametrize("moment", [pytest.param(m, marks=[] if m in TELLING else [pytest.mark.full]) for m in MOMENTS])
def test_the_next_controller_finishes_the_iteration_and_no_bit_of_either_model_differs(moment, calm, tmp_path):
    conf = config(PPO, tmp_path / "run", *SMALL, "layout.replicas=2", "layout.spares=0", "faults=[]", "recovery.controller_grace_s=30")
    prove(conf, calm, moment)


@pytest.mark.full
@pytest.mark.parametrize("shape", [["layout.tp=2", "engine.sequence_parallel=true"], ["layout.pp=2"]], ids=["tp2", "pp2"])
def test_replicas_of_two_ranks_and_two_controllers_in_one_iteration(shape, calm, tmp_path):
    conf = config(PPO, tmp_path / "run", *SMALL, *shape, "layout.replicas=2", "layout.spares=0", "faults=[]", "recovery.controller_grace_s=30")
    prove(conf, calm, in_logprobs, between_actor_and_critic, more=shape)


@pytest.mark.full
@pytest.mark.parametrize("shape", [["layout.tp=2", "engine.sequence_parallel=true"], ["layout.pp=2"]], ids=["tp2", "pp2"])
def test_ranks_that_were_not_all_called_form_again(shape, calm, tmp_path):
    conf = config(PPO, tmp_path / "run", *SMALL, *shape, "layout.replicas=2", "layout.spares=0", "faults=[]", "recovery.controller_grace_s=30")
    done = prove(conf, calm, while_it_calls_the_ranks, more=shape)
    assert [t["members"] for t in done.kind("takeover")] == [[0]]
    assert [(e["replica"], e["build"]) for e in done.kind("form")[4:]] == [(1, 1), (1, 1)]
    assert not done.kind("rollback") and not done.kind("restart")


def prove(conf, calm: Path, *moments: Callable[[int], None], more: list[str] | None = None) -> Finished:
    folder = Path(conf.run_dir)
    for number, moment in enumerate(moments):
        assert end(start(conf, moment, attach=number > 0)) == -signal.SIGKILL, moment.__name__
    assert end(start(conf, attach=True)) == 0
    done = Finished(folder, read_events(folder / "events"))
    assert_invariants(done, steps=STEPS)
    assert len(done.kind("takeover")) == len(moments) and not done.kind("death") and rendezvous.find(folder) is None
    # A replica of which some ranks had been called and others not forms again; it may not be back before the end.
    assert by_position(done, len(done.kind("commit")[-1]["members"])) == undisturbed(calm, *(more or ()))
    rollouts = [e["iteration"] for e in done.kind("stage") if e["name"] == "rollout"]
    assert set(rollouts) == set(range(1, ITERATIONS + 1))
    kept = {after_the_record_is_written, between_two_updates_of_the_actor, between_actor_and_critic, in_an_update_of_the_critic, before_the_next_iteration}
    if set(moments) <= kept:
        assert len(rollouts) == ITERATIONS, "what was on disk was not made again"
    assert not list((folder / "iterations").iterdir())
    assert not still_running(done.pids, 15.0)
    return done
