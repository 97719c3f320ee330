"""Who is overdue, in a world of messages and invented times: no clock, no process."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.recovery.progress import ORDER, Deadlines, Judge, overdue_results
from everstep.recovery.view import Member

LIMITS = Deadlines(progress_s=10.0, step_s=100.0, heal_s=50.0)


@dataclass
class Scene:
    """``replicas`` x ``ranks`` workers named ``REPLICA/RANK``, all of which have finished step 1 at time 0 (``warm``)."""

    replicas: int = 3
    ranks: int = 1
    warm: bool = True
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self.judge = Judge(LIMITS)
        self.view()
        if self.warm:
            self.all(1, "apply", 0.0)
            self.all(1, "idle", 0.0)

    def members(self, build: int = 0) -> list[Member]:
        return [Member(r, build, tuple(f"{r}/{k}" for k in range(self.ranks))) for r in range(self.replicas)]

    def view(self, healing: frozenset[int] = frozenset(), now: float = 0.0, members: list[Member] | None = None) -> None:
        self.judge.view(self.members() if members is None else members, healing, now)

    def all(self, step: int, phase: str, now: float, but: tuple[str, ...] = (), waits: bool = False, epoch: tuple[int, int] = (0, 0)) -> None:
        for member in self.members():
            for worker in member.workers:
                if worker not in but:
                    self.judge.entered(worker, step, phase, now, waits, epoch)

    def accused(self, now: float) -> list[str]:
        return sorted(o.worker for o in self.judge.overdue(now))


def test_a_rank_that_stays_in_compute_long_after_its_peers_is_overdue_and_not_a_moment_before():
    s = Scene()
    s.all(2, "compute", 1.0)
    s.all(2, "reduce", 4.0, but=("1/0",))
    assert s.accused(14.0) == [] and s.accused(14.1) == ["1/0"]
    (verdict,) = s.judge.overdue(15.0)
    assert verdict.cause == "no progress: step 2, compute, 11.0 s after its peers left it"


def test_heartbeats_repeat_where_a_rank_is_and_are_no_progress():
    s = Scene()
    s.all(2, "compute", 1.0)
    s.all(2, "reduce", 4.0, but=("1/0",))
    for now in range(5, 20):
        s.judge.entered("1/0", 2, "compute", float(now))
    assert s.accused(20.0) == ["1/0"]


def test_as_long_as_one_peer_is_there_too_nobody_is_overdue_until_the_phase_has_its_own_deadline():
    s = Scene()
    s.all(2, "compute", 1.0)
    s.all(2, "reduce", 4.0, but=("1/0", "2/0"))
    assert s.accused(100.9) == []
    assert s.accused(101.1) == ["1/0", "2/0"]  # two that hang together do not cover for each other for ever
    assert s.judge.stalled(101.1) == ""


def test_everybody_slow_evicts_nobody_and_in_the_end_is_said():
    s = Scene()
    s.all(2, "compute", 1.0)
    assert s.accused(1e6) == [] and s.judge.stalled(100.0) == ""
    assert "rank 0/0 is in compute for 101.0 s" in s.judge.stalled(102.0)


def test_the_first_step_of_a_life_may_be_slow():
    s = Scene(warm=False)
    s.all(1, "compute", 0.0)
    s.all(1, "reduce", 1.0, but=("1/0",))
    assert s.accused(100.0) == [] and s.accused(101.1) == ["1/0"]
    warm = Scene()
    joined = [Member(1, 1, ("spare",)) if m.replica == 1 else m for m in warm.members()]
    warm.view(now=5.0, members=joined)  # it has been idle, as a spare, since long ago
    warm.all(2, "reduce", 6.0, but=("1/0",))
    assert warm.accused(100.0) == []


def test_a_joiner_that_hangs_in_its_heal_is_not_given_the_time_of_a_first_step():
    s = Scene()
    s.view(frozenset({2}), members=[*s.members()[:2], *s.members(build=1)[2:]])
    for worker in ("0/0", "1/0"):
        s.judge.entered(worker, 2, "exchange", 1.0)
    s.judge.entered("2/0", 2, "heal", 1.0)
    assert not s.judge.overdue(50.0) and [o.worker for o in s.judge.overdue(52.0)] == ["2/0"]


def test_a_heal_has_its_own_deadline_for_the_joiner_and_for_the_source_that_streams_to_it():
    s = Scene()
    s.view(frozenset({2}))
    s.all(2, "compute", 1.0)
    s.judge.entered("2/0", 2, "heal", 1.0)
    s.judge.entered("1/0", 2, "reduce", 2.0)  # 0/0 is the source
    assert s.accused(51.0) == []
    assert s.accused(52.1) == ["0/0", "2/0"]


FIRST, SECOND, THIRD = (1, 1), (1, 2), (1, 3)  # epochs


def test_who_hangs_at_a_later_point_than_the_others_reach_without_it_is_the_one_who_is_overdue():
    """0/0 dies; 1/0 hangs in reduce of the attempt that ended with it, and repeats so; 2/0 waits for it in the exchange of the next one."""
    s = Scene()
    s.all(2, "reduce", 1.0, epoch=FIRST)
    s.judge.view(s.members()[1:], frozenset(), 2.0, SECOND)
    for phase in ("begin", "exchange"):
        s.judge.entered("2/0", 2, phase, 2.1, epoch=SECOND)
    for now in range(3, 12):
        s.judge.entered("1/0", 2, "reduce", float(now), epoch=FIRST)
        s.judge.entered("2/0", 2, "exchange", float(now), waits=True, epoch=SECOND)
        assert s.accused(float(now)) == []
    (verdict,) = s.judge.overdue(12.5)
    assert verdict.worker == "1/0" and verdict.cause == "no progress: step 2, reduce of an attempt that has ended, 10.4 s after its peers left it"


@pytest.mark.parametrize(("was", "says"), [("exchange", "reduce"), ("compute", "exchange")])
@pytest.mark.parametrize("inside", [True, False])
def test_what_a_rank_says_of_an_attempt_that_has_ended_is_no_progress_even_if_it_comes_after_the_view(was, says, inside):
    """0/0 dies. What 1/0 says next was meant before it heard of that; then it hangs, inside the old link's collective or not."""
    s = Scene()
    s.all(2, "compute", 0.5, epoch=FIRST)
    s.all(2, was, 1.0, epoch=FIRST)
    s.judge.view(s.members()[1:], frozenset(), 2.0, SECOND)
    for phase in ("begin", "exchange"):
        s.judge.entered("2/0", 2, phase, 2.1, epoch=SECOND)
    s.judge.entered("1/0", 2, says, 2.2, epoch=FIRST)
    for now in range(3, 13):
        s.judge.entered("1/0", 2, says, float(now), waits=inside, epoch=FIRST)
        s.judge.entered("2/0", 2, "exchange", float(now), waits=True, epoch=SECOND)
        assert s.accused(float(now)) == []
    assert s.accused(13.2) == ["1/0"]
    s.judge.entered("1/0", 2, "begin", 13.2, epoch=SECOND)  # it was slow to notice
    s.judge.entered("1/0", 2, "exchange", 13.3, waits=True, epoch=SECOND)
    assert s.accused(1000.0) == []


