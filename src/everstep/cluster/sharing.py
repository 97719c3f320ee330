"""A batch that goes to many ranks is handed to the host once."""

from __future__ import annotations

import time
from typing import Any

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.host import Host


class Sharing:
    """Hands each batch to the host once, however many ranks get it."""

    def __init__(self, host: Host) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self._host = host
        self._shared: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, TrainingBatch):
            return value
        if id(value) not in self._shared:
            start = time.monotonic()
            self._shared[id(value)] = (value, self._host.share(value))
            self.seconds += time.monotonic() - start
            self.nbytes += value.nbytes
        return self._shared[id(value)][1]
