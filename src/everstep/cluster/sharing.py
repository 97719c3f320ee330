"""What the controller sends: each batch goes to the host once, however many ranks get it."""

from __future__ import annotations

import time
from typing import Any

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.host import Host


class Sharing:
    """For one call or step. ``nbytes`` and ``seconds`` of what was sent for it."""

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
