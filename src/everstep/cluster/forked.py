"""Worker processes as children of this machine, forked from a server process that has done the imports: tens of milliseconds each.

For many short runs one after the other (exactness under hundreds of faults, the soak): controller, coordinator, worker and
transaction are those of any other run. On the CPU only; CUDA survives no fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing as mp
import os
import pickle
import queue
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from multiprocessing import forkserver
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

from everstep.cluster import environment
from everstep.cluster.batch import TrainingBatch
from everstep.cluster.host import NoRoom, ProcessEnded, Served, WorkerInfo, WorkerSpec, make_worker
from everstep.cluster.namespaces import Bridge, Plug
from everstep.cluster.processes import ProcessWatch, die_with_parent, end_for_certain
from everstep.cluster.slots import ListSlots
from everstep.config.schema import Config
from everstep.errors import BadInput, DeadlineExceeded, EverstepError, WorkerFailed
from everstep.node import channel
from everstep.node.agent import AgentSpec

if TYPE_CHECKING:
    from everstep.cluster.formation import Meant

PRELOAD = [
    "everstep.cluster.worker.worker",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
]
_START_S = 60.0
_END_S = 30.0
_AGENT_S = 3.0


def context() -> Any:
    """The multiprocessing context of the server process, which sees no accelerator and computes with one thread."""
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(PRELOAD)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server.get_inherited_fds() is not None:  # this process was forked by it: the same one serves here
        server.ensure_running = lambda: None
        return made
    with _environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""):
        forkserver.ensure_running()  # the server, and with it every child, keeps this environment
    return made


class _Child:
    """One worker process and the calls it owes. Two threads, so that a frozen one holds nobody up: one feeds it, one listens."""

    def __init__(self, worker: str, pipe: Connection, pid: int, process: Any = None):
        self.name, self.pipe, self.pid, self.process = worker, pipe, pid, process
        self._pidfd: int | None = None  # the process itself: its number may be another's once the server process has reaped it
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)
        self.started: Future[Any] = Future()
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {-1: self.started}
        self._number = 0
        self._ended = False
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for loop in (self._feed, self._listen):
            threading.Thread(target=loop, name=f"{worker}{loop.__name__}", daemon=True).start()

    @staticmethod
    def fork(
        spec: WorkerSpec, env: dict[str, str], plug: Plug | None, prepare: Callable[[], None] | None, key: bytes | None, node: str
    ) -> _Child:
        pipe, theirs = mp.Pipe()
        process = context().Process(target=_serve, args=(spec, env, plug, prepare, theirs, key, node), name=spec.worker_id, daemon=True)
        process.start()
        theirs.close()
        return _Child(spec.worker_id, pipe, process.pid, process)

    @staticmethod
    def reach(worker: str, pid: int, key: bytes) -> _Child:
        """One whose controller is gone. Raises OSError if it does not listen."""
        child = _Child(worker, Client(_address(worker, key), "AF_UNIX", authkey=key), pid)
        with child._lock:
            child._calls.pop(-1, None)  # it has started long ago
        return child

    def submit(self, *call: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._ended:
                future.set_exception(ProcessEnded("it had ended before the call"))
                return future
            number, self._number = self._number, self._number + 1
            self._calls[number] = future
        self._outbox.put(pickle.dumps((number, *call)))
        return future

    def signal(self, number: int) -> None:
        """Nothing happens if the process is gone."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)

    def wait_gone(self, timeout_s: float) -> None:
        """Returns once the process has ended. Raises DeadlineExceeded."""
        if not self._gone_within(timeout_s):
            raise DeadlineExceeded(f"worker {self.name} (process {self.pid}) did not die within {timeout_s:g} s")

    def end_within(self, timeout_s: float) -> bool:
        """Kill the process; whether it has ended within this time."""
        self.signal(signal.SIGKILL)
        return self._gone_within(timeout_s)

    def _gone_within(self, timeout_s: float) -> bool:
        if self._pidfd is None:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def forget(self) -> None:
        """Of a process that has ended: close what leads to it."""
        with self._lock:
            pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)
            if self.process is None:
                return  # another controller's
            self.process.join(_END_S)
            with contextlib.suppress(ValueError):  # the server process has not told its end yet; nothing but a descriptor is left then
                self.process.close()

    def leave(self) -> None:
        """Of one that another controller shall reach: it is told that this one is gone."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as end:  # it is gone itself
            end.shutdown(socket.SHUT_RDWR)  # wakes the listening thread, which close() does not

    def _feed(self) -> None:
        with contextlib.suppress(OSError):  # its end is the listener's business
            while (message := self._outbox.get()) is not None:
                self.pipe.send_bytes(message)

    def _listen(self) -> None:
        ended = f"process {self.pid} closed its pipe"
        try:
            while True:
                number, error, value = pickle.loads(self.pipe.recv_bytes())
                with self._lock:
                    future = self._calls.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        except (EOFError, OSError):
            pass
        except Exception as error:  # an answer that is none: nothing more can be understood from this process
            ended = f"what process {self.pid} said could not be read ({type(error).__name__}: {error})"
        self._outbox.put(None)
        with self._lock:
            self._ended = True
            owed, self._calls = list(self._calls.values()), {}
        for future in owed:
            future.set_exception(ProcessEnded(ended))
        self.pipe.close()


class ForkedHost:
    """The :class:`everstep.cluster.host.Host` whose workers are processes of this machine.

    ``prepare``: an importable function that every worker process calls first. ``namespaces``: each worker has a network namespace of
    its own and can be cut off for real (:mod:`everstep.cluster.namespaces`); BadInput where that is not permitted. ``node_of(worker)``: which workers share a node's memory:
    those of one name, as if each name were a machine. With
    ``recovery.controller_grace_s`` the processes outlive this one for so long, and another host can :meth:`attach` them.
    """

    def __init__(
        self, config: Config, prepare: Callable[[], None] | None = None, namespaces: bool = False,
        node_of: Callable[[str], str] = lambda worker: socket.gethostname(),
    ):
        if config.device == "cuda":
            raise BadInput("device=cuda: processes that are forked cannot use CUDA; use device=cpu")
        self._env = environment.worker_environment(config.model_copy(update={"device": "cpu"}))
        self._prepare, self._node_of = prepare, node_of
        self._key = secrets.token_bytes(16) if config.recovery.controller_grace_s > 0 else None
        self._bridge = Bridge() if namespaces else None
        self.address = self._bridge.address if self._bridge else "127.0.0.1"
        self._children: dict[str, _Child] = {}
        self._watch: ProcessWatch | None = None
        self._closed, self._kept = False, True  # whether the processes end with us
        self._lock = threading.Lock()
        self.infos: dict[str, WorkerInfo] = {}
        self._agents: list[Any] = []

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        for spec in specs:
            self._launch(spec)
        end = time.monotonic() + _START_S
        for spec in specs:
            self._await_start(spec, end)

    def handle(self) -> dict[str, Any]:
        if self._key is None or self._bridge:
            return {}
        return {"kind": "forked", "key": self._key.hex(), "pids": {worker: child.pid for worker, child in dict(self._children).items()}}

    def attach(self, handle: Mapping[str, Any]) -> None:
        if handle.get("kind") != "forked":
            raise BadInput("the workers of this run are no processes of this kind of host; start again with resume=auto")
        self._key, self._kept = bytes.fromhex(handle["key"]), False
        for worker, pid in handle["pids"].items():
            with contextlib.suppress(OSError):  # it died with its controller, or before
                self._children[worker] = child = _Child.reach(worker, pid, self._key)
                self.infos[worker] = WorkerInfo(worker, child.pid, socket.gethostname(), self._node_of(worker))

    def keep(self) -> None:
        self._kept = True

    def add(self, spec: WorkerSpec, instead_of: str, avoid: Collection[str] = ()) -> None:
        if socket.gethostname() in avoid:
            raise NoRoom("all processes of this host are on one machine, and that is being drained")
        self._launch(spec)
        self._await_start(spec, time.monotonic() + _START_S)
        if self._watch:
            self._watch.add(spec.worker_id, self.infos[spec.worker_id].pid)

    def has_place(self, worker: str) -> bool:
        return True

    def _launch(self, spec: WorkerSpec) -> None:
        env = self._env | {"MASTER_ADDR": spec.store[0], "MASTER_PORT": str(spec.store[1]), "LOCAL_RANK": "0"}
        with self._lock:
            if self._closed:
                raise WorkerFailed(f"worker {spec.worker_id} was not started: the host is closed")
            plug = self._bridge.plug(spec.worker_id) if self._bridge else None
            self._children[spec.worker_id] = _Child.fork(spec, env, plug, self._prepare, self._key, self._node_of(spec.worker_id))

    def _await_start(self, spec: WorkerSpec, end: float) -> None:
        child = self._children[spec.worker_id]
        try:
            child.started.result(max(1.0, end - time.monotonic()))
        except TimeoutError:
            raise DeadlineExceeded(f"worker {spec.worker_id} was not ready in {_START_S:g} s; see {spec.log_path}") from None
        except ProcessEnded as ended:
            raise WorkerFailed(f"worker {spec.worker_id} could not start ({ended}); see {spec.log_path}") from ended
        self.infos[spec.worker_id] = WorkerInfo(spec.worker_id, child.pid, socket.gethostname(), self._node_of(spec.worker_id))

    def watch(self, on_end: Callable[[str], None]) -> None:
        self._watch = ProcessWatch(on_end)
        for worker, info in list(self.infos.items()):
            self._watch.add(worker, info.pid)

    def run_agent(self, spec: AgentSpec, worker: str) -> None:
        process = context().Process(target=_serve_agent, args=(spec, self._prepare), name=f"agent-{spec.node}", daemon=True)
        with self._lock:
            if self._closed:
                return
            process.start()
            self._agents.append(process)
        process.join()

    def end_agent(self, node: str) -> None:
        with self._lock:
            for agent in self._agents:
                agent.kill()

    def share(self, batch: TrainingBatch) -> TrainingBatch:
        return batch

    def slots(self, shared: list[list[Any]]) -> ListSlots:
        return ListSlots(shared)

    def submit(self, worker: str, meant: Meant | None, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._children[worker].submit(meant, method, args, kwargs)

    def wait(self, pending: Collection[Any], timeout_s: float) -> list[Any]:
        return list(wait_futures(pending, timeout_s, FIRST_COMPLETED).done)

    def result(self, pending: Any, worker: str, what: str) -> Any:
        return pending.result(0)

    def signal(self, worker: str, number: int) -> None:
        self._children[worker].signal(number)

    def cut(self, worker: str) -> str:
        if not self._bridge:
            return ""
        self._bridge.cut(worker)
        return "the network interface of its namespace is down: nothing leaves it or reaches it, and nothing is reset"

    def end(self, worker: str) -> None:
        if worker not in self._children:
            return  # it was gone before this controller came
        child = self._children[worker]
        end_for_certain(f"worker {worker} (process {child.pid} on {socket.gethostname()})", child.end_within, lambda: self._closed)
        child.forget()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        try:
            if self._watch:
                self._watch.close()
            children = list(self._children.values())
            for child in children:
                child.signal(signal.SIGKILL) if self._kept else child.leave()
            for child in children:
                if self._kept:
                    child.wait_gone(_END_S)
                child.forget()
            for agent in self._agents:  # it was told that the run is over
                agent.join(_AGENT_S)
                if agent.is_alive():
                    agent.kill()
        finally:
            if self._bridge:
                self._bridge.close()


def _address(worker: str, key: bytes) -> str:
    """Where a worker that outlives its controller waits for the next one: in the kernel's own namespace, which no file is left of."""
    return f"\0everstep-{hashlib.sha256(key).hexdigest()[:24]}-{worker}"


