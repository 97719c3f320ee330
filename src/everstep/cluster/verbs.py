"""The verbs of a group, down to where launchers differ: what a recipe hands over is cut into slots, what ranks shall call is put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.dispatch import mesh_of
from everstep.cluster.group import Role, StepResult
from everstep.cluster.slots import cut_round, cut_slots, require_synchronous
from everstep.cluster.worker.island import Round
from everstep.config.schema import Config
from everstep.engine.loss import LossSpec
from everstep.layout import Layout
from everstep.rl.rollout import Response, Sampling

Slots = list[tuple[TrainingBatch, ...]]
#: Of a worker's method, from the number of the step and the slots in the form in which ranks are given them.
Arguments = Callable[[int, Any], tuple[Any, ...]]


class Verbs:
    """Of :class:`everstep.cluster.group.Group`, which says what each does. A launcher brings ``call`` and ``_transact``."""

    config: Config
    layout: Layout

    def call(self, dispatch: str, method: str, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _transact(
        self, slots: Slots, loss: LossSpec, lr: float, method: str, arguments: Arguments, state: dict[str, Any] | None,
        about: Mapping[str, Any],
    ) -> StepResult:
        """One transaction over ``slots``, in which each rank runs ``method`` of the worker."""
        raise NotImplementedError

    def rollout(self, prompts: TrainingBatch, sampling: Sampling) -> TrainingBatch:
        completed: TrainingBatch = self.call(mesh_of(self.config.recovery, sampling.samples_per_batch), "generate", prompts, sampling)
        return completed

    def rollout_ahead(self, prompts: TrainingBatch, sampling: Sampling, made: Mapping[str, Response] | None = None) -> None:
        """The ranks generate when they are asked for the samples."""

    def rollout_so_far(self, prompts: TrainingBatch) -> dict[str, Response]:
        return {}

    def train_step(
        self, batch: TrainingBatch, loss: LossSpec, lr: float, temperature: float = 1.0, role: Role = "actor",
        about: Mapping[str, Any] | None = None, state: dict[str, Any] | None = None,
    ) -> StepResult:
        require_synchronous(self.config)
        slots = cut_slots(batch, self.config.train, self.layout.dp)
        return self._transact(
            slots, loss, lr, "train_step", lambda step, held: (step, held, loss, lr, temperature, role), state, {"lr": lr} | dict(about or {})
        )

    def train_round(
        self, batches: Sequence[TrainingBatch], loss: LossSpec, lrs: Sequence[float], temperature: float = 1.0, rollout: LossSpec | None = None,
        state: dict[str, Any] | None = None,
    ) -> StepResult:
        slots, bounds = cut_round(batches, self.config, rollout is not None)
        return self._transact(
            slots, loss, lrs[-1], "train_round", lambda step, held: (Round(step, bounds, tuple(lrs), temperature), held, loss, rollout), state,
            {"lr": lrs[-1]},
        )
