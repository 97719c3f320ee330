"""The Megatron + Ray example with hot spares (``Config`` and ``MegatronConfig`` of its main.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.config.importing.option import Given, Option, Untranslatable, implied, mapped, same, table, unsupported

TITLE = "the Megatron + Ray fault tolerance example"
ABOUT = (
    "Reads its main.py (the defaults of class `Config`; nothing is run), or overrides such as `num_spare_gpus=4`. It trains on batches made "
    "up on the spot with advantages already in them; here an iteration generates, scores and estimates, so data and a reward are to be given."
)
COMMANDS = ("main.py",)
PREFIXES: dict[str, str] = {}
ENVIRONMENT: dict[str, str] = {}
_MEGATRON, _OPTIMIZER = "megatron_config", "megatron_config.optimizer_config"


def finish(found: dict[str, Any], given: Given) -> None:
    found |= {"recipe": "ppo", "rl.advantage": "gae", "data.format": "prompt", "rl.samples_per_prompt": 1, "model.dtype": "bfloat16"}


def _replicas(value: Any, given: Given) -> Mapping[str, Any]:
    size = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        size *= given.integer(f"{_MEGATRON}.{name}")
    devices = given.integer("num_nodes") * given.integer("num_gpus_per_node")
    if devices % size:
        raise Untranslatable(f"{devices} GPUs are no multiple of the {size} that hold one copy of the model")
    return {"layout.replicas": devices // size}


def _model(value: Any, given: Given) -> Mapping[str, Any]:
    return {"model.path": value if value.startswith(("/", ".", "~", "hf:")) else f"hf:{value}"}


def _recompute(value: Any, given: Given) -> Mapping[str, Any]:
    return {"engine.recompute": value or "none"}


def _scheduler(value: Any, given: Given) -> Mapping[str, Any]:
    known = {"constant_with_warmup": "constant", "constant": "constant", "linear": "linear", "cosine": "cosine"}
    if value not in known:
        raise Untranslatable("optimizer.schedule is constant, linear, cosine or wsd")
    return {"optimizer.schedule": known[value]}


OPTIONS: dict[str, Option] = table(
    mapped("model", "model.path", "hf:ORG/NAME", _model, default="Qwen/Qwen3-0.6B"),
    mapped("num_nodes", "layout.replicas", "nodes times GPUs over tp*pp*cp: each copy of the model is a replica, which may fail", _replicas, default=2),
    mapped("num_gpus_per_node", "layout.replicas", "as num_nodes", _replicas, default=4),
    same("num_spare_gpus", "layout.spares", "warm processes, which take any rank's place", default=4),
    same("mini_batch_size", "rl.prompts_per_step", "samples of an optimizer step; rl.updates_per_pass makes several of an iteration", default=16),
    same("micro_train_batch_size_per_gpu", "train.micro_batch_size", default=2),
    same(f"{_MEGATRON}.tensor_model_parallel_size", "layout.tp", default=2),
    same(f"{_MEGATRON}.pipeline_model_parallel_size", "layout.pp", default=2),
    same(f"{_MEGATRON}.context_parallel_size", "layout.cp", default=1),
    same(f"{_MEGATRON}.expert_model_parallel_size", "layout.ep"),
    implied(f"{_MEGATRON}.expert_tensor_parallel_size", "experts are cut over layout.tp", only=(None,), otherwise="experts are cut over layout.tp"),
    implied(f"{_MEGATRON}.ddp_config.grad_reduce_in_fp32", "gradients are reduced in float32", only=(True,), otherwise="gradients are reduced in float32"),
    implied(f"{_MEGATRON}.ddp_config.overlap_grad_reduce", "the step transaction reduces after the exchange of ledgers", only=(False,),
            otherwise="the step transaction reduces after the exchange of ledgers"),
    implied(f"{_MEGATRON}.ddp_config.overlap_param_gather", "parameters are gathered when a step is applied", only=(False,),
            otherwise="parameters are gathered when a step is applied"),
    implied(f"{_MEGATRON}.ddp_config.average_in_collective", "gradients are summed, and divided once by what was really contributed"),
    same(f"{_OPTIMIZER}.lr", "optimizer.lr"),
    same(f"{_OPTIMIZER}.weight_decay", "optimizer.weight_decay", default=0.01),
    same(f"{_OPTIMIZER}.max_grad_norm", "optimizer.clip_grad_norm"),
    same(f"{_OPTIMIZER}.offload_after_step", "engine.offload.optimizer", "from the rollout to the next step", default=True),
    same(f"{_OPTIMIZER}.num_warmup_steps", "optimizer.warmup_steps"),
    mapped(f"{_OPTIMIZER}.scheduler", "optimizer.schedule", "constant_with_warmup is constant", _scheduler),
    mapped(f"{_MEGATRON}.transformer_config.recompute_granularity", "engine.recompute", "null is none", _recompute),
    implied(f"{_MEGATRON}.transformer_config.recompute_modules", "engine.recompute=selective chooses"),
    implied(f"{_MEGATRON}.transformer_config.recompute_method", "engine.recompute=full recomputes every layer", only=(None, "uniform"),
            otherwise="engine.recompute=full recomputes every layer"),
    implied(f"{_MEGATRON}.transformer_config.recompute_num_layers", "engine.recompute=full recomputes every layer", only=(None, 1),
            otherwise="engine.recompute=full recomputes every layer"),
    same("ckpt_dir", "checkpoint.path", "a folder, s3:// or gs://"),
    implied("local_ckpt_dir", "checkpoints are read from where they lie"),
    same("eps_clip_low", "rl.clip_low"),
    same("eps_clip_high", "rl.clip_high"),
    same("clip_ratio_c", "rl.dual_clip"),
    unsupported("mode", "baseline, the restart from a checkpoint, is a rival of python -m benchmarks.recovery"),
)  # fmt: skip
