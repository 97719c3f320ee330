"""Metrics, console and report: what a run shows is what its files say."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console as RichConsole

from everstep.errors import BadInput
from everstep.telemetry import events as events_module
from everstep.telemetry.console import Completion, Console, recovery_line
from everstep.telemetry.docs import PAGES
from everstep.telemetry.events import EventLog, of_kind, read_events
from everstep.telemetry.metrics import METRICS, Metrics, check_name, read_metrics
from everstep.telemetry.recoveries import Recovery, account, recoveries, survivor_inside
from everstep.telemetry.report import describe, marks, reward_curve, summary_table
from everstep.telemetry.trackers import TensorBoard

SAMPLES = 4  # per step


class Story:
    """Writes the event log of a run with two replicas of one rank each, on a clock that the test moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(events_module.time, "time", lambda: 1e9 + self.now)
        monkeypatch.setattr(events_module.time, "monotonic", lambda: self.now)
        self.lead = EventLog(folder / "lead.jsonl", "lead")
        self.ranks = [EventLog(folder / f"rank-{r}-0.jsonl", f"rank-{r}-0") for r in range(2)]
        self.folder, self.epoch = folder, 1

    def start(self, step: int = 0, attempt: int = 1) -> None:
        self.lead.emit("run_start", step=step, attempt=attempt, recipe="sft", launcher="ray", replicas=2, spares=1)
        self.view([0, 1], "start")

    def view(self, members: list[int], cause: str) -> None:
        self.lead.emit("view", epoch=self.epoch, members=members, cause=cause, deal=self.epoch, dealt=members)

    def begin(self, step: int, **more: object) -> None:
        samples = [f"0/{(step - 1) * SAMPLES + i}" for i in range(SAMPLES)]
        self.lead.emit("begin", step=step, epoch=self.epoch, members=[0, 1], **({"samples": samples} | more))

    def compute(self, step: int, replica: int, slots: list[int], seconds: float = 1.0) -> None:
        where = {"step": step, "epoch": self.epoch, "replica": replica, "rank": 0, "slots": slots, "deal": self.epoch, "salvage": False}
        self.ranks[replica].emit("compute", **where)
        self.now += seconds
        self.ranks[replica].emit("computed", **where, seconds=seconds)

    def commit(self, step: int, members: list[int], kind: str = "apply", **more: object) -> None:
        samples = [f"0/{(step - 1) * SAMPLES + i}" for i in range(SAMPLES)]
        fields = {"kind": kind, "members": members, "samples": samples, "divisor": 8.0, "deal": self.epoch, "dealt": members} | more
        self.lead.emit("commit", step=step, epoch=self.epoch, **fields)
        for replica in members:
            self.ranks[replica].emit(kind, step=step, epoch=self.epoch, replica=replica, rank=0, seconds=0.0)

    def step(self, step: int, members: tuple[int, ...] = (0, 1), **more: object) -> None:
        self.begin(step)
        for replica in members:
            self.compute(step, replica, [s for s in range(SAMPLES) if s % len(members) == members.index(replica)])
        self.commit(step, list(members), **more)

    def kill(self, step: int, replica: int = 1, detect_s: float = 0.25) -> None:
        self.lead.emit("fault", step=step, replica=replica, rank=0, kind="kill", phase="compute", done="SIGKILL",
                       found=f"step {step}, compute")
        self.now += detect_s
        self.died(step, replica)

    def died(self, step: int, replica: int, cause: str = "its process ended") -> None:
        self.lead.emit("death", step=step, epoch=self.epoch, replica=replica, rank=0, cause=cause)

    @property
    def events(self) -> list[events_module.Event]:
        return read_events(self.folder)


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    yield Story(tmp_path / "events", monkeypatch)


