"""What may be wrong with a node, read from the kernel, from NVML and from the file systems; and which class of failure a death belongs to.

The classes are those of the Llama 3 report (arXiv 2407.21783, table 5), as used by whoever runs such clusters:

===============  =======================================================================================================
``gpu``          the device: uncorrectable memory errors, Xid errors of hardware, heat that throttles, a device that is gone
``host``         memory exhausted (the kernel's OOM killer), machine checks, disks that are full or fail
``network``      links of NVLink or of the network that are down or make errors, a node that fell silent
``dependency``   the file system, the Ray cluster, a driver
``software``     the process ended by itself: a crash in code, a hang while everything under it is well
``data``         gradients that are not finite, a sample that kills whoever computes it
``maintenance``  a person or a scheduler asked for it: SIGTERM, drain, replacement of a straggler
===============  =======================================================================================================

Pure but for :func:`look`, which reads this machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

FailureClass = Literal["gpu", "host", "network", "dependency", "software", "data", "maintenance"]
Severity = Literal["ok", "warning", "bad"]

HOT_C = 90            # degrees Celsius of a GPU, above which it throttles
DISK_FREE_BYTES = 1 << 30
MEMORY_FREE_SHARE = 0.03


@dataclass(frozen=True)
class Sign:
    """One thing seen. ``device``: GPU index or path, where it concerns one."""

    kind: FailureClass
    severity: Severity
    what: str
    device: str = ""


# -- the kernel's log ------------------------------------------------------------------------------------------------------------------

#: Xid numbers by what they tell of (NVIDIA, "Xid Errors"); application errors (13, 31, 43, 45, 68) are no fault of the device.
XID_HARDWARE = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 121, 136, 140, 143, 149, 151, 155, 156, 158})
XID_LINK = frozenset({74, 149, 155})
XID_APPLICATION = frozenset({13, 31, 43, 45, 68})

_PATTERNS: tuple[tuple[re.Pattern[str], FailureClass, Severity, str], ...] = (
    (re.compile(r"Out of memory: Killed process (\d+) \(([^)]*)\)"), "host", "bad", "the kernel killed process {0} ({1}): out of memory"),
    (re.compile(r"Memory cgroup out of memory: Killed process (\d+) \(([^)]*)\)"), "host", "bad", "process {0} ({1}) was killed: its cgroup is out of memory"),
    (re.compile(r"oom-kill:.*task=([^,]+),pid=(\d+)"), "host", "bad", "the kernel killed process {1} ({0}): out of memory"),
    (re.compile(r"mce: \[Hardware Error\]: (.*)"), "host", "bad", "machine check: {0}"),
    (re.compile(r"EDAC .*\bUE\b(.*)"), "host", "bad", "uncorrectable memory error:{0}"),
    (re.compile(r"EXT4-fs error(.*)|XFS .*(?:Corruption|I/O Error)(.*)"), "host", "bad", "file system error"),
    (re.compile(r"(?:blk_update_request: |Buffer )I/O error.* dev (\w+)"), "host", "bad", "disk {0}: I/O error"),
    (re.compile(r"nfs: server (\S+) not responding"), "dependency", "bad", "file server {0} does not answer"),
    (re.compile(r"(\w+): (?:NIC )?Link is Down"), "network", "bad", "network link {0} is down"),
    (re.compile(r"NETDEV WATCHDOG: (\w+)"), "network", "bad", "network device {0} hangs"),
    (re.compile(r"(\S+)\[(\d+)\]: segfault at (\S+)"), "software", "warning", "process {1} ({0}): segmentation fault at {2}"),
)
_INITIAL_PIDS = "pid:[4026531836]"  # PROC_PID_INIT_INO, the same in every Linux
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")


def host_numbers() -> bool:
    """Whether processes have the same numbers here as in the kernel's log: not in a container."""
    try:
        return os.readlink("/proc/self/ns/pid") == _INITIAL_PIDS
    except OSError:
        return True


def kernel_signs(lines: Iterable[str], ours: bool | None = None) -> list[Sign]:
    """What lines of the kernel's log tell. ``ours``: the log's process numbers are those that processes have here; None: find out. Else a
    sign names no process of ours, whose number may be another one's in the log."""
    found = []
    process = "process " if (host_numbers() if ours is None else ours) else "process number (of the host) "
    for line in lines:
        if match := _XID.search(line):
            number = int(match[2])
            if number in XID_APPLICATION:
                found.append(Sign("software", "warning", f"Xid {number} (an error of the application): {match[3][:120]}", match[1]))
            else:
                kind: FailureClass = "network" if number in XID_LINK else "gpu"
                found.append(Sign(kind, "bad" if number in XID_HARDWARE else "warning", f"Xid {number}: {match[3][:120]}", match[1]))
            continue
        for pattern, of, severity, text in _PATTERNS:
            if match := pattern.search(line):
                what = text.replace("process ", process).format(*(group or "" for group in match.groups()))
                found.append(Sign(of, severity, what))
                break
    return found


_STAMP = re.compile(r"(?:<\d+>)?\[\s*(\d+\.\d+)\]")


