"""Bridges of network namespaces: gone when closed, and gone at the next start if their owner was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from everstep.cluster import namespaces

pytestmark = pytest.mark.skipif(bool(namespaces.refusal()), reason=f"no network namespaces here: {namespaces.refusal()}")
KILLED = "import os, signal; from everstep.cluster.namespaces import Bridge; print(Bridge()._name, flush=True); os.kill(os.getpid(), signal.SIGKILL)"


def exists(bridge: str) -> bool:
    return Path("/sys/class/net", bridge).exists()


def test_a_bridge_whose_owner_was_killed_is_removed_by_the_next_and_one_that_is_in_use_is_not():
    mine = namespaces.Bridge()
    left = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False, timeout=60).stdout.strip()
    assert left and left != mine._name and exists(left)
    other = namespaces.Bridge()
    try:
        assert exists(mine._name) and (other._name == left or not exists(left))
    finally:
        for bridge in (other, mine):
            bridge.close()
    assert not exists(mine._name) and not exists(other._name)
