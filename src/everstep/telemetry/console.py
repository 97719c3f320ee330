"""What the user sees while a run goes on. Used by the lead process only, from any of its threads.

``rich`` draws a live display under the scrolling lines (progress, time left, latest metrics, replicas and spares,
latest completions); ``plain`` prints lines only (logs, CI, pipes); ``none`` prints nothing. In both of the former a step
is one line, and a recovery is one line: who, cause, noticed after, stalled for, lost.

A display must never end a run: if the terminal goes away (closed pipe, hung-up line) the console falls silent.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Literal

import rich.console
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from everstep.telemetry.recoveries import Recovery

Mode = Literal["auto", "rich", "plain", "none"]

#: Metrics of the step line, in order: (name, label, format). Those absent from a step are left out.
STEP_LINE = (
    ("train/loss", "loss", ".4f"),
    ("val/loss", "held-out loss", ".4f"),
    ("dpo/loss", "loss", ".4f"),
    ("dpo/reward_margin", "margin", ".4f"),
    ("val/accuracy", "held-out accuracy", ".3f"),
    ("critic/score/mean", "reward", ".3f"),
    ("val-core/acc/mean@1", "held-out accuracy", ".3f"),
    ("actor/pg_loss", "pg loss", ".4f"),
    ("actor/kl_loss", "kl", ".4f"),
    ("actor/entropy", "entropy", ".3f"),
    ("actor/pg_clipfrac", "clip", ".3f"),
    ("actor/grad_norm", "grad", ".3f"),
    ("train/grad_norm", "grad", ".3f"),
    ("response_length/mean", "length", ".1f"),
    ("perf/throughput", "tok/s/device", ".0f"),
    ("timing_s/step", "time", ".2f"),
    ("ft/live_replicas", "replicas", ".0f"),
    ("ft/attempts", "attempts", ".0f"),
)


@dataclass(frozen=True)
class Completion:
    """One completion to show."""

    prompt: str
    completion: str
    reward: float | None = None


class _Terminal(rich.console.Console):
    """rich's console, but a closed pipe is an ordinary error (rich would end the process)."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that rich is handling when it calls this

    def silence(self) -> None:
        """Send what is still buffered to nowhere: flushed at exit, it would turn success into exit status 120."""
        try:
            target = self.file.fileno()
        except (OSError, ValueError):  # not a file of the operating system, or closed
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)


