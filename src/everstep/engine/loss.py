"""What a loss is to the engine: a function of log-probabilities that returns sums, never means.

Legend: B samples, T token columns. The divisor (tokens, or sequences) is known only after all replicas have
contributed, so it is applied once, when the optimizer is: a loss returns its sum and its weight.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from everstep.errors import BadInput, WorkerFailed

if TYPE_CHECKING:
    from everstep.cluster.batch import TrainingBatch


@dataclass
class LossOutput:
    """One micro-batch's loss. ``loss_sum`` is a scalar with a gradient; ``weight`` what it is to be divided by.

    ``metrics``: name -> (sum, weight), two scalars whose ratio, over all replicas, is the reported number.
    """

    loss_sum: Tensor
    weight: Tensor | float
    metrics: dict[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


class LossFn(Protocol):
    """Called on the last pipeline stage, once per micro-batch, with logprobs and entropy of shape (B, T), float32.

    ``logprobs[b, t] = log p(input_ids[b, t] | input_ids[b, <t])``; column 0 is 0. ``entropy`` is that of the same
    distribution, or None unless ``needs_entropy``.

    With an auxiliary loss of experts (``moe.aux_loss_coef``) it also has ``weight(batch)``: the ``LossOutput.weight`` that it
    will return, from the batch alone; every pipeline stage calls it.
    """

    metric_names: tuple[str, ...]
    needs_entropy: bool

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: TrainingBatch) -> LossOutput: ...


@dataclass(frozen=True)
class LossSpec:
    """Names a loss so that it can be sent to another process: a factory ``module:function`` and its arguments."""

    function: str
    args: dict[str, Any] = field(default_factory=dict)

    def build(self) -> LossFn:
        """Import the factory and call it. BadInput if it cannot be imported."""
        module_name, colon, name = self.function.partition(":")
        if not colon:
            raise BadInput(f"loss {self.function!r} must be written as module:function")
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise BadInput(f"loss {self.function!r}: cannot import {module_name}: {error}") from error
        factory = getattr(module, name, None)
        if factory is None:
            raise BadInput(f"loss {self.function!r}: {module_name} has no {name}")
        return factory(**self.args)


def pack_sums(output: LossOutput, metric_names: tuple[str, ...], device: torch.device) -> Tensor:
    """The float64 vector ``[weight, loss_sum, metric sums..., metric weights...]`` of one micro-batch."""
    if set(output.metrics) != set(metric_names):
        raise WorkerFailed(
            f"the loss returned metrics {sorted(output.metrics)} but declares metric_names "
            f"{sorted(metric_names)}; return exactly the declared ones for every micro-batch"
        )
    values = [output.weight, output.loss_sum]
    values += [output.metrics[name][0] for name in metric_names]
    values += [output.metrics[name][1] for name in metric_names]
    return torch.stack([_scalar(value, device) for value in values])


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device=device, dtype=torch.float64).reshape(())
    return torch.full((), float(value), dtype=torch.float64, device=device)  # unlike a copy, it does not wait for the device


def unpack_sums(sums: Tensor, metric_names: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """name -> (sum, weight) from a vector made by ``pack_sums``, or any sum of such; the loss is called ``loss``."""
    numbers = sums.tolist()
    n = len(metric_names)
    if len(numbers) != 2 + 2 * n:
        raise WorkerFailed(f"{len(numbers)} sums for {n} metrics {metric_names}; expected {2 + 2 * n}")
    named = {name: (numbers[2 + i], numbers[2 + n + i]) for i, name in enumerate(metric_names)}
    return {"loss": (numbers[1], numbers[0]), **named}
