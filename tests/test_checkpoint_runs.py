"""Whole runs that save while they train, are killed, and go on: bitwise as if nothing had happened.

Each run is ``everstep train``: its recipe, controller, coordinator and workers in real processes (forked from one that has done the
imports). In exact mode, so that what is compared does not depend on the number of replicas.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.runs import DEMO, PPO, ROOT, SFT, Finished, config, finish
from tests.test_faults import assert_invariants

from everstep.checkpoint.choose import choose
from everstep.checkpoint.manifest import checkpoint_folders, damage, pointed_at
from everstep.checkpoint.storage import CheckpointError
from everstep.cluster import forked
from everstep.cluster.forked import ForkedHost
from everstep.cluster.host import Host
from everstep.config.schema import Config
from everstep.telemetry.events import EventLog, read_events
from everstep.telemetry.metrics import read_metrics
from support.checkpoints import flip_a_bit

pytestmark = [pytest.mark.timeout(300)]

EXACT = ["recovery.exact=true", "train.verify_every=1000", "recovery.heartbeat_s=0.2", "checkpoint.hf=false"]
# 15 samples a step of 81 in all: a pass over the data ends within step 6.
SFT_RUN = [*EXACT, "layout.replicas=2", "sft.samples_per_step=15", "train.micro_batch_size=5", "optimizer.schedule=linear",
           "optimizer.warmup_steps=3", "optimizer.decay_steps=12", "sft.steps=12", "checkpoint.every_steps=2"]
GRPO_RUN = [*EXACT, "faults=[]", "layout.replicas=2", "layout.spares=0", "warmup.steps=2", "warmup.samples_per_step=64", "rl.iterations=3",
            "rl.prompts_per_step=8", "rl.samples_per_prompt=8", "rl.updates_per_pass=2", "rl.kl_coef=0.05", "rl.eval_every=1",
            "train.micro_batch_size=8", "rollout.eval_samples=8", "checkpoint.every_steps=1"]
# With a critic, which is trained by itself first: two of its steps, then two of each model in every iteration.
PPO_RUN = [*EXACT, "faults=[]", "layout.replicas=2", "layout.pp=1", "layout.spares=0", "warmup.steps=1", "warmup.samples_per_step=32", "rl.iterations=4",
           "rl.prompts_per_step=8", "rl.samples_per_prompt=4", "rl.updates_per_pass=2", "critic.warmup=1", "rl.eval_every=2",
           "train.micro_batch_size=4", "rollout.eval_samples=8", "checkpoint.every_steps=1"]
DPO_RUN = [*EXACT, "layout.replicas=2", "dpo.steps=10", "dpo.eval_every=5", "dpo.pairs_per_step=32", "train.micro_batch_size=16", "optimizer.decay_steps=10",
           "checkpoint.every_steps=2"]
LORA_RUN = [*SFT_RUN, "lora.rank=4", "lora.targets=[qkv, fc1]", "lora.dropout=0.1"]
DPO = str(ROOT / "examples" / "dpo_sort.yaml")
LORA = "LoRA"
RUNS = {SFT: SFT_RUN, DEMO: GRPO_RUN, PPO: PPO_RUN, DPO: DPO_RUN, LORA: LORA_RUN}


def run_of(name: str, run_dir: Path, *overrides: str) -> Config:
    return config(SFT if name == LORA else name, run_dir, *RUNS[name], *overrides)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """The run that nothing happens to, of a recipe."""

    @functools.cache
    def run(name: str) -> Finished:
        return finish(run_of(name, tmp_path_factory.mktemp("calm")), host=ForkedHost)

    return run


def killed(conf: Config, arm: Callable[[], None], host: Callable[[Config], Host] = ForkedHost) -> None:
    """``everstep train`` in a process of its own, which ``arm`` has SIGKILLed somewhere: its workers are left to themselves."""
    forked.context()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            gc.freeze()  # what the parent's threads use is not collected where they do not run
            # The server that workers are forked from is our parent's, and runs.
            forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined, method-assign]
            arm()
            finish(conf, host=host)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def at_event(name: str, step: int) -> None:
    """From now on this process is killed when it says this of that step, or a later one: a save may have been put off."""
    emit = EventLog.emit

    def watched(self: EventLog, event: str, *, step: int | None = None, **fields: Any) -> None:
        emit(self, event, step=step, **fields)
        if event == name and step is not None and step >= least:
            os.kill(os.getpid(), signal.SIGKILL)

    least = step
    EventLog.emit = watched  # type: ignore[method-assign, assignment]


def saving(cut: str) -> list[str]:
    """For a cut at a commit, that the steps before it are saved however busy the machine is; at a save's beginning it is in the background."""
    return ["checkpoint.asynchronous=false"] if cut == "commit" else []


