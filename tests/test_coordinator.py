"""The coordinator's decisions, without processes: named interleavings of docs/protocol.md, and a random exploration of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everstep.errors import BadInput, DeadlineExceeded, InvariantViolated, NonFinite
from everstep.recovery.commitlog import CommitLog, read
from everstep.recovery.coordinator import MAX_LINK_FAILURES, MAX_MISMATCHES, Coordinator, Mode, State
from everstep.recovery.view import Epoch, Kind, Member, Outcome, Record, Rerun, Vote, assign


def member(replica: int, ranks: int = 1, build: int = 0) -> Member:
    return Member(replica, build, tuple(f"{replica}.{build}.{rank}" for rank in range(ranks)))


def vote(worker: str, c: Coordinator, **changes: object) -> Vote:
    fields: dict = dict(worker=worker, step=c.committed + 1, epoch=c.view.epoch, digest=hash(worker.split(".")[2]), divisor=8.0,
                        grad_norm_bits=5, finite=True, slots=(0, 1))
    return Vote(**(fields | changes))


def opened(replicas: int = 2, ranks: int = 1, minimum: int = 1, mode: Mode = Mode.SALVAGE, standbys: int = 0) -> Coordinator:
    c = Coordinator(1, 0, minimum, mode, standbys)
    c.open([member(r, ranks) for r in range(replicas)])
    c.begin(1, (("s0",), ("s1",)))
    return c


def workers(c: Coordinator) -> list[str]:
    return sorted(c.view.workers)


def commit_step(c: Coordinator) -> Record:
    records = [r for w in workers(c) for r in c.vote(vote(w, c))]
    (record,) = [r for r in records if r.kind is Kind.COMMIT]
    return record


def test_a_step_commits_when_the_last_rank_has_voted_and_not_before():
    c = opened(2, ranks=2)
    *first, last = workers(c)
    assert [r for w in first for r in c.vote(vote(w, c))] == []
    (record,) = c.vote(vote(last, c))
    assert (record.kind, record.step, record.epoch, record.samples) == (Kind.COMMIT, 1, Epoch(1, 1), ("s0", "s1"))
    assert record.divisor == 8.0 and record.view.committed == 1 and c.votes == {}


def test_votes_of_another_epoch_step_or_stranger_do_not_count():
    c = opened(2)
    a, b = workers(c)
    assert c.vote(vote(a, c)) == []
    for stray in (vote(b, c, epoch=Epoch(1, 0)), vote(b, c, epoch=Epoch(0, 99)), vote(b, c, step=2), vote("7.0.0", c)):
        assert c.vote(stray) == []
    assert c.committed == 0


def test_death_after_every_survivor_voted_commits_in_the_old_epoch_and_then_publishes_the_new_one():
    """Rule 2: otherwise one survivor waits for a commit while another waits on the next link."""
    c = opened(3)
    a, b, dead = workers(c)
    c.vote(vote(a, c))
    c.vote(vote(b, c))
    epoch = c.view.epoch
    (record,) = c.death(dead, "killed")
    assert (record.kind, record.step, record.epoch) == (Kind.COMMIT, 1, epoch)
    assert record.view.epoch > epoch and record.view.replicas == (0, 1)


def test_death_before_a_survivor_voted_voids_the_epoch_and_late_votes_are_ignored():
    c = opened(3)
    a, b, dead = workers(c)
    late = vote(b, c)
    c.vote(vote(a, c))
    (record,) = c.death(dead, "killed")
    assert record.kind is Kind.VIEW and record.view.committed == 0
    assert c.vote(late) == [] and c.vote(vote(a, c)) == []
    (commit,) = c.vote(vote(b, c))
    assert commit.kind is Kind.COMMIT and commit.epoch == record.view.epoch


def test_one_dead_rank_takes_its_whole_replica_out_of_the_view():
    c = opened(2, ranks=2)
    (record,) = c.death("1.0.1", "killed")
    assert record.view.replicas == (0,) and "1.0.0" not in record.view.workers
    assert c.death("1.0.0", "killed too") == [] and c.death("1.0.1", "again") == []


@pytest.mark.parametrize("odd", [{"digest": 1}, {"divisor": 9.0}, {"grad_norm_bits": 6}, {"slots": (0, 0)}])
def test_unequal_totals_void_the_attempt_and_end_the_run_if_they_persist(odd):
    c = opened(2)
    a, b = workers(c)
    for _ in range(MAX_MISMATCHES - 1):
        before = c.view.epoch
        c.vote(vote(a, c))
        (record,) = c.vote(vote(b, c, **odd))
        assert record.kind is Kind.VIEW and record.view.epoch > before and record.view.replicas == (0, 1)
    c.vote(vote(a, c))
    with pytest.raises(InvariantViolated, match="totals differ"):
        c.vote(vote(b, c, **odd))
    assert c.committed == 0


def test_digests_may_differ_between_positions_but_not_between_replicas():
    c = opened(2, ranks=2)
    assert commit_step(c).outcome is Outcome.APPLY  # digests are hash(rank): they differ between ranks 0 and 1


def test_a_non_finite_total_is_computed_once_more_and_then_skipped_with_its_samples():
    c = opened(2)
    for w in workers(c):
        records = c.vote(vote(w, c, finite=False))
    assert [r.kind for r in records] == [Kind.VIEW] and c.committed == 0
    for w in workers(c):
        records = c.vote(vote(w, c, finite=False))
    assert [(r.kind, r.outcome, r.samples) for r in records] == [(Kind.COMMIT, Outcome.SKIP, ("s0", "s1"))]
    c.begin(2, (("s2",),))
    assert commit_step(c).outcome is Outcome.APPLY


def test_a_step_of_which_no_token_counts_is_skipped_at_once_and_stops_nothing():
    c = Coordinator(1, stop_at_non_finite=True)
    c.open([member(0), member(1)])
    c.begin(1, (("s0",), ("s1",)))
    for w in workers(c):
        records = c.vote(vote(w, c, finite=False, divisor=0.0))
    assert [(r.kind, r.outcome, r.samples, r.cause) for r in records] == [(Kind.COMMIT, Outcome.SKIP, ("s0", "s1"), "no token of its samples counts")]
    assert c.take_findings() == []


def test_a_transient_non_finite_total_costs_one_attempt():
    c = opened(1)
    (w,) = workers(c)
    c.vote(vote(w, c, finite=False, spoiled=(1,)))
    assert commit_step(c).outcome is Outcome.APPLY
    assert [(f.verdict, f.slots, f.ranks, f.samples) for f in c.take_findings()] == [(v, (1,), ("0/0",), ("s1",)) for v in ("again", "transient")]


def test_what_was_not_finite_is_computed_by_another_replica_and_who_is_to_blame_is_told():
    c = opened(3, ranks=2)
    share = lambda: {m.replica: c.view.deal.share(m, 3) for m in c.view.members}
    assert share() == {0: (0,), 1: (1,), 2: (2,)}
    for w in workers(c):
        records = c.vote(vote(w, c, finite=False, spoiled=(1,) if w == "1.0.1" else ()))
    assert "slots [1] (samples s1), computed by ranks 1/1" in records[0].cause
    assert share() == {0: (1,), 1: (2,), 2: (0,)}
    for w in workers(c):
        records = c.vote(vote(w, c, finite=False, spoiled=(1,) if w == "0.0.0" else ()))
    assert records[0].outcome is Outcome.SKIP
    assert [(f.verdict, f.ranks) for f in c.take_findings()] == [("again", ("1/1",)), ("data", ("0/0",))]
    c.begin(2, (("s2",), ("s3",), ("s4",)))
    assert share() == {0: (0,), 1: (1,), 2: (2,)}  # as usual again


def test_a_gradient_that_two_replicas_disagree_about_is_never_committed():
    """It is computed once more; who is alone is found out, and neither its votes nor its death commit the total it is part of."""
    c = opened(3)
    said = {"0.0.0": (Rerun(0, 7, 1.0),), "1.0.0": (Rerun(0, 9, 1.5), Rerun(1, 4, 1.0)), "2.0.0": (Rerun(1, 4, 1.0),)}
    for w in workers(c):
        records = c.vote(vote(w, c, reruns=said[w]))
    assert [r.kind for r in records] == [Kind.VIEW] and "slot 0 by replicas [0, 1]; computed once more" in records[0].cause
    again = {"0.0.0": (Rerun(0, 7, 1.0),), "1.0.0": (), "2.0.0": (Rerun(0, 7, 1.0),)}
    for w in workers(c):
        records = c.vote(vote(w, c, reruns=again[w]))
    assert records == [] and c.committed == 0, "it waits until the one that is wrong is gone"
    assert [(x.worker, x.replica, x.rank) for x in c.reruns.take_culprits()] == [("1.0.0", 1, 0)]
    (record, *_) = c.death("1.0.0", "corruption")
    assert record.kind is Kind.VIEW and record.view.replicas == (0, 2) and c.committed == 0, "its slots are computed by the others"
    for w in workers(c):
        records = c.vote(vote(w, c, reruns=again[w]))
    assert [r.kind for r in records][:1] == [Kind.COMMIT] and c.committed == 1
    c.begin(2, (("s2",), ("s3",)))
    assert commit_step(c).step == 2


def test_a_death_does_not_commit_what_two_replicas_disagree_about():
    c = opened(3)
    c.vote(vote("0.0.0", c, reruns=(Rerun(0, 7, 1.0),)))
    c.vote(vote("1.0.0", c, reruns=(Rerun(0, 9, 1.0),)))
    assert c.death("2.0.0", "its cable")[0].kind is Kind.VIEW and c.committed == 0


def test_a_step_that_is_not_finite_twice_stops_the_run_if_that_is_asked_for():
    c = Coordinator(1, stop_at_non_finite=True)
    c.open([member(0)])
    c.begin(1, (("s0",), ("s1",)))
    c.vote(vote("0.0.0", c, finite=False, spoiled=(0,)))
    with pytest.raises(NonFinite, match=r"step 1: .* for the second time: slots \[0\] \(samples s0\), computed by ranks 0/0"):
        c.vote(vote("0.0.0", c, finite=False, spoiled=(0,)))
    assert c.committed == 0 and [f.verdict for f in c.take_findings()] == ["again", "unclear"]


def test_a_slot_that_killed_its_replica_before_a_rollback_is_known_after_it():
    c = Coordinator(1, quarantine_after=2)
    c.open([member(0)])
    for build in range(2):
        for step in (1, 2):
            c.begin(step, (("s0",), ("s1",))) if step > c.committed else None
            if step == 1:
                commit_step(c)
        assert c.view.quarantined == ()
        c.death(f"0.{build}.0", "poison", computing=(1,))
        assert c.state is State.LOST
        c.rollback(0, [member(0, build=build + 1)], "copy", {})
    assert c.view.quarantined == ()  # of step 1
    c.begin(1, (("s0",), ("s1",)))
    assert commit_step(c).view.quarantined == (1,)  # of step 2
    c.begin(2, (("s2",), ("s3",)))
    records = c.vote(vote("0.2.0", c, slots=(0,)))
    assert records[0].samples == ("s2",) and records[0].dropped == ("s3",) and records[0].view.quarantined == ()


def test_a_joiner_enters_with_a_commit_once_every_rank_acknowledged_its_link():
    c = opened(2)
    c.death("1.0.0", "killed")
    joiner = member(1, build=1)
    (build,) = c.joiner(joiner)
    assert build.kind is Kind.BUILD and build.view.replicas == (0, 1)
    assert commit_step(c).view.replicas == (0,)  # not ready: the survivor goes on alone
    c.begin(2, ())
    link = build.view.link_id
    assert c.link_ready("0.0.0", link) == []
    assert commit_step(c).view.replicas == (0,)
    c.begin(3, ())
    c.link_ready("1.1.0", link)
    record = commit_step(c)
    assert record.view.healing == {1} and record.view.link_id == link and record.view.link_ready
    assert record.view.contributors == (0,)
    c.begin(4, ())
    assert c.vote(vote("0.0.0", c)) == []  # the joiner votes too: it must hold the state before the next commit
    (record,) = c.vote(vote("1.1.0", c))
    assert record.view.healing == frozenset() and record.view.contributors == (0, 1)


def test_acknowledging_another_link_does_not_let_a_joiner_in():
    c = opened(2)
    c.death("1.0.0", "killed")
    (build,) = c.joiner(member(1, build=1))
    for w in ("0.0.0", "1.1.0"):
        c.link_ready(w, build.view.link_id + "x")
    assert commit_step(c).view.replicas == (0,)


def test_a_death_during_a_build_orders_a_new_one_under_a_new_name():
    c = opened(3)
    c.death("2.0.0", "killed")
    (first,) = c.joiner(member(2, build=1))
    records = c.death("1.0.0", "killed")
    (second,) = [r for r in records if r.kind is Kind.BUILD]
    assert second.view.replicas == (0, 2) and second.view.link_id != first.view.link_id
    c.link_ready("0.0.0", first.view.link_id)
    c.link_ready("2.1.0", first.view.link_id)
    assert commit_step(c).view.replicas == (0,)


def test_a_joiner_that_dies_is_forgotten_and_links_are_built_one_at_a_time():
    c = opened(3)
    c.death("1.0.0", "killed")
    c.death("2.0.0", "killed")
    assert [r.kind for r in c.joiner(member(1, build=1))] == [Kind.BUILD]
    assert c.joiner(member(2, build=1)) == []
    (build,) = c.death("1.1.0", "killed while joining")
    assert build.kind is Kind.BUILD and build.view.replicas == (0, 2)


def test_a_build_that_nobody_finishes_is_ordered_again():
    c = opened(2)
    c.death("1.0.0", "killed")
    (first,) = c.joiner(member(1, build=1))
    (second,) = c.build_expired()
    assert second.view.link_id != first.view.link_id


def test_the_death_of_the_last_contributor_loses_the_state_even_if_a_joiner_lives():
    c = opened(2)
    c.death("1.0.0", "killed")
    (build,) = c.joiner(member(1, build=1))
    for w in ("0.0.0", "1.1.0"):
        c.link_ready(w, build.view.link_id)
    commit_step(c)
    assert c.view.healing == {1}
    c.begin(2, ())
    c.death("0.0.0", "the only source is gone")
    assert c.state is State.LOST
    assert c.vote(vote("1.1.0", c)) == []


def test_below_the_minimum_nothing_commits_until_a_joiner_is_ready():
    c = opened(2, minimum=2)
    c.death("1.0.0", "killed")
    assert c.state is State.HELD
    assert c.vote(vote("0.0.0", c)) == []
    (build,) = c.joiner(member(1, build=1))
    c.link_ready("0.0.0", build.view.link_id)
    (record,) = c.link_ready("1.1.0", build.view.link_id)
    assert record.kind is Kind.VIEW and record.view.healing == {1} and c.state is State.VOTING
    assert commit_step(c).view.contributors == (0, 1)


def test_a_failed_link_without_a_death_gives_a_new_epoch_and_evicts_nobody():
    c = opened(2)
    old = c.view
    (record,) = c.link_failed(old.link_id, "flap")
    assert record.view.members == old.members and record.view.epoch > old.epoch and record.view.link_id != old.link_id
    assert c.link_failed(old.link_id, "the other rank tells it too") == []


def test_a_link_that_keeps_breaking_with_everybody_alive_ends_the_run():
    c = opened(2)
    for _ in range(MAX_LINK_FAILURES - 1):
        assert c.link_failed(c.view.link_id, "flap")
    with pytest.raises(DeadlineExceeded, match=r"replicas \[0, 1\] broke 10 times"):
        c.link_failed(c.view.link_id, "flap")
    c = opened(2)
    for step in range(2, 2 * MAX_LINK_FAILURES):  # now and then is no reason
        assert c.link_failed(c.view.link_id, "flap")
        commit_step(c)
        c.begin(step, ())


def test_below_the_minimum_a_death_commits_nothing_either():
    """Two of four are left, three are needed: when one of them dies, the other's vote alone must not commit."""
    c = opened(4, minimum=3)
    for worker in ("3.0.0", "2.0.0"):
        c.death(worker, "killed")
    assert c.state is State.HELD
    c.vote(vote("0.0.0", c))
    (record,) = c.death("1.0.0", "killed")
    assert record.kind is Kind.VIEW and c.committed == 0


