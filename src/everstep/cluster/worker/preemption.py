"""The notice that a machine or a process is about to be taken away: SIGTERM, or a file that appears on the machine.

Schedulers and clouds give it seconds to minutes before the kill. A worker passes it on, and is replaced between two steps; until then it
goes on computing, whatever its main thread is in.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

LOOK_S = 1.0  # between looks for the file


class Notices:
    """``told(cause, whole_node)`` is called at most once, on a thread of its own. Made on the main thread: signals are set there.

    The signal's handler does nothing: what wakes the thread is the byte that the interpreter's C handler writes
    (``signal.set_wakeup_fd``), even while the main thread is inside a call that does not return.
    """

    def __init__(self, file: str | None, told: Callable[[str, bool], None]):
        self._file, self._told = Path(file) if file else None, told
        self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="preemption", daemon=True).start()

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._read], [], [], LOOK_S if self._file else None)
            if ready and signal.SIGTERM in os.read(self._read, 256):
                return self._told("its process was sent SIGTERM", False)
            if self._file and self._file.exists():
                return self._told(f"{self._file} appeared on its machine (recovery.preemption_file)", True)
