"""Learning rates of every schedule: where they start, bend and end."""

from __future__ import annotations

from itertools import pairwise

import pytest

from everstep.config.schema import OptimizerConfig
from everstep.recipes.schedule import learning_rate

PEAK, LOW = 1.0, 0.1


def rates(steps: int, **settings: object) -> list[float]:
    optimizer = OptimizerConfig(lr=PEAK, min_lr=LOW, **settings)
    return [learning_rate(optimizer, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_every_schedule_warms_up_and_ends_where_it_should(schedule: str) -> None:
    got = rates(20, schedule=schedule, warmup_steps=4)
    assert got[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(a >= b for a, b in pairwise(got[3:])), "never up again"
    assert got[-1] == pytest.approx(PEAK if schedule == "constant" else LOW)


def test_midpoints() -> None:
    assert rates(10, schedule="linear")[4] == pytest.approx(0.55)
    assert rates(10, schedule="cosine")[4] == pytest.approx(0.55)
    assert rates(10, schedule="cosine")[0] > rates(10, schedule="linear")[0]
    assert rates(10, schedule="linear", decay_steps=5)[4:] == pytest.approx([LOW] * 6)


@pytest.mark.parametrize(("form", "middle"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_wsd_is_stable_until_its_decay(form: str, middle: float) -> None:
    got = rates(20, schedule="wsd", warmup_steps=2, wsd_decay_steps=4, wsd_decay=form)
    assert got[1:16] == [PEAK] * 15
    assert got[17] == pytest.approx(LOW + (PEAK - LOW) * middle)
    assert got[16] < PEAK and got[19] == pytest.approx(LOW)
    # The decay ends at decay_steps, if that is set; the low rate stays.
    early = rates(20, schedule="wsd", wsd_decay_steps=4, wsd_decay=form, decay_steps=10)
    assert early[5] == PEAK > early[6] and early[9:] == pytest.approx([LOW] * 11)


def test_wsd_decays_over_a_tenth_by_default_and_never_into_the_warmup() -> None:
    assert rates(40, schedule="wsd")[35:] == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1])
    assert rates(20, schedule="wsd", warmup_steps=19)[18:] == pytest.approx([PEAK, LOW])
