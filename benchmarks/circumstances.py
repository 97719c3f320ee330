"""On what a number was made: every benchmark writes this beside its results, in these words. And in what a benchmark's processes run."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "megatron-core", "ray", "transformers")


def environment(**more: str) -> dict[str, str]:
    """The environment of a process that a benchmark starts: finds this repository, one thread per process, byte code is kept (else every process
    compiles all that it imports, and who starts more processes looks slower for it); ``more`` has the last word."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "", **more}


def circumstances(benchmark: str, arguments: Sequence[str] | None = None, more: Sequence[str] = ()) -> dict[str, str]:
    """``command``, ``machine`` (cards, processor, cores), ``versions``, ``date`` and ``load`` (processes that wanted to run, mean of 5 minutes).
    ``benchmark``: its name in this folder; ``arguments``: those it was called with (None: of the command line); ``more``: packages besides
    :data:`PACKAGES` that the numbers depend on; what is not installed is left out."""
    import torch

    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = []
    for name in (*PACKAGES, *more):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    if cards:
        found.append(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *(sys.argv[1:] if arguments is None else arguments)]),
        "machine": f"{f'{len(cards)} x {cards[0]}' if cards else 'no GPU'}, {platform.machine()}, {os.cpu_count()} CPU cores, {platform.system()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *found]),
        "date": datetime.date.today().isoformat(),
        "load": f"{os.getloadavg()[1]:.1f}",
    }
