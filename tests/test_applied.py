"""Rule 2 of the history checker, process by process: histories of correct runs hold, and each way to miss a commit is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from everstep.telemetry.applied import applied_once
from everstep.telemetry.events import Event

RANKS = ((0, 0), (0, 1), (1, 0), (1, 1))
Told = list[Event]


class Story:
    """Two replicas of two ranks; rank R/P is worker wRP. One second passes with each event."""

    def __init__(self) -> None:
        self.events: Told = []
        self.now, self.counter, self.incarnation = 0.0, 1, 0

    def tell(self, event: str, who: str = "lead", step: int | None = None, epoch: Any = None, **fields: Any) -> None:
        self.now += 1.0
        pid = self.incarnation if who == "lead" or self.incarnation else 1
        self.events.append(Event(self.now, self.now, who, pid, "here", epoch, step, event, fields))

    @property
    def epoch(self) -> tuple[int, int]:
        return self.incarnation, self.counter

    def start(self, step: int = 0) -> None:
        self.incarnation, self.counter = self.incarnation + 1, 1
        self.tell("run_start", step=step)
        self.form(RANKS)
        self.view((0, 1), step)

    def form(self, ranks: Iterable[tuple[int, int]], build: int = 0) -> None:
        for replica, rank in ranks:
            self.tell("form", f"w{replica}{rank}", None, self.epoch, replica=replica, rank=rank, build=build)

    def view(self, members: Sequence[int], step: int) -> None:
        self.tell("view", step=step, epoch=self.epoch, members=list(members))

    def votes(self, step: int, ranks: Iterable[tuple[int, int]] = RANKS) -> None:
        for replica, rank in ranks:
            self.rank("compute", step, replica, rank, slots=[2 * replica + rank])
            self.rank("vote", step, replica, rank)

    def rank(self, event: str, step: int, replica: int, rank: int, **fields: Any) -> None:
        self.tell(event, f"w{replica}{rank}", step, self.epoch, replica=replica, rank=rank, **fields)

    def commit(self, step: int, members: Sequence[int] = (0, 1), kind: str = "apply") -> None:
        self.tell("commit", step=step, epoch=self.epoch, kind=kind, members=list(members), next_epoch=self.epoch)

    def step(self, step: int, apply: Iterable[tuple[int, int]] = RANKS, kind: str = "apply") -> None:
        self.votes(step)
        self.commit(step, kind=kind)
        for replica, rank in apply:
            self.rank(kind, step, replica, rank)

    def death(self, replica: int, rank: int, step: int) -> None:
        self.tell("death", step=step, epoch=self.epoch, replica=replica, rank=rank, worker=f"w{replica}{rank}", cause="")

    def end(self, status: str = "done") -> None:
        self.tell("run_end", status=status)


def undisturbed(story: Story) -> None:
    story.start()
    for step in (1, 2, 3):
        story.step(step)
    story.end()


def a_rank_dies_before_it_can_apply(story: Story) -> None:
    """So its replica is broken: the other rank does not apply either; they heal, keep what is committed meanwhile, and apply it later."""
    story.start()
    story.step(1)
    story.votes(2)
    story.death(1, 0, 2)
    story.commit(2, [0])
    for rank in (0, 1):
        story.rank("apply", 2, 0, rank)
    story.counter += 1
    story.form(((1, 0), (1, 1)), build=1)
    story.view([0, 1], 2)
    story.votes(3)
    story.commit(3)
    for (replica, rank), event in zip(RANKS, ("apply", "apply", "keep", "keep"), strict=True):
        story.rank(event, 3, replica, rank)
    for rank in (0, 1):
        story.rank("apply", 3, 1, rank)
    story.counter += 1
    story.view([0, 1], 3)
    story.step(4)
    story.end()


def a_skipped_step(story: Story) -> None:
    story.start()
    story.step(1, kind="skip")
    story.end()


def interrupted(story: Story) -> None:
    """The lead is killed after it has recorded a commit; the run is resumed from the checkpoint before, by processes of the same names."""
    story.start()
    story.step(1)
    story.step(2, apply=[(0, 0)])
    story.start(1)
    story.step(2)
    story.end()


def taken_over(story: Story) -> None:
    """Another controller goes on with replica 0; replica 1, of which one rank has not the total, is formed anew."""
    story.start()
    story.step(1)
    story.step(2, apply=[(0, 0), (0, 1)])
    story.counter += 1
    story.tell("takeover", step=2, epoch=story.epoch, members=[0])
    story.view([0, 1], 2)
    story.form(((1, 0), (1, 1)), build=1)
    story.step(3)
    story.end()


def without_waiting_for_the_commit(story: Story) -> None:
    """Where no death is survived, ranks apply at once, and the run may end before the last step is recorded."""
    story.start()
    story.votes(1)
    for replica, rank in RANKS:
        story.rank("apply", 1, replica, rank)
    story.commit(1)
    story.votes(2)
    story.rank("apply", 2, 0, 0)


@pytest.mark.parametrize(
    ("run", "times"),
    [(undisturbed, 12), (a_rank_dies_before_it_can_apply, 14), (a_skipped_step, 4), (interrupted, 9), (taken_over, 10), (without_waiting_for_the_commit, 4)],
)
def test_histories_of_correct_runs_hold(run: Callable[[Story], None], times: int) -> None:
    story = Story()
    run(story)
    assert applied_once(story.events) == (times, "")


def replica_0_misses_one_and_dies_much_later(story: Story) -> None:
    """Rank 1/1 applies nothing after step 1 either."""
    story.start()
    story.step(1)
    story.step(2, apply=[(1, 0)])
    story.step(3, apply=[(0, 0), (0, 1), (1, 0)])
    story.now += 1000
    story.death(0, 0, 4)
    story.end("failed")


def one_rank_of_two_goes_on_without_the_commit(story: Story) -> None:
    story.start()
    story.step(1)
    story.step(2, apply=[(0, 0), (0, 1), (1, 0)])
    story.step(3)
    story.end()


def it_goes_on_without_and_dies_at_once(story: Story) -> None:
    story.start()
    story.step(1, apply=[(0, 0), (0, 1), (1, 0)])
    story.rank("compute", 2, 1, 1, slots=[3])
    story.death(1, 1, 2)
    story.end("failed")


def the_same_step_is_attempted_again(story: Story) -> None:
    story.start()
    story.step(1, apply=[(0, 0), (0, 1), (1, 0)])
    story.counter += 1
    story.rank("compute", 1, 1, 1, slots=[3])
    story.death(1, 1, 2)
    story.end("failed")


def another_replica_died(story: Story) -> None:
    story.start()
    story.step(1, apply=[(0, 0), (0, 1), (1, 0)])
    story.death(0, 0, 2)
    story.counter += 1
    story.view([1], 1)
    story.votes(2, [(1, 0)])
    story.commit(2, [1])
    story.rank("apply", 2, 1, 0)
    story.end("failed")


def it_died_in_a_former_run_only(story: Story) -> None:
    story.start()
    story.death(1, 1, 1)
    story.start()
    story.step(1, apply=[(0, 0), (0, 1), (1, 0)])
    story.end()


def it_died_in_a_former_life_only(story: Story) -> None:
    story.start()
    story.death(1, 1, 1)
    story.now += 10
    story.form(((1, 0), (1, 1)), build=1)
    story.step(1, apply=[(0, 0), (0, 1), (1, 0)])
    story.end()


def the_last_commit_of_a_run_that_is_done(story: Story) -> None:
    story.start()
    story.step(1, apply=[(0, 0), (0, 1), (1, 0)])
    story.end()


def a_commit_without_a_vote_of_one_rank(story: Story) -> None:
    story.start()
    story.votes(1, RANKS[:3])
    story.commit(1)
    for replica, rank in RANKS[:3]:
        story.rank("apply", 1, replica, rank)
    story.end()


def applied_without_a_vote(story: Story) -> None:
    a_commit_without_a_vote_of_one_rank(story)
    story.rank("apply", 1, 1, 1)


def of_another_epoch(story: Story) -> None:
    story.start()
    story.step(1, apply=RANKS[:3])
    story.counter += 1
    story.rank("apply", 1, 1, 1)
    story.end()


def skipped_instead(story: Story) -> None:
    story.start()
    story.step(1, apply=RANKS[:3])
    story.rank("skip", 1, 1, 1)
    story.end()


def skipped_twice(story: Story) -> None:
    a_skipped_step(story)
    story.rank("skip", 1, 1, 1)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (replica_0_misses_one_and_dies_much_later, "w00 went on to compute in step 3 without applying"),
        (one_rank_of_two_goes_on_without_the_commit, "w11 went on to compute in step 3 without applying"),
        (it_goes_on_without_and_dies_at_once, "w11 went on to compute in step 2 without applying"),
        (the_same_step_is_attempted_again, "w11 went on to compute in step 1 without applying"),
        (another_replica_died, "w11 did not apply the commit that it voted for"),
        (it_died_in_a_former_run_only, "w11 did not apply the commit that it voted for"),
        (it_died_in_a_former_life_only, "w11 did not apply the commit that it voted for"),
        (the_last_commit_of_a_run_that_is_done, "w11 did not apply the commit that it voted for"),
        (a_commit_without_a_vote_of_one_rank, "without the vote of rank 1/1"),
        (applied_without_a_vote, "w11 has an event apply for a total that it had not voted for"),
        (of_another_epoch, "w11 has an event apply for the total of epoch (1, 2), commits are of [(1, 1)]"),
        (skipped_instead, "w11 answered a commit of kind apply with skip"),
        (skipped_twice, "w11 applied the commit 2 times"),
    ],
)
def test_a_commit_that_a_process_missed_is_found(run: Callable[[Story], None], said: str) -> None:
    story = Story()
    run(story)
    assert said in applied_once(story.events)[1]
