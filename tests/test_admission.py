"""Who may take part: a process that examines its device first, under every launcher, with a device that computes wrongly."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.support.launchers import Up
from tests.support.replicas import Replicas
from tests.support.runs import QUIET, SFT, Finished, command, config, finish, gone
from tests.test_faults import assert_invariants
from tests.test_lost_node import until
from tests.test_watching import seconds_between

from everstep import cli
from everstep.cluster.forked import ForkedHost
from everstep.cluster.worker import worker as worker_module
from everstep.doctor import Unfit
from everstep.driver import run as run_recipe
from everstep.telemetry.events import read_events

# -- a controller ----------------------------------------------------------------------------------------------------------------------------


def break_products() -> None:
    """In this process: one element of every product is wrong by one, from the second product on."""
    matmul, done = torch.matmul, itertools.count()

    def wrong(a, b):
        product = matmul(a, b)
        product[3, 5] += next(done) > 0
        return product

    torch.matmul = wrong


def wrong_products(worker: str) -> None:
    """In this worker's process, once it is to be admitted."""
    admit = worker_module.Worker.admit

    def on_a_broken_device(self, link, end, alone):
        if self.worker_id == worker:
            break_products()
        return admit(self, link, end, alone)

    worker_module.Worker.admit = on_a_broken_device  # type: ignore[method-assign]


@pytest.mark.full
def test_a_device_that_computes_wrongly_is_not_admitted_and_the_next_process_is(tmp_path: Path) -> None:
    run = finish(config(
        SFT, tmp_path / "run", "layout.replicas=2", "layout.spares=1", "sft.steps=14", "recovery.heartbeat_s=0.2", "checkpoint.at_end=false",
        "recovery.restart_attempts=3", "recovery.restart_backoff_s=0.1", "recovery.min_replicas=2",  # the second replica is waited for
        "faults=[{step: 3, phase: compute, replica: 1}, {step: 8, phase: compute, replica: 0}]",
    ), host=lambda conf: ForkedHost(conf, prepare=functools.partial(wrong_products, "w3")))
    (refused,) = run.kind("refused")
    assert refused["worker"] == "w3" and refused["cause"].startswith("matmul") and refused["checks"]["memory"].startswith("ok")
    admitted = run.kind("admitted")
    assert [e["worker"] for e in admitted][:1] == ["w4"] and admitted[0]["checks"].keys() >= {"matmul", "memory"}
    assert seconds_between(run.kind("restart")[0], refused) < 15.0
    assert "w3" not in {e["spare"] for e in run.kind("spare_used")} | {e["worker"] for e in run.kind("death")}, "it was nobody yet"
    assert {e["spare"] for e in run.kind("spare_used")} == {"w2", "w4"}, "the first death did not wait for it"
    assert_invariants(run, steps=14)
    assert gone({e.pid for e in run.events if e.who == "w3"})


@pytest.mark.full
def test_at_the_start_all_are_examined_with_their_neighbours_and_one_that_is_unfit_ends_it(tmp_path: Path) -> None:
    conf = config(SFT, tmp_path / "run", "layout.replicas=2", "layout.spares=1", "sft.steps=8", "watch.admission=all", "watch.admission_s=0.05")
    with pytest.raises(Unfit, match=r"w1 on .* matmul: .* wrong elements"):
        run_recipe(conf, host=lambda c: ForkedHost(c, prepare=functools.partial(wrong_products, "w1")))
    events = read_events(tmp_path / "run" / "events")
    assert sorted(e["worker"] for e in events if e.event == "admitted") == ["w0", "w2"] and not [e for e in events if e.event == "begin"]
    (checks,) = [e["checks"] for e in events if e.event == "admitted" and e["worker"] == "w0"]
    assert checks["all-reduce"].startswith("ok"), "it is not the neighbour's fault"


# -- torchrun --------------------------------------------------------------------------------------------------------------------------------


def _broken_once_there_is(file: Path) -> None:
    if file.exists() and (os.environ["EVERSTEP_REPLICA"], os.environ["RANK"]) == ("1", "1"):
        break_products()


@pytest.mark.full
def test_a_replica_with_an_unfit_rank_does_not_join_and_is_not_started_again(tmp_path: Path) -> None:
    conf = config(
        SFT, tmp_path / "run", "launcher=local", "layout.replicas=2", "layout.tp=2", "layout.spares=0", "sft.steps=400", "lighthouse.wait_s=20",
        "recovery.heartbeat_s=0.2", "recovery.min_replicas=1", "watch.admission_s=0.05", "checkpoint.at_end=false", "train.verify_every=100",
    )
    with Replicas(conf, tmp_path, prepare=functools.partial(_broken_once_there_is, tmp_path / "broken")) as replicas:
        replicas.start(0, 1)
        replicas.wait_for_commit(3)
        (tmp_path / "broken").touch()
        replicas.kill(1, 0)
        replicas.wait_for(lambda events: any(e.event == "refused" for e in events))
        replicas._threads[1].join(30)
        assert not replicas._threads[1].is_alive() and replicas.codes[1] == 3, replicas.logs()
        assert "is not fit to take part: matmul: " in replicas.logs()
        at = max(e.step for e in replicas.events() if e.event == "commit")
        replicas.wait_for_commit(at + 3)  # the other one goes on
        events = replicas.events()
    (refused,), (admitted,) = [e for e in events if e.event == "refused"], [e for e in events if e.event == "admitted"]
    assert refused["cause"].startswith("matmul") and refused["checks"]["memory"].startswith("ok") and refused["checks"]["all-reduce"].startswith("ok")
    assert admitted["checks"].keys() == {"matmul", "memory", "all-reduce"} and admitted["worker"] != refused["worker"]
    assert {refused["worker"], admitted["worker"]} == {refused.who, admitted.who}
    assert not [e for e in events if e.event == "form" and e.who in (refused.who, admitted.who)], "neither came to be anything"


