"""Ray itself: starting or joining a cluster, its nodes, its objects and its errors. Nothing here knows of training."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from everstep.cluster.orphans import TOKEN, Watch, kill_all
from everstep.cluster.processes import end_pid
from everstep.config.schema import Config
from everstep.errors import (
    BadInput,
    EverstepError,
    WorkerFailed,
    first_line,
)

_QUIET: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": True}
_HEAD_S = 60.0


def join_ray(address: str, **more: Any) -> None:
    """Connect to the cluster at ``address``. Raises BadInput."""
    with kept_signal_handlers():
        try:
            ray.init(address=address, **_QUIET, **more)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise BadInput(f"ray.address={address}: no Ray cluster answers there ({error}); start one with `ray start`") from error


def start_head(token: str, folder: str, processes: int) -> str:
    """A Ray cluster of this machine that does not end with this process; returns its address.

    All its processes carry ``token``, by which they are ended (:func:`everstep.cluster.orphans.kill_all`); its sockets and logs are in
    ``folder``. Raises WorkerFailed.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    _private_ray()
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}",
        f"--num-cpus={max(processes + 1, os.cpu_count() or 1)}", "--include-dashboard=false", f"--object-store-memory={512 << 20}",
        f"--temp-dir={folder}", "--disable-usage-stats",
    ]
    try:
        done = subprocess.run(command, env=os.environ | {TOKEN: token}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_HEAD_S)
    except subprocess.TimeoutExpired as error:
        raise WorkerFailed(f"`ray start --head` did not return within {_HEAD_S:g} s: is the machine busy?") from error
    if done.returncode:
        raise WorkerFailed(f"`ray start --head` failed: {(done.stderr or done.stdout).strip()[-300:]}")
    return f"127.0.0.1:{port}"


def _private_ray() -> None:
    """Of a cluster of this run alone, on this machine."""
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # calls that a death voided are given up, not forgotten


def start_ray(config: Config, processes: int) -> Callable[[], None]:
    """Connect to the configured cluster, or start one for this run; returns what undoes it. BadInput.

    A process that is connected already stays so.
    """
    if ray.is_initialized():
        return lambda: None
    address = config.ray.address
    with kept_signal_handlers(), contextlib.ExitStack() as undo:
        if address:
            join_ray(address)
        else:
            _private_ray()
            token = secrets.token_hex(16)
            watch = undo.enter_context(Watch(token))
            os.environ[TOKEN] = token  # Ray's processes inherit it
            try:
                context: Any = ray.init(num_cpus=max(processes + 1, os.cpu_count() or 1), include_dashboard=False,
                                        object_store_memory=512 << 20, _node_ip_address="127.0.0.1", **_QUIET)
            except Exception as error:  # of a type of its own for none of what may be wrong
                ray.shutdown()
                kill_all(token)
                raise WorkerFailed(f"Ray did not start on this machine: {first_line(error)}") from error
            finally:
                del os.environ[TOKEN]
            watch.also_of(context.address_info["session_dir"])
        undo.callback(ray.shutdown)
        return undo.pop_all().close


@contextlib.contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Ray's own handler of SIGTERM aborts the process, and no Python code runs; ours shuts down in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def uses_gpus(config: Config) -> bool:
    if config.device == "cpu":
        return False
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if config.device == "cuda" and not gpus:
        raise BadInput("device=cuda, but the Ray cluster has no GPU; use device=cpu or auto")
    return gpus > 0


def devices_per_node(on_gpu: bool) -> dict[str, int]:
    kind = "GPU" if on_gpu else "CPU"
    return {n["NodeID"]: int(n["Resources"].get(kind, 0)) for n in ray.nodes() if n["Alive"]}


def node_ip(node_id: str) -> str:
    return next(str(n["NodeManagerAddress"]) for n in ray.nodes() if n["NodeID"] == node_id)


def on_node(node_id: str, act: Callable[..., Any]) -> Any:
    return ray.remote(num_cpus=0)(act).options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))


class KillThere:
    """A process on another node is killed by a task on that node; by another one if that failed. Called with the seconds to wait: whether it is gone."""

    def __init__(self, pid: int, node_id: str):
        self._pid, self._node_id = pid, node_id
        self._task: Any = None

    def __call__(self, within_s: float) -> bool:
        if self._task is None:
            self._task = on_node(self._node_id, end_pid).remote(self._pid, within_s)
        done, _ = ray.wait([self._task], timeout=within_s)  # one after the other: a frozen node does all of them when it goes on
        if not done:
            return False
        task, self._task = self._task, None
        try:
            return bool(ray.get(task))
        except RayError:
            return False


def typed_error(error: RayError, worker: str, what: str) -> EverstepError:
    """A Ray error as one of ours. What the worker raised typed stays as it is."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, EverstepError):
        return cause
    if cause is not None:
        return WorkerFailed(f"worker {worker} failed in {what}: {type(cause).__name__}: {first_line(cause)}")
    return WorkerFailed(f"worker {worker} failed in {what}: {first_line(error)}")
