"""An RL iteration as a small graph of named stages, in plain Python.

    rollout ──> reward ────────┐
            ├─> old_logprob ───┤
            ├─> ref_logprob ───┼──> advantages ──> update_actor
            └─> values ────────┘              └──> update_critic

A stage says which columns of the samples it reads and which it writes; who runs after whom follows from that alone. The first
stage makes the samples from prompts; every other one adds columns to them. Updates come last: each trains one model over
everything that was made (the iteration record, :mod:`everstep.rl.record`), and adds no column.

:func:`standard` gives the stages of a recipe. Your own, ``pipeline=module:function`` in the configuration, is a function from the
configuration to a :class:`Pipeline`, most often that one with a stage replaced or added::

    def shaped(config):
        penalty = Stage("penalty", too_long, reads=("loss_mask",), writes=("penalty",))
        return standard(config).add(penalty).replace("advantages", minus_penalty, reads=("scores", "penalty", "group", "loss_mask"))

:meth:`Pipeline.ordered` refuses what cannot run before any process is started. This module imports no torch, so that
``everstep plan`` answers at once; what a stage computes is in :mod:`everstep.rl.stages`, how stages are run in :mod:`everstep.rl.execute`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from everstep.config import derive
from everstep.data.functions import check_arguments, load_function
from everstep.errors import ConfigError, EverstepError

if TYPE_CHECKING:
    from everstep.config.schema import Config, RlConfig

PROMPTS = "prompts"  # what the first stage reads: the prompts of the iteration, each repeated rl.samples_per_prompt times


class PipelineError(ConfigError):
    """The stages of a pipeline do not fit together; names the stages and the column."""


@dataclass(frozen=True)
class Stage:
    """One computation of an iteration.

    ``function(context, samples)``, or its name as ``module:function``. ``samples`` holds the columns in ``reads`` and no other; what
    comes back is a mapping with exactly the columns in ``writes``, (B,) or (B, T) tensors or lists of B values that JSON can hold, or
    that and a mapping of metrics. The stage that reads ``prompts`` is given these, and returns a TrainingBatch in the place of the
    mapping. See :class:`everstep.rl.execute.Context`.

    ``on``: ``ranks``: it calls methods of the workers (``context.group``), one stage at a time; ``lead``: it computes in the recipe's
    own process, on a thread of its own beside whatever runs on the ranks, and its result is known everywhere. Only the first kind may
    use the group; either must give the same result if it is made again.
    """

    name: str
    function: str | Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    on: Literal["ranks", "lead"] = "lead"


@dataclass(frozen=True)
class Update:
    """Optimizer steps of one model over the iteration's samples, in mini-batches and passes: each a step transaction.

    ``loss(context)``, or its name as ``module:function``, returns an :class:`everstep.engine.loss.LossSpec`: which loss the workers build.
    """

    name: str
    role: Literal["actor", "critic"]
    reads: tuple[str, ...]
    loss: str | Callable[..., Any]


@dataclass(frozen=True)
class Pipeline:
    """Stages and updates, in the order in which they were written down; see :meth:`ordered`."""

    stages: tuple[Stage, ...]
    updates: tuple[Update, ...]

    @property
    def parts(self) -> tuple[Stage | Update, ...]:
        return (*self.stages, *self.updates)

    def add(self, *stages: Stage) -> Pipeline:
        return dataclasses.replace(self, stages=(*self.stages, *stages))

    def without(self, name: str) -> Pipeline:
        self.named(name)
        return Pipeline(tuple(s for s in self.stages if s.name != name), tuple(u for u in self.updates if u.name != name))

    def replace(self, name: str, function: str | Callable[..., Any], **changes: Any) -> Pipeline:
        """Another function (or, of an update, another loss) in the place of a stage's; ``changes``: fields besides, such as reads."""
        found = self.named(name)
        what = {"loss": function} if isinstance(found, Update) else {"function": function}
        swapped: Any = dataclasses.replace(found, **what, **changes)  # type: ignore[arg-type]
        return Pipeline(
            tuple(swapped if s.name == name else s for s in self.stages), tuple(swapped if u.name == name else u for u in self.updates)
        )

    def named(self, name: str) -> Stage | Update:
        for part in self.parts:
            if part.name == name:
                return part
        raise PipelineError(f"the pipeline has no stage {name!r}; there are {', '.join(p.name for p in self.parts)}")

    def ordered(self) -> Pipeline:
        """The same, each stage after those whose columns it reads. Of several that could be next, those that would have to wait for a
        stage on the lead come last, and of the others those on the lead first, which then run beside those on the ranks. The order
        is the same in every process and run.

        Raises PipelineError: a column that nobody writes, or two do; a cycle; not one stage that makes the samples; no update.
        """
        _check_names(self)
        writers = _writers(self.stages)
        for part in self.parts:
            for column in part.reads:
                if column != PROMPTS and column not in writers:
                    close = difflib.get_close_matches(column, writers, n=1)
                    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(writers)) or 'none'}"
                    raise PipelineError(f"pipeline: stage {part.name} reads {column}, which no stage writes; {hint}")
        left, order = list(self.stages), list[Stage]()
        running: set[str] = set()  # on the lead: started, and nothing has waited for them
        while left:
            done = {stage.name for stage in order}
            after = {s.name: {writers[c].name for c in s.reads if c != PROMPTS} for s in left}
            ready = [s for s in left if after[s.name] <= done]
            if not ready:
                raise PipelineError(f"pipeline: stages wait for each other: {' -> '.join(_cycle(left, writers))}")
            chosen = min(ready, key=lambda s: (bool(after[s.name] & running), s.on == "ranks", self.stages.index(s)))
            running -= after[chosen.name]
            if chosen.on == "lead":
                running.add(chosen.name)
            left.remove(chosen)
            order.append(chosen)
        return Pipeline(tuple(order), self.updates)

    def writer(self, column: str) -> Stage:
        return _writers(self.stages)[column]

    def lines(self) -> list[str]:
        """The graph for people, in the order in which it runs."""
        said = []
        for stage in self.stages:
            after = [PROMPTS if column == PROMPTS else self.writer(column).name for column in stage.reads]
            beside = ", beside the ranks" if stage.on == "lead" else ""
            said.append(f"{stage.name} ({stage.on}{beside}) after {', '.join(dict.fromkeys(after))}; writes {', '.join(stage.writes)}")
        for update in self.updates:
            said.append(f"{update.name} (transactions of the {update.role}) reads {', '.join(update.reads)}")
        return said


