"""An optimizer step as the transaction sees it: slots are fetched, computed and applied by a rank's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.worker.rank_state import clip
from everstep.engine.loss import LossFn
from everstep.engine.step import Engine
from everstep.recovery.ledger import Contribution, Ledger, SlotLedger, SumLedger
from everstep.recovery.transaction import Total

if TYPE_CHECKING:
    from everstep.cluster.worker.worker import Worker


class Slots(Protocol):
    """The micro-batches of a step, fetched one by one by whoever needs them."""

    def __len__(self) -> int: ...
    def fetch(self, slot: int, dp: int) -> TrainingBatch: ...


class StepWork:
    """One optimizer step as the transaction sees it (everstep.recovery.transaction.Work)."""

    def __init__(self, worker: Worker, step: int, slots: Slots, loss: LossFn, lr: float, temperature: float, engine: Engine):
        self.step, self.slots = step, len(slots)
        self._worker, self._source, self._loss, self._lr, self._temperature = worker, slots, loss, lr, temperature
        self._engine = engine
        every = worker.config.watch.rerun_every
        self.rerun: Callable[[int], Contribution] | None = self._gradient if every and step % every == 0 else None

    def ledger(self) -> Ledger:
        return SlotLedger() if self._worker.config.recovery.exact else SumLedger()

    def restart(self) -> None:
        """Nothing changes before a commit."""

    skip = restart

    def compute(self, slots: tuple[int, ...]) -> Contribution:
        contribution = self._gradient(*slots)
        self._worker.victim.spoil(self.step, contribution.gradients)
        return contribution

    def _gradient(self, *slots: int) -> Contribution:
        engine, dp = self._engine, self._worker.position.dp
        batches = [self._source.fetch(slot, dp) for slot in slots]
        seeds = [self._worker.seed_of(self.step, slot, dp) for slot in slots]
        sums = engine.accumulate(batches, self._loss, seeds, self._temperature)
        return Contribution(engine.gradients(), sums.cpu())

    def norm(self, gradients: list[torch.Tensor], sums: torch.Tensor) -> float:
        return self._engine.squared_norm(gradients) ** 0.5 / float(sums[0])

    def apply(self, total: Total) -> None:
        gradients = [g.to(self._worker.device) for g in total.gradients]
        self._engine.apply(gradients, clip(self._engine, total.grad_norm) / total.divisor, self._lr)
