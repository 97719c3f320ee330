"""A rank's state as heal, checkpoints and the next formation see it, where all replicas hold the same; see also everstep.cluster.island."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from everstep.config.schema import OffloadConfig
from everstep.engine.logical import LogicalState
from everstep.engine.step import Engine
from everstep.layout import Position


class Versioned:
    """``version``: the last applied step, or None while the state is being changed. ``before_change`` is called before it becomes
    None: whoever still reads the state in the background is waited for."""

    def __init__(self, version: int | None):
        self._version = version
        self.before_change: Callable[[], None] = lambda: None

    @property
    def version(self) -> int | None:
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        if version is None:
            self.before_change()
        self._version = version


class WholeState(Versioned):
    """The engine's state with its version, as heal and the transaction see it (everstep.recovery.heal.State)."""

    island = False

    def __init__(self, engine: Engine, version: int | None):
        super().__init__(version)
        self.engine = engine

    def tensors(self) -> dict[str, torch.Tensor]:
        """Without what LoRA never trains: every rank has that from model.path, and the scalars tell whether it is the same."""
        return self.engine.state(frozen=False)

    def logical(self, replica: int) -> dict[str, LogicalState]:
        """What a checkpoint holds of it, by part."""
        return {"model": self.engine.logical_state()}

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
