"""Advantages against the numbers of verl, TRL and OpenRLHF (tests/golden/rl_advantages.json), and the rules we chose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everstep.rl import advantages as adv

GOLDEN = json.loads((Path(__file__).parent / "golden" / "rl_advantages.json").read_text())["cases"]
PER_COMPLETION = ("grpo", "grpo_batch_std", "dr_grpo", "rloo")


def conventions(case: dict) -> adv.Conventions:
    """Those of whoever made the case: what the README of the golden numbers says of them, in our words."""
    p = case["params"]
    given = {"eps": p.get("eps", 1e-6), "gamma": p.get("gamma", 1.0), "lam": p.get("lam", 1.0)}
    given["lone_completion"] = "reward" if "baseline 0" in str(p.get("singleton_rule")) else "zero"
    given["whitening"] = "population" if p.get("whiten_var_ddof") == 0 else "sample"
    rule = str(p.get("masked_token_rule") or p.get("interior_masked_token_rule"))
    given["gaps"] = "zero" if "zero" in rule else "skip"
    return adv.Conventions(**given)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["name"])
def test_reproduces_the_references(case: dict) -> None:
    t = {name: torch.tensor(value, dtype=torch.float32) for name, value in case["inputs"].items() if name != "group"}
    expected = {name: torch.tensor(value) for name, value in case["expected"].items()}
    mask, groups = t["mask"], case["inputs"].get("group", [])
    close = lambda got, name: torch.testing.assert_close(got, expected[name], **case["tolerance"])
    c, name = conventions(case), case["algorithm"]
    advantages, returns = adv.estimate(name, t["token_level_rewards"], mask, groups, c, t.get("values"))
    checked = set()
    if name == "gae":
        raw, _ = adv.gae(t["token_level_rewards"], t["values"], mask, c.gamma, c.lam, c.gaps)
        close(raw, "advantages_raw")
        close(returns, "returns")
        close(advantages, "advantages_whitened")
        checked = {"advantages_raw", "returns", "advantages_whitened"}
        if "advantages_whitened_ddof0" in expected:
            close(adv.whiten(raw, mask, "population"), "advantages_whitened_ddof0")
            checked |= {"advantages_whitened_ddof0"}
    else:
        close(advantages, "advantages")
        checked = {"advantages"}
        if name == "reinforce_plus_plus":
            close(adv.returns_to_go(t["token_level_rewards"], mask, c.gamma, c.gaps), "returns")
            checked |= {"returns"}
        if name in PER_COMPLETION:
            alone = {"grpo": adv.grpo, "grpo_batch_std": adv.grpo_batch_std, "dr_grpo": adv.dr_grpo, "rloo": adv.rloo}[name]
            more = (c.eps,) if name.startswith("grpo") else ()
            close(alone(case["inputs"]["rewards"], groups, *more, lone_completion=c.lone_completion), "scalar_advantages")
            checked |= {"scalar_advantages"}
    assert checked == set(expected)


def test_the_golden_numbers_are_all_there() -> None:
    assert len(GOLDEN) == 73
    assert {case["algorithm"] for case in GOLDEN} == set(adv.ESTIMATORS)


@pytest.mark.parametrize("estimator", [*adv.GROUPED])
@given(value=st.floats(-1e6, 1e6, allow_nan=False, width=32), size=st.integers(1, 64))
@settings(max_examples=50, deadline=None)
def test_equal_rewards_give_exactly_zero(estimator: str, value: float, size: int) -> None:
    """Also where the mean of equal float32 numbers is not that number, and for a group of one."""
    got, _ = adv.estimate(estimator, torch.full((size, 1), value), torch.ones(size, 1), ["g"] * size)
    assert got.eq(0).all()


def scalars(estimator: str, rewards: list[float], groups: list[str]) -> Tensor:
    token_rewards = torch.tensor(rewards, dtype=torch.float32).unsqueeze(1)
    return adv.estimate(estimator, token_rewards, torch.ones_like(token_rewards), groups)[0][:, 0]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_groups_do_not_see_each_other(estimator: str, data: st.DataObject) -> None:
    """Permuting samples permutes the advantages; other groups' rewards change nothing."""
    rewards = data.draw(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=12))
    groups = data.draw(st.lists(st.sampled_from("abc"), min_size=len(rewards), max_size=len(rewards)))
    full = scalars(estimator, rewards, groups)
    order = data.draw(st.permutations(range(len(rewards))))
    shuffled = scalars(estimator, [rewards[i] for i in order], [groups[i] for i in order])
    torch.testing.assert_close(shuffled, full[list(order)])
    mine = [i for i, g in enumerate(groups) if g == groups[0]]
    alone = scalars(estimator, [rewards[i] for i in mine], [groups[i] for i in mine])
    torch.testing.assert_close(alone, full[mine])


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_gae_is_the_sum_of_discounted_errors(data: st.DataObject) -> None:
    """Against the definition, over the tokens that count one after the other; padding and gaps may hold anything."""
    draw = lambda lo, hi, n: data.draw(st.lists(st.floats(lo, hi, width=32), min_size=n, max_size=n))
    width = data.draw(st.integers(1, 7))
    mask = torch.tensor([data.draw(st.lists(st.integers(0, 1), min_size=width, max_size=width))], dtype=torch.float32)
    gamma, lam = data.draw(st.sampled_from([1.0, 0.9])), data.draw(st.sampled_from([1.0, 0.5, 0.0]))
    rewards, values = torch.tensor([draw(-2, 2, width)]), torch.tensor([draw(-2, 2, width)])
    garbage = torch.where(mask > 0, 0.0, float("nan"))
    got, returns = adv.gae(rewards + garbage, values + garbage, mask, gamma, lam)
    at = [t for t in range(width) if mask[0, t]]
    r, v = [float(rewards[0, t]) for t in at], [float(values[0, t]) for t in at] + [0.0]
    delta = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(at))]
    want = [sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, len(at))) for k in range(len(at))]
    torch.testing.assert_close(got[0, at], torch.tensor(want, dtype=torch.float32), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(returns[0, at], got[0, at] + values[0, at], rtol=1e-5, atol=1e-6)
    assert got[mask == 0].eq(0).all() and returns[mask == 0].eq(0).all()


def test_a_completion_that_was_dropped_is_in_no_mean() -> None:
    """Its mask is 0 throughout: the others get what they would get without it, and it gets 0."""
    rewards, groups = torch.tensor([[0.0, 1.0], [0.0, 5.0], [0.0, 0.0], [2.0, 0.0]]), ["a", "a", "a", "b"]
    mask = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    for estimator in adv.GROUPED:
        got, _ = adv.estimate(estimator, rewards * mask, mask, groups)
        kept = [0, 2, 3]
        without, _ = adv.estimate(estimator, rewards[kept], mask[kept], [groups[i] for i in kept])
        assert torch.equal(got[kept], without) and got[1].eq(0).all() and got[0].ne(0).all()


def test_errors_say_which_reward() -> None:
    with pytest.raises(adv.AdvantageError, match=r"reward 1 \(group 'b'\) is nan"):
        adv.grpo([1.0, float("nan")], ["a", "b"])
    with pytest.raises(adv.AdvantageError, match="2 rewards for 1 group ids"):
        adv.rloo([1.0, 2.0], ["a"])
    one = torch.ones(1, 1)
    with pytest.raises(adv.AdvantageError, match=r"rl.advantage='vtrace' is unknown"):
        adv.estimate("vtrace", one, one, ["a"])
    with pytest.raises(adv.AdvantageError, match="needs the values of a critic"):
        adv.estimate("gae", one, one, ["a"])
    with pytest.raises(adv.AdvantageError, match="values of completion 0 are not finite"):
        adv.gae(one, one * float("inf"), one)
    with pytest.raises(adv.AdvantageError, match=r"\(1, 1\) and mask \(1, 2\)"):
        adv.gae(one, one, torch.ones(1, 2))
