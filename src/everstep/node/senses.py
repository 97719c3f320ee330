"""What a machine tells of itself, looked at again and again: what is new, what is over.

:mod:`everstep.telemetry.health` reads one moment. Here are the things that only two moments tell (lines that the kernel's log has got, counters
of the kernel's OOM killer and of network interfaces that have grown), and a memory of what was told already.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.telemetry.health import Sign, gpu_signs, host_signs, kernel_signs, load_nvml

_KEPT = 200            # signs of the past that an examination of a death still sees
_AGAIN_S = 60.0        # the same line of the kernel's log is told again after so long
_BYTES = 8192          # the kernel's longest record


class KernelLog:
    """The kernel's log from now on (/dev/kmsg). Each look returns what came since the last one, and waits for nothing."""

    def __init__(self, path: str = "/dev/kmsg"):
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self._fd = -1

    @property
    def readable(self) -> bool:
        return self._fd >= 0

    def new_lines(self) -> list[str]:
        lines: list[str] = []
        while self._fd >= 0:
            try:
                record = os.read(self._fd, _BYTES).decode(errors="replace")
            except OSError as error:
                if error.errno == errno.EPIPE:  # some were overwritten before we came to them
                    continue
                return lines  # EAGAIN: that is all
            lines.append(record.partition(";")[2].partition("\n")[0])
        return lines

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class OutOfMemory:
    """How many processes the OOM killer took from the memory cgroups of the watched processes."""

    def __init__(self, root: str = "/sys/fs/cgroup"):
        self._root = Path(root)
        self._counts: dict[Path, int] = {}

    def watch(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if controllers == "memory":     # version 1
                    self._add(self._root / "memory" / path.lstrip("/") / "memory.oom_control")
                elif not controllers:           # version 2
                    self._add(self._root / path.lstrip("/") / "memory.events")
                    self._add(self._root / "unified" / path.lstrip("/") / "memory.events")

    def look(self) -> list[Sign]:
        found = []
        for file, before in list(self._counts.items()):
            count = _oom_kills(file)
            if count > before:
                self._counts[file] = count
                found.append(Sign("host", "bad", f"out of memory: the kernel killed {count - before} of the processes of cgroup {file.parent}"))
        return found

    def _add(self, file: Path) -> None:
        if file.exists():
            self._counts.setdefault(file, _oom_kills(file))


def _oom_kills(file: Path) -> int:
    with contextlib.suppress(OSError, ValueError):  # the cgroup is gone
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class Links:
    """Network interfaces of this machine that have a link: one that loses it, or makes errors since the last look.

    Those are the ones with hardware, and the one behind the default route (in a container that has none). Bridges and ends of other
    containers come and go on a healthy machine."""

    _COUNTERS = ("rx_errors", "tx_errors", "rx_crc_errors", "tx_carrier_errors")

    def __init__(self, root: str = "/sys/class/net", routes: str = "/proc/net"):
        self._root, self._routes = Path(root), Path(routes)
        self._errors: dict[str, int] = {}
        self._had_carrier: set[str] = set()
        self.look()

    def look(self) -> list[Sign]:
        found = []
        try:
            names = sorted(os.listdir(self._root))
        except OSError:
            return []
        routed = self._default_routes()
        for name in names:
            folder = self._root / name
            if not (folder / "device").exists() and name not in routed | self._had_carrier:
                continue
            carrier = _number(folder / "carrier")  # of an interface that is switched off there is none to read
            if carrier:
                self._had_carrier.add(name)
            elif name in self._had_carrier:
                found.append(Sign("network", "bad", f"network link {name} is down", name))
            errors = sum(_number(folder / "statistics" / counter) for counter in self._COUNTERS)
            grown = errors - self._errors.get(name, errors)
            self._errors[name] = errors
            if grown > 0:
                found.append(Sign("network", "warning", f"network link {name}: {grown} errors since the last look", name))
        for name in sorted(self._had_carrier - set(names)):
            found.append(Sign("network", "bad", f"network link {name} is gone", name))
        return found

    def _default_routes(self) -> set[str]:
        """Interfaces to everywhere, of IPv4 and IPv6."""
        rows = [(file, line.split()) for file in ("route", "ipv6_route") for line in _lines(self._routes / file)]
        return {row[0] if file == "route" else row[-1] for file, row in rows if len(row) > 7
                and (row[1] == row[7] == "00000000" if file == "route" else row[0] == "0" * 32 and row[1] == "00")} - {"lo"}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True)
