"""Temporary folders that are gone when their process is, however it ended.

    with scratch.folder("exit") as folder: ...

What a SIGKILL leaves behind, the next process that asks for a folder of the same kind removes. Whoever made a folder holds a lock on it that
the kernel gives back at his end, so that nobody needs to believe a process id, which another machine or container may count differently.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_YOUNG_S = 60.0  # its maker may not have locked it yet


@contextlib.contextmanager
def folder(kind: str) -> Iterator[Path]:
    """A new folder ``everstep-KIND.*`` among the temporary files, for its owner alone, until the end of the block."""
    _sweep(kind)
    path = Path(tempfile.mkdtemp(prefix=f"everstep-{kind}."))
    lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: then nobody will get one to remove it either
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _sweep(kind: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"everstep-{kind}.*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone already
            left = path.lstat()
            if left.st_uid != os.getuid() or time.time() - left.st_mtime < _YOUNG_S:
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its maker lives
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
