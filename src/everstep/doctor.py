"""``everstep doctor``: is this machine fit to be a node of a run? Minutes before a job, or at its start, instead of hours after it.

    from everstep.doctor import examine
    for found in examine("cpu", ["runs"], processes=2): print(found.name, found.state, found.told)

Each check computes something whose result is known, measures how fast that was, and says so: `ok`, `warning`, `bad`, or `skipped` with the reason.
It uses a device's memory and time for seconds; do not run it beside a training.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from everstep.errors import EverstepError, first_line
from everstep.telemetry.health import Sign, gpu_signs, host_signs, kernel_log, kernel_signs, load_nvml

State = Literal["ok", "warning", "bad", "skipped"]
_ALL_REDUCE_S = 60.0
_START_S = 180.0
_WORST: tuple[State, ...] = ("skipped", "ok", "warning", "bad")


class Unfit(EverstepError):
    """This machine or one of its devices failed a check of ``everstep doctor``."""


@dataclass(frozen=True)
class Found:
    """One check. ``measured``: numbers by name, the unit at the end of it."""

    name: str
    device: str
    state: State
    told: str
    measured: dict[str, float]


def examine(device: str, folders: Sequence[str], processes: int = 2, seconds: float = 1.0) -> list[Found]:
    """All checks of this machine. ``device``: cpu or cuda (every GPU that is visible). ``processes``: for the all-reduce on the CPU;
    on GPUs one for each. ``seconds``: for each measurement."""
    devices = [torch.device("cpu")] if device == "cpu" else [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    found: list[Found] = []
    for each in devices:
        found += [guarded("matmul", str(each), lambda d=each: matmul(d, seconds)), guarded("memory", str(each), lambda d=each: memory(d, seconds))]  # type: ignore[misc]
    count = processes if device == "cpu" else len(devices)
    found.append(guarded("all-reduce", f"{count} processes", lambda: all_reduce(device, count)))
    found.append(guarded("start", "a rank's process", process_start))
    found += [guarded("disk", folder, lambda f=folder: disk(Path(f))) for folder in folders]  # type: ignore[misc]
    found.append(guarded("host", socket.gethostname(), lambda: _signs("host", socket.gethostname(), host_signs(folders), "memory and room on disks")))
    lines = kernel_log()
    found.append(_signs("kernel log", socket.gethostname(), [_lasting(sign) for sign in kernel_signs(lines)], f"{len(lines)} lines") if lines
                 else Found("kernel log", socket.gethostname(), "skipped", "may not be read (dmesg)", {}))
    nvml = load_nvml()
    found.append(guarded("nvml", "all GPUs", lambda: _signs("nvml", "all GPUs", gpu_signs(nvml), "every GPU answers")) if nvml
                 else Found("nvml", "all GPUs", "skipped", "no NVIDIA driver answers", {}))
    return found


def worst(found: Sequence[Found]) -> State:
    return max((f.state for f in found), key=_WORST.index, default="skipped")


def guarded(name: str, device: str, check: Callable[[], Found]) -> Found:
    """A device that raises is unfit, and the others are examined all the same."""
    try:
        return check()
    except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired, EverstepError) as error:
        return Found(name, device, "bad", f"{type(error).__name__}: {first_line(error)}", {})


def _lasting(sign: Sign) -> Sign:
    """A line of the kernel's log may be months old: a device that was broken is so still, but a link that was down, a file server that did not
    answer or a process that was too large say nothing of this machine now."""
    passing = sign.kind in ("network", "dependency") or "out of memory" in sign.what
    return replace(sign, severity="warning") if passing and sign.severity == "bad" else sign


def _signs(name: str, device: str, signs: Sequence[Sign], when_none: str) -> Found:
    state: State = "bad" if any(s.severity == "bad" for s in signs) else "warning" if signs else "ok"
    told = "; ".join(f"{s.device + ': ' if s.device else ''}{s.what}" for s in signs[-5:]) or when_none
    return Found(name, device, state, told, {"signs": float(len(signs))})


# -- the checks ------------------------------------------------------------------------------------------------------------------------


def matmul(device: torch.device, seconds: float, size: int | None = None) -> Found:
    """Products of small integers, which every floating-point type used here holds exactly: each element must be right, every time.

    A and B have entries -1, 0, 1. Eight rows are compared with what int64 arithmetic on the host gives (in bfloat16 within its rounding), and
    every product, bit by bit, with the first.
    """
    size = size or (4096 if device.type == "cuda" else 512)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-1, 2, (size, size), generator=generator)
    b = torch.randint(-1, 2, (size, size), generator=generator)
    block = (a[:8] @ b).double()
    left, right = a.to(device, dtype), b.to(device, dtype)
    first = torch.matmul(left, right)
    wrong = int(((first[:8].cpu().double() - block).abs() > block.abs() * torch.finfo(dtype).eps).sum())
    done, begun = 0, time.monotonic()
    while done == 0 or time.monotonic() - begun < seconds:
        wrong += int((torch.matmul(left, right) != first).sum())  # waits for the device
        done += 1
    took = time.monotonic() - begun
    tflops = 2 * size**3 * done / took / 1e12
    told = f"{done} products of {size}x{size} in {str(dtype).removeprefix('torch.')}: " + (f"{wrong} wrong elements" if wrong else "every element right")
    return Found("matmul", str(device), "bad" if wrong else "ok", told, {"tflops": tflops, "wrong": float(wrong)})


def memory(device: torch.device, seconds: float, nbytes: int | None = None) -> Found:
    """A pattern written, copied and read back whole; bytes copied per second (read and written)."""
    nbytes = nbytes or ((1 << 30) if device.type == "cuda" else (64 << 20))
    source = torch.arange(nbytes // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    done, begun = 0, time.monotonic()
    while done == 0 or time.monotonic() - begun < seconds:
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done += 1
    took = time.monotonic() - begun
    right = bool(torch.equal(source, target)) and int(target[-1]) == nbytes // 8 - 1
    rate = 2 * nbytes * done / took / 1e9
    return Found("memory", str(device), "ok" if right else "bad", f"{nbytes >> 20} MiB copied {done} times: {'the same' if right else 'not what was written'}",
                 {"gb_per_s": rate})


def disk(folder: Path, nbytes: int = 64 << 20) -> Found:
    """Random bytes written, synced, dropped from the page cache where that can be asked for, and read back."""
    folder.mkdir(parents=True, exist_ok=True)
    path, data = folder / f".doctor-{socket.gethostname()}-{os.getpid()}", os.urandom(nbytes)
    try:
        begun = time.monotonic()
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        wrote = time.monotonic() - begun
        begun = time.monotonic()
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            same = file.read() == data
        read = time.monotonic() - begun
    finally:
        path.unlink(missing_ok=True)
    return Found("disk", str(folder), "ok" if same else "bad", f"{nbytes >> 20} MiB written, synced and read: {'the same' if same else 'not what was written'}",
                 {"write_mb_per_s": nbytes / wrote / 1e6, "read_mb_per_s": nbytes / read / 1e6})


_IMPORTS = """
import importlib, os, sys, time
begun = time.perf_counter()
importlib.import_module(sys.argv[1])
took = time.perf_counter() - begun
where = [getattr(vars(module).get("__spec__"), "cached", None) for module in list(sys.modules.values())]  # some have no spec, or no file
kept = [os.path.exists(path) for path in where if path]
print(took, len(kept), kept.count(False))
"""


def process_start(module: str = "everstep.cluster.worker.worker") -> Found:
    """How long a new rank's imports take, which every dead one's successor is waited for if there is no warm spare. A warning if Python keeps
    no byte code of what it imports, as where PYTHONDONTWRITEBYTECODE is set and nothing was compiled when it was installed: it compiles all of
    it again in each process, which doubles that time."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _IMPORTS, module], capture_output=True, text=True, timeout=_START_S)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    took, modules, compiled = (float(part) for part in done.stdout.split()[-3:])
    told = f"imports of {modules:g} modules"
    if slow := compiled > modules / 2:
        why = "PYTHONDONTWRITEBYTECODE is set" if os.environ.get("PYTHONDONTWRITEBYTECODE") else "their folders cannot be written"
        told += f", {compiled:g} of which every process compiles anew ({why}): compile them once, with python -m compileall on site-packages"
    return Found("start", "a rank's process", "warning" if slow else "ok", told, {"seconds": took, "compiled": compiled})


