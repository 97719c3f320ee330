"""Agreement among the ranks of one replica.

The ranks of a replica see the coordinator's log at slightly different moments, but run one forward/backward together: before
an attempt, and before leaving one, they agree on what they saw (docs/protocol.md, rule 4). The collective is polled together
with the view, so that a rank whose peer is gone finds out from the coordinator at the latest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from everstep.errors import DeadlineExceeded, ReplicaBroken
from everstep.node.page import noted

_POLL_S = 0.0002


class ReplicaWorld:
    """The default ``torch.distributed`` world of this process. ``broken`` tells whether the coordinator's newest view excludes
    this replica."""

    def __init__(self, label: str, size: int, timeout_s: float, broken: Callable[[], bool]):
        self.name = f"replica {label}"
        self.label, self.size, self._timeout_s, self._broken = label, size, timeout_s, broken

    def agree(self, values: tuple[int, ...], what: str) -> list[tuple[int, ...]]:
        """Every rank's values, in rank order. Raises ReplicaBroken if a rank of the replica is gone."""
        if self.size == 1:
            return [values]
        return self._agree(values, what)

    @noted("agree")
    def _agree(self, values: tuple[int, ...], what: str) -> list[tuple[int, ...]]:
        mine = torch.tensor(values, dtype=torch.int64)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        end = time.monotonic() + self._timeout_s
        try:
            work: Any = dist.all_gather(everybody, mine, async_op=True)
            while not work.is_completed():
                if self._broken():
                    raise ReplicaBroken(f"replica {self.label}: a rank is gone (while agreeing on {what})")
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"replica {self.label}: its ranks did not agree on {what} in {self._timeout_s:g} s (recovery.step_timeout_s and recovery.progress_timeout_s)"
                    )
                time.sleep(_POLL_S)
            work.wait()
        except RuntimeError as error:
            raise ReplicaBroken(f"replica {self.label}: {error} (while agreeing on {what})") from error
        return [tuple(int(x) for x in t) for t in everybody]
