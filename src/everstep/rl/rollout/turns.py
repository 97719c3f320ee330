"""Whose turn it is on devices that rollout engines and ranks share (rollout.colocated)."""

from __future__ import annotations

from collections.abc import Callable


def _nothing() -> None:
    pass


class Turns:
    """Each of the two is called before that side uses the devices. As built without arguments nobody shares any.

    ``engines_leave``: weights and cache of all engines leave the devices; ``ranks_leave``: ranks give up what they can do without.
    """

    def __init__(self, engines_leave: Callable[[], None] = _nothing, ranks_leave: Callable[[], object] = _nothing):
        self._engines_leave, self._ranks_leave = engines_leave, ranks_leave
        self._of_ranks = True

    def engines(self) -> None:
        if self._of_ranks:
            self._ranks_leave()
            self._of_ranks = False

    def ranks(self) -> None:
        if not self._of_ranks:
            self._of_ranks = True
            self._engines_leave()
