"""Being told: alerts through a real web server and real commands, structured logs and their merged view, stragglers, spikes, corruption."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.replicas import Replicas
from tests.support.runs import ROOT, SFT, Finished, config, finish
from tests.test_faults import assert_invariants

from everstep import cli
from everstep.cluster.dispatch import ranks_of
from everstep.cluster.forked import ForkedHost
from everstep.cluster.results import minority
from everstep.cluster.worker import worker as worker_module
from everstep.config.check import check, check_plan
from everstep.config.levels import parse_levels
from everstep.config.load import load_config
from everstep.config.watch_schema import AlertConfig
from everstep.driver import run as run_recipe
from everstep.errors import BadInput, InvariantViolated
from everstep.layout import Layout
from everstep.recovery.digest import digest_of
from everstep.recovery.rerun import Reruns, looked_at
from everstep.recovery.view import Deal, Member, Rerun
from everstep.telemetry import alerts as alerts_module
from everstep.telemetry import logs
from everstep.telemetry.alerts import QUEUED, Alerts
from everstep.telemetry.events import EventLog, read_events, seconds_between
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


def test_a_hook_that_answers_nonsense_is_told_of_the_next_event_too(tmp_path: Path) -> None:
    """What answers there is no web server: its alert fails, and the thread that tells it goes on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        events, told = alerting(tmp_path, AlertConfig(events=["spare_ready"], url=f"http://127.0.0.1:{server.getsockname()[1]}/"))
        for number in range(2):
            events.emit("spare_ready", spares=number)
            peer, _ = server.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(b"what?\r\n\r\n")
        told.close()


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
    ("{events: [death], url: 'http://'}", "not a http"),
    ("{events: [death], url: 'http://a b/c'}", "not a http"),
    ("{events: [death], url: 'http://x:99999/'}", "not a http"),
    ("{events: [death], url: 'http://x:port/'}", "not a http"),
    ("{events: [death], command: ['']}", "an empty part"),
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
    assert parse_levels(text) == wanted


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


def test_who_stays_slow_while_nobody_is_there_to_compare_with_is_reported_once() -> None:
    detector, found = Stragglers(1.2, 10.0), []
    for step in range(60):
        ranks = {"b": Timed(1, 0, {"compute": 0.8}, 1)} | ({"a": Timed(0, 0, {"compute": 0.5}, 1)} if not 20 <= step < 25 else {})
        found += detector.step(float(step), ranks)
    assert [s.worker for s in found] == ["b"]


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


@pytest.mark.full
def test_without_ray_the_lighthouse_reports_a_slow_rank(tmp_path: Path) -> None:
    """By when ranks say what they do; a replica that dies meanwhile disturbs the step it died in, and no finding rests on that one."""
    conf = config(
        SFT, tmp_path / "run", "launcher=local", "layout.replicas=3", "layout.spares=0", "sft.steps=40", "sft.samples_per_step=6",
        "train.micro_batch_size=1", "recovery.heartbeat_s=0.2", "checkpoint.at_end=false", "watch.straggler_for_s=1", "watch.straggler_ratio=1.5",
        "faults=[{step: 12, phase: reduce, kind: kill, replica: 2}]",
    )
    with Replicas(conf, tmp_path, prepare=slow_worker_one) as replicas:
        replicas.start(0, 1, 2)
        run = replicas.finished()
    found = run.kind("straggler")
    assert [(e["worker"], e["replica"], e["phase"], e["action"]) for e in found] == [("w1", 1, "compute", "reported")]
    assert found[0]["ratio"] > 1.5 and found[0]["excess_s"] >= 2 * SLOW_S * 0.8
    assert 1.0 < seconds_between(run.kind("begin")[0], found[0]) < 30.0
    assert [e["replica"] for e in run.kind("death")] == [2]
    assert_invariants(run, steps=40)


# -- silent corruption -------------------------------------------------------------------------------------------------------------------


def test_the_minority_is_found_only_if_there_is_one() -> None:
    ranks = ranks_of(Layout(replicas=3, tp=2), (0, 1, 2))
    same = [(5, f"h{rank.rank}") for rank in ranks]
    assert minority(ranks, same) == []
    wrong = [(5, "x") if (rank.replica, rank.rank) == (1, 1) else said for rank, said in zip(ranks, same, strict=True)]
    assert [(r.replica, r.rank) for r in minority(ranks, wrong)] == [(1, 1)]
    assert minority(ranks_of(Layout(replicas=3, tp=2), (0, 1)), wrong[:4]) == [], "of two replicas nobody knows which is right"


