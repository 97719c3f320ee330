"""A replica as an island: what the worker does in semi-synchronous training (:mod:`everstep.recovery.semisync` has the algorithm).

Between two commits an island moves away from the others, by inner steps on slots of its own. What the replicas agree on, and what a
joiner receives, is therefore not what the engine holds at the moment but a copy of the last commit, in host memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.worker.rank_state import Versioned, clip
from everstep.config import semisync as settings
from everstep.engine.logical import LogicalState
from everstep.engine.loss import LossFn
from everstep.engine.state import hash_state
from everstep.engine.step import Engine
from everstep.recovery.ledger import Contribution, Ledger
from everstep.recovery.semisync import Outer, OuterSgd, RoundLedger
from everstep.recovery.transaction import Total

if TYPE_CHECKING:
    from everstep.cluster.group import Role
    from everstep.cluster.worker.worker import Slots, Worker
    from everstep.config.schema import Config
    from everstep.engine.shape import ModelShape


class Island(Versioned):
    """A rank's state at the last commit (everstep.recovery.heal.State), and the way back to it.

    It consists of the engine's state as it was (``param/``, ``master/``, ``exp_avg/``, ``exp_avg_sq/``: local, they differ between
    replicas) and the outer optimizer's (``global/``, ``momentum/``: equal on all). A reference model never changes and is the engine's.
    """

    island = True
    critic = None  # recipe=ppo is not for islands

    def __init__(self, engine: Engine, version: int | None, config: Config, shape: ModelShape):
        super().__init__(version)
        self.engine = engine
        weights, inside = engine.stepped(), engine.inside_stepped()
        owner = {module: i for i, group in enumerate(settings.fragments(config, shape)) for module in group}
        fragments: list[list[str]] = [[] for _ in set(owner.values())]
        for name in weights:
            fragments[owner[settings.module_of(inside[name][0])]].append(name)
        self.outer = Outer(OuterSgd.of(config.semisync), fragments, weights, _on_host)
        self._copy = {name: _on_host(tensor) for name, tensor in self._live().items()}
        self._adam_step = int(engine.state_scalars()["adam_step"])
        self.moved = False  # whether the engine is not where the copy is
        self.steps_made = 0  # inner steps since this process holds the state: a name for the engine's present weights

    def _live(self) -> dict[str, torch.Tensor]:
        return {name: t for name, t in self.engine.state(frozen=False).items() if not name.startswith("reference/")}

    # -- everstep.recovery.heal.State ------------------------------------------------------------------------------------------

    def of(self, role: Role) -> Engine:
        assert role == "actor", role
        return self.engine

    def tensors(self, frozen: bool = False) -> dict[str, torch.Tensor]:
        reference = {name: t for name, t in self.engine.state(frozen=False).items() if name.startswith("reference/")}
        return {
            **self._copy, **reference,
            **{f"global/{name}": t for name, t in self.outer.globals.items()},
            **{f"momentum/{name}": t for name, t in self.outer.momenta.items()},
        }  # fmt: skip

    def logical(self, replica: int) -> dict[str, Callable[[], LogicalState]]:
        """What a checkpoint holds of it: what all replicas share, and what this one has for itself."""
        shared = {name: t for name, t in self.tensors().items() if name.startswith(("global/", "momentum/", "reference/"))}
        agreed = self.engine.logical_state(shared, ["global", *["momentum"] * bool(self.outer.momenta)])
        own = self.engine.logical_state(self._copy)
        return {"model": agreed, f"island-{replica}": lambda: dataclasses.replace(own(), of_one_replica=True)}

    def scalars(self) -> dict[str, Any]:
        return self.engine.state_scalars() | {"adam_step": self._adam_step, "outer_steps": self.outer.synced}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """The tensors follow, or came before: then ``restore``."""
        self.engine.load_scalars({name: value for name, value in scalars.items() if name != "outer_steps"})
        self._adam_step, self.outer.synced = int(scalars["adam_step"]), int(scalars["outer_steps"])
        self.moved = True

    @property
    def weights_key(self) -> tuple[int | None, int]:
        return self.version, self.steps_made

    def hash(self) -> str:
        """Of what replicas agree on: the outer optimizer's state, and the weights where a synchronisation makes them equal."""
        agreed = {name: t for name, t in self.tensors().items() if name.startswith(("global/", "momentum/"))}
        if self.outer.replaces_weights:
            agreed |= {name: t for name, t in self._live().items() if name.startswith("param/")}
        return hash_state(agreed, {"outer_steps": self.outer.synced})

    def close(self) -> None:
        self.engine.close()

    # -- to and fro ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self) -> None:
        """Put the engine where the copy is. Local."""
        self.engine.backload_to_gpu()
        self.engine.load_scalars(self.engine.state_scalars() | {"adam_step": self._adam_step})
        for name, tensor in self._live().items():
            tensor.copy_(self._copy[name])
        self.moved = False
        self.steps_made += 1

    @torch.no_grad()
    def take(self) -> None:
        """The engine is where the next round begins."""
        self.engine.backload_to_gpu()
        for name, tensor in self._live().items():
            self._copy[name].copy_(tensor)
        self._adam_step = int(self.engine.state_scalars()["adam_step"])
        self.moved = False


class Rollout(Protocol):
    """Makes the samples of an inner step from prompts, on the island alone (see everstep.rl.island)."""

    def __call__(self, worker: Worker, prompts: TrainingBatch) -> list[TrainingBatch]:
        """Micro-batches to train on, equal on all ranks of a data-parallel coordinate. Collective over the replica."""


