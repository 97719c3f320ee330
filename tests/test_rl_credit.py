"""From scores to advantages as section ``rl`` says: KL in the reward, the adaptive coefficient, importance weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.runs import DEMO, ROOT, config
from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import RlConfig, RolloutConfig
from everstep.recipes.grpo import kl_coef_after, rollout_metrics
from everstep.rl import credit, pipeline
from everstep.rl.kl import adapted, mean_kl, token_rewards
from everstep.rl.record import IterationRecord


def samples(**tensors: Tensor) -> TrainingBatch:
    """Two prompts of two completions; the third has a gap, the fourth was dropped."""
    mask = torch.tensor([[0.0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]])
    return TrainingBatch({"loss_mask": mask, **tensors}, {"group": ["a", "a", "b", "b"]}, ["a#0", "a#1", "b#0", "b#1"])


def test_a_reward_sits_on_the_last_token_that_counts() -> None:
    got = token_rewards(torch.tensor([1.0, 2, 3, 4]), samples()["loss_mask"])
    assert got.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 3], [0, 0, 0, 0]]


def test_kl_in_the_reward_is_subtracted_token_by_token() -> None:
    generator = torch.Generator().manual_seed(0)
    old, ref = (torch.randn(4, 4, generator=generator) for _ in range(2))
    rl = RlConfig(advantage="reinforce_plus_plus", whitening="none", kl_in="reward", kl_coef=0.5, kl_kind="k1")
    got, metrics = credit.assign(samples(old_logprobs=old, ref_logprobs=ref), torch.ones(4), rl, 0.5)
    x = (old - ref) * got["loss_mask"]
    # Without discount the advantage is what is still to come: the reward, less all KL from this token on.
    assert got["advantages"][0, 1] == pytest.approx(float(1 - 0.5 * (x[0, 1] + x[0, 2])))
    assert got["advantages"][2, 3] == pytest.approx(float(1 - 0.5 * x[2, 3]))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(float((x[:3].sum(1) / torch.tensor([2, 3, 2])).mean()))
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert credit.policy_loss(rl, RolloutConfig(), False, 0.5).args["kl_coef"] == 0  # and not in the loss as well


def test_metrics_are_of_completions_that_count(tmp_path: Path) -> None:
    """Of the fourth one the reward failed (reward.on_error=drop): it has a 0 for a score, and no token that counts."""
    scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
    batch = samples(scores=scores)
    assert credit.assign(batch, scores, RlConfig(), 0.0)[1]["critic/rewards/min"] == 1.0
    found = rollout_metrics(batch, config(DEMO, tmp_path, "rollout.max_response_tokens=3", "data.max_tokens=8"), 0)
    assert [found[f"response_length/{how}"] for how in ("mean", "max", "min")] == [pytest.approx(7 / 3), 3.0, 2.0]
    assert found["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert [found[f"critic/score/{how}"] for how in ("mean", "max", "min")] == [2.0, 3.0, 1.0]
    assert [found[f"prompt_length/{how}"] for how in ("mean", "max", "min")] == [1.0, 1.0, 1.0]


def test_the_coefficient_is_pushed_towards_the_target() -> None:
    assert adapted(0.1, kl=0.02, target=0.01, samples=100, horizon_samples=1000) == pytest.approx(0.1 * 1.02)  # at most 20 %
    assert adapted(0.1, kl=0.009, target=0.01, samples=1000, horizon_samples=1000) == pytest.approx(0.1 * 0.9)
    assert adapted(0.1, kl=0.01, target=0.01, samples=1000, horizon_samples=10) == pytest.approx(0.1)


@given(kl=st.floats(-10, 1e6), target=st.floats(1e-6, 10), samples_=st.integers(1, 10**9), horizon=st.integers(1, 10**6))
@settings(max_examples=100, deadline=None)
def test_the_coefficient_stays_positive(kl: float, target: float, samples_: int, horizon: int) -> None:
    assert 0.79 < adapted(1.0, kl, target, samples_, horizon) < 1.21


def test_the_coefficient_of_the_next_iteration() -> None:
    old, ref = torch.full((4, 4), -1.0), torch.full((4, 4), -1.5)
    batch = samples(old_logprobs=old, ref_logprobs=ref)
    fixed = RlConfig(kl_coef=0.1, kl_kind="k1")
    assert credit.next_kl_coef(batch, fixed, 0.1) == 0.1
    steered = RlConfig(kl_coef=0.1, kl_kind="k1", kl_target=1.0, kl_horizon_samples=40)
    assert mean_kl((old - ref) * batch["loss_mask"], batch["loss_mask"]) == pytest.approx(0.5)
    assert credit.next_kl_coef(batch, steered, 0.1) == pytest.approx(0.1 * (1 - 0.2 * 4 / 40))


def test_while_the_critic_warms_up_the_coefficient_stands_still(tmp_path: Path) -> None:
    """The actor does not move, so its KL of 0 is no reason to hold it less."""
    conf = config(str(ROOT / "examples" / "ppo_kill.yaml"), tmp_path, "critic.warmup=2", "rl.kl_coef=0.1", "rl.kl_target=0.1", "rl.iterations=5")
    same = torch.full((4, 4), -1.0)
    of = lambda iteration: IterationRecord(iteration, 0, 1, 2, "", samples(old_logprobs=same, ref_logprobs=same))
    assert [kl_coef_after(conf, of(n), 0.1) for n in (1, 2)] == [0.1, 0.1] and kl_coef_after(conf, of(3), 0.1) < 0.1


@pytest.mark.parametrize(
    ("changes", "needed"),
    [({}, False), ({"passes": 2}, True), ({"updates_per_pass": 2}, True), ({"kl_in": "reward"}, True), ({"kl_target": 0.1}, True),
     ({"importance": {"level": "token"}}, True), ({"kl_coef": 0.1}, False)],
)
def test_who_needs_old_logprobs(changes: dict, needed: bool) -> None:
    assert pipeline.needs_old_logprobs(RlConfig(**changes)) is needed


def test_importance_weights_come_from_the_whole_iteration() -> None:
    old, rollout = torch.zeros(4, 4), torch.full((4, 4), 0.5)
    rl = RlConfig(importance={"level": "token", "upper": 2.0, "normalise": True})
    got, metrics = credit.assign(samples(old_logprobs=old, rollout_logprobs=rollout), torch.arange(4.0), rl, 0.0)
    inside = got["importance_weights"][got["loss_mask"] > 0]
    torch.testing.assert_close(inside, torch.ones(7))
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(0.60653, abs=1e-5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 0.0
    assert metrics["rollout_corr/kl"] == pytest.approx(0.5)
    assert credit.policy_loss(rl, RolloutConfig(), True, 0.0).args["weighted"] is True


def test_the_horizon_is_the_longest_completion_unless_given() -> None:
    dr = {"advantage": "dr_grpo", "loss_aggregation": "seq-mean-token-sum-norm"}
    assert credit.policy_loss(RlConfig(**dr), RolloutConfig(max_response_tokens=77), True, 0.0).args["horizon"] == 77
    assert credit.policy_loss(RlConfig(**dr, loss_horizon_tokens=9), RolloutConfig(), True, 0.0).args["horizon"] == 9
