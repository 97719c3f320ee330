"""Semi-synchronous training over replicas: Local SGD (arXiv 1805.09767), DiLoCo (2311.08105), Streaming DiLoCo (2501.18512).

A *round* is one step transaction (:mod:`everstep.recovery.transaction`). In its COMPUTE each replica makes inner steps by itself, on
the slots it was dealt; what goes over the link is, once a round, how far one fragment of its weights moved. With theta_r the local
weights of replica r, G the global ones, and f the fragment whose turn it is:

    D_r  = G_f - theta_f        the pseudo-gradient, taken ``delay`` inner steps before the end of the round
    D    = mean of D_r          over the replicas that made inner steps in this round
    G_f <- G_f - lr * v         where v is the outer SGD's update for gradient D (torch.optim.SGD: momentum, Nesterov)
    theta_f <- G_f + alpha * (theta_f - G_f)

Local SGD, which averages weights, is lr 1 without momentum. The round commits or does not, like any step: until then every rank keeps
the state of its beginning (:class:`everstep.cluster.worker.island.Island`), so an attempt that is void, or a round that is skipped, costs
inner steps and nothing else.

Why this is not ``torchft.local_sgd``: its classes are hooks on a torch optimizer that reduce through torchft's Manager, each
parameter of one ``nn.Module`` in turn. Here weights are shards of Megatron's optimizer in several model chunks, membership and
commits come from our own log, and a vote needs the total before anything is changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from everstep.config.schema import SemiSyncConfig
from everstep.errors import DeadlineExceeded, LinkBroken
from everstep.recovery.ledger import Contribution, Inventory, SumLedger
from everstep.recovery.link import Link
from everstep.recovery.quantized import sum_quantized
from everstep.recovery.view import View


@dataclass(frozen=True)
class OuterSgd:
    """The outer optimizer, and how its result is mixed with the local weights (``alpha``)."""

    lr: float
    momentum: float
    nesterov: bool
    alpha: float

    @staticmethod
    def of(config: SemiSyncConfig) -> OuterSgd:
        if config.method == "local_sgd":
            return OuterSgd(lr=1.0, momentum=0.0, nesterov=False, alpha=0.0)
        return OuterSgd(config.outer_lr, config.outer_momentum, config.outer_nesterov, config.fragment_update_alpha)


class Outer:
    """Global weights and outer momentum of one rank's part of the model; equal on all replicas.

    Args:
        optimizer: the outer SGD.
        fragments: names of the weights of each fragment, in the order in which they are synchronised. On a pipeline stage one may be
            empty.
        weights: float32 tensors by name, as they are at the start.
        home: a tensor like the given one, of the same values, where the global weights shall live.
    """

    def __init__(
        self, optimizer: OuterSgd, fragments: Sequence[Sequence[str]], weights: Mapping[str, torch.Tensor],
        home: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ):
        named = [name for fragment in fragments for name in fragment]
        if sorted(named) != sorted(weights):
            raise ValueError(f"each of {len(weights)} weights must be in exactly one fragment, {len(named)} are named")
        self._optimizer, self._fragments = optimizer, tuple(map(tuple, fragments))
        self.globals = {name: home(tensor.detach()) for name, tensor in weights.items()}
        self.momenta = {name: torch.zeros_like(tensor) for name, tensor in self.globals.items()} if optimizer.momentum else {}
        self.synced = 0  # committed synchronisations so far, skipped rounds not counted: whose turn it is

    @property
    def fragment(self) -> tuple[str, ...]:
        """Weights whose turn it is."""
        return self._fragments[self.synced % len(self._fragments)]

    @property
    def replaces_weights(self) -> bool:
        """Whether replicas hold equal weights after every synchronisation: the whole model at once, nothing mixed in."""
        return len(self._fragments) == 1 and self._optimizer.alpha == 0

    @torch.no_grad()
    def pseudo_gradient(self, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """G - theta of the fragment whose turn it is, in new memory beside ``weights``."""
        return [self.globals[name].to(weights[name].device, non_blocking=True) - weights[name] for name in self.fragment]

    @torch.no_grad()
    def step(self, mean: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
        """Apply the mean pseudo-gradient of the fragment whose turn it is to the global and the local weights."""
        o = self._optimizer
        for name, gradient in zip(self.fragment, mean, strict=True):
            local, kept = weights[name], self.globals[name]
            new = kept.to(local.device, copy=True)
            update = gradient
            if o.momentum:
                momentum = self.momenta[name].to(local.device, copy=True).mul_(o.momentum).add_(gradient)
                self.momenta[name].copy_(momentum)
                update = gradient.add(momentum, alpha=o.momentum) if o.nesterov else momentum
            new.add_(update, alpha=-o.lr)
            kept.copy_(new)
            local.copy_(torch.lerp(new, local, o.alpha) if o.alpha else new)
        self.synced += 1


class Ahead:
    """A sum that is under way while inner steps go on: on a link of its own, so that nothing else waits behind it, in a thread.

    Of use only if every member of the view sent, and all got the total (:meth:`agreed`); otherwise it is given up, and the sum is made
    at the end of the round, as without a delay.
    """

    def __init__(self, of: str, connect: Callable[[], Link], add: Callable[[Link], list[torch.Tensor]]):
        """``of``: name of the view's link; ``connect``: forms the link, ``add``: sums over it. Both raise LinkBroken."""
        self.of = of
        self._connect, self._add = connect, add
        self._total: list[torch.Tensor] | None = None
        self._thread = threading.Thread(target=self._run, name=f"ahead-{of}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        link: Link | None = None
        try:
            link = self._connect()
            self._total = self._add(link)
        except (LinkBroken, DeadlineExceeded):  # no total: the end of the round makes one
            if link is not None:
                link.drop()

    @staticmethod
    def agreed(ahead: Ahead | None, link: Link, stop: Callable[[], bool], timeout_s: float) -> list[torch.Tensor] | None:
        """The total, if every member of ``link`` has it. All members call this at the same place. Raises LinkBroken."""
        sent = ahead is not None and ahead.of == link.name
        if not all(float(row) for row in link.gather(torch.tensor([float(sent)]), stop, timeout_s)):
            return None
        assert ahead is not None
        end = time.monotonic() + timeout_s
        while ahead._thread.is_alive() and not stop() and time.monotonic() < end:
            ahead._thread.join(0.001)
        got = ahead._total is not None and not ahead._thread.is_alive()
        if not all(float(row) for row in link.gather(torch.tensor([float(got)]), stop, timeout_s)):
            return None
        return ahead._total


class RoundLedger(SumLedger):
    """What a replica holds of a round in progress: the slots it made inner steps on. Gradients are not kept; what the weights moved
    is asked for when it is to be sent, so that it covers every inner step, salvaged ones included.

    ``inner_of``: slot -> its inner step; slots of one are computed together, inner steps one after the other.
    """

    def __init__(self, inner_of: Callable[[int], int], moved: Callable[[], list[torch.Tensor]], quantize: bool, delayed: bool):
        super().__init__()
        self._inner_of, self._moved, self._quantize, self._delayed = inner_of, moved, quantize, delayed
        self._begin_ahead: Callable[[list[torch.Tensor]], Ahead] | None = None
        self._ahead: Ahead | None = None

    def look_closely(self) -> None:
        """Nothing can be computed slot by slot: the inner steps of a round follow each other."""

    def may_send(self, view: View, beside: Callable[[], Link], stop: Callable[[], bool], timeout_s: float) -> None:
        self._ahead = None
        alone = len(view.members) == 1
        self._begin_ahead = None if alone else (
            lambda moved: Ahead(view.link_id, beside, lambda link: self._add(link, moved, stop, timeout_s))
        )

    def send_ahead(self, moved: list[torch.Tensor]) -> None:
        """Begin to sum what the weights moved until now. ``moved`` is given up."""
        if self._begin_ahead is not None:
            self._ahead = self._begin_ahead(moved)

    def total(
        self, link: Link, inventory: Inventory, stop: Callable[[], bool], timeout_s: float, issued: Callable[[], None], in_place: bool = False
    ) -> list[torch.Tensor]:
        if self._delayed and len(link.replicas) > 1:
            issued()
            total = Ahead.agreed(self._ahead, link, stop, timeout_s)
            if total is not None:
                return total
        return self._add(link, self._moved(), stop, timeout_s, issued)

    def _add(
        self, link: Link, moved: list[torch.Tensor], stop: Callable[[], bool], timeout_s: float, issued: Callable[[], None] = lambda: None
    ) -> list[torch.Tensor]:
        if self._quantize:
            return sum_quantized(link, moved, stop, timeout_s, issued)
        return link.sum(moved, stop, timeout_s, issued, in_place=True)  # made for this call

    def _portions(self, slots: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        steps: dict[int, list[int]] = {}
        for slot in sorted(slots):
            steps.setdefault(self._inner_of(slot), []).append(slot)
        return [tuple(portion) for portion in steps.values()] or [()]

    def _secure(self) -> None:
        pass  # nothing that a computation overwrites is held

    def _take(self, slots: tuple[int, ...], contribution: Contribution) -> None:
        self._sums = self._sums + contribution.sums if self.held else contribution.sums.to(torch.float64)