def kill_and_rejoin(story: Story) -> None:
    """Steps 1..5; replica 1 is killed in step 3, which replica 0 redoes alone, and is back with the commit of step 4."""
    story.start()
    story.step(1)
    story.step(2)
    story.begin(3)
    story.compute(3, 0, [0, 2])
    story.kill(3)  # t0, noticed at +0.25
    story.now += 0.05
    story.epoch = 2
    story.view([0], "replica 1 died")
    story.compute(3, 0, [0, 1, 2, 3], seconds=2.0)  # from +0.30 to +2.30
    story.now += 0.1
    story.commit(3, [0])  # +2.40
    story.epoch = 3
    story.begin(4)
    story.ranks[1].emit("compute", step=4, epoch=3, replica=1, rank=0, slots=[], deal=3, salvage=False)  # healing
    story.compute(4, 0, [0, 1, 2, 3], seconds=1.6)
    story.commit(4, [0, 1])
    story.lead.emit("join", step=4, epoch=3, replica=1, members=[0, 1])  # +4.00
    story.step(5)
    story.lead.emit("run_end", status="done")


def test_one_kill_told_in_numbers(story: Story) -> None:
    kill_and_rejoin(story)
    (recovery,) = recoveries(story.events)
    assert (recovery.replica, recovery.rank, recovery.step, recovery.injected) == (1, 0, 3, True)
    assert recovery.detect_s == pytest.approx(0.25)
    assert recovery.stall_s == pytest.approx(0.30)
    assert recovery.commit_s == pytest.approx(2.40)
    assert recovery.full_strength_s == pytest.approx(4.00)
    assert recovery.slots_redone == 4  # dealt anew: 0 and 2 once more, and those of the dead one
    books = account(story.events)
    assert books.exact and (books.first_step, books.last_step, books.committed) == (1, 5, 5)
    assert books.samples_committed == 5 * SAMPLES


def test_a_real_death_is_counted_from_its_detection(story: Story) -> None:
    story.start()
    story.begin(1)
    story.died(1, 1, cause="SIGSEGV")
    story.now += 0.5
    story.epoch = 2
    story.compute(1, 0, [0, 1, 2, 3])
    (recovery,) = recoveries(story.events)
    assert (recovery.injected, recovery.detect_s, recovery.full_strength_s) == (False, None, None)
    assert recovery.stall_s == pytest.approx(0.5) and recovery.cause == "SIGSEGV"
    assert "not yet at full strength" in recovery_line(recovery)


def test_all_survivors_must_compute_again(story: Story) -> None:
    story.ranks.append(EventLog(story.folder / "rank-2-0.jsonl", "rank-2-0"))
    story.lead.emit("run_start", step=0, attempt=1, recipe="sft", launcher="ray", replicas=3, spares=0)
    story.view([0, 1, 2], "start")
    story.begin(1)
    story.kill(1, replica=1)
    story.epoch = 2
    story.compute(1, 0, [0, 2], seconds=0.5)
    story.compute(1, 2, [1, 3])
    (recovery,) = recoveries(story.events)
    assert recovery.stall_s == pytest.approx(0.75)  # replica 2 came last


def test_a_survivor_that_was_computing_is_idle_only_from_the_end_of_that(story: Story) -> None:
    """It learns of the death at its reduce, and what it has computed by then counts: it was of use all the time."""
    story.start()
    story.begin(1)
    story.kill(1)
    story.ranks[0].emit("computed", step=1, epoch=1, replica=0, rank=0, slots=[0, 2], deal=1, salvage=False, seconds=1.0)
    story.now += 0.03
    story.epoch = 2
    story.ranks[0].emit("reduce", step=1, epoch=2, replica=0, rank=0)
    (recovery,) = recoveries(story.events)
    assert recovery.stall_s == pytest.approx(0.03)


def test_the_death_of_a_spare_and_of_a_replica_already_out_stall_nobody(story: Story) -> None:
    story.start()
    story.step(1)
    story.begin(2)
    story.lead.emit("death", step=2, epoch=1, replica=-1, rank=-1, cause="gone")
    story.kill(2)
    story.epoch = 2
    story.view([0], "died")
    story.lead.emit("death", step=2, epoch=2, replica=1, rank=0, cause="died again while it was re-formed")
    story.compute(2, 0, [0, 1, 2, 3])
    spare, first, again = recoveries(story.events)
    assert spare.stall_s is None and "a spare died" in recovery_line(spare)
    assert first.stall_s is not None and again.stall_s is None and again.slots_redone == 0