def _serve(
    spec: WorkerSpec, env: dict[str, str], plug: Plug | None, prepare: Callable[[], None] | None, pipe: Connection, key: bytes | None,
    node: str,
) -> None:
    """The process of one worker: its calls, one after the other."""
    if key is None:
        die_with_parent(signal.SIGKILL)  # the server process ends with the controller
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal it goes to all; the controller ends us in order
    os.environ.update(env)
    if prepare:
        prepare()
    try:
        if plug:
            plug.enter()
        listener = Listener(_address(spec.worker_id, key), "AF_UNIX", authkey=key) if key else None
        worker = make_worker(spec, node)
    except EverstepError as error:
        pipe.send_bytes(pickle.dumps((-1, error, None)))
        os._exit(1)
    pipe.send_bytes(pickle.dumps((-1, None, None)))
    later: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    if listener:
        threading.Thread(target=_accept, args=(listener, later), name="accept", daemon=True).start()
    while True:
        _serve_calls(worker, pipe)
        if listener is None:
            os._exit(0)  # without the interpreter's shutdown: groups of a broken world may wait in their destructors
        pipe = later.get()


def _serve_agent(spec: AgentSpec, prepare: Callable[[], None] | None) -> None:
    if prepare:
        prepare()
    os._exit(channel.main(spec))


def _accept(listener: Listener, later: queue.SimpleQueue[Connection]) -> None:
    """On a thread: the next controller must not wait for the call in which this worker waits for the next coordinator."""
    while True:
        with contextlib.suppress(OSError, EOFError, mp.AuthenticationError):  # whoever it was had no key, or went away
            later.put(listener.accept())


def _serve_calls(worker: Served, pipe: Connection) -> None:
    """Until the controller closes its end, or is gone."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, meant, method, args, kwargs = pickle.loads(pipe.recv_bytes())
            try:
                answer: tuple[Any, ...] = (number, None, worker.run(method, args, kwargs, meant))
            except EverstepError as error:
                answer = (number, error, None)
            pipe.send_bytes(pickle.dumps(answer))


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    kept = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
