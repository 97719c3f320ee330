"""``everstep report``: the page of a run as one file that needs nothing else, and its pictures."""

from __future__ import annotations

import contextlib
from pathlib import Path

from everstep.errors import BadInput
from everstep.telemetry.dashboard.server import page
from everstep.telemetry.dashboard.story import Story, as_page, lanes
from everstep.telemetry.goodput import PARTS, Goodput
from everstep.telemetry.report import reward_curve

#: One colour for each part of the time, as the page has them.
COLOURS = {"productive": "#2a78d6", "redone": "#e07b1a", "stalled": "#d13438", "healing": "#1a9e78", "checkpoint": "#7a5bd0",
           "restart": "#8a908d", "vacant": "#3c4240", "idle": "#d6dad7"}


def write(story: Story) -> list[Path]:
    """Into ``RUN/report``: report.html, time.png, and reward_curve.png if it has what that shows. Returns what was written."""
    run = Path(story.status.folder)
    folder = run / "report"
    folder.mkdir(exist_ok=True)
    written = [folder / "report.html"]
    written[0].write_text(page(as_page(story)))
    if story.goodput.spans:
        written.append(time_picture(story.goodput, folder / "time.png"))
    with contextlib.suppress(BadInput):  # a run whose own pipeline or loop logs other metrics has no such curve, nor has one without a step
        written.append(reward_curve(run / "metrics.jsonl", run / "events", folder / "reward_curve.png"))
    return written


def time_picture(time: Goodput, out_png: Path) -> Path:
    """Where the time of every rank went: one line each, seconds from the start of the run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = lanes(time)
    places = drawn["places"]
    figure = Figure(figsize=(8, 1.4 + 0.22 * min(len(places), 64)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for part in PARTS:
        share = time.share[part]
        for row, place in enumerate(places):
            pieces = [(since - drawn["begin"], until - since) for since, until, what in place["spans"] if what == part]
            label = f"{part} {share:.1%}" if row == 0 and share >= 0.0005 else None
            axes.broken_barh(pieces, (row - 0.42, 0.84), color=COLOURS[part], linewidth=0, label=label)
    if len(places) <= 64:
        axes.set_yticks(range(len(places)), [f"{place['replica']}/{place['rank']}" for place in places])
    axes.invert_yaxis()
    axes.set_xlim(0, time.wall_s)
    axes.set_xlabel(f"seconds; goodput {time.goodput:.1%}, ETTR {time.ettr:.1%}")
    axes.set_ylabel("replica/rank")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize="small", frameon=False)
    figure.savefig(out_png)
    return out_png
