"""The state of a process's random number generators: Python's, NumPy's, torch's and, with CUDA, the device's.

everstep's own streams come from (seed, step, micro-batch) and leave nothing behind; these are for user code: losses in
the ranks, stages of a pipeline in the lead.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def capture(device: torch.device | None = None) -> dict[str, Tensor]:
    """library -> its state as bytes (uint8)."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "python": _bytes([version, list(numbers), gauss]),
        "numpy": _bytes([kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)]),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: Mapping[str, Tensor], device: torch.device | None = None) -> None:
    """The inverse of ``capture``, for the libraries that are among ``states``."""
    if "python" in states:
        version, numbers, gauss = _value(states["python"])
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in states:
        kind, keys, position, has_gauss, cached = _value(states["numpy"])
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(tensor: Tensor) -> list:  # type: ignore[type-arg]
    found: list = json.loads(bytes(tensor.tolist()))  # type: ignore[type-arg]
    return found
