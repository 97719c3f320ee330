"""What watching costs a run in each step: ``python -m benchmarks.watching [--ranks 64]``.

Measures, on this machine and with real objects, everything that a step does only because it is watched: in the lead the comparison of
all ranks' times, of metrics with their past, the ``ft/*`` metrics, an event offered to an alert, and the state that is replaced every
second; in a rank the log's look at its level in each phase. Prints microseconds, and the share of a step of one second.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from everstep.config.watch_schema import AlertConfig
from everstep.telemetry.alerts import Alerts
from everstep.telemetry.ongoing import Ongoing
from everstep.telemetry.spikes import Spikes
from everstep.telemetry.status import PULSE_S, replace_file
from everstep.telemetry.stragglers import Stragglers, Timed

PHASES = 12  # that a rank enters in a step, and the lines it would log then


def microseconds(act: Callable[[int], object], times: int = 2000) -> float:
    """Of this thread's processor time: what the pulse waits for the disk delays nobody."""
    begun = time.thread_time()
    for number in range(times):
        act(number)
    return (time.thread_time() - begun) / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64, help="ranks of the run, two in each replica")
    ranks = parser.parse_args().ranks
    stragglers, spikes, ongoing = Stragglers(1.2, 60.0), Spikes(3.0, 50), Ongoing()
    times = {f"w{i}": Timed(i // 2, i % 2, {"compute": 0.5 + i * 1e-4, "apply": 0.02, "begin": 0.001}, 4) for i in range(ranks)}
    metrics = {"train/loss": 1.0, "train/grad_norm": 1.0, "timing_s/step": 1.0, "ft/attempts": 1.0}
    alerts = Alerts([AlertConfig(events=["death"], url="http://127.0.0.1:9/")], "run")
    state = {"ranks": {w: {"replica": t.replica, "rank": t.rank, "step": 5, "phase": "compute", "since_s": 0.1} for w, t in times.items()}}
    log = logging.getLogger("everstep.recovery.transaction")
    logging.getLogger("everstep").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "status.json"
        found = {
            f"stragglers among {ranks} ranks, each step": microseconds(lambda step: stragglers.step(float(step), times), 300),
            "spikes, each step": microseconds(lambda step: spikes.step(metrics)),
            "ft/* metrics, each step": microseconds(lambda step: ongoing.metrics(metrics, 0, 1)),
            "ten events past an alert, each step": 10 * microseconds(lambda step: alerts.offer({"event": "commit"})),
            "the state, each second": microseconds(lambda step: replace_file(path, json.dumps(state)), 300) / PULSE_S,
            "log calls of a rank, each step": PHASES * microseconds(lambda step: log.debug("%s, after %.4f s", "compute", 0.1)),
        }
    alerts.close()
    for name, cost in found.items():
        print(f"{cost:10.1f} us  {name}")
    lead = sum(list(found.values())[:-1])
    print(f"{lead:10.1f} us  in the lead: {lead / 1e4:.3f}% of a step of one second; in a rank: {found['log calls of a rank, each step'] / 1e4:.4f}%")


if __name__ == "__main__":
    main()
