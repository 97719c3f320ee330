"""Log-probability and entropy from logits whose vocabulary is spread over the tensor-parallel ranks.

Legend: N positions, V real vocabulary entries, v columns of it on this rank (padding columns already cut off).
With x = logits / temperature, Z = log sum exp x over all ranks and p = exp(x - Z):

    logprob = x[target] - Z           d logprob / dx = onehot(target) - p
    entropy = Z - sum p x             d entropy / dx = -p (log p + entropy)

Only the logits, in the model's own type, and three numbers per position are kept for backward; the float32
probabilities exist for a slice of the positions at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# float32 numbers of one slice of probabilities: 64 Mi numbers are 256 MiB.
_SLICE_NUMBERS = 64 * 1024 * 1024


def _slices(positions: int, columns: int) -> list[slice]:
    step = max(1, _SLICE_NUMBERS // max(columns, 1))
    return [slice(a, min(a + step, positions)) for a in range(0, positions, step)]


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # (N, v)
        targets: Tensor,  # (N,) int64, global vocabulary index
        first: int,  # global index of this rank's column 0
        temperature: float,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
        fused: bool,
    ) -> tuple[Tensor, Tensor]:
        positions, columns = logits.shape
        local = targets - first
        here = (local >= 0) & (local < columns)
        column = local.clamp(0, columns - 1)

        ctx.temperature, ctx.with_entropy, ctx.fused = temperature, with_entropy, fused
        if fused:  # one pass over the logits: relative to this rank's own maximum
            from everstep.engine import kernels

            own, sums = kernels.row_sums(logits, column, temperature, with_entropy)
            top = over_ranks(own, sums, here, with_entropy, group)
        else:
            top = logits.amax(dim=-1).float() / temperature  # (N,)
            if group is not None:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            # Rows: sum of exp(x - top), the target's x - top, sum of exp(x - top) * (x - top).
            sums = torch.zeros(3, positions, dtype=torch.float32, device=logits.device)
            for part in _slices(positions, columns):
                shifted = logits[part].to(torch.float32, copy=True).div_(temperature).sub_(top[part, None])
                sums[1, part] = shifted.gather(1, column[part, None]).squeeze(1) * here[part]
                weights = shifted.exp()
                sums[0, part] = weights.sum(dim=-1)
                if with_entropy:
                    sums[2, part] = weights.mul_(shifted).sum(dim=-1)
            if group is not None:
                dist.all_reduce(sums, group=group)
        log_z, logprobs, entropy = from_sums(top, sums, with_entropy)
        ctx.save_for_backward(logits, column, here, log_z, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_logprobs, d_entropy = grads
        logits, column, here, log_z, entropy = ctx.saved_tensors
        if ctx.fused:
            from everstep.engine import kernels

            how = ctx.temperature, ctx.with_entropy
            return kernels.row_gradient(logits, column, here, log_z, entropy, d_logprobs, d_entropy, *how), *[None] * 6
        d_logits = torch.empty_like(logits)
        for part in _slices(*logits.shape):
            log_p = logits[part].to(torch.float32, copy=True).div_(ctx.temperature).sub_(log_z[part, None])
            d_logits[part] = logit_gradient(
                log_p, column[part], here[part], entropy[part], d_logprobs[part], d_entropy[part], ctx.temperature, ctx.with_entropy
            )
        return d_logits, *[None] * 6


def over_ranks(own: Tensor, sums: Tensor, here: Tensor, with_entropy: bool, group: dist.ProcessGroup | None) -> Tensor:
    """(N,) maximum over all ranks; ``sums``, the three relative to this rank's ``own`` maximum, become those of all ranks relative
    to it. ``here``: where the target is among this rank's entries, whose row of ``sums`` means nothing elsewhere."""
    top = own
    if group is not None:
        top = own.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        by = own - top
        if with_entropy:
            sums[2] = by.exp() * (sums[2] + by * sums[0])
        sums[1] += by
        sums[0] *= by.exp()
    sums[1] *= here
    if group is not None:
        dist.all_reduce(sums, group=group)
    return top


def from_sums(top: Tensor, sums: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(N,) each: Z, log-probabilities and entropies (zeros if not wanted), from the sums over all ranks."""
    log_z = sums[0].log()  # of the shifted x
    logprobs = sums[1] - log_z
    return top + log_z, logprobs, log_z - sums[2] / sums[0] if with_entropy else torch.zeros_like(logprobs)


def logit_gradient(
    log_p: Tensor, column: Tensor, here: Tensor, entropy: Tensor, d_logprobs: Tensor, d_entropy: Tensor, temperature: float, with_entropy: bool
) -> Tensor:
    """d / dlogits, float32 (n, v), of some positions, from their log p (n, v), which is used up; the rest (n,)."""
    p = log_p.exp()
    factor = d_logprobs[:, None]
    if with_entropy:
        factor = factor + d_entropy[:, None] * log_p.add_(entropy[:, None])
    d_x = p.mul_(factor).neg_()
    d_x.scatter_add_(1, column[:, None], (d_logprobs * here)[:, None])
    return d_x.div_(temperature)


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    first: int,
    valid: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of the token that is the target of each position, and the entropy there.

    ``logits`` (B, S, v'): this rank's vocabulary columns, of which the first ``valid`` are real; ``first`` is the
    vocabulary index of column 0; ``targets`` (B, S). Returns float32 (B, S), equal on every rank of ``group`` (None:
    the vocabulary is whole). Gradients flow to ``logits``. ``fused``: by the kernels of ``everstep.engine.kernels``.
    """
    flat = logits[..., :valid].reshape(-1, valid)
    logprobs, entropy = _VocabParallel.apply(
        flat, targets.reshape(-1), first, float(temperature), with_entropy, group, fused
    )
    return logprobs.view(targets.shape), entropy.view(targets.shape) if with_entropy else None