def all_reduce(device: str, count: int, numel: int = 1 << 22) -> Found:
    """``count`` processes of this machine sum known numbers over gloo or NCCL; each must hold the sum. Bus bandwidth as nccl-tests
    counts it: 2 (n - 1) / n bytes moved for each byte reduced."""
    where = f"{count} processes"
    if count < 2:
        return Found("all-reduce", where, "skipped", "needs at least two", {})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    answers: Any = context.Queue()
    children = [context.Process(target=_reduce, args=(device, rank, count, port, numel, answers), daemon=True) for rank in range(count)]
    for child in children:
        child.start()
    try:
        got: list[tuple[str, float]] = []
        end = time.monotonic() + _ALL_REDUCE_S
        while len(got) < count and time.monotonic() < end and (any(c.is_alive() for c in children) or not answers.empty()):
            try:
                got.append(answers.get(timeout=0.2))
            except queue.Empty:
                continue
    finally:
        for child in children:
            child.kill()
            child.join()
    errors = [error for error, _ in got if error]
    if errors or len(got) < count:
        return Found("all-reduce", where, "bad", errors[0] if errors else f"{count - len(got)} processes gave no answer in {_ALL_REDUCE_S:g} s", {})
    slowest = max(seconds for _, seconds in got)
    moved = 2 * (count - 1) / count * 4 * numel
    return Found("all-reduce", where, "ok", f"{numel * 4 >> 20} MiB over {'nccl' if device == 'cuda' else 'gloo'}: every sum right",
                 {"bus_gb_per_s": moved / slowest / 1e9})


