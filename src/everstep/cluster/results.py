"""From the reports of many ranks to the one result a recipe sees. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch

from everstep.cluster.dispatch import Rank
from everstep.cluster.group import StepResult
from everstep.engine.loss import LossSpec, unpack_sums
from everstep.errors import InvariantViolated
from everstep.recovery.transaction import StepReport
from everstep.recovery.view import Outcome
from everstep.telemetry.events import EventLog


def combine(
    step: int, reports: Sequence[StepReport], per_replica: Sequence[StepReport], loss: LossSpec, lr: float, slots: int, members: tuple[int, ...]
) -> StepResult:
    """``reports``: of every rank that finished the step; ``per_replica``: one of each replica, to count slots once.

    The sums are global (they went over the link), so any report has them; that all have the same is part of the protocol.
    """
    first = reports[0]
    if len({(repr(r.sums), r.outcome) for r in reports}) > 1:  # as text, for of a skipped step they may be NaN, which equals nothing
        raise InvariantViolated(f"step {step}: ranks report different sums for one commit: {[r.sums[:2] for r in reports]}")
    named = unpack_sums(torch.tensor(first.sums, dtype=torch.float64), loss.build().metric_names)
    ratios = {name: total / weight if weight else 0.0 for name, (total, weight) in named.items()}
    seconds: dict[str, float] = {}
    for report in reports:
        for phase, spent in report.seconds.items():
            seconds[phase] = max(seconds.get(phase, 0.0), spent)
    memory: dict[str, float] = {}
    for report in reports:
        memory |= {name: max(memory.get(name, 0.0), used) for name, used in report.memory_gb.items()}
    return StepResult(
        step=step, applied=first.outcome is Outcome.APPLY, loss=ratios.pop("loss"), divisor=first.sums[0],
        grad_norm=first.grad_norm, lr=lr, metrics=ratios | first.metrics, seconds=seconds, attempts=max(r.attempts for r in reports),
        slots=slots, slots_redone=sum(r.slots_redone for r in per_replica), members=members,
        link_bytes=sum(r.link_bytes for r in reports) / len(per_replica), memory_gb=memory,
    )


def minority(ranks: Sequence[Rank], hashes: Sequence[tuple[int | None, str]]) -> list[Rank]:
    """The ranks whose state differs from that which more than half of the replicas have at their position. Nobody, if all are equal or
    if there is no such majority at a position."""
    odd = []
    for position in {rank.rank for rank in ranks}:
        here = [(rank, said) for rank, said in zip(ranks, hashes, strict=True) if rank.rank == position]
        usual, count = Counter(said for _, said in here).most_common(1)[0]
        if 2 * count > len(here):
            odd += [rank for rank, said in here if said != usual]
    return sorted(odd, key=lambda rank: (rank.replica, rank.rank))


def compare_hashes(ranks: Sequence[Rank], hashes: Sequence[tuple[int | None, str]], step: int, events: EventLog | None) -> str:
    """Equal positions of all replicas must hold equal bits at the committed step. Returns a digest over the positions.

    Raises InvariantViolated naming the ranks that differ.
    """
    by_position: dict[int, dict[int, str]] = {}
    for rank, (version, digest) in zip(ranks, hashes, strict=True):
        if version != step:
            raise InvariantViolated(f"rank {rank} holds version {version}, but step {step} is the last committed one")
        by_position.setdefault(rank.rank, {})[rank.replica] = digest
    odd = {position: found for position, found in by_position.items() if len(set(found.values())) > 1}
    named = {f"{replica}/{position}": d for position, found in by_position.items() for replica, d in found.items()}
    if events:
        events.emit("verify", step=step, equal=not odd, hashes=named)
    if odd:
        raise InvariantViolated(
            f"step {step}: the replicas' states differ at "
            + "; ".join(f"position {p}: " + ", ".join(f"replica {r} {d[:12]}" for r, d in found.items()) for p, found in odd.items())
        )
    first = [next(iter(by_position[position].values())) for position in sorted(by_position)]
    return hashlib.sha256("".join(first).encode()).hexdigest()
