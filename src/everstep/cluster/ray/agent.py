"""The nodes' agents under Ray: a process beside the controller on its own machine, a Ray actor without a CPU slot on every other one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from everstep.errors import WorkerFailed
from everstep.node.agent import AgentSpec
from everstep.node.channel import serve, spawn

_END_S = 3.0


class _NodeAgent:
    """Serves until the run is over; then its process ends, whoever still refers to it."""

    def run(self, spec: str) -> None:
        os._exit(serve(AgentSpec.load(spec)))


class RayAgents:
    def __init__(self) -> None:
        self._here: list[subprocess.Popen[str]] = []
        self._there: dict[str, Any] = {}
        self._closed = False
        self._lock = threading.Lock()

    def run_here(self, spec: AgentSpec) -> None:
        with self._lock:
            if self._closed:
                return
            self._here = [process for process in self._here if process.poll() is None]
            process = spawn(spec)
            self._here.append(process)
        process.wait()

    def run_there(self, spec: AgentSpec, node_id: str, namespace: str) -> None:
        """``namespace``: of a run whose actors outlive their controller. Raises WorkerFailed when the agent has ended."""
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        detached: dict[str, Any] = {"lifetime": "detached", "namespace": namespace, "name": f"agent-{os.urandom(4).hex()}"} if namespace else {}
        remote: Any = ray.remote(_NodeAgent)
        try:
            with self._lock:
                if self._closed:
                    return
                self._there[spec.node] = made = remote.options(num_cpus=0, max_restarts=0, scheduling_strategy=where, **detached).remote()
            ray.get(made.run.remote(spec.dump()))
        except RayError as error:
            raise WorkerFailed(f"the agent of {spec.node} ended: {error}") from error

    def end(self, node: str) -> None:
        """Kill one that is frozen."""
        with self._lock:
            if actor := self._there.get(node):
                ray.kill(actor)
            else:
                for process in self._here:
                    process.kill()

    def close(self) -> None:
        """They were told that the run is over; what does not end by itself is killed."""
        with self._lock:
            self._closed = True
            here, there = list(self._here), list(self._there.values())
        for process in here:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()
        for actor in there:
            with contextlib.suppress(RayError):
                ray.kill(actor)
