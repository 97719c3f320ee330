"""The engine against transformers and torch.optim: log-probabilities, gradients, updates, for every layout.

Each process checks many things: a world costs more than a check.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from everstep.layout import Layout
from support.models import (
    NllWithEntropy,
    batch,
    hf_model,
    reference_loss,
    saved_gradients,
    saved_weights,
    settings,
    tiny_config,
)
from support.processes import run_ranks

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
#: Every family, tied and untied, with grouped queries; biases; both rope scalings.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-llama3": ("llama", {"tied": True, "rope_parameters": LLAMA3}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias-linear-rope": (
        "llama",
        {"attention_bias": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tied": True}),
}
#: Checked by test_moe.py. Weights of experts that are renormalised, and not; dense layers by their number, and by a step.
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("qwen3_moe", {"tied": True}),
    "qwen3-moe-plain": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2}),
    "mixtral": ("mixtral", {}),
}
TEMPERATURE = 0.7
LR, SCALE = 1e-2, 0.05
# eps well above what rounding leaves of a gradient (1e-7 after SCALE): with 1e-8, the first step of an element whose gradient
# is nearly 0 depended on the kind of processor, by a tenth of LR.
OPTIMIZER = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.1}


def build(name: str, layout: Layout, rank: int, **sections: Any) -> tuple[Any, Any]:
    """(engine with the weights of the transformers model, that model)."""
    from everstep.engine.step import Engine

    family, changes = (MODELS | EXPERTS)[name]
    model = hf_model(tiny_config(family, **changes)).eval()
    engine = Engine(
        settings(optimizer=OPTIMIZER, **sections), tiny_config(family, **changes), layout.position(rank), layout, CPU
    )
    engine.load_pretrained(model.state_dict())
    return engine, model


def micro_batches(dp: int, coordinate: int) -> list[Any]:
    """Four micro-batches of different sizes and widths, dealt to the data-parallel coordinates."""
    every = [batch(1, 2, 9), batch(2, 1, 12), batch(3, 2, 7), batch(4, 1, 5)]
    return every[coordinate::dp]


def decay_groups(model: Any) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]}, {"params": others, "weight_decay": 0.0}]


def check_against_transformers(rank: int, name: str, layout: Layout, sharded: bool, steps: int) -> None:
    cut = {"sequence_parallel": True} if name in EXPERTS and layout.tp > 1 else {}
    engine, model = build(name, layout, rank, engine={"distributed_optimizer": sharded} | cut)
    coordinate = layout.position(rank).dp

    # Weights come out as they went in, bit by bit, on every rank.
    exported = dict(engine.export_hf())
    expected = saved_weights(model)
    assert list(exported) == list(expected) or exported.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(exported[key], tensor), key

    # Log-probabilities.
    batches = micro_batches(layout.dp, coordinate)
    got = engine.logprobs(batches, temperature=TEMPERATURE)
    at = layout.position(rank)
    assert (got is not None) == (at.pp == layout.pp - 1 and at.tp == 0)
    for one, values in zip(batches, got or [], strict=got is not None):
        ids = one.tensors["input_ids"]
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids).logits[:, :-1] / TEMPERATURE, -1)
        wanted = log_p.gather(-1, ids[:, 1:, None])[..., 0]
        real = one.tensors["attention_mask"][:, 1:].bool()
        assert values.shape == ids.shape and values.dtype == torch.float32
        assert torch.equal(values[:, 0], torch.zeros(len(ids)))
        assert (values[:, 1:] - wanted)[real].abs().max() < 1e-4

    # Loss, norm and AdamW updates.
    everything = micro_batches(1, 0)
    adam = torch.optim.AdamW(
        decay_groups(model), lr=LR, betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]), eps=OPTIMIZER["eps"]
    )
    for step in range(steps):
        adam.zero_grad()
        loss = sum(reference_loss(model, one, TEMPERATURE) for one in everything)
        loss.backward()
        norm2 = sum(float(p.grad.double().square().sum()) for p in model.parameters())
        sums = engine.accumulate(batches, NllWithEntropy(), [7] * len(batches), temperature=TEMPERATURE)
        tokens = sum(float(one.tensors["loss_mask"].sum()) for one in everything)
        side = 1 + sum(engine.arch.experts.sparse) * engine.arch.experts.count if engine.arch.experts else 0
        assert sums.dtype == torch.float64 and sums.shape == (6 + side,)
        assert float(sums[0]) == tokens == float(sums[4]) == float(sums[5])
        assert float(sums[1]) == pytest.approx(float(loss), rel=1e-5)
        totals = [gradient.clone() for gradient in engine.gradients()]
        assert engine.squared_norm(totals) == pytest.approx(norm2, rel=1e-4)

        for parameter in model.parameters():
            parameter.grad.mul_(SCALE)
        adam.step()
        before = [total.clone() for total in totals]
        engine.apply(totals, SCALE, LR)
        assert all(torch.equal(a, b) for a, b in zip(before, totals, strict=True)), "totals must only be read"
        exported = dict(engine.export_hf())
        for key, tensor in saved_weights(model).items():
            assert (exported[key] - tensor).abs().max() < 1e-4, (step, key)
    assert engine.state_scalars()["adam_step"] == steps
    engine.close()


def check_gradients(rank: int, name: str) -> None:
    """Each parameter's gradient by itself: through AdamW small ones would look like large ones."""
    from everstep.engine.hf import join, pieces

    engine, model = build(name, Layout(), rank)
    one = batch(5, 3, 10)
    reference_loss(model, one, 1.0).backward()
    engine.accumulate([one], NllWithEntropy(), [0])
    wanted = saved_gradients(model)
    mine = {n: p.main_grad for n, p in engine._ddps[0].module.named_parameters()}
    for piece in pieces(engine.arch, Layout()):
        for key, gradient in zip(piece.names, join(piece, [piece.of(mine)], engine.arch), strict=True):
            error, largest = float((gradient - wanted[key]).abs().max()), float(wanted[key].abs().max())
            assert error <= 1e-4 * largest, (key, error, largest)  # an expert without a token has none
    engine.close()


