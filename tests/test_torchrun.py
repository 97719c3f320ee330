"""A rank's environment, and launcher local started by hand: real torchrun, real signals, exit codes that
come through.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.runs import SFT, config

from everstep.cluster.environment import (
    RankEnvironment,
    check_user_environment,
    detect_launcher,
    inside_torchrun,
    read_environment,
    worker_environment,
)
from everstep.cluster.local import torchrun
from everstep.cluster.local.lighthouse import serve
from everstep.config.check import check_plan
from everstep.config.load import load_config
from everstep.config.schema import Config
from everstep.errors import BadInput, ConfigError

GOOD = RankEnvironment(1, 2, 1, "127.0.0.1", 29500, replica=3, epoch="7")


def config_of(**changes: Any) -> Config:
    return Config.model_validate(
        {"recipe": "sft", "launcher": "local", "model": {"path": "m"}, "data": {"source": "d"}, **changes}
    )


# ---------------------------------------------------------------- the environment of a rank


def test_environment_round_trip() -> None:
    assert read_environment(GOOD.variables()) == GOOD
    plain = {k: v for k, v in GOOD.variables().items() if not k.startswith("EVERSTEP_")}
    assert read_environment(plain).replica == 0, "a plain torchrun has one replica"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_nothing_is_guessed(name: str) -> None:
    for broken in ({k: v for k, v in GOOD.variables().items() if k != name}, {**GOOD.variables(), name: ""}):
        with pytest.raises(BadInput, match=rf"variable {name} missing; start the ranks with"):
            read_environment(broken)
    with pytest.raises(BadInput, match="RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT missing"):
        read_environment({})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"RANK": "x"}, "RANK='x' is not a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"EVERSTEP_REPLICA": "one"}, "EVERSTEP_REPLICA='one'"),
    ],
)
def test_nonsense_is_named(change: dict[str, str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        read_environment({**GOOD.variables(), **change})


@pytest.mark.parametrize(
    "name", ["RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "EVERSTEP_EPOCH", "TORCHELASTIC_RUN_ID", "RAY_ADDRESS", "A=B"]
)
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check_user_environment({"NCCL_DEBUG": "INFO", name: "1"})


def test_the_users_variables_reach_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert worker_environment(config_of(env={"NCCL_DEBUG": "INFO"})) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    assert worker_environment(config_of(env={"OMP_NUM_THREADS": "4"}))["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert worker_environment(config_of(device="cpu")) == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(ConfigError, match=r"env\.RANK"):
        worker_environment(config_of(env={"RANK": "0"}))


SEVERAL = ("launcher=local", "replica.id=0", "layout.replicas=2", "layout.spares=0")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((*SEVERAL, "lighthouse.address=foo"), "lighthouse address 'foo' is not of the form"),
        ((*SEVERAL, "lighthouse.address=http://h:65534"), "is not of the form"),
        ((*SEVERAL, "lighthouse.min_replicas=3"), "lighthouse.min_replicas=3 is more than the 2 replicas"),
        ((*SEVERAL, "watch.replace_stragglers=true"), "watch.replace_stragglers is obeyed by the controller of launcher=ray"),
        ((*SEVERAL, "recovery.preemption_file=/tmp/leave"), "recovery.preemption_file is obeyed by the controller"),
        (("launcher=ray", "replica.id=0", "layout.replicas=2"), "replica.id=0 is for launcher=local"),
        (("replica.id=0", "layout.replicas=2"), "launcher=auto would start all 2 of them"),
    ],
)
def test_what_cannot_be_one_replica_of_several_is_refused_before_torchrun(tmp_path: Path, given: tuple[str, ...], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        check_plan(config(SFT, tmp_path, *given), {})


def test_machines_of_one_replica_need_a_secret_of_theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"PET_NNODES": "2", "PET_NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("EVERSTEP_LIGHTHOUSE_TOKEN", raising=False)
    with pytest.raises(BadInput, match=r"spread over 2 machines .* set EVERSTEP_LIGHTHOUSE_TOKEN to the same secret"):
        torchrun.launch(config(SFT, tmp_path, *SEVERAL, "layout.tp=2"), ["-m", "nothing"])


def test_one_number_of_replicas_has_two_names() -> None:
    with pytest.raises(ConfigError, match=r"^replica.count=3 and layout.replicas=2 are two names of one number; give layout.replicas=3"):
        load_config(SFT, ["layout.replicas=2", "replica.count=3"])


@pytest.mark.parametrize(("port", "minimum", "says"), [(70000, 1, "--port 70000"), (65534, 1, "the two after it"), (0, 1, "--port 0"), (29510, 0, "--min-replicas 0")])
def test_a_lighthouse_that_could_not_serve_is_refused(port: int, minimum: int, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        serve("127.0.0.1", port, minimum, 100, 1000, 1000, print, threading.Event())


def test_launcher_is_detected_from_the_environment() -> None:
    torchrun_like = {"TORCHELASTIC_RUN_ID": "x", **GOOD.variables()}
    assert detect_launcher(config_of(launcher="auto"), {}) == "ray"
    assert detect_launcher(config_of(launcher="auto"), torchrun_like) == "local"
    assert detect_launcher(config_of(launcher="auto"), {"RANK": "0"}) == "local"
    assert detect_launcher(config_of(launcher="local"), {}) == "local"
    with pytest.raises(ConfigError, match="launcher=ray inside torchrun"):
        detect_launcher(config_of(launcher="ray"), torchrun_like)


# ---------------------------------------------------------------- torchrun started by us


WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from everstep.cluster.environment import inside_torchrun, read_environment
from everstep.cluster.local.torchrun import launch, report_exit
from everstep.config.schema import Config
from everstep.errors import BadInput, Interrupted, InvariantViolated, NotEnoughReplicas

out, mode = Path(sys.argv[1]), sys.argv[2]
env = read_environment()
(out / f"rank-{env.rank}").write_text(
    f"{os.getpid()} {env.world_size} {env.master_addr} {env.replica} {os.environ['OMP_NUM_THREADS']} {os.environ['MARK']} "
    f"{env.master_port}"
)
if mode == "done":
    config = Config.model_validate({"recipe": "sft", "model": {"path": "m"}, "data": {"source": "d"}})
    try:
        launch(config, [])
    except BadInput as error:
        assert "must not start another" in str(error)
    else:
        sys.exit(99)
    report_exit(None)
elif mode == "typed":
    # rank 1 is quick to complain of the echo, rank 0 knows the cause
    error = BadInput("the cause") if env.rank == 0 else NotEnoughReplicas("the echo")
    time.sleep(0.3 if env.rank == 0 else 0)
    report_exit(error)
    time.sleep(1)
    sys.exit(error.exit_code)
elif mode == "silent4":
    if env.rank == 1:
        sys.exit(4)
    time.sleep(60)
elif mode == "killed":
    if env.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    def stop(*_):
        error = Interrupted("told to stop")
        report_exit(error)
        sys.exit(error.exit_code)
    signal.signal(signal.SIGTERM, stop)
    while True:
        time.sleep(0.05)
elif mode == "hang":
    def stop(number, _):
        (out / f"signal-{env.rank}").write_text(signal.Signals(number).name)
        error = Interrupted("stopped in order")
        report_exit(error)
        sys.exit(error.exit_code)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (out / f"child-{env.rank}").write_text(str(child.pid))
    while True:
        time.sleep(0.05)
"""

