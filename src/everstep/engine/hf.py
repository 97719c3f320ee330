"""Weights in and out of the sharded model, by Hugging Face names.

One table (``pieces``) says, for every parameter of the model, which Hugging Face tensors it is made of, which
pipeline stage holds it and how the tensor-parallel ranks cut it; loading, export and random initialisation all read
that table. Legend: H query heads, G key/value heads, D channels per head, F intermediate size, V vocabulary.

Experts go by the names under which transformers saves them, one tensor for each matrix of each expert; in memory transformers
(from version 5 on) fuses the experts of a layer, and those names are understood too (``everstep.engine.fused``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from everstep.engine.fused import expert_names, single_experts
from everstep.engine.model import Architecture, chunk_prefix
from everstep.errors import BadInput
from everstep.layout import Layout

Getter = Callable[[], Tensor]
Cut = Literal["whole", "rows", "columns", "vocab", "qkv", "gate_up"]


@dataclass(frozen=True)
class Piece:
    """One parameter of the model: ``local`` is its name among ``model.rank_parameters`` of pipeline rank ``stage``.

    ``names`` and ``shapes`` are the Hugging Face tensors it holds (q, k, v or gate, up or one), ``shape`` its own on
    every rank. ``shared``: a second copy of the embedding, kept equal by Megatron, that exports and norms skip. An expert's
    matrix is entry ``index`` of a parameter, and expert-parallel rank ``ep`` holds it (None: it is a whole parameter, of all).
    """

    local: str
    stage: int
    cut: Cut
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    shared: bool = False
    ep: int | None = None
    index: int | None = None

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Its tensor, of ``shape``, among this rank's ``parameters``."""
        return parameters[self.local] if self.index is None else parameters[self.local][self.index]

    def held(self, stage: int, ep: int) -> bool:
        """Whether the ranks of pipeline stage ``stage`` and expert-parallel rank ``ep`` hold it."""
        return self.stage == stage and self.ep in (None, ep)

    @property
    def replicated(self) -> bool:
        """True if all tensor-parallel ranks hold the same values."""
        return self.cut == "whole"


