"""A selection of ``python -m benchmarks.parity``: the command, its table, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.parity import (
    CHUNKED,
    ENGINE,
    LAUNCHED,
    LAUNCHED_MOE,
    MOE,
    PACKED,
    STEPS,
    Outcome,
    Row,
    all_rows,
    compare,
)
from tests.support.runs import ROOT


def parity(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.parity", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.full
def test_the_command_compares_and_says_so(tmp_path: Path) -> None:
    done = parity("--only", "engine LoRA TP2 SP, recompute", "--out", f"{tmp_path}/out.json", "--markdown", f"{tmp_path}/page.md")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    names = [row["row"]["name"] for row in rows]
    assert names == ["1 rank", "TP2 SP, recompute full"]
    assert all(len(row["losses"]) == len(row["norms"]) == STEPS and row["error"] <= 1e-5 for row in rows)
    assert (tmp_path / "page.md").read_text().count("| equal |") == 1

    strict = parity("--only", "engine full 1 rank, recompute full", "--out", f"{tmp_path}/out.json", "--tolerance", "-1")
    assert strict.returncode == 1 and "differs from one rank by" in strict.stdout


def test_a_difference_a_missing_step_and_nothing_at_all_are_no_match() -> None:
    row, numbers = Row("TP2", {"tp": 2}), [2.0] * STEPS
    reference = Outcome(row, numbers, numbers)
    for losses, says in (
        ([*numbers[:-1], 2.0001], "differs from one rank by 5.0e-05"),
        ([*numbers[:-1], float("nan")], "differs from one rank by nan"),
        (numbers[1:], "9 numbers, the reference has 10"),
    ):
        outcome = Outcome(row, losses, numbers)
        compare(outcome, reference, 1e-5)
        assert says in outcome.problem
    fine = Outcome(row, [*numbers[:-1], 2.00001], numbers)
    compare(fine, reference, 1e-5)
    assert not fine.problem and fine.error == pytest.approx(5e-6)


def test_every_row_has_a_name_of_its_own() -> None:
    names = [row.full_name for row in all_rows()]
    dense = 2 * len(ENGINE + CHUNKED + PACKED) + 4 * (len(LAUNCHED) + 1)
    assert len(names) == len(set(names)) == dense + len(MOE) + 3 + 2 * len(LAUNCHED_MOE)
