"""Saving and reading a whole checkpoint, for either launcher: begin, let the ranks write, publish."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.checkpoint import manifest, sharded
from everstep.checkpoint.sharded import Shard
from everstep.layout import Layout
from everstep.telemetry.events import EventLog


@dataclass(frozen=True)
class SavedRun:
    """What belongs to the run rather than to a rank. ``recipe_state``: data cursor and counters of the recipe (JSON)."""

    step: int
    reference: bool
    recipe_state: dict[str, Any]


def save(
    checkpoints: Path, run: SavedRun, layout: Layout, keep_last: int, write: Callable[[Path], list[Shard]], events: EventLog
) -> Path:
    """Called in one process. ``write`` makes every rank of one replica write into the folder it is given.

    Raises CheckpointError (the previous checkpoint stays complete and current).
    """
    start = time.monotonic()
    folder = manifest.begin(checkpoints, run.step)
    known = {path: entry for shard in write(folder) for path, entry in shard.files.items()}
    state = {"step": run.step, "reference": run.reference, "recipe": run.recipe_state}
    final = manifest.publish(folder, run.step, sharded.inner_layout(layout), state, keep_last, known)
    size = manifest.read_manifest(final).nbytes
    events.emit("save", step=run.step, path=str(final), checkpoint_bytes=size, seconds=time.monotonic() - start)
    return final


def read(path: Path, layout: Layout) -> SavedRun:
    """The run's part of a checkpoint; BadInput if its shards do not fit ``layout``."""
    sharded.check_layout(path, layout)
    state = manifest.read_run_state(path)
    return SavedRun(int(state["step"]), bool(state["reference"]), dict(state["recipe"]))
