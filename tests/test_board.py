"""The board alone, and what else of the lighthouse needs no process: decisions, addresses, devices, environment, the coordinator that takes over."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.replicas import free_ports

from everstep.cluster import takeover
from everstep.cluster.environment import Machines, lighthouse_address, machines, manager_port, placed, slurm_hosts
from everstep.cluster.local.head import Head
from everstep.cluster.local.lighthouse import Lighthouse, Ports, pack_journal, serve, unpack_journal
from everstep.cluster.local.up import Child, check_ports_of_replicas, share_devices, up
from everstep.config.load import from_tree
from everstep.config.schema import Config
from everstep.errors import BadInput, ConfigError, InvariantViolated, NotEnoughReplicas, WorkerFailed, typed
from everstep.recovery import commitlog
from everstep.recovery.board import Board, Journal, Result, Who, Work
from everstep.recovery.commitlog import CommitLog
from everstep.recovery.coordinator import Coordinator, State
from everstep.recovery.view import Epoch, Heal, Kind, Member, View, Vote

A, B, C = (Member(r, 0, (f"w{r}",)) for r in range(3))


def view(*members: Member, healing: tuple[int, ...] = (), committed: int = 0) -> View:
    source = next((m.replica for m in members if m.replica not in healing), 0)
    return View(Epoch(1, 1), members, tuple(Heal(r, r, source, committed) for r in healing), committed, "x")


# ---------------------------------------- the board


def test_all_contributors_compute_and_everybody_gets_the_same() -> None:
    board, now = Board(), view(A, B, C, healing=(2,))
    work = board.ask((0, 0), "call", Who.CONTRIBUTORS, now, 0.0)
    assert work == Work(1, (A, B)), "who heals has no state to compute with"
    board.give((0, 0), 1, B, b"b", now, 0.0)
    assert board.ask((0, 0), "call", Who.CONTRIBUTORS, now, 0.0) == work, "one part is missing"
    board.give((0, 0), 1, A, b"a", now, 0.0)
    assert board.ask((0, 0), "call", Who.CONTRIBUTORS, now, 0.0) == Result((0, 1), (0, 1), (b"a", b"b"))


def test_a_death_before_its_part_makes_the_others_compute_all_of_it() -> None:
    board = Board()
    board.ask((0, 0), "call", Who.CONTRIBUTORS, view(A, B), 0.0)
    board.give((0, 0), 1, A, b"half", view(A, B), 0.0)
    board.view_changed(view(A), 1.0)
    assert board.ask((0, 0), "call", Who.CONTRIBUTORS, view(A), 1.0) == Work(2, (A,))
    board.give((0, 0), 1, A, b"late", view(A), 1.0)
    assert not isinstance(board.ask((0, 0), "call", Who.CONTRIBUTORS, view(A), 1.0), Result), "a part of the attempt that is over counted"
    board.give((0, 0), 2, A, b"whole", view(A), 1.0)
    assert board.ask((0, 0), "call", Who.CONTRIBUTORS, view(A), 1.0) == Result((0,), (0,), (b"whole",))


def test_a_death_after_its_part_costs_nothing() -> None:
    board = Board()
    board.ask((0, 0), "call", Who.CONTRIBUTORS, view(A, B), 0.0)
    board.give((0, 0), 1, B, b"b", view(A, B), 0.0)
    board.view_changed(view(A), 0.0)
    board.give((0, 0), 1, A, b"a", view(A), 0.0)
    assert board.ask((0, 0), "call", Who.CONTRIBUTORS, view(A), 0.0) == Result((0, 1), (0,), (b"a", b"b"))


def test_a_new_life_is_not_the_old_one() -> None:
    board, reborn = Board(), Member(1, 1, ("w1b1",))
    board.ask((0, 0), "call", Who.CONTRIBUTORS, view(A, B), 0.0)
    board.view_changed(view(A, reborn, healing=(1,)), 0.0)
    assert board.ask((0, 0), "call", Who.CONTRIBUTORS, view(A, reborn, healing=(1,)), 0.0) == Work(2, (A,))


def test_one_computes_what_is_done_once_and_the_next_one_if_it_dies() -> None:
    board = Board()
    assert board.ask((0, 0), "once", Who.ONE, view(A, B), 0.0) == Work(1, (A,))
    board.view_changed(view(B), 0.0)
    assert board.ask((0, 0), "once", Who.ONE, view(B), 0.0) == Work(2, (B,))


def test_a_report_of_the_dead_is_left_out() -> None:
    board = Board()
    board.ask((0, 0), "report", Who.REPORTS, view(A, B), 0.0)
    board.give((0, 0), 1, A, b"a", view(A, B), 0.0)
    board.view_changed(view(A), 0.0)
    assert board.ask((0, 0), "report", Who.REPORTS, view(A), 0.0) == Result((0,), (0,), (b"a",))


def test_replicas_that_do_different_things_are_stopped() -> None:
    board = Board()
    board.ask((0, 0), "call mesh generate", Who.CONTRIBUTORS, view(A, B), 0.0)
    with pytest.raises(InvariantViolated, match="'call mesh logprobs' in one replica and 'call mesh generate' in another"):
        board.ask((0, 0), "call mesh logprobs", Who.CONTRIBUTORS, view(A, B), 0.0)
    board.mark(1, (b"state", 3))
    board.mark(1, (b"state", 3))
    with pytest.raises(InvariantViolated, match="state at bookmark 1"):
        board.mark(1, (b"other", 3))


def test_results_of_two_bookmarks_are_kept() -> None:
    board = Board()
    for generation in range(3):
        board.ask((generation, 0), "call", Who.ONE, view(A), 0.0)
        board.give((generation, 0), 1, A, b"%d" % generation, view(A), 0.0)
        board.mark(generation + 1, (b"", generation + 1))
    assert isinstance(board.ask((2, 0), "call", Who.ONE, view(A), 0.0), Result)
    with pytest.raises(InvariantViolated, match="call 0 after bookmark 1 is asked for, the run is at bookmark 3"):
        board.ask((1, 0), "call", Who.ONE, view(A), 0.0)


def test_who_owes_a_part_is_named() -> None:
    board = Board()
    board.ask((0, 0), "call", Who.CONTRIBUTORS, view(A, B, C), 0.0)
    board.give((0, 0), 1, A, b"", view(A, B, C), 1.0)
    assert board.overdue(50.0, 10.0, 100.0) == {}, "two owe: nobody can say that one of them holds the other up"
    board.give((0, 0), 1, B, b"", view(A, B, C), 50.0)
    assert board.overdue(59.0, 10.0, 100.0) == {}
    assert list(board.overdue(61.0, 10.0, 100.0)) == [C]
    board.ask((0, 1), "once", Who.ONE, view(A, B), 100.0)
    assert A in board.overdue(201.0, 1000.0, 100.0)


@given(st.lists(st.tuples(st.sampled_from("give die join"), st.integers(0, 2)), max_size=12), st.sampled_from(list(Who)))
@settings(max_examples=200, deadline=None)
def test_a_result_is_of_one_attempt_and_never_changes(events: list[tuple[str, int]], who: Who) -> None:
    board, lives, last = Board(), {0: 0, 1: 0, 2: 0}, {0: 0, 1: 0, 2: 0}
    first: Result | None = None
    for number, (event, replica) in enumerate([*events, *[("give", r) for r in (0, 1, 2)]]):
        now = view(*(Member(r, life, (f"w{r}b{life}",)) for r, life in sorted(lives.items())))
        if event == "die" and len(lives) > 1:
            lives.pop(replica, None)
        elif event == "join" and replica not in lives:
            last[replica] += 1
            lives[replica] = last[replica]
        now = view(*(Member(r, life, (f"w{r}b{life}",)) for r, life in sorted(lives.items())))
        board.view_changed(now, float(number))
        answer = board.ask((0, 0), "call", who, now, float(number))
        if isinstance(answer, Work):
            assert all(now.member(m.replica) == m for m in answer.members if not board.has_given((0, 0), m)), "the dead are waited for"
            member = now.member(replica)
            if event == "give" and member in answer.members:
                board.give((0, 0), answer.attempt, member, f"{answer.attempt}".encode(), now, float(number))
                answer = board.ask((0, 0), "call", who, now, float(number))
        if isinstance(answer, Result):
            assert len(set(answer.parts)) == 1, "parts of several attempts"
            assert first in (None, answer)
            first = answer


def test_a_journal_survives_its_way() -> None:
    journal = Journal(4, (b"state", 9), {0: ("call", Who.CONTRIBUTORS, Result((0, 2), (0,), (b"aa", b""))), 3: ("x", Who.ONE, Result((2,), (0,), (b"z",)))})
    assert unpack_journal(*pack_journal(journal, True)) == (journal, True)
    board = Board()
    board.restore(journal, True)
    assert board.generation == 4 and board.bookmark == (b"state", 9) and board.has_reference
    assert board.ask((4, 3), "x", Who.ONE, view(A), 0.0) == journal.results[3][2]
    board.restore(Journal(3, (b"older", 5), {0: ("y", Who.ONE, Result((0,), (0,), (b"y",)))}), False)
    assert board.generation == 4 and board.ask((3, 0), "y", Who.ONE, view(A), 0.0) == Result((0,), (0,), (b"y",))


# ---------------------------------------- a coordinator that goes on


def test_a_coordinator_goes_on_where_the_log_of_another_ends(tmp_path: Path) -> None:
    log = CommitLog(tmp_path / "commits.log")
    first = Coordinator(log.incarnation)
    for record in first.open([A, B]):
        log.write(record)
    first.begin(1, (("s",), ("t",)))
    votes = [Vote(w, 1, first.view.epoch, 7, 2.0, 5, True, (0, 1)) for w in ("w0", "w1")]
    for vote in votes:
        for record in first.vote(vote):
            log.write(record)
    log.close()

    assert commitlog.is_open(log.path)
    again = CommitLog(log.path, takeover=True)
    last = again.past.last
    assert last and last == again.past.commit and last.step == 1 and again.incarnation == 2
    second = Coordinator(again.incarnation)
    (record,) = second.take_over(last, again.past.commit, [A], 2)
    assert (record.kind, record.step, record.epoch) == (Kind.COMMIT, 1, last.epoch), "sent again, for whoever did not hear it"
    assert record.view.members == (A,) and record.view.committed == second.committed == 1
    assert record.view.epoch > last.view.epoch and record.number > last.number
    assert record.view.deal.number > last.view.deal.number, "who computed what of the step, only the dead coordinator knew"
    assert record.view.link_id != last.view.link_id and second.state is State.VOTING
    second.begin(2, (("u",),))
    again.write(record)
    (commit,) = second.vote(Vote("w0", 2, second.view.epoch, 7, 1.0, 5, True, (0,)))
    assert commit.kind is Kind.COMMIT and commit.step == 2
    again.end()
    again.close()
    assert not commitlog.is_open(log.path)
    third = CommitLog(log.path)
    assert third.past.last is None and third.incarnation == 3
    third.close()


def test_nobody_came_back() -> None:
    first = Coordinator(1)
    (record, *_) = first.open([A])
    second = Coordinator(2)
    second.take_over(record, None, [], 1, [A])
    assert second.state is State.LOST and not second.view.members, "nobody can heal from nobody"


def test_a_replica_that_was_healing_heals_anew_under_another_coordinator() -> None:
    """Under a new number: a rank that is in the middle of the old heal must leave it."""
    first = Coordinator(1)
    first.open([A])
    first.joiner(B)
    build = first.build
    assert build
    for worker in ("w0", "w1"):
        first.link_ready(worker, build.link_id)
    first.begin(1, (("s",),))
    (last, *_) = first.vote(Vote("w0", 1, first.view.epoch, 7, 2.0, 5, True, (0,)))
    (old,) = last.view.heals
    holds: Callable[[str, int | None], takeover.Told] = lambda worker, version: takeover.Told(
        last, last, (int(worker[1]), 0, 0), version, None, False
    )
    told = {"w0": holds("w0", 1), "w1": holds("w1", None)}
    decided = takeover.decide(commitlog.Past(1, 1, last, last, {0: A, 1: B}), told, Path("run"))
    assert (decided.members, decided.healing) == ([A], [B])
    second = Coordinator(2)
    (record, *_) = second.take_over(last, last, decided.members, 2, decided.healing)
    (heal,) = record.view.heals
    assert heal.number != old.number and (heal.replica, heal.source, heal.version) == (1, 0, 1)
    assert record.view.contributors == (0,) and record.view.deal.replicas == (0,)


# ---------------------------------------- addresses, machines, devices


def conf(**changes) -> Config:
    return from_tree({"recipe": "sft", "launcher": "local", "model": {"path": "m"}, "data": {"source": "d"}, **changes})


def test_number_of_replicas_has_two_names() -> None:
    assert conf(replica={"id": 1, "count": 3}).layout.replicas == 3
    assert conf(replica={"count": 3}, layout={"replicas": 3}).layout.replicas == 3
    with pytest.raises(ConfigError, match=r"replica.count=3 and layout.replicas=2 are two names of one number"):
        conf(replica={"count": 3}, layout={"replicas": 2})


def test_variables_of_torchft_and_torchtitan() -> None:
    given = {"REPLICA_GROUP_ID": "1", "NGPU": "4"}
    found = placed(conf(layout={"tp": 2}, replica={"count": 2}), given)
    assert found.replica.id == 1 and found.layout.dp == 2
    assert placed(conf(replica={"id": 0, "count": 2}), given | {"NGPU": "1"}).replica.id == 0, "what is configured counts"
    with pytest.raises(ConfigError, match=r"NGPU=4, but layout.tp\*cp\*pp\*dp=3"):
        placed(conf(layout={"tp": 3}), given)
    with pytest.raises(BadInput, match="REPLICA_GROUP_ID='x'"):
        placed(conf(), {"REPLICA_GROUP_ID": "x"})
    assert placed(conf(launcher="ray"), given) == conf(launcher="ray")
    assert lighthouse_address(conf(), {"TORCHFT_LIGHTHOUSE": "http://h:1"}) == "http://h:1"
    assert lighthouse_address(conf(lighthouse={"address": "http://g:2"}), {"TORCHFT_LIGHTHOUSE": "http://h:1"}) == "http://g:2"
    assert Ports.parse(lighthouse_address(conf(), {})) == Ports("127.0.0.1", 29510)
    assert (manager_port({}), manager_port({"TORCHFT_MANAGER_PORT": "700"})) == (0, 700)
    with pytest.raises(BadInput, match="TORCHFT_MANAGER_PORT=70000 is not a port number"):
        manager_port({"TORCHFT_MANAGER_PORT": "70000"})


@pytest.mark.parametrize("address", ["", "host", "http://host", "host:0", "host:65535", "http://host:port", ":29510", "https://host:1", "a b:1"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(BadInput, match="is not of the form http://HOST:PORT"):
        Ports.parse(address)


def test_machines_of_a_replica() -> None:
    assert machines(8, {}).count == machines(8, {"PET_NNODES": "1"}).count == 1
    assert machines(8, {"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29400"}) == Machines(2, 1, "n0", 29400)
    with pytest.raises(BadInput, match="needs MASTER_ADDR"):
        machines(8, {"PET_NNODES": "2", "PET_NODE_RANK": "0"})
    with pytest.raises(BadInput, match="PET_NODE_RANK=2 is not below PET_NNODES=2"):
        machines(8, {"PET_NNODES": "2", "PET_NODE_RANK": "2", "MASTER_ADDR": "h"})


OVER_TWO = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "MASTER_ADDR": "h"}
OF_SLURM = {"SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "a,b"}


@pytest.mark.parametrize(("given", "says"), [
    (OVER_TWO | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port number"),
    (OVER_TWO | {"MASTER_PORT": "-1"}, "MASTER_PORT=-1 is not"),
    (OVER_TWO | {"PET_NNODES": "1", "PET_NODE_RANK": "1"}, "PET_NODE_RANK=1 is not below PET_NNODES=1"),
    (OVER_TWO | {"PET_NNODES": "0"}, "PET_NNODES=0 must be 1 or more"),
    (OVER_TWO | {"PET_NNODES": "1:2"}, "PET_NNODES='1:2' is not a whole number"),
    (OF_SLURM | {"SLURM_NNODES": "0"}, "SLURM_NNODES=0 must be"),
    (OF_SLURM | {"SLURM_GPUS_ON_NODE": "-1"}, "SLURM_GPUS_ON_NODE=-1 must be"),
    *((OF_SLURM | {"SLURM_JOB_NODELIST": nodes}, "is no list of Slurm's") for nodes in ("n[a-b]", "n[1-", "a,,b", "a,", "n[1-2]]")),
])
def test_machines_that_make_no_sense(given: dict[str, str], says: str) -> None:
    with pytest.raises(BadInput, match=re.escape(says)):
        machines(16, given)


@pytest.mark.parametrize("given", [{"NGPU": "0"}, {"NGPU": "-2"}, {"REPLICA_GROUP_ID": "-1"}])
def test_numbers_that_are_too_small(given: dict[str, str]) -> None:
    with pytest.raises(BadInput, match=f"{next(iter(given))}={next(iter(given.values()))} must be"):
        placed(conf(), given)


def test_everstep_up_starts_nothing_where_it_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    port, nothing = free_ports(), ["-c", "raise SystemExit(2)"]
    with socket.create_server(("127.0.0.1", port + 2)), pytest.raises(BadInput, match=f"port {port + 2} of 127.0.0.1 cannot be used"):
        up(conf(lighthouse={"address": f"http://127.0.0.1:{port}"}), nothing, print)
    with pytest.raises(BadInput, match=r"choose another of this machine with lighthouse\.address"):
        up(conf(lighthouse={"address": "192.0.2.1:29510"}), nothing, print)  # of the documentation's network, nobody's
    with socket.create_server(("", port + 1)), pytest.raises(BadInput, match=rf"local.port={port + 1} is in use"):
        check_ports_of_replicas(conf(layout={"replicas": 2}, local={"port": port}))
    monkeypatch.setenv("TORCHFT_MANAGER_PORT", "65535")
    with pytest.raises(BadInput, match="TORCHFT_MANAGER_PORT=65535 is that of the first of 2 replicas, and there is no port 65536"):
        check_ports_of_replicas(conf(layout={"replicas": 2}))


def test_machines_of_a_replica_in_a_step_of_slurm() -> None:
    """MASTER_ADDR is left aside: in a job of several replicas it can be right for one of them only."""
    step = {"SLURM_NNODES": "4", "SLURM_NODEID": "3", "SLURM_JOB_NODELIST": "n[03-05],m1", "SLURM_GPUS_ON_NODE": "8", "MASTER_ADDR": "n03"}
    assert machines(8, step) == machines(1, step) == Machines(), "a replica for each node (deploy/slurm/local.sbatch)"
    assert machines(16, step) == Machines(2, 1, "n05") and machines(16, step | {"SLURM_NODEID": "0"}) == Machines(2, 0, "n03")
    assert machines(32, step) == Machines(4, 3, "n03")
    assert machines(16, step | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n05,m1", "SLURM_NODEID": "1"}) == Machines(2, 1, "n05")
    assert machines(8, step | {"SLURM_GPUS_ON_NODE": ""}) == Machines(4, 3, "n03"), "without GPUs a step is a replica"
    with pytest.raises(BadInput, match="a replica of 24 ranks needs 3 machines, and Slurm's step has 4"):
        machines(24, step)
    for nodes, hosts in {"n[03-05,9],m1": "n03 n04 n05 n9 m1", "a,b": "a b", "gpu-7": "gpu-7", "x[1]-ib,y": "x1-ib y", "q[098-101]": "q098 q099 q100 q101"}.items():
        assert slurm_hosts(nodes) == hosts.split()


def test_devices_are_shared_within_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.config.derive.cuda_devices", lambda environ: 4)
    monkeypatch.setattr("everstep.config.derive.device", lambda config, environ: "cuda")
    two = conf(layout={"replicas": 2, "tp": 2})
    assert share_devices(two, {}) == ["0,1", "2,3"]
    assert share_devices(two, {"CUDA_VISIBLE_DEVICES": "7,5,GPU-a,1"}) == ["7,5", "GPU-a,1"]
    with pytest.raises(ConfigError, match="2 replicas of 2 ranks need 4 devices, 3 are visible"):
        share_devices(two, {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_all_replicas_on_one_of_several_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    with pytest.raises(BadInput, match="says that this is one of 2"):
        up(conf(layout={"replicas": 2, "tp": 2}), [], print)


def test_what_dies_soon_is_started_later_each_time(tmp_path: Path) -> None:
    child, waits = Child("x", [], {}, tmp_path / "log"), []
    for _ in range(9):
        child.started = time.monotonic()
        child.died(1.0)
        waits.append(round(child.due - time.monotonic()))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_lighthouse_for_everybody_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERSTEP_LIGHTHOUSE_TOKEN", raising=False)
    with pytest.raises(BadInput, match="set EVERSTEP_LIGHTHOUSE_TOKEN to a secret"):
        serve("0.0.0.0", 25000, 1, 100, 1000, 5000, print, None)  # type: ignore[arg-type]


def test_what_the_lighthouse_cannot_do_is_told_at_once_and_every_time() -> None:
    """Whoever asks would else ask until lighthouse.wait_s is over."""
    lighthouse = Lighthouse(socket.create_server(("127.0.0.1", 0)), "127.0.0.1")
    config = conf(run_dir="/dev/null/run", replica={"id": 0, "count": 2}).model_dump(mode="json")
    head = Head(lighthouse.address, "", 20.0, {"replica": 0, "nonce": "a", "config": config, "clean": False, "restarts": 0})
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises((WorkerFailed, BadInput), match="/dev/null/run"):
            head.register()
    wrong = Head(lighthouse.address, "another secret", 20.0, {})
    for _ in range(2):
        with pytest.raises(BadInput, match="the lighthouse has another secret"):
            wrong.request("ping")
    assert time.monotonic() - began < 10.0
    head.close()
    wrong.close()
    lighthouse.close()


def test_errors_of_another_process_keep_their_kind() -> None:
    assert isinstance(typed("NotEnoughReplicas", "x"), NotEnoughReplicas)
    assert isinstance(typed("os", "x"), WorkerFailed) and isinstance(typed("Any", "x"), WorkerFailed)
