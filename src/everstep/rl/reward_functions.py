"""Reward functions: the built-ins, and how the configuration names one. Without torch: worker processes of the pool import it.

A reward function takes (prompt, completion, record) and returns a number; ``async def`` is fine. Texts are without special
tokens; ``record`` is the data record, as its source gave it.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from everstep.config.rl_schema import RewardConfig
from everstep.data.functions import check_arguments, load_function
from everstep.data.source import REASONING_GYM
from everstep.errors import BadInput
from everstep.rl.answers import extract_answer, leading_number, number, right_answer

Reward = Callable[[str, str, dict[str, Any]], Any]
"""(prompt, completion, record) -> a number, or an awaitable of one."""


# ------------------------------------------------------------------------------------------------ built-ins


def exact_match(prompt: str, completion: str, record: dict[str, Any], extract: str = "auto", ignore_case: bool = False) -> float:
    """1 if the extracted answer is the record's, else 0."""
    got, want = extract_answer(completion, extract), str(right_answer(record)).strip()
    return float(got.casefold() == want.casefold() if ignore_case else got == want)


def number_match(
    prompt: str, completion: str, record: dict[str, Any], extract: str = "last_number", tolerance: float = 1e-6
) -> float:
    """1 if the extracted answer is the number that the record's answer is (relative ``tolerance``), else 0. After #### a unit may follow
    the number, as in verl's scorer of gsm8k: ``#### 18 dollars``."""
    answer, want = extract_answer(completion, extract), number(str(right_answer(record)))
    got = number(leading_number(answer) if extract == "hashes" else answer)
    if want is None:
        raise ValueError(f"the record's answer {right_answer(record)!r} is not a number")
    return float(got is not None and math.isclose(got, want, rel_tol=tolerance, abs_tol=tolerance))


def position_match(prompt: str, completion: str, record: dict[str, Any], extract: str = "all") -> float:
    """Share of character positions at which the answer is right; a completion that is too long or too short loses as well."""
    got, want = extract_answer(completion, extract), str(right_answer(record)).strip()
    right = sum(a == b for a, b in zip(got, want, strict=False))
    return right / max(len(got), len(want), 1)


def math_verify(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """1 if the completion's answer and the record's are the same mathematics (package math-verify: LaTeX, fractions, sets, ...).

    Its own time limits are off, as they work by signals, which cannot interrupt C code; the pool's kills.
    """
    import math_verify as library

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    want = str(right_answer(record))
    gold = library.parse(want if "\\boxed" in want or "$" in want else f"\\boxed{{{want}}}", parsing_timeout=None)  # type: ignore[arg-type]
    if not gold:
        raise ValueError(f"the record's answer {want!r} cannot be read as mathematics")
    got = library.parse(completion, parsing_timeout=None)  # type: ignore[arg-type]
    return float(library.verify(gold, got, timeout_seconds=None))


def format_match(prompt: str, completion: str, record: dict[str, Any], pattern: str) -> float:
    """1 if the whole completion has the form of the regular expression ``pattern`` (a dot matches newlines too), else 0."""
    return float(re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None)


def brevity(prompt: str, completion: str, record: dict[str, Any], free: int, longest: int) -> float:
    """0 up to ``free`` characters, falling along a line to -1 at ``longest``."""
    return -min(max(len(completion) - free, 0) / (longest - free), 1.0)


BUILT_IN: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "number_match": number_match,
    "position_match": position_match,
    "math_verify": math_verify,
    "format_match": format_match,
    "brevity": brevity,
}

# What takes microseconds whatever the completion says, and so needs no process that could be killed.
QUICK = frozenset({"exact_match", "number_match", "position_match", "brevity"})


def reasoning_gym_reward(task: str, task_args: dict[str, Any], extract: str = "auto") -> Reward:
    """The scorer that the reasoning_gym task brings along, applied to the extracted answer."""
    import reasoning_gym

    ours = {"instruction", "as_text", "size"}
    # Some scorers look at the configuration of their task, so it is made with the same arguments.
    dataset = reasoning_gym.create_dataset(task, size=1, **{k: v for k, v in task_args.items() if k not in ours})

    def score(prompt: str, completion: str, record: dict[str, Any]) -> float:
        return float(dataset.score_answer(extract_answer(completion, extract), record))

    return score


# ------------------------------------------------------------------------------------------------ choosing


