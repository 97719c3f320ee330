"""The rollout pool at work: engines in processes of their own, kept busy, watched, and replaced when they die.

Who gets what is decided by :class:`everstep.rl.rollout.requests.Requests`. One thread hands out sequences and takes what was made,
a call for each engine at a time; weights are moved by whoever owns the trainer's ranks, between two steps (``refit``).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.host import Host, ProcessEnded
from everstep.config.schema import RolloutConfig
from everstep.errors import DeadlineExceeded, EverstepError, NotEnoughReplicas
from everstep.rl.rollout import Response, Sampling, prompt_tokens
from everstep.rl.rollout.decoding import Pending
from everstep.rl.rollout.requests import EngineState, Requests
from everstep.rl.rollout.sync import Kind
from everstep.telemetry.events import EventLog

_POLL_S = 0.05
_IDLE_S = 0.2


class Processes(Protocol):
    """What the pool needs of the launcher besides the host."""

    def start_engine(self, name: str, instead_of: str) -> None:
        """A process for the engine, where the dead one was if that is possible. Raises EverstepError if it does not start."""

    def end_engine(self, name: str) -> None:
        """Returns once its process is gone. Raises DeadlineExceeded."""

    def expel(self, worker: str, cause: str) -> None:
        """It is taken for dead; ``RolloutPool.died`` is told."""

    def call_off(self, stream: str) -> None:
        """Whoever waits at this transfer of weights gives it up."""


class RolloutPool:
    def __init__(self, config: RolloutConfig, lora: bool, host: Host, processes: Processes, events: EventLog):
        self._config, self._host, self._processes, self._events = config, host, processes, events
        self._requests = Requests(config.samples_per_batch, config.poison_after)
        self._lora = lora
        self._based: set[str] = set()           # engines that hold the frozen weights, with LoRA
        self._streams: dict[str, str] = {}      # of the transfer that is under way, or was the last one
        self._rounds = itertools.count()
        self._calls: dict[Any, tuple[str, float]] = {}
        self._builds = itertools.count(1)
        self._restarts = config.engine_restarts
        self._starting = 0
        self._changed = threading.Condition()
        self._closed = False
        self.failure: EverstepError | None = None
        self.first_engines = [f"e{i}" for i in range(config.engines)]

    # -- engines -------------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The first engines' processes have started."""
        with self._changed:
            for name in self.first_engines:
                self._requests.starting(name)
                self._requests.started(name)
        threading.Thread(target=self._loop, name="rollout-pool", daemon=True).start()

    def knows(self, worker: str) -> bool:
        return worker in self._requests.engines

    @staticmethod
    def number_of(worker: str) -> int:
        """Which of ``rollout.engines`` it is; one that takes a dead one's place takes its number."""
        return int(worker.removeprefix("e").partition(".")[0])

    def engine_at(self, number: int) -> str | None:
        """The living engine with this number."""
        with self._changed:
            living = (name for name, engine in self._requests.engines.items() if engine.state is not EngineState.GONE)
            return next((name for name in living if self.number_of(name) == number), None)

    def died(self, worker: str, cause: str, injected: bool) -> None:
        """An engine's process ended, or is about to be ended; another takes its place. Must be told of every death."""
        with self._changed:
            lost = self._requests.gone(worker, at_fault=not injected)
            self._based.discard(worker)
            dropped = [sample for sample in lost if sample in self._requests.dropped]
            self._events.emit("rollout_death", engine=worker, cause=cause, requeued=len(lost) - len(dropped), dropped=dropped)
            again = self._restarts > 0 and not self._closed
            self._restarts -= again
            self._starting += again
            self._changed.notify_all()
        if worker in self._streams:  # its source need not wait for it
            self._processes.call_off(self._streams[worker])
        threading.Thread(target=self._replace, args=(worker, again), name=f"replace-{worker}", daemon=True).start()

    def _replace(self, worker: str, again: bool) -> None:
        try:
            self._processes.end_engine(worker)
            if again and not self._closed:
                with self._changed:
                    name = f"e{self.number_of(worker)}.{next(self._builds)}"
                    self._requests.starting(name)
                self._processes.start_engine(name, worker)
                with self._changed:
                    if self._requests.engines[name].state is EngineState.STARTING:
                        self._requests.started(name)
                        self._events.emit("rollout_start", engine=name, instead_of=worker)
        except EverstepError as error:
            self.failure = self.failure or error
        finally:
            with self._changed:
                self._starting -= again
                self._changed.notify_all()

    def close(self) -> None:
        """Nothing is handed out any more; the processes are the host's."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- sequences -----------------------------------------------------------------------------------------------------------

    def submit(self, prompts: TrainingBatch, sampling: Sampling, min_version: int) -> None:
        """Complete every row of ``prompts`` under weights of ``min_version`` or later."""
        groups = prompts.columns.get("group", prompts.sample_ids)
        sequences = [Pending(sid, tokens) for sid, tokens in zip(prompts.sample_ids, prompt_tokens(prompts), strict=True)]
        with self._changed:
            self._requests.submit(zip(groups, sequences, strict=True), sampling, min_version)
            self._changed.notify_all()

    def has(self, samples: Sequence[str]) -> bool:
        """Whether these were submitted (all of them, or none)."""
        with self._changed:
            return self._requests.knows(samples[0]) if samples else True

    def wait(self, samples: Sequence[str], timeout_s: float) -> bool:
        """Whether all are complete or dropped. Raises what ended the pool, and NotEnoughReplicas if no engine is left."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or not self._requests.missing(samples), timeout_s)
            if self.failure:
                raise self.failure
            if not self._requests.missing(samples):
                return True
            if not self._requests.usable and not self._starting:
                raise NotEnoughReplicas(
                    f"no rollout engine is left, after {self._config.engine_restarts} restarts (rollout.engine_restarts); see their logs, "
                    "then resume with resume=auto"
                )
            return False

    def collect(self, samples: Sequence[str]) -> tuple[dict[str, Response], dict[str, str]]:
        """The complete ones, and sample -> reason of those that were dropped; both are forgotten."""
        with self._changed:
            complete = self._requests.collect(samples)
            dropped = {sample: self._requests.dropped[sample] for sample in samples if sample in self._requests.dropped}
            self._requests.cancel(dropped)
            return complete, dropped

    # -- weights -------------------------------------------------------------------------------------------------------------

    def want(self, version: int) -> None:
        with self._changed:
            self._requests.want(version)

    @property
    def stale(self) -> list[str]:
        with self._changed:
            return list(self._requests.stale)

    def refit(self, version: int, send: Callable[[Mapping[str, str], Kind], bool]) -> None:
        """Bring weights of ``version`` to all engines that lack them: one attempt, after which those that failed are still stale.

        ``send(streams, kind)``: let a replica of the trainer serve the streams (engine -> its name); False if it broke on the way.
        """
        if self._lora and (lacking := [name for name in self.stale if name not in self._based]):
            self._round(lacking, version, "base", send)
        engines = [name for name in self.stale if not self._lora or name in self._based]
        if engines:
            self._round(engines, version, "adapter" if self._lora else "full", send)

    def _round(self, engines: list[str], version: int, kind: Kind, send: Callable[[Mapping[str, str], Kind], bool]) -> None:
        number = next(self._rounds)
        with self._changed:
            engines = [name for name in engines if self._requests.engines[name].state is EngineState.STALE]  # who died meanwhile does not
            self._streams = {name: f"rollout/{version}/{kind}/{number}/{name}" for name in engines}
            for name in engines:
                self._requests.syncing(name)
        calls = {self._host.submit(name, None, "receive_weights", self._streams[name], version, kind): name for name in engines}
        if not send(dict(self._streams), kind):
            for stream in self._streams.values():
                self._processes.call_off(stream)
        end = time.monotonic() + self._config.sync_timeout_s
        while calls:
            for call in self._host.wait(calls, _IDLE_S):
                self._received(calls.pop(call), call, version, kind)
            if calls and time.monotonic() > end:
                for name in calls.values():
                    self._processes.expel(name, f"weights did not reach it in {self._config.sync_timeout_s:g} s (rollout.sync_timeout_s)")
                return

    def _received(self, name: str, call: Any, version: int, kind: Kind) -> None:
        got: int | None = None if kind == "base" else version
        try:
            self._host.result(call, name, "receive_weights")
        except ProcessEnded as ended:
            self._processes.expel(name, f"its process ended ({ended})")
            return
        except EverstepError as error:
            got = None
            self._events.emit("error", step=version, error=type(error).__name__, message=f"rollout engine {name}: {error}")
        else:
            self._based |= {name} if kind == "base" else set()
        with self._changed:
            if self._requests.engines[name].state is EngineState.SYNCING:  # else it died afterwards
                self._requests.synced(name, got)
            self._changed.notify_all()

    # -- the thread ----------------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._closed:
                self._hand_out()
                if not self._calls:
                    with self._changed:
                        self._changed.wait(_POLL_S)
                    continue
                for call in self._host.wait(self._calls, _IDLE_S):
                    self._take_back(call)
                now = time.monotonic()
                for name in [n for n, since in self._calls.values() if now - since > self._config.call_timeout_s]:
                    self._forget_calls(name)
                    self._processes.expel(name, f"made no {self._config.tokens_per_call} tokens in {self._config.call_timeout_s:g} s "
                                                "(rollout.call_timeout_s)")
        except Exception as error:  # the end of the thread: nothing would be generated any more
            with self._changed:
                wrong = error if isinstance(error, EverstepError) else DeadlineExceeded(f"the rollout pool failed: {type(error).__name__}: {error}")
                self.failure = self.failure or wrong
                self._changed.notify_all()

    def _hand_out(self) -> None:
        busy = {name for name, _ in self._calls.values()}
        with self._changed:
            orders = []
            for name, engine in self._requests.engines.items():
                if name in busy or engine.state is not EngineState.READY:
                    continue
                new = self._requests.take(name)
                if engine.has:
                    orders.append((name, new, engine.sampling))
        for name, new, sampling in orders:
            call = self._host.submit(name, None, "advance", new, sampling, self._config.tokens_per_call)
            self._calls[call] = name, time.monotonic()

    def _take_back(self, call: Any) -> None:
        name, _ = self._calls.pop(call)
        try:
            pieces = self._host.result(call, name, "advance")
        except (ProcessEnded, EverstepError) as error:
            self._processes.expel(name, f"{type(error).__name__}: {error}")
            return
        with self._changed:
            self._requests.gained(name, pieces)
            self._changed.notify_all()

    def _forget_calls(self, name: str) -> None:
        self._calls = {call: (n, since) for call, (n, since) in self._calls.items() if n != name}