# -- as a user starts it -----------------------------------------------------------------------------------------------------------------------

#: Found by every Python process below: the first one that examines its device has a broken one.
BREAKS = """
import importlib.abc, importlib.util, os, sys

class Breaks(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "everstep.cluster.worker.admission":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            examine = module.examine

            def examine_a_broken_one(*arguments):
                try:
                    os.close(os.open(os.environ["BROKEN"], os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return examine(*arguments)
                sys.path.insert(0, os.environ["TESTS"])
                from tests.test_admission import break_products
                break_products()
                return examine(*arguments)

            module.examine = examine_a_broken_one

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Breaks())
"""


def broken_once(folder: Path) -> dict[str, str]:
    """Variables for a command."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(BREAKS)
    path = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "BROKEN": str(folder / "broken"), "TESTS": str(Path(__file__).parents[1])}


@pytest.mark.full
@pytest.mark.timeout(500)
def test_under_torchrun_an_unfit_replica_stays_out_and_the_next_one_comes_back(tmp_path: Path) -> None:
    """Of two that are started anew the first to look at its device has a broken one."""
    with Up(tmp_path, SFT, "layout.replicas=3", "sft.steps=9000", "recovery.heartbeat_s=0.2", "checkpoint.at_end=false", "checkpoint.on_interrupt=false",
            "train.verify_every=100", "faults=[{step: 5, phase: compute, replica: 1}, {step: 60, phase: compute, replica: 2}]", **broken_once(tmp_path)) as up:
        up.wait_for_commit(61)
        seen = lambda kind: [e for e in read_events(up.folder / "events") if e.event == kind]
        assert until(lambda: seen("admitted") and seen("refused") and seen("join"), 240), [seen("admitted"), seen("refused")]
        out = int(next(e["replica"] for e in seen("death") if e["replica"] not in {j["replica"] for j in seen("join")}))
        assert until(lambda: not up.below(f"replica.id={out}"), 60), "nobody starts it again"
        time.sleep(0.5)  # `everstep up` says so
        (refused,), (admitted,), join = seen("refused"), seen("admitted"), seen("join")[-1]
        up.process.send_signal(signal.SIGINT)
        assert up.finish() == 130, up.err[-3000:]
    assert refused["cause"].startswith("matmul") and refused["checks"]["memory"].startswith("ok")
    assert admitted["checks"].keys() == {"matmul", "memory"}, "of one rank, which has nobody to sum with"
    places = {e.who: e["replica"] for e in seen("form")}
    assert refused.who not in places and places[admitted.who] == join["replica"] and len(join["members"]) == 2
    assert "has ended and is not started anew" in up.err and "is not fit to take part: matmul: " in up.err
    assert cli.run(["verify", str(up.folder)]) == 0


@pytest.mark.full
@pytest.mark.timeout(400)
def test_through_ray_the_next_process_is_admitted(tmp_path: Path) -> None:
    process = command(["train", SFT, *QUIET, f"run_dir={tmp_path / 'run'}", "layout.replicas=2", "layout.spares=0", "sft.steps=14",
                       "recovery.heartbeat_s=0.2", "checkpoint.at_end=false", "recovery.restart_attempts=3", "recovery.restart_backoff_s=0.1",
                       "recovery.min_replicas=2", "recovery.below_minimum=wait", "faults=[{step: 3, phase: compute, kind: kill, replica: 1}]"], **broken_once(tmp_path))
    out, err = process.communicate(timeout=380)
    assert process.returncode == 0, f"{out[-4000:]}\n{err[-4000:]}"
    run = Finished(tmp_path / "run", read_events(tmp_path / "run" / "events"))
    (refused,) = run.kind("refused")
    assert refused["cause"].startswith("matmul") and refused["checks"]["matmul"].startswith("bad")
    admitted = [e for e in run.kind("admitted") if e.t_wall > refused.t_wall]
    assert admitted and all(text.startswith("ok") for text in admitted[0]["checks"].values())
    back = [e for e in run.kind("join") if e.t_wall > admitted[0].t_wall and e["replica"] == 1]
    assert back and len(back[0]["members"]) == 2, "it took part again"
    assert_invariants(run, steps=14)
    assert gone({e.pid for e in run.events if e.who.startswith("w")})