def test_who_hangs_in_the_vote_that_a_death_voided_and_several_who_hang_there_together():
    s = Scene()
    s.all(2, "vote", 1.0, epoch=FIRST)
    s.judge.view(s.members()[1:], frozenset(), 2.0, SECOND)
    for worker in ("1/0", "2/0"):
        s.judge.entered(worker, 2, "voted", 2.1, epoch=FIRST)  # too late
    s.judge.entered("2/0", 2, "exchange", 2.2, waits=True, epoch=SECOND)
    assert s.accused(12.1) == [] and s.accused(12.3) == ["1/0"]
    s = Scene()
    s.all(2, "reduce", 1.0, waits=True, epoch=FIRST)
    s.judge.view(s.members(), frozenset(), 90.0, SECOND)
    s.judge.entered("2/0", 2, "exchange", 90.1, waits=True, epoch=SECOND)
    assert s.accused(189.0) == []  # that they waited for somebody in the first attempt is not counted
    assert s.accused(190.1) == ["0/0", "1/0"]


def test_who_begins_the_next_attempt_is_judged_by_it_and_a_commit_ends_none():
    s = Scene()
    s.all(2, "exchange", 1.0, waits=True, epoch=FIRST)
    s.judge.view(s.members()[1:], frozenset(), 2.0, SECOND)
    for worker in ("1/0", "2/0"):
        for phase in ("begin", "exchange"):
            s.judge.entered(worker, 2, phase, 2.5, epoch=SECOND)
    s.judge.entered("1/0", 2, "reduce", 3.0, epoch=SECOND)
    assert s.accused(13.0) == [] and s.accused(13.1) == ["2/0"]
    other = Scene()
    other.all(2, "vote", 1.0)
    other.all(2, "voted", 1.1)
    other.view(now=2.0)  # as a commit says it again
    other.judge.entered("0/0", 2, "idle", 2.1)
    other.judge.entered("1/0", 2, "idle", 2.1)
    assert other.judge.overdue(12.2)[0].cause.startswith("no progress: step 2, voted, 10.1 s")


