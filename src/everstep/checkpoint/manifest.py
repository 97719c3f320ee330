"""A checkpoint folder's life: begun as ``step-N.partial``, completed by its manifest, published, verified, retired.

The order of a publish, and what a crash after each stage leaves behind:

    1. all data is in step-N.partial, forced to disk       -> a .partial folder, deleted by the next save 2.
    manifest.json (sizes, checksums) is written into it -> the same 3. the folder is renamed to step-N
    -> a complete checkpoint; ``latest`` names an older, whole one 4. ``latest`` is replaced
    -> done 5. checkpoints beyond keep_last are deleted            -> only complete ones remain named step-N
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from everstep.checkpoint.storage import (
    CheckpointError,
    digest,
    free_name,
    fsync_tree,
    remove_folder,
    rename_folder,
    storage_errors,
    write_atomic,
    write_json,
)
from everstep.errors import BadInput

MANIFEST, POINTER, BEST, RUN_STATE = "manifest.json", "latest", "best", "run.json"
PARTIAL = ".partial"
FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and xxh3-128 of one file."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint folder holds; ``files`` by path relative to the folder, ``layout`` of a
    replica.
    """

    step: int
    layout: dict[str, Any]
    files: dict[str, FileEntry]
    wall_time: float
    everstep: str
    format: int = FORMAT
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None for any other name, ``.partial`` included."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """All folders named step-N, newest first, whole or not."""
    if not checkpoints.is_dir():
        return []
    named = [(step, path) for path in checkpoints.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(named, reverse=True)]


# ---------------------------------------------------------------- saving


def begin(checkpoints: Path, step: int) -> Path:
    """The empty folder ``step-N.partial`` to write into; left-overs of saves that died are deleted.

    Called by the one that publishes, before any rank writes.
    """
    partial = checkpoints / (folder_name(step) + PARTIAL)
    with storage_errors("preparing", partial):
        checkpoints.mkdir(parents=True, exist_ok=True)
        for left_over in [*checkpoints.glob(f"step-*{PARTIAL}"), *checkpoints.glob(".step-*.deleted*")]:
            remove_folder(left_over)
        for left_over in checkpoints.glob(f".{POINTER}.*.tmp"):
            left_over.unlink()
        (partial / "state").mkdir(parents=True)
    return partial


def publish(
    partial: Path,
    step: int,
    layout: Mapping[str, Any],
    run_state: Mapping[str, Any],
    keep_last: int,
    known: Mapping[str, FileEntry] | None = None,
    details: Mapping[str, Any] | None = None,
) -> Path:
    """Make ``partial`` (all ranks have written) the newest checkpoint; returns its final path.

    ``run_state`` is the recipe's state (JSON). ``known`` gives digests that ranks computed already, so that
    their files need not be read again. If the step has a whole checkpoint already, that one is kept and
    ``partial`` is dropped: a committed step has one state.
    """
    checkpoints = partial.parent
    final = checkpoints / folder_name(step)
    with storage_errors("publishing", final):
        if final.exists():
            if not damage(final):
                remove_folder(partial)
                set_pointer(final)
                return final
            rename_folder(final, free_name(checkpoints / f"{final.name}.damaged"))
        write_json(partial / RUN_STATE, dict(run_state))
        fsync_tree(partial)
        write_manifest(partial, step, layout, known or {}, details or {})
        fsync_tree(partial)
        rename_folder(partial, final)
        set_pointer(final)
    retire(checkpoints, keep_last)
    return final


def write_manifest(
    folder: Path,
    step: int,
    layout: Mapping[str, Any],
    known: Mapping[str, FileEntry],
    details: Mapping[str, Any],
) -> Manifest:
    files: dict[str, FileEntry] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        size = path.stat().st_size
        if name in known:
            if known[name].bytes != size:
                raise CheckpointError(f"{path}: its rank wrote {known[name].bytes} bytes, the disk has {size}; the save is void")
            files[name] = known[name]
        else:
            files[name] = FileEntry(size, digest(path))
    missing = sorted(set(known) - set(files))
    if missing:
        raise CheckpointError(f"{folder}: a rank reported {missing[0]}, but it is not there; do all nodes share run_dir?")
    manifest = Manifest(step, dict(layout), files, time.time(), _own_version(), details=dict(details))
    write_json(folder / MANIFEST, asdict(manifest))
    return manifest


def set_pointer(folder: Path, pointer: str = POINTER) -> None:
    """Let ``latest`` (or ``best``) name ``folder``, atomically."""
    write_atomic(folder.parent / pointer, (folder.name + "\n").encode())


def pointed_at(checkpoints: Path, pointer: str = POINTER) -> Path | None:
    """The folder that ``latest`` (or ``best``) names; None if there is no such pointer yet."""
    try:
        return checkpoints / (checkpoints / pointer).read_text().strip()
    except FileNotFoundError:
        return None


def retire(checkpoints: Path, keep_last: int) -> list[Path]:
    """Delete complete checkpoints beyond the newest ``keep_last``; returns what was deleted.

    Nothing is deleted before one of the kept ones has been read back and found undamaged, nor what
    ``latest`` or ``best`` name. Incomplete folders do not count and are not touched.
    """
    complete = [folder for folder in checkpoint_folders(checkpoints) if incomplete(folder) is None]
    kept, old = complete[:keep_last], complete[keep_last:]
    old = [folder for folder in old if folder not in (pointed_at(checkpoints), pointed_at(checkpoints, BEST))]
    if not old or all(damage(folder) for folder in kept):
        return []
    with storage_errors("deleting an old checkpoint in", checkpoints):
        for folder in reversed(old):
            remove_folder(folder)
    return old


# ---------------------------------------------------------------- looking


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder; BadInput if it is missing, unreadable or of a newer format."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text())
        if raw["format"] > FORMAT:
            raise BadInput(f"{path}: written by everstep {raw['everstep']} in format {raw['format']}; upgrade everstep")
        files = {name: FileEntry(**entry) for name, entry in raw.pop("files").items()}
        return Manifest(files=files, **raw)
    except FileNotFoundError:
        raise BadInput(f"{folder}: no {MANIFEST}, so the checkpoint is not complete") from None
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: unreadable ({type(error).__name__}: {error})") from error


def incomplete(folder: Path) -> str | None:
    """Why ``folder`` is not a complete checkpoint (manifest, every file, its size); None if it is. Reads no
    data.
    """
    try:
        manifest = read_manifest(folder)
    except BadInput as error:
        return str(error)
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{folder / name}: {error.strerror}"
        if size != entry.bytes:
            return f"{folder / name}: has {size} bytes, the manifest says {entry.bytes}"
    return None


def damage(folder: Path) -> str | None:
    """Like ``incomplete``, and reads every byte: also names the first file whose checksum is wrong."""
    reason = incomplete(folder)
    if reason:
        return reason
    for name, entry in read_manifest(folder).files.items():
        try:
            found = digest(folder / name)
        except OSError as error:
            return f"{folder / name}: {error.strerror}"
        if found != entry.xxh3_128:
            return f"{folder / name}: damaged, checksum {found} where the manifest says {entry.xxh3_128}"
    return None


def verify(folder: Path) -> Manifest:
    """Read all of a checkpoint; BadInput naming the missing, truncated or damaged file."""
    reason = damage(folder)
    if reason:
        raise BadInput(f"checkpoint is not usable: {reason}")
    return read_manifest(folder)


def read_run_state(folder: Path) -> dict[str, Any]:
    """The recipe's state as given to ``publish``."""
    with storage_errors("reading", folder / RUN_STATE):
        state: dict[str, Any] = json.loads((folder / RUN_STATE).read_text())
    return state


def _own_version() -> str:
    try:
        return version("everstep")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
