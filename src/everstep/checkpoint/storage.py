"""Durable, atomic writing: a file or folder appears at its final name whole, and survives a power cut, or not at all.

Local and mounted (NFS, Lustre, FUSE) folders. Addresses are parsed by fsspec, so that one of another kind
is refused by name instead of becoming a folder called ``s3:``.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec.core
import xxhash
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError

from everstep.errors import BadInput, EverstepError

_READ_BYTES = 4 << 20


class CheckpointError(EverstepError):
    """A checkpoint could not be written or read now (disk full, read-only, vanished); older ones are
    untouched.
    """


def local_folder(address: str | Path) -> Path:
    """``address`` as an absolute path. BadInput if it names storage that is not a local or mounted folder."""
    try:
        filesystem, path = fsspec.core.url_to_fs(str(address))
    except (ValueError, ImportError) as error:
        raise BadInput(f"{address}: not an address of a folder: {error}") from error
    if not isinstance(filesystem, LocalFileSystem):
        raise BadInput(
            f"{address}: a run folder must be a local or mounted folder, not {type(filesystem).__name__}; "
            "mount the bucket or choose another run_dir"
        )
    return Path(path)


@contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an operating-system error into a CheckpointError that says what was done, where, and what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else None
        text = str(error)
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "Disk quota" in text:
            advice = "free space there or choose another run_dir"
        elif number in (errno.EROFS, errno.EACCES, errno.EPERM) or "Permission denied" in text or "Read-only" in text:
            advice = "make the folder writable or choose another run_dir"
        else:
            advice = "check the disk"
        raise CheckpointError(
            f"{doing} {path} failed: {text}; {advice}. Earlier checkpoints are untouched: resume=auto continues there"
        ) from error


def fsync(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Force every file and folder below ``folder``, and itself, to the disk."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            fsync(Path(parent, name))
        fsync(Path(parent))


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file at ``path``: a reader sees the old content or the new one, whole, whenever we die."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """``write_atomic`` of readable JSON."""
    write_atomic(path, (json.dumps(value, indent=1) + "\n").encode())


def rename_folder(source: Path, target: Path) -> None:
    """Give ``source`` its final name in one instant; ``target`` must not exist. Both lie in one file
    system.
    """
    if target.exists():
        raise FileExistsError(errno.EEXIST, "already exists", str(target))
    os.rename(source, target)
    fsync(target.parent)


def free_name(wanted: Path) -> Path:
    """``wanted``, or ``wanted-2``, ``wanted-3``, ...: the first that does not exist."""
    candidate, n = wanted, 1
    while candidate.exists():
        n += 1
        candidate = wanted.with_name(f"{wanted.name}-{n}")
    return candidate


def remove_folder(folder: Path) -> None:
    """Delete a folder; it loses its name first, so that half of it is never mistaken for the whole."""
    doomed = free_name(folder.with_name(f".{folder.name}.deleted"))
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def digest(path: Path) -> str:
    """xxh3-128 of a file's content, as hexadecimal."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            state.update(block)
    return state.hexdigest()