def _check_names(pipeline: Pipeline) -> None:
    for part in pipeline.parts:
        if not part.name.isidentifier():
            raise PipelineError(f"pipeline: {part.name!r} cannot be the name of a stage; use letters, digits and _")
        for field in ("reads", "writes"):
            columns = getattr(part, field, ())
            if not isinstance(columns, tuple) or not all(isinstance(column, str) for column in columns):
                raise PipelineError(f"pipeline: {field} of stage {part.name} is {columns!r}; it must be a tuple of names, such as ('scores',)")
        if isinstance(part, Stage) and part.on not in ("ranks", "lead"):
            raise PipelineError(f"pipeline: stage {part.name} is on {part.on!r}; it can be on 'ranks' or 'lead'")
    names = [part.name for part in pipeline.parts]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise PipelineError(f"pipeline: two stages are called {doubled[0]}; give each its own name")
    sources = [stage.name for stage in pipeline.stages if PROMPTS in stage.reads]
    if len(sources) != 1:
        said = f"{', '.join(sources)} do" if sources else "none does"
        raise PipelineError(f"pipeline: one stage must read {PROMPTS} and make the samples; {said}")
    source = next(stage for stage in pipeline.stages if stage.name == sources[0])
    if source.reads != (PROMPTS,):
        raise PipelineError(f"pipeline: stage {source.name} makes the samples, so it can read nothing but {PROMPTS}")
    if not pipeline.updates:
        raise PipelineError("pipeline: nothing is trained; add an Update")
    for update in pipeline.updates:
        if PROMPTS in update.reads:
            raise PipelineError(f"pipeline: {update.name} reads {PROMPTS}, but updates train on samples")


def _writers(stages: Iterable[Stage]) -> dict[str, Stage]:
    writers: dict[str, Stage] = {}
    for stage in stages:
        for column in stage.writes:
            if column == PROMPTS or column in writers:
                other = "the data" if column == PROMPTS else f"stage {writers[column].name}"
                raise PipelineError(f"pipeline: column {column} is written by {other} and by stage {stage.name}; rename one")
            writers[column] = stage
    return writers


def _cycle(stuck: Sequence[Stage], writers: dict[str, Stage]) -> list[str]:
    """Names along one cycle among stages none of which can run, each read by the next."""
    waiting = {stage.name: stage for stage in stuck}
    path: list[str] = []
    name = stuck[0].name
    while name not in path:
        path.append(name)
        name = next(writers[c].name for c in waiting[name].reads if c != PROMPTS and writers[c].name in waiting)
    return [*path[path.index(name) :], name][::-1]


# ------------------------------------------------------------------------------------------------ the recipes' own

_SAMPLES = ("input_ids", "attention_mask", "loss_mask", "rollout_logprobs", "completion", "finished", "rollout_s", "prompt", "record", "group")
_TOKENS = ("input_ids", "attention_mask")
_REPORTED = ("attention_mask", "loss_mask", "prompt", "completion", "scores")
_SCORED_ROLLOUT = "everstep.rl.stages:scored_rollout"


def needs_old_logprobs(rl: RlConfig) -> bool:
    """Whether an iteration needs the trainer's own log-probabilities of its samples before the first update.

    Not if the one update that there is takes its own as the old ones, and nothing else asks for them.
    """
    return rl.passes * rl.updates_per_pass > 1 or rl.kl_in == "reward" or bool(rl.kl_target) or rl.importance.level != "none"


