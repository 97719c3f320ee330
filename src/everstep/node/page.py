"""A rank's progress page: where it is, in a few hundred bytes of shared memory that others can read whatever state it is in.

A page is a memfd, memory with a name but no file: the agent of the node finds it among the descriptors of the process and maps it too. So it
can be read when the process is stopped, when its interpreter lock is stuck, and after its death; and it is gone, by the kernel's hand, once
the process and the agent are. There is nothing to clean up.

Four parts, each written by a thread of its own and without a lock:

    where       step, phase, micro-batch, and since when           the main thread
    collective  the last one: operation, group, number, done?      whoever runs it
    tick        when a thread of Python ran last                   a thread for nothing else (:mod:`everstep.node.beat`)
    device      what the device answered last                      another one: it may be stuck in the driver

Each part has two places that are written in turn (as the copies of :mod:`everstep.checkpoint.memory`): a number that grows, the fields, a
checksum. A reader takes the place with the higher number whose checksum holds; a write that was torn, or cut by a death, therefore hides
nothing but itself. Times are seconds of the machine's monotonic clock, the same for all its processes.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
NAME = "everstep-page"
BYTES = 4096
_MAGIC = b"EVERPAGE1"
_HEAD = struct.Struct("<9s 31s 96s q")              # magic, worker, device, pid
_WHERE = struct.Struct("<Q i i q 24s i i d")        # number, replica, rank, step, phase, micro-batch, of how many, since
_COLLECTIVE = struct.Struct("<Q Q 24s 48s d d")     # number, how many so far, operation, group, started, done
_TICK = struct.Struct("<Q d")                       # number, time
_DEVICE = struct.Struct("<Q d d d d")               # number, asked, answered, queued, caught up
_SUM = struct.Struct("<I")
_PLACE_BYTES = 256
_PARTS = {"where": (512, _WHERE), "collective": (1024, _COLLECTIVE), "tick": (1536, _TICK), "device": (2048, _DEVICE)}
HANDED_OVER = -1.0
ENDS = "ends"  # the phase of a process that ends in order


@dataclass(frozen=True)
class Where:
    replica: int = -1
    rank: int = -1
    step: int = 0
    phase: str = ""
    micro_batch: int = -1      # the one that is being computed, from 0; -1: none
    micro_batches: int = 0
    since: float = 0.0


@dataclass(frozen=True)
class Collective:
    """``count``: which one of this process. ``group``: a link's name, or how the ranks of the replica are joined. ``done``: 0: not yet;
    HANDED_OVER: torch or the device runs it, and nobody has said what became of it."""

    count: int = 0
    operation: str = ""
    group: str = ""
    started: float = 0.0
    done: float = 0.0

    @property
    def open(self) -> bool:
        return self.count > 0 and self.done == 0.0


@dataclass(frozen=True)
class Device:
    """``asked``, ``answered``: on a stream of its own: whether the device answers at all. ``queued``, ``caught_up``: behind the work that the
    rank had given it by then. All 0 without a device; what was asked last and not answered has the later time."""

    asked: float = 0.0
    answered: float = 0.0
    queued: float = 0.0
    caught_up: float = 0.0


@dataclass(frozen=True)
class Reading:
    worker: str
    pid: int
    name: str                  # of its device: "cpu", or its UUID
    where: Where = field(default_factory=Where)
    collective: Collective = field(default_factory=Collective)
    tick: float = 0.0
    device: Device = field(default_factory=Device)

    def as_json(self, now: float) -> dict[str, Any]:
        """As reports have it: times as ages, in seconds."""
        age = lambda at: round(now - at, 3) if at > 0 else None
        where, last, device = asdict(self.where), self.collective, self.device
        where["since_s"] = age(where.pop("since"))
        state = "open" if last.open else "handed over" if last.done == HANDED_OVER else "done"
        return {
            "worker": self.worker, "pid": self.pid, "device": self.name, **where, "tick_s": age(self.tick),
            "collective": {"count": last.count, "operation": last.operation, "group": last.group, "state": state,
                           "started_s": age(last.started), "done_s": age(last.done)} if last.count else None,
            "device_heartbeat": {name + "_s": age(at) for name, at in asdict(device).items()} if device.asked else None,
        }

    def says(self, now: float) -> str:
        """One line for people."""
        at, last = self.where, self.collective
        text = f"in {at.phase or 'no phase'} of step {at.step} for {now - at.since:.1f} s" if at.since else "in no phase yet"
        if at.micro_batch >= 0:
            text += f", micro-batch {at.micro_batch + 1} of {at.micro_batches}"
        if last.count:
            text += f"; last collective {last.operation} #{last.count} of {last.group}, " + (
                f"begun {now - last.started:.1f} s ago and not done" if last.open else f"handed over {now - last.started:.1f} s ago"
                if last.done == HANDED_OVER else f"done {now - last.done:.1f} s ago")
        return text


class Page:
    """This process's page. Writing takes about a microsecond, never waits, and never raises."""

    def __init__(self, worker: str, device: str = "cpu"):
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)  # kept open: it is how the agent finds it
        os.ftruncate(fd, BYTES)
        self._fd, self._memory = fd, mmap.mmap(fd, BYTES)
        self._numbers = dict.fromkeys(_PARTS, 0)
        self._replica = self._rank = -1
        self._step, self._phase, self._of = 0, b"", 0
        self._collectives = 0
        self._memory[: _HEAD.size] = _HEAD.pack(_MAGIC, worker.encode()[:31], device.encode()[:96], os.getpid())

    def place(self, replica: int, rank: int) -> None:
        """From now on this process is that rank; (-1, -1): a spare."""
        self._replica, self._rank = replica, rank
        self.phase(self._step, self._phase.decode())

    def phase(self, step: int, phase: str) -> None:
        self._step, self._phase, self._of = step, phase.encode(), 0
        self._where(-1)

    def ends(self) -> None:
        """The process is about to end in order."""
        self.phase(self._step, ENDS)

    def micro_batch(self, index: int, count: int) -> None:
        """Micro-batch ``index`` of ``count`` (from 0) is begun."""
        self._of = count
        self._where(index)

    def begin(self, operation: str, group: str) -> tuple[int, str, str, float]:
        """A collective is begun; what is returned is for :meth:`done`."""
        self._collectives = count = self._collectives + 1
        begun = count, operation, group, time.monotonic()
        self._put("collective", count, operation.encode(), group.encode(), begun[3], 0.0)
        return begun

    def done(self, count: int, operation: str, group: str, started: float, handed_over: bool = False) -> None:
        if count == self._collectives:  # else another one is the last
            self._put("collective", count, operation.encode(), group.encode(), started, HANDED_OVER if handed_over else time.monotonic())

    def tick(self) -> None:
        self._put("tick", time.monotonic())

    def device(self, asked: float, answered: float, queued: float, caught_up: float) -> None:
        self._put("device", asked, answered, queued, caught_up)

    def close(self) -> None:
        """The page is no more, but for those that have mapped it."""
        self._memory.close()
        os.close(self._fd)

    def _where(self, micro_batch: int) -> None:
        self._put("where", self._replica, self._rank, self._step, self._phase, micro_batch, self._of, time.monotonic())

    def _put(self, part: str, *fields: Any) -> None:
        start, layout = _PARTS[part]
        self._numbers[part] = number = self._numbers[part] + 1
        body = layout.pack(number, *fields)
        start += (number & 1) * _PLACE_BYTES
        self._memory[start : start + len(body) + 4] = body + _SUM.pack(zlib.crc32(body))  # one copy, in which no other thread of ours runs


