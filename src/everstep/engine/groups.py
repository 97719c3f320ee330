"""The process groups inside a replica: opening Megatron's, and dropping all of them, also after a death.

The replica's ``torch.distributed`` world is made by the caller; ``open_groups`` lays Megatron's groups over it and
``close_groups`` drops both. Afterwards the process may join another world.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from everstep.errors import ReplicaBroken, first_line
from everstep.layout import Layout

#: How long ``close_groups`` waits for the abort of NCCL communicators; they are left behind after that.
ABORT_TIMEOUT_S = 30.0
#: How long ``close_groups`` waits for gloo's destructors; what has not ended by then ends in the background.
LET_GO_TIMEOUT_S = 2.0

#: To be set before the replica's NCCL world is made: else the watchdog may end a whole process because a peer died or
#: merely closed its groups first. What a failed collective means is the step transaction's decision.
NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}

# What gloo and the store say when a peer is gone or silent; NCCL has exception types of its own.
_BROKEN = (
    "gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "Application timeout caused pair closure",
    "NCCL",
    "process group has been destroyed",
)


def open_groups(layout: Layout) -> None:
    """Create Megatron's groups inside the replica's world. Collective; the world must have the layout's size."""
    world = dist.get_world_size()
    if world != layout.ranks_per_replica:
        raise AssertionError(f"the replica's world has {world} ranks, its layout {layout.ranks_per_replica}")
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp,  # Megatron's own default
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )


def close_groups() -> None:
    """Drop every process group of this process, the replica's world included. Talks to nobody, so safe after a death; of a collective that is
    still under way nobody is waited for, beyond ``LET_GO_TIMEOUT_S``.

    Gloo closes its sockets when the last reference to a group goes, and closed sockets are how the other ranks learn
    of a death; so the caller must have dropped its own references (models, optimizers, tracebacks) before.
    """
    # Its lru_cache keeps modules, and through them groups, alive.
    RotaryEmbedding.forward.cache_clear()
    get_cuda_rng_tracker().reset()
    mpu.destroy_model_parallel()
    _forget_remaining_groups()
    if dist.is_initialized():
        abort_groups()
        groups = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        _let_go(groups)
    else:
        # A world that could not be made has taken a number, and the next one would not meet those of processes that began at 0.
        dist.distributed_c10d._world.group_count = 0
    _unwrap_excepthook()
    give_memory_back()


def _let_go(groups: list[dist.ProcessGroup]) -> None:
    """Drop these, which must be the last references. Gloo's destructor waits for a collective that still runs, and so for mates that have not
    left it yet, or whose machine is gone without a word: on a thread each, that nobody is held up."""
    threads = []
    while groups:
        last = [groups.pop()]
        threads.append(threading.Thread(target=last.clear, name="let-go", daemon=True))
        threads[-1].start()
    deadline = time.monotonic() + LET_GO_TIMEOUT_S
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))


def give_memory_back() -> None:
    """Free what a closed engine held: Megatron's models and optimizers are full of cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _forget_remaining_groups() -> None:
    """``destroy_model_parallel`` forgets some of its groups (those of experts, of parts of optimizer instances): each would keep
    its sockets open until the next life's group replaces it."""
    for name, value in list(vars(mpu).items()):
        members = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(member, dist.ProcessGroup) for member in members):
            setattr(mpu, name, {} if isinstance(value, dict) else None)


def _unwrap_excepthook() -> None:
    """``init_process_group`` puts one more function of its own around ``sys.excepthook`` each time, and never takes it off."""
    while getattr(sys.excepthook, "__qualname__", "") == "init_process_group.<locals>._distributed_excepthook":
        sys.excepthook = inspect.getclosurevars(sys.excepthook).nonlocals["old_hook"]


def abort_groups() -> None:
    """Abort all NCCL communicators of this process, from any thread; nothing on gloo.

    Concurrently: one after the other can hang, because freeing an idle communicator waits for the kernel that spins
    in the broken one.
    """
    if not dist.is_initialized() or "nccl" not in dist.get_backend_config():
        return
    threads = [
        threading.Thread(target=group.abort, daemon=True) for group in list(dist.distributed_c10d._world.pg_map)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ABORT_TIMEOUT_S
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))


def broken_replica(error: BaseException) -> ReplicaBroken | None:
    """``ReplicaBroken`` if ``error`` says that a collective failed because a peer is gone; None otherwise."""
    if isinstance(error, dist.DistError):
        return ReplicaBroken(f"a collective inside the replica failed: {first_line(error)[:300]}")
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _BROKEN):
        return ReplicaBroken(f"a collective inside the replica failed: {first_line(error)[:300]}")
    return None


def forget_frames(error: BaseException) -> None:
    """Clear the local variables that an exception, and those that it came from, hold by their tracebacks: they reference groups and what is
    under way in them, and would keep their sockets open as long as anybody keeps the exception."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)  # skips frames that are still running
            chain += [one.__cause__, one.__context__]


def sum_over_replica(own: torch.Tensor) -> torch.Tensor:
    """Sum over the replica's ranks in the order of ranks, so that it is bitwise equal everywhere; on the CPU."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    total = torch.zeros_like(own)
    for one in everyone:
        total += one
    return total.cpu()