def test_who_computes_under_an_older_view_what_its_peers_compute_under_a_newer_one_is_not_behind():
    """It began before the death between two steps, and they after it. Views pass it by until it is done."""
    s = Scene()
    s.judge.entered("1/0", 2, "compute", 1.0, epoch=FIRST)
    s.judge.view(s.members()[1:], frozenset(), 2.0, SECOND)
    s.judge.entered("2/0", 2, "compute", 3.0, epoch=SECOND)
    assert s.accused(90.0) == []
    s.judge.entered("2/0", 2, "exchange", 90.0, epoch=SECOND)
    s.judge.view(s.members()[1:], frozenset(), 95.0, THIRD)
    for phase in ("begin", "exchange"):
        s.judge.entered("2/0", 2, phase, 95.1, epoch=THIRD)
    assert s.accused(100.0) == [] and s.accused(100.1) == ["1/0"]  # from when it first had nothing to compute
    s.judge.entered("1/0", 2, "exchange", 100.1, epoch=FIRST)
    assert s.accused(110.0) == []
    s.judge.entered("2/0", 2, "salvage", 110.0, epoch=THIRD)
    s.judge.entered("1/0", 2, "salvage", 110.0, epoch=THIRD)
    s.judge.entered("2/0", 2, "exchange", 115.0, waits=True, epoch=THIRD)
    assert s.accused(124.0) == [] and s.accused(125.1) == ["1/0"]


def test_after_a_rollback_who_does_not_begin_the_older_step_is_the_one_who_is_overdue():
    s = Scene(replicas=2, warm=False)
    s.all(9, "idle", 1.0, epoch=FIRST)
    s.judge.view(s.members(build=1), frozenset(), 2.0, SECOND)
    s.judge.entered("1/0", 4, "exchange", 3.0, waits=True, epoch=SECOND)
    assert s.accused(102.9) == [] and s.accused(103.1) == ["0/0"]


def test_between_steps_who_joined_last_is_not_behind_however_long_that_takes():
    s = Scene()
    joined = [Member(1, 1, ("spare",)) if m.replica == 1 else m for m in s.members()]
    s.view(frozenset({1}), 5.0, joined)
    assert s.judge.overdue(1000.0) == []
    for phase in ("begin", "compute"):
        s.judge.entered("0/0", 2, phase, 1000.0, epoch=SECOND)
        s.judge.entered("2/0", 2, phase, 1000.0, epoch=SECOND)
    assert s.judge.overdue(1100.0) == []  # it was called with them
    assert [o.worker for o in s.judge.overdue(1100.1)] == ["spare"]


@pytest.mark.parametrize("phase", ["reduce", "exchange", "voted", "compute"])
def test_a_single_member_that_hangs_ends_the_run(phase):
    """It has no peers, and nobody waits for it in a collective."""
    s = Scene()
    s.all(2, phase, 1.0, waits=phase in ("reduce", "exchange"), epoch=FIRST)
    s.judge.view(s.members()[1:2], frozenset(), 2.0, SECOND)
    for now in range(3, 100):
        s.judge.entered("1/0", 2, phase if phase != "voted" else "vote", float(now), waits=phase in ("reduce", "exchange"), epoch=FIRST)
        assert s.accused(float(now)) == [] and s.judge.stalled(float(now)) == ""
    assert s.judge.stalled(102.1).startswith("rank 1/0 is in ") and "of an attempt that has ended for 100.1 s" in s.judge.stalled(102.1)


def test_a_single_member_that_waits_in_a_step_ends_the_run_and_one_that_waits_for_others_to_join_does_not():
    s = Scene(replicas=1, ranks=2)
    s.all(2, "exchange", 1.0, waits=True, epoch=FIRST)
    assert s.judge.stalled(101.0) == "" and "exchanging for 100.1 s" in s.judge.stalled(101.1)
    for phase in ("begin", "voted"):
        s.all(2, phase, 200.0, waits=True, epoch=FIRST)
        assert s.judge.stalled(1e6) == ""
    joins = [*s.members(), Member(1, 0, ("1/0", "1/1"))]
    s.judge.view(joins, frozenset({1}), 200.0, SECOND)
    s.all(2, "exchange", 201.0, waits=True, epoch=SECOND)
    assert s.judge.stalled(1e6) == ""  # for the one that heals
    s.all(2, "reduce", 201.0, epoch=SECOND)
    assert s.judge.stalled(301.0) == "" and s.judge.stalled(301.1)