def test_totals_without_a_number_are_skipped_not_compared():
    c = opened(2)
    for _ in range(2):
        for w in workers(c):
            records = c.vote(vote(w, c, finite=False, divisor=float("nan"), digest=hash(w)))
    assert [r.outcome for r in records] == [Outcome.SKIP]


def test_steps_begin_in_order():
    c = opened(1)
    with pytest.raises(InvariantViolated, match="step 3"):
        c.begin(3, ())


def test_a_checkpoint_can_be_entered_only_before_the_first_step():
    c = Coordinator(1)
    c.open([member(0)])
    (record,) = c.restart_at(40)
    assert record.view.committed == 40
    c.begin(41, ())
    with pytest.raises(InvariantViolated):
        c.restart_at(10)


def acknowledge(c: Coordinator) -> list[Record]:
    """Every rank concerned builds the link that is in construction."""
    assert c.build is not None
    build = c.build
    return [r for w in sorted(w for m in build.members for w in m.workers) for r in c.link_ready(w, build.link_id)]


def test_commits_deal_the_next_step_and_a_death_between_steps_does_not_deal_it_anew():
    """Rule 1: otherwise A begins under the old view and B under the new one, and both hold the same slots."""
    c = opened(3)
    commit = commit_step(c)
    assert commit.view.deal.replicas == (0, 1, 2)
    c.begin(2, ())
    (view,) = c.death("1.0.0", "killed")
    assert view.view.deal == commit.view.deal and view.view.replicas == (0, 2)


