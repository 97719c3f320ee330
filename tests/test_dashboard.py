"""Looking at a run: its state, its page in a real browser, its numbers for Prometheus; while it lives, after it ended, after it was killed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from tests.support.runs import QUIET, ROOT, SFT, Finished, command, config, finish

import everstep
from everstep import cli, driver
from everstep.cluster.forked import ForkedHost
from everstep.errors import BadInput, WorkerFailed
from everstep.recovery.desk import Desk
from everstep.run_dir import OWN_ENTRIES, check_run_dir, prepare_run_dir, starting
from everstep.telemetry import status as status_module
from everstep.telemetry import window
from everstep.telemetry.dashboard import prometheus
from everstep.telemetry.dashboard.server import Dashboard, page
from everstep.telemetry.dashboard.story import POINTS, Reader, as_page, lanes, tell, thin
from everstep.telemetry.events import EventLog, EventLogError, read_events
from everstep.telemetry.goodput import Goodput
from everstep.telemetry.status import RunStatus
from everstep.telemetry.tail import Tail

STEPS = 24


@dataclass
class Watched:
    """A run under a fault, and what was seen of it from outside while it lived."""

    run: Finished
    seen: list[RunStatus] = field(default_factory=list)
    answers: list[tuple[dict, str]] = field(default_factory=list)  # story and /metrics of its own dashboard
    afar: list[dict] = field(default_factory=list)  # story and, last, status of a dashboard that has only the run's address


def get(address: str) -> tuple[int, str]:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.status, answer.read().decode()


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Watched:
    folder = tmp_path_factory.mktemp("watched") / "run"
    over, seen, answers, afar, far = threading.Event(), [], [], [], Elsewhere(tmp_path_factory.mktemp("elsewhere"))

    def watch() -> None:
        while not over.wait(0.1):
            if not (folder / "logs").is_dir() or not list((folder / "events").glob("w*.jsonl")):
                continue
            seen.append(everstep.status(folder))
            if seen[-1].dashboard and seen[-1].live and len(answers) < 5:
                answers.append((json.loads(get(seen[-1].dashboard + "/story")[1]), get(seen[-1].dashboard + "/metrics")[1]))
            far.begin(folder / "watch.json")
            if far.address and len(afar) < 3:
                afar.append(json.loads(get(far.address + "/story")[1]))

    #: What must have been seen before this step begins: a busy machine looks later, and the run would be over.
    before_step = {
        4: lambda: afar and answers and any(s.spares == ["w4"] for s in seen),
        7: lambda: any(s.unavailable for s in seen),
    }
    begin = Desk.begin

    def held(self: Desk, k: int, *args):
        if k in before_step:
            done, until = before_step.pop(k), time.monotonic() + 60
            while not done() and time.monotonic() < until:
                time.sleep(0.02)
        return begin(self, k, *args)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Desk, "begin", held)
            run = finish(config(
                SFT, folder, "layout.replicas=2", "layout.tp=2", "layout.spares=1", f"sft.steps={STEPS}", "recovery.heartbeat_s=0.2",
                "checkpoint.every_steps=12", "checkpoint.at_end=false", "telemetry.dashboard=true",
                "faults=[{step: 6, phase: reduce, kind: kill, replica: 1, rank: 1}]",
            ), host=ForkedHost)
    finally:
        over.set()
        watcher.join(30)
        afar.append(far.end())
    return Watched(run, seen, answers, afar)


class Elsewhere:
    """`everstep dashboard HOST:PORT` in another folder, as one runs it whose machine does not see the run's."""

    def __init__(self, folder: Path):
        self.folder, self.address, self._process = folder, "", None

    def begin(self, file: Path) -> None:
        if self._process is None and file.is_file():
            said = json.loads(file.read_text())
            env = {**os.environ, window.ENV: said["token"], "TMPDIR": str(self.folder)}
            self._process = subprocess.Popen([sys.executable, "-m", "everstep", "dashboard", f"{said['host']}:{said['port']}"], cwd=self.folder, env=env,
                                             stdout=subprocess.PIPE, text=True)
            self.address = self._process.stdout.readline().strip()

    def end(self) -> dict:
        """Its last word on the run, which has ended; then it is ended, too."""
        if self._process is None:
            return {}
        try:
            return json.loads(get(self.address + "/status")[1])
        finally:
            self._process.send_signal(signal.SIGINT)
            self._process.communicate(timeout=30)


# -- the state ---------------------------------------------------------------------------------------------------------------------