class Gpu:
    """How a device is called: by NVML, by its UUID, by its place on the bus (``BUS:DEVICE``, as the kernel's log has it behind the domain)."""

    index: str
    uuid: str
    bus: str

    def is_called(self, name: str) -> bool:
        return bool(name) and (name == self.index or (":" in name and _bus(name) == self.bus))


def _bus(name: str) -> str:
    """``00000000:3B:00.0``, ``0000:3b:00`` -> ``3b:00``."""
    return ":".join(name.lower().partition(".")[0].split(":")[-2:])


def gpus(nvml: Any) -> list[Gpu]:
    found = []
    nvml.nvmlInit()
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):  # one that is lost already has no name
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                found.append(Gpu(str(index), _text(nvml.nvmlDeviceGetUUID(handle)), _bus(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))))
    finally:
        nvml.nvmlShutdown()
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@dataclass(frozen=True)
class News:
    """What a look found. ``over``: told before, and not so any more. ``sick``: devices with a fault of their own that was not there when the
    first look was taken; with the sign of it."""

    new: list[Sign]
    over: list[Sign]
    sick: list[tuple[Gpu, Sign]]


class Senses:
    """All of it. ``nvml``: ``pynvml`` or what looks like it; None: this machine has none. ``folders``: on whose file systems there must be room."""

    def __init__(
        self, folders: Sequence[str] = (), nvml: Any = None, kernel: KernelLog | None = None, oom: OutOfMemory | None = None, links: Links | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._folders, self._nvml, self._clock = tuple(folders), nvml, clock
        self.kernel, self.oom, self._links = kernel or KernelLog(), oom or OutOfMemory(), links or Links()
        if nvml:
            nvml.nvmlInit()  # counted: with this one each look's own costs nothing
        self.gpus = gpus(nvml) if nvml else []
        self._standing: dict[tuple[str, str, str], Sign] = {}
        self._past: deque[tuple[float, Sign]] = deque(maxlen=_KEPT)
        self._said: dict[str, float] = {}
        self._first: set[tuple[str, str]] | None = None
        self._sick: set[Gpu] = set()

    @staticmethod
    def of_this_machine(folders: Sequence[str]) -> Senses:
        return Senses(folders, load_nvml())

    @property
    def sees(self) -> list[str]:
        """What can be read here."""
        return ["memory", "disks", "network"] + ["kernel log"] * self.kernel.readable + [f"NVML ({len(self.gpus)} GPUs)"] * bool(self._nvml)

    def look(self) -> News:
        now = self._clock()
        passing = [sign for sign in self._passing() if self._is_due(sign, now)]
        standing = {_key(sign): sign for sign in self._at_this_moment()}
        new = [sign for key, sign in standing.items() if key not in self._standing]
        over = [sign for key, sign in self._standing.items() if key not in standing]
        self._standing = standing
        self._past.extend((now, sign) for sign in passing)
        of_devices = [sign for sign in (*standing.values(), *passing) if sign.kind == "gpu" and sign.severity == "bad" and sign.device]
        if self._first is None:
            self._first = {(sign.device, sign.what) for sign in standing.values()}
        sick = []
        for sign in of_devices:
            gpu = next((gpu for gpu in self.gpus if gpu.is_called(sign.device)), None)
            if gpu is not None and gpu not in self._sick and (sign.device, sign.what) not in self._first:
                self._sick.add(gpu)
                sick.append((gpu, sign))
        return News(new + passing, over, sick)

    def recent(self, within_s: float) -> list[Sign]:
        """All that is so now, and all that passed since so many seconds."""
        since = self._clock() - within_s
        return [*self._standing.values(), *(sign for at, sign in list(self._past) if at >= since)]

    def close(self) -> None:
        self.kernel.close()
        if self._nvml:
            self._nvml.nvmlShutdown()

    def _passing(self) -> Iterable[Sign]:
        yield from kernel_signs(self.kernel.new_lines())
        yield from self.oom.look()

    def _at_this_moment(self) -> Iterable[Sign]:
        yield from host_signs(self._folders)
        yield from self._links.look()
        if self._nvml:
            yield from gpu_signs(self._nvml)

    def _is_due(self, sign: Sign, now: float) -> bool:
        name = f"{sign.device} {sign.what}"
        if now - self._said.get(name, -_AGAIN_S) < _AGAIN_S:
            return False
        self._said[name] = now
        return True


def _key(sign: Sign) -> tuple[str, str, str]:
    """Of what stands, so that it is told once: a worse number of something bad is news, another temperature is not."""
    return sign.kind, sign.device, sign.what if sign.severity == "bad" and sign.kind == "gpu" else re.sub(r"\d+", "#", sign.what)
