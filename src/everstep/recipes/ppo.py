"""PPO with a critic (arXiv 1707.06347, 1506.02438): a second model learns what to expect, and the policy is pushed towards what went
better than that.

    rollout -> reward -> old log-probs, [reference log-probs], values -> advantages (GAE) -> update_actor, update_critic

The loop is GRPO's; the pipeline has the critic's stages besides. In the first ``critic.warmup`` iterations the critic alone is trained.
Actor and critic live in the same ranks and are one state under one version: a rank that joins heals both, a checkpoint holds both, and
the optimizer steps of either are transactions of one sequence, so a death between the two updates is a death like any other.
"""

from __future__ import annotations

from everstep.recipes import grpo
from everstep.recipes.run import Run


def train(run: Run) -> None:
    grpo.train(run)
