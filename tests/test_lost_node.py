"""A node that falls silent: a second Ray node on this machine under a host name of its own, all of whose processes are frozen at once.

Nothing of it closes a connection or answers a signal, which is how a node that lost its power or its network looks from outside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.runs import SFT, Finished, command
from tests.test_faults import assert_invariants

from everstep.telemetry.events import EventLogError, of_kind, read_events

NODE = "everstep-lost-node"
QUICK_NOTICE = {"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "1000",
                "RAY_health_check_failure_threshold": "4", "RAY_AUTH_MODE": "disabled"}


def namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:
        return ""  # gone


def tree(pid: int) -> set[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return {pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))}
    return set()


@pytest.fixture
def cluster(request) -> Iterator[tuple[str, int]]:
    """A head with room for two processes, and another node for one, or for as many as a test asks for: the address, and the other node's process.
    The test may also say after how many of its questions Ray calls a node that does not answer dead: one takes 1 to 1.5 s.

    In a folder of its own: what `ray start` notes in Ray's usual one would lead every later `ray.init` on this machine here.
    """
    if os.geteuid() or subprocess.run(["unshare", "--uts", "true"], check=False).returncode:
        pytest.skip("a host name of its own takes a namespace, and that takes root")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray = str(Path(sys.executable).with_name("ray"))
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: sockets lie in it
    room, questions = getattr(request, "param", (1, 4))
    env = os.environ | QUICK_NOTICE | {"RAY_TMPDIR": folder, "RAY_health_check_failure_threshold": str(questions)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
    head = subprocess.Popen([ray, "start", "--head", f"--port={port}", "--num-cpus=2", "--node-ip-address=127.0.0.1",
                             "--include-dashboard=false", "--object-store-memory=100000000", "--block"], **quiet)
    node: subprocess.Popen[bytes] | None = None
    try:
        end = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < end:
            time.sleep(0.2)
        node = subprocess.Popen(
            ["unshare", "--uts", "sh", "-c",
             f"hostname {NODE} && exec {ray} start --address=127.0.0.1:{port} --num-cpus={room} --node-ip-address=127.0.0.2 "
             "--object-store-memory=100000000 --block"], **quiet)
        until(lambda: namespace(node.pid) != namespace(os.getpid()), 10.0)
        yield f"127.0.0.1:{port}", node.pid
    finally:
        mine = tree(head.pid) | (tree(node.pid) | of_namespace(node.pid) if node else set())
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        head.wait()
        if node:
            node.wait()
        shutil.rmtree(folder, ignore_errors=True)


def of_namespace(pid: int) -> set[int]:
    name = namespace(pid)
    assert name != namespace(os.getpid()), "these would be all processes of the machine"
    return {p for p in psutil.pids() if name and namespace(p) == name}


@pytest.mark.full
@pytest.mark.timeout(280)
def test_a_node_that_falls_silent_is_given_up_and_its_place_filled_once_it_must_have_fenced_itself(tmp_path, cluster):
    address, node = cluster
    run = command(["train", SFT, f"run_dir={tmp_path}/run", f"ray.address={address}", "device=cpu", "telemetry.tensorboard=false",
                   "telemetry.progress=none", "layout.spares=1", "sft.steps=4000", "checkpoint.at_end=false", "train.verify_every=50",
                   "recovery.heartbeat_s=0.2", "recovery.silence_s=3", "recovery.fence_s=4", "env.GLOO_SOCKET_IFNAME=lo"], **QUICK_NOTICE)
    try:
        commits = lambda: len(of_kind(events(tmp_path), "commit"))
        assert until(lambda: commits() > 10 or run.poll() is not None, 120) and run.poll() is None, run.communicate()
        elsewhere = {e.who for e in of_kind(events(tmp_path), "process_start") if e.host == NODE}
        assert len(elsewhere) == 1
        frozen = time.time()
        for pid in of_namespace(node):
            os.kill(pid, signal.SIGSTOP)
        assert until(lambda: bool(of_kind(events(tmp_path), "join")) or run.poll() is not None, 120) and run.poll() is None, run.communicate()
    finally:
        interrupt(run)
    done = ended_by_interrupt(run, tmp_path)
    (death,), (expel,) = done.kind("death"), done.kind("expel")
    assert death["worker"] in elsewhere and "silent for 3 s" in death["cause"] and death.t_wall - frozen < 8
    assert expel.t_wall - death.t_wall > 4.0, "its place was filled before it had to be fenced"
    last = done.kind("commit")[-1]
    assert last["members"] == [0, 1]
    assert_invariants(done, steps=last.step)


@pytest.mark.full
@pytest.mark.timeout(560)
@pytest.mark.parametrize("cluster", [(2, 45)], indirect=True)
def test_a_node_that_ray_is_late_to_call_dead_ends_no_run_and_its_lease_is_waited_for_once(tmp_path, cluster):
    """Ray's defaults take more than a minute: longer than anybody waits for a process to die. Two processes of the run are on that node."""
    address, node = cluster
    run = command(["train", SFT, f"run_dir={tmp_path}/run", f"ray.address={address}", "device=cpu", "telemetry.tensorboard=false",
                   "telemetry.progress=none", "layout.replicas=3", "layout.spares=1", "sft.steps=40000", "checkpoint.at_end=false", "train.verify_every=50",
                   "recovery.heartbeat_s=0.2", "recovery.silence_s=3", "recovery.fence_s=8", "recovery.restart_attempts=0", "env.GLOO_SOCKET_IFNAME=lo"],
                  **QUICK_NOTICE)
    try:
        commits = lambda: len(of_kind(events(tmp_path), "commit"))
        assert until(lambda: commits() > 10 or run.poll() is not None, 200) and run.poll() is None, run.communicate()
        elsewhere = {e.who for e in of_kind(events(tmp_path), "process_start") if e.host == NODE}
        assert len(elsewhere) == 2
        for pid in of_namespace(node):
            os.kill(pid, signal.SIGSTOP)
        assert until(lambda: len(of_kind(events(tmp_path), "expel")) == 2 or run.poll() is not None, 200) and run.poll() is None, run.communicate()
        before = commits()
        assert until(lambda: commits() > before + 3 or run.poll() is not None, 60) and run.poll() is None, run.communicate()
    finally:
        interrupt(run)
    done = ended_by_interrupt(run, tmp_path)
    deaths, expels = done.kind("death"), done.kind("expel")
    assert {e["worker"] for e in deaths} == {e["worker"] for e in expels} == elsewhere
    assert min(e.t_wall for e in expels) - max(e.t_wall for e in deaths) > 35.0, "Ray was not late"
    assert abs(expels[0].t_wall - expels[1].t_wall) < 5.0, "the lease of one node was waited for twice"
    told = [line for line in (tmp_path / "run" / "logs" / "latest" / "lead.jsonl").read_text().splitlines() if "is not known to have ended" in line]
    assert len(told) == 2 and all(f"on {NODE}" in line for line in told)
    assert_invariants(done, steps=done.kind("commit")[-1].step)


