"""What is compared: the answer inside a completion, and the right one inside a data record. Without torch."""

from __future__ import annotations

import re
from typing import Any

from everstep.errors import BadInput

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")


def right_answer(record: dict[str, Any]) -> Any:
    """``answer`` of a record, or, in verl's layout, ``reward_model.ground_truth``. KeyError if it has neither."""
    if record.get("answer") is not None:
        return record["answer"]
    model = record.get("reward_model")
    if isinstance(model, dict) and model.get("ground_truth") is not None:
        return model["ground_truth"]
    raise KeyError("answer (or reward_model.ground_truth)")


def extract_answer(completion: str, how: str = "auto") -> str:
    """The part of a completion that is its answer; "" if there is none.

    tag          inside the last <answer>...</answer>
    boxed        inside the last \\boxed{...}
    hashes       what follows the last #### on its line (gsm8k's way)
    last_number  the last number
    last_line    the last line that is not empty
    all          all of it, without surrounding white space
    auto         tag if there is one, else boxed if there is one, else all
    """
    if how == "tag":
        return _tagged(completion)
    if how == "boxed":
        return _boxed(completion)
    if how == "hashes":
        __, mark, after = completion.rpartition("####")
        return (after.strip().splitlines() or [""])[0].strip() if mark else ""
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
    raise BadInput(
        f"reward.args: extract={how!r} is unknown; choose tag, boxed, hashes, last_number, last_line, all or auto"
    )


def number(text: str) -> float | None:
    """The number that a text is, thousands separated by commas; None if it is none."""
    try:
        return float(text.replace(",", "").strip())
    except ValueError:
        return None


def _tagged(text: str) -> str:
    """By hand, in one go: a regular expression would look for the end anew from each of the tags that are never closed."""
    found, at = "", 0
    while (start := text.find("<answer>", at)) >= 0 and (end := text.find("</answer>", start)) >= 0:
        found, at = text[start + len("<answer>") : end], end
    return found.strip()


def leading_number(text: str) -> str:
    """The number with which a text begins; "" if it begins with something else."""
    found = _NUMBER.match(text)
    return found[0] if found else ""


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
