"""Data for benchmarks: texts of one length, so that every step does the same work."""

from __future__ import annotations

import random

SAMPLES = 1200


def digits(length: int = 1000) -> list[dict[str, str]]:
    """SAMPLES texts of ``length`` random digits; one token each with the tokenizer of examples/models/tiny-qwen3."""
    rng = random.Random(0)
    return [{"text": "".join(rng.choices("0123456789", k=length))} for _ in range(SAMPLES)]
