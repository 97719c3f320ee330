"""LoRA against ``peft``: losses, gradients and updates for every layout; adapters in and out; what is frozen and what is not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from everstep.layout import Layout
from support.models import NllWithEntropy, batch, hf_model, reference_loss, settings, tiny_config
from support.processes import join_world, run_ranks

CPU = torch.device("cpu")
LR, SCALE, STEPS = 1e-2, 0.05, 3
TEMPERATURE = 0.7
OPTIMIZER = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LORA: dict[str, Any] = {"rank": 3, "alpha": 5.0}
NAMES = {"qkv": ["q_proj", "k_proj", "v_proj"], "proj": ["o_proj"], "fc1": ["gate_proj", "up_proj"], "fc2": ["down_proj"]}


@dataclass(frozen=True)
class Case:
    """A layout with engine settings. Six layers: 4 stages are uneven."""

    layout: Layout
    family: str = "qwen3"
    tied: bool = True
    engine: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        biases = {"attention_bias": True, "mlp_bias": True} if self.family == "llama" else {}
        return tiny_config(self.family, tied=self.tied, num_hidden_layers=6, **biases)


def data(step: int) -> list[Any]:
    shapes = [(2, 9), (1, 13), (2, 7), (1, 5), (1, 11)]
    return [batch(10 * step + i, *shape) for i, shape in enumerate(shapes)]


def peft_model(case: Case) -> Any:
    """The model with adapters by ``peft``; B not zero, so that every adapter has a gradient in the first step."""
    from peft import LoraConfig, get_peft_model

    lora = {**LORA, **case.lora}
    targets = [name for target in lora.get("targets", list(NAMES)) for name in NAMES.get(target, [target])]
    config = LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(hf_model(case.model), config).train()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
    return model


def our_name(name: str) -> str:
    """Of a parameter of ``peft``'s model, as the engine exports it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".default.", ".")


def build(case: Case, rank: int, model: Any = None, **lora: Any) -> Any:
    from everstep.engine.step import Engine

    engine = Engine(
        settings(engine=case.engine, optimizer=OPTIMIZER, lora={**LORA, **case.lora, **lora}), case.model,
        case.layout.position(rank), case.layout, CPU,
    )  # fmt: skip
    if model is not None:
        engine.load_pretrained({our_name(name): tensor for name, tensor in model.state_dict().items()})
    return engine


def check_against_peft(rank: int, case: Case) -> None:
    """Equal losses, every gradient, norm and update through several steps."""
    from everstep.engine.hf import join
    from everstep.engine.lora import adapters

    model = peft_model(case)
    trained = {our_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    engine = build(case, rank, model)
    layout, at = case.layout, case.layout.position(rank)
    frozen = {name: tensor.clone() for name, tensor in engine.state().items() if name not in engine.state(frozen=False)}
    assert frozen and not any(".lora." in name for name in frozen)
    assert all(".lora." in name for name in engine.state(frozen=False))
    adam = torch.optim.AdamW(list(trained.values()), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(STEPS):
        adam.zero_grad()
        loss = sum(reference_loss(model, one, TEMPERATURE) for one in data(step))
        loss.backward()
        mine = data(step)[at.dp :: layout.dp]
        sums = engine.accumulate(mine, NllWithEntropy(), [0] * len(mine), temperature=TEMPERATURE)
        assert float(sums[1]) == pytest.approx(float(loss), rel=1e-5), (case, step)
        norm2 = sum(float(p.grad.double().square().sum()) for p in trained.values())
        assert engine.squared_norm(engine.gradients()) == pytest.approx(norm2, rel=2e-5), (case, step)

        # Each adapter on each rank has its gradient; where no rank shares it with others, it is compared.
        parameters = {f"{at}.lora.{n}": p for at, a in adapters(engine._ddps).items() for n, p in a.named_parameters()}
        stages = layout.stages(case.model.num_hidden_layers)[at.pp]
        per_layer = sum(len(NAMES.get(t, [t])) for t in {**LORA, **case.lora}.get("targets", list(NAMES)))
        assert len(parameters) == 2 * per_layer * sum(map(len, stages))
        for name, parameter in parameters.items():
            assert float(parameter.main_grad.norm()) > 0, (case, step, name)
        if layout.tp * layout.dp * layout.cp == 1:  # after a step less exactly: AdamW makes large steps of small gradients
            for piece in engine._adapters:
                if piece.stage == at.pp:
                    (got,) = join(piece, [parameters[piece.local].main_grad], engine.arch)
                    wanted = trained[piece.names[0]].grad
                    assert (got - wanted).norm() < (1e-3 if step else 1e-5) * wanted.norm(), (case, step, piece.local)

        for parameter in trained.values():
            parameter.grad.mul_(SCALE)
        adam.step()
        engine.apply(engine.gradients(), SCALE, LR)
        exported = dict(engine.export_adapter())
        assert exported.keys() == trained.keys()
        for name, tensor in exported.items():
            assert (tensor - trained[name]).norm() < 1e-4 * trained[name].norm(), (case, step, name)
    assert all(torch.equal(engine.state()[name], tensor) for name, tensor in frozen.items())
    merged = {our_name(n): t for n, t in model.merge_and_unload().state_dict().items()}
    for name, tensor in engine.export_hf():
        assert (tensor - merged[name]).norm() < 1e-5 * merged[name].norm(), (case, name)
    engine.close()


def check_all(rank: int, ranks: int, cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        join_world(rank, ranks, f"case{number}")
        check_against_peft(rank, case)


SP = {"sequence_parallel": True}
FULL, SELECTIVE, UNSHARDED = {"recompute": "full"}, {"recompute": "selective"}, {"distributed_optimizer": False}
CASES = {
    1: [
        Case(Layout()),
        Case(Layout(), engine=FULL),
        Case(Layout(), "llama", False, engine={**SELECTIVE, **UNSHARDED}, lora={"targets": ["fc1"]}),
        Case(Layout(), "qwen2", lora={"targets": ["v_proj", "down_proj"]}),
    ],
    2: [
        Case(Layout(tp=2)),
        Case(Layout(tp=2), engine={**SP, **FULL}),
        Case(Layout(tp=2), "llama", False, engine={**SP, **SELECTIVE, **UNSHARDED}),
        Case(Layout(pp=2), engine=FULL),
        Case(Layout(pp=2), lora={"targets": ["fc2"]}),
        Case(Layout(pp=2, vpp=3), "llama", False, engine=FULL),
        Case(Layout(dp=2)),
        Case(Layout(dp=2), engine=UNSHARDED),
        Case(Layout(cp=2), engine=SELECTIVE),
    ],
    8: [
        Case(Layout(tp=2, pp=2, dp=2), engine=SP),
        Case(Layout(tp=2, cp=2, pp=2, vpp=3), engine={**SP, **FULL}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("ranks", list(CASES))
def test_equal_to_peft(ranks: int) -> None:
    run_ranks(check_all, ranks, ranks, CASES[ranks], join=False, deadline_s=200)