@dataclasses.dataclass(frozen=True)
class Round:
    """What all ranks are told of a round. ``bounds[i]``: the first slot of inner step i, and at the end the number of slots."""

    step: int
    bounds: tuple[int, ...]
    lrs: tuple[float, ...]
    temperature: float

    def inner_of(self, slot: int) -> int:
        return bisect.bisect_right(self.bounds, slot) - 1

    @property
    def inner_steps(self) -> int:
        return len(self.bounds) - 1


class RoundWork:
    """One round as the transaction sees it (everstep.recovery.transaction.Work).

    Its sums are those of the inner steps, and at the end 1 from each replica that made any.
    """

    rerun: Callable[[int], Contribution] | None = None  # replicas have weights of their own

    def __init__(self, worker: Worker, round: Round, slots: Slots, loss: LossFn, rollout: Rollout | None):
        self.step, self.slots = round.step, len(slots)
        self._worker, self._round, self._source, self._loss, self._rollout = worker, round, slots, loss, rollout
        self._delay = worker.config.semisync.fragment_sync_delay
        self._sums = worker.engine.no_sums(loss)
        self._begin()

    def _begin(self) -> None:
        self._counted = False   # whether the sums say that this replica takes part
        self._poisoned = False  # an inner step was not finite; the rest of the round is pointless
        self._taken: list[torch.Tensor] | None = None  # the pseudo-gradient, if it was taken before the end
        self._inner = -1        # the last one made
        self._salvaging = False

    @property
    def _island(self) -> Island:
        state = self._worker.state
        assert isinstance(state, Island)
        return state

    def ledger(self) -> Ledger:
        self._ledger = RoundLedger(self._round.inner_of, self._moved, self._worker.config.semisync.should_quantize, delayed=self._delay > 0)
        return self._ledger

    def restart(self) -> None:
        self._begin()
        if self._island.moved:
            self._island.restore()

    skip = restart

    def compute(self, slots: tuple[int, ...]) -> Contribution:
        """One inner step, on slots of it. Of no slots: nothing, and a part in nothing."""
        if not slots:
            return Contribution([], torch.cat([self._sums, torch.zeros(1, dtype=torch.float64)]))
        inner = self._round.inner_of(slots[0])
        if inner <= self._inner:
            self._salvaging, self._taken = True, None  # what is sent covers what was salvaged
        if not self._salvaging and self._inner <= self._last_before_sending < inner:
            self._taken = self._island.outer.pseudo_gradient(self._worker.engine.stepped())
            self._ledger.send_ahead([t.clone() for t in self._taken])  # while the inner steps that are left are made
            self._tell("sent_ahead", inner)
        self._inner = inner
        start = time.monotonic()
        sums = self._poison() if self._poisoned else self._inner_step(inner, slots)
        takes_part = torch.tensor([0.0 if self._counted else 1.0], dtype=torch.float64)
        self._counted = True
        self._tell("inner_step", inner, of=self._round.inner_steps, slots=list(slots), seconds=time.monotonic() - start)
        return Contribution([], torch.cat([sums, takes_part]))

    def _tell(self, event: str, inner: int, **fields: Any) -> None:
        place = self._worker.formation
        self._worker.events.emit(event, step=self.step, replica=place.replica, rank=place.rank, inner=inner, **fields)

    @property
    def _last_before_sending(self) -> int:
        return self._round.inner_steps - 1 - self._delay

    def _inner_step(self, inner: int, slots: tuple[int, ...]) -> torch.Tensor:
        worker, engine, round = self._worker, self._worker.engine, self._round
        dp = worker.position.dp
        self._island.moved = True
        batches = [self._source.fetch(slot, dp) for slot in slots]
        if self._rollout is not None:
            batches = self._rollout(worker, TrainingBatch.concat(batches))
            numbers = [slots[0] + (i + 1) * self.slots for i in range(len(batches))]  # not those of slots, which are prompts here
        else:
            numbers = list(slots)
        seeds = [worker.seed_of(self.step, number, dp) for number in numbers]
        sums = engine.accumulate(batches, self._loss, seeds, round.temperature).cpu()
        worker.victim.spoil(self.step, gradients := engine.gradients())
        weight = float(sums[0])
        norm = engine.squared_norm(gradients) ** 0.5 / weight if weight > 0 else 0.0
        if not torch.isfinite(sums).all() or not torch.isfinite(torch.tensor(norm)):
            self._poisoned = True
            return self._poison()
        if weight > 0:
            engine.apply(gradients, clip(engine, norm) / weight, round.lrs[inner])
            self._island.steps_made += 1
        return sums

    def _poison(self) -> torch.Tensor:
        """Sums that make the total not finite: the coordinator has the round done once more, then skips it."""
        return torch.full_like(self._sums, torch.nan)

    def _moved(self) -> list[torch.Tensor]:
        island = self._island
        if self._taken is not None:
            return [t.clone() for t in self._taken]
        weights = self._worker.engine.stepped()
        if not self._counted:
            return [torch.zeros_like(weights[name]) for name in island.outer.fragment]
        return island.outer.pseudo_gradient(weights)

    def norm(self, gradients: list[torch.Tensor], sums: torch.Tensor) -> float:
        """Of the mean pseudo-gradient."""
        return self._worker.engine.squared_norm(gradients, self._island.outer.fragment) ** 0.5 / float(sums[-1])

    def apply(self, total: Total) -> None:
        island, engine, members = self._island, self._worker.engine, float(total.sums[-1])
        with torch.no_grad():
            mean = [gradient / members for gradient in total.gradients]
            island.outer.step(mean, engine.stepped())
        engine.gather_parameters()
        island.take()
        island.steps_made += 1


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, page-locked if it comes from a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor.detach())


def without_participants(sums: Sequence[float]) -> list[float]:
    """Sums of a committed round -> those of its inner steps, as ``Engine.accumulate`` returns them."""
    return list(sums[:-1])


