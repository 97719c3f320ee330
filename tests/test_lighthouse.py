"""Several replicas under a lighthouse: each is processes of its own, found through it; real kills of ranks, replicas and the lighthouse.

What only launcher local has; deaths in every phase are in test_exact.py, for all launchers, and test_up.py goes through torchrun. Here ranks
are forked from a process that has done the imports (tests/support/replicas.py). In exact mode: whatever dies, the final weights are those
of the undisturbed run to the last bit.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.replicas import Replicas
from tests.support.runs import DEMO, SFT, Finished, config, finish
from tests.test_controller_death import (
    after_one_rank_was_told,
    after_the_record_before_anybody_is_told,
    before_the_record_is_durable,
    between_two_steps,
)
from tests.test_faults import assert_invariants

import everstep
from everstep.checkpoint.manifest import checkpoint_folders, step_of
from everstep.cluster.forked import ForkedHost
from everstep.cluster.worker.worker import Worker
from everstep.config.schema import Config
from everstep.recovery.commitlog import is_open
from everstep.telemetry import history
from everstep.telemetry.events import Event, epoch_key
from everstep.telemetry.metrics import read_metrics
from everstep.telemetry.status import fold

pytestmark = pytest.mark.timeout(240)

AT_A_COMMIT = [before_the_record_is_durable, after_the_record_before_anybody_is_told, after_one_rank_was_told, between_two_steps]
STEPS = 16
BASE = ["layout.spares=0", "faults=[]", f"sft.steps={STEPS}", "sft.samples_per_step=32", "train.micro_batch_size=4", "recovery.exact=true",
        "recovery.heartbeat_s=0.2", "train.verify_every=1000", "checkpoint.at_end=false", "lighthouse.wait_s=60"]
GRPO = ["layout.spares=0", "faults=[]", "warmup.steps=2", "warmup.samples_per_step=32", "rl.iterations=4", "rl.prompts_per_step=8",
        "rl.samples_per_prompt=4", "rl.updates_per_pass=2", "rl.kl_coef=0.05", "rl.eval_every=2", "train.micro_batch_size=8",
        "rollout.eval_samples=8", "recovery.exact=true", "recovery.heartbeat_s=0.2", "train.verify_every=1000", "checkpoint.at_end=false",
        "lighthouse.wait_s=60"]


def local(folder: Path, replicas: int, *more: str, file: str = SFT) -> Config:
    return config(file, folder / "run", *(BASE if file == SFT else GRPO), "launcher=local", f"layout.replicas={replicas}", *more)


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory):
    """Hashes by position of an undisturbed run of one replica under the controller: everything else is compared with that."""

    @functools.cache
    def hashes(file: str, *more: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("calm") / "run"
        run = finish(config(file, folder, *(BASE if file == SFT else GRPO), "layout.replicas=1", *more), host=ForkedHost)
        return by_position(run)

    return hashes


def by_position(run: Finished) -> dict[str, str]:
    last = run.kind("verify")[-1]
    assert last["equal"]
    return {name.split("/")[1]: digest for name, digest in last["hashes"].items()}


def replicas_at_end(run: Finished) -> set[str]:
    return {name.split("/")[0] for name in run.kind("verify")[-1]["hashes"]}


def check(run: Finished, expected: dict[str, str], replicas: int | None) -> None:
    """``replicas``: that are there at the end; None: one may not have been back by then."""
    assert_invariants(run, steps=run.kind("commit")[-1].step)  # as many as in the run that it is compared with, else the hashes differ
    assert by_position(run) == expected
    assert replicas is None or len(replicas_at_end(run)) == replicas
    steps = [row["step"] for row in read_metrics(run.folder / "metrics.jsonl")]
    assert steps == sorted(set(steps)), f"some step's metrics were written twice: {steps}"
    assert run.kind("run_end")[-1]["status"] == "done"


def test_a_killed_rank_comes_back_as_a_new_life_of_its_replica(tmp_path: Path, calm) -> None:
    """Replica 0, which leads at first: the other one leads until it is back, and nobody in between."""
    fault = "faults=[{step: 3, phase: reduce, kind: kill, replica: 0}]"
    told = tmp_path / "told"
    alert = f"alerts=[{{events: [death, run_end], command: [sh, -c, 'cat >> {told}; echo >> {told}']}}]"
    with Replicas(local(tmp_path, 2, fault, "sft.steps=40", alert, "telemetry.dashboard=true"), tmp_path) as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(1)
        replicas.wait_for(lambda events: everstep.status(replicas.config.run_dir).dashboard)
        with urllib.request.urlopen(everstep.status(replicas.config.run_dir).dashboard + "/metrics", timeout=20) as answer:
            assert b"everstep_live_replicas" in answer.read()
        run = replicas.finished()
    check(run, calm(SFT, "sft.steps=40"), 2)
    assert [json.loads(line)["event"] for line in told.read_text().splitlines()] == ["death", "run_end"], "the lighthouse tells"
    assert len(run.kind("death")) == 1 and run.kind("fault")[0]["kind"] == "kill"
    assert {e["replica"] for e in run.kind("join")} == {0}
    logged = {row["step"] for row in read_metrics(run.folder / "metrics.jsonl")}
    assert set(range(1, 41)) - logged <= {3}, "only the step in which the lead died may have nobody who wrote its metrics"


def test_the_lighthouse_is_killed_and_comes_back(tmp_path: Path, calm) -> None:
    with Replicas(local(tmp_path, 2, "sft.steps=24"), tmp_path) as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(4)
        replicas.kill_lighthouse()
        before = max(e.step for e in replicas.events() if e.event == "commit")
        time.sleep(1.0)
        stalled = max(e.step for e in replicas.events() if e.event == "commit")
        assert stalled == before, "nothing commits without a coordinator"
        replicas.start_lighthouse()
        run = replicas.finished()
    check(run, calm(SFT, "sft.steps=24"), 2)
    assert not run.kind("death")
    epochs = [epoch_key(e.epoch) for e in run.kind("commit")]
    assert epochs == sorted(epochs) and {epoch[0] for epoch in epochs} == {1, 2}, "epochs grow, over incarnations"


@pytest.mark.full
@pytest.mark.parametrize("moment", ["trains", "forms"])
def test_a_lighthouse_that_is_stopped_in_order_leaves_what_a_killed_one_leaves(tmp_path: Path, calm, moment: str) -> None:
    """It gives those that are stopped with it a moment to leave first, in which training goes on."""
    with Replicas(local(tmp_path, 2, "sft.steps=100"), tmp_path) as replicas:
        replicas.start(0, 1)
        if moment == "trains":
            replicas.wait_for_commit(4)
        else:
            replicas.wait_for(lambda events: any(e.event == "process_start" for e in events))
        replicas.lighthouse.terminate()
        replicas.lighthouse.join(20)
        assert replicas.lighthouse.exitcode == 0 and not any(e.event == "run_end" for e in replicas.events())
        assert "waits for another lighthouse" in (tmp_path / "lighthouse.log").read_text()
        replicas.start_lighthouse()
        run = replicas.finished()
    check(run, calm(SFT, "sft.steps=100"), 2)
    assert not run.kind("death") and (run.kind("takeover") or moment == "forms")


def test_nobody_ends_well_of_a_run_that_was_interrupted(tmp_path: Path) -> None:
    with Replicas(local(tmp_path, 2, "sft.steps=5000"), tmp_path) as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(4)
        for replica in range(2):
            replicas.kill(replica, number=signal.SIGTERM)
        replicas.join(60)
        assert set(replicas.codes.values()) == {3}, "started anew, they are told that it has ended"
        replicas.lighthouse.terminate()
        replicas.lighthouse.join(20)
        assert replicas.lighthouse.exitcode == 0
    assert [e["status"] for e in replicas.events() if e.event == "run_end"] == ["interrupted"]
    assert not is_open(tmp_path / "run" / "commits.log") and "ended before it was done (interrupted)" in replicas.logs()


@pytest.mark.full
@pytest.mark.parametrize("moment", AT_A_COMMIT)
def test_the_lighthouse_dies_at_a_commit(tmp_path: Path, calm, moment: Callable[[int], None]) -> None:
    """Whoever heard of the commit, and whoever did not, go on from it; one that is not durable is made anew."""
    with Replicas(local(tmp_path, 2, "sft.steps=24"), tmp_path, moment=functools.partial(moment, 4)) as replicas:
        replicas.start(0, 1)
        replicas.lighthouse.join(60)
        assert replicas.lighthouse.exitcode == -signal.SIGKILL
        replicas.start_lighthouse()
        run = replicas.finished()
    check(run, calm(SFT, "sft.steps=24"), 2)
    assert not run.kind("death") and [(e.step, e["members"]) for e in run.kind("takeover")] in ([(3, [0, 1])], [(4, [0, 1])])


@pytest.mark.full
@pytest.mark.parametrize("moment", ["forms", "heals"])
def test_the_lighthouse_dies_while_a_replica_comes_back(tmp_path: Path, calm, moment: str) -> None:
    with Replicas(local(tmp_path, 2, "sft.steps=60"), tmp_path) as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(4)
        replicas.kill(1)
        if moment == "forms":
            replicas.wait_for(lambda events: any(e.event == "process_start" and e.who == "w1b1" for e in events))
        else:
            replicas.wait_for(lambda events: any(e.event in ("view", "commit") and e["healing"] == [1] for e in events))
        replicas.kill_lighthouse()
        replicas.start_lighthouse()
        run = replicas.finished()
    check(run, calm(SFT, "sft.steps=60"), 2)
    assert run.kind("takeover") and {e["replica"] for e in run.kind("join")} == {1}


@pytest.mark.full
def test_waiting_for_a_replica_is_bitwise_the_same_without_exact_mode(tmp_path: Path) -> None:
    hashes = []
    for name, fault in (("calm", "faults=[]"), ("killed", "faults=[{step: 4, phase: reduce, kind: kill, replica: 1}]")):
        conf = local(tmp_path / name, 2, "recovery.mode=wait", "recovery.exact=false", fault)
        with Replicas(conf, tmp_path / name, min_replicas=1) as replicas:
            replicas.start(0, 1)
            run = replicas.finished()
        assert_invariants(run, steps=STEPS)
        assert all(e["members"] == [0, 1] for e in run.kind("commit")) and len(run.kind("death")) == (name == "killed")
        hashes.append(by_position(run))
    assert hashes[0] == hashes[1]


@pytest.mark.full
@pytest.mark.parametrize("moment", [after_the_record_before_anybody_is_told, between_two_steps])
def test_lighthouse_and_a_replica_die_together(tmp_path: Path, calm, moment: Callable[[int], None]) -> None:
    """The death is written down by the next lighthouse; if nobody had heard of the commit, the dead replica never applied it."""
    conf = local(tmp_path, 3, "sft.steps=100", "recovery.silence_s=4")
    with Replicas(conf, tmp_path, moment=functools.partial(moment, 4)) as replicas:
        replicas.start(0, 1, 2)
        replicas.lighthouse.join(60)
        replicas.kill(1)
        time.sleep(0.5)
        replicas.start_lighthouse()
        run = replicas.finished()
    check(run, calm(SFT, "sft.steps=100"), 3)
    (death,) = run.kind("death")
    assert death["worker"] == "w1" and "did not come back" in death["cause"]


@pytest.mark.full
def test_the_lighthouse_dies_many_times(tmp_path: Path, calm) -> None:
    with Replicas(local(tmp_path, 2, "sft.steps=60"), tmp_path) as replicas:
        replicas.start(0, 1)
        for death in range(5):
            replicas.wait_for_commit(4 + 8 * death)
            replicas.kill_lighthouse()
            replicas.start_lighthouse()
        run = replicas.finished()
    check(run, calm(SFT, "sft.steps=60"), 2)


@pytest.mark.full
def test_a_replica_that_was_not_there_joins_and_stalls_nobody(tmp_path: Path, calm) -> None:
    """The run begins with two of three, when torchft's join timeout has passed; the third comes while they train."""
    with Replicas(local(tmp_path, 3, "sft.steps=80"), tmp_path, min_replicas=2, join_timeout_ms=60_000) as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(5)
        replicas.start(2)
        run = replicas.finished()
    check(run, calm(SFT, "sft.steps=80"), 3)
    times = sorted(e.t_wall for e in run.kind("commit"))
    assert max(b - a for a, b in itertools.pairwise(times)) < 10, "the join timeout was waited for"


