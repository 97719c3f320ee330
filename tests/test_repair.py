"""The broken replica and everything around it: whatever dies while it is being repaired, with spares, without, and below the minimum.

Each row is a whole run of ``everstep train`` in real processes under real signals, in exact mode: the final weights must be, to the last
bit, those of a run in which nobody died; the history checker must be content; and no survivor may have waited long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.launchers import trained
from tests.support.paths import ways
from tests.support.runs import SFT, Finished, config, finish, gone
from tests.support.strikes import Strike, Strikes
from tests.test_exact import BASE, SHAPES, by_position, path_of, undisturbed
from tests.test_faults import assert_invariants

from everstep import cli
from everstep.checkpoint import manifest
from everstep.cluster import forked, processes
from everstep.cluster.controller.refill import Refill
from everstep.cluster.endpoint import FILE, Endpoint, ask
from everstep.cluster.forked import ForkedHost
from everstep.cluster.worker import worker as worker_module
from everstep.engine import groups
from everstep.errors import BadInput, BelowMinimum, WorkerFailed
from everstep.recovery import heal
from everstep.telemetry.events import read_events
from everstep.telemetry.recoveries import recoveries

pytestmark = [pytest.mark.timeout(420)]

STEPS = 48
STALL_S = 5.0  # far below every deadline that a survivor could be waiting for; an ordinary stall is some tens of milliseconds
RESTART = "recovery.restart_attempts=5"


@dataclasses.dataclass(frozen=True)
class Case:
    """``faults``: as in the configuration; ``strikes``: at what the log says. ``left``: replicas that contribute at the end."""

    name: str
    faults: tuple[str, ...] = ()
    strikes: tuple[Strike, ...] = ()
    left: int = 3
    replicas: int = 3
    spares: int = 1
    shape: str = ""
    more: tuple[str, ...] = ()
    prepare: Callable[[], None] | None = None

    def __str__(self) -> str:
        return self.name


def kill(step: int, phase: str, replica: int, rank: int = 0, kind: str = "kill", hold: bool | None = None, delay_s: float = 0.0) -> str:
    """In reduce the victim is held until the signal: it would be through in a moment, and vote."""
    held = str(phase == "reduce" if hold is None else hold).lower()
    return f"{{step: {step}, phase: {phase}, kind: {kind}, replica: {replica}, rank: {rank}, hold: {held}, delay_s: {delay_s}}}"


def slow_heals() -> None:
    """As over a slow network: a heal takes 1.5 s and more, many steps; what is not sent when a step is applied is copied aside."""
    heal.PIECE_BYTES = 32 << 10
    pieces = heal.Snapshot.pieces

    def slowly(self, lane=0, lanes=1):
        for piece in pieces(self, lane, lanes):
            time.sleep(0.05)
            yield piece

    heal.Snapshot.pieces = slowly  # type: ignore[method-assign]


TWO, TP2, PP2 = {"left": 2, "replicas": 2}, {"left": 2, "replicas": 2, "shape": "tp2"}, {"left": 2, "replicas": 2, "shape": "pp2"}
ALL_NEEDED = ("recovery.min_replicas=2",)
SLOW = {"prepare": slow_heals}
CASES = [
    # nobody is left to take the place: the process is started again
    Case("no-spare", (kill(4, "reduce", 1),), spares=0, more=(RESTART,)),
    Case("no-spare-rank0-of-tp2", (kill(4, "compute", 0),), spares=0, more=(RESTART,), **TP2),
    Case("no-spare-rank1-of-pp2-in-vote", (kill(4, "vote", 1, 1),), spares=0, more=(RESTART,), **PP2),
    Case("no-spare-both-ranks-of-tp2", (kill(4, "compute", 1), kill(4, "compute", 1, 1)), spares=0, more=(RESTART,), **TP2),
    Case("no-spare-two-of-three-at-once", (kill(4, "reduce", 0), kill(4, "reduce", 2)), spares=0, more=(RESTART,)),
    Case("no-spare-and-all-are-needed", (kill(4, "exchange", 1),), spares=0, more=(RESTART, *ALL_NEEDED), **TWO),
    Case("no-spare-frozen", (kill(4, "compute", 2, kind="stop"),), spares=0, more=(RESTART, "recovery.silence_s=2")),
    Case("one-spare-for-two-and-the-other-is-started", (kill(4, "reduce", 0), kill(4, "compute", 1)), more=(RESTART,)),
    # any rank, of replicas of two, with spares
    Case("rank0-of-replica0-of-pp2-in-apply", (kill(4, "apply", 0),), **PP2),
    Case("rank1-of-pp2-in-compute", (kill(4, "compute", 1, 1),), **PP2),
    Case("rank0-of-tp2-after-the-commit", (kill(4, "commit", 1),), **TP2),
    Case("both-ranks-of-tp2-in-reduce", (kill(4, "reduce", 0), kill(4, "reduce", 0, 1)), spares=2, **TP2),
    Case("ranks-of-two-replicas-of-three-not-next-to-each-other", (kill(4, "vote", 0), kill(4, "vote", 2)), spares=2),
    # the spare
    Case("an-idle-spare", ("{step: 3, phase: spare, kind: kill}", kill(8, "reduce", 1)), spares=2),
    Case("an-idle-spare-is-filled-up", ("{step: 3, phase: spare, kind: kill}", kill(30, "reduce", 1)), more=(RESTART,)),
    Case("the-spare-while-it-forms", (kill(4, "reduce", 1),), (Strike("spare_used", "spare"),), spares=2),
    Case("the-spare-while-it-forms-a-tp2", (kill(4, "reduce", 1),), (Strike("spare_used", "spare"),), more=(RESTART,), **TP2),
    Case("the-living-rank-while-its-replica-forms", (kill(4, "reduce", 1),), (Strike("spare_used", "1/1"),), spares=2, **TP2),
    # links and joining
    Case("a-survivor-while-the-joiner's-link-is-built", (kill(4, "reduce", 1),), (Strike("link_build", "0/0", lambda e: "1b1" in e["link"]),), spares=2),
    Case("the-joiner-while-its-link-is-built", (kill(4, "reduce", 1),), (Strike("link_build", "1/0", lambda e: "1b1" in e["link"]),), spares=2),
    Case("in-the-first-step-after-joining", (kill(4, "reduce", 1),), (Strike("join", "1/0"),), spares=2),
    Case("while-standbys-are-built-after-joining", (kill(4, "reduce", 1),), (Strike("join", "2/0", delay_s=0.02),), spares=2),
    # heals that take long
    Case("the-source-in-mid-transfer", (kill(4, "reduce", 1),), (Strike("heal_start", "source", delay_s=0.3),), spares=2, **SLOW),
    Case("the-joiner-in-mid-transfer", (kill(4, "reduce", 1),), (Strike("heal_start", "writer", delay_s=0.3),), spares=2, **SLOW),
    Case("a-third-one-in-mid-transfer", (kill(4, "reduce", 1),), (Strike("heal_start", "2/0", delay_s=0.3),), spares=2, **SLOW),
    Case("the-source-of-a-tp2-in-mid-transfer", (kill(4, "reduce", 1),), (Strike("heal_start", "source", delay_s=0.3),), spares=2,
         **(TP2 | {"left": 3, "replicas": 3}), **SLOW),
    Case("one-rank-of-a-joining-tp2-in-mid-transfer", (kill(4, "reduce", 1),), (Strike("heal_start", "1/1", delay_s=0.3),), spares=2, **TP2, **SLOW),
    Case("the-source-freezes-in-mid-transfer", (kill(4, "reduce", 1),), (Strike("heal_start", "source", number=signal.SIGSTOP, delay_s=0.3),),
         spares=2, more=("recovery.silence_s=2",), **SLOW),
    Case("a-heal-that-is-waited-for", (kill(4, "reduce", 1),), more=("recovery.heal_backlog_steps=0",), **SLOW),
    Case("a-heal-in-a-held-step", (kill(4, "reduce", 1),), more=ALL_NEEDED, **TWO, **SLOW),
]
#: What became of the step in which each death came, and who took the place (tests/support/paths.py). When a strike comes the others may be
#: anywhere in a step; a vote is counted or not. ?: of two at once the second may be seen only when its replica is formed again, which is no death in a step.
SALVAGED, VOTING, STRUCK = "salvaged/spare", "(salvaged|stood)/spare", "[a-z]+/spare"
WAYS = {
    "no-spare": ("salvaged/started",), "no-spare-rank0-of-tp2": ("salvaged/started",), "no-spare-rank1-of-pp2-in-vote": ("(salvaged|stood)/started",),
    "no-spare-both-ranks-of-tp2": ("salvaged/started", "?[a-z]+/started"), "no-spare-two-of-three-at-once": ("salvaged/started",) * 2,
    "no-spare-and-all-are-needed": ("salvaged/started",), "no-spare-frozen": ("salvaged/started",),
    "one-spare-for-two-and-the-other-is-started": ("salvaged/spare", "salvaged/started"), "rank0-of-replica0-of-pp2-in-apply": (SALVAGED,),
    "rank1-of-pp2-in-compute": (SALVAGED,), "rank0-of-tp2-after-the-commit": (SALVAGED,), "both-ranks-of-tp2-in-reduce": (SALVAGED, STRUCK),
    "ranks-of-two-replicas-of-three-not-next-to-each-other": (VOTING, VOTING), "an-idle-spare": (SALVAGED,),
    "an-idle-spare-is-filled-up": ("salvaged/started",), "the-spare-while-it-forms": (SALVAGED, STRUCK),
    "the-spare-while-it-forms-a-tp2": (SALVAGED, "[a-z]+/(spare|started)"), "the-living-rank-while-its-replica-forms": (SALVAGED, STRUCK),
    "a-survivor-while-the-joiner's-link-is-built": (SALVAGED, STRUCK), "the-joiner-while-its-link-is-built": (SALVAGED, STRUCK),
    "in-the-first-step-after-joining": (SALVAGED, STRUCK), "while-standbys-are-built-after-joining": (SALVAGED, STRUCK),
    "the-source-in-mid-transfer": (SALVAGED, STRUCK), "the-joiner-in-mid-transfer": (SALVAGED, STRUCK),
    "a-third-one-in-mid-transfer": (SALVAGED, STRUCK), "the-source-of-a-tp2-in-mid-transfer": (SALVAGED, STRUCK),
    "one-rank-of-a-joining-tp2-in-mid-transfer": (SALVAGED, STRUCK), "the-source-freezes-in-mid-transfer": (SALVAGED, STRUCK),
    "a-heal-that-is-waited-for": (SALVAGED,), "a-heal-in-a-held-step": (SALVAGED,),
}
TELLING = {"the-source-in-mid-transfer"}


def prove(case: Case, model: Path, folder: Path, launcher: str = "controller", steps: int = STEPS) -> Finished:
    shape = [*SHAPES[case.shape], f"layout.replicas={case.replicas}"]
    with Strikes(folder / "run", case.strikes) as strikes:
        run = trained(launcher, SFT, folder, *BASE, f"sft.steps={steps}", *shape, f"layout.spares={case.spares}", path_of(model, case.shape),
                      *case.more, f"faults=[{', '.join(case.faults)}]", prepare=case.prepare if launcher != "ray" else None)
    assert_invariants(run, steps=steps)
    assert len(run.kind("fault")) == len(case.faults) and len(strikes.done) == len(case.strikes)
    last = run.kind("commit")[-1]
    left = len(last["members"])
    if launcher == "lighthouse":  # who died last may not be back yet
        left = len({name.split("/")[0] for name in run.kind("verify")[-1]["hashes"]})
    else:
        assert left == case.left and last["healing"] == []
    assert by_position(run, left) == undisturbed(model, case.shape, f"sft.steps={steps}")
    bound = STALL_S + 2.0 * any("silence_s" in more for more in case.more)
    stalls = [r.stall_s for r in recoveries(run.events) if r.stall_s is not None]
    assert not stalls or max(stalls) < bound, stalls
    taken = ways(run)
    if launcher == "lighthouse":  # torchrun fills the places, of whole replicas
        assert len(taken) >= len(WAYS[case.name]), taken
    else:
        wanted = WAYS[case.name]
        sure = [way for way in wanted if not way.startswith("?")]
        assert len(sure) <= len(taken) <= len(wanted) and all(re.fullmatch(way.lstrip("?"), one) for way, one in zip(wanted, taken, strict=False)), taken
    assert gone(run.pids)
    return run


def test_the_matrix_is_what_it_says():
    names = [str(c) for c in CASES]
    assert len(set(names)) == len(names) >= 24 and set(names) >= TELLING | THROUGH_RAY and set(names) == set(WAYS)


@pytest.mark.parametrize("case", [pytest.param(c, id=str(c), marks=[] if str(c) in TELLING else [pytest.mark.full]) for c in CASES])
def test_whatever_dies_in_a_repair_the_bits_are_those_of_an_undisturbed_run(case, model, tmp_path):
    run = prove(case, model, tmp_path)
    if case.name == "the-source-in-mid-transfer":
        began = [e for e in run.kind("heal_start") if e["replica"] == 1]
        ended = [e for e in run.kind("heal_done") if e["replica"] == 1]
        assert began[0]["source"] != began[1]["source"] and ended[0]["source"] == began[1]["source"]  # nothing came of the first
        assert ended[0]["heal_bytes"] > 0 and ended[0].step >= began[0].step
    if case.name in ("a-third-one-in-mid-transfer", "the-source-in-mid-transfer"):
        assert run.kind("keep")  # steps were committed while it healed, and applied afterwards
        own = [e for e in run.events if e.who == run.kind("keep")[0].who]
        done = next(i for i, e in enumerate(own) if e.event == "heal_done")
        acts = [(e.event, e.step) for e in own[done:] if e.event == "apply" or (e.event == "compute" and e["slots"])]
        kept, first = own[done]["kept"], own[done].step + 1
        assert kept and acts[:kept] == [("apply", first + i) for i in range(kept)]  # all of them, in order, before it computes
    if case.name == "a-heal-that-is-waited-for":
        assert not run.kind("keep")


THROUGH_RAY = {
    "no-spare", "no-spare-rank0-of-tp2", "no-spare-frozen", "rank0-of-replica0-of-pp2-in-apply", "both-ranks-of-tp2-in-reduce", "an-idle-spare",
    "the-spare-while-it-forms", "in-the-first-step-after-joining", "ranks-of-two-replicas-of-three-not-next-to-each-other",
}


@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("case", [pytest.param(c, id=str(c)) for c in CASES if str(c) in THROUGH_RAY])
def test_through_ray_whatever_dies_in_a_repair(case, model, tmp_path):
    """A cold process takes seconds here; the run goes on until it has joined."""
    held = () if case.spares else ("recovery.min_replicas=" + str(case.replicas),)
    prove(dataclasses.replace(case, more=(*case.more, *held)), model, tmp_path, "ray")


#: Those that need no spare: a replica that died is started anew.
WITHOUT_RAY = [
    dataclasses.replace(case, spares=0) for case in CASES
    if not any(word in case.name for word in ("the-spare", "an-idle-spare", "one-spare", "living-rank", "standbys")) and not case.name.startswith(("rank0", "rank1"))
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", WITHOUT_RAY, ids=str)
def test_without_ray_whatever_dies_in_a_repair(case, model, tmp_path):
    """Who died is started cold, and must be back before the end: after ten steps or so of replicas of two ranks, which two cores share, after more of others."""
    prove(case, model, tmp_path, "lighthouse", steps=60 if case.shape else 120)


@pytest.mark.full
def test_a_process_that_cannot_be_killed_ends_no_run_and_holds_up_no_other_repair(model, tmp_path, monkeypatch):
    """As one that is stuck in the kernel: it is frozen, and SIGKILL does nothing until replica 2, which dies after it, is back."""
    send, freed = forked._Child.signal, threading.Event()
    monkeypatch.setattr(forked._Child, "signal", lambda self, number: None if (self.name, number) == ("w1", signal.SIGKILL) and not freed.is_set() else send(self, number))
    monkeypatch.setattr(processes, "_TELL_S", 1.5)
    joined = lambda: any(e.event == "join" and e["replica"] == 2 for e in read_events(tmp_path / "run" / "events"))

    def free() -> None:
        while not (tmp_path / "run" / "events" / "lead.jsonl").exists() or not joined():
            time.sleep(0.1)
        freed.set()

    threading.Thread(target=free, daemon=True).start()
    run = finish(config(SFT, tmp_path / "run", *BASE, f"model.path={model}", "layout.replicas=3", "layout.spares=1", "sft.steps=120", "recovery.silence_s=1.5",
                        f"faults=[{kill(4, 'compute', 1, kind='stop')}, {kill(20, 'compute', 2)}]"), host=ForkedHost)
    assert_invariants(run, steps=120)
    by_worker = {e["worker"]: e for e in run.kind("expel")}
    (join,) = run.kind("join")
    assert set(by_worker) == {"w1", "w2"} and join["replica"] == 2 and by_worker["w2"].t_wall < join.t_wall < by_worker["w1"].t_wall
    assert run.kind("commit")[-1]["members"] == [0, 2] and gone(run.pids)
    told = [line for line in (run.folder / "logs" / "latest" / "lead.jsonl").read_text().splitlines() if "is not known to have ended" in line]
    assert len(told) == 1 and "worker w1 (process" in told[0] and "state D" in told[0]


@pytest.mark.parametrize(("phase", "shape"), [("reduce", ""), *(pytest.param(phase, shape, marks=pytest.mark.full) for phase, shape in (("vote", ""), ("reduce", "tp2"), ("compute", "tp2"), ("compute", "pp2")))])
def test_who_hangs_in_the_first_step_of_its_life_is_found_before_the_others_give_up_waiting(phase, shape, model, tmp_path):
    """Nobody is warm yet: it has recovery.step_timeout_s, and they wait for it in collectives meanwhile."""
    run = finish(config(
        SFT, tmp_path / "run", *BASE, *SHAPES[shape], path_of(model, shape), "layout.replicas=2", "layout.spares=1", "sft.steps=6", "recovery.step_timeout_s=6",
        "recovery.heal_timeout_s=5", "recovery.progress_timeout_s=2", f"faults=[{{step: 1, phase: {phase}, kind: hang, replica: 1}}]"), clean=True, host=ForkedHost)
    assert_invariants(run, steps=6)
    (death,) = run.kind("death")
    assert death["replica"] == 1 and death["cause"].startswith("no progress: step 1, ")
    assert by_position(run, 2) == undisturbed(model, shape, "sft.steps=6")


def the_first_spare_dies_when_all_have_met() -> None:
    """Before it has told anybody its address: the others wait for that in torch's rendezvous."""
    enter = worker_module.Worker._enter

    def dying(self, formation):
        if formation.build == 1 and self.worker_id == formation.workers[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        enter(self, formation)

    worker_module.Worker._enter = dying  # type: ignore[method-assign]


def the_first_spare_dies_when_the_world_is_made() -> None:
    """It is connected: the others meet closed sockets in what the engine does first."""
    enter, open_groups, entering = worker_module.Worker._enter, groups.open_groups, []

    def remembered(self, formation):
        entering.append((formation, self.worker_id))
        enter(self, formation)

    def dying(layout):
        formation, worker = entering[-1]
        if formation.build == 1 and worker == formation.workers[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        open_groups(layout)
        if formation.build == 1:  # as any collective of the groups that were just opened would
            dist.all_reduce(torch.zeros(1))

    worker_module.Worker._enter, groups.open_groups = remembered, dying  # type: ignore[method-assign]


@pytest.mark.full
@pytest.mark.parametrize("prepare", [the_first_spare_dies_when_all_have_met, the_first_spare_dies_when_the_world_is_made], ids=lambda prepare: prepare.__name__)
def test_who_lives_on_when_a_spare_dies_while_the_replica_forms_is_not_killed_and_keeps_its_state(prepare, model, tmp_path):
    """The step is held meanwhile, so the state that it kept is the committed one: only the next spare heals."""
    run = finish(config(SFT, tmp_path / "run", *BASE, *SHAPES["tp2"], path_of(model, "tp2"), "layout.spares=2", *ALL_NEEDED,
                        f"faults=[{kill(4, 'reduce', 1)}]"), host=functools.partial(ForkedHost, prepare=prepare))
    assert_invariants(run, steps=24)
    assert [(e["replica"], e["rank"], e["worker"]) for e in run.kind("death")] == [(1, 0, "w2"), (1, 0, "w4")]
    assert [e["worker"] for e in run.kind("expel")] == ["w2", "w4"]
    healed = {e["rank"]: e["heal_bytes"] for e in run.kind("heal_done") if e["replica"] == 1}
    assert healed[1] == 0 < healed[0]
    assert max(r.stall_s for r in recoveries(run.events) if r.stall_s is not None) < 2 * STALL_S
    assert by_position(run, 2) == undisturbed(model, "tp2")
    assert gone(run.pids)


@pytest.mark.full
def test_a_spare_rehearses_and_is_as_good_as_one_that_did_not(model, tmp_path):
    """In a layout that a spare alone does not have (tensor and sequence parallel)."""
    run = finish(config(SFT, tmp_path / "run", *BASE, *SHAPES["tp2"], "layout.spares=1", f"model.path={model}", "recovery.rehearse=always", RESTART,
                        f"faults=[{kill(4, 'reduce', 1, 1)}]"), host=ForkedHost)
    assert_invariants(run, steps=24)
    first, *_ = run.kind("rehearsed")
    assert first.who == "w4" == run.kind("spare_used")[0]["spare"] and 0 < first["seconds"] < 30 and not run.kind("error")
    assert by_position(run, len(run.kind("commit")[-1]["members"])) == undisturbed(model, "tp2")


# -- planned leaves ---------------------------------------------------------------------------------------------------------------


def leaves(model: Path, folder: Path, strike: Strike, *more: str, spares: int = 1, left: int = 2, steps: int = STEPS) -> Finished:
    """A run in which somebody is told to leave while step 5 is under way: nothing is voided, redone, or counted as a death."""
    conf = config(SFT, folder / "run", *BASE, "layout.replicas=2", f"layout.spares={spares}", f"model.path={model}", "faults=[]", f"sft.steps={steps}", *more)
    with Strikes(folder / "run", [strike]) as strikes:
        run = finish(conf, host=ForkedHost)
    assert strikes.done
    assert_invariants(run, steps=steps)
    assert not run.kind("death", "void", "fault") and not [e for e in run.kind("computed") if e["salvage"]]
    assert run.kind("retire") and len(run.kind("commit")[-1]["members"]) == left
    slots = [(e.step, e["rank"], s) for e in run.kind("computed") for s in e["slots"]]
    assert len(slots) == len(set(slots)), "a slot was computed twice"
    assert by_position(run, left) == undisturbed(model, "", f"sft.steps={steps}")
    assert gone(run.pids)
    return run


IN_STEP_5 = {"event": "compute", "when": lambda row: row["step"] == 5 and row["replica"] == 1}


@pytest.mark.full
def test_a_rank_that_is_drained_is_replaced_between_two_steps_with_nothing_redone(model, tmp_path):
    said = []
    order = lambda folder: said.append(cli.run(["drain", str(folder), "1/0"]))
    run = leaves(model, tmp_path, Strike(**IN_STEP_5, act=order))
    assert said == [0]
    (left,) = run.kind("retire")
    (join,) = run.kind("join")
    assert (left["replica"], left["rank"]) == (1, 0) and join["members"] == [0, 1]


def test_a_rank_that_is_sent_sigterm_is_replaced_between_two_steps(model, tmp_path):
    run = leaves(model, tmp_path, Strike(**IN_STEP_5, whom="1/0", number=signal.SIGTERM))
    assert "SIGTERM" in run.kind("leave")[0]["cause"]


@pytest.mark.full
def test_a_machine_that_is_about_to_go_keeps_the_last_replica_that_holds_the_state(model, tmp_path):
    """All are on one machine: the spare goes, one replica goes, the other cannot, for nobody would hold the state."""
    notice = tmp_path / "notice"
    run = leaves(model, tmp_path, Strike(**IN_STEP_5, act=lambda folder: notice.touch()), f"recovery.preemption_file={notice}", RESTART, left=1, steps=120)
    assert len(run.kind("retire")) == 2 and len(run.kind("leave")) == 3
    assert sorted(e["after"] for e in run.kind("no_room")) == sorted(e["after"] for e in run.kind("restart")) == ["w0", "w2"], "told once"
    assert {e.who for e in run.events if e.who.startswith("w")} == {"w0", "w1", "w2"}, "nothing is started on a machine that goes"


def test_orders_that_are_none_are_refused(model, tmp_path):
    with pytest.raises(BadInput, match="no run is under way"):
        ask(tmp_path, "drain", target="1/0")
    seen = []
    endpoint = Endpoint(tmp_path, "127.0.0.1", {"drain": lambda target: seen.append(target)})
    said = json.loads((tmp_path / FILE).read_text())
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    for order, arguments, message in [("rm", {}, "takes no order 'rm'"), ("drain", {"everything": 1}, "drain failed: TypeError")]:
        with pytest.raises(BadInput, match=message):
            ask(tmp_path, order, **arguments)
    (tmp_path / FILE).write_text(json.dumps(said | {"token": "guessed"}))
    with pytest.raises(BadInput, match="nobody answers"):
        ask(tmp_path, "drain", target="1/0")
    assert seen == []
    endpoint.close()
    assert not (tmp_path / FILE).exists()


# -- the batch shrinks --------------------------------------------------------------------------------------------------------------


def by_cube(lr: float, dealt: int, replicas: int) -> float:
    return lr * (dealt / replicas) ** 3


@pytest.mark.parametrize(
    ("how", "factor"), [("scale_lr_linear", 0.5), pytest.param("scale_lr_sqrt", 0.5**0.5, marks=pytest.mark.full),
                        pytest.param("tests.test_repair:by_cube", 0.125, marks=pytest.mark.full)],
)
def test_with_fewer_replicas_the_batch_shrinks_from_the_next_step_on_and_the_learning_rate_with_it(how, factor, model, tmp_path):
    same = ["recovery.exact=false", f"recovery.on_resize={how}", "optimizer.schedule=constant", "optimizer.warmup_steps=0", "optimizer.lr=0.002", "sft.steps=12"]
    run = finish(config(SFT, tmp_path / "run", *BASE, *same, "layout.replicas=2", "layout.spares=0", f"model.path={model}",
                        f"faults=[{kill(5, 'reduce', 1)}]"), host=ForkedHost)
    assert_invariants(run, steps=12)
    sizes = {e.step: (len(e["samples"]), e["lr"]) for e in run.kind("begin")}
    assert sizes == {step: (32, 0.002) if step <= 5 else (16, pytest.approx(0.002 * factor)) for step in range(1, 13)}
    used = [s for e in run.kind("commit") for s in e["samples"]]
    assert len(used) == len(set(used)) == 5 * 32 + 7 * 16


# -- fifty deaths -------------------------------------------------------------------------------------------------------------------


def held_by(pid: int | str) -> dict[str, float]:
    sockets = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets += os.readlink(link).startswith("socket:")
    return {"descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": len(os.listdir(f"/proc/{pid}/task")), "sockets": sockets,
            "resident_mb": int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_fifty_deaths_in_one_run_with_one_spare_that_is_filled_up_leave_nothing_behind(model, tmp_path):
    kills, apart = 50, 4
    phases = ("compute", "exchange", "reduce", "vote", "apply")
    faults = [kill(4 + apart * i, phases[i % len(phases)], 1 + i % 2) for i in range(kills)]
    steps = 4 + apart * kills + 6
    measured: dict[str, list[dict[str, float]]] = {"controller": [], "survivor": []}

    class Measured(ForkedHost):
        def submit(self, worker, life, method, *args, **kwargs):
            if method == "train_step" and worker == "w0" and args[0] % apart == 3:  # just before the next kill
                measured["controller"].append(held_by("self"))
                measured["survivor"].append(held_by(self.infos["w0"].pid))
            return super().submit(worker, life, method, *args, **kwargs)

    run = finish(config(SFT, tmp_path / "run", *BASE, "layout.replicas=3", "layout.spares=1", f"model.path={model}", f"sft.steps={steps}", RESTART,
                        "recovery.min_replicas=3", f"faults=[{', '.join(faults)}]"), host=Measured)
    assert_invariants(run, steps=steps)
    assert len(run.kind("death")) == kills and len(run.kind("commit")[-1]["members"]) == 3
    assert by_position(run, 3) == undisturbed(model, "", f"sft.steps={steps}")
    for who, samples in measured.items():
        early, late = samples[8:18], samples[-10:]
        median = lambda rows, what: sorted(row[what] for row in rows)[len(rows) // 2]
        for what, slack in (("descriptors", 4), ("threads", 4), ("sockets", 4), ("resident_mb", 40 if who == "controller" else 24)):
            assert median(late, what) <= median(early, what) + slack, (who, what, [row[what] for row in samples])
    assert gone(run.pids)


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

        def add(self, spec, instead_of, avoid=()):
            self.asked = self.asked or time.monotonic()
            if time.monotonic() - self.asked < seconds:
                raise NoRoom("no room")
            super().add(spec, instead_of, avoid)

    return Full


@pytest.mark.full
def test_below_the_minimum_a_run_that_waits_goes_on_when_there_is_room_again(model, tmp_path):
    waits = ["recovery.min_replicas=2", "recovery.below_minimum=wait", RESTART, "recovery.restart_backoff_s=0.2"]
    run = finish(config(SFT, tmp_path / "run", *BASE, "sft.steps=24", "layout.replicas=2", "layout.spares=0", f"model.path={model}", *waits,
                        f"faults=[{kill(4, 'compute', 0)}]"), host=no_room_for(1.0))
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


def ends_as_it_comes_up() -> None:
    """A process that is started later connects, and ends before it is ready."""
    from everstep.cluster.worker.worker import Worker

    made = Worker.__init__

    def dying(self, config, worker_id, *args, **kwargs):
        if int(worker_id[1:]) >= 3:
            time.sleep(0.2)  # heard of
            os._exit(7)
        made(self, config, worker_id, *args, **kwargs)

    Worker.__init__ = dying  # type: ignore[method-assign]


def test_a_process_that_dies_of_its_start_counts_against_its_place_alone(model, tmp_path):
    """It is not another death to be repaired: so many tries and no more, and then the run is below its minimum, and ends."""
    conf = config(SFT, tmp_path / "run", *BASE, "sft.steps=4000", "layout.replicas=3", "layout.spares=0", path_of(model, ""), "recovery.restart_attempts=3",
                  "recovery.restart_backoff_s=0.1", "recovery.min_replicas=3", f"faults=[{kill(4, 'compute', 1)}]")
    with pytest.raises(BelowMinimum, match=r"recovery\.min_replicas=3"):
        finish(conf, host=lambda settings: ForkedHost(settings, prepare=ends_as_it_comes_up))
    told = read_events(tmp_path / "run" / "events")
    starts = {e.who for e in told if e.event == "process_start"}
    assert [e["attempt"] for e in told if e.event == "restart"] == [1, 2, 3] and len(starts) <= 6
    assert [e["error"] for e in told if e.event == "error" and e.who == "lead"].count("RestartsGivenUp") == 1


def test_with_no_attempts_nothing_is_started():
    starter = Starter(fails=0)
    Refill(starter, attempts=0, backoff_s=0.01).replace("w1")
    assert starter.starts == []
