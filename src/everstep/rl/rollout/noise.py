"""Reproducible sampling: the noise of token t of a sample is a pure function of (seed, sample id, t, token).

So a completion does not depend on which other samples are in the batch, which process makes it, or how often it is made again after a
fault; one that was broken off goes on where it was. Noise is Gumbel noise: argmax(log p + Gumbel) is a draw from p. It is computed
with integer arithmetic on the device, so it is the same on CPU and GPU.

(Logits themselves may differ in the last bit between batch sizes; that changes a draw about once in a million tokens.)
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from everstep.rl.rollout import Sampling


def draw(logits: Tensor, sampling: Sampling, keys: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Next tokens (B,) int64 and their log-probabilities (B,) float32, of ``logits`` (B, V).

    ``keys``: of :func:`sample_keys` (B,); ``step``: the number of the token in its completion (B,). Log-probabilities are those at
    ``sampling.temperature`` (1 if greedy), before top_k and top_p cut the distribution, so that they compare with the trainer's.
    """
    logp = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)
    if sampling.temperature == 0:
        token = logp.argmax(dim=-1, keepdim=True)
    else:
        noisy = logp + gumbel_noise(keys, step, logp.shape[1])
        token = keep_likely(logp, noisy, sampling.top_k, sampling.top_p).argmax(dim=-1, keepdim=True)
    return token.squeeze(1), logp.gather(1, token).squeeze(1)


def keep_likely(logp: Tensor, values: Tensor, top_k: int, top_p: float) -> Tensor:
    """``values`` (B, V), with -inf where a token is not among the ``top_k`` likeliest or the nucleus of mass ``top_p``.

    The nucleus is the smallest set of likeliest tokens whose probability reaches ``top_p``; taken after top_k, over the
    renormalised rest, as transformers and vLLM do. The likeliest token always stays.
    """
    vocabulary = logp.shape[1]
    if top_k == 0 and top_p >= 1.0:
        return values
    count = min(top_k or vocabulary, vocabulary)
    top, index = logp.topk(count, dim=-1)  # sorted, likeliest first
    keep = torch.ones_like(top, dtype=torch.bool)
    if top_p < 1.0:
        # In fixed point, because CUDA has no deterministic running sum of floating-point numbers.
        p = (top.softmax(dim=-1).double() * 2.0**40).long()
        keep = p.cumsum(dim=-1) - p < int(top_p * 2.0**40)  # the mass before this token has not reached top_p yet
        keep[:, 0] = True
    kept = torch.zeros_like(logp, dtype=torch.bool).scatter_(1, index, keep)
    return values.masked_fill(~kept, float("-inf"))


_INCREMENT = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's constants, as signed 64-bit integers
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLY_2 = 0x94D049BB133111EB - 2**64


def sample_keys(seed: int, sample_ids: list[str]) -> Tensor:
    """One int64 per sample, (B,): the start of its stream of noise."""
    digest = lambda sid: hashlib.blake2b(f"{seed}/{sid}".encode(), digest_size=8).digest()
    return torch.tensor([int.from_bytes(digest(sid), "little", signed=True) for sid in sample_ids], dtype=torch.int64)


def gumbel_noise(keys: Tensor, step: int | Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise (B, V) float32 of token number ``step`` (one for all, or int64 (B,)) of each sample; a pure function of
    its arguments."""
    row = _mix(keys + (step + 1) * torch.tensor(_INCREMENT))  # of no dimensions, on the host: nothing is copied to a device, nor waited for
    column = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=keys.device) * _INCREMENT
    bits = _shift(_mix(row.unsqueeze(1) + column), 11)  # 53 random bits
    # Small uniforms keep their relative precision in float32; they are the exponentials, and so the Gumbels, that win.
    uniform = ((bits.float() + 0.5) * 2.0**-53).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix(x: Tensor) -> Tensor:
    """The output function of splitmix64; int64 arithmetic wraps around like the unsigned one."""
    x = (x ^ _shift(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift(x, 27)) * _MULTIPLY_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
