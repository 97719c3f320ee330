"""Configurations of other systems, translated: scripts and files as users have them, and what the tables promise."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep import cli
from everstep.config.importing import SYSTEMS, Translation, as_yaml, translate
from everstep.config.importing.shell import Unknown, commands
from everstep.config.keys import fields
from everstep.config.load import load, load_config
from everstep.config.writing import nested
from everstep.errors import BadInput, ConfigError
from everstep.plan import make_plan

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "grpo_qwen3_8b.yaml"
SHAPE = [f"model.path={ROOT}/benchmarks/shapes/qwen3-8b", *(f"data.{key}={ROOT}/examples/data/sums.parquet" for key in ("source", "eval_source"))]

# Every option and every turn of shell that siiRL's documentation of its Megatron backend has in run_qwen3-8b-megatron.sh.
SIIRL = r"""#!/usr/bin/env bash
export HYDRA_FULL_ERROR=1                   # for debugging
export DATASET=deepscaler ALG=grpo
export MODEL_NAME=qwen3-8b
export HOME=${HOME:-"/root"} # the home path
export TRAIN_DATA_PATH=$HOME/data/datasets/$DATASET/train.parquet TEST_DATA_PATH=$HOME/data/datasets/$DATASET/test.parquet
export MODEL_PATH=$HOME/data/models/Qwen3-8B
export TRAIN_BATCH_SIZE_PER_NODE=128
export PPO_MINI_BATCH_SIZE_PER_NODE=16
export ACTOR_REF_TP=2
export ACTOR_REF_PP=4 ACTOR_REF_CP=1 ACTOR_REF_SP=True
export N_GPUS_PER_NODE=${N_GPUS_PER_NODE:-8}
export NNODES=${PET_NNODES:-1}
timestamp=$(date +"%Y%m%d_%H%M%S")
export CKPT_PATH=$HOME/ckpts/${MODEL_NAME}_${ALG}_${DATASET}_megatron_${NNODES}nodes
export TENSORBOARD_DIR=$HOME/tensorboard/dlc_${NNODES}_$timestamp
export TRAIN_BATCH_SIZE=$(($TRAIN_BATCH_SIZE_PER_NODE * $NNODES))
export PPO_MINI_BATCH_SIZE=$(($PPO_MINI_BATCH_SIZE_PER_NODE * NNODES))

TRAINING_CMD=(
    python3 -m siirl.client.main_dag
    algorithm.adv_estimator=\$ALG
    data.train_files=\$TRAIN_DATA_PATH
    data.val_files=\$TEST_DATA_PATH
    data.train_batch_size=\$TRAIN_BATCH_SIZE
    data.max_prompt_length=1024
    data.max_response_length=2048
    actor_rollout_ref.model.path=\$MODEL_PATH
    actor_rollout_ref.model.enable_gradient_checkpointing=True

    # --- the Megatron backend ---
    actor_rollout_ref.actor.strategy=megatron
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=\$ACTOR_REF_TP
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=\$ACTOR_REF_PP
    actor_rollout_ref.actor.megatron.context_parallel_size=\$ACTOR_REF_CP
    actor_rollout_ref.actor.megatron.sequence_parallel=\$ACTOR_REF_SP
    actor_rollout_ref.actor.megatron.use_distributed_optimizer=True
    actor_rollout_ref.actor.megatron.param_dtype=bfloat16
    actor_rollout_ref.actor.megatron.param_offload=False
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=\$PPO_MINI_BATCH_SIZE
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    actor_rollout_ref.actor.grad_clip=1.0
    actor_rollout_ref.rollout.tensor_model_parallel_size=\$ACTOR_REF_TP
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.gpu_memory_utilization=0.45
    actor_rollout_ref.rollout.n=8
    trainer.logger=['console','tensorboard']
    trainer.project_name=siirl_${DATASET}_$ALG
    trainer.experiment_name=an_experiment
    trainer.n_gpus_per_node=\$N_GPUS_PER_NODE
    trainer.nnodes=\$NNODES
    trainer.save_freq=30
    trainer.test_freq=10
    trainer.total_epochs=30
    trainer.resume_mode=auto
    trainer.max_actor_ckpt_to_keep=5
    trainer.default_local_dir=\$CKPT_PATH
    trainer.val_before_train=True
)

