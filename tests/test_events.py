"""The event log: promises are kept where written, a SIGKILL costs at most the last line, order holds."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from everstep.telemetry.events import (
    EVENTS,
    Event,
    EventLog,
    EventLogError,
    epoch_key,
    of_kind,
    read_events,
    read_history,
    seconds_between,
)


def commit(log: EventLog, step: int, **more: object) -> None:
    fields = {"kind": "apply", "members": [0, 1], "samples": [f"0/{step}"], "divisor": 17.0, "deal": 4, "dealt": [0, 1]} | more
    log.emit("commit", step=step, epoch=1, **fields)


def test_round_trip(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "lead.jsonl", "lead")
    before = time.time()
    commit(log, 3, loss=torch.tensor(0.5), weights=np.arange(2), where=Path("a/b"))
    (event,) = read_events(tmp_path)
    assert (event.who, event.event, event.step, event.epoch, event.pid) == (
        "lead",
        "commit",
        3,
        1,
        os.getpid(),
    )
    assert before - 1e-3 <= event.t_wall <= time.time() and event.t_mono <= time.monotonic()
    assert event["samples"] == ["0/3"] and event["loss"] == 0.5 and event["weights"] == [0, 1]
    assert event["where"] == "a/b" and event.get("absent") is None


def test_epochs_of_two_parts_survive_and_compare(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "lead.jsonl", "lead")
    for epoch in [(1, 9), (2, 1)]:
        log.emit("view", epoch=epoch, members=[0], cause="death", deal=1, dealt=[0])
    first, second = read_events(tmp_path)
    assert first.epoch == (1, 9) and epoch_key(first.epoch) < epoch_key(second.epoch)
    assert epoch_key(None) < epoch_key(0) < epoch_key(3)


@pytest.mark.parametrize(
    ("event", "header", "fields", "says"),
    [
        ("comit", {}, {}, "did you mean 'commit'"),
        ("view", {"epoch": 1}, {"members": [0], "deal": 1, "dealt": [0]}, "lacks cause"),
        ("view", {}, {"members": [0], "cause": "x", "deal": 1, "dealt": [0]}, "lacks epoch"),
        ("verify", {"epoch": 1}, {"equal": True, "hashes": {}}, "lacks step"),
        ("delete", {}, {"path": "x", "pid": 3}, "pid is set by the log itself"),
    ],
)
def test_refused_where_it_is_written(
    tmp_path: Path, event: str, header: dict, fields: dict, says: str
) -> None:
    log = EventLog(tmp_path / "a.jsonl", "a")
    with pytest.raises(ValueError, match=says):
        log.emit(event, **header, **fields)
    assert (tmp_path / "a.jsonl").read_bytes() == b""


def test_a_field_that_is_no_json_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.jsonl", "a")
    with pytest.raises(TypeError, match="type object"):
        log.emit("delete", path=object())
    log.emit("delete", path="b")
    assert [event["path"] for event in read_events(tmp_path)] == ["b"]


def test_not_finite_numbers_stay_strict_json(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.jsonl", "a")
    values = {"x": float("nan"), "y": [float("inf"), -float("inf"), 1.0], "z": torch.tensor(float("nan"))}
    log.emit("metrics", step=1, values=values)

    def refuse(token: str) -> float:
        raise AssertionError(token)

    row = json.loads((tmp_path / "a.jsonl").read_text(), parse_constant=refuse)
    assert row["values"] == {"x": "NaN", "y": ["Infinity", "-Infinity", 1.0], "z": "NaN"}


def test_registry_is_documented() -> None:
    for name, kind in EVENTS.items():
        assert kind.meaning.endswith("."), name
        assert kind.by in {"lead", "rank", "agent", "both"}, name
        assert len(set(kind.required)) == len(kind.required), name


def test_threads_do_not_mix_lines(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.jsonl", "a")

    def write(thread: int) -> None:
        for index in range(200):
            log.emit("delete", path=f"{thread}/{index}", padding="x" * (index * 7 % 500))

    threads = [threading.Thread(target=write, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    paths = [event["path"] for event in read_events(tmp_path)]
    assert sorted(paths) == sorted(f"{t}/{i}" for t in range(8) for i in range(200))
    for t in range(8):  # each thread's own order is kept
        assert [p for p in paths if p.startswith(f"{t}/")] == [f"{t}/{i}" for i in range(200)]
    assert log.events_written == 1600 and log.bytes_written == (tmp_path / "a.jsonl").stat().st_size


def test_a_torn_tail_is_tolerated_reported_and_sealed(tmp_path: Path) -> None:
    path = tmp_path / "lead.jsonl"
    with EventLog(path, "lead") as log:
        for step in (1, 2, 3):
            commit(log, step)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    history = read_history(tmp_path)
    assert [event.step for event in history.events] == [1, 2]
    torn = len(whole.split(b"\n")[2]) - 9
    assert [(tail.path, tail.tail_bytes) for tail in history.torn] == [(path, torn)]

    with EventLog(path, "lead") as log:  # the next process of that name goes on in the same file
        commit(log, 3)
    history = read_history(tmp_path)
    assert [(event.event, event.step) for event in history.events] == [
        ("commit", 1),
        ("commit", 2),
        ("torn_tail", None),
        ("commit", 3),
    ]
    assert [tail.tail_bytes for tail in history.torn] == [torn]


def test_every_cut_of_a_log_reads_as_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "lead.jsonl"
    with EventLog(path, "lead") as log:
        commit(log, 1)
        commit(log, 2)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        history = read_history(tmp_path)
        assert len(history.events) == whole[:cut].count(b"\n")
        assert bool(history.torn) == (cut > 0 and whole[cut - 1 : cut] != b"\n")


def test_damage_elsewhere_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "lead.jsonl"
    with EventLog(path, "lead") as log:
        for step in (1, 2, 3):
            commit(log, step)
    lines = path.read_bytes().split(b"\n")
    for damaged in (
        [lines[0], lines[1][:-5], lines[2], b""],
        [lines[0], b"", lines[2], b""],
        [*lines[:3], b"{}", b""],
    ):
        path.write_bytes(b"\n".join(damaged))
        with pytest.raises(EventLogError, match=r"lead\.jsonl:[24]"):
            read_events(tmp_path)


def test_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match="not a folder"):
        read_events(tmp_path / "nowhere")


def test_merge_by_wall_clock_keeps_each_process_in_order(tmp_path: Path) -> None:
    def line(who: str, t_wall: float, index: int) -> str:
        header = {
            "t_wall": t_wall,
            "t_mono": t_wall,
            "who": who,
            "pid": 1,
            "host": "h",
            "epoch": None,
            "step": index,
        }
        return json.dumps({**header, "event": "delete", "path": "x"}) + "\n"

    (tmp_path / "a.jsonl").write_text(line("a", 10.0, 0) + line("a", 5.0, 1) + line("a", 30.0, 2))  # set back
    (tmp_path / "b.jsonl").write_text(line("b", 9.0, 0) + line("b", 20.0, 1))
    assert [(e.who, e.step) for e in read_events(tmp_path)] == [
        ("b", 0),
        ("a", 0),
        ("a", 1),
        ("b", 1),
        ("a", 2),
    ]


def test_spans_use_the_right_clock() -> None:
    def at(host: str, t_wall: float, t_mono: float) -> Event:
        return Event(t_wall, t_mono, "x", 1, host, None, None, "delete")

    assert seconds_between(at("h", 100.0, 1.0), at("h", 50.0, 3.5)) == 2.5  # the wall clock was set back
    assert seconds_between(at("h", 100.0, 900.0), at("g", 101.5, 1.0)) == 1.5


def test_unknown_kinds_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="unknown event 'comit'"):
        of_kind([], "comit")


def _child(path: Path) -> None:
    log = EventLog(path / "rank-0-0.jsonl", "rank-0-0")
    step = 0
    while True:
        step += 1
        log.emit("compute", step=step, epoch=1, replica=0, rank=0, slots=list(range(64)), deal=1, salvage=False)


def test_sigkill_loses_nothing_but_the_line_being_written(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(tmp_path,))
    child.start()
    path = tmp_path / "rank-0-0.jsonl"
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < 200_000:
        assert time.monotonic() < deadline and child.is_alive()
        time.sleep(0.01)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    history = read_history(tmp_path)
    assert [event.step for event in history.events] == list(range(1, len(history.events) + 1))
    assert len(history.events) > 100
    assert history.events[0]["slots"] == list(range(64))


def test_a_forked_child_must_open_its_own(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from everstep.telemetry.events import EventLog, read_events\n"
        "log = EventLog(sys.argv[1] + '/a.jsonl', 'a')\n"
        "log.emit('delete', path='parent')\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        log.emit('delete', path='child')\n"
        "    except ValueError as error:\n"
        "        os._exit(7 if 'opens its own' in str(error) else 1)\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["7"]
    assert [event["path"] for event in read_events(tmp_path)] == ["parent"]


def test_closed_log_and_bad_names(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.jsonl", "a")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.emit("delete", path="x")
    with pytest.raises(ValueError, match="cannot name an event file"):
        EventLog(tmp_path / "b.jsonl", "a/b")


def test_size_of_an_event(tmp_path: Path) -> None:
    """What a run writes: under 200 bytes for a small event (docs/telemetry.md states it), plus its lists."""
    log = EventLog(tmp_path / "a.jsonl", "rank-0-0")
    log.emit("reduce", step=1000, epoch=12, replica=0, rank=0)
    assert log.bytes_written < 230 + len(log._host)
