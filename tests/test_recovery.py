"""The parts of recovery on their own: real sockets, real process groups, real threads, no cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.support.processes import run_ranks

from everstep.cluster.controller.repair import Repair
from everstep.config.recovery_schema import RecoveryConfig
from everstep.errors import BadInput, DeadlineExceeded, InvariantViolated, LinkBroken, RunEnded, WorkerFailed
from everstep.recovery import heal, wire
from everstep.recovery.commitlog import CommitLog
from everstep.recovery.control import Control
from everstep.recovery.coordinator import Coordinator, State
from everstep.recovery.desk import Listener
from everstep.recovery.healing import Healing
from everstep.recovery.link import Link, Links
from everstep.recovery.proxy import Relay
from everstep.recovery.rendezvous import Announcement
from everstep.recovery.replica import ReplicaWorld
from everstep.recovery.server import CoordinatorServer
from everstep.recovery.transaction import Transaction
from everstep.recovery.view import Epoch, Heal, Kind, Member, Record, View, Vote
from everstep.telemetry.events import EventLog

never = lambda: False


def until(condition, within_s: float = 20.0) -> bool:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


# -- the coordinator's threads -------------------------------------------------------------------------------------------------


def serve(folder: Path, replicas: int = 2, silence_s: float = 30.0, heartbeat_s: float = 1.0) -> tuple[CoordinatorServer, list[Member]]:
    log = CommitLog(folder / "commits.log")
    server = CoordinatorServer(
        Coordinator(log.incarnation), log, EventLog(folder / "lead.jsonl", "lead"), Listener(lambda worker: (0, 0)), "secret", silence_s,
        10.0, heartbeat_s=heartbeat_s,
    )
    return server, [Member(r, 0, (f"w{r}",)) for r in range(replicas)]


def connect(server: CoordinatorServer, worker: str, heartbeat_s: float = 0.1) -> Control:
    control = Control(server.address, "secret", worker, heartbeat_s)
    assert until(lambda: server.connected(worker))
    return control


def test_a_rank_that_says_goodbye_is_no_death(tmp_path):
    server, members = serve(tmp_path)
    controls = [connect(server, w) for w in ("w0", "w1")]
    server.open(members)
    controls[1].close()
    assert until(lambda: not server.connected("w1"))
    time.sleep(0.2)
    assert server.dead == {} and server.coordinator.view.replicas == (0, 1)
    server.close()


@pytest.mark.parametrize("over", [False, True])
def test_whose_process_ends_once_the_run_is_over_has_not_died_of_anything(over, tmp_path):
    server, members = serve(tmp_path)
    controls = [connect(server, w) for w in ("w0", "w1", "w2")]  # w2 is on its way into the run
    server.open(members)
    if over:
        server.tell_end(RunEnded("the run ended"))
    server.process_ended("w2")
    server.receive("w1", {"type": "dying", "cause": "an error of its own"})
    assert sorted(server.dead) == ([] if over else ["w1", "w2"])
    for control in controls:
        control.close()
    server.close()


@pytest.mark.parametrize(("told", "silence_s"), [(True, 30.0), (False, 0.3), (False, 30.0)], ids=["hears-the-end", "hears-nothing", "is-not-missed"])
def test_a_rank_that_is_expelled_does_not_take_its_coordinator_for_dead(told, silence_s, tmp_path):
    """It would end what it shares with the others (a placement group of Ray) after the grace. Whoever hears nothing fences itself, and asks."""
    server, members = serve(tmp_path, silence_s=silence_s, heartbeat_s=0.1)
    relay = Relay(server.address)
    control = Control(relay.address, "secret", "w0", 0.1, fence_s=0.5, grace_s=2.5)
    other = connect(server, "w1")
    control.find = lambda: Announcement(1, server.address, server.address, "secret")
    refused, abandoned = [], []
    control.on_refused, control.on_abandoned = refused.append, abandoned.append
    assert until(lambda: server.connected("w0") and server.connected("w1"))
    server.open(members)
    assert until(lambda: control.epoch.counter == 1)
    control.phase(1, "compute")  # it has come up
    if told:
        server.expel("w0", "on purpose")
    else:
        relay.cut()
    assert until(lambda: bool(refused)) and f"was expelled: {server.dead['w0']}" in refused[0]
    time.sleep(3.0)
    assert len(refused) == 1 and not abandoned and control.lost
    assert list(server.dead) == ["w0"], "its questions disturb nobody"
    other.close()
    server.close()
    relay.close()


def test_a_rank_whose_coordinator_is_gone_is_abandoned_after_the_grace(tmp_path):
    server, members = serve(tmp_path)
    control = Control(server.address, "secret", "w0", 0.1, grace_s=0.5)
    control.find = lambda: Announcement(1, server.address, server.address, "secret")
    refused, abandoned = [], []
    control.on_refused, control.on_abandoned = refused.append, abandoned.append
    assert until(lambda: server.connected("w0"))
    server.open(members)
    server.close()
    assert until(lambda: bool(abandoned)) and "no coordinator for 0.5 s" in abandoned[0] and not refused


def test_a_rank_that_dies_between_its_formation_and_the_first_view_is_not_in_it_for_long(tmp_path):
    server, members = serve(tmp_path)
    controls = [connect(server, w) for w in ("w0", "w1")]
    controls[1]._socket.shutdown(socket.SHUT_RDWR)  # what the kernel does when a process ends; close() would say goodbye
    assert until(lambda: "w1" in server.dead)
    server.open(members)
    assert server.coordinator.view.replicas == (0,)
    assert controls[0].wait_for(lambda rs: rs[-1] if rs[-1].view.replicas == (0,) else None, 5.0, "the view").view.replicas == (0,)
    server.close()


def test_a_rank_that_connects_late_is_told_the_latest_view(tmp_path):
    server, members = serve(tmp_path)
    server.open(members)
    server.restart_at(7)
    assert connect(server, "w0").latest.view.committed == 7
    server.close()


def test_a_commit_record_that_cannot_be_written_ends_the_run_and_is_told_to_nobody(tmp_path):
    server, members = serve(tmp_path)
    control = connect(server, "w0")
    server.open(members)
    first = control.latest
    os.close(server._log._fd)  # the disk is gone
    server._log._fd = os.open("/dev/full", os.O_WRONLY)
    server.expel("w1", "killed")
    with pytest.raises(WorkerFailed, match="could not be written"):
        server.wait(lambda c: True, 1.0)
    server.expel("w0", "killed too")  # nothing is decided any more
    assert control._records == [first]
    server.close()


def test_a_process_that_comes_up_may_be_silent_for_longer_than_one_that_takes_part(tmp_path, monkeypatch):
    """Importing holds the interpreter lock: no heartbeat leaves, and nobody waits for one. Before the run begins, and in the first seconds of a
    process that is no member of the view: a member that is frozen before its first step holds the others up like any other."""
    monkeypatch.setattr("everstep.recovery.server.COMING_UP_S", 12.0)
    server, members = serve(tmp_path, replicas=3, silence_s=0.4)
    controls = [connect(server, worker, heartbeat_s=60.0) for worker in ("w0", "w1", "w2", "w3")]  # they say hello, and nothing more
    time.sleep(1.0)
    assert not server.dead
    controls[0]._heartbeat_s = 0.1
    threading.Thread(target=controls[0]._heartbeat_loop, daemon=True).start()  # w0 goes on
    server.open(members[:2])
    controls[1].phase(1, "compute")
    assert until(lambda: "w1" in server.dead, 8.0) and "silent for 0.4 s (last: step 1, compute)" in server.dead["w1"]
    assert sorted(server.dead) == ["w1"]
    server.joiner(members[2])  # formed, not in the view yet
    time.sleep(0.6)
    assert sorted(server.dead) == ["w1"]
    for worker in ("w0", "w2"):
        server.receive(worker, {"type": "link_ready", "link_id": server.coordinator.build.link_id})
    server.receive("w0", {"type": "vote", "vote": Vote("w0", 1, server.coordinator.view.epoch, 1, 1.0, 0, True).to_json()})
    assert server.coordinator.view.replicas == (0, 2)  # it entered with the commit
    assert until(lambda: "w2" in server.dead, 8.0) and server.dead["w2"] == "silent for 0.4 s (last: step 0, idle)"
    assert sorted(server.dead) == ["w1", "w2"]
    assert until(lambda: "w3" in server.dead, 30.0) and server.dead["w3"].startswith("silent for ")
    server.close()


def test_a_spare_that_got_a_place_before_it_could_leave_is_missed_there(tmp_path):
    server, members = serve(tmp_path)
    connect(server, "w0"), connect(server, "w1"), connect(server, "w2")
    server.open(members)
    server.retire("w2", "planned leave")
    assert server.coordinator.view.replicas == (0, 1), "nobody misses a spare"
    server.retire("w1", "planned leave")
    assert server.coordinator.view.replicas == (0,)
    server.close()


class Heard:
    """A judge that writes down what it is told."""

    def __init__(self):
        self.entries, self.begun = [], []

    def entered(self, worker, step, phase, now, waits, epoch):
        self.entries.append((step, phase, epoch))

    def view(self, members, healing, now, begins):
        self.begun.append(begins)

    def overdue(self, now):
        return []

    def stalled(self, now):
        return ""


def test_what_a_rank_says_is_judged_by_the_epoch_under_which_it_acts(tmp_path):
    """Whatever it has heard since; and a view begins the attempt anew, which a commit does not."""
    server, members = serve(tmp_path)
    server._judge = heard = Heard()
    controls = [connect(server, worker, heartbeat_s=60.0) for worker in ("w0", "w1")]
    server.open(members)
    first = controls[0].latest.view.epoch
    controls[0].obeys = first
    server.expel("w1", "killed")
    assert controls[0].wait_for(lambda rs: rs[-1] if rs[-1].view.epoch > first else None, 5.0, "the view")
    controls[0].phase(1, "reduce")
    controls[0].vote(Vote("w0", 1, first, 1, 1.0, 0, True))
    controls[0].obeys = second = controls[0].epoch
    controls[0].phase(1, "begin")
    controls[0].vote(Vote("w0", 1, second, 1, 1.0, 0, True))
    assert until(lambda: server.coordinator.committed == 1 and len(heard.begun) == 3)
    assert heard.entries == [(1, "reduce", first.key), (1, "voted", first.key), (1, "begin", second.key), (1, "voted", second.key)]
    assert heard.begun == [first.key, second.key, None]
    server.close()


def test_a_rank_that_reads_nothing_delays_nobody_and_misses_nothing(tmp_path):
    """Frozen, then awake: what the kernel does not take at once waits on a thread of its own, and comes whole and in order."""
    server, _ = serve(tmp_path)
    frozen = socket.create_connection(server.address, timeout=20.0)
    wire.send(frozen, {"token": "secret", "worker": "w0", "pid": 1, "host": "here"})
    heard, control = [], connect(server, "w1")
    control.on_order = lambda order: heard.append(order["number"])
    assert until(lambda: server.connected("w0"))
    begun = time.monotonic()
    for number in range(200):
        for worker in ("w0", "w1"):
            assert server.order(worker, {"type": "fault", "number": number, "filler": "x" * 100_000})
    assert until(lambda: heard == list(range(200)), 10.0) and time.monotonic() - begun < 10.0
    assert sum("coordinator-to-w" in thread.name for thread in threading.enumerate()) == 1
    incoming, numbers = wire.Reader(frozen), []
    while len(numbers) < 200:
        if (message := incoming.receive())["type"] == "fault":
            numbers.append(message["number"])
    assert numbers == list(range(200)) and until(lambda: not any("coordinator-to-w" in thread.name for thread in threading.enumerate()))
    assert server.order("w0", {"type": "fault", "number": 200})
    while (message := incoming.receive())["type"] != "fault":
        pass
    assert message["number"] == 200
    frozen.close()
    control.close()
    server.close()


def test_messages_are_read_whole_however_they_come():
    ours, theirs = socket.socketpair()
    ours.settimeout(0.1)
    incoming, messages = wire.Reader(ours), [{"n": n, "filler": "x" * (n * 20_000)} for n in range(4)]
    data = b"".join(map(wire.packed, messages))
    theirs.sendall(data[:-7])
    assert [incoming.receive() for _ in range(3)] == messages[:3]
    with pytest.raises(TimeoutError):
        incoming.receive()
    theirs.sendall(data[-7:] + wire.packed({"n": 9})[:2])
    assert incoming.receive() == messages[3]
    theirs.close()
    with pytest.raises(wire.Closed):
        incoming.receive()


def test_nonsense_on_the_channel_ends_the_run(tmp_path):
    server, members = serve(tmp_path)
    control = connect(server, "w0")
    server.open(members)
    control._send({"type": "vote"})
    with pytest.raises(WorkerFailed, match="listening to a rank: KeyError"):
        server.wait(lambda c: False, 5.0)
    server.close()


def test_closing_the_coordinator_ends_its_threads_and_frees_its_port(tmp_path):
    before = set(threading.enumerate())
    server, members = serve(tmp_path, silence_s=1.0)
    control = connect(server, "w0")
    server.open(members)
    server.close()
    control.close()
    assert until(lambda: set(threading.enumerate()) <= before)


def test_after_a_pause_of_its_own_the_coordinator_expels_nobody(tmp_path):
    """Ctrl-Z and fg, or a frozen container: everybody was silent, for all it knows."""
    results = run_ranks(_stopped_coordinator, 2, str(tmp_path), join=False, deadline_s=30)
    assert results[0] == {}


def _stopped_coordinator(rank: int, folder: str) -> dict | None:
    pid = Path(folder) / "pid"
    if rank == 1:
        assert until(pid.exists, 20.0)
        time.sleep(1.0)
        coordinator, ranks = map(int, pid.read_text().split())
        for process in (coordinator, ranks):
            os.kill(process, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(coordinator, signal.SIGCONT)
        time.sleep(0.5)
        os.kill(ranks, signal.SIGCONT)
        return None
    server, members = serve(Path(folder), silence_s=1.5)
    server.open(members)
    child = os.fork()
    if child == 0:  # two ranks that speak every 0.2 s
        controls = [Control(server.address, "secret", w, 0.2) for w in ("w0", "w1")]
        time.sleep(30.0)  # ended from outside
        os._exit(len(controls))
    (Path(folder) / "pid.tmp").write_text(f"{os.getpid()} {child}")
    (Path(folder) / "pid.tmp").rename(pid)
    assert until(lambda: server.connected("w0") and server.connected("w1"))
    time.sleep(5.0)
    dead = dict(server.dead)
    server.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return dead


# -- repair -----------------------------------------------------------------------------------------------------------------


class Launcher:
    """What repair asks of the launcher, written down."""

    def __init__(self, fails: list[dict[str, str]] | None = None):
        self.formed: list[list[str]] = []
        self.announced: list[Member] = []
        self.confirmed: list[str] = []
        self.replaced: list[str] = []
        self._fails = fails or []
        self.hold = threading.Event()
        self.hold.set()
        self.nodes: dict[str, str] = {}
        self.stuck: dict[str, threading.Event] = {}

    def confirm_dead(self, worker):
        self.hold.wait(5.0)
        if worker in self.stuck:
            assert self.stuck[worker].wait(20.0)
        if worker == "unkillable":
            raise KeyError("a bug")
        self.confirmed.append(worker)

    def form(self, formations):
        self.formed.append([worker for worker, _ in formations])
        return self._fails.pop(0) if self._fails else {}

    def expel(self, worker, cause): ...

    def announce(self, member):
        self.announced.append(member)

    def retire(self, worker): ...

    def replace(self, worker):
        self.replaced.append(worker)

    def settle(self): ...

    def node(self, worker):
        return self.nodes.get(worker, "A")

    def note(self, event, **fields): ...


def repair(launcher: Launcher, spares: list[str]) -> Repair:
    return Repair(launcher, {r: Member(r, 0, (f"{r}a", f"{r}b")) for r in range(2)}, spares, lambda: False)


def test_all_ranks_of_a_replica_that_died_together_are_replaced_in_one_formation():
    launcher = Launcher()
    launcher.hold.clear()
    r = repair(launcher, ["s1", "s2"])
    r.worker_died("0a")  # the thread takes it; the next ones arrive while it confirms
    r.worker_died("1a")
    r.worker_died("1b")
    assert r.hopeful(["1a", "1b"])
    launcher.hold.set()
    assert until(lambda: not r.hopeful(["0a", "1a", "1b"]))
    assert [m.workers for m in launcher.announced] == [("s1", "0b")]  # one spare is left for two gaps
    r.close()


def test_a_process_that_does_not_end_delays_no_repair_but_its_own():
    """Nor is another one of its replica formed around it, nor it taken for a spare, before it is gone."""
    launcher = Launcher()
    launcher.stuck = {"0a": threading.Event(), "s3": threading.Event()}
    r = repair(launcher, ["s1", "s2", "s3"])
    r.worker_died("0a")
    r.worker_died("0b")
    r.worker_died("s3")
    assert until(lambda: "0b" in launcher.confirmed and r.spares == ["s1", "s2"])
    r.worker_died("1a")
    assert until(lambda: [m.workers for m in launcher.announced] == [("s1", "1b")])
    assert r.hopeful(["0a"]) and r.hopeful(["s3"]) and launcher.formed == [["s1", "1b"]]
    r.spare_is_ready("s4")
    time.sleep(1.5)
    assert launcher.formed == [["s1", "1b"]]
    for ended in launcher.stuck.values():
        ended.set()
    assert until(lambda: not r.hopeful(["0a", "0b", "1a", "s3"]))
    assert sorted(launcher.announced[-1].workers) == ["s2", "s4"] and launcher.announced[-1].replica == 0 and r.spares == [] and r.failure is None
    r.close()


def test_a_spare_that_dies_while_a_replica_forms_costs_that_spare_alone():
    launcher = Launcher(fails=[{"s1": "killed"}])
    r = repair(launcher, ["s1", "s2"])
    r.worker_died("1a")
    assert until(lambda: not r.hopeful(["1a"]))
    assert launcher.formed == [["s1", "1b"], ["s2", "1b"]]
    assert launcher.announced == [Member(1, 2, ("s2", "1b"))] and launcher.confirmed == ["1a", "s1"]
    r.close()


@pytest.mark.parametrize("spares", [["s1"], []])
@pytest.mark.parametrize("first", ["died", "adopted"])
def test_a_replica_is_formed_once_whoever_says_that_it_is_broken(spares, first):
    """After a takeover a death is told twice: by who was dead, and by which replicas are out. And the place is filled again."""
    launcher = Launcher()
    r = repair(launcher, spares)
    told = [lambda: r.worker_died("1a"), lambda: r.adopt({"1a"}, [Member(1, 0, ("1a", "1b"))])]
    for tell in told if first == "died" else reversed(told):
        tell()
        assert until(lambda: not r.hopeful(["1a"]))
    if not spares:
        assert launcher.announced == []
        r.spare_is_ready("s1")
    assert until(lambda: bool(launcher.announced) and not r.hopeful(["1a"]))
    assert launcher.announced == [Member(1, 1, ("s1", "1b"))] and launcher.formed == [["s1", "1b"]]
    assert launcher.replaced == ["1a"] and launcher.confirmed == ["1a"]
    r.close()


def test_a_replica_that_is_stranded_is_formed_anew_of_the_same_ranks():
    launcher = Launcher()
    r = repair(launcher, ["s1"])
    r.adopt(set(), [Member(1, 0, ("1a", "1b"))])
    assert until(lambda: not r.hopeful([]))
    assert launcher.announced == [Member(1, 1, ("1a", "1b"))] and r.spares == ["s1"] and launcher.replaced == []
    r.close()


def test_who_takes_a_place_has_its_state_or_is_near_it():
    """A spare of the dead one's node first; of a replica that was given up, each living rank goes back to its own place."""
    launcher = Launcher()
    launcher.nodes = {"s1": "B", "s2": "A", "0a": "A", "0b": "A"}
    r = repair(launcher, ["s1", "s2"])
    r.worker_died("0a")
    assert until(lambda: not r.hopeful(["0a"]))
    assert launcher.announced[-1].workers == ("s2", "0b")
    r.worker_died("1a")
    assert until(lambda: not r.hopeful(["1a"]))
    assert launcher.announced[-1].workers == ("s1", "1b")
    r.worker_died("s1")  # nobody is left: 1b is given up with it
    assert until(lambda: not r.hopeful(["s1"]) and r.spares == ["1b"])
    r.spare_is_ready("s3")
    assert until(lambda: launcher.announced[-1].build == 2 and launcher.announced[-1].workers == ("s3", "1b"))
    r.close()


