"""A rank's state as heal, checkpoints and the next formation see it, where all replicas hold the same; see also everstep.cluster.island."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from everstep.config.schema import OffloadConfig
from everstep.engine.step import Engine
from everstep.layout import Position


class WholeState:
    """The engine's state with its version, as heal and the transaction see it (everstep.recovery.heal.State)."""

    island = False

    def __init__(self, engine: Engine, version: int | None):
        self.engine, self.version = engine, version

    def tensors(self) -> dict[str, torch.Tensor]:
        """Without what LoRA never trains: every rank has that from model.path, and the scalars tell whether it is the same."""
        return self.engine.state(frozen=False)

    def scalars(self) -> dict[str, Any]:
        return self.engine.state_scalars()

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        self.engine.load_scalars(scalars)

    @property
    def weights_key(self) -> tuple[int | None, int]:
        """Differs whenever the weights do; the same on all ranks of the replica."""
        return self.version, 0

    def hash(self) -> str:
        return self.engine.state_hash()

    def restore(self) -> None:
        """What was written into ``tensors`` is in the engine already."""

    def global_weights(self) -> contextlib.AbstractContextManager[None]:
        """The engine has no others."""
        return contextlib.nullcontext()


@dataclass(frozen=True)
class Kept:
    """The state of a rank that lives on after its replica broke; the engine it came from is closed."""

    position: Position
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, Any]
    version: int

    def move_to_host(self, offload: OffloadConfig) -> None:
        """What may be offloaded goes, so that the engine that is built next need not find room beside it."""
        kinds = (("param/",) if offload.parameters else ()) + (("master/", "exp_avg/", "exp_avg_sq/") if offload.optimizer else ())
        for name, tensor in self.tensors.items():
            if name.startswith(kinds) and tensor.is_cuda:
                self.tensors[name] = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
