"""The real command line, in real processes: what is refused, with which code, and that nothing is left behind.

Commands are forked from a server that has the launcher imported, so that each costs a fraction of a second; a fork is
still a process of its own, and runs the same ``main``. One test starts the installed program itself.
"""

from __future__ import annotations

import io
import json
import multiprocessing as mp
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from everstep import cli
from everstep.config import derive
from everstep.config.load import from_tree, load
from everstep.config.schema import Config
from everstep.engine.shape import ExpertShape, ModelShape
from everstep.engine.source import describe
from everstep.layout import Layout
from everstep.plan import make_plan
from everstep.plan.memory import expert_parameters, stage_parameters
from everstep.plan.terminal import print_plan, size_rows

ROOT = Path(__file__).parent.parent
MODEL = str(ROOT / "examples" / "models" / "tiny-qwen3")
TREE: dict[str, Any] = {
    "recipe": "grpo",
    "launcher": "ray",
    "device": "cpu",
    "run_dir": "run",
    "model": {"path": MODEL, "init": "random"},
    "data": {"source": "everstep.data.digits:sort_prompts", "format": "prompt"},
    "reward": {"function": "position_match"},
    "layout": {"replicas": 2, "spares": 1},
}
TOKEN = "EVERSTEP_TEST_TOKEN"


@dataclass
class Done:
    code: int | None
    out: str
    err: str


def _main(arguments: list[str], folder: str, token: str, columns: str) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ[TOKEN] = token
    os.environ["COLUMNS"] = columns
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{token}.{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    sys.argv = ["everstep", *arguments]
    cli.main()


def start(arguments: list[str], folder: Path, columns: int = 80) -> tuple[Any, str]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["everstep.cli", "everstep.driver", "everstep.cluster.controller.controller", "everstep.cluster.ray.host"])
    token = uuid.uuid4().hex
    process = context.Process(target=_main, args=(arguments, str(folder), token, str(columns)))
    process.start()
    return process, token


def finish(process: Any, folder: Path, token: str, timeout: float = 60) -> Done:
    process.join(timeout)
    assert not process.is_alive(), "the command does not end"
    return Done(process.exitcode, *((folder / f"{token}.{name}").read_text() for name in ("out", "err")))


def everstep(arguments: list[str], folder: Path, columns: int = 80) -> Done:
    process, token = start(arguments, folder, columns)
    done = finish(process, folder, token)
    assert survivors(token, process.pid) == []
    return done


