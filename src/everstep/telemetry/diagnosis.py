"""What everybody was doing when somebody had to be killed, written to ``RUN/diagnosis/`` before that.

    RUN/diagnosis/step-000025-w4/
      summary.json            who, why; of every rank: place, step, phase, for how long; who is behind
      w4.kernel.json          what the operating system says of the process and its threads
      w4.page.json            its progress page, and what it is stuck in by that (everstep.node.verdict)
      w4.stacks, w0.stacks    Python stacks of all threads
      w0.collectives.json     torch's flight recorder: the last collectives of NCCL or gloo, and which did not complete

A rank is asked over the control channel, whose thread lives in one that merely hangs, and writes stacks and flight recorder itself. One that is to
be killed and does not answer gets a signal that Python's ``faulthandler`` serves in C, also while its interpreter lock is stuck. Nobody who lives on
gets that signal: a dump in C reads the frames of threads that run, and has killed healthy ranks. A stopped process (SIGSTOP) serves no signal; of it
py-spy reads the stacks from outside, if it is installed. What is read from outside is read by the agent of its node (:mod:`everstep.cluster.agents`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from everstep.telemetry.events import to_json
from everstep.telemetry.status import replace_file

LOG = logging.getLogger(__name__)
SIGNAL = signal.SIGUSR2
WAIT_S = 1.0        # for what ranks write; survivors do not wait for it
ANSWER_S = 0.2       # for the one that will be killed to write its stacks itself; then it gets the signal
PY_SPY_S = 5.0       # for stacks that are read from outside
LONGEST_S = WAIT_S + PY_SPY_S + 1.0  # for one diagnosis, whatever does not answer
HEAD_START_S = 0.05  # in which all are asked before the others are told to go on without the rank

# -- in a worker -----------------------------------------------------------------------------------------------------------------------

_stacks: IO[str] | None = None  # faulthandler needs an open file for as long as the process lives


def register(path: Path) -> None:
    """From now on this process answers :data:`SIGNAL` with the stacks of all its threads, appended to ``path``. Main thread only."""
    global _stacks
    path.parent.mkdir(parents=True, exist_ok=True)
    _stacks = path.open("a")
    faulthandler.register(SIGNAL, file=_stacks, all_threads=True, chain=False)


def answer(folder: str, worker: str) -> None:
    """Asked over the control channel: the stacks of this process's threads, and torch's record of its last collectives, if this build keeps one."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    with contextlib.suppress(OSError):  # the folder is made by the lead, and gone with the run
        replace_file(Path(folder) / f"{worker}.stacks", _own_stacks())
        if dump is not None:
            (Path(folder) / f"{worker}.collectives.json").write_bytes(dump())