def pieces(arch: Architecture, layout: Layout) -> list[Piece]:
    """Every parameter of the model, in the order in which transformers lists them."""
    a, tp, pp = arch, layout.tp, layout.pp
    first, last = chunk_prefix(0, layout.vpp), chunk_prefix(layout.vpp - 1, layout.vpp)
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    vocab_rows = a.padded_vocab(tp) // tp
    table = [
        Piece(
            first + "embedding.word_embeddings.weight", 0, "vocab",
            ("model.embed_tokens.weight",), ((a.vocab, a.hidden),), (vocab_rows, a.hidden),
        )
    ]  # fmt: skip
    homes = {
        layer: (stage, f"{chunk_prefix(chunk, layout.vpp)}decoder.layers.{index}.")
        for stage, chunks in enumerate(layout.stages(a.layers))
        for chunk, layers in enumerate(chunks)
        for index, layer in enumerate(layers)
    }
    for layer in range(a.layers):
        stage, mine = homes[layer]
        theirs = f"model.layers.{layer}."

        def add(
            local: str, cut: Cut, names: list[str], shapes: list[tuple[int, ...]], shape: tuple[int, ...],
            at: tuple[int | None, int | None] = (None, None), stage: int = stage, mine: str = mine, theirs: str = theirs,
        ) -> None:  # fmt: skip
            table.append(Piece(mine + local, stage, cut, tuple(theirs + n for n in names), tuple(shapes), shape, ep=at[0], index=at[1]))

        qkv = [f"self_attn.{n}_proj" for n in "qkv"]
        gate_up = ["mlp.gate_proj", "mlp.up_proj"]
        h = a.hidden
        add(
            "self_attention.linear_qkv.weight", "qkv",
            [f"{n}.weight" for n in qkv], [(q, h), (kv, h), (kv, h)], ((q + 2 * kv) // tp, h),
        )  # fmt: skip
        if a.qkv_bias:
            add(
                "self_attention.linear_qkv.bias", "qkv",
                [f"{n}.bias" for n in qkv], [(q,), (kv,), (kv,)], ((q + 2 * kv) // tp,),
            )  # fmt: skip
        add("self_attention.linear_proj.weight", "columns", ["self_attn.o_proj.weight"], [(h, q)], (h, q // tp))
        if a.out_bias:
            add("self_attention.linear_proj.bias", "whole", ["self_attn.o_proj.bias"], [(h,)], (h,))
        if a.qk_norm:
            for n in "qk":
                add(
                    f"self_attention.{n}_layernorm.weight", "whole",
                    [f"self_attn.{n}_norm.weight"], [(a.head_dim,)], (a.head_dim,),
                )  # fmt: skip
        if a.experts is not None and a.experts.sparse[layer]:
            x, inside = a.experts, expert_names(a.family)
            add("mlp.router.weight", "whole", [f"{inside.block}.gate.weight"], [(x.count, h)], (x.count, h))
            for expert in range(x.count):
                its, at = f"{inside.block}.experts.{expert}.", divmod(expert, x.count // layout.ep)
                gate_up_names = [f"{its}{n}.weight" for n in (inside.gate, inside.up)]
                add("mlp.experts.gate_up", "gate_up", gate_up_names, [(x.ffn, h)] * 2, (2 * x.ffn // tp, h), at)
                add("mlp.experts.down", "columns", [f"{its}{inside.down}.weight"], [(h, x.ffn)], (h, x.ffn // tp), at)
        else:
            add(
                "mlp.linear_fc1.weight", "gate_up",
                [f"{n}.weight" for n in gate_up], [(a.ffn, h)] * 2, (2 * a.ffn // tp, h),
            )  # fmt: skip
            add("mlp.linear_fc2.weight", "columns", ["mlp.down_proj.weight"], [(h, a.ffn)], (h, a.ffn // tp))
            if a.mlp_bias:
                add("mlp.linear_fc1.bias", "gate_up", [f"{n}.bias" for n in gate_up], [(a.ffn,)] * 2, (2 * a.ffn // tp,))
                add("mlp.linear_fc2.bias", "whole", ["mlp.down_proj.bias"], [(h,)], (h,))
        add("input_layernorm.weight", "whole", ["input_layernorm.weight"], [(h,)], (h,))
        add("pre_mlp_layernorm.weight", "whole", ["post_attention_layernorm.weight"], [(h,)], (h,))
    table.append(
        Piece(
            last + "decoder.final_layernorm.weight", pp - 1, "whole",
            ("model.norm.weight",), ((a.hidden,),), (a.hidden,),
        )
    )  # fmt: skip
    if a.value_head:
        for kind, size in (("weight", (1, a.hidden)), ("bias", (1,))):
            table.append(Piece(f"{last}output_layer.{kind}", pp - 1, "whole", (f"score.{kind}",), (size,), size))
    elif not a.tied or pp > 1:
        head = "model.embed_tokens.weight" if a.tied else "lm_head.weight"
        table.append(
            Piece(
                last + "output_layer.weight", pp - 1, "vocab",
                (head,), ((a.vocab, a.hidden),), (vocab_rows, a.hidden), shared=a.tied,
            )
        )  # fmt: skip
    return table


# ------------------------------------------------------------------ cutting and joining


def shard(piece: Piece, tensors: list[Tensor], arch: Architecture, tp: int, rank: int) -> Tensor:
    """What tensor-parallel rank ``rank`` of ``tp`` keeps of the whole Hugging Face tensors of ``piece``."""
    if piece.cut == "whole":
        return tensors[0]
    if piece.cut == "rows":
        return tensors[0].chunk(tp, dim=0)[rank]
    if piece.cut == "columns":
        return tensors[0].chunk(tp, dim=1)[rank]
    if piece.cut == "vocab":
        rows = piece.shape[0]
        mine = tensors[0][rank * rows : (rank + 1) * rows]
        missing = rows - mine.shape[0]
        return torch.cat([mine, mine.new_zeros(missing, *mine.shape[1:])]) if missing else mine
    if piece.cut == "gate_up":
        return torch.cat([t.chunk(tp, dim=0)[rank] for t in tensors])
    # qkv: Megatron keeps, for each key/value head, its query heads, then the key, then the value.
    groups, d = arch.kv_heads, arch.head_dim
    rest = tensors[0].shape[1:]
    grouped = [t.reshape(groups, -1, d, *rest).chunk(tp, dim=0)[rank] for t in tensors]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)


def join(piece: Piece, shards: list[Tensor], arch: Architecture) -> list[Tensor]:
    """The inverse of ``shard``: the whole Hugging Face tensors from the shards of all tensor-parallel ranks."""
    if piece.cut == "whole":
        return [shards[0]]
    if piece.cut == "columns":
        return [torch.cat(shards, dim=1)]
    if piece.cut == "gate_up":
        halves = [s.chunk(2, dim=0) for s in shards]
        return [torch.cat([h[i] for h in halves]) for i in (0, 1)]
    whole = torch.cat(shards)
    if piece.cut == "vocab":
        return [whole[: arch.vocab]]
    if piece.cut == "rows":
        return [whole]
    groups, d, per_group = arch.kv_heads, arch.head_dim, arch.heads // arch.kv_heads
    rest = whole.shape[1:]
    grouped = whole.reshape(groups, per_group + 2, d, *rest)
    parts = (grouped[:, :per_group], grouped[:, per_group : per_group + 1], grouped[:, per_group + 1 :])
    return [p.reshape(-1, *rest) for p in parts]


# ------------------------------------------------------------------ in


@torch.no_grad()
def load(
    parameters: Mapping[str, Tensor], table: list[Piece], source: Mapping[str, Getter], arch: Architecture, origin: str
) -> None:
    """Fill this rank's ``parameters`` from whole tensors, one at a time. ``origin`` is named in errors.

    BadInput if a tensor is missing or has another shape than config.json says.
    """
    tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    if arch.experts is not None:
        source = single_experts(source, arch.family, arch.experts.count)
    stage, ep = mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
    left = set(parameters)
    for piece in table:
        if not piece.held(stage, ep):
            continue
        whole = []
        for name, shape in zip(piece.names, piece.shapes, strict=True):
            if name not in source:
                raise BadInput(f"{origin} has no tensor {name}, which config.json calls for")
            tensor = source[name]()
            if tuple(tensor.shape) != shape:
                raise BadInput(
                    f"{origin}: tensor {name} has shape {tuple(tensor.shape)}, but config.json says {shape}"
                )
            whole.append(tensor)
        left.discard(piece.local)
        piece.of(parameters).copy_(shard(piece, whole, arch, tp, rank))
    if left:
        raise AssertionError(f"the table of weights does not cover {sorted(left)}")


def random_weights(table: list[Piece], arch: Architecture, seed: int) -> dict[str, Getter]:
    """Getters of the weights of a new model, distributed as transformers initialises them.

    Normal with ``initializer_range``; norms 1, biases 0, the padding token's embedding 0. Each tensor has its own
    generator, seeded by (seed, name), so the values do not depend on the layout or on who asks first.
    """

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        tensor = torch.normal(0.0, arch.initializer_range, shape, generator=generator)
        if name == "model.embed_tokens.weight" and arch.pad_token is not None and 0 <= arch.pad_token < arch.vocab:
            tensor[arch.pad_token] = 0
        return tensor

    return {
        name: partial(make, name, shape)
        for piece in table
        for name, shape in zip(piece.names, piece.shapes, strict=True)
    }


def getters(tensors: Mapping[str, Tensor | Getter]) -> dict[str, Getter]:
    """Getters over a Hugging Face state dict."""
    return {name: partial(_same, t) if isinstance(t, Tensor) else t for name, t in tensors.items()}


def _same(tensor: Tensor) -> Tensor:
    return tensor


# ------------------------------------------------------------------ out


@torch.no_grad()
def export(
    parameters: Mapping[str, Tensor], table: list[Piece], arch: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under their Hugging Face names, on every rank. Collective: every rank must exhaust it.

    The tensors are copies. A tied output layer is not listed, as in transformers' safetensors.
    """
    tp_group, tp = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_world_size()
    pp_group, pp = mpu.get_pipeline_model_parallel_group(), mpu.get_pipeline_model_parallel_world_size()
    ep_group, ep = mpu.get_expert_model_parallel_group(), mpu.get_expert_model_parallel_world_size()
    stage, ep_rank = mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
    like = next(iter(parameters.values()))
    for piece in table:
        if piece.shared:
            continue
        if piece.held(stage, ep_rank):
            own = piece.of(parameters).detach()
            if piece.replicated or tp == 1:
                shards = [own]
            else:
                shards = [torch.empty_like(own) for _ in range(tp)]
                dist.all_gather(shards, own.contiguous(), group=tp_group)
            whole = [t.contiguous() for t in join(piece, shards, arch)]
            whole = [t.clone() if t.data_ptr() == own.data_ptr() else t for t in whole]
        else:
            whole = [torch.empty(shape, dtype=like.dtype, device=like.device) for shape in piece.shapes]
        for name, tensor in zip(piece.names, whole, strict=True):
            if piece.ep is not None and ep > 1 and piece.stage == stage:
                dist.broadcast(tensor, src=dist.get_global_rank(ep_group, piece.ep), group=ep_group)
            if pp > 1:
                dist.broadcast(tensor, src=dist.get_global_rank(pp_group, piece.stage), group=pp_group)
            yield name, tensor
