"""Both launchers, resumed runs, interrupts and failing user code: real processes, through the command line where a user would.

Most command lines are forked from a server that has the imports (tests/test_plan_cli.py), which saves seconds; what they start
are real torchrun ranks and Ray clusters. Those that get signals are the program itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support import probe
from tests.support.runs import DEMO, QUIET, ROOT, SFT, Finished, config, finish, gone, shared_memory
from tests.test_plan_cli import TOKEN, Done, start, survivors
from tests.test_plan_cli import finish as end

from everstep.driver import run
from everstep.errors import BadInput, NotEnoughReplicas, WorkerFailed
from everstep.telemetry.events import read_events
from everstep.telemetry.metrics import read_metrics
from everstep.telemetry.recoveries import account

pytestmark = pytest.mark.timeout(200)

ONE = ["layout.replicas=1", "layout.spares=0", "faults=[]"]
# GRPO with all that it can do, small: a warm-up, several updates, a reference model.
GRPO = [*ONE, "warmup.steps=2", "warmup.samples_per_step=64", "rl.iterations=3", "rl.prompts_per_step=8", "rl.samples_per_prompt=8",
        "rl.updates_per_pass=2", "rl.kl_coef=0.05", "rl.eval_every=1", "train.micro_batch_size=16", "rollout.eval_samples=8"]
COSTS = ("timing_s/", "perf/throughput", "perf/time_per_step", "perf/cpu_memory_used_gb", "dispatch/", "ft/goodput", "t_wall")  # metrics that no two runs share


def result(folder: Path) -> Finished:
    return Finished(folder, read_events(folder / "events"))


def same(one: Finished, other: Finished) -> None:
    """The metrics of every step agree to 1e-6, and the final state of every rank bit by bit."""
    mine, theirs = read_metrics(one.folder / "metrics.jsonl"), read_metrics(other.folder / "metrics.jsonl")
    assert [row["step"] for row in mine] == [row["step"] for row in theirs] and mine
    for a, b in zip(mine, theirs, strict=True):
        assert a.keys() == b.keys()
        assert any(name.endswith("loss") for name in a)
        compared = {name: value for name, value in a.items() if not name.startswith(COSTS)}
        assert compared == pytest.approx({name: b[name] for name in compared}, abs=1e-6, rel=1e-6)
    assert one.kind("verify")[-1]["hashes"] == other.kind("verify")[-1]["hashes"]


def command(*arguments: str) -> list[str]:
    return [arguments[0], arguments[1], *QUIET, *arguments[2:]]


def everstep(folder: Path, *arguments: str, timeout: float = 90) -> Done:
    process, token = start(command(*arguments), folder)
    done = end(process, folder, token, timeout)
    assert survivors(token, process.pid) == []
    return done


# ---------------------------------------- the same recipe from the same file under both


@pytest.mark.full
def test_grpo_with_tensor_parallelism_gives_the_same_losses_under_both_launchers(tmp_path: Path, ray_cluster: None) -> None:
    """And whether memory goes to the host during rollouts or not."""
    layout = [*GRPO, "layout.tp=2"]
    done = everstep(tmp_path, "train", DEMO, *layout, "launcher=local", f"run_dir={tmp_path}/local")
    assert done.code == 0, done.err
    assert done.err == ""  # nothing of torchrun's or torch's own
    offload = [f"engine.offload.{part}=true" for part in ("parameters", "gradients", "optimizer", "reference")]
    same(result(tmp_path / "local"), finish(config(DEMO, tmp_path / "ray", *layout, *offload)))


@pytest.mark.full
def test_sft_with_pipeline_stages_gives_the_same_losses_under_a_plain_torchrun(tmp_path: Path, ray_cluster: None) -> None:
    layout = [*ONE, "layout.pp=2", "sft.steps=6", "data.eval_source=everstep.data.arithmetic:texts"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "everstep", *command("train", SFT, *layout, f"run_dir={tmp_path}/local")],
        cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "local").kind("run_start")[0]["launcher"] == "local"
    same(result(tmp_path / "local"), finish(config(SFT, tmp_path / "ray", *layout)))


@pytest.mark.full
def test_the_environment_of_the_configuration_reaches_ranks_and_spares(tmp_path: Path, ray_cluster: None) -> None:
    for name in ("ray", "local"):
        (tmp_path / name).mkdir()
    conf = config(SFT, tmp_path / "run", "layout.spares=1", "env.PROBE=by ray",
                  "faults=[{step: 2, phase: compute, kind: kill, replica: 1}]")
    status = probe.train(conf, tmp_path / "ray", ranks=3)
    assert status["replicas"] == [0, 1] and status["spares"] == 0
    notes = probe.notes(tmp_path / "ray")
    assert sorted(note["rank"] for note in notes) == ["0/0", "1/0", "1/0"]
    assert {note["PROBE"] for note in notes} == {"by ray"}

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "tests.support.probe"]
    own = [*ONE, "layout.tp=2", "env.PROBE=by torchrun", f"run_dir={tmp_path}/local-run"]
    done = subprocess.run([*torchrun, SFT, f"{tmp_path}/local", *QUIET, *own], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    notes = probe.notes(tmp_path / "local")
    assert sorted((note["rank"], note["PROBE"]) for note in notes) == [("0/0", "by torchrun"), ("0/1", "by torchrun")]


# ---------------------------------------- from Python


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user's own, with the examples in it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_program_of_the_readme_runs(workplace: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    for verb in ("everstep.launch(", "group.call(", "group.train_step(", "group.save(", "group.status(", "group.close("):
        assert verb in program, f"the README does not show {verb}"
    (workplace / "program.py").write_text(program)
    variables = runpy.run_path(str(workplace / "program.py"))
    assert variables["group"].committed_step == 10
    (saved,) = [path for path in (workplace / "runs" / "sft_text" / "checkpoints").iterdir() if path.name.startswith("step-")]
    assert (saved / "hf" / "config.json").is_file()
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    assert len(losses) == 10 and losses[-1] < losses[0]


@pytest.mark.full
def test_the_custom_dispatch_of_the_examples_runs(workplace: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("custom_dispatch", ROOT / "examples" / "custom_dispatch.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main("examples/sft_text.yaml", "device=cpu")
    mesh, balanced = (eval(found) for found in re.findall(r"\[[\d, ]+\]", capsys.readouterr().out))
    assert sum(mesh) == sum(balanced) and max(balanced) - min(balanced) <= max(mesh) - min(mesh)


# ---------------------------------------- resume


SFT_TWELVE = ["sft.steps=12", "optimizer.decay_steps=12"]


@pytest.mark.full
def test_a_resumed_sft_run_ends_in_the_same_state(tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    whole = finish(config(SFT, tmp_path / "whole", *SFT_TWELVE))
    finish(config(SFT, tmp_path / "run", *SFT_TWELVE, "sft.steps=6"))
    capsys.readouterr()
    resumed = finish(config(SFT, tmp_path / "run", *SFT_TWELVE, "resume=must", "telemetry.progress=plain"))
    said = capsys.readouterr().out
    assert f"resume=must: continuing after step 6 from {tmp_path}/run/checkpoints/step-000006" in said
    assert "step 7/12" in said and "step 6/12" not in said
    same(whole, resumed)
    books = account(resumed.events)
    assert books.exact and (books.first_step, books.last_step, books.steps_rolled_back) == (1, 12, [])


@pytest.mark.full
def test_a_resumed_grpo_run_ends_in_the_same_state(tmp_path: Path, ray_cluster: None) -> None:
    """From a step between, with a reference model; and after a death in the warm-up."""
    whole = finish(config(DEMO, tmp_path / "whole", *GRPO, "checkpoint.every_steps=2"))
    shutil.copytree(tmp_path / "whole", tmp_path / "run", symlinks=True)
    again = finish(config(DEMO, tmp_path / "run", *GRPO, "resume=6"))
    assert account(again.events).steps_rolled_back == [7, 8]
    same(whole, again)

    dies = ["faults=[{step: 2, phase: compute, kind: kill}]", "checkpoint.every_steps=1"]
    with pytest.raises(NotEnoughReplicas, match="resume"):
        finish(config(DEMO, tmp_path / "early", *GRPO, *dies))
    resumed = finish(config(DEMO, tmp_path / "early", *GRPO, "resume=must"))
    assert resumed.kind("load")[0].step == 1
    same(whole, resumed)
    assert account(resumed.events).exact


@pytest.mark.full
def test_a_reference_model_that_the_checkpoint_lacks_is_refused(tmp_path: Path, ray_cluster: None) -> None:
    finish(config(DEMO, tmp_path / "run", *GRPO, "rl.kl_coef=0", "rl.iterations=1"))
    with pytest.raises(BadInput, match=r"rl\.kl_coef=0\.05: the checkpoint has no reference model"):
        run(config(DEMO, tmp_path / "run", *GRPO, "resume=must"))


def test_resume_must_with_nothing_to_resume_is_bad_input(tmp_path: Path) -> None:
    done = everstep(tmp_path, "train", SFT, *ONE, "resume=must", f"run_dir={tmp_path}/run")
    assert done.code == 2
    assert re.fullmatch(r"everstep: resume=must: no usable checkpoint in .*/run/checkpoints .*\n", done.err), done.err
    assert not (tmp_path / "run").exists()


# ---------------------------------------- interrupts


@contextlib.contextmanager
def training(folder: Path, launcher: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command itself in the middle of training, its first checkpoint complete: (process, token). Whatever happens, it ends."""
    layout = ["layout.tp=2", "layout.replicas=1"] if launcher == "local" else ["layout.replicas=2"]
    token = uuid.uuid4().hex
    arguments = command("train", SFT, f"launcher={launcher}", *layout, "sft.steps=5000", "checkpoint.every_steps=5", f"run_dir={folder}/run")
    process = subprocess.Popen(
        [sys.executable, "-m", "everstep", *arguments], cwd=folder, env=os.environ | {TOKEN: token, "OMP_NUM_THREADS": "1"},
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )
    try:
        deadline = time.monotonic() + 180
        while not (folder / "run" / "checkpoints" / "step-000005" / "manifest.json").exists():
            assert time.monotonic() < deadline, "no checkpoint after 180 s"
            assert process.poll() is None, f"it ended with {process.returncode}: {process.communicate()[1]}"
            time.sleep(0.05)
        yield process, token
    finally:
        for left in survivors(token, process.pid):
            os.kill(int(left.split()[0]), signal.SIGKILL)
        process.communicate(timeout=10)


