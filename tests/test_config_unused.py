"""Keys that nothing obeys under the values of others are refused, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.runs import DEMO, PPO, config

from everstep.config import unused
from everstep.config.check import check_plan
from everstep.config.importing import translate
from everstep.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "under", "with_which_it_is_obeyed"),
    [
        ("rl.advantage_eps=1e-4", "rl.advantage=rloo", "rl.advantage=grpo_batch_std"),
        ("rl.lone_completion=reward", "rl.advantage=reinforce_plus_plus", "rl.advantage=rloo"),
        ("rl.whitening=none", "rl.advantage=grpo", "rl.advantage=reinforce_plus_plus_baseline"),
        ("rl.gamma=0.9", "rl.advantage=dr_grpo", "rl.advantage=reinforce_plus_plus"),
        ("rl.gaps=zero", "rl.advantage=grpo", "rl.advantage=reinforce_plus_plus"),
        ("rl.loss_horizon_tokens=9", "rl.loss_aggregation=token-mean", "rl.loss_aggregation=seq-mean-token-sum-norm"),
        ("rl.empty_rows=count", "rl.loss_aggregation=token-mean", "rl.loss_aggregation=seq-mean-token-sum"),
        ("rl.kl_kind=k1", "rl.kl_coef=0", "rl.kl_coef=0.1"),
        ("rl.kl_clamp=none", "rl.kl_coef=0", "rl.kl_coef=0.1"),
        ("rl.importance.upper=3", "rl.importance.level=none", "rl.importance.level=token"),
        ("rl.importance.lower=0.5", "rl.importance.level=none", "rl.importance.level=sequence"),
        ("rl.importance.normalise=true", "rl.importance.level=none", "rl.importance.level=token"),
        ("reward.overlong_factor=0.5", "reward.overlong_cache_tokens=null", "reward.overlong_cache_tokens=2"),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(given: str, under: str, with_which_it_is_obeyed: str, tmp_path: Path) -> None:
    key = given.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key}=\S+ has no effect with {under}; leave it out, or change {under.partition('=')[0]}$"):
        check_plan(config(DEMO, tmp_path, "launcher=ray", given, under), {})
    unused.check(config(DEMO, tmp_path, given, with_which_it_is_obeyed))
    unused.check(config(DEMO, tmp_path, given, under, "pipeline=mine:stages"))  # whose stages may read it


def test_lambda_is_of_gae_alone_and_the_horizon_of_a_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rl\.lam=0.9 has no effect with rl.advantage=reinforce_plus_plus"):
        unused.check(config(DEMO, tmp_path, "rl.lam=0.9", "rl.advantage=reinforce_plus_plus"))
    unused.check(config(PPO, tmp_path, "rl.lam=0.9", "rl.gamma=0.9", "rl.gaps=zero"))
    with pytest.raises(ConfigError, match=r"rl\.kl_horizon_samples=5 has no effect with rl.kl_target=null"):
        unused.check(config(DEMO, tmp_path, "rl.kl_horizon_samples=5", "rl.kl_coef=0.1"))
    unused.check(config(DEMO, tmp_path, "rl.kl_horizon_samples=5", "rl.kl_coef=0.1", "rl.kl_target=0.1"))


@pytest.mark.parametrize(("estimator", "kept"), [("gae", {"rl.gamma", "rl.lam"}), ("reinforce_plus_plus", {"rl.gamma"}), ("grpo", set())])
def test_an_imported_script_gives_no_discount_to_an_estimator_that_has_none(estimator: str, kept: set[str]) -> None:
    options = [f"algorithm.adv_estimator={estimator}", "algorithm.gamma=0.9", "algorithm.lam=0.8", "actor_rollout_ref.actor.use_kl_loss=true",
               "actor_rollout_ref.actor.kl_loss_coef=0", "actor_rollout_ref.actor.kl_loss_type=k1"]
    found = translate("siirl", options, environ={}).keys
    assert {key for key in found if key in ("rl.gamma", "rl.lam")} == kept and "rl.kl_kind" not in found
