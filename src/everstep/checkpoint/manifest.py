"""A checkpoint folder's life: begun, completed by its manifest, published, verified, retired.

The order of a publish, and what a crash after each stage leaves behind:

    1. all data is in step-N.partial, forced to disk             -> a folder without a manifest, deleted by the next save
    2. manifest.json (sizes, checksums) is written into it       -> the same, with a manifest
    3. the folder is renamed to step-N                           -> a complete checkpoint; ``latest`` names an older, whole one
    4. ``latest`` is replaced                                    -> done
    5. those that are kept no longer are deleted                 -> only complete ones remain named step-N

An object store cannot rename: there the data goes to step-N itself, and stage 2 is what completes it. Readers accept only folders
that have a manifest.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from everstep.checkpoint.index import damaged_tensor
from everstep.checkpoint.storage import (
    CheckpointError,
    FileEntry,
    as_json,
    digest,
    exists,
    folder_entries,
    free_name,
    fsync,
    fsync_folders,
    is_file,
    is_local,
    read_file,
    remove_folder,
    rename_folder,
    says_damaged,
    storage_errors,
    write_atomic,
    write_file,
    write_json,
)
from everstep.errors import BadInput, EverstepError
from everstep.paths import within

MANIFEST, POINTER, BEST, RUN_STATE = "manifest.json", "latest", "best", "run.json"
PARTIAL = ".partial"
CHECKSUM = "xxh3_128"  # in a manifest: of the rest of it
FORMAT = 2
READERS = 8
_NAME = re.compile(r"step-(\d{6,})")


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
    """All folders named step-N, newest first, whole or not. CheckpointError if storage does not say which there are."""
    with storage_errors("looking at", checkpoints):
        named = [(step, path) for path, is_one in folder_entries(checkpoints) if is_one and (step := step_of(path)) is not None]
    return [path for _, path in sorted(named, key=lambda found: found[0], reverse=True)]


# ---------------------------------------------------------------- saving


def working_folder(checkpoints: Path, step: int) -> Path:
    """Where a save of ``step`` writes: ``step-N.partial``, or ``step-N`` in an object store."""
    return checkpoints / (folder_name(step) + (PARTIAL if is_local(checkpoints) else ""))


def begin(checkpoints: Path, step: int) -> Path:
    """Make the empty folder to write into; left-overs of saves that died are deleted.

    Called by the one that publishes, before any rank writes.
    """
    partial = working_folder(checkpoints, step)
    if not is_local(checkpoints):
        return partial
    with storage_errors("preparing", partial):
        checkpoints.mkdir(parents=True, exist_ok=True)
        sweep(checkpoints)
        (partial / "state").mkdir(parents=True)
    return partial


def sweep(checkpoints: Path, older_than_s: float = 0.0) -> list[Path]:
    """Delete what saves and deletions left that died; returns it. Nobody else may be saving there, unless ``older_than_s`` spares what
    changed since. CheckpointError if storage refuses."""
    with storage_errors("deleting left-overs in", checkpoints):
        return _sweep(checkpoints, older_than_s)


def _sweep(checkpoints: Path, older_than_s: float) -> list[Path]:
    if not is_local(checkpoints):
        left_over = [folder for folder in checkpoint_folders(checkpoints) if not is_file(folder / MANIFEST)]
        left_over = [folder for folder in left_over if _unchanged_for(folder, older_than_s)]
        for folder in left_over:
            remove_folder(folder)
        if not older_than_s:
            for folder in checkpoint_folders(checkpoints):
                left_over += _sweep_objects(folder)
        return left_over
    left_over = [*checkpoints.glob(f"step-*{PARTIAL}"), *checkpoints.glob(".step-*.deleted*")]
    left_over = [folder for folder in left_over if _unchanged_for(folder, older_than_s) and remove_folder(folder)]
    if older_than_s:
        return left_over
    for pointer in (POINTER, BEST):
        for file in checkpoints.glob(f".{pointer}.*.tmp"):
            file.unlink(missing_ok=True)
    return left_over


def _unchanged_for(folder: Path, seconds: float) -> bool:
    if not seconds:
        return True
    now = time.time()
    try:
        return all(now - path.stat().st_mtime > seconds for path in [folder, *folder.rglob("*")] if is_local(folder) or is_file(path))
    except FileNotFoundError:  # it is being published, or deleted, at this very moment
        return False


def _sweep_objects(folder: Path) -> list[Path]:
    """Delete what attempts that failed left beside the complete checkpoint of the same step."""
    try:
        known = {MANIFEST, *read_manifest(folder).files}
    except BadInput:  # damaged, or of another everstep: what belongs to it nobody knows
        return []
    fs, base = folder.fs, str(folder.path)  # type: ignore[attr-defined]
    strays = [name for path in fs.find(base) if (name := path.removeprefix(f"{base}/")) not in known]
    for name in strays:
        fs.rm_file(f"{base}/{name}")
    return [folder / name for name in strays]


def existing(checkpoints: Path, step: int) -> Path | None:
    """The whole checkpoint of ``step``, if there is one already: a committed step has one state. A damaged one is put aside."""
    final = checkpoints / folder_name(step)
    with storage_errors("looking at", final):
        if not is_file(final / MANIFEST):
            return None
        if not damage(final):
            return final
        rename_folder(final, free_name(checkpoints / f"{final.name}.damaged"))
    return None


def publish(
    folder: Path, step: int, layout: Mapping[str, Any], run_state: Mapping[str, Any], files: Mapping[str, FileEntry],
    details: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Make ``folder`` (everything but the recipe's state is written) the newest checkpoint; returns its final path.

    ``run_state`` is the recipe's state (JSON). ``files``: what was written, as its writers say; it is looked for. Can be repeated
    after a CheckpointError.
    """
    checkpoints = folder.parent
    final = checkpoints / folder_name(step)
    with storage_errors("publishing", final):
        if folder != final and exists(final) and not exists(folder):  # a try before this one failed later
            set_pointer(final)
            return final
        known = {**files, RUN_STATE: write_file(folder / RUN_STATE, as_json(dict(run_state)))}
        fsync_folders(folder)
        write_manifest(folder, step, layout, known, details or {})
        if folder != final:
            if exists(final):
                rename_folder(final, free_name(checkpoints / f"{final.name}.damaged"))
            rename_folder(folder, final)
        set_pointer(final)
    return final


