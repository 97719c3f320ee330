"""Totals that are not finite: whose slots made them so, and whether that is a device's fault or the data's. Pure.

The step is computed once more, by other replicas, each slot by itself. Finite then: a transient fault, of the ranks that were
spoiled the first time. Not finite, with the same slots spoiled on another replica: the data (or the weights, which all share). Not
finite by the same replica, because there is no other, or elsewhere: it is not clear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from everstep.errors import NonFinite
from everstep.recovery.view import View, Vote

_NAMED = 8  # samples that a message names; events have all


@dataclass(frozen=True)
class Finding:
    """``slots``: those that were not finite by themselves; ``ranks``: who computed them, as REPLICA/RANK; ``samples``: theirs.
    ``verdict``: again (computed once more), transient, data, unclear."""

    step: int
    epoch: tuple[int, int]
    verdict: str
    slots: tuple[int, ...]
    ranks: tuple[str, ...]
    samples: tuple[str, ...]

    def fields(self) -> dict[str, Any]:
        return {name: value if isinstance(value, str) else list(value) for name, value in asdict(self).items() if name not in ("step", "epoch")}

    def __str__(self) -> str:
        if not self.slots:
            return "of no slot by itself: the sum overflowed, or what was summed in place is gone"
        named = ", ".join(self.samples[:_NAMED]) + (f" and {len(self.samples) - _NAMED} more" if len(self.samples) > _NAMED else "")
        return f"slots {list(self.slots)} (samples {named}), computed by ranks {', '.join(self.ranks)}"


class NonFinites:
    """Of the step in progress. ``shift``: how far slots are dealt to other replicas than usual."""

    def __init__(self, stop: bool, rotates: bool):
        self._stop, self._rotates = stop, rotates
        self._first: Finding | None = None
        self._findings: list[Finding] = []

    @property
    def shift(self) -> int:
        return int(self._rotates and self._first is not None)

    def clear(self) -> None:
        """Another step is in progress."""
        self._first = None

    def happened(self, step: int, view: View, votes: Mapping[str, Vote], samples: Sequence[Sequence[str]]) -> str:
        """The votes agree on a total that is not finite: why there is another attempt; "" if the step is to be skipped.

        Raises NonFinite for the second time, if it is to stop the run.
        """
        spoiled = {(m.replica, rank): votes[w].spoiled for m in view.members for rank, w in enumerate(m.workers) if votes[w].spoiled}
        slots = tuple(sorted({slot for of in spoiled.values() for slot in of}))
        ranks = tuple(f"{replica}/{rank}" for replica, rank in sorted(spoiled))
        ids = tuple(sample for slot in slots if slot < len(samples) for sample in samples[slot])
        if self._first is None:
            self._first = Finding(step, view.epoch.key, "again", slots, ranks, ids)
            self._findings.append(self._first)
            return f"non-finite gradient: computed once more; it came {self._first}"
        others = {rank.partition("/")[0] for rank in ranks} - {rank.partition("/")[0] for rank in self._first.ranks}
        verdict = "data" if slots and set(slots) <= set(self._first.slots) and others else "unclear"
        finding = Finding(step, view.epoch.key, verdict, slots, ranks, ids)
        self._findings.append(finding)
        if self._stop:
            raise NonFinite(
                f"step {step}: loss or gradient is not finite, for the second time: {finding}. The weights are those of step {step - 1}. Look at "
                "these samples, lower optimizer.lr, or set recovery.non_finite=skip"
            )
        return ""

    def passed(self, step: int, view: View) -> None:
        """The votes agree on a finite total."""
        if self._first is not None:
            first = self._first
            self._findings.append(Finding(step, view.epoch.key, "transient", first.slots, first.ranks, first.samples))

    def take_findings(self) -> list[Finding]:
        findings, self._findings = self._findings, []
        return findings
