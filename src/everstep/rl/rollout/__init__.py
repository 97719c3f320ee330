"""Generation of completions: what is asked for, and how a prompt becomes a group of samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import Config


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep all tokens.

    ``seed`` is the run's: together with a sample's id it fixes the noise of that sample (see rollout/transformers.py).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_response_tokens: int = 256
    samples_per_batch: int = 64
    seed: int = 0

    @staticmethod
    def for_training(config: Config) -> Sampling:
        r = config.rollout
        return Sampling(r.temperature, r.top_p, r.top_k, r.max_response_tokens, r.samples_per_batch, config.seed)

    @staticmethod
    def for_evaluation(config: Config) -> Sampling:
        r = config.rollout
        return Sampling(r.eval_temperature, 1.0, 0, r.max_response_tokens, r.samples_per_batch, config.seed)


def repeat_prompts(prompts: TrainingBatch, samples_per_prompt: int) -> TrainingBatch:
    """Each prompt ``samples_per_prompt`` times, one group after the other; B prompts -> B * samples_per_prompt samples.

    Sample k of prompt ``0/17`` has the id ``0/17#k``; the column ``group`` holds the prompt's id, which is what the
    advantage estimators group by.
    """
    rows = torch.arange(len(prompts)).repeat_interleave(samples_per_prompt)
    rows_list: list[int] = rows.tolist()
    assert prompts.weight_versions is not None
    return TrainingBatch(
        tensors={name: t.index_select(0, rows.to(t.device)) for name, t in prompts.tensors.items()},
        columns={
            **{name: [values[i] for i in rows_list] for name, values in prompts.columns.items()},
            "group": [prompts.sample_ids[i] for i in rows_list],
        },
        sample_ids=[f"{sid}#{k}" for sid in prompts.sample_ids for k in range(samples_per_prompt)],
        weight_versions=[prompts.weight_versions[i] for i in rows_list],
    )
