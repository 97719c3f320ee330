"""A process outlives its replica: it closes the engine and builds another one, of another layout, without leaving anything behind.

Rank 0 lives through all lives and is measured after each. In some of them a peer is killed in the middle of a collective; a fresh
process has its place in the next life.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.errors import ReplicaBroken
from everstep.layout import Layout
from support.models import NllWithEntropy, batch, settings, tiny_config
from support.processes import join_world, run_ranks

pytestmark = pytest.mark.timeout(700)

HEAP_BYTES_PER_LIFE = 16 << 10  # measured are 1.5 kB, of torch's stores and groups; a model with its optimizer has 400 kB here
RESIDENT_BYTES = 16 << 20  # in all: freed memory that glibc keeps is resident, some 8 MB more after 50 lives
FEW_TENSORS = 2


class MallocInfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in
                ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]]  # fmt: skip


@dataclass(frozen=True)
class Left:
    """What a process still holds once its engine is closed."""

    descriptors: int
    threads: int  # of the operating system, those of gloo included
    tensors: int
    hooks: int  # functions around sys.excepthook
    heap_bytes: int  # allocated and not freed, wherever in the process
    resident_bytes: int

    @classmethod
    def now(cls) -> Left:
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = MallocInfo
        heap = libc.mallinfo2()
        return cls(
            len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")),
            sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()), hook_depth(),
            heap.uordblks + heap.hblkhd, int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        )  # fmt: skip


def hook_depth() -> int:
    depth, hook = 0, sys.excepthook
    while closure := getattr(hook, "__closure__", None):
        hook = next(cell.cell_contents for cell in closure if callable(cell.cell_contents))
        depth += 1
    return depth


class DiesInIt(NllWithEntropy):
    """The victim's loss: SIGKILL comes while it, and those who wait for it, are inside the collectives of backward."""

    def __call__(self, *args: Any) -> Any:
        threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return super().__call__(*args)


def live(rank: int, number: int, layout: Layout, broken: bool, victim: bool) -> None:
    """One life: a world, an engine, two steps and a reference model; then all of it closed."""
    import torch.distributed as dist

    from everstep.engine.step import Engine

    # Who takes a seat later waits for it in here.
    join_world(rank, layout.ranks_per_replica, f"life{number}", timeout_s=600)
    engine = Engine(settings(), tiny_config("qwen3", tied=True), layout.position(rank), layout, torch.device("cpu"))
    engine.init_random(number)
    mine = [batch(i, 2, 9) for i in range(4)][layout.position(rank).dp :: layout.dp]
    for step in range(200 if broken else 2):
        try:
            engine.accumulate(mine, DiesInIt() if victim and step else NllWithEntropy(), [0] * len(mine))
            engine.squared_norm(engine.gradients())
            engine.apply(engine.gradients(), 0.05, 1e-2)
        except ReplicaBroken:
            assert broken
            break
    else:
        assert not broken, "the victim lives"
        engine.keep_reference()
        engine.logprobs(mine, model="reference")
        engine.state_hash()
    engine.close()
    world = dist.distributed_c10d._world
    for registered in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_coalesce_state,
                       world.tags_to_pg, world.pg_to_tag):  # fmt: skip
        assert not registered
    assert not dist.is_initialized()


def lives(process: int, layouts: list[Layout], deaths: list[int]) -> list[Left]:
    """``deaths``: numbers of the lives in which the holder of the last seat is killed. Processes 0, 1, ... have the seats; those
    that are more take the last seat one after the other.
    """
    # The recorder of the last collectives grows to 2000 entries, two megabytes, before it stays as it is.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    last = layouts[0].ranks_per_replica - 1
    measured = [Left.now()]
    for number, layout in enumerate(layouts):
        holder = last + sum(death < number for death in deaths)
        if process < last or process == holder:
            live(min(process, last), number, layout, number in deaths, number in deaths and process == holder)
            measured.append(Left.now())
    return measured


PAIR = [Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(cp=2)]
FOUR = [Layout(tp=2, pp=2), Layout(dp=2, pp=2), Layout(cp=2, tp=2), Layout(pp=2, vpp=2, dp=2)]


@pytest.mark.parametrize(
    ("layouts", "deaths"),
    [
        pytest.param((PAIR * 2)[:6], [3, 4], id="6 lives"),
        pytest.param((PAIR * 13)[:50], [7, 16, 25, 34, 43], id="50 lives", marks=pytest.mark.full),
        pytest.param(FOUR * 3, [4, 5, 6, 7], id="four ranks", marks=pytest.mark.full),
    ],
)
def test_building_again_leaves_nothing_behind(layouts: list[Layout], deaths: list[int]) -> None:
    seats = layouts[0].ranks_per_replica
    dead = tuple(range(seats - 1, seats - 1 + len(deaths)))
    measured = run_ranks(
        lives, seats + len(deaths), layouts, deaths, join=False, may_die=dead, deadline_s=90 + 10 * len(layouts)
    )
    assert [measured[i] for i in dead] == [None] * len(dead)
    for before, *after in measured[: seats - 1]:
        assert len(after) == len(layouts)
        for left in after:
            assert left.descriptors == before.descriptors and left.threads == before.threads, (before, left)
            assert left.tensors <= before.tensors + FEW_TENSORS and left.hooks == before.hooks, (before, left)
        # From the first life of every layout on.
        steady = after[len(set(layouts)) :]
        assert (after[-1].heap_bytes - steady[0].heap_bytes) / (len(steady) - 1) < HEAP_BYTES_PER_LIFE, steady
        assert after[-1].resident_bytes - steady[0].resident_bytes < RESIDENT_BYTES, steady


# -- a rank that leaves while it waits for others ------------------------------------------------------------------------------------


def leave(rank: int, gone: int, killed: bool) -> tuple[float, int] | None:
    """Seconds that it takes to close the groups in the middle of an agreement that ``gone`` is missing in, and the connections that are left. Gloo
    passes values around a ring: two ranks of four hear of it at once, the one between them only when those two have closed their sockets."""
    import psutil
    import torch.distributed as dist

    from everstep.engine.groups import close_groups, forget_frames
    from everstep.recovery.replica import ReplicaWorld

    join_world(rank, 4, "ring", timeout_s=60.0)
    dist.barrier()
    if rank == gone:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(12.0)  # frozen; or its machine is gone, and nobody closes its sockets
        return None
    begun = time.monotonic()
    kept: list[BaseException] = []  # as whoever tells the controller of it has it
    try:
        ReplicaWorld("0", 4, 60.0, lambda: time.monotonic() > begun + 0.5).agree((rank,), "nothing")
    except ReplicaBroken as error:
        kept.append(error)
    forget_frames(kept[0])
    begun = time.monotonic()
    close_groups()
    took = time.monotonic() - begun
    connections = lambda: sum(c.status == "ESTABLISHED" for c in psutil.Process().net_connections("tcp"))
    end = time.monotonic() + 10.0 * killed
    while connections() and time.monotonic() < end:
        time.sleep(0.01)
    return took, connections()


@pytest.mark.parametrize("gone", [3, 0])
def test_of_a_ring_that_is_broken_everybody_leaves(gone: int) -> None:
    left = [one for one in run_ranks(leave, 4, gone, True, join=False, may_die=(gone,)) if one]
    assert len(left) == 3 and all(connections == 0 for _, connections in left), left


def test_who_leaves_is_not_held_up_by_one_that_answers_nothing() -> None:
    left = [one for one in run_ranks(leave, 4, 2, False, join=False) if one]
    assert len(left) == 3 and all(took < 8.0 for took, _ in left), left
