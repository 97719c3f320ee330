"""The value head against transformers' ``...ForTokenClassification`` with one label, for every way to cut a replica."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from everstep.engine.loss import LossOutput
from everstep.errors import EverstepError
from everstep.layout import Layout
from support import models
from support.models import batch, hf_model, settings, tiny_config
from support.processes import join_world, run_ranks

LR, SCALE = 1e-2, 0.05


class SquaredError:
    """Of values against the token ids: any target will do."""

    metric_names = ()
    needs_entropy = False

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: Any) -> LossOutput:
        assert entropy is None
        return LossOutput(squared_error(logprobs, batch), batch["loss_mask"].sum())


def squared_error(values: Tensor, source: Any) -> Tensor:
    return ((values - source["input_ids"] / 50.0).square() * source["loss_mask"]).sum()


class Case(models.Case):
    """Four layers, and one label instead of the vocabulary."""

    @property
    def model(self) -> Any:
        return tiny_config(self.family, tied=self.tied, num_labels=1)


def critic(case: Case) -> Any:
    from transformers import AutoModelForTokenClassification

    base = hf_model(case.model)
    model = AutoModelForTokenClassification.from_config(case.model, attn_implementation="eager").float().eval()
    missing, unexpected = model.load_state_dict(base.state_dict(), strict=False)
    assert sorted(missing) == ["score.bias", "score.weight"] and set(unexpected) <= {"lm_head.weight"}
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
        model.score.bias.fill_(0.3)
    return model


def values_of(model: Any, source: Any) -> Tensor:
    """(B, T), by hand: what the head says one token earlier."""
    said = model(source["input_ids"]).logits[:, :-1, 0]
    return torch.cat([torch.zeros(len(said), 1), said], dim=1)


def check(rank: int, ranks: int, cases: list[Case]) -> None:
    from everstep.engine.step import Engine

    for number, case in enumerate(cases):
        join_world(rank, ranks, f"case{number}")
        layout, at = case.layout, case.layout.position(rank)
        config = settings(engine=case.engine, lora=case.lora)
        engine = Engine(config, case.model, at, layout, torch.device("cpu"), head="value")
        model = critic(case)
        engine.load_pretrained(model.state_dict())
        every = [batch(10 + i, *shape) for i, shape in enumerate([(2, 9), (1, 13), (2, 7), (1, 5)])]
        mine = every[at.dp :: layout.dp]
        got = engine.values(mine)
        assert (got is not None) == (rank in layout.collect_ranks())
        for one, values in zip(mine, got or [], strict=got is not None):
            real = one["attention_mask"].bool()
            assert values.shape == one["input_ids"].shape and not values[:, 0].any()
            assert (values - values_of(model, one))[real].abs().max() < 1e-4, case
        with pytest.raises(EverstepError, match="value head"):
            engine.logprobs(mine)

        if case.lora:
            model.requires_grad_(False)
            model.score.requires_grad_(True)  # of what is not LoRA, the only thing that is trained
        loss = sum(squared_error(values_of(model, one), one) for one in every)
        loss.backward()
        wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        sums = engine.accumulate(mine, SquaredError(), [0] * len(mine))
        assert float(sums[1]) == pytest.approx(float(loss), rel=1e-5), case
        norm2 = sum(float(gradient.double().square().sum()) for gradient in wanted.values())
        if not case.lora:
            assert engine.squared_norm(engine.gradients()) == pytest.approx(norm2, rel=1e-5), case
        engine.apply(engine.gradients(), SCALE, LR)

        # What comes out is a critic that transformers loads, and it has moved as AdamW moves.
        exported = dict(engine.export_hf())
        adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        for gradient in wanted.values():
            gradient.mul_(SCALE)
        adam.step()
        state = model.state_dict()
        assert exported.keys() == state.keys(), case
        compared = ["score.weight", "score.bias"] if case.lora else list(state)
        for name in compared:
            assert (exported[name] - state[name]).norm() < 1e-3 * state[name].norm(), (case, name)
        model.load_state_dict(exported)
        for one, values in zip(mine, engine.values(mine) or [], strict=got is not None):
            with torch.no_grad():
                assert (values - values_of(model, one))[one["attention_mask"].bool()].abs().max() < 1e-4, case
        engine.close()


SP = {"sequence_parallel": True}
CASES = {
    1: [Case(Layout()), Case(Layout(), "llama", False, {"recompute": "full"}), Case(Layout(), lora={"rank": 2})],
    2: [
        Case(Layout(tp=2), "qwen2"),
        Case(Layout(tp=2), engine=SP),
        Case(Layout(pp=2, vpp=2)),
        Case(Layout(cp=2), "llama", False, {"distributed_optimizer": False}),
        Case(Layout(dp=2), lora={"rank": 2}),
    ],
    4: [Case(Layout(tp=2, pp=2), engine=SP)],
}


@pytest.mark.parametrize("ranks", list(CASES))
def test_a_critic_equals_that_of_transformers(ranks: int) -> None:
    run_ranks(check, ranks, ranks, CASES[ranks], join=False, deadline_s=150)


def new_head(rank: int) -> None:
    """A language model has no value head: a new one is drawn; and a model with a vocabulary has no values."""
    from everstep.engine.step import Engine

    model = hf_model(tiny_config("qwen3"))
    heads = []
    for number in range(2):
        join_world(rank, 1, f"new{number}")
        engine = Engine(settings(seed=4), tiny_config("qwen3"), Layout().position(0), Layout(), torch.device("cpu"), head="value")
        engine.load_pretrained(model.state_dict())
        heads.append(dict(engine.export_hf()))
        engine.close()
    assert torch.equal(heads[0]["score.weight"], heads[1]["score.weight"]) and not heads[0]["score.bias"].any()
    assert heads[0]["score.weight"].std() > 0.1
    assert torch.equal(heads[0]["model.norm.weight"], model.state_dict()["model.norm.weight"])
    join_world(rank, 1, "vocabulary")
    engine = Engine(settings(), tiny_config("qwen3"), Layout().position(0), Layout(), torch.device("cpu"))
    with pytest.raises(EverstepError, match="has no value head"):
        engine.values([batch(1, 1, 5)])
    engine.close()


def test_a_language_model_gets_a_new_head() -> None:
    run_ranks(new_head, 1, join=False)


def actor_and_critic(rank: int, number: int, case: Case) -> None:
    """Beside each other in one process, sharing its groups, they end in the states of two that were alone."""
    from everstep.engine.step import Engine
    from support.models import NllWithEntropy

    layout, at, cpu = case.layout, case.layout.position(rank), torch.device("cpu")
    mine = [batch(10 + i, 2, 9) for i in range(4)][at.dp :: layout.dp]

    def build(head: Any, seed: int, **more: Any) -> Any:
        engine = Engine(settings(engine=case.engine), case.model, at, layout, cpu, head, **more)
        engine.init_random(seed)
        return engine

    def step(engine: Any, loss: Any) -> None:
        engine.accumulate(mine, loss, [0] * len(mine))
        engine.apply(engine.gradients(), SCALE, LR)

    alone = []
    for head, loss in (("vocabulary", NllWithEntropy()), ("value", SquaredError())):
        join_world(rank, layout.ranks_per_replica, f"{number}-alone-{head}")
        engine = build(head, 5)
        for _ in range(2):
            step(engine, loss)
        alone.append(engine.state_hash())
        engine.close()
    join_world(rank, layout.ranks_per_replica, f"{number}-together")
    actor = build("vocabulary", 5)
    judge = build("value", 5, beside=actor)
    for _ in range(2):
        step(actor, NllWithEntropy())
        actor.offload_to_cpu()
        step(judge, SquaredError())
        judge.offload_to_cpu()
        assert (actor.logprobs(mine) is None) == (judge.values(mine) is None) == (rank not in layout.collect_ranks())
    assert [actor.state_hash(), judge.state_hash()] == alone
    judge.close()
    step(actor, NllWithEntropy())  # the groups are still there
    with pytest.raises(EverstepError, match="cannot share the groups"):
        Engine(settings(), case.model, at, Layout(dp=3), cpu, "value", beside=actor)
    late = build("value", 5, beside=actor)
    actor.close()
    with pytest.raises(EverstepError, match="closed"):
        late.values(mine)
    late.close()


def actors_and_critics(rank: int, cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        actor_and_critic(rank, number, case)


def test_an_actor_and_its_critic_share_a_process() -> None:
    cases = [Case(Layout(tp=2), engine=SP), Case(Layout(pp=2, vpp=2)), Case(Layout(dp=2))]
    run_ranks(actors_and_critics, 2, cases, join=False, deadline_s=150)