def check_one_rank(rank: int) -> None:
    """Every model on one rank, each in an engine of its own in the same process."""
    check_models(rank, MODELS)


def check_models(rank: int, names: Iterable[str]) -> None:
    from support.processes import join_world

    for name in names:
        join_world(0, 1, f"{name}-1")
        check_gradients(rank, name)
        join_world(0, 1, f"{name}-2")
        check_against_transformers(rank, name, Layout(), sharded=True, steps=1)


def check_two_ranks(rank: int, layout: Layout, cases: list[tuple[str, bool]]) -> None:
    from support.processes import join_world

    for number, (name, sharded) in enumerate(cases):
        join_world(rank, layout.ranks_per_replica, f"case{number}")
        check_against_transformers(rank, name, layout, sharded, steps=2)


def test_every_model_on_one_rank() -> None:
    run_ranks(check_one_rank, 1, join=False, deadline_s=120)


@pytest.mark.parametrize("split", ["tp", "pp", "dp"])
def test_two_ranks(split: str) -> None:
    layout = Layout(**{split: 2})
    cases = [("qwen3", True), ("qwen3-tied", False), ("llama-biases", True), ("qwen2-tied", True)]
    if split != "dp":
        cases += [("llama-attention-bias-linear-rope", False), ("llama-tied-llama3", True)]
    run_ranks(check_two_ranks, 2, layout, cases, join=False, deadline_s=120)


@pytest.mark.full
def test_eight_way_corner() -> None:
    """tp, pp and dp at once, tied embeddings: the norm counts nothing twice."""
    cases = [("qwen3-tied", True), ("qwen3-tied", False)]
    run_ranks(check_two_ranks, 8, Layout(tp=2, pp=2, dp=2), cases, join=False, deadline_s=150)