@pytest.mark.parametrize(("mode", "dealt"), [(Mode.SALVAGE, (0, 1, 2)), (Mode.RETRY, (0, 2)), (Mode.WAIT, ())])
def test_what_a_death_leaves_of_the_deal(mode, dealt):
    c = opened(3, mode=mode)
    before = c.view.deal
    (record,) = c.death("1.0.0", "killed")
    assert record.view.deal.replicas == dealt
    assert (record.view.deal.number > before.number) == (mode is not Mode.SALVAGE)


def test_waiting_for_a_spare_deals_to_all_again_the_joiner_included():
    c = opened(2, mode=Mode.WAIT)
    c.death("1.0.0", "killed")
    assert c.state is State.HELD and c.vote(vote("0.0.0", c)) == []
    c.joiner(member(1, build=1))
    (record,) = acknowledge(c)
    assert record.view.deal.replicas == (0, 1) and record.view.healing == {1} and c.state is State.VOTING
    assert commit_step(c).view.deal.replicas == (0, 1)


@pytest.mark.parametrize("what", ["mismatch", "not finite", "doubled slot"])
def test_contradictions_empty_every_ledger(what):
    c = opened(2)
    before = c.view.deal.number
    if what == "doubled slot":
        (record,) = c.link_failed(c.view.link_id, "slot 1 is held twice", void=True)
    else:
        a, b = workers(c)
        c.vote(vote(a, c, finite=what == "mismatch"))
        (record,) = c.vote(vote(b, c, **({"digest": 3} if what == "mismatch" else {"finite": False})))
    assert record.kind is Kind.VIEW and record.view.deal.number == before + 1 and record.view.deal.replicas == (0, 1)


