"""Fault injection: what can go wrong where, and the injector that makes it so in a running group.

The injector sits beside the coordinator and knows from the ranks' ordinary progress messages where each of them is. Three ways:

- **from outside** (``kill``, ``stop``): a real signal to the victim's process once it reports the phase; nothing in it takes part.
- **on its connection** (``partition``): the victim is cut off the network, where its host can do that (network namespaces), else from
  the coordinator, which it then reaches through a proxy that stops forwarding (:mod:`everstep.recovery.proxy`).
- **inside** (the others): the order goes over the control channel before the step begins, is acknowledged, and is carried out by
  the victim itself at its entry into the phase (:mod:`everstep.recovery.victim`).

Every ``fault`` event says what was done and where the victim was then. What never happened is listed as ``unfired``.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from everstep.config.schema import Fault
from everstep.telemetry.events import ENGINES, EventLog

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
OUTSIDE = frozenset({"kill", "stop", "partition"})
THREAD = frozenset({"exit", "segv", "gil"})          # inside the victim, on a thread of its own
AT_POINT = frozenset({"nan", "hang", "oom", "error"})  # inside the victim, on its main thread
DEADLY = (OUTSIDE | THREAD | AT_POINT) - {"nan", "error"}  # cost the victim's process
COMPANY_S = 5.0      # that a held victim waits for a survivor to enter its phase, before the signal is sent anyway
ACKNOWLEDGE_S = 5.0  # for a victim to say that it holds its order, before the step begins without it

_STEP = frozenset({"compute", "exchange", "salvage", "reduce", "vote", "apply", "heal"})
_CALLS = frozenset({"save", "rollout", "send", "logprobs", "values"})
_LEAD = frozenset({"reward", "advantages"})  # stages that compute in the lead: the victim is in none of its own

#: Stages of an RL iteration; a fault in one names the iteration's first step.
STAGES = frozenset({"rollout", "logprobs", "values"}) | _LEAD
#: Phases of rollout engines.
ENGINE_PHASES = frozenset({"generate", "sync"})

#: A death there leaves slots that nobody holds, or may: they are salvaged.
BEFORE_THE_VOTE_IS_COUNTED = frozenset({"compute", "exchange", "reduce", "vote"})
#: What can find its victim waiting at the phase's entry, and the phases that no victim enters by itself.
HELD_KINDS = frozenset({"kill", "stop", "partition"})
UNHELD_PHASES = frozenset({"spare", "commit", "heal"}) | ENGINE_PHASES | _LEAD

_OF_OTHERS = frozenset({"spare", "commit"}) | _LEAD  # no rank reports that it enters these

#: Where each kind makes sense.
PHASES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("kill", "stop", "exit", "segv", "gil"), _STEP | _CALLS | _LEAD | ENGINE_PHASES | {"commit", "spare"}),
    "partition": _STEP | _CALLS | _LEAD | {"commit", "spare"},
    **dict.fromkeys(("hang", "oom"), _STEP | _CALLS | ENGINE_PHASES),  # an idle spare's main thread waits by nature
    "nan": frozenset({"compute"}),              # the one phase that makes a gradient
    "error": frozenset({"compute", "rollout"}),  # where user code runs: losses, rewards' models, sampling
}


def place_of(fault: Fault) -> tuple[int, int]:
    """(replica, rank) of the victim, as :meth:`Target.place` gives them."""
    if fault.phase == "spare":
        return -1, -1
    return (ENGINES if fault.phase in ENGINE_PHASES else fault.replica), fault.rank


def describe(fault: Fault) -> str:
    """One line: what happens to whom, when."""
    victim = f"rank {fault.replica}/{fault.rank}"
    if fault.phase == "spare":
        victim = f"spare {fault.rank}"
    elif fault.phase in ENGINE_PHASES:
        victim = f"rollout engine {fault.rank}"
    where = "idle" if fault.phase == "spare" else f"in {fault.phase}"
    delay = f" after {fault.delay_s:g} s" if fault.delay_s else ""
    return f"step {fault.step}: {fault.kind} {victim}, {where}{delay}"


class Target(Protocol):
    """What the injector needs of the launcher."""

    def place(self, worker: str) -> tuple[int, int]:
        """(replica, rank) of a worker; (-1, -1) for a spare, (ENGINES, number) for a rollout engine."""

    def workers_at(self, replica: int, rank: int) -> str | None:
        """The worker that holds a place now, if it lives."""

    def idle_spares(self) -> list[str]: ...

    def lives(self, worker: str) -> bool: ...

    def where(self, worker: str) -> str:
        """The phase that a worker reported last."""

    def process(self, worker: str) -> str:
        """A word on which process the worker is."""

    def signal(self, worker: str, number: int) -> None:
        """Send a signal to the worker's process on its node."""

    def order(self, worker: str, message: Mapping[str, object]) -> bool:
        """Send a message over the worker's control channel; False if it has none."""

    def cut(self, worker: str) -> str:
        """Cut the worker off, from everybody or from the coordinator; says how. "" if there is no way to."""


