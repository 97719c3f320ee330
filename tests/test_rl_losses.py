"""Losses against the numbers of verl, TRL and OpenRLHF (tests/golden/rl_losses.json), and that micro-batches do not matter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.engine.loss import LossFn, LossSpec, pack_sums, unpack_sums
from everstep.errors import ConfigError
from everstep.rl import importance, kl, losses
from everstep.rl.shaping import overlong_penalty

GOLDEN = json.loads((Path(__file__).parent / "golden" / "rl_losses.json").read_text())["cases"]


def golden(*algorithms: str) -> list:
    return [pytest.param(c, id=c["name"]) for c in GOLDEN if c["algorithm"] in algorithms]


def tensors(case: dict) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in case["inputs"].items()}


def choices(case: dict) -> dict:
    """Horizon and empty rows, in our words."""
    p = case["params"]
    horizon = p.get("horizon", case["inputs"]["mask"] and len(case["inputs"]["mask"][0]))  # the references' default: the width
    return {"horizon": horizon, "empty_rows": "count" if "every row" in p.get("empty_row_rule", "") else "skip"}


def policy(case: dict, **changes) -> LossFn:
    p = case["params"]
    args = {
        "clip_low": p["clip_low"],
        "clip_high": p["clip_high"],
        "dual_clip": p.get("dual_clip_c"),
        "aggregation": p["aggregation"],
        "kl_coef": p.get("kl_coef", 0.0),
        "kl_kind": p.get("kl_estimator", "k3"),
        "entropy_coef": p.get("entropy_coef", 0.0),
        "report_entropy": False,
        **choices(case),
    }
    return losses.policy_loss(**{**args, **changes})


def batch_of(t: dict[str, Tensor]) -> TrainingBatch:
    named = {
        "advantages": t["advantages"],
        "loss_mask": t["mask"],
        "old_logprobs": t["old_logprobs"],
        **{name: t[name] for name in ("ref_logprobs", "importance_weights") if name in t},
    }
    return TrainingBatch(named, sample_ids=[str(i) for i in range(len(t["mask"]))])


def check(got: Tensor | float, expected: object, case: dict) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float32), torch.tensor(expected, dtype=torch.float32), **case["tolerance"]
    )


def test_the_golden_numbers_are_all_there_and_each_has_a_test() -> None:
    assert len(GOLDEN) == 81
    assert {case["algorithm"] for case in GOLDEN} == {
        "ppo_clip", "ppo_clip_plus_kl", "gspo", "aggregation", "value_loss", "kl", "entropy_bonus", "composite_from_logits",
        "truncated_importance_sampling", "dapo_soft_overlong",
    }


def is_sum(case: dict) -> bool:
    """A sum over tokens cannot be cut into micro-batches, so no loss function offers it."""
    return case["params"]["aggregation"] == "token-sum"


@pytest.mark.parametrize("case", golden("ppo_clip", "ppo_clip_plus_kl"))
def test_policy_loss_and_gradient(case: dict) -> None:
    t = tensors(case)
    new = t["new_logprobs"].requires_grad_()
    if is_sum(case):
        p = case["params"]
        terms = losses.clipped_policy_terms(new, t["old_logprobs"], t["advantages"], t["mask"], p["clip_low"], p["clip_high"])
        total, weight = losses.aggregate(terms.loss, t["mask"], "token-sum")
        total.backward()
        check((total / weight).detach(), case["expected"]["loss"], case)
        check(new.grad, case["expected"]["grad_new_logprobs"], case)
        return
    fn = policy(case)
    out = fn(new, None, batch_of(t))
    loss = out.loss_sum / out.weight
    loss.backward()
    check(loss.detach(), case["expected"]["loss"], case)
    check(new.grad, case["expected"]["grad_new_logprobs"], case)
    assert new.grad is not None and new.grad[t["mask"] == 0].eq(0).all()
    means = {name: float(s / w) for name, (s, w) in out.metrics.items()}
    for metric, key in {
        "actor/pg_clipfrac": "clip_fraction",
        "actor/pg_clipfrac_lower": "dual_clip_fraction",
        "actor/ppo_kl": "approx_kl",
        "actor/pg_loss": "policy_loss",
        "actor/kl_loss": "kl_loss",
    }.items():
        # Where a case sets no dual clip its reference still counts against a default constant of its own.
        if metric == "actor/pg_clipfrac_lower" and case["params"]["dual_clip_c"] is None:
            continue
        if key in case["expected"]:
            check(means[metric], case["expected"][key], case)


@pytest.mark.parametrize("case", golden("gspo"))
def test_sequence_ratios(case: dict) -> None:
    t = tensors(case)
    new = t["new_logprobs"].requires_grad_()
    own = case["convention"] == "verl"  # whose gradient differs where advantages differ within a completion
    for level in ["sequence_token" if own else "sequence"] if case["alternatives"] else ["sequence", "sequence_token"]:
        new.grad = None
        out = policy(case, ratio=level)(new, None, batch_of(t))
        (out.loss_sum / out.weight).backward()
        check((out.loss_sum / out.weight).detach(), case["expected"]["loss"], case)
        check(new.grad, case["expected"]["grad_new_logprobs"], case)
        ratio = losses.log_ratios(new.detach(), t["old_logprobs"], t["mask"], level).exp()
        p = case["params"]
        terms = losses.clipped_policy_terms(
            new.detach(), t["old_logprobs"], t["advantages"], t["mask"], p["clip_low"], p["clip_high"], ratio=level
        )
        rows = {
            "sequence_ratio": torch.where(t["mask"] > 0, ratio, float("nan")).nanmean(dim=1),
            "clip_fraction_per_sequence": terms.clipped.amax(dim=1).mean(),
            "clip_fraction": out.metrics["actor/pg_clipfrac"][0] / out.metrics["actor/pg_clipfrac"][1],
            "approx_kl": out.metrics["actor/ppo_kl"][0] / out.metrics["actor/ppo_kl"][1],
        }
        for key, got in rows.items():
            if key in case["expected"]:
                check(got, case["expected"][key], case)


@pytest.mark.parametrize("case", golden("truncated_importance_sampling"))
def test_truncated_importance_sampling(case: dict) -> None:
    t, p = tensors(case), case["params"]
    new = t["new_logprobs"].requires_grad_()
    w = importance.importance_weights(
        t["old_logprobs"], t["rollout_logprobs"], t["mask"], p["level"], p["upper"], p["lower"], p["batch_normalise"]
    )
    check(w.weights, case["expected"]["weights"], case)
    check(w.mean, case["expected"]["weight_mean_before_normalisation"], case)
    if "fraction_above_upper" in case["expected"]:
        check(w.beyond, case["expected"]["fraction_above_upper"], case)
    out = policy(case, weighted=True)(new, None, batch_of(t | {"importance_weights": w.weights}))
    (out.loss_sum / out.weight).backward()
    check((out.loss_sum / out.weight).detach(), case["expected"]["loss"], case)
    check(new.grad, case["expected"]["grad_new_logprobs"], case)


def test_weights_of_completions_are_normalised_over_completions_however_long_they_are() -> None:
    """A long one counts once in the mean, one without tokens not at all."""
    old, mask = torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0], [9.0, 9.0, 9.0]]), torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 0]])
    w = importance.importance_weights(old, torch.zeros(3, 3), mask, "sequence", upper=2.0, normalise=True)
    own = torch.tensor([0.5, 0.0]).exp()
    torch.testing.assert_close(w.weights[:2], (own / own.mean()).unsqueeze(1) * mask[:2])
    assert w.weights[2].eq(0).all() and w.mean == pytest.approx(float((own[0] + 3 * own[1]) / 4))


@pytest.mark.parametrize("case", golden("value_loss"))
def test_value_loss(case: dict) -> None:
    t, p = tensors(case), case["params"]
    new = t["new_values"].requires_grad_()
    batch = TrainingBatch(
        {"values": t["old_values"], "returns": t["returns"], "loss_mask": t["mask"]}, sample_ids=[str(i) for i in range(len(new))]
    )
    out = losses.value_loss(p["clip_range"], p["aggregation"])(new, None, batch)
    (out.loss_sum / out.weight).backward()
    check((out.loss_sum / out.weight).detach(), case["expected"]["loss"], case)
    check(new.grad, case["expected"]["grad_new_values"], case)
    check(out.metrics["critic/vf_clipfrac"][0] / out.metrics["critic/vf_clipfrac"][1], case["expected"]["clip_fraction"], case)


@pytest.mark.parametrize("case", golden("dapo_soft_overlong"))
def test_soft_overlong_punishment(case: dict) -> None:
    p = case["params"]
    got = [overlong_penalty(n, p["max_length"], p["cache"], p["factor"]) for n in case["inputs"]["response_lengths"]]
    assert got == pytest.approx(case["expected"]["penalty"], rel=1e-9)


@pytest.mark.parametrize("case", golden("composite_from_logits"))
def test_composite_from_logits(case: dict) -> None:
    t = tensors(case)
    logits = t["logits"].requires_grad_()
    logp = logits.log_softmax(dim=-1)
    new = logp.gather(2, t["token_ids"].long().unsqueeze(2)).squeeze(2)
    entropy = -(logp.exp() * logp).sum(dim=-1)
    out = policy(case)(new, entropy, batch_of(t))
    (out.loss_sum / out.weight).backward()
    check((out.loss_sum / out.weight).detach(), case["expected"]["loss"], case)
    check(logits.grad, case["expected"]["grad_logits"], case)
    for metric, key in {"actor/pg_loss": "policy_loss", "actor/entropy": "entropy", "actor/kl_loss": "kl_loss"}.items():
        check(out.metrics[metric][0] / out.metrics[metric][1], case["expected"][key], case)


@pytest.mark.parametrize("case", golden("kl"))
def test_kl(case: dict) -> None:
    t = tensors(case)
    new = t["new_logprobs"].requires_grad_()
    per_token = kl.kl_terms(new, t["ref_logprobs"], t["mask"], case["params"]["estimator"])
    total, weight = losses.aggregate(per_token, t["mask"], case["params"]["aggregation"])
    (total / weight).backward()
    check((per_token * t["mask"]).detach(), case["expected"]["per_token"], case)
    check((total / weight).detach(), case["expected"]["loss"], case)
    check(new.grad, case["expected"]["grad_new_logprobs"], case)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "k1+", "k3+"])
def test_far_from_the_reference_the_clamps_of_three_libraries(kind: str) -> None:
    """Log-ratios of -25, -1 and 25 nats: values by the formulas in float64, gradients by the table of rl/kl.py."""
    x = torch.tensor([[-25.0, -1.0, 25.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones_like(x)
    plain = {"k1": x, "k2": x * x / 2, "k3": (-x).exp() + x - 1, "abs": x.abs()}[kind.rstrip("+")].detach()
    held = (-x.clamp(-20, 20)).exp() + x.clamp(-20, 20) - 1
    expected = {"none": plain, "all": (held.detach() if kind.startswith("k3") else plain).clamp(-10, 10)}
    expected["k3"] = expected["all"] if kind.startswith("k3") else plain
    slope = {"k1": torch.ones_like(plain), "k2": x, "k3": 1 - (-x).exp(), "abs": x.sign()}[kind if kind[-1] != "+" else "k2"].detach()
    for clamp, value in expected.items():
        x.grad = None
        got = kl.kl_terms(x, torch.zeros_like(x), mask, kind, clamp)
        got.sum().backward()
        torch.testing.assert_close(got.detach(), value)
        free = torch.ones_like(plain) if kind[-1] == "+" else (value == plain).double()
        torch.testing.assert_close(x.grad, slope * free)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_a_ratio_far_from_one_is_bounded(level: str) -> None:
    """Log-ratios of 30 and -30 nats count as 20 and -20, and have no gradient: the loss stays far below what float32 holds."""
    new = torch.tensor([[30.0], [-30.0]], requires_grad=True)
    terms = losses.clipped_policy_terms(
        new, torch.zeros(2, 1), torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1), dual_clip=None, ratio=level  # type: ignore[arg-type]
    )
    torch.testing.assert_close(terms.loss.detach(), torch.tensor([[20.0], [-20.0]]).exp() * torch.tensor([[1.0], [-1.0]]))
    assert terms.neg_log_ratio.tolist() == [[-20.0], [20.0]]
    terms.loss.sum().backward()
    assert new.grad is not None and new.grad.eq(0).all()


@pytest.mark.parametrize("case", golden("entropy_bonus"))
def test_entropy_bonus(case: dict) -> None:
    """Through the whole loss: advantages of zero leave only the entropy term."""
    t = tensors(case)
    logits = t["logits"].requires_grad_()
    logp = logits.log_softmax(dim=-1)
    entropy = -(logp.exp() * logp).sum(dim=-1)
    zeros = torch.zeros_like(t["mask"])
    fn = losses.policy_loss(
        entropy_coef=case["params"]["entropy_coef"], aggregation=case["params"]["aggregation"], on_policy=True
    )
    batch = TrainingBatch({"advantages": zeros, "loss_mask": t["mask"]}, sample_ids=[str(i) for i in range(len(zeros))])
    out = fn(logp[..., 0], entropy, batch)
    (out.loss_sum / out.weight).backward()
    check((out.loss_sum / out.weight).detach(), case["expected"]["loss"], case)
    check(logits.grad, case["expected"]["grad_logits"], case)


@pytest.mark.parametrize("case", golden("aggregation"))
def test_aggregation_adds_up_over_micro_batches(case: dict) -> None:
    """The sums of micro-batches over the global weight are the reference's micro-batch losses and the whole loss."""
    t = tensors(case)
    values = t["loss_matrix"].requires_grad_()
    how, horizon = case["params"]["aggregation"], choices(case)["horizon"]
    total, weight = losses.aggregate(values, t["mask"], how, horizon)
    (total / weight).backward()
    check((total / weight).detach(), case["expected"]["loss"], case)
    check(values.grad, case["expected"]["grad_loss_matrix"], case)
    parts = [losses.aggregate(values[a:b], t["mask"][a:b], how, horizon) for a, b in case["params"]["micro_batches"]]
    check(torch.stack([s / weight for s, _ in parts]).detach(), case["expected"]["micro_batch_losses"], case)
    assert is_sum(case) or float(sum(w for _, w in parts)) == float(weight)
    # Where gradients of data-parallel ranks are averaged, each multiplies its part by their number; we add up instead.
    scaled = [len(parts) * float((s / weight).detach()) for s, _ in parts]
    assert sum(case["expected"]["data_parallel_losses"]) / len(parts) == pytest.approx(sum(scaled) / len(parts), rel=1e-5)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("sizes", [[9], [1] * 9, [4, 0, 5], [2, 7]])
