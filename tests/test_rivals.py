"""What the benchmark reads from the logs of rivals: real lines, written by a process that dies and one that goes on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import rivals
from benchmarks.rivals import Log, cost_of, kill
from benchmarks.rivals.measure import SYSTEMS, compare, summary

ROOT = Path(__file__).parents[1]
STEPS = """
import sys, time
from benchmarks import rivals
folder, first, whole = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for step in range(first, first + 3000):
    time.sleep(0.02)
    rivals.say(folder, step, 3 if step >= whole else 2)
"""


def steps(log: Log, first: int, whole: int) -> subprocess.Popen[bytes]:
    """Of two, and from step ``whole`` on of three."""
    return subprocess.Popen([sys.executable, "-c", STEPS, str(log.folder), str(first), str(whole)], cwd=ROOT,
                            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})


def test_the_clock_starts_with_the_signal_and_steps_that_are_made_again_are_lost(tmp_path):
    """A system that goes back 5 steps, is 2 for a while, and 3 again at last."""
    log = Log(tmp_path)
    running = [steps(log, 1, 1)]

    def strike(rows):
        struck = kill(running[0].pid)
        running[0].wait()
        time.sleep(0.3)
        made = log.rows()[-1]["step"]
        running.append(steps(log, made - 4, made + 10))
        return struck

    try:
        cost = cost_of("it", log, 3, 4, strike, random.Random(0), "")
    finally:
        rivals.end(running)
    assert cost.lost_steps == 5 and cost.devices == 4 and 0.015 < cost.step_s < 0.5
    assert cost.committed_s is not None and cost.full_strength_s is not None
    assert 0.3 + 6 * 0.02 < cost.committed_s < cost.full_strength_s - 8 * 0.02 < 20


def test_a_system_that_never_makes_another_step_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(rivals, "DEADLINE_S", 1.0)
    log = Log(tmp_path)
    process = steps(log, 1, 1)
    try:
        with pytest.raises(TimeoutError):  # not warm in time, or nothing after the kill
            cost_of("it", log, 3, 3, lambda rows: kill(process.pid), random.Random(0), "")
    finally:
        rivals.end([process])


def test_results_of_several_commands_add_up_and_what_is_not_installed_is_left_out(tmp_path, monkeypatch, capsys):
    from benchmarks.rivals import Cost, measure

    cost = lambda system: lambda setting, kills: [Cost(system, 3, 0.1, 0.5, 2.0, 1, "")] * kills
    monkeypatch.setitem(SYSTEMS, "ours", cost("ours"))
    monkeypatch.setitem(SYSTEMS, "restart", cost("restart"))
    monkeypatch.setitem(measure._NEEDS, "nvrx", "no_such_package")
    setting = type("Setting", (), {"device": "cpu"})()
    for _ in range(2):
        rows = compare(setting, ["restart", "nvrx"], kills=3, batch=2, append=tmp_path / "all.jsonl")
        assert [row["system"] for row in rows] == ["ours"] * 2 + ["restart"] * 2 + ["ours", "restart"]  # in turn
    capsys.readouterr()
    summary(tmp_path / "all.jsonl")
    said = capsys.readouterr().out
    assert [line.split()[:2] for line in said.splitlines()[1:]] == [["ours", "6"], ["restart", "6"]]
