"""The Ray actor around a :class:`Worker`: one process, one device, a rank or a spare."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import ray

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.host import WorkerInfo, WorkerSpec, make_worker

if TYPE_CHECKING:
    from everstep.cluster.worker import Life

_FETCH_S = 60.0


class RefSlots:
    """Slots as references into Ray's object store: a rank pulls only those it computes."""

    def __init__(self, refs: list[list[ray.ObjectRef]]):
        self._refs = refs

    def __len__(self) -> int:
        return len(self._refs)

    def fetch(self, slot: int, dp: int) -> TrainingBatch:
        batch: TrainingBatch = ray.get(self._refs[slot][dp], timeout=_FETCH_S)
        return batch


class RankActor:
    """Methods run on the actor's main thread, one at a time; control calls come over the coordinator's channel instead."""

    def __init__(self, spec: WorkerSpec):
        self._worker = make_worker(spec)
        self._info = WorkerInfo(spec.worker_id, os.getpid(), socket.gethostname(), ray.get_runtime_context().get_node_id())

    def ready(self) -> WorkerInfo:
        return self._info

    def run(self, life: Life | None, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._worker.run(method, args, kwargs, life)
