"""Rewards: a function of (prompt, completion, record) that returns a number.

``reward.function`` names one of the built-ins below or your own ``module:function``; ``reward.args`` are bound to it.
Without it, a reasoning_gym source is scored by the task's own scorer, and other sources need an answer to compare with.

Texts are without special tokens. ``record`` is the data record, as its source gave it.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable
from typing import Any

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import RewardConfig
from everstep.data.functions import check_arguments, load_function
from everstep.data.source import REASONING_GYM
from everstep.errors import BadInput, WorkerFailed

Reward = Callable[[str, str, dict[str, Any]], float]


class RewardFailed(WorkerFailed):
    """The reward function raised, or returned something that is not a finite number. ``sample_id`` says for which sample."""

    def __init__(self, sample_id: str, problem: str):
        self.sample_id, self.problem = sample_id, problem
        super().__init__(f"reward of sample {sample_id}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.sample_id, self.problem))


# ------------------------------------------------------------------------------------------------ built-ins

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")


def extract_answer(completion: str, how: str = "auto") -> str:
    """The part of a completion that is its answer; "" if there is none.

    tag          inside the last <answer>...</answer>
    boxed        inside the last \\boxed{...}
    last_number  the last number
    last_line    the last line that is not empty
    all          all of it, without surrounding white space
    auto         tag if there is one, else boxed if there is one, else all
    """
    if how == "tag":
        found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
        return found[-1].strip() if found else ""
    if how == "boxed":
        return _boxed(completion)
    if how == "last_number":
        found = _NUMBER.findall(completion)
        return found[-1].rstrip(",") if found else ""
    if how == "last_line":
        lines = [line.strip() for line in completion.splitlines() if line.strip()]
        return lines[-1] if lines else ""
    if how == "all":
        return completion.strip()
    if how == "auto":
        return extract_answer(completion, "tag") or extract_answer(completion, "boxed") or completion.strip()
    raise BadInput(f"reward.args: extract={how!r} is unknown; choose tag, boxed, last_number, last_line, all or auto")


def exact_match(prompt: str, completion: str, record: dict[str, Any], extract: str = "auto", ignore_case: bool = False) -> float:
    """1 if the extracted answer is the record's ``answer``, else 0."""
    got, want = extract_answer(completion, extract), str(record["answer"]).strip()
    return float(got.casefold() == want.casefold() if ignore_case else got == want)


def number_match(
    prompt: str, completion: str, record: dict[str, Any], extract: str = "last_number", tolerance: float = 1e-6
) -> float:
    """1 if the extracted answer is the number that the record's ``answer`` is (relative ``tolerance``), else 0."""
    got, want = _number(extract_answer(completion, extract)), _number(str(record["answer"]))
    if want is None:
        raise ValueError(f"the record's answer {record['answer']!r} is not a number")
    return float(got is not None and math.isclose(got, want, rel_tol=tolerance, abs_tol=tolerance))


def position_match(prompt: str, completion: str, record: dict[str, Any], extract: str = "all") -> float:
    """Share of character positions at which the answer is right; a completion that is too long or too short loses as well."""
    got, want = extract_answer(completion, extract), str(record["answer"]).strip()
    right = sum(a == b for a, b in zip(got, want, strict=False))
    return right / max(len(got), len(want), 1)


BUILT_IN: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "number_match": number_match,
    "position_match": position_match,
}


def reasoning_gym_reward(task: str, task_args: dict[str, Any], extract: str = "auto") -> Reward:
    """The scorer that the reasoning_gym task brings along, applied to the extracted answer."""
    import reasoning_gym

    ours = {"instruction", "as_text", "size"}
    # Some scorers look at the configuration of their task, so it is made with the same arguments.
    dataset = reasoning_gym.create_dataset(task, size=1, **{k: v for k, v in task_args.items() if k not in ours})

    def score(prompt: str, completion: str, record: dict[str, Any]) -> float:
        return float(dataset.score_answer(extract_answer(completion, extract), record))

    return score


# ------------------------------------------------------------------------------------------------ choosing and applying


def resolve(reward: RewardConfig, source: str, source_args: dict[str, Any] | None = None) -> Reward:
    """The reward function of a run: ``reward`` is section ``reward`` of the configuration, ``source`` is data.source.

    BadInput if the function cannot be imported, is not known, or does not take (prompt, completion, record) and
    ``reward.args``.
    """
    if reward.function is None:
        if not source.startswith(REASONING_GYM):
            raise BadInput(
                f"data.source={source} has no scorer of its own: set reward.function to module:function or one of "
                f"{', '.join(BUILT_IN)}"
            )
        allowed = {"extract"}
        if unknown := sorted(reward.args.keys() - allowed):
            raise BadInput(f"reward.args: the scorer of {source} takes only 'extract', not {unknown}")
        extract_answer("", reward.args.get("extract", "auto"))  # refuses an unknown way now
        return reasoning_gym_reward(source.removeprefix(REASONING_GYM), source_args or {}, **reward.args)
    if ":" in reward.function:
        function = load_function(reward.function, "reward.function")
    elif reward.function in BUILT_IN:
        function = BUILT_IN[reward.function]
    else:
        close = difflib.get_close_matches(reward.function, BUILT_IN, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; choose one of {', '.join(BUILT_IN)} or module:function"
        raise BadInput(f"reward.function={reward.function} is not a built-in reward{hint}")
    check_arguments(function, 3, reward.args, reward.function, "reward.function", "reward.args")
    if function in BUILT_IN.values() and "extract" in reward.args:
        extract_answer("", reward.args["extract"])
    return functools.partial(function, **reward.args) if reward.args else function


def score(reward: Reward, batch: TrainingBatch) -> list[float]:
    """One reward per sample, from the columns ``prompt``, ``completion`` and ``record``.

    RewardFailed, with the sample's id, if the function raises or returns anything but a finite number.
    """
    columns = (batch.column(name) for name in ("prompt", "completion", "record"))
    rewards = []
    for sample_id, prompt, completion, record in zip(batch.sample_ids, *columns, strict=True):
        try:
            value = reward(prompt, completion, record)
        except Exception as error:  # a fault boundary: user code
            raise RewardFailed(sample_id, f"{type(error).__name__}: {error} (completion {completion[:200]!r})") from error
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise RewardFailed(sample_id, f"the function returned {value!r}; it must return a number") from None
        if not math.isfinite(number):
            raise RewardFailed(sample_id, f"the function returned {number}; it must be finite (completion {completion[:200]!r})")
        rewards.append(number)
    return rewards


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").strip())
    except ValueError:
        return None


def _boxed(text: str) -> str:
    start = text.rfind("\\boxed{")
    if start < 0:
        return ""
    depth, begin = 1, start + len("\\boxed{")
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip()
    return ""  # never closed
