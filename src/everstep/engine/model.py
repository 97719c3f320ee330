"""From a Hugging Face config to a Megatron-Core GPTModel, DistributedDataParallel and optimizer.

``read_architecture`` says what the config means, or refuses it; everything after it knows only ``Architecture``.
Transformers' meaning is the reference: the tests compare log-probabilities, gradients and updates with its models.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from everstep.config.schema import Config
from everstep.engine import fusion
from everstep.engine.layers import (
    AddingRowParallelLinear,
    BiasedRowParallelLinear,
    CausalAttention,
    RMSNorm,
    Rotary,
    ValueHead,
)
from everstep.engine.moe import ExpertLayer
from everstep.engine.projection import DeferredProjection
from everstep.engine.shape import sparse_layers
from everstep.errors import BadInput
from everstep.layout import Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Advice to Megatron's developers that would be repeated for every engine: that GPTModel is to be replaced by
# HybridModel, and that DDP computes the layout of its buffers itself.
for _name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
    logging.getLogger(f"megatron.core.{_name}").setLevel(logging.ERROR)

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Experts:
    """The feed-forward layers that are mixtures of experts. ``sparse``: for every layer of the model whether it is one."""

    count: int  # of one layer
    per_token: int
    ffn: int  # of one expert
    renormalized: bool  # the chosen experts' weights are divided by their sum
    sparse: tuple[bool, ...]
    aux_loss_coef: float  # 0: no auxiliary loss


@dataclass(frozen=True)
class Architecture:
    """What a decoder of the Llama, Qwen2, Qwen3 or Mixtral family is made of. Sizes are those of the whole model."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    tied: bool  # output layer and embedding are one tensor
    qkv_bias: bool
    out_bias: bool  # of the attention output projection
    mlp_bias: bool
    qk_norm: bool
    attention_dropout: float
    initializer_range: float
    pad_token: int | None
    inverse_frequencies: tuple[float, ...]  # of the rotary embedding, head_dim // 2 of them
    experts: Experts | None = None
    value_head: bool = False  # one number per token instead of the vocabulary: a critic

    def sparse(self, layer: int) -> bool:
        """Whether the feed-forward layer number ``layer`` is a mixture of experts."""
        return self.experts is not None and self.experts.sparse[layer]

    @property
    def ties(self) -> bool:
        """Whether the output layer is the embedding; a value head never is."""
        return self.tied and not self.value_head

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary entries, rounded up so that every tensor-parallel rank holds as many."""
        return -(-self.vocab // tp) * tp


def _refuse(key: str, value: Any, why: str) -> BadInput:
    return BadInput(f"config.json of the model: {key}={value!r} is not supported: {why}")


def read_architecture(hf_config: Any, aux_loss_coef: float | None = None) -> Architecture:
    """What ``hf_config`` (a transformers ``PretrainedConfig``) describes. BadInput names the key that cannot be used.

    ``aux_loss_coef``: of the auxiliary loss of experts, in the place of the model's own (``moe.aux_loss_coef``).
    """
    c = hf_config
    family = c.model_type
    if family not in FAMILIES:
        names = ", ".join(getattr(c, "architectures", None) or ["unknown"])
        raise _refuse("model_type", family, f"architecture {names}; everstep trains {', '.join(FAMILIES)}")
    if c.hidden_act != "silu":
        raise _refuse("hidden_act", c.hidden_act, "the gated MLP uses silu")
    if getattr(c, "quantization_config", None):
        raise _refuse("quantization_config", "...", "quantised weights cannot be trained; use the unquantised model")
    if getattr(c, "use_sliding_window", False):
        raise _refuse("use_sliding_window", True, "attention is causal over the whole sequence")
    if family == "mixtral" and c.sliding_window is not None:
        raise _refuse("sliding_window", c.sliding_window, "attention is causal over the whole sequence")
    other = sorted(set(getattr(c, "layer_types", None) or []) - {"full_attention"})
    if other:
        raise _refuse("layer_types", other, "every layer must be full_attention")

    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    biased = bool(getattr(c, "attention_bias", False))
    mlp_bias = bool(getattr(c, "mlp_bias", False))
    if mlp_bias and not biased:
        raise _refuse("mlp_bias", True, "without attention_bias; Megatron-Core has both biases or none")
    kv_heads = c.num_key_value_heads if c.num_key_value_heads is not None else c.num_attention_heads
    return Architecture(
        family=family,
        layers=c.num_hidden_layers,
        hidden=c.hidden_size,
        ffn=c.intermediate_size,
        heads=c.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=c.vocab_size,
        max_positions=c.max_position_embeddings,
        norm_eps=c.rms_norm_eps,
        tied=bool(c.tie_word_embeddings),
        qkv_bias=biased or family == "qwen2",
        out_bias=biased and family != "qwen2",
        mlp_bias=mlp_bias,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        attention_dropout=float(getattr(c, "attention_dropout", 0.0) or 0.0),
        initializer_range=c.initializer_range,
        pad_token=c.pad_token_id,
        inverse_frequencies=tuple(_inverse_frequencies(c, head_dim).tolist()),
        experts=_experts(c, aux_loss_coef) if family in ("qwen3_moe", "mixtral") else None,
    )


def _experts(c: Any, aux_loss_coef: float | None) -> Experts | None:
    """None if no layer has experts. The auxiliary loss is on where transformers adds it: with ``output_router_logits``."""
    if getattr(c, "router_jitter_noise", 0.0):
        raise _refuse("router_jitter_noise", c.router_jitter_noise, "routing is a function of the token alone")
    count, chosen = c.num_local_experts, c.num_experts_per_tok
    mixtral = c.model_type == "mixtral"
    dense, step = ((), 1) if mixtral else (c.mlp_only_layers, c.decoder_sparse_step)
    sparse = sparse_layers(c.model_type, c.num_hidden_layers, count, dense, step)
    if not any(sparse):
        return None
    if not 1 <= chosen <= count:
        raise _refuse("num_experts_per_tok", chosen, f"a layer has {count} experts")
    its_own = float(c.router_aux_loss_coef) if c.output_router_logits else 0.0
    return Experts(
        count=count,
        per_token=chosen,
        ffn=c.intermediate_size if mixtral else c.moe_intermediate_size,
        renormalized=mixtral or bool(c.norm_topk_prob),
        sparse=sparse,
        aux_loss_coef=its_own if aux_loss_coef is None else aux_loss_coef,
    )


def _inverse_frequencies(c: Any, head_dim: int) -> Tensor:
    """Inverse frequencies of the rotary embedding, (head_dim // 2,) float32, as transformers computes them."""
    c.standardize_rope_params()
    rope = c.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise _refuse("rope_scaling.rope_type", kind, f"known are {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refuse("partial_rotary_factor", rope["partial_rotary_factor"], "all channels of a head are rotated")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (rope["rope_theta"] ** exponents)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](c, torch.device("cpu"))
    if attention_factor != 1.0:
        raise _refuse("rope_scaling.attention_factor", attention_factor, "it must be 1")
    return frequencies


def check_layout(arch: Architecture, layout: Layout, sequence_parallel: bool = False) -> None:
    """BadInput if the model cannot be cut as ``layout`` says; names the keys of both sides."""
    experts = arch.experts
    for key, value in (
        ("num_attention_heads", arch.heads),
        ("num_key_value_heads", arch.kv_heads),
        ("intermediate_size", arch.ffn if experts is None or not all(experts.sparse) else layout.tp),
        ("the intermediate size of experts", experts.ffn if experts else layout.tp),
    ):
        if value % layout.tp:
            raise BadInput(f"layout.tp={layout.tp} does not divide {key}={value} of the model; change layout.tp")
    if arch.padded_vocab(layout.tp) // layout.tp * (layout.tp - 1) >= arch.vocab:
        raise BadInput(
            f"layout.tp={layout.tp} leaves a rank without vocabulary: vocab_size={arch.vocab}; make layout.tp smaller"
        )
    layout.stages(arch.layers)
    if experts is not None and layout.tp > 1 and not sequence_parallel:
        raise BadInput(
            f"layout.tp={layout.tp} with experts: tensor-parallel ranks must route different tokens; set engine.sequence_parallel=true"
        )
    if layout.ep > 1 and (experts is None or experts.count % layout.ep):
        raise BadInput(
            f"layout.ep={layout.ep} does not divide num_experts={experts.count if experts else 0} of the model; change layout.ep"
        )


def transformer_config(arch: Architecture, config: Config, layout: Layout) -> TransformerConfig:
    """Megatron's description of one model. Fusions that need Transformer Engine or Apex are off."""
    dtype = DTYPES[config.model.dtype]
    recompute: dict[str, Any] = {}
    if config.engine.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif config.engine.recompute == "selective":
        # The feed-forward layer keeps the most and costs the least to repeat. Fused attention keeps nothing of its own,
        # except, under context parallelism, everybody's keys and values.
        recompute = {
            "recompute_granularity": "selective",
            "recompute_modules": ["mlp", "core_attn"] if layout.cp > 1 else ["mlp"],
        }
    pipeline: dict[str, Any] = {}
    if layout.pp > 1:
        pipeline = {
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "pipeline_model_parallel_layout": _pipeline_layout(layout.stages(arch.layers)),
        }
    if layout.vpp > 1:
        # The batched exchange posts a rank's sends in both directions as one list; between the same two ranks (pp=2)
        # their order differs from that of the receives, and activations arrive as gradients.
        pipeline |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    mixture: dict[str, Any] = {}
    if arch.experts is not None:
        mixture = {
            "num_moe_experts": arch.experts.count,
            "moe_ffn_hidden_size": arch.experts.ffn,
            "moe_router_topk": arch.experts.per_token,
            # Megatron's word for weights that are not divided by their sum.
            "moe_router_pre_softmax": not arch.experts.renormalized,
            "moe_router_load_balancing_type": "none",  # ours: everstep.engine.moe
            "moe_aux_loss_coeff": arch.experts.aux_loss_coef / sum(arch.experts.sparse),
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.tp,
        }
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.ffn,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=arch.mlp_bias,
        add_qkv_bias=arch.qkv_bias,
        attention_dropout=arch.attention_dropout,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        sequence_parallel=config.engine.sequence_parallel,
        # Weights come from a checkpoint or from init_random, the same for every layout; Megatron's own
        # initialisation would only cost time.
        perform_initialization=False,
        # The loss returns sums; nothing inside Megatron may divide by tokens or micro-batches.
        calculate_per_token_loss=True,
        deterministic_mode=config.engine.deterministic,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **pipeline,
        **recompute,
        **mixture,
    )


def _pipeline_layout(stages: list[list[range]]) -> list[list[str]]:
    """Megatron's way to write down which layers every chunk has, in the order of depth."""
    pp, vpp = len(stages), len(stages[0])
    rows = [["decoder"] * len(stages[stage][chunk]) for chunk in range(vpp) for stage in range(pp)]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return rows


def build_chunks(
    arch: Architecture, megatron: TransformerConfig, layout: Layout, deferred: bool, fused: frozenset[str] = frozenset()
) -> list[GPTModel]:
    """This rank's parts of the model, one per virtual stage, weights uninitialised.

    ``deferred``: hidden states come out, for ``everstep.engine.projection``. ``fused``: the kernels of ``everstep.engine.fusion`` to
    use. Collective over the replica if embeddings are tied.
    """
    fusion.configure(megatron, fused)
    chunks = layout.stages(arch.layers)[mpu.get_pipeline_model_parallel_rank()]
    models = [_build_chunk(arch, megatron, layers, i if layout.vpp > 1 else None, fused, deferred) for i, layers in enumerate(chunks)]
    if deferred and models[-1].post_process and not arch.value_head:
        models[-1].output_layer = DeferredProjection(models[-1].output_layer)
    return models


def output_weight(chunks: Sequence[torch.nn.Module]) -> Tensor:
    """This rank's rows of the output projection, which may be the embedding; on the last pipeline stage."""
    last = bare(chunks[-1])
    return last.shared_embedding_or_output_weight() if last.share_embeddings_and_output_weights else last.output_layer.weight


def _norm(fused: frozenset[str]) -> type[RMSNorm]:
    return fusion.FusedRMSNorm if "norm" in fused else RMSNorm


def _build_layer(arch: Architecture, sparse: bool, fused: frozenset[str]) -> ModuleSpec:
    norm = _norm(fused)
    layer = get_gpt_layer_local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = fusion.CudnnAttention if "attention" in fused else CausalAttention
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    if arch.out_bias and not arch.mlp_bias:
        attention.linear_proj = BiasedRowParallelLinear
    mlp: Any = layer.submodules.mlp  # a ModuleSpec up to Megatron-Core 0.16, later a functools.partial
    parts = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    if "swiglu" in fused:
        parts.activation_func = fusion.Swiglu
    if arch.mlp_bias:
        parts.linear_fc2 = AddingRowParallelLinear
    if sparse:
        layer.submodules.mlp = ExpertLayer
    return layer


def _build_chunk(
    arch: Architecture, megatron: TransformerConfig, layers: range, chunk: int | None, fused: frozenset[str], deferred: bool
) -> GPTModel:
    specs = [_build_layer(arch, arch.sparse(layer), fused) for layer in layers]
    tp = megatron.tensor_model_parallel_size
    model = GPTModel(
        megatron,
        TransformerBlockSubmodules(layer_specs=specs, layer_norm=_norm(fused)),
        vocab_size=arch.padded_vocab(tp),
        max_sequence_length=arch.max_positions,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=arch.ties,
        vp_stage=chunk,
    )
    if arch.value_head and model.post_process:
        model.output_layer = ValueHead(megatron, arch.hidden)
    elif "logprobs" in fused and model.post_process and not megatron.sequence_parallel and not deferred:
        fusion.samples_first(model.output_layer)
    model.rotary_pos_emb = Rotary(arch.head_dim, rotary_percent=1.0)
    # Transformers' frequencies rather than Megatron's: the same formula, but every rope type and its parameters.
    model.rotary_pos_emb.inv_freq = torch.tensor(
        arch.inverse_frequencies, dtype=torch.float32, device=torch.cuda.current_device()
    )
    return model.to(torch.cuda.current_device())


def in_model_precision(model: GPTModel, megatron: TransformerConfig) -> torch.nn.Module:
    """``model``, wrapped so that activations enter it in bfloat16 if that is the model's type."""
    return Float16Module(megatron, model) if megatron.bf16 else model


def bare(model: torch.nn.Module) -> GPTModel:
    """The GPTModel inside Megatron's wrappers."""
    inner: Any = model
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner


def chunk_prefix(chunk: int, vpp: int) -> str:
    """What the names of a chunk's parameters begin with: nothing where a rank has but one chunk."""
    return f"chunks.{chunk}." if vpp > 1 else ""


def rank_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """name -> parameter of all chunks of this rank, wrapped or not."""
    return {
        chunk_prefix(i, len(chunks)) + name: parameter
        for i, chunk in enumerate(chunks)
        for name, parameter in bare(chunk).named_parameters()
    }


def wrap_for_training(
    chunks: list[GPTModel], megatron: TransformerConfig, config: Config, *, fused: frozenset[str] = frozenset()
) -> tuple[list[DistributedDataParallel], Any]:
    """(DistributedDataParallel of each chunk, one Megatron optimizer) over the inner data- and context-parallel ranks.

    Gradients are reduced in float32 after backward, not overlapped: the step transaction decides when. Clipping and
    divisors are the caller's. Weight decay is left out for one-dimensional parameters and biases.
    """
    sharded = config.engine.distributed_optimizer
    ddps = [
        DistributedDataParallel(
            megatron,
            DistributedDataParallelConfig(
                use_distributed_optimizer=sharded, overlap_grad_reduce=False, grad_reduce_in_fp32=True
            ),
            in_model_precision(chunk, megatron),
        )
        for chunk in chunks
    ]
    o = config.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=o.lr,
            min_lr=0.0,
            weight_decay=o.weight_decay,
            adam_beta1=o.beta1,
            adam_beta2=o.beta2,
            adam_eps=o.eps,
            clip_grad=0.0,
            bf16=megatron.bf16,
            params_dtype=megatron.params_dtype,
            use_distributed_optimizer=sharded,
        ),
        ddps,
        use_gloo_process_groups=False,
    )
    # Megatron leaves it to its learning-rate scheduler to apply the groups' weight-decay factors.
    for group in optimizer.param_groups:
        group["weight_decay"] = o.weight_decay * group["wd_mult"]
        if "adam" in fused:
            group |= {"fused": True, "foreach": False}
    return ddps, optimizer
