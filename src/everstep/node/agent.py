"""The agent: one process of each node, which looks at its ranks and its machine, whoever else still lives.

What it finds goes to an event file of its own, ``RUN/events/agent-NODE.jsonl``, and to the coordinator, which may be gone for a while; then it is
told later (:mod:`everstep.node.channel`).

It decides one thing: that a device is sick, and must not be used any more (*quarantine*). Nobody else can know, and nothing is undone by it:
that the ranks on it leave, when, and who takes their places, the lead decides. Everything else that a finding may lead to is decided where it was
decided before: who is expelled, by the coordinator; which process is started in which place, by ``everstep.cluster.controller.refill`` (by torchrun, without
Ray). An agent that killed or started ranks as well could undo their decisions; so it does neither. Its own death harms nobody: whoever started it
starts another one (:mod:`everstep.cluster.agents`), and ranks do not know of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everstep.cluster.processes import ProcessWatch, state_letter
from everstep.errors import BadInput
from everstep.node.page import Reading, View, Where
from everstep.node.senses import News, Senses
from everstep.node.verdict import Stuck, explain, surely_stuck
from everstep.telemetry.diagnosis import PY_SPY_S, kernel_view
from everstep.telemetry.health import Sign

_LINES = 2000      # of stacks that are sent
_LATE_S = 0.05     # is usual on a busy machine
_RECENT_S = 120.0  # what passed so long ago at most is evidence of a death


@dataclass(frozen=True)
class AgentSpec:
    """What an agent process needs to start; JSON. ``coordinator``: (host, port), with ``token``. ``lost_s``: without a coordinator, and without a
    rank that lives, it ends at once; with ranks that live, after so many seconds."""

    node: str
    run_dir: str
    attempt: int
    coordinator: tuple[str, int]
    token: str
    every_s: float
    stuck_after_s: float
    suspect_s: float
    lost_s: float

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> AgentSpec:
        """Raises BadInput."""
        try:
            read = json.loads(text)
            return AgentSpec(**(read | {"coordinator": (str(read["coordinator"][0]), int(read["coordinator"][1]))}))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise BadInput(f"an agent is started with its specification on its standard input ({type(error).__name__}: {error})") from error


@dataclass
class _Rank:
    pid: int
    view: View | None = None
    last: Reading | None = None
    ended: bool = False
    stuck: Stuck | None = None  # by the last look while it lived
    tick: float = 0.0           # at that look
    told: set[tuple[str, bool]] = field(default_factory=set)  # what was said of it, while that is so
    quiet: tuple[float, float, dict[str, ThreadClock]] | None = None  # (tick, when it was first found silent since, its threads then)

    def has_not_moved(self, reading: Reading) -> bool:
        """Whether its process was surely stuck, and is so still. What the kernel says of one that is being killed is no better reason."""
        return self.stuck is not None and self.stuck.sure and self.stuck.what == "process" and reading.tick == self.tick

    def starved_s(self, reading: Reading, now: float, after_s: float) -> float:
        """Of the time in which no thread of Python has run: how long the one that waited most waited for a CPU. Who waits for a lock waits for none.

        The kernel's clocks count since a thread began, so they are read once the silence is half as long as tells, and what they gained counts.
        A look that finds a rank so silent for the first time accuses nobody."""
        if not reading.tick or now - reading.tick < after_s / 2:
            return 0.0
        clocks = thread_clocks(self.pid)
        if self.quiet is None or self.quiet[0] != reading.tick:
            self.quiet = reading.tick, now, clocks
            return now - reading.tick
        _, since, before = self.quiet
        return max((clock.starved_s(before[thread], now - since) for thread, clock in clocks.items() if thread in before), default=0.0)


@dataclass(frozen=True)
class ThreadClock:
    """Of one thread, by the kernel: whether it would run now; seconds that it ran; and that it was ready to, before it did."""

    ready: bool
    ran_s: float
    waited_s: float

    def starved_s(self, before: ThreadClock, passed_s: float) -> float:
        """In the time that passed between two looks. The kernel counts a wait when it is over: of one who waits still, all that it did not run."""
        still = passed_s - (self.ran_s - before.ran_s) if self.ready and before.ready else 0.0
        return max(self.waited_s - before.waited_s, still)


class NodeWatch:
    """Ranks and machine of this node. ``tell(event, **fields)``: something was found; called on any thread, must not wait.

    ``stuck_after_s``, ``suspect_s``: see :mod:`everstep.node.verdict`.
    """

    def __init__(self, node: str, senses: Senses, tell: Callable[..., None], stuck_after_s: float, suspect_s: float):
        self.node, self._senses, self._tell, self._stuck_after_s, self._suspect_s = node, senses, tell, stuck_after_s, suspect_s
        self._ranks: dict[str, _Rank] = {}
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._over = False
        self._excused: deque[tuple[float, float]] = deque()  # when, and for how long the agent got no CPU
        self._processes = ProcessWatch(self._ended)
        self.quarantined: dict[str, str] = {}  # UUID -> why

    def add(self, worker: str, pid: int) -> None:
        """Watch a rank from now on. Idempotent."""
        with self._lock:
            known = self._ranks.get(worker)
            if known and known.pid == pid:
                return
            self._ranks[worker] = _Rank(pid)
        self._senses.oom.watch(pid)
        self._processes.add((worker, pid), pid)

    @property
    def somebody_lives(self) -> bool:
        """Whether there is a rank whose end has not been told."""
        with self._lock:
            return any(not rank.ended for rank in self._ranks.values())

    def over(self) -> None:
        """The run is over: what ends from now on is no news."""
        self._over = True

    def close(self) -> None:
        self._over = True
        self._processes.close()
        self._senses.close()

    def round(self) -> None:
        """One look at everything."""
        with self._looking:
            self._look_at_ranks()
            self._news(self._senses.look())

    def excuse(self, late_s: float) -> None:
        """The agent itself got no CPU for so long: neither may its ranks have got any. For as long as it takes to call one stuck."""
        if late_s > _LATE_S:
            self._excused.append((time.monotonic(), late_s))

    @property
    def _after_s(self) -> float:
        now = time.monotonic()
        while self._excused and now - self._excused[0][0] > self._stuck_after_s + self._excused[0][1]:
            self._excused.popleft()
        return self._stuck_after_s + sum(late_s for _, late_s in self._excused)

    def examine(self, worker: str, pid: int, spy: bool) -> dict[str, Any]:
        """All that can be said now of a rank and of its machine, for somebody who asks. ``spy``: with its Python stacks, read from outside."""
        with self._lock:
            rank = self._ranks.get(worker) or _Rank(pid)
        self.round()  # the kernel may have written since
        now, reading = time.monotonic(), _reading(rank)
        found: dict[str, Any] = {"node": self.node, "signs": [asdict(sign) for sign in self._senses.recent(_RECENT_S)], "kernel": kernel_view(pid)}
        found["page"] = reading.as_json(now) if reading else None
        found["says"] = reading.says(now) if reading else ""
        if reading and not rank.ended and not rank.has_not_moved(reading):
            rank.stuck = explain(reading, *_state(pid), now, self._after_s, 0.0)
        found["stuck"] = asdict(rank.stuck) if rank.stuck else None
        found["stacks"] = stacks(pid) if spy else ""
        return found

    # -- ranks -------------------------------------------------------------------------------------------------------------------------

    def _look_at_ranks(self) -> None:
        with self._lock:
            ranks = [(worker, rank) for worker, rank in self._ranks.items() if not rank.ended]
        now = time.monotonic()
        for worker, rank in ranks:
            reading = _reading(rank)
            if reading is None or rank.has_not_moved(reading):
                continue
            state, waits_in = _state(rank.pid)
            if not state or state in "ZX":
                continue  # its end is told by its pidfd
            after_s = self._after_s
            stuck = explain(reading, state, waits_in, now, after_s + rank.starved_s(reading, now, after_s), self._suspect_s)
            seen: set[tuple[str, bool]] = {(stuck.what, stuck.sure)} if stuck else set()
            if stuck and not seen <= rank.told:
                self._stuck(worker, rank.pid, reading, stuck)
            rank.told, rank.stuck, rank.tick = seen, stuck, reading.tick

    def _stuck(self, worker: str, pid: int, reading: Reading, stuck: Stuck) -> None:
        at = reading.where
        self._tell("stuck", step=at.step, node=self.node, worker=worker, worker_pid=pid, replica=at.replica, rank=at.rank, what=stuck.what,
                   sure=stuck.sure, why=stuck.why, for_s=round(stuck.for_s, 3), says=reading.says(time.monotonic()))

    def _ended(self, which: tuple[str, int]) -> None:
        worker, pid = which
        with self._lock:
            rank = self._ranks.get(worker)
        if rank is None or rank.pid != pid or self._over:
            return  # a run that was begun anew has given its name to another process
        reading, now = _reading(rank), time.monotonic()
        at = reading.where if reading else Where()
        self._tell("rank_end", step=at.step, node=self.node, worker=worker, worker_pid=rank.pid, replica=at.replica, rank=at.rank,
                   says=reading.says(now) if reading else "it had no page, or it was not opened yet")
        rank.ended = True  # only now: an agent that has nobody left to look at leaves

    # -- the machine ---------------------------------------------------------------------------------------------------------------------

    def _news(self, news: News) -> None:
        for sign in news.new:
            self._health(sign, sign.severity)
        for sign in news.over:
            self._health(sign, "ok")
        for gpu, sign in news.sick:
            with self._lock:
                on_it = sorted(w for w, rank in self._ranks.items() if (seen := _reading(rank)) and seen.name == gpu.uuid)
            self.quarantined[gpu.uuid] = sign.what
            self._tell("quarantine", node=self.node, device=gpu.uuid, index=gpu.index, why=sign.what, workers=on_it)

    def _health(self, sign: Sign, severity: str) -> None:
        self._tell("health", node=self.node, failure_class=sign.kind, severity=severity, what=sign.what, device=sign.device)


def _reading(rank: _Rank) -> Reading | None:
    """What its page says; once the process is gone, what it said last."""
    if rank.view is None and not rank.ended:
        rank.view = View.of(rank.pid)
    return rank.view.read() if rank.view else None


def _state(pid: int) -> tuple[str, str]:
    """(letter of its state, where its main thread waits in the kernel); ("", "") if it is gone."""
    try:
        state = state_letter(f"/proc/{pid}")
    except (OSError, IndexError):
        return "", ""
    with contextlib.suppress(OSError):
        return state, Path(f"/proc/{pid}/wchan").read_text().strip().strip("0")
    return state, ""


def thread_clocks(pid: int) -> dict[str, ThreadClock]:
    """Of each thread of a process of this machine, by its number; empty where the kernel does not count (CONFIG_SCHED_INFO)."""
    clocks = {}
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it ended
                ran, waited, _ = (thread / "schedstat").read_text().split()
                clocks[thread.name] = ThreadClock(state_letter(str(thread)) == "R", int(ran) / 1e9, int(waited) / 1e9)
    return clocks


def stacks(pid: int) -> str:
    """Python stacks of a process of this machine, by py-spy; empty where that is not installed or not permitted."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if spy:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([spy, "dump", "--pid", str(pid), "--nonblocking"], capture_output=True, text=True, timeout=PY_SPY_S)
            return "".join(done.stdout.splitlines(keepends=True)[:_LINES])
    return ""


def look_at(pid: int) -> dict[str, Any]:
    """As :meth:`NodeWatch.examine`, of a process of this machine and without an agent's memory of it."""
    view, now = View.of(pid), time.monotonic()
    reading = view.read() if view else None
    stuck = surely_stuck(reading, *_state(pid), now, 1.0) or explain(reading, *_state(pid), now, 1.0, 0.0) if reading else None
    return {"kernel": kernel_view(pid), "page": reading.as_json(now) if reading else None, "says": reading.says(now) if reading else "",
            "stuck": asdict(stuck) if stuck else None}


def round_cost_s(pids: list[int], folder: str, rounds: int = 20) -> float:
    """Seconds of CPU that one round takes here, with these ranks."""
    watch = NodeWatch("cost", Senses.of_this_machine([folder]), lambda event, **fields: None, 10.0, 120.0)
    try:
        for number, pid in enumerate(pids):
            watch.add(f"w{number}", pid)
        watch.round()
        begun = time.thread_time()
        for _ in range(rounds):
            watch.round()
        return (time.thread_time() - begun) / rounds
    finally:
        watch.close()