def test_whatever_happens_in_repair_is_told():
    launcher = Launcher()
    r = repair(launcher, ["s1"])
    r.worker_died("unkillable")
    assert until(lambda: r.failure is not None)
    assert isinstance(r.failure, WorkerFailed) and "KeyError" in str(r.failure)
    r.worker_died("1a")  # and the thread lives on
    assert until(lambda: bool(launcher.announced))
    r.close()


# -- heal -------------------------------------------------------------------------------------------------------------------


class Numbers:
    """A state of two tensors, and a third one if it has a reference."""

    island = False

    def __init__(self, value: float, version: int | None, reference: bool):
        self.version = version
        self._all = {"weights": torch.full((5,), value), "reference": torch.full((3,), value)}
        self.reference = reference

    def tensors(self):
        return {k: t for k, t in self._all.items() if self.reference or k != "reference"}

    def scalars(self):
        return {"reference": self.reference}

    def load_scalars(self, scalars):
        self.reference = scalars["reference"]


def healed(source: Numbers, joiner: Numbers) -> heal.Healed:
    store = dist.HashStore()
    snapshot = heal.Snapshot(source, 4)
    sender = threading.Thread(
        target=lambda: heal.send(heal.HealStream("x", store, 10.0, never).serve("127.0.0.1", snapshot.lanes), snapshot), daemon=True
    )
    sender.start()
    with heal.HealStream("x", store, 10.0, never) as stream:
        tensors = heal.open_state(stream.join(), joiner, 4)
        result = heal.receive(stream, tensors, 4) if tensors is not None else heal.Healed(0, 0.0)
        joiner.version = 4
    sender.join(5.0)
    assert not sender.is_alive()
    return result