# -- the page of this process -------------------------------------------------------------------------------------------------------------

_mine: Page | None = None
_inside = threading.local()
_waiting = set[int]()  # threads that wait for other ranks


def open_mine(worker: str, device: str = "cpu") -> Page:
    """The page of this process from now on."""
    global _mine
    _mine = Page(worker, device)
    return _mine


def micro_batch(index: int, count: int) -> None:
    """Of this process's page, if it has one: a lead and a test of a part have none."""
    if _mine is not None:
        _mine.micro_batch(index, count)


def phase(step: int, name: str) -> None:
    if _mine is not None:
        _mine.phase(step, name)


def place(replica: int, rank: int) -> None:
    if _mine is not None:
        _mine.place(replica, rank)


class collective:
    """``with collective("sum", "a link"):`` one that this process takes part in: begun, and done if nothing is raised. What it is made of is not
    told apart. No generator: Megatron issues some hundred in a step."""

    __slots__ = ("_begun", "_group", "_handed_over", "_operation")

    def __init__(self, operation: str, group: str, handed_over: bool = False):
        self._operation, self._group, self._handed_over = operation, group, handed_over
        self._begun: tuple[int, str, str, float] | None = None

    def __enter__(self) -> None:
        if _mine is not None and not getattr(_inside, "one", False):
            _inside.one = True
            _waiting.add(threading.get_ident())
            self._begun = _mine.begin(self._operation, self._group)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._begun is not None:
            _inside.one = False
            _waiting.discard(threading.get_ident())
            if kind is None and _mine is not None:
                _mine.done(*self._begun, self._handed_over)


