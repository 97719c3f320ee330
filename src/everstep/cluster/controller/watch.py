"""What the controller's process looks for while a run goes on: who is slow, whose state is wrong, what was done before somebody is killed, and
what each death was. The deciding is in :mod:`everstep.telemetry`; here it meets processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.cluster.agents import EXAMINE_S, Agents
from everstep.cluster.dispatch import Rank
from everstep.cluster.host import Host, WorkerInfo
from everstep.cluster.post_mortem import PostMortem
from everstep.cluster.results import minority
from everstep.config.schema import Config
from everstep.recovery.view import Member, View
from everstep.run_dir import RunDir
from everstep.telemetry.diagnosis import Diagnosis
from everstep.telemetry.events import EventLog
from everstep.telemetry.stragglers import Stragglers, Timed

if TYPE_CHECKING:
    from everstep.recovery.server import CoordinatorServer
    from everstep.recovery.transaction import StepReport


class Watch:
    """``server()``: the coordinator's, once there is one; ``place(worker)``: (replica, rank); ``spares()``: how many are warm;
    ``leave(worker, cause)``: it is to leave at a step boundary; ``quarantine(workers, cause)``: these, and nobody takes their places."""

    def __init__(
        self, config: Config, run_dir: RunDir, events: EventLog, host: Host, server: Callable[[], CoordinatorServer | None],
        place: Callable[[str], tuple[int, int]], spares: Callable[[], int], leave: Callable[[str, str], None],
        quarantine: Callable[[list[str], str], None],
    ):
        self._config, self._events, self._host, self._server, self._place, self._spares = config, events, host, server, place, spares
        self._leave = leave
        self._run_dir = run_dir
        self._stragglers = Stragglers(config.watch.straggler_ratio, config.watch.straggler_for_s)
        self.agents = Agents(config, run_dir, events, self._process_ended, quarantine, host.run_agent, host.end_agent, self._coordinator)
        self._post_mortem = PostMortem(events, self._examine)
        self._diagnosis = Diagnosis(run_dir.path / "diagnosis", host.signal, self._order, self._look_into, self._stacks, self._diagnosed)

    def finish(self) -> None:
        """The run ends: while nodes and ranks can still be asked, what is being written of them is finished."""
        self._diagnosis.close()
        self._post_mortem.close()

    def close(self) -> None:
        self.agents.close()

    # -- deaths ----------------------------------------------------------------------------------------------------------------------

    def before_kill(self, worker: str, cause: str) -> None:
        """It lives, and will be expelled next: what everybody does is written down, while the others are told to go on."""
        server = self._server()
        if server and self._config.watch.diagnose:
            self._diagnosis.take(worker, cause, server.coordinator.committed + 1, server.whereabouts())

    def finish_diagnosis(self, worker: str) -> None:
        """Before it is killed; nobody but the repair waits for this."""
        self._diagnosis.finish(worker)

    def died(self, worker: str, cause: str) -> None:
        server, info = self._server(), self._host.infos.get(worker)
        self.agents.died(worker)
        if server and info:
            coordinator = server.coordinator
            self._post_mortem.died(info, self._place(worker), coordinator.committed + 1, cause, suspected=bool(coordinator.view.quarantined))

    # -- steps -----------------------------------------------------------------------------------------------------------------------

    def step(self, step: int, reports: Mapping[tuple[str, Member], StepReport], view: View) -> None:
        """Who was slow in a step that nothing disturbed. A straggler is asked to leave, if that is wanted and can be: nothing is redone."""
        if any(report.attempts > 1 or "heal" in report.seconds for report in reports.values()):
            return
        timed = {
            worker: Timed(member.replica, member.workers.index(worker), report.seconds, report.slots_dealt)
            for (worker, member), report in reports.items() if view.member(member.replica) == member
        }
        for slow in self._stragglers.step(time.monotonic(), timed):
            replace = self._config.watch.replace_stragglers and self._spares() > 0
            self._events.emit("straggler", step=step, replica=slow.replica, rank=slow.rank, phase=slow.phase, ratio=slow.ratio,
                              excess_s=slow.excess_s, since_s=slow.since_s, worker=slow.worker, action="replaced" if replace else "reported")
            if replace:
                self._leave(slow.worker, f"straggler: {slow.phase} takes {slow.ratio:.2f} times that of its peers, for {slow.since_s:.0f} s")

    def evict_corrupt(self, view: View, ranks: Sequence[Rank], hashes: Sequence[tuple[int | None, str]]) -> bool:
        """Whether ranks were evicted because their state differs from that of most replicas; then who is left must be compared again."""
        odd, server = minority(ranks, hashes), self._server()
        evict = server is not None and self._config.watch.evict_corrupt and self._config.recovery.enabled
        for rank in odd:
            self._events.emit("corruption", step=view.committed, replica=rank.replica, rank=rank.rank, action="evicted" if evict else "none", found="comparison")
            member = view.member(rank.replica)
            if evict and server and member:
                server.expel(member.workers[rank.rank], "corruption: its state differs from that of the other replicas at its position")
        return bool(odd) and evict

    # -- parts -----------------------------------------------------------------------------------------------------------------------

    def _order(self, worker: str, message: Mapping[str, object]) -> bool:
        server = self._server()
        return server is not None and server.order(worker, dict(message))

    def _coordinator(self) -> tuple[tuple[str, int], str]:
        server = self._server()
        assert server is not None  # it is what a rank connected to before its node needed an agent
        return server.address, server.token

    def _process_ended(self, worker: str) -> None:
        if server := self._server():
            server.process_ended(worker)

    def _examine(self, info: WorkerInfo, timeout_s: float = EXAMINE_S, spy: bool = False) -> dict[str, Any]:
        return self.agents.examine(info.host, info.worker_id, info.pid, timeout_s, spy)

    def _look_into(self, worker: str, timeout_s: float, spy: bool) -> dict[str, Any]:
        info = self._host.infos.get(worker)
        return self._examine(info, timeout_s, spy) if info else {}

    def _stacks(self, worker: str) -> Path:
        number = worker.removeprefix("w")
        return (self._run_dir.rank_log(int(number)) if number.isdigit() else self._run_dir.engine_log(worker)).with_suffix(".stacks")

    def _diagnosed(self, folder: Path, worker: str, step: int) -> None:
        replica, rank = self._place(worker)
        self._events.emit("diagnosis", step=step, replica=replica, rank=rank, worker=worker, path=str(folder))
