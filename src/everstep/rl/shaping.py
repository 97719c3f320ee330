"""What is added to a completion's reward for its length."""

from __future__ import annotations


def overlong_penalty(length: int, max_length: int, cache: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in -factor..0; lengths in tokens.

    0 up to ``max_length - cache``, then falling along a line to -factor at ``max_length``, and -factor beyond (verl has no floor
    there, but nothing is longer than what was asked of the rollout).
    """
    start = max_length - cache
    if length <= start:
        return 0.0
    return -factor * min((length - start) / cache, 1.0)
