"""Sums over a link with numbers sent as int8: a quarter of the bytes of float32.

Blocks of ``BLOCK`` numbers share one float32 scale, the block's largest magnitude over 127, and are rounded to the nearest multiple
of it. Two stages, as in a ring all-reduce: each member sends part i of its numbers to member i, which adds what it was sent in
float32, in the order of the members, and sends the sum, rounded once more, to all. Everybody decodes the same bytes, so the result is
bitwise equal everywhere.

Error of one number of the result, with m_r the largest magnitude of its block at member r and M that of the block of the sum of what
was decoded: at most (sum of m_r + M) / 254, beside float32 rounding. A number that is not finite makes its whole block not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from everstep.recovery.link import BUCKET_BYTES, Link

BLOCK = 256
_LEVELS = 127


def encode(numbers: torch.Tensor) -> torch.Tensor:
    """(..., n) float32 with n a multiple of BLOCK -> (..., n + 4 n / BLOCK) uint8: the numbers, then the scales."""
    blocks = numbers.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / _LEVELS
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    # A block with NaN or infinity: what its numbers become does not matter, the scale makes them NaN again.
    rounded = torch.nan_to_num(blocks / divisor).clamp_(-_LEVELS, _LEVELS).round_().to(torch.int8)
    scale = torch.where(torch.isfinite(scale), scale, torch.full_like(scale, torch.nan))
    return torch.cat([rounded.flatten(-2).view(torch.uint8), scale.flatten(-2).contiguous().view(torch.uint8)], dim=-1)


def decode(message: torch.Tensor) -> torch.Tensor:
    """The inverse of ``encode``, but for rounding."""
    count = message.shape[-1] * BLOCK // (BLOCK + 4)
    numbers = message[..., :count].contiguous().view(torch.int8).unflatten(-1, (-1, BLOCK))
    scale = message[..., count:].contiguous().view(torch.float32).unsqueeze(-1)
    return (numbers.float() * scale).flatten(-2)


def sum_quantized(
    link: Link, tensors: Sequence[torch.Tensor], stop: Callable[[], bool], timeout_s: float, issued: Callable[[], None] = lambda: None
) -> list[torch.Tensor]:
    """Sums of float32 ``tensors`` over the members, out of place. Raises like ``Link.sum``. A single survivor's come back as they are."""
    members = len(link.replicas)
    if members == 1:
        issued()
        return [t.detach().clone() for t in tensors]
    flat = torch.cat([t.detach().reshape(-1) for t in tensors]) if tensors else torch.zeros(0)
    window = BUCKET_BYTES // flat.element_size() // (members * BLOCK) * (members * BLOCK)
    for start in range(0, flat.numel(), window):
        part = flat[start : start + window]
        padded = torch.nn.functional.pad(part, (0, -part.numel() % (members * BLOCK))).view(members, -1)
        got = link.exchange(encode(padded), stop, timeout_s)
        if start == 0:
            issued()
        mine = decode(got).unbind(0)
        total = mine[0].clone()
        for other in mine[1:]:
            total += other
        sums = link.gather_rows(encode(total), stop, timeout_s)
        part.copy_(decode(torch.stack(sums)).view(-1)[: part.numel()])
    if not flat.numel():
        issued()
    return [piece.view_as(t) for piece, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)] if tensors else []
