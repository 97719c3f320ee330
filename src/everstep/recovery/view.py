"""Views, commits and the assignment of slots: the values everybody agrees on. Pure: no process, no socket, no torch.

The coordinator writes one numbered log of :class:`Record`. A rank learns everything that concerns membership from that log,
in order, over one channel (docs/protocol.md, rule 6).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, order=True)
class Epoch:
    """Number of a view. Grows with every change of membership, and across restarts of the coordinator (``incarnation``)."""

    incarnation: int
    counter: int

    def next(self) -> Epoch:
        return Epoch(self.incarnation, self.counter + 1)

    @property
    def key(self) -> tuple[int, int]:
        return (self.incarnation, self.counter)

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.counter}"


@dataclass(frozen=True)
class Member:
    """One replica in one of its lives: ``build`` counts how often it was formed, ``workers[r]`` is its rank r."""

    replica: int
    build: int
    workers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.replica}b{self.build}"


@dataclass(frozen=True)
class Deal:
    """Among whom all slots of a step were divided, when every ledger of it was empty.

    Each commit deals the next step's slots, and views repeat the deal: whoever begins late, under a later view, still computes the
    slots it was dealt, and no slot has two owners (rule 1). A rank whose ledger belongs to a deal with another ``number`` empties
    it and computes what the new deal gives it. ``lives``: (replica, build) of those dealt to; a replica formed anew within the step
    has none of its former life's slots, they are salvaged like any other. With no lives nothing is computed until a later view deals
    again. ``shift``: by how many places slots go to another replica than usual, so that a result that may be a device's fault is
    computed by another device.
    """

    number: int
    lives: tuple[tuple[int, int], ...] = ()
    shift: int = 0

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(replica for replica, _ in self.lives)

    def share(self, member: Member, slots: int) -> tuple[int, ...]:
        """What this member was dealt of ``slots`` slots."""
        if (member.replica, member.build) not in self.lives:
            return ()
        replicas = sorted(self.replicas)
        whose = replicas[(replicas.index(member.replica) + self.shift) % len(replicas)]
        return assign(range(slots), replicas)[whose]


@dataclass(frozen=True)
class Heal:
    """A replica receives the state of ``version`` from a contributor, position by position, over as many steps as that takes.

    It takes part in every step meanwhile: adds zeros, votes for the total, and keeps what is committed, to apply it once it has the
    state. A heal that fails, or whose source leaves, is begun anew, of the version then committed, under another ``number``.
    """

    number: int
    replica: int
    source: int
    version: int


@dataclass(frozen=True)
class View:
    """Which replicas take part in the transaction ``committed + 1``.

    ``heals``: those of the members that do not hold the committed state yet (``healing``); the others are contributors. A healing
    replica has no slots, and becomes a contributor with the commit for which all its ranks voted with the state in their hands.
    ``link_ready`` is true only if every rank of every member acknowledged the link's warm-up; otherwise members form it at
    their next reduce. ``links`` names the links beside it that stay of use: standbys, and the one in construction. ``quarantined``:
    slots of this step that nobody computes any more, because replicas died of it.
    """

    epoch: Epoch
    members: tuple[Member, ...]
    heals: tuple[Heal, ...]
    committed: int
    link_id: str
    link_ready: bool = False
    deal: Deal = Deal(0)
    links: tuple[str, ...] = ()
    quarantined: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        replicas = [m.replica for m in self.members]
        if replicas != sorted(set(replicas)):
            raise ValueError(f"members must be unique and sorted, got {replicas}")
        healing = [h.replica for h in self.heals]
        if not set(healing) <= set(replicas) or len(set(healing)) < len(healing) or any(h.source in healing for h in self.heals):
            raise ValueError(f"heals {self.heals} must be of members {replicas}, one each, from contributors")

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(m.replica for m in self.members)

    @property
    def healing(self) -> frozenset[int]:
        return frozenset(h.replica for h in self.heals)

    @property
    def contributors(self) -> tuple[int, ...]:
        return tuple(r for r in self.replicas if r not in self.healing)

    @functools.cached_property
    def workers(self) -> frozenset[str]:
        return frozenset(w for m in self.members for w in m.workers)

    def member(self, replica: int) -> Member | None:
        return next((m for m in self.members if m.replica == replica), None)

    def member_of(self, worker: str) -> Member | None:
        return next((m for m in self.members if worker in m.workers), None)

    def heal_of(self, replica: int) -> Heal | None:
        return next((h for h in self.heals if h.replica == replica), None)


def link_name(members: Sequence[Member], incarnation: int, number: int) -> str:
    """A link is named by the incarnations of its members and of the coordinator, and a number, and is never used again after a voided
    attempt."""
    return "+".join(str(m) for m in members) + f"#{incarnation}.{number}"


def assign(slots: Sequence[int], replicas: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Who computes which of these slots: a pure function of both, uneven where it must be."""
    n = len(replicas)
    return {replica: tuple(slots[i::n]) for i, replica in enumerate(sorted(replicas))}


class Outcome(StrEnum):
    """What a commit does: ``apply`` the total, or ``skip`` a step whose gradient is not finite (its samples are listed)."""

    APPLY = "apply"
    SKIP = "skip"


class Kind(StrEnum):
    VIEW = "view"      # a new view; the attempt under the old one is void
    COMMIT = "commit"  # step is committed with the total of `epoch`; `view` is the view of the next step
    BUILD = "build"    # build this link in the background and acknowledge it
    ROLLBACK = "rollback"  # a view whose members hold an older step again: commits after `step` are void, their samples used again
    HALT = "halt"      # the step in progress is given up, and no other will be: members keep the committed state, to be saved


