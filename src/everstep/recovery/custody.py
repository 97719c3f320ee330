"""What a rank holds must not change between two commits: its state is summed up after each, and again before the next vote.

Whoever finds another sum has a memory that lies, and knows so without any peer: it must not vote. Found is what changed in between,
also in weights that are never trained. Not found is what was wrong when the sum was taken (arithmetic of the optimizer), or changes between
the vote and the next sum; the comparison of all replicas (``train.verify_every``) is for those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from everstep.recovery.digest import digests_of


class State(Protocol):
    version: int | None

    def tensors(self, frozen: bool = False) -> dict[str, torch.Tensor]: ...


class Custody:
    """Of one rank in one life of its replica. ``every``: in which steps the state is looked at (1: in all; 0: never). ``broken(cause)``
    does not return: this rank is no rank any more."""

    def __init__(self, every: int, state: State, broken: Callable[[str], None]):
        self._every, self._state, self._broken = every, state, broken
        self._sealed: tuple[int, dict[str, int]] | None = None  # version, digests by name

    def seal(self) -> None:
        """A commit was applied; nothing changes the state until the next one."""
        version = self._state.version
        if self._every and version is not None and (version + 1) % self._every == 0:
            self._sealed = version, self._sum_up()

    def check(self) -> None:
        """Before a vote for the step after the version that is held."""
        if self._sealed is None or self._sealed[0] != self._state.version:
            return
        version, then = self._sealed
        now = self._sum_up()
        changed = [name for name in then if name in now and now[name] != then[name]]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self._broken(f"corruption: {changed[0]}{more} changed in memory since step {version} was applied, and nobody wrote there")

    def _sum_up(self) -> dict[str, int]:
        state = self._state.tensors(frozen=True)
        return dict(zip(state, digests_of(list(state.values())), strict=True))
