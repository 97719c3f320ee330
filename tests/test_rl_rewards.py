"""Rewards: choosing them, the built-ins, and what happens when one raises, hangs or crashes."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.support.runs import DEMO, config, gone

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import RewardConfig
from everstep.errors import BadInput, WorkerFailed
from everstep.rl import reward_functions
from everstep.rl.answers import extract_answer
from everstep.rl.reward_functions import brevity, exact_match, format_match, math_verify, number_match, position_match
from everstep.rl.rewards import RewardFailed, Scorer
from everstep.telemetry.events import EventLog, read_events


def batch(completions: list[str], records: list[dict] | None = None) -> TrainingBatch:
    """The mask has as many tokens as the completion has characters."""
    columns = {"prompt": ["p"] * len(completions), "completion": completions, "record": records or [{}] * len(completions)}
    mask = torch.tensor([[float(t < len(c)) for t in range(40)] for c in completions])
    return TrainingBatch({"loss_mask": mask}, columns, sample_ids=[f"0/{i}#0" for i in range(len(completions))])


def scorer(tmp_path: Path, *overrides: str, events: EventLog | None = None, said: list[str] | None = None) -> Scorer:
    conf = config(DEMO, tmp_path, "reward.function=null", "rollout.max_response_tokens=40", *overrides)
    return Scorer(conf, events, (said if said is not None else []).append)


@pytest.mark.parametrize(
    ("how", "completion", "answer"),
    [
        ("tag", "<answer>1</answer> no: <answer> 2\n</answer>", "2"),
        ("tag", "2", ""),
        ("tag", "<answer>1</answer><answer>never closed", "1"),
        ("tag", "</answer><answer>a<answer>b</answer>", "a<answer>b"),
        ("boxed", r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1", ""),
        ("last_number", "4 - 1 = 3.", "3"),
        ("last_number", "it is -1,234.5, I think", "-1,234.5"),
        ("last_number", "none", ""),
        ("hashes", "1 + 1 = 2\n#### 1,002 \n", "1,002"),
        ("hashes", "none", ""),
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
    after = {completion: number_match("", f"9\n#### {completion}", {"answer": "1018"}, extract="hashes") for completion in ("1,018", "1018.", "1018 dollars", "9", "all")}
    assert after == {"1,018": 1, "1018.": 1, "1018 dollars": 1, "9": 0, "all": 0}
    assert position_match("", "134", {"answer": "134"}) == 1
    assert position_match("", "143", {"answer": "134"}) == pytest.approx(1 / 3)
    assert position_match("", "1344", {"answer": "134"}) == 3 / 4, "too long loses"
    assert position_match("", "", {"answer": "134"}) == 0


def test_reasoning_gym_scores_with_its_own_scorer() -> None:
    gym = pytest.importorskip("reasoning_gym")
    args = {"size": 4, "seed": 1, "min_terms": 2, "max_terms": 2, "instruction": "ignored by the scorer"}
    score = reward_functions.resolve(RewardConfig(args={"extract": "last_number"}), "reasoning_gym:chain_sum", args)
    task = gym.create_dataset("chain_sum", size=4, seed=1, min_terms=2, max_terms=2)
    for entry in task:
        assert score("", f"The answer is {entry['answer']}.", dict(entry)) == 1.0
        assert score("", "I do not know", dict(entry)) == task.score_answer("", entry) < 1
    with pytest.raises(BadInput, match=r"takes only 'extract', not \['tolerance'\]"):
        reward_functions.resolve(RewardConfig(args={"tolerance": 1}), "reasoning_gym:chain_sum", args)


def test_own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_for_test.py").write_text(
        "def length(prompt, completion, record, scale=1.0): return scale * len(completion)\n"
        "def two(prompt, completion): return 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    bound = reward_functions.resolve(RewardConfig(function="my_rewards_for_test:length", args={"scale": 0.5}), "x.parquet")
    assert [bound("p", text, {}) for text in ("ab", "abcd")] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ({"function": "exact_mach"}, "not a built-in reward; did you mean exact_match"),
        ({"function": "zzz"}, "choose one of exact_match"),
        ({"function": "no_such_module_here:f"}, "there is no module 'no_such_module_here'"),
        ({"function": "everstep.rl.reward_functions:exact"}, "did you mean everstep.rl.reward_functions:exact_match"),
        ({"function": "everstep.rl.reward_functions:extract_answer"}, "cannot be called with 3 positional arguments"),
        ({"function": "exact_match", "args": {"extrakt": "all"}}, "unexpected keyword argument 'extrakt'"),
        ({"function": "exact_match", "args": {"extract": "everything"}}, "extract='everything' is unknown"),
        ({}, "set reward.function"),
        ({"function": "format_match", "args": {"pattern": "("}}, "is not a regular expression"),
        ({"function": "format_match", "args": {"pattern": 3}}, "reward.args.pattern=3 must be of type str"),
        ({"function": "number_match", "args": {"tolerance": "small"}}, "reward.args.tolerance='small' must be of type float"),
        ({"function": "number_match", "args": {"tolerance": -1}}, "reward.args.tolerance=-1 must be a finite number, not below 0"),
        ({"terms": [{"function": "exact_match", "args": {"ignore_case": "no"}}]}, "reward.terms.0.args.ignore_case='no' must be of type bool"),
        ({"function": "brevity", "args": {"free": 8, "longest": 8}}, "reward.args.free=8 must not be below 0, and less than reward.args.longest=8"),
        ({"function": "exact_match", "terms": [{"function": "brevity"}]}, "reward.terms replaces reward.function"),
        ({"terms": [{"function": "exact_match"}, {"function": "zzz"}]}, "reward.terms.1.function=zzz is not a built-in"),
    ],
)
def test_bad_choices_say_what_to_do(reward: dict, says: str) -> None:
    with pytest.raises(BadInput, match=says) as error:
        reward_functions.terms(RewardConfig(**reward), "x.parquet")
    assert "reward" in str(error.value)


def test_more_built_ins() -> None:
    assert exact_match("", "7", {"reward_model": {"style": "rule", "ground_truth": "7"}}) == 1  # verl's layout
    assert format_match("", "<think>a\nb</think> 3 ", {}, r"<think>.*</think>\s*\d") == 1
    assert format_match("", "x <think></think> 3", {}, r"<think>.*</think>\s*\d") == 0
    assert [brevity("", "x" * n, {}, free=4, longest=8) for n in (0, 4, 6, 8, 20)] == [0, 0, -0.5, -1, -1]


@pytest.mark.parametrize(
    ("completion", "answer", "same"),
    [
        (r"so it is $\frac{2}{4}$", r"\frac{1}{2}", True),
        (r"\boxed{0.5}", r"\frac12", True),
        ("The answer is 1,024", "1024", True),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
        (r"$\{2, 1\}$", r"\{1,2\}", True),
        (r"\boxed{3}", "4", False),
        ("no idea", "4", False),
    ],
)
def test_mathematics(completion: str, answer: str, same: bool) -> None:
    assert math_verify("", completion, {"answer": answer}) == same


# ------------------------------------------------------------------------------------------------ failures

MODULE = """
import asyncio, ctypes, os, time

