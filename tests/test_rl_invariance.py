"""The same loss, metrics and gradient whatever the size of micro-batches, packing, context, tensor and pipeline parallelism, and number
of replicas: for every kind of loss of actor and critic, in real process groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.slots import cut_slots
from everstep.config.schema import TrainConfig
from everstep.engine.loss import LossSpec, unpack_sums
from everstep.layout import Layout
from support.models import hf_model, settings, tiny_config
from support.processes import join_world, run_ranks

LOSSES = {
    "token-mean": dict(aggregation="token-mean", kl_coef=0.1, entropy_coef=0.01),
    "seq-mean-token-mean": dict(aggregation="seq-mean-token-mean", ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    "sum-norm": dict(aggregation="seq-mean-token-sum-norm", horizon=11, weighted=True, kl_coef=0.1, kl_kind="k3+"),
    "rows-counted": dict(aggregation="seq-mean-token-sum", empty_rows="count", ratio="sequence_token"),
}
SPECS = {name: LossSpec("everstep.rl.losses:policy_loss", args) for name, args in LOSSES.items()}
CRITIC = {"values": dict(clip=0.2), "values-by-row": dict(clip=None, aggregation="seq-mean-token-sum-norm", horizon=11, empty_rows="count")}
SPECS |= {name: LossSpec("everstep.rl.losses:value_loss", args) for name, args in CRITIC.items()}
SPECS["pairs"] = LossSpec("everstep.rl.preference:dpo_loss", {"beta": 0.2, "label_smoothing": 0.1})
CUTS = [dict(micro_batch_size=8), dict(micro_batch_size=2), dict(micro_batch_size=4), dict(tokens_per_micro_batch=40)]


def samples() -> TrainingBatch:
    """Eight completions of different lengths, two to a prompt; one has a gap, one was dropped. As pairs for DPO too."""
    generator = torch.Generator().manual_seed(3)
    lengths = [13, 7, 11, 5, 16, 9, 6, 12]
    width = max(lengths)
    real = (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).long()
    mask = real.float() * (torch.arange(width) >= 3)
    mask[2, 6:8] = 0.0
    mask[5] = 0.0
    draw = lambda scale=1.0, shift=0.0: torch.randn(8, width, generator=generator) * scale + shift
    return TrainingBatch(
        {
            "input_ids": torch.randint(1, 60, (8, width), generator=generator) * real, "attention_mask": real, "loss_mask": mask,
            "advantages": draw(), "old_logprobs": draw(0.3, -4.0), "ref_logprobs": draw(0.3, -4.0), "importance_weights": draw().abs(),
            "values": draw(0.3), "returns": draw(), "chosen": torch.tensor([1.0, 0.0]).repeat(4),
        },
        sample_ids=[f"0/{i}" for i in range(8)],
    )


def numbers(engine: Any, spec: LossSpec, parts: list[list[TrainingBatch]]) -> dict[str, Any]:
    """Loss, metrics, and gradients over the global weight. ``parts``: what each replica computes; their raw sums are added, which
    is what a link does."""
    loss = spec.build()
    sums = torch.zeros(2 + 2 * len(loss.metric_names), dtype=torch.float64)
    gradients: list[Tensor] = []
    for part in parts:
        sums += engine.accumulate(part, loss, [0] * len(part))
        own = [g.clone() for g in engine.gradients()]
        gradients = [a + b for a, b in zip(gradients, own, strict=True)] if gradients else own
    weight = float(sums[0])
    divided = [g / weight for g in gradients]
    named = {name: total / count for name, (total, count) in unpack_sums(sums, loss.metric_names).items()}
    return {"metrics": named, "gradients": divided, "norm2": engine.squared_norm(divided)}


def every_cut(rank: int, layouts: list[Layout]) -> dict[str, dict[str, Any]]:
    """For each loss: metrics and squared gradient norm, the same for all cuts and layouts of this number of ranks."""
    from everstep.engine.step import Engine

    found: dict[str, dict[str, Any]] = {}
    for number, layout in enumerate(layouts):
        join_world(rank, layout.ranks_per_replica, f"layout{number}")
        at, model = layout.position(rank), tiny_config("qwen3", tied=True)
        actor = Engine(settings(engine={"sequence_parallel": layout.tp > 1}), model, at, layout, torch.device("cpu"))
        actor.load_pretrained(hf_model(model).state_dict())
        critic = Engine(settings(engine={"sequence_parallel": layout.tp > 1}), model, at, layout, torch.device("cpu"), "value", beside=actor)
        critic.init_random(7)
        for name, spec in SPECS.items():
            engine, base = critic if name in CRITIC else actor, None
            for cut in CUTS if layout.ranks_per_replica == 1 else CUTS[1::2]:
                if layout.dp * (cut.get("micro_batch_size") or 1) > 8:
                    continue
                slots = [slot[at.dp] for slot in cut_slots(samples(), TrainConfig(**cut), layout.dp)]
                for parts in ([slots], [slots[::2], slots[1::2]]):  # one replica, or two
                    if not all(parts):
                        continue
                    got = numbers(engine, spec, parts)
                    base = base or got
                    assert got["metrics"] == pytest.approx(base["metrics"], rel=2e-5, abs=1e-6), (name, layout, cut, len(parts))
                    scale = max(float(g.abs().max()) for g in base["gradients"])
                    for mine, theirs in zip(got["gradients"], base["gradients"], strict=True):
                        assert (mine - theirs).abs().max() <= 2e-5 * scale, (name, layout, cut, len(parts))
            assert base is not None
            here = {"metrics": base["metrics"], "norm2": base["norm2"]}
            if name in found:
                same(found[name], here, (name, layout))
            found[name] = here
        critic.close()
        actor.close()
    return found


def same(a: dict[str, Any], b: dict[str, Any], where: object) -> None:
    assert a["metrics"] == pytest.approx(b["metrics"], rel=5e-5, abs=1e-6), where
    assert a["norm2"] == pytest.approx(b["norm2"], rel=1e-4), where


@pytest.mark.full
def test_every_way_to_cut_a_step_gives_the_same_step() -> None:
    (one,) = run_ranks(every_cut, 1, [Layout()], join=False, deadline_s=200)
    two = run_ranks(every_cut, 2, [Layout(tp=2), Layout(cp=2), Layout(dp=2), Layout(pp=2)], join=False, deadline_s=250)
    for name in SPECS:
        same(one[name], two[0][name], name)
        assert one[name]["norm2"] > 0 and one[name]["metrics"]["loss"] != 0


def test_the_cuts_differ_and_the_dropped_sample_has_no_weight() -> None:
    """What the test above compares are really different cuts, and the choice about empty rows is visible in it."""
    counts = [[len(m) for (m,) in cut_slots(samples(), TrainConfig(**cut), 1)] for cut in CUTS]
    assert counts[:3] == [[8], [2] * 4, [4, 4]] and counts[3] not in counts[:3]
    weights = {name: float(spec.build().weight(samples())) for name, spec in SPECS.items()}
    tokens = float(samples()["loss_mask"].sum())
    assert weights == {"token-mean": tokens, "seq-mean-token-mean": 7, "sum-norm": 7, "rows-counted": 8, "values": tokens, "values-by-row": 8, "pairs": 4}
