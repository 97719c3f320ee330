"""torchtitan's options (``--fault_tolerance.*``, ``--parallelism.*``, ...), torchft's lighthouse and its environment variables.

Defaults as in torchtitan/config/job_config.py and experiments/ft at the commits that the seed of this table was written for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from everstep.config.importing.option import Given, Option, Untranslatable, implied, mapped, same, table, unsupported

TITLE = "torchtitan with torchft"
ABOUT = (
    "Reads a launch script or command (`--a.b c`, `--a.b=c`, flags, `NAME=value` before it), a TOML file, or overrides. Each replica "
    "group is started by a command of its own there; here one configuration describes all of them."
)
COMMANDS = ("run_train.sh", "torchtitan", "torchft_lighthouse")
#: Options of a command that have no section of their own get this one.
PREFIXES = {"torchft_lighthouse": "torchft_lighthouse."}
#: Variables that mean something to a training command, and the name of the option that they are.
ENVIRONMENT = {
    name: f"${name}"
    for name in (
        "NGPU", "CUDA_VISIBLE_DEVICES", "TRAIN_FILE", "MODEL", "CONFIG", "CONFIG_FILE", "TORCHFT_LIGHTHOUSE", "TORCHFT_MANAGER_PORT",
        "REPLICA_GROUP_ID", "RUST_LOGS", "RUST_BACKTRACE",
    )
}  # fmt: skip


def finish(found: dict[str, Any], given: Given) -> None:
    found["recipe"] = "sft"
    found.setdefault("data.format", "text")
    found.setdefault("model.init", "random")


def _fault_tolerant(given: Given) -> bool:
    return bool(given.get("fault_tolerance.enable"))


def _replicas(value: Any, given: Given) -> Mapping[str, Any]:
    groups = given.get("fault_tolerance.group_size") or 1 if _fault_tolerant(given) else 1
    replicate = given.integer("parallelism.data_parallel_replicate_degree")
    if _fault_tolerant(given):
        return {"layout.replicas": groups} if replicate == 1 else {"layout.replicas": groups * replicate}
    return {"layout.replicas": replicate}


def _ngpu(given: Given) -> int | None:
    return int(given.get("$NGPU")) if given.get("$NGPU") else None


def _shards(value: Any, given: Given) -> Mapping[str, Any]:
    degree = given.integer("parallelism.data_parallel_shard_degree")
    if degree > 0:
        return {"layout.dp": degree}
    others = math.prod(given.integer(f"parallelism.{name}_parallel_degree") for name in ("tensor", "pipeline", "context"))
    others *= given.integer("parallelism.data_parallel_replicate_degree")
    if _ngpu(given) is None:
        if "parallelism.data_parallel_shard_degree" in given:
            raise Untranslatable("-1 takes the GPUs that are left; set layout.dp, or give NGPU")
        return {}
    if _ngpu(given) % others:  # type: ignore[operator]
        raise Untranslatable(f"NGPU={_ngpu(given)} is no multiple of {others}")
    return {"layout.dp": _ngpu(given) // others}  # type: ignore[operator]


def _batch(value: Any, given: Given) -> Mapping[str, Any]:
    total = given.integer("training.global_batch_size")
    if total <= 0:
        dp = _shards(None, given).get("layout.dp", 1)
        total = given.integer("training.local_batch_size") * dp * _replicas(None, given)["layout.replicas"]
    return {"sft.samples_per_step": total}


def _micro(value: Any, given: Given) -> Mapping[str, Any]:
    if given.integer("parallelism.pipeline_parallel_degree") > 1:
        return {"train.micro_batch_size": given.integer("parallelism.pipeline_parallel_microbatch_size")}
    return {"train.micro_batch_size": given.integer("training.local_batch_size")}


def _method(value: Any, given: Given) -> Mapping[str, Any]:
    if value in (None, ""):
        return {}
    if value not in ("local_sgd", "diloco"):
        raise Untranslatable("semisync.method has local_sgd, diloco and streaming_diloco")
    streaming = value == "diloco" and (
        given.integer("fault_tolerance.num_fragments") > 1
        or given.integer("fault_tolerance.fragment_sync_delay") > 0
        or bool(given.get("fault_tolerance.fragment_update_alpha"))
        or bool(given.get("fault_tolerance.module_fqns_per_model_fragment"))
    )
    return {"semisync.method": "streaming_diloco" if streaming else value, "semisync.sync_every": given.integer("fault_tolerance.sync_steps")}


def _semisync(key: str) -> Any:
    """Only where a method is chosen: torchtitan ignores these otherwise."""

    def to(value: Any, given: Given) -> Mapping[str, Any]:
        if not given.get("fault_tolerance.semi_sync_method"):
            raise Untranslatable("without semi_sync_method it means nothing")
        return {key: value}

    return to


def _modules(value: Any, given: Given) -> Mapping[str, Any]:
    if not value:
        return {}
    names = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    return {"semisync.fragments": [[names.get(module, "model." + module) for module in fragment] for fragment in value]}


def _decay(value: Any, given: Given) -> Mapping[str, Any]:
    steps, warmup = given.integer("training.steps"), given.integer("lr_scheduler.warmup_steps")
    ratio, kind = given.get("lr_scheduler.decay_ratio"), given.get("lr_scheduler.decay_type")
    if kind not in ("linear", "cosine", "sqrt"):
        raise Untranslatable(f"there is no decay {kind}")
    if ratio is not None:
        return {"optimizer.schedule": "wsd", "optimizer.wsd_decay": kind, "optimizer.wsd_decay_steps": max(1, round(steps * ratio))}
    if kind == "sqrt":
        return {"optimizer.schedule": "wsd", "optimizer.wsd_decay": kind, "optimizer.wsd_decay_steps": max(1, steps - warmup)}
    return {"optimizer.schedule": kind}


def _min_lr(value: Any, given: Given) -> Mapping[str, Any]:
    return {"optimizer.min_lr": given.get("optimizer.lr") * value}


def _checkpoint(value: Any, given: Given) -> Mapping[str, Any]:
    if not given.get("checkpoint.enable"):
        return {"checkpoint.at_end": False}
    return {"checkpoint.every_steps": given.integer("checkpoint.interval"), "resume": "auto"}


def _recompute(value: Any, given: Given) -> Mapping[str, Any]:
    if value not in ("none", "selective", "full"):
        raise Untranslatable("engine.recompute is none, selective or full")
    return {"engine.recompute": value}


def _dataset(value: Any, given: Given) -> Mapping[str, Any]:
    raise Untranslatable(f"the data set {value!r} is streamed from a hub; save it as parquet or jsonl with a field `text`, and set data.source")


def _source(value: Any, given: Given) -> Mapping[str, Any]:
    return {"data.source": value} if value else {}


def _flavor(value: Any, given: Given) -> Mapping[str, Any]:
    raise Untranslatable("a model's shape is that of its config.json: set model.path to a folder with one, or to hf:ORG/NAME")


def _seed(value: Any, given: Given) -> Mapping[str, Any]:
    return {"seed": value} if value is not None else {}


_LOCAL = "launcher=local: "
OPTIONS: dict[str, Option] = table(
    mapped("fault_tolerance.enable", "recovery.enabled", "", lambda v, g: {"recovery.enabled": bool(v)}, default=False),
    mapped("fault_tolerance.group_size", "layout.replicas", "it counts replica groups", _replicas, default=0, fill=False),
    implied("fault_tolerance.replica_id", "one configuration describes all replicas; with launcher=local a replica that is started by a command of its "
            "own is told its number (REPLICA_GROUP_ID)"),
    same("fault_tolerance.min_replica_size", "recovery.min_replicas"),
    implied("fault_tolerance.process_group", "links are NCCL on GPUs, gloo on CPUs", only=("gloo", "nccl"), otherwise="links are NCCL on GPUs, gloo on CPUs"),
    implied("fault_tolerance.process_group_timeout_ms", "a link is left when its view changes, not when an operation is late: recovery.silence_s, "
            "recovery.progress_timeout_s and recovery.step_timeout_s are the deadlines"),
    mapped("fault_tolerance.semi_sync_method", "semisync.method", "diloco with fragments or a delay is streaming_diloco", _method, default=None, fill=False),
    mapped("fault_tolerance.sync_steps", "semisync.sync_every", "with semi_sync_method", _semisync("semisync.sync_every"), default=5, fill=False),
    mapped("fault_tolerance.should_quantize", "semisync.should_quantize", "with semi_sync_method", _semisync("semisync.should_quantize")),
    mapped("fault_tolerance.fragment_sync_delay", "semisync.fragment_sync_delay", "with semi_sync_method", _semisync("semisync.fragment_sync_delay"), default=0,
           fill=False),
    mapped("fault_tolerance.fragment_update_alpha", "semisync.fragment_update_alpha", "with semi_sync_method", _semisync("semisync.fragment_update_alpha"),
           default=0.0, fill=False),
    mapped("fault_tolerance.num_fragments", "semisync.fragments", "with semi_sync_method", _semisync("semisync.fragments"), default=1, fill=False),
    mapped("fault_tolerance.module_fqns_per_model_fragment", "semisync.fragments", "names of modules become those of transformers", _modules, default=None,
           fill=False),
    mapped("parallelism.data_parallel_replicate_degree", "layout.replicas", "every copy of the model is a replica, which may fail", _replicas, default=1,
           aliases=("parallelism.data_parallel_replica_degree", "data_parallel_replica_degree")),
    mapped("parallelism.data_parallel_shard_degree", "layout.dp", "optimizer state is sharded over these ranks (engine.distributed_optimizer), parameters are not; "
           "-1: NGPU over the others", _shards, default=-1, aliases=("data_parallel_shard_degree",)),
    same("parallelism.tensor_parallel_degree", "layout.tp", default=1),
    same("parallelism.pipeline_parallel_degree", "layout.pp", default=1),
    same("parallelism.context_parallel_degree", "layout.cp", default=1),
    same("parallelism.expert_parallel_degree", "layout.ep"),
    mapped("parallelism.pipeline_parallel_microbatch_size", "train.micro_batch_size", "with a pipeline", _micro, default=1, fill=False),
    implied("parallelism.pipeline_parallel_schedule", "1F1B, with layout.vpp interleaved", only=("1F1B",), otherwise="the schedules are 1F1B and, with layout.vpp, "
            "Interleaved1F1B: set layout.vpp"),
    unsupported("parallelism.pipeline_parallel_split_points", "layout.layers_per_stage counts layers"),
    unsupported("parallelism.pipeline_parallel_layers_per_stage", "layout.layers_per_stage is a list, one number for each stage"),
    implied("parallelism.fsdp_reshard_after_forward", "parameters are not sharded"),
    implied("parallelism.disable_loss_parallel", "the loss is computed over the sharded vocabulary", only=(False,), otherwise="the loss is always parallel"),
    implied("parallelism.context_parallel_rotate_method", "keys and values are gathered", only=("allgather",), otherwise="keys and values are gathered"),
    same("training.steps", "sft.steps", default=10000),
    same("training.seq_len", "data.max_tokens", "a sample is one record, not cut out of a stream; train.tokens_per_micro_batch packs several into a row",
         default=2048),
    mapped("training.local_batch_size", "train.micro_batch_size", "", _micro, default=8, aliases=("training.batch_size",)),
    mapped("training.global_batch_size", "sft.samples_per_step", "over all replicas; -1: local_batch_size times the data-parallel ranks", _batch, default=-1),
    same("training.max_norm", "optimizer.clip_grad_norm"),
    mapped("training.dataset", "data.source", "a file with a field `text`; a name has no counterpart", _dataset),
    mapped("training.dataset_path", "data.source", "", _source),
    same("training.mixed_precision_param", "model.dtype", "with float32 masters", default="bfloat16"),
    implied("training.mixed_precision_reduce", "gradients are reduced in float32"),
    mapped("training.seed", "seed", "", _seed, aliases=("debug.seed",)),
    same("training.deterministic", "engine.deterministic", default=False, aliases=("debug.deterministic",)),
    implied("training.compile", "engine.fused_kernels takes the place of compilation", aliases=("compile.enable",)),
    unsupported("training.enable_cpu_offload", "engine.offload.* makes room for rollouts; optimizer state is sharded over layout.dp"),
    implied("training.gc_freq", "Python collects as it likes"),
    implied("optimizer.name", "AdamW", only=("AdamW",), otherwise="the optimizer is AdamW"),
    same("optimizer.lr", "optimizer.lr", default=8e-4),
    same("optimizer.beta1", "optimizer.beta1"),
    same("optimizer.beta2", "optimizer.beta2"),
    same("optimizer.eps", "optimizer.eps"),
    same("optimizer.weight_decay", "optimizer.weight_decay", default=0.1),
    implied("optimizer.implementation", "engine.fused_kernels"),
    unsupported("optimizer.early_step_in_backward", "a step is applied only after its commit"),
    same("lr_scheduler.warmup_steps", "optimizer.warmup_steps", default=200),
    mapped("lr_scheduler.decay_ratio", ("optimizer.schedule", "optimizer.wsd_decay_steps"), "null: decay begins after the warm-up; else schedule wsd", _decay,
           default=None),
    mapped("lr_scheduler.decay_type", ("optimizer.schedule", "optimizer.wsd_decay"), "", _decay, default="linear", fill=False),
    mapped("lr_scheduler.lr_min", "optimizer.min_lr", "a ratio there, a rate here", _min_lr, aliases=("lr_scheduler.min_lr_factor",)),
    mapped("checkpoint.enable", ("checkpoint.every_steps", "resume"), "false: none, not even at the end", _checkpoint, default=False,
           aliases=("checkpoint.enable_checkpoint",)),
    mapped("checkpoint.interval", "checkpoint.every_steps", "", _checkpoint, default=500, fill=False),
    implied("checkpoint.folder", "checkpoints are in run_dir/checkpoints; checkpoint.path puts them elsewhere"),
    mapped("checkpoint.keep_latest_k", "checkpoint.keep_last", "0 keeps all: a large number",
           lambda v, g: {"checkpoint.keep_last": v or 1_000_000}),
    mapped("checkpoint.async_mode", "checkpoint.asynchronous", "disabled is false", lambda v, g: {"checkpoint.asynchronous": v != "disabled"}, default="disabled"),
    mapped("checkpoint.load_step", "resume", "-1 is auto", lambda v, g: {"resume": "auto" if v < 0 else str(v)}),
    unsupported("checkpoint.initial_load_path", "model.path takes weights in Hugging Face's format; resume=PATH a checkpoint of everstep"),
    implied("checkpoint.enable_ft_dataloader_checkpoints", "the position in the data is in the commit record of every step"),
    mapped("activation_checkpoint.mode", "engine.recompute", "", _recompute),
    unsupported("activation_checkpoint.selective_ac_option", "engine.recompute=selective recomputes feed-forward layers"),
    mapped("model.name", "model.path", "a folder with config.json, or hf:ORG/NAME", _flavor),
    mapped("model.flavor", "model.path", "as model.name", _flavor),
    same("model.tokenizer_path", "model.tokenizer", aliases=("model.hf_assets_path",)),
    unsupported("model.converters", "bfloat16 and float32 are what model.dtype has"),
    same("job.dump_folder", "run_dir"),
    unsupported("job.config_file", "translate that file, too, and give the options of the command after it", aliases=("$CONFIG_FILE",)),
    implied("job.description", "a comment in the file"),
    implied("job.print_args", "RUN/configs/resolved.yaml has every value"),
    same("metrics.enable_tensorboard", "telemetry.tensorboard", default=False),
    same("metrics.enable_wandb", "telemetry.wandb"),
    implied("metrics.log_freq", "every step is logged"),
    implied("metrics.save_tb_folder", "RUN/tensorboard"),
    implied("metrics.disable_color_printing", "telemetry.progress"),
    unsupported("profiling.enable_profiling", "there is no profiler; timing_s/* and everstep status say where the time goes"),
    implied("comm.init_timeout_seconds", "ray.start_timeout_s, recovery.reform_timeout_s"),
    implied("comm.train_timeout_seconds", "recovery.step_timeout_s"),
    mapped("$NGPU", "layout.dp", "the ranks of one replica: layout.tp*cp*pp*dp", lambda v, g: _shards(None, g), default=None, fill=False),
    implied("$CUDA_VISIBLE_DEVICES", "ranks get devices of their own"),
    implied("$TRAIN_FILE", "the command is everstep train"),
    mapped("$MODEL", "model.path", "a folder with config.json, or hf:ORG/NAME", _flavor),
    mapped("$CONFIG", "model.path", "as MODEL", _flavor),
    implied("$TORCHFT_LIGHTHOUSE", _LOCAL + "the same variable says where everstep lighthouse listens"),
    implied("$TORCHFT_MANAGER_PORT", _LOCAL + "the same variable says where a replica's torchft manager listens (it tells torchft's lighthouse that the replica lives)"),
    implied("$REPLICA_GROUP_ID", _LOCAL + "the same variable says which replica a command starts"),
    implied("$RUST_LOGS", "of torchft, launcher=local: the same; of everstep: log.level, or EVERSTEP_LOG", aliases=("$RUST_LOG",)),
    implied("$RUST_BACKTRACE", "of torchft, launcher=local: the same; of everstep: --debug shows tracebacks"),
    same("torchft_lighthouse.min_replicas", "lighthouse.min_replicas", _LOCAL + "for everstep up and everstep lighthouse --min-replicas: how many begin the run. How many it needs to go on: recovery.min_replicas"),
    same("torchft_lighthouse.quorum_tick_ms", "lighthouse.quorum_tick_ms", _LOCAL + "for everstep up, and everstep lighthouse --quorum-tick-ms"),
    same("torchft_lighthouse.join_timeout_ms", "lighthouse.join_timeout_ms", _LOCAL + "for everstep up, and everstep lighthouse --join-timeout-ms; it counts at the start only, nobody waits for who comes later"),
    same("torchft_lighthouse.heartbeat_timeout_ms", "lighthouse.heartbeat_timeout_ms", _LOCAL + "for everstep up, and everstep lighthouse --heartbeat-timeout-ms"),
    implied("torchft_lighthouse.bind", _LOCAL + "everstep lighthouse --bind and --port"),
)  # fmt: skip
