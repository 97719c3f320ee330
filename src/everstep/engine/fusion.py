"""Which fused kernels an engine uses, and how they get into Megatron's model.

    norm       RMSNorm, also of query and key heads
    rope       rotary embedding, angles in float32
    swiglu     the gated activation of the feed-forward layer
    logprobs   log-probabilities, entropies and their gradient in one pass over the logits each
    adam       one kernel for all of AdamW
    attention  cuDNN's attention rather than the flash attention that comes with torch; it is not deterministic

They compute what the eager code computes, but keep float32 from one end of a kernel to the other, so results agree within
the rounding of the model's type. The first four need triton (which comes with torch for CUDA), all need a CUDA device.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from everstep.config.schema import FusedKernel
from everstep.engine.layers import CausalAttention, RMSNorm
from everstep.errors import BadInput

if TYPE_CHECKING:
    from everstep.config.schema import EngineConfig

WITH_TRITON = frozenset({"norm", "rope", "swiglu", "logprobs"})
KERNELS: frozenset[str] = frozenset(get_args(FusedKernel))
_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def chosen(engine: EngineConfig, device: torch.device) -> frozenset[str]:
    """The fused kernels that ``engine.fused_kernels`` means on ``device``. BadInput if it names one that cannot be had."""
    wanted = engine.fused_kernels
    possible: frozenset[str] = frozenset()
    if device.type == "cuda":
        possible = KERNELS if has_triton() else KERNELS - WITH_TRITON
        if engine.deterministic:
            possible -= {"attention"}
    if wanted == "auto":
        return possible
    if wanted == "none":
        return frozenset()
    if missing := sorted(set(wanted) - possible):
        why = "there is no CUDA device" if device.type != "cuda" else "triton is not installed"
        if missing == ["attention"] and device.type == "cuda":
            why = "cuDNN's attention is not deterministic, and engine.deterministic=true"
        raise BadInput(f"engine.fused_kernels asks for {', '.join(missing)}, but {why}; leave it out, or use auto")
    return frozenset(wanted)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def configure(megatron: TransformerConfig, fused: frozenset[str]) -> None:
    """Tell Megatron of the fused activation and rotary embedding. Idempotent.

    Megatron has a place for either, and fills it from Transformer Engine alone; without that it would refuse ``apply_rope_fusion``
    when the configuration is made, so it is set here.
    """
    megatron.use_te_activation_func = "swiglu" in fused
    megatron.apply_rope_fusion = "rope" in fused
    if "rope" in fused and rope_utils.fused_apply_rotary_pos_emb is None:
        from everstep.engine import kernels

        rope_utils.fused_apply_rotary_pos_emb = kernels.rotary


class FusedRMSNorm(RMSNorm):
    """``RMSNorm`` in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        from everstep.engine import kernels

        return kernels.rms_norm(x, self.weight, self.eps)


class Swiglu(nn.Module):
    """The gated activation as a module: what Megatron's MLP calls under ``use_te_activation_func``."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """(..., 2F), gates first -> (..., F)."""
        from everstep.engine import kernels

        return kernels.swiglu(x)


class CudnnAttention(CausalAttention):
    """``CausalAttention`` that takes cuDNN's kernel before flash attention where both can compute it.

    cuDNN makes a plan for every shape, which takes it a tenth of a second, so tokens are padded to a multiple of 128: no token
    sees what is behind it.
    """

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = len(query)
        if len(key) != tokens:  # under context parallelism, with a mask that cuDNN does not take
            return super()._attend(query, key, value)
        if missing := -tokens % 128:
            query, key, value = (F.pad(x, (0, 0, 0, 0, 0, 0, 0, missing)) for x in (query, key, value))
        with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
            return super()._attend(query, key, value)[:tokens]


def samples_first(output_layer: Any) -> None:
    """Let ``output_layer`` project (B, S, h) rather than (S, B, h): GPTModel wants logits (B, S, v), and would copy them."""

    def before(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return inputs[0].transpose(0, 1).contiguous(), *inputs[1:]

    def after(module: Any, inputs: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return outputs[0].transpose(0, 1), outputs[1]

    output_layer.register_forward_pre_hook(before)
    output_layer.register_forward_hook(after)
