"""Run a function in several real processes that form a gloo world, with a deadline.

Processes are forked from a server that has torch, Megatron-Core and transformers imported, so one costs some tens of
milliseconds. ``function`` must be importable (a module-level function of a test file is).

    def check(rank: int, tp: int) -> float: ...        # torch.distributed is initialised
    results = run_ranks(check, 2, 2)                   # two ranks, tp=2; one result per rank
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from everstep.cluster import forked

_PORT = "EVERSTEP_TEST_STORE_PORT"
#: Once a rank has failed, the others get this long to fail too, so that their reports are seen.
GRACE_S = 2.0


def _context(cuda: bool) -> Any:
    """Where processes come from: the fork server, which sees no accelerator, or, for CUDA, fresh interpreters.

    CUDA does not survive a fork, and Megatron-Core may touch it when it is imported.
    """
    if cuda:
        return mp.get_context("spawn")
    return forked.context()


def join_world(
    rank: int, ranks: int, name: str = "world", timeout_s: float = 60.0, backend: str = "gloo"
) -> None:
    """Form the gloo (or nccl) world ``name`` from inside a process of ``run_ranks``; each name can be used once."""
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", int(os.environ[_PORT]), is_master=False, timeout=timeout)
    dist.init_process_group(
        backend, store=dist.PrefixStore(name, store), rank=rank, world_size=ranks, timeout=timeout
    )


def _child(
    pipe: Connection, port: int, rank: int, ranks: int, join: bool, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ[_PORT] = str(port)
    try:
        if join:
            join_world(rank, ranks)
        result = function(rank, *args)
        # Plain pickle: multiprocessing's own would share tensors through file descriptors that end with this process.
        pipe.send_bytes(pickle.dumps(("result", result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
    # Leave without the interpreter's shutdown: groups of a broken world may wait in their destructors.
    pipe.close()
    os._exit(0)


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    deadline_s: float = 60.0,
    join: bool = True,
    may_die: tuple[int, ...] = (),
    cuda: bool = False,
) -> list[Any]:
    """``function(rank, *args)`` in ``ranks`` processes; their results by rank.

    ``join``: form a gloo world first. ``may_die``: ranks whose death is expected; their result is None. AssertionError
    with the tracebacks if a rank raises, dies unexpectedly, or is not done after ``deadline_s``; no process is left.
    ``cuda``: the processes may use CUDA devices (else they see none), and take ten seconds to start.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = _context(cuda)
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(ranks):
        parent, child = context.Pipe(duplex=False)
        process = context.Process(
            target=_child, args=(child, store.port, rank, ranks, join, function, args), daemon=True
        )
        process.start()
        child.close()
        pipes[parent] = rank
        processes.append(process)
    results: list[Any] = [None] * ranks
    problems: dict[int, str] = {}
    end = time.monotonic() + deadline_s
    try:
        while pipes and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(pipes), timeout=left):
                rank = pipes.pop(pipe)  # type: ignore[call-overload]
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    if rank not in may_die:
                        processes[rank].join(5)
                        problems[rank] = f"died with exit code {processes[rank].exitcode}"
                    continue
                if kind == "result":
                    results[rank] = value
                else:
                    problems[rank] = value
            if problems:
                end = min(end, time.monotonic() + GRACE_S)
        for rank in pipes.values():
            problems.setdefault(rank, f"not done after {deadline_s} s" if not problems else "killed: another rank failed")
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    assert not problems, "\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(problems.items()))
    return results