def flip_a_bit_of_worker_two_and_let_gradients_jump() -> None:
    """The bit: of a weight, in the place where it lies, after step 5 was applied, as a broken memory cell does. The jump: in step 20, everywhere."""
    apply, gradient = worker_module.StepWork.apply, worker_module.StepWork._gradient

    def damaged(self, total):
        apply(self, total)
        if self._worker.worker_id == "w2" and self.step == 5:
            tensor = next(t for name, t in self._worker.engine.state().items() if name.startswith(("master/", "param/")))
            tensor.view(-1).view(torch.int32)[17] ^= 1 << 12

    def jumping(self, *slots):
        contribution = gradient(self, *slots)
        if self.step == 20:
            for tensor in contribution.gradients:
                tensor *= 60.0
        return contribution

    worker_module.StepWork.apply, worker_module.StepWork._gradient = damaged, jumping  # type: ignore[method-assign]


def test_a_flipped_bit_a_hung_collective_and_a_jump_are_each_told_with_culprit_and_time(tmp_path: Path) -> None:
    run = finish(config(
        SFT, tmp_path / "run", "layout.replicas=3", "layout.spares=2", "sft.steps=24", "recovery.heartbeat_s=0.2", "checkpoint.at_end=false",
        "train.verify_every=4", "recovery.progress_timeout_s=2", "faults=[{step: 14, phase: reduce, kind: hang, replica: 1}]",
    ), host=lambda conf: ForkedHost(conf, prepare=flip_a_bit_of_worker_two_and_let_gradients_jump))
    (found,) = run.kind("corruption")
    assert (found["replica"], found["rank"], found.step, found["action"], found["found"]) == (2, 0, 8, "evicted", "comparison"), "at the first comparison"
    corrupt, hung = run.kind("death")
    assert corrupt["worker"] == "w2" and "corruption" in corrupt["cause"]
    (fault,) = run.kind("fault")
    assert hung["worker"] == fault["worker"] == "w1" and hung["cause"].startswith("no progress: step 14, reduce")
    assert 1.9 < seconds_between(fault, hung) < 20.0, "its peers wait in the collective; it is the one that never came"
    assert {e["replica"]: e["failure_class"] for e in run.kind("failure")} == {2: "gpu", 1: "software"}
    (spike,) = run.kind("spike")
    assert (spike.step, spike["metric"]) == (20, "train/grad_norm") and spike["value"] > 10 * spike["usual"]
    assert run.kind("join")[-1]["members"] == [0, 1, 2] and run.kind("verify")[-1]["equal"]
    assert len(run.final_hashes) == 1
    assert_invariants(run, steps=24)


TWO = ["layout.replicas=2", "layout.spares=1", "sft.steps=12", "recovery.heartbeat_s=0.2", "checkpoint.at_end=false", "recovery.exact=true"]


def flip_a_bit_at_rest() -> None:
    """Of a weight, in the place where it lies, while the rank is in step 5."""
    compute = worker_module.StepWork.compute

    def damaged(self, slots):
        if self._worker.worker_id == "w1" and self.step == 5 and not hasattr(self, "hit"):
            self.hit = next(t for name, t in self._worker.engine.state().items() if name.startswith(("master/", "param/")))
            self.hit.view(-1).view(torch.int32)[17] ^= 1 << 12
        return compute(self, slots)

    worker_module.StepWork.compute = damaged  # type: ignore[method-assign]


def wrong_gradients(which: tuple[int, ...]) -> None:
    """Of worker 1, in step 4, in its computations of these numbers: one bit of one element, as broken arithmetic gives it."""
    gradient, done = worker_module.StepWork._gradient, itertools.count()

    def damaged(self, *slots):
        contribution = gradient(self, *slots)
        if self._worker.worker_id == "w1" and self.step == 4 and next(done) in which:
            contribution.gradients[0].view(-1).view(torch.int32)[5] ^= 1 << 20
        return contribution

    worker_module.StepWork._gradient = damaged  # type: ignore[method-assign]


