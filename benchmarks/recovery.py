"""What a death costs: real runs of ``everstep train``, ranks killed from outside, spans read from the event logs.

    python -m benchmarks.recovery                        what the machine allows: GPUs if there are any, else the CPU
    python -m benchmarks.recovery --quick                CPU, a small model, under 10 minutes on 2 cores
    python -m benchmarks.recovery --tp 2 --replicas 2 --spares 0
    python -m benchmarks.recovery --forked               CPU, children of this process in the place of Ray: seconds instead of minutes
    python -m benchmarks.recovery --overhead 3           nothing is killed: steps with recovery against recovery.enabled=false
    python -m benchmarks.recovery --against torchft,nvrx,ray-train,restart --append FILE      rivals under the same kills (benchmarks/rivals)
    python -m benchmarks.recovery --summary FILE --picture PNG                                what was collected so far

Prints a table and writes everything to ``--out`` (JSON), with machine, versions and command. The clock starts when the signal is
sent. A kill in reduce counts only if the log shows a survivor whose gradient collectives were issued and not complete at that
moment; others are listed as missed. Below the table: of what the time to full strength is made (everstep.telemetry.strength). p99 is by nearest rank: with fewer than 100 kills it is the maximum.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.circumstances import ROOT, circumstances, environment
from benchmarks.rivals import measure
from everstep.cluster.forked import ForkedHost
from everstep.config.load import load_config
from everstep.driver import run as run_recipe
from everstep.errors import EverstepError
from everstep.telemetry.events import Event, epoch_key, of_kind, read_events, seconds_between
from everstep.telemetry.recoveries import recoveries, survivor_inside
from everstep.telemetry.strength import PARTS, parts_of_recoveries

SHAPES = ROOT / "benchmarks" / "shapes"
WORK = {"cuda": (24, 4, 1100), "cpu": (24, 2, 128)}  # samples and micro-batch of a step, tokens of a sample
WARM_STEPS = 5  # not counted: kernels are compiled and caches filled


@dataclass(frozen=True)
class Setting:
    """One configuration under test. ``faults``: (step, phase, replica, delay_s)."""

    name: str
    overrides: tuple[str, ...]
    faults: tuple[tuple[int, str, int, float], ...]
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Kill:
    """What one kill cost, in seconds since the signal."""

    run: int
    step: int
    phase: str
    inside: bool         # a survivor was in that phase when the signal was sent
    noticed_s: float | None
    working_again_s: float | None  # the longest time that a survivor did nothing of use
    committed_s: float | None
    full_strength_s: float | None
    slots_salvaged: int
    link_was_ready: bool  # no survivor had to form one
    step_s: float         # an ordinary step of that run


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    if args.summary:
        measure.summary(Path(args.summary))
        if args.picture:
            measure.picture(Path(args.summary), Path(args.picture))
        return 0
    device = args.device or ("cuda" if gpus() else "cpu")
    folder = Path(args.runs or tempfile.mkdtemp(prefix="everstep-bench-"))
    report: dict[str, object] = {"about": circumstances("recovery", arguments)}
    if args.against:
        return _against(args, device, folder)
    if args.overhead:
        pairs = _overhead(args, device, folder)
        report["overhead"] = pairs
        _print_overhead(pairs)
    else:
        kills, parts, failures = _kills(args, device, folder)
        report["kills"] = [asdict(k) for k in kills]
        report["summary"] = _print_kills(kills)
        report["full_strength"] = _print_parts(parts)
        report["failures"] = failures
        for failure in failures:
            print(failure)
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1))
    if not args.runs:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if report.get("failures") else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, few kills")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--shape", help="folder under benchmarks/shapes (default: qwen3-0.6b on GPUs, else qwen3-small)")
    parser.add_argument("--forked", action="store_true", help="workers are forked children of this process; CPU only")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--per-run", type=int, help="kills in one run (default: what its replicas and spares bear without anybody being started)")
    parser.add_argument("--apart", type=int, help="steps between two kills of a run, for the replica to come back (default: 15 on GPUs, else 40)")
    parser.add_argument("--mode", default="salvage", choices=("salvage", "retry"))
    parser.add_argument("--phases", default="reduce,compute", help="in turn")
    parser.add_argument("--seed", type=int, default=0, help="of --against: when who is killed")
    parser.add_argument("--max-connections", type=int, help="CUDA_DEVICE_MAX_CONNECTIONS of every rank")
    parser.add_argument("--overhead", type=int, metavar="PAIRS", help="compare steps with and without recovery in so many pairs of runs")
    measure.arguments(parser)
    parser.add_argument("--runs", help="keep the run folders here")
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    args = parser.parse_args(arguments)
    if args.quick:
        args.kills = min(args.kills, 9)
    return args


# -- runs -------------------------------------------------------------------------------------------------------------------


def shape_of(args: argparse.Namespace, device: str) -> str:
    return str(args.shape or ("qwen3-0.6b" if device == "cuda" else "qwen3-small"))


def _base(args: argparse.Namespace, device: str) -> list[str]:
    return [
        *work(shape_of(args, device), device), f"layout.replicas={args.replicas}", f"layout.spares={args.spares}", f"layout.tp={args.tp}", f"recovery.mode={args.mode}",
        *args.overrides,
    ]


def work(shape: str, device: str) -> list[str]:
    """What a step of these benchmarks does, whoever it is done by."""
    samples, micro, tokens = WORK[device]
    return [
        f"device={device}", f"model.path={SHAPES / shape}", "model.init=random", f"model.tokenizer={ROOT / 'examples' / 'models' / 'tiny-qwen3'}",
        f"model.dtype={'bfloat16' if device == 'cuda' else 'float32'}", "data.source=benchmarks.texts:digits", "data.format=text",
        f"data.max_tokens={tokens}", "data.source_args={length: " + str(tokens - 100) + "}", f"train.micro_batch_size={micro}",
        f"sft.samples_per_step={samples}", "optimizer.lr=1e-4", "optimizer.warmup_steps=1", "checkpoint.at_end=false", "telemetry.tensorboard=false",
    ]  # fmt: skip


def _train(overrides: Sequence[str], folder: Path, env: dict[str, str], forked: bool = False, clean: bool = True) -> subprocess.CompletedProcess[str]:
    if forked:
        config = load_config(str(ROOT / "examples" / "sft_text.yaml"), [*overrides, "telemetry.progress=none", f"run_dir={folder}"])
        with contextlib.redirect_stdout(io.StringIO()):
            return subprocess.CompletedProcess([], run_recipe(config, clean=clean, host=ForkedHost), "", "")
    command = [sys.executable, "-m", "everstep", "train", str(ROOT / "examples" / "sft_text.yaml"), *overrides, f"run_dir={folder}", *(["--clean"] if clean else [])]
    return subprocess.run(command, env=environment(**env), text=True, capture_output=True, timeout=600, check=False)


def _kills(args: argparse.Namespace, device: str, folder: Path) -> tuple[list[Kill], list[dict[str, float]], list[str]]:
    phases = args.phases.split(",")
    per_run = args.per_run or args.replicas - 1 + args.spares // args.tp
    apart = args.apart or (15 if device == "cuda" else 40)  # steps, for a spare to be formed and healed in between
    kills: list[Kill] = []
    parts: list[dict[str, float]] = []
    failures: list[str] = []
    for run in range(math.ceil(args.kills / per_run)):
        faults = []
        for i in range(per_run):
            phase = phases[(run * per_run + i) % len(phases)]
            delay = 0.002 if phase == "reduce" else 0.02 * (1 + run % 5)
            faults.append(f"{{step: {WARM_STEPS + 3 + apart * i}, phase: {phase}, kind: kill, replica: {(run + i) % args.replicas}, delay_s: {delay}}}")
        steps = WARM_STEPS + 3 + apart * (per_run - 1) + 6
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(args.max_connections)} if args.max_connections else {}
        start = time.monotonic()
        done = _train([*_base(args, device), f"sft.steps={steps}", f"faults=[{', '.join(faults)}]"], folder / f"run-{run}", env, args.forked)
        print(f"run {run}: {time.monotonic() - start:.0f} s, exit code {done.returncode}", flush=True)
        if done.returncode:
            failures.append(f"run {run} ended with exit code {done.returncode}: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
            continue
        events = read_events(folder / f"run-{run}" / "events")
        kills += _read(run, events)
        parts += parts_of_recoveries(events)
    return kills, parts, failures


def _read(run: int, events: list[Event]) -> list[Kill]:
    ordinary = _step_seconds(events)
    found = []
    for fault, death in zip(of_kind(events, "fault"), [r for r in recoveries(events) if r.injected], strict=True):
        voided = next(e for e in of_kind(events, "death") if e.t_wall >= fault.t_wall and e["replica"] == fault["replica"])
        later = [e for e in events if e.step == fault.step and epoch_key(e.epoch) > epoch_key(voided.epoch)]
        links = [e for e in of_kind(later, "link_used")]
        found.append(Kill(
            run, death.step, fault["phase"], survivor_inside(events, fault), death.detect_s, death.stall_s, death.commit_s, death.full_strength_s,
            sum(len(e["slots"]) for e in of_kind(later, "computed") if e["rank"] == 0 and e["salvage"]),
            all(e["built"] for e in links) or len({e["replica"] for e in links}) == 1, ordinary,
        ))
    return found


def _step_seconds(events: list[Event]) -> float:
    """Median time between commits of steps in which nothing else happened."""
    commits = of_kind(events, "commit")
    odd = {e.step for e in of_kind(events, "fault", "death", "join", "heal_start", "heal_done", "link_build")}
    spans = [
        seconds_between(a, b) for a, b in itertools.pairwise(commits)
        if b.step is not None and b.step > WARM_STEPS and not {b.step, b.step - 1, b.step + 1} & odd
    ]
    return statistics.median(spans) if spans else float("nan")


def _overhead(args: argparse.Namespace, device: str, folder: Path) -> list[dict[str, float]]:
    """Pairs of runs, one with recovery and one without, in turn; seconds per step (median) and their ratio."""
    pairs = []
    steps = 40 if device == "cuda" else 60
    for pair in range(args.overhead):
        seconds = {}
        for enabled in (True, False) if pair % 2 == 0 else (False, True):
            where = folder / f"pair-{pair}-{enabled}"
            spares = [] if enabled else ["layout.spares=0"]
            done = _train([*_base(args, device), f"sft.steps={steps}", f"recovery.enabled={str(enabled).lower()}", *spares], where, {})
            if done.returncode:
                raise SystemExit(f"the run {where} ended with exit code {done.returncode}: {done.stderr[-500:]}")
            commits = of_kind(read_events(where / "events"), "commit")[WARM_STEPS:]
            seconds[enabled] = statistics.median(seconds_between(a, b) for a, b in itertools.pairwise(commits))
        pairs.append({"with_s": seconds[True], "without_s": seconds[False], "ratio": seconds[True] / seconds[False]})
    return pairs


def _against(args: argparse.Namespace, device: str, folder: Path) -> int:
    samples, micro, tokens = WORK[device]
    without = ("layout.replicas=", "layout.spares=")

    def train(overrides: Sequence[str], where: Path) -> int:
        with contextlib.suppress(EverstepError):
            return _train(overrides, where, {}, args.forked, clean=not any(o.startswith("resume=") for o in overrides)).returncode
        return 1

    setting = measure.Setting(
        device, shape_of(args, device), samples, micro, tokens, [o for o in _base(args, device) if not o.startswith(without)], train, folder,
        random.Random(args.seed),
    )
    rows = measure.compare(setting, args.against.split(","), args.kills, args.batch, Path(args.append) if args.append else None)
    if not args.runs:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if rows else 1


# -- telling ----------------------------------------------------------------------------------------------------------------


def _print_kills(kills: list[Kill]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    print(f"{'killed in':<10} {'link':<8} {'kills':>5}  {'':<9} {'noticed':>9} {'working again':>14} {'committed':>10} {'full strength':>14}")
    for phase in sorted({k.phase for k in kills}):
        for ready in (True, False):
            group = [k for k in kills if k.phase == phase and k.link_was_ready is ready and k.inside]
            if not group:
                continue
            columns = {
                "noticed_s": [k.noticed_s for k in group], "working_again_s": [k.working_again_s for k in group],
                "committed_s": [k.committed_s for k in group], "full_strength_s": [k.full_strength_s for k in group],
            }
            stats = {name: _stats([v for v in values if v is not None]) for name, values in columns.items()}
            rows.append({"phase": phase, "link_ready": ready, "kills": len(group), **stats})
            for line in ("p50", "p99", "max"):
                cells = [stats[c].get(line) for c in columns]
                text = [f"{c * 1000:.1f} ms" if c is not None and c < 1 else (f"{c:.2f} s" if c is not None else "-") for c in cells]
                head = f"{phase:<10} {'ready' if ready else 'formed':<8} {len(group):>5}" if line == "p50" else " " * 25
                print(f"{head}  {line:<9} {text[0]:>9} {text[1]:>14} {text[2]:>10} {text[3]:>14}")
    missed = sum(not k.inside for k in kills)
    ordinary = statistics.median(k.step_s for k in kills) if kills else float("nan")
    print(f"ordinary step {ordinary:.3f} s; slots salvaged a kill: {sorted(k.slots_salvaged for k in kills if k.inside)}; {missed} kills missed their phase")
    return rows


def _print_parts(parts: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Medians and greatest values; of deaths whose replica came back with nothing else dying meanwhile."""
    stats = {name: _stats([p[name] for p in parts]) for name in (*PARTS, "total")}
    if parts:
        print(f"to full strength, {len(parts)} times: " + ", ".join(f"{name} {s['p50']:.3f} s (max {s['max']:.3f})" for name, s in stats.items()))
    return stats


def _stats(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[math.ceil(0.99 * len(ordered)) - 1], "max": ordered[-1], "n": len(ordered)}


def _print_overhead(pairs: list[dict[str, float]]) -> None:
    print(f"{'pair':>4} {'with recovery':>14} {'without':>10} {'ratio':>8}")
    for number, pair in enumerate(pairs):
        print(f"{number:>4} {pair['with_s']:>12.4f} s {pair['without_s']:>8.4f} s {pair['ratio']:>8.4f}")
    print(f"median ratio {statistics.median(p['ratio'] for p in pairs):.4f}")


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
