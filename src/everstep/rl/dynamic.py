"""Dynamic sampling (DAPO, arXiv 2503.14476): groups whose rewards are all equal teach nothing and are replaced by others.

A pure function of what it is given to call, so every process that makes the same calls gets the same groups. Prompts are taken in the
order of the data, exactly as many as groups are missing: none is skipped, and none is scored for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.cluster.batch import TrainingBatch


@dataclass
class Collected:
    """``samples``: scored, as many groups as were wanted. ``dropped``: (ids of the samples of a group that was left out, why)."""

    samples: TrainingBatch
    dropped: list[tuple[list[str], str]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def collect(scored: TrainingBatch, rounds: int, more: Callable[[int], TrainingBatch]) -> Collected:
    """Groups with a difference in their rewards, refilled.

    Args:
        scored: the first samples, with the column ``group`` and the tensors ``scores`` and perhaps ``dropped`` (B,), which is 1
            for completions whose reward failed and that do not count (reward.on_error=drop). As many groups are wanted as it has.
        rounds: how often groups are replaced at most; 0: all are taken as they are. If there are too few after that, the last ones that were left out fill the
            rest, as without dynamic sampling.
        more: ``more(n)`` gives the scored samples of the next ``n`` prompts.
    """
    if not rounds:
        return Collected(scored)
    wanted = len(set(scored.column("group")))
    kept: list[TrainingBatch] = []
    left_out: list[tuple[TrainingBatch, str]] = []
    batch, done = scored, 0
    while True:
        for rows in _groups(batch).values():
            group = batch.select(rows)
            reason = why_useless(group)
            if reason is None:
                kept.append(group)
            else:
                left_out.append((group, reason))
        missing = wanted - len(kept)
        if not missing or done == rounds:
            break
        done += 1
        batch = more(missing)
    fill = left_out[len(left_out) - missing :] if missing else []
    gone = left_out[: len(left_out) - missing] if missing else left_out
    return Collected(
        TrainingBatch.concat([*kept, *(group for group, _ in fill)]),
        [(group.sample_ids, reason) for group, reason in gone],
        {"train/num_gen_batches": 1.0 + done, "train/dropped_groups": len(gone) / (wanted + len(gone))},
    )


def why_useless(group: TrainingBatch) -> str | None:
    """The reason why the completions of one prompt have no advantage; None if they have."""
    gone = group["dropped"].tolist() if "dropped" in group else [0.0] * len(group)
    counted = [score for score, out in zip(group["scores"].tolist(), gone, strict=True) if not out]
    if len(counted) < 2:
        return f"{len(counted)} of {len(group)} rewards did not fail"
    if len(set(counted)) == 1:
        return f"all rewards are {counted[0]:g}"
    return None


def _groups(batch: TrainingBatch) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(batch.column("group")):
        rows.setdefault(name, []).append(row)
    return rows
