"""Processes that must not outlive the one that started them: marked by a token in their environment, killed by it.

A process that ends in order stops its own. For the one that is killed there is the watch: a small process that waits at a
pipe, and when its other end closes without a word, kills everything that carries the token. Ray's own processes notice the
death of their driver, but two of its agents wait a minute for a server that is gone, and a frozen actor notices nothing.

Where another controller may take over (recovery.controller_grace_s) the watch gives it that time first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import psutil

from everstep.errors import BadInput
from everstep.recovery import rendezvous

TOKEN = "EVERSTEP_LAUNCH"  # the environment variable that marks every process of one launch
_DONE = b"done"
_GRACE_S = 3.0  # for what ends by itself
_POLL_S = 0.2


class Watch:
    """While it is open, the death of this process kills all that carry ``token``, and Ray's processes of ``also_of``.

    ``run_dir``, ``grace_s``: not if another controller announces itself there in time. ``folder``: is removed then.
    """

    def __init__(self, token: str, run_dir: str = "", grace_s: float = 0.0, folder: str = ""):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "everstep.cluster.orphans", token, run_dir, str(grace_s), folder, str(os.getpid())], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,  # it may outlive us: whoever reads what we say shall not wait for it
            env={name: value for name, value in os.environ.items() if name != TOKEN},
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin

    def also_of(self, session: str) -> None:
        """Processes of the Ray session with this folder: those that write their title over their environment."""
        with contextlib.suppress(BrokenPipeError):  # somebody killed the watch
            self._stdin.write(session.encode() + b"\n")
            self._stdin.flush()

    def close(self) -> None:
        """End the watch; nothing is killed. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            if not self._stdin.closed:
                self._stdin.write(_DONE)
                self._stdin.close()
        self._process.wait()

    def leave(self) -> None:
        """What the death of this process leads to happens now: after the grace, unless another controller came."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def kill_all(token: str, session: str = "") -> list[int]:
    """SIGKILL every process of the launch with this token, orphans included, and Ray's of the session with this folder.

    Returns their ids once they are gone.
    """
    found: dict[int, psutil.Process] = {}
    while True:
        alive = [p for p in psutil.process_iter() if p.pid not in found and (_carries(p, token) or _is_rays(p, session))]
        if not alive:
            break
        for process in alive:
            found[process.pid] = process
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    psutil.wait_procs(list(found.values()), timeout=10)
    return sorted(found)


def _carries(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False  # gone, or somebody else's


def _is_rays(process: psutil.Process, session: str) -> bool:
    try:
        return bool(session) and process.name().startswith("ray::") and any(
            file.path.startswith(session + os.sep) for file in process.open_files()
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def _watch(token: str, run_dir: str, grace_s: float, folder: str, watched: int) -> None:
    heard = sys.stdin.buffer.read()  # until the other end closes, or its process is gone
    if heard.endswith(_DONE):
        return
    end = time.monotonic() + max(_GRACE_S, grace_s)
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        if grace_s and _taken_over(Path(run_dir), watched):
            return
    kill_all(token, heard.decode().strip() or folder)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    if grace_s:
        rendezvous.withdraw(Path(run_dir))


def _taken_over(run_dir: Path, watched: int) -> bool:
    """Whether another controller than the one that was watched has announced itself."""
    try:
        found = rendezvous.find(run_dir)
    except BadInput:
        return False
    return found is not None and found.pid != watched and psutil.pid_exists(found.pid)


if __name__ == "__main__":
    _watch(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
