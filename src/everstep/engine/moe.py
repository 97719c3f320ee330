"""Mixture-of-experts layers (Qwen3-MoE, Mixtral): router, experts, and what a step learns about how tokens were routed.

The layer stands in the place of the MLP in Megatron's layer spec. Megatron's own router scales its auxiliary loss by the number
of tokens and keeps it in process-wide state, and its dispatcher needs a CUDA device (see ``everstep.engine.experts``).

Legend: S tokens of this rank's part of the sequence, B samples, N = S B, H hidden size, E experts of the layer, k experts per
token, L layers with experts, T real tokens of the micro-batch, w its weight in the loss.

Routing, as transformers does it: p = softmax over all E logits in float32, the k largest are chosen, and divided by their sum
if the model says so (``norm_topk_prob``; Mixtral always). Logits are computed in float32 whatever the model's type. No token is
dropped, and no token's route depends on another token.

The auxiliary loss (Switch Transformer, arXiv 2101.03961) of one micro-batch, added to its loss sum:

    w coef 1/L sum over layers of E sum_e f_e P_e        f_e = (real tokens sent to e) / T, P_e = mean over real tokens of p_e

For L = 1 and w = 1 it is transformers'; for more layers transformers multiplies means over all layers instead, which needs all
layers in one place. It never looks beyond a micro-batch, so it is independent of how micro-batches are shared out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from everstep.engine.experts import Experts, Travel
from everstep.engine.loss import LossFn
from everstep.errors import BadInput
from everstep.layout import Layout

if TYPE_CHECKING:
    from everstep.cluster.batch import TrainingBatch


class Router(nn.Module):
    """Chooses k experts for every token. ``counts`` (E,) float64: real tokens sent to each expert by this rank since
    ``forget``; ``aux_sum`` float64: this rank's part of the auxiliary losses of those tokens, coefficient and 1/L included.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        experts = config.num_moe_experts
        assert experts is not None and isinstance(config.moe_aux_loss_coeff, float)
        self.experts, self.chosen = experts, config.moe_router_topk
        self.renormalized = not config.moe_router_pre_softmax
        self.coefficient = config.moe_aux_loss_coeff  # coef / L
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size, dtype=config.params_dtype, device=device))
        # Read by finalize_model_grads: each tensor-parallel rank routes its own tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.forget()

    def forget(self) -> None:
        self.counts = torch.zeros(self.experts, dtype=torch.float64, device=self.weight.device)
        self.aux_sum = torch.zeros((), dtype=torch.float64, device=self.weight.device)

    def forward(self, hidden: Tensor, shares: Tensor | None) -> tuple[Tensor, Tensor]:
        """(S, B, H), and the ``token_shares`` of its tokens (S, B) -> which experts take each token (N, k), and how much each
        counts (N, k) float32."""
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), self.weight.float())
        p = logits.softmax(dim=-1)  # (N, E)
        weights, chosen = p.topk(self.chosen, dim=-1)
        if self.renormalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # A recomputed layer runs twice, the first time without gradients: it counts once.
        if shares is not None and self.training and torch.is_grad_enabled():
            weights = self._balance(weights, p, chosen, shares.reshape(-1))
        return chosen, weights

    def _balance(self, weights: Tensor, p: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Count, and hang the auxiliary loss on ``weights``."""
        counts = (F.one_hot(chosen, self.experts).sum(1) * (shares != 0)[:, None]).sum(0)  # (E,)
        self.counts += counts
        if not self.coefficient:
            return weights
        group = mpu.get_tensor_and_context_parallel_group()  # the ranks that share this micro-batch
        if group.size() > 1:
            dist.all_reduce(counts, group=group)
        tokens = (counts.sum() / self.chosen).clamp(min=1.0)
        mass = shares.clamp(min=0.0) @ p  # (E,): w P_e, of this rank's tokens
        loss = self.coefficient * self.experts * (counts / tokens * mass).sum()
        self.aux_sum += loss.detach()
        return _Added.apply(weights, loss)


class _Added(torch.autograd.Function):
    """Passes ``carrier`` on; ``loss`` is added to the sum that backward starts from, wherever that is computed."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)


class ExpertLayer(nn.Module):
    """Router and experts, called by TransformerLayer as it calls an MLP."""

    def __init__(self, config: TransformerConfig, **unused: Any) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.travel = Travel(config)

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        """(S, B, H) -> (S, B, H), and no bias to be added. ``padding_mask``: the ``token_shares`` of the micro-batch, (B, S), or
        under sequence parallelism of all tensor-parallel ranks, (B, tp S): Megatron cuts it in the first stage only."""
        chosen, weights = self.router(hidden, _own_rows(padding_mask, len(hidden)))
        results = self.travel.through(self.experts, hidden.reshape(-1, hidden.shape[-1]), chosen)
        return (results * weights[..., None]).sum(1).to(hidden.dtype).view_as(hidden), None


def _own_rows(shares: Tensor | None, rows: int) -> Tensor | None:
    if shares is None:
        return None
    shares = shares.t()
    if len(shares) != rows:
        shares = shares.chunk(len(shares) // rows)[mpu.get_tensor_model_parallel_rank()]
    return shares


def token_shares(real: Tensor, weight: Tensor | float) -> Tensor:
    """``real`` (B, T): 1 for tokens, 0 for padding -> float32 (B, T): each token's share w / T of its micro-batch's weight, -1
    where that is nothing (the token still counts as routed), 0 for padding."""
    real = real.float()
    share = torch.as_tensor(weight, dtype=torch.float32, device=real.device) / real.sum().clamp(min=1.0)
    return torch.where(share > 0, share, -1.0) * real


def weight_of(loss: LossFn, aux_loss_coef: float) -> Callable[[TrainingBatch], Tensor | float] | None:
    """The loss's ``weight``, with which every pipeline stage weighs its auxiliary losses; None if there are none. BadInput."""
    if not aux_loss_coef:
        return None
    weight = getattr(loss, "weight", None)
    if weight is None:
        raise BadInput(
            f"the auxiliary loss of experts is weighed like the loss {type(loss).__name__}, which has no method weight(batch); "
            "add one, or set moe.aux_loss_coef=0"
        )
    return weight  # type: ignore[no-any-return]


# ------------------------------------------------------------------ side state of a step


class SideState:
    """What a contribution carries beside gradients (docs/protocol.md, rule 13): one float64 vector of raw sums,

        [w coef aux summed over micro-batches, real tokens sent to expert 0 of the first layer with experts, to expert 1, ...]

    It is summed like weights and losses, over ranks, slots and replicas, and read once the step is committed.
    ``sparse``: for every layer of the model whether it has experts.
    """

    def __init__(self, chunks: Sequence[nn.Module], sparse: Sequence[bool], experts: int, layout: Layout) -> None:
        stage = layout.stages(len(sparse))[mpu.get_pipeline_model_parallel_rank()]
        numbers = [sum(sparse[:layer]) for layers in stage for layer in layers if sparse[layer]]
        routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
        self._routers = dict(zip(numbers, routers, strict=True))  # by number among the layers with experts
        self.width = 1 + sum(sparse) * experts

    def forget(self) -> None:
        """Before a contribution is computed."""
        for router in self._routers.values():
            router.forget()

    def sums(self, device: torch.device) -> Tensor:
        """This rank's part, (width,)."""
        sums = torch.zeros(self.width, dtype=torch.float64, device=device)
        for number, router in self._routers.items():
            sums[0] += router.aux_sum
            sums[1 + number * router.experts : 1 + (number + 1) * router.experts] = router.counts
        return sums


def routing_metrics(sums: Sequence[float], experts: int, coefficient: float, weight: float) -> dict[str, float]:
    """Metrics of a committed step from its ``SideState`` sums and total weight.

    ``moe/aux_loss``: mean auxiliary loss without its coefficient (k if all experts get as much), only with a coefficient.
    ``moe/max_load``: tokens of the busiest expert over those of an average one, mean over layers (1: balanced).
    ``moe/idle_experts``: part of all experts that got no token.
    """
    counts = torch.tensor(sums[1:], dtype=torch.float64).view(-1, experts)
    averages = counts.mean(dim=1)
    found = {
        "moe/max_load": float((counts.amax(dim=1) / averages.clamp(min=1e-9)).mean()),
        "moe/idle_experts": float((counts == 0).double().mean()),
    }
    return found | ({"moe/aux_loss": sums[0] / coefficient / weight} if coefficient and weight else {})