def odd(prompt, completion, record):
    if completion == "raise": raise KeyError("answer")
    if completion == "nan": return float("nan")
    if completion == "none": return None
    if completion == "text": return "1.0"
    if completion == "huge": return 1e39
    if completion == "sleep": time.sleep(1000)
    if completion == "c":  # keeps the interpreter lock: no thread or signal handler of this process ever runs again
        ctypes.PyDLL(None).pause()
    if completion == "segv": ctypes.string_at(0)
    if completion == "exit": os._exit(3)
    return float(len(completion))

running = 0

async def judge(prompt, completion, record):
    global running
    running += 1
    try:
        if completion == "sleep": await asyncio.sleep(1000)
        if completion == "block": time.sleep(1000)
        if completion == "raise": raise ValueError("no")
        await asyncio.sleep(0.3)
        return float(running)
    finally:
        running -= 1

def slow(prompt, completion, record):
    time.sleep(float(completion)); return os.getpid()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "odd_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "odd_rewards"


def test_what_raises_hangs_or_crashes_marks_its_sample_and_no_other(module: str, tmp_path: Path) -> None:
    said: list[str] = []
    texts = ["aa", "raise", "nan", "c", "bbb", "segv", "none", "exit", "sleep", "cccc"]
    args = f"reward.function={module}:odd", "reward.timeout_s=1.5"
    with EventLog(tmp_path / "events" / "lead.jsonl", "lead") as events, scorer(tmp_path, *args, events=events, said=said) as score:
        got = score(batch(texts))
        again = score(batch(["a", "raise"]))  # the pool is whole afterwards
    assert got.values.tolist() == [2, 0, 0, 0, 3, 0, 0, 0, 0, 4] and again.values.tolist() == [1, 0]
    wanted = {1: "odd: KeyError: 'answer'", 2: "returned nan; it must be finite", 3: "no answer within reward.timeout_s=1.5 s, killed",
              5: "its process died (exit status -11)", 6: "returned None; it must return a number", 7: "(exit status 3)", 8: "killed"}
    assert got.failed.keys() == wanted.keys()
    assert all(text in got.failed[row] for row, text in wanted.items()), got.failed
    assert got.terms == {"odd": 3.0}
    told, later = [e for e in read_events(tmp_path / "events") if e.event == "reward_failed"]
    assert told["samples"] == [f"0/{row}#0" for row in wanted] and told["reasons"] == list(got.failed.values())
    assert told["action"] == "zero" and later["samples"] == ["0/1#0"]
    assert "7 of 10 samples failed (reward.on_error=zero), the first: 0/1#0: odd: KeyError" in said[0]


