"""Who is overdue, in a world of messages and invented times: no clock, no process."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    def all(self, step: int, phase: str, now: float, but: tuple[str, ...] = (), waits: bool = False) -> None:
        for member in self.members():
            for worker in member.workers:
                if worker not in but:
                    self.judge.entered(worker, step, phase, now, waits)

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


def test_who_hangs_at_a_later_point_than_the_others_reach_without_it_is_the_one_who_is_overdue():
    """0/0 dies; 1/0 hangs in reduce of the attempt that ended with it, and repeats so; 2/0 waits for it in the exchange of the next one."""
    s = Scene()
    s.all(2, "reduce", 1.0)
    s.judge.view(s.members()[1:], frozenset(), 2.0, anew=True)
    for phase in ("begin", "exchange"):
        s.judge.entered("2/0", 2, phase, 2.1)
    for now in range(3, 12):
        s.judge.entered("1/0", 2, "reduce", float(now))
        s.judge.entered("2/0", 2, "exchange", float(now), waits=True)
        assert s.accused(float(now)) == []
    (verdict,) = s.judge.overdue(13.5)
    assert verdict.worker == "1/0" and verdict.cause == "no progress: step 2, reduce of an attempt that has ended, 10.5 s after its peers left it"


def test_who_begins_the_next_attempt_is_judged_by_it_and_a_commit_ends_none():
    s = Scene()
    s.all(2, "exchange", 1.0, waits=True)
    s.judge.view(s.members()[1:], frozenset(), 2.0, anew=True)
    for worker in ("1/0", "2/0"):
        for phase in ("begin", "exchange"):
            s.judge.entered(worker, 2, phase, 2.5)
    s.judge.entered("1/0", 2, "reduce", 3.0)
    assert s.accused(13.0) == [] and s.accused(13.1) == ["2/0"]
    other = Scene()
    other.all(2, "vote", 1.0)
    other.all(2, "voted", 1.1)
    other.view(now=2.0)  # as a commit says it again
    other.judge.entered("0/0", 2, "idle", 2.1)
    other.judge.entered("1/0", 2, "idle", 2.1)
    assert other.judge.overdue(12.2)[0].cause.startswith("no progress: step 2, voted, 10.1 s")


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
