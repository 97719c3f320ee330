"""Who makes no progress while its peers do. Pure: messages and times in, verdicts out; no clock, no thread, no socket.

A rank can be alive, heartbeat, and still never leave a phase (a lost wake-up, a driver call that does not return, user code
that waits). How long a phase may take nobody knows, but the ranks of the same position in the other replicas do the same work:
a rank is *overdue* when all of them have left its phase long ago. Everybody slow together is nobody's fault.

The deadlines, each counted from the later of the rank's entry into its phase and the last peer's departure from it:

    ===================================  ==============================================================================
    ``progress_s``                       any phase, once the rank has finished a step in its present life
    ``step_s``                           its first step (warm-up of kernels, caches), which is legally slow
    ``heal_s``                           while it heals, in its first step or not; the others, while any replica heals: its
                                         source streams before it reduces, its peers wait
    ``step_s`` since the rank's entry    a phase that waits for nobody outside, once *any* peer has left it: for several
                                         ranks that hang together, which keep each other from being overdue
    ===================================  ==============================================================================

If nobody at all leaves such a phase for ``step_s`` there is no peer to be judged by: :meth:`Judge.stalled` says so.

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
    step: int
    phase: str
    since: float
    warm: bool = False   # has finished a step in this life
    waits: bool = False  # its main thread was last seen inside a collective
    before: bool = False  # where it is belongs to an attempt that a newer view ended: it has yet to begin the next one

    @property
    def point(self) -> tuple[int, int]:
        return self.step, ORDER.index("begin" if self.before else self.phase)

    @property
    def judged(self) -> bool:
        """A call from outside (a rollout, a save) is no phase of a step: its caller judges it (:func:`overdue_results`)."""
        return self.phase in ORDER


class Judge:
    def __init__(self, deadlines: Deadlines):
        self._deadlines = deadlines
        self._said: dict[str, tuple[int, str, float, bool]] = {}  # worker -> step, phase, since, waits
        self._standing: dict[str, _Standing] = {}
        self._healing: frozenset[int] = frozenset()

    # -- what happens ---------------------------------------------------------------------------------------------------

    def entered(self, worker: str, step: int, phase: str, now: float, waits: bool = False) -> None:
        """A rank said where it is (a repeated message changes nothing but ``waits``), or its vote arrived (``voted``)."""
        before = self._said.get(worker)
        if before and before[:2] == (step, "voted") and phase == "vote":
            phase = "voted"  # a heartbeat between the vote and what follows it
        repeated = before is not None and (before[0], _SAID.get(before[1], before[1])) == (step, phase)
        if waits:
            phase = _INSIDE.get(phase, phase)
        since = before[2] if before and before[:2] == (step, phase) else now
        self._said[worker] = (step, phase, since, waits)
        standing = self._standing.get(worker)
        if standing is None:
            return
        standing.waits = waits
        standing.before = standing.before and repeated
        if (standing.step, standing.phase) != (step, phase):
            standing.warm = standing.warm or (standing.phase == "apply" and phase == "idle")
            standing.step, standing.phase, standing.since = step, phase, now

    def view(self, members: Sequence[Member], healing: Collection[int], now: float, anew: bool = False) -> None:
        """A new view, or the same one repeated by a commit. A replica that was formed anew begins a new life. ``anew``: the attempt under way
        has ended. Whoever takes part in the next one says that it begins it; one that hangs goes on repeating where it was, maybe at
        a later point than the others will reach without it."""
        standing: dict[str, _Standing] = {}
        for member in members:
            for position, worker in enumerate(member.workers):
                life, known = (member.replica, member.build), self._standing.get(worker)
                if known is None or known.life != life:
                    step, phase, _, waits = self._said.get(worker, (0, "idle", now, False))
                    known = _Standing(life, position, step, phase, now, waits=waits)
                if anew and known.judged and known.phase not in ("begin", "apply", "idle"):
                    known.before, known.since = True, now
                standing[worker] = known
        self._standing, self._healing = standing, frozenset(healing)

    def excuse(self, seconds: float) -> None:
        """The observer itself was suspended for so long: nobody could be heard meanwhile."""
        for standing in self._standing.values():
            standing.since += seconds

    # -- verdicts ---------------------------------------------------------------------------------------------------------

    def overdue(self, now: float) -> list[Overdue]:
        accused: dict[tuple[int, int], str] = {}
        for standing in self._standing.values():
            if standing.life not in accused and (why := self._late(standing, now)):
                accused[standing.life] = why
        return [Overdue(worker, why) for life, why in accused.items() for worker in self._holding_up(life)]

    def stalled(self, now: float) -> str:
        """Why the step cannot go on although every process is alive: in each member somebody has not left a busy phase in time.
        Empty if that is not so."""
        stuck = {s.life: s for s in self._standing.values() if s.phase in BUSY and now - s.since > self._phase_limit(s)}
        if not stuck or len(stuck) < len({s.life for s in self._standing.values()}):
            return ""
        return "; ".join(f"rank {s.life[0]}/{s.position} is in {s.phase} for {now - s.since:.1f} s" for s in stuck.values())

    def _late(self, standing: _Standing, now: float) -> str:
        peers = [
            s for s in self._standing.values()
            if s.position == standing.position and s.life != standing.life and s.life[0] not in self._healing
        ]
        if not standing.judged or not peers:
            return ""
        ahead = [s for s in peers if s.judged and s.point > standing.point]
        where = f"no progress: step {standing.step}, {standing.phase}" + (" of an attempt that has ended" if standing.before else "")
        if len(ahead) == len(peers):
            lag = now - max(standing.since, *(s.since for s in ahead))
            if lag > self._lag_limit(standing):
                return f"{where}, {lag:.1f} s after its peers left it"
        if ahead and standing.phase in BUSY and now - standing.since > self._phase_limit(standing):
            return f"{where} for {now - standing.since:.1f} s, and a peer has left it"
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
