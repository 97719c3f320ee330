"""Keys of reinforcement learning that nothing obeys under the values of others: refused, since who gives one expects it to matter."""

from __future__ import annotations

from everstep.config.schema import Config
from everstep.errors import ConfigError

_BY_STD = ("grpo", "grpo_batch_std")
_BY_TOKEN = ("reinforce_plus_plus", "gae")
_GROUPED = (*_BY_STD, "dr_grpo", "rloo", "reinforce_plus_plus_baseline")


def check(config: Config) -> None:
    """ConfigError for the first such key that is given another value than its default. Stages of one's own may read what they like."""
    if config.pipeline is not None:
        return
    rl, reward = config.rl, config.reward
    estimator, aggregation = f"rl.advantage={rl.advantage}", f"rl.loss_aggregation={rl.loss_aggregation}"
    obeyed = {
        "advantage_eps": (rl.advantage in _BY_STD, estimator),
        "lone_completion": (rl.advantage in _GROUPED, estimator),
        "whitening": (rl.advantage in (*_BY_TOKEN, "reinforce_plus_plus_baseline"), estimator),
        "gamma": (rl.advantage in _BY_TOKEN, estimator),
        "gaps": (rl.advantage in _BY_TOKEN, estimator),
        "lam": (rl.advantage == "gae", estimator),
        "loss_horizon_tokens": (rl.loss_aggregation == "seq-mean-token-sum-norm", aggregation),
        "empty_rows": (rl.loss_aggregation != "token-mean", aggregation),
        "kl_kind": (rl.kl_coef > 0, "rl.kl_coef=0"),
        "kl_clamp": (rl.kl_coef > 0, "rl.kl_coef=0"),
        "kl_horizon_samples": (rl.kl_target is not None, "rl.kl_target=null"),
    }
    for name, (is_obeyed, under) in obeyed.items():
        _refuse(f"rl.{name}", getattr(rl, name), type(rl).model_fields[name].default, is_obeyed, under)
    for name in ("upper", "lower", "normalise"):
        default = type(rl.importance).model_fields[name].default
        _refuse(f"rl.importance.{name}", getattr(rl.importance, name), default, rl.importance.level != "none", "rl.importance.level=none")
    default = type(reward).model_fields["overlong_factor"].default
    _refuse("reward.overlong_factor", reward.overlong_factor, default, reward.overlong_cache_tokens is not None, "reward.overlong_cache_tokens=null")


def _refuse(key: str, value: object, default: object, is_obeyed: bool, under: str) -> None:
    if value != default and not is_obeyed:
        raise ConfigError(f"{key}={value} has no effect with {under}; leave it out, or change {under.partition('=')[0]}")
