"""Advantages against the numbers of verl and TRL (tests/golden/rl_advantages.json), and the rules we chose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.rl import advantages as adv

GOLDEN = json.loads((Path(__file__).parent / "golden" / "rl_advantages.json").read_text())["cases"]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["name"])
def test_reproduces_the_references(case: dict) -> None:
    got = adv.estimate(case["algorithm"], case["inputs"]["rewards"], case["inputs"]["group"], case["params"].get("eps", 1e-6))
    expected = torch.tensor(case["expected"]["scalar_advantages"])
    torch.testing.assert_close(got, expected, **case["tolerance"])
    mask = torch.tensor(case["inputs"]["mask"], dtype=torch.float32)
    tokens = torch.tensor(case["expected"]["advantages"])
    torch.testing.assert_close(adv.spread(got, mask), tokens, **case["tolerance"])


def test_every_algorithm_has_golden_cases() -> None:
    assert {case["algorithm"] for case in GOLDEN} == set(adv.ESTIMATORS)


@pytest.mark.parametrize("estimator", adv.ESTIMATORS)
@given(
    value=st.floats(-1e6, 1e6, allow_nan=False, width=32),
    size=st.integers(1, 64),
)
@settings(max_examples=50, deadline=None)
def test_equal_rewards_give_exactly_zero(estimator: str, value: float, size: int) -> None:
    """Also where the mean of equal float32 numbers is not that number, and for a group of one."""
    assert adv.estimate(estimator, torch.full((size,), value), ["g"] * size).tolist() == [0.0] * size


@pytest.mark.parametrize("estimator", adv.ESTIMATORS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_groups_do_not_see_each_other(estimator: str, data: st.DataObject) -> None:
    """Permuting samples permutes the advantages; other groups' rewards change nothing."""
    rewards = data.draw(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=12))
    groups = data.draw(st.lists(st.sampled_from("abc"), min_size=len(rewards), max_size=len(rewards)))
    full = adv.estimate(estimator, rewards, groups)
    order = data.draw(st.permutations(range(len(rewards))))
    shuffled = adv.estimate(estimator, [rewards[i] for i in order], [groups[i] for i in order])
    torch.testing.assert_close(shuffled, full[list(order)])
    mine = [i for i, g in enumerate(groups) if g == groups[0]]
    alone = adv.estimate(estimator, [rewards[i] for i in mine], [groups[i] for i in mine])
    torch.testing.assert_close(alone, full[mine])


def test_errors_say_which_reward() -> None:
    with pytest.raises(adv.AdvantageError, match=r"reward 1 \(group 'b'\) is nan"):
        adv.grpo([1.0, float("nan")], ["a", "b"])
    with pytest.raises(adv.AdvantageError, match="2 rewards for 1 group ids"):
        adv.rloo([1.0, 2.0], ["a"])
    with pytest.raises(adv.AdvantageError, match="gae"):
        adv.estimate("gae", [1.0], ["a"])
