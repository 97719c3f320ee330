"""Which token columns of a micro-batch a rank computes, when ranks share the sequence.

Legend: B samples, T token columns, P >= T columns after padding, S = P / cp of them on one context-parallel rank.

Context parallelism cuts the P columns into 2*cp blocks and gives rank r the blocks r and 2*cp - 1 - r (zigzag):
causal attention is then as much work on every rank. Megatron's rotary embedding assumes this order. Sequence
parallelism cuts the S columns once more, inside Megatron, over the tensor-parallel ranks; it only needs S to divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """The cut of the sequence as one rank sees it. ``multiple``: P is the next multiple of it."""

    multiple: int = 1
    cp: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_this_rank(cls, sequence_parallel: bool = False) -> Columns:
        """From Megatron's groups, which must be open."""
        cp = mpu.get_context_parallel_world_size()
        multiple = (mpu.get_tensor_model_parallel_world_size() if sequence_parallel else 1) * (2 * cp if cp > 1 else 1)
        return cls(multiple, cp, mpu.get_context_parallel_rank(), mpu.get_context_parallel_group())

    @property
    def blocks(self) -> tuple[int, int]:
        """The two blocks of this rank, among 2*cp."""
        return self.rank, 2 * self.cp - 1 - self.rank

    def padded(self, tokens: int) -> int:
        """P for T = ``tokens``."""
        return -(-tokens // self.multiple) * self.multiple

    def own(self, values: Tensor, width: int) -> Tensor:
        """(B, T) -> (B, S) with P = ``width``: this rank's columns; zeros where there is only padding."""
        padded = F.pad(values, (0, width - values.shape[1]))
        if self.cp == 1:
            return padded
        blocks = padded.chunk(2 * self.cp, dim=1)
        return torch.cat([blocks[i] for i in self.blocks], dim=1)

    def whole(self, own: Tensor) -> Tensor:
        """(B, S) of every rank -> (B, P), the same on all of them. The gradient goes to this rank's columns alone:

        what is computed from the result is computed by every rank, and counts once for each column.
        """
        return own if self.cp == 1 else _Whole.apply(own, self)

    def gathered(self, own: Tensor) -> Tensor:
        """(S, B, ...) of every rank -> (P, B, ...). Gradients are summed over the ranks."""
        return own if self.cp == 1 else _Gathered.apply(own, self)

    def _order(self) -> list[int]:
        """Places of blocks 0, 1, ... in what the ranks hold, one rank after the other."""
        last = 2 * self.cp - 1
        return [2 * block if block < self.cp else 2 * (last - block) + 1 for block in range(2 * self.cp)]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, columns: Columns) -> Tensor:
        ctx.columns = columns
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(columns.cp)]
        dist.all_gather(parts, own.contiguous(), group=columns.group)
        held = [block for part in parts for block in part.chunk(2, dim=1)]
        return torch.cat([held[place] for place in columns._order()], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.columns.own(grads[0], grads[0].shape[1]), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, columns: Columns) -> Tensor:
        ctx.columns = columns
        held = own.new_empty(columns.cp * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(held, own.contiguous(), group=columns.group)
        return _rearranged(held, columns._order())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        columns: Columns = ctx.columns
        order = columns._order()
        held = _rearranged(grads[0].contiguous(), [order.index(place) for place in range(len(order))])
        own = held.new_empty(held.shape[0] // columns.cp, *held.shape[1:])
        dist.reduce_scatter_tensor(own, held, group=columns.group)
        return own, None


def _rearranged(rows: Tensor, order: list[int]) -> Tensor:
    """Blocks of ``rows``, which are as many as ``order`` is long, in that order."""
    blocks = rows.chunk(len(order))
    return torch.cat([blocks[place] for place in order])