PARENT = """
import sys
from everstep.cluster.local.torchrun import launch
from everstep.config.schema import Config
sys.exit(launch(Config.model_validate_json(sys.argv[1]), sys.argv[2:]))
"""


class Launch:
    """``launch`` running in a process of its own, with two ranks of WORKER."""

    def __init__(self, tmp_path: Path, mode: str, **changes: Any):
        self.out = tmp_path
        (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
        config = config_of(layout={"tp": 2}, env={"MARK": "seen"}, **changes).model_dump_json()
        program = [str(tmp_path / "worker.py"), str(tmp_path), mode]
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, config, *program], stderr=subprocess.PIPE, text=True, env=env
        )

    def end(self, timeout: float = 60) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=timeout)
        return self.process.returncode, stderr

    def pids(self, *kinds: str) -> list[int]:
        return [int(path.read_text().split()[0]) for kind in kinds for path in sorted(self.out.glob(f"{kind}-*"))]

    def wait_for(self, pattern: str, count: int, timeout: float = 40) -> None:
        end = time.monotonic() + timeout
        while len([p for p in self.out.glob(pattern) if p.read_text()]) < count:
            assert time.monotonic() < end, f"no {count} x {pattern}: {sorted(p.name for p in self.out.iterdir())}"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)


def alive(pids: list[int]) -> list[int]:
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def gone(pids: list[int], timeout: float) -> bool:
    end = time.monotonic() + timeout
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pids)


