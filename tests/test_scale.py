"""The simulation of many deaths against answers that can be had without it, and the coordinator's benchmark with few ranks."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from benchmarks import scale
from benchmarks.control_plane import measure
from benchmarks.scale import LLAMA3_GPU_HOURS, Constants, Death, Job, drawn_deaths, restarting, simulate

from everstep.telemetry import events as events_module
from everstep.telemetry.events import EventLog
from everstep.telemetry.recoveries import Recovery

JOB = Job(replicas=4, ranks=2, spares=1, slots=32, fixed_s=1.0, slot_s=0.5, state_bytes=0.0)


def test_without_deaths_all_time_is_good() -> None:
    found = simulate(JOB, Constants(), iter(()), 1000.0)
    assert found.goodput == pytest.approx(1.0) and found.deaths == 0 and found.mean_members == pytest.approx(4.0)
    assert simulate(JOB, Constants(), iter(()), steps=10).seconds == pytest.approx(10 * JOB.step_s(4))


def test_one_death_costs_what_its_parts_add_up_to() -> None:
    c = Constants(noticed_s=0.1, again_s=0.2, form_s=3.0, cold_s=1e9)
    step = JOB.step_s(4)  # 1 + 0.5 * 8 = 5 s
    found = simulate(JOB, c, iter([Death(7.0)]), steps=10)  # in the second step, which has 3 s to go
    # it takes 0.2 s more and the salvage of 8 slots by three; the spare is back 3 s and a step of three replicas after the death
    dies = 2 * step + 0.2 + 0.5 * math.ceil(8 / 3)
    returns = 7.0 + 3.0 + JOB.step_s(3)
    degraded = math.ceil((returns - dies) / JOB.step_s(3))
    assert found.seconds == pytest.approx(dies + degraded * JOB.step_s(3) + (8 - degraded) * step) and found.deaths == 1


def test_a_spare_that_dies_costs_nothing_and_the_last_replica_everything() -> None:
    c = Constants()
    assert simulate(JOB, c, iter([Death(7.0, of_member=False, broken=True)]), 1000.0).goodput == pytest.approx(1.0)
    alone = Job(replicas=1, ranks=2, spares=0, slots=8, fixed_s=1.0, slot_s=0.5, state_bytes=0.0)
    found = simulate(alone, c, iter([Death(7.0)]), 100_000.0)
    assert found.all_lost == 1 and found.goodput < 0.99


def test_links_beyond_the_standbys_and_broken_devices_cost_more() -> None:
    many = Job(replicas=12, ranks=2, spares=0, slots=96, fixed_s=1.0, slot_s=0.5, state_bytes=0.0)
    ready = Job(**{**many.__dict__, "standbys_up_to": 12})
    one = [Death(7.0)]
    assert simulate(many, Constants(), iter(one), steps=50).seconds == pytest.approx(simulate(ready, Constants(), iter(one), steps=50).seconds + Constants().link_s)
    broken = simulate(ready, Constants(), iter([Death(7.0, broken=True)]), steps=1000).seconds
    assert broken > simulate(ready, Constants(), iter([Death(7.0)]), steps=1000).seconds + 10


def test_a_spare_is_filled_up_again_and_who_lost_all_is_told() -> None:
    """A death every 40 s: with a new spare after 10 s each costs alike; without, there is nobody left before the end."""
    c = Constants(noticed_s=0.1, again_s=0.2, form_s=3.0, cold_s=10.0)
    times = [7.0 + 40 * i for i in range(20)]
    one, two = (simulate(JOB, c, iter(map(Death, times[:count])), steps=200).seconds for count in (1, 2))
    all_ = simulate(JOB, c, iter(map(Death, times)), steps=200)
    assert all_.deaths == 20 and all_.seconds - 200 * JOB.step_s(4) == pytest.approx(20 * (two - one), rel=0.25)
    with pytest.raises(ValueError, match=r"nobody is left after .* of 200 steps, and nobody comes"):
        simulate(JOB, Constants(cold_s=math.inf, restart_s=0.0), iter(map(Death, times)), steps=200)


def test_a_run_is_reproduced_from_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas and a spare, four slots: steps of 1 s, of one replica 1.6 s; two deaths, whose steps take what salvage costs more."""
    clock, log, found = [1000.0], EventLog(tmp_path / "events" / "lead.jsonl", "lead"), []
    monkeypatch.setattr(events_module.time, "time", lambda: clock[0])
    log.emit("run_start", step=0, attempt=1, recipe="sft", launcher="ray", replicas=2, spares=1)
    for step in range(1, 41):
        log.emit("begin", step=step, epoch=1, members=[0, 1], samples=[])
        alone = any(step in (died + 1, died + 2) for died in (10, 25))  # the spare comes after two steps
        for replica in [0] if alone else [0, 1]:
            log.emit("computed", step=step, epoch=1, replica=replica, rank=0, slots=[0, 1, 2, 3] if alone else [2 * replica, 2 * replica + 1],
                     deal=1, salvage=False, seconds=0.5)
        if step in (10, 25):
            at = clock[0] + 0.5
            found.append(Recovery(1, 0, "killed", step, at, False, stall_s=0.05, full_strength_s=1.15 + 2 * 1.6))
            clock[0] = at + 3.0
            log.emit("spare_ready", spares=1)
            clock[0] = at + 0.5 + 0.05 + 0.6  # what is left of the step, again computing, two slots of 0.3 s
        else:
            clock[0] += 1.6 if alone else 1.0
    monkeypatch.setattr(scale, "recoveries", lambda events: found)
    made = scale.reproduce(tmp_path)
    assert made["deaths"] == 2 and made["step_s"] == pytest.approx({1: 1.6, 2: 1.0}) and made["slot_s"] == pytest.approx(0.3)
    assert made["refilled_s"] == pytest.approx([3.0, 3.0]) and abs(made["error"]) < 0.03
    assert scale.reproduce(tmp_path, tmp_path)["predicted_s"] == made["predicted_s"]


def test_the_rate_of_deaths_and_the_rival_are_what_theory_says() -> None:
    job = Job(256, 64, 0, 2048, 1.0, 1.0, 0.0)
    times = [death.at_s for death in itertools.islice(drawn_deaths(job, LLAMA3_GPU_HOURS, Constants(), 1), 4000)]
    assert 4000 / times[-1] * 3600 == pytest.approx(16_384 / LLAMA3_GPU_HOURS, rel=0.06)
    # Young's: what is lost is nearly sqrt(2 save / mtbf) and restart / mtbf, where both are small
    c, mtbf = Constants(save_s=1.0, restart_s=10.0), LLAMA3_GPU_HOURS / 16_384 * 3600
    assert 1 - restarting(job, c, LLAMA3_GPU_HOURS, 2, 5e7) == pytest.approx(math.sqrt(2 * c.save_s / mtbf) + c.restart_s / mtbf, rel=0.1)


def test_a_few_fake_ranks_and_the_real_coordinator(tmp_path: Path) -> None:
    found = measure(ranks=12, per_replica=3, steps=4, kills=2, processes=2, folder=tmp_path)
    assert found["ranks"] == 12 and found["replicas"] == 4 and 0 < found["commit_first_s"]["median"] <= found["commit_all_s"]["median"] < 30
    assert found["view_s"] is not None and (tmp_path / "commits.log").stat().st_size > 4 * found["record_bytes"] / 2