def at_touch(folder: Path, number: int) -> None:
    """From now on this process is killed at its n-th touch of anything in ``folder``."""
    left = [number]

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(args[0]).startswith(str(folder)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def numbers(folder: Path) -> dict[int, dict[str, float]]:
    """What must be equal of every step: loss, learning rate, gradient norm, rewards."""
    rows = read_metrics(folder / "metrics.jsonl")
    kept = ("train/", "actor/", "critic/", "val", "training/")
    return {int(row["step"]): {k: v for k, v in row.items() if k.startswith(kept)} for row in rows}


def samples(folder: Path) -> dict[int, list[str]]:
    """Sample ids of every step, in order; of a step that was made twice, those of the last time."""
    return {e.step: e["samples"] for e in read_events(folder / "events") if e.event == "begin" and e.step is not None}


def same(again: Finished, whole: Finished) -> None:
    assert again.final_hashes == whole.final_hashes
    assert numbers(again.folder) == numbers(whole.folder)
    assert samples(again.folder) == samples(whole.folder)


SFT_CUTS = {
    "between": [("commit", 7)],                            # a step that is not saved; the pass over the data has just ended
    "in-flight": [("save_begin", 4)],                      # a checkpoint is being written, after a complete one
    "twice": [("commit", 3), ("commit", 9)],
    "before-the-first": [("commit", 1)],
}


@pytest.mark.parametrize(
    ("cut", "replicas"),
    [
        ("in-flight", 1), ("twice", 2),
        *(pytest.param(cut, replicas, marks=pytest.mark.full) for cut in SFT_CUTS for replicas in (1, 2, 3)),
    ],
)
def test_sft_goes_on_bitwise(cut: str, replicas: int, calm: Callable[[str], Finished], tmp_path: Path) -> None:
    """``replicas``: with how many the run goes on."""
    for attempt, (event, step) in enumerate(SFT_CUTS[cut]):
        more = ["resume=auto"] if attempt else []
        killed(config(SFT, tmp_path / "run", *SFT_RUN, *more, *saving(event)), lambda event=event, step=step: at_event(event, step))  # type: ignore[misc]
    again = finish(config(SFT, tmp_path / "run", *SFT_RUN, "resume=auto", f"layout.replicas={replicas}"), host=ForkedHost)
    if replicas == 2:
        same(again, calm(SFT))
    else:
        assert again.final_hashes == calm(SFT).final_hashes and samples(again.folder) == samples(calm(SFT).folder)
    assert_invariants(again, steps=12)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.full), 4, pytest.param(6, marks=pytest.mark.full)])
def test_grpo_goes_on_bitwise(step: int, calm: Callable[[str], Finished], tmp_path: Path) -> None:
    """Killed in the warm-up; between two updates of an iteration; after one."""
    killed(config(DEMO, tmp_path / "run", *GRPO_RUN, *saving("commit")), lambda: at_event("commit", step + 1))
    same(finish(config(DEMO, tmp_path / "run", *GRPO_RUN, "resume=auto"), host=ForkedHost), calm(DEMO))


