"""The one place that decides views and commits. Pure: events in, log records out; no process, no socket, no clock.

Each method takes one event and returns the records it causes, in order; the caller makes them durable, then publishes them
(:mod:`everstep.recovery.server`). Between events the coordinator is in one of four states:

    =========  ===================================================  ==========================================
    state      meaning                                              leaves it
    =========  ===================================================  ==========================================
    FORMING    members are admitted; no view yet                    open()            -> VOTING
    VOTING     votes for (committed + 1, view.epoch) are collected  all voted         -> VOTING of the next step
                                                                    death, mismatch   -> VOTING under a new epoch
                                                                    below the minimum -> HELD
                                                                    no contributor    -> LOST
    HELD       fewer members than the minimum: nothing commits      joiner ready      -> VOTING
                                                                    no contributor    -> LOST
    LOST       no living replica holds the committed state          never; the run resumes from a checkpoint
    =========  ===================================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from everstep.errors import DeadlineExceeded, InvariantViolated
from everstep.recovery.view import Epoch, Kind, Member, Outcome, Record, View, Vote, link_name

MAX_MISMATCHES = 3  # totals that differ between replicas this often for one step are no transient fault
MAX_LINK_FAILURES = 10  # nor is a link that breaks this often for one step, with every process alive


class State(StrEnum):
    FORMING = "forming"
    VOTING = "voting"
    HELD = "held"
    LOST = "lost"


@dataclass
class Joining:
    """A replica that waits to enter: it enters with a commit, once every rank concerned has built the link (rule 10)."""

    member: Member
    link_id: str
    members: tuple[Member, ...]
    acknowledged: set[str] = field(default_factory=set)

    @property
    def ready(self) -> bool:
        return self.acknowledged >= {w for m in self.members for w in m.workers}


class Coordinator:
    def __init__(self, incarnation: int, committed: int = 0, min_replicas: int = 1):
        self.state = State.FORMING
        self.min_replicas = min_replicas
        self.committed = committed
        self.view = View(Epoch(incarnation, 0), (), frozenset(), committed, "none")
        self.votes: dict[str, Vote] = {}
        self.joining: Joining | None = None
        self.waiting: list[Member] = []      # formed replicas whose link is not being built yet (one build at a time)
        self.samples: tuple[str, ...] = ()   # of the step in progress
        self.begun = committed               # last step announced by begin()
        self._mismatches = 0
        self._nonfinite = 0
        self._link_failures = 0
        self._records = 0
        self._links = 0

    # -- events -------------------------------------------------------------------------------------------------------

    def open(self, members: list[Member]) -> list[Record]:
        """All replicas of the start hold the same committed state: the first view."""
        if self.state is not State.FORMING:
            raise InvariantViolated("the coordinator was opened twice")
        self.state = State.VOTING
        return [self._new_view(tuple(members), frozenset(), "start")]

    def restart_at(self, step: int) -> list[Record]:
        """All members loaded a checkpoint of ``step``: a new view says so. Before the first commit of this incarnation only."""
        if self.begun != self.committed or self.committed != 0:
            raise InvariantViolated(f"cannot restart at step {step}: step {self.begun} has begun")
        self.committed = self.begun = step
        return [self._new_view(self.view.members, self.view.healing, f"checkpoint of step {step}")]

    def begin(self, step: int, samples: tuple[str, ...]) -> None:
        """The step's samples, for its commit record. Steps begin in order, one at a time."""
        if step != self.committed + 1:
            raise InvariantViolated(f"step {step} begins but {self.committed} is the last committed one")
        self.begun, self.samples = step, samples

    def vote(self, vote: Vote) -> list[Record]:
        """Late votes (an older epoch, a committed step, an expelled worker) have no effect."""
        if self.state is State.LOST or vote.step != self.committed + 1 or vote.epoch != self.view.epoch:
            return []
        if vote.worker not in self.view.workers:
            return []
        self.votes[vote.worker] = vote
        return self._decide()

    def death(self, worker: str, cause: str) -> list[Record]:
        """A worker is gone. Idempotent. Decides once what becomes of the step in progress (rule 2)."""
        self.waiting = [m for m in self.waiting if worker not in m.workers]
        records: list[Record] = []
        if self.joining and worker in self.joining.member.workers:
            self.joining = None
        dead = self.view.member_of(worker)
        if dead is None or self.state is State.LOST:
            return records + self._next_build()
        survivors = tuple(m for m in self.view.members if m is not dead)
        healing = self.view.healing - {dead.replica}
        self._cancel_build_with(dead)
        self._link_failures = 0
        if self.state is State.VOTING and survivors and self._all_voted(survivors) and self._agree(survivors) and self._finite(survivors):
            records.append(self._commit(Outcome.APPLY, survivors, frozenset(), cause))
        else:
            records.append(self._new_view(survivors, healing, cause))
        if not self.view.contributors:
            self.state = State.LOST
        elif len(self.view.members) < self.min_replicas:
            self.state = State.HELD
        return records + self._next_build()

    def joiner(self, member: Member) -> list[Record]:
        """A replica was formed anew and waits to enter."""
        known = {m.replica for m in (*self.view.members, *self.waiting)}
        if self.joining:
            known.add(self.joining.member.replica)
        if member.replica in known:
            raise InvariantViolated(f"replica {member.replica} joins but is a member already")
        self.waiting.append(member)
        return self._next_build()

    def link_ready(self, worker: str, link_id: str) -> list[Record]:
        if self.joining is None or self.joining.link_id != link_id:
            return []
        self.joining.acknowledged.add(worker)
        if self.state is State.HELD and self.joining.ready:
            self.state = State.VOTING
            members, healing = self._with_joiner(self.view.members)
            record = self._new_view(members, self.view.healing | healing, "joiner ready", self.joining.link_id)
            self.joining = None
            if len(members) < self.min_replicas:
                self.state = State.HELD
            return [record, *self._next_build()]
        return []

    def build_expired(self) -> list[Record]:
        """The link in construction was not acknowledged by everybody before its deadline: build it anew, under a new name."""
        if self.joining is None:
            return []
        self.waiting.append(self.joining.member)
        self.joining = None
        return self._next_build()

    def link_failed(self, link_id: str, cause: str) -> list[Record]:
        """A collective failed with every process alive (a flapping link): new epoch, same members, nobody is evicted.

        Raises DeadlineExceeded if that happens MAX_LINK_FAILURES times in one step.
        """
        if link_id != self.view.link_id or self.state is State.LOST:
            return []
        self._link_failures += 1
        if self._link_failures >= MAX_LINK_FAILURES:
            raise DeadlineExceeded(
                f"step {self.committed + 1}: the link between replicas {list(self.view.replicas)} broke {self._link_failures} times "
                f"with every process alive ({cause}); check the network between their nodes, then resume with resume=auto"
            )
        return [self._new_view(self.view.members, self.view.healing, cause)]

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _decide(self) -> list[Record]:
        if self.state is not State.VOTING or not self._all_voted(self.view.members):
            return []
        if not self._agree(self.view.members):
            self._mismatches += 1
            if self._mismatches >= MAX_MISMATCHES:
                raise InvariantViolated(self._describe_mismatch())
            return [self._new_view(self.view.members, self.view.healing, "totals differ between replicas")]
        if not self._finite(self.view.members):
            self._nonfinite += 1
            if self._nonfinite == 1:
                return [self._new_view(self.view.members, self.view.healing, "non-finite gradient: computed once more")]
            outcome = Outcome.SKIP
        else:
            outcome = Outcome.APPLY
        return [self._commit(outcome, self.view.members, frozenset(), ""), *self._next_build()]

    def _all_voted(self, members: tuple[Member, ...]) -> bool:
        return all(w in self.votes for m in members for w in m.workers)

    def _agree(self, members: tuple[Member, ...]) -> bool:
        votes = [self.votes[w] for m in members for w in m.workers]
        same: Callable[[Vote], tuple[object, ...]] = lambda v: (v.divisor, v.grad_norm_bits, v.finite, v.slots)
        if not any(v.finite for v in votes):  # NaN equals nothing; such a total is never applied
            same = lambda v: v.slots
        if len({same(v) for v in votes}) != 1:
            return False
        if not votes[0].finite:
            return True
        positions = zip(*(m.workers for m in members), strict=True)
        return all(len({self.votes[w].digest for w in position}) == 1 for position in positions)

    def _finite(self, members: tuple[Member, ...]) -> bool:
        return all(self.votes[w].finite for m in members for w in m.workers)

    def _commit(self, outcome: Outcome, members: tuple[Member, ...], healing: frozenset[int], cause: str) -> Record:
        """Record the step; its record carries the view of the next one, with a joiner if one is ready."""
        epoch, step, samples = self.view.epoch, self.committed + 1, self.samples
        divisor = self.votes[members[0].workers[0]].divisor
        self.committed = step
        self._mismatches = self._nonfinite = self._link_failures = 0
        changed = members != self.view.members
        link_id = None if changed else self.view.link_id
        if self.joining and self.joining.ready and not changed:
            members, healing = self._with_joiner(members)
            link_id, self.joining = self.joining.link_id, None
            changed = True
        if changed:
            view = self._make_view(members, healing, link_id)
        else:
            view = View(epoch, members, healing, step, self.view.link_id, self.view.link_ready)
        self.view, self.votes = view, {}
        return self._record(Kind.COMMIT, step=step, epoch=epoch, outcome=outcome, samples=samples, divisor=divisor, cause=cause)

    def _with_joiner(self, members: tuple[Member, ...]) -> tuple[tuple[Member, ...], frozenset[int]]:
        assert self.joining is not None
        joined = tuple(sorted((*members, self.joining.member), key=lambda m: m.replica))
        return joined, frozenset({self.joining.member.replica})

    def _cancel_build_with(self, dead: Member) -> None:
        """A link in construction that includes a dead member is obsolete; its joiner waits for the next build."""
        if self.joining and dead in self.joining.members:
            self.waiting.insert(0, self.joining.member)
            self.joining = None

    def _next_build(self) -> list[Record]:
        """Order the next link build: one at a time, the same order everywhere."""
        if self.joining or not self.waiting or not self.view.contributors or self.state is State.LOST:
            return []
        member = self.waiting.pop(0)
        members = tuple(sorted((*self.view.members, member), key=lambda m: m.replica))
        self.joining = Joining(member, self._new_link(members), members)
        view = View(self.view.epoch, members, frozenset({member.replica}), self.committed, self.joining.link_id)
        self._records += 1
        return [Record(self._records, Kind.BUILD, view)]

    # -- records ------------------------------------------------------------------------------------------------------

    def _new_link(self, members: tuple[Member, ...]) -> str:
        self._links += 1
        return link_name(members, self._links)

    def _make_view(self, members: tuple[Member, ...], healing: frozenset[int], link_id: str | None) -> View:
        ready = link_id is not None
        return View(self.view.epoch.next(), members, healing, self.committed, link_id or self._new_link(members), ready)

    def _new_view(
        self, members: tuple[Member, ...], healing: frozenset[int], cause: str, link_id: str | None = None
    ) -> Record:
        self.view, self.votes = self._make_view(members, healing, link_id), {}
        return self._record(Kind.VIEW, cause=cause)

    def _record(
        self, kind: Kind, step: int = 0, epoch: Epoch | None = None, outcome: Outcome = Outcome.APPLY,
        samples: tuple[str, ...] = (), divisor: float = 0.0, cause: str = "",
    ) -> Record:
        self._records += 1
        return Record(self._records, kind, self.view, step, epoch, outcome, samples, divisor, cause)

    def _describe_mismatch(self) -> str:
        rows = "; ".join(
            f"{w}: digest {v.digest:x} divisor {v.divisor} norm {v.grad_norm_bits:x} finite {v.finite} slots {list(v.slots)}"
            for w, v in sorted(self.votes.items())
        )
        return (
            f"step {self.committed + 1}: the replicas' totals differ {self._mismatches} times in a row ({rows}); "
            "a device computes wrongly or the reduction is broken. Nothing was committed; resume from the last checkpoint."
        )
