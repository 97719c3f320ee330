"""Where checkpoints lie: a local or mounted folder, or any address that fsspec knows (``s3://bucket/...``, ``gs://bucket/...``).

Paths are ``pathlib.Path`` for folders of this machine and ``upath.UPath`` for the rest, which has the same methods. What is written
here is durable when the call returns, and appears under its name whole or not at all: files of this machine are forced to the disk,
and replaced by renaming; an object appears when its upload is complete.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec.core
import xxhash
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError
from upath import UPath

from everstep.errors import BadInput, EverstepError

T = TypeVar("T")

_PIECE_BYTES = 16 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0
_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 30}
#: Nothing is remembered of what an object store said: other processes write there too.
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": _TIMEOUTS}, "s3a": {"config_kwargs": _TIMEOUTS}}


class CheckpointError(EverstepError):
    """A checkpoint could not be written or read now (disk full, read-only, vanished); older ones are
    untouched.
    """


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and xxh3-128 of one file."""

    bytes: int
    xxh3_128: str


def place(address: str | Path, anew: bool = False) -> Path:
    """``address`` as a path. ``anew``: with a connection of its own, and credentials looked up again. BadInput if fsspec
    does not know such addresses, or lacks what it needs for them."""
    address = str(address)
    try:
        filesystem, path = fsspec.core.url_to_fs(address, **_options(address))
    except (ValueError, ImportError) as error:
        raise BadInput(f"{address}: not an address of a folder: {error}") from error
    except Exception as error:  # whatever the library for that storage raises, for lack of credentials for example
        raise BadInput(f"{address}: cannot be used: {type(error).__name__}: {error}") from error
    if isinstance(filesystem, LocalFileSystem):
        return Path(path)
    if anew:
        type(filesystem).clear_instance_cache()
    return UPath(address.rstrip("/"), **_options(address))  # type: ignore[return-value]


def _options(address: str) -> dict[str, Any]:
    protocol, separator, _ = address.partition("://")
    if not separator or protocol in ("file", "local"):
        return {}
    return {"use_listings_cache": False, **_OPTIONS.get(protocol, {})}


def local_folder(address: str | Path) -> Path:
    """``address`` as an absolute path. BadInput if it names storage that is not a local or mounted folder."""
    path = place(address)
    if not is_local(path):
        raise BadInput(
            f"{address}: a run folder must be a local or mounted folder, not {type(path.fs).__name__}; "  # type: ignore[attr-defined]
            "mount the bucket, or choose another run_dir and set checkpoint.path to the bucket"
        )
    return path


def is_local(path: Path) -> bool:
    return isinstance(path, Path)


# ---------------------------------------------------------------- trouble


@contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn what an operating system or a storage library raises into a CheckpointError that says what was done, where, and what to do."""
    try:
        yield
    except EverstepError:
        raise
    except Exception as error:  # a fault boundary: storage libraries' errors have no common type
        if is_local(path) and not isinstance(error, OSError | SafetensorError):
            raise  # a bug; of remote storage every library has errors of its own
        number, looks = error.errno if isinstance(error, OSError) else None, doing in ("reading", "looking at")
        text = str(error) or type(error).__name__
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "Disk quota" in text:
            advice = "free space there or choose another run_dir"
        elif number in (errno.EROFS, errno.EACCES, errno.EPERM) or "Permission denied" in text or "Read-only" in text:
            own = "let this user read it" if looks else "make the folder writable or choose another run_dir"
            advice = own if is_local(path) else "check the credentials"
        else:
            advice = "check the disk" if is_local(path) else "check the address, the network and the credentials"
        rest = "" if looks else ". Earlier checkpoints are untouched: resume=auto continues there"
        raise CheckpointError(f"{doing} {path} failed: {text}; {advice}{rest}") from error


def patiently(
    action: Callable[[Path], T], path: Path, for_s: float, stop: threading.Event | None = None, note: Callable[[str], None] | None = None
) -> T:
    """``action(path)``, made again after each CheckpointError, with growing pauses, for ``for_s`` seconds in all; then it is raised.

    Every further try on remote storage has a new connection and looks up its credentials again. ``stop`` ends the pauses;
    ``note`` is told of the first failure.
    """
    end, pause, tries = time.monotonic() + for_s, _FIRST_PAUSE_S, 0
    while True:
        try:
            return action(path)
        except CheckpointError as error:
            tries += 1
            if time.monotonic() + pause > end or (stop is not None and stop.is_set()):
                raise
            if tries == 1 and note:
                note(str(error))
        wait = pause * random.uniform(0.5, 1.0)  # not all ranks at once
        if stop is None:
            time.sleep(wait)
        else:
            stop.wait(wait)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        if not is_local(path):
            path = place(path, anew=True)


# ---------------------------------------------------------------- what is there
#
# Not by the methods of paths and of storage libraries: those say "no" as well when nobody answered, and what is not there is written
# anew, passed over or deleted.


def is_file(path: Path) -> bool:
    """Whether there is such a file. Raises what storage raises that does not say."""
    return _kind(path) == "file"


def is_folder(path: Path) -> bool:
    """Whether there is such a folder. Raises what storage raises that does not say."""
    return _kind(path) == "directory"


def exists(path: Path) -> bool:
    """Whether there is anything of this name. Raises what storage raises that does not say."""
    return _kind(path) is not None


def _kind(path: Path) -> str | None:
    try:
        if not is_local(path):
            kind: str = path.fs.info(path.path)["type"]  # type: ignore[attr-defined]
            return kind
        mode = path.stat().st_mode
    except OSError as error:
        if not says_absent(error):
            raise
        return None
    return "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "other"


def says_absent(error: OSError) -> bool:
    """Whether storage says that there is no such thing, and not that it could not look."""
    return isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno in (errno.ELOOP, errno.ENAMETOOLONG)


def says_damaged(path: Path, error: OSError) -> bool:
    """Whether the file at ``path`` is not what it was: gone, something else, or on a part of the disk that cannot be read any more.
    Else it was not looked at, and may be whole: storage did not answer, or does not let us."""
    return says_absent(error) or isinstance(error, IsADirectoryError) or (is_local(path) and error.errno == errno.EIO)


def folder_entries(folder: Path) -> list[tuple[Path, bool]]:
    """(entry, whether it is a folder) of all that lies in ``folder``; empty if there is none. Raises what storage raises that does not
    say."""
    try:
        if is_local(folder):
            return [(path, is_folder(path)) for path in folder.iterdir()]
        found = folder.fs.ls(folder.path, detail=True)  # type: ignore[attr-defined]
    except OSError as error:
        if not says_absent(error):
            raise
        return []
    names = [(entry["name"].rstrip("/").rpartition("/")[2], entry["type"] == "directory") for entry in found
             if entry["name"].strip("/") != folder.path.strip("/")]  # type: ignore[attr-defined]
    return [(folder / name, is_one) for name, is_one in names]


# ---------------------------------------------------------------- files


def write_file(path: Path, data: bytes | memoryview) -> FileEntry:
    """Write ``path``, durable on return. On this machine a death leaves a part of it: for what nothing names yet."""
    if is_local(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view[:_PIECE_BYTES]) :]
            os.fsync(file.fileno())
    else:
        path.fs.pipe_file(path.path, bytes(data))  # type: ignore[attr-defined]
    return FileEntry(len(data), xxhash.xxh3_128_hexdigest(data))


def read_file(path: Path, start: int = 0, end: int | None = None) -> bytes:
    """Bytes ``start`` to ``end`` of a file."""
    if not is_local(path):
        found: bytes = path.fs.cat_file(path.path, start=start or None, end=end)  # type: ignore[attr-defined]
        return found
    with open(path, "rb") as file:
        file.seek(start)
        return file.read() if end is None else file.read(end - start)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file at ``path``: a reader sees the old content or the new one, whole, whenever we die."""
    if not is_local(path):
        write_file(path, data)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync(path.parent)


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """``write_atomic`` of readable JSON."""
    write_atomic(path, as_json(value))


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


def fsync_folders(folder: Path) -> None:
    """Force the entries of ``folder`` and of all folders in it to the disk; its files have been."""
    if is_local(folder):
        for parent, _, _ in os.walk(folder, topdown=False):
            fsync(Path(parent))


def digest(path: Path, nbytes: int) -> str:
    """xxh3-128 of a file's content, which is ``nbytes`` long, as hexadecimal."""
    state = xxhash.xxh3_128()
    for start in range(0, nbytes, _PIECE_BYTES):
        state.update(read_file(path, start, min(start + _PIECE_BYTES, nbytes)))
    return state.hexdigest()


# ---------------------------------------------------------------- folders


def rename_folder(source: Path, target: Path) -> None:
    """Give ``source`` another name: in one instant on this machine, object after object elsewhere. ``target`` must not exist."""
    if exists(target):
        raise FileExistsError(errno.EEXIST, "already exists", str(target))
    if is_local(source):
        os.rename(source, target)
        fsync(target.parent)
    else:
        fs = source.fs  # type: ignore[attr-defined]
        start, end = source.path, target.path  # type: ignore[attr-defined]
        for path in fs.find(start):
            fs.cp_file(path, end + path.removeprefix(start))
        remove_folder(source)


def free_name(wanted: Path) -> Path:
    """``wanted``, or ``wanted-2``, ``wanted-3``, ...: the first that does not exist."""
    candidate, n = wanted, 1
    while exists(candidate):
        n += 1
        candidate = wanted.with_name(f"{wanted.name}-{n}")
    return candidate


def remove_folder(folder: Path, first: Sequence[str] = ()) -> bool:
    """Delete a folder, so that half of it is never mistaken for the whole: on this machine it loses its name first, elsewhere the
    files ``first``. False if somebody else, a run and ``--prune`` for example, deleted it at the same time."""
    if is_local(folder):
        doomed = folder
        if not folder.name.startswith("."):
            doomed = free_name(folder.with_name(f".{folder.name}.deleted"))
            try:
                os.rename(folder, doomed)
            except FileNotFoundError:
                return False
        return _remove_tree(doomed)
    fs = folder.fs  # type: ignore[attr-defined]
    for name in first:
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file((folder / name).path)  # type: ignore[attr-defined]
    for path in fs.find(folder.path):  # type: ignore[attr-defined]
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(path)
    return True


def _remove_tree(folder: Path) -> bool:
    """False if it was gone in the end by somebody else's hands."""
    while True:
        try:
            shutil.rmtree(folder)
            return True
        except FileNotFoundError:
            if not exists(folder):
                return False

