"""Log-probability and entropy from hidden states, with the output projection inside a loop over chunks of tokens.

    logits = hidden W^T        exists for one chunk of positions at a time, in forward and again in backward

What is kept for backward is the hidden states and two numbers per position; backward computes each chunk's logits once more
(the formulas are those of ``everstep.engine.vocab``). So memory does not grow with tokens times vocabulary, for one more
matrix product. Legend: N positions, h hidden channels, v real vocabulary rows of W on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from everstep.engine.vocab import from_sums, logit_gradient, over_ranks


class DeferredProjection(nn.Module):
    """In the place of GPTModel's output layer: hands the hidden states on to whoever projects them, chunk by chunk.

    It owns the weight of the layer it replaces, if that had one of its own, so names and gradients stay as they were. What comes
    out is whole along the sequence; under sequence parallelism the gather's backward sums its gradient over the tensor-parallel
    ranks, each of which knows its part of the vocabulary alone.
    """

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = replaced.weight
        self.sequence_parallel = bool(replaced.sequence_parallel)

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """(S, B, h), under sequence parallelism only this rank's part of S -> (S, B, h), and no bias to be added."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return hidden, None


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, h)
        weight: Tensor,  # (v, h)
        targets: Tensor,  # (N,) int64, global vocabulary index
        first: int,  # global index of this rank's row 0
        temperature: float,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        positions, rows = len(hidden), len(weight)
        local = targets - first
        here = (local >= 0) & (local < rows)
        row = local.clamp(0, rows - 1)
        # Of x on this rank, with ``own`` its maximum. Rows: sum of exp(x - own), the target's x - own, sum of
        # exp(x - own) * (x - own).
        own = torch.empty(positions, dtype=torch.float32, device=hidden.device)
        sums = torch.zeros(3, positions, dtype=torch.float32, device=hidden.device)
        for part in _chunks(positions, chunk):
            shifted = _scaled_logits(hidden[part], weight, temperature)
            own[part] = shifted.amax(dim=-1)
            shifted.sub_(own[part, None])
            sums[1, part] = shifted.gather(1, row[part, None]).squeeze(1)
            weights = shifted.exp()
            sums[0, part] = weights.sum(dim=-1)
            if with_entropy:
                sums[2, part] = weights.mul_(shifted).sum(dim=-1)
        top = over_ranks(own, sums, here, with_entropy, group)  # once for all chunks
        log_z, logprobs, entropy = from_sums(top, sums, with_entropy)
        ctx.save_for_backward(hidden, weight, row, here, log_z, entropy)
        ctx.temperature, ctx.with_entropy, ctx.chunk = temperature, with_entropy, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_logprobs, d_entropy = grads
        hidden, weight, row, here, log_z, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # In float32: a sum over chunks in the model's own type would lose what the product over all positions keeps.
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(hidden), ctx.chunk):
            log_p = _scaled_logits(hidden[part], weight, ctx.temperature).sub_(log_z[part, None])
            d_logits = logit_gradient(
                log_p, row[part], here[part], entropy[part], d_logprobs[part], d_entropy[part], ctx.temperature, ctx.with_entropy
            ).to(weight.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[part])
            if d_weight is not None and weight.dtype == torch.float32:
                d_weight.addmm_(d_logits.t(), hidden[part])
            elif d_weight is not None:
                d_weight += d_logits.t() @ hidden[part]
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None, None, None, None


def _chunks(positions: int, chunk: int) -> list[slice]:
    return [slice(a, min(a + chunk, positions)) for a in range(0, positions, chunk)]


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """float32 (n, v) of one chunk, rounded to the model's type in between as a whole projection would be."""
    return (hidden @ weight.t()).float().div_(temperature)


def projected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    first: int,
    valid: int,
    chunk: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As ``vocab.token_logprobs`` of ``hidden W^T``, ``chunk`` positions at a time.

    ``hidden`` (B, S, h); ``weight`` (v', h): this rank's rows of the output projection, of which the first ``valid`` are real
    vocabulary, row 0 being entry ``first``; ``targets`` (B, S). Returns float32 (B, S), equal on every rank of ``group`` (None:
    the vocabulary is whole). Gradients flow to ``hidden``, summed over ``group`` (under sequence parallelism by
    ``DeferredProjection``), and to ``weight`` unless it is frozen.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    if group is not None and not sequence_parallel:
        # Here, where the gradient is contiguous: of any other, Megatron's backward reduces a copy and returns the original.
        flat = copy_to_tensor_model_parallel_region(flat)
    logprobs, entropy = _Projected.apply(
        flat, weight[:valid], targets.reshape(-1), first, float(temperature), with_entropy, group, chunk
    )
    return logprobs.view(targets.shape), entropy.view(targets.shape) if with_entropy else None
