"""The Ray actor around a :class:`Worker`: one process, one device, a rank or a spare."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import Config

if TYPE_CHECKING:
    from everstep.cluster.worker import Formation, Life


@dataclass(frozen=True)
class ActorSpec:
    """What a worker process needs to start. ``coordinator`` and ``store``: (host, port)."""

    worker_id: str
    config: Config
    coordinator: tuple[str, int]
    token: str
    store: tuple[str, int]
    events_dir: str
    log_path: str


@dataclass(frozen=True)
class ActorInfo:
    worker_id: str
    pid: int
    host: str
    node_id: str


class RefSlots:
    """Slots as references into Ray's object store: a rank pulls only those it computes."""

    def __init__(self, refs: list[list[ray.ObjectRef]]):
        self._refs = refs

    def __len__(self) -> int:
        return len(self._refs)

    def fetch(self, slot: int, dp: int) -> TrainingBatch:
        batch: TrainingBatch = ray.get(self._refs[slot][dp], timeout=60)
        return batch


class RankActor:
    """Methods run on the actor's main thread, one at a time; control calls come over the coordinator's channel instead."""

    def __init__(self, spec: ActorSpec):
        _redirect_output(Path(spec.log_path))
        warnings.filterwarnings("ignore", module=r"torch|megatron|transformers")  # advice to developers of those

        import torch

        from everstep.cluster.device import choose_device
        from everstep.cluster.worker import Worker
        from everstep.engine import cpu
        from everstep.engine.groups import NCCL_ENVIRONMENT
        from everstep.recovery.control import Control
        from everstep.telemetry.events import EventLog

        os.environ.update(NCCL_ENVIRONMENT)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        device = choose_device(spec.config)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)  # the context is made now, not in the first step of a spare
        else:
            cpu.apply()
        control = Control(spec.coordinator, spec.token, spec.worker_id, spec.config.recovery.heartbeat_s,
                          fence_s=spec.config.recovery.fence_s)
        events = EventLog(Path(spec.events_dir) / f"{spec.worker_id}.jsonl", spec.worker_id)
        self._worker = Worker(spec.config, spec.worker_id, device, control, spec.store, events)
        self._info = ActorInfo(spec.worker_id, os.getpid(), socket.gethostname(), ray.get_runtime_context().get_node_id())

    def ready(self) -> ActorInfo:
        return self._info

    def form(self, formation: Formation) -> None:
        self._worker.run("form", (formation,), {})

    def run(self, life: Life, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._worker.run(method, args, kwargs, life)

    def train_step(self, life: Life, step: int, slots: list[list[ray.ObjectRef]], *args: Any) -> Any:
        return self._worker.run("train_step", (step, RefSlots(slots), *args), {}, life)


def _redirect_output(path: Path) -> None:
    """Everything this process prints, from Python or from C++, goes to its own log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