def test_a_later_attempt_is_no_recovery(story: Story) -> None:
    story.start()
    story.begin(1)
    story.kill(1)
    story.now += 60
    story.epoch = 7
    story.start(attempt=2)
    story.step(1)
    (recovery,) = recoveries(story.events)
    assert recovery.stall_s is None and recovery.full_strength_s is None


@pytest.mark.parametrize("defect", ["missing", "doubled", "applied twice", "sample lost", "sample doubled"])
def test_the_account_finds_every_defect(story: Story, defect: str) -> None:
    story.start()
    story.step(1)
    if defect != "missing":
        story.step(2)
    if defect == "doubled":
        story.commit(2, [0, 1])
    if defect == "applied twice":
        story.ranks[1].emit("apply", step=2, epoch=1, replica=1, rank=0, seconds=0.0)
    if defect == "sample lost":
        story.begin(3)
        story.commit(3, [0, 1], samples=["0/8", "0/9", "0/10"])
    elif defect == "sample doubled":
        story.begin(3, samples=["0/8", "0/7"])
        story.commit(3, [0, 1], samples=["0/8", "0/7"])
    else:
        story.step(3)
    books = account(story.events)
    assert not books.exact
    found = {
        "missing": books.steps_missing == [2] and books.steps_lost == 1,
        "doubled": books.steps_doubled == [2],
        "applied twice": books.steps_doubled == [2],
        "sample lost": books.samples_lost == ["0/11"],
        "sample doubled": books.samples_doubled == ["0/7"],
    }
    assert found[defect], books


def test_dropped_samples_and_several_passes_are_no_defects(story: Story) -> None:
    story.start()
    for step, rl_pass in [(1, 0), (2, 1)]:
        story.begin(step, samples=["0/0", "0/1"], rl_pass=rl_pass)
        story.commit(step, [0, 1], samples=["0/0", "0/1"], rl_pass=rl_pass)
    story.begin(3, samples=["0/2", "0/3"])
    story.lead.emit("drop", samples=["0/3"], reason="too long")
    story.commit(3, [0, 1], kind="skip", samples=["0/2"])
    books = account(story.events)
    assert books.exact and books.samples_dropped == 1 and books.skipped == 1
    assert "3 committed (steps 1 to 3, 1 without update)" in describe([], books)


def test_the_step_in_progress_is_lost_only_if_the_run_says_it_is_done(story: Story) -> None:
    story.start()
    story.step(1)
    story.begin(2)
    assert account(story.events).exact
    story.lead.emit("run_end", status="done")
    assert account(story.events).samples_lost == [f"0/{i}" for i in (4, 5, 6, 7)]


def test_a_restart_from_a_checkpoint_rolls_back_and_says_so(story: Story) -> None:
    story.start()
    for step in (1, 2, 3):
        story.step(step)
    story.start(step=1, attempt=2)
    story.step(2)
    books = account(story.events)
    assert books.exact and books.steps_rolled_back == [2, 3] and books.committed == 2
    assert "rolled back" in describe([], books)


def test_the_table_shows_what_was_computed(story: Story) -> None:
    kill_and_rejoin(story)
    out = RichConsole(file=io.StringIO(), width=160)
    out.print(summary_table(story.events))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    for part in ("rank 1/0", "0.250 s", "0.300 s", "2.400 s", "4.000 s", "5 committed (steps 1 to 5)"):
        assert part in text, text


