"""User code on every rank: a loss that notes the environment it is built in, and a program that trains with it.

    torchrun --nproc_per_node N -m tests.support.probe CONFIG FOLDER [a.b=c ...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import everstep
from everstep.data import SampleStream, check


def make_loss(folder: str, fail_on: str = "") -> Any:
    """The SFT loss; every rank that builds it leaves a note in ``folder``. Raises on the rank ``fail_on`` (replica/rank)."""
    from everstep.rl.losses import sft_loss

    if "EVERSTEP_REPLICA" in os.environ:  # not the controller of launcher ray, which builds it for the names of its metrics
        rank = f"{os.environ['EVERSTEP_REPLICA']}/{os.environ['RANK']}"
        Path(folder, str(os.getpid())).write_text(json.dumps({"rank": rank, "PROBE": os.environ.get("PROBE")}))
        if rank == fail_on:
            raise KeyError("a bug in the loss")
    return sft_loss()


def notes(folder: Path) -> list[dict[str, str]]:
    return [json.loads(path.read_text()) for path in folder.iterdir()]


def train(config: everstep.Config, folder: Path, ranks: int, fail_on: str = "") -> dict[str, Any]:
    """Train until ``ranks`` processes have left a note and the group is whole; the group's last status."""
    data = check(config).train
    stream = SampleStream(len(data), config.seed)
    group = everstep.launch(config)
    try:
        for _ in range(config.sft.steps):
            batch = data.batch(stream.take(config.sft.samples_per_step))
            group.train_step(batch, everstep.LossSpec("tests.support.probe:make_loss", {"folder": str(folder), "fail_on": fail_on}), 1e-3)
            whole = len(group.status()["replicas"]) == config.layout.replicas
            if whole and len(list(folder.iterdir())) >= ranks:
                break
        return group.status()
    finally:
        group.close()


if __name__ == "__main__":
    train(everstep.load_config(sys.argv[1], sys.argv[3:]), Path(sys.argv[2]), ranks=1)