def write_manifest(
    folder: Path, step: int, layout: Mapping[str, Any], files: Mapping[str, FileEntry], details: Mapping[str, Any]
) -> Manifest:
    """Complete ``folder``, once every one of ``files`` is there with its size. CheckpointError if one is not."""
    with ThreadPoolExecutor(READERS) as pool:
        sizes = dict(zip(files, pool.map(lambda name: _size(folder / name), files), strict=True))
    for name, entry in files.items():
        if sizes[name] is None:
            raise CheckpointError(f"{folder}: a rank reported {name}, but it is not there; do all nodes share run_dir?")
        if sizes[name] != entry.bytes:
            raise CheckpointError(f"{folder / name}: its rank wrote {entry.bytes} bytes, there are {sizes[name]}; the save is void")
    manifest = Manifest(step, dict(layout), dict(sorted(files.items())), time.time(), _own_version(), details=dict(details))
    said = asdict(manifest)
    write_json(folder / MANIFEST, {**said, CHECKSUM: _checksum(said)})
    if is_local(folder):
        fsync(folder)
    return manifest


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def set_pointer(folder: Path, pointer: str = POINTER) -> None:
    """Let ``latest`` (or ``best``) name ``folder``, atomically."""
    write_atomic(folder.parent / pointer, (folder.name + "\n").encode())


