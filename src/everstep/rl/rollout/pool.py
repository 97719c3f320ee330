"""The rollout pool at work: engines in processes of their own, kept busy, watched, and replaced when they die.

Who gets what is decided by :class:`everstep.rl.rollout.requests.Requests`. One thread hands out sequences and takes what was made,
a call for each engine at a time; weights are moved by whoever owns the trainer's ranks, between two steps (``refit``).
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.host import Host, ProcessEnded
from everstep.config.schema import RolloutConfig
from everstep.errors import BadInput, DeadlineExceeded, EverstepError, NotEnoughReplicas, WorkerFailed
from everstep.rl.rollout import Response, Sampling, prompt_tokens
from everstep.rl.rollout.decoding import Pending
from everstep.rl.rollout.requests import EngineState, Requests
from everstep.rl.rollout.sync import Kind
from everstep.telemetry.events import EventLog

_POLL_S = 0.05
_IDLE_S = 0.2
_SLOW_FACTOR, _SLOW_S = 5.0, 1.0  # a call in which a token takes so many times as long as others' did last, and so many seconds, is of a slow engine
_BESIDE = 1000  # numbers of engines on spares' devices begin here
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # before an engine that did not start is started again
_MISSED = 5  # transfers of weights in a row that came to nothing: then it is not the trainers' deaths any more, but the engine


class Processes(Protocol):
    """What the pool needs of the launcher besides the host."""

    def start_engine(self, name: str, where: str) -> None:
        """A process for the engine, where the worker ``where`` is or was if that is possible; "": anywhere. Raises EverstepError if it does not start."""

    def end_engine(self, name: str) -> None:
        """No death from now on, whatever becomes of it; returns once its process is gone. Raises DeadlineExceeded."""

    def expel(self, worker: str, cause: str) -> None:
        """It is taken for dead; ``RolloutPool.died`` is told."""

    def call_off(self, stream: str) -> None:
        """Whoever waits at this transfer of weights gives it up."""


class RolloutPool:
    """``places``: devices that colocated engines can share."""

    def __init__(self, config: RolloutConfig, lora: bool, host: Host, processes: Processes, events: EventLog, places: int):
        self._config, self._host, self._processes, self._events = config, host, processes, events
        self._requests = Requests(config.samples_per_batch, config.poison_after)
        self._lora = lora
        self._based: set[str] = set()           # engines that hold the frozen weights, with LoRA
        self._streams: dict[str, str] = {}      # of the transfer that is under way, or was the last one
        self._missed: dict[str, int] = {}       # by engine: its transfers of weights that failed, since one that did not
        self._rounds = itertools.count()
        self._calls: dict[Any, tuple[str, float]] = {}
        self._builds = itertools.count(1)
        self._restarts, self._count, self._places = config.engine_restarts, config.engines, places
        self._took: dict[str, float] = {}       # seconds a token of an engine's last call
        self._moved = defaultdict[str, list[str]](list)  # what engines are still at, although it was given to others, or is void
        self._beside: dict[int, str] = {}       # engines on the devices of idle spares: number -> spare
        self._coming: set[int] = set()          # numbers of engines that are being started
        self._untried: set[int] = set()         # of them, those that neither started nor failed so far
        self._cause = ""                        # of the last start that failed
        self._changed = threading.Condition()
        self._closed = False
        self.failure: EverstepError | None = None

    # -- engines -------------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the first engines; returns once each has started, or failed for the first time. WorkerFailed if none has started: then it
        is not the machine."""
        threading.Thread(target=self._loop, name="rollout-pool", daemon=True).start()
        with self._changed:
            for number in range(self._count):
                self._begin(number, f"e{number}")
            self._changed.wait_for(lambda: self._closed or not self._untried)
            # One that failed may be on its way again by now: that is no engine yet.
            if not self._closed and all(self._requests.engines[name].state is EngineState.STARTING for name in self._requests.usable):
                raise WorkerFailed(f"no rollout engine could start: {self._cause}")

    def resize(self, engines: int) -> dict[str, list[str]]:
        """As many engines as this from now on: others are started, or those with the highest numbers leave, and what they were at goes on
        elsewhere. Returns the living ones, and those that leave. BadInput."""
        if engines < 1 or (self._config.colocated and engines > self._places):
            raise BadInput(f"{engines} rollout engines: there must be at least one" + (f", and at most {self._places} with rollout.colocated" if self._config.colocated else ""))
        with self._changed:
            for number in range(self._count, engines):
                if number not in self._coming:
                    self._begin(number, f"e{number}.{next(self._builds)}")
            self._count = engines
            leaving = [name for name in self._requests.usable if engines <= self.number_of(name) < _BESIDE]
            staying = [name for name in self._requests.usable if name not in leaving]
            for name in leaving:
                self._leaves(name)
            self._changed.notify_all()
        for name in leaving:
            threading.Thread(target=self._let_go, args=(name,), name=f"leave-{name}", daemon=True).start()
        return {"engines": staying, "leaving": leaving}

    def serve_beside(self, spares: Collection[str]) -> None:
        """On the devices of exactly these idle spares there is an engine more each (rollout.on_spares), from now on."""
        for worker in [worker for worker in self._beside.values() if worker not in spares]:
            self.vacate(worker)
        with self._changed:
            for worker in spares:
                if (number := _BESIDE + int(worker[1:])) not in self._beside and number not in self._coming:
                    self._beside[number] = worker
                    self._begin(number, f"e{number}.{next(self._builds)}", beside=worker)

    def vacate(self, worker: str) -> None:
        """A spare is needed as a trainer: returns once the engine on its device is gone, or did not go in time, which is recorded."""
        with self._changed:
            number = _BESIDE + int(worker[1:])
            if self._beside.pop(number, None) is None:
                return
            leaving = [name for name in self._requests.usable if self.number_of(name) == number]
            for name in leaving:
                self._leaves(name)
            self._changed.notify_all()
        for name in leaving:
            self._let_go(name)
        with self._changed:
            self._changed.wait_for(lambda: number not in self._coming, self._config.call_timeout_s)

    def _leaves(self, name: str) -> None:
        lost = self._requests.gone(name, at_fault=False)
        self._based.discard(name)
        self._events.emit("rollout_leave", engine=name, requeued=len(lost))

    def knows(self, worker: str) -> bool:
        return worker in self._requests.engines

    @staticmethod
    def number_of(worker: str) -> int:
        """Which of ``rollout.engines`` it is; one that takes a dead one's place takes its number. Of worker w3's device: 1003."""
        return int(worker.removeprefix("e").partition(".")[0])

    def engine_at(self, number: int) -> str | None:
        """The living engine with this number."""
        with self._changed:
            return next((name for name in self._requests.usable if self.number_of(name) == number), None)

    def died(self, worker: str, cause: str, injected: bool) -> None:
        """An engine's process ended, or is about to be ended; another takes its place. Must be told of every death."""
        with self._changed:
            state = self._requests.engines[worker].state
            lost = self._requests.gone(worker, at_fault=not injected)
            self._based.discard(worker)
            if state in (EngineState.GONE, EngineState.STARTING):
                return  # it left; or whoever starts it sees to it
            dropped = [sample for sample in lost if sample in self._requests.dropped]
            self._events.emit("rollout_death", engine=worker, cause=cause, requeued=len(lost) - len(dropped), dropped=dropped)
            number = self.number_of(worker)
            if self._restarts > 0 and self._wanted(number):
                self._restarts -= 1
                self._begin(number, f"e{number}.{next(self._builds)}", worker)
            else:
                threading.Thread(target=self._let_go, args=(worker,), name=f"end-{worker}", daemon=True).start()
            self._changed.notify_all()
        if worker in self._streams:  # its source need not wait for it
            self._processes.call_off(self._streams[worker])

    def _wanted(self, number: int) -> bool:
        return not self._closed and (number < self._count or number in self._beside)

    def _begin(self, number: int, name: str, instead_of: str = "", beside: str = "") -> None:
        self._coming.add(number)
        self._untried.add(number)
        threading.Thread(target=self._bring, args=(number, name, instead_of, beside), name=f"start-{name}", daemon=True).start()

    def _bring(self, number: int, name: str, instead_of: str, beside: str) -> None:
        """Start engine ``number``, again and again, later and later, while it fails and rollout.engine_restarts are left."""
        pause_s = _FIRST_PAUSE_S
        try:
            while (cause := self._start(name, instead_of, beside)) is not None:
                with self._changed:
                    again = self._restarts > 0 and self._wanted(number)
                    self._restarts -= again
                    self._cause = f"{name}: {cause}"
                    self._events.emit("rollout_start_failed", engine=name, cause=cause, again_s=pause_s if again else None)
                    self._untried.discard(number)
                    self._changed.notify_all()
                    if not again or self._changed.wait_for(lambda: not self._wanted(number), pause_s):
                        self._coming.discard(number)
                        return
                    name = f"e{number}.{next(self._builds)}"
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            with self._changed:
                self._untried.discard(number)
                self._coming.discard(number)
                self._changed.notify_all()

    def _start(self, name: str, instead_of: str, beside: str) -> str | None:
        """Why it did not; None if it has, or is not wanted any more."""
        try:
            if instead_of:
                self._processes.end_engine(instead_of)
            with self._changed:
                if not self._wanted(self.number_of(name)):
                    return None
                self._requests.starting(name)
            self._processes.start_engine(name, instead_of or beside)
        except (Exception, SystemExit) as error:  # a fault boundary: whatever a library raises; SystemExit is Ray's word to who waits when it ends
            with self._changed:
                began = name in self._requests.engines
                if began:
                    self._requests.gone(name, at_fault=False)
            if began and not isinstance(error, SystemExit):
                self._let_go(name)
            return f"{type(error).__name__}: {error}"
        with self._changed:
            if self._requests.engines[name].state is not EngineState.STARTING:
                cause: str | None = "it died while it started"
            elif not self._wanted(self.number_of(name)):
                self._requests.gone(name, at_fault=False)
                cause = None
            else:
                self._requests.started(name)
                if "." in name:
                    self._events.emit("rollout_start", engine=name, instead_of=instead_of)
                self._changed.notify_all()
                return None
        self._let_go(name)
        return cause

    def _let_go(self, name: str) -> None:
        """An engine that is no engine any more: its process ends, and whoever sends it weights need not wait for it."""
        if name in self._streams:
            self._processes.call_off(self._streams[name])
        try:
            self._processes.end_engine(name)
        except EverstepError as error:
            self._events.emit("error", error=type(error).__name__, message=f"rollout engine {name}: {error}")

    def close(self) -> None:
        """Nothing is handed out any more; the processes are the host's."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- sequences -----------------------------------------------------------------------------------------------------------

    def submit(self, prompts: TrainingBatch, sampling: Sampling, min_version: int, made: Mapping[str, Response]) -> None:
        """Complete every row of ``prompts`` under weights of ``min_version`` or later; those in ``made`` go on from what they have."""
        groups = prompts.columns.get("group", prompts.sample_ids)
        sequences = [
            Pending(sid, tokens, copy.deepcopy(made.get(sid, Response()))) for sid, tokens in zip(prompts.sample_ids, prompt_tokens(prompts), strict=True)
        ]
        with self._changed:
            self._requests.submit(zip(groups, sequences, strict=True), sampling, min_version)
            self._changed.notify_all()

    def so_far(self, samples: Sequence[str]) -> dict[str, Response]:
        """What there is of those that have something, complete or not; a copy."""
        with self._changed:
            return copy.deepcopy(self._requests.so_far(samples))

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
            if not self._requests.usable and not self._coming:
                why = f"; the last one failed: {self._cause}" if self._cause else ""
                raise NotEnoughReplicas(
                    f"no rollout engine is left, after {self._config.engine_restarts} restarts (rollout.engine_restarts){why}; see their logs, "
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

    def void(self) -> None:
        """The run went back to an older step."""
        with self._changed:
            for name, samples in self._requests.void().items():
                self._moved[name] += samples

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

    def sleep(self) -> None:
        """All engines leave their devices; nothing may be under way. Returns once they have, or are taken for dead."""
        with self._changed:
            living = [name for name, engine in self._requests.engines.items() if engine.state in (EngineState.READY, EngineState.STALE)]
            for name in living:
                self._requests.asleep(name)
        calls = {self._host.submit(name, None, "sleep", self._moved.pop(name, [])): name for name in living}
        self._await(calls, "did not leave its device", lambda call, name: self._host.result(call, name, "sleep"))

    def _await(self, calls: dict[Any, str], what: str, take: Callable[[Any, str], object]) -> None:
        """Results of calls to engines; one that does not answer in rollout.sync_timeout_s, or whose process ended, is taken for dead."""
        end = time.monotonic() + self._config.sync_timeout_s
        while calls:
            for call in self._host.wait(calls, _IDLE_S):
                name = calls.pop(call)
                try:
                    take(call, name)
                except ProcessEnded as ended:
                    self._processes.expel(name, f"its process ended ({ended})")
                except EverstepError as error:
                    self._processes.expel(name, f"{type(error).__name__}: {error}")
            if calls and time.monotonic() > end:
                for name in calls.values():
                    self._processes.expel(name, f"{what} in {self._config.sync_timeout_s:g} s (rollout.sync_timeout_s)")
                return

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
        self._await(calls, "got no weights", lambda call, name: self._received(call, name, version, kind))

    def _received(self, call: Any, name: str, version: int, kind: Kind) -> None:
        got: int | None = None if kind == "base" else version
        try:
            self._host.result(call, name, "receive_weights")
        except EverstepError as error:
            got = None
            self._events.emit("error", step=version, error=type(error).__name__, message=f"rollout engine {name}: {error}")
            self._missed[name] = self._missed.get(name, 0) + 1
            if self._missed[name] >= _MISSED:
                self._cause = f"{name}: {error}"
                self._processes.expel(name, f"{_MISSED} transfers of weights to it failed in a row, the last one with {type(error).__name__}: {error}")
        else:
            self._missed.pop(name, None)
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
                self._relieve(now)
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
        with self._changed:  # until the calls are made: no transfer of weights gets in between, after which an engine may have none
            for name, engine in self._requests.engines.items():
                if name in busy or engine.state is not EngineState.READY:
                    continue
                new = self._requests.take(name)
                if engine.has:
                    moved = self._moved.pop(name, [])
                    call = self._host.submit(name, None, "advance", new, engine.sampling, self._config.tokens_per_call, moved)
                    self._calls[call] = name, time.monotonic()

    def _relieve(self, now: float) -> None:
        """What a slow engine has goes to those that are idle; a prompt's noise is its own, so the samples are the same."""
        with self._changed:
            idle = [name for name in self._requests.idle if name in self._took]
            for name, since in self._calls.values() if idle else ():
                limit = max(_SLOW_S, _SLOW_FACTOR * max(self._took[other] for other in idle) * self._config.tokens_per_call)
                if now - since > limit and (moved := self._requests.move(name)):
                    self._moved[name] += moved
                    self._events.emit("rollout_moved", engine=name, samples=len(moved), seconds=now - since)
                    return

    def _take_back(self, call: Any) -> None:
        name, since = self._calls.pop(call)
        try:
            pieces = self._host.result(call, name, "advance")
        except (ProcessEnded, EverstepError) as error:
            self._processes.expel(name, f"{type(error).__name__}: {error}")
            return
        if tokens := max((len(response.tokens) for response, _ in pieces.values()), default=0):
            self._took[name] = (time.monotonic() - since) / tokens
        with self._changed:
            self._requests.gained(name, pieces)
            self._changed.notify_all()

    def _forget_calls(self, name: str) -> None:
        self._calls = {call: (n, since) for call, (n, since) in self._calls.items() if n != name}
