"""Temporary folders go with their process; those that a SIGKILL leaves, with the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from everstep import scratch

HOLDS = ("import sys, time; from everstep import scratch\n"
         "with scratch.folder('kept') as folder:\n    (folder / 'file').touch(); print(folder, flush=True); time.sleep(60)")


def test_what_a_kill_leaves_is_removed_and_what_somebody_uses_is_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    killed, living = (subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=env) for _ in range(2))
    try:
        left, used = (Path(process.stdout.readline().strip()) for process in (killed, living))  # type: ignore[union-attr]
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        young = tmp_path / "everstep-kept.young"
        young.mkdir()
        for path in (left, used):
            os.utime(path, (time.time() - 3600,) * 2)
        with scratch.folder("other"):
            assert left.exists(), "of another kind"
        with scratch.folder("kept") as mine:
            assert not left.exists() and (used / "file").exists() and young.exists() and mine.stat().st_mode & 0o077 == 0
        assert not mine.exists()
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()
