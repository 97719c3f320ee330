"""``everstep checkpoints``: what checkpoints a run has, whether they are whole, and which are kept no longer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from everstep.checkpoint import manifest
from everstep.checkpoint.storage import CheckpointError, is_folder, is_local, place, storage_errors
from everstep.config.load import load_config
from everstep.errors import BadInput
from everstep.run_dir import checkpoints_in

#: What lies there without a manifest and has not changed for so long belongs to no save any more.
FORGOTTEN_S = 3600.0


@dataclass(frozen=True)
class Row:
    """One folder named step-N. ``trouble``: why it cannot be used; None if it can."""

    folder: Path
    step: int
    nbytes: int
    made: float | None  # seconds since 1970
    layout: str
    pointers: tuple[str, ...]  # that name it: latest, best
    trouble: str | None


def find(where: str) -> Path:
    """The folder with the checkpoints of ``where``: a run folder, or that folder itself. BadInput if there is nothing."""
    at = place(where)
    with storage_errors("looking at", at):
        if is_local(at) and is_folder(at / "configs"):
            return checkpoints_in(at)
        if is_local(at) and is_folder(at / "checkpoints"):
            return at / "checkpoints"
        found = manifest.checkpoint_folders(at)
    if not found:
        raise BadInput(f"{where}: neither a run folder nor one with checkpoints (step-N)")
    return at


def rows(checkpoints: Path, verify: bool) -> list[Row]:
    """Newest first. ``verify``: every byte is read and its checksum compared; else only names and sizes."""
    with storage_errors("looking at", checkpoints):
        folders = manifest.checkpoint_folders(checkpoints)
        named = dict[str, Path | None]()
        for pointer in (manifest.POINTER, manifest.BEST):
            try:
                named[pointer] = manifest.pointed_at(checkpoints, pointer)
            except BadInput:  # ``pointers`` tells
                named[pointer] = None
    found = []
    for folder in folders:
        try:
            trouble = manifest.damage(folder) if verify else manifest.incomplete(folder)
        except CheckpointError as error:  # this one could not be looked at
            trouble = str(error)
        nbytes, made, layout = 0, None, ""
        try:
            said = manifest.read_manifest(folder)
            sizes = [f"{name} {size}" for name, size in said.layout.items() if size != 1]
            replicas = said.details.get("replicas", "?")
            nbytes, made, layout = said.nbytes, said.wall_time, ", ".join([*sizes, "1 replica" if replicas == 1 else f"{replicas} replicas"])
        except (BadInput, CheckpointError):
            pass  # it is the trouble
        step = manifest.step_of(folder)
        assert step is not None
        pointers = tuple(pointer for pointer, path in named.items() if path is not None and path.name == folder.name)
        found.append(Row(folder, step, nbytes, made, layout, pointers, trouble))
    return found


def pointers(checkpoints: Path) -> list[str]:
    """What is wrong with ``latest`` and ``best``, in a sentence each."""
    wrong = []
    for pointer in (manifest.POINTER, manifest.BEST):
        with storage_errors("looking at", checkpoints):
            try:
                named = manifest.pointed_at(checkpoints, pointer)
                if named is not None and not is_folder(named):
                    wrong.append(f"{checkpoints / pointer}: names {named.name}, which is not there; write the name of another into it, or delete it")
            except BadInput as error:
                wrong.append(str(error))
    return wrong


def table(found: list[Row], verified: bool) -> Table:
    from everstep.plan.terminal import size_text

    shown = Table("checkpoint", "made", "size", "saved with", "verified" if verified else "complete")
    for row in found:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.made)) if row.made else ""
        shown.add_row(row.folder.name + (f" ({', '.join(row.pointers)})" if row.pointers else ""), made, size_text(row.nbytes), row.layout, row.trouble or "yes")
    return shown


def prune(where: str, checkpoints: Path, keep_last: int | None, keep_every: int | None) -> list[Path]:
    """Apply retention now; None: as the run was configured. Also deletes what saves left that died over an hour ago."""
    resolved = place(where) / "configs" / "resolved.yaml"
    if keep_last is None or keep_every is None:
        if not is_local(resolved) or not resolved.is_file():
            raise BadInput(f"{where}: no run folder, which would say how many to keep; give --keep-last and --keep-every")
        configured = load_config(resolved).checkpoint
        keep_last = configured.keep_last if keep_last is None else keep_last
        keep_every = configured.keep_every if keep_every is None else keep_every
    if keep_last < 1:
        raise BadInput(f"--keep-last is {keep_last}; it must be at least 1")
    if keep_every < 0:
        raise BadInput(f"--keep-every is {keep_every}; it must be a number of steps, or 0")
    with storage_errors("pruning", checkpoints):
        return [*manifest.retire(checkpoints, keep_last, keep_every), *manifest.sweep(checkpoints, FORGOTTEN_S)]