def test_a_snapshot_is_of_its_version_whatever_becomes_of_the_state(monkeypatch):
    monkeypatch.setattr(heal, "PIECE_BYTES", 8)
    source = Numbers(7.0, 4, reference=True)
    snapshot = heal.Snapshot(source, 4)
    pieces = snapshot.pieces()
    got = bytes(next(pieces))
    assert snapshot.set_aside() == 24
    for tensor in source.tensors().values():
        tensor.fill_(8.0)
    got += b"".join(bytes(piece) for piece in pieces)
    assert torch.equal(torch.frombuffer(bytearray(got), dtype=torch.float32), torch.full((8,), 7.0))
    with pytest.raises(InvariantViolated, match="is at 4"):
        heal.Snapshot(source, 5)


@pytest.mark.parametrize("damage", [lambda b: bytes([b[0] ^ 1]) + b[1:], lambda b: b[:-1] + bytes([b[-1] ^ 0x80])])
def test_a_damaged_piece_is_noticed_and_the_state_stays_dirty(damage, monkeypatch):
    sent = heal.Lane.send

    def send(self, data):
        sent(self, memoryview(damage(bytes(data))) if len(data) == 20 else data)  # the five weights

    monkeypatch.setattr(heal.Lane, "send", send)
    joiner = Numbers(2.0, 3, reference=False)
    store, snapshot = dist.HashStore(), heal.Snapshot(Numbers(7.0, 4, False), 4)
    sender = threading.Thread(target=lambda: heal.send(heal.HealStream("x", store, 10.0, never).serve("127.0.0.1", snapshot.lanes), snapshot), daemon=True)
    sender.start()
    with heal.HealStream("x", store, 10.0, never) as stream:
        tensors = heal.open_state(stream.join(), joiner, 4)
        with pytest.raises(LinkBroken, match="checksum"):
            heal.receive(stream, tensors, 4)
    sender.join(5.0)
    assert joiner.version is None


