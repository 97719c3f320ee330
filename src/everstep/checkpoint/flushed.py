"""Copies of the nodes' memory that were written to the disk when nobody was left to go back to them: a run that died goes on from there.

    RUN/copies/attempt-2/0-1.9-1-4.copy  of rank 1, step 9, committed in epoch (1, 4); as in memory (:mod:`everstep.checkpoint.memory`), checksums and all
    RUN/copies/attempt-2/run.json        the recipe's state after each step that may be gone on from, and the rollbacks, of the commit record

Written by whoever is left on a node: its workers, the controller, or the janitor. Only a layout of the same cut can read them; a
checkpoint, which any can, is preferred where it is as new.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from everstep.checkpoint import memory
from everstep.checkpoint.memory import Stamp
from everstep.checkpoint.storage import fsync, fsync_folders, write_atomic
from everstep.recovery import commitlog

FOLDER, RUN = "copies", "run.json"


@dataclass(frozen=True)
class Flushed:
    """``reference``, ``state``: as of a checkpoint. ``cause``: why nothing of this folder can be used; the rest means nothing then."""

    folder: Path
    step: int = -1
    stamp: Stamp | None = None
    reference: bool = False
    state: dict[str, Any] | None = None
    cause: str = ""


def folder_of(run_dir: Path, attempt: int) -> Path:
    return run_dir / FOLDER / f"attempt-{attempt}"


def is_flushed(path: Path) -> bool:
    """Whether this is such a folder, and no checkpoint."""
    return path.parent.name == FOLDER and (path / RUN).is_file()


def write(copies: Path, to: Path) -> list[int]:
    """Write every whole copy in the memory below ``copies`` to the disk; the steps they are of. Another node may write there as well.
    OSError if the disk is full."""
    steps = set()
    to.mkdir(parents=True, exist_ok=True)
    for node in sorted({path.parent for path in copies.rglob("*.copy")}):
        for path, (rank, stamp) in memory.whole_copies(node).items():
            steps.add(stamp.version)
            target = to / f"0-{rank}.{stamp.version}-{stamp.epoch[0]}-{stamp.epoch[1]}.copy"
            if target.exists():
                continue  # of another replica, or another node was faster: the same state
            temporary = to / f".{target.name}.{socket.gethostname()}.{os.getpid()}"
            shutil.copyfile(path, temporary)
            fsync(temporary)
            os.replace(temporary, target)
    past = commitlog.past(to.parent.parent / "commits.log")
    run = {"states": {str(step): state for step, state in past.states.items() if step in steps} | {"0": {}},
           "rollbacks": [[list(epoch), step] for epoch, step in past.rollbacks]}
    write_atomic(to / RUN, json.dumps(run | {"xxh3_128": _checksum(run)}).encode())
    fsync_folders(to)
    return sorted(steps)


def newest(run_dir: Path, ranks: int, layout: dict[str, Any]) -> Flushed | None:
    """What the last start of the run that left anything has left; None if none did."""
    number = lambda path: path.parent.name.partition("-")[2]
    there = sorted((path for path in (run_dir / FOLDER).glob(f"attempt-*/{RUN}") if number(path).isdecimal()), key=lambda path: int(number(path)))
    return _judge(there[-1].parent, ranks, layout) if there else None


def read(folder: Path) -> Flushed:
    """Of a folder that was chosen."""
    ranks, layout = next(iter(_about(folder).values()))
    return _judge(folder, ranks, layout)


def sweep(run_dir: Path, keep: Path | None) -> None:
    """Delete what was left of other starts; ``keep``: what this one goes on from."""
    for folder in (run_dir / FOLDER).glob("attempt-*"):
        if keep is None or folder.resolve() != keep.resolve():
            shutil.rmtree(folder, ignore_errors=True)
    if keep is None:
        shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


def _judge(folder: Path, ranks: int, layout: dict[str, Any]) -> Flushed:
    try:
        run = json.loads((folder / RUN).read_text())
        if run.pop("xxh3_128") != _checksum(run):
            raise ValueError("its checksum is another one")
        states = {int(step): state for step, state in run["states"].items()}
        rollbacks = [((epoch[0], epoch[1]), step) for epoch, step in run["rollbacks"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Flushed(folder, cause=f"{RUN} is damaged ({type(error).__name__}: {error})")
    about = _about(folder)
    if any(said != (ranks, layout) for said in about.values()):
        return Flushed(folder, cause="copies of memory can be read by the same layout only; it was another one")
    whole = memory.whole_copies(folder)
    of = [{stamp for rank, stamp in whole.values() if rank == number and stamp.stands(rollbacks)} for number in range(ranks)]
    usable = [stamp for stamp in set.intersection(*of) if stamp.version in states]
    if not usable:
        return Flushed(folder, cause="no whole copy of every rank of one step is there")
    stamp = max(usable)
    described = memory.described(next(path for path, (_, s) in whole.items() if s == stamp))
    return Flushed(folder, stamp.version, stamp, bool(described["scalars"].get("has_reference")), states[stamp.version])


def _checksum(run: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(run, sort_keys=True).encode())


def _about(folder: Path) -> dict[Path, tuple[int, dict[str, Any]]]:
    """(ranks of a replica, how they are arranged) that each whole copy says it is of."""
    return {path: (said["ranks"], said["layout"]) for path in memory.whole_copies(folder) for said in [memory.described(path)]}