def test_ranks_get_their_place_on_the_given_port_and_refuse_another_torchrun(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code, stderr = Launch(tmp_path, "done", local={"port": port}).end()
    assert code == 0, stderr
    for rank in (0, 1):
        assert (tmp_path / f"rank-{rank}").read_text().split()[1:] == ["2", "127.0.0.1", "0", "1", "seen", str(port)]


def test_typed_exit_codes_come_through_with_one_sentence(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "typed")
    code, stderr = launch.end()
    assert code == 2 and stderr.strip() == "the cause", stderr
    assert not alive(launch.pids("rank"))


def test_a_rank_that_only_exits_is_named_with_its_status(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "silent4")
    code, stderr = launch.end()
    assert code == 4 and stderr.strip().startswith("rank 0/1 (process ") and "ended with status 4" in stderr, stderr
    assert not alive(launch.pids("rank"))


def test_a_killed_rank_ends_the_run_resumable_and_names_the_signal(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "killed")
    code, stderr = launch.end()
    assert code == 3 and "was killed by SIGKILL; continue with resume=auto" in stderr, stderr
    assert "Traceback" not in stderr and not alive(launch.pids("rank"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_reaches_the_ranks_and_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    launch = Launch(tmp_path, "hang")
    launch.wait_for("child-*", 2)
    launch.process.send_signal(number)
    code, stderr = launch.end()
    assert code == 130 and stderr.strip() == "stopped in order", stderr
    assert len(list(tmp_path.glob("signal-*"))) == 2, "every rank heard of it"
    assert not alive(launch.pids("rank", "child")), "not even what a rank started in a session of its own"


def test_an_interruption_while_libraries_are_imported_is_not_swallowed() -> None:
    """Imports in which everything is tried, as torch's do: SIGINT in one of them is raised once all are done, and not before."""
    done, before = [], signal.getsignal(signal.SIGINT)  # a shell's background process is born with it ignored
    with pytest.raises(KeyboardInterrupt), torchrun._interrupted_afterwards():
        try:
            signal.raise_signal(signal.SIGINT)
            done.append("one")
        except BaseException:
            done.append("swallowed")
        done.append("another")
    assert done == ["one", "another"] and signal.getsignal(signal.SIGINT) is before


@pytest.mark.full
@pytest.mark.parametrize("after_s", [0.1, 0.4, 0.8, 1.5, 3.0])
def test_an_interruption_ends_it_whenever_it_comes(tmp_path: Path, after_s: float) -> None:
    launch = Launch(tmp_path, "hang")
    while not psutil.Process(launch.process.pid).children():
        assert launch.process.poll() is None
        time.sleep(0.01)
    time.sleep(after_s)
    launch.process.send_signal(signal.SIGINT)
    code, stderr = launch.end()
    assert code == 130, stderr
    assert not alive(launch.pids("rank", "child"))


def test_nothing_is_left_when_torchrun_is_killed(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "hang")
    launch.wait_for("child-*", 2)
    (agent,) = psutil.Process(launch.process.pid).children()
    agent.kill()
    code, stderr = launch.end()
    assert code == 3 and "torchrun ended unexpectedly (status -9); continue with resume=auto" in stderr
    assert not alive(launch.pids("rank", "child"))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_the_ranks_end_when_we_are_killed_ourselves(tmp_path: Path) -> None:
    launch = Launch(tmp_path, "hang")
    launch.wait_for("child-*", 2)
    launch.process.kill()
    assert gone(launch.pids("rank"), timeout=20)
    for child in launch.pids("child"):  # a rank's own detached child is beyond what the kernel tells torchrun
        os.kill(child, signal.SIGKILL)
    launch.end()


def test_bad_input_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    assert not inside_torchrun()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(BadInput, match=rf"local\.port={port} is in use"):
            torchrun.launch(config_of(local={"port": port}), ["worker.py"])
    torchrun.check_port_free(port, "local.port")
    with pytest.raises(ConfigError, match=r"not layout\.replicas=2 layout\.spares=0"):
        torchrun.launch(config_of(layout={"replicas": 2}), ["worker.py"])
    with pytest.raises(ConfigError, match=r"env\.RANK"):
        torchrun.launch(config_of(env={"RANK": "1"}), ["worker.py"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(BadInput, match="must not start another"):
        torchrun.launch(config_of(), ["worker.py"])


def test_report_exit_outside_of_launch_leaves_printing_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERSTEP_EXIT_DIR", raising=False)
    assert torchrun.report_exit(BadInput("x")) is False
