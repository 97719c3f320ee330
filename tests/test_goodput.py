"""Where the time of a run went: parts that add up to the whole, whatever the log holds, and each of them where it should be."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.test_telemetry import Story, kill_and_rejoin, story

from everstep.telemetry.events import EVENTS, Event
from everstep.telemetry.goodput import PARTS, Goodput, goodput
from everstep.telemetry.ongoing import Ongoing
from everstep.telemetry.recoveries import recoveries

__all__ = ["story"]  # the fixture


def formed(story: Story, t: float | None = None) -> None:
    for replica, rank in enumerate(story.ranks):
        rank.emit("form", epoch=story.epoch, replica=replica, rank=0, build=0)


def seconds(found: Goodput, replica: int) -> dict[str, float]:
    return {part: round(s, 6) for part, s in found.by_place[replica, 0].items() if s > 1e-9}


def test_a_run_without_faults(story: Story) -> None:
    story.start()
    formed(story)
    story.now += 7.0   # models are built
    story.step(1)      # one after the other replica computes for 1 s
    story.now += 0.5   # the lead makes a batch
    story.step(2)
    story.lead.emit("save", step=2, path="x", checkpoint_bytes=1, seconds=0.25)
    story.now += 0.75
    story.lead.emit("run_end", status="done")
    found = goodput(story.events)
    assert found.wall_s == pytest.approx(7 + 2 + 0.5 + 2 + 0.75)
    assert seconds(found, 0) == seconds(found, 1) == {"restart": 7.0, "productive": 4.0 - 0.25, "checkpoint": 0.25, "idle": 1.25}
    assert found.samples_per_second == pytest.approx(8 / found.wall_s)
    assert found.ettr == pytest.approx(3.75 / found.wall_s) and sum(found.share.values()) == pytest.approx(1)


def test_a_kill_in_numbers(story: Story) -> None:
    """Of the survivor: 0.30 s stalled, then the whole step once more, for it was dealt anew. Of the victim: no spare until it joins."""
    formed(story)
    kill_and_rejoin(story)
    found = goodput(story.events)
    assert seconds(found, 0)["stalled"] == pytest.approx(0.30) and seconds(found, 0)["redone"] == pytest.approx(2.0)
    assert seconds(found, 1)["stalled"] == pytest.approx(0.25)       # from the kill to its detection
    assert seconds(found, 1)["vacant"] == pytest.approx(4.0 - 0.25)  # from there to the join
    assert "redone" not in seconds(found, 1)


def test_a_spare_is_formed_and_heals(story: Story) -> None:
    story.start()
    formed(story)
    story.step(1)
    story.begin(2)
    story.kill(2, detect_s=0.25)
    story.now += 1.0
    story.lead.emit("spare_used", replica=1, rank=0, spare="w2")
    story.now += 2.0
    story.epoch = 2
    story.ranks[1].emit("heal_start", step=1, epoch=2, replica=1, rank=0, source=0)
    story.now += 0.5
    story.lead.emit("join", step=2, epoch=2, replica=1, members=[0, 1])
    parts = seconds(goodput(story.events), 1)
    assert (parts["stalled"], parts["vacant"], parts["restart"], parts["healing"]) == (0.25, 1.0, 2.0, 0.5)


def test_what_a_restart_takes_back_was_not_productive(story: Story) -> None:
    story.start()
    formed(story)
    story.step(1)
    story.step(2)
    story.begin(3)
    story.compute(3, 0, [0, 2])
    story.lead.emit("run_end", status="failed")
    before = goodput(story.events)
    story.now += 10.0
    story.start(step=1, attempt=2)
    story.now += 5.0
    story.step(2)
    story.lead.emit("run_end", status="done")
    found = goodput(story.events)
    assert seconds(before, 0) == {"productive": 4.0, "redone": 1.0}  # step 3 never came to be
    assert seconds(found, 0) == {"productive": 2.0 + 2.0, "redone": 2.0 + 1.0, "restart": 15.0}


def test_of_a_running_run_the_step_in_progress_counts(story: Story) -> None:
    story.start()
    formed(story)
    story.begin(1)
    story.compute(1, 0, [0, 2], seconds=3.0)
    assert seconds(goodput(story.events, until=1e9 + story.now + 1.0), 0) == {"productive": 4.0}


def soup(seed: int) -> list[Event]:
    """Events of every kind with plausible and implausible fields, in the order of their clocks, from several starts."""
    r = random.Random(seed)
    t, events = 1000.0, []
    workers = [f"w{i}" for i in range(4)]
    for _ in range(r.randint(0, 120)):
        t += r.choice([0.0, 0.0, 0.01, r.random(), 3.0])
        name = r.choice([*EVENTS, "form", "begin", "compute", "computed", "commit", "apply", "death", "join", "run_start", "reduce"])
        fields = {"replica": r.randint(-1 if name == "death" else 0, 2), "rank": r.randint(0, 1), "slots": r.sample(range(4), r.randint(0, 3)),
                  "deal": r.randint(1, 3), "salvage": r.random() < 0.3, "seconds": r.random() * 4, "members": [0, 1], "samples": ["0/1"],
                  "method": r.choice(["generate", "state_hash"]), "kind": "kill" if name == "fault" else "apply", "cause": "x",
                  "worker": r.choice(workers), "spare": "w3", "replicas": 3, "status": "done", "values": {}, "attempt": 1}
        epoch = (1, r.randint(1, 6))
        events.append(Event(t, t, r.choice([*workers, "lead"]), 1, "here", epoch, r.randint(0, 6), name, fields))
    return events


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_parts_always_sum_to_the_whole(seed: int) -> None:
    events = soup(seed)
    found = goodput(events)
    for place, parts in found.by_place.items():
        assert set(parts) == set(PARTS) and all(s >= 0 for s in parts.values())
        assert sum(parts.values()) == pytest.approx(found.wall_s, abs=1e-6)
        spans = found.spans[place]
        assert all(a[1] == b[0] and a[2] != b[2] for a, b in itertools.pairwise(spans)), "gapless, and no seam inside a part"
    assert 0 <= found.ettr <= 1 + 1e-9 and 0 <= found.goodput <= 1 + 1e-9
    assert found.goodput <= found.ettr + 1e-9


def test_numbers_of_a_recovery_go_with_the_next_logged_step(story: Story) -> None:
    kill_and_rejoin(story)
    now = [0.0]
    ongoing = Ongoing(lambda: now[0])
    (recovery,) = recoveries(story.events)
    ongoing.recovered(recovery, story.events)
    now[0] = 10.0
    first = ongoing.metrics({"timing_s/step": 4.0, "ft/attempts": 1.0}, deaths=1, spares=2)
    assert first["ft/detect_s"] == pytest.approx(0.25) and first["ft/full_strength_s"] == pytest.approx(4.0)
    assert (first["ft/goodput"], first["ft/deaths"], first["ft/spares"]) == (0.4, 1.0, 2.0)
    second = ongoing.metrics({"timing_s/step": 4.0, "ft/attempts": 2.0}, deaths=1, spares=2)
    assert "ft/detect_s" not in second and second["ft/goodput"] == 0.4, "a step that took two attempts adds nothing"
