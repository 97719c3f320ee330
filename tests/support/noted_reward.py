"""The demonstration's reward, as a user's function: it says which process gave it. Of what a reward may import alone."""

import os
from pathlib import Path

from everstep.rl.reward_functions import position_match


def noted(prompt: str, completion: str, record: dict, folder: str) -> float:
    (Path(folder) / str(os.getpid())).touch()
    return position_match(prompt, completion, record)