def standard(config: Config) -> Pipeline:
    """The stages of recipe grpo or ppo: log-probabilities only where something needs them, values and a critic's update with ppo."""
    rl, has_critic = config.rl, config.recipe == "ppo"
    old = ("old_logprobs",) if needs_old_logprobs(rl) else ()
    ref = ("ref_logprobs",) if rl.kl_coef > 0 else ()
    value = ("values",) if has_critic else ()
    scored = ("scores", "dropped") if config.reward.on_error == "drop" else ("scores",)
    weight = ("importance_weights",) if rl.importance.level != "none" else ()
    stages = [
        Stage("rollout", "everstep.rl.stages:rollout", (PROMPTS,), _SAMPLES, "ranks"),
        Stage("reward", "everstep.rl.stages:reward", ("prompt", "completion", "record", "loss_mask"), scored),
    ]
    if rl.dynamic_sampling_rounds:  # which completions there are depends on their rewards
        stages = [Stage("rollout", _SCORED_ROLLOUT, (PROMPTS,), (*_SAMPLES, *scored), "ranks")]
    if old:
        stages.append(Stage("old_logprob", "everstep.rl.stages:old_logprob", _TOKENS, old, "ranks"))
    if ref:
        stages.append(Stage("ref_logprob", "everstep.rl.stages:ref_logprob", _TOKENS, ref, "ranks"))
    if value:
        stages.append(Stage("values", "everstep.rl.stages:values", _TOKENS, value, "ranks"))
    estimated = (*scored, "group", "loss_mask", "rollout_logprobs", *old, *ref, *value)
    made = ("advantages", *(("returns",) if has_critic else ()), *weight)
    stages.append(Stage("advantages", "everstep.rl.stages:advantages", estimated, made))

    trained = (*_TOKENS, "loss_mask", "advantages", *old, *(ref if rl.kl_in == "loss" else ()), *weight)
    updates = [Update("update_actor", "actor", trained, "everstep.rl.stages:actor_loss")]
    if has_critic:
        updates.append(Update("update_critic", "critic", (*_TOKENS, "loss_mask", "values", "returns"), "everstep.rl.stages:critic_loss"))
    return Pipeline(tuple(stages), tuple(updates))


def fault_phases(config: Config) -> frozenset[str]:
    """The stages of an iteration in which fault injection can strike (``faults[].phase``); none if the recipe has no iterations."""
    if not derive.is_rl(config):
        return frozenset()
    phases = {"reward": "reward", "advantages": "advantages", "old_logprob": "logprobs", "ref_logprob": "logprobs", "values": "values"}
    stages = resolve(config).stages
    found = {"rollout"} | {phases[stage.name] for stage in stages if stage.name in phases}
    return frozenset(found | {"reward"} if any(stage.function == _SCORED_ROLLOUT for stage in stages) else found)


def resolve(config: Config) -> Pipeline:
    """The pipeline that ``config`` names, ordered. BadInput if it cannot be imported or made, PipelineError if it cannot run."""
    if config.pipeline is None:
        return standard(config).ordered()
    make = load_function(config.pipeline, "pipeline")
    check_arguments(make, 1, {}, config.pipeline, "pipeline", "nothing more")
    try:
        made = make(config)
    except EverstepError:
        raise
    except Exception as error:  # a fault boundary: user code
        raise PipelineError(f"pipeline={config.pipeline} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Pipeline):
        raise PipelineError(f"pipeline={config.pipeline} returned a {type(made).__name__}, not an everstep.rl.pipeline.Pipeline")
    pipeline = made.ordered()
    written = _writers(pipeline.stages)
    for column in (*_REPORTED, *(("old_logprobs", "ref_logprobs") if config.rl.kl_target else ())):
        if column not in written:
            what = "what rl.kl_target steers by" if column not in _REPORTED else "what is logged of an iteration"
            raise PipelineError(f"pipeline={config.pipeline}: no stage writes {column}, which is {what}; leave the standard stage, or write it in yours")
    trained = ["actor", "critic"] if config.recipe == "ppo" else ["actor"]
    if sorted(update.role for update in pipeline.updates) != trained:
        got = ", ".join(f"{update.name} ({update.role})" for update in pipeline.updates)
        raise PipelineError(f"pipeline={config.pipeline} has the updates {got}; recipe={config.recipe} trains {' and '.join(trained)}, in one update each")
    for part in pipeline.parts:
        function = part.loss if isinstance(part, Update) else part.function
        if isinstance(function, str):
            function = load_function(function, f"pipeline, stage {part.name}")
        if not callable(function):
            raise PipelineError(f"pipeline: {part.name} has a {type(function).__name__} for a function; give a function, or its name as module:function")
        name = getattr(function, "__name__", type(function).__name__)
        check_arguments(function, 1 if isinstance(part, Update) else 2, {}, name, f"pipeline, stage {part.name}")
    return pipeline
