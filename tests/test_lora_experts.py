"""Adapters on experts: against transformers' model with merged weights under autograd, in every kind of layout; and what ``peft`` makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.models import Case, NllWithEntropy, hf_model, micro_batches, reference_loss, saved_weights
from tests.support.processes import join_world, run_ranks
from tests.support.runs import ROOT, config, finish
from tests.test_lora import LORA, LR, OPTIMIZER, SCALE, STEPS, TEMPERATURE, build

from everstep.cluster.forked import ForkedHost
from everstep.config.load import load_config
from everstep.errors import ConfigError
from everstep.layout import Layout

SP, UNSHARDED = {"sequence_parallel": True}, {"distributed_optimizer": False}
EXPERTS: dict[str, Any] = {"experts": True}


def merged(model: Any, adapters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights in memory, where transformers fuses experts, with what the adapters (by their exported names) add."""
    scale = LORA["alpha"] / LORA["rank"]
    deltas = {
        name.removesuffix(".lora_A.weight"): scale * adapters[name.replace("lora_A", "lora_B")] @ a
        for name, a in adapters.items() if name.endswith("lora_A.weight")
    }  # fmt: skip
    mixtral = model.config.model_type == "mixtral"
    gate, up, down, block = ("w1", "w3", "w2", "block_sparse_moe") if mixtral else ("gate_proj", "up_proj", "down_proj", "mlp")
    found = {}
    for name, weight in model.state_dict().items():
        layer, inside, matrix = name.partition(".mlp.experts.")
        if not inside:
            delta = deltas.pop(name.removesuffix(".weight"), None)
        elif f"{layer}.{block}.experts.0.{down if matrix == 'down_proj' else gate}" not in deltas:
            delta = None
        else:
            its = lambda of, layer=layer: [deltas.pop(f"{layer}.{block}.experts.{e}.{of}") for e in range(len(weight))]  # noqa: B023 - used at once
            delta = torch.stack(its(down)) if matrix == "down_proj" else torch.cat([torch.stack(its(gate)), torch.stack(its(up))], dim=1)
        found[name] = weight if delta is None else weight + delta
    assert not deltas, f"adapters of no weight: {sorted(deltas)}"
    return found


def check_case(rank: int, case: Case, number: int) -> None:
    model = hf_model(case.model).train()
    at = case.layout.position(rank)
    blank = build(case, rank, **EXPERTS)  # for the names and shapes of its adapters
    generator = torch.Generator().manual_seed(1)
    blank.init_random(7)
    adapters = {
        name: (torch.randn(tensor.shape, generator=generator) * 0.1).requires_grad_() for name, tensor in sorted(blank.export_adapter())
    }  # fmt: skip
    inside = [name for name in adapters if ".experts." in name]
    sparse = case.model.num_hidden_layers - len(getattr(case.model, "mlp_only_layers", []))
    experts = case.model.num_local_experts if case.family == "mixtral" else case.model.num_experts
    targets = case.lora.get("targets", ["qkv", "proj", "fc1", "fc2"])
    assert len(inside) == 2 * sparse * experts * (2 * ("fc1" in targets) + ("fc2" in targets))
    assert not [name for name in adapters if ".mlp.gate_proj" in name or ".mlp.down_proj" in name], "a dense layer beside experts has none"
    blank.close()

    join_world(rank, case.layout.ranks_per_replica, f"loaded{number}")
    engine = build(case, rank, **EXPERTS)
    engine.load_pretrained({**saved_weights(model), **{name: tensor.detach() for name, tensor in adapters.items()}})
    reference = lambda weights: lambda ids: SimpleNamespace(logits=torch.func.functional_call(model, weights, (ids,), tie_weights=False).logits)
    adam = torch.optim.AdamW(list(adapters.values()), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=OPTIMIZER["weight_decay"])
    for step in range(STEPS):
        adam.zero_grad()
        weights = merged(model, adapters)
        loss = sum(reference_loss(reference(weights), one, TEMPERATURE) for one in micro_batches(step))
        loss.backward()
        mine = micro_batches(step)[at.dp :: case.layout.dp]
        sums = engine.accumulate(mine, NllWithEntropy(), [0] * len(mine), temperature=TEMPERATURE)
        assert float(sums[1]) == pytest.approx(float(loss), rel=1e-5), (case, step)
        norm2 = sum(float(tensor.grad.double().square().sum()) for tensor in adapters.values() if tensor.grad is not None)
        assert engine.squared_norm(engine.gradients()) == pytest.approx(norm2, rel=5e-5), (case, step)
        for tensor in adapters.values():
            assert tensor.grad is not None, "an expert without tokens: its gradient would not be compared"
            tensor.grad.mul_(SCALE)
        adam.step()
        engine.apply(engine.gradients(), SCALE, LR)
        for name, tensor in engine.export_adapter():
            assert (tensor - adapters[name]).norm() < 2e-4 * adapters[name].norm(), (case, step, name)
    with torch.no_grad():
        after = merged(model, adapters)
        single = saved_weights(_holding(model, after))
    for name, tensor in engine.export_hf():
        assert (tensor - single[name]).norm() < 1e-4 * single[name].norm(), (case, name)
    engine.keep_reference()
    assert any(".experts.lora." in name for name in engine.state() if name.startswith("reference/"))
    engine.close()


