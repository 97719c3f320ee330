"""GRPO on an island: rollout, reward and advantages of an inner step, by one replica alone and with the weights that it has.

The ranks that collect (last pipeline stage, tensor- and context-parallel rank 0) generate and score for their data-parallel
coordinate; the others get what they made. Nothing here talks to another replica: a group of completions belongs to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.slots import micro_batches
from everstep.config.schema import Config
from everstep.engine.loss import LossFn, LossOutput, LossSpec
from everstep.rl import credit
from everstep.rl.losses import PolicyLoss, policy_loss
from everstep.rl.pipeline import needs_old_logprobs
from everstep.rl.rewards import Scorer, without_dropped
from everstep.rl.rollout import Sampling

if TYPE_CHECKING:
    from everstep.cluster.worker.worker import Worker


class GrpoRollout:
    """everstep.cluster.worker.island.Rollout. What an estimator takes over a batch, it takes over the samples of one island and data-parallel rank.

    The processes of its reward functions stay from one inner step to the next, and end with the rank.
    """

    def __init__(self) -> None:
        self._reward: Scorer | None = None

    def __call__(self, worker: Worker, prompts: TrainingBatch) -> list[TrainingBatch]:
        config, rl, temperature = worker.config, worker.config.rl, worker.config.rollout.temperature
        samples = worker.generate(prompts, Sampling.for_training(config))
        if len(samples):
            self._reward = self._reward or Scorer(config, worker.events)
            found = self._reward(samples, whole=len(set(samples.column("group"))) > 1)  # a rank's share may be one prompt
            samples = without_dropped(samples.with_tensors(**found.tensors(drop=config.reward.on_error == "drop")))
        samples = worker.from_collecting_rank(samples)
        if rl.kl_coef > 0:
            samples = worker.from_collecting_rank(worker.logprobs(samples, temperature, "reference"))
        if needs_old_logprobs(rl):
            old = worker.from_collecting_rank(worker.logprobs(samples, temperature))
            samples = samples.with_tensors(old_logprobs=old["logprobs"])
        samples, _ = credit.assign(samples, samples["scores"], rl, rl.kl_coef)
        return [micro for _, micro in micro_batches(samples, config.train)]


@dataclass
class IslandLoss:
    """A policy loss that also reports what the rollouts were like, since the samples stay on the island."""

    policy: PolicyLoss
    max_response_tokens: int

    def __post_init__(self) -> None:
        self.needs_entropy = self.policy.needs_entropy
        self.metric_names = (*self.policy.metric_names, "critic/score/mean", "response_length/mean", "response_length/clip_ratio")

    def weight(self, batch: TrainingBatch) -> Tensor:
        return self.policy.weight(batch)

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: TrainingBatch) -> LossOutput:
        output = self.policy(logprobs, entropy, batch)
        lengths = batch["loss_mask"].sum(dim=1)
        count = float(len(batch))
        output.metrics["critic/score/mean"] = (batch["scores"].sum(), count)
        output.metrics["response_length/mean"] = (lengths.sum(), count)
        output.metrics["response_length/clip_ratio"] = ((lengths >= self.max_response_tokens).sum(), count)
        return output


def island_loss(max_response_tokens: int, **arguments: Any) -> LossFn:
    """``everstep.rl.losses.policy_loss`` with these arguments, with the metrics of rollouts."""
    policy = policy_loss(**arguments)
    assert isinstance(policy, PolicyLoss)
    return IslandLoss(policy, max_response_tokens)


def loss_spec(config: Config) -> LossSpec:
    """The loss of an island's inner steps."""
    policy = credit.policy_loss(config.rl, config.rollout, on_policy=True, kl_coef=config.rl.kl_coef)
    return LossSpec("everstep.rl.island:island_loss", policy.args | {"max_response_tokens": config.rollout.max_response_tokens})


ROLLOUT = LossSpec("everstep.rl.island:GrpoRollout")
