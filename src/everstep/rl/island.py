"""GRPO on an island: rollout, reward and advantages of an inner step, by one replica alone and with the weights that it has.

The ranks that collect (last pipeline stage, tensor- and context-parallel rank 0) generate and score for their data-parallel
coordinate; the others get what they made. Nothing here talks to another replica: a group of completions belongs to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.slots import micro_batches
from everstep.engine.loss import LossFn, LossOutput
from everstep.rl import advantages
from everstep.rl.losses import PolicyLoss, policy_loss
from everstep.rl.rewards import resolve, score
from everstep.rl.rollout import Sampling

if TYPE_CHECKING:
    from everstep.cluster.worker import Worker


def grpo_rollout() -> GrpoRollout:
    """Everything it needs is in the worker's configuration."""
    return GrpoRollout()


class GrpoRollout:
    """everstep.cluster.island.Rollout."""

    def __call__(self, worker: Worker, prompts: TrainingBatch) -> list[TrainingBatch]:
        config = worker.config
        samples = worker.generate(prompts, Sampling.for_training(config))
        if len(samples):
            reward = resolve(config.reward, config.data.source, config.data.source_args)
            scores = torch.tensor(score(reward, samples))
            estimates = advantages.estimate(config.rl.advantage, scores, samples.column("group"), config.rl.advantage_eps)
            samples = samples.with_tensors(scores=scores, advantages=advantages.spread(estimates, samples["loss_mask"]))
        samples = worker.from_collecting_rank(samples)
        if config.rl.kl_coef > 0:
            samples = worker.from_collecting_rank(worker.logprobs(samples, config.rollout.temperature, "reference"))
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


def island_loss(max_response_tokens: int, **arguments: object) -> LossFn:
    """``everstep.rl.losses.policy_loss`` with these arguments, on policy, with the metrics of rollouts."""
    policy = policy_loss(**arguments, on_policy=True)  # type: ignore[arg-type]
    assert isinstance(policy, PolicyLoss)
    return IslandLoss(policy, max_response_tokens)