@dataclass
class _Planned:
    number: int
    fault: Fault
    armed: str = ""     # the worker that acknowledged the order (or, from outside, at whom the fault is under way)
    holds: str = ""     # the worker that will wait at the phase's entry for the signal
    fired: bool = False


class FaultInjector:
    def __init__(self, faults: Sequence[Fault], target: Target, events: EventLog):
        self._plan = [_Planned(number, fault) for number, fault in enumerate(faults)]
        self._target, self._events = target, events
        self._changed = threading.Condition()
        self._ordered: set[tuple[int, str]] = set()
        self._struck: set[str] = set()
        self._phases: dict[str, tuple[int, str]] = {}  # what each worker entered last

    @property
    def unfired(self) -> list[str]:
        """What was planned and never happened."""
        with self._changed:
            return [describe(p.fault) for p in self._plan if not p.fired]

    # -- called by the controller -----------------------------------------------------------------------------------------

    def prepare(self, step: int) -> None:
        """Before anything of step ``step`` is sent: order what victims do themselves in it, and wait until they hold the orders."""
        waiting = []
        for planned in self._open():
            fault = planned.fault
            if not self._is_ordered(fault) or fault.phase in _OF_OTHERS or not self._is_due(fault, step):
                continue
            worker = self._target.workers_at(*place_of(fault))
            if worker and planned.armed != worker and self._order(planned, worker):
                waiting.append((planned, worker))
        with self._changed:
            self._changed.wait_for(lambda: all(w in (p.armed, p.holds) or p.fired for p, w in waiting), ACKNOWLEDGE_S)

    def begins(self, step: int) -> None:
        """Step ``step`` begins: idle spares are struck now."""
        for planned in self._open():
            if planned.fault.phase == "spare" and planned.fault.step == step:
                spares = self._target.idle_spares()
                if planned.fault.rank < len(spares):
                    self._later(planned, spares[planned.fault.rank])

    # -- called by the coordinator's server --------------------------------------------------------------------------------

    def on_phase(self, worker: str, step: int, phase: str) -> None:
        """A worker entered a phase."""
        with self._changed:
            self._phases[worker] = step, phase
        place = self._target.place(worker)
        for planned in self._open():
            fault = planned.fault
            if fault.phase in _OF_OTHERS:
                continue
            mine = place_of(fault) == place
            if fault.kind not in OUTSIDE:
                if mine and self._is_due(fault, step) and planned.armed != worker:
                    self._order(planned, worker)  # it took the place after the step had begun
            elif fault.phase == phase and (fault.step == step or (phase == "heal" and step >= fault.step)):
                if mine and (not fault.hold or self._has_company(fault, step)):
                    self._later(planned, worker)
                elif mine:
                    self._timer(COMPANY_S, self._later, planned, worker)
                elif fault.hold and place[0] >= 0 and place[0] != fault.replica:
                    victim = self._target.workers_at(fault.replica, fault.rank)
                    if victim and self._phases.get(victim) == (step, phase):  # it waits, and now it is not alone
                        self._later(planned, victim)

    def on_commit(self, step: int) -> None:
        """Step ``step`` has been recorded."""
        self._at("commit", step)

    def on_stage(self, stage: str, step: int) -> None:
        """The lead is in a stage of its own of the iteration whose first step is ``step``."""
        if stage in _LEAD:
            self._at(stage, step)

    def _at(self, phase: str, step: int) -> None:
        for planned in self._open():
            if planned.fault.phase == phase and planned.fault.step == step:
                worker = self._target.workers_at(planned.fault.replica, planned.fault.rank)
                if worker:
                    self._later(planned, worker)

    def on_word(self, worker: str, number: int, word: str) -> None:
        """The victim says of its order: ``armed``, or ``fired`` (just before it does it)."""
        with self._changed:
            planned = self._plan[number]
            if word == "armed" and planned.fault.hold:
                planned.holds = worker
            elif word == "armed":
                planned.armed = worker
            else:
                planned.fired = True
                self._struck.add(worker)
            self._changed.notify_all()

    def struck(self, worker: str) -> bool:
        """Whether a fault has been, or is about to be, done to this worker."""
        return worker in self._struck

    # -- parts -------------------------------------------------------------------------------------------------------------

    def _has_company(self, fault: Fault, step: int) -> bool:
        """Whether a rank of another replica is in the phase in which the victim waits."""
        with self._changed:
            there = [worker for worker, where in self._phases.items() if where == (step, fault.phase)]
        return any(self._target.place(worker)[0] not in (-1, fault.replica) and self._target.lives(worker) for worker in there)

    def _open(self) -> list[_Planned]:
        with self._changed:
            return [p for p in self._plan if not p.fired]

    @staticmethod
    def _is_ordered(fault: Fault) -> bool:
        """Whether the victim takes part: in doing it, or in waiting for it."""
        return fault.kind not in OUTSIDE or fault.hold

    @staticmethod
    def _is_due(fault: Fault, step: int) -> bool:
        if fault.phase == "heal":
            return step >= fault.step
        return fault.step in (step, step - 1) if fault.phase == "save" else fault.step == step

    def _order(self, planned: _Planned, worker: str, now: bool = False) -> bool:
        """Once to each worker: a second one with the same order would strike twice."""
        with self._changed:
            if (planned.number, worker) in self._ordered:
                return False
            self._ordered.add((planned.number, worker))
        place = self._target.place(worker)
        return self._target.order(worker, {
            "type": "fault", "number": planned.number, "fault": planned.fault.model_dump(), "replica": place[0], "rank": place[1],
            "now": now,
        })

    def _later(self, planned: _Planned, worker: str) -> None:
        with self._changed:
            if planned.armed or planned.fired:
                return
            planned.armed = worker
        self._timer(planned.fault.delay_s, self._strike, planned, worker)

    @staticmethod
    def _timer(seconds: float, act: Callable[[_Planned, str], None], planned: _Planned, worker: str) -> None:
        timer = threading.Timer(seconds, act, (planned, worker))
        timer.daemon = True
        timer.start()

    def _strike(self, planned: _Planned, worker: str) -> None:
        try:
            self._do(planned, worker)
        except Exception as error:  # the end of a thread: the run goes on, the fault is told as one that never fired
            self._events.emit("error", step=planned.fault.step, error=type(error).__name__,
                              message=f"fault injection, {describe(planned.fault)}: {error}")

    def _do(self, planned: _Planned, worker: str) -> None:
        fault = planned.fault
        replica, rank = self._target.place(worker)
        if (replica, rank) != place_of(fault) or not self._target.lives(worker):  # it died, or a spare took a place, within delay_s
            with self._changed:
                planned.armed = ""
            return
        if fault.kind not in OUTSIDE:
            self._order(planned, worker, now=True)  # it writes its event itself
            return
        emit = lambda done: self._events.emit(
            "fault", step=fault.step, replica=replica, rank=rank, kind=fault.kind, phase=fault.phase, worker=worker,
            found=self._target.where(worker), done=done,
        )
        if fault.kind == "partition":
            if not (done := self._target.cut(worker)):
                return  # a spare that took the victim's place has a direct connection
            self._struck.add(worker)
            emit(done)
        else:
            self._struck.add(worker)
            emit(f"{SIGNALS[fault.kind].name} to process {self._target.process(worker)}")
            self._target.signal(worker, SIGNALS[fault.kind])
        with self._changed:
            planned.fired = True
