"""How fast weights go from a trainer's rank to a rollout engine, against what a plain copy between the same devices moves.

    python -m benchmarks.sync                                     SmolLM2-135M's and Qwen3-0.6B's shape; with two GPUs also from one to the other
    python -m benchmarks.sync --shape qwen3-0.6b --rounds 20
    python -m benchmarks.sync --quick                             a tiny model, also without a GPU

Two processes, as a rank and an engine are (:mod:`everstep.rl.rollout.sync`): one serves random bfloat16 weights under their Hugging Face names,
the other copies them into tensors of its own. A round's time runs from when the source begins to serve until the engine has the last one;
connecting is in it, and waking an engine and gathering the weights of a replica are not. Medians; the first ``--warm`` rounds (the window is
opened, memory is found) are not counted.

    way      same device, other device: through the window on the source's device; host: the engine has no device
    limit    copies of all these tensors in one process, from the source's device to the engine's (host: into page-locked memory)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.circumstances import circumstances
from benchmarks.rl import SHAPES, config_of
from everstep.rl.rollout import sync

LIMIT_S = 60.0  # of one transfer


def weights(shape: str, device: torch.device) -> list[tuple[str, Tensor]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    return [(name, torch.randn(p.shape, dtype=torch.bfloat16, device=device)) for name, p in model.named_parameters()]


def engine(shape: str, port: int, rounds: int, on: str, near: bool, answers: Any) -> None:
    """The engine's process: takes the weights of every round. ``near``: it says that it has a device."""
    device = torch.device(on)
    mine = dict(weights(shape, device))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    answers.send("ready")
    for number in range(rounds):
        way = "host"
        with sync.stream(f"round{number}", store, LIMIT_S) as stream:
            for name, tensor in sync.receive(stream.join(), number, device if near else None):
                mine[name].copy_(tensor)
                way = "device" if tensor.is_cuda else "host"
        _wait(device)
        answers.send(way)


def measure(shape: str, source: torch.device, target: torch.device, near: bool, rounds: int, warm: int) -> dict[str, Any]:
    held, context = weights(shape, source), mp.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = context.Pipe()
    process = context.Process(target=engine, args=(shape, store.port, warm + rounds, str(target), near, theirs), daemon=True)
    process.start()
    theirs.close()
    seconds, ways = list[float](), set[str]()
    try:
        ours.recv()  # EOFError if it ends
        for number in range(warm + rounds):
            _wait(source)
            start = time.monotonic()
            if missed := sync.serve({"engine": f"round{number}"}, store, LIMIT_S, "127.0.0.1", held, number, source):
                raise RuntimeError(f"the engine did not get the weights: {missed['engine']}")
            ways.add(ours.recv())
            seconds.append(time.monotonic() - start)
    finally:
        process.join(10)
        process.kill()
    nbytes, taken = sum(tensor.nbytes for _, tensor in held), seconds[warm:]
    into = [torch.empty_like(t, device=target if near else "cpu", pin_memory=not near and source.type == "cuda") for _, t in held]
    limit = _median(lambda: [a.copy_(b, non_blocking=True) for a, (_, b) in zip(into, held, strict=True)], source, target)
    return {
        "went": "/".join(sorted(ways)), "tensors": len(held), "bytes": nbytes, "seconds": statistics.median(taken), "all": taken,
        "gb_per_s": nbytes / statistics.median(taken) / 1e9, "limit_gb_per_s": nbytes / limit / 1e9,
    }  # fmt: skip


def _median(act: Callable[[], object], *devices: torch.device) -> float:
    seconds = []
    for _ in range(8):
        start = time.monotonic()
        act()
        for device in devices:
            _wait(device)
        seconds.append(time.monotonic() - start)
    return statistics.median(seconds[3:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ways(cuda: bool) -> dict[str, tuple[torch.device, torch.device, bool]]:
    """Name -> source's device, engine's, and whether the engine says that it has it."""
    if not cuda:
        return {"host": (torch.device("cpu"), torch.device("cpu"), False)}
    first, last = torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1)
    return {"same device": (first, first, True)} | ({"other device": (first, last, True)} if last != first else {}) | {"host": (first, first, False)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["smollm2-135m", "qwen3-0.6b"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm", type=int, default=2, help="rounds before, not counted")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds")
    parser.add_argument("--out", type=Path, default=Path("build/sync.json"))
    options = parser.parse_args(arguments)
    if options.quick:
        options.shape, options.rounds, options.warm = ["tiny"], 2, 1
    rows: dict[str, Any] = {}
    print(f"{'shape':14} {'way':12} {'went by':8} {'MB':>8} {'tensors':>8} {'seconds':>8} {'GB/s':>7} {'limit GB/s':>11}")
    for shape in options.shape:
        for name, (source, target, near) in ways(torch.cuda.is_available()).items():
            rows[f"{shape}, {name}"] = row = measure(shape, source, target, near, options.rounds, options.warm)
            print(f"{shape:14} {name:12} {row['went']:8} {row['bytes'] / 1e6:8.1f} {row['tensors']:8} {row['seconds']:8.4f} {row['gb_per_s']:7.2f} "
                  f"{row['limit_gb_per_s']:11.1f}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"about": circumstances("sync", arguments), "rows": rows}, indent=1) + "\n")
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
