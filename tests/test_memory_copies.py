"""Copies in the memory of the node: whole or none, whatever kills the rank; and runs that go back to them."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.support.processes import run_ranks
from tests.support.runs import SFT, config, finish, gone
from tests.support.strikes import Strike, Strikes
from tests.test_exact import BASE, SHAPES, STEP, STEPS, by_position, undisturbed
from tests.test_faults import assert_invariants

from everstep import attempt
from everstep.checkpoint import flushed, memory, shelf
from everstep.checkpoint.memory import Keeper, Stamp
from everstep.checkpoint.shelf import Shelf, ShelfError
from everstep.cluster.buddies import choose_buddies
from everstep.cluster.forked import ForkedHost
from everstep.config.check import check_plan
from everstep.errors import BadInput, ConfigError, InvariantViolated, NotEnoughReplicas
from everstep.recovery.view import Epoch, Kind, Member, Record, View
from everstep.telemetry.events import EventLog, read_events

pytestmark = [pytest.mark.timeout(200)]


@pytest.fixture
def folder(tmp_path):
    path = memory.folder_of(tmp_path, 1)
    yield path
    memory.remove(path)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((1000, 333), value), "b": torch.full((7,), value, dtype=torch.bfloat16), "none": torch.zeros(0)}


def restored(folder: Path, version: int) -> tuple[dict, dict]:
    scalars: dict = {}
    mine = state(-1.0)
    memory.restore(folder, 0, Stamp(version, (1, 1)), SimpleNamespace(load_scalars=scalars.update, tensors=lambda: mine))
    return mine, scalars


def offers(folder: Path, rank: int) -> list[int]:
    return sorted(stamp.version for of, stamp in memory.whole_copies(folder).values() if of == rank)


def kept(folder: Path, *versions: int) -> memory.Keeper:
    keeper = memory.Keeper(folder, 0, 0)
    for version in versions:
        keeper.copy(Stamp(version, (1, 1)), state(float(version)), {"step": version})
    keeper.settle()
    return keeper


def test_the_last_two_copies_are_there_for_whoever_comes(folder, tmp_path):
    log = EventLog(tmp_path / "w0.jsonl", "w0")
    keeper = memory.Keeper(folder, 0, 0, log)
    for version in (0, 4, 8):
        keeper.copy(Stamp(version, (1, 1)), state(float(version)), {"step": version})
    keeper.settle()
    assert offers(folder, 0) == [4, 8] and offers(folder, 1) == []
    for version in (4, 8):
        tensors, scalars = restored(folder, version)
        assert all(torch.equal(tensors[n], t) for n, t in state(float(version)).items()) and scalars == {"step": version}
    told = read_events(tmp_path)
    assert [e.step for e in told] == [0, 4, 8] and all(e["copy_bytes"] > 1_332_000 and e["seconds"] > 0 for e in told)
    kept(folder, 12)  # another process in the same place: the newest copy stays
    assert offers(folder, 0) == [8, 12]


def die_while_copying(rank: int, folder: Path, done: int) -> None:
    """SIGKILL once ``done`` bytes of the data have been written: in the middle of a tensor."""
    keeper = kept(folder, 4, 8)
    torch.frombuffer, real = lambda memory, **how: Dying(real(memory, **how), done), torch.frombuffer
    keeper.copy(Stamp(12, (1, 1)), state(12.0), {"step": 12})


class Dying:
    def __init__(self, flat: torch.Tensor, left: int):
        self.flat, self.left = flat, left

    def __getitem__(self, where: slice) -> torch.Tensor:
        if where.stop > self.left:
            self.flat[where.start : self.left].fill_(12)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.flat[where]


def die_while_sealing(rank: int, folder: Path) -> None:
    keeper = kept(folder, 4, 8)
    memory.xxhash.xxh3_64_intdigest = lambda data: os.kill(os.getpid(), signal.SIGKILL)
    keeper.copy(Stamp(12, (1, 1)), state(12.0), {"step": 12})
    keeper.settle()


@pytest.mark.parametrize("how", [(die_while_copying, 0), (die_while_copying, 700_001), (die_while_copying, 1_332_003), (die_while_sealing,)])
def test_a_copy_that_a_kill_cut_short_is_none(how, folder):
    run_ranks(how[0], 1, folder, *how[1:], join=False, may_die=(0,))
    assert offers(folder, 0) == [8]
    tensors, _ = restored(folder, 8)
    assert all(torch.equal(tensors[n], t) for n, t in state(8.0).items())


def test_a_flipped_bit_or_a_cut_file_or_another_layout_is_no_copy_of_mine(folder):
    kept(folder, 4, 8)
    with open(folder / "0-0.0.copy", "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        data[len(data) // 2] ^= 1
    assert offers(folder, 0) == [8]
    with pytest.raises(BadInput, match="no whole copy of step 4 of rank 0"):
        restored(folder, 4)
    with pytest.raises(InvariantViolated, match="does not fit my state"):
        memory.restore(folder, 0, Stamp(8, (1, 1)), SimpleNamespace(load_scalars=lambda scalars: None, tensors=lambda: {"a": torch.zeros(3)}))
    os.truncate(folder / "0-0.1.copy", 1000)
    assert offers(folder, 0) == []


def test_a_copy_whose_seal_names_another_step_is_none(folder):
    """A flipped bit must not make the state of step 8 one of step 9."""
    kept(folder, 4, 8)
    path = next(path for path, (_, stamp) in memory.whole_copies(folder).items() if stamp.version == 8)
    content = path.read_bytes()
    for at in range(56):  # magic, version, sizes, checksum, epoch
        flipped = bytearray(content)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        assert offers(folder, 0) == [4], at
    path.write_bytes(content)
    assert offers(folder, 0) == [4, 8]


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"set recovery\.memory_checkpoint_every or checkpoint\.every_steps"):
        check_plan(config(SFT, tmp_path / "run", "layout.replicas=1", "layout.spares=1", "checkpoint.every_steps=0"))
    check_plan(config(SFT, tmp_path / "run", "layout.replicas=1", "layout.spares=1", "checkpoint.every_steps=0", "recovery.memory_checkpoint_every=2"))


# -- runs ----------------------------------------------------------------------------------------------------------------------------


def fault(phase: str, rank: int, step: int = STEP + 1, replica: int = 0) -> str:
    return f"{{step: {step}, phase: {phase}, kind: kill, replica: {replica}, rank: {rank}}}"


@pytest.mark.parametrize(
    ("shape", "faults", "back"),
    [
        pytest.param("tp2", [fault("compute", 1)], [3], marks=pytest.mark.full),
        pytest.param("pp2", [fault("apply", 0, step=6), fault("reduce", 1, step=12)], [3, 9], marks=pytest.mark.full),
        pytest.param("dp2", [fault("vote", 0), fault("compute", 0), fault("compute", 1)], [3], marks=pytest.mark.full),
        pytest.param("tp2", [fault("compute", 0, step=2)], [0], marks=pytest.mark.full),
        pytest.param("", [fault("compute", 0)], [3], marks=pytest.mark.full),  # tests/test_quarantine.py has one that is quicker
    ],
)
def test_one_replica_goes_back_to_the_copy_and_repeats_the_steps_since(shape, faults, back, model, tmp_path):
    run = finish(config(SFT, tmp_path / "run", *BASE, *SHAPES[shape], f"model.path={model}", "layout.replicas=1", f"layout.spares={len(faults)}",
                        "recovery.memory_checkpoint_every=3", f"faults=[{', '.join(faults)}]"), host=ForkedHost)
    assert_invariants(run, steps=STEPS)
    assert sorted({r.step for r in run.kind("rollback")}) == back and all("the copy in memory" in r["cause"] for r in run.kind("rollback"))
    assert by_position(run, 1) == undisturbed(model, shape)
    assert len(run.kind("memory_copy")) >= (STEPS // 3) * (2 if shape else 1)
    assert gone(run.pids) and not memory.folder_of(tmp_path / "run", 1).exists()


@pytest.mark.full
def test_two_replicas_lost_at_once_come_back_from_copies(model, tmp_path):
    run = finish(config(SFT, tmp_path / "run", *BASE, f"model.path={model}", "layout.replicas=2", "layout.spares=2", "sft.steps=40",
                        "recovery.memory_checkpoint_every=2", f"faults=[{fault('reduce', 0)}, {fault('reduce', 0, replica=1)}]"), host=ForkedHost)
    assert_invariants(run, steps=40)
    assert len(run.kind("rollback")) == 1 and len(run.kind("commit")[-1]["members"]) == 2
    assert by_position(run, 2) == undisturbed(model, "", "sft.steps=40")


def test_a_state_of_steps_that_were_taken_back_is_none():
    """What a rank kept of a broken replica, and what one holds that is out of the view: by the version alone they would pass for steps made anew."""
    from everstep.cluster.worker.rank_state import Kept
    from everstep.cluster.worker.worker import Worker
    from everstep.layout import Position

    view = View(Epoch(1, 9), (Member(0, 1, ("w4",)),), (), 6, "l")
    back, later = Record(30, Kind.ROLLBACK, view, step=6), Record(31, Kind.COMMIT, dataclasses.replace(view, committed=7), step=7)
    kept = lambda version: Kept(Position(), {}, {}, version)
    rank = lambda **what: SimpleNamespace(**{"worker_id": "w1", "_kept": None, "_state": None, "_void": None, "_rollbacks": 0} | what)

    def hears(told, *records):
        for record in records:
            Worker._forget_what_is_void(told, record)
        return told

    assert hears(rank(_kept=kept(7)), back, later)._kept is None
    assert hears(rank(_kept=kept(6)), back, later)._kept.version == 6, "that step stands"
    for version, void in ((7, True), (None, True), (6, False)):
        state = SimpleNamespace(version=version)
        told = hears(rank(_state=state), back, later)
        assert (told._void is state) == void and told._rollbacks == 1
    state = SimpleNamespace(version=6)
    assert hears(rank(worker_id="w4", _state=state), back)._void is None, "a member of what goes on"
    state = SimpleNamespace(version=7)
    assert hears(rank(_state=state), dataclasses.replace(back, kind=Kind.VIEW))._void is state, "the rollback itself was told before its controller died"


def test_a_replica_that_waits_to_enter_goes_back_to_the_copy_if_nobody_is_left_to_heal_it(model, tmp_path):
    """Replica 1 has been formed anew, and its link is being built, when the only one that holds the state dies; nobody takes its place."""
    strike = Strike("link_build", "0/0", lambda e: "1b1" in e["link"])
    with Strikes(tmp_path / "run", [strike]) as strikes:
        run = finish(config(SFT, tmp_path / "run", *BASE, f"model.path={model}", "layout.replicas=2", "layout.spares=1", "sft.steps=20",
                            "recovery.restart_attempts=0", "recovery.memory_checkpoint_every=3", f"faults=[{fault('compute', 0, replica=1)}]"), host=ForkedHost)
    assert len(strikes.done) == 1
    assert_invariants(run, steps=20)
    assert len(run.kind("rollback")) == 1 and run.kind("commit")[-1]["members"] == [1]
    assert by_position(run, 1) == undisturbed(model, "", "sft.steps=20")
    assert gone(run.pids)


@pytest.mark.full
def test_without_copies_all_load_the_last_checkpoint_in_place(model, tmp_path):
    run = finish(config(SFT, tmp_path / "run", *BASE, *SHAPES["tp2"], f"model.path={model}", "layout.replicas=1", "layout.spares=1",
                        "checkpoint.every_steps=4", f"faults=[{fault('compute', 1, step=7)}]"), host=ForkedHost)
    assert_invariants(run, steps=STEPS)
    (back,) = run.kind("rollback")
    assert back.step == 4 and "step-000004" in back["cause"]
    assert by_position(run, 1) == undisturbed(model, "tp2")
    lived = {e.who for e in run.kind("process_start")} - {d["worker"] for d in run.kind("death")}
    assert len(lived) == 2 and {e.who for e in run.kind("form") if e["build"] == 1} == lived  # no process was started for it


@pytest.mark.full
def test_with_nothing_to_go_back_to_it_says_so(model, tmp_path):
    with pytest.raises(NotEnoughReplicas, match="no copy in memory was left of every rank, and there is no checkpoint"):
        finish(config(SFT, tmp_path / "run", *BASE, f"model.path={model}", "layout.replicas=1", "layout.spares=1", "checkpoint.every_steps=20",
                      f"faults=[{fault('compute', 0)}]"), host=ForkedHost)


# -- more than one node ---------------------------------------------------------------------------------------------------------------


def test_buddies_are_on_other_nodes_spread_evenly_and_rather_spares():
    nodes = {"w0": "A", "w1": "A", "w2": "B", "w3": "B", "w4": "C"}
    assert choose_buddies(["w0", "w1", "w2", "w3"], ["w4"], nodes) == {"w0": "w4", "w1": "w2", "w2": "w0", "w3": "w1"}
    assert choose_buddies(["w0", "w1"], [], nodes) == {}


def test_a_step_that_was_rolled_back_does_not_stand():
    before, after, older = Stamp(9, (1, 4)), Stamp(9, (1, 6)), Stamp(3, (1, 1))
    assert [s.stands([((1, 5), 6)]) for s in (before, after, older)] == [False, True, True]


@pytest.fixture
def shelves(folder):
    return [Shelf(folder / node, "127.0.0.1", 5.0) for node in "AB"]


def test_a_copy_goes_to_another_node_and_comes_back_whole(folder, shelves):
    there = Keeper(folder / "A", 0, 0, send=lambda copy: shelf.put(shelves[1].address, copy, 0, 0, 5.0) or "w1")
    for version in (3, 6, 9):
        there.copy(Stamp(version, (1, 1)), state(float(version)), {"step": version})
    there.settle()
    assert shelf.copies_at(shelves[1].address, 5.0) == [(0, Stamp(6, (1, 1))), (0, Stamp(9, (1, 1)))]
    memory.remove(folder / "A")  # the node is lost
    assert shelf.copies_at(shelves[0].address, 5.0) == []
    shelf.get(shelves[1].address, 0, Stamp(6, (1, 1)), folder / "C", 0, 5.0)
    tensors, scalars = restored(folder / "C", 6)
    assert scalars == {"step": 6} and all(torch.equal(tensors[n], t) for n, t in state(6.0).items())
    with pytest.raises(ShelfError, match="no copy of step 3"):
        shelf.get(shelves[1].address, 0, Stamp(3, (1, 1)), folder / "C", 0, 5.0)
    host, port, _ = shelves[1].address
    with pytest.raises(ShelfError):
        shelf.copies_at((host, port, "guessed"), 5.0)


def die_while_sending(rank: int, address: shelf.Address, folder: Path) -> None:
    shelf._PIECE_BYTES = 100_000
    sent: list[int] = []
    receive = socket.socket.sendall

    def sendall(self, data):
        sent.append(len(data))
        if len(sent) > 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(self, data)

    copy = memory.Copy(folder / "mine.copy", 1_000_000)
    copy.seal(Stamp(12, (1, 1)), 10)
    socket.socket.sendall = sendall  # type: ignore[method-assign]
    shelf.put(address, copy, 0, 0, 5.0)


def test_a_copy_whose_sender_dies_in_the_middle_is_none_and_the_one_before_stays(folder, shelves):
    kept(folder / "B", 4, 8)
    run_ranks(die_while_sending, 1, shelves[1].address, folder, join=False, may_die=(0,))
    end = time.monotonic() + 5
    while 4 in offers(folder / "B", 0) and time.monotonic() < end:
        time.sleep(0.01)
    assert offers(folder / "B", 0) == [8]


def nodes(**of: str):
    """A host whose workers are on these nodes; with a node that is lost, its memory goes once its process is known to be dead."""
    lost = of.pop("lost", "")

    class Nodes(ForkedHost):
        def __init__(self, conf):
            super().__init__(conf, node_of=lambda worker: of.get(worker, "A"))
            self._copies = memory.folder_of(conf.run_dir, 1)

        def end(self, worker):
            super().end(worker)
            if of.get(worker) == lost:
                memory.remove(self._copies / lost)

    return Nodes


@pytest.mark.full
@pytest.mark.parametrize(("lost", "spare"), [("B", "w2"), ("", "w3")])
def test_a_lost_node_takes_no_copy_along_and_a_spare_of_the_dead_ones_node_is_preferred(lost, spare, model, tmp_path):
    """Ranks 0 and 1 on A and B, spares on C and (if it lives) B."""
    where = {"w0": "A", "w1": "B", "w2": "C", "w3": "B"}
    run = finish(config(SFT, tmp_path / "run", *BASE, *SHAPES["tp2"], f"model.path={model}", "layout.replicas=1", f"layout.spares={1 if lost else 2}",
                        "recovery.memory_checkpoint_every=3", f"faults=[{fault('compute', 1)}]"), host=nodes(**where, lost=lost))
    assert_invariants(run, steps=STEPS)
    assert [r.step for r in run.kind("rollback")] == [3] and "the copy in memory" in run.kind("rollback")[0]["cause"]
    assert [u["spare"] for u in run.kind("spare_used")] == [spare]
    fetched = {e.who: e["fetched_from"] for e in run.kind("load")}
    assert fetched == {"w0": "", spare: "127.0.0.1" if lost else ""}
    sent = {(e.who, e["buddy"]) for e in run.kind("memory_copy") if e.step}
    assert all(buddy and where[who] != where[buddy] for who, buddy in sent if who in ("w0", "w1"))
    assert by_position(run, 1) == undisturbed(model, "tp2")
    assert gone(run.pids) and not memory.folder_of(tmp_path / "run", 1).exists()


@pytest.mark.full
def test_all_ranks_and_their_node_are_lost_and_spares_of_another_go_on(model, tmp_path):
    where = {"w0": "A", "w1": "A", "w2": "B", "w3": "B"}
    run = finish(config(SFT, tmp_path / "run", *BASE, *SHAPES["pp2"], f"model.path={model}", "layout.replicas=1", "layout.spares=2",
                        "recovery.memory_checkpoint_every=3", f"faults=[{fault('compute', 0)}, {fault('compute', 1)}]"), host=nodes(**where, lost="A"))
    assert_invariants(run, steps=STEPS)
    assert [r.step for r in run.kind("rollback")] == [3] and "the copy in memory" in run.kind("rollback")[0]["cause"]
    assert by_position(run, 1) == undisturbed(model, "pp2")


# -- copies that nobody in the run can go back to go to the disk -----------------------------------------------------------------------


def test_a_run_that_nobody_can_continue_leaves_its_copies_on_the_disk(model, tmp_path):
    same = [*BASE, f"model.path={model}", "layout.replicas=1", "layout.spares=0", "recovery.memory_checkpoint_every=3"]
    with pytest.raises(NotEnoughReplicas):
        finish(config(SFT, tmp_path / "run", *same, f"faults=[{fault('compute', 0)}]"), host=ForkedHost)
    assert not memory.folder_of(tmp_path / "run", 1).exists()
    assert flushed.is_flushed(flushed.folder_of(tmp_path / "run", 1))
    run = finish(config(SFT, tmp_path / "run", *same, "resume=must", "faults=[]"), host=ForkedHost)
    assert [e.step for e in run.kind("load")] == [3] and [e.step for e in run.kind("run_start")] == [0, 3]
    assert by_position(run, 1) == undisturbed(model, "")
    assert not (tmp_path / "run" / "copies").exists(), "the run is done"


@pytest.mark.full
def test_copies_of_another_layout_or_damaged_ones_are_passed_over(model, tmp_path):
    same = [*BASE, f"model.path={model}", "layout.replicas=1", "layout.spares=0", "recovery.memory_checkpoint_every=3"]
    with pytest.raises(NotEnoughReplicas):
        finish(config(SFT, tmp_path / "run", *same, f"faults=[{fault('compute', 0)}]"), host=ForkedHost)
    with pytest.raises(BadInput, match="by the same layout only"):
        finish(config(SFT, tmp_path / "run", *same, *SHAPES["tp2"], "layout.replicas=1", "resume=must"), host=ForkedHost)
    (newest, *_) = sorted(flushed.folder_of(tmp_path / "run", 1).glob("0-0.3-*.copy"))
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    run = finish(config(SFT, tmp_path / "run", *same, "resume=must", "faults=[]"), host=ForkedHost)
    assert [e.step for e in run.kind("load")] == [0]
    assert by_position(run, 1) == undisturbed(model, "")


@pytest.mark.parametrize("harm", [lambda text: text.replace('"seen": 80', '"seen": 90'), lambda text: text[:50], lambda text: ""])
def test_copies_without_the_recipes_state_as_it_was_are_passed_over(harm, folder, tmp_path):
    """Data cursor and counters lie beside the copies: other ones would train on other samples, and nobody would know."""
    keeper = memory.Keeper(folder, 0, 0, about={"ranks": 1, "layout": {}})
    keeper.copy(Stamp(8, (1, 1)), state(8.0), {"step": 8})
    keeper.settle()
    to = flushed.folder_of(tmp_path, 3)
    flushed.write(folder, to)
    run = {"states": {"8": {"seen": 80}}, "rollbacks": []}
    (to / flushed.RUN).write_text(json.dumps(run | {"xxh3_128": flushed._checksum(run)}))
    (tmp_path / flushed.FOLDER / "attempt-x").mkdir()
    (tmp_path / flushed.FOLDER / "attempt-x" / flushed.RUN).write_text("of somebody else")
    found = flushed.newest(tmp_path, 1, {})
    assert (found.step, found.state, found.cause) == (8, {"seen": 80}, "")
    (to / flushed.RUN).write_text(harm((to / flushed.RUN).read_text()))
    assert "run.json is damaged" in flushed.newest(tmp_path, 1, {}).cause
    with pytest.raises(BadInput, match=r"resume=must: no usable checkpoint .*\n  .*attempt-3: run.json is damaged"):
        attempt.chosen(config(SFT, tmp_path, "layout.replicas=1", "resume=must"))


def test_copies_that_nobody_would_go_back_to_are_refused(tmp_path):
    local = ["launcher=local", "layout.replicas=1", "layout.spares=0", "faults=[]", "recovery.memory_checkpoint_every=3"]
    with pytest.raises(ConfigError, match="memory_checkpoint_every=3: with launcher=local nobody goes back"):
        check_plan(config(SFT, tmp_path, *local), {})
