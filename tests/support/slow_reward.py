"""A reward that takes its time."""

from __future__ import annotations

import time
from typing import Any

from everstep.rl import reward_functions


def position_match(prompt: Any, completion: str, record: dict[str, Any]) -> float:
    time.sleep(0.006)
    return reward_functions.position_match(prompt, completion, record)
