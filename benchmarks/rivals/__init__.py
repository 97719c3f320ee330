"""What a death costs elsewhere: other systems under the same kills, each set up as well as it lets itself be.

Every rank of a rival appends one line to a log after each optimizer step that counts: when, which step, how many took part. A kill is a
SIGKILL from outside, at a random moment of a step, once all take part and are warm. Read from the logs, in seconds since the signal:

    committed_s       until anybody has made a step that nobody had made before
    full_strength_s   until such a step was made by as many as at first
    lost_steps        steps that had been made and were made again

The work of a step is the same shape of model (transformers, float32), the same tokens and samples; the engine is theirs.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_STEPS = 5
DEADLINE_S = 180.0
_POLL_S = 0.005


@dataclass(frozen=True)
class Cost:
    """Of one kill. ``devices``: that were held, spares included; ``step_s``: an ordinary step of that run."""

    system: str
    devices: int
    step_s: float
    committed_s: float | None
    full_strength_s: float | None
    lost_steps: int
    how: str


class Log:
    """The lines of all ranks of one run."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for path in self.folder.glob("*.jsonl"):
            whole = path.read_bytes().rpartition(b"\n")[0]
            rows += [json.loads(line) for line in whole.splitlines()]
        return sorted(rows, key=lambda row: row["t"])


def say(folder: str | os.PathLike[str], step: int, members: int) -> None:
    """Called by a rank after an optimizer step that counts."""
    line = json.dumps({"t": time.time(), "pid": os.getpid(), "step": step, "members": members}) + "\n"
    with open(Path(folder) / f"{os.getpid()}.jsonl", "a") as file:
        file.write(line)


def wait_until(condition: Callable[[], Any], what: str, alive: Callable[[], bool] = lambda: True) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {DEADLINE_S:g} s: {what}")
        if not alive():
            raise RuntimeError(f"it ended: {what}")
        time.sleep(_POLL_S)
    return found


def cost_of(system: str, log: Log, members: int, devices: int, strike: Callable[[list[dict[str, Any]]], float], rng: random.Random, how: str,
            comes_back: bool = True) -> Cost:
    """Wait until all are warm, strike, and read what it cost. ``strike(rows)`` kills and returns when (wall clock)."""
    since = time.time()
    warm = lambda: len({row["step"] for row in log.rows() if row["t"] > since and row["members"] == members}) >= WARM_STEPS
    wait_until(warm, f"{WARM_STEPS} steps with {members} members")
    step_s = step_seconds([row for row in log.rows() if row["t"] > since])
    time.sleep(rng.uniform(0.0, step_s))
    struck = strike(log.rows())
    made = max(row["step"] for row in log.rows() if row["t"] <= struck)
    new = lambda: next((row for row in log.rows() if row["t"] > struck and row["step"] > made), None)
    first = wait_until(new, "a new step after the kill")
    full = None
    if comes_back:
        full = wait_until(lambda: next((row for row in log.rows() if row["t"] > struck and row["step"] > made and row["members"] == members), None),
                          f"a step with {members} members")
    again = {row["step"] for row in log.rows() if struck < row["t"] <= first["t"] and row["step"] <= made}
    finished = {row["step"] for row in log.rows() if row["t"] <= struck}
    return Cost(system, devices, step_s, first["t"] - struck, full["t"] - struck if full else None, len(again & finished), how)


def step_seconds(rows: Sequence[dict[str, Any]]) -> float:
    """The median time between the first lines of consecutive steps."""
    first: dict[int, float] = {}
    for row in rows:
        first.setdefault(row["step"], row["t"])
    times = [t for _, t in sorted(first.items())]
    return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else float("nan")


def kill(pid: int) -> float:
    now = time.time()
    os.kill(pid, signal.SIGKILL)
    return now


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
