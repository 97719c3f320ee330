"""Triton kernels for what a layer does between its matrix products: one pass over memory where eager PyTorch makes several.

All arithmetic inside a kernel is float32, whatever the tensors are; only the results are rounded. No kernel adds atomically or
in an order that varies, so all are bitwise deterministic. Needs CUDA and triton: ``everstep.engine.fusion`` says when.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# ------------------------------------------------------------------ RMSNorm (arXiv 1910.07467)


@triton.jit
def _norm_forward(  # type: ignore[no-untyped-def]
    x, weight, y, inverse, rows, groups, token_stride, group_stride, columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < columns)[None, :]
    source = (row // groups) * token_stride + (row % groups) * group_stride
    value = tl.load(x + source[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, axis=1) / columns + eps)
    tl.store(y + row[:, None] * columns + at[None, :], value * r[:, None] * w[None, :], mask=inside)
    tl.store(inverse + row, r, mask=row < rows)


@triton.jit
def _norm_backward(  # type: ignore[no-untyped-def]
    x, weight, d_y, inverse, d_x, d_weight, rows, groups, token_stride, group_stride, columns,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    w = tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (at < columns)[None, :]
        source = (row // groups) * token_stride + (row % groups) * group_stride
        r = tl.load(inverse + row, mask=row < rows, other=0.0)
        unit = tl.load(x + source[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32) * r[:, None]
        d = tl.load(d_y + row[:, None] * columns + at[None, :], mask=inside, other=0.0).to(tl.float32)
        sums += d * unit
        d *= w[None, :]
        mean = tl.sum(d * unit, axis=1) / columns
        tl.store(d_x + row[:, None] * columns + at[None, :], (d - unit * mean[:, None]) * r[:, None], mask=inside)
    tl.store(d_weight + program * columns + at, tl.sum(sums, axis=0), mask=at < columns)


def _norm_blocks(columns: int) -> dict[str, int]:
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "ROWS": max(1, 2048 // block), "num_warps": 4 if block < 4096 else 8}


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        columns = x.shape[-1]
        # Heads cut out of a wider projection are read where they are: rows in groups, which are evenly spaced.
        spaced = x.dim() == 4 and x.stride(3) == 1 and x.stride(0) == x.shape[1] * x.stride(1)
        if not spaced:
            x = x.contiguous()
        rows = x.numel() // columns
        ctx.walk = (rows, x.shape[2], x.stride(1), x.stride(2)) if spaced else (rows, 1, columns, columns)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
        how = _norm_blocks(columns)
        if rows:
            _norm_forward[(triton.cdiv(rows, how["ROWS"]),)](x, weight, y, inverse, *ctx.walk, columns, eps, **how)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        columns = x.shape[-1]
        how = _norm_blocks(columns)
        # Each program sums its rows' share of the weight's gradient in order; few enough that their sum costs nothing.
        programs = max(1, min(triton.cdiv(len(inverse), how["ROWS"]), 4 * _processors(x.device)))
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        d_weight = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
        _norm_backward[(programs,)](
            x, weight, grads[0].contiguous(), inverse, d_x, d_weight, *ctx.walk, columns, **how
        )  # fmt: skip
        return d_x, d_weight.sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None, None


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension of ``x`` (..., C), ``weight`` (C,); C up to 65536."""
    return _Norm.apply(x, weight, eps)  # type: ignore[no-any-return]


# ------------------------------------------------------------------ SwiGLU (arXiv 2002.05202)


