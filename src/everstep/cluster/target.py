"""What a configuration asks of coordinator, progress judge and fault injection, put together once for both launchers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from everstep.config.recovery_schema import RecoveryConfig
from everstep.config.schema import Config
from everstep.recovery.coordinator import Coordinator, Mode
from everstep.recovery.progress import Deadlines, Judge
from everstep.recovery.proxy import Relay
from everstep.recovery.rerun import Reruns
from everstep.recovery.server import CoordinatorServer
from everstep.telemetry.events import ENGINES


def coordinator_of(config: Config, incarnation: int) -> Coordinator:
    recovery, everybody = config.recovery, config.layout.replicas
    # Without recovery the first death leaves fewer replicas than the run needs.
    return Coordinator(
        incarnation, 0, recovery.min_replicas if recovery.enabled else everybody, Mode(recovery.mode),
        recovery.standby_links_up_to if recovery.enabled else 0, recovery.quarantine_after, recovery.non_finite == "stop",
        rotates=config.semisync.method == "none", reruns=reruns_of(config),
    )


def reruns_of(config: Config) -> Reruns:
    """Bit by bit where the same computation has the same bits."""
    same = config.engine.deterministic or config.recovery.exact
    return Reruns(0.0 if same else config.watch.rerun_tolerance, config.watch.evict_corrupt and config.recovery.enabled)


def judge(recovery: RecoveryConfig) -> Judge:
    return Judge(Deadlines(recovery.progress_timeout_s, recovery.step_timeout_s, recovery.heal_timeout_s))


def judge_every_s(recovery: RecoveryConfig) -> float:
    return min(1.0, recovery.progress_timeout_s / 4)


class LaunchedTarget:
    """Ranks and spares of a running group (everstep.recovery.faults.Target).

    ``place(worker)``: (replica, rank), or (-1, -1) for a spare; ``send(worker, signal)`` delivers a signal, ``process(worker)`` names
    the process; ``spares()``: idle ones; ``relays``: the workers that reach the coordinator through one;
    ``cut(worker)``: takes it off the network and says how, or "" (then its relay is cut); ``engine_at(number)``: a rollout engine.
    """

    def __init__(
        self, server: Callable[[], CoordinatorServer], place: Callable[[str], tuple[int, int]], send: Callable[[str, int], None],
        process: Callable[[str], str], spares: Callable[[], list[str]], relays: Mapping[str, Relay],
        cut: Callable[[str], str] = lambda worker: "", engine_at: Callable[[int], str | None] = lambda number: None,
    ):
        self._server, self._place, self._send, self._process = server, place, send, process
        self._spares, self._relays, self._cut, self._engine_at = spares, relays, cut, engine_at

    def place(self, worker: str) -> tuple[int, int]:
        return self._place(worker)

    def workers_at(self, replica: int, rank: int) -> str | None:
        server = self._server()
        if replica == ENGINES:
            worker = self._engine_at(rank)
        else:
            member = server.coordinator.view.member(replica)
            worker = member.workers[rank] if member else None
        return None if worker in server.dead else worker

    def idle_spares(self) -> list[str]:
        dead = self._server().dead
        return [worker for worker in self._spares() if worker not in dead]

    def lives(self, worker: str) -> bool:
        return self._server().connected(worker)

    def where(self, worker: str) -> str:
        said = self._server().progress.get(worker)
        return f"step {said.step}, {said.phase}" if said else "not connected"

    def process(self, worker: str) -> str:
        return self._process(worker)

    def signal(self, worker: str, number: int) -> None:
        self._send(worker, number)

    def order(self, worker: str, message: Mapping[str, object]) -> bool:
        return self._server().order(worker, dict(message))

    def cut(self, worker: str) -> str:
        if done := self._cut(worker):
            return done
        if worker not in self._relays:
            return ""
        self._relays[worker].cut()
        return "its control connection forwards nothing any more, in either direction"


def partition_victims(config: Config, ranks_per_replica: int, world_size: int) -> set[int]:
    """Indices of the workers (ranks of replica 0, of replica 1, ..., then spares) that a partition is planned for."""
    return {
        world_size + fault.rank if fault.phase == "spare" else fault.replica * ranks_per_replica + fault.rank
        for fault in config.faults if fault.kind == "partition"
    }
