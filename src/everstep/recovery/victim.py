"""A worker's obedience to orders of fault injection: it harms itself, in its real process, at the named point.

Orders come over the control channel (:mod:`everstep.recovery.faults`). The event is written and the injector told just before the
act, because after it nobody could. Without orders nothing here runs but one look into an empty dictionary per phase.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from everstep.config.schema import Fault
from everstep.recovery.faults import THREAD
from everstep.telemetry.events import EventLog

EXIT_STATUS = 13
_ROOM_BYTES = 256 << 20  # what `oom` leaves above the address space in use, and then takes


class InjectedError(Exception):
    """Raised by the fault kind `error`, as user code might raise."""


@dataclass(frozen=True)
class Order:
    number: int
    fault: Fault
    replica: int  # where the victim is; -1, -1: an idle spare
    rank: int
    now: bool


class Victim:
    """``tell(number, word)`` reports to the injector (``armed``, ``fired``); ``where()``: this worker's phase."""

    def __init__(self, worker: str, events: EventLog, tell: Callable[[int, str], None], where: Callable[[], str]):
        self._worker, self._events, self._tell, self._where = worker, events, tell, where
        self._orders: dict[int, Order] = {}

    def obey(self, message: Mapping[str, Any]) -> None:
        """An order arrived (on the control thread)."""
        order = Order(message["number"], Fault(**message["fault"]), message["replica"], message["rank"], message["now"])
        if order.now:
            self._act(order)
        else:
            self._orders[order.number] = order
            self._tell(order.number, "armed")

    def enter(self, step: int, phase: str) -> None:
        """The worker enters a phase (on its main thread). May not return."""
        for order in list(self._orders.values()):
            fault = order.fault
            if fault.kind != "nan" and fault.phase == phase and (step == fault.step or (phase == "heal" and step >= fault.step)):
                del self._orders[order.number]
                if fault.hold:
                    while True:  # the signal comes from outside
                        time.sleep(3600.0)
                self._act(order)

    def spoil(self, step: int, gradients: Sequence[torch.Tensor]) -> None:
        """The contribution of a step is complete: one not-a-number in it is what `nan` does."""
        for order in list(self._orders.values()):
            if order.fault.kind == "nan" and order.fault.step == step:
                del self._orders[order.number]
                self._announce(order, "one element of the gradient contribution set to NaN")
                gradients[0].view(-1)[0] = float("nan")
                return  # another order for this step spoils the next attempt

    def _act(self, order: Order) -> None:
        kind = order.fault.kind
        if kind in THREAD:
            threading.Thread(target=self._act_on_thread, args=(order,), name=f"fault-{kind}", daemon=True).start()
        elif kind == "hang":
            self._announce(order, "the main thread sleeps for ever; the others go on")
            while True:
                time.sleep(3600.0)
        elif kind == "oom":
            limit = _address_space() + _ROOM_BYTES
            self._announce(order, f"RLIMIT_AS set to {limit} bytes, and memory taken on the main thread until that refuses")
            exhaust(limit)
        else:
            assert kind == "error", kind
            self._announce(order, "InjectedError raised on the main thread")
            raise InjectedError(f"injected fault: an exception in user code in {order.fault.phase} of step {order.fault.step}")

    def _act_on_thread(self, order: Order) -> None:
        time.sleep(0.0 if order.now else order.fault.delay_s)  # for an order to act now, the injector has waited
        match order.fault.kind:
            case "exit":
                self._announce(order, f"os._exit({EXIT_STATUS}) on a thread")
                os._exit(EXIT_STATUS)
            case "segv":
                self._announce(order, "read from address 0")
                ctypes.string_at(0)
            case "gil":
                self._announce(order, "pause() called with the interpreter lock held")
                ctypes.PyDLL(None).pause()

    def _announce(self, order: Order, done: str) -> None:
        fault = order.fault
        self._events.emit("fault", step=fault.step, replica=order.replica, rank=order.rank, kind=fault.kind, phase=fault.phase,
                          worker=self._worker, found=self._where(), done=done)
        self._tell(order.number, "fired")


def exhaust(limit_bytes: int) -> NoReturn:
    """Take memory until ``limit_bytes`` of address space are used up: MemoryError, as under a batch system's limit.

    What was taken is held as long as the exception is. Not the kernel's out-of-memory killer: what that does is a SIGKILL, and the
    kind `kill` is the same.
    """
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard), hard))
    taken: list[bytearray] = []
    while True:
        taken.append(bytearray(16 << 20))


def _address_space() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