@pytest.mark.parametrize("version", [None, 3, 4])
def test_a_joiner_gets_the_reference_model_that_was_made_while_it_was_away(version):
    """Even if its weights are those of the version already."""
    joiner = Numbers(2.0, version, reference=False)
    assert healed(Numbers(7.0, 4, reference=True), joiner).nbytes == 32
    assert joiner.version == 4 and joiner.reference
    assert all(bool((t == 7.0).all()) for t in joiner.tensors().values())


def test_strangers_do_not_end_a_heal(monkeypatch):
    """One who goes at once, one who says nothing, one who guesses."""
    monkeypatch.setattr(heal, "PIECE_BYTES", 8)  # several lanes
    monkeypatch.setattr(heal, "_STRANGER_S", 0.2)
    store, source, joiner = dist.HashStore(), Numbers(7.0, 4, True), Numbers(2.0, 3, True)
    snapshot = heal.Snapshot(source, 4)
    assert snapshot.lanes > 1
    sender = threading.Thread(
        target=lambda: heal.send(heal.HealStream("x", store, 10.0, never).serve("127.0.0.1", snapshot.lanes), snapshot), daemon=True
    )
    sender.start()
    store.wait(["heal/x"], timedelta(seconds=5))
    host, port, secret, _ = json.loads(store.get("heal/x"))
    socket.create_connection((host, port)).close()
    silent = socket.create_connection((host, port))
    guesses = socket.create_connection((host, port))
    guesses.sendall(b"0" * len(secret) + b"\0")
    with heal.HealStream("x", store, 10.0, never) as stream:
        tensors = heal.open_state(stream.join(), joiner, 4)
        assert tensors is not None and heal.receive(stream, tensors, 4).nbytes == 32
    sender.join(5.0)
    assert all(bool((t == 7.0).all()) for t in joiner.tensors().values())
    for one in (silent, guesses):
        one.close()


