"""LoRA (arXiv 2106.09685): a frozen model with trained low-rank adapters beside its matrices.

    y = W x + alpha/r B A dropout(x)        A (r, in), B (out, r), B = 0 at first

There is one pair A, B for each matrix by its transformers name, as ``peft`` has it, although Megatron fuses q, k, v and
gate, up. An adapter hangs on a parallel linear layer as a submodule ``lora`` and a forward hook, so that names and code of
the layer stay as they are. Legend: S tokens of this rank's part of the sequence, B samples, r rank, n matrices fused in one, e experts
of a layer on this rank, M rows that they compute.

Under tensor parallelism only the r-wide middle travels between ranks:

    column-parallel (qkv, fc1)   A whole, B by rows        gradients of A x are summed in backward
    row-parallel (proj, fc2)     A by columns, B whole     A x is summed in forward

and under sequence parallelism the same sums scatter, or start from a gather, along the sequence. Then the whole ones of A
and B see only this rank's tokens; they are flagged, and ``finalize_model_grads`` sums their gradients.

Experts (``lora.experts``) have a pair for each expert of a matrix, in two parameters. All tensor-parallel ranks have the same rows there, and
what they make of them, and of their gradients, is added where the rows come from (``everstep.engine.experts``): nothing is summed in between, and the
whole ones of A and B, of whose gradients each rank has an addend, are flagged as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from everstep.config.derive import LORA_MATRICES, adapted_in, lora_matrices, refuse_adapted_experts
from everstep.config.schema import Config, LoraConfig
from everstep.engine.experts import Experts, Product
from everstep.engine.hf import Getter, Piece
from everstep.engine.model import Architecture, bare, chunk_prefix, rank_parameters
from everstep.engine.offload import host_bytes
from everstep.errors import BadInput
from everstep.layout import Layout

#: The adapter's name among the submodules of its linear layer.
NAME = "lora"


class Adapter(nn.Module):
    """The adapters of one parallel linear layer: parameters ``MATRIX_a`` and ``MATRIX_b`` of each adapted matrix in it.

    ``widths``: this rank's output rows of every matrix in the layer, adapted or not, in the order in which it fuses them.
    ``inputs``: columns of A on this rank. ``groups``: the layer's output is this many runs, each with a part of every matrix.
    ``row``: the layer is row-parallel. ``experts``: so many of them have a pair each, in parameters of three dimensions.
    """

    def __init__(
        self, config: TransformerConfig, lora: LoraConfig, widths: Mapping[str, int], adapted: Sequence[str], inputs: int,
        groups: int, row: bool, experts: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rank, self.scale, self.dropout = lora.rank, lora.alpha / lora.rank, lora.dropout
        self.widths, self.adapted, self.groups, self.row = dict(widths), tuple(adapted), groups, row
        self.sequence_parallel = config.sequence_parallel
        self.kept: dict[str, Tensor] = {}  # the reference model's adapters, by parameter name
        self.serves_reference = False
        how: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        several = () if experts is None else (experts,)
        for matrix in self.adapted:
            a, b = torch.empty(*several, lora.rank, inputs, **how), torch.empty(*several, widths[matrix], lora.rank, **how)
            for kind, tensor in (("a", a), ("b", b)):
                parameter = nn.Parameter(tensor)
                # Both read by Megatron: which gradients finalize_model_grads sums over tensor-parallel ranks, and which ranks have others.
                parameter.sequence_parallel = self.sequence_parallel and (kind == "b") == row  # type: ignore[attr-defined]
                parameter.allreduce = experts is None or config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
                self.register_parameter(f"{matrix}_{kind}", parameter)

    def forward(self, x: Tensor) -> Tensor:
        """What is to be added to the layer's output for its input ``x`` (S, B, columns of A)."""
        if self.training and self.dropout > 0:
            # Tensor-parallel ranks hold the same x only in front of a column-parallel layer without sequence parallelism.
            alike = not self.row and not self.sequence_parallel
            with contextlib.nullcontext() if alike else get_cuda_rng_tracker().fork():
                x = F.dropout(x, self.dropout)
        low = F.linear(x, torch.cat([self._tensor(f"{matrix}_a") for matrix in self.adapted]))  # (S, B, n r)
        if self.row and self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low)
        elif self.row:
            low = reduce_from_tensor_model_parallel_region(low)
        elif self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low)
        else:
            low = copy_to_tensor_model_parallel_region(low)
        parts = zip(self.adapted, low.split(self.rank, dim=-1), strict=True)
        return self.scale * self._fused({matrix: F.linear(part, self._tensor(f"{matrix}_b")) for matrix, part in parts})

    def delta(self) -> Tensor:
        """What the adapters add to this rank's part of the layer's weight, float32, of its shape."""
        tensors = {name: parameter.detach().float() for name, parameter in self.named_parameters()}
        return self.scale * self._fused({m: tensors[f"{m}_a"].mT @ tensors[f"{m}_b"].mT for m in self.adapted}).mT

    def keep(self) -> None:
        """From now on the reference model has the present adapters."""
        self.kept = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def _tensor(self, name: str) -> Tensor:
        return self.kept[name] if self.serves_reference else self.get_parameter(name)

    def _fused(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """(..., rows of one matrix) of each adapted matrix -> (..., rows of the layer), zeros where nothing is adapted."""
        if len(self.widths) == 1:
            return outputs[self.adapted[0]]
        like = outputs[self.adapted[0]]
        parts = [outputs[m] if m in outputs else like.new_zeros(*like.shape[:-1], width) for m, width in self.widths.items()]
        return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in parts], dim=-1).flatten(-2)


