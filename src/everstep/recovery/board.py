"""The board: what lets a recipe run in every rank of several replicas, which die and join, as if it ran in one place. Pure.

A recipe is the same program everywhere, and what it does next depends on nothing but its state and the results of its calls. So a
call is named by its place in the program: ``(generation, index)``, the index-th call since the recipe last said what it could go on
from (a *bookmark*). The board decides who computes a call, keeps the parts they give, and hands the same result to everybody, also to
those that ask later: a replica that joins takes the bookmark and runs the recipe with the results that are on the board (that is
rule 21's iteration record), until it comes to what has not happened yet.

    who            computes it                            when one of them dies before it gave its part
    =============  =====================================  ===============================================================
    contributors   all that hold the committed state      all that are left compute it anew (a part is of one division of
                                                          the work; one who finds itself in the same division gives the same)
    one            the contributor with the smallest id   the next one computes it
    reports        all contributors, each of itself       its part is left out
    =============  =====================================  ===============================================================

Results of the present generation and of the one before are kept: whoever is a member can lag behind the others by one bookmark at
most, because a step needs all members.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from everstep.errors import InvariantViolated
from everstep.recovery.view import Member, View

Place = tuple[int, int]  # (generation, index)
KEPT_GENERATIONS = 2


class Who(StrEnum):
    CONTRIBUTORS = "contributors"
    ONE = "one"
    REPORTS = "reports"


@dataclass(frozen=True)
class Result:
    """The parts by replica, in ascending order of ``replicas``; ``contributors``: of the view when it was complete."""

    replicas: tuple[int, ...]
    contributors: tuple[int, ...]
    parts: tuple[bytes, ...]


@dataclass(frozen=True)
class Work:
    """The call is to be computed by ``members``, in this attempt at it."""

    attempt: int
    members: tuple[Member, ...]


@dataclass
class Journal:
    """What a member saw of a generation: ``bookmark`` (see :class:`Board`), and by index what was called, by whom computed, with what
    result."""

    generation: int
    bookmark: tuple[bytes, int]
    results: dict[int, tuple[str, Who, Result]] = field(default_factory=dict)


@dataclass
class Call:
    what: str
    who: Who
    since: float
    attempt: int = 0
    members: tuple[Member, ...] = ()
    parts: dict[Member, bytes] = field(default_factory=dict)
    given: dict[Member, float] = field(default_factory=dict)  # when
    result: Result | None = None


class Board:
    """``bookmark``: (what the recipe can go on from, as bytes; the committed step there) of the present generation."""

    def __init__(self) -> None:
        self.generation = 0
        self.bookmark: tuple[bytes, int] = (b"", 0)
        self.has_reference = False  # whether the run keeps a reference model by now
        self._calls: dict[Place, Call] = {}

    # -- events ---------------------------------------------------------------------------------------------------------

    def ask(self, place: Place, what: str, who: Who, view: View, now: float) -> Result | Work | None:
        """Somebody came to this call. None: nobody can compute it at present. Raises InvariantViolated if others called something
        else at this place."""
        call = self._calls.get(place)
        if call is None:
            self._must_be_kept(place)
            call = self._calls[place] = Call(what, who, now)
        if (call.what, call.who) != (what, who):
            raise InvariantViolated(
                f"call {place[1]} after bookmark {place[0]} is {what!r} in one replica and {call.what!r} in another: the recipe must "
                "depend on nothing but its configuration, its state and the results of its calls"
            )
        if call.result is None and not call.members:
            self._begin(call, view, now)
        if call.result is not None:
            return call.result
        return Work(call.attempt, call.members) if call.members else None

    def has_given(self, place: Place, member: Member) -> bool:
        """Whether this member's part of the present attempt is here."""
        call = self._calls.get(place)
        return call is not None and member in call.parts

    def give(self, place: Place, attempt: int, member: Member, part: bytes, view: View, now: float) -> None:
        """Of an attempt that is over it has no effect."""
        call = self._calls.get(place)
        if call is None or call.result is not None or attempt != call.attempt or member not in call.members:
            return
        call.parts[member], call.given[member] = part, now
        self._settle(call, view, now)

    def view_changed(self, view: View, now: float) -> None:
        for call in self._calls.values():
            if call.result is None and call.members:
                self._settle(call, view, now)

    def mark(self, generation: int, bookmark: tuple[bytes, int]) -> None:
        """The recipe can go on from here. Raises InvariantViolated if another replica said something else."""
        if generation <= self.generation:
            if generation == self.generation and bookmark != self.bookmark:
                raise InvariantViolated(f"the recipe's state at bookmark {generation} (step {bookmark[1]}) differs between replicas")
            return
        self.generation, self.bookmark = generation, bookmark
        for place in [p for p in self._calls if p[0] <= generation - KEPT_GENERATIONS]:
            del self._calls[place]

    def restore(self, journal: Journal, reference: bool) -> None:
        """What a member of an earlier board saw."""
        self.has_reference = self.has_reference or reference
        if journal.generation > self.generation:
            self.mark(journal.generation, journal.bookmark)
        if journal.generation > self.generation - KEPT_GENERATIONS:
            for index, (what, who, result) in journal.results.items():
                call = self._calls.setdefault((journal.generation, index), Call(what, who, 0.0))
                call.result = call.result or result

    def overdue(self, now: float, after_peers_s: float, whole_s: float) -> dict[Member, str]:
        """Members whose part does not come: ``after_peers_s`` after all others' (recovery.progress_timeout_s), or ``whole_s`` after the
        attempt began (recovery.call_timeout_s)."""
        late: dict[Member, str] = {}
        for call in self._calls.values():
            owing = [m for m in call.members if m not in call.parts] if call.result is None else []
            if len(owing) == 1 and call.given and now - max(call.given.values()) > after_peers_s:
                late[owing[0]] = f"owes its part of {call.what} {after_peers_s:g} s after its peers"
            elif owing and now - call.since > whole_s:
                late |= dict.fromkeys(owing, f"{call.what} took longer than {whole_s:g} s (recovery.call_timeout_s)")
        return late

    # -- parts ------------------------------------------------------------------------------------------------------------

    def _begin(self, call: Call, view: View, now: float) -> None:
        able = tuple(m for m in view.members if m.replica not in view.healing)
        call.attempt += 1
        call.members = able[:1] if call.who is Who.ONE else able
        call.since, call.parts, call.given = now, {}, {}

    def _settle(self, call: Call, view: View, now: float) -> None:
        """Complete the call if all have given; begin it anew, or wait for one less, if one died before."""
        lost = [m for m in call.members if m not in call.parts and view.member(m.replica) != m]
        if lost and (call.who is not Who.REPORTS or len(lost) == len(call.members)):
            self._begin(call, view, now)
            return
        call.members = tuple(m for m in call.members if m not in lost)
        if call.members and all(m in call.parts for m in call.members):
            call.result = Result(
                tuple(m.replica for m in call.members), view.contributors, tuple(call.parts[m] for m in call.members)
            )
            call.parts = {}

    def _must_be_kept(self, place: Place) -> None:
        if place[0] <= self.generation - KEPT_GENERATIONS or place[0] > self.generation + 1:
            raise InvariantViolated(f"call {place[1]} after bookmark {place[0]} is asked for, the run is at bookmark {self.generation}")