def test_a_lane_that_fails_ends_the_others(monkeypatch):
    """And the failure told is the first one, not that of those who were called off."""
    monkeypatch.setattr(heal, "PIECE_BYTES", 8)
    monkeypatch.setattr(heal, "DEVICE_LANES", 3)
    monkeypatch.setattr(heal, "HOST_LANES", 3)
    store, joiner = dist.HashStore(), Numbers(2.0, 3, True)

    def damaged() -> None:
        snapshot = heal.Snapshot(Numbers(7.0, 4, True), 4)
        with heal.HealStream("x", store, 10.0, never) as stream:
            stream.serve("127.0.0.1", 3)
            version = snapshot.version
            has = bytearray(heal._HAS.size)
            stream.receive_into(memoryview(has))
            header = json.dumps({"scalars": snapshot.scalars, "tensors": snapshot.described}).encode()
            stream.send(memoryview(heal.MARK.pack(version, len(header), heal.checksum_of(memoryview(header)))))
            stream.send(memoryview(header))
            stream.lanes[1].send(memoryview(heal.MARK.pack(version, 8, 1)))
            stream.lanes[1].send(memoryview(bytes(8)))  # its checksum is not 1; lanes 0 and 2 hear nothing at all
            noticed.wait(10.0)

    noticed = threading.Event()
    sender = threading.Thread(target=damaged, daemon=True)
    sender.start()
    begun = time.monotonic()
    with heal.HealStream("x", store, 10.0, never) as stream:
        tensors = heal.open_state(stream.join(), joiner, 4)
        assert tensors is not None
        with pytest.raises(LinkBroken, match="checksum"):
            heal.receive(stream, tensors, 4)
    assert time.monotonic() - begun < 8.0, "the others waited for the source to close"
    noticed.set()
    sender.join(5.0)


