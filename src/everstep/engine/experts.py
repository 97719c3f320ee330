"""The experts of a layer that this rank holds, and how tokens travel to the ranks of their experts and back.

Megatron's all-to-all dispatcher asks a CUDA device for the sizes of its messages, and its sequential experts launch a handful of
kernels for each expert; here one all-to-all takes tokens there and one takes results back, and the matrices of all experts lie in
two parameters, so that a GPU computes them by grouped products.

Legend: N tokens of this rank, k experts per token, E experts of the layer, e of them on each expert-parallel rank, H hidden size,
F intermediate size of an expert, tp tensor-parallel ranks, M rows that this rank's experts compute.

The ranks among which tokens travel are tp times ep, the tensor-parallel rank varying fastest; a row goes to all tp ranks that
share its expert, each computes with its part of the matrices, and what comes back is added in the order of ranks. Every rank has
tokens of its own (under tensor parallelism: engine.sequence_parallel), so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class Experts(nn.Module):
    """SwiGLU experts: ``down(silu(gate x) * up x)``, matrices of transformers' shapes, gate above up in ``gate_up``.

    Only the expert-data-parallel ranks sum the gradients: with expert parallelism ``allreduce`` says so to Megatron's DDP.

    ``lora``: what adapters add to what ``gate_up`` and ``down`` make of their rows, hung here by ``everstep.engine.lora.attach``.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.num_moe_experts is not None and config.moe_ffn_hidden_size is not None
        ep = config.expert_model_parallel_size
        held, width = config.num_moe_experts // ep, config.moe_ffn_hidden_size // config.tensor_model_parallel_size
        how: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.gate_up = nn.Parameter(torch.empty(held, 2 * width, config.hidden_size, **how))  # (e, 2F / tp, H)
        self.down = nn.Parameter(torch.empty(held, config.hidden_size, width, **how))  # (e, H, F / tp)
        for parameter in (self.gate_up, self.down):
            parameter.allreduce = ep == 1  # type: ignore[attr-defined]
        self.lora: nn.ModuleDict | None = None

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """(M, H), of which the first ``sizes[0]`` are expert 0's and so on -> (M, H), under tp this rank's addend of it."""
        ends = None
        if rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows):
            ends = torch.tensor(sizes, device=rows.device).cumsum(0).to(torch.int32)
        product = partial(grouped, sizes=sizes, ends=ends)
        gate, up = self._through("gate_up", rows, product).chunk(2, dim=-1)
        return self._through("down", F.silu(gate) * up, product)

    def _through(self, matrix: str, rows: Tensor, product: Product) -> Tensor:
        out = product(rows, self.get_parameter(matrix))
        return out + self.lora[matrix](rows, product) if self.lora is not None and matrix in self.lora else out


#: (rows, a matrix (out, in) for each expert) -> each expert's rows times its matrix
Product = Callable[[Tensor, Tensor], Tensor]


def grouped(rows: Tensor, matrices: Tensor, sizes: list[int], ends: Tensor | None) -> Tensor:
    """(M, in), of which the first ``sizes[0]`` are expert 0's and so on, by ``matrices`` (e, out, in) -> (M, out). ``ends``: where each
    expert's rows end, on the device, for one kernel for all of them, which wants rows of matrices to begin at 16 bytes; None: one by one."""
    if ends is not None and all(size % 8 == 0 for size in matrices.shape[1:]):
        return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
    # One view of all: a view of each would give backward a whole gradient of zeros for each.
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(rows.split(sizes), matrices.unbind(), strict=True)])


class Travel:
    """Rows of tokens on their way, for the ranks of one layer."""

    def __init__(self, config: TransformerConfig) -> None:
        assert config.num_moe_experts is not None
        self.group = mpu.get_expert_tensor_and_model_parallel_group()
        self.tp, self.ep = config.tensor_model_parallel_size, config.expert_model_parallel_size
        self.total, self.held = config.num_moe_experts, config.num_moe_experts // self.ep
        self.ep_rank = mpu.get_expert_model_parallel_rank()

    def through(self, experts: Experts, tokens: Tensor, chosen: Tensor) -> Tensor:
        """``tokens`` (N, H) and the experts of each (N, k) -> what each expert makes of its tokens, (N, k, H)."""
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)  # by expert
        rows = tokens[:, None].expand(-1, chosen.shape[1], -1).reshape(-1, tokens.shape[1])[order]
        counts = F.one_hot(flat, self.total).sum(0)  # (E,)
        return self._sorted_through(experts, rows, counts)[_inverse(order)].view(*chosen.shape, -1)

    def _sorted_through(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, (N k, H), ``counts`` of each expert -> results in the same order."""
        if self.group.size() == 1:
            return experts(rows, counts.tolist())
        everybody = [torch.empty_like(counts) for _ in range(self.group.size())]
        dist.all_gather(everybody, counts, group=self.group)
        first = self.ep_rank * self.held
        mine = torch.stack(everybody)[:, first : first + self.held].cpu()  # (tp ep, e): rows that come to me
        to_ranks = counts.view(self.ep, self.held).sum(1).tolist()
        send = [size for size in to_ranks for _ in range(self.tp)]
        receive = mine.sum(1).tolist()
        if self.tp > 1:  # the same rows to each tensor-parallel rank
            rows = torch.cat([part for part in rows.split(to_ranks) for _ in range(self.tp)])
        came = _AllToAll.apply(rows, send, receive, self.group)
        # They came by rank, and of each rank by expert; the experts take them by expert, and of each expert by rank.
        number = torch.arange(self.held).repeat(len(mine)).repeat_interleave(mine.flatten())
        order = number.argsort(stable=True)
        order, back = order.to(rows.device), _inverse(order).to(rows.device)
        done = experts(came[order], mine.sum(0).tolist())[back]
        returned = _AllToAll.apply(done, receive, send, self.group)
        if self.tp == 1:
            return returned
        addends = returned.split([size * self.tp for size in to_ranks])
        return torch.cat([part.view(self.tp, size, rows.shape[1]).sum(0) for part, size in zip(addends, to_ranks, strict=True)])


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes ``order``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _AllToAll(torch.autograd.Function):
    """Rows (sum of send, H) in pieces, one for each rank of the group -> those of all ranks for this one, (sum of receive, H)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = grads[0].new_empty(sum(ctx.send), grads[0].shape[1])
        dist.all_to_all_single(back, grads[0].contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return back, None, None, None
