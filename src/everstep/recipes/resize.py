"""What a step is while fewer replicas take part than the run has (``recovery.on_resize``): the same batch for all of them (the default), or
as much for each as always, with a learning rate for the smaller batch.

A pure function of the number of replicas to which the commit record of the step before dealt this one (before the first step: the first
view). Whatever dies within a step changes nothing about that step: survivors compute all of it; the next one is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from everstep.config.schema import Config
from everstep.data.functions import load_function

#: (learning rate of the whole batch, replicas that are dealt the step, replicas of the run) -> learning rate.
Scale = Callable[[float, int, int], float]
SCALES: dict[str, Scale] = {
    "scale_lr_linear": lambda lr, dealt, replicas: lr * dealt / replicas,  # arXiv 1706.02677
    "scale_lr_sqrt": lambda lr, dealt, replicas: lr * math.sqrt(dealt / replicas),  # arXiv 1404.5997
}


@dataclass(frozen=True)
class StepSize:
    samples: int
    lr: float


def step_size(config: Config, samples_per_step: int, lr: float, dealt: int) -> StepSize:
    """Samples and learning rate of a step that is dealt to ``dealt`` of ``layout.replicas`` replicas.

    ``samples_per_step``, ``lr``: with all of them there. Each replica's part, samples_per_step / replicas, stays as it is unless
    recovery.on_resize=keep_batch. (That replicas divide samples_per_step is checked before the run starts.)
    """
    how, replicas = config.recovery.on_resize, config.layout.replicas
    if how == "keep_batch":
        return StepSize(samples_per_step, lr)
    scale = SCALES[how] if how in SCALES else load_function(how, "recovery.on_resize")
    return StepSize(samples_per_step // replicas * dealt, lr if dealt == replicas else float(scale(lr, dealt, replicas)))
