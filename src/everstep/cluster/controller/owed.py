"""Results that the controller waits for: who owes one, who gave it, and whose has been waited for too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from everstep.cluster.host import Host, ProcessEnded
from everstep.config.recovery_schema import RecoveryConfig
from everstep.errors import DeadlineExceeded, EverstepError
from everstep.recovery.progress import Place, overdue_results
from everstep.recovery.server import CoordinatorServer
from everstep.recovery.view import Member

POLL_S = 0.2


class Owed:
    """The results of one call, or the reports of one step. ``what`` they are, for the causes.

    A rank whose result does not come within ``recovery.progress_timeout_s`` after those of all its peers is expelled.
    """

    def __init__(self, server: CoordinatorServer, recovery: RecoveryConfig, what: str):
        self._server, self._recovery, self._what = server, recovery, what
        self._returned: dict[str, tuple[Place, float]] = {}
        self._since: float | None = None

    def gave(self, worker: str, member: Member) -> None:
        """The result of ``worker``, called as a rank of ``member``, is there (or its error)."""
        self._returned[worker] = _place(worker, member), time.monotonic()

    def expel_overdue(self, owing: Iterable[tuple[str, Member]]) -> None:
        limit = self._recovery.progress_timeout_s
        for worker in overdue_results({w: _place(w, m) for w, m in owing}, self._returned, time.monotonic(), limit):
            said = self._server.progress[worker]
            self._server.expel(worker, f"no progress: owes {self._what} {limit:g} s after its peers (step {said.step}, {said.phase})")

    def waited(self, limit_s: float) -> bool:
        """Whether the first question of this kind was more than ``limit_s`` ago."""
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since > limit_s

    def give_up_call(self, owing: Iterable[str], method: str) -> None:
        """The deadline of a call has passed: whoever is left without those that owe a result makes it again. DeadlineExceeded."""
        limit, view, late = f"{method} took longer than {self._recovery.call_timeout_s:g} s", self._server.coordinator.view, set(owing)
        if all(late & set(member.workers) for member in view.members if member.replica in view.contributors):
            raise DeadlineExceeded(
                f"step {view.committed}: {limit} (recovery.call_timeout_s) on every replica; see the ranks' logs, then resume with "
                "resume=auto"
            )
        for worker in sorted(late):
            self._server.expel(worker, f"no progress: {limit} (recovery.call_timeout_s)")


def gather(
    host: Host, server: CoordinatorServer, recovery: RecoveryConfig, is_death: Callable[[str, Member, ProcessEnded | EverstepError], bool],
    calls: dict[Any, int], called: list[tuple[str, Member]], method: str,
) -> list[Any] | None:
    """Results in the order of the ranks; None if a death voided the call (it is made again on those that are left).

    ``called``: each worker, and the life of its replica that it was called in. A rank whose result does not come long after its
    peers' is expelled (recovery.progress_timeout_s); recovery.call_timeout_s ends the whole call.
    """
    owed = Owed(server, recovery, f"the result of {method}")
    pending = dict(calls)
    results: list[Any] = [None] * len(called)
    while pending:
        for call in host.wait(pending, POLL_S):
            index = pending.pop(call)
            worker, member = called[index]
            owed.gave(worker, member)
            try:
                results[index] = host.result(call, worker, method)
            except (ProcessEnded, EverstepError) as error:
                if not is_death(worker, member, error):
                    raise
                return None
        view = server.coordinator.view
        if any(view.member(member.replica) != member for _, member in called):
            return None
        owing = [called[index] for index in pending.values()]
        owed.expel_overdue(owing)
        if owed.waited(recovery.call_timeout_s) and owing:
            owed.give_up_call([worker for worker, _ in owing], method)
    return results


def all_done(host: Host, calls: Collection[Any], timeout_s: float) -> bool:
    """Whether all of them end, well or not, before the deadline."""
    end, left = time.monotonic() + timeout_s, set(calls)
    while left and time.monotonic() < end:
        left -= set(host.wait(left, POLL_S))
    return not left


def _place(worker: str, member: Member) -> Place:
    return member.replica, member.workers.index(worker)