def test_the_curve_marks_kill_and_rejoin(story: Story, tmp_path: Path) -> None:
    kill_and_rejoin(story)
    ((kill, back),) = marks(story.events)
    assert 2 < kill < 3 and back == pytest.approx(4.0)
    with Metrics(tmp_path) as metrics:
        for step in range(1, 6):
            metrics.log(step, {"critic/score/mean": step / 5})
    blank = reward_curve(tmp_path / "metrics.jsonl", _empty(tmp_path / "none"), tmp_path / "blank.png").read_bytes()
    path = reward_curve(tmp_path / "metrics.jsonl", story.folder, tmp_path / "report" / "curve.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.read_bytes() != blank  # the marks are drawn
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    for colour in ((0.839, 0.153, 0.157), (0.173, 0.627, 0.173)):  # tab:red, tab:green
        assert (np.abs(pixels - colour).max(axis=-1) < 0.02).sum() > 50


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("loss", ["train/loss", "dpo/loss"])
def test_a_run_without_rewards_or_held_out_data_has_a_curve(loss: str, tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        for step in (1, 2):
            metrics.log(step, {loss: 1.0 / step})
    assert reward_curve(tmp_path / "metrics.jsonl", _empty(tmp_path / "none"), tmp_path / "curve.png").read_bytes()


def test_nothing_to_draw_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing to draw"):
        reward_curve(tmp_path / "metrics.jsonl", tmp_path, tmp_path / "x.png")


# -- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_are_readable_at_once_and_by_tensorboard(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, [TensorBoard(tmp_path)])
    metrics.log(1, {"train/loss": torch.tensor(2.5), "mine/anything": 3})
    metrics.log(2, {"train/loss": float("nan")})
    rows = read_metrics(tmp_path / "metrics.jsonl")  # before close
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["train/loss"] == 2.5 and rows[0]["mine/anything"] == 3.0 and math.isnan(rows[1]["train/loss"])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(point.step, point.value) for point in board.Scalars("mine/anything")] == [(1, 3.0)]
    metrics.close()
    metrics.close()


def test_metric_typos_are_refused_user_names_are_free() -> None:
    check_name("my_reward/bonus")
    with pytest.raises(ValueError, match="did you mean 'actor/pg_loss'"):
        check_name("actor/pgloss")
    with pytest.raises(ValueError, match="unknown metric 'ft/zzz'"):
        check_name("ft/zzz")
    assert all(meaning.endswith(".") for meaning in METRICS.values())


def test_metrics_of_a_resumed_run(tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.log(step, {"train/loss": step})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-7])  # the lead died in the middle of line 3
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    with Metrics(tmp_path) as metrics:
        metrics.log(2, {"train/loss": 20.0})
    assert [(row["step"], row["train/loss"]) for row in read_metrics(path)] == [(1, 1.0), (2, 20.0)]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_lines_of_a_step_are_one_row_until_another_step_stands_between(tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        metrics.log(1, {"train/loss": 1.0})
        metrics.log(2, {"train/loss": 2.0, "ft/goodput": 0.5})
        metrics.log(2, {"val/loss": 2.5, "ft/goodput": 0.6})  # an evaluation after the step: the same row
        assert read_metrics(metrics.path)[-1].items() >= {"train/loss": 2.0, "ft/goodput": 0.6, "val/loss": 2.5}.items()
        metrics.log(1, {"train/loss": 10.0})  # both are made again
        metrics.log(2, {"train/loss": 20.0})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["train/loss"] for row in rows] == [10.0, 20.0] and rows[-1].keys() == {"step", "t_wall", "train/loss"}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5, "the file keeps all of them"


def test_generated_pages_are_up_to_date() -> None:
    root = Path(__file__).parent.parent
    for name, make in PAGES.items():
        assert (root / "docs" / name).read_text() == make(), f"docs/{name} is old: run `make docs`"


# -- console --------------------------------------------------------------------------------------------------------

RECOVERY = Recovery(1, 0, "its process ended", 12, 0.0, True, 0.021, 0.043, 1.5, 3.2, 4)


def play(console: Console) -> None:
    with console:
        console.start(3, "iteration")
        console.note("resumed [from] nothing: \u2713")
        console.strength(2, 2, 1)
        console.step(1, {"critic/score/mean": 0.5, "perf/throughput": 1234.4, "unknown/name": 1.0})
        console.recovery(RECOVERY)
        console.strength(1, 2, 0)
        console.completions([Completion("1+1=" + "x" * 500, "[bold]2[/bold] \u2713\nnext", 1.0)])
        console.step(2, {"train/loss": 0.25})
        console.completions([{"prompt": "2+2=", "completion": "4", "step": 9}])