@pytest.mark.full  # tests/test_shutdown.py and tests/test_torchrun.py show the same without a command line
@pytest.mark.parametrize(("launcher", "number"), [("ray", signal.SIGINT), ("ray", signal.SIGTERM), ("local", signal.SIGINT)])
def test_an_interrupt_ends_everything_in_order(tmp_path: Path, launcher: str, number: signal.Signals) -> None:
    before = shared_memory(tmp_path / "run")
    with training(tmp_path, launcher) as (process, token):
        workers = {e.pid for e in result(tmp_path / "run").events if e.who.startswith("w")}
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130, said
        sentence = rf"everstep: interrupted by {number.name}; the processes were stopped; continue after step \d+ with resume=auto\n"
        assert re.fullmatch(sentence, said), said
        assert survivors(token, process.pid) == [] and gone(workers, within_s=0)
    assert shared_memory(tmp_path / "run") <= before
    assert result(tmp_path / "run").kind("run_end")[-1]["status"] == "interrupted"


@pytest.mark.full  # tests/test_shutdown.py and tests/test_controller_death.py show the same without a command line
def test_nothing_outlives_a_killed_controller(tmp_path: Path) -> None:
    """For torchrun's ranks tests/test_torchrun.py shows the same."""
    before = shared_memory(tmp_path / "run")
    with training(tmp_path, "ray") as (process, token):
        workers = {e.pid for e in result(tmp_path / "run").events if e.who.startswith("w")}
        assert len(workers) == 2
        psutil.Process(min(workers)).suspend()  # it cannot notice anything
        process.kill()
        process.wait(10)
        deadline = time.monotonic() + 30
        while left := survivors(token, process.pid):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
        assert gone(workers, within_s=0)
    assert shared_memory(tmp_path / "run") <= before