def slow_on_replica_1() -> None:
    """Longer than a phase of a step may take."""
    state_hash = Worker.state_hash

    def slow(self: Worker) -> tuple[int | None, str]:
        if os.environ["EVERSTEP_REPLICA"] == "1":
            time.sleep(9.0)
        return state_hash(self)

    Worker.state_hash = slow  # type: ignore[method-assign]


@pytest.mark.full
def test_all_ranks_of_a_replica_wait_for_another_one_as_long_as_their_head_does(tmp_path: Path, calm) -> None:
    shape = ["layout.tp=2", "engine.sequence_parallel=true", "sft.steps=6"]
    with Replicas(local(tmp_path, 2, *shape, "recovery.step_timeout_s=4", "recovery.heal_timeout_s=3"), tmp_path, prepare=slow_on_replica_1) as replicas:
        replicas.start(0, 1)
        run = replicas.finished()
    check(run, calm(SFT, *shape), 2)
    assert not run.kind("death")


@pytest.mark.full
def test_all_ranks_of_a_replica_freeze_at_once_on_machines_of_their_own(tmp_path: Path, calm) -> None:
    """The first one that is expelled is the end of that life; the others must be killed as well, for it to be started anew."""
    shape = ["layout.tp=2", "engine.sequence_parallel=true", "sft.steps=60"]
    with Replicas(local(tmp_path, 2, *shape, "recovery.silence_s=2"), tmp_path, apart=True) as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(4)
        for rank in range(2):
            replicas.kill(1, rank, signal.SIGSTOP)
        run = replicas.finished()
    check(run, calm(SFT, *shape), None)
    assert {e["worker"] for e in run.kind("death")} == {"w2", "w3"} and len(run.kind("expel")) == 1
    assert {e.who for e in run.kind("form") if e["replica"] == 1} >= {"w2b1", "w3b1"}, "it came back"


