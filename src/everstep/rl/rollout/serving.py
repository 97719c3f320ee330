"""A rollout engine in a process of its own: what the pool calls, one call after the other.

Calls are short. ``advance`` generates a few tokens for every sequence that the engine has; so its caller has what was made when the
process dies, gives it new sequences in between, and can tell a slow engine from one that is stuck.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everstep.config.schema import Config
from everstep.engine import cpu, source
from everstep.errors import EverstepError, WorkerFailed
from everstep.recovery.control import Control
from everstep.recovery.victim import Victim
from everstep.rl.rollout import Pieces, Sampling, engine, sync
from everstep.rl.rollout.decoding import Pending
from everstep.telemetry.events import EventLog


class EngineWorker:
    """Public methods are the engine's; ``run`` is how a host calls them (as :meth:`everstep.cluster.worker.worker.Worker.run`)."""

    def __init__(
        self, config: Config, worker_id: str, device: torch.device, control: Control, store: tuple[str, int], events: EventLog, run_dir: Path
    ):
        self.config, self.worker_id, self.device, self.control, self.events = config, worker_id, device, control, events
        self._store_address = store
        self._store: dist.Store | None = None
        hf_config, tokenizer = source.resolve(config.model).hf_config, source.load_tokenizer(config.model)
        self._rollout = engine.make(config, hf_config, tokenizer, device, run_dir / "rollout" / worker_id)
        self._decoder = self._rollout.decoder()
        if config.rollout.colocated:
            self._rollout.sleep()
        self.victim = Victim(worker_id, events, control.fault_word, lambda: "step {}, {}".format(*control.where))
        control.on_order, control.on_phase = self.victim.obey, self.victim.enter
        events.emit("process_start", device=str(device))

    def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], life: object = None) -> Any:
        cpu.enter_thread()
        function = getattr(self, method, None)
        if method.startswith("_") or not callable(function):
            raise WorkerFailed(f"rollout engine has no public method {method!r}")
        try:
            return function(*args, **kwargs)
        except EverstepError:
            raise
        except Exception as error:  # a fault boundary: the pool decides what it means
            raise WorkerFailed(f"rollout engine {self.worker_id} failed in {method}: {type(error).__name__}: {error}") from error

    def advance(self, new: Sequence[Pending], sampling: Sampling, tokens: int, moved: Sequence[str] = ()) -> Pieces:
        """Drop those that were ``moved`` to other engines, take ``new`` sequences, and make up to ``tokens`` tokens for each that the engine
        has."""
        self._decoder.cancel(moved)
        self._decoder.add(new, sampling)
        with self._in_phase("generate", self._rollout.version or 0):
            pieces = self._decoder.advance(tokens)
        if made := [sample for sample, (_, complete) in pieces.items() if complete]:
            self.events.emit("rollout_made", engine=self.worker_id, samples=made, version=self._rollout.version)
        return pieces

    def receive_weights(self, name: str, version: int, kind: sync.Kind) -> int:
        """Weights of committed step ``version``, from whoever serves the stream ``name``; returns bytes.

        What is being generated goes on under them. LinkBroken, if they do not come whole: then there are no weights.
        """
        start, counter = time.monotonic(), _Counter()
        self.events.emit("rollout_sync_begin", step=version, engine=self.worker_id, kind=kind)
        with self._in_phase("sync", version), sync.stream(name, self._open_store(), self.config.rollout.sync_timeout_s) as stream:
            device = self.device if self.config.rollout.tp == 1 else None  # the model's parts are in other processes
            weights = counter.counted(sync.receive(stream.join(), version, device))
            if kind == "adapter":
                self._rollout.load_adapter(weights, self.config.lora.alpha / self.config.lora.rank, version)
            else:
                self._rollout.load_weights(weights, version if kind == "full" else None)
        if kind != "base":
            self._decoder.restart()
        self.events.emit("rollout_sync", step=version, engine=self.worker_id, kind=kind, nbytes=counter.nbytes,
                         seconds=time.monotonic() - start, transfer=counter.seconds, way=counter.way)
        return counter.nbytes

    def sleep(self, moved: Sequence[str] = ()) -> None:
        """Leave the device to whoever shares it: weights and cache go, until weights are received again. Nothing may be under way but what
        was ``moved`` to other engines."""
        self._decoder.cancel(moved)
        if len(self._decoder):
            raise WorkerFailed(f"rollout engine {self.worker_id} was asked to sleep with {len(self._decoder)} sequences under way")
        self._rollout.sleep()
        self.events.emit("rollout_sleep", engine=self.worker_id)

    @contextlib.contextmanager
    def _in_phase(self, phase: str, version: int) -> Iterator[None]:
        """Told is the step that these completions, or weights, precede."""
        self.control.phase(version + 1, phase)
        try:
            yield
        finally:
            self.control.phase(version + 1, "idle")

    def _open_store(self) -> dist.Store:
        if self._store is None:
            host, port = self._store_address
            self._store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=self.config.rollout.sync_timeout_s))
        return self._store


class _Counter:
    """Counts the bytes of what goes through it, and sees which way it came, and how long they took to come."""

    def __init__(self) -> None:
        self.nbytes, self.way, self.seconds = 0, "host", 0.0

    def counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        start = time.monotonic()
        for name, tensor in weights:
            self.nbytes += tensor.nbytes
            self.way = "device" if tensor.is_cuda else "host"
            yield name, tensor
        self.seconds = time.monotonic() - start
