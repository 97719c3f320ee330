"""Kills of ours and of rivals in turn, one line of JSON for each, appended to a file: results of several commands add up.

    python -m benchmarks.recovery --against torchft,nvrx,ray-train,restart --kills 8 --append results.jsonl
    python -m benchmarks.recovery --summary results.jsonl

torchft     3 replica groups, one process each, a lighthouse that misses 300 ms of heartbeats; a dead one is started again at once
nvrx        3 active ranks and 1 in reserve, in-process restart; state kept in memory; ticks of 100 ms
ray-train   3 workers, Ray Train's own restart, a checkpoint every 5 steps
restart     ours with recovery.enabled=false, asynchronous checkpoints every 5 steps, `resume=auto` as soon as the run has ended
ours        3 replicas and 1 spare, that is filled up again

NVRx and Ray Train are found if they are installed; else that is said, and they are left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.circumstances import ROOT, circumstances, environment
from benchmarks.rivals import Cost, Log, cost_of, end, kill
from everstep.telemetry.events import of_kind, read_events
from everstep.telemetry.recoveries import recoveries

RANKS = 3
SAVED_EVERY = 5
Train = Callable[[Sequence[str], Path], int]  # overrides, run folder -> exit code


class Setting:
    """What all systems are given. ``train``: runs ``everstep train``; ``base``: its overrides."""

    def __init__(self, device: str, shape: str, samples: int, micro: int, tokens: int, base: Sequence[str], train: Train, folder: Path, rng: random.Random):
        self.device, self.base, self.train, self.folder, self.rng = device, list(base), train, folder, rng
        self.of_rank = ["--shape", shape, "--device", device, "--samples", str(samples // RANKS), "--micro", str(micro), "--tokens", str(tokens)]
        self.numbers = 0

    def new_folder(self, name: str) -> Path:
        self.numbers += 1
        return self.folder / f"{name}-{self.numbers}"


def _start(module: str, arguments: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(**env)
    )


def torchft(setting: Setting, kills: int) -> list[Cost]:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=300)
    log = Log(setting.new_folder("torchft"))
    rank: Callable[[int], subprocess.Popen[bytes]] = lambda number: _start(
        "benchmarks.rivals.torchft_rank", [*setting.of_rank, "--log", str(log.folder), "--number", str(number), "--address", lighthouse.address()], LOGLEVEL="ERROR"
    )
    ranks = [rank(number) for number in range(RANKS)]
    costs = []
    try:
        for i in range(kills):
            def strike(rows: list[dict[str, Any]], victim: int = i % RANKS) -> float:
                struck = kill(ranks[victim].pid)
                ranks[victim].wait()
                ranks[victim] = rank(victim)
                return struck

            costs.append(cost_of("torchft", log, RANKS, RANKS, strike, setting.rng, "heartbeat 300 ms, collectives 2 s"))
    finally:
        end(ranks)
        lighthouse.shutdown()
    return costs


def nvrx(setting: Setting, kills: int) -> list[Cost]:
    """A process that died does not come back: one kill a run. The first rank has the store, and is left alone."""
    costs = []
    for _ in range(kills):
        log = Log(setting.new_folder("nvrx"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = [
            _start("benchmarks.rivals.nvrx_rank", [*setting.of_rank, "--log", str(log.folder), "--number", str(n), "--active", str(RANKS)],
                   RANK=str(n), WORLD_SIZE=str(RANKS + 1), LOCAL_RANK=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            for n in range(RANKS + 1)
        ]
        victim = ranks[setting.rng.randrange(1, RANKS)].pid
        try:
            costs.append(cost_of("nvrx", log, RANKS, RANKS + 1, functools.partial(_kill, victim), setting.rng, "in-process, 1 in reserve"))
        finally:
            _end_all(ranks, log)
    return costs


def ray_train(setting: Setting, kills: int) -> list[Cost]:
    log = Log(setting.new_folder("ray-train"))
    driver = _start("benchmarks.rivals.ray_train", [*setting.of_rank, "--log", str(log.folder), "--active", str(RANKS)],
                    RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S="5", RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2", RAY_AUTH_MODE="disabled")
    costs = []
    try:
        for _ in range(kills):
            strike: Callable[[list[dict[str, Any]]], float] = lambda rows: kill(setting.rng.choice(sorted({row["pid"] for row in rows[-RANKS:]})))
            costs.append(cost_of("ray-train", log, RANKS, RANKS, strike, setting.rng, f"its own restart, checkpoint every {SAVED_EVERY} steps"))
    finally:
        _end_all([driver], log)
    return costs


def _kill(pid: int, rows: list[dict[str, Any]]) -> float:
    return kill(pid)


def _end_all(started: Sequence[subprocess.Popen[bytes]], log: Log) -> None:
    """What was started, what that started, and what was detached of it: that one carries the log's folder in its command line."""
    everybody: list[psutil.Process] = []
    for process in started:
        with suppress(psutil.NoSuchProcess):
            everybody += psutil.Process(process.pid).children(recursive=True)
    end(started)
    for other in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if other.pid != os.getpid() and str(log.folder) in other.cmdline():
                everybody.append(other)
    for other in everybody:
        with suppress(psutil.NoSuchProcess):
            other.kill()