class ExpertAdapter(Adapter):
    """The adapters of one matrix of all experts of a layer that this rank holds: parameters ``MATRIX_a`` (e, r, in), ``MATRIX_b`` (e, out, r)."""

    def forward(self, rows: Tensor, product: Product) -> Tensor:  # type: ignore[override]
        """What is to be added to what the experts' matrix makes of ``rows`` (M, in): (M, out)."""
        if self.training and self.dropout > 0:  # in front of a column-parallel matrix tensor-parallel ranks hold the same rows
            with get_cuda_rng_tracker().fork() if self.row else contextlib.nullcontext():
                rows = F.dropout(rows, self.dropout)
        low = product(rows, torch.cat([self._tensor(f"{matrix}_a") for matrix in self.adapted], dim=1))  # (M, n r)
        parts = zip(self.adapted, low.split(self.rank, dim=-1), strict=True)
        return self.scale * self._fused({matrix: product(part, self._tensor(f"{matrix}_b")) for matrix, part in parts})


# ------------------------------------------------------------------ in the model


def pieces(table: Sequence[Piece], config: Config, layout: Layout) -> list[Piece]:
    """The parameters of all adapters, as ``hf.pieces`` lists those of the model (``table``); none without LoRA.

    Their Hugging Face names are those of ``peft`` without its prefix ``base_model.model.``. Without ``lora.experts`` experts get none;
    ConfigError if that leaves nothing of a matrix of ``lora.targets``.
    """
    r, tp = config.lora.rank, layout.tp
    adapted, inside, beside = (lora_matrices(config), *(adapted_in(config, experts=experts) for experts in (True, False)))
    found, matched = [], set()
    for piece in table:
        for name, matrix, shape in zip(piece.names, _matrices(piece), piece.shapes, strict=True):
            stem, _, kind = name.rpartition(".")
            if kind != "weight" or matrix not in (beside if piece.ep is None else inside):
                continue
            matched.add(matrix)
            layer, _, parameter = piece.local.rpartition(".")
            local = f"{layer}.{NAME}.{matrix}_" if piece.ep is None else f"{layer}.{NAME}.{parameter}.{matrix}_"
            (rows, columns), row = shape, piece.cut == "columns"
            names_a, names_b = (f"{stem}.lora_A.weight",), (f"{stem}.lora_B.weight",)
            a = (r, columns // tp) if row else (r, columns)
            b = (rows, r) if row else (rows // tp, r)
            where: dict[str, Any] = {"ep": piece.ep, "index": piece.index}
            found += [
                Piece(f"{local}a", piece.stage, "columns" if row else "whole", names_a, ((r, columns),), a, **where),
                Piece(f"{local}b", piece.stage, "whole" if row else "rows", names_b, ((rows, r),), b, **where),
            ]
    refuse_adapted_experts(matrix for matrix in adapted if matrix not in matched)
    return found


def _matrices(piece: Piece) -> list[str]:
    """The matrices in it by the names that ``lora_matrices`` has for them; experts' have others in some families."""
    if piece.ep is None:
        return [name.split(".")[-2] for name in piece.names]
    return list(LORA_MATRICES["fc1"] if piece.cut == "gate_up" else LORA_MATRICES["fc2"])


def attach(
    chunks: Sequence[nn.Module], table: Sequence[Piece], arch: Architecture, megatron: TransformerConfig, config: Config,
    layout: Layout,
) -> None:  # fmt: skip
    """Freeze this rank's ``chunks`` and hang adapters on them, values undefined. ``table``: the model without adapters."""
    inside, beside = (adapted_in(config, experts=experts) for experts in (True, False))
    stage = mpu.get_pipeline_model_parallel_rank()
    for number, chunk in enumerate(chunks):
        model, prefix = bare(chunk), chunk_prefix(number, len(chunks))
        model.requires_grad_(False)
        if arch.value_head and model.post_process:
            model.output_layer.requires_grad_(True)  # new, so there is nothing to keep
        for piece in table:
            if piece.stage != stage or piece.ep is not None:
                continue
            if not piece.local.startswith(prefix) or not piece.local.endswith(".weight"):
                continue
            matrices = {m: s[0] for m, s in zip(_matrices(piece), piece.shapes, strict=True)}
            mine = [matrix for matrix in matrices if matrix in beside]
            if not mine:
                continue
            row = piece.cut == "columns"
            widths = {matrix: rows if row else rows // layout.tp for matrix, rows in matrices.items()}
            groups = arch.kv_heads // layout.tp if piece.cut == "qkv" else 1
            linear = model.get_submodule(piece.local.removeprefix(prefix).removesuffix(".weight"))
            linear.add_module(NAME, Adapter(megatron, config.lora, widths, mine, piece.shape[1], groups, row))
            linear.register_forward_hook(_add)
        for experts in [module for module in model.modules() if isinstance(module, Experts)]:
            if made := _of_experts(experts, megatron, config.lora, inside):
                experts.lora = made
        if model.pre_process:
            # Nothing in front of the adapters is trained. But recomputation, and Megatron's backward of a stage, leave out
            # what was computed from nothing that requires a gradient.
            model.embedding.register_forward_hook(_require_gradient)


def _of_experts(experts: Experts, megatron: TransformerConfig, lora: LoraConfig, adapted: Sequence[str]) -> nn.ModuleDict:
    held, rows, hidden = experts.gate_up.shape
    width = rows // 2
    made = nn.ModuleDict()  # empty if nothing in experts is adapted
    for parameter, matrices, inputs, row in (
        ("gate_up", dict.fromkeys(LORA_MATRICES["fc1"], width), hidden, False), ("down", dict.fromkeys(LORA_MATRICES["fc2"], hidden), width, True),
    ):  # fmt: skip
        if mine := [matrix for matrix in matrices if matrix in adapted]:
            made[parameter] = ExpertAdapter(megatron, lora, matrices, mine, inputs, 1, row, held)
    return made


def _add(linear: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return output[0] + linear.get_submodule(NAME)(inputs[0]), output[1]


def _require_gradient(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def adapters(chunks: Sequence[nn.Module]) -> dict[str, Adapter]:
    """This rank's adapters, by their own names (what their parameters' names begin with in ``rank_parameters``)."""
    return {
        chunk_prefix(number, len(chunks)) + name: module
        for number, chunk in enumerate(chunks)
        for name, module in bare(chunk).named_modules()
        if isinstance(module, Adapter)
    }


def _adapted_by(name: str) -> str:
    """The parameter to which the adapter ``name`` adds: ``L.weight`` for ``L.lora``, ``L.P`` for ``L.lora.P``."""
    layer, _, parameter = name.partition(f".{NAME}")
    return f"{layer}.{parameter.removeprefix('.') or 'weight'}"


class AdapterReference:
    """A reference model that shares the frozen weights: the adapters as they were when it was kept, and no other copy."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = chunks
        self.keep()

    def keep(self) -> None:
        for adapter in adapters(self._chunks).values():
            adapter.keep()

    def tensors(self) -> dict[str, Tensor]:
        """The kept adapters by the names of their parameters."""
        return {f"{at}.{n}": t for at, adapter in adapters(self._chunks).items() for n, t in adapter.kept.items()}

    @contextlib.contextmanager
    def serving(self) -> Iterator[Sequence[nn.Module]]:
        """Within it, the chunks compute as the reference model."""
        mine = adapters(self._chunks).values()
        for adapter in mine:
            adapter.serves_reference = True
        try:
            yield self._chunks
        finally:
            for adapter in mine:
                adapter.serves_reference = False


# ------------------------------------------------------------------ values


def initial(table: Sequence[Piece], seed: int) -> dict[str, Getter]:
    """Getters of new adapters (``table``), as ``peft`` makes them: A Kaiming-uniform with a = sqrt(5), B zero.

    That is uniform within 1/sqrt(in). Each A has its own generator, seeded by (seed, name), so it does not depend on the layout.
    """

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("lora_B.weight"):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)

    return {p.names[0]: partial(make, p.names[0], p.shapes[0]) for p in table}


def without_adapters(chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """``rank_parameters`` of the model alone."""
    return {name: p for name, p in rank_parameters(chunks).items() if f".{NAME}." not in name}


class Merged(Mapping[str, Tensor]):
    """``rank_parameters`` of the model without adapters, what they add being added to each weight when it is asked for."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._adapters = {_adapted_by(name): adapter for name, adapter in adapters(chunks).items()}
        self._own = without_adapters(chunks)
        self._last: tuple[str, Tensor] = ("", torch.empty(0))  # experts share a parameter, and are asked for one after the other

    def __getitem__(self, name: str) -> Tensor:
        own, adapter = self._own[name].detach(), self._adapters.get(name)
        if adapter is None:
            return own
        if self._last[0] != name:
            self._last = name, (own.float() + adapter.delta()).to(own.dtype)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def frozen_digest(chunks: Sequence[nn.Module]) -> str:
    """xxh3-128 of this rank's frozen weights, 32 hexadecimal digits: two ranks of one position with the same base agree."""
    digest = xxhash.xxh3_128()
    for name, parameter in rank_parameters(chunks).items():
        if not parameter.requires_grad:
            digest.update(name.encode())
            digest.update(host_bytes(parameter.detach().contiguous().cpu()))
    return digest.hexdigest()


def check_same_base(scalars: Mapping[str, Any], config: Config, digest: str | None) -> None:
    """BadInput unless adapters that come with ``scalars`` (of ``Engine.state_scalars``) mean the same here.

    ``digest``: of the frozen weights of this rank; None: they come along.
    """
    alpha = scalars["lora_alpha"]
    if alpha != config.lora.alpha:
        raise BadInput(f"the adapters were trained with lora.alpha={alpha}, configured is {config.lora.alpha}; set it to {alpha}")
    if digest is not None and digest != scalars["frozen_digest"]:
        raise BadInput(
            f"the adapters were trained on other frozen weights than those of model.path={config.model.path} "
            f"(model.init={config.model.init}, seed={config.seed}); give the model that the run began with"
        )