@pytest.mark.full
def test_min_replicas_holds_the_run(tmp_path: Path, calm) -> None:
    with Replicas(local(tmp_path, 2, "recovery.min_replicas=2", "sft.steps=20"), tmp_path) as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(4)
        replicas.kill(1)
        run = replicas.finished()
    check(run, calm(SFT, "sft.steps=20"), 2)
    assert all(e["members"] == [0, 1] for e in run.kind("commit")), "nothing committed with fewer than two"


@pytest.mark.full
def test_a_run_with_too_few_waits_longer_than_a_step_may_take(tmp_path: Path, calm) -> None:
    shape = ["layout.tp=2", "engine.sequence_parallel=true", "sft.steps=12"]
    conf = local(tmp_path, 2, *shape, "recovery.min_replicas=2", "recovery.below_minimum=wait", "recovery.step_timeout_s=4", "recovery.heal_timeout_s=3")
    with Replicas(conf, tmp_path, max_restarts=0) as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(4)
        replicas.kill(1)
        time.sleep(10.0)
        later = again(replicas, tmp_path / "later")
        later.start(1)
        replicas.join()
        run = later.finished()
    check(run, calm(SFT, *shape), 2)
    assert replicas.codes[0] == 0 and [e["replica"] for e in run.kind("death")] == [1, 1]
    times = sorted(e.t_wall for e in run.kind("commit"))
    assert max(b - a for a, b in itertools.pairwise(times)) > 8.0, "it was held"