@pytest.mark.full
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        (DEMO, [("save_begin", 4)]),
        (DEMO, [("commit", 3), ("commit", 7)]),
        (PPO, [("commit", 5)]),                # between the updates of an iteration
        (PPO, [("save_begin", 3), ("save_begin", 7)]),
        (DPO, [("commit", 5), ("save_begin", 8)]),
        (LORA, [("commit", 7)]),
        (LORA, [("save_begin", 4), ("commit", 9)]),
    ],
    ids=["grpo-in-flight", "grpo-twice", "ppo", "ppo-in-flight-twice", "dpo-twice", "lora", "lora-twice"],
)
def test_every_recipe_goes_on_bitwise(
    name: str, cuts: list[tuple[str, int]], replicas: int, calm: Callable[[str], Finished], tmp_path: Path
) -> None:
    """``replicas``: with how many the run goes on, each time."""
    for attempt, (event, step) in enumerate(cuts):
        more = ["resume=auto", f"layout.replicas={replicas}"] if attempt else []
        killed(run_of(name, tmp_path / "run", *more, *saving(event)), lambda event=event, step=step: at_event(event, step))  # type: ignore[misc]
    again = finish(run_of(name, tmp_path / "run", "resume=auto", f"layout.replicas={replicas}"), host=ForkedHost)
    went_on_after = again.kind("load")[-1].step or 0
    assert again.final_hashes == calm(name).final_hashes and samples(again.folder) == samples(calm(name).folder)
    if replicas == 2:
        # Not of that step itself: where the iterations begin the evaluation before them is made again, and told as all of it.
        later = lambda run: {step: said for step, said in numbers(run.folder).items() if step > went_on_after}
        assert later(again) == later(calm(name)) != {}
    assert_invariants(again, steps=max(numbers(calm(name).folder)))


def draws() -> list[float]:
    """One number of each library; NumPy makes normal ones in pairs, and keeps the second."""
    return [random.random(), float(np.random.normal()), float(torch.rand(()))]


def seeded() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def drawing_workers() -> None:
    """In every worker: user code that draws random numbers once a step, and writes them down."""
    from everstep.cluster.worker.worker import Worker

    seeded()
    train_step = Worker.train_step

    def drawing(self: Worker, step: int, *args: Any) -> Any:
        with open(os.environ["DRAWS"], "a") as file:
            file.write(json.dumps([self.formation.replica, step, draws()]) + "\n")
        return train_step(self, step, *args)

    Worker.train_step = drawing  # type: ignore[method-assign, assignment]


def drawing_lead(into: Path, dies_at: int | None = None) -> None:
    """The same in this process, which is killed after it has drawn for a step."""
    emit = EventLog.emit

    def watched(self: EventLog, event: str, *, step: int | None = None, **fields: Any) -> None:
        emit(self, event, step=step, **fields)
        if event == "commit":
            with open(into, "a") as file:
                file.write(json.dumps(["lead", step, draws()]) + "\n")
            if step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

    seeded()
    EventLog.emit = watched  # type: ignore[method-assign, assignment]


@pytest.mark.full
def test_random_numbers_of_user_code_go_on_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def conf(name: str, *more: str) -> Config:
        return config(SFT, tmp_path / name, *SFT_RUN, f"env.DRAWS={tmp_path / name}.draws", *more)

    def end(name: str, *more: str) -> dict[tuple[str, int], list[float]]:
        """Of every step, and replica, the numbers that were drawn the last time it was made."""
        with monkeypatch.context() as patched:
            patched.setattr(EventLog, "emit", EventLog.emit)  # to be put back
            drawing_lead(tmp_path / f"{name}.draws")
            finish(conf(name, *more), host=lambda c: ForkedHost(c, drawing_workers))
        rows = [json.loads(line) for line in (tmp_path / f"{name}.draws").read_text().splitlines()]
        return {(str(who), step): drawn for who, step, drawn in rows}

    whole = end("whole")
    killed(conf("parts"), lambda: drawing_lead(tmp_path / "parts.draws", dies_at=7), lambda c: ForkedHost(c, drawing_workers))
    assert end("parts", "resume=auto") == whole
    assert len({tuple(drawn) for drawn in whole.values()}) >= 12, "they differ from step to step"


# ---------------------------------------------------------------- the writers die


