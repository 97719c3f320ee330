"""A rank's state as heal, checkpoints and the next formation see it, where all replicas hold the same; see also everstep.cluster.worker.island."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from everstep.cluster.group import Role
from everstep.config.schema import OffloadConfig
from everstep.engine.logical import LogicalState
from everstep.engine.step import Engine
from everstep.errors import BadInput, WorkerFailed
from everstep.layout import Position

CRITIC_PREFIX = "critic/"


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
    """The state of a rank's models with its version, as heal and the transaction see it (everstep.recovery.heal.State).

    The actor, and with recipe=ppo its critic, are one state under one version: they are healed, saved and hashed together. The
    critic's names begin with ``critic/``.
    """

    island = False

    def __init__(self, engine: Engine, critic: Engine | None, version: int | None):
        super().__init__(version)
        self.engine, self.critic = engine, critic

    def of(self, role: Role) -> Engine:
        if role == "actor":
            return self.engine
        if self.critic is None:
            raise WorkerFailed(f"there is no {role}: recipe=ppo makes one")
        return self.critic

    def tensors(self, frozen: bool = False) -> dict[str, torch.Tensor]:
        """Without what LoRA never trains: every rank has that from model.path, and the scalars tell whether it is the same."""
        critic = self.critic.state(frozen) if self.critic else {}
        return self.engine.state(frozen) | {CRITIC_PREFIX + name: tensor for name, tensor in critic.items()}

    def logical(self, replica: int) -> dict[str, Callable[[], LogicalState]]:
        """What a checkpoint holds of it, by part; to be called by whoever needs it, in the background for example."""
        return {"model": self.engine.logical_state()} | ({"critic": self.critic.logical_state()} if self.critic else {})

    def scalars(self) -> dict[str, Any]:
        return self.engine.state_scalars() | ({"critic": self.critic.state_scalars()} if self.critic else {})

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        if ("critic" in scalars) != (self.critic is not None):
            raise BadInput(
                f"this state was saved {'with' if 'critic' in scalars else 'without'} a critic, and the run has "
                f"{'none' if self.critic is None else 'one'}; use the recipe it was saved with, or start from its weights (model.path, critic.path)"
            )
        self.engine.load_scalars({name: value for name, value in scalars.items() if name != "critic"})
        if self.critic:
            self.critic.load_scalars(scalars["critic"])

    @property
    def weights_key(self) -> tuple[int | None, int]:
        """Differs whenever the weights do; the same on all ranks of the replica."""
        return self.version, 0

    def hash(self) -> str:
        if self.critic is None:
            return self.engine.state_hash()
        return hashlib.sha256(f"{self.engine.state_hash()} {self.critic.state_hash()}".encode()).hexdigest()

    def restore(self) -> None:
        """What was written into ``tensors`` is in the engine already."""

    def close(self) -> None:
        if self.critic:
            self.critic.close()
        self.engine.close()  # last: the groups are its


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
            if name.removeprefix(CRITIC_PREFIX).startswith(kinds) and tensor.is_cuda:
                self.tensors[name] = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def clip(engine: Engine, grad_norm: float) -> float:
    """What a gradient of this norm is multiplied by (optimizer.clip_grad_norm, of the model's own optimizer)."""
    limit = engine.config.optimizer.clip_grad_norm
    return min(1.0, limit / (grad_norm + 1e-6)) if limit > 0 else 1.0


def with_digests_of(mine: dict[str, Any], scalars: dict[str, Any]) -> dict[str, Any]:
    """``scalars`` of a rank of another layout: the digests of what LoRA froze are of that rank's cut, so this one's own stand in."""
    changed = {name: mine[name] for name in scalars if name == "frozen_digest" and name in mine}
    inner = {name: with_digests_of(mine[name], value) for name, value in scalars.items() if isinstance(value, dict) and name in mine}
    return scalars | changed | inner