@pytest.mark.full
def test_the_lead_dies_while_it_saves(tmp_path: Path, calm) -> None:
    fault = "faults=[{step: 8, phase: save, kind: kill, replica: 0}]"
    with Replicas(local(tmp_path, 2, fault, "sft.steps=40", "checkpoint.every_steps=4", "checkpoint.asynchronous=false"), tmp_path) as replicas:
        replicas.start(0, 1)
        run = replicas.finished()
    check(run, calm(SFT, "sft.steps=40"), 2)
    assert [e.step for e in run.kind("save")] == list(range(4, 41, 4))
    replica_of = {e.who: e["replica"] for e in run.kind("form")}
    for save in run.kind("save"):
        now = [e for e in run.kind("view", "commit") if e.t_wall < save.t_wall][-1]
        assert replica_of[save.who] == min(set(now["members"]) - set(now["healing"])), "the smallest that lives saves"
    assert {replica_of[save.who] for save in run.kind("save")} == {0, 1}


@pytest.mark.full
@pytest.mark.parametrize("phase", ["rollout", "compute", "reduce"])
@pytest.mark.parametrize("replica", [0, 1])
def test_grpo(tmp_path: Path, calm, phase: str, replica: int) -> None:
    """A life that joins in the middle of an iteration takes its samples, scores and log-probabilities from the board."""
    fault = f"faults=[{{step: 5, phase: {phase}, kind: kill, replica: {replica}}}]"
    with Replicas(local(tmp_path, 2, fault, "rl.iterations=32", file=DEMO), tmp_path) as replicas:
        replicas.start(0, 1)
        run = replicas.finished()
    check(run, calm(DEMO, "rl.iterations=32"), 2)
    assert run.kind("join")


