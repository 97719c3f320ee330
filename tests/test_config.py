"""Files and overrides to one tree and back; every mistake names its key; impossible combinations are refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from everstep.config import derive
from everstep.config.check import check_model, check_plan
from everstep.config.explain import explain, unit
from everstep.config.keys import fields
from everstep.config.load import COMMAND_LINE, DEFAULT, dump, from_tree, load, load_config, parse_overrides, save
from everstep.config.schema import Config
from everstep.engine.shape import ModelShape
from everstep.errors import BadInput, ConfigError
from everstep.layout import Layout

MODEL = str(Path(__file__).parent.parent / "examples" / "models" / "tiny-qwen3")
MOE = MODEL + "-moe"
RL: dict[str, Any] = {
    "recipe": "grpo",
    "launcher": "ray",
    "device": "cpu",
    "model": {"path": MODEL, "init": "random"},
    "data": {"source": "everstep.data.digits:sort_prompts", "format": "prompt"},
    "reward": {"function": "position_match"},
}
SFT: dict[str, Any] = {**RL, "recipe": "sft", "data": {"source": "everstep.data.arithmetic:texts", "format": "text"}}


def with_(tree: dict[str, Any], **changes: Any) -> Config:
    """``tree`` with dotted keys (``__`` for the dot) changed."""
    merged = OmegaConf.create(tree)
    for key, value in changes.items():
        OmegaConf.update(merged, key.replace("__", "."), value, force_add=True)
    return from_tree(OmegaConf.to_container(merged))  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(
        "recipe: grpo\n"
        "model:\n"
        f"  path: {MODEL}\n"
        "data: {source: 'a.b:c', source_args: {size: 3}}\n"
        "layout:\n"
        "optimizer:\n"
        "  lr: 1e-5\n"
        "  min_lr: ${optimizer.lr}\n"
        "faults:\n"
        "  - {step: 3}\n"
        "  - step: 4\n"
        "    kind: stop\n"
        "resume: 120\n"
    )
    return path


# ---------------------------------------- files and overrides


def test_values_come_from_file_overrides_and_defaults(file: Path) -> None:
    loaded = load(file, ["optimizer.lr=2e-5", "--layout.replicas", "3", "--faults.1.step=9", "env.NCCL_DEBUG=INFO"])
    config, origin = loaded.config, loaded.origins.of
    assert config.optimizer.lr == config.optimizer.min_lr == 2e-5  # interpolation sees the override
    assert (config.layout.replicas, config.layout.tp) == (3, 1)
    assert [(fault.step, fault.kind) for fault in config.faults] == [(3, "kill"), (9, "stop")]
    assert config.resume == "120"
    assert config.env == {"NCCL_DEBUG": "INFO"}
    assert origin("optimizer.lr") == origin("layout.replicas") == origin("env.NCCL_DEBUG") == COMMAND_LINE
    assert origin("model.path") == f"{file}:3"
    assert origin("data.source_args") == f"{file}:4"
    assert (origin("faults.1.kind"), origin("faults.1.step")) == (f"{file}:12", COMMAND_LINE)
    assert origin("layout.tp") == origin("rl.clip_low") == DEFAULT
    whole = load(file, ["layout={replicas: 2}"]).origins.of
    assert (whole("layout.replicas"), whole("layout.tp")) == (COMMAND_LINE, DEFAULT)


@pytest.mark.parametrize("spelling", [["rl.passes=2"], ["--rl.passes=2"], ["--rl.passes", "2"], ["rl.passes=1", "rl.passes=2"]])
def test_spellings_of_an_override_mean_the_same(file: Path, spelling: list[str]) -> None:
    assert load_config(file, spelling).rl.passes == 2


def test_text_stays_what_was_typed(file: Path) -> None:
    config = load_config(file, ["resume=007", "env.A=1e3", "env.B=true", "env.C=", "env.D=x=y", "model.tokenizer=null"])
    assert config.resume == "007"
    assert config.env == {"A": "1e3", "B": "true", "C": "", "D": "x=y"}
    assert config.model.tokenizer is None


def test_a_list_or_mapping_given_whole_replaces_the_old_one(file: Path) -> None:
    loaded = load(file, ["faults=[]", "data.source_args={seed: 1}"])
    assert loaded.config.faults == [] and loaded.config.data.source_args == {"seed": 1}
    assert loaded.origins.of("data.source_args") == loaded.origins.of("faults") == COMMAND_LINE


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("sampels_per_step=3", "unknown key sampels_per_step .*did you mean sft.samples_per_step"),
        ("rl.promts_per_step=3", r"unknown key rl.promts_per_step \(command line\); did you mean rl.prompts_per_step\?"),
        ("optimzer.lr=3", "unknown key optimzer.lr .*did you mean optimizer.lr"),
        ("lr=3", "unknown key lr .*did you mean optimizer.lr or warmup.lr"),
        ("sft.steps.x=2", r"unknown key sft.steps.x .*did you mean sft.steps\?"),
        ("faults.0.stp=2", r"unknown key faults.0.stp .*did you mean faults.0.step\?"),
        ("faults=[{step: 1, knd: kill}]", r"unknown key faults.0.knd .*did you mean faults.0.kind\?"),
        ("qqqq=2", "unknown key qqqq .*the top level has recipe, run_dir"),
        ("sft.steps=abc", r"sft.steps is 'abc' \(command line\): expected an integer >= 1$"),
        ("seed=true", "seed is True .*expected an integer >= 0$"),
        ("layout=3", "layout is 3 .*expected a section with the keys replicas"),
        ("recipe=pop", "recipe is 'pop' .*expected one of sft, grpo, ppo, dpo$"),
        ("layout.tp=2.5", "layout.tp is 2.5 .*expected an integer >= 1"),
        ("optimizer.beta1=1", "optimizer.beta1 is 1 .*expected a number >= 0 and < 1"),
        ("optimizer.lr=.inf", "optimizer.lr is inf .*expected a number > 0"),
        ("rl.dual_clip=0.5", "rl.dual_clip is 0.5 .*expected a number > 1 or null"),
        ("telemetry.tensorboard=3", "telemetry.tensorboard is 3 .*expected true or false"),
        ("env=[1]", r"env is \[1\] .*expected a mapping of names to text"),
        ("faults=[3]", r"faults.0 is 3 .*expected a list of \{step, "),
        ("faults.9.step=3", "faults.9.step=3 .*cannot be set"),
        ("model.path=${nope}", "model.path: Interpolation key 'nope' not found"),
        ("model.path=[1", r"model.path=\[1 .*cannot be set"),
        ("=3", "sets nothing; overrides are written KEY=VALUE"),
        ("--seed", "sets nothing; overrides are written --seed VALUE"),
    ],
)
def test_a_wrong_override_is_one_sentence_with_its_key(file: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load(file, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {path: x", r"c.yaml:\d+ is not valid YAML"),
        ("seed: 1\nseed: 2", r"c.yaml:2 is not valid YAML: found duplicate key seed"),
        ("- a", "c.yaml holds a list"),
        ("recipe: sft\nmodel: {path: x}", r"data is not set in .*c.yaml and has no default"),
        ("recipe: sft\nmodel: {path: x}\ndata: {}", r"data.source is not set .*: Training data"),
        ("recipe: sft\nmodel:\n  path: x\n  inti: random", r"unknown key model.inti \(.*c.yaml:4\); did you mean model.init\?"),
        ("recipe: sft\nmodel: {path: x}\ndata: {source: y}\nsft:\n\n  steps: -1", r"sft.steps is -1 \(.*c.yaml:6\): expected"),
        ("\x00", "c.yaml"),
    ],
)
def test_a_wrong_file_is_one_sentence_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_names_the_nearest(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no configuration file .*cc\.yaml; did you mean .*c\.yaml\?"):
        load(file.with_name("cc.yaml"))


texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=["Cs"]), max_size=12)
plain = st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), texts)
free = st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), st.recursive(plain, st.lists, max_leaves=4), max_size=4)


@settings(max_examples=60, deadline=None)
@given(free, st.dictionaries(st.from_regex(r"[A-Z_]{1,6}", fullmatch=True), texts, max_size=4), st.floats(1e-12, 1e3), texts)
def test_resolved_yaml_loads_back_equal(args: dict[str, Any], env: dict[str, str], lr: float, run_dir: str) -> None:
    config = from_tree({**RL, "env": env, "run_dir": run_dir, "optimizer": {"lr": lr}, "faults": [{"step": 2}]})
    config = config.model_copy(update={"data": config.data.model_copy(update={"source_args": args})})
    text = dump(config)
    assert from_tree(OmegaConf.to_container(OmegaConf.create(text), resolve=True)) == config  # type: ignore[arg-type]


def test_resolved_yaml_is_a_configuration_file(file: Path, tmp_path: Path) -> None:
    config = load_config(file, ["env.A=${x}".replace("$", "\\$"), "layout.replicas=2"])
    assert config.env["A"] == "${x}"
    assert load_config(save(config, tmp_path / "configs" / "resolved.yaml")) == config


def test_an_override_needs_a_value() -> None:
    assert parse_overrides(["--a.b", "c", "d=e=f", "--g=h i"]) == [("a.b", "c"), ("d", "e=f"), ("g", "h i")]


# ---------------------------------------- what follows


@given(
    samples=st.integers(1, 400), micro=st.integers(1, 8), dp=st.integers(1, 4), replicas=st.integers(1, 6)
)
@settings(deadline=None)
def test_slots_cover_the_step_or_it_is_refused(samples: int, micro: int, dp: int, replicas: int) -> None:
    tree = {
        **SFT,
        "sft": {"samples_per_step": samples},
        "train": {"micro_batch_size": micro},
        "layout": {"dp": dp, "replicas": replicas},
    }
    config = from_tree(tree)
    possible = samples % (micro * dp) == 0 and samples // (micro * dp) >= replicas
    if not possible:
        with pytest.raises(ConfigError, match=f"sft.samples_per_step={samples} .*train.micro_batch_size"):
            derive.sizes(config)
        return
    step = derive.sizes(config).main
    assert sum(step.samples_per_replica) == samples
    assert max(step.slots_per_replica) - min(step.slots_per_replica) <= 1
    assert list(step.slots_per_replica) == sorted(step.slots_per_replica, reverse=True)


def test_rl_arithmetic() -> None:
    config = with_(
        RL, rl__prompts_per_step=12, rl__samples_per_prompt=4, rl__passes=2, rl__updates_per_pass=3, rl__iterations=5,
        layout__replicas=3, train__micro_batch_size=2, warmup__steps=7, warmup__samples_per_step=14, warmup__source="a:b",
    )  # fmt: skip
    sizes = derive.sizes(config)
    assert sizes.rl and sizes.warmup
    assert (sizes.rl.samples_per_iteration, sizes.rl.updates_per_iteration) == (48, 6)
    assert (sizes.main.samples_per_step, sizes.main.slots, sizes.main.samples_per_replica) == (16, 8, (6, 6, 4))
    assert sizes.warmup.samples_per_replica == (6, 4, 4)
    assert sizes.total_steps == 7 + 5 * 6
    assert sizes.main.max_tokens_per_step == 16 * (512 + 256)


# ---------------------------------------- impossible combinations


@pytest.mark.parametrize("tree", [RL, SFT])
def test_the_trees_of_these_tests_are_possible(tree: dict[str, Any]) -> None:
    check_plan(from_tree(tree), {})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layout__tp": 3}, r"layout.tp=3 does not divide the 4 attention heads .*layout.tp can be 1 or 2"),
        ({"layout__tp": 4}, r"layout.tp=4 does not divide the 2 key-value heads .*layout.tp can be 1 or 2"),
        ({"layout__pp": 3}, r"layout.pp\*layout.vpp=3\*1=3 stages are more than the 2 layers .*lower layout.pp"),
        ({"layout__vpp": 2}, r"layout.vpp=2 .*but layout.pp=1; raise layout.pp, or set layout.vpp=1"),
        ({"layout__pp": 2, "layout__vpp": 2}, r"layout.pp\*layout.vpp=2\*2=4 stages are more than the 2 layers"),
        ({"layout__pp": 2, "layout__layers_per_stage": [2]}, r"layout.layers_per_stage=\[2\] must be 2 numbers"),
        ({"layout__pp": 2, "layout__layers_per_stage": [2, 0]}, r"layout.layers_per_stage=\[2, 0\] .*at least 1"),
        ({"layout__pp": 2, "layout__layers_per_stage": [2, 1]}, r"layout.layers_per_stage=\[2, 1\] makes 3 layers, the model has 2"),
        ({"engine__sequence_parallel": True}, r"engine.sequence_parallel=true .*layout.tp=1; raise layout.tp"),
        ({"engine__offload__reference": True}, r"engine.offload.reference=true, but with rl.kl_coef=0"),
        (
            {"engine__offload__reference": True, "rl__kl_coef": 0.1, "lora__rank": 4},
            r"engine.offload.reference=true, but with lora.rank=4 .* shares the frozen weights",
        ),
        ({"recipe": "sft", "engine__offload__optimizer": True}, r"engine.offload.optimizer=true .* recipe=sft has neither"),
        ({"optimizer__wsd_decay_steps": 5}, r"optimizer.wsd_decay_steps=5 belongs to optimizer.schedule=wsd"),
        (
            {"optimizer__schedule": "wsd", "optimizer__wsd_decay_steps": 90, "optimizer__warmup_steps": 11},
            r"optimizer.warmup_steps=11 and optimizer.wsd_decay_steps=90 do not fit into the 100 steps",
        ),
        ({"rl__prompts_per_step": 3, "train__micro_batch_size": 5}, r"samples_per_prompt=24 .*multiple of .*=5 \(say 25\)"),
        (
            {"train__micro_batch_size": 2, "train__tokens_per_micro_batch": 1024},
            "train.micro_batch_size=2 and train.tokens_per_micro_batch=1024 exclude each other",
        ),
        ({"train__tokens_per_micro_batch": 700}, r"=700 is too small for a sample of 768 .*max_prompt_tokens\+rollout.max_response_tokens"),
        (
            {"train__tokens_per_micro_batch": 4096, "rl__prompts_per_step": 2, "rl__samples_per_prompt": 2, "layout__dp": 5},
            r"=4 is too few for layout.dp\*layout.replicas=5\*1: .*raise it to 5",
        ),
        (
            {"train__tokens_per_micro_batch": 1 << 40, "layout__replicas": 2},
            r"tokens_per_micro_batch=\d+ packs .* into 1 slot at most, too few for layout.replicas=2: lower it",
        ),
        ({"rl__updates_per_pass": 3}, r"rl.updates_per_pass=3 does not divide rl.prompts_per_step\*rl.samples_per_prompt"),
        (
            {"rl__prompts_per_step": 2, "rl__samples_per_prompt": 2, "layout__replicas": 5},
            "gives 4 slots of 1 samples .*too few for layout.replicas=5: raise it to 5",
        ),
        ({"warmup__steps": 1, "warmup__source": "a:b", "train__micro_batch_size": 128}, "warmup.samples_per_step=32"),
        ({"warmup__steps": 1}, "warmup.steps=1 needs data: set warmup.source"),
        ({"rl__samples_per_prompt": 1}, "rl.samples_per_prompt=1: .*at least 2"),
        ({"rl__eval_every": 1}, "rl.eval_every=1 needs held-out data: set data.eval_source"),
        ({"data__format": "chat"}, "set data.format=prompt"),
        ({"launcher": "local", "layout__replicas": 2}, "launcher=local runs one replica, but layout.replicas=2; say which one this is with replica.id"),
        (
            {"layout__replicas": 2, "layout__spares": 1, "recovery__enabled": False},
            "layout.spares=1 wait for deaths that recovery.enabled=false",
        ),
        ({"layout__spares": 1}, "layout.spares=1 with layout.replicas=1: a spare heals from"),
        ({"recovery__mode": "wait"}, "recovery.mode=wait waits for a spare"),
        ({"recovery__exact": True, "engine__deterministic": False}, "recovery.exact=true promises equal bits"),
        ({"recovery__min_replicas": 2}, "recovery.min_replicas=2 is more than layout.replicas=1"),
        ({"recovery__silence_s": 1}, "recovery.silence_s=1.0 is not longer than recovery.heartbeat_s=1.0"),
        ({"layout__replicas": 2, "recovery__step_timeout_s": 60}, "recovery.step_timeout_s=60.0 must be longer than recovery.heal_timeout_s=300.0"),
        ({"faults": [{"step": 1}, {"step": 1, "replica": 1}]}, "faults.1.replica=1 does not exist"),
        ({"faults": [{"step": 1, "rank": 1}]}, "faults.0.rank=1 does not exist; a replica has 1"),
        ({"faults": [{"step": 101}]}, "faults.0.step=101 never comes; the run has 100 steps"),
        ({"env": {"MASTER_ADDR": "x"}}, "env.MASTER_ADDR is set by"),
        ({"env": {"EVERSTEP_EPOCH": "1"}}, "env.EVERSTEP_EPOCH is set by"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "env.CUDA_VISIBLE_DEVICES is set by"),
        ({"optimizer__min_lr": 1.0}, "optimizer.min_lr=1.0 is greater than optimizer.lr"),
        ({"optimizer__schedule": "cosine", "optimizer__warmup_steps": 100}, "warmup_steps=100 leaves no step to decay in"),
        ({"model__path": "/no/such/model"}, "model.path=/no/such/model is not a directory"),
        ({"data__source": "/no/such.parquet"}, "data.source=/no/such.parquet does not exist"),
        ({"data__eval_source": MODEL + "/config.json"}, "data.eval_source=.* is not a parquet file"),
        ({"data__source": "no_such_module:f"}, "data.source=no_such_module:f"),
        ({"reward__function": "no_such_module:f"}, "reward.function=no_such_module:f"),
        ({"reward__function": "everstep.errors:f"}, "reward.function=everstep.errors:f"),
    ],
)  # fmt: skip
def test_an_impossible_combination_names_the_keys_to_change(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says) as caught:
        check_plan(with_(RL, **changes), {})
    assert "\n" not in str(caught.value)


def test_sections_of_the_other_recipe_do_no_harm() -> None:
    check_plan(with_(SFT, rl__samples_per_prompt=1, warmup__steps=3, rl__updates_per_pass=7, data__format="text"), {})


def test_more_ranks_than_devices_is_refused_on_cuda_only() -> None:
    present = derive.cuda_devices({})
    changes = {"layout__replicas": present + 1, "layout__spares": 1}
    with pytest.raises(ConfigError, match=rf"needs {present + 2} devices .*this machine has {present}: .*ray.address"):
        check_plan(with_(RL, **{**changes, "device": "cuda", "layout__replicas": present + 1 + (present == 0)}) if present else
                   with_(RL, device="cuda", layout__replicas=2, layout__spares=0), {})  # fmt: skip
    check_plan(with_(RL, **{**changes, "layout__replicas": present + 2}), {})
    check_plan(with_(RL, **{**changes, "layout__replicas": present + 2, "device": "cuda", "ray__address": "auto"}), {})


def test_torchrun_must_start_one_replica() -> None:
    inside = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}
    auto = {"launcher": "auto"}
    check_plan(with_(RL, **auto, layout__dp=2), inside)
    with pytest.raises(ConfigError, match=r"torchrun started 2 processes.*--nproc_per_node 1"):
        check_plan(with_(RL, **auto), inside)
    with pytest.raises(ConfigError, match=r"launcher=auto under torchrun .* one replica, but layout.replicas=2"):
        check_plan(with_(RL, **auto, layout__replicas=2), inside)
    check_plan(with_(RL, **auto, layout__replicas=2), {})


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = with_(RL, launcher="local", local__port=port)
        with pytest.raises(BadInput, match=rf"local.port={port} .*(in use|cannot be used).*choose another"):
            check_plan(config, {})
    check_plan(config, {})


@pytest.mark.filterwarnings("ignore")  # Megatron-Core on what is not installed
def test_the_engine_and_the_plan_refuse_the_same_layouts() -> None:
    from everstep.engine.model import check_layout, read_architecture
    from everstep.engine.source import describe, resolve

    model = from_tree(RL).model
    shape, architecture = describe(model), read_architecture(resolve(model).hf_config)

    def refused(call: Any) -> bool:
        try:
            call()
        except BadInput:
            return True
        return False

    for tp in range(1, 6):
        for pp, vpp in ((1, 1), (2, 1), (2, 2), (3, 1)):
            layout = Layout(tp=tp, pp=pp, vpp=vpp)
            assert refused(lambda at=layout: check_model(shape, at, "m")) == refused(
                lambda at=layout: check_layout(architecture, at)
            ), layout


@pytest.mark.filterwarnings("ignore")  # Megatron-Core on what is not installed
def test_the_engine_and_the_plan_refuse_the_same_layouts_of_experts() -> None:
    from everstep.engine.model import check_layout, read_architecture
    from everstep.engine.source import describe, resolve

    model = with_(SFT, model__path=MOE).model
    shape, architecture = describe(model), read_architecture(resolve(model).hf_config)
    for ep in (1, 2, 4, 16):
        layout = Layout(dp=16, ep=ep)
        for check, known in ((check_model, (shape, layout, "m")), (check_layout, (architecture, layout))):
            if ep == 16:
                with pytest.raises(BadInput, match=r"layout.ep=16 does not divide"):
                    check(*known)
            else:
                check(*known)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model__path": MODEL, "layout__dp": 2, "layout__ep": 2}, r"layout.ep=2 shares out experts, but model.path=.* has none; set layout.ep=1"),
        ({"layout__ep": 2}, r"layout.ep=2 does not divide layout.dp\*layout.cp=1"),
        ({"layout__dp": 3, "layout__ep": 3, "sft__samples_per_step": 24}, r"layout.ep=3 does not divide the 8 experts .* layout.ep can be 1$"),
        ({"layout__tp": 2}, r"layout.tp=2 with experts: .*set engine.sequence_parallel=true"),
        ({"lora__rank": 2}, r"gate_proj, up_proj, down_proj match only matrices of experts.*lora.targets=\[qkv,proj\]"),
        ({"model__path": MODEL, "moe__aux_loss_coef": 0.1}, r"moe.aux_loss_coef=0.1 balances experts, but model.path=.* has none"),
    ],
)  # fmt: skip
def test_what_experts_do_not_go_with(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_plan(with_(SFT, **{"model__path": MOE, "train__micro_batch_size": 1, **changes}), {})


def test_what_experts_go_with() -> None:
    sizes = check_plan(with_(SFT, model__path=MOE, layout__dp=2, layout__ep=2, lora__rank=2, lora__targets=["qkv", "proj"]), {})
    assert (sizes.layout.ep, sizes.layout.ranks_per_replica) == (2, 2)
    check_plan(with_(SFT, model__path=MOE, layout__tp=2, engine__sequence_parallel=True, moe__aux_loss_coef=0.0), {})


def test_an_unknown_architecture_is_refused() -> None:
    shape = ModelShape("GPT2LMHeadModel", 2, 8, 8, 2, 2, 4, 10, True)
    with pytest.raises(ConfigError, match=r"model.path=m is a GPT2LMHeadModel; this version trains LlamaForCausalLM"):
        check_model(shape, Layout(), "m")


# ---------------------------------------- explain


def test_every_key_is_described_and_every_number_has_a_unit() -> None:
    everything = [found for section in (*Config.model_fields,) for found in explain(section)]
    assert {"faults[].delay_s", "optimizer.lr", "recipe"} <= {found.key for found in everything}
    for found in everything:
        assert found.meaning, found.key
    for key, info in fields():
        unit(key, info)  # LookupError names the key


def test_explain_tells_value_and_origin(file: Path) -> None:
    loaded = load(file, ["rl.passes=2"])
    (lr,) = explain("optimizer.lr", loaded)
    assert (lr.kind, lr.default, lr.value, lr.origin) == ("a number > 0", "1e-06", "1e-05", f"{file}:7")
    (passes,) = explain("rl.passes", loaded)
    assert (passes.value, passes.origin) == ("2", COMMAND_LINE)
    (silence,) = explain("recovery.silence_s", loaded)
    assert (silence.unit, silence.value, silence.origin) == ("seconds", "30.0", DEFAULT)
    (kind,) = explain("faults.1.kind", loaded)
    assert (kind.value, kind.origin) == ("stop", f"{file}:12")
    with pytest.raises(ConfigError, match=r"unknown key optimizer.rl .*did you mean optimizer.lr"):
        explain("optimizer.rl")
    with pytest.raises(ConfigError, match=r"faults.5.kind: there are only 2 entries"):
        explain("faults.5.kind", loaded)


def test_planning_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from everstep.config.load import load\nfrom everstep.plan import make_plan\nfrom everstep.config.explain import explain\n"
        "make_plan(load(sys.argv[1]).config); explain('optimizer.lr')\n"
        "print([name for name in ('torch', 'ray', 'megatron', 'transformers') if name in sys.modules])"
    )
    example = Path(__file__).parent.parent / "examples" / "grpo_sort.yaml"
    done = subprocess.run(
        [sys.executable, "-c", program, str(example)],
        cwd=example.parent.parent, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr


def test_a_path_may_begin_at_home_where_a_shell_does_not_expand_it(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/me")
    config = from_tree({**RL, "run_dir": "~/runs/a", "checkpoint": {"path": "~/kept"}, "recovery": {"preemption_file": "~/leave"}})
    assert (config.run_dir, config.checkpoint.path, config.recovery.preemption_file) == ("/home/of/me/runs/a", "/home/of/me/kept", "/home/of/me/leave")
    assert from_tree({**RL, "checkpoint": {"path": "s3://bucket/~/kept"}}).checkpoint.path == "s3://bucket/~/kept"
