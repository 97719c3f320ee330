"""What a node tells of itself: the kernel's log, GPUs (NVML as it looks, for what a machine without one cannot have), classes of failures,
and `everstep doctor` on this machine."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.support.runs import SFT

from everstep import cli, doctor
from everstep.cluster.agents import Agents
from everstep.cluster.host import WorkerInfo
from everstep.cluster.post_mortem import PostMortem
from everstep.config.load import load_config
from everstep.run_dir import RunDir
from everstep.telemetry import health
from everstep.telemetry.events import EventLog, read_events
from everstep.telemetry.health import (
    Sign,
    classify,
    gpu_signs,
    host_numbers,
    host_signs,
    kernel_log,
    kernel_signs,
    newest_stamp,
)


@pytest.mark.parametrize(("line", "kind", "severity", "says"), [
    ("[ 12.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", "gpu", "bad", "Xid 79"),
    ("[ 12.5] NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', DBE (double bit error)", "gpu", "bad", "Xid 48"),
    ("NVRM: Xid (PCI:0000:c1:00): 74, pid=99, NVLink: fatal error", "network", "bad", "Xid 74"),
    ("NVRM: Xid (PCI:0000:3b:00): 13, pid=1234, Graphics Exception", "software", "warning", "of the application"),
    ("[9.1] Out of memory: Killed process 4242 (python3) total-vm:1kB", "host", "bad", "process 4242 (python3)"),
    ("Memory cgroup out of memory: Killed process 77 (ray::Rank) total-vm", "host", "bad", "cgroup"),
    ("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: 8c00", "host", "bad", "CPU 3"),
    ("blk_update_request: I/O error, dev nvme0n1, sector 12", "host", "bad", "nvme0n1"),
    ("mlx5_core 0000:12:00.0 ib0: Link is Down", "network", "bad", "ib0"),
    ("nfs: server filer7 not responding, still trying", "dependency", "bad", "filer7"),
    ("python[31422]: segfault at 0 ip 00007f", "software", "warning", "process 31422"),
])
def test_a_line_of_the_kernels_log(line: str, kind: str, severity: str, says: str) -> None:
    (sign,) = kernel_signs(["usb 1-1: new device", line, "eth0: Link is Up"], ours=True)
    assert (sign.kind, sign.severity) == (kind, severity) and says in sign.what


def test_a_line_that_goes_on_is_as_old_as_its_beginning(tmp_path: Path, monkeypatch) -> None:
    dmesg = tmp_path / "dmesg"
    dmesg.write_text("#!/bin/sh\nprintf '[    1.5] one\\n   and more\\n[    2.5] two\\n   and more of it\\n'")
    dmesg.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert kernel_log(after=1.5) == ["[    2.5] two", "   and more of it"] and kernel_log(after=newest_stamp()) == []
    assert len(kernel_log()) == 4


def test_old_lines_of_the_log_count_only_if_asked_for() -> None:
    if not (lines := kernel_log()):
        pytest.skip("this machine's kernel log may not be read")
    newest = newest_stamp()
    assert len([line for line in kernel_log(after=newest) if line in lines]) == 0 < newest


def test_in_a_container_the_logs_process_numbers_are_the_hosts() -> None:
    (sign,) = kernel_signs(["python[31422]: segfault at 0 ip 00007f"], ours=False)
    assert "31422" in sign.what
    assert classify("its process ended (pidfd)", 31422, [sign]).evidence == ("its process ended (pidfd)",)


# -- GPUs ----------------------------------------------------------------------------------------------------------------------------


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class Nvml:
    """As ``pynvml`` looks, with GPUs that the test describes: what it does not set is well, or not supported."""

    NVMLError, NVMLError_NotSupported = NVMLError, NVMLError_NotSupported
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU = 1, 0, 0
    nvmlClocksThrottleReasonHwThermalSlowdown, nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x40, 0x80
    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_ERROR_DL_REPLAY = 18, 0

    def __init__(self, *gpus: dict):
        self.gpus, self.open = gpus, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict:
        if self.gpus[index].get("lost"):
            raise NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetTotalEccErrors(self, gpu: dict, kind: int, counter: int) -> int:
        if "ecc" not in gpu:
            raise NVMLError_NotSupported("Not Supported")
        return gpu["ecc"]

    def nvmlDeviceGetRemappedRows(self, gpu: dict) -> tuple[int, int, int, int]:
        return gpu.get("rows", (0, 0, 0, 0))

    def nvmlDeviceGetTemperature(self, gpu: dict, sensor: int) -> int:
        return gpu.get("degrees", 45)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: dict) -> int:
        return gpu.get("throttle", 0)

    def nvmlDeviceGetNvLinkState(self, gpu: dict, link: int) -> int:
        links = gpu.get("links", ())
        if link >= len(links):
            raise NVMLError("Invalid Argument")
        return links[link]

    def nvmlDeviceGetNvLinkErrorCounter(self, gpu: dict, link: int, counter: int) -> int:
        return gpu.get("replays", {}).get(link, 0)


@pytest.mark.parametrize(("gpu", "kind", "severity", "says"), [
    ({"ecc": 3}, "gpu", "bad", "3 uncorrectable"),
    ({"rows": (1, 0, 1, 0)}, "gpu", "bad", "waits to be remapped"),
    ({"rows": (0, 1, 0, 1)}, "gpu", "bad", "could not be remapped"),
    ({"degrees": 93}, "gpu", "warning", "93 degrees"),
    ({"throttle": 0x40}, "gpu", "warning", "heat"),
    ({"throttle": 0x80}, "gpu", "warning", "power"),
    ({"links": (1, 0, 1)}, "network", "warning", "NVLink 1 is down"),
    ({"links": (1, 1), "replays": {1: 5}}, "network", "warning", "NVLink 1: 5 replays"),
    ({"lost": True}, "gpu", "bad", "does not answer"),
])
def test_a_sick_gpu_is_found_among_healthy_ones(gpu: dict, kind: str, severity: str, says: str) -> None:
    nvml = Nvml({"ecc": 0, "links": (1, 1)}, gpu, {})
    (sign,) = gpu_signs(nvml)
    assert (sign.kind, sign.severity, sign.device) == (kind, severity, "1") and says in sign.what
    assert nvml.open == 0


def test_every_name_of_nvml_that_is_used_exists_in_the_real_one() -> None:
    import pynvml

    named = {name for name in dir(Nvml) if name.lower().startswith("nvml")}
    assert {name for name in named if not hasattr(pynvml, name)} == set()


def test_a_full_disk_and_one_that_is_gone(tmp_path: Path, monkeypatch) -> None:
    assert host_signs([str(tmp_path)]) == [] or host_signs([str(tmp_path)])[0].kind == "host"
    monkeypatch.setattr(health, "DISK_FREE_BYTES", 1 << 60)
    assert any("MiB are free" in s.what and s.severity == "bad" for s in host_signs([str(tmp_path)]))
    (sign,) = [s for s in host_signs([str(tmp_path / "none")]) if s.device]
    assert sign.kind == "dependency"


# -- classes of failures -----------------------------------------------------------------------------------------------------------------

OOM = Sign("host", "bad", "the kernel killed process 42 (python): out of memory")
ECC = Sign("gpu", "bad", "3 uncorrectable memory errors", "1")


@pytest.mark.parametrize(("cause", "signs", "again", "kind"), [
    ("its process ended (pidfd)", [OOM], False, "host"),
    ("its process ended (pidfd)", [ECC, OOM], False, "host"),        # the kernel names this very process
    ("its process ended (pidfd)", [ECC], False, "gpu"),
    ("its process ended (pidfd)", [], False, "software"),
    ("its process ended (pidfd)", [], True, "data"),
    ("out of memory in train_step: std::bad_alloc", [], False, "host"),
    ("silent for 30 s (last: step 5, compute)", [], False, "software"),
    ("silent for 30 s (last: step 5, compute)", [Sign("network", "bad", "network link ib0 is down")], False, "network"),
    ("fenced itself (nothing was heard)", [], False, "network"),
    ("corruption: its state differs from that of the other replicas", [], False, "gpu"),
    ("straggler: compute takes 1.5 times", [ECC], False, "maintenance"),
    ("no progress: step 5, compute, 120 s after its peers left it", [Sign("gpu", "warning", "93 degrees")], False, "software"),
])
def test_the_class_of_a_death(cause: str, signs: list[Sign], again: bool, kind: str) -> None:
    verdict = classify(cause, 42, signs, again)
    assert verdict.kind == kind and verdict.evidence


def test_a_real_crash_is_found_in_the_kernels_log(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "lead.jsonl", "lead")
    agents = Agents(load_config(SFT), RunDir(tmp_path, 1), events)
    post_mortem = PostMortem(events, lambda info: agents.examine(info.host, info.worker_id, info.pid, 1.0))
    before = newest_stamp()
    crashed = subprocess.Popen([sys.executable, "-c", "import ctypes; ctypes.string_at(0)"], stderr=subprocess.DEVNULL)
    assert crashed.wait() == -signal.SIGSEGV
    post_mortem.died(WorkerInfo("w0", crashed.pid, os.uname().nodename, "n"), (1, 0), 5, "its process ended (pidfd)", suspected=False)
    post_mortem.close()
    (found,) = read_events(tmp_path)
    assert (found.event, found["replica"], found.step) == ("failure", 1, 5)
    if any(f"[{crashed.pid}]" in line and "segfault" in line for line in kernel_log(after=before)) and host_numbers():
        assert found["failure_class"] == "software" and f"process {crashed.pid}" in found["evidence"][0]


# -- doctor ------------------------------------------------------------------------------------------------------------------------------


def test_a_machine_that_is_well(tmp_path: Path, capsys) -> None:
    code = cli.run(["doctor", str(tmp_path), "--device", "cpu", "--seconds", "0.1", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == (3 if told["state"] == "bad" else 0)
    states = {check["name"]: check["state"] for check in told["checks"]}
    assert [states[name] for name in ("matmul", "memory", "all-reduce", "disk")] == ["ok"] * 4, told
    assert states["start"] in ("ok", "warning"), "a warning where no byte code is kept"
    measured = {name: value for check in told["checks"] for name, value in check["measured"].items()}
    assert min(measured[name] for name in ("tflops", "gb_per_s", "bus_gb_per_s", "write_mb_per_s")) > 0
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_what_is_over_makes_no_machine_unfit(monkeypatch) -> None:
    lines = ["eth0: NIC Link is Down", "nfs: server filer not responding, still trying", "Out of memory: Killed process 7 (python) total-vm:1kB"]
    monkeypatch.setattr(doctor, "process_start", functools.partial(doctor.process_start, "json"))  # sooner
    monkeypatch.setattr(doctor, "kernel_log", lambda: lines)
    assert {f.name: f.state for f in doctor.examine("cpu", [], 1, 0.0)}["kernel log"] == "warning"
    monkeypatch.setattr(doctor, "kernel_log", lambda: [*lines, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."])
    assert {f.name: f.state for f in doctor.examine("cpu", [], 1, 0.0)}["kernel log"] == "bad"


def test_where_every_process_compiles_what_it_imports_it_is_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))  # nothing is compiled yet
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    found = doctor.process_start("everstep.config.schema")
    assert found.state == "warning" and "PYTHONDONTWRITEBYTECODE is set" in found.told and "compileall" in found.told and found.measured["compiled"] > 100
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    found = doctor.process_start("everstep.config.schema")
    assert found.state == "ok" and found.measured["compiled"] == 0, "it is kept now"
    assert doctor.guarded("start", "", lambda: doctor.process_start("everstep.nowhere")).state == "bad"


@pytest.mark.parametrize("arguments", [["--seconds", "inf"], ["--seconds", "nan"], ["--processes", "0"], ["--device", "tpu"]])
def test_doctor_refuses_what_it_cannot_do(arguments: list[str], capsys) -> None:
    assert cli.run(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_one_wrong_element_of_a_product_is_found(monkeypatch) -> None:
    right, calls = torch.matmul, [0]

    def sometimes_wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        product = right(a, b)
        if calls[0] == 3:
            product[100, 7] += 1
        return product

    monkeypatch.setattr(torch, "matmul", sometimes_wrong)
    found = doctor.matmul(torch.device("cpu"), 0.05, size=128)
    assert found.state == "bad" and found.measured["wrong"] == 1 and "1 wrong elements" in found.told


def test_a_device_that_is_wrong_every_time_is_found(monkeypatch) -> None:
    right = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda a, b: right(a, b) * 1.01)
    assert doctor.matmul(torch.device("cpu"), 0.01, size=64).state == "bad"


@pytest.mark.full
def test_a_process_that_cannot_join_the_all_reduce_is_told(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "_reduce", _dies)
    monkeypatch.setattr(doctor, "_ALL_REDUCE_S", 280.0)
    begun = time.monotonic()
    assert doctor.all_reduce("cpu", 2).state == "bad" and time.monotonic() - begun < 200, "nobody waits for the dead"


def _dies(*args: object) -> None:
    os._exit(1)


def test_a_disk_that_cannot_be_written(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    found = doctor.examine("cpu", [str(tmp_path / "file" / "below")], processes=1, seconds=0.01)
    (disk,) = [f for f in found if f.name == "disk"]
    assert disk.state == "bad" and doctor.worst(found) == "bad"
    assert {f.name: f.state for f in found}["all-reduce"] == "skipped"


def test_a_device_that_is_not_there_is_refused(capsys) -> None:
    if not torch.cuda.is_available():
        assert cli.run(["doctor", "--device", "cuda"]) == 2 and "no CUDA device" in capsys.readouterr().err
    assert cli.run(["doctor", "--device", "tpu"]) == 2
