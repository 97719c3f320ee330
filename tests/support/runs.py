"""Whole runs in tests: the configuration of the demonstration, cut short, and what its event log says afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint.memory import folder_of
from everstep.cluster.host import Host
from everstep.cluster.processes import still_running
from everstep.config.load import load_config
from everstep.config.schema import Config
from everstep.driver import run
from everstep.telemetry.events import Event, of_kind, read_events
from everstep.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "examples" / "grpo_sort.yaml")
PPO = str(ROOT / "examples" / "ppo_kill.yaml")
SFT = str(ROOT / "examples" / "sft_text.yaml")
#: A dead process stays dead unless a test asks for more (tests/test_repair.py).
QUIET = ["recovery.restart_attempts=0", "telemetry.progress=none", "telemetry.tensorboard=false", "device=cpu", f"model.path={ROOT}/examples/models/tiny-qwen3"]


def config(file: str, run_dir: Path, *overrides: str) -> Config:
    return load_config(file, [*QUIET, f"run_dir={run_dir}", *overrides])


@dataclass
class Finished:
    """A run that ended well."""

    folder: Path
    events: list[Event]

    def kind(self, *kinds: str) -> list[Event]:
        return of_kind(self.events, *kinds)

    @property
    def losses(self) -> dict[int, float]:
        rows = read_metrics(self.folder / "metrics.jsonl")
        return {int(r["step"]): r.get("train/loss", r.get("actor/pg_loss", float("nan"))) for r in rows}

    @property
    def final_hashes(self) -> set[str]:
        """Hashes of the last comparison of all ranks."""
        last = self.kind("verify")[-1]
        assert last["equal"]
        return set(last["hashes"].values())

    @property
    def pids(self) -> set[int]:
        """Every process that took part, the lead excepted."""
        return {e.pid for e in self.events if e.who != "lead"}


def finish(conf: Config, clean: bool = False, host: Callable[[Config], Host] | None = None) -> Finished:
    """Run ``conf`` here, to its end."""
    assert run(conf, clean=clean, host=host) == 0
    folder = Path(conf.run_dir)
    return Finished(folder, read_events(folder.events if hasattr(folder, "events") else folder / "events"))


def command(arguments: Sequence[str], module: str = "everstep", **env: str) -> subprocess.Popen[str]:
    """``everstep ARGUMENTS`` (or another ``module``) as a user starts it, in the repository."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def gone(pids: set[int], within_s: float = 15.0) -> bool:
    """Whether all these processes end (zombies count as ended) before the deadline."""
    return not still_running(pids, within_s)


def shared_memory(run_dir: Path) -> set[str]:
    """What lies in shared memory, memory copies of other runs left out (tests run side by side); semaphores are multiprocessing's,
    which everstep does not use."""
    ours = folder_of(run_dir, 1).name
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if name == ours or not name.startswith(("sem.", "everstep-"))}
