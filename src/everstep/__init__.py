"""Fault-tolerant post-training of Hugging Face language models on Ray and Megatron-Core.

The names below are the public interface; they are imported when first used, so that ``import everstep`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "launch": "everstep.driver",
    "run": "everstep.driver",
    "load_config": "everstep.config.load",
    "Config": "everstep.config.schema",
    "TrainingBatch": "everstep.cluster.batch",
    "Dispatch": "everstep.cluster.dispatch",
    "MeshDispatch": "everstep.cluster.dispatch",
    "Rank": "everstep.cluster.dispatch",
    "register_dispatch": "everstep.cluster.dispatch",
    "LossSpec": "everstep.engine.loss",
    "LossOutput": "everstep.engine.loss",
    "StepResult": "everstep.cluster.group",
    "status": "everstep.telemetry.status",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
