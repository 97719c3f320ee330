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
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from everstep.config.schema import Config
from everstep.engine import fusion
from everstep.engine.layers import AddingRowParallelLinear, BiasedRowParallelLinear, CausalAttention, RMSNorm, ValueHead
from everstep.errors import BadInput
from everstep.layout import Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Advice to Megatron's developers that would be repeated for every engine: that GPTModel is to be replaced by
# HybridModel, and that DDP computes the layout of its buffers itself.
for _name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
    logging.getLogger(f"megatron.core.{_name}").setLevel(logging.ERROR)

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Architecture:
    """What a decoder of the Llama, Qwen2 or Qwen3 family is made of. Sizes are those of the whole model."""

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
    value_head: bool = False  # one number per token instead of the vocabulary: a critic

    @property
    def ties(self) -> bool:
        """Whether the output layer is the embedding; a value head never is."""
        return self.tied and not self.value_head

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary entries, rounded up so that every tensor-parallel rank holds as many."""
        return -(-self.vocab // tp) * tp


def _refuse(key: str, value: Any, why: str) -> BadInput:
    return BadInput(f"config.json of the model: {key}={value!r} is not supported: {why}")


def read_architecture(hf_config: Any) -> Architecture:
    """What ``hf_config`` (a transformers ``PretrainedConfig``) describes. BadInput names the key that cannot be used."""
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
        qk_norm=family == "qwen3",
        attention_dropout=float(getattr(c, "attention_dropout", 0.0) or 0.0),
        initializer_range=c.initializer_range,
        pad_token=c.pad_token_id,
        inverse_frequencies=tuple(_inverse_frequencies(c, head_dim).tolist()),
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


def check_layout(arch: Architecture, layout: Layout) -> None:
    """BadInput if the model cannot be cut as ``layout`` says; names the keys of both sides."""
    for key, value in (
        ("num_attention_heads", arch.heads),
        ("num_key_value_heads", arch.kv_heads),
        ("intermediate_size", arch.ffn),
    ):
        if value % layout.tp:
            raise BadInput(f"layout.tp={layout.tp} does not divide {key}={value} of the model; change layout.tp")
    if arch.padded_vocab(layout.tp) // layout.tp * (layout.tp - 1) >= arch.vocab:
        raise BadInput(
            f"layout.tp={layout.tp} leaves a rank without vocabulary: vocab_size={arch.vocab}; make layout.tp smaller"
        )
    layout.stages(arch.layers)
    if layout.ep != 1:
        raise BadInput(f"layout.ep={layout.ep} is not supported; set it to 1")


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
    )


def _pipeline_layout(stages: list[list[range]]) -> list[list[str]]:
    """Megatron's way to write down which layers every chunk has, in the order of depth."""
    pp, vpp = len(stages), len(stages[0])
    rows = [["decoder"] * len(stages[stage][chunk]) for chunk in range(vpp) for stage in range(pp)]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return rows


def build_chunks(
    arch: Architecture, megatron: TransformerConfig, layout: Layout, *, fused: frozenset[str] = frozenset()
) -> list[GPTModel]:
    """This rank's parts of the model, one per virtual stage, weights uninitialised.

    ``fused``: the kernels of ``everstep.engine.fusion`` to use. Collective over the replica if embeddings are tied.
    """
    fusion.configure(megatron, fused)
    chunks = layout.stages(arch.layers)[mpu.get_pipeline_model_parallel_rank()]
    return [_build_chunk(arch, megatron, len(layers), i if layout.vpp > 1 else None, fused) for i, layers in enumerate(chunks)]


def _build_chunk(
    arch: Architecture, megatron: TransformerConfig, layers: int, chunk: int | None, fused: frozenset[str]
) -> GPTModel:
    norm = fusion.FusedRMSNorm if "norm" in fused else RMSNorm
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
    tp = megatron.tensor_model_parallel_size
    model = GPTModel(
        megatron,
        TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm),
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
    elif "logprobs" in fused and model.post_process and not megatron.sequence_parallel:
        fusion.samples_first(model.output_layer)
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
