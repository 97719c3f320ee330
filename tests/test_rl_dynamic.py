"""Dynamic sampling: which groups are replaced, by which prompts, and what is recorded."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from tests.support.runs import DEMO, config

from everstep.cluster.batch import TrainingBatch
from everstep.rl.dynamic import collect, why_useless
from everstep.rl.execute import Context
from everstep.rl.rewards import Scorer
from everstep.rl.stages import scored_rollout

NAN = float("nan")  # of a completion whose reward failed and that is dropped


class Prompts:
    """Scored groups of two, one for each prompt in the order of the data."""

    def __init__(self, *rewards: tuple[float, float]):
        self.rewards, self.taken = rewards, 0
        self.asked: list[int] = []

    def __call__(self, count: int) -> TrainingBatch:
        self.asked.append(count)
        first, self.taken = self.taken, self.taken + count
        scores = torch.tensor([float(r) for pair in self.rewards[first : self.taken] for r in pair])
        names = [f"0/{i}" for i in range(first, self.taken) for _ in range(2)]
        ids = [f"{name}#{k % 2}" for k, name in enumerate(names)]
        return TrainingBatch({"scores": scores.nan_to_num(), "dropped": scores.isnan().float()}, {"group": names}, ids)


def groups(batch: TrainingBatch) -> list[str]:
    return batch.column("group")[::2]


def test_as_many_prompts_are_taken_as_groups_are_missing() -> None:
    prompts = Prompts((0, 1), (1, 1), (0, 0), (1, 0), (0.7, 0.7), (0, 1), (1, 0))
    got = collect(prompts(4), 3, prompts)
    assert groups(got.samples) == ["0/0", "0/3", "0/5", "0/6"] and prompts.asked == [4, 2, 1]
    assert got.samples.sample_ids[:2] == ["0/0#0", "0/0#1"]
    assert got.dropped == [
        (["0/1#0", "0/1#1"], "all rewards are 1"), (["0/2#0", "0/2#1"], "all rewards are 0"), (["0/4#0", "0/4#1"], "all rewards are 0.7"),
    ]
    assert got.metrics == {"train/num_gen_batches": 3.0, "train/dropped_groups": 3 / 7}


def test_after_the_last_round_the_step_is_filled_with_the_last_that_were_left_out() -> None:
    prompts = Prompts((1, 1), (0, 0), (1, 0), (0, 0), (1, 1))
    got = collect(prompts(3), 1, prompts)
    assert groups(got.samples) == ["0/2", "0/3", "0/4"] and prompts.asked == [3, 2]
    assert [ids[0] for ids, _ in got.dropped] == ["0/0#0", "0/1#0"]
    used = set(got.samples.sample_ids) | {sample for ids, _ in got.dropped for sample in ids}
    assert used == {f"0/{i}#{k}" for i in range(5) for k in range(2)}  # each one once, used or recorded


def test_nothing_is_asked_for_where_nothing_is_missing_or_it_is_off() -> None:
    prompts = Prompts((0, 1), (1, 0))
    assert groups(collect(prompts(2), 5, prompts).samples) == ["0/0", "0/1"] and prompts.asked == [2]
    prompts = Prompts((1, 1), (0, 0))
    batch = prompts(2)
    off = collect(batch, 0, prompts)
    assert off.samples is batch and not off.dropped and not off.metrics and prompts.asked == [2]


def test_completions_that_were_dropped_are_not_compared() -> None:
    prompts = Prompts((0, 1), (NAN, 1), (NAN, NAN))
    scored = prompts(3)
    reasons = [why_useless(scored.slice(i, i + 2)) for i in (0, 2, 4)]
    assert reasons == [None, "1 of 2 rewards did not fail", "0 of 2 rewards did not fail"]


def test_a_prompt_whose_reward_always_fails_is_replaced_even_if_it_is_the_only_one_of_its_round(tmp_path) -> None:
    """The second prompt is answered wrong each time, the one that replaces it has no answer to compare with, the next one teaches."""
    conf = config(DEMO, tmp_path, "reward.function=exact_match", "reward.on_error=drop", "rl.dynamic_sampling_rounds=3")
    answers, taken = ["x0", "nobody", None, "x3"], [0]

    def more(count: int) -> TrainingBatch:
        first, taken[0] = taken[0], taken[0] + count
        rows = [(i, k) for i in range(first, taken[0]) for k in range(2)]
        columns = {"group": [f"0/{i}" for i, _ in rows], "prompt": ["p"] * len(rows), "completion": [f"x{i}" if k else "" for i, k in rows],
                   "record": [{"answer": answers[i]} if answers[i] else {} for i, _ in rows]}
        return TrainingBatch({"loss_mask": torch.ones(len(rows), 1)}, columns, [f"0/{i}#{k}" for i, k in rows])

    group = SimpleNamespace(rollout=lambda prompts, sampling: prompts, once=lambda function, *args: function(*args), enter_stage=lambda name: None)
    dropped: list = []
    with Scorer(conf) as reward:
        context = Context(conf, 1, reward, 0.0, more, dropped.extend, group)  # type: ignore[arg-type]
        samples, _ = scored_rollout(context, more(2))
    assert groups(samples) == ["0/0", "0/3"]
    assert [reason for _, reason in dropped] == ["all rewards are 0", "0 of 2 rewards did not fail"]
