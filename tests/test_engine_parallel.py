"""Sequence, context and interleaved pipeline parallelism against one rank: loss, gradient norm, weights, log-probabilities.

Each world of processes goes through many layouts, one engine after the other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everstep.layout import Layout
from support.models import Case, NllWithEntropy, micro_batches, settings
from support.processes import join_world, run_ranks

LR, SCALE, STEPS = 1e-2, 0.05, 2
TEMPERATURE = 0.7


def train(rank: int, case: Case) -> dict[str, Any]:
    """Losses, norms, log-probabilities before and after, and the weights after ``STEPS`` steps; the world must exist."""
    from everstep.engine.step import Engine

    layout, at = case.layout, case.layout.position(rank)
    engine = Engine(settings(engine=case.engine), case.model, at, layout, torch.device("cpu"))
    engine.init_random(3)
    engine.keep_reference()
    result: dict[str, Any] = {"initial": dict(engine.export_hf()), "loss": [], "norm2": []}
    for step in range(STEPS):
        mine = micro_batches(step)[at.dp :: layout.dp]
        sums = engine.accumulate(mine, NllWithEntropy(), [0] * len(mine), temperature=TEMPERATURE)
        result["loss"].append(float(sums[1]))
        assert float(sums[0]) == sum(float(b.tensors["loss_mask"].sum()) for b in micro_batches(step))
        result["norm2"].append(engine.squared_norm(engine.gradients()))
        engine.apply(engine.gradients(), SCALE, LR)
    result["final"] = dict(engine.export_hf())
    batches = micro_batches(9)[at.dp :: layout.dp]
    for model in ("policy", "reference"):
        result[model] = engine.logprobs(batches, temperature=TEMPERATURE, model=model)
        assert (result[model] is not None) == (rank in layout.collect_ranks())
    # A restored state is the same state, whatever the number of chunks.
    digest = engine.state_hash()
    saved = {name: tensor.clone() for name, tensor in engine.state().items()}
    assert len(saved) == len({t.data_ptr() for t in engine.state().values() if t.numel()}) + sum(not t.numel() for t in saved.values())
    engine.init_random(4)
    with torch.no_grad():
        for name, view in engine.state().items():
            view.copy_(saved[name])
    assert engine.state_hash() == digest
    engine.close()
    return result


def train_all(rank: int, ranks: int, cases: list[Case]) -> list[dict[str, Any]]:
    results = []
    for number, case in enumerate(cases):
        join_world(rank, ranks, f"case{number}")
        results.append(train(rank, case))
    return results


def references(cases: list[Case]) -> list[dict[str, Any]]:
    """Results of the same models on one rank, by (family, tied)."""
    kinds = sorted({(case.family, case.tied) for case in cases})
    single = [Case(Layout(), family, tied) for family, tied in kinds]
    by_kind = dict(zip(kinds, run_ranks(train_all, 1, 1, single, join=False)[0], strict=True))
    return [by_kind[case.family, case.tied] for case in cases]


def compare(case: Case, rank: int, got: dict[str, Any], wanted: dict[str, Any]) -> None:
    where = f"rank {rank} of {case}"
    assert got["initial"].keys() == wanted["initial"].keys(), where
    assert all(torch.equal(t, wanted["initial"][k]) for k, t in got["initial"].items()), where
    assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-5), where
    assert got["norm2"] == pytest.approx(wanted["norm2"], rel=1e-5), where
    errors = {key: (tensor - wanted["final"][key]).norm() for key, tensor in got["final"].items()}
    sizes = {key: tensor.norm() for key, tensor in wanted["final"].items()}
    assert torch.stack(list(errors.values())).norm() < 1e-5 * torch.stack(list(sizes.values())).norm(), where
    for key, error in errors.items():
        # AdamW turns a gradient near zero (of a key's bias, say) into a step of lr, rounding errors included.
        assert error < 1e-3 * sizes[key], (where, key)
    for model in ("policy", "reference"):
        if got[model] is not None:
            mine = wanted[model][case.layout.position(rank).dp :: case.layout.dp]
            for values, expected, one in zip(got[model], mine, micro_batches(9)[case.layout.position(rank).dp :: case.layout.dp], strict=True):
                real = one.tensors["attention_mask"].bool()
                assert values.shape == expected.shape, where
                assert (values - expected)[real].abs().max() < 1e-4, where


SP = {"sequence_parallel": True}
CASES = {
    2: [
        Case(Layout(tp=2), engine=SP),
        Case(Layout(tp=2), "llama", False, engine={**SP, "recompute": "full", "distributed_optimizer": False}),
        Case(Layout(pp=2, layers_per_stage=(4, 2))),
        Case(Layout(pp=2, vpp=2)),
        Case(Layout(pp=2, vpp=3), "llama", False, engine={"recompute": "full", "distributed_optimizer": False}),
        Case(Layout(cp=2)),
        Case(Layout(cp=2), "llama", False, engine={"recompute": "selective", "distributed_optimizer": False}),
    ],
    4: [
        Case(Layout(pp=4), "llama", False),
        Case(Layout(tp=2, cp=2), engine={**SP, "recompute": "full"}),
        Case(Layout(cp=2, dp=2)),
        Case(Layout(cp=2, pp=2, vpp=2, layers_per_stage=(1, 2, 2, 1))),
        Case(Layout(tp=2, pp=2, vpp=2), engine={**SP, "recompute": "selective"}),
    ],
    8: [
        Case(Layout(tp=2, cp=2, pp=2, vpp=2), engine=SP),
        Case(Layout(cp=2, dp=2, pp=2), engine={"distributed_optimizer": False}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.full if n > 2 else []) for n in CASES])
def test_parallel_layouts_equal_one_rank(ranks: int) -> None:
    cases = CASES[ranks]
    wanted = references(cases)
    for rank, results in enumerate(run_ranks(train_all, ranks, ranks, cases, join=False, deadline_s=200)):
        for case, got, want in zip(cases, results, wanted, strict=True):
            compare(case, rank, got, want)
