"""Generation of completions: what is asked for, how a prompt becomes a group of samples, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import Config


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep all tokens.

    ``seed`` is the run's: together with a sample's id it fixes the noise of that sample (see rollout/noise.py).
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


@dataclass
class Response:
    """A completion as far as it has come.

    ``tokens``, ``logprobs`` and ``versions`` have one entry per token: its id, its log-probability at the sampling temperature before
    top_k and top_p, and the committed step of the weights that made it. ``finished``: it ended with an end-of-sequence token, which is
    the last of ``tokens``; not so if it was cut at the greatest length. ``text``: without special tokens, once it is complete.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: bool = False
    text: str = ""
    seconds: float = 0.0  # of generation, its share of what was generated together with it

    def extend(self, more: Response) -> None:
        self.tokens += more.tokens
        self.logprobs += more.logprobs
        self.versions += more.versions
        self.seconds += more.seconds
        self.finished, self.text = more.finished, more.text


#: What an engine made: sample -> (more of it, whether it is complete now).
Pieces = dict[str, tuple[Response, bool]]


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


def prompt_tokens(prompts: TrainingBatch) -> list[list[int]]:
    """The token ids of each row's prompt; ``input_ids``/``attention_mask`` (B, P) are right-padded prompts."""
    lengths = prompts["attention_mask"].sum(dim=1).tolist()
    return [row[:length] for row, length in zip(prompts["input_ids"].tolist(), lengths, strict=True)]


def assemble(prompts: TrainingBatch, responses: Mapping[str, Response]) -> TrainingBatch:
    """The samples of ``prompts`` with their completions, right-padded to [prompt, completion, pad], T columns:

        input_ids, attention_mask   int64 (B, T)
        loss_mask                   float32 (B, T): 1 on the completion, its end-of-sequence token included
        rollout_logprobs            float32 (B, T): log p of each completion token, 0 elsewhere
        rollout_versions            int64 (B, T): the weights that made each completion token, -1 elsewhere

    and the columns ``completion`` (text without special tokens), ``finished`` (False: cut at max_response_tokens) and ``rollout_s``.
    A sample's weight version is the lowest among its tokens; one without tokens (nobody could complete it) has that of the newest, and no
    token of it counts.
    """
    heads = prompt_tokens(prompts)
    made = [responses[sid] for sid in prompts.sample_ids]
    B, newest = len(prompts), max((version for response in made for version in response.versions), default=0)
    T = max((len(head) + len(response.tokens) for head, response in zip(heads, made, strict=True)), default=0)
    ids, mask = torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, T, dtype=torch.int64)
    loss_mask, logprobs = torch.zeros(B, T), torch.zeros(B, T)
    versions = torch.full((B, T), -1, dtype=torch.int64)
    for row, (head, response) in enumerate(zip(heads, made, strict=True)):
        start, end = len(head), len(head) + len(response.tokens)
        ids[row, :end] = torch.tensor([*head, *response.tokens], dtype=torch.int64)
        mask[row, :end] = 1
        loss_mask[row, start:end] = 1.0
        logprobs[row, start:end] = torch.tensor(response.logprobs)
        versions[row, start:end] = torch.tensor(response.versions, dtype=torch.int64)
    return TrainingBatch(
        tensors={
            "input_ids": ids, "attention_mask": mask, "loss_mask": loss_mask, "rollout_logprobs": logprobs, "rollout_versions": versions,
        },
        columns={
            **prompts.columns,
            "completion": [response.text for response in made],
            "finished": [response.finished for response in made],
            "rollout_s": [response.seconds for response in made],
        },
        sample_ids=prompts.sample_ids,
        weight_versions=[min(response.versions, default=newest) for response in made],
    )

