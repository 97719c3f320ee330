"""Names of expert weights: one by one, as transformers saves them, and fused by layer, as it holds them from version 5 on.

    qwen3_moe   saved      mlp.experts.N.gate_proj.weight, up_proj, down_proj            mlp.gate.weight
    mixtral     saved      block_sparse_moe.experts.N.w1.weight, w3, w2                  block_sparse_moe.gate.weight
    both        in memory  mlp.experts.gate_up_proj (E, 2F, H), down_proj (E, H, F)      mlp.gate.weight

Legend: E experts of a layer, F intermediate size of one, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

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


def saved_name(family: str, matrix: str) -> str:
    """What the checkpoints of ``family`` call an expert's ``gate_proj``, ``up_proj`` or ``down_proj``; other matrices keep their names."""
    names = expert_names(family)
    return {"gate_proj": names.gate, "up_proj": names.up, "down_proj": names.down}.get(matrix, matrix)


def single_experts(source: Mapping[str, Getter], family: str, experts: int) -> dict[str, Getter]:
    """``source`` with each expert's matrices, and the router, under the names they are saved by, where a layer's are fused in it.

    What the getters return are views of the fused tensors, so this works both ways. The fused tensors of one layer stay in memory
    until those of another are asked for.
    """
    names, single = expert_names(family), dict(source)
    fused = functools.lru_cache(maxsize=2)(lambda name: source[name]())
    for name in source:
        layer, found, matrix = name.partition(".mlp.experts.")
        if not found or matrix not in ("gate_up_proj", "down_proj"):
            continue
        del single[name]
        block = f"{layer}.{names.block}"
        for expert in range(experts):
            if matrix == "gate_up_proj":
                for half, its in enumerate((names.gate, names.up)):
                    single[f"{block}.experts.{expert}.{its}.weight"] = functools.partial(_half, fused, name, expert, half)
            else:
                single[f"{block}.experts.{expert}.{names.down}.weight"] = functools.partial(_one, fused, name, expert)
        if (router := single.pop(f"{layer}.mlp.gate.weight", None)) is not None:
            single[f"{block}.gate.weight"] = router
    return single


def _half(fused: Callable[[str], Tensor], name: str, expert: int, half: int) -> Tensor:
    return fused(name)[expert].chunk(2, dim=0)[half]


def _one(fused: Callable[[str], Tensor], name: str, expert: int) -> Tensor:
    return fused(name)[expert]