ONCE, ALWAYS = functools.partial(wrong_gradients, (1,)), functools.partial(wrong_gradients, tuple(range(99)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> set[str]:
    run = finish(config(SFT, tmp_path_factory.mktemp("calm") / "run", *TWO), host=ForkedHost)
    assert not run.kind("corruption")
    return run.final_hashes


def struck(folder: Path, prepare: Callable[[], None], *overrides: str) -> Finished:
    return finish(config(SFT, folder / "run", *TWO, *overrides), host=lambda conf: ForkedHost(conf, prepare=prepare))


def test_of_two_replicas_the_one_whose_memory_changed_says_so(tmp_path: Path, undisturbed: set[str]) -> None:
    """Before its vote: nothing that it computed with the wrong weight counts, so that the result is that of a run without it."""
    run = struck(tmp_path, flip_a_bit_at_rest, "watch.check_state_every=1")
    (found,) = run.kind("corruption")
    assert (found.who, found.step, found["replica"], found["rank"], found["action"], found["found"]) == ("w1", 4, 1, 0, "evicted", "at rest")
    (death,) = run.kind("death")
    assert death["worker"] == "w1" and death.step == 5 and "changed in memory since step 4" in death["cause"]
    assert next(e["failure_class"] for e in run.kind("failure")) == "gpu"
    assert run.final_hashes == undisturbed
    assert_invariants(run, steps=12)


def test_of_two_replicas_the_one_that_computed_wrongly_once_is_found(tmp_path: Path, undisturbed: set[str]) -> None:
    """The gradient that it contributed: the second computation in the step (the first is of the other one's slot)."""
    run = struck(tmp_path, ONCE, "watch.rerun_every=2")
    (found,) = run.kind("corruption")
    assert (found.step, found["replica"], found["rank"], found["action"], found["found"]) == (4, 1, 0, "evicted", "rerun")
    (death,) = run.kind("death")
    assert death["worker"] == "w1" and death.step == 4 and "its gradient of slot" in death["cause"]
    assert run.final_hashes == undisturbed, "no wrong gradient was committed"
    assert_invariants(run, steps=12)


@pytest.mark.full
def test_of_three_replicas_one_that_always_computes_wrongly_is_found_of_two_nobody_knows(tmp_path: Path) -> None:
    run = struck(tmp_path / "three", ALWAYS, "watch.rerun_every=4", "layout.replicas=3")
    assert [(e.step, e["replica"], e["found"]) for e in run.kind("corruption")] == [(4, 1, "rerun")]
    assert_invariants(run, steps=12)
    conf = config(SFT, tmp_path / "two", *TWO, "watch.rerun_every=4")
    with pytest.raises(InvariantViolated, match="nobody knows which"):
        run_recipe(conf, host=lambda c: ForkedHost(c, prepare=ALWAYS))
    kinds = [e.step for e in read_events(tmp_path / "two" / "events") if e.event == "commit"]
    assert max(kinds) == 3, "nothing of it was committed"


def said(*statements: tuple[int, int, float]) -> set[tuple[int, str, Rerun]]:
    return {(replica, f"w{replica}", Rerun(0, digest, norm)) for replica, digest, norm in statements}


@pytest.mark.parametrize(("statements", "wrong", "tolerance"), [
    ([(0, 1, 1.0), (1, 1, 1.0)], set(), 0.0),
    ([(0, 1, 1.0), (1, 2, 2.0)], set(), 0.0),                                      # one word against the other
    ([(0, 1, 1.0), (1, 2, 2.0), (1, 1, 1.0)], {1}, 0.0),                           # it took its word back
    ([(0, 1, 1.0), (1, 2, 2.0), (1, 3, 3.0)], {1}, 0.0),                           # it contradicts itself
    ([(0, 1, 1.0), (0, 4, 9.0), (1, 2, 2.0), (1, 3, 3.0)], set(), 0.0),            # both do
    ([(0, 1, 1.0), (1, 2, 2.0), (2, 1, 1.0)], {1}, 0.0),                           # two against one
    ([(0, 1, 1.0), (1, 1, 1.0), (2, 2, 2.0), (3, 2, 2.0)], set(), 0.0),            # two against two
    ([(0, 1, 1.0), (1, 2, 1.0001), (2, 3, 1.5)], {2}, 1e-3),                       # within rounding, and not
])
def test_who_is_at_fault_in_what_was_said(statements, wrong: set[int], tolerance: float) -> None:
    assert {replica for replica, _ in Reruns(tolerance)._wrong(said(*statements))} == wrong


@given(st.integers(2, 6), st.integers(1, 9), st.integers(0, 50), st.integers(1, 50))
def test_everybody_is_watched_by_another_one(replicas: int, slots: int, number: int, step: int) -> None:
    """Each replica's looked-at slot has exactly one witness, which is another replica; a second attempt has others, from three on."""
    members = [Member(r, r % 2, (f"w{r}",)) for r in range(replicas)]

    def witnesses(number: int) -> dict[int, int]:
        deal = Deal(number, tuple((m.replica, m.build) for m in members))
        own = {m.replica: looked_at(deal, m, slots, step)[0] for m in members}
        owner = {slot: replica for replica, slot in own.items() if slot is not None}
        assert all(slot in deal.share(members[replica], slots) for slot, replica in owner.items())
        seen = {looked_at(deal, m, slots, step)[1]: m.replica for m in members} 
        seen.pop(None, None)
        assert seen.keys() == owner.keys() and all(seen[slot] != owner[slot] for slot in owner)
        return {owner[slot]: witness for slot, witness in seen.items()}

    first, second = witnesses(number), witnesses(number + 1)
    assert replicas == 2 or all(first[r] != second[r] for r in first)


def test_any_change_of_any_bit_is_seen(tmp_path: Path) -> None:
    """Of every kind of tensor that a state has, wherever it lies; a change of the order, too."""
    r = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64):
        whole = torch.randint(0, 99, (9001,), generator=r).to(dtype)[1:]  # begins between two words
        before = digest_of([whole])
        words = whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()])
        for at, bit in ((0, 0), (4095, 3), (4096, 7), (8999, 6)):
            words[at] ^= 1 << bit
            assert digest_of([whole]) != before, (dtype, at)
            words[at] ^= 1 << bit
        assert digest_of([whole]) == before
    a, b = torch.arange(5000.0), torch.arange(5000.0).flip(0)
    assert len({digest_of([a, b]), digest_of([b, a]), digest_of([a, a]), digest_of([torch.cat([a, b])])}) >= 3


