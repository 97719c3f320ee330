"""Names of expert weights: one by one, as transformers saves them, and fused by layer, as it holds them from version 5 on.

    qwen3_moe   saved      mlp.experts.N.gate_proj.weight, up_proj, down_proj            mlp.gate.weight
    mixtral     saved      block_sparse_moe.experts.N.w1.weight, w3, w2                  block_sparse_moe.gate.weight
    both        in memory  mlp.experts.gate_up_proj (E, 2F, H), down_proj (E, H, F)      mlp.gate.weight

Legend: E experts of a layer, F intermediate size of one, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from everstep.engine.model import Architecture

Getter = Callable[[], Tensor]


@dataclass(frozen=True)
class ExpertNames:
    """How a family's checkpoints call a layer's experts (``block``) and an expert's matrices."""

    block: str
    gate: str
    up: str
    down: str


def expert_names(family: str) -> ExpertNames:
    if family == "mixtral":
        return ExpertNames("block_sparse_moe", "w1", "w3", "w2")
    return ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")


def single_experts(source: Mapping[str, Getter], arch: Architecture) -> Mapping[str, Getter]:
    """``source``, and for each layer whose experts are fused in it, each expert's matrices under the names they are saved by.

    A fused tensor is read once for all experts of its layer that are asked for one after the other.
    """
    if arch.experts is None:
        return source
    names, more = expert_names(arch.family), dict(source)
    for layer in (n for n in range(arch.layers) if arch.sparse(n)):
        block = f"model.layers.{layer}.{names.block}"
        there = f"model.layers.{layer}.mlp"
        if f"{there}.experts.gate_up_proj" not in source or f"{there}.experts.down_proj" not in source:
            continue
        if f"{there}.gate.weight" in source:
            more[f"{block}.gate.weight"] = source[f"{there}.gate.weight"]
        gate_up = functools.lru_cache(maxsize=1)(source[f"{there}.experts.gate_up_proj"])
        down = functools.lru_cache(maxsize=1)(source[f"{there}.experts.down_proj"])
        for expert in range(arch.experts.count):
            for half, name in enumerate((names.gate, names.up)):
                more[f"{block}.experts.{expert}.{name}.weight"] = functools.partial(_half, gate_up, expert, half)
            more[f"{block}.experts.{expert}.{names.down}.weight"] = functools.partial(_one, down, expert)
    return more


def _half(fused: Getter, expert: int, half: int) -> Tensor:
    return fused()[expert].chunk(2, dim=0)[half]


def _one(fused: Getter, expert: int) -> Tensor:
    return fused()[expert]


def fused_experts(tensors: Iterable[tuple[str, Tensor]], arch_names: ExpertNames, experts: int) -> Iterator[tuple[str, Tensor]]:
    """The inverse, for a transformers model in memory: single experts of a layer, which must come together, leave as two tensors."""
    marker = f".{arch_names.block}.experts."
    pending: dict[str, dict[str, Tensor]] = {}  # layer -> rest of the name -> tensor
    for name, tensor in tensors:
        layer, found, rest = name.partition(marker)
        if not found:
            yield name.replace(f".{arch_names.block}.gate.", ".mlp.gate."), tensor
            continue
        held = pending.setdefault(layer, {})
        held[rest] = tensor
        if len(held) == 3 * experts:
            matrix = lambda n, held=held: [held[f"{expert}.{n}.weight"] for expert in range(experts)]
            both = zip(matrix(arch_names.gate), matrix(arch_names.up), strict=True)
            yield f"{layer}.mlp.experts.gate_up_proj", torch.stack([torch.cat(pair) for pair in both])
            yield f"{layer}.mlp.experts.down_proj", torch.stack(matrix(arch_names.down))
            del pending[layer]
    if pending:
        raise AssertionError(f"experts of {sorted(pending)} are not complete")
