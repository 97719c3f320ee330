"""What is on every node: progress pages of real processes, stopped, stuck and killed; what an agent makes of them, and of its machine; the agent's
process, without a coordinator and with another one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.runs import SFT
from tests.test_health import Nvml
from tests.test_recovery import serve, until

from everstep.cluster import agents as agents_module
from everstep.cluster.agents import Agents, Keeper, agent_spec
from everstep.cluster.processes import pid_runs
from everstep.config.load import load_config
from everstep.node import page
from everstep.node.agent import AgentSpec, NodeWatch, round_cost_s
from everstep.node.beat import ASK_S, Cuda, Heart, beside_captures, name_of
from everstep.node.channel import ANOTHER, spawn
from everstep.node.page import HANDED_OVER, Page, View
from everstep.node.senses import KernelLog, Links, OutOfMemory, Senses, gpus
from everstep.node.verdict import explain, surely_stuck
from everstep.recovery import rendezvous
from everstep.recovery.desk import Listener
from everstep.run_dir import RunDir
from everstep.telemetry.events import EventLog, read_events
from everstep.telemetry.health import Sign, classify, load_nvml

#: A rank as the agent sees one: a process with a page that ticks. What it does then is told on its command line.
RANK = """
import ctypes, sys, threading, time
from everstep.node import page
mine = page.open_mine(sys.argv[1], sys.argv[3])
mine.place(int(sys.argv[1][1:]), 0)
mine.tick()
def tick():
    while True:
        mine.tick()
        time.sleep(0.02)
threading.Thread(target=tick, daemon=True).start()
mine.phase(7, "compute")
mine.micro_batch(1, 4)
print("up", flush=True)
match sys.argv[2]:
    case "spin":
        sys.stdin.readline()
        3 ** 10**9  # minutes, without letting go of the interpreter lock
    case "gil":
        sys.stdin.readline()
        mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex); lock(mutex)
    case "collective":
        with page.collective("sum", "0b0+1b0"):
            time.sleep(600)
    case "busy":
        while True:
            for index in range(1000):
                mine.micro_batch(index, index + 1)
                mine.tick()
    case "balloon":
        sys.stdin.readline()
        kept = []
        while True:
            kept.append(bytearray(b"x" * (8 << 20)))
time.sleep(600)
"""


class Ranks:
    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, worker: str, what: str = "", device: str = "cpu") -> int:
        process = subprocess.Popen([sys.executable, "-c", RANK, worker, what, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes[worker] = process
        return process.pid

    def await_up(self) -> None:
        for process in self.processes.values():
            assert process.stdout and process.stdout.readline() == "up\n"

    def go(self, worker: str) -> None:
        pipe = self.processes[worker].stdin
        assert pipe
        pipe.write("\n")
        pipe.flush()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


class Told:
    """What a watch told, and when."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, dict]] = []

    def __call__(self, event: str, **fields: object) -> None:
        self.events.append((time.monotonic(), event, fields))

    def of(self, *events: str) -> list[dict]:
        return [fields for _, event, fields in self.events if event in events]

    def when(self, worker: str) -> float:
        return next(at for at, _, fields in self.events if fields.get("worker") == worker)


