"""Ledgers: the gradient sums that a rank holds of a step in progress, and of which slots they are.

A ledger outlives the attempts of its step: what was computed under an older view counts under the next one, unless the coordinator
dealt the slots anew. Entry and merge are one act (docs/protocol.md, rule 11): a computation that is interrupted leaves the ledger
as it was.

Two forms. :class:`SumLedger` adds slots up as they are computed; members' sums are all-reduced. :class:`SlotLedger` (exact mode)
keeps each slot by itself, whoever computes it, and all slots are added in the order of their numbers: the total is then bitwise the
same whatever the membership was, at the price of one gradient buffer a slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from everstep.errors import LedgersDiffer
from everstep.recovery.link import Link
from everstep.recovery.view import View


@dataclass(frozen=True)
class Contribution:
    """Raw sums of some slots: ``gradients`` of this rank's optimizer shard, ``sums`` agreed by the replica (weight first)."""

    gradients: list[torch.Tensor]
    sums: torch.Tensor  # float64, CPU


@dataclass(frozen=True)
class Inventory:
    """What all members of a link hold together. ``owners[slot]``: the member (index in the link) that holds it."""

    slots: int
    owners: dict[int, int]
    sums: torch.Tensor  # float64, CPU, folded over everything held

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(sorted(self.owners))

    def missing(self, quarantined: Sequence[int] = ()) -> tuple[int, ...]:
        """Slots that nobody holds and somebody has to compute."""
        return tuple(slot for slot in range(self.slots) if slot not in self.owners and slot not in quarantined)