def test_any_cut_of_the_batch_gives_the_same_step(aggregation: str, sizes: list[int]) -> None:
    """Loss, gradient and every metric, through the engine's own packing; rows of unequal length, one without tokens."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda: torch.randn(9, 7, generator=generator)
    lengths = torch.tensor([7, 1, 3, 0, 5, 2, 7, 4, 6])
    mask = (torch.arange(7) < lengths.unsqueeze(1)).float()
    new, entropy = (draw() - 2).requires_grad_(), draw().abs().requires_grad_()
    batch = TrainingBatch(
        {"advantages": draw(), "loss_mask": mask, "old_logprobs": new.detach() + draw(), "ref_logprobs": draw() - 2,
         "importance_weights": draw().abs()},
        sample_ids=[str(i) for i in range(9)],
    )
    fn = LossSpec(
        "everstep.rl.losses:policy_loss",
        {"aggregation": aggregation, "horizon": 9, "kl_coef": 0.1, "entropy_coef": 0.01, "clip_high": 0.28, "weighted": True},
    ).build()

    def step(sizes: list[int]) -> tuple[dict[str, float], Tensor, Tensor]:
        new.grad = entropy.grad = None
        total, start = torch.zeros(2 + 2 * len(fn.metric_names), dtype=torch.float64), 0
        for part in batch.split_sizes(sizes):
            rows = slice(start, start + len(part))
            out = fn(new[rows], entropy[rows], part)
            out.loss_sum.backward()
            total += pack_sums(out, fn.metric_names, torch.device("cpu"))
            start += len(part)
        sums = unpack_sums(total, fn.metric_names)
        weight = sums["loss"][1]
        assert new.grad is not None and entropy.grad is not None
        return {k: s / w for k, (s, w) in sums.items()}, new.grad / weight, entropy.grad / weight

    whole, cut = step([9]), step(sizes)
    assert whole[0] == pytest.approx(cut[0], rel=1e-6)
    torch.testing.assert_close(whole[1], cut[1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(whole[2], cut[2], rtol=1e-6, atol=1e-9)
    assert set(whole[0]) == {
        "loss",
        "actor/pg_loss",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/kl_loss",
        "actor/entropy",
    }


def test_padding_may_hold_anything() -> None:
    """Infinite and NaN log-probabilities where the mask is 0 reach neither the loss nor the gradient."""
    new = torch.tensor([[0.0, -1.0, float("-inf")], [0.0, float("nan"), -2.0]], requires_grad=True)
    mask = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    batch = TrainingBatch(
        {
            "advantages": torch.ones(2, 3),
            "loss_mask": mask,
            "old_logprobs": torch.tensor([[0.0, -1.1, 0.0], [0.0, 0.0, -2.1]]),
            "ref_logprobs": torch.full((2, 3), -1.5),
        },
        sample_ids=["a", "b"],
    )
    out = losses.policy_loss(kl_coef=0.1, report_entropy=False)(new, None, batch)
    out.loss_sum.backward()
    assert torch.isfinite(out.loss_sum) and new.grad is not None and torch.isfinite(new.grad).all()
    assert new.grad[mask == 0].eq(0).all() and new.grad[mask == 1].ne(0).all()


def test_on_policy_equals_old_logprobs_of_the_same_weights() -> None:
    new = (torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) - 2).requires_grad_()
    batch = TrainingBatch(
        {"advantages": torch.tensor([[1.0], [-2.0], [0.5]]).expand(3, 4), "loss_mask": torch.ones(3, 4)},
        sample_ids=["a", "b", "c"],
    )
    fn = losses.policy_loss(on_policy=True, report_entropy=False)
    fn(new, None, batch).loss_sum.backward()
    first, new.grad = new.grad, None
    given = losses.policy_loss(report_entropy=False)
    given(new, None, batch.with_tensors(old_logprobs=new.detach())).loss_sum.backward()
    assert first is not None and torch.equal(first, new.grad) and first.ne(0).all()


def test_sft_loss_is_cross_entropy_of_the_marked_tokens() -> None:
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(2), requires_grad=True)
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[0.0, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
    logprobs = logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)
    out = losses.sft_loss()(logprobs, None, TrainingBatch({"loss_mask": mask}, sample_ids=["a", "b"]))
    expected = torch.nn.functional.cross_entropy(logits[mask > 0], ids[mask > 0])
    torch.testing.assert_close(out.loss_sum / out.weight, expected)
    assert out.weight == 5 and tuple(out.metrics) == losses.sft_loss().metric_names == ("train/loss",)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ({"aggregation": "mean"}, "rl.loss_aggregation='mean'"),
        ({"kl_kind": "k4"}, "rl.kl_kind='k4'"),
        ({"kl_clamp": "k2"}, "rl.kl_clamp='k2'"),
        ({"dual_clip": 1.1}, "rl.dual_clip=1.1"),
        ({"clip_low": 1.5}, "rl.clip_low=1.5"),
        ({"kl_coef": -1.0}, "rl.kl_coef=-1.0"),
        ({"ratio": "row"}, "rl.ratio='row'"),
        ({"empty_rows": "maybe"}, "rl.empty_rows='maybe'"),
    ],
)
def test_impossible_settings_name_their_key(args: dict, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        losses.policy_loss(**args)
