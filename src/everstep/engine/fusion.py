"""How the fused kernels that ``engine.fused_kernels`` means (:func:`everstep.config.derive.fused_kernels`) get into Megatron's model.

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

from typing import Any

import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from everstep.engine.layers import CausalAttention, RMSNorm

_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
