"""The rewards of a batch of completions, as section ``reward`` of the configuration says.

``reward.function`` names one of the built-ins of ``reward_functions`` or your own ``module:function``; ``reward.terms`` several,
whose weighted sum counts. Without either, a reasoning_gym source is scored by the task's own scorer, and other sources need a
function. What takes microseconds runs here; everything else in the processes of ``reward_pool``, each call with
``reward.timeout_s``. A function that raises, hangs, crashes, or returns no finite number marks its sample; ``reward.on_error``
says what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import Config
from everstep.errors import WorkerFailed
from everstep.rl.reward_functions import checked, terms
from everstep.rl.reward_pool import RewardPool
from everstep.rl.reward_worker import Answer, Task
from everstep.rl.shaping import overlong_penalty
from everstep.telemetry.events import EventLog


class RewardFailed(WorkerFailed):
    """A reward function failed where that stops the run. ``sample_id`` says for which sample."""

    def __init__(self, sample_id: str, problem: str):
        self.sample_id, self.problem = sample_id, problem
        super().__init__(f"reward of sample {sample_id}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.sample_id, self.problem))


@dataclass(frozen=True)
class Scores:
    """Rewards of B completions.

    ``values`` (B,) float32, 0 where there is none; ``unpunished``: the same before reward.overlong_cache_tokens; ``failed``: row -> reason; ``sums``: the sum of each term, before its weight, over
    the completions for which it has a value, and how many these are.
    """

    values: Tensor
    unpunished: Tensor
    failed: dict[int, str] = field(default_factory=dict)
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    @property
    def terms(self) -> dict[str, float]:
        """The mean of each term over the completions for which it has a value (none: it is left out)."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}

    @property
    def metrics(self) -> dict[str, float]:
        """The means of the terms, if there are several."""
        return {f"reward_terms/{name}": mean for name, mean in self.terms.items()} if len(self.sums) > 1 else {}

    def __add__(self, more: Scores) -> Scores:
        """Of these completions and ``more`` after them, by the same functions."""
        failed = self.failed | {len(self.values) + row: reason for row, reason in more.failed.items()}
        sums = {name: (total + more.sums[name][0], count + more.sums[name][1]) for name, (total, count) in self.sums.items()}
        return Scores(torch.cat([self.values, more.values]), torch.cat([self.unpunished, more.unpunished]), failed, sums)

    def tensors(self, drop: bool) -> dict[str, Tensor]:
        """As columns of the samples: ``scores`` (B,); with ``drop`` also ``dropped`` (B,), 1 for those that failed."""
        if not drop:
            return {"scores": self.values}
        dropped = torch.zeros_like(self.values)
        dropped[list(self.failed)] = 1.0
        return {"scores": self.values, "dropped": dropped}


def without_dropped(samples: TrainingBatch) -> TrainingBatch:
    """The same samples; of those that are ``dropped`` (B,) no token counts: they weigh nothing, in their group neither."""
    if "dropped" not in samples:
        return samples
    return samples.with_tensors(loss_mask=samples["loss_mask"] * (1.0 - samples["dropped"]).unsqueeze(1))


class Scorer:
    """The reward of a run. Close it (``with``): it may hold processes, which are started when they are first needed.

    ``events``, ``note``: where failures are recorded, and said. BadInput if ``config.reward`` names what does not exist or cannot
    be called.
    """

    def __init__(self, config: Config, events: EventLog | None = None, note: Callable[[str], None] = lambda text: None):
        self._reward, self._events, self._note = config.reward, events, note
        self._longest = config.rollout.max_response_tokens
        self._terms = terms(config.reward, config.data.source, config.data.source_args)
        self._pool = None
        if not all(term.quick for term in self._terms):
            self._pool = RewardPool(config.reward, config.data.source, config.data.source_args, self._terms)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._pool:
            self._pool.close()

    def __call__(self, batch: TrainingBatch) -> Scores:
        """Scores from the columns ``prompt``, ``completion`` and ``record``, and, for the length, ``loss_mask``.

        RewardFailed with reward.on_error=stop if one failed, and in any case if all did: then it is not the completions.
        """
        answers = self._answers(batch)
        failed: dict[int, str] = {}
        values = [0.0] * len(batch)
        sums = {term.name: (0.0, 0) for term in self._terms}
        for i, answer in enumerate(answers):
            row, term = divmod(i, len(self._terms))
            if answer.value is None:
                failed.setdefault(row, answer.problem)
            else:
                name = self._terms[term].name
                values[row] += self._terms[term].weight * answer.value
                sums[name] = sums[name][0] + answer.value, sums[name][1] + 1
        if failed:
            self._record(batch, failed)
        if failed and (self._reward.on_error == "stop" or len(failed) == len(batch)):
            row, problem = next(iter(failed.items()))
            many = f"; all {len(batch)} samples failed" if len(failed) == len(batch) > 1 else ""
            raise RewardFailed(batch.sample_ids[row], f"{problem} (completion {batch.column('completion')[row][:200]!r}){many}")
        unpunished = torch.tensor(values, dtype=torch.float32)
        unpunished[list(failed)] = 0.0
        scores = unpunished.clone()
        if self._reward.overlong_cache_tokens:
            lengths = batch["loss_mask"].sum(dim=1).tolist()
            cache, factor = self._reward.overlong_cache_tokens, self._reward.overlong_factor
            scores += torch.tensor([overlong_penalty(int(n), self._longest, cache, factor) for n in lengths])
        scores[list(failed)] = 0.0
        return Scores(scores, unpunished, failed, sums)

    def _record(self, batch: TrainingBatch, failed: dict[int, str]) -> None:
        ids, reasons, action = [batch.sample_ids[row] for row in failed], list(failed.values()), self._reward.on_error
        if self._events:
            self._events.emit("reward_failed", samples=ids, reasons=reasons, action=action)
        self._note(f"reward of {len(ids)} of {len(batch)} samples failed (reward.on_error={action}), the first: {ids[0]}: {reasons[0]}")

    def _answers(self, batch: TrainingBatch) -> Sequence[Answer]:
        """One for each term of each sample, those of a sample side by side."""
        columns = [batch.column(name) for name in ("prompt", "completion", "record")]
        tasks = [
            Task(row * len(self._terms) + term, term, *values)
            for row, values in enumerate(zip(*columns, strict=True))
            for term in range(len(self._terms))
        ]
        return self._pool.score(tasks) if self._pool else [self._now(task) for task in tasks]

    def _now(self, task: Task) -> Answer:
        term = self._terms[task.term]
        try:
            return Answer(task.number, checked(term.function(task.prompt, task.completion, task.record)))
        except Exception as error:  # a fault boundary: records are the user's
            return Answer(task.number, None, f"{term.name}: {type(error).__name__}: {error}")