def restart(setting: Setting, kills: int) -> list[Cost]:
    costs = []
    for _ in range(kills):
        step = 3 * SAVED_EVERY - 1 - setting.rng.randrange(SAVED_EVERY)
        folder = setting.new_folder("restart")
        fault = f"faults=[{{step: {step}, phase: compute, kind: kill, replica: {setting.rng.randrange(RANKS)}, delay_s: {setting.rng.uniform(0, 0.05):.3f}}}]"
        same = [*setting.base, f"layout.replicas={RANKS}", "layout.spares=0", "recovery.enabled=false", f"checkpoint.every_steps={SAVED_EVERY}",
                "checkpoint.hf=false", f"sft.steps={step + 6}"]
        if not setting.train([*same, fault], folder):
            raise RuntimeError(f"{folder}: the run survived its fault")
        if setting.train([*same, "faults=[]", "resume=auto"], folder):
            raise RuntimeError(f"{folder}: the run could not be resumed")
        events = read_events(folder / "events")
        (struck,) = of_kind(events, "fault")
        commits = of_kind(events, "commit")
        before, after = [c for c in commits if c.t_wall <= struck.t_wall], [c for c in commits if c.t_wall > struck.t_wall]
        made = max(c.step or 0 for c in before)
        first = next(c for c in after if (c.step or 0) > made)
        spans = [b.t_wall - a.t_wall for a, b in itertools.pairwise(before[SAVED_EVERY:])]
        costs.append(Cost("restart", RANKS, statistics.median(spans), first.t_wall - struck.t_wall, first.t_wall - struck.t_wall,
                          sum((c.step or 0) <= made for c in after), f"checkpoint every {SAVED_EVERY} steps, asynchronous"))
    return costs


def ours(setting: Setting, kills: int) -> list[Cost]:
    apart = 15 if setting.device == "cuda" else 25  # a spare is there again by then
    faults = []
    for i in range(kills):
        phase = setting.rng.choice(("compute", "reduce"))
        faults.append(f"{{step: {8 + apart * i}, phase: {phase}, kind: kill, replica: {i % RANKS}, delay_s: {setting.rng.uniform(0, 0.05):.3f}}}")
    folder = setting.new_folder("ours")
    code = setting.train([*setting.base, f"layout.replicas={RANKS}", "layout.spares=1", "recovery.restart_attempts=5",
                          f"sft.steps={8 + apart * kills}", f"faults=[{', '.join(faults)}]"], folder)
    if code:
        raise RuntimeError(f"{folder}: exit code {code}")
    events = read_events(folder / "events")
    commits = of_kind(events, "commit")
    odd = {e.step for e in of_kind(events, "fault", "death", "join", "heal_start", "heal_done", "link_build")}
    spans = [b.t_wall - a.t_wall for a, b in itertools.pairwise(commits[5:]) if b.step is not None and not {b.step, b.step - 1} & odd]
    return [Cost("ours", RANKS + 1, statistics.median(spans), one.commit_s, one.full_strength_s, 0, "salvage, 1 spare, filled up again")
            for one in recoveries(events) if one.injected]