# -- over simulated time: survivors form a link that one of them never comes to -------------------------------------------------------

DEFAULTS = Deadlines(progress_s=120.0, step_s=600.0, heal_s=300.0)
LINK_S, TICK_S = 60.0, 0.5


def simulate(hangs: str = "", computes_s: dict[str, float] | None = None, until_s: float = 400.0) -> tuple[list[tuple[str, float]], int]:
    """Four replicas compute step 2; 3/0 dies at 5 s. The others form their link when all have come to the exchange of one epoch, and give
    it up after LINK_S, which makes a new view. ``hangs``: 0/0 does, in that phase of the first attempt (idle: before it); ``computes_s``: for how long.
    Returns who was accused and when, and how many views there were."""
    judge, members = Judge(DEFAULTS), [Member(r, 0, (f"{r}/0",)) for r in range(4)]
    judge.view(members, frozenset(), 0.0, FIRST)
    takes = {m.workers[0]: 4.0 for m in members} | (computes_s or {})
    at: dict[str, tuple[str, tuple[int, int], float]] = {}  # phase, epoch, since
    for worker in takes:
        for phase in ("apply", "idle"):
            judge.entered(worker, 1, phase, 0.0, epoch=FIRST)
        at[worker] = "compute", FIRST, 0.0
    if hangs == "idle":
        at["0/0"] = "idle", FIRST, 0.0
    epoch, now, views, accused = FIRST, 0.0, 0, []

    def renew() -> None:
        nonlocal epoch, views
        epoch, views = (1, epoch[1] + 1), views + 1
        judge.view(members, frozenset(), now, epoch)

    while now < until_s and any(phase != "idle" for phase, _, _ in at.values()):
        now += TICK_S
        if now == 5.0:
            members, at = members[:3], {w: where for w, where in at.items() if w != "3/0"}
            renew()
        for worker, (phase, mine, since) in list(at.items()):
            if phase == "compute" and now - since >= takes[worker] and not (hangs == "compute" and worker == "0/0"):
                at[worker] = "exchange", mine, now
            elif phase == "exchange" and mine < epoch and not (hangs == "exchange" and worker == "0/0" and mine == FIRST):
                at[worker] = "begin", epoch, now
            elif phase == "begin":
                at[worker] = "exchange", mine, now
        waiting = [mine for phase, mine, _ in at.values() if phase == "exchange"]
        if waiting.count(epoch) == len(members) and len(members) == 3:
            at = {worker: ("idle", epoch, now) for worker in at}
        elif any(phase == "exchange" and mine == epoch and mine > FIRST and now - since >= LINK_S for phase, mine, since in at.values()):
            renew()
        for worker, (phase, mine, _) in at.items():
            judge.entered(worker, 1 if phase == hangs == "idle" else 2, phase, now, waits=phase == "exchange" and hangs != "exchange", epoch=mine)
        found = [o.worker for o in judge.overdue(now)]
        if found:
            return [(worker, now) for worker in found], views
        assert judge.stalled(now) == ""
    return accused, views


@pytest.mark.parametrize("phase", ["idle", "compute", "exchange"])
def test_a_rank_that_hangs_while_survivors_form_a_link_again_and_again_is_found_as_soon_as_any_other(phase):
    ((worker, when),), views = simulate(phase)
    assert worker == "0/0" and views >= 2
    since = {"idle": 0.5, "compute": 4.0, "exchange": 5.0}[phase]  # when its peers first left that
    assert since + DEFAULTS.progress_s <= when <= since + DEFAULTS.progress_s + 2.0