def test_a_joiner_that_holds_the_version_receives_nothing():
    joiner = Numbers(2.0, 4, reference=True)
    assert healed(Numbers(7.0, 4, reference=True), joiner).nbytes == 0
    assert joiner.version == 4 and bool((joiner.tensors()["weights"] == 2.0).all())


def test_ranks_of_a_replica_heal_together_or_leave_together(tmp_path):
    """Otherwise one computes, and waits in a collective for one that waits for the next view."""
    broken = run_ranks(_half_healed, 2, str(tmp_path), deadline_s=40)
    assert "closed the connection" in broken[1] or "is gone" in broken[1]
    assert broken[0] == "another rank of this replica was not healed"


def _half_healed(rank: int, folder: str) -> str:
    """Replica 1 (both processes) heals from replica 0 (a thread in each): the source of rank 1 ends in the middle."""
    world = dist.group.WORLD
    address: list = [None]
    if rank == 0:
        server, _ = serve(Path(folder))
        address = [server.address]
    dist.broadcast_object_list(address, group=world)
    control = Control(address[0], "secret", f"1{'ab'[rank]}", 0.5)
    one = Heal(3, 1, 0, 4)
    view = View(Epoch(1, 2), (Member(0, 0, ("0a", "0b")), Member(1, 1, ("1a", "1b"))), (one,), 4, "l#1")
    store = dist.HashStore()
    state = Numbers(0.0, None, False)
    events = EventLog(Path(folder) / f"w{rank}.jsonl", f"w{rank}")
    config = RecoveryConfig(heal_timeout_s=10.0, heal_hold_s=0.0, heal_backlog_steps=0)
    healing = Healing(1, rank, store, "127.0.0.1", state, config, events, lambda number: True)
    links = Links(lambda n, r: None, 1.0)  # type: ignore[arg-type,return-value]
    transaction = Transaction(
        config, 1, 1, rank, f"1{'ab'[rank]}", control, links, ReplicaWorld("1", 2, 20.0, never), healing,
        state, events,
    )

    def source() -> None:
        with heal.HealStream(healing._name(view, one), store, 10.0, never) as stream:
            stream.serve("127.0.0.1")
            snapshot = heal.Snapshot(Numbers(7.0, 4, False), 4)
            if rank == 1:
                snapshot.drop()  # the header, and no piece
            heal.send(stream, snapshot)

    threading.Thread(target=source, daemon=True).start()
    work = SimpleNamespace(step=5, slots=2)
    try:
        transaction._catch_up(work, view, one, never)
    except LinkBroken as error:
        dist.barrier()
        return str(error)
    return "healed"


