"""Who computes wrongly: in some steps one slot of every replica is computed by another one, too, and compared before anything is committed.

If two disagree about a slot, the step is computed once more, where there are three replicas or more with other witnesses. A result that two
different replicas came to is the right one; who said anything else is at fault. If there is none (two replicas, each of which says the same
thing twice) then only who contradicts himself is; otherwise nobody knows, and the run ends. Pure, but for digests of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from everstep.errors import InvariantViolated
from everstep.recovery.digest import digest_of
from everstep.recovery.view import Deal, Member, Rerun, View, Vote


def rerun_of(slot: int, gradients: Sequence[torch.Tensor]) -> Rerun:
    """``gradients``: raw sums of this slot alone."""
    return Rerun(slot, digest_of(gradients), math.hypot(*(float(torch.linalg.vector_norm(g)) for g in gradients)))


@dataclass(frozen=True)
class Culprit:
    worker: str
    replica: int
    rank: int
    cause: str


def looked_at(deal: Deal, member: Member, slots: int, step: int) -> tuple[int | None, int | None]:
    """(a slot of its own that this member computes by itself, one of another replica that it computes as its witness), each None if
    there is none. A pure function of the deal: all know who watches whom. Another deal has other witnesses, if there are enough."""
    lives = sorted(deal.lives)
    if len(lives) < 2 or (member.replica, member.build) not in lives:
        return None, None
    index, offset = lives.index((member.replica, member.build)), 1 + deal.number % (len(lives) - 1)
    watched = lives[(index + offset) % len(lives)]

    def one_of(life: tuple[int, int]) -> int | None:
        share = deal.share(Member(life[0], life[1], ()), slots)
        return share[step % len(share)] if share else None

    return one_of(lives[index]), one_of(watched)


class Reruns:
    """Of the step in progress, at the coordinator. ``tolerance``: by how much norms may differ, relatively (0: results are compared bit by
    bit). ``evict``: who is found out is expelled; otherwise the run ends."""

    def __init__(self, tolerance: float = 0.0, evict: bool = True):
        self._tolerance, self._evict = tolerance, evict
        self._said: dict[tuple[int, int], set[tuple[int, str, Rerun]]] = {}  # (rank, slot) -> by (replica, worker), in all attempts
        self._attempts = 0
        self._culprits: list[Culprit] = []
        self.guilty: set[str] = set()  # workers that were found out: nothing that they gave to this step counts

    def clear(self) -> None:
        """Another step is in progress."""
        self._said.clear()
        self._attempts = 0
        self.guilty.clear()

    def disputed(self, view: View, votes: Mapping[str, Vote]) -> bool:
        """Whether there is a slot in these votes about which two replicas disagree."""
        return any(not self._agree(said) for said in self._by_slot(view, votes).values())

    def happened(self, step: int, view: View, votes: Mapping[str, Vote]) -> str:
        """The votes agree on a finite total. "": it may be committed; else why there is another attempt, or, if it ``waits``, whose
        death is waited for. Raises InvariantViolated if somebody computes wrongly and nobody knows who, or nobody is to be expelled."""
        now = self._by_slot(view, votes)
        for at, said in now.items():
            self._said.setdefault(at, set()).update(said)
        doubtful = {at: said for at, said in self._said.items() if not self._agree(said)}
        if not doubtful:
            return ""
        self._attempts += 1
        which = ", ".join(f"slot {slot} by replicas {sorted({r for r, _, _ in said})}" for (_, slot), said in sorted(doubtful.items()))
        if self._attempts == 1:
            return f"gradients differ: {which}; computed once more"
        found: dict[str, Culprit] = {}
        for (rank, slot), said in sorted(doubtful.items()):
            for replica, worker in self._wrong(said):
                found[worker] = Culprit(worker, replica, rank, f"corruption: its gradient of slot {slot} of step {step} is not what others compute")
        unclear = [at for at, said in doubtful.items() if not self._wrong(said)]
        if unclear or not self._evict:
            raise InvariantViolated(
                f"step {step}: a device computes wrongly: {which}. "
                + (f"It is that of {', '.join(sorted(found))} (watch.evict_corrupt=false). " if found and not unclear else
                   "Each replica says the same every time, so that nobody knows which (three replicas would). ")
                + "Nothing was committed; run `everstep doctor` on their nodes, then resume with resume=auto"
            )
        self._culprits += found.values()
        self.guilty |= found.keys()
        self._said.clear()  # settled: those who are left begin anew
        self._attempts = 0
        return f"gradients differ: {which}"

    @property
    def waits(self) -> bool:
        """Whether somebody was found out and is not expelled yet."""
        return bool(self._culprits)

    def take_culprits(self) -> list[Culprit]:
        found, self._culprits = self._culprits, []
        return found

    # -- judging --------------------------------------------------------------------------------------------------------------------

    def _by_slot(self, view: View, votes: Mapping[str, Vote]) -> dict[tuple[int, int], set[tuple[int, str, Rerun]]]:
        found: dict[tuple[int, int], set[tuple[int, str, Rerun]]] = {}
        for member in view.members:
            for rank, worker in enumerate(member.workers):
                for rerun in votes[worker].reruns if worker in votes else ():
                    found.setdefault((rank, rerun.slot), set()).add((member.replica, worker, rerun))
        return found

    def _same(self, a: Rerun, b: Rerun) -> bool:
        return a.digest == b.digest or (self._tolerance > 0 and abs(a.norm - b.norm) <= self._tolerance * max(a.norm, b.norm))

    def _agree(self, said: set[tuple[int, str, Rerun]]) -> bool:
        return all(self._same(a, b) for _, _, a in said for _, _, b in said)

    def _wrong(self, said: set[tuple[int, str, Rerun]]) -> set[tuple[int, str]]:
        """Who is at fault in what was said of one slot; nobody if that cannot be told."""
        backed = [(rerun, {replica for replica, _, other in said if self._same(rerun, other)}) for _, _, rerun in said]
        most = max(len(backers) for _, backers in backed)
        if most >= 2:
            right = [rerun for rerun, backers in backed if len(backers) == most]
            if all(self._same(a, b) for a in right for b in right):
                return {(replica, worker) for replica, worker, rerun in said if not self._same(rerun, right[0])}
            return set()
        twofaced = {(r, w) for r, w, a in said for q, v, b in said if (r, w) == (q, v) and not self._same(a, b)}
        return twofaced if len(twofaced) == 1 else set()
