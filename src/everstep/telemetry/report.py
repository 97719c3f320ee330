"""The report of a run: the curve with kills and rejoins marked, and the table of recoveries.

Computed from the files of the run folder alone (event log, metrics), so that it can be made anew at any time, by
anybody, also for a run that died. What each number means: :mod:`everstep.telemetry.recoveries`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from everstep.errors import BadInput
from everstep.telemetry.events import Event, of_kind, read_events
from everstep.telemetry.goodput import Goodput, goodput
from everstep.telemetry.metrics import read_metrics
from everstep.telemetry.recoveries import Account, Recovery, account, recoveries

#: Drawn when present, in this order: (metric, label, as points).
REWARD = "reward (training samples)"
CURVES = (
    ("critic/score/mean", REWARD, False),
    ("train/loss", "training loss", False),
    ("dpo/loss", "loss of pairs", False),
    ("val-core/acc/mean@1", "accuracy (held-out prompts)", True),
    ("val/loss", "held-out loss", True),
)


def summary_table(events: Sequence[Event]) -> Group:
    """What ``everstep report`` and the demo print: one row per death, the account of steps and samples, and that of time."""
    return _summary(recoveries(events), account(events), goodput(events))


def _summary(deaths: Sequence[Recovery], books: Account, time: Goodput) -> Group:
    table = Table(title="Recoveries: seconds since the kill", title_justify="left", expand=False)
    table.add_column("killed", no_wrap=True)
    for name in ("step", "noticed", "computing\nagain", "step\ncommitted", "full\nstrength", "slots\nredone"):
        table.add_column(name, justify="right", no_wrap=True)
    for death in deaths:
        table.add_row(
            death.who,
            str(death.step),
            _seconds(death.detect_s) if death.injected else "(start)",
            _seconds(death.stall_s),
            _seconds(death.commit_s),
            _seconds(death.full_strength_s),
            str(death.slots_redone),
        )
    lines: list[Text | Table] = [table] if deaths else [Text("No rank died.")]
    if any(not death.injected for death in deaths):
        lines.append(Text("(start): nobody knows when it died; seconds are since it was noticed"))
    for death in deaths:
        lines.append(Text(f"{death.who} in step {death.step}: {death.cause}"))
    return Group(*lines, Text(describe(deaths, books)), Text(describe_time(time)))


def describe(deaths: Sequence[Recovery], books: Account) -> str:
    """The account in words, one fact per line."""
    steps = "no step was committed"
    if books.last_step is not None:
        steps = f"{books.committed} committed (steps {books.first_step} to {books.last_step}"
        steps += f", {books.skipped} without update)" if books.skipped else ")"
    rows = [
        ("kills", str(len(deaths))),
        ("steps", steps),
        ("steps lost", _count(books.steps_missing)),
        ("steps committed or applied twice", _count(books.steps_doubled)),
        ("samples", f"{books.samples_committed} used, {books.samples_dropped} dropped with a reason"),
        ("samples lost", _count(books.samples_lost)),
        ("samples used twice", _count(books.samples_doubled)),
    ]
    if books.steps_rolled_back:
        rows.append(("steps rolled back by a restart from a checkpoint", _count(books.steps_rolled_back)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def describe_time(time: Goodput) -> str:
    """Where the time of all ranks went, in one line."""
    parts = ", ".join(f"{part} {share:.1%}" for part, share in sorted(time.share.items(), key=lambda item: -item[1]) if share >= 0.0005)
    if not parts:
        return f"time: {time.wall_s:.1f} s, in which no rank took its place"
    return f"time of all ranks over {time.wall_s:.1f} s: {parts}; ETTR {time.ettr:.1%}; {time.samples_per_second:.2f} committed samples/s"


def reward_curve(
    metrics_path: str | os.PathLike[str], events_dir: str | os.PathLike[str], out_png: str | os.PathLike[str]
) -> Path:
    """Draw the run: reward (or loss) and held-out accuracy per step, each kill and each return to full strength marked.

    Raises ``BadInput`` if the run wrote nothing that could be drawn. No display is needed.
    """
    path = Path(metrics_path)
    rows = read_metrics(path) if path.is_file() else []
    curves = [
        (label, points, [row["step"] for row in rows if name in row], [row[name] for row in rows if name in row])
        for name, label, points in CURVES
    ]
    curves = [curve for curve in curves if curve[2]]
    if any(label == REWARD for label, *_ in curves):  # the loss of an SFT warm-up is on another scale, and not the point
        curves = [curve for curve in curves if "loss" not in curve[0]]
    if not curves:
        wanted = ", ".join(name for name, _, _ in CURVES)
        raise BadInput(f"nothing to draw: {path} has none of {wanted} (did the run finish a step?)")
    events = read_events(events_dir)

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, points, steps, values in curves:
        axes.plot(steps, values, marker="o" if points else None, linestyle="--" if points else "-", label=label)
    for number, (kill, back) in enumerate(marks(events)):
        axes.axvline(kill, color="tab:red", linewidth=1.5, label=None if number else "a rank is killed")
        if back is not None:
            axes.axvline(back, color="tab:green", linewidth=1.5, linestyle=":", label=None if number else "all replicas are back")
    axes.set_xlabel("committed step")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    out = Path(out_png)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def marks(events: Sequence[Event]) -> list[tuple[float, float | None]]:
    """For each death of a replica's rank the step in which it fell, and the step with which all replicas were back.

    Fractions of a step are those of its time: a kill half way between two commits is drawn half way.
    """
    commits = [(event.t_wall, float(event.step)) for event in of_kind(events, "commit") if event.step is not None]
    return [
        (_at(death.t_wall, commits), None if death.t_full_strength is None else _at(death.t_full_strength, commits))
        for death in recoveries(events)
        if death.replica >= 0
    ]


def _at(t_wall: float, commits: Sequence[tuple[float, float]]) -> float:
    """Position on the axis of steps of a moment, linear between commits."""
    before = [commit for commit in commits if commit[0] <= t_wall]
    after = [commit for commit in commits if commit[0] > t_wall]
    if not before or not after:
        return before[-1][1] if before else (after[0][1] - 1.0 if after else 0.0)
    (t0, step0), (t1, step1) = before[-1], after[0]
    return step0 + (step1 - step0) * (t_wall - t0) / (t1 - t0)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} s"


def _count(items: Sequence[int | str]) -> str:
    """The number, and the first few by name if there are any."""
    if not items:
        return "0"
    named = ", ".join(str(item) for item in items[:5])
    return f"{len(items)} ({named}{', ...' if len(items) > 5 else ''})"
