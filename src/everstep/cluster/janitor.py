"""Whatever becomes of a run, its copies do not stay in a node's memory.

Every process of the run on a machine, the controller too, holds a shared lock on a file beside the copies; the kernel gives it back when
the process ends, however. One small process that outlives them all waits for the lock alone: when it has it, nobody is left. It gives
another controller, or another worker, some time to come; then it writes the copies to the disk, for ``resume=auto``, and frees the memory.
A run that ends in order frees it itself, and the janitor finds nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from everstep.cluster.orphans import TOKEN
from everstep.errors import EverstepError

LOCK = ".in-use"
ABANDONED = ".abandoned"
COMING_S = 60.0  # for a worker that is started in the place of a dead one, or another controller
_POLL_S = 0.2


def enter(folder: Path, flush_to: Path, grace_s: float) -> int:
    """This process uses the copies below ``folder``, which is made, until it ends or closes the descriptor that is returned.

    Whoever comes first starts the janitor. ``flush_to``: where it writes copies that nobody freed, ``grace_s`` or ``COMING_S`` (what is
    longer) after the last process is gone.
    """
    first = False
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        first = True
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    if first:
        # Through a shell that ends at once: nobody's child, so that whoever ends this process with all its children leaves it alone.
        subprocess.run(
            ["/bin/sh", "-c", 'exec "$0" -m everstep.cluster.janitor "$1" "$2" "$3" >/dev/null 2>&1 </dev/null &', sys.executable, str(folder),
             str(flush_to), str(max(grace_s, COMING_S))],
            start_new_session=True, check=True, env={n: v for n, v in os.environ.items() if n != TOKEN},
        )
    return fd


def abandon(folder: Path) -> None:
    """Nobody will come any more: the janitor need not wait."""
    with contextlib.suppress(OSError):  # it was faster
        (folder / ABANDONED).touch()


def wait(folder: Path, flush_to: Path, grace_s: float) -> None:
    """The janitor's life."""
    while _all_are_gone(folder):
        end = time.monotonic() + grace_s
        while folder.is_dir() and not _in_use(folder) and time.monotonic() < end and not (folder / ABANDONED).exists():
            time.sleep(_POLL_S)
        if not folder.is_dir() or _in_use(folder):
            continue
        with contextlib.suppress(OSError, ValueError, EverstepError):  # no room on the disk, no record: the memory is freed all the same
            if flush_to.parent.parent.is_dir():
                from everstep.checkpoint import flushed  # heavy, and seldom needed

                flushed.write(folder, flush_to)
        shutil.rmtree(folder, ignore_errors=True)


def _all_are_gone(folder: Path) -> bool:
    """Waits until no process uses the copies; False if there are none any more."""
    try:
        with open(folder / LOCK, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    except FileNotFoundError:
        return False
    return folder.is_dir()


def _in_use(folder: Path) -> bool:
    try:
        with open(folder / LOCK, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


if __name__ == "__main__":
    wait(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
