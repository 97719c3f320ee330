"""What watching costs a run: act by act, and whole runs with and without it.

    python -m benchmarks.watching [--ranks 64] [--pairs 6] [--steps 60] [--out FILE.json]

**Acts**: on this machine and with real objects, everything that a step does only because it is watched. In the lead: the comparison of all
ranks' times, of metrics with their past, the `ft/*` metrics, an event offered to an alert, the state that is replaced every second. In a rank:
the log's look at its level in each phase. Microseconds of the thread's processor time.

**Runs** (`--pairs`): pairs of real runs of the same shape and seed, by turns, one watched as it is by default, one with everything in :data:`OFF`
taken out. Compared are the seconds of a step (the median of each run), and of the lead's processor time for a step, which other
processes of the machine disturb less. The difference is given with what noise makes of it: the same number from pairs of two runs of
the same kind, beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.circumstances import ROOT, circumstances
from everstep.config.load import load_config
from everstep.config.watch_schema import AlertConfig
from everstep.telemetry.alerts import Alerts
from everstep.telemetry.events import of_kind, read_events, seconds_between
from everstep.telemetry.ongoing import Ongoing
from everstep.telemetry.spikes import Spikes
from everstep.telemetry.status import PULSE_S, replace_file
from everstep.telemetry.stragglers import Stragglers, Timed

PHASES = 12  # that a rank enters in a step, and the lines it would log then
WARM_STEPS = 8
#: What makes a run unwatched, beside what is patched out below. A further part of watching belongs here, with what takes it out.
OFF = ["watch.agent_every_s=0", "watch.spike_ratio=0", "watch.diagnose=false", "watch.admission=never", "log.level=error"]
#: Watching beyond the defaults: what each step may cost at most.
MORE = ["watch.check_state_every=1", "watch.rerun_every=10", "telemetry.dashboard=true"]


def microseconds(act: Callable[[int], object], times: int = 2000) -> float:
    """Of this thread's processor time: what the pulse waits for the disk delays nobody."""
    begun = time.thread_time()
    for number in range(times):
        act(number)
    return (time.thread_time() - begun) / times * 1e6


def acts(ranks: int) -> dict[str, float]:
    """Microseconds for each step (of one second) by what they are spent on; the last one is a rank's, the others the lead's."""
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
    return found


# -- whole runs ------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def unwatched() -> Any:
    """In this process, the lead's: no comparison of times, no state replaced each second, nobody who may look from elsewhere, no structured log."""
    from everstep.cluster.controller.watch import Watch
    from everstep.telemetry.watching import Watching

    kept = Watch.step, Watching.begin, Watching.follow
    Watch.step = lambda self, step, reports, view: None  # type: ignore[method-assign]
    Watching.begin = lambda self, run_dir, own_log: None  # type: ignore[method-assign]
    Watching.follow = lambda self, run_dir, ask, host: ""  # type: ignore[method-assign]
    try:
        yield
    finally:
        Watch.step, Watching.begin, Watching.follow = kept  # type: ignore[method-assign]


def one_run(folder: Path, steps: int, kind: str, overrides: Sequence[str]) -> dict[str, float]:
    """``kind``: watched, unwatched, or more. ``step_s``: median seconds between commits; ``lead_s``: of this process's processor time, a step."""
    from everstep.cluster.forked import ForkedHost
    from everstep.driver import run

    config = load_config(str(ROOT / "examples" / "sft_text.yaml"), [
        "device=cpu", f"model.path={ROOT}/benchmarks/shapes/qwen3-small", "model.init=random", f"model.tokenizer={ROOT}/examples/models/tiny-qwen3",
        "data.source=benchmarks.texts:digits", "data.source_args={length: 28}", "data.max_tokens=128", "train.micro_batch_size=1", "sft.samples_per_step=4",
        f"sft.steps={steps}", "layout.replicas=2", "checkpoint.at_end=false", "telemetry.tensorboard=false", "telemetry.progress=none",
        "optimizer.warmup_steps=1", f"run_dir={folder}", *({"unwatched": OFF, "more": MORE}.get(kind, ())), *overrides,
    ])
    with contextlib.redirect_stdout(io.StringIO()), unwatched() if kind == "unwatched" else contextlib.nullcontext():
        used = time.process_time()
        if code := run(config, host=ForkedHost):
            raise SystemExit(f"the run in {folder} ended with exit code {code}")
        used = time.process_time() - used
    commits = of_kind(read_events(folder / "events"), "commit")
    spans = [seconds_between(a, b) for a, b in itertools.pairwise(commits[WARM_STEPS:])]
    return {"step_s": statistics.median(spans), "mean_s": statistics.mean(spans), "lead_s": used / steps}