def _holding(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    model.load_state_dict(weights)
    return model


def check_cases(rank: int, ranks: int, cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        join_world(rank, ranks, f"case{number}")
        check_case(rank, case, number)


CASES = {
    "1": [
        Case(Layout(), "qwen3_moe"),
        Case(Layout(), "mixtral", False, engine={"recompute": "full"}, lora={"targets": ["fc2"]}),
    ],
    "2": [
        Case(Layout(dp=2, ep=2), "qwen3_moe"),
    ],
    "2, more": [
        Case(Layout(tp=2), "qwen3_moe", engine=SP),
        Case(Layout(dp=2, ep=2), "mixtral", False, engine=UNSHARDED, lora={"targets": ["qkv", "fc1"]}),
        Case(Layout(pp=2), "qwen3_moe", engine={"recompute": "full"}),
    ],
    "4": [
        Case(Layout(tp=2, dp=2, ep=2), "qwen3_moe", engine=SP),
        Case(Layout(tp=2, dp=2, ep=2), "mixtral", False, engine=SP | UNSHARDED),
        Case(Layout(dp=4, ep=2), "qwen3_moe"),
        Case(Layout(cp=2, pp=2, ep=2), "qwen3_moe", engine={"recompute": "selective"}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("which", ["1", "2", pytest.param("2, more", marks=pytest.mark.full), pytest.param("4", marks=pytest.mark.full)])
def test_equal_to_merged_weights_under_autograd(which: str) -> None:
    ranks = int(which.split(",")[0])
    run_ranks(check_cases, ranks, ranks, CASES[which], join=False, deadline_s=240)


def test_peft_and_transformers_load_what_a_run_saves(tmp_path: Path) -> None:
    """The adapters beside the base give the logits of the merged model, which has learned something in its experts."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    hf_model(_all_sparse()).save_pretrained(base)
    saved = []
    for number, targets in enumerate(("[qkv,proj,fc1,fc2]", "[fc2]")):
        done = finish(config(
            str(ROOT / "examples" / "lora_sft.yaml"), tmp_path / f"run{number}", f"model.path={base}", f"model.tokenizer={ROOT}/examples/models/tiny-qwen3-sums",
            "sft.steps=4", "optimizer.warmup_steps=1", "lora.experts=true", f"lora.targets={targets}", "layout.replicas=2", "layout.spares=0", "layout.dp=1", "optimizer.lr=1e-2",
        ), host=ForkedHost)  # fmt: skip
        saved.append(done.folder / "checkpoints" / "step-000004")
    tokens = torch.arange(4, 44)[None]
    logits: Callable[[Any], torch.Tensor] = lambda model: model.eval()(tokens).logits
    with torch.no_grad():
        untrained = logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
        for folder in saved:
            adapted = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder / "adapter"))
            whole = logits(AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32))
            assert (adapted - whole).abs().max() < 1e-4 < 1e-3 < (adapted - untrained).abs().max()


def _all_sparse() -> Any:
    from tests.support.models import tiny_config

    return tiny_config("qwen3_moe", mlp_only_layers=[], vocab_size=160)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["lora.experts=true"], r"lora\.experts=true, but model\.path=.* has no experts"),
        (["model.path=examples/models/tiny-qwen3-moe", "lora.experts=true", "lora.targets=[up_proj]"], r"lora\.experts=true with up_proj alone"),
    ],
)
def test_what_cannot_be_is_refused_by_the_plan(changes: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.plan import make_plan

    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=says):
        make_plan(load_config("examples/lora_sft.yaml", changes))


def test_the_plan_counts_the_adapters_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    from everstep.engine import hf, lora
    from everstep.engine.model import read_architecture
    from everstep.engine.source import describe
    from everstep.plan.memory import adapter_parameters, expert_adapter_parameters

    monkeypatch.chdir(ROOT)
    settings = load_config("examples/lora_sft.yaml", ["model.path=examples/models/tiny-qwen3-moe", "lora.experts=true"])
    shape = describe(settings.model)
    for layout in (Layout(), Layout(tp=2), Layout(dp=2, ep=2), Layout(tp=2, dp=2, ep=2, pp=2)):
        table = hf.pieces(read_architecture(AutoConfig.from_pretrained(settings.model.path)), layout)
        for stage in range(layout.pp):
            mine = [p for p in lora.pieces(table, settings, layout) if p.held(stage, 0)]
            count = lambda pieces: sum(p.shape[0] * p.shape[1] for p in pieces)
            assert adapter_parameters(settings, shape, layout, stage) == count(mine)
            assert expert_adapter_parameters(settings, shape, layout, stage) == count(p for p in mine if p.ep is not None) > 0
