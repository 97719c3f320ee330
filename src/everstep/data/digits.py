"""A small task with a right answer: write the digits of the prompt in ascending order ("314>" -> "134").

Used by examples/grpo_sort.yaml. The prompts are all orders of ``digits`` distinct digits, split once and for all into a
training and a held-out part. ``warm_up`` teaches the *format* and nothing else: its targets are the prompt's digits in
every order alike, so a model that learned it perfectly is right once in ``digits``! times.
"""

from __future__ import annotations

import itertools
import random
from typing import Literal

from everstep.errors import BadInput

SEPARATOR = ">"
HELD_OUT_FRACTION = 0.2

Split = Literal["train", "held_out"]


def sort_prompts(split: Split = "train", digits: int = 3) -> list[dict[str, str]]:
    """Records {prompt, answer}; the two splits have no prompt in common. 576 and 144 prompts for three digits."""
    return [{"prompt": "".join(p) + SEPARATOR, "answer": "".join(sorted(p))} for p in _split(split, digits)]


def warm_up(digits: int = 3, targets_per_prompt: int = 6, seed: int = 0) -> list[dict[str, str]]:
    """Records {prompt, completion}: training prompts, each with ``targets_per_prompt`` different orders of its digits.

    With ``targets_per_prompt`` = ``digits``! (the default) every order is a target exactly once.
    """
    generator = random.Random(f"{seed}/warm_up")
    records = []
    for prompt in _split("train", digits):
        orders = list(itertools.permutations(sorted(prompt)))
        for order in generator.sample(orders, min(targets_per_prompt, len(orders))):
            records.append({"prompt": "".join(prompt) + SEPARATOR, "completion": "".join(order)})
    return records


def preferences(split: Split = "train", digits: int = 3) -> list[dict[str, str]]:
    """Records {prompt, chosen, rejected}: the digits in ascending order are preferred to each other order of them."""
    return [
        {"prompt": "".join(p) + SEPARATOR, "chosen": "".join(sorted(p)), "rejected": "".join(order)}
        for p in _split(split, digits)
        for order in itertools.permutations(sorted(p))
        if list(order) != sorted(p)
    ]


def _split(split: str, digits: int) -> list[tuple[str, ...]]:
    if split not in ("train", "held_out"):
        raise BadInput(f"split={split!r} must be train or held_out")
    if not 2 <= digits <= 5:
        raise BadInput(f"digits={digits} must be 2 to 5")
    prompts = list(itertools.permutations("0123456789", digits))
    random.Random(f"{digits}/split").shuffle(prompts)
    held_out = int(len(prompts) * HELD_OUT_FRACTION)
    return prompts[:held_out] if split == "held_out" else prompts[held_out:]
