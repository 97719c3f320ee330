"""The one place that decides views and commits. Pure: events in, log records out; no process, no socket, no clock.

Each method takes one event and returns the records it causes, in order; the caller makes them durable, then publishes them
(:mod:`everstep.recovery.server`). Between events the coordinator is in one of five states:

    =========  ===================================================  ==========================================
    state      meaning                                              leaves it
    =========  ===================================================  ==========================================
    FORMING    members are admitted; no view yet                    open()            -> VOTING
                                                                    take_over()       -> VOTING, HELD or LOST
    VOTING     votes for (committed + 1, view.epoch) are collected  all voted         -> VOTING of the next step
                                                                    death, mismatch   -> VOTING under a new epoch
                                                                    below the minimum -> HELD
                                                                    no source         -> LOST
    HELD       fewer members than the minimum: nothing commits      joiner ready      -> VOTING
                                                                    no source         -> LOST
                                                                    halt()            -> HALTED
    HALTED     the step in progress is given up for good            never; what members hold is saved
    LOST       no living replica holds the committed state          rollback()        -> VOTING or HELD
    =========  ===================================================  ==========================================

What a new view means for work already done is said by its deal (:class:`everstep.recovery.view.Deal`), and decided here alone:

    ===================================  =======================  =======================  =======================
    cause of the view                    salvage                  retry                    wait
    ===================================  =======================  =======================  =======================
    a commit, a takeover, a rollback     dealt to contributors    dealt to contributors    dealt to all replicas
    a death                              as before: ledgers stay  dealt to the survivors   to nobody until all are back
    a joiner, while HELD                 as before                dealt to contributors    dealt to all replicas
    a link broke, everybody is alive     as before                dealt to contributors    dealt to all replicas
    totals differ, or are not finite,    dealt to contributors    dealt to contributors    dealt to all replicas
    a slot counted twice, or two
    replicas differ about one
    ===================================  =======================  =======================  =======================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from everstep.errors import DeadlineExceeded, InvariantViolated
from everstep.recovery.nonfinite import Finding, NonFinites
from everstep.recovery.rerun import Reruns
from everstep.recovery.view import Deal, Epoch, Heal, Kind, Member, Outcome, Record, View, Vote, link_name

TAKEOVER = "takeover"  # cause of the record with which a coordinator goes on where a dead one ended
MAX_MISMATCHES = 3  # totals that differ between replicas this often for one step are no transient fault
MAX_HEAL_FAILURES = 5  # nor is a heal that fails so often for one life of a replica, with its sources alive
MAX_LINK_FAILURES = 10  # nor is a link that breaks this often for one step, with every process alive


class State(StrEnum):
    FORMING = "forming"
    VOTING = "voting"
    HELD = "held"
    HALTED = "halted"
    LOST = "lost"


class Mode(StrEnum):
    """What survivors of a death do with the step in progress."""

    SALVAGE = "salvage"  # they keep what they have, and compute only the slots that nobody holds any more
    RETRY = "retry"      # they compute all of it together, anew
    WAIT = "wait"        # they wait for a spare, and all compute what they would have computed without the death


@dataclass
class Build:
    """A link in construction: for a joiner, who enters with a commit once every rank concerned has built it (rule 10), or
    (``joiner`` None) a standby for those who survive a death to come."""

    link_id: str
    members: tuple[Member, ...]
    joiner: Member | None
    acknowledged: set[str] = field(default_factory=set)

    @property
    def ready(self) -> bool:
        return self.acknowledged >= {w for m in self.members for w in m.workers}

    def concerns(self, worker: str) -> bool:
        return any(worker in m.workers for m in self.members)


class Coordinator:
    """``min_replicas``: with fewer members nothing commits (``wait`` needs all). ``standbys_up_to``: with at most this many members a
    standby link is kept for each one that may die. ``quarantine_after``: replicas that may die while they compute one slot, before it
    is left out of the step (0: no limit). ``stop_at_non_finite``: a total that is not finite twice raises NonFinite, else the step is
    skipped. ``rotates``: what was not finite is computed by another replica the second time. ``reruns``: judges slots that two replicas computed."""

    def __init__(
        self, incarnation: int, committed: int = 0, min_replicas: int = 1, mode: Mode = Mode.SALVAGE, standbys_up_to: int = 0,
        quarantine_after: int = 0, stop_at_non_finite: bool = False, rotates: bool = True, reruns: Reruns | None = None,
    ):
        self.state = State.FORMING
        self.mode = mode
        self.min_replicas = min_replicas
        self.committed = committed
        self.view = View(Epoch(incarnation, 0), (), (), committed, "none")
        self.votes: dict[str, Vote] = {}
        self.build: Build | None = None      # one at a time, the same order everywhere
        self.waiting: list[Member] = []      # formed replicas whose link is not being built yet
        self.standbys: dict[tuple[Member, ...], str] = {}  # complete links of those who would survive a death
        self.slots: tuple[tuple[str, ...], ...] = ()  # sample ids of the step in progress, by slot
        self.dealt = 0                       # to how many replicas the last commit (or the first view) dealt the next step
        self.begun = committed               # last step announced by begin()
        self._recipe_state: dict[str, Any] | None = None  # what it will be after that step
        self._standbys_up_to = standbys_up_to if mode is not Mode.WAIT else 0
        self._quarantine_after = quarantine_after
        self._died_of: dict[tuple[int, int], set[Member]] = {}  # (step, slot) -> lives of replicas that ended while they computed it
        self._unbuildable: set[tuple[Member, ...]] = set()  # standbys that were not finished in time; not tried again
        self._mismatches = 0
        self._nonfinite = NonFinites(stop_at_non_finite, rotates and mode is not Mode.WAIT)
        self.reruns = reruns or Reruns()
        self._link_failures = 0
        self._heal_failures: dict[Member, int] = {}
        self._heals = 0
        self._holding: set[str] = set()  # workers that have said, in a vote for the step in progress, that they hold the committed state
        self._records = 0
        self._links = 0

    # -- events -------------------------------------------------------------------------------------------------------

    def open(self, members: list[Member]) -> list[Record]:
        """All replicas of the start hold the same committed state: the first view."""
        if self.state is not State.FORMING:
            raise InvariantViolated("the coordinator was opened twice")
        self.state = State.VOTING
        if self.mode is Mode.WAIT:
            self.min_replicas = len(members)
        record = self._new_view(tuple(members), (), "start", redeal=True)
        self.dealt = len(self.view.deal.lives)
        return [record, *self._next_build()]

    def take_over(
        self, last: Record, commit: Record | None, members: list[Member], replicas: int, healing: Sequence[Member] = ()
    ) -> list[Record]:
        """Go on where the log of a dead coordinator ends (rule 7). ``last``: the newest record of it that is known anywhere,
        ``commit`` that of its last committed step (None: that step is a checkpoint's, or there is none); ``members``: the replicas
        of which every rank lives and holds that step, or the total of it; ``replicas``: how many there are at full strength;
        ``healing``: further replicas that live as they were then, and heal anew.

        The commit is sent again, since some may not have heard it. It carries the first view of this incarnation, which deals the
        next step anew: what was computed of it is void.
        """
        if self.state is not State.FORMING:
            raise InvariantViolated("a coordinator that has a view cannot take over")
        if self.mode is Mode.WAIT:
            self.min_replicas = replicas
        self._records, self.committed = last.number, last.view.committed
        self._heals = last.number * replicas  # no record began more: ranks in the middle of an old heal must not take a new one for it
        self.begun = self.committed
        before, healing = self.view.epoch, healing if members else ()
        kept = tuple(sorted((*members, *healing), key=lambda m: m.replica))
        heals: tuple[Heal, ...] = ()
        for member in healing:
            heals = (*heals, self._heal(member.replica, tuple(m.replica for m in members), heals))
        self.view = dataclasses.replace(last.view, epoch=before, members=kept, heals=heals)  # whose deal is continued
        self.state = State.VOTING
        self._settle_state()
        record = self._new_view(kept, heals, TAKEOVER, redeal=True)
        self.dealt = len(self.view.deal.lives)
        if commit is not None and commit.step == self.committed:
            record = dataclasses.replace(commit, number=record.number, view=self.view, cause=TAKEOVER)
        return [record, *self._next_build()]

    def rollback(self, step: int, members: list[Member], cause: str, state: dict[str, Any] | None) -> list[Record]:
        """No living replica held the committed step; ``members`` hold ``step`` again, from a copy. Commits after it are void, and the
        samples of those steps are used again; ``state``: the recipe's at that step."""
        if self.state is not State.LOST or step > self.committed:
            raise InvariantViolated(f"cannot roll back from step {self.committed} to {step} while {self.state}")
        self.committed = self.begun = step
        self.waiting = [m for m in self.waiting if m not in members]
        self._mismatches = self._link_failures = 0
        self._nonfinite.clear()
        self.reruns.clear()
        kept = tuple(sorted(members, key=lambda m: m.replica))
        self.state = State.VOTING
        record = self._new_view(kept, (), cause, redeal=True)
        self.dealt = len(self.view.deal.lives)
        self._settle_state()
        return [dataclasses.replace(record, kind=Kind.ROLLBACK, step=step, state=state), *self._next_build()]

    def restart_at(self, step: int, state: dict[str, Any] | None = None) -> list[Record]:
        """All members loaded a checkpoint of ``step``: a new view says so. Before the first commit of this incarnation only.
        ``state``: the recipe's in that checkpoint."""
        if self.begun != self.committed or self.committed != 0:
            raise InvariantViolated(f"cannot restart at step {step}: step {self.begun} has begun")
        self.committed = self.begun = step
        record = self._new_view(self.view.members, self.view.heals, f"checkpoint of step {step}", redeal=True)
        self.dealt = len(self.view.deal.lives)
        return [dataclasses.replace(record, state=state)]

    def begin(self, step: int, slots: tuple[tuple[str, ...], ...], state: dict[str, Any] | None = None) -> None:
        """The step's samples by slot, for its commit record; ``state``: what the recipe's will be then. Steps begin in order, one at
        a time."""
        if step != self.committed + 1:
            raise InvariantViolated(f"step {step} begins but {self.committed} is the last committed one")
        self.begun, self.slots, self._recipe_state = step, slots, state

    def vote(self, vote: Vote) -> list[Record]:
        """Late votes (an older epoch, a committed step, an expelled worker) have no effect."""
        if self.state is State.LOST or vote.step != self.committed + 1 or vote.epoch != self.view.epoch:
            return []
        if vote.worker not in self.view.workers or self.state is State.HALTED:
            return []
        self.votes[vote.worker] = vote
        if vote.healed:
            self._holding.add(vote.worker)
        return self._decide()

    def death(self, worker: str, cause: str, computing: tuple[int, ...] = ()) -> list[Record]:
        """A worker is gone. Idempotent. Decides once what becomes of the step in progress (rule 2).

        ``computing``: slots of the step in progress that it was in the middle of, if they may have killed it.
        """
        self.waiting = [m for m in self.waiting if worker not in m.workers]
        if self.build and self.build.concerns(worker):  # obsolete; a joiner that lives waits for the next build
            if self.build.joiner and worker not in self.build.joiner.workers:
                self.waiting.insert(0, self.build.joiner)
            self.build = None
        dead = self.view.member_of(worker)
        if dead is None or self.state is State.LOST:
            return self._next_build()
        survivors = tuple(m for m in self.view.members if m is not dead)
        for slot in computing:
            self._died_of.setdefault((self.committed + 1, slot), set()).add(dead)
        self.standbys = {members: link for members, link in self.standbys.items() if dead not in members}
        self._unbuildable.clear()
        self._link_failures = 0
        healing = self._still_healing(survivors)
        decided = bool(survivors) and self._all_voted(survivors) and self._agree(survivors) and self._finite(survivors)
        if worker in self.reruns.guilty or (decided and self.reruns.disputed(self.view, self.votes)):
            decided = False  # the total has in it what is in doubt
        if self.state is State.VOTING and decided and len(healing) < len(survivors):
            record = self._commit(Outcome.APPLY, survivors, cause)
        else:
            record = self._new_view(survivors, healing, cause, redeal=False)
        if self.state is State.HALTED and self.view.contributors:
            return [record]
        self._settle_state()
        return [record, *self._next_build()]

    def _settle_state(self) -> None:
        """After members were lost, or came back from a copy."""
        if not self.view.contributors:
            self.state = State.LOST
        elif len(self.view.members) < self.min_replicas:
            self.state = State.HELD

    def leave(self, replica: int, cause: str, replaceable: bool) -> list[Record]:
        """A member leaves between two steps, its ranks alive: nobody has begun the next one, so its slots are dealt anew, and nothing is
        lost. Has no effect if a step is in progress, if the others could not go on without it (``replaceable``: they can be held for
        the moment until it is back), or if nobody else holds the state."""
        member = self.view.member(replica)
        rest = tuple(m for m in self.view.members if m is not member)
        enough = len(rest) >= self.min_replicas or replaceable
        heals = self._still_healing(rest)
        if member is None or self.begun != self.committed or self.state is not State.VOTING or not enough or len(heals) >= len(rest):
            return []
        self._forget_builds(member)
        record = self._new_view(rest, heals, cause, redeal=True)
        if len(rest) < self.min_replicas:
            self.state = State.HELD
        return [record, *self._next_build()]

    def _forget_builds(self, gone: Member) -> None:
        """Links with a member that is gone are of no use; a joiner that lives waits for the next build."""
        if self.build and gone in self.build.members:
            if self.build.joiner and self.build.joiner is not gone:
                self.waiting.insert(0, self.build.joiner)
            self.build = None
        self.standbys = {members: link for members, link in self.standbys.items() if gone not in members}
        self._unbuildable.clear()

    def joiner(self, member: Member) -> list[Record]:
        """A replica was formed anew and waits to enter."""
        known = {m.replica for m in (*self.view.members, *self.waiting)}
        if self.build and self.build.joiner:
            known.add(self.build.joiner.replica)
        if member.replica in known:
            raise InvariantViolated(f"replica {member.replica} joins but is a member already")
        self.waiting.append(member)
        return self._next_build()

    def link_ready(self, worker: str, link_id: str) -> list[Record]:
        build = self.build
        if build is None or build.link_id != link_id:
            return []
        build.acknowledged.add(worker)
        if not build.ready:
            return []
        if build.joiner is None:
            self.standbys[build.members], self.build = link_id, None
            return self._next_build()
        if self.state is not State.HELD:
            return []  # it enters with the next commit
        members, heals, link_id = self._with_joiner(self.view.members, self.view.heals)
        record = self._new_view(members, heals, "joiner ready", redeal=False, link_id=link_id)
        self.state = State.HELD if len(members) < self.min_replicas else State.VOTING
        return [record, *self._next_build()]

    def build_expired(self) -> list[Record]:
        """The link in construction was not acknowledged by everybody before its deadline: a joiner's is built anew, under a new
        name; without a standby, survivors will form their link when they need it."""
        build, self.build = self.build, None
        if build is None:
            return []
        if build.joiner:
            self.waiting.append(build.joiner)
        else:
            self._unbuildable.add(build.members)
        return self._next_build()

    def link_failed(self, link_id: str, cause: str, void: bool = False) -> list[Record]:
        """A collective failed with every process alive (a flapping link): new epoch, same members, nobody is evicted.

        ``void``: the ledgers contradict each other, all are emptied. Raises DeadlineExceeded if this happens MAX_LINK_FAILURES times
        in one step.
        """
        if link_id != self.view.link_id or self.state in (State.LOST, State.HALTED):
            return []
        self._link_failures += 1
        if self._link_failures >= MAX_LINK_FAILURES:
            raise DeadlineExceeded(
                f"step {self.committed + 1}: the link between replicas {list(self.view.replicas)} broke {self._link_failures} times "
                f"with every process alive ({cause}); check the network between their nodes, then resume with resume=auto"
            )
        return [self._new_view(self.view.members, self.view.heals, cause, redeal=void)]

    def heal_failed(self, number: int, cause: str) -> list[Record]:
        """A heal in progress came to nothing, though its source lives as far as is known: it begins anew, from another source if there
        is one. Raises DeadlineExceeded if this happens MAX_HEAL_FAILURES times to one life of a replica."""
        heal = next((h for h in self.view.heals if h.number == number), None)
        if heal is None or self.state in (State.LOST, State.HALTED):
            return []  # it is over
        member = self.view.member(heal.replica)
        assert member is not None
        self._heal_failures[member] = self._heal_failures.get(member, 0) + 1
        if self._heal_failures[member] >= MAX_HEAL_FAILURES:
            raise DeadlineExceeded(
                f"step {self.committed + 1}: replica {heal.replica} could not be healed in {MAX_HEAL_FAILURES} tries ({cause}); check the "
                "network between the nodes of its ranks and the others', then resume with resume=auto"
            )
        others = tuple(h for h in self.view.heals if h is not heal)
        heals = (*others, self._heal(heal.replica, self.view.contributors, others, not_from=heal.source))
        return [self._new_view(self.view.members, heals, f"heal of replica {heal.replica} failed: {cause}", redeal=False)]

    def halt(self, cause: str) -> list[Record]:
        """Fewer members than the minimum, and nobody will come: the step in progress is given up. Has no effect unless HELD."""
        if self.state is not State.HELD:
            return []
        self.state, self.build, self.waiting = State.HALTED, None, []
        return [self._record(Kind.HALT, cause=cause)]

    def take_findings(self) -> list[Finding]:
        """What became known of totals that were not finite, since the last call."""
        return self._nonfinite.take_findings()

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _decide(self) -> list[Record]:
        if self.state is not State.VOTING or not self._all_voted(self.view.members):
            return []
        if not self._agree(self.view.members):
            self._mismatches += 1
            if self._mismatches >= MAX_MISMATCHES:
                raise InvariantViolated(self._describe_mismatch())
            return [self._new_view(self.view.members, self.view.heals, "totals differ between replicas", redeal=True)]
        cause = ""
        if all(self.votes[w].divisor == 0.0 for m in self.view.members for w in m.workers):
            outcome, cause = Outcome.SKIP, "no token of its samples counts"  # it has no mean, and would have none if it were computed once more
        elif not self._finite(self.view.members):
            again = self._nonfinite.happened(self.committed + 1, self.view, self.votes, self.slots)
            if again:
                return [self._new_view(self.view.members, self.view.heals, again, redeal=True)]
            outcome = Outcome.SKIP
        else:
            self._nonfinite.passed(self.committed + 1, self.view)
            if again := self.reruns.happened(self.committed + 1, self.view, self.votes):
                return [] if self.reruns.waits else [self._new_view(self.view.members, self.view.heals, again, redeal=True)]
            outcome = Outcome.APPLY
        return [self._commit(outcome, self.view.members, cause), *self._next_build()]

    def _all_voted(self, members: tuple[Member, ...]) -> bool:
        enough = len(self.votes) >= sum(len(m.workers) for m in members)  # first: of a thousand votes all but the last end here
        return enough and all(w in self.votes for m in members for w in m.workers)

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

    def _commit(self, outcome: Outcome, members: tuple[Member, ...], cause: str) -> Record:
        """Record the step; its record carries the view of the next one, with a joiner if one is ready, and deals its slots. Replicas
        that healed until the vote contribute from now on."""
        before, step = self.view, self.committed + 1
        vote = self.votes[members[0].workers[0]]
        left_out = set(before.quarantined) - set(vote.slots)
        samples = tuple(s for slot, ids in enumerate(self.slots) if slot not in left_out for s in ids)
        dropped = tuple(s for slot, ids in enumerate(self.slots) if slot in left_out for s in ids)
        self.committed = step
        heals = self._still_healing(members)
        self._holding.clear()
        self._mismatches = self._link_failures = 0
        self._nonfinite.clear()
        self.reruns.clear()
        self._died_of = {of: lives for of, lives in self._died_of.items() if of[0] > step}
        epoch, link_id, ready = before.epoch, before.link_id, before.link_ready
        if members != before.members:
            epoch, link_id, ready = before.epoch.next(), *self._link_of(members)
        elif self.build and self.build.joiner and self.build.ready:
            members, heals, link_id = self._with_joiner(members, heals)
            self.standbys[before.members] = before.link_id  # whole and in use until now: it serves if the joiner dies
            epoch, ready = before.epoch.next(), True
        self.view = View(epoch, members, heals, step, link_id, ready, self._deal(members, heals), self._kept_links(), self._quarantined())
        self.votes, self.dealt = {}, len(self.view.deal.lives)
        return self._record(Kind.COMMIT, step=step, epoch=before.epoch, outcome=outcome, samples=samples, dropped=dropped,
                            divisor=vote.divisor, cause=cause, state=self._recipe_state)

    def _with_joiner(self, members: tuple[Member, ...], heals: tuple[Heal, ...]) -> tuple[tuple[Member, ...], tuple[Heal, ...], str]:
        """Members and heals with the joiner among them, and their link."""
        assert self.build is not None and self.build.joiner is not None
        build, self.build = self.build, None
        assert build.joiner is not None
        joined = tuple(sorted((*members, build.joiner), key=lambda m: m.replica))
        healing = {h.replica for h in heals}
        sources = tuple(m.replica for m in members if m.replica not in healing)
        return joined, (*heals, self._heal(build.joiner.replica, sources, heals)), build.link_id

    def _heal(self, replica: int, sources: tuple[int, ...], heals: tuple[Heal, ...], not_from: int | None = None) -> Heal:
        """From the contributor that serves the fewest, of the version that is committed."""
        serving = [h.source for h in heals]
        self._heals += 1
        return Heal(self._heals, replica, min(sources, key=lambda s: (s == not_from, serving.count(s), s)), self.committed)

    def _still_healing(self, members: tuple[Member, ...]) -> tuple[Heal, ...]:
        """The heals that go on among these members, of whoever has not voted with the state in its hands. Those whose source is gone
        begin anew, if there is anybody to serve them."""
        heals = tuple(
            h for h in self.view.heals for m in members if m.replica == h.replica and not self._holding.issuperset(m.workers)
        )
        healing = {h.replica for h in heals}
        sources = tuple(m.replica for m in members if m.replica not in healing)
        goes_on = tuple(h for h in heals if h.source in sources or not sources)
        for lost in heals:
            if lost not in goes_on:
                goes_on = (*goes_on, self._heal(lost.replica, sources, goes_on))
        return goes_on

    def _next_build(self) -> list[Record]:
        """Order the next link build: a joiner's before standbys."""
        if self.build or not self.view.contributors or self.state in (State.LOST, State.HALTED):
            return []
        if self.waiting:
            joiner = self.waiting.pop(0)
            members = tuple(sorted((*self.view.members, joiner), key=lambda m: m.replica))
        else:
            wanted = self._next_standby()
            if wanted is None:
                return []
            joiner, members = None, wanted
        self.build = Build(self._new_link(members), members, joiner)
        self._records += 1
        return [Record(self._records, Kind.BUILD, View(self.view.epoch, members, (), self.committed, self.build.link_id))]

    def _next_standby(self) -> tuple[Member, ...] | None:
        """Members without one of them, for whom there is no link yet. A single survivor needs none."""
        members = self.view.members
        if not 3 <= len(members) <= self._standbys_up_to or self.view.heals:
            return None
        without = [tuple(m for m in members if m is not one) for one in members]
        return next((rest for rest in without if rest not in self.standbys and rest not in self._unbuildable), None)

    # -- records ------------------------------------------------------------------------------------------------------

    def _deal(self, members: tuple[Member, ...], heals: tuple[Heal, ...]) -> Deal:
        if self.mode is Mode.WAIT:
            dealt = members if len(members) >= self.min_replicas else ()
        else:
            healing = {h.replica for h in heals}
            dealt = tuple(m for m in members if m.replica not in healing)
        return Deal(self.view.deal.number + 1, tuple((m.replica, m.build) for m in dealt), self._nonfinite.shift)

    def _quarantined(self) -> tuple[int, ...]:
        """Slots of the next step that nobody is to compute any more. After a rollback that knows of what replicas died before."""
        step, limit = self.committed + 1, self._quarantine_after
        return tuple(sorted(slot for (of, slot), lives in self._died_of.items() if of == step and 0 < limit <= len(lives)))

    def _link_of(self, members: tuple[Member, ...]) -> tuple[str, bool]:
        """(name, whether every rank has it): the standby of these members, or a link that they will form."""
        standby = self.standbys.pop(members, None)
        return (standby, True) if standby else (self._new_link(members), False)

    def _kept_links(self) -> tuple[str, ...]:
        return (*self.standbys.values(), *([self.build.link_id] if self.build else []))

    def _new_link(self, members: tuple[Member, ...]) -> str:
        self._links += 1
        return link_name(members, self.view.epoch.incarnation, self._links)

    def _new_view(
        self, members: tuple[Member, ...], heals: tuple[Heal, ...], cause: str, *, redeal: bool, link_id: str | None = None
    ) -> Record:
        name, ready = (link_id, True) if link_id else self._link_of(members)
        deal = self._deal(members, heals) if redeal or self.mode is not Mode.SALVAGE else self.view.deal
        self.view = View(self.view.epoch.next(), members, heals, self.committed, name, ready, deal, self._kept_links(), self._quarantined())
        self.votes = {}
        return self._record(Kind.VIEW, cause=cause)

    def _record(
        self, kind: Kind, step: int = 0, epoch: Epoch | None = None, outcome: Outcome = Outcome.APPLY,
        samples: tuple[str, ...] = (), dropped: tuple[str, ...] = (), divisor: float = 0.0, cause: str = "",
        state: dict[str, Any] | None = None,
    ) -> Record:
        self._records += 1
        return Record(self._records, kind, self.view, step, epoch, outcome, samples, dropped, divisor, cause, state)

    def _describe_mismatch(self) -> str:
        rows = "; ".join(
            f"{w}: digest {v.digest:x} divisor {v.divisor} norm {v.grad_norm_bits:x} finite {v.finite} slots {list(v.slots)}"
            for w, v in sorted(self.votes.items())
        )
        return (
            f"step {self.committed + 1}: the replicas' totals differ {self._mismatches} times in a row ({rows}); "
            "a device computes wrongly or the reduction is broken. Nothing was committed; resume from the last checkpoint."
        )
