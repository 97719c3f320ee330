"""The coordinator's decisions, without processes: named interleavings of docs/protocol.md, and a random exploration of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import BadInput, DeadlineExceeded, InvariantViolated
from everstep.recovery.commitlog import CommitLog, read
from everstep.recovery.coordinator import MAX_LINK_FAILURES, MAX_MISMATCHES, Coordinator, State
from everstep.recovery.view import Epoch, Kind, Member, Outcome, Record, Vote, assign


def member(replica: int, ranks: int = 1, build: int = 0) -> Member:
    return Member(replica, build, tuple(f"{replica}.{build}.{rank}" for rank in range(ranks)))


def vote(worker: str, c: Coordinator, **changes: object) -> Vote:
    fields: dict = dict(worker=worker, step=c.committed + 1, epoch=c.view.epoch, digest=hash(worker.split(".")[2]), divisor=8.0,
                        grad_norm_bits=5, finite=True, slots=(0, 1))
    return Vote(**(fields | changes))


def opened(replicas: int = 2, ranks: int = 1, minimum: int = 1) -> Coordinator:
    c = Coordinator(1, 0, minimum)
    c.open([member(r, ranks) for r in range(replicas)])
    c.begin(1, ("s0", "s1"))
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
    c.begin(2, ("s2",))
    assert commit_step(c).outcome is Outcome.APPLY


def test_a_transient_non_finite_total_costs_one_attempt():
    c = opened(1)
    (w,) = workers(c)
    c.vote(vote(w, c, finite=False))
    assert commit_step(c).outcome is Outcome.APPLY


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


@given(slots=st.integers(1, 64), members=st.sets(st.integers(0, 9), min_size=1, max_size=6))
def test_every_slot_has_exactly_one_owner_and_shares_differ_by_at_most_one(slots, members):
    shares = assign(slots, sorted(members))
    assert sorted(s for share in shares.values() for s in share) == list(range(slots))
    sizes = [len(share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 1 and shares.keys() == members


EVENTS = st.lists(
    st.tuples(st.sampled_from(["vote", "vote", "vote", "death", "join", "ack", "ack", "expire", "flap", "nan"]), st.integers(0, 7)),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(events=EVENTS, ranks=st.integers(1, 2), replicas=st.integers(1, 4), minimum=st.integers(1, 2))
def test_under_any_interleaving_the_log_keeps_the_invariants(events, ranks, replicas, minimum):
    """Epochs strictly grow with membership; commits are contiguous, once each, only of votes of all ranks that it binds; a joiner
    never enters without every acknowledgement; a view never holds a dead worker."""
    minimum = min(minimum, replicas)
    c = Coordinator(3, 0, minimum)
    log = c.open([member(r, ranks) for r in range(replicas)])
    c.begin(1, ("s1",))
    dead: set[str] = set()
    builds = {r: 0 for r in range(replicas)}
    acked: dict[str, set[str]] = {}
    links: dict[str, frozenset[str]] = {}
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
                everyone = sorted({w for m in (*c.view.members, *c.waiting) for w in m.workers}
                                  | ({w for w in c.joining.member.workers} if c.joining else set()))
                worker = everyone[number % len(everyone)]
                dead.add(worker)
                records = c.death(worker, "killed")
            case "join":
                known = set(c.view.replicas) | {m.replica for m in c.waiting}
                known |= {c.joining.member.replica} if c.joining else set()
                missing = [r for r in range(replicas) if r not in known]
                if missing:
                    builds[missing[0]] += 1
                    records = c.joiner(member(missing[0], ranks, builds[missing[0]]))
            case "ack" if c.joining:
                todo = sorted({w for m in c.joining.members for w in m.workers} - c.joining.acknowledged)
                if todo:
                    acked.setdefault(c.joining.link_id, set()).add(todo[0])
                    records = c.link_ready(todo[0], c.joining.link_id)
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
                c.begin(record.step + 1, (f"s{record.step + 1}",))
            if record.kind is not Kind.BUILD:
                if record.view.link_ready:
                    assert acked[record.view.link_id] == links[record.view.link_id]
                if record.view.members != before.members:
                    assert record.view.epoch > before.epoch
        log += records
        assert not c.view.workers & dead
        assert [r.number for r in log] == list(range(1, len(log) + 1))
        commits = [r.step for r in log if r.kind is Kind.COMMIT]
        assert commits == list(range(1, len(commits) + 1)) and len(commits) == c.committed
        assert [r.samples for r in log if r.kind is Kind.COMMIT] == [(f"s{k}",) for k in commits]


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
    v = vote("0.0.0", c)
    assert Vote.from_json(v.to_json()) == v
