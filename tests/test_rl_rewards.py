"""Rewards: choosing them, the built-ins, and what happens when one fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import RewardConfig
from everstep.errors import BadInput
from everstep.rl import rewards
from everstep.rl.rewards import RewardFailed, exact_match, extract_answer, number_match, position_match


def batch(completions: list[str], records: list[dict]) -> TrainingBatch:
    columns = {"prompt": ["p"] * len(completions), "completion": completions, "record": records}
    return TrainingBatch({}, columns, sample_ids=[f"0/{i}#0" for i in range(len(completions))])


@pytest.mark.parametrize(
    ("how", "completion", "answer"),
    [
        ("tag", "<answer>1</answer> no: <answer> 2\n</answer>", "2"),
        ("tag", "2", ""),
        ("boxed", r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", ""),
        ("last_number", "4 - 1 = 3.", "3"),
        ("last_number", "it is -1,234.5, I think", "-1,234.5"),
        ("last_number", "none", ""),
        ("last_line", "a\n\n b \n\n", "b"),
        ("all", " a b ", "a b"),
        ("auto", r"<answer>1</answer>\boxed{2}", "1"),
        ("auto", r"x \boxed{2}", "2"),
        ("auto", " x ", "x"),
    ],
)
def test_extract(how: str, completion: str, answer: str) -> None:
    assert extract_answer(completion, how) == answer


def test_built_ins() -> None:
    assert exact_match("", "134", {"answer": "134"}) == 1 and exact_match("", "143", {"answer": "134"}) == 0
    assert exact_match("", "Yes", {"answer": "yes"}) == 0
    assert exact_match("", "Yes", {"answer": "yes"}, ignore_case=True) == 1
    assert exact_match("", "3", {"answer": 3}) == 1
    assert number_match("", "4 - 1 = 3.0.", {"answer": "3"}) == 1
    assert number_match("", "1,000", {"answer": 1000}) == 1
    assert number_match("", "4", {"answer": "3"}) == 0 and number_match("", "", {"answer": "0"}) == 0
    assert number_match("", "<answer>5</answer> 3", {"answer": "3"}, extract="tag") == 0
    assert position_match("", "134", {"answer": "134"}) == 1
    assert position_match("", "143", {"answer": "134"}) == pytest.approx(1 / 3)
    assert position_match("", "1344", {"answer": "134"}) == 3 / 4, "too long loses"
    assert position_match("", "", {"answer": "134"}) == 0


def test_reasoning_gym_scores_with_its_own_scorer() -> None:
    gym = pytest.importorskip("reasoning_gym")
    args = {"size": 4, "seed": 1, "min_terms": 2, "max_terms": 2, "instruction": "ignored by the scorer"}
    score = rewards.resolve(RewardConfig(args={"extract": "last_number"}), "reasoning_gym:chain_sum", args)
    task = gym.create_dataset("chain_sum", size=4, seed=1, min_terms=2, max_terms=2)
    for entry in task:
        assert score("", f"The answer is {entry['answer']}.", dict(entry)) == 1.0
        assert score("", "I do not know", dict(entry)) == task.score_answer("", entry) < 1
    with pytest.raises(BadInput, match=r"takes only 'extract', not \['tolerance'\]"):
        rewards.resolve(RewardConfig(args={"tolerance": 1}), "reasoning_gym:chain_sum", args)


def test_own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_for_test.py").write_text(
        "def length(prompt, completion, record, scale=1.0): return scale * len(completion)\n"
        "def two(prompt, completion): return 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    bound = rewards.resolve(RewardConfig(function="my_rewards_for_test:length", args={"scale": 0.5}), "x.parquet")
    assert rewards.score(bound, batch(["ab", "abcd"], [{}, {}])) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ({"function": "exact_mach"}, "not a built-in reward; did you mean exact_match"),
        ({"function": "zzz"}, "choose one of exact_match"),
        ({"function": "no_such_module_here:f"}, "there is no module 'no_such_module_here'"),
        ({"function": "everstep.rl.rewards:exact"}, "did you mean everstep.rl.rewards:exact_match"),
        ({"function": "everstep.rl.rewards:extract_answer"}, "cannot be called with 3 positional arguments"),
        ({"function": "exact_match", "args": {"extrakt": "all"}}, "unexpected keyword argument 'extrakt'"),
        ({"function": "exact_match", "args": {"extract": "everything"}}, "extract='everything' is unknown"),
        ({}, "set reward.function"),
    ],
)
def test_bad_choices_say_what_to_do(reward: dict, says: str) -> None:
    with pytest.raises(BadInput, match=says) as error:
        rewards.resolve(RewardConfig(**reward), "x.parquet")
    assert "reward" in str(error.value)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (float("nan"), "returned nan; it must be finite"),
        (float("inf"), "returned inf"),
        (None, "returned None; it must return a number"),
        ("good", "returned 'good'"),
    ],
)
def test_a_reward_that_is_no_finite_number_names_the_sample(returned: object, says: str) -> None:
    reward = lambda p, c, r: returned if c == "bad" else 1.0
    with pytest.raises(RewardFailed, match=says) as error:
        rewards.score(reward, batch(["ok", "bad"], [{}, {}]))  # type: ignore[arg-type]
    assert error.value.sample_id == "0/1#0" and "0/1#0" in str(error.value)


def test_a_reward_that_raises_names_the_sample_and_the_cause() -> None:
    with pytest.raises(RewardFailed, match=r"sample 0/1#0: KeyError: 'answer' \(completion 'b'\)") as error:
        rewards.score(exact_match, batch(["a", "b"], [{"answer": "a"}, {}]))
    assert isinstance(error.value.__cause__, KeyError)
    import pickle

    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
