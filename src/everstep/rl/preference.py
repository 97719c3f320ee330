r"""Direct preference optimisation (DPO, arXiv 2305.18290): the loss of pairs of completions.

With d the log-probability of a completion under the policy less that under the reference model, summed over its tokens, and
the margin m = beta (d_chosen - d_rejected):

    sigmoid   L = -(1 - s) log sigmoid(m) - s log sigmoid(-m)
    hinge     L = max(0, 1 - m)                   RSO, arXiv 2309.06657
    ipo       L = (m / beta - 1 / (2 beta))^2     IPO, arXiv 2310.12036, equation 17: the margin has a target, and is not pushed on

s is ``label_smoothing``: the probability that a label is wrong (conservative DPO, E. Mitchell 2023). The weight of a pair is 1,
so that the loss of a step is the mean over its pairs however they are cut into micro-batches. Of ipo TRL takes the mean over a
completion's tokens in the place of the paper's sum, which is what is taken here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from everstep.cluster.batch import TrainingBatch
from everstep.engine.loss import LossFn, LossOutput
from everstep.errors import ConfigError, WorkerFailed

PairLoss = Literal["sigmoid", "hinge", "ipo"]


@dataclass(frozen=True)
class DpoTerms:
    """Of P pairs, each (P,). ``chosen`` and ``rejected`` are the implicit rewards beta d, without gradient."""

    loss: Tensor
    chosen: Tensor
    rejected: Tensor


def dpo_terms(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float, label_smoothing: float = 0.0, kind: PairLoss = "sigmoid"
) -> DpoTerms:
    """Rows 2 i and 2 i + 1 of (2 P, T) tensors are the chosen and the rejected completion of pair i."""
    d = torch.where(mask > 0, logprobs - ref_logprobs, 0.0).sum(dim=1)
    chosen, rejected = beta * d[0::2], beta * d[1::2]
    margin = chosen - rejected
    if kind == "sigmoid":
        loss = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    elif kind == "hinge":
        loss = torch.relu(1 - margin)
    else:
        loss = ((margin - 0.5) / beta).square()
    return DpoTerms(loss, chosen.detach(), rejected.detach())


@dataclass
class DpoLoss:
    """See ``dpo_loss``."""

    beta: float
    label_smoothing: float
    kind: PairLoss
    needs_entropy: bool = False
    metric_names: tuple[str, ...] = ("dpo/loss", "dpo/reward_chosen", "dpo/reward_rejected", "dpo/reward_margin", "dpo/accuracy")

    def weight(self, batch: TrainingBatch) -> Tensor:
        return batch["chosen"].sum()

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: TrainingBatch) -> LossOutput:
        chosen = batch["chosen"]
        if len(chosen) % 2 or not torch.equal(chosen.cpu(), torch.tensor([1.0, 0.0]).repeat(len(chosen) // 2)):
            raise WorkerFailed(
                f"the loss of pairs was given a micro-batch in which they are not side by side: {batch.sample_ids[:4]}; the size of "
                "micro-batches must be even"
            )
        terms = dpo_terms(logprobs, batch["ref_logprobs"], batch["loss_mask"], self.beta, self.label_smoothing, self.kind)
        pairs = self.weight(batch)
        margin = terms.chosen - terms.rejected
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            "dpo/loss": (terms.loss.sum().detach(), pairs),
            "dpo/reward_chosen": (terms.chosen.sum(), pairs),
            "dpo/reward_rejected": (terms.rejected.sum(), pairs),
            "dpo/reward_margin": (margin.sum(), pairs),
            "dpo/accuracy": ((margin > 0).to(margin.dtype).sum(), pairs),
        }
        return LossOutput(terms.loss.sum(), pairs, metrics)


def dpo_loss(beta: float = 0.1, label_smoothing: float = 0.0, kind: PairLoss = "sigmoid") -> LossFn:
    """The batch must hold ``ref_logprobs`` and ``loss_mask`` (B, T) and ``chosen`` (B,): 1, 0, 1, 0, ... ConfigError for values that
    make no loss."""
    if beta <= 0:
        raise ConfigError(f"dpo.beta={beta} must be greater than 0")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"dpo.label_smoothing={label_smoothing} must lie in 0..0.5 (0.5: labels say nothing)")
    if kind not in get_args(PairLoss):
        raise ConfigError(f"dpo.loss={kind!r} is unknown; choose one of {', '.join(get_args(PairLoss))}")
    if label_smoothing and kind != "sigmoid":
        raise ConfigError(f"dpo.label_smoothing={label_smoothing} belongs to dpo.loss=sigmoid (it is {kind}); set it to 0")
    return DpoLoss(beta, label_smoothing, kind)