def test_what_would_watch_nothing_is_refused() -> None:
    for overrides, says in (
        (["watch.rerun_every=2", "layout.replicas=1"], "watch.rerun_every"),
        (["watch.replace_stragglers=true", "layout.replicas=1"], "is slower than its peers"),
        (["alerts=[{events: [death], command: [no-such-program]}]"], "no-such-program"),
        (["watch.agent_every_s=0.001"], "below 0.05"),
    ):
        with pytest.raises(BadInput, match=says):
            check_plan(load_config(SFT, [*overrides, "device=cpu"]))
    check_plan(load_config(SFT, ["alerts=[{events: [death], command: [cat]}]", "device=cpu"]))


def test_what_is_compared_needs_something_to_compare() -> None:
    for key in ("check_state_every", "rerun_every"):
        with pytest.raises(BadInput, match=f"watch.{key}"):
            check(load_config(str(ROOT / "examples" / "diloco.yaml"), [f"watch.{key}=1", "device=cpu"]))



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


# -- what it costs -------------------------------------------------------------------------------------------------------------------------


def test_the_cost_of_watching_is_told_beside_the_noise() -> None:
    from benchmarks.watching import acts, summary

    def round_of(unwatched: float, watched: float, again: float) -> dict:
        return {kind: {"step_s": s, "lead_s": 0.01 + s / 100} for kind, s in (("unwatched", unwatched), ("watched", watched), ("again", again), ("more", 2 * unwatched))}

    found = summary([round_of(1.0, 1.01, 0.98), round_of(1.0, 1.03, 1.02), round_of(2.0, 2.04, 2.0)])
    default, noise, more = found.values()
    assert default["step_percent"] == pytest.approx(2.0) and (default["least_percent"], default["most_percent"]) == pytest.approx((1.0, 3.0))
    assert noise["step_percent"] == pytest.approx(0.0) and noise["least_percent"] == pytest.approx(-2.0) and more["step_percent"] == pytest.approx(100.0)
    assert default["lead_ms"] == pytest.approx(0.3) and default["lead_percent_of_step"] == pytest.approx(0.03)
    assert sum(acts(64).values()) < 5000.0, "microseconds of a step of one second: 0.5%"
