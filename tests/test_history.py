"""The history checker must be able to fail: a real log, and copies of it corrupted in each way it exists to notice."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import SFT, config

from everstep.checkpoint import manifest
from everstep.config.load import save as save_config
from everstep.recipes.schedule import learning_rate
from everstep.telemetry.events import Event
from everstep.telemetry.history import INVARIANTS, check
from everstep.telemetry.rollout_history import stale_serving
from support.checkpoints import entries_of

RECORDED = Path(__file__).parent / "golden" / "history"
Rows = dict[str, list[dict[str, Any]]]


def read(folder: Path) -> Rows:
    return {f.name: [json.loads(line) for line in f.read_text().splitlines()] for f in sorted(folder.glob("*.jsonl"))}


def engine_rows() -> list[dict[str, Any]]:
    """A rollout engine beside the recorded run, which gets the weights of its last commit and serves them."""
    last = [row for row in read(RECORDED)["lead.jsonl"] if row["event"] == "commit"][-1]
    common = {**{k: last[k] for k in ("t_wall", "t_mono", "host")}, "who": "e0", "pid": 999999999, "epoch": None, "engine": "e0"}
    said = [("process_start", {"device": "cpu"}), ("rollout_sync_begin", {"step": last["step"], "kind": "full"}),
            ("rollout_sync", {"step": last["step"], "kind": "full", "nbytes": 10, "seconds": 0.1, "transfer": 0.1, "way": "host"}),
            ("rollout_made", {"samples": ["0/0#0"], "version": last["step"]})]
    return [{**common, "step": None, "event": kind, **more, "t_wall": last["t_wall"] + 0.001 * n} for n, (kind, more) in enumerate(said, 1)]


@pytest.fixture
def run(tmp_path):
    shutil.copytree(RECORDED, tmp_path / "events", ignore=shutil.ignore_patterns("*.md"))
    partial = manifest.begin(tmp_path / "checkpoints", 12)
    (partial / "state" / "rank-000.safetensors").write_bytes(os.urandom(2000))
    manifest.publish(partial, 12, {}, {"step": 12}, entries_of(partial))
    conf = config(SFT, tmp_path, "sft.steps=12", "sft.samples_per_step=8", "layout.replicas=2", "layout.spares=1")
    (tmp_path / "configs").mkdir()
    save_config(conf, tmp_path / "configs" / "resolved.yaml")
    lead = tmp_path / "events" / "lead.jsonl"  # recorded before learning rates were
    rows = [json.loads(line) for line in lead.read_text().splitlines()]
    rows = [row | ({"lr": learning_rate(conf.optimizer, row["step"], 12)} if row["event"] == "begin" else {}) for row in rows]
    lead.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "events" / "e0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in engine_rows()))
    return tmp_path


def corrupt(run: Path, change: Callable[[Rows], None]) -> set[int]:
    """The numbers of the invariants that are broken after ``change`` was applied to the rows of the log."""
    rows = read(run / "events")
    change(rows)
    for name, lines in rows.items():
        (run / "events" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {f.number for f in check(run) if f.held is False}


def pick(rows: Rows, file: str, event: str, step: int | None = None, which: int = 0) -> dict[str, Any]:
    return [r for r in rows[f"{file}.jsonl"] if r["event"] == event and step in (None, r["step"])][which]


def test_a_real_history_holds_and_says_what_was_looked_at(run):
    findings = check(run)
    assert [f.number for f in findings] == list(INVARIANTS)
    assert all(f.held for f in findings), findings
    assert "12 of 12 commits" in findings[0].looked_at and "96 samples" in findings[2].looked_at


def drop(file: str, event: str, step: int) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        rows[f"{file}.jsonl"].remove(pick(rows, file, event, step))

    return change


def put(file: str, event: str, step: int | None, **fields: Any) -> Callable[[Rows], None]:
    return lambda rows: pick(rows, file, event, step).update(fields)


def twice(file: str, event: str, step: int, **fields: Any) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        row = pick(rows, file, event, step)
        rows[f"{file}.jsonl"].insert(rows[f"{file}.jsonl"].index(row) + 1, row | fields)

    return change


def another_hash(rows: Rows) -> None:
    hashes = pick(rows, "lead", "verify")["hashes"]
    hashes["1/0"] = "0" * 64


def a_sample_again(rows: Rows) -> None:
    pick(rows, "lead", "commit", 7)["samples"][0] = pick(rows, "lead", "commit", 6)["samples"][0]


def work_of_the_dead(rows: Rows) -> None:
    """The killed process votes in an epoch after the one it was expelled in."""
    vote = pick(rows, "w1", "vote", 2)
    rows["w1.jsonl"].append(vote | {"step": 3, "epoch": pick(rows, "w0", "vote", 3)["epoch"], "t_wall": rows["w1.jsonl"][-1]["t_wall"] + 1})


def a_vote_of_the_fenced(rows: Rows) -> None:
    """A process that has fenced itself votes on."""
    vote = pick(rows, "w0", "vote", 5)
    rows["w0.jsonl"].insert(rows["w0.jsonl"].index(vote), vote | {"event": "fenced", "cause": "silence"})


def work_of_the_retired(rows: Rows) -> None:
    """w2 is told to end in step 6, and works in later views."""
    at = pick(rows, "lead", "commit", 5)
    row = at | {"event": "retire", "step": None, "epoch": None, "replica": 1, "rank": 0, "worker": "w2", "cause": ""}
    rows["lead.jsonl"].insert(rows["lead.jsonl"].index(at) + 1, row)
    for name in rows:
        for later in rows[name]:
            if later["epoch"] and (later["step"] or 0) > 6:
                later["epoch"] = [1, 9]
                later.update({"next_epoch": [1, 9]} if "next_epoch" in later else {})
    pick(rows, "lead", "commit", 6)["next_epoch"] = [1, 9]


def samples_of_another_step(rows: Rows) -> None:
    """Each is used once, but two in the place of each other."""
    one, other = (pick(rows, "lead", "commit", step)["samples"] for step in (6, 7))
    one[0], other[0] = other[0], one[0]


def a_sample_was_dropped_in_another_step(rows: Rows) -> None:
    sample = pick(rows, "lead", "commit", 6)["samples"].pop()
    rows["lead.jsonl"].append(pick(rows, "lead", "commit", 8) | {"event": "drop", "samples": [sample], "reason": "long"})


def commits_change_places(rows: Rows) -> None:
    lead = rows["lead.jsonl"]
    one, other = (lead.index(pick(rows, "lead", "commit", step)) for step in (6, 7))
    lead[one], lead[other] = lead[other] | {"t_wall": lead[one]["t_wall"]}, lead[one] | {"t_wall": lead[other]["t_wall"]}


def a_slot_that_died_before(rows: Rows) -> None:
    """Step 3 is committed after its owner died: slots 1 and 3 were not computed again, and are said to be in the total."""
    for event in ("compute", "computed"):
        again = [r for r in rows["w0.jsonl"] if r["event"] == event and r["step"] == 3 and r["salvage"]]
        for row in again:
            rows["w0.jsonl"].remove(row)
    pick(rows, "w0", "vote", 3)["held"] = [0, 2]


def nothing_after_the_fault(rows: Rows) -> None:
    at = pick(rows, "lead", "fault")["t_wall"]
    for name in rows:
        rows[name] = [r for r in rows[name] if r["t_wall"] <= at or r["event"] == "death"]


CORRUPTIONS: list[tuple[str, Callable[[Rows], None], set[int]]] = [
    ("a state hash differs", another_hash, {1}),
    ("replicas voted for different totals", put("w0", "vote", 5, digest=1), {1}),
    ("a commit is missing", drop("lead", "commit", 6), {2, 3}),
    ("steps are committed in another order", commits_change_places, {2}),
    ("a commit without the vote of a member", drop("w2", "vote", 6), {2}),
    ("a step is committed twice", twice("lead", "commit", 6), {2}),
    ("a member never applied", drop("w0", "apply", 6), {2}),
    ("a member applied twice", twice("w0", "apply", 6), {2}),
    ("the total of another epoch was applied", put("w0", "apply", 6, epoch=[1, 1]), {2}),
    ("a skipped step was applied", put("lead", "commit", 6, kind="skip"), {2}),
    ("a sample is used twice, another never", a_sample_again, {3}),
    ("a commit has samples of another step", samples_of_another_step, {3}),
    ("a sample of another step was dropped", a_sample_was_dropped_in_another_step, {3}),
    ("an epoch with two memberships", put("lead", "commit", 6, members=[0]), {4}),
    ("an epoch goes back", put("lead", "commit", 7, next_epoch=[0, 9]), {4}),
    ("an expelled process works on", work_of_the_dead, {4}),
    ("a fenced process votes", a_vote_of_the_fenced, {4}),
    ("two processes vote in one place", put("w2", "vote", 6, replica=0), {4}),
    ("another process of that name works in its place", put("w0", "vote", 6, pid=1), {4}),
    ("a retired process works on", work_of_the_retired, {4}),
    ("the divisor is not the sum", put("lead", "commit", 5, divisor=1.0), {5}),
    ("a vote with another divisor", put("w0", "vote", 5, divisor=1.0), {5}),
    ("a slot counts twice", put("w0", "vote", 5, ledger=[0, 0, 1, 2]), {5}),
    ("a slot was computed by nobody", put("w0", "computed", 6, slots=[0]), {5}),
    ("two members hold one slot", put("w0", "vote", 2, held=[0, 1, 2]), {5}),
    ("nobody holds a slot of the total", put("w0", "vote", 2, held=[0]), {5}),
    ("a slot of the total died with its owner before", a_slot_that_died_before, {5}),
    ("a fault after which nothing happened", nothing_after_the_fault, {8}),
    ("work done twice in one epoch", twice("w0", "compute", 6), {9}),
    ("slots of a living replica were salvaged", put("w0", "compute", 2, slots=[0, 1, 2, 3], salvage=True), {9}),
    ("slots were computed that were dealt to another", put("w0", "compute", 2, slots=[1, 3]), {9}),
    ("a step is applied to the state of another", drop("w0", "apply", 6), {11}),
    ("a step is computed with the state of another", lambda rows: pick(rows, "w0", "compute", 6).update(step=8), {11}),
    ("a step has less than its replicas make", lambda rows: pick(rows, "lead", "begin", 5)["samples"].pop(), {12}),
    ("a step has another learning rate", put("lead", "begin", 5, lr=1.0), {12}),
    ("slots were salvaged before their owner died", lambda rows: pick(rows, "lead", "death").update(step=4), {9}),
]


@pytest.mark.parametrize("change, broken", [c[1:] for c in CORRUPTIONS], ids=[c[0] for c in CORRUPTIONS])
def test_a_corrupted_history_is_found(run, change, broken):
    assert broken <= corrupt(run, change)


def test_a_process_that_outlives_the_run_is_found_and_one_that_is_about_to_end_is_waited_for(run):
    log = run / "events" / "w0.jsonl"
    held = f"import sys, time; log = open({str(log)!r}, 'a'); print(flush=True); time.sleep(float(sys.argv[1]))"
    for lives_s, ended_s_ago, broken in ((60, 60, {8}), (1, 0, set())):
        process = subprocess.Popen([sys.executable, "-c", held, str(lives_s)], stdout=subprocess.PIPE)

        def its_worker(rows: Rows) -> None:
            for row in rows["w0.jsonl"]:
                row.update(pid=process.pid, host=socket.gethostname())  # noqa: B023
            pick(rows, "lead", "run_end").update(t_wall=time.time() - ended_s_ago)  # noqa: B023

        try:
            assert process.stdout and process.stdout.readline()
            assert corrupt(run, its_worker) == broken
        finally:
            process.kill()
            process.wait()


def test_a_flipped_bit_in_the_newest_checkpoint_and_a_pointer_to_nothing_are_found(run):
    data = next((run / "checkpoints" / "step-000012").rglob("*.safetensors"))
    damaged = bytearray(data.read_bytes())
    damaged[1000] ^= 1
    data.write_bytes(bytes(damaged))
    (finding,) = [f for f in check(run) if f.held is False]
    assert finding.number == 7 and data.name in finding.counterexample
    shutil.rmtree(run / "checkpoints")
    assert {f.number for f in check(run) if f.held is False} == {7}


def test_an_empty_history_proves_nothing(tmp_path):
    (tmp_path / "events").mkdir()
    assert {f.held for f in check(tmp_path)} <= {None, True}
    assert [f.held for f in check(tmp_path) if f.number in (1, 2, 3, 4, 5, 7, 9)] == [None] * 7


def _set(which: str, **fields: Any) -> Callable[[Rows], None]:
    return lambda rows: pick(rows, "e0", which).update(fields)


@pytest.mark.parametrize(
    "change",
    [
        _set("rollout_made", version=11),                                     # others than it holds
        lambda rows: rows["e0.jsonl"].remove(pick(rows, "e0", "rollout_sync")),  # the transfer was never complete
        _set("rollout_sync", kind="base"),                                    # frozen weights alone are not the model
        _set("rollout_made", pid=999999998),                                  # another process, which got nothing
        lambda rows: rows["e0.jsonl"].insert(3, pick(rows, "e0", "rollout_sync") | {"event": "rollout_sleep"}),  # it has given them up
        lambda rows: [row.update(step=99) if row["step"] else row.update(version=99) for row in rows["e0.jsonl"] if row["step"] or "version" in row],
    ],
    ids=["other-version", "half-of-them", "base-only", "restarted", "asleep", "not-committed"],
)
def test_an_engine_that_serves_what_it_does_not_hold_is_found(run, change):
    assert corrupt(run, change) == {10}


@pytest.mark.parametrize("again", [False, True])
def test_what_was_made_by_weights_from_before_the_run_went_back_is_not_to_be_used(again) -> None:
    """An engine completes something after the rollback; it is made anew by weights that count, or not, and a step uses it."""

    def event(name: str, step: int | None = None, who: str = "lead", **fields: Any) -> Event:
        return Event(0.0, 0.0, who, 1, "here", None, step, name, fields)

    def sync(step: int) -> list[Event]:
        return [event("rollout_sync_begin", step, "e0", kind="full"), event("rollout_sync", step, "e0", kind="full")]

    def made(version: int) -> Event:
        return event("rollout_made", None, "e0", samples=["0/7#1"], version=version)

    anew = [*sync(1), made(1)] if again else []
    events = [event("commit", step, samples=[]) for step in (1, 2, 3)] + [*sync(3), event("rollback", 1), made(3), *anew]
    assert stale_serving(events)[1] == "", "so far nobody uses it"
    said = stale_serving([*events, event("commit", 2, samples=["2/0/0/7#1"])])[1]
    assert said == ("" if again else "step 2 used what e0 completed by weights of step 3 from before the run went back")
