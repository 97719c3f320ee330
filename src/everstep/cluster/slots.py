"""How a batch is cut into micro-batches, and these into slots: pure functions of the batch and the configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.config import derive
from everstep.config.schema import Config, TrainConfig
from everstep.data.packing import pack
from everstep.data.preferences import CHOSEN
from everstep.errors import BadInput


def cut_slots(batch: TrainingBatch, train: TrainConfig, dp: int) -> list[tuple[TrainingBatch, ...]]:
    """The slots of a step: a pure function of the batch alone (docs/protocol.md, rule 16).

    Slot i holds ``dp`` micro-batches, one for each inner data-parallel rank. With ``train.micro_batch_size`` these are so many
    consecutive samples, and all are padded to the width of the step's longest sample, rounded up to 8, so that any rank can run
    any slots together.

    With ``train.tokens_per_micro_batch`` they are what ``everstep.data.packing`` puts into one row, and their number varies from
    step to step. Rows of about as many tokens stand side by side in a slot, and slots with more tokens come first: replicas, which
    are dealt every n-th slot, then have even work, and one that has a slot more than another has the smallest. BadInput names a
    sample that is longer than the budget.

    Rows of a pair (the tensor ``chosen``: recipe dpo) lie side by side, and stay so: micro-batches then have an even size, and
    pairs are packed whole.
    """
    if train.tokens_per_micro_batch is not None:
        together = 2 if CHOSEN in batch else 1
        micro = [_rows(batch, row) for row in _packed(batch, train.tokens_per_micro_batch, dp, together)]
        return [tuple(micro[i : i + dp]) for i in range(0, len(micro), dp)]
    size = derive.micro_batch_size(train)
    per_slot = size * dp
    if len(batch) % per_slot:
        raise BadInput(
            f"{len(batch)} samples cannot be cut into slots of {per_slot} (train.micro_batch_size={size} times "
            f"layout.dp={dp}); choose sizes that divide"
        )
    trimmed = batch.trim()
    padded = trimmed.pad_to(-(-trimmed.width // 8) * 8)
    micro = [padded.slice(i, i + size) for i in range(0, len(padded), size)]
    return [tuple(micro[i : i + dp]) for i in range(0, len(micro), dp)]


def cut_round(
    batches: Sequence[TrainingBatch], config: Config, prompts: bool
) -> tuple[list[tuple[TrainingBatch, ...]], tuple[int, ...]]:
    """(slots of a round of semi-synchronous training, the first slot of each inner step and at the end their number).

    One batch for each inner step. ``prompts``: what is trained on is still to be made of them; a slot is then one prompt, with all
    its samples to be, for each inner data-parallel rank. BadInput if the configuration has no rounds, or another number of steps in them.
    """
    wanted = derive.inner_steps(config)
    if config.semisync.method == "none":
        raise BadInput("semisync.method=none: there are no rounds; call train_step")
    if len(batches) != wanted:
        raise BadInput(f"a round of semisync.method={config.semisync.method} has {wanted} inner steps, {len(batches)} batches were given")
    slots: list[tuple[TrainingBatch, ...]] = []
    bounds = [0]
    for batch in batches:
        slots += _groups(batch, config) if prompts else cut_slots(batch, config.train, config.layout.dp)
        bounds.append(len(slots))
    return slots, tuple(bounds)


def _groups(batch: TrainingBatch, config: Config) -> list[tuple[TrainingBatch, ...]]:
    size, dp = config.rl.samples_per_prompt, config.layout.dp
    if len(batch) % (size * dp):
        raise BadInput(
            f"{len(batch)} samples are not whole groups of rl.samples_per_prompt={size} for each of layout.dp={dp} ranks; choose sizes that divide"
        )
    groups = [batch.slice(i, i + size) for i in range(0, len(batch), size)]
    return [tuple(groups[i : i + dp]) for i in range(0, len(groups), dp)]


def require_synchronous(config: Config) -> None:
    """BadInput if replicas are islands: they train in rounds."""
    if config.semisync.method != "none":
        raise BadInput(f"semisync.method={config.semisync.method}: replicas train in rounds; call train_round with the batches of its inner steps")


def micro_batches(batch: TrainingBatch, train: TrainConfig) -> list[tuple[list[int], TrainingBatch]]:
    """(indices, those samples) of the micro-batches in which one rank evaluates ``batch``; none if it is empty."""
    if not len(batch):
        return []
    if train.tokens_per_micro_batch is not None:
        return [(row, _rows(batch, row)) for row in _packed(batch, train.tokens_per_micro_batch, 1)]
    size = derive.micro_batch_size(train)
    return [(list(range(i, stop := min(i + size, len(batch)))), batch.slice(i, stop)) for i in range(0, len(batch), size)]


def in_order(batch: TrainingBatch, indices: Sequence[list[int]], values: Sequence[Tensor]) -> Tensor:
    """(B, T) on the CPU from the results (b, t) for the micro-batches of ``micro_batches``; zero where those are narrower."""
    whole = torch.zeros(len(batch), batch.width, dtype=values[0].dtype)
    for rows, value in zip(indices, values, strict=True):
        whole[rows, : value.shape[1]] = value.cpu()
    return whole


def with_evaluated(
    batch: TrainingBatch, name: str, cut: Sequence[tuple[list[int], TrainingBatch]], results: Sequence[Tensor] | None
) -> TrainingBatch:
    """``batch`` with the tensor ``name`` (B, T) from the results for its micro-batches; no samples from a rank that has none."""
    if not results:  # not a collecting rank, or an empty batch
        return batch.slice(0, 0).with_tensors(**{name: torch.zeros(0, batch.width)})
    return batch.with_tensors(**{name: in_order(batch, [indices for indices, _ in cut], results)})


def _packed(batch: TrainingBatch, budget: int, dp: int, together: int = 1) -> list[list[int]]:
    counts = batch.token_counts()
    lengths = [sum(counts[i : i + together]) for i in range(0, len(counts), together)]
    for sid, length in zip(batch.sample_ids[::together], lengths, strict=True):
        if not 0 < length <= budget:
            raise BadInput(
                f"sample {sid} has {length} tokens, which do not fit into a row of train.tokens_per_micro_batch={budget}; raise it, or "
                "leave the sample out"
                if length else f"sample {sid} has no token (attention_mask); leave it out"
            )
    rows = pack(lengths, budget, dp)
    return [[i for unit in row for i in range(together * unit, together * (unit + 1))] for row in rows]


def _rows(batch: TrainingBatch, row: list[int]) -> TrainingBatch:
    return batch.select(row).trim() if row else batch.slice(0, 0)


def sample_ids(slots: Sequence[Sequence[TrainingBatch]]) -> tuple[tuple[str, ...], ...]:
    """The samples of each slot."""
    return tuple(tuple(sample for micro in slot for sample in micro.sample_ids) for slot in slots)


class ListSlots:
    """Slots of a batch that the rank holds whole."""

    def __init__(self, slots: Sequence[Sequence[TrainingBatch]]):
        self._slots = slots

    def __len__(self) -> int:
        return len(self._slots)

    def fetch(self, slot: int, dp: int) -> TrainingBatch:
        return self._slots[slot][dp]


def slot_seed(seed: int, step: int, slot: int, dp: int) -> int:
    """RNG seed of a micro-batch: whoever computes it, in whatever attempt, draws the same numbers (rule 15)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{slot}/{dp}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
