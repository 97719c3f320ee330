from __future__ import annotations

from typing import Any


def initialize_layerwise_reload(model: Any) -> None:
    model.begin()


def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
    model.finish()
