"""The parent of a controller that is started again by itself when it was killed (recovery.controller_restarts).

It imports nothing heavy, holds nothing, and only waits. A signal to it goes to the controller, which shuts down in order; if it is
killed itself the controller is interrupted.
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
from everstep.errors import CoordinatorLost
from everstep.recovery import rendezvous
from everstep.run_dir import local_folder

SUPERVISED = "EVERSTEP_SUPERVISED"  # in the environment of a controller that has such a parent


def wanted(config: Config) -> bool:
    return config.recovery.controller_restarts > 0 and SUPERVISED not in os.environ


def supervise(config: Config, arguments: Sequence[str]) -> int:
    """Run ``everstep ARGUMENTS``; as often as configured, a controller that was killed is followed by one with ``--attach``.

    Returns the exit code of the last one. Raises CoordinatorLost if that was killed too.
    """
    left, attach = config.recovery.controller_restarts, "--attach" in arguments
    while True:
        command = [sys.executable, "-m", "everstep", *(a for a in arguments if not (attach and a in ("--clean", "--attach")))]
        process = subprocess.Popen(
            [*command, *(["--attach"] if attach else [])], env=os.environ | {SUPERVISED: "1"},
            preexec_fn=lambda: die_with_parent(signal.SIGTERM), start_new_session=True,  # a terminal's signals come through us
        )
        code = _wait(process)
        if code >= 0:
            return code
        cause = f"the controller was killed by {signal.Signals(-code).name}"
        if rendezvous.find(local_folder(config.run_dir)) is None:
            raise CoordinatorLost(f"{cause} before its workers were ready; start again with resume=auto or --clean")
        if left == 0:
            raise CoordinatorLost(
                f"{cause}, for the {config.recovery.controller_restarts + 1}th time (recovery.controller_restarts); its workers wait "
                f"{config.recovery.controller_grace_s:g} s for --attach, then continue with resume=auto"
            )
        print(f"everstep: {cause}; another one takes over", file=sys.stderr, flush=True)
        left, attach = left - 1, True


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; signals that come meanwhile go to it."""

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