class Console:
    """Shows one run.

    Args:
        mode: ``auto`` is ``rich`` on a terminal, else ``plain``.
        title: name of the run, shown in front of the bar.
        file: where to print; default: standard output at the time of the call.
    """

    def __init__(self, mode: Mode = "auto", title: str = "everstep", file: IO[str] | None = None):
        stream = file or sys.stdout
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a completion may hold what an ASCII terminal cannot print
        self._out = _Terminal(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.mode: Mode = ("rich" if self._out.is_terminal else "plain") if mode == "auto" else mode
        self._title = title
        self._lock = threading.RLock()
        self._unit, self._total = "step", 0
        self._begun = time.monotonic()
        self._metrics: dict[str, float] = {}
        self._strength = ""
        self._shown: list[Completion] = []
        self._progress: Progress | None = None
        self._task: Any = None
        self._live: Live | None = None

    def start(self, total: int, unit: str = "step", done: int = 0) -> None:
        """A phase of ``total`` units begins (warm-up, training), ``done`` of them already behind it. Ends one before it."""
        with self._lock:
            self.stop()
            self._unit, self._total = unit, total
            if self.mode != "rich":
                return
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(unit + "s"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._out,
            )
            self._task = self._progress.add_task(self._title, total=total, completed=done)
            self._live = Live(self._picture(), console=self._out, refresh_per_second=4, transient=True)
            self._guard(self._live.start)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Unit ``step`` (counted from 1) is done."""
        with self._lock:
            self._metrics = dict(metrics)
            parts = [f"{label} {metrics[name]:{form}}" for name, label, form in STEP_LINE if name in metrics]
            self._print(f"{self._unit} {step}/{self._total}  " + "  ".join(parts))
            if self._progress is not None:
                self._progress.update(self._task, completed=step)
            self._refresh()

    def strength(self, live: int, replicas: int, spares: int) -> None:
        """How many replicas take part and how many spares are warm."""
        with self._lock:
            text = f"replicas {live}/{replicas}, spares {spares}"
            if text != self._strength and self._strength and self.mode != "rich":
                self._print(text)
            self._strength = text
            self._refresh()

    def note(self, text: str) -> None:
        """A line that stays: what was resumed, saved, built, refused."""
        with self._lock:
            self._print(text)

    def recovery(self, recovery: Recovery) -> None:
        """The line of one recovery."""
        with self._lock:
            self._print(recovery_line(recovery), style="bold yellow")

    def completions(self, shown: Sequence[Completion | Mapping[str, Any]]) -> None:
        """The latest completions (or mappings with ``prompt``, ``completion`` and perhaps ``reward``): a panel that is
        replaced (rich), or lines (plain)."""
        with self._lock:
            self._shown = [_completion(item) for item in shown]
            if self.mode == "plain":
                for item in self._shown:
                    self._print("  " + _one_line(item))
            self._refresh()

    def stop(self) -> None:
        """End the live display. What was printed stays. Idempotent."""
        with self._lock:
            if self._live is not None:
                live, self._live, self._progress = self._live, None, None
                self._guard(live.stop)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _print(self, text: str, style: str | None = None) -> None:
        if self.mode != "none":
            self._guard(lambda: self._out.print(Text(text, style=style or "")))

    def _refresh(self) -> None:
        if self._live is not None:
            live, picture = self._live, self._picture()
            self._guard(lambda: live.update(picture))

    def _guard(self, draw: Any) -> None:
        """Draw, unless the terminal is gone (this is the one place where that is decided)."""
        try:
            draw()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self.mode, self._live, self._progress = "none", None, None
            self._out.silence()

    def _picture(self) -> rich.console.Group:
        parts: list[Any] = []
        if self._shown:
            body = Text("\n").join(Text(_one_line(item), overflow="ellipsis", no_wrap=True) for item in self._shown)
            parts.append(Panel(body, title="latest completions", title_align="left"))
        table = Table.grid(padding=(0, 2))
        cells = [f"{label} {self._metrics[n]:{form}}" for n, label, form in STEP_LINE if n in self._metrics]
        for first in range(0, len(cells), 6):
            table.add_row(*cells[first : first + 6])
        if cells:
            parts.append(table)
        if self._strength:
            parts.append(Text(self._strength))
        if self._progress is not None:
            parts.append(self._progress)
        return rich.console.Group(*parts)


def recovery_line(recovery: Recovery) -> str:
    """Who, cause, detected after, stalled for, full strength after, redone."""
    if recovery.replica < 0:
        return f"recovery: {recovery.who} died in step {recovery.step} ({recovery.cause}); training was not concerned"
    parts = [f"recovery: replica {recovery.replica} rank {recovery.rank} died in step {recovery.step} ({recovery.cause})"]
    if recovery.detect_s is not None:
        parts.append(f"noticed after {recovery.detect_s:.3f} s")
    if recovery.stall_s is not None:
        parts.append(f"survivors computed again after {recovery.stall_s:.3f} s")
    if recovery.full_strength_s is not None:
        parts.append(f"full strength after {recovery.full_strength_s:.3f} s")
    else:
        parts.append("not yet at full strength")
    parts.append(f"{recovery.slots_redone} slots redone")
    return "; ".join(parts)


def _completion(item: Completion | Mapping[str, Any]) -> Completion:
    if isinstance(item, Completion):
        return item
    reward = item.get("reward")
    return Completion(str(item["prompt"]), str(item["completion"]), None if reward is None else float(reward))


def _one_line(item: Completion) -> str:
    reward = "" if item.reward is None else f"[reward {item.reward:.2f}] "
    return f"{reward}{_shorten(item.prompt, 120)!r} -> {_shorten(item.completion, 200)!r}"


def _shorten(text: str, limit: int) -> str:
    """The end of a long text is what a completion was made from: keep it, mark the cut."""
    return text if len(text) <= limit else "..." + text[-limit:]