def test_a_flapping_link_leaves_the_ledgers_alone():
    c = opened(2)
    (record,) = c.link_failed(c.view.link_id, "flap")
    assert record.view.deal.number == 1


def test_standbys_are_built_one_by_one_for_each_that_may_die_and_a_death_takes_its_own():
    c = Coordinator(1, 0, 1, Mode.SALVAGE, standbys_up_to=3)
    _, build = c.open([member(r) for r in range(3)])
    c.begin(1, ())
    built = {}
    for _ in range(3):
        built[build.view.replicas] = build.view.link_id
        more = acknowledge(c)
        build = more[0] if more else None
    assert build is None and sorted(built) == [(0, 1), (0, 2), (1, 2)]
    commit = commit_step(c)
    assert set(commit.view.links) == set(built.values())
    c.begin(2, ())
    (view,) = c.death("1.0.0", "killed")
    assert view.view.link_id == built[0, 2] and view.view.link_ready and view.view.links == ()
    (flap,) = c.link_failed(view.view.link_id, "flap")
    assert flap.view.link_id != built[0, 2] and not flap.view.link_ready  # never used again


def test_a_standby_that_one_rank_never_acknowledged_is_not_named():
    c = Coordinator(1, 0, 1, Mode.SALVAGE, standbys_up_to=3)
    _, build = c.open([member(r) for r in range(3)])
    c.begin(1, ())
    c.link_ready("0.0.0", build.view.link_id)  # of (1, 2): not one of its members
    c.link_ready("1.0.0", build.view.link_id)
    records = c.death("0.0.0", "killed")
    assert not records[0].view.link_ready and records[0].view.replicas == (1, 2)


