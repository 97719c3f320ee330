"""Worker processes as Ray actors, one per rank and spare, on the nodes that the placement chose.

Training itself, commits and deaths included, goes over the coordinator's channel; Ray starts processes, moves data and returns results.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from everstep.cluster import environment
from everstep.cluster.batch import TrainingBatch
from everstep.cluster.formation import Meant
from everstep.cluster.host import NoRoom, ProcessEnded, WorkerInfo, WorkerSpec
from everstep.cluster.processes import ProcessWatch, end_for_certain, end_pid, signal_pid, wait_gone
from everstep.cluster.ray.actor import RankActor, RefSlots
from everstep.cluster.ray.agent import RayAgents
from everstep.cluster.ray.apart import Apart
from everstep.cluster.ray.placement import place
from everstep.cluster.ray.runtime import (
    KillThere,
    devices_per_node,
    first_line,
    node_ip,
    on_node,
    start_ray,
    typed_error,
    uses_gpus,
)
from everstep.config import derive
from everstep.config.schema import Config
from everstep.errors import BadInput, DeadlineExceeded, EverstepError
from everstep.layout import Layout
from everstep.node.agent import AgentSpec

_SIGNAL_S = 30.0
_CLOSE_S = 10.0


class RayHost:
    """The :class:`everstep.cluster.host.Host` of launcher ray. Joins the configured cluster, or starts one for this run.

    With ``recovery.controller_grace_s`` the actors are detached, and a Ray of this run is apart from this process. ``handle``: of
    the host of a dead controller, whose workers :meth:`attach` will reach.
    """

    def __init__(self, config: Config, layout: Layout, handle: Mapping[str, Any] | None = None):
        self._config, self._layout = config, layout
        self._actors: dict[str, Any] = {}
        self._bundles: dict[str, int] = {}  # of the placement group
        self._on_gpu = False
        self._remote: Any = ray.remote(RankActor)
        self.infos: dict[str, WorkerInfo] = {}
        self._ended: set[str] = set()  # workers whose process is known to be gone
        self._group: Any = None
        self._watch: ProcessWatch | None = None
        self._agents = RayAgents()
        self._closed, self._kept = False, handle is None  # whether the workers end with us
        self._adding, self._adds = threading.Condition(), 0  # processes that are being started, or ended, beside the run
        self._lost: dict[str, float] = {}  # by node id: since when Ray calls it dead, as far as was seen here
        self._own = not ray.is_initialized() and not config.ray.address  # Ray is started for this run, and ends with it
        self._apart: Apart | None = None
        if config.recovery.controller_grace_s > 0:
            if handle is not None and handle.get("kind") != "ray":
                raise BadInput("--attach: the workers of this run are no actors of Ray; start again with resume=auto")
            self._apart = Apart(config, layout.devices, secrets.token_hex(8), handle)
            self._own = bool(self._apart.folder)
            self._leave_ray = self._apart.close
        else:
            self._leave_ray = start_ray(config, layout.devices * (1 + (config.rollout.colocated or config.rollout.on_spares)) + derive.engine_devices(config))
        self.address = ray.util.get_node_ip_address() if config.ray.address else "127.0.0.1"

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        config, layout = self._config, self._layout
        on_gpu = uses_gpus(config)
        nodes = devices_per_node(on_gpu)
        apart = 0 if config.rollout.colocated else config.rollout.engines
        plan = place(layout.ranks_per_replica, layout.replicas, layout.spares, nodes, layout.tp, apart, config.rollout.tp)
        chosen = [(node, 1) for node in (*(node for replica in plan.replica_nodes for node in replica), *plan.spare_nodes)]
        chosen += [(node, config.rollout.tp) for node in plan.engine_nodes]
        bundles = [
            {"CPU": 1.0 + (config.rollout.colocated or config.rollout.on_spares), **({"GPU": float(devices)} if on_gpu else {}), f"node:{node_ip(node)}": 0.001}
            for node, devices in chosen
        ]
        self._group = placement_group(bundles, strategy="PACK", lifetime="detached" if self._apart else None)
        deadline = time.monotonic() + config.ray.start_timeout_s
        try:
            ray.get(self._group.ready(), timeout=config.ray.start_timeout_s)
        except GetTimeoutError:
            raise DeadlineExceeded(
                f"Ray did not place {len(bundles)} processes ({bundles[0]}) in {config.ray.start_timeout_s:g} s "
                "(ray.start_timeout_s); free devices, or ask for fewer in layout.*"
            ) from None
        self._on_gpu = on_gpu
        for index, spec in enumerate(specs):
            self._bundles[spec.worker_id] = index
            self._start_actor(spec, PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index))
        for spec in specs:
            self._await_start(spec, deadline)

    def handle(self) -> dict[str, Any]:
        if not self._apart:
            return {}
        infos = {worker: [info.pid, info.host, info.node_id] for worker, info in dict(self.infos).items()}
        return self._apart.handle() | {"group": self._group.id.hex(), "workers": infos, "bundles": dict(self._bundles)}

    def attach(self, handle: Mapping[str, Any]) -> None:
        assert self._apart is not None
        self._group = PlacementGroup(PlacementGroupID(bytes.fromhex(handle["group"])))
        self._bundles, self._on_gpu = dict(handle["bundles"]), uses_gpus(self._config)
        for worker, (pid, host, node) in handle["workers"].items():
            with contextlib.suppress(ValueError):  # it died with its controller, or before
                self._actors[worker] = ray.get_actor(worker, self._apart.namespace)
                self.infos[worker] = WorkerInfo(worker, pid, host, node)

    def keep(self) -> None:
        assert self._apart is not None
        self._kept = True
        self._apart.keep()

    def add(self, spec: WorkerSpec, instead_of: str, avoid: Collection[str] = ()) -> None:
        where: Any = "SPREAD"  # anywhere: a node that came to the cluster since, or came back
        bundle = self._bundles.get(instead_of, self._engine_bundle(spec))
        there = bundle is not None and (instead_of not in self.infos or (self.has_place(instead_of) and self.infos[instead_of].node_id not in avoid))
        if there:
            assert bundle is not None
            self._bundles[spec.worker_id] = bundle
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        with self._beside(NoRoom(f"worker {spec.worker_id} was not started: the host is closed")):
            self._start_actor(spec, where)
            self._await_added(spec, there, avoid)

    @contextlib.contextmanager
    def _beside(self, closed: EverstepError) -> Iterator[None]:
        """Raises ``closed`` once the host is; until it is over Ray is not left."""
        with self._adding:
            if self._closed:
                raise closed
            self._adds += 1
        try:
            yield
        finally:
            with self._adding:
                self._adds -= 1
                self._adding.notify_all()

    def _await_added(self, spec: WorkerSpec, there: bool, avoid: Collection[str]) -> None:
        try:
            self._await_start(spec, time.monotonic() + self._config.ray.start_timeout_s)
        except EverstepError as error:
            _ask_ray(ray.kill, self._actors[spec.worker_id], no_restart=True)  # it may be waiting for room still
            raise (error if there or not isinstance(error, DeadlineExceeded) else NoRoom(str(error))) from None
        if self._closed:
            self._end_process(spec.worker_id)
        elif self.infos[spec.worker_id].node_id in avoid:
            self.end(spec.worker_id)
            raise NoRoom(f"Ray had room for worker {spec.worker_id} only on a node that is being drained")
        else:
            self._watch_here(spec.worker_id, self.infos[spec.worker_id])

    def _await_adds(self) -> None:
        """Their actors have been killed, so they end; one that asked Ray anything after we left it would start another Ray."""
        with self._adding:
            self._adding.wait_for(lambda: not self._adds, _CLOSE_S)

    def _engine_bundle(self, spec: WorkerSpec) -> int | None:
        """Where one of the first rollout engines has its place; colocated ones with the ranks, from the first one on."""
        if spec.role != "engine":
            return None
        number, rollout, devices = int(spec.worker_id[1:].partition(".")[0]), self._config.rollout, self._layout.devices
        if rollout.colocated:
            return number
        return devices + number if number < rollout.engines else None

    def has_place(self, worker: str) -> bool:
        return self._node_lives(self.infos[worker].node_id)

    def _start_actor(self, spec: WorkerSpec, where: Any) -> None:
        host, port = spec.store
        env = environment.worker_environment(self._config) | {"MASTER_ADDR": host, "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
        apart = {"lifetime": "detached", "namespace": self._apart.namespace, "name": spec.worker_id} if self._apart else {}
        rollout = self._config.rollout
        beside = self._bundles.get(spec.worker_id, self._layout.devices) < self._layout.devices
        shared = (rollout.colocated or rollout.on_spares) and (spec.role == "rank" or beside)  # a rank and an engine on one device
        gpus = 0.5 if shared else rollout.tp if spec.role == "engine" else 1
        self._actors[spec.worker_id] = self._remote.options(
            num_cpus=1, num_gpus=gpus if self._on_gpu else 0, max_restarts=0, max_task_retries=0, runtime_env={"env_vars": env},
            scheduling_strategy=where, **apart,
        ).remote(spec)

    def _await_start(self, spec: WorkerSpec, deadline: float) -> None:
        worker = spec.worker_id
        try:
            self.infos[worker] = ray.get(self._actors[worker].ready.remote(), timeout=max(1.0, deadline - time.monotonic()))
        except GetTimeoutError:
            raise DeadlineExceeded(
                f"worker {worker} was not ready in {self._config.ray.start_timeout_s:g} s (ray.start_timeout_s); see {spec.log_path}"
            ) from None
        except RayError as error:
            raise typed_error(error, worker, "its start") from error

    def watch(self, on_end: Callable[[str], None]) -> None:
        self._watch = ProcessWatch(on_end)
        for worker, info in list(self.infos.items()):
            self._watch_here(worker, info)

    def _watch_here(self, worker: str, info: WorkerInfo) -> None:
        if self._watch and info.host == socket.gethostname():
            self._watch.add(worker, info.pid)

    def run_agent(self, spec: AgentSpec, worker: str) -> None:
        if spec.node == socket.gethostname():
            self._agents.run_here(spec)
        else:
            self._agents.run_there(spec, self.infos[worker].node_id, self._apart.namespace if self._apart else "")

    def end_agent(self, node: str) -> None:
        self._agents.end(node)

    def share(self, batch: TrainingBatch) -> Any:
        return ray.put(batch)

    def slots(self, shared: list[list[Any]]) -> RefSlots:
        return RefSlots(shared)

    def submit(self, worker: str, meant: Meant | None, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._actors[worker].run.remote(meant, method, *args, **kwargs)

    def wait(self, pending: Collection[Any], timeout_s: float) -> list[Any]:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=timeout_s)
        return list(done)

    def result(self, pending: Any, worker: str, what: str) -> Any:
        try:
            return ray.get(pending)
        except RayActorError as error:
            raise ProcessEnded(first_line(error)) from error
        except RayError as error:
            raise typed_error(error, worker, what) from error

    def signal(self, worker: str, number: int) -> None:
        info = self.infos[worker]
        if info.host == socket.gethostname():
            signal_pid(info.pid, number)
        else:
            try:
                ray.get(on_node(info.node_id, signal_pid).remote(info.pid, number), timeout=_SIGNAL_S)
            except RayError:
                if self._node_lives(info.node_id):  # it answers, but not to this
                    raise

    def cut(self, worker: str) -> str:
        return ""

    def end(self, worker: str) -> None:
        if worker not in self._actors:
            return  # it was gone before this controller came
        with self._beside(DeadlineExceeded(f"worker {worker} was not ended: the host is closed")):
            ray.kill(self._actors[worker], no_restart=True)
            if info := self.infos.get(worker):
                end_for_certain(f"worker {worker} (process {info.pid} on {info.host})", self._attempt_to_end(info), lambda: self._closed)
        self._ended.add(worker)

    def close(self) -> None:
        with self._adding:
            self._closed = True
        with contextlib.ExitStack() as last_first:  # all of it happens, whatever fails
            last_first.callback(self._leave_ray)
            last_first.callback(self._await_adds)
            if self._kept:
                self._close_workers(last_first)
            last_first.callback(self._agents.close)
            if self._watch:
                last_first.callback(self._watch.close)

    def _close_workers(self, last_first: contextlib.ExitStack) -> None:
        last_first.callback(self._end_processes)
        if self._group and not self._own:  # a Ray of our own ends with us
            last_first.callback(_ask_ray, remove_placement_group, self._group)
        for actor in list(self._actors.values()):
            last_first.callback(_ask_ray, ray.kill, actor, no_restart=True)

    def _attempt_to_end(self, info: WorkerInfo) -> Callable[[float], bool]:
        """Nothing can be killed on a node that is lost. Ray may be late to say so, and until then asks in vain."""
        if info.host == socket.gethostname():
            return lambda within_s: end_pid(info.pid, within_s)
        kill = KillThere(info.pid, info.node_id)
        return lambda within_s: kill(within_s) if self._node_lives(info.node_id) else self._lease_is_over(info.node_id)

    def _lease_is_over(self, node_id: str) -> bool:
        """Of a node that Ray calls dead. Its processes hear nothing from the coordinator since they were expelled, so they have fenced themselves
        once ``recovery.fence_s`` (and a heartbeat) has passed since it was first seen to be lost, all ranks on it together."""
        recovery = self._config.recovery
        with self._adding:
            since = self._lost.setdefault(node_id, time.monotonic())
        return time.monotonic() - since > recovery.fence_s + 2 * recovery.heartbeat_s

    @staticmethod
    def _node_lives(node_id: str) -> bool:
        return any(n["NodeID"] == node_id and n["Alive"] for n in ray.nodes())

    def _end_processes(self) -> None:
        """A frozen process does not hear Ray's request to end."""
        living = [worker for worker in list(self.infos) if worker not in self._ended]
        for worker in living:
            self._end_process(worker)
        for worker in living:
            self._wait_gone(worker, _CLOSE_S)

    def _end_process(self, worker: str) -> None:
        if self.infos[worker].host == socket.gethostname():
            signal_pid(self.infos[worker].pid, signal.SIGKILL)

    def _wait_gone(self, worker: str, timeout_s: float) -> None:
        info = self.infos[worker]
        if info.host == socket.gethostname():  # elsewhere the signal was delivered by a task on that node
            wait_gone(worker, info.pid, timeout_s)


def _ask_ray(act: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """At the end of a run. A signal to the whole process group (a terminal's, a service manager's) ends Ray's own processes too; what
    Ray does not free any more ended with it, and workers of this machine are killed without it."""
    with contextlib.suppress(RayError):
        act(*args, **kwargs)