@contextlib.contextmanager
def for_others() -> Iterator[None]:
    """The calling thread waits for other ranks meanwhile, without a collective that the page would tell of."""
    me = threading.get_ident()
    already = me in _waiting
    _waiting.add(me)
    try:
        yield
    finally:
        if not already:
            _waiting.discard(me)


def waits(thread: int) -> bool:
    """Whether this thread (its ``ident``) is inside something that waits for other ranks. Nobody looks at its frames for that: walking those of
    a thread that runs is not safe in CPython 3.11."""
    return thread in _waiting


def leave_out() -> None:
    """Collectives of the calling thread are nothing that the rank's work waits for, and stay out of its page."""
    _inside.one = True


def noted(operation: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Of a method of something with a ``name``: it is a collective."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            group: Any = args[0]
            with collective(operation, group.name):
                return method(*args, **kwargs)

        return run

    return decorate


# -- from outside -------------------------------------------------------------------------------------------------------------------------


class View:
    """Another process's page, as the agent of its node has it. It stays readable when the process is gone."""

    def __init__(self, fd: int):
        self._memory = mmap.mmap(fd, BYTES, prot=mmap.PROT_READ)

    @staticmethod
    def of(pid: int) -> View | None:
        """None if the process is gone, is another user's, or has no page (yet)."""
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                    if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{NAME} "):
                        fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                        try:
                            if os.fstat(fd).st_size == BYTES and (view := View(fd)).read() is not None:
                                return view
                        finally:
                            os.close(fd)
        return None

    def read(self) -> Reading | None:
        """What it says now; None if its writer has not begun."""
        magic, worker, device, pid = _HEAD.unpack_from(self._memory)
        if magic != _MAGIC:
            return None
        text = lambda raw: raw.rstrip(b"\0").decode(errors="replace")
        where, collective, tick, answers = (self._newest(part) for part in _PARTS)
        return Reading(
            text(worker), pid, text(device),
            Where(where[0], where[1], where[2], text(where[3]), *where[4:]) if where else Where(),
            Collective(collective[0], text(collective[1]), text(collective[2]), *collective[3:]) if collective else Collective(),
            tick[0] if tick else 0.0,
            Device(*answers) if answers else Device(),
        )

    def close(self) -> None:
        self._memory.close()

    def _newest(self, part: str) -> tuple[Any, ...] | None:
        start, layout = _PARTS[part]
        found: tuple[Any, ...] | None = None
        for at in (start, start + _PLACE_BYTES):
            raw = self._memory[at : at + layout.size + _SUM.size]  # copied first: it may change
            body, (checksum,) = raw[:-4], _SUM.unpack(raw[-4:])
            fields = layout.unpack(body)
            if fields[0] and zlib.crc32(body) == checksum and (found is None or fields[0] > found[0]):
                found = fields
        return found[1:] if found else None


def cost_s(writes: int = 20_000) -> float:
    """Seconds of CPU that one write of a page takes here, in the middle of ``writes``."""
    page = Page("cost")
    begun = time.thread_time()
    for index in range(writes):
        page.micro_batch(index, writes)
    seconds = time.thread_time() - begun
    page.close()
    return seconds / writes