def test_coroutines_run_together_and_one_that_blocks_is_found(module: str, tmp_path: Path) -> None:
    args = [f"reward.function={module}:judge", "reward.timeout_s=1", "reward.workers=1", "reward.concurrency=8"]
    with scorer(tmp_path, *args) as score:
        got = score(batch(["a"] * 8))
        assert not got.failed and got.values.max() >= 4  # several were under way in one process
        odd = score(batch(["a", "sleep", "block", "raise", "b"]))
    assert odd.failed.keys() == {1, 2, 3} and odd.values[[0, 4]].gt(0).all()
    assert "no answer within" in odd.failed[1] and "killed" in odd.failed[2] and "ValueError: no" in odd.failed[3]


def test_all_failing_stops_whatever_the_policy(module: str, tmp_path: Path) -> None:
    with scorer(tmp_path, f"reward.function={module}:odd") as score:
        with pytest.raises(RewardFailed, match=r"sample 0/0#0: odd: KeyError: 'answer' \(completion 'raise'\); all 2 samples failed") as error:
            score(batch(["raise", "nan"]))
        assert error.value.sample_id == "0/0#0" and error.value.exit_code == 3
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_what_float32_cannot_hold_and_what_is_no_number_is_no_reward(module: str, tmp_path: Path) -> None:
    """By itself, or as the sum of terms: it would be infinite, and no group could be compared any more. A reward.timeout_s beyond what the
    kernel can count is as good as any."""
    with scorer(tmp_path, f"reward.function={module}:odd", "reward.timeout_s=1e15") as score:
        got = score(batch(["huge", "text", "aa"]))
    assert got.values.tolist() == [0, 0, 2] and got.failed.keys() == {0, 1}
    assert "returned 1e+39; it must be finite in float32" in got.failed[0] and "returned '1.0'; it must return a number" in got.failed[1]
    terms = "reward.terms=[{function: exact_match, weight: 3e38}, {function: position_match, weight: 3e38}]"
    with scorer(tmp_path, terms) as score:
        summed = score(batch(["a", "b"], [{"answer": "a"}, {"answer": "a"}]))
    assert summed.values.tolist() == [0, 0] and list(summed.failed) == [0] and "weighted sum of reward.terms is 6e+38" in summed.failed[0]


