"""The layers that Megatron-Core has only with Transformer Engine, written with plain PyTorch.

Shapes, in Megatron's order: S tokens, B samples, H query heads, G key/value heads (groups), D channels per head.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from everstep.engine.arrange import Segments
from everstep.engine.columns import Columns

try:
    from torch.nn.attention import varlen
except ImportError:  # torch < 2.10
    _VARLEN_KNOWS = frozenset[str]()
else:
    _VARLEN_KNOWS = frozenset(inspect.signature(varlen.varlen_attn).parameters)


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension; reduced in float32.

    Unlike Megatron's wrapper of ``torch.nn.RMSNorm`` it can run under sequence parallelism: its weight is flagged,
    so that ``finalize_model_grads`` sums its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class CausalAttention(nn.Module):
    """Causal grouped-query attention by ``scaled_dot_product_attention``; no mask tensor is built.

    Under context parallelism each rank gathers the keys and values of all ranks and attends from its own two blocks
    of queries (see ``everstep.engine.columns``), each to the keys up to its own end; only a backend without such a
    kernel (the CPU) is given a mask.

    Sequences are right-padded, so causality alone keeps real tokens from seeing padding. What comes out at padded
    positions is finite and meaningless; the loss mask excludes it.

    Of a packed row (``Segments``) each segment attends within itself: in one call of a kernel for sequences of different
    lengths where there is one (half precision on a GPU, without dropout or context parallelism), else segment by segment.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels or 1)
        self.columns = Columns.of_this_rank()

    def forward(
        self,
        query: Tensor,  # (S, B, H, D)
        key: Tensor,  # (S, B, G, D)
        value: Tensor,  # (S, B, G, D)
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> Tensor:  # (S, B, H*D)
        if isinstance(packed_seq_params, Segments):
            return self._packed(query, key, value, packed_seq_params)
        if self.columns.cp == 1:
            return self._attend(query, key, value)
        key, value = self.columns.gathered(torch.cat([key, value], dim=-1)).chunk(2, dim=-1)  # (P, B, G, D) each
        block = len(query) // 2
        ends = [(number + 1) * block for number in self.columns.blocks]
        parts = [self._attend(q, key[:end], value[:end]) for q, end in zip(query.chunk(2), ends, strict=True)]
        return torch.cat(parts)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        """B is 1. This rank's queries lie in one or two blocks of the row, and each block in pieces of segments."""
        if self.columns.cp > 1:
            key, value = self.columns.gathered(torch.cat([key, value], dim=-1)).chunk(2, dim=-1)  # (P, 1, G, D) each
            block = len(query) // 2
            blocks = [(number * block, (number + 1) * block) for number in self.columns.blocks]
        elif _has_varlen_kernel(query) and not (self.training and self.dropout > 0):
            return self._varlen(query, key, value, segments)
        else:
            blocks = [(0, len(query))]
        parts, done = [], 0
        for start, stop in blocks:
            for begin, end in segments.bounds:
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    queries = query[done : done + high - low]
                    parts.append(self._attend(queries, key[begin:high], value[begin:high]))
                    done += high - low
        return torch.cat(parts)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        q, k, v = (x[:, 0] for x in (query, key, value))
        # The kernel takes grouped heads; torch asks for this to be said since 2.12.
        grouped: dict[str, Any] = {"enable_gqa": k.shape[1] != q.shape[1]} if "enable_gqa" in _VARLEN_KNOWS else {}
        out: Any = varlen.varlen_attn(
            q, k, v, segments.offsets, segments.offsets, segments.longest, segments.longest,
            scale=self.scale, window_size=(-1, 0), **grouped,
        )  # fmt: skip
        return out.reshape(len(query), 1, -1)  # type: ignore[no-any-return]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The last query sees all keys, each one before it sees one key less."""
        tokens, samples, heads, channels = query.shape
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        how: dict[str, Any] = {"scale": self.scale, "enable_gqa": k.shape[1] != heads}
        if len(key) == tokens:
            how["is_causal"] = True
        else:
            how["attn_mask"] = causal_lower_right(tokens, len(key))
        if self.training and self.dropout > 0:
            # Heads differ between tensor-parallel ranks, so their dropout must too.
            with get_cuda_rng_tracker().fork():
                out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, **how)
        else:
            out = F.scaled_dot_product_attention(q, k, v, **how)
        return out.permute(2, 0, 1, 3).reshape(tokens, samples, heads * channels)


def _has_varlen_kernel(query: Tensor) -> bool:
    """Whether torch's attention over sequences of different lengths can take ``query``: it is flash attention on a GPU, and the
    scale came in after its first version, torch 2.10."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256 and {"scale", "window_size"} <= _VARLEN_KNOWS


class Rotary(RotaryEmbedding):
    """Megatron's rotary embedding, which for a packed row begins anew in each segment."""

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """What ``forward`` is given: the length of the sequence, or the segments."""
        packed = kwargs.get("packed_seq_params", args[4] if len(args) > 4 else None)
        return packed if isinstance(packed, Segments) else super().get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Angles (S, 1, 1, D) of this rank's columns."""
        if not isinstance(max_seq_len, Segments):
            return super().forward(max_seq_len, *args, **kwargs)
        angles = torch.outer(max_seq_len.positions.to(self.inv_freq.dtype), self.inv_freq)
        return torch.cat([angles, angles], dim=-1)[:, None, None]


class ValueHead(nn.Module):
    """The last layer of a critic, in the place of GPTModel's output layer: one number per token, ``w h + b``.

    The same on all tensor-parallel ranks, from the whole sequence also under sequence parallelism; so its gradients need no sum.
    Transformers calls it ``score`` (``...ForTokenClassification`` with one label).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int) -> None:
        super().__init__()
        how: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.empty(1, hidden_size, **how))
        self.bias = nn.Parameter(torch.empty(1, **how))
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """(S, B, hidden), under sequence parallelism only this rank's part of S -> (S, B, 1), and no bias to be added."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return F.linear(hidden, self.weight, self.bias), None


class BiasedRowParallelLinear(RowParallelLinear):
    """The attention output projection of models with ``attention_bias``: has a bias although the MLP has none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["bias"] = True
        super().__init__(*args, **kwargs)


class AddingRowParallelLinear(RowParallelLinear):
    """The second matrix of an MLP with biases: adds its bias, instead of handing it on to be added later.

    Under selective recompute the MLP is one autograd function; a parameter among its outputs would be given that
    function as its history, and every later backward would run through all earlier ones.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["skip_bias_add"] = False
        super().__init__(*args, **kwargs)
