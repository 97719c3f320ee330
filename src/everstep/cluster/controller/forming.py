"""Letting workers take their places in a replica, together or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from everstep.cluster.controller.owed import POLL_S
from everstep.cluster.formation import Formation, called_off
from everstep.cluster.host import Host, ProcessEnded
from everstep.errors import BadInput, EverstepError, Fenced, ReplicaBroken

_CALL_OFF_S = 10.0  # for the living ranks of a formation that lost one, to leave it


def form(
    host: Host, store: dist.Store, formations: Sequence[tuple[str, Formation]], dead: Mapping[str, str], timeout_s: float,
    closed: Callable[[], bool],
) -> dict[str, str]:
    """Worker -> cause for those that failed; if any did, the others are called off: they live and can form again.

    ``dead``: workers that are known to be, and why, as it grows. Raises BadInput as a worker did, Fenced once ``closed()``.
    """
    calls = {host.submit(worker, None, "form", formation): worker for worker, formation in formations}
    lives = {formation.life for _, formation in formations}
    failed: dict[str, str] = {}
    broken: dict[str, str] = {}  # alive, but without all others
    end = time.monotonic() + timeout_s
    while calls:
        for call in host.wait(calls, POLL_S):
            worker = calls.pop(call)
            try:
                host.result(call, worker, "form")
            except BadInput:
                raise
            except ReplicaBroken as error:
                broken[worker] = str(error)
            except (ProcessEnded, EverstepError) as error:
                failed[worker] = str(error)
        for call in [c for c, worker in calls.items() if worker in dead]:
            worker = calls.pop(call)
            failed[worker] = dead[worker]
        if closed():
            raise Fenced("the group was closed while a replica was being formed")
        if failed and lives:
            for life in lives:
                store.set(called_off(life), "1")
            lives = set()
            end = min(end, time.monotonic() + _CALL_OFF_S)
        if calls and time.monotonic() > end:
            reason = f"not formed in {timeout_s:g} s (recovery.reform_timeout_s)"
            return failed | {worker: reason for worker in calls.values()}
    return failed or broken