@triton.jit
def _swiglu_forward(x, y, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(x + row * 2 * columns + at, mask=inside).to(tl.float32)
    up = tl.load(x + row * 2 * columns + columns + at, mask=inside).to(tl.float32)
    tl.store(y + row * columns + at, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _swiglu_backward(x, d_y, d_x, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(x + row * 2 * columns + at, mask=inside).to(tl.float32)
    up = tl.load(x + row * 2 * columns + columns + at, mask=inside).to(tl.float32)
    d = tl.load(d_y + row * columns + at, mask=inside).to(tl.float32)
    share = tl.sigmoid(gate)
    tl.store(d_x + row * 2 * columns + at, d * up * share * (1 + gate * (1 - share)), mask=inside)
    tl.store(d_x + row * 2 * columns + columns + at, d * gate * share, mask=inside)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        columns = x.shape[-1] // 2
        y = x.new_empty(*x.shape[:-1], columns)
        ctx.save_for_backward(x)
        ctx.grid = (y.numel() // columns, triton.cdiv(columns, 1024))
        if y.numel():
            _swiglu_forward[ctx.grid](x, y, columns, BLOCK=1024)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        d_x = torch.empty_like(x)
        if x.numel():
            _swiglu_backward[ctx.grid](x, grads[0].contiguous(), d_x, x.shape[-1] // 2, BLOCK=1024)
        return d_x


def swiglu(x: Tensor) -> Tensor:
    """(..., 2F), gates first -> (..., F): ``silu(gate) * up``. Only ``x`` is kept for backward."""
    return _Swiglu.apply(x)  # type: ignore[no-any-return]


# ------------------------------------------------------------------ rotary embedding (arXiv 2104.09864)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x, y, angles, x_s, x_b, x_h, y_s, y_b, y_h, samples, heads, half, sign, HEADS: tl.constexpr, HALF: tl.constexpr
):
    token = tl.program_id(0)
    s = (token // samples).to(tl.int64)
    b = (token % samples).to(tl.int64)
    d = tl.arange(0, HALF)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    angle = tl.load(angles + s * 2 * half + d, mask=d < half, other=0.0)
    cos = tl.cos(angle)[None, :]
    sin = (tl.sin(angle) * sign)[None, :]
    inside = (h < heads)[:, None] & (d < half)[None, :]
    source = x + s * x_s + b * x_b + h[:, None] * x_h + d[None, :]
    target = y + s * y_s + b * y_b + h[:, None] * y_h + d[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, first * cos - second * sin, mask=inside)
    tl.store(target + half, second * cos + first * sin, mask=inside)


def _rotated(x: Tensor, angles: Tensor, sign: float) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, samples, heads, channels = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(16, triton.next_power_of_2(heads))
    if x.numel():
        _rotate[(tokens * samples, triton.cdiv(heads, block))](
            x, y, angles, *x.stride()[:3], *y.stride()[:3], samples, heads, channels // 2, sign,
            HEADS=block, HALF=triton.next_power_of_2(channels // 2),
        )  # fmt: skip
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return _rotated(x, angles, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _rotated(grads[0], ctx.saved_tensors[0], -1.0), None


def rotary(x: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate all channels of ``x`` (S, B, H, D) by ``angles`` (S, 1, 1, D) float32, whose two halves along D are equal.

    Channel i turns with channel i + D/2. The signature is that of Transformer Engine's fused_apply_rotary_pos_emb.
    """
    if interleaved or angles.shape != (len(x), 1, 1, x.shape[-1]) or angles.dtype != torch.float32:
        raise NotImplementedError(f"angles {tuple(angles.shape)} {angles.dtype} (interleaved: {interleaved}) for {tuple(x.shape)}")
    return _Rotary.apply(x, angles.contiguous())  # type: ignore[no-any-return]


# ------------------------------------------------------------------ log-probabilities (see everstep.engine.vocab)


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    logits, row_stride, column, top, sums, positions, columns, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    high = float("-inf")
    total = 0.0
    spread = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < columns, other=float("-inf")).to(tl.float32) * scale
        now = tl.maximum(high, tl.max(x, axis=0))
        by = high - now  # -inf the first time
        shifted = x - now
        weights = tl.exp(shifted)
        if ENTROPY:
            # What was summed so far is relative to the old maximum. 0 * -inf must stay 0, at the start and behind the last column.
            spread = tl.exp(by) * (spread + tl.where(total > 0, by * total, 0.0))
            spread += tl.sum(tl.where(at < columns, weights * shifted, 0.0), axis=0)
        total = tl.exp(by) * total + tl.sum(weights, axis=0)
        high = now
    tl.store(top + row, high)
    tl.store(sums + row, total)
    tl.store(sums + positions + row, tl.load(base + tl.load(column + row)).to(tl.float32) * scale - high)
    tl.store(sums + 2 * positions + row, spread)


def row_sums(logits: Tensor, column: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Of ``x = logits / temperature``, (N, v) with rows of any stride: each row's maximum (N,), and (3, N) in float32:

    sum of exp(x - maximum), x - maximum in ``column`` (N,) int64, sum of exp(x - maximum) * (x - maximum) or 0.
    """
    positions, columns = logits.shape
    top = torch.empty(positions, dtype=torch.float32, device=logits.device)
    sums = torch.empty(3, positions, dtype=torch.float32, device=logits.device)
    if positions:
        _row_sums[(positions,)](
            logits, logits.stride(0), column, top, sums, positions, columns, 1.0 / temperature,
            ENTROPY=with_entropy, BLOCK=min(8192, triton.next_power_of_2(columns)), num_warps=8,
        )  # fmt: skip
    return top, sums


@triton.jit
def _row_gradient(  # type: ignore[no-untyped-def]
    logits, row_stride, out, column, here, log_z, entropy, d_logprob, d_entropy, columns, scale,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    log_p = tl.load(logits + row * row_stride + at, mask=inside, other=0.0).to(tl.float32) * scale - tl.load(log_z + row)
    d = tl.load(d_logprob + row)
    factor = d
    if ENTROPY:
        factor = d + tl.load(d_entropy + row) * (log_p + tl.load(entropy + row))
    chosen = (at == tl.load(column + row)) & (tl.load(here + row) != 0)
    d_x = tl.where(chosen, d, 0.0) - tl.exp(log_p) * factor
    tl.store(out + row * columns + at, d_x * scale, mask=inside)


def row_gradient(
    logits: Tensor, column: Tensor, here: Tensor, log_z: Tensor, entropy: Tensor, d_logprobs: Tensor, d_entropy: Tensor,
    temperature: float, with_entropy: bool,
) -> Tensor:  # fmt: skip
    """Gradient (N, v) of the logits of ``row_sums``, in their type; all others (N,), ``here`` boolean: whether ``column`` counts."""
    positions, columns = logits.shape
    out = torch.empty(positions, columns, dtype=logits.dtype, device=logits.device)
    block = min(4096, triton.next_power_of_2(columns))
    if positions:
        _row_gradient[(positions, triton.cdiv(columns, block))](
            logits, logits.stride(0), out, column, here.to(torch.int8), log_z, entropy, d_logprobs.contiguous(),
            d_entropy.contiguous(), columns, 1.0 / temperature, ENTROPY=with_entropy, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out
