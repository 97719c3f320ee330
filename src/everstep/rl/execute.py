"""Running the stages of an iteration: those on the ranks one after the other, those on the lead beside them.

What runs when is decided by the pipeline's order alone, never by who is faster: with ``launcher=local`` every process runs this,
and all of them must make the same calls in the same order. So a stage on the lead is started when its turn comes, on a thread of
the lead, and its result is taken, and told to everybody, when the first stage that reads it has its turn.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.group import Group
from everstep.config.schema import Config
from everstep.data.functions import load_function
from everstep.engine.loss import LossSpec
from everstep.errors import DeadlineExceeded, EverstepError, WorkerFailed
from everstep.rl.pipeline import PROMPTS, Pipeline, Stage, Update
from everstep.rl.rewards import Scorer
from everstep.telemetry.events import EventLog
from everstep.telemetry.metrics import check_name


@dataclass(frozen=True)
class Context:
    """What a stage may use besides the samples, and a loss besides the configuration. ``iteration`` counts from 1."""

    config: Config
    iteration: int
    reward: Scorer
    kl_coef: float  # the present one: rl.kl_target moves it
    prompts: Callable[[int], TrainingBatch]  # takes the next ones of the data, each rl.samples_per_prompt times; for a stage on the ranks
    dropped: Callable[[Sequence[tuple[list[str], str]]], None]  # records ids of samples that will not be used, and why
    _group: Group | None = None

    @property
    def group(self) -> Group:
        """For stages on the ranks. A stage on the lead has none: its call would come between others' (EverstepError)."""
        if self._group is None:
            raise EverstepError('a stage on the lead cannot call workers; declare it with on="ranks"')
        return self._group


@dataclass
class Execution:
    """What the stages of one iteration made. ``seconds``: of each stage by itself; they overlap."""

    samples: TrainingBatch
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Outcome:
    made: Any
    start: float  # of the monotonic clock
    seconds: float


def execute(pipeline: Pipeline, context: Context, group: Group, prompts: TrainingBatch, events: EventLog | None) -> Execution:
    """Run all stages over ``prompts``. ``pipeline`` is ordered. Whatever a stage raises is raised here, in every process.

    A stage on the lead whose result is not there ``recovery.call_timeout_s`` after it is asked for raises DeadlineExceeded.
    """
    done = Execution(prompts)
    pending: dict[str, Callable[[], _Outcome]] = {}
    begin = time.monotonic()

    def finish(stage: Stage, outcome: _Outcome) -> None:
        _join(stage, done, outcome.made)
        done.seconds[stage.name] = outcome.seconds
        if events and group.is_lead:
            events.emit("stage", step=group.committed_step + 1, name=stage.name, iteration=context.iteration, on=stage.on,
                        after_s=outcome.start - begin, seconds=outcome.seconds)

    try:
        for stage in pipeline.stages:
            for column in stage.reads:
                if column != PROMPTS and (writer := pipeline.writer(column)).name in pending:
                    finish(writer, group.once(pending.pop(writer.name)))
            given = done.samples if PROMPTS in stage.reads else done.samples.only(*stage.reads)
            group.enter_stage(stage.name)
            if stage.on == "ranks":
                finish(stage, _run(stage, replace(context, _group=group), given))
            elif group.is_lead:
                pending[stage.name] = _beside(stage, context, given)
            else:
                pending[stage.name] = functools.partial(_run, stage, context, given)  # if the lead dies before it has the result
        for stage in pipeline.stages:
            if stage.name in pending:
                finish(stage, group.once(pending.pop(stage.name)))
    finally:
        group.enter_stage("")
    return done


