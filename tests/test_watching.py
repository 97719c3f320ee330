"""Being told: alerts through a real web server and real commands, structured logs and their merged view, stragglers, spikes, corruption."""

from __future__ import annotations

import json
import logging
import os
import random
import statistics
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.runs import SFT, config, finish
from tests.test_faults import assert_invariants

from everstep import cli
from everstep.cluster import worker as worker_module
from everstep.cluster.dispatch import ranks_of
from everstep.cluster.forked import ForkedHost
from everstep.cluster.results import minority
from everstep.config.load import load_config
from everstep.config.watch_schema import AlertConfig
from everstep.errors import BadInput
from everstep.layout import Layout
from everstep.telemetry import alerts as alerts_module
from everstep.telemetry import logs
from everstep.telemetry.alerts import QUEUED, Alerts
from everstep.telemetry.events import EventLog, seconds_between
from everstep.telemetry.spikes import Spikes
from everstep.telemetry.stragglers import Straggler, Stragglers, Timed, _median_without

# -- alerts --------------------------------------------------------------------------------------------------------------------------


class Receiver:
    """A web server that keeps what is posted to it. ``wait``: answers only when told to."""

    def __init__(self, status: int = 200, wait: bool = False):
        self.got: list[dict] = []
        self.release = threading.Event()
        if not wait:
            self.release.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.release.wait(30)
                receiver.got.append(json.loads(body))
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.close()


def alerting(folder: Path, *hooks: AlertConfig) -> tuple[EventLog, Alerts]:
    told = Alerts(hooks, "runs/x")
    return EventLog(folder / "lead.jsonl", "lead", told.offer), told


def test_a_webhook_gets_the_events_it_asked_for(receiver: Receiver, tmp_path: Path) -> None:
    events, told = alerting(tmp_path, AlertConfig(events=["death", "run_end"], url=receiver.url))
    events.emit("death", step=7, epoch=(1, 2), replica=1, rank=0, cause="SIGSEGV")
    events.emit("spare_ready", spares=1)
    events.emit("run_end", status="failed")
    told.close()
    assert [row["event"] for row in receiver.got] == ["death", "run_end"], "and what is told last is delivered before the end"
    assert receiver.got[0]["cause"] == "SIGSEGV" and receiver.got[0]["run_dir"] == "runs/x"
    assert receiver.got[0]["text"].startswith("everstep runs/x: death in step 7: replica 1, rank 0, cause SIGSEGV")


