"""What a configuration will do, worked out without starting anything: ``everstep plan``.

Memory is an estimate in the sense of its formulas (:mod:`everstep.plan.memory`). Every other number is exact arithmetic. How it is said
is in :mod:`everstep.plan.terminal`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everstep.cluster.environment import detect_launcher
from everstep.config import derive
from everstep.config.check import check_plan
from everstep.config.schema import Config
from everstep.engine.shape import ModelShape
from everstep.engine.source import describe
from everstep.layout import Layout
from everstep.plan.memory import BYTES, RankMemory, adapter_parameters, rank_memory

if TYPE_CHECKING:
    from everstep.cluster.ray.placement import Placement

_MASTER_BYTES, _MOMENT_BYTES = 4, 8  # of one parameter, float32


@dataclass(frozen=True)
class Plan:
    """Everything ``everstep plan`` prints."""

    config: Config
    sizes: derive.Sizes
    shape: ModelShape
    launcher: str
    device: str
    memory: tuple[RankMemory, ...]  # by rank inside a replica
    placement: Placement | None  # None: the nodes are known only to the cluster of ray.address

    @property
    def deaths_at_once(self) -> int:
        """Replicas that may be broken at the same time while training goes on."""
        if not self.config.recovery.enabled:
            return 0
        return self.config.layout.replicas - max(1, self.config.recovery.min_replicas)

    @property
    def heal_bytes(self) -> int:
        """Bytes sent to the rank with the largest state, from its peer."""
        return max(memory.state for memory in self.memory)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: what is trained with its optimizer state, and a reference model, each element once; and with
        checkpoint.hf the weights, and adapters, once more in others' formats."""
        config, each = self.config, BYTES[self.config.model.dtype]
        adapters = adapter_parameters(config, self.shape, Layout(), 0) if config.lora.rank else 0
        trained = adapters or self.shape.parameters
        masters = _MASTER_BYTES if config.model.dtype == "bfloat16" else 0
        if config.recipe == "ppo":  # the critic, trained in the same way
            critic = describe(derive.critic(config).model).parameters
            trained += trained if adapters else critic
        state = trained * (each + masters + _MOMENT_BYTES)
        reference = (adapters or self.shape.parameters) * each if any(memory.reference for memory in self.memory) else 0
        exported = self.shape.parameters + adapters + (describe(derive.critic(config).model).parameters if config.recipe == "ppo" else 0)
        return state + reference + (exported * each if config.checkpoint.hf else 0)


def make_plan(config: Config, environ: Mapping[str, str] = os.environ) -> Plan:
    """Check ``config`` and work everything out. ``BadInput`` if it cannot work. Starts nothing, imports no torch."""
    sizes = check_plan(config, environ)
    shape = describe(config.model)
    ranks = range(sizes.layout.ranks_per_replica)
    return Plan(
        config=config,
        sizes=sizes,
        shape=shape,
        launcher=detect_launcher(config, environ),
        device=derive.device(config, environ),
        memory=tuple(rank_memory(config, sizes, shape, rank) for rank in ranks),
        placement=_placement(config, sizes.layout, environ),
    )


def _placement(config: Config, layout: Layout, environ: Mapping[str, str]) -> Placement | None:
    if config.ray.address:
        return None
    from everstep.cluster.ray.placement import place

    # A CPU has no devices to count: every rank is a process of this machine.
    cuda = derive.device(config, environ) == "cuda"
    here = {socket.gethostname(): derive.cuda_devices(environ) if cuda else layout.devices + derive.engine_devices(config)}
    rollout = config.rollout
    engines = 0 if rollout.colocated else rollout.engines
    return place(layout.ranks_per_replica, layout.replicas, layout.spares, here, layout.tp, engines, rollout.tp)