def test_plain_is_one_line_per_step_and_per_recovery() -> None:
    out = io.StringIO()
    console = Console("auto", file=out)
    assert console.mode == "plain"
    play(console)
    lines = out.getvalue().splitlines()
    assert lines[0] == "resumed [from] nothing: \u2713"
    assert lines[1] == "iteration 1/3  reward 0.500  tok/s/device 1234"
    assert lines[2] == (
        "recovery: replica 1 rank 0 died in step 12 (its process ended); noticed after 0.021 s; survivors computed "
        "again after 0.043 s; full strength after 3.200 s; 4 slots redone"
    )
    assert lines[3] == "replicas 1/2, spares 0"
    assert lines[4].startswith("  [reward 1.00] '...xxx") and "[bold]2[/bold]" in lines[4]  # no markup, no line break
    assert lines[5:] == ["iteration 2/3  loss 0.2500", "  '2+2=' -> '4'"]


def test_off_prints_nothing() -> None:
    out = io.StringIO()
    play(Console("none", file=out))
    assert out.getvalue() == ""


def test_rich_without_a_terminal_still_prints_the_lines() -> None:
    out = io.StringIO()
    play(Console("rich", file=out))
    assert "iteration 1/3" in out.getvalue() and "recovery: replica 1" in out.getvalue()


def test_rich_on_a_terminal_is_live() -> None:
    code = (
        "import tests.test_telemetry as t\n"
        "from everstep.telemetry.console import Console\n"
        "c = Console('auto'); assert c.mode == 'rich', c.mode; t.play(c)\n"
    )
    parent, child = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    root = Path(__file__).parent.parent
    process = subprocess.Popen([sys.executable, "-c", code], stdout=child, stderr=child, env=env, cwd=root)
    os.close(child)
    said = b""
    while True:
        try:
            block = os.read(parent, 65536)
        except OSError:  # the child closed the terminal
            break
        if not block:
            break
        said += block
    text = said.decode()
    assert process.wait(60) == 0, text
    for part in ("iteration 2/3", "2/3", "latest completions", "replicas 1/2, spares 0", "recovery: replica 1"):
        assert part in text, text


def test_a_terminal_that_goes_away_does_not_end_the_run() -> None:
    code = (
        "import tests.test_telemetry as t\n"
        "from everstep.telemetry.console import Console\n"
        "c = Console('plain'); t.play(c); assert c.mode == 'none', c.mode\n"
    )
    root = Path(__file__).parent.parent
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, cwd=root)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
    closed = io.StringIO()
    console = Console("plain", file=closed)
    closed.close()
    play(console)
    assert console.mode == "none"


def test_an_ascii_terminal_does_not_end_the_run() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    play(Console("plain", file=stream))
    assert b"resumed [from] nothing: ?" in raw.getvalue()


def test_threads_may_print_together() -> None:
    out = io.StringIO()
    console = Console("plain", file=out)
    console.start(100)
    threads = [threading.Thread(target=lambda: [console.note("x" * 50) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out.getvalue() == ("x" * 50 + "\n") * 200


@pytest.mark.parametrize(("fault_s", "inside"), [(0.5, False), (1.5, True), (2.5, True)])
def test_a_survivor_is_inside_apply_from_when_it_begins_to(tmp_path, monkeypatch, fault_s, inside) -> None:
    """Its event is written when all is applied, and says for how long that went on; nothing is told of how long it stays."""
    story = Story(tmp_path, monkeypatch)
    story.start()
    began = story.now
    for after_s, tell in sorted([
        (fault_s, lambda: story.lead.emit("fault", step=1, replica=1, rank=0, kind="kill", phase="apply", done="SIGKILL", found="step 1, apply")),
        (2.0, lambda: story.ranks[0].emit("apply", step=1, epoch=1, replica=0, rank=0, seconds=1.0)),
    ], key=lambda one: one[0]):
        story.now = began + after_s
        tell()
    events = read_events(tmp_path)
    (fault,) = of_kind(events, "fault")
    assert survivor_inside(events, fault) == inside