def survivors(token: str, session: int) -> list[str]:
    """Processes of a command that are still there: by session, or by the token in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            # A fork keeps the environment block it was born with, its children get the real one.
            if os.getsid(process.pid) == session or process.environ().get(TOKEN) == token:
                found.append(f"{process.pid} {process.cmdline()}")
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(TREE))
    return path


def refused(done: Done, says: str) -> None:
    """Exit code 2, and one sentence on stderr that ``says`` matches."""
    assert done.code == 2, done.err
    assert done.out == ""
    lines = done.err.strip().splitlines()
    assert len(lines) == 1 and "Traceback" not in done.err, done.err
    assert lines[0].startswith("everstep: ") and re.search(says, lines[0]), lines[0]


# ---------------------------------------- bad input, as a user meets it


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.path=/no/such/dir"], "model.path=/no/such/dir is not a directory"),
        (["optimizer.lrr=1"], r"unknown key optimizer.lrr \(command line\); did you mean optimizer.lr\?"),
        (["data.source=c.yaml"], "data.source=c.yaml is not a parquet file"),
        (["reward.function=no_such_module:reward"], "reward.function=no_such_module:reward"),
        (["reward.function=position_mach"], "reward.function=position_mach.*position_match"),
        (["data.max_prompt_tokens=2"], r"(?=.*data.source)(?=.*data.max_prompt_tokens)"),
        (["layout.replicas=64", "rl.prompts_per_step=64", "device=cuda"], "the layout needs 65 devices .* has [0-9]+: lower"),
        (["--layout.tp", "3"], "layout.tp=3 does not divide the 4 attention heads"),
        (["launcher=local"], "launcher=local runs one replica, but layout.replicas=2"),
        (["env.RANK=0"], "env.RANK is set by"),
    ],
)
def test_train_refuses_bad_input_before_anything_is_started(config: Path, overrides: list[str], says: str) -> None:
    refused(everstep(["train", str(config), *overrides], config.parent), says)
    assert not (config.parent / "run").exists()


def test_train_refuses_a_port_in_use(config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one = ["launcher=local", "layout.replicas=1", "layout.spares=0", f"local.port={port}"]
        refused(everstep(["train", str(config), *one], config.parent), rf"local.port={port} .*choose another")


def test_a_record_that_is_too_long_is_named_before_anything_is_started(config: Path) -> None:
    rows = [{"prompt": "31>"}, {"prompt": "1" * 60}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), config.parent / "d.parquet")
    done = everstep(["train", str(config), "data.source=d.parquet", "data.max_prompt_tokens=10"], config.parent)
    refused(done, r"(?=.*data.source)(?=.*record 1)(?=.*data.max_prompt_tokens)")
    assert not (config.parent / "run").exists()


def test_a_used_run_folder_is_refused(config: Path) -> None:
    (config.parent / "run" / "checkpoints").mkdir(parents=True)
    refused(everstep(["train", str(config)], config.parent), r"run_dir=.*resume=auto.*--clean")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "c.yml"], r"no configuration file c\.yml; did you mean c\.yaml\?"),
        (["plan", "c.yaml", "layout.pp=3"], r"layout.pp\*layout.vpp=3\*1=3 stages are more than the 2 layers"),
        (["plan", "c.yaml", "rl.samples_per_prompt=x"], "rl.samples_per_prompt is 'x' .command line.: expected an integer"),
        (["plan"], r"Missing .*(see everstep plan --help)"),
        (["plna", "c.yaml"], "No such command 'plna'"),
        (["explain", "layout.tpp"], r"unknown key layout.tpp .*did you mean layout.tp\?"),
        (["generate", "/no/such", "hi"], "model.path=/no/such is not a directory"),
        (["generate", MODEL, "hi"], r"no \.safetensors weights"),
        (["generate", MODEL, "hi", "--max-tokens", "0"], "--max-tokens is 0"),
        (["generate", MODEL, "hi", "--max-tokens", "x"], "Invalid value for '--max-tokens'"),
        (["report", "/no/such"], "there is no such folder"),
    ],
)
def test_other_commands_refuse_bad_input(config: Path, arguments: list[str], says: str) -> None:
    refused(everstep(arguments, config.parent), says)


def test_debug_shows_the_traceback_and_keeps_the_exit_code(config: Path) -> None:
    done = everstep(["train", str(config), "optimizer.lrr=1", "--debug"], config.parent)
    assert done.code == 2 and "Traceback" in done.err and "unknown key optimizer.lrr" in done.err


def test_ctrl_c_ends_with_130(config: Path) -> None:
    (config.parent / "slow.py").write_text(
        "import time, pathlib\ndef records():\n    pathlib.Path('reading').touch(); time.sleep(60); return []\n"
    )
    process, token = start(["train", str(config), "data.source=slow:records"], config.parent)
    deadline = time.monotonic() + 30
    while not (config.parent / "reading").exists():
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    done = finish(process, config.parent, token, 20)
    assert done.code == 130 and "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1 and "interrupted" in done.err
    assert survivors(token, process.pid) == []


# ---------------------------------------- help, explain, plan


def test_help_fits_one_screen(tmp_path: Path) -> None:
    done = everstep(["--help"], tmp_path)
    lines = done.out.rstrip().splitlines()
    assert done.code == 0 and len(lines) <= 24 and max(map(len, lines)) <= 80, done.out
    for command in ("train", "plan", "explain", "generate", "report"):
        assert re.search(rf"^  {command} +\S", done.out, re.M)
    assert everstep([], tmp_path).out == done.out


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_program_itself_answers_quickly(config: Path) -> None:
    """Not forked: the interpreter, the entry point and every import, in a second and a half of a processor (others may use it meanwhile)."""
    seconds = []
    for _ in range(3):
        begun = _seconds_of_children()
        done = subprocess.run(
            [sys.executable, "-m", "everstep", "plan", str(config), "--layout.tp", "2"],
            cwd=config.parent, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        seconds.append(_seconds_of_children() - begun)
        assert done.returncode == 0, done.stderr
        assert "failure domains" in done.stdout.lower() and "its death breaks" in done.stdout
        assert not (config.parent / "run").exists()
    assert min(seconds) < 1.5, seconds


def test_explain_names_the_line(config: Path) -> None:
    done = everstep(["explain", "layout.replicas", "c.yaml"], config.parent)
    assert done.code == 0
    assert re.search(r"type +an integer >= 1\n.*unit +replicas\n.*default +1\n.*value +2 +\(c\.yaml:\d+\)", done.out), done.out
    assert "command line" in everstep(["explain", "seed", "c.yaml", "seed=3"], config.parent).out
    assert everstep(["explain", "ray"], config.parent).out.count("  default") == 2


def planned(**changes: Any) -> Config:
    return from_tree({**TREE, **changes})


def test_plan_shows_every_rank_where_it_is(tmp_path: Path) -> None:
    from rich.console import Console

    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({**TREE, "layout": {"replicas": 2, "tp": 2, "pp": 2, "dp": 2, "spares": 1}}))
    loaded = load(path)
    text = io.StringIO()
    print_plan(make_plan(loaded.config, {}), loaded, Console(file=text, width=120))
    rows = [
        tuple(int(cell) for cell in line.split("│")[1:7])
        for line in text.getvalue().splitlines()
        if line.startswith("│ ") and line.count("│") == 13 and "spare" not in line
    ]
    layout = Layout(replicas=2, spares=1, tp=2, pp=2, dp=2)
    expected = []
    for replica, rank in layout.ranks():
        at = layout.position(rank)
        expected.append((replica, rank, at.pp, at.dp, at.cp, at.tp))
    assert rows == expected


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tp", "pp", "vpp"), [(1, 1, 1), (2, 1, 1), (1, 3, 1), (2, 4, 2)])
def test_stages_hold_all_parameters(tied: bool, tp: int, pp: int, vpp: int) -> None:
    shape = ModelShape("LlamaForCausalLM", 8, 64, 128, 4, 2, 16, 100, tied)
    layout = Layout(tp=tp, pp=pp, vpp=vpp)
    held = sum(stage_parameters(shape, layout, layout.position(rank).pp) for rank in range(layout.ranks_per_replica))
    norms = (2 * shape.layers + 1) * shape.hidden  # on every tensor-parallel rank
    second_embedding = shape.vocab * shape.hidden if tied and pp > 1 else 0
    assert held == shape.parameters + (tp - 1) * norms + second_embedding


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=4, ep=2), Layout(tp=2, pp=2, dp=2, ep=2), Layout(cp=2, dp=2, ep=4)], ids=str)
def test_experts_are_shared_out(layout: Layout) -> None:
    shape = ModelShape("Qwen3MoeForCausalLM", 4, 64, 128, 4, 2, 16, 100, False, ExpertShape(8, 2, 32, (True, False, True, True)))
    held = sum(expert_parameters(shape, layout, layout.position(rank).pp) for rank in range(layout.ranks_per_replica))
    experts = 3 * 8 * 3 * 64 * 32
    assert held == experts * layout.dp * layout.cp // layout.ep  # each by its expert-data-parallel ranks
    whole = 4 * (2 * shape.hidden) + shape.hidden + 3 * 8 * shape.hidden  # norms and routers
    everything = sum(stage_parameters(shape, layout, layout.position(rank).pp) for rank in range(layout.ranks_per_replica))
    assert everything == held + layout.dp * layout.cp * (shape.parameters - experts + (layout.tp - 1) * whole)


@pytest.mark.parametrize(
    ("changes", "at_once", "sentence"),
    [
        ({}, 1, "1 of 2 replicas may be broken at once"),
        ({"recovery": {"min_replicas": 2}}, 0, "0 of 2 replicas may be broken at once"),
        ({"layout": {"replicas": 4}, "recovery": {"min_replicas": 2}}, 2, "2 of 4 replicas"),
        ({"layout": {}, "recovery": {"enabled": False}}, 0, "any death ends the run"),
        ({"layout": {}}, 0, "one replica has no peer"),
    ],
)
def test_deaths_survivable(changes: dict[str, Any], at_once: int, sentence: str) -> None:
    from everstep.plan.terminal import recovery_lines

    plan = make_plan(planned(**changes), {})
    assert plan.deaths_at_once == at_once
    assert sentence in recovery_lines(plan)[0]


@pytest.mark.parametrize(
    ("recovery", "sentence"),
    [
        ({}, "2 standby links a rank: one death at a time costs survivors no new link"),
        ({"standby_links_up_to": 2}, "no standby links: recovery.standby_links_up_to=2 and 3 replicas; survivors form a link"),
        ({"mode": "retry"}, "compute the whole step anew"),
    ],
)
def test_the_plan_says_what_survivors_will_do(recovery: dict[str, Any], sentence: str) -> None:
    from everstep.plan.terminal import recovery_lines

    lines = recovery_lines(make_plan(planned(layout={"replicas": 3}, recovery=recovery), {}))
    assert any(sentence in line for line in lines), lines


def test_memory_follows_what_it_depends_on() -> None:
    base = make_plan(planned(), {}).memory[0]
    shape = describe(planned().model)
    assert base.weights == base.gradients == base.recovery == 4 * shape.parameters
    assert base.optimizer == 2 * base.weights
    assert base.reference == 0 and base.rollout == 4 * shape.parameters

    half = make_plan(planned(model={**TREE["model"], "dtype": "bfloat16"}), {}).memory[0]
    assert half.weights == base.weights // 2 and half.gradients == base.gradients
    assert half.optimizer == 3 * half.gradients

    sharded = make_plan(planned(layout={"dp": 2}), {}).memory[0]
    assert sharded.optimizer == base.optimizer // 2 and sharded.recovery == base.recovery // 2
    whole = make_plan(planned(layout={"dp": 2}, engine={"distributed_optimizer": False}), {}).memory[0]
    assert whole.optimizer == base.optimizer

    two = {"replicas": 2}
    salvaging = make_plan(planned(layout=two), {})
    assert salvaging.memory[0].salvage == salvaging.memory[0].recovery == base.recovery
    assert make_plan(planned(layout=two, recovery={"mode": "retry"}), {}).memory[0].salvage == 0
    exact = make_plan(planned(layout=two, recovery={"exact": True}), {})
    slots, mine = exact.sizes.main.slots, max(exact.sizes.main.slots_per_replica)
    assert exact.memory[0].recovery == base.recovery * (1 + mine)
    assert exact.memory[0].salvage == base.recovery * (slots - mine)

    kept = make_plan(planned(rl={"kl_coef": 0.1}), {}).memory[0]
    away = make_plan(planned(rl={"kl_coef": 0.1}, engine={"offload": {"reference": True}}), {}).memory[0]
    assert kept.state == away.state and kept.total - away.total == away.reference > 0
    assert kept.reference == kept.weights and kept.state == base.state + kept.weights
    cheap = make_plan(planned(engine={"recompute": "full"}), {}).memory[0]
    assert cheap.activations < base.activations
    some = make_plan(planned(engine={"recompute": "selective"}), {}).memory[0]
    assert cheap.activations < some.activations < base.activations
    tensor = make_plan(planned(layout={"tp": 2}), {}).memory[0]
    sequence = make_plan(planned(layout={"tp": 2}, engine={"sequence_parallel": True}), {}).memory[0]
    assert sequence.activations * 2 == base.activations < tensor.activations * 2
    context = make_plan(planned(layout={"cp": 2}), {}).memory
    assert context[0] != context[1] and context[1].rollout == 0 < context[0].rollout
    assert context[0].optimizer == base.optimizer // 2 and context[0].logits == base.logits // 2
    assert base.activations < context[0].activations * 2 < base.activations * 1.5  # every rank gathers keys and values
    packed = make_plan(planned(train={"tokens_per_micro_batch": 4 * base_tokens()}), {}).memory[0]
    assert packed.activations == 4 * base.activations and packed.logits == 4 * base.logits
    chunked = make_plan(planned(lora={"rank": 2}, engine={"logprob_chunk_tokens": 1}), {}).memory[0]
    assert chunked.logits == base.logits // base_tokens()
    stages = make_plan(planned(layout={"pp": 2}), {}).memory
    assert stages[0].logits == 0 < stages[1].logits and stages[0].rollout == 0 < stages[1].rollout


def base_tokens() -> int:
    return derive.sizes(planned()).main.max_tokens


def test_the_plan_says_how_samples_are_packed() -> None:
    plan = make_plan(planned(train={"tokens_per_micro_batch": 3 * base_tokens()}), {})
    step = plan.sizes.main
    assert step.slots == -(-step.samples_per_step // 3) and step.samples_per_replica is None
    rows = dict(size_rows(plan))
    assert rows["samples per step"].startswith(f"{step.samples_per_step} packed into rows of at most {3 * base_tokens()} tokens: at most ")


def test_the_plan_says_which_layers_a_stage_holds() -> None:
    from dataclasses import replace

    from everstep.plan.terminal import stage_lines

    plan = make_plan(planned(layout={"pp": 2}), {})
    assert stage_lines(plan) == ["layers: pp 0: 0; pp 1: 1"]
    assert stage_lines(make_plan(planned(), {})) == []
    interleaved = replace(plan.sizes, layout=Layout(pp=2, vpp=2), main=replace(plan.sizes.main, slots_per_replica=(7, 6)))
    lines = stage_lines(replace(plan, shape=replace(plan.shape, layers=10), sizes=interleaved))
    assert lines[0] == "layers: pp 0: 0-1, 5-7; pp 1: 2-4, 8-9"
    assert "1 empty micro-batch a step" in lines[1]


def test_the_plan_says_which_keys_the_recipe_does_not_read() -> None:
    rows = lambda **changes: dict(size_rows(make_plan(planned(**changes), {})))
    assert rows(dpo={"beta": 0.2, "steps": 100}, critic={"warmup": 2})["not read by recipe=grpo"] == "dpo.beta, critic.warmup", "100 is the default"
    assert not [name for name in rows() if "not read" in name]


def test_sizes_of_the_plan_are_those_of_the_configuration() -> None:
    plan = make_plan(planned(), {})
    assert plan.sizes == derive.sizes(plan.config)
    assert plan.placement is not None and len(plan.placement.ranks) == 2 and len(plan.placement.spare_nodes) == 1
    assert make_plan(planned(ray={"address": "auto"}), {}).placement is None


# ---------------------------------------- generate


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one complete checkpoint, written by the checkpoint code, and a newer one that was cut off."""
    import torch
    from tests.support.checkpoints import entries_of
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from everstep.checkpoint.manifest import begin, publish

    run = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL), dtype=torch.float32)
    for step in (3, 5):
        partial = begin(run / "checkpoints", step)
        model.save_pretrained(partial / "hf")
        AutoTokenizer.from_pretrained(MODEL).save_pretrained(partial / "hf")
        final = publish(partial, step, {"tp": 1}, {}, entries_of(partial))
    weights = final / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    return run


