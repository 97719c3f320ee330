"""The ranks and spares of a run, as those see them who repair replicas, start processes in the place of dead ones, and let ranks go."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from everstep.cluster.controller.forming import form
from everstep.cluster.controller.leaving import Leaving
from everstep.cluster.controller.refill import Refill
from everstep.cluster.controller.repair import Repair
from everstep.cluster.formation import Formation
from everstep.cluster.host import Host, NoRoom, WorkerInfo, WorkerSpec
from everstep.cluster.worker.admission import Admission
from everstep.config.schema import Config
from everstep.errors import WorkerFailed
from everstep.recovery.coordinator import State
from everstep.recovery.server import CoordinatorServer
from everstep.recovery.view import Member
from everstep.telemetry.events import EventLog


class Crew:
    """``spec(worker)``: how a worker is started; ``injected(worker)``: whether fault injection struck it; ``is_engine(worker)``: whether
    it is a rollout engine, which is no rank and no spare; ``before_end(worker)``: called before a process that was expelled is killed. ``served``: workers that have taken part in a commit."""

    def __init__(
        self, config: Config, host: Host, events: EventLog, server: Callable[[], CoordinatorServer], spec: Callable[[str], WorkerSpec],
        injected: Callable[[str], bool], is_engine: Callable[[str], bool], before_end: Callable[[str], None],
    ):
        self._config, self._host, self._events, self._server, self._spec = config, host, events, server, spec
        self._injected, self._is_engine, self._before_end = injected, is_engine, before_end
        self.served: set[str] = set()
        self.leaving = Leaving(self)
        self.unfit: set[str] = set()  # workers, of the past too, whose device is in quarantine
        recovery = config.recovery
        self._refill = Refill(self, recovery.restart_attempts if recovery.enabled else 0, recovery.restart_backoff_s)
        self._repair: Repair | None = None
        self.admission = Admission(config.watch, host, self.note)
        self._numbers = itertools.count()
        self._starting = threading.Lock()
        self._strangers: set[str] = set()  # processes that are being started, or never became a spare: whoever starts them buries them
        self._store: dist.Store | None = None
        self._held_since: float | None = None  # fewer members than recovery.min_replicas, by what was seen last
        self._closed = False
        self.on_start: Callable[[], None] = lambda: None  # another process was started
        self.before_form: Callable[[list[str]], None] = lambda workers: None  # these are about to take places
        self.on_lost: Callable[[Member], None] = lambda member: None  # a replica was formed anew, and nobody holds the committed state

    def open(
        self, members: list[Member], spares: list[str], has_reference: Callable[[], bool], store: dist.Store, first_number: int | None = None
    ) -> None:
        """All processes have started. ``store``: the run's; ``first_number``: of the next worker (after a takeover)."""
        started = sum(len(m.workers) for m in members) + len(spares)
        self._numbers, self._store = itertools.count(started if first_number is None else first_number), store
        self._repair = Repair(self, {m.replica: m for m in members}, spares, has_reference)
        for worker in list(self._server().dead):  # it died before there was a repair to be told
            self.died(worker)
        if first_number is None:
            for worker in spares:
                self._let_rehearse(worker)

    @property
    def is_open(self) -> bool:
        return self._repair is not None

    def adopt(self, gone: set[str], broken: list[Member]) -> None:
        """Workers that are known to be gone, and replicas that must be formed anew although nobody was told of a death (their lives)."""
        if self._repair and (gone or broken):
            self._repair.adopt(gone, broken)

    def may_go_back(self) -> bool:
        """Whether a replica that no living one could heal is being formed anew, to go back to a copy (see ``on_lost``)."""
        if self.failure or not self._config.recovery.enabled:
            return False
        return self._repairs() or bool(self._config.recovery.memory_checkpoint_every and self._is_coming_back())

    def close(self) -> None:
        self._closed = True
        self._refill.close()
        if self._repair:
            self._repair.close()

    def died(self, worker: str) -> None:
        with self._starting:
            known = worker not in self._strangers
        if known and self._repair and not self._is_engine(worker):
            self._repair.worker_died(worker)

    @property
    def spares(self) -> list[str]:
        """Warm, and not placed."""
        return self._repair.spares if self._repair else []

    @property
    def failure(self) -> BaseException | None:
        """What ended a repair that must not fail."""
        return self._repair.failure if self._repair else None

    def has_too_few(self) -> bool:
        """Whether there are fewer replicas than recovery.min_replicas, and waiting for more is over (recovery.below_minimum)."""
        coordinator, recovery = self._server().coordinator, self._config.recovery
        if coordinator.state is not State.HELD:
            self._held_since = None
            return False
        self._held_since = self._held_since or time.monotonic()
        held_s = time.monotonic() - self._held_since
        return not self._is_coming_back() and not (recovery.below_minimum == "wait" and held_s < recovery.below_minimum_wait_s)

    def _is_coming_back(self) -> bool:
        """Whether a replica is about to be there again."""
        coordinator, avoid = self._server().coordinator, self.leaving.nodes
        starting = any(w in self._host.infos and self._host.has_place(w) and self._host.infos[w].node_id not in avoid for w in self._refill.pending)
        return bool(self._repairs() or starting or coordinator.waiting or (coordinator.build and coordinator.build.joiner))

    def _repairs(self) -> bool:
        """Whether a repair is under way, or will be."""
        return self._repair is not None and self._repair.hopeful([w for w in self._server().dead if w not in self._strangers and not self._is_engine(w)])

    # -- what repair needs (everstep.cluster.controller.repair.Processes) -----------------------------------------------------

    def confirm_dead(self, worker: str) -> None:
        self._before_end(worker)
        self._host.end(worker)
        replica, rank = self.place(worker)
        self._events.emit("expel", replica=replica, rank=rank, worker=worker, cause=self._server().dead.get(worker, "repair"))

    def form(self, formations: list[tuple[str, Formation]]) -> dict[str, str]:
        assert self._store is not None
        self.before_form([worker for worker, _ in formations])
        limit_s = self._config.recovery.reform_timeout_s
        return form(self._host, self._store, formations, self._server().dead, limit_s, lambda: self._closed)

    def expel(self, worker: str, cause: str) -> None:
        self._server().expel(worker, cause)

    def announce(self, member: Member) -> None:
        if self._server().coordinator.state is State.LOST:
            self.on_lost(member)
        else:
            self._server().joiner(member)

    def settle(self) -> None:
        """Nobody that lives holds the committed state, and a replica was formed before that, to heal: it goes back to a copy like one that is
        formed after it. It did not begin the step that the others died in, so its ranks are free to."""
        coordinator = self._server().coordinator
        if coordinator.state is State.LOST and (waiting := list(coordinator.waiting)):
            self.on_lost(waiting[0])

    def retire(self, worker: str) -> None:
        self._server().retire(worker, "planned leave")
        self._host.end(worker)

    def replace(self, worker: str) -> None:
        """But for a single process that was told to leave, and one whose device is in quarantine: its device is, or may be, why."""
        alone = worker in self.leaving.workers and self._host.infos[worker].node_id not in self.leaving.nodes
        if not alone and worker not in self.unfit:
            self._refill.replace(worker)

    def quarantine(self, workers: list[str], cause: str) -> None:
        """Their device is sick: those that live leave as in a drain, and no process is started in the place of any of them."""
        self.unfit |= set(workers)
        for worker in workers:
            self.leaving.tell(worker, cause)

    # -- what planned leaves need (everstep.cluster.controller.leaving.Roster) -----------------------------------------------------

    def place(self, worker: str) -> tuple[int, int]:
        return self._repair.place(worker) if self._repair else (-1, -1)

    def living(self) -> dict[str, WorkerInfo]:
        """Ranks and spares. A rollout engine that is taken away is a death like any other: the pool loses nothing by it."""
        dead = self._server().dead
        return {w: info for w, info in dict(self._host.infos).items() if w not in dead and not self._is_engine(w)}

    def takes_part(self, replica: int) -> bool:
        return self._server().coordinator.view.member(replica) is not None

    def is_busy(self) -> bool:
        """Or a replica heals, or is about to."""
        coordinator = self._server().coordinator
        joining = coordinator.waiting or (coordinator.build and coordinator.build.joiner) or coordinator.view.heals
        return bool(joining or self._repairs())

    def let_go(self, replica: int, cause: str, spares: int) -> bool:
        return self._server().leave(replica, cause, replaceable=spares >= 0)

    def replace_living(self, workers: list[str]) -> None:
        assert self._repair is not None
        for worker in workers:
            self._repair.worker_leaves(worker)

    def idle_spares(self) -> list[str]:
        return [w for w in self.spares if w not in self.leaving.workers]

    # -- what refilling needs (everstep.cluster.controller.refill.Starter) -----------------------------------------------------

    def start_in_place_of(self, worker: str) -> str:
        if worker in self.unfit:
            raise WorkerFailed(f"the device of {worker} is in quarantine")
        name = f"w{next(self._numbers)}"
        nodes = [info.node_id for info in self.living().values()]
        with self._starting:
            self._strangers.add(name)
        try:
            self._host.add(self._spec(name), worker, {*self.leaving.nodes, *self.admission.avoid(worker, nodes)})
            self.on_start()
            self.admission.admit(name, worker, self.idle_spares())
            with self._starting:
                if name in (dead := self._server().dead):
                    raise WorkerFailed(f"{name} did not live until it was a spare: {dead[name]}")
                self._strangers.discard(name)
        except BaseException as error:  # it may be connected: it must be nothing to anybody any more
            if isinstance(error, NoRoom):
                self.admission.found_no_room(worker)
            if self._server().connected(name):
                self._server().retire(name, f"refused: {error}")
            self._host.end(name)
            raise
        return name

    def spare_is_ready(self, worker: str, after: str) -> None:
        assert self._repair is not None
        if len(self._server().coordinator.view.members) == self._config.layout.replicas:  # else it is needed at once
            self._let_rehearse(worker)
        self._repair.spare_is_ready(worker)

    def _let_rehearse(self, worker: str) -> None:
        """Nobody waits for it; what it came to is an event."""
        if self._config.recovery.enabled and self._config.recovery.rehearse != "never":
            self._host.submit(worker, None, "rehearse")

    def was_of_use(self, worker: str) -> bool:
        return worker in self.served or self._injected(worker)

    def node(self, worker: str) -> str:
        info = self._host.infos.get(worker)
        return info.node_id if info else ""

    def note(self, event: str, **fields: Any) -> None:
        self._events.emit(event, **fields)