def kernel_log(after: float = 0.0, timeout_s: float = 5.0) -> list[str]:
    """The newest lines of this machine's kernel log whose stamps come after ``after`` (see :func:`newest_stamp`); none where that is not
    permitted."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except (OSError, subprocess.SubprocessError):
        return []
    newer, newest = True, []
    for line in done.stdout.splitlines()[-5000:] if done.returncode == 0 else []:
        if stamp := _STAMP.match(line):
            newer = float(stamp[1]) > after
        if newer:  # a line without a stamp goes on with the one before it
            newest.append(line)
    return newest


def newest_stamp() -> float:
    """Of the last line that the kernel's log holds now, in the log's own seconds; 0 without one.

    Only the log's own stamps say what is older: its clock is not disciplined, and falls behind CLOCK_MONOTONIC by a second in some days.
    """
    stamps = [stamp for line in kernel_log() if (stamp := _STAMP.match(line))]
    return float(stamps[-1][1]) if stamps else 0.0


# -- devices ---------------------------------------------------------------------------------------------------------------------------


def gpu_signs(nvml: Any) -> list[Sign]:
    """What NVML (``pynvml``, or what looks like it) tells of each GPU: memory errors, pending row remappings, heat, throttling, NVLink."""
    found: list[Sign] = []
    nvml.nvmlInit()
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            name = str(index)
            try:
                found += _of_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index), name)
            except nvml.NVMLError as error:  # one that fell off the bus answers nothing
                found.append(Sign("gpu", "bad", f"does not answer: {error}", name))
    finally:
        nvml.nvmlShutdown()
    return found


def _of_gpu(nvml: Any, gpu: Any, name: str) -> list[Sign]:
    found: list[Sign] = []

    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except nvml.NVMLError_NotSupported:
            return None

    errors = ask(lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC))
    if errors:
        found.append(Sign("gpu", "bad", f"{errors} uncorrectable memory errors since the driver was loaded", name))
    rows = ask(lambda: nvml.nvmlDeviceGetRemappedRows(gpu))
    if rows is not None:
        _, _, pending, failed = rows
        if failed:
            found.append(Sign("gpu", "bad", "a memory row could not be remapped: replace it", name))
        elif pending:
            found.append(Sign("gpu", "bad", "a memory row waits to be remapped: reset it", name))
    degrees = ask(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
    if degrees is not None and degrees >= HOT_C:
        found.append(Sign("gpu", "warning", f"{degrees} degrees Celsius", name))
    reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)) or 0
    for reason, text in ((nvml.nvmlClocksThrottleReasonHwThermalSlowdown, "slowed down by heat"),
                         (nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, "slowed down by its power supply")):
        if reasons & reason:
            found.append(Sign("gpu", "warning", text, name))
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = nvml.nvmlDeviceGetNvLinkState(gpu, link)
        except nvml.NVMLError:
            break  # it has no more links
        replays = ask(lambda link=link: nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, nvml.NVML_NVLINK_ERROR_DL_REPLAY)) if active else 0  # type: ignore[misc]
        if not active:
            found.append(Sign("network", "warning", f"NVLink {link} is down", name))
        elif replays:
            found.append(Sign("network", "warning", f"NVLink {link}: {replays} replays", name))
    return found


def host_signs(folders: Sequence[str] = ()) -> list[Sign]:
    """Memory of this machine, and room on the file systems of ``folders``."""
    import psutil

    found = []
    memory = psutil.virtual_memory()
    if memory.available < MEMORY_FREE_SHARE * memory.total:
        found.append(Sign("host", "warning", f"{memory.available >> 20} MiB of memory are left of {memory.total >> 20}"))
    for folder in folders:
        try:
            free = shutil.disk_usage(folder).free
        except OSError as error:
            found.append(Sign("dependency", "bad", f"cannot be reached: {error.strerror}", folder))
            continue
        if free < DISK_FREE_BYTES:
            found.append(Sign("host", "bad", f"{free >> 20} MiB are free", folder))
    return found


def look(folders: Sequence[str] = (), after: float = 0.0) -> list[Sign]:
    """Everything that this machine tells of itself now; of the kernel's log what came after ``after`` (see :func:`kernel_log`)."""
    found = host_signs(folders) + kernel_signs(kernel_log(after))
    if nvml := load_nvml():
        found += gpu_signs(nvml)
    return found


def load_nvml() -> Any:
    """``pynvml``, if this machine has a driver that it can talk to; else None."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return pynvml


# -- classes of failures ---------------------------------------------------------------------------------------------------------------

_CAUSES: tuple[tuple[str, FailureClass], ...] = (
    ("straggler", "maintenance"), ("drain", "maintenance"), ("corruption", "gpu"), ("out of memory", "host"), ("fenced itself", "network"),
    ("node", "network"), ("silent", "software"), ("no progress", "software"), ("not finite", "data"), ("process ended", "software"),
)


@dataclass(frozen=True)
class Verdict:
    kind: FailureClass
    evidence: tuple[str, ...]


def classify(cause: str, pid: int | None, signs: Sequence[Sign], computing_again: bool = False, stuck: str = "") -> Verdict:
    """Which class a death belongs to, and on what evidence.

    ``cause``: of the ``death`` event. ``signs``: of its node, around that time. ``computing_again``: another process died of the same slot. ``stuck``: in what it was, by the agent of its
    node, before it was killed (:mod:`everstep.node.verdict`).
    Evidence of the node about this very process (the OOM killer names it) counts first, then bad signs of its hardware, then the cause.
    """
    named = [s for s in signs if pid is not None and re.search(rf"process {pid}\b", s.what)]
    if named:
        return Verdict(named[0].kind, tuple(s.what for s in named))
    if computing_again:
        return Verdict("data", (cause, "another process died while it computed the same slot"))
    if "straggler" not in cause and "drain" not in cause:
        for kind in ("gpu", "host", "network", "dependency"):
            if bad := [s for s in signs if s.kind == kind and s.severity == "bad"]:
                return Verdict(kind, (cause, *(f"{s.device + ': ' if s.device else ''}{s.what}" for s in bad[:5])))  # type: ignore[arg-type]
    if stuck == "device":
        return Verdict("gpu", (cause,))
    kind = next((kind for text, kind in _CAUSES if text in cause), "software")
    return Verdict(kind, (cause,))  # type: ignore[arg-type]