def _own_stacks() -> str:
    """By ``faulthandler``, called and not signalled: no other thread runs Python meanwhile, whose frames it reads. With the threads' names; those that
    Python did not start have none."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    for thread in threading.enumerate():
        text = text.replace(f"hread 0x{thread.ident or 0:016x} ", f"hread {thread.ident or 0:#x} {thread.name} ")
    return text


# -- in the lead -----------------------------------------------------------------------------------------------------------------------


class Diagnosis:
    """``send(worker, signal)`` delivers a signal; ``order(worker, message)`` sends a message over the control channel; ``examine(worker,
    timeout_s, spy)``: what its node says of it (:meth:`everstep.cluster.agents.Agents.examine`); ``stacks(worker)``: the file of its stacks;
    ``told(folder, worker, step)``: it is complete."""

    def __init__(
        self, folder: Path, send: Callable[[str, int], None], order: Callable[[str, Mapping[str, Any]], bool],
        examine: Callable[[str, float, bool], Mapping[str, Any]], stacks: Callable[[str], Path], told: Callable[[Path, str, int], None],
    ):
        self._folder, self._send, self._order, self._examine, self._stacks, self._told = folder, send, order, examine, stacks, told
        self._running: dict[str, threading.Thread] = {}

    def take(self, worker: str, cause: str, step: int, whereabouts: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin to write down what all ranks do. Returns once that is done, or after :data:`HEAD_START_S`; never raises."""
        thread = threading.Thread(target=self._take, args=(worker, cause, step, whereabouts), name=f"diagnosis-{worker}", daemon=True)
        thread.start()
        self._running[worker] = thread  # not before: who finishes it joins it
        thread.join(HEAD_START_S)

    def finish(self, worker: str) -> None:
        """Before this worker is killed: wait until what it can still tell is written, with a deadline."""
        if thread := self._running.get(worker):
            thread.join(LONGEST_S)

    def close(self) -> None:
        """The run ends: what was begun is finished first, with one deadline for all. A short run can end before a stopped process is read."""
        end = time.monotonic() + LONGEST_S
        for thread in list(self._running.values()):
            thread.join(max(0.0, end - time.monotonic()))

    def _take(self, worker: str, cause: str, step: int, whereabouts: Mapping[str, Mapping[str, Any]]) -> None:
        try:
            folder = self._folder / f"step-{step:06d}-{worker}"
            folder.mkdir(parents=True, exist_ok=True)
            for each in sorted(whereabouts, key=lambda w: w != worker):  # the one that will be killed first
                self._order(each, {"type": "diagnose", "folder": str(folder)})
            summary = {"worker": worker, "cause": cause, "step": step, "t_wall": time.time(), "behind": behind(whereabouts), "ranks": whereabouts}
            (folder / "summary.json").write_text(to_json(summary))
            self._outside(folder, worker)
            self._await_stacks(folder, worker, whereabouts)
            self._told(folder, worker, step)
        except (OSError, ValueError) as error:  # the log is closed, or full: the run ends
            LOG.warning("the diagnosis of %s could not be written: %s", worker, error)

    def _await_stacks(self, folder: Path, worker: str, whereabouts: Mapping[str, Any]) -> None:
        """Until each has written its stacks. Of the one that will be killed they are got in other ways, if need be."""
        begun = time.monotonic()
        written = lambda each: (folder / f"{each}.stacks").exists()
        _until(lambda: written(worker), begun + ANSWER_S)
        if not written(worker):
            self._by_signal(folder, worker, begun + WAIT_S)
        if not written(worker) and (read := self._examine(worker, PY_SPY_S + 1.0, True).get("stacks")):
            (folder / f"{worker}.stacks").write_text(read)
        _until(lambda: all(map(written, whereabouts)), begun + WAIT_S)

    def _by_signal(self, folder: Path, worker: str, end: float) -> None:
        path = self._stacks(worker)
        before = _size(path)
        with contextlib.suppress(Exception):  # gone, or its node is: that is in the summary by its absence
            self._send(worker, SIGNAL)
        last = ""

        def complete() -> bool:
            nonlocal last
            text, last = last, _after(path, before)
            return text == last and text.endswith("\n")

        if _until(complete, end):
            (folder / f"{worker}.stacks").write_text(last)

    def _outside(self, folder: Path, worker: str) -> None:
        found = dict(self._examine(worker, WAIT_S, False))
        if kernel := found.pop("kernel", None):
            (folder / f"{worker}.kernel.json").write_text(json.dumps(kernel, indent=1))
        (folder / f"{worker}.page.json").write_text(to_json({key: found.get(key) for key in ("page", "says", "stuck", "missing")}))


def behind(whereabouts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The ranks that are at the earliest point of the step in progress, as ``REPLICA/RANK in PHASE``. Who just took its place, and has begun
    no step yet, is not among them."""
    from everstep.recovery.progress import ORDER

    placed = [w for w in whereabouts.values() if w["replica"] >= 0 and w["phase"] in ORDER and (w["step"], w["phase"]) != (0, "idle")]
    points = [(w["step"], ORDER.index(w["phase"]) if w["phase"] != "idle" else len(ORDER)) for w in placed]
    return [f"{w['replica']}/{w['rank']} in {w['phase']} of step {w['step']} for {w['since_s']:.1f} s"
            for w, point in zip(placed, points, strict=True) if point == min(points)]


def kernel_view(pid: int) -> dict[str, Any]:
    """Of a process of this machine: its state, memory, and what each of its threads waits for in the kernel. Empty if it is gone."""
    root = Path("/proc") / str(pid)
    view: dict[str, Any] = {}
    wanted = ("State", "Threads", "VmRSS", "VmHWM", "SigQ", "voluntary_ctxt_switches")
    try:
        view = {key: value.strip() for key, _, value in (line.partition(":") for line in (root / "status").read_text().splitlines()) if key in wanted}
        view["threads"] = {}
        for task in sorted((root / "task").iterdir(), key=lambda path: int(path.name))[:256]:
            with contextlib.suppress(OSError):  # it ended meanwhile
                stat = (task / "stat").read_text().rsplit(")", 1)[1].split()
                view["threads"][task.name] = {"name": (task / "comm").read_text().strip(), "state": stat[0], "waits_in": _read(task / "wchan"),
                                              "cpu_s": (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")}
    except OSError:
        pass
    return view


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _until(condition: Callable[[], bool], end: float) -> bool:
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return met


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _after(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(size)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def report(folder: Path) -> Sequence[str]:
    """One line for each diagnosis of a run: where it is, and who was behind."""
    found = []
    for path in sorted((folder / "diagnosis").glob("*/summary.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            summary = json.loads(path.read_text())
            found.append(f"{path.parent}: {summary['cause']}; behind: {'; '.join(summary['behind']) or 'nobody'}")
    return found