def _reduce(device: str, rank: int, count: int, port: int, numel: int, answers: Any) -> None:
    import torch.distributed as dist

    try:
        where = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(where)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
        best = float("inf")
        for _ in range(4):
            mine = torch.full((numel,), float(rank + 1), device=where)
            dist.barrier()
            begun = time.monotonic()
            dist.all_reduce(mine)
            if device == "cuda":
                torch.cuda.synchronize(where)
            best = min(best, time.monotonic() - begun)
            if not bool((mine == count * (count + 1) / 2).all()):
                answers.put((f"rank {rank} holds a wrong sum", best))
                return
        answers.put(("", best))
    except Exception as error:  # told to who asked; this process is the check
        answers.put((f"rank {rank}: {type(error).__name__}: {error}", 0.0))
    finally:
        answers.close()
        answers.join_thread()


# -- showing -----------------------------------------------------------------------------------------------------------------------------


def as_json(found: Sequence[Found]) -> str:
    return json.dumps({"host": socket.gethostname(), "state": worst(found), "checks": [asdict(f) for f in found]})


def table(found: Sequence[Found]) -> Any:
    from rich.table import Table

    shown = Table(title=f"{socket.gethostname()}: {worst(found)}", title_justify="left", expand=False)
    for name in ("check", "of", "state", "measured", "what was done"):
        shown.add_column(name, overflow="fold")
    for f in found:
        shown.add_row(f.name, f.device, f.state, ", ".join(f"{value:.3g} {name.replace('_', ' ')}" for name, value in f.measured.items()), f.told)
    return shown