@pytest.mark.parametrize("touch", [9, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 60, 4))])
def test_the_lead_is_killed_at_any_touch_of_the_disk(touch: int, calm: Callable[[str], Finished], tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    killed(config(SFT, tmp_path / "run", *SFT_RUN), lambda: at_touch(folder, touch))
    newest = choose(folder, "auto")
    if (pointed := pointed_at(folder)) is not None:
        assert damage(pointed) is None and newest.path is not None and newest.step >= int(pointed.name[5:])
    same(finish(config(SFT, tmp_path / "run", *SFT_RUN, "resume=auto"), host=ForkedHost), calm(SFT))


def kill_the_writer_of_replica_1() -> None:
    """In every worker: who writes for replica 1 dies when it opens its n-th file; n comes from the environment. Steps take longer than
    usual, so that saves end between them."""
    from everstep.cluster.worker.worker import Worker

    train_step = Worker.train_step
    Worker.train_step = lambda *args: time.sleep(0.15) or train_step(*args)  # type: ignore[method-assign, func-returns-value]
    left = [int(os.environ["KILLED_AT_FILE"])]

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and "/state/" in str(args[0]) and "-1.000-" in str(args[0]) and "w" in str(args[1]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_a_rank_that_dies_while_it_writes_costs_one_attempt(calm: Callable[[str], Finished], tmp_path: Path) -> None:
    run = finish(config(SFT, tmp_path / "run", *SFT_RUN, "env.KILLED_AT_FILE=2"), host=lambda c: ForkedHost(c, kill_the_writer_of_replica_1))
    (failed,) = run.kind("save_failed")
    first, second = [e.step for e in run.kind("save_begin")][:2]
    assert first == 2 and failed.step == second and "rank 0 of replica 1 (w1) is gone while it saved" in failed["cause"]
    saved = [e.step for e in run.kind("save")]
    assert saved[0] == 2 and second < saved[1] <= second + 2 and saved[-1] == 12, "another step was saved at once"
    assert run.final_hashes == calm(SFT).final_hashes
    assert_invariants(run, steps=12)
    assert [damage(folder) for folder in checkpoint_folders(run.folder / "checkpoints")] == [None, None]


def slow_disk() -> None:
    """In every worker: a checkpoint's files take half a second each."""
    sys.addaudithook(lambda event, args: time.sleep(0.5) if event == "open" and "/state/" in str(args[0]) else None)


def test_saves_back_to_back_wait_for_each_other_and_training_does_not(tmp_path: Path) -> None:
    """With a heal in between: replica 1 loses its rank, and a spare is healed while saves are on their way."""
    death = "faults=[{step: 3, phase: reduce, kind: kill, replica: 1}]"
    run = finish(config(SFT, tmp_path / "run", *SFT_RUN, "checkpoint.every_steps=1", "sft.steps=30", "layout.spares=1", death),
                 host=lambda c: ForkedHost(c, slow_disk))
    assert run.kind("save_postponed") and run.kind("heal_done")
    begun = {e.step: e.t_mono for e in run.kind("save_begin")}
    ended = {e.step: e.t_mono for e in run.kind("save", "save_failed")}
    steps = sorted(begun)
    assert all(ended[first] <= begun[second] for first, second in pairwise(steps)), "one at a time"
    committed = [e for e in run.kind("commit") if begun[steps[0]] < e.t_mono < ended[steps[0]]]
    assert committed, "steps were made while it was written"
    assert steps[-1] == 30 and damage(run.folder / "checkpoints" / "step-000030") is None
    assert_invariants(run, steps=30)


# ---------------------------------------------------------------- storage refuses


def test_a_run_goes_on_from_the_good_one_before_a_damaged_one(calm: Callable[[str], Finished], tmp_path: Path) -> None:
    shutil.copytree(calm(SFT).folder / "checkpoints", tmp_path / "run" / "checkpoints")
    newest, good, *_ = checkpoint_folders(tmp_path / "run" / "checkpoints")
    victim = max((newest / "state").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip_a_bit(victim, -1)
    said = choose(newest.parent, "auto").explain()
    assert re.search(rf"skipped {newest.name}: .*{victim.name}: damaged in (model|rng)/", said), "file and tensor are named"
    again = finish(config(SFT, tmp_path / "run", *SFT_RUN, "resume=auto"), host=ForkedHost)
    assert {e["path"] for e in again.kind("load")} == {str(good)} and again.final_hashes == calm(SFT).final_hashes
    assert damage(newest) is None and (newest.parent / "set-aside" / newest.name).is_dir()


@pytest.mark.full
def test_a_step_or_another_runs_checkpoint_can_be_named(calm: Callable[[str], Finished], tmp_path: Path) -> None:
    theirs = calm(SFT).folder / "checkpoints"
    before = {path: path.stat().st_mtime_ns for path in theirs.rglob("*")}
    step = int(checkpoint_folders(theirs)[1].name[5:])
    shutil.copytree(theirs, tmp_path / "run" / "checkpoints")
    for run_dir, resume in ((tmp_path / "run", str(step)), (tmp_path / "other", str(theirs / f"step-{step:06d}"))):
        again = finish(config(SFT, run_dir, *SFT_RUN, f"resume={resume}"), host=ForkedHost)
        assert {e.step for e in again.kind("load")} == {step} and again.final_hashes == calm(SFT).final_hashes
        assert damage(run_dir / "checkpoints" / "step-000012") is None
    assert (tmp_path / "run" / "checkpoints" / "set-aside" / "step-000012").is_dir(), "the future that was left is kept"
    assert before == {path: path.stat().st_mtime_ns for path in theirs.rglob("*")}, "another run's folder is only read"


@pytest.mark.full
@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_disk_that_is_full_or_read_only_costs_checkpoints_and_no_step(
    trouble: str, calm: Callable[[str], Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file system of its own, into which nothing goes between the commits of two steps."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a file system needs root")
    emit = EventLog.emit

    def watched(self: EventLog, event: str, *, step: int | None = None, **fields: Any) -> None:
        emit(self, event, step=step, **fields)
        if event == "commit" and step in (5, 11):
            if trouble == "read-only":
                while subprocess.run(["mount", "-o", f"remount,{'ro' if step == 5 else 'rw'}", folder]).returncode:
                    time.sleep(0.02)  # a file is being written
            elif step == 5:
                with contextlib.suppress(OSError), open(folder / "ballast", "wb", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass
            else:
                (folder / "ballast").unlink()

    try:
        with monkeypatch.context() as patched:
            patched.setattr(EventLog, "emit", watched)
            run = finish(config(SFT, tmp_path / "run", *SFT_RUN, "checkpoint.retry_s=0", f"checkpoint.path={folder}"), host=ForkedHost)
        says = "No space left on device.*; free space there" if trouble == "full" else "Read-only file system.*; make the folder writable"
        assert run.kind("save_failed") and all(re.search(says, e["cause"]) for e in run.kind("save_failed"))
        assert run.kind("save")[-1].step == 12 and run.final_hashes == calm(SFT).final_hashes
        assert [damage(found) for found in checkpoint_folders(folder)] == [None] * len(checkpoint_folders(folder))
        assert_invariants(run, steps=12)
    finally:
        subprocess.run(["umount", folder], check=True)


def without_the_folder(monkeypatch: pytest.MonkeyPatch, folder: Path, gone_at: int, back_at: int | None) -> None:
    """Between the commits of these steps a file is where the checkpoints were; there is one by then."""
    emit, saved = EventLog.emit, threading.Event()

    def watched(self: EventLog, event: str, *, step: int | None = None, **fields: Any) -> None:
        emit(self, event, step=step, **fields)
        if event == "save":
            saved.set()
        if event == "commit" and step == gone_at:
            assert saved.wait(60.0)
            folder.rename(folder.with_name("elsewhere"))
            while not folder.is_file():
                shutil.rmtree(folder, ignore_errors=True)  # a save that was on its way makes it again
                with contextlib.suppress(IsADirectoryError):
                    folder.write_text("no folder")
        if event == "commit" and step == back_at:
            folder.unlink()
            folder.with_name("elsewhere").rename(folder)

    monkeypatch.setattr(EventLog, "emit", watched)


def test_storage_that_refuses_for_a_while_costs_checkpoints_and_no_step(
    calm: Callable[[str], Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        without_the_folder(patched, tmp_path / "run" / "checkpoints", 5, 11)
        run = finish(config(SFT, tmp_path / "run", *SFT_RUN, "checkpoint.retry_s=0"), host=ForkedHost)
    assert run.kind("save_failed") and all("Not a directory" in e["cause"] or "exists" in e["cause"] for e in run.kind("save_failed"))
    assert run.kind("save")[-1].step == 12 and run.final_hashes == calm(SFT).final_hashes
    assert_invariants(run, steps=12)


def test_on_failure_stop_ends_the_run_and_it_can_be_resumed(
    calm: Callable[[str], Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match=r"checkpoint.* failed: .*resume=auto"):
        without_the_folder(patched, folder, 5, None)
        finish(config(SFT, tmp_path / "run", *SFT_RUN, "checkpoint.retry_s=0", "checkpoint.on_failure=stop"), host=ForkedHost)
    folder.unlink()
    folder.with_name("elsewhere").rename(folder)
    same(finish(config(SFT, tmp_path / "run", *SFT_RUN, "resume=must"), host=ForkedHost), calm(SFT))