SYSTEMS: dict[str, Callable[[Setting, int], list[Cost]]] = {"ours": ours, "restart": restart, "torchft": torchft, "nvrx": nvrx, "ray-train": ray_train}
_NEEDS = {"torchft": "torchft", "nvrx": "nvidia_resiliency_ext", "ray-train": "pandas"}  # without pandas ray.train cannot be imported


def compare(setting: Setting, rivals: Sequence[str], kills: int, batch: int, append: Path | None) -> list[dict[str, Any]]:
    """``kills`` of each, in batches of ``batch``: ours, a rival, ours, the next ... Rows as they are appended."""
    rows: list[dict[str, Any]] = []
    about = {"about": circumstances("recovery", None, ("torchft", "nvidia-resiliency-ext")), "device": setting.device}
    asked = [name for name in rivals if _there(name)]
    for done in range(0, kills, batch):
        for name in asked:
            for system in (("ours", name) if name != "ours" else ("ours",)):
                try:
                    costs = SYSTEMS[system](setting, min(batch, kills - done))
                except (TimeoutError, RuntimeError) as error:
                    print(f"{system}: {error}", flush=True)
                    continue
                new = [asdict(cost) | about | {"t": time.time()} for cost in costs]
                rows += new
                if append:
                    with open(append, "a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in new)
                print_summary(rows)
    return rows


def _there(name: str) -> bool:
    if name in _NEEDS and importlib.util.find_spec(_NEEDS[name]) is None:
        print(f"{name}: not installed ({_NEEDS[name]}); left out")
        return False
    return True


def print_summary(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'system':<10} {'kills':>5} {'devices':>7} {'step':>8}  {'new step':>20}  {'full strength':>20}  {'steps lost':>10}")
    for system in sorted({row["system"] for row in rows}):
        of = [row for row in rows if row["system"] == system]
        spread = lambda name, of=of: _spread([row[name] for row in of if row[name] is not None])
        print(f"{system:<10} {len(of):>5} {of[0]['devices']:>7} {statistics.median(row['step_s'] for row in of):>6.3f} s  {spread('committed_s'):>20}  "
              f"{spread('full_strength_s'):>20}  {statistics.mean(row['lost_steps'] for row in of):>10.1f}", flush=True)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} s ({min(values):.2f}-{max(values):.2f})" if values else "never"


def summary(path: Path) -> None:
    print_summary([json.loads(line) for line in path.read_text().splitlines()])


def picture(path: Path, to: Path) -> None:
    """Every kill as a dot, the time to the first new step and to full strength, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    systems = sorted({row["system"] for row in rows}, key=lambda s: statistics.median(r["committed_s"] for r in rows if r["system"] == s))
    figure, axes = pyplot.subplots(figsize=(7, 0.8 + 0.5 * len(systems)))
    for what, mark, label in (("committed_s", "o", "first new step"), ("full_strength_s", "|", "full strength")):
        found = [(row[what], systems.index(row["system"])) for row in rows if row[what] is not None]
        axes.plot([x for x, _ in found], [y for _, y in found], mark, label=label, alpha=0.7)
    axes.set(xscale="log", xlabel="seconds since the kill", yticks=range(len(systems)), yticklabels=systems)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(to)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", help="rivals, in turn with ours: torchft,nvrx,ray-train,restart")
    parser.add_argument("--batch", type=int, default=4, help="with --against: kills of one system in a row")
    parser.add_argument("--append", help="with --against: a file to which a line of JSON is added for each kill")
    parser.add_argument("--summary", metavar="FILE", help="of what --append collected; with --picture, a picture of it")
    parser.add_argument("--picture", metavar="PNG")
