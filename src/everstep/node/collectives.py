"""Collectives among the ranks of a replica, as Megatron issues them through ``torch.distributed``, noted on the page.

The functions of the module are wrapped, for Megatron calls them by their module, or by a name of its own that it gave them when it was imported
(those of sequence parallelism, ``dist_all_gather_func``), which is wrapped, too. A call that is not asynchronous is done when it returns; on
CUDA that means: handed to the device, whose heartbeat and NCCL's flight recorder say the rest. An asynchronous one is only handed over; who
waits for it later (a pipeline stage for its neighbour) waits for others meanwhile.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from everstep.node import page

OPERATIONS = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "barrier", "send", "recv",
    "isend", "irecv", "batch_isend_irecv", "all_gather_object", "broadcast_object_list", "gather_object", "reduce", "scatter",
)


def note_collectives() -> None:
    """In this process, from now on. Idempotent."""
    wrapped: dict[int, Callable[..., Any]] = {}  # by the id of the plain function
    for name in OPERATIONS:
        plain = getattr(c10d, name)
        if not hasattr(plain, "noted"):
            wrapped[id(plain)] = noted = _within(_collective(name), plain)
            setattr(c10d, name, noted)
            setattr(dist, name, noted)
    named = [module for name, module in sys.modules.items() if wrapped and name.startswith("megatron.")]
    for module in named:
        for name, value in list(vars(module).items()):
            if id(value) in wrapped:
                setattr(module, name, wrapped[id(value)])
    if not hasattr(c10d.Work.wait, "noted"):
        c10d.Work.wait = _within(lambda kwargs: page.for_others(), c10d.Work.wait)  # type: ignore[method-assign]


def _collective(name: str) -> Callable[[dict[str, Any]], page.collective]:
    asynchronous = name in ("isend", "irecv", "batch_isend_irecv")
    return lambda kwargs: page.collective(name, _name_of(kwargs.get("group")), asynchronous or bool(kwargs.get("async_op")))


def _within(context: Callable[[dict[str, Any]], Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, each call inside what ``context`` makes of its keyword arguments."""

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context(kwargs):
            return plain(*args, **kwargs)

    run.noted = True  # type: ignore[attr-defined]
    return run


def _name_of(group: Any) -> str:
    return getattr(group, "group_desc", "") or getattr(group, "group_name", "") or "the replica"