# -- links ------------------------------------------------------------------------------------------------------------------


def _link(rank: int, name: str, timeout_s: float) -> Link:
    port = int(os.environ["EVERSTEP_TEST_STORE_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    return Link(name, (0, 1), rank, 0, store, torch.device("cpu"), timeout_s)


def test_a_reduce_waits_for_a_slow_member_longer_than_a_link_takes_to_form():
    assert run_ranks(_late, 2, join=False) == [2.0, 2.0]


def _late(rank: int) -> float:
    link = _link(rank, "slow", 1.0)
    time.sleep(2.0 * rank)
    return float(link.sum([torch.ones(1)], never, 30.0)[0])


def test_a_reduce_that_nobody_joins_ends_at_its_deadline_and_giving_the_link_up_takes_no_time():
    waited, dropped = run_ranks(_alone, 2, join=False)[0]
    assert 0.9 < waited < 2.0 and dropped < 0.5


def _alone(rank: int) -> tuple[float, float]:
    link = _link(rank, "alone", 10.0)
    if rank == 1:
        time.sleep(3.0)  # computes, and does not look
        return 0.0, 0.0
    asked = time.monotonic()
    with pytest.raises((DeadlineExceeded, LinkBroken)):
        link.sum([torch.ones(1)], lambda: time.monotonic() - asked > 1.0, 30.0)
    gave_up = time.monotonic()
    link.drop()
    return gave_up - asked, time.monotonic() - gave_up


def test_a_link_that_was_built_for_a_rank_that_left_is_dropped():
    built = threading.Event()
    link = Link("x#1", (0,), 0, 0, dist.HashStore(), torch.device("cpu"), 1.0)

    def build(name, replicas):
        built.wait(5.0)
        return link

    links, ready = Links(build, 1.0), []
    view = View(Epoch(1, 1), (Member(0, 0, ("0a",)),), (), 0, "x#1")
    links.build_in_background(Record(1, Kind.BUILD, view), never, lambda: ready.append(1))
    links.drop_all()
    built.set()
    assert until(lambda: not any(t.name == "link-x#1" for t in threading.enumerate()))
    assert ready == [] and links._links == {}


class Built:
    """As a link: how often it was dropped. ``fails``: when it is warmed."""

    sent_bytes = 0

    def __init__(self, fails: Exception | None = None):
        self.drops, self._fails = 0, fails

    def warm(self, stop):
        if self._fails:
            raise self._fails

    def drop(self):
        self.drops += 1


@pytest.mark.parametrize("error", [LinkBroken("overtaken"), DeadlineExceeded("late"), RuntimeError("NCCL")])
def test_a_link_that_is_not_warmed_in_the_background_is_dropped(error):
    """Else each death would leave a communicator of those that were being built."""
    link = Built(error)
    links, ready = Links(lambda name, replicas: link, 1.0), []
    view = View(Epoch(1, 1), (Member(0, 0, ("0a",)), Member(1, 0, ("1a",))), (), 0, "x#1")
    links.build_in_background(Record(1, Kind.BUILD, view), never, lambda: ready.append(1))
    assert until(lambda: link.drops == 1)
    assert ready == [] and links._links == {}


@pytest.mark.parametrize("how", ["overtaken", "not formed in"])
def test_a_link_that_is_formed_after_it_was_given_up_is_dropped(how):
    link, goes_on = Built(), threading.Event()

    def build(name, replicas):
        goes_on.wait(5.0)
        return link

    view = View(Epoch(1, 1), (Member(0, 0, ("0a",)), Member(1, 0, ("1a",))), (), 0, "x#1")
    links, overtaken = Links(build, 0.1 if how != "overtaken" else 5.0), how == "overtaken"
    with pytest.raises(LinkBroken, match=how):
        links.use(Record(1, Kind.VIEW, view), lambda: overtaken)
    assert link.drops == 0
    goes_on.set()
    assert until(lambda: link.drops == 1)
    assert links._links == {}
    assert links.use(Record(1, Kind.VIEW, view), never) == (link, False) and link.drops == 1


def test_a_link_whose_devices_cannot_connect_is_dropped(monkeypatch):
    class Group:
        class Options:
            config = SimpleNamespace(blocking=True)

        aborted = threading.Event()

        def __init__(self, *args): ...

        def eager_connect_single_device(self, device):
            raise RuntimeError("NCCL")

        def abort(self):
            self.aborted.set()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    with pytest.raises(RuntimeError, match="NCCL"):
        Link("x#1", (0, 1), 0, 0, dist.HashStore(), torch.device("cuda", 0), 1.0)
    assert Group.aborted.wait(5.0)


def test_the_lease_of_a_closed_log_is_free(tmp_path):
    server, _ = serve(tmp_path)
    with pytest.raises(BadInput):
        CommitLog(tmp_path / "commits.log")
    server.close()
    CommitLog(tmp_path / "commits.log").close()
    assert server.coordinator.state is State.FORMING
