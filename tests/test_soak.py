"""Random kills: real runs whose ranks get SIGKILL and SIGSTOP from outside at random moments. Seeds are in the test's name.

``EVERSTEP_SOAK_SEEDS=7,8,9`` chooses other seeds than the default one of each layout.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.runs import DEMO, SFT, Finished, config, gone
from tests.test_faults import assert_invariants

from everstep.driver import run
from everstep.errors import EverstepError
from everstep.telemetry.events import Event, EventLogError, of_kind, read_events

DEADLINE_S = 240.0
FULL_STRENGTH_S = 15.0
SEEDS = [int(s) for s in os.environ.get("EVERSTEP_SOAK_SEEDS", "1").split(",")]
pytestmark = [pytest.mark.full, pytest.mark.timeout(DEADLINE_S + 60), pytest.mark.usefixtures("ray_cluster")]

#: After which events a volley is fired at once (and not after a random while): the narrow moments of a recovery.
MOMENTS = ("form", "link_build", "heal_start", "spare_used", "view", "save", "join")


@dataclass
class Sniper:
    """Sends signals to worker processes at random moments, but never such that the state must be lost (one replica that holds it
    is spared until every process that was hit has been noticed), and to no more than there are spares."""

    folder: Path
    seed: int
    shots: int
    at_once: int
    victims: dict[str, int] = field(default_factory=dict)  # worker -> signal
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Sniper:
        self._random = random.Random(self.seed)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _events(self) -> list[Event]:
        with contextlib.suppress(EventLogError):  # not begun yet
            return read_events(self.folder / "events")
        return []

    def _run(self) -> None:
        while not self._stop.wait(0.2) and not of_kind(self._events(), "commit"):
            pass
        while len(self.victims) < self.shots:
            kind = self._random.choice(("any", "any", *MOMENTS))
            delay = self._random.uniform(0.0, 0.3) if kind != "any" else self._random.uniform(0.2, 3.0)
            since = time.time()
            if kind != "any":  # wait for the moment, but not for ever: some need a death before them
                while not any(e.t_wall > since for e in of_kind(self._events(), kind)) and time.time() - since < 3.0:
                    if self._stop.wait(0.1):
                        return
            if self._stop.wait(delay):
                return
            self._fire()

    def _fire(self) -> None:
        events = self._events()
        dead = {e["worker"] for e in of_kind(events, "death")}
        if set(self.victims) - dead:
            return  # not all noticed yet: whom the state depends on is unknown
        pids = {e.who: e.pid for e in of_kind(events, "process_start")}
        places = {e.who: int(e["replica"]) for e in of_kind(events, "form")}
        view = of_kind(events, "view", "commit")[-1]
        holders = sorted(set(view["members"]) - set(view.get("healing") or ()))
        spared = self._random.choice(holders)
        targets = sorted(w for w in pids if w not in dead and (places.get(w) != spared))
        shots = min(len(targets), self.shots - len(self.victims), self._random.randint(1, self.at_once))
        for _ in range(shots):
            (worker,) = self._random.choices(targets, [4 if w in places else 1 for w in targets])  # a spare's death is dull
            targets.remove(worker)
            number = self._random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
            self.victims[worker] = number
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[worker], number)


def soak(tmp_path: Path, seed: int, file: str, *overrides: str, at_once: int = 2) -> Finished:
    folder = tmp_path / "run"
    conf = config(file, folder, "recovery.heartbeat_s=0.2", "recovery.silence_s=2.0", "recovery.link_timeout_s=15",
                  "recovery.reform_timeout_s=60", "recovery.step_timeout_s=60", "recovery.heal_timeout_s=30", *overrides)
    failure: list[EverstepError] = []
    threads = {t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
    start = time.monotonic()
    with Sniper(folder, seed, conf.layout.spares, at_once) as sniper:
        try:
            assert run(conf) == 0
        except EverstepError as error:
            failure.append(error)
    seconds = time.monotonic() - start
    events = read_events(folder / "events")
    print(f"seed {seed}: {seconds:.1f} s, victims {sniper.victims}, "
          f"{len(of_kind(events, 'death'))} deaths, {len(of_kind(events, 'join'))} joins, "
          f"{len(of_kind(events, 'void'))} voided attempts, failure {failure}")
    finished = Finished(folder, events)
    assert sniper.victims, "the run ended before a single shot"
    time.sleep(1.0)  # the last look of the thread that watches for silence
    left = {t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)} - threads
    assert not {t.name for t in left if t.name.startswith(("coordinator", "repair"))}
    assert gone(finished.pids), "a process was left behind"
    if failure:
        raise failure[0]
    assert seconds < DEADLINE_S
    deaths = [e["worker"] for e in finished.kind("death")]  # the run may end before the last shot is noticed
    assert len(set(deaths)) == len(deaths) and set(deaths) <= set(sniper.victims), "somebody died whom nobody shot"
    if deaths and finished.kind("death")[-1].t_wall < events[-1].t_wall - FULL_STRENGTH_S:
        assert finished.kind("commit")[-1]["members"] == list(range(conf.layout.replicas)), "there were spares for all"
    return finished


@pytest.mark.parametrize("seed", SEEDS)
def test_three_replicas(tmp_path, seed):
    done = soak(tmp_path, seed, SFT, "layout.replicas=3", "layout.spares=3", "sft.steps=120", "sft.samples_per_step=60",
                "checkpoint.every_steps=20", "train.verify_every=5")
    assert_invariants(done, steps=120)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_tensor_parallel_replicas(tmp_path, seed):
    done = soak(tmp_path, seed, SFT, "layout.replicas=2", "layout.tp=2", "layout.spares=3", "sft.steps=120",
                "checkpoint.every_steps=20", "train.verify_every=5")
    assert_invariants(done, steps=120)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforcement_learning_below_the_minimum(tmp_path, seed):
    done = soak(tmp_path, seed, DEMO, "layout.replicas=2", "layout.tp=2", "layout.spares=4", "recovery.min_replicas=2",
                "warmup.steps=10", "rl.iterations=10", "rl.prompts_per_step=16", "rl.eval_every=0", "rl.kl_coef=0.01",
                "train.verify_every=1", "faults=[]")
    assert_invariants(done, steps=20)
