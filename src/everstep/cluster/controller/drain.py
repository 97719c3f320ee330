"""``everstep drain``: ask a run to let ranks go, and wait until they have left."""

from __future__ import annotations

import time
from typing import TextIO

from everstep.cluster.endpoint import ask
from everstep.errors import BadInput, DeadlineExceeded
from everstep.run_dir import open_run_dir

_LOOK_S = 0.2


def drain(run: str, target: str, wait_s: float, out: TextIO) -> int:
    """``target``: a node, a rank, or a worker. Returns 0. Raises BadInput, and DeadlineExceeded if somebody is left after ``wait_s``."""
    folder = open_run_dir(run).path
    leaving = ask(folder, "drain", target=target)
    print(f"leaving: {', '.join(leaving)}", file=out)
    end = time.monotonic() + wait_s
    left = leaving
    while left and wait_s:
        try:
            left = sorted(set(ask(folder, "draining")) & set(leaving))
        except BadInput:
            print("the run has ended", file=out)
            return 0
        if left and time.monotonic() > end:
            raise DeadlineExceeded(
                f"{', '.join(left)} did not leave in {wait_s:g} s (--wait-s): the run cannot spare them before there are devices for others"
            )
        time.sleep(_LOOK_S if left else 0.0)
    if wait_s:
        print("all have left", file=out)
    return 0