def pointed_at(checkpoints: Path, pointer: str = POINTER) -> Path | None:
    """The folder that ``latest`` (or ``best``) names; None if there is no such pointer yet. BadInput if it names no checkpoint."""
    path = checkpoints / pointer
    try:
        with storage_errors("reading", path), _damage_as_it_is(path):
            content = read_file(path)
    except _Damaged as damaged:
        if isinstance(damaged.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise BadInput(f"{path}: unreadable ({_text(damaged)}); delete it") from damaged.__cause__
    name = content.decode(errors="replace").strip()
    if not _NAME.fullmatch(name):
        raise BadInput(f"{path}: names {name!r}, which is no checkpoint (step-N); write the name of one into it, or delete it")
    return checkpoints / name


def retire(checkpoints: Path, keep_last: int, keep_every: int = 0) -> list[Path]:
    """Delete complete checkpoints beyond the newest ``keep_last``, but those of every ``keep_every``-th step; returns what was deleted.

    Nothing is deleted before one of the kept ones has been read back and found undamaged, nor what
    ``latest`` or ``best`` name. Incomplete folders do not count and are not touched.
    """
    complete = [folder for folder in checkpoint_folders(checkpoints) if incomplete(folder) is None]
    kept, old = complete[:keep_last], complete[keep_last:]
    named = (pointed_at(checkpoints), pointed_at(checkpoints, BEST))
    old = [f for f in old if f not in named and not (keep_every and (step_of(f) or 0) % keep_every == 0)]
    if not old or all(damage(folder) for folder in kept):
        return []
    with storage_errors("deleting an old checkpoint in", checkpoints):
        return [folder for folder in reversed(old) if remove_folder(folder, first=(MANIFEST,))][::-1]


# ---------------------------------------------------------------- looking


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder; BadInput if it is missing, damaged or of another format, CheckpointError if storage does not
    let us look."""
    path = folder / MANIFEST
    try:
        with storage_errors("reading", path), _damage_as_it_is(path):
            content = read_file(path)
    except _Damaged as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError):
            raise BadInput(f"{folder}: no {MANIFEST}, so the checkpoint is not complete") from None
        raise BadInput(f"{path}: unreadable ({type(cause).__name__}: {cause})") from cause
    try:
        raw = json.loads(content)
        if raw["format"] > FORMAT:
            raise BadInput(f"{path}: written by everstep {raw['everstep']} in format {raw['format']}; upgrade everstep")
        if raw["format"] < FORMAT:
            raise BadInput(
                f"{path}: written by everstep {raw['everstep']} in format {raw['format']}, which is no longer read; start a new run from "
                f"its weights with model.path={folder / 'hf'}"
            )
        said = raw.pop(CHECKSUM, None)  # those of before it have none
        found = _checksum(raw)
        files = {within(name): FileEntry(**entry) for name, entry in raw.pop("files").items()}
        manifest = Manifest(files=files, **raw)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: unreadable ({type(error).__name__}: {error})") from error
    if said is not None and said != found:
        raise BadInput(f"{path}: damaged, checksum {found} where it says {said} itself")
    if step_of(folder) not in (None, manifest.step):
        raise BadInput(f"{path}: is of step {manifest.step}, which its folder's name is not; call it {folder_name(manifest.step)} again")
    return manifest


def _checksum(said: Mapping[str, Any]) -> str:
    """xxh3-128 of what a manifest says, however it is laid out."""
    return xxhash.xxh3_128_hexdigest(json.dumps(said, sort_keys=True, separators=(",", ":")).encode())


class _Damaged(EverstepError):
    """Something of a checkpoint is not what it was, as its cause says; never leaves this module."""


@contextmanager
def _damage_as_it_is(path: Path) -> Iterator[None]:
    """Tells damage from storage that does not answer: that must not cost a checkpoint."""
    try:
        yield
    except OSError as error:
        if says_damaged(path, error):
            raise _Damaged(str(error)) from error
        raise


def incomplete(folder: Path) -> str | None:
    """Why ``folder`` is not a complete checkpoint (manifest, every file, its size); None if it is. Reads no
    data. CheckpointError if storage does not let us look: that says nothing about the checkpoint.
    """
    try:
        manifest = read_manifest(folder)
    except BadInput as error:
        return str(error)

    def reason(name: str) -> str | None:
        try:
            with storage_errors("looking at", folder / name), _damage_as_it_is(folder / name):
                size = (folder / name).stat().st_size
        except _Damaged as damaged:
            return f"{folder / name}: {_text(damaged)}"
        expected = manifest.files[name].bytes
        return None if size == expected else f"{folder / name}: has {size} bytes, the manifest says {expected}"

    return _first(reason, manifest.files)


def damage(folder: Path) -> str | None:
    """Like ``incomplete``, and reads every byte: also names the first file whose checksum is wrong, and the tensor."""
    if found := incomplete(folder):
        return found
    manifest = read_manifest(folder)

    def reason(name: str) -> str | None:
        entry = manifest.files[name]
        try:
            with storage_errors("reading", folder / name), _damage_as_it_is(folder / name):
                checksum = digest(folder / name, entry.bytes)
        except _Damaged as damaged:
            return f"{folder / name}: {_text(damaged)}"
        if checksum == entry.xxh3_128:
            return None
        tensor = damaged_tensor(folder, name)
        return f"{folder / name}: damaged{f' in {tensor}' if tensor else ''}, checksum {checksum} where the manifest says {entry.xxh3_128}"

    return _first(reason, manifest.files)


def _text(damaged: _Damaged) -> str:
    return getattr(damaged.__cause__, "strerror", None) or str(damaged)


def _first(reason: Any, names: Mapping[str, Any]) -> str | None:
    """Of the names, in order, the first with a reason; asked several at a time."""
    with ThreadPoolExecutor(READERS) as pool:
        found: str | None = next((said for said in pool.map(reason, names) if said), None)
    return found


def verify(folder: Path) -> Manifest:
    """Read all of a checkpoint; BadInput naming the missing, truncated or damaged file."""
    reason = damage(folder)
    if reason:
        raise BadInput(f"checkpoint is not usable: {reason}")
    return read_manifest(folder)


def read_run_state(folder: Path) -> dict[str, Any]:
    """The recipe's state as given to ``publish``."""
    with storage_errors("reading", folder / RUN_STATE):
        state: dict[str, Any] = json.loads(read_file(folder / RUN_STATE))
    return state


def _own_version() -> str:
    try:
        return version("everstep")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
