"""How the samples of a micro-batch lie in the model's input: one a row, or packed, all in one row.

Losses never see the difference: what the model says at each position is brought back to (B, T). Legend: B samples, T token
columns of the batch; R rows and P columns of the model's input, of which S = P / cp are on one context-parallel rank.

    Grid    R = B, P = T (padded): right-padded samples, so causality alone keeps real tokens from seeing padding
    Packed  R = 1, P = the samples' real tokens (padded): positions begin at 0 in each sample, and attention stays inside it

A packed row is cut over context-parallel ranks like any other, zigzag in blocks of the whole row, wherever samples begin; a
sample's queries find the keys of its own beginning on other ranks, since all keys are gathered. So nothing is padded per sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from everstep.engine.columns import Columns
from everstep.errors import BadInput

if TYPE_CHECKING:
    from everstep.cluster.batch import TrainingBatch

MULTIPLE = 8  # of a packed row: what matrix products of half precision like


class Segments(PackedSeqParams):
    """Where samples begin and end in a packed row; Megatron hands it through to rotary embedding and attention of each layer.

    ``bounds``: (begin, end) of each segment among the row's P columns, in order and without gaps; what is padding is a segment
    too. ``positions`` (S,): place of each of this rank's columns inside its segment. Megatron's own packed format ("thd") is not
    used: it would cut and rotate every segment by itself in every layer.
    """

    def __init__(self, lengths: Sequence[int], columns: Columns, device: torch.device) -> None:
        super().__init__(qkv_format="sbhd")
        ends = list(itertools.accumulate(lengths))
        self.bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        self.longest = max(lengths)
        self.offsets = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        whole = torch.cat([torch.arange(length) for length in lengths])
        self.positions = columns.own(whole[None], len(whole))[0].to(device)


class Grid:
    """One sample a row."""

    def __init__(self, batch: TrainingBatch | None, columns: Columns, rows: int, width: int, device: torch.device) -> None:
        self.batch, self._columns, self.shape = batch, columns, (rows, width)
        self._device = device

    @classmethod
    def of(cls, batch: TrainingBatch, columns: Columns, device: torch.device) -> Grid:
        samples, tokens = batch.tensors["input_ids"].shape
        return cls(batch, columns, samples, columns.padded(tokens), device)

    def widened(self, rows: int, width: int) -> Grid:
        """The same samples in a larger input."""
        return Grid(self.batch, self._columns, rows, width, self._device)

    def inputs(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Token ids and positions (R, S) of this rank's columns, and what else the model is called with."""
        rows, width = self.shape
        positions = torch.arange(width, device=self._device)[None].expand(rows, -1)
        return self._own(self._ids()), self._columns.own(positions, width), {}

    def targets(self) -> Tensor:
        """(B, S) what each of this rank's positions predicts; the last one, nothing."""
        assert self.batch is not None
        return self._own(F.pad(self._ids()[: len(self.batch), 1:], (0, 1)))

    def of_samples(self, outputs: Tensor) -> Tensor:
        """Of what the model gave, (R, S, ...), the rows with samples."""
        assert self.batch is not None
        # Even of all rows a slice's backward would fill a tensor of the logits' size with zeros, and copy their gradient into it.
        return outputs if len(self.batch) == len(outputs) else outputs[: len(self.batch)]

    def at_targets(self, own: Tensor) -> Tensor:
        """(B, S) computed at this rank's positions -> (B, T), each at the token that follows its position."""
        assert self.batch is not None
        return F.pad(self._columns.whole(own)[:, : self.batch.tensors["input_ids"].shape[1] - 1], (1, 0))

    def spread(self, values: Tensor | None) -> Tensor:
        """(B, T) values of the batch's tokens -> (R, S) at this rank's positions of these tokens; zero where there is none."""
        if values is None:
            return self._own(torch.zeros(self.shape, device=self._device))
        return self._own(F.pad(values, (0, 0, 0, self.shape[0] - len(values))))

    def _ids(self) -> Tensor:
        if self.batch is None:
            return torch.zeros(self.shape, dtype=torch.int64, device=self._device)
        ids = self.batch.tensors["input_ids"]
        return F.pad(ids, (0, 0, 0, self.shape[0] - len(ids)))

    def _own(self, values: Tensor) -> Tensor:
        return self._columns.own(values, self.shape[1])