main() {
    eval "${TRAINING_CMD[@]}" "$@"
}
main "$@"
"""


def write(folder: Path, text: str, name: str = "run.sh") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def plain(result: Translation) -> dict[str, Any]:
    return {key: value for key, (value, _) in result.keys.items()}


def test_the_script_of_siirl_comes_through_whole(tmp_path: Path) -> None:
    result = translate("siirl", [write(tmp_path, SIIRL)], records=40315, environ={"HOME": "~"})
    given = [line.strip().partition("=")[0] for line in SIIRL.splitlines() if line.startswith("    ") and "=" in line and "." in line.partition("=")[0]]
    assert len(given) == 36
    assert set(given) == set(result.mapped) | set(result.implied) | set(result.unsupported) and result.unknown == {} and result.missing == {}
    assert sorted(result.unsupported) == sorted(f"actor_rollout_ref.rollout.{n}" for n in ("name", "tensor_model_parallel_size", "gpu_memory_utilization"))
    keys = plain(result)
    wanted = {
        "recipe": "grpo", "rl.advantage": "grpo", "layout.tp": 2, "layout.pp": 4, "layout.cp": 1, "layout.replicas": 1, "model.dtype": "bfloat16",
        "engine.sequence_parallel": True, "engine.recompute": "full", "engine.offload.parameters": False, "engine.distributed_optimizer": True,
        "rl.prompts_per_step": 128, "rl.samples_per_prompt": 8, "rl.updates_per_pass": 8, "train.micro_batch_size": 8, "data.max_prompt_tokens": 1024,
        "rollout.max_response_tokens": 2048, "checkpoint.every_steps": 30 * 8, "checkpoint.keep_last": 5, "rl.eval_every": 10, "rl.eval_before": True,
        "rl.iterations": 30 * (40315 // 128), "resume": "auto", "optimizer.lr": 1e-6, "optimizer.clip_grad_norm": 1.0,
        "optimizer.beta2": 0.999, "optimizer.weight_decay": 0.01,  # their defaults, which are not ours
        "telemetry.tensorboard": True, "telemetry.wandb": False, "telemetry.project": "siirl_deepscaler_grpo",
        "run_dir": "~/ckpts/qwen3-8b_grpo_deepscaler_megatron_1nodes", "data.source": "~/data/datasets/deepscaler/train.parquet",
    }  # fmt: skip
    assert {key: keys[key] for key in wanted} == wanted


def test_the_example_is_that_script_translated_and_can_be_planned(tmp_path: Path) -> None:
    result = translate("siirl", [write(tmp_path, SIIRL), "trainer.default_local_dir=runs/grpo_qwen3_8b"], records=40315, environ={"HOME": "~"})
    assert yaml.safe_load(EXAMPLE.read_text()) == yaml.safe_load(as_yaml(result, "..."))
    plan = make_plan(load_config(EXAMPLE, SHAPE))
    assert (plan.sizes.layout.ranks_per_replica, plan.sizes.main.samples_per_step, plan.sizes.main.slots) == (8, 128, 16)
    assert 8.1e9 < plan.shape.parameters < 8.3e9
    head = EXAMPLE.read_text()
    assert all(f"#   {name}{why}\n" in head for name, why in result.unsupported.items()), "the head of the example must name what has no counterpart"


def test_what_only_running_the_script_would_tell_is_named(tmp_path: Path) -> None:
    script = """
    if [ -n "$BIG" ]; then
        MODEL=/big
    fi
    export BATCH=$(nproc)
    python3 -m siirl.main_dag actor_rollout_ref.model.path=$MODEL data.train_batch_size=$BATCH \\
        trainer.project_name=$NOWHERE 'custom_reward_function.path=rewards.py' actor_rollout_ref.rollout.nn=3 # trainer.nnodes=7
    """
    result = translate("siirl", [write(tmp_path, script), "data.train_files=a.parquet"], environ={"HOME": "/h"})
    assert "set inside an if" in result.unsupported["actor_rollout_ref.model.path"]
    assert "output of a command" in result.unsupported["data.train_batch_size"]
    assert "$NOWHERE is set neither" in result.unsupported["trainer.project_name"]
    assert list(result.unknown) == ["actor_rollout_ref.rollout.nn"]
    keys = plain(result)
    assert keys["reward.function"] == "rewards:compute_score" and keys["data.source"] == "a.parquet"
    assert "model.path" in result.missing and "trainer.nnodes" not in result.mapped
    assert "rl.iterations" not in keys and "--records" in result.unsupported["trainer.total_epochs"]
    # an override says it, and is believed
    again = translate("siirl", [str(tmp_path / "run.sh"), "actor_rollout_ref.model.path=/m"], environ={})
    assert plain(again)["model.path"] == "/m" and "actor_rollout_ref.model.path" not in again.unsupported


def test_shell() -> None:
    found, variables = commands(
        "A=2; B='x y'\nexport C=\"$A-${D:-$B}\" E=$((A * (3 + 4) - 1))\nF=( one \"two $A\" # no\n three)\nX=1 run --a $E \\\n  b=${C}c\n", {"D": ""}
    )
    assert variables["C"] == "2-x y" and variables["E"] == "13"
    assert [word for word, _ in found[0].words] == ["one", "two 2", "three"]
    assert [word for word, _ in found[1].words] == ["run", "--a", "13", "b=2-x yc"] and found[1].settings == {"X": "1"} and "X" not in variables
    loop, _ = commands("A=$A$B\nB=$A\nrun x=$B", {})
    assert isinstance(loop[0].words[1][0], Unknown)


TORCHTITAN = """
RUST_BACKTRACE=1 torchft_lighthouse --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000
NGPU=4 CUDA_VISIBLE_DEVICES=0,1,2,3 TRAIN_FILE=torchtitan.experiments.ft.train MODEL=llama3 CONFIG=llama3_8B ./run_train.sh --fault_tolerance.enable --fault_tolerance.replica_id=0 --fault_tolerance.group_size=2 --parallelism.data_parallel_shard_degree=4
NGPU=4 CUDA_VISIBLE_DEVICES=4,5,6,7 TRAIN_FILE=torchtitan.experiments.ft.train MODEL=llama3 CONFIG=llama3_8B ./run_train.sh --fault_tolerance.enable --fault_tolerance.replica_id=1 --fault_tolerance.group_size=2 --parallelism.data_parallel_shard_degree=4
"""


def test_the_commands_of_torchtitan(tmp_path: Path) -> None:
    result = translate("torchtitan", [write(tmp_path, TORCHTITAN), "--training.dataset_path", "c4.jsonl"], environ={})
    keys = plain(result)
    assert result.unknown == {} and set(result.missing) == {"model.path"} and set(result.unsupported) == {"$MODEL", "$CONFIG"}
    assert keys["layout.replicas"] == 2 and keys["layout.dp"] == 4 and keys["recovery.enabled"] is True
    assert keys["sft.samples_per_step"] == 8 * 4 * 2 and keys["optimizer.warmup_steps"] == 200 and keys["data.source"] == "c4.jsonl"
    assert keys["lighthouse.min_replicas"] == 1 and keys["lighthouse.join_timeout_ms"] == 10000
    assert {"torchft_lighthouse.quorum_tick_ms", "$NGPU", "$RUST_BACKTRACE", "fault_tolerance.replica_id"} <= set(result.implied) | set(result.mapped)
    assert load(None, ["model.path=x", *(f"{k}={v}" for k, v in keys.items())]).config.layout.dp == 4


def test_a_toml_file_with_semi_synchronous_training(tmp_path: Path) -> None:
    toml = """
    [training]
    local_batch_size = 2
    steps = 100
    [lr_scheduler]
    warmup_steps = 10
    decay_ratio = 0.25
    decay_type = "cosine"
    lr_min = 0.1
    [optimizer]
    lr = 3e-4
    [fault_tolerance]
    enable = true
    group_size = 4
    semi_sync_method = "diloco"
    sync_steps = 20
    num_fragments = 2
    fragment_sync_delay = 3
    """
    keys = plain(translate("torchtitan", [write(tmp_path, toml, "t.toml"), "--fault_tolerance.process_group=mccl"], environ={}))
    wanted = {
        "semisync.method": "streaming_diloco", "semisync.sync_every": 20, "semisync.fragments": 2, "semisync.fragment_sync_delay": 3, "layout.replicas": 4,
        "optimizer.schedule": "wsd", "optimizer.wsd_decay": "cosine", "optimizer.wsd_decay_steps": 25, "sft.samples_per_step": 8,
    }  # fmt: skip
    assert {key: keys[key] for key in wanted} == wanted and keys["optimizer.min_lr"] == pytest.approx(3e-5)


def test_python_files_are_read_not_run(tmp_path: Path) -> None:
    main = """
    import os
    os.remove(__file__)
    @dataclass
    class MegatronConfig:
        tensor_model_parallel_size: int = 2
        pipeline_model_parallel_size: int = 1
    @dataclass
    class Config:
        model: str = "Qwen/Qwen3-0.6B"
        num_nodes: int = 2
        num_gpus_per_node: int = 4
        num_spare_gpus: int = 3
        ckpt_dir: str = os.environ["STORAGE"] + "/ckpt"
        megatron_config: MegatronConfig = field(default_factory=MegatronConfig)
    """
    import textwrap

    result = translate("ray-example", [write(tmp_path, textwrap.dedent(main), "main.py"), "mini_batch_size=8"], environ={})
    keys = plain(result)
    assert (keys["layout.tp"], keys["layout.pp"], keys["layout.replicas"], keys["layout.spares"]) == (2, 1, 4, 3)
    assert keys["model.path"] == "hf:Qwen/Qwen3-0.6B" and keys["recipe"] == "ppo" and keys["rl.prompts_per_step"] == 8
    assert "it is computed, os.environ" in result.unsupported["ckpt_dir"] and set(result.missing) == {"data.source"}
    script = """
    SEED = 7
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=4, pp_size=None)
    twinkle.initialize(mode='ray', nproc_per_node=8, groups=make(), seed=SEED, global_device_mesh=mesh, megatron_config={'cp_size': 2})
    """
    result = translate("twinkle", [write(tmp_path, textwrap.dedent(script), "lora.py")], environ={})
    keys = plain(result)
    assert keys == {"launcher": "ray", "seed": 7, "layout.replicas": 2, "layout.tp": 4, "layout.pp": 1, "layout.cp": 2, "engine.deterministic": False}
    assert set(result.unsupported) == {"groups"} and "nproc_per_node" in result.implied


@pytest.mark.parametrize(
    ("system", "arguments", "error", "says"),
    [
        ("verl", ["a.b=c"], BadInput, "--from verl: known are siirl"),
        ("siirl", ["/no/such.sh"], BadInput, "/no/such.sh cannot be read"),
        ("siirl", [], BadInput, "no option of siiRL"),
        ("siirl", ["trainer.nnodes=x"], None, "trainer.nnodes='x' is no integer"),
        ("siirl", ["actor_rollout_ref.rollout.n=0"], ConfigError, r"rl.samples_per_prompt.*from actor_rollout_ref.rollout.n=0"),
        ("siirl", ["actor_rollout_ref.actor.optim.betas=3"], BadInput, "optim.betas=3 is no value"),
        ("siirl", ["algorithm.adv_estimator=cpgd"], None, "there is no estimator cpgd"),
        ("siirl", ["actor_rollout_ref.actor.ppo_mini_batch_size=100"], None, "100 does not divide data.train_batch_size=1024"),
        ("siirl", ["actor_rollout_ref.actor.megatron.seed=3", "trainer.seed=4", "trainer.logger=swanlab"], None, "no logger swanlab"),
        ("torchtitan", ["--fault_tolerance.sync_steps=3"], None, "without semi_sync_method it means nothing"),
        ("torchtitan", ["--parallelism.data_parallel_shard_degree=-1"], None, "give NGPU"),
        ("ray-example", ["num_nodes=3"], None, None),
        ("ray-example", ["num_gpus_per_node=3"], None, "6 GPUs are no multiple of the 4"),
    ],
)
def test_what_cannot_be_translated_says_so(system: str, arguments: list[str], error: Any, says: str | None) -> None:
    if error:
        with pytest.raises(error, match=says):
            translate(system, arguments, environ={})
        return
    reasons = list(translate(system, arguments, environ={}).unsupported.values())
    assert (not reasons) if says is None else any(says in reason for reason in reasons), reasons


def test_tables_speak_of_keys_that_exist() -> None:
    known = {key for key, _ in fields()} | {"data.columns"}
    for name, system in SYSTEMS.items():
        for option in system.OPTIONS.values():
            assert set(option.ours) <= known, (name, option.name)
            assert option.kind == "mapped" or option.how, f"{name}: {option.name} gives no reason"
        aliases = [alias for option in system.OPTIONS.values() for alias in (option.name, *option.aliases)]
        assert len(aliases) == len(set(aliases))


def test_their_defaults_are_configurations() -> None:
    """What a system would do with (nearly) no option: the values that are filled in are of the right type, and are loaded as they are written."""
    for name, option in (("siirl", "trainer.nnodes=1"), ("torchtitan", "training.steps=10"), ("ray-example", "num_nodes=2"), ("twinkle", "seed=1")):
        result = translate(name, [option], environ={})
        text = as_yaml(result, "x")
        tree = yaml.safe_load(text)
        assert tree == yaml.safe_load(yaml.safe_dump(nested(plain(result)))), text


def test_nothing_of_what_is_read_gets_out_of_its_comment(tmp_path: Path) -> None:
    odd = yaml.safe_dump({"trainer": {"project_name": "a\nlayout: {replicas: 9}\n#", "n": {"x\ny": "\0z"}, "logger": ["console\nseed: 7"]}})
    result = translate("siirl", [write(tmp_path, odd, "c.yaml")], environ={})
    tree = yaml.safe_load(as_yaml(result, "a\nrecipe: dpo"))
    assert tree == yaml.safe_load(yaml.safe_dump(nested(plain(result)))) and tree["telemetry"]["project"].startswith("a\n")
    assert tree["recipe"] == "ppo" and tree["layout"]["replicas"] == 8 and tree["seed"] == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.py", "x = " + "(" * 5000), ("a.sh", "A=$((" + "(" * 5000 + "1" + ")" * 5000 + "))\nsiirl trainer.nnodes=$A"), ("a.yaml", "\0"), ("a.toml", "a = "),
     ("a.sh", "siirl trainer.nnodes=$(("), ("a.yaml", "- 1\n- 2"), ("a.py", "x = 1"), ("a.sh", "echo hello")],
)  # fmt: skip
def test_files_that_make_no_sense_are_bad_input(tmp_path: Path, name: str, text: str) -> None:
    """Or a value that is not known; nothing else, and no traceback."""
    try:
        result = translate("siirl", [write(tmp_path, text, name)], environ={})
    except BadInput:
        return
    assert "trainer.nnodes" in result.unsupported


def test_the_command(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(["config", "import", "--from", "siirl", write(tmp_path, SIIRL), "--records", "1280", "trainer.nnodes=2"])
    assert code == 0 and "3 have no counterpart" in err.getvalue()
    written = tmp_path / "out.yaml"
    written.write_text(out.getvalue())
    config = load_config(written, SHAPE)
    assert config.layout.replicas == 2 and config.rl.iterations == 30 * 10
    with contextlib.redirect_stderr(err):
        assert cli.run(["config", "import", "--from", "siirl", "/no/such"]) == 2
        assert cli.run(["config", "import", "x=1"]) == 2
    assert "see everstep config import --help" in err.getvalue()
