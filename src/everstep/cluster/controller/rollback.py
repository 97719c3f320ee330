"""Going back to an older step when no living replica holds the last one: from copies in memory, else from the disk, in place.

The replica has been formed anew, around spares and its living ranks. All of its ranks go back to the newest step of which each finds a
whole copy; the coordinator records that (``rollback``), and the driver enters the recipe again with the state it had then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint import saving
from everstep.checkpoint.choose import choose
from everstep.checkpoint.manifest import pointed_at, step_of
from everstep.checkpoint.storage import patiently
from everstep.cluster.controller.copies import Copies
from everstep.cluster.formation import Meant
from everstep.cluster.host import Host, ProcessEnded
from everstep.config.schema import Config
from everstep.errors import DeadlineExceeded, EverstepError, NotEnoughReplicas
from everstep.recovery.view import Member, Record
from everstep.run_dir import checkpoints_of

_POLL_S = 0.2
_STATES_KEPT = 10_000  # steps
_TRIES = 3  # a node with a copy may be lost while it is fetched


class _RankLost(Exception):
    """A rank died while the replica went back."""


@dataclass(frozen=True)
class Restored:
    step: int
    cause: str
    state: dict[str, Any]  # the recipe's


class Rollback:
    """``gone(worker)``: whether it is known to be dead; ``meant(member)``: what a call of its ranks says it is for."""

    def __init__(self, host: Host, config: Config, copies: Copies, gone: Callable[[str], bool], meant: Callable[[Member], Meant]):
        self._host, self._recovery, self._checkpoints, self._copies, self._gone = host, config.recovery, checkpoints_of(config), copies, gone
        self._meant, self._retry_s = meant, config.checkpoint.retry_s
        self.states: dict[int, dict[str, Any]] = {0: {}}  # the recipe's, after each of the last steps

    def remember(self, record: Record) -> None:
        """The recipe's state after this record's step."""
        if record.state is not None:
            self.states[record.view.committed] = record.state
            self.states.pop(record.view.committed - _STATES_KEPT, None)

    def restore(self, member: Member, committed: int) -> Restored | None:
        """Bring a formed replica to the newest step that all its ranks can have.

        None if one of them died meanwhile: its repair begins again. Raises NotEnoughReplicas if there is nothing to go back to.
        """
        try:
            step, origin, state = self._restore(member, committed)
        except _RankLost:
            return None
        cause = f"no living replica held step {committed}: back to step {step}, from {origin}"
        if state is None and step not in self.states:
            raise NotEnoughReplicas(f"{cause}, but of that step the recipe's state is not known; resume with resume=auto")
        return Restored(step, cause, self.states[step] if state is None else state)

    def _restore(self, member: Member, committed: int) -> tuple[int, str, dict[str, Any] | None]:
        """(step, from where, the recipe's state if it was saved with it)."""
        if all(version == committed for version in self._on_all(member, "version")):
            return committed, "its own memory", None  # it was formed anew for another reason than a death
        if self._copies.made:
            saved_step = self._saved_step()
            for _ in range(_TRIES):
                version = self._from_memory(member, committed, saved_step)
                if version is not None:
                    return version, "the copy in memory", None
        chosen = patiently(lambda at: choose(at, "auto"), self._checkpoints, self._retry_s)
        if chosen.path is None:
            raise NotEnoughReplicas(
                f"no living replica holds step {committed}, no copy in memory was left of every rank, and there is no checkpoint; "
                "start again with --clean"
            )
        saved = saving.read(chosen.path)
        self._on_all(member, "load_shard", str(chosen.path), saved.step, saved.reference)
        saving.restore_rng(chosen.path)
        return saved.step, str(chosen.path), saved.recipe_state

    def _saved_step(self) -> int:
        """Of the newest checkpoint, by its pointer; -1 if there is none, or storage does not say: then any copy is better."""
        try:
            named = pointed_at(self._checkpoints)
        except EverstepError:
            return -1
        return (step_of(named) or 0) if named else -1

    def _from_memory(self, member: Member, committed: int, newer_than: int) -> int | None:
        """The step of the copies that all ranks went back to; None if there are none of all, or a node that had one is gone."""
        found = self._copies.found()
        of = [set(found.get(rank, {})) for rank in range(len(member.workers))]
        usable = [s for s in set.intersection(*of) if newer_than < s.version <= committed and s.version in self.states]
        if not usable:
            return None
        stamp = max(usable)
        node = lambda worker: self._host.infos[worker].node_id
        sources = []
        for rank, worker in enumerate(member.workers):
            there = found[rank][stamp]
            here = any(node(other) == node(worker) for other in there)
            sources.append((stamp, None if here else self._copies.at(there[0])))
        return stamp.version if all(self._on_each(member, "restore_copy", sources)) else None

    def _on_all(self, member: Member, method: str, *args: Any) -> list[Any]:
        return self._on_each(member, method, [args] * len(member.workers))

    def _on_each(self, member: Member, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """``arguments``: of each rank."""
        meant = self._meant(member)
        calls = {self._host.submit(worker, meant, method, *arguments[index]): index for index, worker in enumerate(member.workers)}
        results: list[Any] = [None] * len(calls)
        limit = self._recovery.heal_timeout_s
        end = time.monotonic() + limit
        while calls:
            if any(self._gone(worker) for worker in member.workers):
                raise _RankLost
            if time.monotonic() > end:
                raise DeadlineExceeded(f"replica {member.replica}: {method} took longer than {limit:g} s (recovery.heal_timeout_s)")
            for call in self._host.wait(calls, _POLL_S):
                index = calls.pop(call)
                worker = member.workers[index]
                try:
                    results[index] = self._host.result(call, worker, method)
                except ProcessEnded as ended:
                    raise _RankLost from ended
                except EverstepError:
                    if self._gone(worker):
                        raise _RankLost from None
                    raise
        return results
