"""LoRA against ``peft``: losses, gradients and updates for every layout; adapters in and out; what is frozen and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.config.load import load_config
from everstep.errors import ConfigError
from everstep.layout import Layout
from support.models import Case, NllWithEntropy, hf_model, micro_batches, reference_loss, settings
from support.processes import join_world, run_ranks

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
LR, SCALE, STEPS = 1e-2, 0.05, 3
TEMPERATURE = 0.7
OPTIMIZER = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LORA: dict[str, Any] = {"rank": 3, "alpha": 5.0}
NAMES = {"qkv": ["q_proj", "k_proj", "v_proj"], "proj": ["o_proj"], "fc1": ["gate_proj", "up_proj"], "fc2": ["down_proj"]}


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
        loss = sum(reference_loss(model, one, TEMPERATURE) for one in micro_batches(step))
        loss.backward()
        mine = micro_batches(step)[at.dp :: layout.dp]
        sums = engine.accumulate(mine, NllWithEntropy(), [0] * len(mine), temperature=TEMPERATURE)
        assert float(sums[1]) == pytest.approx(float(loss), rel=1e-5), (case, step)
        norm2 = sum(float(p.grad.double().square().sum()) for p in trained.values())
        assert engine.squared_norm(engine.gradients()) == pytest.approx(norm2, rel=2e-5), (case, step)

        # Each adapter on each rank has its gradient; where no rank shares it with others, it is compared.
        parameters = {f"{at}.{n}": p for at, a in adapters(engine._ddps).items() for n, p in a.named_parameters()}
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
    "1": [
        Case(Layout()),
        Case(Layout(), engine=FULL),
        Case(Layout(), "llama", False, engine={**SELECTIVE, **UNSHARDED}, lora={"targets": ["fc1"]}),
        Case(Layout(), "qwen2", lora={"targets": ["v_proj", "down_proj"]}),
    ],
    "2": [
        Case(Layout(tp=2), engine={**SP, **FULL}),
        Case(Layout(pp=2), engine=FULL),
    ],
    "2, more": [
        Case(Layout(dp=2)),
        Case(Layout(cp=2), engine=SELECTIVE),
        Case(Layout(tp=2)),
        Case(Layout(tp=2), "llama", False, engine={**SP, **SELECTIVE, **UNSHARDED}),
        Case(Layout(pp=2), lora={"targets": ["fc2"]}),
        Case(Layout(pp=2, vpp=3), "llama", False, engine=FULL),
        Case(Layout(dp=2), engine=UNSHARDED),
    ],
    "8": [
        Case(Layout(tp=2, pp=2, dp=2), engine=SP),
        Case(Layout(tp=2, cp=2, pp=2, vpp=3), engine={**SP, **FULL}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("which", ["1", "2", pytest.param("2, more", marks=pytest.mark.full), pytest.param("8", marks=pytest.mark.full)])
def test_equal_to_peft(which: str) -> None:
    ranks = int(which.split(",")[0])
    run_ranks(check_all, ranks, ranks, CASES[which], join=False, deadline_s=200)


# ------------------------------------------------------------------ values, precision, dropout, reference


def one_step(engine: Any, batches: list[Any], seeds: list[int]) -> torch.Tensor:
    sums = engine.accumulate(batches, NllWithEntropy(), seeds)
    engine.apply(engine.gradients(), SCALE, LR)
    return sums


def share(layout: Layout, rank: int, step: int) -> tuple[list[Any], list[int]]:
    """(micro-batches, seeds) of this rank."""
    dp = layout.position(rank).dp
    mine = micro_batches(step)[dp :: layout.dp]
    return mine, [100 * step + dp + layout.dp * i for i in range(len(mine))]


def values(rank: int, layout: Layout) -> dict[str, torch.Tensor]:
    """New adapters of seed 7, and then, in bfloat16 with dropout, two steps: equal bit by bit when repeated."""
    case = Case(layout)
    engine = build(case, rank)
    engine.init_random(7)
    fresh = dict(engine.export_adapter())
    engine.close()

    runs = []
    for again in range(2):
        join_world(rank, layout.ranks_per_replica, f"again{again}")
        engine = build(Case(layout, engine={"recompute": ["none", "full"][again]}), rank, dropout=0.5)
        engine.init_random(7)
        sums = [one_step(engine, *share(layout, rank, step)) for step in range(2)]
        unseeded = engine.accumulate(share(layout, rank, 2)[0], NllWithEntropy(), [5] * len(share(layout, rank, 2)[0]))
        runs.append((*sums, unseeded, *(tensor for _, tensor in engine.export_adapter())))
        if again:
            other = engine.accumulate(share(layout, rank, 2)[0], NllWithEntropy(), [6] * len(share(layout, rank, 2)[0]))
            assert not torch.equal(other, unseeded), "dropout must follow the seed"
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), "recomputation must drop the same elements"
    return fresh


@pytest.mark.full
def test_new_adapters_do_not_depend_on_the_layout_and_dropout_follows_the_seeds() -> None:
    (alone,) = run_ranks(values, 1, Layout())
    for name, tensor in alone.items():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            assert 0.9 < tensor.abs().max() * tensor.shape[1] ** 0.5 <= 1, name  # uniform within 1/sqrt(in)
    for fresh in run_ranks(values, 4, Layout(tp=2, pp=2), deadline_s=120):
        assert fresh.keys() == alone.keys() and all(torch.equal(fresh[name], alone[name]) for name in alone)


def check_state(rank: int, layout: Layout, dtype: str) -> None:
    """Reference, state, digest of the frozen weights."""
    from everstep.engine.step import Engine
    from everstep.errors import BadInput

    def engine_of(seed: int | None, **lora: Any) -> Engine:
        config = settings(lora={**LORA, **lora}, model={"dtype": dtype}, seed=7)
        engine = Engine(config, Case(layout).model, layout.position(rank), layout, CPU)
        if seed is not None:
            engine.init_random(seed)
        return engine

    join_world(rank, layout.ranks_per_replica, "source")
    engine = engine_of(7)
    mine, seeds = share(layout, rank, 0)
    at_first = engine.logprobs(mine)
    engine.keep_reference()
    size = sum(t.numel() for n, t in engine.state().items() if n.startswith("reference/"))
    assert size == sum(t.numel() for n, t in engine.state().items() if n.startswith("param/") and ".lora." in n)
    for _ in range(2):
        one_step(engine, mine, seeds)
    for got, expected, trained in zip(*(r or [] for r in (engine.logprobs(mine, model="reference"), at_first, engine.logprobs(mine))), strict=True):
        assert torch.equal(got, expected) and not torch.equal(got, trained)
    engine.keep_reference()  # after a warm-up, say: what it is now
    for got, expected in zip(engine.logprobs(mine, model="reference") or [], engine.logprobs(mine) or [], strict=True):
        assert torch.equal(got, expected)
    if dtype == "bfloat16":
        masters = {n: t for n, t in engine.state().items() if n.startswith("master/")}
        assert masters and all(".lora." in n and t.dtype == torch.float32 for n, t in masters.items())
    digest, scalars = engine.state_hash(), engine.state_scalars()
    trained = {name: tensor.clone() for name, tensor in engine.state(frozen=False).items()}
    following = one_step(engine, *share(layout, rank, 1))
    after = engine.state_hash()
    name = next(name for name in engine.state() if name not in trained)
    engine.state()[name].view(-1)[0] += 1
    assert engine.state_hash() != after, "the hash covers the frozen weights"
    engine.close()

    # A spare: the frozen weights from the seed, all else from the peer.
    join_world(rank, layout.ranks_per_replica, "spare")
    spare = engine_of(7)
    spare.load_scalars(scalars)
    with torch.no_grad():
        assert list(spare.state(frozen=False)) == list(trained)
        for name, view in spare.state(frozen=False).items():
            view.copy_(trained[name])
    assert spare.state_hash() == digest
    assert torch.equal(one_step(spare, *share(layout, rank, 1)), following) and spare.state_hash() == after
    spare.close()

    join_world(rank, layout.ranks_per_replica, "others")
    other = engine_of(8)
    with pytest.raises(BadInput, match="trained on other frozen weights"):
        other.load_scalars(scalars)
    other.close()
    join_world(rank, layout.ranks_per_replica, "scaled")
    scaled = engine_of(7, alpha=9.0)
    with pytest.raises(BadInput, match=r"lora\.alpha=5\.0, configured is 9\.0"):
        scaled.load_scalars(scalars)
    scaled.close()


@pytest.mark.parametrize(("layout", "dtype"), [(Layout(tp=2), "bfloat16"), (Layout(pp=2, vpp=3), "float32")], ids=["tp", "pp"])
def test_the_reference_shares_the_frozen_weights_and_a_spare_takes_them_from_the_model(layout: Layout, dtype: str) -> None:
    run_ranks(check_state, layout.ranks_per_replica, layout, dtype, join=False, deadline_s=120)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (["lora.rank=-1"], r"lora\.rank is -1"),
        (["lora.targets=[qkv,experts]"], r"'experts' matches no matrix of the model; there are qkv, proj"),
        (["lora.targets=[]"], r"lora\.targets is empty, so lora\.rank=16 would train nothing"),
        (["lora.dropout=1"], r"lora\.dropout is 1"),
    ],
)
def test_what_cannot_work_is_refused_by_the_plan(lora: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.plan import make_plan

    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=says):
        make_plan(load_config("examples/lora_sft.yaml", lora))


def test_the_plan_counts_the_frozen_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.plan import make_plan

    monkeypatch.chdir(ROOT)
    layout = ["layout.tp=2", "layout.dp=2"]
    full, lora = (make_plan(load_config("examples/lora_sft.yaml", [*layout, *o])).memory[0] for o in (["lora.rank=0"], []))
    adapters = sum(sizes_of_rank(Layout(tp=2)))
    assert lora.weights == full.weights + 4 * adapters and lora.frozen == full.weights
    assert (lora.gradients, lora.optimizer, lora.recovery) == (4 * adapters, 4 * adapters, 2 * adapters)
    assert lora.state == 4 * adapters + 4 * adapters


def sizes_of_rank(layout: Layout) -> list[int]:
    """Elements of every adapter tensor on one rank, from the engine's own table."""
    from transformers import AutoConfig

    from everstep.engine import hf, lora
    from everstep.engine.model import read_architecture

    config = load_config(ROOT / "examples" / "lora_sft.yaml")
    table = hf.pieces(read_architecture(AutoConfig.from_pretrained(ROOT / config.model.path)), layout)
    return [piece.shape[0] * piece.shape[1] for piece in lora.pieces(table, config, layout)]