def pairs(count: int, steps: int, folder: Path, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Rounds of four runs, in an order that turns: watched, unwatched, unwatched again (for the noise), and watched beyond the defaults."""
    kinds = ["watched", "unwatched", "again", "more"]
    rounds = []
    one_run(folder / "first", WARM_STEPS + 3, "watched", overrides)  # what this process loads once is no run's cost
    for number in range(count):
        found: dict[str, Any] = {}
        for kind in kinds[number % 4 :] + kinds[: number % 4]:
            found[kind] = one_run(folder / f"{number}-{kind}", steps, "unwatched" if kind == "again" else kind, overrides)
        rounds.append(found)
        print(f"round {number}: " + ", ".join(f"{kind} {1e3 * found[kind]['step_s']:.1f} ms" for kind in kinds), flush=True)
    return rounds


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of ratios to the unwatched run of the same round: median, least, greatest (step_s); and milliseconds of a step that they are."""
    found = {}
    for kind, what in (("watched", "watched as by default"), ("again", "unwatched again: noise"), ("more", " ".join(MORE))):
        ratios = sorted(r[kind]["step_s"] / r["unwatched"]["step_s"] - 1 for r in rounds)
        lead = [r[kind]["lead_s"] - r["unwatched"]["lead_s"] for r in rounds]
        step = statistics.median(r["unwatched"]["step_s"] for r in rounds)
        found[what] = {"step_percent": 100 * statistics.median(ratios), "least_percent": 100 * ratios[0], "most_percent": 100 * ratios[-1],
                       "lead_ms": 1e3 * statistics.median(lead), "lead_percent_of_step": 100 * statistics.median(lead) / step}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64, help="ranks of the acts, two in each replica")
    parser.add_argument("--pairs", type=int, default=0, help="rounds of whole runs; 0: the acts alone")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--out", help="JSON file for all numbers")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of every run")
    args = parser.parse_args(arguments)
    found = acts(args.ranks)
    for name, cost in found.items():
        print(f"{cost:10.1f} us  {name}")
    *in_lead, in_rank = found.values()
    print(f"{sum(in_lead):10.1f} us  in the lead: {sum(in_lead) / 1e4:.3f}% of a step of one second; in a rank: {in_rank / 1e4:.4f}%")
    report: dict[str, Any] = {"circumstances": circumstances("watching", arguments), "ranks": args.ranks, "acts_us": found}
    if args.pairs:
        with tempfile.TemporaryDirectory() as folder:
            rounds = pairs(args.pairs, args.steps, Path(folder), args.overrides)
        table = summary(rounds)
        step = statistics.median(r["unwatched"]["step_s"] for r in rounds)
        print(f"\n{args.pairs} rounds of runs of {args.steps} steps; a step unwatched: {1e3 * step:.1f} ms\n")
        print("| against the unwatched run of the same round | step time, median | from | to | lead's processor time, of a step |\n|---|---|---|---|---|")
        for what, row in table.items():
            print(f"| {what} | {row['step_percent']:+.2f}% | {row['least_percent']:+.2f}% | {row['most_percent']:+.2f}% | "
                  f"{row['lead_ms']:+.2f} ms, {row['lead_percent_of_step']:+.2f}% |")
        report |= {"rounds": rounds, "summary": table}
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