def test_state_while_the_run_lives(watched: Watched) -> None:
    fresh = [s for s in watched.seen if s.fresh]
    assert fresh, "the pulse of the lead was never used"
    assert {s.state for s in fresh} >= {"running"}
    assert any(rank.phase not in ("idle", "ended") for s in fresh for rank in s.ranks)
    broken = [s for s in watched.seen if s.unavailable]
    assert broken, "nobody saw the replica out of service"
    lost = broken[0].unavailable[0]
    assert (lost.replica, lost.rank, lost.step) == (1, 1, 6) and "ended" in lost.cause
    assert any(r.state == "out" and (r.replica, r.rank) == (1, 1) for r in broken[0].ranks)
    assert any(s.spares == ["w4"] for s in watched.seen)


def test_state_after_the_end(watched: Watched, capsys) -> None:
    state = everstep.status(watched.run.folder)
    assert (state.state, state.committed_step, state.members, state.unavailable, state.spares) == ("done", STEPS, [0, 1], [], [])
    assert [(r.replica, r.rank, r.worker) for r in state.ranks] == [(0, 0, "w0"), (0, 1, "w1"), (1, 0, "w2"), (1, 1, "w4")]
    assert all(r.step == STEPS and r.phase == "ended" for r in state.ranks)
    assert cli.run(["status", str(watched.run.folder)]) == 0
    assert "done: sft" in capsys.readouterr().out
    assert cli.run(["status", str(watched.run.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["committed_step"] == STEPS


def test_a_run_is_watched_by_its_address_alone(watched: Watched) -> None:
    *stories, last = watched.afar
    assert stories and all(story["status"]["state"] in ("starting", "running") for story in stories)
    assert stories[0]["status"]["folder"].startswith(f"{watched.run.folder} at 127.0.0.1:"), "and it says whose it is"
    here = everstep.status(watched.run.folder).as_json()
    assert last["state"] == "done" and last["ranks"] == here["ranks"] and last["committed_step"] == STEPS, "what was told last arrives, too"


def test_what_a_window_serves(tmp_path: Path, capsys) -> None:
    """Whole files of the run, none but those that are named, to nobody but who shows the token; also through a dashboard."""
    log = lone_log(tmp_path / "run")
    for step in range(1, 400):
        log.emit("begin", step=step, epoch=(1, 0), members=[0, 1], samples=[f"é{step}/{i}" for i in range(300)])
    (tmp_path / "run" / "configs").mkdir()
    (tmp_path / "run" / "configs" / "resolved.yaml").write_text("secret: 1")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "t_wall": 1.0, "train/loss": 2.0}\n')
    assert log.path.stat().st_size > window.CHUNK_BYTES, "more than one piece"
    served, dashboard = window.Window(tmp_path / "run", "127.0.0.1"), Dashboard(tmp_path / "run")
    try:
        assert (tmp_path / "run" / "watch.json").stat().st_mode & 0o777 == 0o600
        for address in (served.address, dashboard.address):
            with contextlib.closing(window.Mirror(address, {})) as mirror:
                assert sorted(str(p.relative_to(mirror.path)) for p in mirror.path.rglob("*") if p.is_file()) == ["events/lead.jsonl", "metrics.jsonl"]
                assert (mirror.path / "events" / "lead.jsonl").read_bytes() == log.path.read_bytes()
                log.emit("spare_ready", spares=1)
                mirror.sync()
                assert (mirror.path / "events" / "lead.jsonl").read_bytes() == log.path.read_bytes() and mirror.trouble == ""
            assert not mirror.path.exists()
            assert everstep.status(address).committed_step == everstep.status(tmp_path / "run").committed_step
        token, where = served.address.split("@")
        for asked in ("configs/resolved.yaml", "events/../configs/resolved.yaml", "/etc/passwd", "watch.json", "events/x.jsonl/../../watch.json"):
            with pytest.raises(BadInput, match="not served"):
                window.ask_at(*where.split(":"), token, "read", name=asked, at=0)
            with pytest.raises(urllib.error.HTTPError):
                get(f"{dashboard.address}/read?name={asked}&at=0")
        with pytest.raises(BadInput, match="takes no order"):
            window.ask_at(*where.split(":"), token, "drain", target="0/0")
        for wrong, says in ((f"{'0' * 32}@{where}", "token"), (where, window.ENV), ("127.0.0.1:9", window.ENV), (f"{token}@127.0.0.1:9", "nobody"),
                            (dashboard.address + "/x", "no dashboard")):
            assert cli.run(["status", wrong]) == 2
            assert says in capsys.readouterr().err, wrong
    finally:
        served.close()
        dashboard.close()
    assert not (tmp_path / "run" / "watch.json").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys) -> None:
    for name in ("status", "dashboard", "report"):
        assert cli.run([name, str(tmp_path)]) == 2
        assert "not a run folder" in capsys.readouterr().err
        assert cli.run([name, str(tmp_path / "none")]) == 2
        assert "there is no such folder" in capsys.readouterr().err


def lone_log(folder: Path) -> EventLog:
    (folder / "logs" / "attempt-1").mkdir(parents=True)
    log = EventLog(folder / "events" / "lead.jsonl", "lead")
    log.emit("run_start", step=0, attempt=1, recipe="sft", launcher="ray", replicas=2, spares=0)
    return log


def test_a_run_whose_lead_was_killed_is_gone(tmp_path: Path) -> None:
    (tmp_path / "logs" / "attempt-1").mkdir(parents=True)
    code = ("import sys, time; from everstep.telemetry.events import EventLog; "
            "EventLog(sys.argv[1] + '/events/lead.jsonl', 'lead').emit('run_start', step=0, attempt=1, recipe='sft', launcher='ray', "
            "replicas=2, spares=0); print('up', flush=True); time.sleep(60)")
    lead = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert lead.stdout and lead.stdout.readline()
    assert everstep.status(tmp_path).state == "starting"
    lead.kill()
    lead.wait()
    lead.stdout.close()
    state = everstep.status(tmp_path)
    assert state.state == "gone" and "resume=auto" in state.cause and not state.live


@pytest.mark.parametrize("arguments", [["train", "layout.replicas=1"], pytest.param(["up", "layout.replicas=2"], marks=pytest.mark.full)], ids=["train", "up"])
def test_while_the_processes_of_a_run_come_up_it_is_starting(tmp_path: Path, arguments: list[str]) -> None:
    folder = tmp_path / "runs" / "new"
    process = command([arguments[0], SFT, *QUIET, f"run_dir={folder}", "launcher=local", "layout.spares=0", "faults=[]", "checkpoint.at_end=false", *arguments[1:]])
    try:
        end = time.monotonic() + 60.0
        while not ((folder / ".starting").exists() and psutil.Process(process.pid).children()):
            assert process.poll() is None and time.monotonic() < end, process.communicate()
            time.sleep(0.01)
        assert shown(everstep.status(folder)) == "starting: nothing was told yet\n"
        time.sleep(0.5)  # until signals are passed on
        process.send_signal(signal.SIGTERM)  # imports of torchrun may swallow a KeyboardInterrupt
        assert process.wait(120) == 130 and not folder.parent.exists(), "no run came to be"
    finally:
        process.kill()
        process.communicate()


def test_the_mark_of_who_starts_a_run_is_believed_while_that_process_lives(tmp_path: Path) -> None:
    conf = config(SFT, tmp_path / "run")
    with starting(conf):
        check_run_dir(conf)
        assert everstep.status(conf.run_dir).state == "starting"
        mark = next((tmp_path / "run").iterdir())
        mark.write_text(f"{2**22 + 1} {socket.gethostname()}")
        with pytest.raises(BadInput, match="not a run folder"):
            everstep.status(conf.run_dir)
        prepare_run_dir(conf)
        assert not mark.exists()
    assert (tmp_path / "run" / "logs" / "attempt-1").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot be prepared"), starting(config(SFT, tmp_path / "file" / "run")):
        pass


def shown(state: RunStatus) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(status_module.describe(state))
    return console.export_text()


def test_a_lead_that_is_stopped_is_missed(tmp_path: Path) -> None:
    log = lone_log(tmp_path)
    assert "for 0." in shown(everstep.status(tmp_path)), "how long it has been starting"
    log.emit("begin", step=1, epoch=(1, 1), members=[0, 1], samples=[], lr=0.1)
    pulse = {"pid": os.getpid(), "host": os.uname().nodename, "attempt": 1, "ranks": {}, "t_wall": time.time()}
    (tmp_path / "status.json").write_text(json.dumps(pulse))
    assert everstep.status(tmp_path).cause == ""
    (tmp_path / "status.json").write_text(json.dumps(pulse | {"t_wall": time.time() - 40}))
    state = everstep.status(tmp_path)
    assert state.state == "running" and "nothing was heard of the lead" in state.cause and "for 40 s" in state.cause


def test_a_bug_that_ends_a_run_is_told_with_its_cause(tmp_path: Path, monkeypatch) -> None:
    """Whatever ends a run, who looks at it afterwards is told; there is nobody left to wait for, and no spare."""
    monkeypatch.setattr(driver, "_start_group", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        driver.run(config(SFT, tmp_path / "run", "layout.replicas=2"), host=ForkedHost)
    state = everstep.status(tmp_path / "run")
    assert (state.state, state.cause) == ("failed", "ZeroDivisionError: division by zero")
    assert cli.run(["report", str(tmp_path / "run")]) == 0
    assert everstep.status(tmp_path / "run").spares == []


def test_ray_that_does_not_start_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    import ray

    def init(**more: object) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because ...")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(WorkerFailed, match=r"^Ray did not start on this machine: The current node timed out during startup$"):
        driver.run(config(SFT, tmp_path / "run", "layout.replicas=2"))
    assert everstep.status(tmp_path / "run").cause.startswith("Ray did not start")


def test_a_replica_without_spare_waits_and_says_for_what(tmp_path: Path) -> None:
    log = lone_log(tmp_path)
    rank = EventLog(tmp_path / "events" / "w1.jsonl", "w1")
    rank.emit("process_start", device="cpu")
    rank.emit("form", epoch=(1, 0), replica=1, rank=0, build=0)
    log.emit("death", step=3, epoch=(1, 1), replica=1, rank=0, worker="w1", cause="silent for 30 s")
    (lost,) = everstep.status(tmp_path).unavailable
    assert (lost.replica, lost.cause, lost.waits_for) == (1, "silent for 30 s", "a spare")


def test_a_rank_of_a_replica_that_was_given_up_serves_in_another_one(tmp_path: Path) -> None:
    """Of replica 1 a rank died, of replica 0 too; the one left of replica 1 takes the place in replica 0."""
    log = lone_log(tmp_path)
    ranks = {w: EventLog(tmp_path / "events" / f"{w}.jsonl", w) for w in ("w0", "w2", "w3")}
    for worker, (replica, rank) in {"w0": (0, 0), "w2": (1, 0), "w3": (1, 1)}.items():
        ranks[worker].emit("form", epoch=(1, 0), replica=replica, rank=rank, build=0)
    log.emit("death", step=3, epoch=(1, 1), replica=1, rank=1, worker="w3", cause="killed")
    log.emit("death", step=4, epoch=(1, 2), replica=0, rank=0, worker="w0", cause="killed")
    log.emit("spare_used", replica=0, rank=0, spare="w2")
    ranks["w2"].emit("form", epoch=(1, 2), replica=0, rank=0, build=1)
    state = everstep.status(tmp_path)
    assert {(r.replica, r.rank): (r.worker, r.state, r.phase) for r in state.ranks} == {
        (0, 0): ("w2", "forms", "idle"), (1, 0): ("w2", "out", "vacant"), (1, 1): ("w3", "out", "dead")}
    assert [lost.waits_for for lost in state.unavailable] == ["its link and its heal", "a spare"]


@pytest.mark.parametrize("junk", ["", "{", "[]", '{"t_wall": 1}', "null"])
def test_a_pulse_that_is_none_is_not_believed(tmp_path: Path, junk: str) -> None:
    lone_log(tmp_path)
    (tmp_path / "status.json").write_text(junk)
    assert not everstep.status(tmp_path).fresh


def test_a_full_disk_does_not_end_the_pulse(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(status_module, "PULSE_S", 0.02)
    gone = tmp_path / "gone"
    pulse = status_module.Pulse(gone, 1, lambda: {"ranks": {}})
    until = time.monotonic() + 5
    while not pulse.refused and time.monotonic() < until:
        time.sleep(0.01)
    assert "No such file" in pulse.refused
    gone.mkdir()
    while not (gone / "status.json").exists() and time.monotonic() < until:
        time.sleep(0.01)
    pulse.close()
    assert status_module.read_pulse(gone) and os.listdir(gone) == ["status.json"]
    assert "status.json" in OWN_ENTRIES, "--clean must delete it"


# -- following a log -----------------------------------------------------------------------------------------------------------------


def test_a_log_that_grows_is_read_as_one_that_is_complete(watched: Watched, tmp_path: Path) -> None:
    """Cut anywhere, also inside a line; what was appended comes with the next look, in the same order as from scratch."""
    source, copy = watched.run.folder / "events", tmp_path / "events"
    copy.mkdir()
    tail = Tail(copy)
    for part in (0.1, 0.35, 0.351, 0.9, 1.0):
        for file in source.glob("*.jsonl"):
            data = file.read_bytes()
            (copy / file.name).write_bytes(data[: int(len(data) * part)])
        assert tail.events() == read_events(copy)
    assert tail.events() == watched.run.events
    (copy / "lead.jsonl").write_bytes(b"")  # --clean: made anew
    assert tail.events() == read_events(copy)


def test_damage_in_a_followed_log_is_an_error(tmp_path: Path) -> None:
    log = lone_log(tmp_path)
    tail = Tail(tmp_path / "events")
    assert len(tail.events()) == 1
    with (tmp_path / "events" / "lead.jsonl").open("a") as file:
        file.write("not json\n")
    log.emit("run_end", status="done")
    with pytest.raises(EventLogError, match=r"lead\.jsonl"):
        tail.events()


def test_a_torn_line_that_is_sealed_later_is_read_over(tmp_path: Path) -> None:
    lone_log(tmp_path)
    path = tmp_path / "events" / "lead.jsonl"
    with path.open("a") as file:
        file.write('{"t_wall": 17')
    tail = Tail(tmp_path / "events")
    assert len(tail.events()) == 1
    EventLog(path, "lead").emit("run_end", status="done")
    assert [e.event for e in tail.events()] == ["run_start", "torn_tail", "run_end"]


def test_reading_takes_a_twentieth_of_a_core(watched: Watched) -> None:
    now, looks = [0.0], []

    def clock() -> float:
        now[0] += 0.5  # every look at the clock costs half a second: so does the reading between two of them
        return now[0]

    reader = Reader(watched.run.folder, clock)
    reader._read = lambda: looks.append(now[0])  # type: ignore[method-assign,func-returns-value,assignment]
    while now[0] < 60:
        reader.story()
        reader._story = reader._story or tell(watched.run.folder)
    assert 3 <= len(looks) <= 7, "a reading of 0.5 s may come every 10 s"


# -- the page ------------------------------------------------------------------------------------------------------------------------


def test_the_dashboard_of_a_living_run_answers(watched: Watched) -> None:
    assert watched.answers, "nobody could reach the dashboard while the run lived"
    story, text = watched.answers[-1]
    assert story["status"]["state"] in ("starting", "running") and story["status"]["ranks"]
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"everstep_step", "everstep_goodput_ratio", "everstep_rank_state"} <= names
    address = next(s.dashboard for s in watched.seen if s.dashboard)
    with pytest.raises(urllib.error.URLError):
        get(address)  # it ended with the run


def test_what_the_server_answers(watched: Watched) -> None:
    dashboard = Dashboard(watched.run.folder)
    try:
        _, story = get(dashboard.address + "/story?after=-1")
        version = json.loads(story)["version"]
        assert get(f"{dashboard.address}/story?after={version}")[0] in (200, 204)
        assert "<script" in get(dashboard.address + "/")[1]
        assert json.loads(get(dashboard.address + "/status")[1])["state"] == "done"
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(dashboard.address + "/../../etc/passwd")
        assert refused.value.code == 404
        port = int(dashboard.address.rsplit(":", 1)[1])
        with pytest.raises(BadInput, match="cannot listen"):
            Dashboard(watched.run.folder, port=port)
    finally:
        dashboard.close()


def test_numbers_for_prometheus_are_those_of_the_run(watched: Watched) -> None:
    story = tell(watched.run.folder)
    values = {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(prometheus.exposition(story)) for s in f.samples}
    assert values["everstep_step",] == STEPS and values["everstep_deaths_total",] == 1 and values["everstep_violations",] == 0
    assert values["everstep_run_state", "done"] == 1 and values["everstep_run_state", "running"] == 0
    assert sum(v for k, v in values.items() if k[0] == "everstep_time_seconds_total") == pytest.approx(4 * story.goodput.wall_s)
    assert values["everstep_metric", "train/loss"] == story.rows[-1]["train/loss"]


def test_every_metric_of_the_grafana_board_exists(watched: Watched) -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "everstep.json").read_text())
    known = {s.name for f in prometheus.families(tell(watched.run.folder)) for s in f.samples}
    texts = [t["expr"] for p in board["panels"] for t in p["targets"]] + [a["expr"] for a in board["annotations"]["list"]]
    texts += [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    used = {name for text in texts for name in re.findall(r"\beverstep_[a-z_]+", text)}
    assert used <= known and len(used) >= 10, used - known
    from everstep.telemetry.metrics import METRICS

    for pattern in re.findall(r'name=~?"([^"]+)"', " ".join(texts)):
        assert all(any(re.fullmatch(part, name) for name in METRICS) for part in pattern.split("|")), pattern


def test_curves_are_thinned_without_losing_peaks() -> None:
    points = [[float(i), float(i), 1.0 if i == 7777 else 0.0] for i in range(20_000)]
    drawn = thin(points)
    assert len(drawn) <= 2 * POINTS and points[7777] in drawn and drawn[0] == points[0] and drawn[-1] == points[-1]


def test_a_short_stall_is_seen_in_a_long_run() -> None:
    spans = [(0.0, 50_000.0, "productive"), (50_000.0, 50_001.0, "stalled"), (50_001.0, 100_000.0, "productive")]
    (place,) = lanes(Goodput(100_000.0, {}, 0.0, 0, {(0, 0): spans}))["places"]
    assert [part for _, _, part in place["spans"]] == ["productive", "stalled", "productive"]


def test_the_report_is_one_file_and_pictures(watched: Watched, capsys) -> None:
    assert cli.run(["report", str(watched.run.folder)]) == 0
    out = capsys.readouterr().out
    assert "time of all ranks" in out and "ETTR" in out
    folder = watched.run.folder / "report"
    text = (folder / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", text) and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    for picture in ("time.png", "reward_curve.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


def browser_path() -> str | None:
    return next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="the page is checked in a browser, through playwright")
    with playwright.sync_playwright() as p:
        try:
            found = p.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 2400)])