@dataclass(frozen=True)
class Term:
    """One of the functions whose weighted sum is the reward; ``name`` is what its metrics and errors are called by."""

    name: str
    function: Reward
    weight: float
    quick: bool

    @property
    def is_async(self) -> bool:
        inner = self.function.func if isinstance(self.function, functools.partial) else self.function
        return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def terms(reward: RewardConfig, source: str, source_args: dict[str, Any] | None = None) -> list[Term]:
    """The functions of section ``reward``; ``source`` is data.source.

    BadInput if a function cannot be imported, is not known, or does not take (prompt, completion, record) and its arguments;
    or if reward.function and reward.terms are both given.
    """
    if not reward.terms:
        return [_term(reward.function, reward.args, 1.0, source, source_args or {}, "reward")]
    if reward.function is not None or reward.args:
        raise BadInput("reward.terms replaces reward.function and reward.args; give either the one or the others")
    found = [
        _term(t.function, t.args, t.weight, source, source_args or {}, f"reward.terms.{i}") for i, t in enumerate(reward.terms)
    ]
    seen: dict[str, int] = {}
    for i, term in enumerate(found):
        seen[term.name] = seen.get(term.name, 0) + 1
        if seen[term.name] > 1:
            found[i] = Term(f"{term.name}_{seen[term.name]}", term.function, term.weight, term.quick)
    return found


def resolve(reward: RewardConfig, source: str, source_args: dict[str, Any] | None = None) -> Reward:
    """The one function of section ``reward``, its arguments bound. BadInput as ``terms``."""
    (term,) = terms(reward, source, source_args)
    return term.function


def _term(
    spec: str | None, args: dict[str, Any], weight: float, source: str, source_args: dict[str, Any], key: str
) -> Term:
    if spec is None:
        if not source.startswith(REASONING_GYM):
            raise BadInput(
                f"data.source={source} has no scorer of its own: set {key}.function to module:function or one of "
                f"{', '.join(BUILT_IN)}"
            )
        if unknown := sorted(args.keys() - {"extract"}):
            raise BadInput(f"{key}.args: the scorer of {source} takes only 'extract', not {unknown}")
        extract_answer("", args.get("extract", "auto"))  # refuses an unknown way now
        task = source.removeprefix(REASONING_GYM)
        return Term(task, reasoning_gym_reward(task, source_args, **args), weight, quick=False)
    if ":" in spec:
        function = load_function(spec, f"{key}.function")
    elif spec in BUILT_IN:
        function = BUILT_IN[spec]
    else:
        close = difflib.get_close_matches(spec, BUILT_IN, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; choose one of {', '.join(BUILT_IN)} or module:function"
        raise BadInput(f"{key}.function={spec} is not a built-in reward{hint}")
    check_arguments(function, 3, args, spec, f"{key}.function", f"{key}.args")
    if spec in BUILT_IN:
        _check_built_in(spec, function, args, key)
    bound = functools.partial(function, **args) if args else function
    return Term(spec.partition(":")[2] or spec, bound, weight, quick=spec in QUICK)


def _check_built_in(name: str, function: Reward, args: dict[str, Any], key: str) -> None:
    kinds = get_type_hints(function)
    for argument, value in args.items():
        try:
            TypeAdapter(kinds[argument]).validate_python(value, strict=True)
        except ValidationError:
            raise BadInput(f"{key}.args.{argument}={value!r} must be of type {kinds[argument].__name__} for {name}") from None
    if args.get("tolerance", 0.0) < 0 or not math.isfinite(args.get("tolerance", 0.0)):
        raise BadInput(f"{key}.args.tolerance={args['tolerance']} must be a finite number, not below 0")
    if name == "brevity" and not 0 <= args["free"] < args["longest"]:
        raise BadInput(f"{key}.args.free={args['free']} must not be below 0, and less than {key}.args.longest={args['longest']}")
    if "extract" in args:
        extract_answer("", args["extract"])
    if "pattern" in args:
        try:
            re.compile(args["pattern"])
        except re.error as error:
            raise BadInput(f"{key}.args.pattern={args['pattern']!r} is not a regular expression: {error}") from error
    if name == "math_verify" and importlib.util.find_spec("math_verify") is None:
        raise BadInput(f"{key}.function=math_verify needs the package math-verify (pip install math-verify)")


# ------------------------------------------------------------------------------------------------ calling


LARGEST = 3.4028234663852886e38
"""Of float32, in which rewards are kept: what is beyond it would be infinite there."""


def checked(value: Any) -> float:
    """What a reward function returned, as a float. ValueError if it is no number, or none that float32 can hold."""
    try:
        if isinstance(value, str | bytes):  # float() would read it
            raise TypeError
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"the function returned {value!r}; it must return a number") from None
    if not abs(result) <= LARGEST:
        raise ValueError(f"the function returned {result}; it must be finite" + (" in float32" if math.isfinite(result) else ""))
    return result


async def call(term: Term, prompt: str, completion: str, record: dict[str, Any]) -> float:
    """The value of one term, before its weight."""
    value = term.function(prompt, completion, record)
    return checked(await value if inspect.isawaitable(value) else value)