def _beside(stage: Stage, context: Context, given: TrainingBatch) -> Callable[[], _Outcome]:
    """Start a stage on a thread; returns what waits for its result. A daemon: one that hangs must not keep the process."""
    future: Future[_Outcome] = Future()
    limit_s = context.config.recovery.call_timeout_s

    def work() -> None:
        try:
            future.set_result(_run(stage, context, given))
        except BaseException as error:  # raised where the result is taken
            future.set_exception(error)

    def result() -> _Outcome:
        try:
            return future.result(limit_s)
        except TimeoutError:
            if future.done():
                raise
            raise DeadlineExceeded(
                f"stage {stage.name} of iteration {context.iteration} has no result after {limit_s:g} s (recovery.call_timeout_s)"
            ) from None

    threading.Thread(target=work, name=f"stage-{stage.name}", daemon=True).start()
    return result


def _run(stage: Stage, context: Context, given: TrainingBatch) -> _Outcome:
    start = time.monotonic()
    function = named(stage.function)
    try:
        made = function(context, given)
    except EverstepError:
        raise
    except Exception as error:  # a fault boundary: user code
        raise WorkerFailed(f"stage {stage.name} of iteration {context.iteration} failed: {type(error).__name__}: {error}") from error
    return _Outcome(made, start, time.monotonic() - start)


def named(function: str | Callable[..., Any]) -> Callable[..., Any]:
    return load_function(function, "pipeline") if isinstance(function, str) else function


def loss_of(update: Update, context: Context) -> LossSpec:
    """The loss of an update's transactions, for the workers to build. WorkerFailed if it cannot be made, or its metrics cannot be logged."""
    try:
        spec = named(update.loss)(context)
        if not isinstance(spec, LossSpec):
            raise TypeError(f"it is a {type(spec).__name__}, not an everstep.engine.loss.LossSpec")
        for name in spec.build().metric_names:
            check_name(name)
    except EverstepError:
        raise
    except Exception as error:  # a fault boundary: user code
        raise WorkerFailed(f"{update.name} of iteration {context.iteration}: its loss cannot be used: {type(error).__name__}: {error}") from error
    return spec


def _join(stage: Stage, done: Execution, made: Any) -> None:
    """Take over what the stage made; WorkerFailed if it is not what the stage declares."""
    if isinstance(made, tuple):
        made, metrics = _with_metrics(stage, made)
        done.metrics.update(metrics)
    if PROMPTS in stage.reads:
        if not isinstance(made, TrainingBatch):
            raise WorkerFailed(f"stage {stage.name} makes the samples, and must return a TrainingBatch; it returned a {type(made).__name__}")
        if missing := sorted(set(stage.writes) - made.tensors.keys() - made.columns.keys()):
            raise WorkerFailed(f"stage {stage.name} declares that it writes {missing[0]}, which its samples do not have")
        done.samples = made
        return
    if not isinstance(made, Mapping) or set(made) != set(stage.writes):
        got = ", ".join(sorted(made)) if isinstance(made, Mapping) else f"a {type(made).__name__}"
        raise WorkerFailed(f"stage {stage.name} declares that it writes {', '.join(stage.writes)}; it returned {got}")
    tensors = {name: value for name, value in made.items() if isinstance(value, Tensor)}
    columns = {name: list(value) for name, value in made.items() if name not in tensors}
    done.samples = done.samples.with_tensors(**tensors).with_columns(**columns)


def _with_metrics(stage: Stage, made: tuple[Any, ...]) -> tuple[Any, dict[str, float]]:
    """(what the stage made, its metrics as numbers that the record can hold). WorkerFailed if they are not such, or have a name of ours."""
    if len(made) != 2 or not isinstance(made[1], Mapping):
        raise WorkerFailed(f"stage {stage.name} returned a tuple that is not (what it made, a mapping of metrics)")
    metrics: dict[str, float] = {}
    for name, value in made[1].items():
        try:
            check_name(name)
            metrics[name] = float(value)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:  # torch: a tensor of several elements
            raise WorkerFailed(f"stage {stage.name}: its metric {name!r} cannot be logged: {error}; give a number, under a prefix of your own") from None
    return made[0], metrics
