"""The transactions of an iteration: which mini-batch trains which model when, as a pure function of the iteration record.

The updates of the pipeline come one after the other, each in passes, each pass in mini-batches. All transactions of a run, of
either model, have one sequence of numbers (docs/protocol.md, rule 22), so how many of an iteration are done is a difference of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from everstep.cluster.batch import TrainingBatch
from everstep.config import derive
from everstep.config.schema import Config
from everstep.data import pass_order
from everstep.recipes.schedule import learning_rate
from everstep.rl.pipeline import Pipeline, Update
from everstep.rl.record import IterationRecord


@dataclass(frozen=True)
class Transaction:
    """One optimizer step. Passes and mini-batches count from 0; ``last``: of this update in the iteration."""

    update: Update
    iteration: int
    rl_pass: int
    mini_batch: int
    batch: TrainingBatch
    lr: float
    last: bool

    @property
    def about(self) -> dict[str, int | str]:
        """What the step is, for the event log."""
        return {"iteration": self.iteration, "model": self.update.role, "rl_pass": self.rl_pass, "mini_batch": self.mini_batch}


def transactions(config: Config, pipeline: Pipeline, record: IterationRecord, done: int) -> Iterator[Transaction]:
    """Those of the iteration after its first ``done``. While the critic warms up, the actor has none."""
    rl = derive.sizes(config).rl
    assert rl is not None
    number = 0
    for update in pipeline.updates:
        is_actor = update.role == "actor"
        if is_actor and record.iteration <= rl.critic_warmup:
            continue
        steps = rl.updates_per_iteration if is_actor else rl.critic_updates_per_iteration
        before, total = (
            (rl.actor_steps_before(record.iteration), rl.actor_steps)
            if is_actor else (rl.critic_steps_before(record.iteration), rl.critic_steps)
        )
        optimizer = config.optimizer if is_actor else config.critic.optimizer
        batches: list[TrainingBatch] = []
        for index in range(steps):
            number += 1
            rl_pass, mini_batch = divmod(index, config.rl.updates_per_pass)
            if number <= done:
                continue
            if mini_batch == 0 or not batches:
                batches = mini_batches(record, update, config, rl_pass)
            lr = learning_rate(optimizer, before + index + 1, total)
            yield Transaction(update, record.iteration, rl_pass, mini_batch, batches[mini_batch], lr, index + 1 == steps)


def mini_batches(record: IterationRecord, update: Update, config: Config, rl_pass: int) -> list[TrainingBatch]:
    """The batches of one pass over an iteration's samples, in an order that the seed fixes.

    Each use of a sample has its own id, ``ITERATION/PASS/SAMPLE``, with ``critic:`` before it if the critic uses it, so that the
    account of samples is exact over passes and models.
    """
    samples = record.samples.only(*update.reads)
    order = pass_order(len(samples), config.seed, record.iteration * config.rl.passes + rl_pass)
    chosen = samples.select(order)
    whose = "" if update.role == "actor" else f"{update.role}:"
    ids = [f"{whose}{record.iteration}/{rl_pass}/{sample}" for sample in chosen.sample_ids]
    named = TrainingBatch(chosen.tensors, chosen.columns, ids, chosen.weight_versions)
    return named.chunk(config.rl.updates_per_pass)
