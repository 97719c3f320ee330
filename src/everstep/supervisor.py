"""The parent of a controller that is started again by itself when it was killed (recovery.controller_restarts).

It imports nothing heavy, holds nothing, and only waits. A signal to it goes to the controller, which shuts down in order, or dies of it while
it comes up; no other one follows then. If it is killed itself the controller is interrupted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from everstep.cluster.processes import die_with_parent
from everstep.config.schema import Config
from everstep.errors import CoordinatorLost, Interrupted
from everstep.recovery import rendezvous
from everstep.run_dir import local_folder

SUPERVISED = "EVERSTEP_SUPERVISED"  # in the environment of a controller that has such a parent


def wanted(config: Config) -> bool:
    return config.recovery.controller_restarts > 0 and SUPERVISED not in os.environ


def supervise(config: Config, arguments: Sequence[str]) -> int:
    """Run ``everstep ARGUMENTS``; as often as configured, a controller that was killed is followed by one with ``--attach``.

    Returns the exit code of the last one. Raises CoordinatorLost if that was killed too, Interrupted if it had been told to stop.
    """
    left, attach = config.recovery.controller_restarts, "--attach" in arguments
    with _Signals() as signals:
        while True:
            command = [sys.executable, "-m", "everstep", *(a for a in arguments if not (attach and a in ("--clean", "--attach")))]
            process = subprocess.Popen(
                [*command, *(["--attach"] if attach else [])], env=os.environ | {SUPERVISED: "1"},
                preexec_fn=lambda: die_with_parent(signal.SIGTERM), start_new_session=True,  # a terminal's signals come through us
            )
            signals.forward_to(process)
            code = process.wait()
            if code >= 0:
                return code
            cause = f"the controller was killed by {signal.Signals(-code).name}"
            waits = rendezvous.find(local_folder(config.run_dir)) is not None
            if signals.received:
                workers = f"; its workers wait {config.recovery.controller_grace_s:g} s for --attach, then" if waits else ";"
                raise Interrupted(f"interrupted by {signal.Signals(signals.received[0]).name}; {cause}{workers} continue with resume=auto")
            if not waits:
                raise CoordinatorLost(f"{cause} before its workers were ready; start again with resume=auto or --clean")
            if left == 0:
                raise CoordinatorLost(
                    f"{cause}, for the {config.recovery.controller_restarts + 1}th time (recovery.controller_restarts); its workers wait "
                    f"{config.recovery.controller_grace_s:g} s for --attach, then continue with resume=auto"
                )
            print(f"everstep: {cause}; another one takes over", file=sys.stderr, flush=True)
            left, attach = left - 1, True


class _Signals:
    """Signals to this process go to the controller, SIGHUP as SIGTERM: it knows no other. ``received``: which came so far."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Signals:
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
        numbers = (signal.SIGINT, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,)))
        self._before = {number: signal.signal(number, self._take) for number in numbers}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def forward_to(self, process: subprocess.Popen[bytes]) -> None:
        """From now on, and what came while it was being started."""
        self._process = process
        if self.received:
            process.send_signal(signal.SIGTERM)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if self._process:
            self._process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
