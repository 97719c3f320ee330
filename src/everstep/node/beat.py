"""What keeps a rank's page alive: ticks of a thread of Python, and the answers of the device.

Ticks stop when the process is stopped, gets no CPU, or has its interpreter lock held. They say nothing of the main thread: that is what
``where`` of the page is for.

The device is asked two things every :data:`ASK_S` seconds. An event on a *side stream*, on which nothing else runs: a device that does not
answer this one is gone, or hangs as a whole. And an event *behind the rank's own work*, on the stream that it computes on: not answered means
that a kernel there does not end (one that spins in a collective does not either; the page says whether the rank is in one). Both are only ever
looked at, never waited for. Without a device there are no such questions.

While a thread captures a CUDA graph in the strictest mode, as vLLM does, a look at an event by any other thread is an error for both, unless that
one has said that it is apart: the thread that asks does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from everstep.node import page
from everstep.node.collectives import note_collectives
from everstep.node.page import Page

TICK_S = 0.25
ASK_S = 1.0
_LOOK_S = 0.1
_CAPTURE_OF_THIS_THREAD = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Answer(Protocol):
    def query(self) -> bool:
        """Whether the device has come so far."""


class Asked(Protocol):
    """A device, as little of it as this needs."""

    def aside(self) -> Answer:
        """An event on a stream that has nothing else to do."""

    def behind(self) -> Answer:
        """An event behind all work that the rank has given the device so far."""


class Cuda:
    """:class:`Asked` of a CUDA device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def aside(self) -> Answer:
        return self._record(self._side)

    def behind(self) -> Answer:
        return self._record(torch.cuda.default_stream(self._device))

    def _record(self, stream: torch.cuda.Stream) -> Answer:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)  # type: ignore[no-untyped-call]
        return event


class Heart:
    """Asks again once a question is answered, and writes both times to the page."""

    def __init__(self, into: Page, device: Asked):
        self._page, self._device = into, device
        self._asked = self._answered = self._queued = self._caught_up = 0.0
        self._open: dict[str, Answer] = {}

    def beat(self) -> None:
        """One look. The page has the question before the device does: the driver itself may not return."""
        now = time.monotonic()
        if "aside" in self._open and self._open["aside"].query():
            del self._open["aside"]
            self._answered = time.monotonic()
        if "behind" in self._open and self._open["behind"].query():
            del self._open["behind"]
            self._caught_up = time.monotonic()
        if "aside" not in self._open and now - self._asked >= ASK_S:
            self._asked = now
            self._write()
            self._open["aside"] = self._device.aside()
        if "behind" not in self._open and now - self._queued >= ASK_S:
            self._queued = now
            self._write()
            self._open["behind"] = self._device.behind()
        self._write()

    def _write(self) -> None:
        self._page.device(self._asked, self._answered, self._queued, self._caught_up)


def start(worker: str, device: torch.device) -> None:
    """This process's page is open, and kept alive, from now on."""
    mine = page.open_mine(worker, name_of(device))
    note_collectives()
    mine.tick()
    atexit.register(mine.ends)  # what follows stops all other threads, and may take its time
    _for_ever("page-tick", mine.tick, TICK_S)
    if device.type == "cuda":
        _for_ever("page-device", Heart(mine, Cuda(device)).beat, _LOOK_S, first=beside_captures)


def name_of(device: torch.device) -> str:
    """How NVML knows this device, whatever number it has here: ``GPU-UUID``; "cpu" for none."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else device.type


def beside_captures() -> None:
    """From now on what this thread asks of the device neither breaks nor is refused for a CUDA graph that another thread captures."""
    mode = ctypes.c_int(_CAPTURE_OF_THIS_THREAD)
    with contextlib.suppress(OSError, AttributeError):  # no NVIDIA driver: there is nothing to be said
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _for_ever(name: str, act: Callable[[], None], every_s: float, first: Callable[[], None] = lambda: None) -> None:
    def loop() -> None:
        first()
        while True:
            act()
            time.sleep(every_s)

    threading.Thread(target=loop, name=name, daemon=True).start()