def test_generate_takes_a_run_a_checkpoint_or_a_folder(trained: Path, tmp_path: Path) -> None:
    checkpoint = trained / "checkpoints" / "step-000003"
    places = [trained, checkpoint, checkpoint / "hf"]
    outputs = [everstep(["generate", str(place), "31>", "--max-tokens", "8"], tmp_path) for place in places]
    assert [done.code for done in outputs] == [0, 0, 0], outputs
    assert len({done.out for done in outputs}) == 1 and outputs[0].out.strip()

    warm = ["generate", str(checkpoint), "31>", "--max-tokens", "8", "--temperature", "1.5", "--seed"]
    first, again, other = (everstep([*warm, seed], tmp_path).out for seed in ("1", "1", "2"))
    assert first == again != other


def test_generate_is_what_transformers_makes_of_the_chat_template(trained: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained / "checkpoints" / "step-000003" / "hf"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.chat_template
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "31>"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    made = list(ids[0])
    with torch.no_grad():
        for _ in range(8):
            made.append(model(torch.tensor([made])).logits[0, -1].argmax())
            if int(made[-1]) == tokenizer.eos_token_id:
                break
    expected = tokenizer.decode(made[ids.shape[1] :], skip_special_tokens=True)
    done = everstep(["generate", str(folder), "31>", "--max-tokens", "8"], tmp_path)
    assert done.out.rstrip("\n") == expected.rstrip("\n")


def test_generate_from_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    refused(everstep(["generate", "run", "hi"], tmp_path), "the run run has no complete checkpoint")


def test_exit_codes_are_those_of_the_errors() -> None:
    """docs/cli.md promises them; schedulers rely on them."""
    from everstep import errors

    page = (ROOT / "docs" / "cli.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.M)}
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.EverstepError)]
    assert {c.exit_code for c in classes} | {0} == documented
    assert json.dumps(sorted(documented)) == "[0, 2, 3, 4, 130]"
