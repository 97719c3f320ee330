"""What tests share: one Ray instance for all of them, and models with dropout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray instance that groups connect to instead of starting their own; room for the largest test."""
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=16, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
             object_store_memory=256 << 20, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The examples' tiny models, with dropout in their attention: the one without experts, and beside it the one with."""
    from tests.support.models import like_example

    folder = tmp_path_factory.mktemp("models")
    for name in ("tiny-qwen3", "tiny-qwen3-moe"):
        like_example(folder / name, name, attention_dropout=0.1)
    return folder / "tiny-qwen3"
