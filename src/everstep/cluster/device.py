"""Which device this process computes on."""

from __future__ import annotations

import os

import psutil
import torch

from everstep.config.schema import Config
from everstep.errors import BadInput


def choose_device(config: Config) -> torch.device:
    """The CUDA device of this process (``LOCAL_RANK`` among the visible ones), or the CPU."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    local = int(os.environ["LOCAL_RANK"])
    if local >= visible:
        raise BadInput(f"LOCAL_RANK={local}, but {visible} CUDA devices are visible; use device=cpu or fewer ranks per node")
    return torch.device("cuda", local)


def memory_gb(device: torch.device) -> dict[str, float]:
    """Metrics of this process: its resident memory, and on a GPU the most of the device's memory that its tensors have taken."""
    found = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 1e9}
    return found | ({"perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / 1e9} if device.type == "cuda" else {})