class Quiet(KernelLog):
    """A kernel's log that says what the test wants."""

    def __init__(self, *lines: str):
        self.lines = list(lines)

    readable = True

    def new_lines(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines

    def close(self) -> None:
        pass


# -- the page ------------------------------------------------------------------------------------------------------------------------------


def test_a_page_is_read_from_outside_whatever_its_process_is_in(ranks: Ranks) -> None:
    pids = [ranks.start("w3", "collective"), ranks.start("w4", "busy")]
    ranks.await_up()
    still, busy = (View.of(pid) for pid in pids)
    assert still and busy
    assert until(lambda: still.read().collective.count == 1, 10.0)
    os.kill(pids[0], signal.SIGSTOP)
    stopped = still.read()
    assert (stopped.worker, stopped.pid, stopped.where.replica, stopped.where.step, stopped.where.phase) == ("w3", pids[0], 3, 7, "compute")
    assert stopped.collective.open and "last collective sum #1 of 0b0+1b0, begun" in stopped.says(time.monotonic())
    ranks.processes["w3"].kill()
    ranks.processes["w3"].wait()
    assert still.read() == stopped, "it outlives its process"
    assert View.of(pids[0]) is None
    seen = set()
    end = time.monotonic() + 10
    while len(seen) < 50 and time.monotonic() < end:  # while it is written without a pause: never a mixture of two writes
        at = busy.read().where
        assert at.micro_batches == at.micro_batch + 1 or (at.micro_batch, at.micro_batches) == (1, 4)
        seen.add(at.micro_batch)
    assert len(seen) == 50
    still.close()
    busy.close()


def test_a_torn_write_hides_nothing_but_itself() -> None:
    mine = Page("w0")
    view = View.of(os.getpid())
    assert view
    mine.phase(1, "compute")
    mine.phase(1, "reduce")
    start, layout = page._PARTS["where"]
    newest = start + (2 & 1) * page._PLACE_BYTES
    for offset in (0, layout.size // 2, layout.size + 1):  # its number, its middle, its checksum
        kept = mine._memory[newest : newest + layout.size + 4]
        mine._memory[newest + offset] ^= 0xFF
        assert view.read().where.phase == "compute"
        mine._memory[newest : newest + layout.size + 4] = kept
    assert view.read().where.phase == "reduce"
    mine.close()


def test_what_a_collective_is_made_of_is_not_told_apart_and_one_that_fails_stays_open() -> None:
    mine = page.open_mine("w0")
    view = View.of(os.getpid())
    assert view
    me = threading.get_ident()
    with page.collective("agree", "replica 0"), page.collective("all_gather", "the world"):
        assert view.read().collective.operation == "agree" and view.read().collective.open and page.waits(me)
        with page.for_others():
            pass
        assert page.waits(me)
    assert not page.waits(me)
    with page.for_others():
        assert page.waits(me) and not page.waits(me + 1)
    assert not page.waits(me)
    assert (view.read().collective.count, view.read().collective.open) == (1, False)
    with pytest.raises(RuntimeError), page.collective("sum", "0b0+1b0"):
        raise RuntimeError("a peer is gone")
    assert view.read().collective.open and "not done" in view.read().says(time.monotonic())
    with page.collective("all_reduce", "TP", handed_over=True):
        pass
    assert view.read().collective.done == HANDED_OVER and not view.read().collective.open
    mine.close()
    page._mine = None


@pytest.mark.full
def test_collectives_of_a_replica_are_noted(tmp_path: Path) -> None:
    """As Megatron issues them, in a process of its own: the functions of torch.distributed are wrapped for good."""
    code = """
import os, sys, torch, torch.distributed as dist
from megatron.core.tensor_parallel import mappings  # names some of them when it is imported
from everstep.node import beat
from everstep.node.page import View
beat.start("w5", torch.device("cpu"))
dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{sys.argv[1]}/store")
view, group = View.of(os.getpid()), dist.new_group([0], group_desc="TENSOR")
dist.all_reduce(torch.ones(2), group=group)
first = view.read()
work = torch.distributed.all_reduce(torch.ones(2), async_op=True)
last = view.read().collective
assert first.tick > 0 and first.device.asked == 0, first  # no device: no answers of one
mappings.dist_reduce_scatter_func(torch.empty(2), torch.ones(2), group=group)
third = view.read().collective
assert type(work).wait.noted and work.wait()
print(first.collective.operation, first.collective.group, first.collective.open, last.count - first.collective.count, last.done, third.operation, third.group)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["all_reduce", "TENSOR", "False", "1", "-1.0", "reduce_scatter_tensor", "TENSOR"], done.stderr[-2000:]


def test_writing_costs_microseconds() -> None:
    """On a quiet machine 1.0; a test's machine is not quiet."""
    assert min(page.cost_s(2000) for _ in range(5)) < 20e-6


# -- the device's heartbeat ------------------------------------------------------------------------------------------------------------------


class Gpu:
    """A device that does what the test says. ``alive``: it answers; ``free``: what it was given before is done."""

    alive = free = True

    def aside(self):
        return _Answer(lambda: self.alive)

    def behind(self):
        return _Answer(lambda: self.alive and self.free)


class _Answer:
    def __init__(self, query: Callable[[], bool]):
        self.query = query


def test_a_stuck_kernel_is_told_from_a_stuck_device_and_from_a_stuck_process(monkeypatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    mine, gpu = Page("w0", "GPU-1"), Gpu()
    heart, view = Heart(mine, gpu), View.of(os.getpid())
    assert view

    def pass_s(seconds: float) -> None:
        nonlocal now
        for _ in range(int(seconds / 0.5)):
            now += 0.5
            mine.tick()
            heart.beat()

    def verdict(suspect_s: float = 30.0):
        return explain(view.read(), "S", "", now, 10.0, suspect_s)

    mine.phase(5, "compute")
    pass_s(25)
    assert verdict() is None and now - view.read().device.caught_up <= 2 * ASK_S + 0.5
    mine.phase(5, "vote")
    pass_s(60)
    assert verdict() is None, "the coordinator holds the step: too few replicas are there"
    assert (asked := verdict(0.0)) and asked.what == "process", "where it is, whoever asks"
    mine.phase(6, "compute")
    gpu.free = False  # a kernel spins; the device answers
    pass_s(25)
    assert verdict() is None, "a long kernel is no fault"
    pass_s(15)
    found = verdict()
    assert found and (found.what, found.sure) == ("device", False) and "a kernel that it started has not ended" in found.why
    mine.begin("all_reduce", "TP")
    now += 31
    mine.tick()
    heart.beat()
    held_up = verdict()
    assert held_up and held_up.what == "collective", "a kernel that spins in a collective waits for others"
    gpu.alive = False
    pass_s(12)
    gone = verdict()
    assert gone and (gone.what, gone.sure) == ("device", True) and "has not answered" in gone.why
    assert classify("silent for 30 s", 1, [], stuck=gone.what).kind == "gpu"
    gpu.alive = gpu.free = True
    pass_s(2)
    now += 11  # the interpreter lock is stuck: nobody ticks, nobody asks
    process = surely_stuck(view.read(), "S", "", now, 10.0)
    assert process and process.what == "process" and "interpreter lock" in process.why
    mine.ends()
    assert surely_stuck(view.read(), "S", "", now, 10.0) is None, "its other threads are gone already"
    mine.close()


def test_nobody_is_stuck_because_the_machine_is(monkeypatch) -> None:
    """The agent got no CPU itself: its ranks are given as much more time, for as long as that matters."""
    watch = NodeWatch("here", Senses(kernel=Quiet()), Told(), 1.0, 600.0)
    watch.excuse(0.01)
    assert watch._after_s == 1.0
    watch.excuse(2.0)
    watch.excuse(0.5)
    assert watch._after_s == 3.5
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 2.0)
    assert watch._after_s == 3.5
    monkeypatch.setattr(time, "monotonic", lambda: now + 3.1)
    assert watch._after_s == 1.0
    monkeypatch.undo()
    watch.close()


def test_who_gets_no_cpu_is_not_stuck(ranks: Ranks, tmp_path: Path) -> None:
    """Two real processes in which no thread of Python runs: one waits for a lock, the other would compute, on a CPU that a third has nearly to itself."""
    told, after_s, cpu = Told(), 0.5, min(os.sched_getaffinity(0))
    watch = NodeWatch("here", Senses([str(tmp_path)], kernel=Quiet()), told, after_s, 600.0)
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for worker, what in (("w0", "gil"), ("w1", "spin")):
            ranks.start(worker, what)
        ranks.await_up()
        for worker, process in ranks.processes.items():
            watch.add(worker, process.pid)
        watch.round()
        os.sched_setaffinity(hog.pid, {cpu})
        for thread in map(int, os.listdir(f"/proc/{ranks.processes['w1'].pid}/task")):
            os.sched_setaffinity(thread, {cpu})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        ranks.go("w0")
        ranks.go("w1")
        begun = time.monotonic()
        while time.monotonic() - begun < 5 * after_s:
            watch.round()
            time.sleep(0.05)
        assert [fields["worker"] for fields in told.of("stuck") if fields["sure"]] == ["w0"]
        hog.kill()
        os.sched_setaffinity(ranks.processes["w1"].pid, os.sched_getaffinity(0))
        assert until(lambda: (watch.round(), len(told.of("stuck")) == 2)[1], 10.0), "with a CPU of its own nothing excuses it"
    finally:
        hog.kill()
        hog.wait()
        watch.close()


@pytest.mark.gpu
def test_a_kernel_that_spins_on_a_real_gpu(monkeypatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", 0)
    nvml = load_nvml()
    assert nvml and name_of(device) in {gpu.uuid for gpu in gpus(nvml)}, "the agent must know whose device it is"
    mine, view = Page("w0", "GPU"), View.of(os.getpid())
    assert view
    heart = Heart(mine, Cuda(device))
    monkeypatch.setattr("everstep.node.beat.ASK_S", 0.05)

    def beat(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            heart.beat()
            time.sleep(0.005)

    beat(0.5)
    calm = view.read().device
    assert calm.asked and time.monotonic() - calm.caught_up < 0.3
    torch.cuda._sleep(6_000_000_000)  # cycles: some seconds
    started = time.monotonic()
    beat(1.5)
    spins = view.read().device
    assert spins.answered > started + 1.0, "an event on the side stream passes by the kernel"
    assert spins.queued > spins.caught_up and spins.caught_up < started + 0.3, "one behind the kernel does not"
    torch.cuda.synchronize()
    beat(0.3)
    after = view.read().device
    assert after.caught_up > started + 1.5
    mine.close()


@pytest.mark.gpu
def test_heartbeats_neither_break_nor_are_broken_by_the_capture_of_a_graph(monkeypatch) -> None:
    """In the mode that vLLM captures in: any thread's look at an event would end it."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr("everstep.node.beat.ASK_S", 0.0)
    mine, end, beats = Page("w0", "GPU"), threading.Event(), []
    heart, data = Heart(mine, Cuda(torch.device("cuda", 0))), torch.ones(16, device="cuda")

    def beat() -> None:
        beside_captures()
        while not end.is_set():
            heart.beat()
            beats.append(time.monotonic())
            time.sleep(0.002)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        for _ in range(10):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="global"):
                twice = data * 2
                time.sleep(0.05)
            graph.replay()
            assert twice.sum().item() == 32
    finally:
        end.set()
        thread.join()
    mine.close()
    assert len(beats) > 50 and beats[-1] - beats[0] > 0.4, "it has beaten all along"


# -- stuck, and why ----------------------------------------------------------------------------------------------------------------------------


def test_each_way_of_being_stuck_is_told_with_culprit_and_in_time(ranks: Ranks, tmp_path: Path) -> None:
    """Real processes: stopped, its interpreter lock held, in a collective, with an idle main thread, and killed."""
    told, after_s, suspect_s = Told(), 0.6, 1.2
    watch = NodeWatch("here", Senses([str(tmp_path)], kernel=Quiet()), told, after_s, suspect_s)
    try:
        pids = {what: ranks.start(f"w{number}", what) for number, what in enumerate(("stop", "gil", "collective", "idle", "kill", "busy"))}
        ranks.await_up()
        for number, pid in enumerate(pids.values()):
            watch.add(f"w{number}", pid)
        watch.round()
        assert told.of("stuck", "rank_end") == []
        begun = time.monotonic()
        os.kill(pids["stop"], signal.SIGSTOP)
        ranks.go("w1")
        os.kill(pids["kill"], signal.SIGKILL)
        assert until(lambda: (watch.round(), len(told.of("stuck")) == 4)[1], 5.0)
        watch.round()
        found = {fields["worker"]: fields for fields in told.of("stuck")}
        assert {worker: (fields["what"], fields["sure"]) for worker, fields in found.items()} == {
            "w0": ("process", True), "w1": ("process", True), "w2": ("collective", False), "w3": ("process", False)}
        assert "stopped" in found["w0"]["why"] and "interpreter lock" in found["w1"]["why"]
        assert "in sum #1 of 0b0+1b0" in found["w2"]["why"] and "its main thread has been in compute of step 7" in found["w3"]["why"]
        assert all((fields["replica"], fields["step"]) == (int(worker[1:]), 7) for worker, fields in found.items())
        assert len(told.of("stuck")) == 4, "each is told once"
        assert told.when("w0") - begun < 2.0 and told.when("w1") - begun < after_s + 2.0, "time to detect"
        (end,) = told.of("rank_end")
        assert end["worker"] == "w4" and end["says"].startswith("in compute of step 7") and "micro-batch 2 of 4" in end["says"]
        assert told.when("w4") - begun < 2.0
        dead = watch.examine("w4", pids["kill"], False)
        assert dead["page"]["phase"] == "compute" and dead["stuck"] is None
        asked = watch.examine("w0", pids["stop"], True)
        assert asked["stuck"]["what"] == "process" and "stopped" in asked["stuck"]["why"] and asked["kernel"]["State"].startswith("T")
        assert not asked["stacks"] or "sleep" in asked["stacks"] or "<module>" in asked["stacks"]
        watch.add("w5", pids["idle"])  # a run that was begun anew gives names again
        os.kill(pids["busy"], signal.SIGKILL)
        assert until(lambda: not pid_runs(pids["busy"]), 5.0)
        os.kill(pids["stop"], signal.SIGCONT)
        time.sleep(0.1)
        watch.round()
        os.kill(pids["stop"], signal.SIGSTOP)
        of_it = lambda: [f["sure"] for f in told.of("stuck") if f["worker"] == "w0"]
        assert until(lambda: (watch.round(), of_it().count(True) == 2)[1], 15.0), "it was well in between"
        assert [fields["worker"] for fields in told.of("rank_end")] == ["w4"], "another process has the name of w5 now"
    finally:
        watch.close()


# -- the machine -------------------------------------------------------------------------------------------------------------------------------


class NamedNvml(Nvml):
    """With names of its GPUs, as pynvml has them."""

    def nvmlDeviceGetUUID(self, gpu: dict) -> str:
        return f"GPU-{self.gpus.index(gpu)}"

    def nvmlDeviceGetPciInfo(self, gpu: dict):
        return type("Pci", (), {"busId": b"00000000:%02X:00.0" % (0x3A + self.gpus.index(gpu))})


@pytest.mark.parametrize(("sick", "line", "why"), [
    ({"ecc": 2}, "", "2 uncorrectable"),
    ({"rows": (0, 1, 0, 1)}, "", "could not be remapped"),
    ({}, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", "Xid 79"),
])
def test_a_device_that_falls_sick_is_put_in_quarantine_with_the_ranks_on_it(ranks: Ranks, sick: dict, line: str, why: str) -> None:
    pids = [ranks.start(f"w{number}", "", f"GPU-{number}") for number in range(2)]
    ranks.await_up()
    nvml = NamedNvml({"ecc": 5, "number": 0}, {"ecc": 0, "number": 1}, {"number": 2})
    told, kernel = Told(), Quiet()
    watch = NodeWatch("here", Senses(nvml=nvml, kernel=kernel), told, 10.0, 600.0)
    try:
        for number, pid in enumerate(pids):
            watch.add(f"w{number}", pid)
        watch.round()
        (old,) = told.of("health")
        assert (old["device"], old["severity"]) == ("0", "bad") and told.of("quarantine") == [], "what was so before is for the doctor"
        nvml.gpus[1].update(sick)
        kernel.lines += [line] * bool(line)
        watch.round()
        watch.round()
        (found,) = told.of("quarantine")
        assert (found["device"], found["index"], found["workers"]) == ("GPU-1", "1", ["w1"]) and why in found["why"]
        assert [f["failure_class"] for f in told.of("health")] == ["gpu", "gpu"]
        assert any(why in sign["what"] for sign in watch.examine("w1", pids[1], False)["signs"]), "evidence of a death that follows"
    finally:
        watch.close()


def test_what_an_application_does_wrong_is_no_fault_of_the_device() -> None:
    nvml, told, kernel = NamedNvml({"number": 0}), Told(), Quiet()
    watch = NodeWatch("here", Senses(nvml=nvml, kernel=kernel), told, 10.0, 600.0)
    watch.round()
    kernel.lines.append("NVRM: Xid (PCI:0000:3a:00): 13, pid=1234, Graphics Exception")
    nvml.gpus[0].update(degrees=93, throttle=0x40)
    for _ in range(3):
        watch.round()
    assert [f["what"].partition(":")[0] for f in told.of("health")] == ["93 degrees Celsius", "slowed down by heat", "Xid 13 (an error of the application)"]
    nvml.gpus[0].update(degrees=91, throttle=0)
    watch.round()
    assert [(f["what"], f["severity"]) for f in told.of("health")[3:]] == [("slowed down by heat", "ok")], "cooler, but hot still: told already"
    assert told.of("quarantine") == []
    watch.close()
    assert nvml.open == 0


def test_every_further_name_of_nvml_exists_in_the_real_one() -> None:
    import pynvml

    assert {name for name in dir(NamedNvml) if name.lower().startswith("nvml") and not hasattr(pynvml, name)} == set()
    assert [(gpu.uuid, gpu.bus) for gpu in gpus(NamedNvml({"number": 0}))] == [("GPU-0", "3a:00")]


def test_the_kernels_log_is_read_from_now_on(ranks: Ranks) -> None:
    log = KernelLog()
    if not log.readable:
        pytest.skip("this machine's kernel log may not be read")
    assert log.new_lines() == []
    crashed = subprocess.Popen([sys.executable, "-c", "import ctypes; ctypes.string_at(0)"], stderr=subprocess.DEVNULL)
    crashed.wait()
    lines: list[str] = []
    if not until(lambda: any(f"[{crashed.pid}]" in line for line in (lines.extend(log.new_lines()), lines)[1]), 2.0):
        pytest.skip("this kernel does not tell of crashes")
    log.close()
    assert log.new_lines() == []
    assert not KernelLog("/nowhere").readable and KernelLog("/nowhere").new_lines() == []


def test_a_link_that_goes_down_or_makes_errors(tmp_path: Path) -> None:
    def write(name: str, **values: int) -> None:
        for file, value in values.items():
            path = tmp_path / name / (file if file == "carrier" else f"statistics/{file}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")

    for name in ("eth0", "ib0", "lo", "unused", "pod0", "veth1", "docker0"):
        write(name, carrier=int(name != "unused"), rx_errors=7)
    for name in ("eth0", "ib0", "unused"):
        (tmp_path / name / "device").mkdir()  # the others have no hardware
    (tmp_path / "route").write_text("Iface Destination Gateway Flags RefCnt Use Metric Mask\npod0 00000000 0100A8C0 0003 0 0 0 00000000\n"
                                    "docker0 0000A8C0 00000000 0001 0 0 0 00FFFFFF\n")
    links = Links(str(tmp_path), str(tmp_path))
    assert links.look() == []
    write("docker0", carrier=0)  # its last container ended
    write("veth1", rx_errors=9)
    assert links.look() == []
    shutil.rmtree(tmp_path / "veth1")
    assert links.look() == [], "what belongs to other containers comes and goes"
    (tmp_path / "route").unlink()
    write("pod0", carrier=0)
    assert [(sign.severity, sign.device) for sign in links.look()] == [("bad", "pod0")], "a container's only way out"
    write("pod0", carrier=1)
    write("ib0", carrier=0)
    write("eth0", rx_errors=10)
    down, errors = sorted(links.look(), key=lambda sign: sign.severity)
    assert (down.kind, down.severity, down.device) == ("network", "bad", "ib0")
    assert (errors.severity, errors.device) == ("warning", "eth0") and "3 errors" in errors.what
    assert [sign.device for sign in links.look()] == ["ib0"], "errors are told when they come, a link that is down while it is"
    assert Links().look() is not None, "this machine's"


def test_a_cgroup_of_version_two(tmp_path: Path) -> None:
    own = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line.split(":", 2)[2] for line in own if line.startswith("0::")), None)
    if path is None:
        pytest.skip("no cgroup of version 2")
    file = tmp_path / path.lstrip("/") / "memory.events"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\n")
    oom = OutOfMemory(str(tmp_path))
    oom.watch(os.getpid())
    assert oom.look() == [], "of before the run"
    file.write_text("oom 2\noom_kill 2\n")
    (sign,) = oom.look()
    assert (sign.kind, sign.severity) == ("host", "bad") and "killed 1 of the processes" in sign.what and oom.look() == []


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 64 MiB, where one may be made."""
    for root, limit in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        folder = root / f"everstep-test-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / limit).write_text(str(64 << 20))
            break
        except OSError:
            if folder.is_dir():
                folder.rmdir()
    else:
        pytest.skip("no cgroup can be made here")
    yield folder
    assert until(lambda: not (folder / "cgroup.procs").read_text().split(), 10.0)
    folder.rmdir()


def test_a_memory_balloon_in_a_cgroup_is_a_failure_of_the_host(ranks: Ranks, small_cgroup: Path, tmp_path: Path) -> None:
    told = Told()
    watch = NodeWatch("here", Senses([str(tmp_path)]), told, 10.0, 600.0)
    try:
        pid = ranks.start("w0", "balloon")
        ranks.await_up()
        (small_cgroup / "cgroup.procs").write_text(str(pid))
        watch.add("w0", pid)
        watch.round()
        ranks.go("w0")
        assert ranks.processes["w0"].wait(30) == -signal.SIGKILL
        assert until(lambda: bool(told.of("rank_end")), 10.0), "time to detect"
        found = watch.examine("w0", pid, False)
        signs = [Sign(**sign) for sign in found["signs"]]
        assert classify("its process ended (pidfd)", pid, signs).kind == "host", signs
        assert any("out of memory" in f["what"] and f["severity"] == "bad" for f in told.of("health"))
    finally:
        watch.close()
        ranks.close()


# -- the agent's process ---------------------------------------------------------------------------------------------------------------------------


def spec_of(folder: Path, address: tuple[str, int], node: str) -> AgentSpec:
    conf = load_config(SFT, ["watch.agent_every_s=0.1", "watch.stuck_after_s=0.5"])
    return replace(agent_spec(conf, folder, 1, node, address, "secret"), lost_s=60.0)


def desk(folder: Path, conf, **on) -> tuple[Agents, Listener]:
    agents = Agents(conf, RunDir(folder, 1), EventLog(folder / f"lead-{len(on)}.jsonl", "lead"), **on)
    return agents, Listener(lambda worker: (0, 0), on_connect=agents.rank, on_agent=agents.attend)


def test_an_agent_goes_on_without_a_coordinator_and_tells_the_next_one(ranks: Ranks, tmp_path: Path, monkeypatch) -> None:
    """Frozen: it is killed, and another one is started. The coordinator gone: a death is in its own file, and is told to the coordinator that comes."""
    conf, node = load_config(SFT), "some-node"
    server, _ = serve(tmp_path)
    ended: list[str] = []
    monkeypatch.setattr(agents_module, "_SILENT_S", 1.0)
    lives: list[subprocess.Popen[str]] = []
    first, server._listener = desk(tmp_path, load_config(SFT, ["watch.agent_every_s=0.1"]), on_end=ended.append, end_agent=lambda node: lives[-1].kill())
    pids = [ranks.start(f"w{number}") for number in range(3)]
    ranks.await_up()

    def live() -> int:
        lives.append(spawn(spec_of(tmp_path, server.address, node)))
        return lives[-1].wait()

    keeper = Keeper(node, live)
    own = lambda event: [e for e in read_events(tmp_path / "events") if e.event == event] if (tmp_path / "events").is_dir() else []
    try:
        for number, pid in enumerate(pids):
            first.rank(f"w{number}", pid, node)
        assert until(lambda: first.examine(node, "w0", pids[0], 0.5).get("page") is not None, 30.0)
        assert "did not answer" in first.examine("another node", "w0", pids[0], 0.2)["missing"]
        second = spawn(spec_of(tmp_path, server.address, node))
        assert second.wait(30) == ANOTHER, "one for each node"
        lives[0].send_signal(signal.SIGSTOP)
        assert until(lambda: len(lives) == 2 and first.examine(node, "w0", pids[0], 0.5).get("page") is not None, 30.0), "another one is started"
        os.kill(pids[0], signal.SIGKILL)
        assert until(lambda: ended == ["w0"], 10.0), "and it knows the ranks"
        server.close()  # and with it whoever would listen
        for session in list(first._sessions.values()):
            session.close()
        assert until(lambda: not first._sessions, 5.0)
        os.kill(pids[1], signal.SIGKILL)
        killed = time.time()
        assert until(lambda: [e["worker"] for e in own("rank_end")] == ["w0", "w1"], 15.0)
        assert own("rank_end")[-1].t_wall - killed < 10.0 and "in compute of step 7" in own("rank_end")[-1]["says"]
        assert ended == ["w0"]
        (tmp_path / "next").mkdir()
        later, _ = serve(tmp_path / "next")
        next_one, later._listener = desk(tmp_path, conf, on_end=ended.append, on_quarantine=print)
        for number, pid in enumerate(pids):
            next_one.rank(f"w{number}", pid, node)
        rendezvous.announce(tmp_path, rendezvous.Announcement(2, later.address, later.address, "secret"))
        assert until(lambda: ended == ["w0", "w1"], 15.0), "what was found in the meantime is told"
        assert next_one.examine(node, "w2", pids[2], 2.0)["page"]["worker"] == "w2"
        keeper.close()
        next_one.close()
        assert lives[-1].wait(10) == 0
        later.close()
        assert {e["state"] for e in own("agent")} == {"up", "down"}
    finally:
        keeper.close()
        for process in lives:
            process.kill()
            process.wait()


def test_an_agent_ends_when_nobody_is_left(ranks: Ranks, tmp_path: Path) -> None:
    conf = load_config(SFT)
    server, _ = serve(tmp_path)
    agents, server._listener = desk(tmp_path, conf)
    pid = ranks.start("w0")
    ranks.await_up()
    agents.rank("w0", pid, "n")
    process = spawn(spec_of(tmp_path, server.address, "n"))
    try:
        assert until(lambda: agents.examine("n", "w0", pid, 0.5).get("page") is not None, 30.0)
        server.close()
        for session in list(agents._sessions.values()):
            session.close()
        time.sleep(0.7)
        assert process.poll() is None, "while a rank lives it watches"
        os.kill(pid, signal.SIGKILL)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def test_a_hello_without_the_secret_and_nonsense_are_refused(tmp_path: Path) -> None:
    from everstep.recovery import wire

    server, _ = serve(tmp_path)
    agents, server._listener = desk(tmp_path, load_config(SFT))
    for hello, nonsense in (({"token": "wrong", "agent": "n", "sees": []}, None), ({"token": "secret", "agent": "n", "sees": []}, {"type": "event", "event": "commit", "fields": {}}),
                            ({"token": "secret", "agent": "n", "sees": []}, {"type": "what"})):
        with socket.create_connection(server.address) as sock:
            wire.send(sock, hello)
            if nonsense:
                wire.send(sock, nonsense)
            sock.settimeout(5.0)
            with pytest.raises(wire.Closed):
                wire.receive(sock)
    assert agents.examine("n", "w0", 1, 0.1) == {"missing": "the agent of n did not answer in 0.1 s"}
    done = subprocess.run([sys.executable, "-m", "everstep.node.channel"], input=json.dumps({"node": "n"}), capture_output=True, text=True)
    assert done.returncode != 0
    server.close()


def test_a_round_is_cheap(tmp_path: Path) -> None:
    """Of one second; the measured value is in docs/telemetry.md."""
    assert min(round_cost_s([os.getpid()] * 2, str(tmp_path), rounds=5) for _ in range(3)) < 0.05