def test_the_page_in_a_browser(watched: Watched, browser, scheme: str, width: int, tmp_path: Path) -> None:
    story = as_page(tell(watched.run.folder))
    story["feed"].append({"t": 1.0, "who": "lead", "event": "error", "step": None, "text": "</script><script>document.title='broken'</script>"})
    story["status"] |= {"state": "running", "nodes": [{"node": "n", "agent": "up", "sees": ["memory"], "since": 1.0, "signs": [], "quarantined": [],
                                                       "stuck": ["rank 0/1 (w1): stuck process: its process is stopped"]}]}
    (tmp_path / "page.html").write_text(page(story))
    view = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    errors: list[str] = []
    view.on("pageerror", lambda error: errors.append(str(error)))
    view.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    view.goto((tmp_path / "page.html").as_uri())
    view.wait_for_selector("body[data-drawn]")
    assert errors == []
    assert view.title().startswith("running") and "warn" in view.locator("#state").get_attribute("class")
    assert "stuck process: its process is stopped" in view.inner_text("#nodes p.warn")
    assert view.locator(".rank").count() == 4 and view.locator("#recoveries tbody tr").count() == 1
    assert view.locator("#curves .card").count() >= 3 and view.locator("#lanes rect").count() > 8
    assert view.evaluate("document.documentElement.scrollWidth") <= width, "it must not scroll sideways"
    small = view.evaluate("""[...document.querySelectorAll('main *')].filter(e => e.textContent
        && parseFloat(getComputedStyle(e).fontSize) * (e.getScreenCTM ? e.getScreenCTM().a : 1) < 10.5).length""")
    assert small == 0, "nothing may be too small to read, nor letters of a picture that is shown smaller than it was drawn"
    if width < 500:
        cut = view.evaluate("[...document.querySelectorAll('#feed .x')].filter(e => e.scrollWidth > e.clientWidth + 1).length")
        assert cut == 0, "there is no mouse to see the rest by"
    background = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (min(map(int, re.findall(r"\d+", background)[:3])) > 200) == (scheme == "light")
    view.close()


def test_the_page_follows_a_run(watched: Watched, browser, tmp_path: Path) -> None:
    """A page that is open shows what is appended to the log, without being loaded again."""
    folder = tmp_path / "run"
    log = lone_log(folder)
    rank = EventLog(folder / "events" / "w0.jsonl", "w0")
    rank.emit("process_start", device="cpu")
    rank.emit("form", epoch=(1, 0), replica=0, rank=0, build=0)
    dashboard = Dashboard(folder)
    view = browser.new_page()
    try:
        view.goto(dashboard.address)
        view.wait_for_selector(".rank.in")
        log.emit("death", step=1, epoch=(1, 1), replica=0, rank=0, worker="w0", cause="its cable was pulled")
        view.wait_for_selector(".rank.out", timeout=10_000)
        assert "its cable was pulled" in view.inner_text("#lost")
    finally:
        view.close()
        dashboard.close()
