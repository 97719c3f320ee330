"""How a run ends that does not end by itself: signals, a controller that is killed, and what is left afterwards, which is counted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.support.runs import SFT, config, finish, gone
from tests.test_controller_death import end, start, while_the_ranks_compute
from tests.test_exact import BASE, by_position, undisturbed
from tests.test_faults import assert_invariants

from everstep.checkpoint import flushed, manifest, memory
from everstep.cluster import forked, janitor
from everstep.cluster.controller.controller import Controller
from everstep.cluster.forked import ForkedHost
from everstep.config.check import check_plan
from everstep.config.schema import Config
from everstep.driver import run
from everstep.errors import ConfigError, EverstepError
from everstep.telemetry.events import read_events

pytestmark = [pytest.mark.timeout(200)]

STEPS, STEP = 12, 4


def listening(pids: set[int]) -> set[str]:
    """Sockets on which these processes listen, by the kernel's table."""
    inodes = {os.readlink(fd)[8:-1] for pid in pids for fd in Path(f"/proc/{pid}/fd").glob("*") if os.path.islink(fd) and os.readlink(fd).startswith("socket:")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


def in_use(addresses: set[str]) -> set[str]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A"} & addresses


def _interrupted(conf: Config, signals: int, ports: Path) -> None:
    """A controller that is sent so many SIGTERMs while the ranks compute, by the last of which it is in that step still."""
    entered, seen = Controller._phase_entered, []

    def struck(self, worker, step, phase):
        if (step, phase) == (STEP, "compute") and not seen:
            seen.append(worker)
            pids = {os.getpid(), *(info.pid for info in self._host.infos.values())}
            ports.write_text("\n".join(sorted(listening(pids))))
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
        entered(self, worker, step, phase)

    Controller._phase_entered = struck  # type: ignore[method-assign]
    try:
        os._exit(run(conf, host=ForkedHost))
    except EverstepError as error:
        Path(f"{ports}.said").write_text(str(error))
        os._exit(error.exit_code)


def interrupted(conf: Config, folder: Path, signals: int = 1) -> str:
    """What it said. It ended with 130, and nothing of it is left: no process, no port that it listened on, no shared memory."""
    ports = folder / "ports"
    process = forked.context().Process(target=_interrupted, args=(conf, signals, ports))
    process.start()
    assert end(process) == 130
    where = Path(conf.run_dir)
    pids = {e.pid for e in read_events(where / "events")}
    listened = set(ports.read_text().split())
    assert len(listened) >= 2 and gone(pids) and not in_use(listened)
    assert not memory.folder_of(where, 1).exists() and not list(where.glob("contro*.json")) + list(where.glob("checkpoints/*.partial"))
    assert [e["status"] for e in read_events(where / "events") if e.event == "run_end"] == ["interrupted"]
    return Path(f"{ports}.said").read_text()


@pytest.mark.parametrize("more", [["checkpoint.on_interrupt=true"], pytest.param(
    ["checkpoint.on_interrupt=true", "layout.replicas=1", "recovery.memory_checkpoint_every=2"], marks=pytest.mark.full)], ids=["two", "one"])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint_from_which_it_goes_on(more, model, tmp_path):
    conf = config(SFT, tmp_path / "run", *BASE, f"sft.steps={STEPS}", f"model.path={model}", "layout.replicas=2", "layout.spares=0", "faults=[]", *more)
    said = interrupted(conf, tmp_path)
    saved = manifest.pointed_at(tmp_path / "run" / "checkpoints")
    assert saved is not None and manifest.step_of(saved) == STEP and f"saved {saved}" in said
    done = finish(conf.model_copy(update={"resume": "must"}), host=ForkedHost)
    assert_invariants(done, steps=STEPS)
    assert by_position(done, 1 if "layout.replicas=1" in more else 2) == undisturbed(model, "", f"sft.steps={STEPS}")


@pytest.mark.full
@pytest.mark.parametrize(("signals", "more"), [(2, ["checkpoint.on_interrupt=true"]), (1, [])], ids=["twice", "not-asked"])
def test_a_second_signal_or_none_that_asks_for_a_checkpoint_ends_it_at_once(signals, more, model, tmp_path):
    conf = config(SFT, tmp_path / "run", *BASE, f"sft.steps={STEPS}", f"model.path={model}", "layout.replicas=2", "layout.spares=0", "faults=[]",
                  "train.micro_batch_size=1", *more)
    assert "no checkpoint was complete" in interrupted(conf, tmp_path, signals)
    assert not [e for e in read_events(tmp_path / "run" / "events") if e.event == "commit" and e.step >= STEP]


def test_an_interrupt_of_a_run_with_copies_leaves_them_on_the_disk(model, tmp_path):
    conf = config(SFT, tmp_path / "run", *BASE, f"sft.steps={STEPS}", f"model.path={model}", "layout.replicas=1", "layout.spares=0", "faults=[]",
                  "recovery.memory_checkpoint_every=3")
    assert "continue after step 3 with resume=auto" in interrupted(conf, tmp_path)
    done = finish(conf.model_copy(update={"resume": "must"}), host=ForkedHost)
    assert_invariants(done, steps=STEPS)
    assert by_position(done, 1) == undisturbed(model, "", f"sft.steps={STEPS}")


def soon(step: int) -> None:
    """The janitor does not wait as long for somebody to come."""
    janitor.COMING_S = 0.5
    while_the_ranks_compute(step)


@pytest.mark.parametrize("grace_s", [0, pytest.param(1.5, marks=pytest.mark.full)])
def test_copies_outlive_neither_the_controller_nor_its_workers_and_are_on_the_disk_then(grace_s, model, tmp_path):
    same = [*BASE, f"sft.steps={STEPS}", f"model.path={model}", "layout.replicas=1", "layout.spares=0", "faults=[]", "recovery.memory_checkpoint_every=3"]
    conf = config(SFT, tmp_path / "run", *same, f"recovery.controller_grace_s={grace_s}")
    assert end(start(conf, soon)) == -signal.SIGKILL
    copies, until = memory.folder_of(tmp_path / "run", 1), time.monotonic() + 30
    assert copies.exists()
    while copies.exists():
        assert time.monotonic() < until, "they stayed in memory"
        time.sleep(0.05)
    assert gone({e.pid for e in read_events(tmp_path / "run" / "events")})
    assert flushed.newest(tmp_path / "run", 1, flushed._about(flushed.folder_of(tmp_path / "run", 1)).popitem()[1][1]).step == 3
    (tmp_path / "run" / "controller.json").unlink(missing_ok=True)
    done = finish(conf.model_copy(update={"resume": "must"}), host=ForkedHost)
    assert_invariants(done, steps=STEPS)
    assert by_position(done, 1) == undisturbed(model, "", f"sft.steps={STEPS}")


def test_what_torchrun_would_not_obey_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.on_interrupt=true"):
        check_plan(config(SFT, tmp_path, "launcher=local", "layout.replicas=1", "layout.spares=0", "faults=[]", "checkpoint.on_interrupt=true"), {})


