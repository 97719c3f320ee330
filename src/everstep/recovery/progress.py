"""Who makes no progress while its peers do. Pure: messages and times in, verdicts out; no clock, no thread, no socket.

A rank can be alive, heartbeat, and still never leave a phase (a lost wake-up, a driver call that does not return, user code
that waits). How long a phase may take nobody knows, but the ranks of the same position in the other replicas do the same work:
a rank is *overdue* when all of them have left its phase long ago. Everybody slow together is nobody's fault.

A view ends the attempt at a step, and sends its members back. So each message says under which view the rank acts (its epoch), and
whoever acts under a newer one is ahead, at whatever phase: a rank that hangs in an attempt that has ended may hang at a later phase
than the others reach without it. Only who computes is not behind because of a view, which it need not look at before it is done: its
peers are ahead once they have nothing to compute any more. Since when they are, further views do not change.

The deadlines, each counted from the later of the rank's entry into its phase and the last peer's departure from it:

    ===================================  ==============================================================================
    ``progress_s``                       any phase, once the rank has finished a step in its present life
    ``step_s``                           its first step (warm-up of kernels, caches), which is legally slow
    ``heal_s``                           while it heals, in its first step or not; the others, while any replica heals: its
                                         source streams before it reduces, its peers wait
    ``step_s`` since the rank's entry    a phase that waits for nobody outside, once *any* peer has left it: for several
                                         ranks that hang together, which keep each other from being overdue
    ===================================  ==============================================================================

In an attempt that a view has ended nobody waits for anybody. If nobody at all leaves such a phase for ``step_s`` there is no peer to be
judged by: :meth:`Judge.stalled` says so; of a single member also while it waits, for there is nobody to wait for.

Of an overdue replica only the rank that holds the others up is named: the one at the earliest point, and of several there the
ones that do not themselves wait in a collective.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from everstep.recovery.view import Member

#: Phases of a step in the order in which a rank passes them. ``exchanging``, ``reducing``: seen inside that collective (until then
#: its peers wait for it there, and leave as little as it does; who has nothing to salvage waits so for those that have); ``voted``:
#: its vote has arrived; ``idle``: the step is finished.
ORDER = ("begin", "heal", "compute", "exchange", "salvage", "exchanging", "reduce", "reducing", "vote", "voted", "apply", "idle")
_INSIDE = {"exchange": "exchanging", "reduce": "reducing"}
_SAID = {inside: said for said, inside in _INSIDE.items()}
#: Phases in which a rank waits for nobody outside its replica (heal: for one peer, which streams while it computes).
BUSY = frozenset({"heal", "compute", "exchange", "salvage", "reduce", "vote", "apply"})
#: Phases that a newer view does not end.
_COMPUTES = frozenset({"compute", "salvage"})
#: Phases outside of an attempt.
_BETWEEN = frozenset({"begin", "apply", "idle"})
_EPOCHS = 64  # of one rank that are remembered; the coordinator gives a step up long before it has seen so many

Stamp = tuple[int, int]  # an epoch's key
Place = tuple[int, int]  # (replica, position)


@dataclass(frozen=True)
class Deadlines:
    """Seconds; see the table above (``recovery.progress_timeout_s``, ``step_timeout_s``, ``heal_timeout_s``)."""

    progress_s: float
    step_s: float
    heal_s: float


@dataclass(frozen=True)
class Overdue:
    worker: str
    cause: str


@dataclass
class _Standing:
    """Where one rank is. ``since``: when it came there, or became a member, whichever is later."""

    life: tuple[int, int]  # (replica, build)
    position: int
    epoch: Stamp
    step: int
    phase: str
    since: float
    waits: bool  # its main thread was last seen inside a collective
    epochs: list[tuple[Stamp, float]]  # under which it acted, and since when; the last one is its present one
    step_since: float  # when it came to its step, in whatever attempt
    warm: bool = False   # has finished a step in this life
    computed: float | None = None  # since when it has nothing to compute in its step, as far as is known; a new view does not change that
    ended: float | None = None     # since when the attempt of its epoch is over

    @property
    def point(self) -> tuple[Stamp, int, int]:
        return self.epoch, self.step, ORDER.index(self.phase)

    @property
    def judged(self) -> bool:
        """A call from outside (a rollout, a save) is no phase of a step: its caller judges it (:func:`overdue_results`)."""
        return self.phase in ORDER

    @property
    def left_over(self) -> bool:
        """It is still in an attempt that has ended."""
        return self.ended is not None and self.judged and self.phase not in _BETWEEN

    @property
    def stays_since(self) -> float:
        """Since when it has nobody to wait for, if it is busy or left over."""
        return max(self.since, self.ended) if self.left_over and self.ended is not None else self.since

    def moves(self, epoch: Stamp, step: int, phase: str, now: float) -> None:
        if epoch != self.epoch:
            self.epochs = [*self.epochs, (epoch, now)][-_EPOCHS:]
        if step != self.step:
            self.step_since = now
        if phase in _COMPUTES or step != self.step:
            self.computed = None
        if self.computed is None and phase in ORDER[ORDER.index("exchange"):] and phase not in _COMPUTES:
            self.computed = now
        self.warm = self.warm or (self.phase == "apply" and phase == "idle")
        self.epoch, self.step, self.phase, self.since = epoch, step, phase, now

    def ahead_since(self, other: _Standing) -> float | None:
        """Since when this rank has been further than ``other`` is; None if it is not. Between steps nobody is: whoever came last begins like
        the others."""
        if self.phase == other.phase == "idle":
            return None
        if self.epoch > other.epoch:
            if self.step != other.step:  # the next one, or one to which all were rolled back
                return self.step_since
            if other.phase in _COMPUTES:
                return self.computed
            return next(since for epoch, since in self.epochs if epoch > other.epoch)
        return self.since if self.point > other.point else None


class Judge:
    def __init__(self, deadlines: Deadlines):
        self._deadlines = deadlines
        self._said: dict[str, tuple[Stamp, int, str, bool]] = {}  # worker -> epoch, step, phase, waits
        self._standing: dict[str, _Standing] = {}
        self._healing: frozenset[int] = frozenset()
        self._begun: Stamp = (0, 0)  # attempts under older epochs have ended

    # -- what happens ---------------------------------------------------------------------------------------------------

    def entered(self, worker: str, step: int, phase: str, now: float, waits: bool = False, epoch: Stamp = (0, 0)) -> None:
        """A rank that acts under the view of ``epoch`` said where it is (a repeated message changes nothing but ``waits``), or its vote
        arrived (``voted``)."""
        if self._said.get(worker, ())[:3] == (epoch, step, "voted") and phase == "vote":
            phase = "voted"  # a heartbeat between the vote and what follows it
        if waits:
            phase = _INSIDE.get(phase, phase)
        self._said[worker] = (epoch, step, phase, waits)
        standing = self._standing.get(worker)
        if standing is None:
            return
        standing.waits = waits
        if (standing.epoch, standing.step, standing.phase) != (epoch, step, phase):
            standing.moves(epoch, step, phase, now)
        self._note_end(standing, now)

    def view(self, members: Sequence[Member], healing: Collection[int], now: float, begins: Stamp | None = None) -> None:
        """A new view, or the same one repeated by a commit. A replica that was formed anew begins a new life. ``begins``: the epoch of a
        view under which the attempt begins anew; that of the one before has ended."""
        self._begun = begins or self._begun
        standing: dict[str, _Standing] = {}
        for member in members:
            for position, worker in enumerate(member.workers):
                life, known = (member.replica, member.build), self._standing.get(worker)
                if known is None or known.life != life:
                    epoch, step, phase, waits = self._said.get(worker, ((0, 0), 0, "idle", False))
                    known = _Standing(life, position, epoch, step, phase, now, waits, [(epoch, now)], now)
                standing[worker] = known
                self._note_end(known, now)
        self._standing, self._healing = standing, frozenset(healing)

    def _note_end(self, standing: _Standing, now: float) -> None:
        if standing.epoch >= self._begun:
            standing.ended = None
        elif standing.ended is None:
            standing.ended = now

    def excuse(self, seconds: float) -> None:
        """The observer itself was suspended for so long: nobody could be heard meanwhile."""
        for standing in self._standing.values():
            standing.since += seconds
            standing.step_since += seconds
            standing.epochs = [(epoch, since + seconds) for epoch, since in standing.epochs]
            standing.computed = None if standing.computed is None else standing.computed + seconds
            standing.ended = None if standing.ended is None else standing.ended + seconds

    # -- verdicts ---------------------------------------------------------------------------------------------------------

    def overdue(self, now: float) -> list[Overdue]:
        accused: dict[tuple[int, int], str] = {}
        for standing in self._standing.values():
            if standing.life not in accused and (why := self._late(standing, now)):
                accused[standing.life] = why
        return [Overdue(worker, why) for life, why in accused.items() for worker in self._holding_up(life)]

    def stalled(self, now: float) -> str:
        """Why the step cannot go on although every process is alive: in each member that does not heal somebody has not left, in time, a
        phase in which it waits for nobody. Empty if that is not so."""
        alone = len({s.life for s in self._standing.values()}) == 1
        judged = [s for s in self._standing.values() if s.life[0] not in self._healing]
        waits_for_nobody = lambda s: s.phase in BUSY or s.left_over or (alone and s.phase in _SAID)
        stuck = {s.life: s for s in judged if waits_for_nobody(s) and now - s.stays_since > self._phase_limit(s)}
        if not stuck or len(stuck) < len({s.life for s in judged}):
            return ""
        return "; ".join(f"rank {s.life[0]}/{s.position} is in {self._where(s)} for {now - s.stays_since:.1f} s" for s in stuck.values())

    @staticmethod
    def _where(standing: _Standing) -> str:
        return standing.phase + (" of an attempt that has ended" if standing.left_over else "")

    def _late(self, standing: _Standing, now: float) -> str:
        peers = [
            s for s in self._standing.values()
            if s.position == standing.position and s.life != standing.life and s.life[0] not in self._healing
        ]
        if not standing.judged or not peers:
            return ""
        ahead = [since for s in peers if s.judged and (since := s.ahead_since(standing)) is not None]
        where = f"no progress: step {standing.step}, {self._where(standing)}"
        if len(ahead) == len(peers):
            lag = now - max(standing.since, *ahead)
            if lag > self._lag_limit(standing):
                return f"{where}, {lag:.1f} s after its peers left it"
        if ahead and (standing.phase in BUSY or standing.left_over) and now - standing.stays_since > self._phase_limit(standing):
            return f"{where} for {now - standing.stays_since:.1f} s, and a peer has left it"
        return ""

    def _lag_limit(self, standing: _Standing) -> float:
        limits = self._deadlines
        if standing.phase == "heal":
            return limits.heal_s
        limit = limits.progress_s if standing.warm else max(limits.progress_s, limits.step_s)
        return max(limit, limits.heal_s) if self._healing else limit

    def _phase_limit(self, standing: _Standing) -> float:
        limits = self._deadlines
        if standing.phase == "heal":
            return limits.heal_s
        return max(limits.step_s, limits.heal_s) if self._healing else limits.step_s

    def _holding_up(self, life: tuple[int, int]) -> list[str]:
        ranks = {w: s for w, s in self._standing.items() if s.life == life and s.judged}
        first = min(s.point for s in ranks.values())
        behind = [w for w, s in ranks.items() if s.point == first]
        return [w for w in behind if not ranks[w].waits] or behind


def overdue_results(waiting: Mapping[str, Place], returned: Mapping[str, tuple[Place, float]], now: float, limit_s: float) -> list[str]:
    """Of the ranks that were called together, those whose result is late: all ranks of their position in other replicas have
    returned theirs (``returned``: place and time), the last one more than ``limit_s`` ago."""
    late = []
    for worker, (replica, position) in waiting.items():
        peers_out = [1 for r, p in waiting.values() if p == position and r != replica]
        peers_back = [t for (r, p), t in returned.values() if p == position and r != replica]
        if peers_back and not peers_out and now - max(peers_back) > limit_s:
            late.append(worker)
    return late