@dataclass(frozen=True)
class Record:
    """One entry of the coordinator's log."""

    number: int
    kind: Kind
    view: View
    step: int = 0                       # commit: the step; rollback: the step that members went back to
    epoch: Epoch | None = None          # commit: the epoch whose total is applied
    outcome: Outcome = Outcome.APPLY    # commit
    samples: tuple[str, ...] = ()       # commit: sample ids consumed (or dropped, for skip)
    dropped: tuple[str, ...] = ()       # commit: sample ids of slots in quarantine, which the total lacks
    divisor: float = 0.0                # commit: the summed weight of what was contributed
    cause: str = ""                     # view: why
    state: dict[str, Any] | None = None  # the recipe's state with which the run goes on after this step (JSON), if it gave one

    def to_json(self, base: Record | None = None) -> dict[str, Any]:
        """``base``: a record that the reader has. Of the view only what is not as there is said then: a run of many ranks would else name all
        of them to each of them in every step."""
        said = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "view"}
        return said | {"view": _view_to_json(self.view, base.view if base else None), "base": base.number if base else None}

    @staticmethod
    def from_json(d: dict[str, Any], base: Record | None = None) -> Record:
        """ValueError if it was said with another ``base``."""
        if d.get("base") is not None and (base is None or base.number != d["base"]):
            raise ValueError(f"record {d['number']} is told by how it differs from record {d['base']}, and the last one here is {base and base.number}")
        return Record(
            number=d["number"], kind=Kind(d["kind"]), view=_view_from_json(d["view"], base.view if base and d.get("base") is not None else None), step=d["step"],
            epoch=Epoch(**d["epoch"]) if d["epoch"] else None, outcome=Outcome(d["outcome"]),
            samples=tuple(d["samples"]), dropped=tuple(d["dropped"]), divisor=d["divisor"], cause=d["cause"], state=d.get("state"),
        )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else copy.deepcopy(value)


def _differing(new: Any, old: Any) -> dict[str, Any]:
    """The fields of one dataclass that are not as in another; of ``None`` all differ."""
    values = ((f.name, getattr(new, f.name)) for f in fields(new))
    return {name: value for name, value in values if old is None or value != getattr(old, name)}


def _view_to_json(view: View, base: View | None) -> dict[str, Any]:
    said = {name: _plain(value) for name, value in _differing(view, base).items()}
    if base and "members" in said:
        gone, come = set(base.members) - set(view.members), set(view.members) - set(base.members)
        said["members"] = {"without": sorted(m.replica for m in gone), "with": [_plain(m) for m in view.members if m in come]}
    if base and "deal" in said:  # its number changes with every step, and whom it is among seldom
        said["deal"] = {name: _plain(value) for name, value in _differing(view.deal, base.deal).items()}
    return said


def _view_from_json(d: dict[str, Any], base: View | None) -> View:
    found = {name: read(d[name]) for name, read in _READ.items() if name in d}
    if "members" in d:
        said = d["members"]
        kept = [m for m in base.members if m.replica not in said["without"]] if base else []
        found["members"] = tuple(sorted([*kept, *(_member(m) for m in (said["with"] if base else said))], key=lambda m: m.replica))
    if "deal" in d:
        deal: dict[str, Any] = {name: tuple((r, b) for r, b in value) if name == "lives" else value for name, value in d["deal"].items()}
        found["deal"] = replace(base.deal, **deal) if base else Deal(**deal)
    return replace(base, **found) if base else View(**found)


def _member(said: dict[str, Any]) -> Member:
    return Member(said["replica"], said["build"], tuple(said["workers"]))


_READ: dict[str, Callable[[Any], Any]] = {
    "epoch": lambda epoch: Epoch(**epoch),
    "heals": lambda heals: tuple(Heal(**h) for h in heals),
    "committed": int, "link_id": str, "link_ready": bool, "links": tuple, "quarantined": tuple,
}  # fmt: skip


@dataclass(frozen=True)
class Rerun:
    """What one rank's gradient of one slot, by itself, was. ``norm``: Euclidean, of this rank's shard."""

    slot: int
    digest: int
    norm: float


@dataclass(frozen=True)
class Vote:
    """One rank's word that it holds the total of (step, epoch). All values must be equal over all ranks of a position's link;
    ``divisor``, ``grad_norm_bits`` and ``finite`` over all ranks of all members (rule 5). ``healed``: the rank holds the state to which
    the total belongs, version ``step - 1``; a healing one may not yet, and will apply the total later. ``spoiled``: slots that the rank holds of which something is not finite by itself (all that it computed together). ``reruns``: of slots that
    other replicas compute, too, in this attempt (:mod:`everstep.recovery.rerun`)."""

    worker: str
    step: int
    epoch: Epoch
    digest: int            # of this position's total; equal over the replicas
    divisor: float
    grad_norm_bits: int
    finite: bool
    healed: bool = True
    slots: tuple[int, ...] = field(default=())  # the slots the total contains, each exactly once
    spoiled: tuple[int, ...] = field(default=())
    reruns: tuple[Rerun, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(d: dict[str, Any]) -> Vote:
        return Vote(**(d | {"epoch": Epoch(**d["epoch"]), "slots": tuple(d["slots"]), "spoiled": tuple(d["spoiled"]),
                          "reruns": tuple(Rerun(**r) for r in d["reruns"])}))