class Packed:
    """All samples in one row, their padding left out. The same methods as ``Grid``, with one row for B samples."""

    def __init__(
        self, batch: TrainingBatch | None, columns: Columns, lengths: Sequence[int], width: int, device: torch.device
    ) -> None:
        self.batch, self._columns, self.shape = batch, columns, (1, width)
        self._lengths, self._device = tuple(lengths), device

    @classmethod
    def of(cls, batch: TrainingBatch, columns: Columns, device: torch.device) -> Packed:
        """BadInput names a sample whose ``attention_mask`` is not ones followed by zeros, or empty."""
        lengths = sample_lengths(batch)
        total = max(sum(lengths), 1)
        return cls(batch, columns, lengths, columns.padded(-(-total // MULTIPLE) * MULTIPLE), device)

    def widened(self, rows: int, width: int) -> Packed:
        return Packed(self.batch, self._columns, self._lengths, width, self._device)

    def inputs(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        padding = self.shape[1] - sum(self._lengths)
        segments = Segments([*self._lengths, padding] if padding else self._lengths, self._columns, self._device)
        return self._columns.own(self._ids(), self.shape[1]), segments.positions[None], {"packed_seq_params": segments}

    def targets(self) -> Tensor:
        """(1, S). The last position of each sample predicts nothing; what it is given here is left out of ``at_targets``."""
        return self._columns.own(F.pad(self._ids()[:, 1:], (0, 1)), self.shape[1])

    def of_samples(self, outputs: Tensor) -> Tensor:
        return outputs

    def at_targets(self, own: Tensor) -> Tensor:
        assert self.batch is not None
        width = self.batch.tensors["input_ids"].shape[1]
        # Where each (b, t) is computed: at the token before it. First tokens and padding read a zero behind the row.
        places = torch.full((len(self._lengths), width), self.shape[1], dtype=torch.int64)
        begin = 0
        for sample, length in enumerate(self._lengths):
            places[sample, 1:length] = torch.arange(begin, begin + length - 1)
            begin += length
        return F.pad(self._columns.whole(own)[0], (0, 1))[places.to(self._device)]

    def spread(self, values: Tensor | None) -> Tensor:
        row = torch.zeros(self.shape, device=self._device)
        if values is not None and self._lengths:
            row[0, : sum(self._lengths)] = torch.cat([one[:length] for one, length in zip(values, self._lengths, strict=True)])
        return self._columns.own(row, self.shape[1])

    def _ids(self) -> Tensor:
        row = torch.zeros(self.shape, dtype=torch.int64, device=self._device)
        if self.batch is not None and self._lengths:
            ids = self.batch.tensors["input_ids"]
            row[0, : sum(self._lengths)] = torch.cat([one[:length] for one, length in zip(ids, self._lengths, strict=True)])
        return row


def sample_lengths(batch: TrainingBatch) -> list[int]:
    """Tokens of each sample. BadInput names a sample whose ``attention_mask`` is not ones followed by zeros, or is all zeros."""
    mask = batch.tensors["attention_mask"].cpu()
    lengths = [int(n) for n in mask.sum(dim=1).tolist()]
    for sid, length, row in zip(batch.sample_ids, lengths, mask, strict=True):
        if not length or not bool((row[:length] == 1).all()):
            raise BadInput(
                f"sample {sid} cannot be packed (train.tokens_per_micro_batch): its attention_mask must be ones followed by zeros, "
                "with at least one 1"
            )
    return lengths