@pytest.mark.full
def test_all_die_and_the_run_is_resumed(tmp_path: Path) -> None:
    conf = local(tmp_path, 2, "checkpoint.every_steps=4", "sft.steps=60")
    with Replicas(conf, tmp_path / "first") as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(9)
        end = time.monotonic() + 20
        while not (written := sorted(filter(None, map(step_of, checkpoint_folders(tmp_path / "run" / "checkpoints"))))) or written[-1] < 8:
            assert time.monotonic() < end, written
            time.sleep(0.02)
        replicas.kill(0)
        replicas.kill(1)
        replicas.join()
        assert set(replicas.codes.values()) == {3} and "resume=auto" in replicas.logs()
    with Replicas(conf.model_copy(update={"resume": "auto"}), tmp_path / "second") as replicas:
        replicas.start(0, 1)
        run = replicas.finished()
    assert run.kind("run_start")[-1].step >= 8
    assert not [finding for finding in history.check(run.folder) if finding.held is False]


@pytest.mark.full
def test_user_code_that_fails_ends_the_run_and_not_ten_times(tmp_path: Path) -> None:
    fault = "faults=[{step: 3, phase: compute, kind: error, replica: 0}, {step: 3, phase: compute, kind: error, replica: 1}]"
    with Replicas(local(tmp_path, 2, fault), tmp_path) as replicas:
        replicas.start(0, 1)
        replicas.join()
        assert set(replicas.codes.values()) == {3}
        assert len(list(tmp_path.glob("exits-*"))) == 2, "they were started anew"
    assert [e["status"] for e in replicas.events() if e.event == "run_end"] == ["failed"]


@pytest.mark.full
def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with Replicas(local(tmp_path, 2), tmp_path) as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(1)
        other = again(replicas, tmp_path / "other")
        other.config = replicas.config.model_copy(update={"seed": 5})
        other.start(1)
        other.join(60)
        assert other.codes == {1: 2} and "differs in seed" in other.logs()
        replicas.finished()


def again(replicas: Replicas, folder: Path) -> Replicas:
    """Another set of processes, of the same run and under the same lighthouse."""
    other = Replicas.__new__(Replicas)
    other.__dict__.update(replicas.__dict__, folder=folder, _threads={}, ranks={}, codes={})
    return other


@pytest.mark.full
def test_nobody_takes_the_place_of_a_living_replica_while_the_lighthouse_is_away(tmp_path: Path, calm) -> None:
    """A second process of the same number is at the new lighthouse before the first one is."""
    with Replicas(local(tmp_path, 2, "sft.steps=24"), tmp_path) as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(4)
        replicas.kill_lighthouse()
        replicas.kill(1, number=signal.SIGSTOP)
        second = again(replicas, tmp_path / "second")
        second.start(1)
        replicas.start_lighthouse()
        replicas.wait_for(lambda events: "replica 1 asks to take part" in (tmp_path / "lighthouse.log").read_text())
        replicas.kill(1, number=signal.SIGCONT)
        run = replicas.finished()
        second.join(60)
    check(run, calm(SFT, "sft.steps=24"), 2)
    assert not run.kind("death") and {e["build"] for e in run.kind("form")} == {0}
    assert second.codes == {1: 0} and "RunEnded" in second.logs(), "it waited for the first one's end"


