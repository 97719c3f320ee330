"""Does it learn, and is learning under kills the same? Whole runs of ``everstep train`` on the CPU, with and without faults, over seeds.

    python -m benchmarks.learning                          GRPO, PPO, and GRPO through LoRA; 3 seeds; about 10 minutes on 2 cores
    python -m benchmarks.learning --algorithms ppo --seeds 1 --out ppo.json --picture ppo.png
    python -m benchmarks.learning --runs FOLDER            runs that are complete in FOLDER are not made again

The task is the demonstration's: sort three digits, from a model with random weights that knows the format only. Each seed is run twice:
undisturbed, and with a rank killed in a step of the actor and another in one of the critic (or of the actor again), two replicas and
two spares. Prints a table of accuracy on held-out prompts and writes it as JSON with the curves, machine, versions and command. Exit code 1: a run
ended below ``--bar``, or the runs with kills differ from those without by more than the noise among seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.circumstances import ROOT, circumstances
from everstep.cluster.forked import ForkedHost
from everstep.config.load import load_config
from everstep.driver import run
from everstep.telemetry.events import of_kind, read_events
from everstep.telemetry.history import check
from everstep.telemetry.metrics import read_metrics
from everstep.telemetry.recoveries import account

ACCURACY, REWARD = "val-core/acc/mean@1", "critic/score/mean"
QUIET = ["telemetry.progress=none", "telemetry.tensorboard=false", "device=cpu", f"model.path={ROOT}/examples/models/tiny-qwen3"]
NOISE_FLOOR = 0.03  # of accuracy: four of the 144 held-out prompts


@dataclass(frozen=True)
class Algorithm:
    """``kills``: the steps in which a rank dies. ``base``: begins from a model that was warmed up before, not in the run. ``iterations``: what
    it takes, generously."""

    name: str
    example: str
    overrides: tuple[str, ...]
    kills: tuple[int, ...]
    iterations: int
    base: bool = False


ALGORITHMS = {
    "grpo": Algorithm("grpo", "grpo_sort.yaml", (), (70, 84), 60),
    "ppo": Algorithm("ppo", "ppo_kill.yaml", ("layout.pp=1",), (62, 91), 30),
    "grpo-lora": Algorithm(
        "grpo-lora", "grpo_sort.yaml",
        ("warmup.steps=0", "warmup.source=null", "model.init=pretrained", "lora.rank=16", "lora.alpha=32", "optimizer.lr=1e-2", "optimizer.min_lr=1e-3"),
        (10, 24), 60, base=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """One run. ``accuracy`` and ``reward``: (iteration, share); ``final``: the last accuracy."""

    algorithm: str
    seed: int
    killed: int
    accuracy: list[tuple[int, float]]
    reward: list[tuple[int, float]]
    final: float
    seconds: float
    steps: int


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    folder = Path(args.runs or tempfile.mkdtemp(prefix="everstep-learning-"))
    curves: list[Curve] = []
    for name in args.algorithms:
        for seed in range(args.seeds):
            for killed in (False, True):
                curves.append(one_run(ALGORITHMS[name], seed, killed, args.iterations or ALGORITHMS[name].iterations, folder))
                c = curves[-1]
                print(f"{name:<10} seed {seed}  kills {c.killed}  final accuracy {c.final:.3f}  {c.seconds:.0f} s", flush=True)
    table = [summary(name, [c for c in curves if c.algorithm == name], args.bar) for name in args.algorithms]
    print_table(table)
    if args.picture:
        draw(curves, Path(args.picture))
    if args.out:
        report = {
            "about": circumstances("learning", arguments), "table": table, "curves": [asdict(c) for c in curves],
        }  # fmt: skip
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["learned"] and row["alike"] for row in table) else 1


def one_run(algorithm: Algorithm, seed: int, killed: bool, iterations: int, folder: Path) -> Curve:
    """Make the run, unless it is there, whole. Its log must prove the invariants, whatever it learned."""
    target = folder / f"{algorithm.name}-{seed}-{'kills' if killed else 'calm'}"
    if not _is_whole(target):
        base = [f"model.path={warmed_up(folder, seed)}"] if algorithm.base else []
        phases = ("compute", "reduce")
        faults = [f"{{step: {step}, phase: {phase}, kind: kill, replica: {i % 2}, rank: 0}}"
                  for i, (step, phase) in enumerate(zip(algorithm.kills, phases, strict=True)) if killed]
        overrides = [
            *QUIET, *algorithm.overrides, *base, f"run_dir={target}", f"seed={seed}", f"rl.iterations={iterations}", "rl.eval_every=4",
            "layout.replicas=2", f"layout.spares={len(faults)}", f"faults=[{', '.join(faults)}]", "checkpoint.every_steps=0", "checkpoint.at_end=false",
        ]
        run(load_config(str(ROOT / "examples" / algorithm.example), overrides), clean=True, host=ForkedHost)
    broken = [f for f in check(target) if f.held is False]
    assert not broken, broken
    rows, events = read_metrics(target / "metrics.jsonl"), read_events(target / "events")
    at = lambda name: [(int(r.get("training/iteration", 0)), float(r[name])) for r in rows if name in r]
    return Curve(algorithm.name, seed, len(of_kind(events, "death")), at(ACCURACY), at(REWARD), at(ACCURACY)[-1][1],
                 events[-1].t_wall - events[0].t_wall, account(events).committed)


def warmed_up(folder: Path, seed: int) -> Path:
    """A model that knows the format: low-rank adapters beside random weights would have nothing to build on."""
    target = folder / f"base-{seed}"
    if not _is_whole(target):
        overrides = [*QUIET, f"run_dir={target}", f"seed={seed}", "layout.replicas=1", "layout.spares=0", "faults=[]", "warmup.steps=60", "rl.iterations=1"]
        run(load_config(str(ROOT / "examples" / "grpo_sort.yaml"), overrides), clean=True, host=ForkedHost)
    return next((target / "checkpoints").glob("step-*")) / "hf"


def _is_whole(target: Path) -> bool:
    events = read_events(target / "events") if (target / "events").is_dir() else []
    return any(e.event == "run_end" and e["status"] == "done" for e in events)


def summary(name: str, curves: Sequence[Curve], bar: float) -> dict[str, object]:
    """``alike``: means over seeds, of the final accuracy and of that over the whole run, differ by no more than twice the standard error
    of their difference (at least NOISE_FLOOR)."""
    calm, kills = [c for c in curves if not c.killed], [c for c in curves if c.killed]
    whole = lambda c: statistics.mean(share for _, share in c.accuracy)
    row: dict[str, object] = {"algorithm": name, "seeds": len(calm), "kills": sum(c.killed for c in kills), "learned": min(c.final for c in curves) >= bar}
    if not calm or not kills:
        return row | {"alike": False}
    alike = True
    for what, of in (("final", lambda c: c.final), ("whole", whole)):
        a, b = [of(c) for c in calm], [of(c) for c in kills]
        difference = statistics.mean(b) - statistics.mean(a)
        error = (sum(statistics.variance(x) / len(x) for x in (a, b)) ** 0.5) if min(len(a), len(b)) > 1 else 0.0
        row |= {f"{what}_calm": round(statistics.mean(a), 4), f"{what}_kills": round(statistics.mean(b), 4), f"{what}_difference": round(difference, 4),
                f"{what}_allowed": round(max(NOISE_FLOOR, 2 * error), 4)}
        alike = alike and abs(difference) <= max(NOISE_FLOOR, 2 * error)
    return row | {"alike": alike}


def print_table(table: Sequence[dict[str, object]]) -> None:
    print(f"{'algorithm':<10} {'seeds':>5} {'kills':>5} {'final':>7} {'killed':>7} {'whole':>7} {'killed':>7}  verdict")
    for row in table:
        verdict = ("learned" if row["learned"] else "BELOW THE BAR") + (", alike" if row["alike"] else ", NOT ALIKE")
        print(f"{row['algorithm']:<10} {row['seeds']:>5} {row['kills']:>5} {row['final_calm']:>7} {row['final_kills']:>7} {row['whole_calm']:>7} "
              f"{row['whole_kills']:>7}  {verdict}")


def draw(curves: Sequence[Curve], out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(c.algorithm for c in curves))
    figure = Figure(figsize=(4.2 * len(names), 3.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(1, len(names), place)
        styles: tuple[tuple[bool, dict[str, Any], str], ...] = (
            (False, {"color": "tab:blue", "linewidth": 4, "alpha": 0.45}, "undisturbed"), (True, {"color": "tab:red", "linewidth": 1, "marker": "."}, "with kills"),
        )  # fmt: skip
        for killed, style, label in styles:
            for number, curve in enumerate(c for c in curves if c.algorithm == name and bool(c.killed) == killed):
                axes.plot(*zip(*curve.accuracy, strict=True), **style, label=None if number else label)
        axes.set(title=name, xlabel="iteration", ylabel="accuracy on held-out prompts", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind, with seeds 0, 1, ...")
    parser.add_argument("--iterations", type=int, help="RL iterations of a run; default: what the algorithm takes")
    parser.add_argument("--bar", type=float, default=0.95, help="accuracy that every run must end with")
    parser.add_argument("--runs", help="folder of the runs; default: a new temporary one")
    parser.add_argument("--out", help="write the report as JSON here")
    parser.add_argument("--picture", help="draw the curves here (PNG)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
