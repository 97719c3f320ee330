"""What a recipe is handed: the group, the tools to report with, and where to go on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.checkpoint import manifest
from everstep.checkpoint.storage import CheckpointError, local_folder
from everstep.cluster.batch import TrainingBatch
from everstep.cluster.group import Group, StepResult
from everstep.config import derive
from everstep.config.schema import Config
from everstep.data import PreparedData
from everstep.engine.loss import LossSpec
from everstep.telemetry.console import Completion, Console
from everstep.telemetry.events import EventLog
from everstep.telemetry.metrics import Metrics
from everstep.telemetry.ongoing import Ongoing
from everstep.telemetry.spikes import Spikes
from everstep.telemetry.trackers import SampleRow


@dataclass
class Run:
    """One run of a recipe. Only processes that may be the lead have a console and metrics (``open_metrics``: at the first line, from
    its step on), and only the one that is uses them.

    ``saved_step``: of the newest checkpoint, from which ``checkpoint.every_steps`` counts. ``when_done``: called in every process once the
    run is complete, and no death can lead back into it.
    """

    config: Config
    group: Group
    data: PreparedData
    console: Console | None
    metrics: Metrics | None
    events: EventLog | None
    saved_step: int
    ongoing: Ongoing = field(default_factory=Ongoing)
    when_done: Callable[[], object] = lambda: None
    summary: dict[str, float] = field(default_factory=dict)  # numbers for the closing table, by name
    open_metrics: Callable[[int], Metrics] | None = None

    def __post_init__(self) -> None:
        self.best: float | None = self.state.get("best")
        self._verified_step = self._ended_step = self.group.committed_step
        if marked := self.group.bookmarked:
            self.saved_step, self._ended_step, self._verified_step = marked["saved"], marked["ended"], marked["verified"]
            self.summary = dict(marked["summary"])
        self._dispatched = (0, 0.0)
        self._spikes = Spikes(self.config.watch.spike_ratio, self.config.watch.spike_steps)
        self._resumable: tuple[int, dict[str, Any]] = (-1, {})  # the last step from which the recipe can go on, and its state then

    @property
    def state(self) -> dict[str, Any]:
        """What the recipe saved with the checkpoint that the run resumed from; empty at the start."""
        return self.group.recipe_state

    @property
    def folder(self) -> Path:
        return local_folder(self.config.run_dir)

    def start(self, total: int, unit: str, done: int = 0) -> None:
        if self.console:
            self.console.start(total, unit, done)

    @property
    def inner_steps(self) -> int:
        """Optimizer steps of each committed step: one, or those of a round of semi-synchronous training."""
        return derive.inner_steps(self.config)

    def train(
        self, batches: Sequence[TrainingBatch], loss: LossSpec, lrs: Sequence[float], temperature: float = 1.0, rollout: LossSpec | None = None,
        state: dict[str, Any] | None = None,
    ) -> StepResult:
        """The next committed step, over a batch and a learning rate for each of its ``inner_steps``. ``state``: the recipe's, then."""
        if self.config.semisync.method != "none":
            return self.group.train_round(batches, loss, lrs, temperature, rollout, state)
        (batch,), (lr,) = batches, lrs
        return self.group.train_step(batch, loss, lr, temperature, state=state)

    def note(self, text: str) -> None:
        if self.console and self.group.is_lead:
            self.console.note(text)

    def log(self, step: int, metrics: dict[str, float], show_at: int | None = None) -> None:
        """Record metrics of a global step; ``show_at``: also a line of progress, with this number."""
        status = self.group.status()
        metrics = metrics | self._dispatch_metrics() | self.ongoing.metrics(metrics, status["deaths"], status["spares"])
        if not self.group.is_lead:
            return
        if self.metrics is None and self.open_metrics:
            self.metrics = self.open_metrics(step)
        if self.metrics:
            self.metrics.log(step, metrics)
        if self.events:
            self.events.emit("metrics", step=step, values=metrics)
            for spike in self._spikes.step(metrics):
                self.events.emit("spike", step=step, metric=spike.metric, value=spike.value, usual=spike.usual)
        if self.console and show_at is not None:
            self.console.step(show_at, metrics)
            self.console.strength(len(status["replicas"]), self.config.layout.replicas, status["spares"])

    def completions(self, shown: Sequence[Completion]) -> None:
        if self.console and shown and self.group.is_lead:
            self.console.completions(shown)

    def sample_table(self, step: int, iteration: int, samples: TrainingBatch) -> None:
        """Every ``telemetry.sample_table_every`` iterations: some samples, with the tensor ``scores``, to disk and to the trackers."""
        every, count = self.config.telemetry.sample_table_every, self.config.telemetry.sample_table_rows
        if not self.metrics or not self.group.is_lead or not every or iteration % every:
            return
        rows = range(0, len(samples), max(1, len(samples) // count))[:count]
        columns = [samples.column("prompt"), samples.column("completion"), samples["scores"].tolist()]
        self.metrics.samples(step, [SampleRow(samples.sample_ids[i], *(column[i] for column in columns)) for i in rows])

    def dropped(self, groups: Sequence[tuple[list[str], str]]) -> None:
        """Samples that will not be used, and why."""
        for samples, reason in groups:
            if self.events:
                self.events.emit("drop", samples=samples, reason=reason)

    def save_if_due(self, state: Callable[[], dict[str, Any]], last: bool = False) -> None:
        """Checkpoint after every ``checkpoint.every_steps`` committed steps, and at the end (``checkpoint.at_end``). Called where the
        recipe, begun with ``state``, would go on: a replica that joins begins there."""
        step, checkpoint = self.group.committed_step, self.config.checkpoint
        self._resumable = step, state()
        if last and checkpoint.at_end:
            if step != self._ended_step:
                self.group.save(state())
                self.saved_step = self._ended_step = step
        elif checkpoint.every_steps and self.group.save_wanted(due=step - self.saved_step >= checkpoint.every_steps):
            self._save(state, wait=not checkpoint.asynchronous)
        self._tell_saves()
        self.group.mark({"recipe": state(), "saved": self.saved_step, "ended": self._ended_step, "verified": self._verified_step,
                         "summary": self.summary})

    def save_now(self) -> Path | None:
        """A checkpoint of the committed step, if the recipe can go on from it and it is not saved; its path, or None."""
        step, state = self._resumable
        if step != self.group.committed_step or step == self.saved_step:
            return None
        return self._save(lambda: state, wait=True)

    def _save(self, state: Callable[[], dict[str, Any]], wait: bool) -> Path | None:
        """None if it is on its way, or failed and training is to go on."""
        try:
            path = self.group.save(state(), wait)
        except CheckpointError:
            if self.config.checkpoint.on_failure == "stop":
                raise
            return None
        self.saved_step = self.group.committed_step
        return path

    def finish_saves(self) -> None:
        """The recipe is done: wait for the checkpoint that is still on its way. Raises CheckpointError."""
        self.group.finish_saves()
        self._tell_saves()

    def _tell_saves(self) -> None:
        for line in self.group.told_of_saves():
            self.note(line)

    def save_if_best(self, value: float, state: Callable[[], dict[str, Any]]) -> None:
        """``checkpoint.keep_best``: a checkpoint of this moment, kept, if ``value`` (the higher the better) is above all before it.
        ``state()`` is to hold ``self.best``, so that a resumed run knows it."""
        if self.best is not None and value <= self.best:
            return
        self.best = value
        if not self.config.checkpoint.keep_best:
            return
        path = self._save(state, wait=True)
        if path is not None:
            if self.group.is_lead:
                manifest.set_pointer(path, manifest.BEST)
            self._tell_saves()
            self.note(f"{path.name} is the best so far")

    def _dispatch_metrics(self) -> dict[str, float]:
        """What the worker calls since the last line of metrics cost beside the workers' own time."""
        total = (self.group.dispatch_bytes, self.group.dispatch_seconds)
        (nbytes, seconds), self._dispatched = self._dispatched, total
        return {"dispatch/sent_bytes": float(total[0] - nbytes), "dispatch/ms": 1000.0 * (total[1] - seconds)}

    def verify_if_due(self) -> None:
        """Compare all replicas' state every ``train.verify_every`` commits. Raises InvariantViolated."""
        every, step = self.config.train.verify_every, self.group.committed_step
        if every and step - self._verified_step >= every:
            self.group.verify()
            self._verified_step = step


def step_metrics(result: StepResult, prefix: str, inner_steps: int = 1) -> dict[str, float]:
    """The metrics that every recipe reports of an optimizer step, or of a round of ``inner_steps``. ``prefix``: ``actor``, ``critic`` or
    ``train``; the whole loss of the others has a name among the loss's own metrics."""
    return {
        **result.metrics,
        **({"actor/loss": result.loss} if prefix == "actor" else {}),
        **result.memory_gb,
        **{f"timing_s/{phase}": spent for phase, spent in result.seconds.items()},
        f"{prefix}/grad_norm": result.grad_norm,
        f"{prefix}/lr": result.lr,
        "training/global_step": float(result.step),
        "ft/live_replicas": float(len(result.members)),
        "ft/attempts": float(result.attempts),
        "ft/microbatches_redone": float(result.slots_redone),
        "ft/link_bytes": result.link_bytes,
        "ft/link_bytes_per_inner_step": result.link_bytes / inner_steps,
    }


def pace(config: Config, result: StepResult, tokens: float, seconds: float) -> dict[str, float]:
    """How fast a step was (RL: an iteration) of ``tokens`` in all. Devices are those that took part, and rollout engines' own."""
    devices = derive.layout(config).ranks_per_replica * len(result.members) + derive.engine_devices(config)
    return {"perf/total_num_tokens": float(tokens), "perf/time_per_step": seconds, "perf/throughput": tokens / seconds / devices}


class Stopwatch:
    """Seconds of the parts of an iteration, by the name of their metric."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self._since = time.monotonic()

    def skip(self) -> None:
        """The next lap begins now."""
        self._since = time.monotonic()

    def lap(self, name: str) -> float:
        now = time.monotonic()
        spent, self._since = now - self._since, now
        self.seconds[name] = self.seconds.get(name, 0.0) + spent
        return spent

    @property
    def wall(self) -> float:
        """Seconds since the start. Laps may be fewer, and parts that overlap more."""
        return time.monotonic() - self._start