@pytest.mark.full
def test_a_second_process_of_a_living_replica_is_refused(tmp_path: Path, calm) -> None:
    with Replicas(local(tmp_path, 2, "sft.steps=100", "recovery.silence_s=2"), tmp_path) as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(4)
        second = again(replicas, tmp_path / "second")
        second.start(1)
        second.join(60)
        run = replicas.finished()
    check(run, calm(SFT, "sft.steps=100"), 2)
    assert second.codes == {1: 2} and "replica.id=1 takes part already" in second.logs() and not run.kind("death")


@pytest.mark.full
def test_who_slept_while_the_run_was_begun_anew_is_not_let_in(tmp_path: Path, calm) -> None:
    """Both replicas are frozen and the lighthouse is gone; the run is started again in the same folder; then the old ones wake up."""
    conf = local(tmp_path, 2, "sft.steps=100", "recovery.silence_s=2")
    with Replicas(conf, tmp_path / "old") as old:
        old.start(0, 1)
        old.wait_for_commit(4)
        old.kill_lighthouse()
        for replica in range(2):
            old.kill(replica, number=signal.SIGSTOP)
        new = again(old, tmp_path / "new")
        new.clean = True
        old.start_lighthouse()
        new.start(0, 1)
        try:
            old.wait_for(lambda events: (tmp_path / "old" / "lighthouse.log").read_text().count("serving the run") == 2)
            new.wait_for_commit(4)
            for replica in range(2):
                old.kill(replica, number=signal.SIGCONT)
            old.join()
            new.lighthouse = old.lighthouse
            run = new.finished()
        finally:
            new.end()
    check(run, calm(SFT, "sft.steps=100"), 2)
    assert not run.kind("death") and {e["build"] for e in run.kind("form")} == {0}
    assert "was begun anew while this replica was away" in old.logs() and not set(old.codes.values()) & {0, 4}, old.codes


@pytest.mark.full
def test_islands_are_saved_whole_and_resumed(tmp_path: Path) -> None:
    """Semi-synchronous training: a checkpoint holds the local state of every replica, wherever it was started."""
    rounds = ["semisync.method=diloco", "semisync.sync_every=2", "optimizer.schedule=constant", "recovery.exact=false", "checkpoint.every_steps=3"]

    def run(name: str, *more: str) -> Finished:
        with Replicas(local(tmp_path, 2, *rounds, *more), tmp_path / name) as replicas:
            replicas.start(0, 1)
            return replicas.finished()

    whole = run("whole", "sft.steps=12")
    expected = by_position(whole)
    whole.folder.rename(tmp_path / "kept")
    run("part", "sft.steps=6")
    assert by_position(run("rest", "sft.steps=12", "resume=auto")) == expected


def test_the_status_of_a_run_is_judged_by_the_lighthouse_that_it_has_now() -> None:
    """And not by the one that began it, whose process is gone."""
    gone, here = 2**22 + 1, os.getpid()
    event = functools.partial(Event, host=socket.gethostname(), epoch=(1, 1))
    events = [
        event(1.0, 1.0, "lead", gone, step=0, event="run_start",
              fields={"recipe": "sft", "launcher": "local", "attempt": 1, "replicas": 2, "run_dir": "r", "samples_per_step": 8, "resumed_from": ""}),
        event(2.0, 2.0, "lead", gone, step=1, event="begin", fields={}),
        event(9.0, 9.0, "lead", here, step=1, event="takeover", fields={"incarnation": 2, "members": [0, 1], "workers": [], "seconds": 1.0}),
    ]
    assert fold("r", events[:2], now=10.0).state == "gone"
    assert fold("r", events, now=10.0).state == "running"