class Ledger(ABC):
    """``deal``: number of the deal that it belongs to. ``held``: its slots, in ascending order."""

    def __init__(self) -> None:
        self.deal = -1
        self.held: tuple[int, ...] = ()
        self._closely = False  # whether each slot is computed by itself

    def open(self, deal: int) -> bool:
        """Belong to this deal; True if that emptied the ledger: what it deals is to be filled in, even if that is nothing."""
        if deal == self.deal:
            return False
        self.deal, self.held = deal, ()
        self._empty()
        return True

    def fill(self, slots: tuple[int, ...], compute: Callable[[tuple[int, ...]], Contribution]) -> None:
        """Compute slots and take them in. ``compute(())`` gives zeros of the right sizes."""
        for portion in self._portions(slots):
            if set(portion) & set(self.held):
                raise LedgersDiffer(f"slots {portion} are to be computed, but {self.held} are held already")
            self._secure()
            self._take(portion, compute(portion))
            self.held = tuple(sorted((*self.held, *portion)))

    def exchange(self, link: Link, slots: int, stop: Callable[[], bool], timeout_s: float) -> Inventory:
        """Tell all members what I hold, and learn what they do. Raises LinkBroken, LedgersDiffer."""
        mine = torch.zeros(slots, dtype=torch.float64)
        mine[list(self.held)] = 1.0
        rows = link.gather(torch.cat([mine, self._head(slots)]), stop, timeout_s)
        owners: dict[int, int] = {}
        for member, row in enumerate(rows):
            for slot in row[:slots].nonzero().flatten().tolist():
                if slot in owners:
                    raise LedgersDiffer(f"slot {slot} is held by replicas {link.replicas[owners[slot]]} and {link.replicas[member]}")
                owners[slot] = member
        return Inventory(slots, owners, self._fold([row[slots:] for row in rows], owners))

    def look_closely(self) -> None:
        """A total was not finite: from now on it is to be told of which slot that came."""
        self._closely = True

    def spoiled(self) -> tuple[int, ...]:
        """Slots I hold of which a sum or a gradient is not finite; all that were computed together. () if that cannot be told."""
        return ()

    @abstractmethod
    def may_send(self, view: View, beside: Callable[[], Link], stop: Callable[[], bool], timeout_s: float) -> None:
        """What follows is computed under ``view``; ``beside`` forms a link of its members for sums that shall not wait for all of it."""

    @abstractmethod
    def total(
        self, link: Link, inventory: Inventory, stop: Callable[[], bool], timeout_s: float, issued: Callable[[], None], in_place: bool = False
    ) -> list[torch.Tensor]:
        """Gradients of all slots; bitwise equal on all members. Out of place unless ``in_place`` allows to give up what is held.
        ``issued``: called once collectives run. Raises LinkBroken."""

    @abstractmethod
    def _portions(self, slots: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        """In how many computations slots are taken in; always at least one."""

    @abstractmethod
    def _secure(self) -> None:
        """Before a computation, which overwrites the engine's buffers."""

    @abstractmethod
    def _take(self, slots: tuple[int, ...], contribution: Contribution) -> None: ...

    @abstractmethod
    def _head(self, slots: int) -> torch.Tensor:
        """My sums, as sent to the others: of the same length on all members."""

    @abstractmethod
    def _fold(self, heads: list[torch.Tensor], owners: dict[int, int]) -> torch.Tensor: ...

    @abstractmethod
    def _empty(self) -> None: ...


class SumLedger(Ledger):
    """One sum. The first contribution stays where the engine has it; only when a second one follows, after a death, are the two
    added in a buffer of the ledger's own."""

    def __init__(self) -> None:
        super().__init__()
        self._gradients: list[torch.Tensor] = []
        self._own: list[torch.Tensor] | None = None
        self._sums = torch.zeros(0, dtype=torch.float64)
        self._spoiled: set[int] = set()  # looked at closely
        self._given_up = False           # a sum in place has overwritten what was held

    def may_send(self, view: View, beside: Callable[[], Link], stop: Callable[[], bool], timeout_s: float) -> None:
        pass  # a gradient is complete only at the end

    def total(
        self, link: Link, inventory: Inventory, stop: Callable[[], bool], timeout_s: float, issued: Callable[[], None], in_place: bool = False
    ) -> list[torch.Tensor]:
        self._given_up = in_place
        return link.sum(self._gradients, stop, timeout_s, issued, in_place)

    def spoiled(self) -> tuple[int, ...]:
        if self._closely:
            return tuple(sorted(self._spoiled))
        return () if _finite([*([] if self._given_up else self._gradients), self._sums]) else self.held

    def _portions(self, slots: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        return [(slot,) for slot in slots] if self._closely and slots else [slots]

    def _secure(self) -> None:
        if self.held and self._own is None:
            self._own = [g.detach().clone() for g in self._gradients]

    def _take(self, slots: tuple[int, ...], contribution: Contribution) -> None:
        if self._closely and not _finite([*contribution.gradients, contribution.sums]):
            self._spoiled |= set(slots)
        if not self.held:
            self._gradients, self._own, self._sums = contribution.gradients, None, contribution.sums.to(torch.float64)
            return
        assert self._own is not None
        for own, gradient in zip(self._own, contribution.gradients, strict=True):
            own += gradient
        self._gradients = self._own
        self._sums = self._sums + contribution.sums

    def _head(self, slots: int) -> torch.Tensor:
        return self._sums

    def _fold(self, heads: list[torch.Tensor], owners: dict[int, int]) -> torch.Tensor:
        total = torch.zeros_like(heads[0])
        for head in heads:
            total += head
        return total

    def _empty(self) -> None:
        self._gradients, self._own = [], None
        self._spoiled.clear()


class SlotLedger(Ledger):
    """Each slot by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._slots: dict[int, Contribution] = {}
        self._like: list[torch.Tensor] = []  # tensors of the shapes of one slot's gradient: the engine's buffers
        self._zeros = torch.zeros(0, dtype=torch.float64)

    def may_send(self, view: View, beside: Callable[[], Link], stop: Callable[[], bool], timeout_s: float) -> None:
        pass  # a gradient is complete only at the end

    def total(
        self, link: Link, inventory: Inventory, stop: Callable[[], bool], timeout_s: float, issued: Callable[[], None], in_place: bool = False
    ) -> list[torch.Tensor]:
        owners = dict(sorted(inventory.owners.items()))
        mine = {slot: contribution.gradients for slot, contribution in self._slots.items()}
        return link.fold(self._like, owners, mine, stop, timeout_s, issued)

    def _portions(self, slots: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        return [(slot,) for slot in slots] or [()]

    def spoiled(self) -> tuple[int, ...]:
        return tuple(slot for slot, held in sorted(self._slots.items()) if not _finite([*held.gradients, held.sums]))

    def _secure(self) -> None:
        pass  # every slot was copied when it was taken in

    def _take(self, slots: tuple[int, ...], contribution: Contribution) -> None:
        self._like, self._zeros = contribution.gradients, torch.zeros_like(contribution.sums, dtype=torch.float64)
        for slot in slots:
            self._slots[slot] = Contribution([g.detach().clone() for g in contribution.gradients], contribution.sums.to(torch.float64))

    def _head(self, slots: int) -> torch.Tensor:
        rows = [self._slots[slot].sums if slot in self._slots else self._zeros for slot in range(slots)]
        return torch.cat(rows)

    def _fold(self, heads: list[torch.Tensor], owners: dict[int, int]) -> torch.Tensor:
        width = len(self._zeros)
        total = self._zeros.clone()
        for slot in sorted(owners):
            total += heads[owners[slot]][slot * width : (slot + 1) * width]
        return total

    def _empty(self) -> None:
        self._slots.clear()


def _finite(tensors: Sequence[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