def test_a_hook_that_hangs_or_fails_delays_nobody(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(alerts_module, "CLOSE_S", 0.3)
    hangs, refuses = Receiver(wait=True), Receiver(status=500)
    monkeypatch.setattr(logging.getLogger("everstep"), "propagate", True)
    try:
        events, told = alerting(
            tmp_path, AlertConfig(events=["spare_ready"], url=hangs.url), AlertConfig(events=["spare_ready"], url=refuses.url),
            AlertConfig(events=["spare_ready"], url="http://127.0.0.1:9/nobody"), AlertConfig(events=["spare_ready"], command=["/no/such/program"]),
        )
        begun = time.monotonic()
        for number in range(3 * QUEUED):
            events.emit("spare_ready", spares=number)
        assert time.monotonic() - begun < 30.0, "emitting waited for a hook: ten seconds for each event"
        begun = time.monotonic()
        told.close()
        assert time.monotonic() - begun < 8.0, "closing waited for a hook: ten seconds"
    finally:
        hangs.close()
        refuses.close()
    assert "were left out" in caplog.text and "HTTP Error 500" in caplog.text and "No such file" in caplog.text


def test_a_command_gets_the_event(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"import os, sys, json; open({str(out)!r}, 'a').write(os.environ['EVERSTEP_EVENT'] + ' ' + str(json.load(sys.stdin)['spares']) + '\\n')"
    events, told = alerting(tmp_path, AlertConfig(events=["spare_ready"], command=[sys.executable, "-c", code]))
    events.emit("spare_ready", spares=3)
    told.close()
    assert out.read_text() == "spare_ready 3\n"


def test_a_storm_becomes_one_message_and_a_count(receiver: Receiver, tmp_path: Path) -> None:
    events, told = alerting(tmp_path, AlertConfig(events=["spare_ready"], url=receiver.url, every_s=0.5))
    for number in range(20):
        events.emit("spare_ready", spares=number)
    time.sleep(0.7)
    events.emit("spare_ready", spares=99)
    told.close()
    assert [(row["spares"], row["skipped"]) for row in receiver.got] == [(0, 0), (99, 19)]
    assert "(and 19 before it)" in receiver.got[1]["text"]


@pytest.mark.parametrize(("alert", "says"), [
    ("{events: [deaht], url: 'http://x'}", "deaht"),
    ("{events: [death]}", "a url or a command"),
    ("{events: [death], url: 'http://x', command: [x]}", "a url or a command"),
    ("{events: [death], url: 'ftp://x'}", "ftp"),
    ("{events: [], url: 'http://x'}", "events"),
])
def test_a_bad_alert_is_refused(alert: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        load_config(SFT, [f"alerts=[{alert}]"])


# -- logs ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "wanted"), [
    ("info", {"": "info"}), ("", {"": "info"}), ("warning,recovery=debug", {"": "warning", "recovery": "debug"}),
    ("everstep.engine=ERROR", {"": "info", "engine": "error"}),
])
def test_levels(text: str, wanted: dict[str, str]) -> None:
    assert logs.parse_levels(text) == wanted


@pytest.mark.parametrize("text", ["loud", "recovery=loud", "=debug", "recovery"])
def test_a_bad_level_is_refused(text: str, monkeypatch) -> None:
    with pytest.raises(BadInput, match=r"log\.level"):
        load_config(SFT, [f"log.level={text}"])
    monkeypatch.setenv("EVERSTEP_LOG", text)
    assert cli.run(["plan", SFT, "launcher=ray", "device=cpu"]) == 2


def test_a_log_is_structured_rotated_and_by_module(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EVERSTEP_LOG", "warning,recovery=debug")
    level = logs.with_environment(load_config(SFT, ["log.level=error"]), os.environ).log.level
    handler = logs.start(tmp_path / "w0.jsonl", "w0", level, 4096, 2, lambda: {"replica": 1, "rank": 0, "step": 5, "phase": "compute"})
    try:
        logging.getLogger("everstep.engine").info("not this")
        logging.getLogger("everstep.recovery.link").debug("this %s", "one")
        try:
            raise ValueError("bad\nlines")
        except ValueError:
            logging.getLogger("everstep.engine").exception("and this")
        rows = [json.loads(line) for line in (tmp_path / "w0.jsonl").read_text().splitlines()]
        assert [(r["level"], r["module"], r["message"]) for r in rows] == [("debug", "recovery.link", "this one"), ("error", "engine", "and this")]
        assert rows[0] | {"who": "w0", "replica": 1, "step": 5, "phase": "compute"} == rows[0] and "ValueError: bad" in rows[1]["traceback"]
        for number in range(200):
            logging.getLogger("everstep.recovery").info("line %d", number)
        files = sorted(tmp_path.glob("w0*"))
        assert [f.name for f in files] == ["w0.jsonl", "w0.jsonl.1", "w0.jsonl.2"] and all(f.stat().st_size <= 4096 for f in files)
    finally:
        logs.stop(handler)
        for module in ("", ".recovery"):
            logging.getLogger("everstep" + module).setLevel(logging.NOTSET)


# -- stragglers ------------------------------------------------------------------------------------------------------------------------


def judged(times: dict[str, list[float]], limit: float = 1.2, for_s: float = 10.0, slots: dict[str, int] | None = None) -> list[tuple[int, Straggler]]:
    """``times``: compute seconds of each replica (of one rank) step by step, one step a second."""
    detector, found = Stragglers(limit, for_s), []
    for step in range(len(next(iter(times.values())))):
        ranks = {w: Timed(i, 0, {"compute": t[step]}, (slots or {}).get(w, 1)) for i, (w, t) in enumerate(times.items())}
        found += [(step, s) for s in detector.step(float(step), ranks)]
    return found


def noisy(seconds: float, steps: int, seed: int, spread: float = 0.05) -> list[float]:
    r = random.Random(seed)
    return [seconds * (1 + r.uniform(-spread, spread)) for _ in range(steps)]


def test_a_rank_that_is_a_quarter_slower_is_found_and_nobody_else() -> None:
    ((step, found),) = judged({"a": noisy(0.5, 60, 1), "b": noisy(0.625, 60, 2), "c": noisy(0.5, 60, 3)})
    assert (found.worker, found.phase, step) == ("b", "compute", 10)
    assert found.ratio == pytest.approx(1.25, abs=0.05) and found.excess_s == pytest.approx(0.125, abs=0.02)


def test_of_two_replicas_the_slower_one_is_found() -> None:
    ((_, found),) = judged({"a": noisy(0.65, 40, 1), "b": noisy(0.5, 40, 2)})
    assert found.worker == "a"


@pytest.mark.parametrize("seed", range(5))
def test_noise_single_hiccups_and_all_slow_together_are_no_stragglers(seed: int) -> None:
    calm = {w: noisy(0.5, 80, 10 * seed + i, spread=0.12) for i, w in enumerate("abcd")}
    calm["b"] = [t * (6 if step % 9 == 0 else 1) for step, t in enumerate(calm["b"])]  # a checkpoint on its disk
    for times in calm.values():
        times[40:60] = [3 * t for t in times[40:60]]
    assert judged(calm) == []


@given(st.lists(st.floats(0, 10), min_size=2, max_size=9), st.integers(0, 8))
def test_the_median_of_the_others(values: list[float], which: int) -> None:
    values.sort()
    which %= len(values)
    assert _median_without(values, values[which]) == pytest.approx(statistics.median(values[:which] + values[which + 1 :]))


def test_more_slots_are_more_work_not_slowness() -> None:
    times = {"a": noisy(1.0, 40, 1), "b": noisy(1.5, 40, 2)}
    assert judged(times, slots={"a": 2, "b": 3}) == []
    assert [s.worker for _, s in judged(times, slots={"a": 2, "b": 2})] == ["b"]


def test_who_recovers_and_slows_down_again_is_reported_again() -> None:
    times = {"a": noisy(0.5, 120, 1), "b": noisy(0.8, 30, 2) + noisy(0.5, 40, 3) + noisy(0.8, 50, 4)}
    assert [s.worker for _, s in judged(times)] == ["b", "b"]


def test_a_new_process_starts_anew() -> None:
    detector = Stragglers(1.2, 10.0)
    for step in range(40):
        ranks = {"a": Timed(0, 0, {"compute": 0.5}, 1), ("b" if step < 9 else "c"): Timed(1, 0, {"compute": 0.8}, 1)}
        if found := detector.step(float(step), ranks):
            break
    assert step == 19 and found[0].worker == "c", "what its predecessor did is not its fault"


SLOW_S = 0.06


def slow_worker_one() -> None:
    compute = worker_module.StepWork.compute

    def slowly(self, slots):
        if self._worker.worker_id == "w1":
            time.sleep(SLOW_S * len(slots))
        return compute(self, slots)

    worker_module.StepWork.compute = slowly  # type: ignore[method-assign]


@pytest.mark.full
def test_a_slow_rank_is_reported_with_its_phase_and_replaced(tmp_path: Path) -> None:
    run = finish(config(
        SFT, tmp_path / "run", "layout.replicas=3", "layout.spares=1", "sft.steps=40", "sft.samples_per_step=6", "train.micro_batch_size=1", "recovery.heartbeat_s=0.2",
        "checkpoint.at_end=false", "watch.straggler_for_s=1", "watch.straggler_ratio=1.5", "watch.replace_stragglers=true",
    ), host=lambda conf: ForkedHost(conf, prepare=slow_worker_one))
    found = run.kind("straggler")
    assert [(e["worker"], e["replica"], e["phase"], e["action"]) for e in found] == [("w1", 1, "compute", "replaced")]
    assert found[0]["ratio"] > 1.5 and found[0]["excess_s"] == pytest.approx(2 * SLOW_S, rel=0.5)
    begun = run.kind("begin")[0]
    assert 1.0 < seconds_between(begun, found[0]) < 12.0
    (leave,) = run.kind("leave")
    assert leave["worker"] == "w1" and leave["cause"].startswith("straggler: compute")
    assert not run.kind("death", "void"), "it leaves between two steps: nothing is redone"
    assert run.kind("spare_used")[0]["spare"] == "w3" and run.kind("join")
    assert_invariants(run, steps=40)


# -- silent corruption -------------------------------------------------------------------------------------------------------------------


def test_the_minority_is_found_only_if_there_is_one() -> None:
    ranks = ranks_of(Layout(replicas=3, tp=2), (0, 1, 2))
    same = [(5, f"h{rank.rank}") for rank in ranks]
    assert minority(ranks, same) == []
    wrong = [(5, "x") if (rank.replica, rank.rank) == (1, 1) else said for rank, said in zip(ranks, same, strict=True)]
    assert [(r.replica, r.rank) for r in minority(ranks, wrong)] == [(1, 1)]
    assert minority(ranks_of(Layout(replicas=3, tp=2), (0, 1)), wrong[:4]) == [], "of two replicas nobody knows which is right"


def flip_a_bit_of_worker_two() -> None:
    """Of a weight, in the place where it lies, after step 5 was applied: what a broken memory cell does."""
    apply = worker_module.StepWork.apply

    def damaged(self, total):
        apply(self, total)
        if self._worker.worker_id == "w2" and self.step == 5:
            tensor = next(t for name, t in self._worker.engine.state().items() if name.startswith(("master/", "param/")))
            tensor.view(-1).view(torch.int32)[17] ^= 1 << 12

    worker_module.StepWork.apply = damaged  # type: ignore[method-assign]


def test_a_flipped_bit_is_found_its_rank_evicted_and_the_run_goes_on(tmp_path: Path) -> None:
    run = finish(config(
        SFT, tmp_path / "run", "layout.replicas=3", "layout.spares=1", "sft.steps=24", "recovery.heartbeat_s=0.2", "checkpoint.at_end=false",
        "train.verify_every=4",
    ), host=lambda conf: ForkedHost(conf, prepare=flip_a_bit_of_worker_two))
    (found,) = run.kind("corruption")
    assert (found["replica"], found["rank"], found.step, found["action"]) == (2, 0, 8, "evicted"), "at the first comparison after the flip"
    (death,) = run.kind("death")
    assert death["worker"] == "w2" and "corruption" in death["cause"]
    assert run.kind("join")[-1]["members"] == [0, 1, 2] and run.kind("verify")[-1]["equal"]
    assert len(run.final_hashes) == 1
    assert_invariants(run, steps=24)


# -- spikes --------------------------------------------------------------------------------------------------------------------------------


def spikes_of(values: list[float], ratio: float = 3.0, steps: int = 20) -> list[int]:
    looking = Spikes(ratio, steps)
    return [i for i, value in enumerate(values) if looking.step({"train/grad_norm": value})]


def test_a_jump_is_a_spike_noise_is_none() -> None:
    calm = noisy(1.0, 100, 1, spread=0.4)
    assert spikes_of(calm) == []
    assert spikes_of([*calm[:50], 7.0, *calm[50:]]) == [50]
    assert spikes_of([*calm[:50], float("nan"), *calm[50:]]) == []
    wild = [10 ** random.Random(i).uniform(-1, 1) for i in range(200)]
    assert len(spikes_of(wild)) < 10, "what is wild by nature is its usual"
    assert spikes_of([*calm[:50], 7.0], ratio=0) == []


def test_a_level_that_stays_is_told_and_then_is_the_usual_one() -> None:
    found = spikes_of(noisy(1.0, 50, 1) + noisy(9.0, 60, 2) + [40.0])
    assert found[0] == 50 and len(found) <= 8 and found[-1] == 110