# ---------------------------------------- failing user code


REWARD = """
def reward(prompt, completion, record):
    raise ZeroDivisionError("no such luck")

def records():
    raise OSError("the disk is on fire")
"""


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["ray", "local"])
def test_a_reward_function_that_raises_is_named_with_its_sample(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    layout = ["layout.tp=2"] if launcher == "local" else []
    done = everstep(tmp_path, "train", DEMO, *GRPO, *layout, "warmup.steps=0", "rl.eval_every=0", "data.eval_source=null", f"launcher={launcher}",
                    "reward.function=mine:reward", f"run_dir={tmp_path}/run")
    assert done.code == 3
    assert re.fullmatch(r"everstep: reward of sample 0/\d+\S*: ZeroDivisionError: no such luck \(completion .*\)\n", done.err), done.err


def test_a_data_function_that_raises_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    done = everstep(tmp_path, "train", SFT, "data.source=mine:records", "data.source_args={}", f"run_dir={tmp_path}/run")
    assert (done.code, done.err) == (2, "everstep: data.source=mine:records raised OSError: the disk is on fire\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_failing_method_of_a_worker_is_named_with_its_rank(tmp_path: Path, ray_cluster: None) -> None:
    with pytest.raises(WorkerFailed, match=r"^rank 1/0 failed in step 1: KeyError: 'a bug in the loss'$"):
        probe.train(config(SFT, tmp_path / "run"), tmp_path, ranks=99, fail_on="1/0")
    assert gone(result(tmp_path / "run").pids)


def test_debug_adds_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    done = everstep(tmp_path, "train", SFT, "data.source=mine:records", "data.source_args={}", f"run_dir={tmp_path}/run", "--debug")
    assert done.code == 2 and "Traceback" in done.err and 'raise OSError("the disk is on fire")' in done.err
