"""Which engine generates what: pure bookkeeping of a rollout pool, without processes, sockets or a clock.

    engine     STARTING -> STALE -> SYNCING -> READY          what it may do: only READY ones get sequences
                 ^           ^  \\______/ |        |
                 |           |___________|        |           a weight transfer failed; newer weights are wanted
                 |________________________________|           any state -> GONE: its process ended

A sequence waits, is with exactly one engine, or is over: complete, or dropped with a reason. What an engine that is gone had made of
its sequences is kept, and they go back to the front of the queue. What an engine says of a sequence that it does not have (it was taken
for dead, and was only slow) has no effect, so no token is counted twice.

A sequence that several engines died of is given to an engine by itself; if that one dies too, the sequence is at fault, and dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from everstep.errors import InvariantViolated
from everstep.rl.rollout import Response, Sampling
from everstep.rl.rollout.decoding import Pending


class EngineState(StrEnum):
    STARTING = "starting"
    STALE = "stale"      # no weights, or older ones than are wanted
    SYNCING = "syncing"  # weights are on their way: it holds neither the old nor the new ones
    READY = "ready"
    GONE = "gone"


_NEXT = {
    EngineState.STARTING: {EngineState.STALE, EngineState.GONE},
    EngineState.STALE: {EngineState.SYNCING, EngineState.GONE},
    EngineState.SYNCING: {EngineState.READY, EngineState.STALE, EngineState.GONE},
    EngineState.READY: {EngineState.STALE, EngineState.GONE},
    EngineState.GONE: set(),
}


@dataclass
class Engine:
    """``version``: the committed step of its weights, while it has a complete set. ``sampling``: of the sequences that it has."""

    name: str
    state: EngineState = EngineState.STARTING
    version: int | None = None
    has: dict[str, Pending] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)

    def becomes(self, state: EngineState) -> None:
        if state not in _NEXT[self.state]:
            raise InvariantViolated(f"rollout engine {self.name} cannot become {state}: it is {self.state}")
        self.state = state


@dataclass
class Waiting:
    sequence: Pending
    group: str         # of the samples of one prompt: they go to one engine, which prefills the prompt once
    sampling: Sampling
    min_version: int   # the weights must be at least those of this committed step
    deaths: int = 0    # engines that ended by themselves while they had it


class Requests:
    """``places``: sequences that an engine has at a time. ``poison_after``: engines that a sequence may have seen die."""

    def __init__(self, places: int, poison_after: int):
        self._places, self._poison_after = places, poison_after
        self.engines: dict[str, Engine] = {}
        self.wanted_version = 0
        self._queue: deque[Waiting] = deque()
        self._open: dict[str, Waiting] = {}  # every sequence that is not over
        self.complete: dict[str, Response] = {}
        self.dropped: dict[str, str] = {}
        self.requeued = 0  # sequences that engines lost

    # -- sequences -----------------------------------------------------------------------------------------------------------

    def submit(self, sequences: Iterable[tuple[str, Pending]], sampling: Sampling, min_version: int) -> None:
        """(group, sequence) pairs, those of a group one after the other. InvariantViolated if a sequence is known already."""
        for group, sequence in sequences:
            sample = sequence.sample_id
            if self.knows(sample):
                raise InvariantViolated(f"sample {sample} was given to the rollout pool twice")
            if sequence.made.finished or len(sequence.made.tokens) >= sampling.max_response_tokens:  # before a run was resumed
                self.complete[sample] = sequence.made
                continue
            waiting = Waiting(sequence, group, sampling, min_version)
            self._open[sample] = waiting
            self._queue.append(waiting)

    def take(self, name: str) -> list[Pending]:
        """What this engine gets now: whole groups while it has places. Nothing unless it is ready."""
        engine = self.engines[name]
        if engine.state is not EngineState.READY:
            return []
        assert engine.version is not None
        taken: list[Pending] = []
        skipped: deque[Waiting] = deque()
        while self._queue and self._has_room(engine):
            first = self._queue[0]
            if first.min_version > engine.version or (engine.has and first.sampling != engine.sampling):
                break  # those behind it came later
            if self._alone(first) and engine.has:
                skipped.append(self._queue.popleft())
                continue
            engine.sampling = first.sampling
            while True:
                waiting = self._queue.popleft()
                engine.has[waiting.sequence.sample_id] = waiting.sequence
                taken.append(waiting.sequence)
                following = self._queue[0] if self._queue else None
                if self._alone(waiting) or following is None or following.group != first.group or self._alone(following):
                    break
        self._queue.extendleft(reversed(skipped))
        return taken

    def gained(self, name: str, pieces: Mapping[str, tuple[Response, bool]]) -> None:
        """What an engine made: more of each sequence, and whether it is complete."""
        has = self.engines[name].has
        for sample, (piece, complete) in pieces.items():
            sequence = has.get(sample)
            if sequence is None:
                continue
            sequence.made.extend(piece)
            if complete:
                del has[sample], self._open[sample]
                self.complete[sample] = sequence.made

    def collect(self, samples: Iterable[str]) -> dict[str, Response]:
        """The complete ones among these, which are then forgotten."""
        return {sample: self.complete.pop(sample) for sample in list(samples) if sample in self.complete}

    def so_far(self, samples: Iterable[str]) -> dict[str, Response]:
        """What there is of those that have something, complete or not."""
        found = {sample: self.complete.get(sample) or (self._open[sample].sequence.made if sample in self._open else None) for sample in samples}
        return {sample: response for sample, response in found.items() if response is not None and response.tokens}

    def cancel(self, samples: Iterable[str]) -> dict[str, list[str]]:
        """Forget sequences, complete or not. Returns engine -> those that it has."""
        wanted = set(samples)
        running = {name: [s for s in engine.has if s in wanted] for name, engine in self.engines.items()}
        for engine in self.engines.values():
            for sample in wanted & engine.has.keys():
                del engine.has[sample]
        self._queue = deque(w for w in self._queue if w.sequence.sample_id not in wanted)
        for sample in wanted:
            self._open.pop(sample, None)
            self.complete.pop(sample, None)
            self.dropped.pop(sample, None)
        return {name: samples for name, samples in running.items() if samples}

    def move(self, slow: str) -> list[str]:
        """An engine that is slow loses what it has to whoever is free: it goes back to the front of the queue. Returns the samples, of which
        the engine must be told that they are not its own any more."""
        engine = self.engines[slow]
        moved, engine.has = list(engine.has), {}
        self._queue.extendleft(self._open[sample] for sample in reversed(moved))
        return moved

    @property
    def idle(self) -> list[str]:
        """Ready, with nothing to do, and nothing waits for them."""
        return [n for n, e in self.engines.items() if e.state is EngineState.READY and not e.has] if not self._queue else []

    def void(self) -> dict[str, list[str]]:
        """The run went back to an older step: everything is forgotten, and no engine's weights are current, whatever their number. Returns
        engine -> the samples that it is at, of which it must be told that they are not its own any more."""
        busy = self.cancel([*self._open, *self.complete, *self.dropped])
        for engine in self.engines.values():
            if engine.state is EngineState.READY:
                engine.becomes(EngineState.STALE)
            engine.version = None
        return busy

    def knows(self, sample: str) -> bool:
        return sample in self._open or sample in self.complete or sample in self.dropped

    def missing(self, samples: Iterable[str]) -> set[str]:
        """Those of ``samples`` that are neither complete nor dropped."""
        return {sample for sample in samples if sample in self._open}

    # -- engines -------------------------------------------------------------------------------------------------------------

    def starting(self, name: str) -> None:
        if name in self.engines and self.engines[name].state is not EngineState.GONE:
            raise InvariantViolated(f"rollout engine {name} was started twice")
        self.engines[name] = Engine(name)

    def started(self, name: str) -> None:
        self.engines[name].becomes(EngineState.STALE)

    def want(self, version: int) -> None:
        """Weights of ``version`` are wanted from now on: engines with older ones become stale, and keep what they are at."""
        self.wanted_version = version
        for engine in self.engines.values():
            if engine.state is EngineState.READY and engine.version != version:
                engine.becomes(EngineState.STALE)

    @property
    def stale(self) -> list[str]:
        return [name for name, engine in self.engines.items() if engine.state is EngineState.STALE]

    def syncing(self, name: str) -> None:
        engine = self.engines[name]
        engine.becomes(EngineState.SYNCING)
        engine.version = None

    def synced(self, name: str, version: int | None) -> None:
        """A transfer of weights ended: the engine has those of ``version``, or (None) no complete set."""
        engine = self.engines[name]
        engine.becomes(EngineState.STALE if version is None else EngineState.READY)
        engine.version = version
        if version is not None and version != self.wanted_version:
            engine.becomes(EngineState.STALE)

    def asleep(self, name: str) -> None:
        """An engine with nothing to do gives its weights up."""
        engine = self.engines[name]
        if engine.has:
            raise InvariantViolated(f"rollout engine {name} sleeps with {len(engine.has)} sequences")
        if engine.state is not EngineState.STALE:
            engine.becomes(EngineState.STALE)
        engine.version = None

    def gone(self, name: str, at_fault: bool) -> list[str]:
        """The engine's process ended. Returns the samples that are requeued, or dropped now.

        ``at_fault``: it may have ended of what it was generating (not so if it was stopped, or struck by fault injection).
        """
        engine = self.engines[name]
        if engine.state is EngineState.GONE:
            return []
        engine.becomes(EngineState.GONE)
        lost, engine.has, engine.version = list(engine.has), {}, None
        back: list[Waiting] = []
        for sample in lost:
            waiting = self._open[sample]
            alone = self._alone(waiting)
            waiting.deaths += at_fault
            if at_fault and alone:
                del self._open[sample]
                self.dropped[sample] = f"{waiting.deaths} rollout engines died while they generated it, the last one with nothing else"
            else:
                back.append(waiting)
        self.requeued += len(back)
        self._queue.extendleft(reversed(back))
        return lost

    @property
    def usable(self) -> list[str]:
        return [name for name, engine in self.engines.items() if engine.state is not EngineState.GONE]

    # -- parts ---------------------------------------------------------------------------------------------------------------

    def _alone(self, waiting: Waiting) -> bool:
        return waiting.deaths >= self._poison_after

    def _has_room(self, engine: Engine) -> bool:
        return len(engine.has) < self._places and not any(self._alone(self._open[sample]) for sample in engine.has)
