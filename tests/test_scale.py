"""The simulation of many deaths against answers that can be had without it, and the coordinator's benchmark with few ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.control_plane import measure
from benchmarks.scale import LLAMA3_GPU_HOURS, Constants, Job, drawn_deaths, restarting, simulate

NEVER = itertools.repeat((math.inf, True, False))
JOB = Job(replicas=4, ranks=2, spares=1, slots=32, fixed_s=1.0, slot_s=0.5, state_bytes=0.0)


def deaths(*of: tuple[float, bool, bool]) -> Iterator[tuple[float, bool, bool]]:
    return itertools.chain(of, NEVER)


def test_without_deaths_all_time_is_good() -> None:
    found = simulate(JOB, Constants(), NEVER, 1000.0)
    assert found.goodput == pytest.approx(1.0) and found.deaths == 0 and found.mean_members == pytest.approx(4.0)
    assert simulate(JOB, Constants(), NEVER, math.inf, steps=10).seconds == pytest.approx(10 * JOB.step_s(4))


def test_one_death_costs_what_its_parts_add_up_to() -> None:
    c = Constants(noticed_s=0.1, again_s=0.2, form_s=3.0, cold_s=1e9)
    step = JOB.step_s(4)  # 1 + 0.5 * 8 = 5 s
    found = simulate(JOB, c, deaths((7.0, True, False)), math.inf, steps=10)  # in the second step, which has 3 s to go
    # it takes 0.2 s more and the salvage of 8 slots by three; the spare is back 3 s and a step of three replicas after the death
    dies = 2 * step + 0.2 + 0.5 * math.ceil(8 / 3)
    returns = 7.0 + 3.0 + JOB.step_s(3)
    degraded = math.ceil((returns - dies) / JOB.step_s(3))
    assert found.seconds == pytest.approx(dies + degraded * JOB.step_s(3) + (8 - degraded) * step) and found.deaths == 1


def test_a_spare_that_dies_costs_nothing_and_the_last_replica_everything() -> None:
    c = Constants()
    assert simulate(JOB, c, deaths((7.0, False, True)), 1000.0).goodput == pytest.approx(1.0)
    alone = Job(replicas=1, ranks=2, spares=0, slots=8, fixed_s=1.0, slot_s=0.5, state_bytes=0.0)
    found = simulate(alone, c, deaths((7.0, True, False)), 100_000.0)
    assert found.all_lost == 1 and found.goodput < 0.99


def test_links_beyond_the_standbys_and_broken_devices_cost_more() -> None:
    many = Job(replicas=12, ranks=2, spares=0, slots=96, fixed_s=1.0, slot_s=0.5, state_bytes=0.0)
    ready = Job(**{**many.__dict__, "standbys_up_to": 12})
    one = ((7.0, True, False),)
    assert simulate(many, Constants(), deaths(*one), math.inf, 50).seconds == pytest.approx(simulate(ready, Constants(), deaths(*one), math.inf, 50).seconds + Constants().link_s)
    broken = simulate(ready, Constants(), deaths((7.0, True, True)), math.inf, 1000).seconds
    assert broken > simulate(ready, Constants(), deaths((7.0, True, False)), math.inf, 1000).seconds + 10


def test_the_rate_of_deaths_and_the_rival_are_what_theory_says() -> None:
    job = Job(256, 64, 0, 2048, 1.0, 1.0, 0.0)
    times = [t for t, _, _ in itertools.islice(drawn_deaths(job, LLAMA3_GPU_HOURS, Constants(), 1), 4000)]
    assert 4000 / times[-1] * 3600 == pytest.approx(16_384 / LLAMA3_GPU_HOURS, rel=0.06)
    # Young's: what is lost is nearly sqrt(2 save / mtbf) and restart / mtbf, where both are small
    c, mtbf = Constants(save_s=1.0, restart_s=10.0), LLAMA3_GPU_HOURS / 16_384 * 3600
    assert 1 - restarting(job, c, LLAMA3_GPU_HOURS, 2, 5e7) == pytest.approx(math.sqrt(2 * c.save_s / mtbf) + c.restart_s / mtbf, rel=0.1)


def test_a_few_fake_ranks_and_the_real_coordinator(tmp_path: Path) -> None:
    found = measure(ranks=12, per_replica=3, steps=4, kills=2, processes=2, folder=tmp_path)
    assert found["ranks"] == 12 and found["replicas"] == 4 and 0 < found["commit_first_s"]["median"] <= found["commit_all_s"]["median"] < 30
    assert found["view_s"] is not None and (tmp_path / "commits.log").stat().st_size > 4 * found["record_bytes"] / 2