@pytest.mark.full
@pytest.mark.timeout(280)
def test_a_spare_on_another_node_has_the_copy_of_the_only_replica(tmp_path, cluster):
    """The rank sends its copies to the node of the spare, which goes on from there when the rank dies."""
    address, _ = cluster
    joined = f"import ray, time; ray.init({address!r}, log_to_driver=False)\nwhile sum(n['Alive'] for n in ray.nodes()) < 2: time.sleep(0.2)"
    subprocess.run([sys.executable, "-c", joined], env=os.environ | QUICK_NOTICE, check=True, timeout=120)  # else both would be on the head
    run = command(["train", SFT, f"run_dir={tmp_path}/run", f"ray.address={address}", "device=cpu", "telemetry.tensorboard=false",
                   "telemetry.progress=none", "layout.replicas=1", "layout.spares=1", "sft.steps=20", "checkpoint.at_end=false",
                   "recovery.memory_checkpoint_every=3", "recovery.restart_attempts=0", "env.GLOO_SOCKET_IFNAME=lo",
                   "faults=[{step: 11, phase: compute, kind: kill}]"], **QUICK_NOTICE)
    out, err = run.communicate(timeout=240)
    assert run.returncode == 0, (out, err)
    done = Finished(tmp_path / "run", events(tmp_path))
    assert_invariants(done, steps=20)
    hosts = {e.who: e.host for e in done.kind("process_start")}
    assert NODE in (hosts["w0"], hosts["w1"]) and hosts["w0"] != hosts["w1"], "either may hold the replica"
    (back,), (death,) = done.kind("rollback"), done.kind("death")
    newest = (death.step - 1) // 3 * 3  # on a busy machine the signal comes a step or two late
    assert back.step in (newest, newest - 3) and back.step > 0 and "the copy in memory" in back["cause"]
    (load,) = done.kind("load")
    (mine,) = {Path(e["path"]).parent.name for e in done.kind("load")}
    assert load.who == "w1" and load["fetched_from"] == "" and len(mine) > 20  # in the folder of its own node
    assert {e["buddy"] for e in done.kind("memory_copy") if e.step and e.who == "w0"} == {"w1"}


def interrupt(run: subprocess.Popen[str]) -> None:
    if run.poll() is None:
        run.send_signal(signal.SIGINT)


def ended_by_interrupt(run: subprocess.Popen[str], tmp_path: Path) -> Finished:
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, (out, err)
    return Finished(tmp_path / "run", events(tmp_path))


def events(tmp_path: Path) -> list:
    with contextlib.suppress(EventLogError):  # not begun yet
        return read_events(tmp_path / "run" / "events")
    return []


def until(condition, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.3)
    return True