def test_a_part_of_an_iteration_may_fail_as_a_whole(module: str, tmp_path: Path) -> None:
    with scorer(tmp_path, f"reward.function={module}:odd", "reward.on_error=drop") as score:
        assert score(batch(["raise", "nan"]), whole=False).failed.keys() == {0, 1}


def test_an_answer_is_found_in_one_go(tmp_path: Path) -> None:
    """Quick rewards run where nothing can kill them: a completion of nothing but opened tags must not take the square of its length."""
    begin = time.monotonic()
    assert extract_answer("<answer>" * 200_000, "tag") == ""
    assert time.monotonic() - begin < 10.0


def test_on_error_stop_names_the_sample(module: str, tmp_path: Path) -> None:
    says = "sample 0/1#0: odd: ValueError: the function returned nan"
    with scorer(tmp_path, f"reward.function={module}:odd", "reward.on_error=stop") as score, pytest.raises(RewardFailed, match=says):
        score(batch(["a", "nan"]))


def test_no_process_is_left(module: str, tmp_path: Path) -> None:
    """Not after close, also if it comes while a function runs."""
    score = scorer(tmp_path, f"reward.function={module}:slow", "reward.workers=2")
    pids = {int(pid) for pid in score(batch(["0.3"] * 8)).values}
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    failure: list[BaseException] = []

    def long() -> None:
        try:
            score(batch(["1000", "1000"]))
        except WorkerFailed as error:
            failure.append(error)

    (thread := threading.Thread(target=long)).start()
    time.sleep(0.3)
    score.close()
    thread.join(10)
    assert "was closed" in str(failure[0]) and gone(pids, 2.0)


def test_the_processes_end_with_their_parent(module: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        gc.freeze()  # what the parent's threads use is not collected where they do not run
        try:
            score = scorer(tmp_path, f"reward.function={module}:slow", "reward.workers=1", "reward.timeout_s=1000")
            pid = int(score(batch(["0"])).values[0])
            os.write(write, str(pid).encode())
            score(batch(["1000"]))
        finally:
            os._exit(1)
    pid = int(os.read(read, 20))
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert gone({pid}, 5.0)


def test_a_module_that_only_processes_of_their_own_cannot_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here_only.py").write_text(f"import os\nassert os.getpid() == {os.getpid()}, 'only in the parent'\ndef f(p, c, r): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    says = r"cannot be loaded in a process of their own.*only in the parent"
    with scorer(tmp_path, "reward.function=here_only:f") as score, pytest.raises(WorkerFailed, match=says):
        score(batch(["a", "b"]))


# ------------------------------------------------------------------------------------------------ sums


def test_several_terms_with_weights_and_the_overlong_punishment(tmp_path: Path) -> None:
    terms = "reward.terms=[{function: exact_match, weight: 2.0}, {function: brevity, args: {free: 2, longest: 4}, weight: 0.5}]"
    records = [{"answer": "ab"}, {"answer": "x"}, {"answer": "y"}]
    texts = ["ab", "abc", "y" * 38]
    with scorer(tmp_path, terms) as score:
        got = score(batch(texts, records))
    assert got.values.tolist() == [2.0, -0.25, -0.5] and got.terms == {"exact_match": pytest.approx(1 / 3), "brevity": pytest.approx(-0.5)}
    with scorer(tmp_path, terms, "reward.overlong_cache_tokens=8", "reward.overlong_factor=0.4") as score:
        shaped = score(batch(texts, records))
        assert torch.equal(score(batch(texts, records), shaped=False).values, got.values), "as an evaluation asks"
    assert shaped.values.tolist() == pytest.approx([2.0, -0.25, -0.5 - 0.4 * 6 / 8])


def test_a_sample_fails_if_one_of_its_terms_does(tmp_path: Path) -> None:
    terms = "reward.terms=[{function: number_match}, {function: exact_match, args: {extract: all}}]"
    with scorer(tmp_path, terms) as score:
        got = score(batch(["1", "1"], [{"answer": "1"}, {"answer": "one"}]))
    assert got.values.tolist() == [2.0, 0.0] and list(got.failed) == [1]
    assert "number_match: ValueError: the record's answer 'one' is not a number" in got.failed[1]
