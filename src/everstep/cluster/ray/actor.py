"""The Ray actor around a :class:`Worker`: one process, one device, a rank or a spare."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import ray

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.host import WorkerInfo, WorkerSpec, make_worker
from everstep.errors import CoordinatorLost

if TYPE_CHECKING:
    from everstep.cluster.formation import Meant

_FETCH_S = 60.0
_REMOVE_S = 5.0


class RefSlots:
    """Slots as references into Ray's object store: a rank pulls only those it computes."""

    def __init__(self, refs: list[list[ray.ObjectRef]]):
        self._refs = refs

    def __len__(self) -> int:
        return len(self._refs)

    def fetch(self, slot: int, dp: int) -> TrainingBatch:
        batch: TrainingBatch = ray.get(self._refs[slot][dp], timeout=_FETCH_S)
        return batch


def _abandon(cause: str) -> None:
    """No controller came: the placement group goes, and with it the actors that do not end by themselves; then this process."""
    group = ray.util.get_current_placement_group()
    if group is not None:
        removal = threading.Thread(target=ray.util.remove_placement_group, args=(group,), daemon=True)
        removal.start()
        removal.join(_REMOVE_S)  # a Ray that is gone itself answers nothing
    os._exit(CoordinatorLost.exit_code)


class RankActor:
    """Methods run on the actor's main thread, one at a time; control calls come over the coordinator's channel instead."""

    def __init__(self, spec: WorkerSpec):
        node = ray.get_runtime_context().get_node_id()
        self._worker = make_worker(spec, node, _abandon)
        self._info = WorkerInfo(spec.worker_id, os.getpid(), socket.gethostname(), node)

    def ready(self) -> WorkerInfo:
        return self._info

    def run(self, meant: Meant | None, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._worker.run(method, args, kwargs, meant)