@pytest.mark.parametrize("seconds", [5.0, 30.0, 63.0, 100.0, 120.0])
def test_a_rank_that_computes_through_several_views_has_all_the_time_that_it_has_in_one(seconds):
    accused, views = simulate(computes_s={"0/0": 4.0 + seconds})
    assert accused == [] and views == 1 + int((seconds - 1.5) // LINK_S)
    accused, views = simulate(computes_s={"0/0": 4.0 + seconds, "1/0": 4.0 + seconds - 60.0, "2/0": 4.0 + seconds - 100.0})
    assert accused == []


def test_if_one_of_two_that_compute_through_views_hangs_the_other_one_is_not_taken_for_it():
    accused, _ = simulate("compute", {"1/0": 90.0, "2/0": 20.0})
    assert [worker for worker, _ in accused] == ["0/0"] and 90.0 + DEFAULTS.progress_s <= accused[0][1] <= 92.0 + DEFAULTS.progress_s


def test_what_a_joiner_without_slots_has_done_says_nothing_of_those_that_compute():
    s = Scene(replicas=2)
    s.view(frozenset({1}))
    s.all(2, "compute", 1.0)
    s.judge.entered("1/0", 2, "reduce", 1.1)
    assert s.accused(1000.0) == []


def test_hung_before_the_collective_and_hung_before_the_vote():
    """Its peers cannot leave either: they are seen inside the collective, and have voted."""
    s = Scene()
    s.all(2, "reduce", 1.0)
    s.all(2, "reduce", 1.5, but=("1/0",), waits=True)
    assert s.accused(12.0) == ["1/0"]
    s = Scene()
    s.all(2, "vote", 1.0)
    s.all(2, "voted", 1.5, but=("1/0",))
    s.all(2, "vote", 2.0)  # heartbeats repeat the phase
    assert s.accused(12.0) == ["1/0"]


def test_idle_while_the_others_are_in_the_next_step_is_overdue_and_a_call_from_outside_is_not():
    s = Scene()
    s.all(2, "reduce", 1.0, but=("1/0",), waits=True)
    assert s.accused(12.0) == ["1/0"]
    s.judge.entered("1/0", 2, "rollout", 1.0)
    assert s.accused(12.0) == []


def test_of_a_replica_only_the_rank_that_holds_the_others_up_is_accused():
    s = Scene(replicas=2, ranks=2)
    s.all(2, "compute", 1.0, waits=True)
    s.judge.entered("1/1", 2, "compute", 1.0, waits=False)
    s.judge.entered("0/0", 2, "reduce", 2.0, waits=True)
    s.judge.entered("0/1", 2, "reduce", 2.0, waits=True)
    assert s.accused(13.0) == ["1/1"]  # 1/0 waits for it in a collective
    s.judge.entered("1/0", 2, "compute", 1.0, waits=False)
    assert s.accused(13.0) == ["1/0", "1/1"]  # nobody can tell
    s.judge.entered("1/1", 2, "reduce", 3.0)
    assert s.accused(15.0) == ["1/0"]  # the earlier one


def test_a_redo_sends_the_peers_back_and_time_counts_anew():
    s = Scene()
    s.all(2, "compute", 1.0)
    s.all(2, "reduce", 4.0, but=("1/0",))
    s.all(2, "begin", 9.0, but=("1/0",))
    s.all(2, "compute", 9.0, but=("1/0",))
    assert s.accused(30.0) == []
    s.all(2, "reduce", 31.0, but=("1/0",))
    assert s.accused(40.9) == [] and s.accused(41.1) == ["1/0"]


def test_a_pause_of_the_observer_is_nobodys_fault():
    s = Scene()
    s.all(2, "compute", 1.0)
    s.all(2, "reduce", 4.0, but=("1/0",))
    s.judge.excuse(100.0)
    assert s.accused(110.0) == [] and s.accused(114.2) == ["1/0"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 9.9)), min_size=1, max_size=60))
def test_nobody_who_moves_on_within_the_limit_is_ever_accused(moves):
    """Ranks go through their phases in lockstep of a step, each in any order and at any pace below the limit."""
    s = Scene()
    at, entered, now = [0, 0, 0], [0.0, 0.0, 0.0], 0.0
    phases = [(2 + i // len(ORDER), ORDER[i % len(ORDER)]) for i in range(len(ORDER) * 60)]
    for who, pause in moves:
        if at[who] > min(at):
            continue  # the transaction lets nobody run ahead
        soonest = min(entered[i] for i in range(3) if at[i] == min(at)) + 9.9
        now = min(now + pause, soonest)
        assert s.accused(now) == []
        step, phase = phases[at[who]]
        s.judge.entered(f"{who}/0", step, phase, now)
        at[who], entered[who] = at[who] + 1, now


def test_a_result_is_overdue_when_all_peers_of_the_position_gave_theirs_long_ago():
    back = {"0/0": ((0, 0), 1.0), "2/0": ((2, 0), 3.0), "0/1": ((0, 1), 1.0)}
    owing = {"1/0": (1, 0), "1/1": (1, 1), "2/1": (2, 1)}
    assert overdue_results(owing, back, 13.1, 10.0) == ["1/0"]
    assert overdue_results(owing, back, 13.0, 10.0) == []
    assert overdue_results({"1/0": (1, 0)}, {}, 1e9, 10.0) == []  # a call to one replica alone has no peers