def test_a_standby_that_is_not_finished_in_time_is_given_up_and_the_next_one_is_built():
    c = Coordinator(1, 0, 1, Mode.SALVAGE, standbys_up_to=3)
    _, first = c.open([member(r) for r in range(3)])
    (second,) = c.build_expired()
    assert second.view.replicas != first.view.replicas
    acknowledge(c)
    acknowledge(c)
    assert c.build is None and len(c.standbys) == 2


def test_a_joiner_comes_before_standbys_and_the_link_without_it_serves_if_it_dies():
    c = Coordinator(1, 0, 1, Mode.SALVAGE, standbys_up_to=3)
    c.open([member(r) for r in range(3)])
    c.begin(1, ())
    c.death("2.0.0", "killed")
    (build,) = c.joiner(member(2, build=1))
    assert build.view.replicas == (0, 1, 2)
    acknowledge(c)
    before = c.view.link_id
    record = commit_step(c)
    assert record.view.healing == {2} and before in record.view.links
    c.begin(2, ())
    records = c.death("2.1.0", "killed while it heals")
    assert records[0].view.link_id == before and records[0].view.link_ready


@given(slots=st.integers(1, 64), members=st.sets(st.integers(0, 9), min_size=1, max_size=6))
def test_every_slot_has_exactly_one_owner_and_shares_differ_by_at_most_one(slots, members):
    shares = assign(range(slots), sorted(members))
    assert sorted(s for share in shares.values() for s in share) == list(range(slots))
    sizes = [len(share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 1 and shares.keys() == members


EVENTS = st.lists(
    st.tuples(st.sampled_from(["vote", "vote", "vote", "death", "join", "ack", "ack", "expire", "flap", "nan"]), st.integers(0, 7)),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@example(events=[("ack", 0), ("ack", 0), ("death", 0)], ranks=1, replicas=3, minimum=1, mode=Mode.SALVAGE)  # the first standby link serves
@given(events=EVENTS, ranks=st.integers(1, 2), replicas=st.integers(1, 4), minimum=st.integers(1, 2), mode=st.sampled_from(Mode))
def test_under_any_interleaving_the_log_keeps_the_invariants(events, ranks, replicas, minimum, mode):
    """Epochs strictly grow with membership; commits are contiguous, once each, only of votes of all ranks that it binds; a joiner
    never enters without every acknowledgement; a view never holds a dead worker; a link that a view calls ready was built by every
    rank of its members, or was in use, and serves in one view; a deal is repeated until it is replaced by one with a higher number;
    in salvage mode a death, a joiner or a flap never replaces it; in wait mode slots are dealt to all replicas or to nobody."""
    minimum = replicas if mode is Mode.WAIT else min(minimum, replicas)
    c = Coordinator(3, 0, minimum, mode, standbys_up_to=4)
    log = c.open([member(r, ranks) for r in range(replicas)])
    c.begin(1, (("s1",),))
    dead: set[str] = set()
    builds = {r: 0 for r in range(replicas)}
    acked: dict[str, set[str]] = {}
    links = {r.view.link_id: r.view.workers for r in log if r.kind is Kind.BUILD}
    in_use, voided = {c.view.link_id}, set()
    for kind, number in events:
        if c.state is State.LOST:
            break
        alive = sorted(c.view.workers)
        before, held, voted = c.view, c.state is State.HELD, {w for w, v in c.votes.items() if v.epoch == c.view.epoch}
        records: list[Record] = []
        match kind:
            case "vote" | "nan":
                worker = alive[number % len(alive)]
                try:
                    records = c.vote(vote(worker, c, finite=kind == "vote"))
                except InvariantViolated as error:  # some said finite and some not, three times: the run ends
                    assert "totals differ" in str(error) and c.committed == before.committed
                    break
                voted.add(worker)
            case "death":
                building = [c.build.joiner] if c.build and c.build.joiner else []
                everyone = sorted({w for m in (*c.view.members, *c.waiting, *building) for w in m.workers})
                worker = everyone[number % len(everyone)]
                dead.add(worker)
                records = c.death(worker, "killed")
            case "join":
                known = set(c.view.replicas) | {m.replica for m in c.waiting}
                known |= {c.build.joiner.replica} if c.build and c.build.joiner else set()
                missing = [r for r in range(replicas) if r not in known]
                if missing:
                    builds[missing[0]] += 1
                    records = c.joiner(member(missing[0], ranks, builds[missing[0]]))
            case "ack" if c.build:
                todo = sorted({w for m in c.build.members for w in m.workers} - c.build.acknowledged)
                if todo:
                    acked.setdefault(c.build.link_id, set()).add(todo[0])
                    records = c.link_ready(todo[0], c.build.link_id)
            case "expire":
                records = c.build_expired()
            case "flap":
                try:
                    records = c.link_failed(c.view.link_id, "flap")
                except DeadlineExceeded:
                    break
        for record in records:
            if record.kind is Kind.BUILD:
                assert record.view.link_id not in links
                links[record.view.link_id] = record.view.workers
            elif record.kind is Kind.COMMIT:
                bound = {w for m in before.members if m in record.view.members for w in m.workers}
                assert not held and bound <= voted and record.epoch == before.epoch
                assert record.step == before.committed + 1 == record.view.committed
                if kind == "death":
                    assert record.outcome is Outcome.APPLY
                c.begin(record.step + 1, ((f"s{record.step + 1}",),))
            if record.kind is not Kind.BUILD:
                view = record.view
                if view.link_ready and view.link_id != before.link_id and view.link_id not in in_use:
                    assert acked[view.link_id] == links[view.link_id] == view.workers
                if view.link_id != before.link_id:
                    assert view.link_id not in voided
                    voided |= {before.link_id} if record.kind is Kind.VIEW else set()
                in_use.add(view.link_id)
                if view.members != before.members:
                    assert view.epoch > before.epoch
                assert (view.deal == before.deal) != (view.deal.number == before.deal.number + 1)
                if mode is Mode.SALVAGE and record.kind is Kind.VIEW and kind in ("death", "ack", "flap"):
                    assert view.deal == before.deal
                if mode is Mode.WAIT:
                    assert view.deal.replicas in ((), tuple(range(replicas)))
                    assert bool(view.deal.replicas) == (len(view.members) == replicas)
                else:
                    assert view.deal.replicas or c.state is State.LOST
        log += records
        assert not c.view.workers & dead
        assert [r.number for r in log] == list(range(1, len(log) + 1))
        commits = [r.step for r in log if r.kind is Kind.COMMIT]
        assert commits == list(range(1, len(commits) + 1)) and len(commits) == c.committed
        assert [r.samples for r in log if r.kind is Kind.COMMIT] == [(f"s{k}",) for k in commits]
    base: Record | None = None
    for record in log:  # as ranks are told them
        assert Record.from_json(json.loads(json.dumps(record.to_json(base))), base) == record
        base = base if record.kind is Kind.BUILD else record


def test_the_commit_record_survives_and_epochs_grow_across_incarnations(tmp_path):
    path = tmp_path / "commits.log"
    log = CommitLog(path)
    c = opened(1)
    log.write(commit_step(c))
    log.close()
    again = CommitLog(path)
    assert again.past.committed == 1 and again.incarnation == 2
    assert Epoch(again.incarnation, 0) > c.view.epoch
    again.close()


def test_a_torn_tail_is_no_commit_and_damage_before_it_is_an_error(tmp_path):
    path = tmp_path / "commits.log"
    log = CommitLog(path)
    c = opened(1)
    log.write(commit_step(c))
    c.begin(2, ())
    log.write(commit_step(c))
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    log = CommitLog(path)
    assert log.past.committed == 1  # the torn commit of step 2 was never told to anybody
    log.close()
    assert len(read(path)[0]) == 3  # open, commit 1, open
    damaged = bytearray(whole)
    damaged[whole.index(b'"step":1') + 7] = ord("9")
    path.write_bytes(bytes(damaged))
    with pytest.raises(InvariantViolated, match="line 2"):
        CommitLog(path)


def test_two_coordinators_cannot_hold_one_run(tmp_path):
    log = CommitLog(tmp_path / "commits.log")
    with pytest.raises(BadInput, match="in use"):
        CommitLog(tmp_path / "commits.log")
    log.close()
    CommitLog(tmp_path / "commits.log").close()


def test_records_survive_the_wire():
    c = opened(3, ranks=2)
    c.death("2.0.1", "killed")
    record = commit_step(c)
    assert Record.from_json(record.to_json()) == record
    c.begin(2, (("s2",),))
    after = commit_step(c)
    told = after.to_json(record)
    assert Record.from_json(told, record) == after and set(told["view"]) == {"committed", "deal"} and set(told["view"]["deal"]) == {"number"}
    for other in (None, after):
        with pytest.raises(ValueError, match="differs from record"):
            Record.from_json(told, other)
    v = vote("0.0.0", c)
    assert Vote.from_json(v.to_json()) == v
