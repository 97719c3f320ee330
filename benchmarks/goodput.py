"""What is left of a cluster's work when something dies every 20, 60 or 120 seconds: ours and a restart from checkpoints, on as many devices.

    python -m benchmarks.goodput                        what the machine allows: GPUs if there are any, else the CPU
    python -m benchmarks.goodput --forked               CPU, forked children in the place of Ray: every start is quicker, the rival's most of all
    python -m benchmarks.goodput --quick                both systems, one rate, half a minute each; for a look

    ours       all devices but one are replicas, one is a spare that is filled up again; copies in memory, should all die
    no spare   all devices are replicas; who died is started anew; copies in memory, as above
    restart    all devices are replicas, recovery.enabled=false; asynchronous checkpoints every --saved-every steps, `resume=auto` as soon as
               the run has ended

All do the same work: the same model, samples and micro-batches of a step. The clock of a run starts once it is warm; from then on a rank is
killed from outside every so many seconds, the first half such a time later; the same replicas at the same moments in each system. A
moment that finds no process of the run (the rival is starting) kills nobody, which is in its favour, and is counted as missed. At the end what has been
committed counts, saved or not. Goodput: samples a second, over those of the best system left undisturbed on these devices. Each system goes undisturbed
for a while first, in turn with the others. Exit code 1: a run of ours does not prove the invariants (`everstep verify`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.circumstances import ROOT, circumstances, environment
from benchmarks.recovery import WORK, gpus, shape_of, work
from everstep.errors import EverstepError
from everstep.telemetry.events import Event, EventLogError, of_kind, read_events
from everstep.telemetry.history import check
from everstep.telemetry.status import status

SYSTEMS = ("ours", "no spare", "restart")
WARM_STEPS = 5
_START_S = 300.0  # for a run to get warm
_POLL_S = 0.02


@dataclass(frozen=True)
class Run:
    """One system under one rate of failure. ``every_s`` 0: nobody was killed. ``steps``: committed in ``seconds``, those that were taken back and
    made again once. ``longest_s``: without a new step."""

    system: str
    every_s: float
    devices: int
    seconds: float
    kills: int
    missed: int
    steps: int
    samples_per_s: float
    longest_s: float
    broken: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    if args.child:
        return _child(args.child)
    folder = Path(args.runs or tempfile.mkdtemp(prefix="everstep-goodput-"))
    runs: list[Run] = []
    for every in (0.0, *args.every):
        for system in args.systems:
            seconds = args.calm if not every else 60 * args.minutes
            runs.append(one(system, every, seconds, args, args.device, folder / f"{system.replace(' ', '-')}-{every:g}"))
            print(_line(runs[-1]), flush=True)
    best = max((r.samples_per_s for r in runs if not r.every_s), default=float("nan"))
    print_table(runs, best)
    if args.out:
        Path(args.out).write_text(json.dumps({"about": circumstances("goodput", arguments), "best_undisturbed": best, "runs": [asdict(r) for r in runs]}, indent=1) + "\n")
    if args.picture:
        draw(runs, best, Path(args.picture))
    if not args.runs:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if any(r.broken for r in runs) else 0


# -- a run ------------------------------------------------------------------------------------------------------------------------------------


def overrides(system: str, args: argparse.Namespace, device: str) -> list[str]:
    spares = 1 if system == "ours" else 0
    ours = [f"layout.replicas={args.devices - spares}", f"layout.spares={spares}", "recovery.restart_attempts=100", "checkpoint.every_steps=0",
            f"recovery.memory_checkpoint_every={args.saved_every}"]
    rival = [f"layout.replicas={args.devices}", "layout.spares=0", "recovery.enabled=false", f"checkpoint.every_steps={args.saved_every}",
             "checkpoint.hf=false", "checkpoint.keep_last=2"]  # fmt: skip
    return [*work(shape_of(args, device), device), "sft.steps=1000000", "faults=[]", "telemetry.progress=none",
            *(rival if system == "restart" else ours), *args.overrides]  # fmt: skip


def one(system: str, every_s: float, seconds: float, args: argparse.Namespace, device: str, folder: Path) -> Run:
    """Start it, wait until it is warm, kill, and read what it made. Raises RuntimeError if it does not get warm."""
    given = [*overrides(system, args, device), f"run_dir={folder}"]
    samples, rng = WORK[device][0], random.Random(args.seed)
    process = _start(given, args.forked, folder)
    try:
        begun = _wait_until_warm(process, folder)
        strikes = [begun + every_s * (i + 0.5) for i in range(int(seconds / every_s + 0.5))] if every_s else []
        victims = [rng.randrange(args.devices - 1) for _ in strikes]
        kills = missed = 0
        while (now := time.time()) < begun + seconds:
            if process.poll() is not None:
                if system != "restart":
                    raise RuntimeError(f"{system}: the run ended with exit code {process.returncode}; its log is {folder.with_suffix('.out')}")
                process = _start([*given, "resume=auto"], args.forked, folder)
            if kills + missed < len(strikes) and now >= strikes[kills + missed]:
                hit = _strike(folder, victims[kills + missed])
                kills, missed = kills + hit, missed + (not hit)
            time.sleep(_POLL_S)
        until = time.time()
    finally:
        _end(process)
    events = read_events(folder / "events")
    steps, longest = progress(events, begun, until)
    broken = [f"{f.number}: {f.counterexample}" for f in check(folder) if f.held is False] if system != "restart" else []
    return Run(system, every_s, args.devices, until - begun, kills, missed, steps, steps * samples / (until - begun), longest, broken)


def progress(events: Sequence[Event], begun: float, until: float) -> tuple[int, float]:
    """Steps beyond the newest one at ``begun`` that were committed at ``until``, and the longest time without a new one. A step that a restart made
    again is not new."""
    since, longest = begun, 0.0
    at_first = max((c.step or 0 for c in of_kind(events, "commit") if c.t_wall <= begun), default=0)
    newest = reached = at_first
    for event in sorted(of_kind(events, "commit"), key=lambda e: e.t_wall):
        if begun < event.t_wall <= until:
            reached = event.step or 0
            if reached > newest:
                longest, since, newest = max(longest, event.t_wall - since), event.t_wall, reached
    return max(0, reached - at_first), max(longest, until - since)


def _start(given: Sequence[str], forked: bool, folder: Path) -> subprocess.Popen[bytes]:
    clean = [] if "resume=auto" in given else ["--clean"]
    if forked:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.goodput", "--child", json.dumps([*given, *clean])]
    else:
        command = [sys.executable, "-W", "ignore", "-m", "everstep", "train", str(ROOT / "examples" / "sft_text.yaml"), *given, *clean]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".out").open("ab") as out:
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True, env=environment())


def _child(given: str) -> int:
    """`everstep train` with forked children."""
    from everstep.cluster.forked import ForkedHost
    from everstep.config.load import load_config
    from everstep.driver import run

    arguments = json.loads(given)
    config = load_config(str(ROOT / "examples" / "sft_text.yaml"), [a for a in arguments if a != "--clean"])
    try:
        return run(config, clean="--clean" in arguments, host=ForkedHost)
    except EverstepError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _commits(folder: Path) -> list[Event]:
    with contextlib.suppress(EventLogError, OSError):  # not begun yet
        return of_kind(read_events(folder / "events"), "commit")
    return []


def _wait_until_warm(process: subprocess.Popen[bytes], folder: Path) -> float:
    end = time.monotonic() + _START_S
    while len(_commits(folder)) < WARM_STEPS:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{folder}: no {WARM_STEPS} steps within {_START_S:g} s, exit code {process.returncode}; see {folder.with_suffix('.out')}")
        time.sleep(0.2)
    return time.time()


def _strike(folder: Path, replica: int) -> bool:
    """Kill a living rank of this replica, else of the next one that has any; whether there was one."""
    with contextlib.suppress(EverstepError, OSError):
        ranks = sorted(status(folder).ranks, key=lambda r: ((r.replica - replica) % 1024, r.rank))
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                if rank.pid and psutil.Process(rank.pid).status() != psutil.STATUS_ZOMBIE:
                    os.kill(rank.pid, signal.SIGKILL)
                    return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -- telling ----------------------------------------------------------------------------------------------------------------------------------


def _line(run: Run) -> str:
    rate = f"a kill every {run.every_s:g} s" if run.every_s else "undisturbed"
    missed = f", {run.missed} moments found nobody" if run.missed else ""
    return (f"{run.system:<9} {rate:<22} {run.kills:>3} kills in {run.seconds:.0f} s: {run.steps} steps, {run.samples_per_s:.2f} samples/s, "
            f"longest {run.longest_s:.1f} s without one{missed}{''.join(f'; BROKEN {b}' for b in run.broken)}")


def print_table(runs: Sequence[Run], best: float) -> None:
    systems = list(dict.fromkeys(r.system for r in runs))
    print(f"\n{'a kill every':<14}" + "".join(f"{system:>24}" for system in systems))
    for every in dict.fromkeys(r.every_s for r in runs):
        cells = []
        for system in systems:
            run = next(r for r in runs if (r.system, r.every_s) == (system, every))
            cells.append("no progress" if not run.steps else f"{100 * run.samples_per_s / best:.1f}% ({run.samples_per_s:.2f}/s)")
        print(f"{f'{every:g} s' if every else 'never':<14}" + "".join(f"{cell:>24}" for cell in cells))


def draw(runs: Sequence[Run], best: float, out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rates = sorted({r.every_s for r in runs if r.every_s})
    systems = list(dict.fromkeys(r.system for r in runs))
    for number, system in enumerate(systems):
        heights = [100 * next(r.samples_per_s for r in runs if (r.system, r.every_s) == (system, rate)) / best for rate in rates]
        bars = axes.bar([i + 0.8 * (number + 0.5) / len(systems) - 0.4 for i in range(len(rates))], heights, 0.8 / len(systems) * 0.92, label=system)
        axes.bar_label(bars, fmt="%.0f", fontsize="small")
    axes.set(ylabel="goodput, % of undisturbed", ylim=(0, 110), xticks=range(len(rates)), xticklabels=[f"a kill every {rate:g} s" for rate in rates])
    axes.legend(fontsize="small", ncols=len(systems), loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, nargs="+", default=[20.0, 60.0, 120.0], metavar="SECONDS", help="between two kills; a run for each")
    parser.add_argument("--minutes", type=float, default=4.0, help="of a run with kills")
    parser.add_argument("--calm", type=float, default=60.0, metavar="SECONDS", help="of an undisturbed run")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--devices", type=int, help="default: the GPUs that there are, or 4")
    parser.add_argument("--saved-every", type=int, help="steps between checkpoints of the restarted one, and between the copies in memory that ours goes "
                        "back to if all die at once (default: 20 on GPUs, whose steps are shorter than a checkpoint; else 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--shape", help="folder under benchmarks/shapes (default: qwen3-0.6b on GPUs, else qwen3-small)")
    parser.add_argument("--forked", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the victims")
    parser.add_argument("--runs", help="keep the run folders here")
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--picture", help="PNG file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    args = parser.parse_args(arguments)
    args.devices = args.devices or gpus() or 4
    args.device = args.device or ("cuda" if gpus() else "cpu")
    args.saved_every = args.saved_every or (20 if args.device == "cuda" else 5)
    least, who = (3, "two replicas and a spare") if "ours" in args.systems else (2, "two replicas")
    if args.devices < least:
        parser.error(f"{args.devices} devices: {who} are the least")
    if args.quick:
        args.every, args.minutes, args.calm, args.systems = [10.0], 0.5, 10.0, ["ours", "restart"]
    return args


if __name__ == "__main__":
    sys.exit(main())
