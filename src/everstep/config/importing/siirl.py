"""siiRL's options (``actor_rollout_ref.*``, ``trainer.*``, ...), whose names are verl's; defaults as in siirl/params at af00a77."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.config.importing.option import Given, Option, Untranslatable, implied, mapped, same, table, unsupported

TITLE = "siiRL"
ABOUT = (
    "Reads a launch script (its `key=value` words; variables are followed, nothing is run), a YAML file, or overrides. Most names are "
    "verl's, so a verl script of the Megatron backend is read as well. Batch sizes there count prompts, here the names say what they count."
)
#: What makes a command of a script the one that trains.
COMMANDS = ("siirl", "verl")
PREFIXES: dict[str, str] = {}
ENVIRONMENT: dict[str, str] = {}

_ACTOR, _MEGATRON = "actor_rollout_ref.actor", "actor_rollout_ref.actor.megatron"
_ROLLOUT, _OPTIM = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.optim"
_ENGINE = "generation is done by the training ranks, or by rollout.engines, each with the whole model on one device"


def finish(found: dict[str, Any], given: Given) -> None:
    """What no single option says."""
    found.setdefault("recipe", "grpo")
    found.setdefault("data.format", "prompt")
    if not any(key.startswith("reward.") for key in found):
        found["reward.function"] = "math_verify"


def _ppo(given: Given) -> bool:
    return bool(given.get("algorithm.adv_estimator") == "gae")


def _estimator(value: Any, given: Given) -> Mapping[str, Any]:
    if value == "gae":
        return {"recipe": "ppo", "rl.advantage": "gae"}
    known = {
        "grpo": "grpo" if given.get("algorithm.norm_adv_by_std_in_grpo") else "dr_grpo", "rloo": "rloo",
        "reinforce_plus_plus": "reinforce_plus_plus", "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    }  # fmt: skip
    if value not in known:
        raise Untranslatable(f"there is no estimator {value}; rl.advantage has others")
    return {"recipe": "grpo", "rl.advantage": known[value]}


def _replicas(value: Any, given: Given) -> Mapping[str, Any]:
    parallel = ("tensor", "pipeline", "context")
    size = 1
    for name in parallel:
        size *= given.integer(f"{_MEGATRON}.{name}_{'parallel' if name == 'context' else 'model_parallel'}_size")
    devices = given.integer("trainer.nnodes") * given.integer("trainer.n_gpus_per_node")
    if devices % size:
        raise Untranslatable(f"{devices} GPUs are no multiple of the {size} that hold one copy of the model")
    return {"layout.replicas": devices // size}


def _updates(value: Any, given: Given) -> Mapping[str, Any]:
    mini, batch = given.integer(f"{_ACTOR}.ppo_mini_batch_size"), given.integer("data.train_batch_size")
    if batch % mini:
        raise Untranslatable(f"{mini} does not divide data.train_batch_size={batch}")
    return {"rl.updates_per_pass": batch // mini}


def _updates_per_iteration(given: Given) -> int:
    updates = int(_updates(None, given)["rl.updates_per_pass"])
    passes = given.integer(f"{_ACTOR}.ppo_epochs")
    return updates * (passes + ((given.get("critic.ppo_epochs") or passes) if _ppo(given) else 0))


def _iterations(value: Any, given: Given) -> Mapping[str, Any]:
    if steps := given.get("trainer.total_training_steps"):
        return {"rl.iterations": steps}
    if given.records is None:
        raise Untranslatable(
            "rl.iterations counts iterations, not passes: passes * (records // prompts per iteration); the training data is not here to be "
            "counted, say how many records it has with --records"
        )
    each = given.records // given.integer("data.train_batch_size")
    if not each:
        raise Untranslatable(f"{given.records} records are fewer than data.train_batch_size")
    return {"rl.iterations": given.integer("trainer.total_epochs") * each}


def _save(value: Any, given: Given) -> Mapping[str, Any]:
    return {"checkpoint.every_steps": value * _updates_per_iteration(given) if value > 0 else 0}


def _resume(value: Any, given: Given) -> Mapping[str, Any]:
    known = {"auto": "auto", "disable": "never"}
    if value == "resume_path":
        return {"resume": given.get("trainer.resume_from_path")}
    if value not in known:
        raise Untranslatable("resume is auto, never, must, a checkpoint or a step")
    return {"resume": known[value]}


_LOGGERS = {"tensorboard": "telemetry.tensorboard", "wandb": "telemetry.wandb", "mlflow": "telemetry.mlflow"}


def _logger(value: Any, given: Given) -> Mapping[str, Any]:
    wanted = [value] if isinstance(value, str) else list(value or [])
    if strange := [name for name in wanted if name not in (*_LOGGERS, "console")]:
        raise Untranslatable(f"there is no logger {', '.join(strange)}; telemetry has tensorboard, wandb and mlflow")
    return {key: name in wanted for name, key in _LOGGERS.items()}


def _source(key: str) -> Any:
    def to(value: Any, given: Given) -> Mapping[str, Any]:
        files = value.split(",") if isinstance(value, str) else list(value)
        if len(files) != 1:
            raise Untranslatable(f"{key} takes one address, in which * stands for several files; put {len(files)} files into one folder")
        return {key: str(files[0]).strip()}

    return to


def _kl(value: Any, given: Given) -> Mapping[str, Any]:
    """The KL term: in the loss, in the reward, or none."""
    in_loss, in_reward = given.get(f"{_ACTOR}.use_kl_loss"), given.get("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        raise Untranslatable("KL in the loss and in the reward at a time: rl.kl_in is one of them")
    if not in_loss and not in_reward:
        return {"rl.kl_coef": 0.0}
    kinds = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    kind = given.get(f"{_ACTOR}.kl_loss_type" if in_loss else "algorithm.kl_penalty")
    if kind not in kinds:
        raise Untranslatable(f"there is no KL estimator {kind}")
    coefficient = given.get(f"{_ACTOR}.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef")
    if coefficient == 0:
        return {"rl.kl_coef": 0.0}
    found: dict[str, Any] = {"rl.kl_coef": coefficient, "rl.kl_in": "loss" if in_loss else "reward", "rl.kl_kind": kinds[kind]}
    if in_reward and given.get("algorithm.kl_ctrl.type") == "adaptive":
        found |= {"rl.kl_target": given.get("algorithm.kl_ctrl.target_kl"), "rl.kl_horizon_samples": given.get("algorithm.kl_ctrl.horizon")}
    return found


def _dtype(value: Any, given: Given) -> Mapping[str, Any]:
    if value not in ("bfloat16", "float32"):
        raise Untranslatable("model.dtype is bfloat16 or float32")
    return {"model.dtype": value}


def _schedule(key: str) -> Any:
    def to(value: Any, given: Given) -> Mapping[str, Any]:
        if value not in ("constant", "cosine", "linear"):
            raise Untranslatable(f"{key}.schedule has constant, linear, cosine and wsd")
        return {f"{key}.schedule": value}

    return to


def _warmup(key: str) -> Any:
    def to(value: Any, given: Given) -> Mapping[str, Any]:
        return {key: max(0, value)}

    return to


def _betas(key: str) -> Any:
    def to(value: Any, given: Given) -> Mapping[str, Any]:
        return {f"{key}.beta1": value[0], f"{key}.beta2": value[1]}

    return to


def _clip(value: Any, given: Given) -> Mapping[str, Any]:
    both = given.get(f"{_ACTOR}.clip_ratio")
    low, high = (given.get(f"{_ACTOR}.clip_ratio_{side}") if f"{_ACTOR}.clip_ratio_{side}" in given else both for side in ("low", "high"))
    return {"rl.clip_low": low, "rl.clip_high": high}


def _micro(value: Any, given: Given) -> Mapping[str, Any]:
    if given.get(f"{_ACTOR}.use_dynamic_bsz"):
        return {"train.tokens_per_micro_batch": given.integer(f"{_ACTOR}.ppo_max_token_len_per_gpu")}
    return {"train.micro_batch_size": given.integer(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")}


def _reward(value: Any, given: Given) -> Mapping[str, Any]:
    path, name = given.get("custom_reward_function.path"), given.get("custom_reward_function.name")
    if not path:
        return {}
    module = str(path).removesuffix(".py").strip("./").replace("/", ".")
    return {"reward.function": f"{module}:{name}", "reward.args": given.get("custom_reward_function.reward_kwargs") or {}}


def _targets(value: Any, given: Given) -> Mapping[str, Any]:
    return {"lora.targets": ["qkv", "proj", "fc1", "fc2"] if value == "all-linear" else [value] if isinstance(value, str) else list(value)}


def _overlong(value: Any, given: Given) -> Mapping[str, Any]:
    known = {"error": "error", "left": "truncate_left", "right": "truncate_right"}
    if given.get("data.filter_overlong_prompts"):
        return {"data.too_long": "drop"}
    if value not in known:
        raise Untranslatable("data.too_long is error, drop, truncate_left or truncate_right")
    return {"data.too_long": known[value]}


def _discount(key: str, *estimators: str) -> Any:
    return lambda value, given: {key: value} if given.get("algorithm.adv_estimator") in estimators else {}


def _seed(value: Any, given: Given) -> Mapping[str, Any]:
    return {"seed": value}


def _rollout_size(value: Any, given: Given) -> Mapping[str, Any]:
    if value != 1:
        raise Untranslatable("set rollout.tp, with rollout.engine=vllm and rollout.engines on devices of their own; ranks that generate have the whole model on one")
    return {}


OPTIONS: dict[str, Option] = table(
    mapped("algorithm.adv_estimator", ("recipe", "rl.advantage"), "gae: recipe ppo, with a critic; grpo, rloo, reinforce_plus_plus(_baseline): "
           "recipe grpo; cpgd and gae_marft have no counterpart", _estimator, default="gae"),
    mapped("algorithm.norm_adv_by_std_in_grpo", "rl.advantage", "false: dr_grpo", lambda v, g: _estimator(g.get("algorithm.adv_estimator"), g),
           default=True, fill=False),
    mapped("algorithm.gamma", "rl.gamma", "with gae and reinforce_plus_plus; nothing else discounts", _discount("rl.gamma", "gae", "reinforce_plus_plus")),
    mapped("algorithm.lam", "rl.lam", "with gae", _discount("rl.lam", "gae")),
    mapped("algorithm.use_kl_in_reward", ("rl.kl_coef", "rl.kl_in"), "with algorithm.kl_ctrl.*", _kl, default=False),
    mapped("algorithm.kl_penalty", "rl.kl_kind", "kl is k1, mse k2, low_var_kl k3", _kl, default="kl", fill=False),
    mapped("algorithm.kl_ctrl.type", "rl.kl_target", "adaptive sets a target, fixed none", _kl, default="fixed", fill=False),
    mapped("algorithm.kl_ctrl.kl_coef", "rl.kl_coef", "if KL is in the reward", _kl, default=0.001, fill=False),
    mapped("algorithm.kl_ctrl.target_kl", "rl.kl_target", "if adaptive", _kl, default=0.1, fill=False),
    mapped("algorithm.kl_ctrl.horizon", "rl.kl_horizon_samples", "if adaptive", _kl, default=10000, fill=False),
    implied("algorithm.workflow_type", "the recipe says what the iteration is; dapo: rl.dynamic_sampling_rounds and rl.clip_high", only=("default", "DEFAULT"),
            otherwise="set rl.dynamic_sampling_rounds (DAPO), or pipeline=module:function for a workflow of your own"),
    mapped("data.train_files", "data.source", "one file; * stands for several", _source("data.source")),
    mapped("data.val_files", "data.eval_source", "one file; * stands for several", _source("data.eval_source")),
    mapped("data.prompt_key", "data.columns", "{prompt: NAME}", lambda v, g: {} if v == "prompt" else {"data.columns": {"prompt": v}}),
    same("data.train_batch_size", "rl.prompts_per_step", "prompts of one iteration", default=1024),
    same("data.max_prompt_length", "data.max_prompt_tokens", default=512),
    same("data.max_response_length", "rollout.max_response_tokens", default=512),
    same("data.shuffle", "data.shuffle"),
    mapped("data.truncation", "data.too_long", "left is truncate_left, right truncate_right; middle has no counterpart", _overlong),
    mapped("data.filter_overlong_prompts", "data.too_long", "true: drop", lambda v, g: {"data.too_long": "drop"} if v else {}, default=False, fill=False,
           aliases=("data.filter_overlong_prompt",)),
    same("data.tokenizer", "model.tokenizer"),
    implied("data.num_loader_workers", "all data is read and tokenized before training starts"),
    implied("data.reward_fn_key", "records are handed to the reward function whole"),
    implied("data.return_raw_chat", "records are handed to the reward function whole"),
    implied("data.val_batch_size", "evaluation is one call; rollout.samples_per_batch sequences at a time"),
    same("actor_rollout_ref.model.path", "model.path"),
    mapped("actor_rollout_ref.model.enable_gradient_checkpointing", "engine.recompute", "true: full; selective recomputes less",
           lambda v, g: {"engine.recompute": "full" if v else "none"}, default=True),
    same("actor_rollout_ref.model.lora_rank", "lora.rank"),
    same("actor_rollout_ref.model.lora_alpha", "lora.alpha"),
    mapped("actor_rollout_ref.model.target_modules", "lora.targets", "all-linear is every matrix", _targets),
    implied("actor_rollout_ref.model.use_remove_padding", "samples are packed without padding with train.tokens_per_micro_batch"),
    implied("actor_rollout_ref.model.use_fused_kernels", "engine.fused_kernels=auto takes what the device has"),
    unsupported("actor_rollout_ref.model.trust_remote_code", "no code of a model's repository is ever run"),
    unsupported("actor_rollout_ref.model.external_lib", "no code of a model's repository is ever run"),
    unsupported("actor_rollout_ref.model.override_config", "the shape of the model is that of its config.json; edit a copy of it"),
    implied("actor_rollout_ref.hybrid_engine", "training and generation share the ranks, unless rollout.engines is set", only=(True,),
            otherwise="set rollout.engines for engines on devices of their own"),
    implied(f"{_ACTOR}.strategy", "the engine is Megatron-Core", only=("megatron",), otherwise="the engine is Megatron-Core; there is no FSDP: translate a "
            "Megatron configuration, or choose layout.tp and layout.pp yourself"),
    same(f"{_MEGATRON}.tensor_model_parallel_size", "layout.tp", default=1),
    same(f"{_MEGATRON}.pipeline_model_parallel_size", "layout.pp", default=1),
    same(f"{_MEGATRON}.context_parallel_size", "layout.cp", default=1),
    same(f"{_MEGATRON}.expert_model_parallel_size", "layout.ep"),
    implied(f"{_MEGATRON}.expert_tensor_parallel_size", "experts are cut over layout.tp", only=(None,),
            otherwise="experts are cut over layout.tp, like all other matrices"),
    mapped(f"{_MEGATRON}.virtual_pipeline_model_parallel_size", "layout.vpp", "null is 1", lambda v, g: {"layout.vpp": v or 1}),
    same(f"{_MEGATRON}.sequence_parallel", "engine.sequence_parallel"),
    same(f"{_MEGATRON}.use_distributed_optimizer", "engine.distributed_optimizer"),
    mapped(f"{_MEGATRON}.param_dtype", "model.dtype", "bfloat16 or float32", _dtype, default="bfloat16"),
    mapped(f"{_MEGATRON}.seed", "seed", "trainer.seed, if it is given", lambda v, g: {} if "trainer.seed" in g else {"seed": v}),
    same(f"{_MEGATRON}.param_offload", "engine.offload.parameters", "while rollouts are generated", default=True),
    same(f"{_MEGATRON}.grad_offload", "engine.offload.gradients", "from the rollout to the next step"),
    same(f"{_MEGATRON}.optimizer_offload", "engine.offload.optimizer", "from the rollout to the next step"),
    implied(f"{_MEGATRON}.use_dist_checkpointing", "checkpoints are sharded, and load into any layout"),
    unsupported(f"{_MEGATRON}.dist_checkpointing_path", "weights come from model.path in Hugging Face's format"),
    implied(f"{_MEGATRON}.use_mbridge", "weights are read and written in Hugging Face's format"),
    unsupported(f"{_MEGATRON}.override_transformer_config", "what Megatron's configuration has is set by engine.* and the model's config.json"),
    unsupported(f"{_MEGATRON}.override_ddp_config", "gradients are summed by the step transaction, whose order is fixed"),
    unsupported(f"{_MEGATRON}.extra", "what Megatron's configuration has is set by engine.* and the model's config.json"),
    same(f"{_OPTIM}.lr", "optimizer.lr"),
    same(f"{_OPTIM}.weight_decay", "optimizer.weight_decay", default=0.01),
    mapped(f"{_OPTIM}.betas", ("optimizer.beta1", "optimizer.beta2"), "", _betas("optimizer"), default=(0.9, 0.999)),
    same(f"{_OPTIM}.min_lr", "optimizer.min_lr"),
    mapped(f"{_OPTIM}.lr_warmup_steps", "optimizer.warmup_steps", "-1 is 0", _warmup("optimizer.warmup_steps")),
    mapped(f"{_OPTIM}.warmup_style", "optimizer.schedule", "", _schedule("optimizer"), aliases=(f"{_OPTIM}.lr_scheduler_type",)),
    same(f"{_OPTIM}.lr_decay_steps", "optimizer.decay_steps"),
    implied(f"{_OPTIM}.lr_warmup_steps_ratio", "optimizer.warmup_steps counts steps", only=(0, 0.0), otherwise="set optimizer.warmup_steps, in steps"),
    implied(f"{_OPTIM}.total_training_steps", "steps follow from rl.iterations"),
    implied(f"{_OPTIM}.clip_grad", "actor.grad_clip is what counts"),
    same(f"{_ACTOR}.grad_clip", "optimizer.clip_grad_norm"),
    mapped(f"{_ACTOR}.ppo_mini_batch_size", "rl.updates_per_pass", "prompts of one optimizer step: train_batch_size / ppo_mini_batch_size updates",
           _updates, default=256),
    mapped(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", ("train.micro_batch_size",), "samples of one forward pass on one rank; not with use_dynamic_bsz",
           _micro, default=1),
    unsupported(f"{_ACTOR}.ppo_micro_batch_size", "it counts over all ranks; set train.micro_batch_size"),
    mapped(f"{_ACTOR}.use_dynamic_bsz", "train.tokens_per_micro_batch", "packs samples", _micro, default=False, fill=False),
    mapped(f"{_ACTOR}.ppo_max_token_len_per_gpu", "train.tokens_per_micro_batch", "with use_dynamic_bsz", _micro, default=16384, fill=False),
    same(f"{_ACTOR}.ppo_epochs", "rl.passes", default=1),
    mapped(f"{_ACTOR}.clip_ratio", ("rl.clip_low", "rl.clip_high"), "where clip_ratio_low and _high are not given", _clip, default=0.2, fill=False),
    mapped(f"{_ACTOR}.clip_ratio_low", "rl.clip_low", "", _clip, default=0.2, fill=False),
    mapped(f"{_ACTOR}.clip_ratio_high", "rl.clip_high", "", _clip, default=0.2, fill=False),
    same(f"{_ACTOR}.clip_ratio_c", "rl.dual_clip"),
    same(f"{_ACTOR}.entropy_coeff", "rl.entropy_coef"),
    mapped(f"{_ACTOR}.use_kl_loss", ("rl.kl_coef", "rl.kl_in"), "", _kl, default=False, fill=False),
    mapped(f"{_ACTOR}.kl_loss_coef", "rl.kl_coef", "with use_kl_loss", _kl, default=0.001, fill=False),
    mapped(f"{_ACTOR}.kl_loss_type", "rl.kl_kind", "with use_kl_loss; low_var_kl is k3", _kl, default="low_var_kl", fill=False),
    same(f"{_ACTOR}.loss_agg_mode", "rl.loss_aggregation"),
    unsupported(f"{_ACTOR}.use_cpgd_loss", "there is no CPGD loss; a pipeline of your own can name another one, see extending.md"),
    unsupported(f"{_ACTOR}.policy_drift_coeff", "there is no CPGD loss"),
    implied(f"{_ACTOR}.shuffle", "an iteration's samples are shuffled before they are cut into mini-batches"),
    implied(f"{_ACTOR}.use_torch_compile", "engine.fused_kernels takes the place of compilation"),
    implied(f"{_ACTOR}.recompute_old_log_prob", "log-probabilities are those of the trainer", only=(True,),
            otherwise="log-probabilities before the update are always the trainer's own; rl.importance weighs the difference"),
    mapped(f"{_ACTOR}.tis_imp_ratio_cap", ("rl.importance.level", "rl.importance.upper"), "-1 is off",
           lambda v, g: {"rl.importance.level": "token", "rl.importance.upper": v} if v > 0 else {}),
    implied(f"{_ACTOR}.ulysses_sequence_parallel_size", "sequences are cut by layout.cp", only=(1,), otherwise="sequences are cut by layout.cp"),
    same(f"{_ACTOR}.checkpoint.async_save", "checkpoint.asynchronous", default=False),
    implied(f"{_ACTOR}.checkpoint.save_contents", "a checkpoint holds everything; checkpoint.hf: the model in Hugging Face's format besides"),
    implied(f"{_ACTOR}.checkpoint.load_contents", "a run resumes with everything, or begins with model.path"),
    unsupported(f"{_ACTOR}.policy_loss.loss_mode", "rl.ratio has PPO's loss and GSPO's; a pipeline of your own can name another one, see extending.md"),
    implied(f"{_ROLLOUT}.name", _ENGINE, only=("hf", "transformers"), otherwise="set rollout.engine=vllm with rollout.engines, which take turns with the ranks (rollout.colocated) or have devices of their own"),
    implied(f"{_ROLLOUT}.mode", "a call generates all samples; ahead of training with rollout.engines and rollout.max_staleness", only=("sync",),
            otherwise="set rollout.engines and rollout.max_staleness"),
    mapped(f"{_ROLLOUT}.tensor_model_parallel_size", (), "1; else rollout.tp, of rollout.engine=vllm with devices of its own", _rollout_size),
    unsupported(f"{_ROLLOUT}.gpu_memory_utilization", "set rollout.gpu_memory_fraction with rollout.engine=vllm; else generation takes what rollout.samples_per_batch sequences need"),
    same(f"{_ROLLOUT}.n", "rl.samples_per_prompt", default=1),
    same(f"{_ROLLOUT}.temperature", "rollout.temperature"),
    same(f"{_ROLLOUT}.top_p", "rollout.top_p"),
    mapped(f"{_ROLLOUT}.top_k", "rollout.top_k", "-1 is 0", lambda v, g: {"rollout.top_k": max(0, v)}),
    same(f"{_ROLLOUT}.max_num_seqs", "rollout.samples_per_batch"),
    same(f"{_ROLLOUT}.val_kwargs.temperature", "rollout.eval_temperature"),
    implied(f"{_ROLLOUT}.val_kwargs.n", "one completion for each held-out prompt", only=(1,), otherwise="evaluation makes one completion for each prompt"),
    implied(f"{_ROLLOUT}.val_kwargs.do_sample", "rollout.eval_temperature=0 is greedy"),
    implied(f"{_ROLLOUT}.do_sample", "rollout.temperature says how", only=(True,), otherwise="rollouts are sampled; lower rollout.temperature"),
    implied(f"{_ROLLOUT}.dtype", "model.dtype"),
    mapped(f"{_ROLLOUT}.enforce_eager", "rollout.cuda_graphs", "its opposite", lambda v, g: {"rollout.cuda_graphs": not v}),
    implied(f"{_ROLLOUT}.free_cache_engine", "generation's memory is given back after each rollout", only=(True,), otherwise="it always is"),
    implied(f"{_ROLLOUT}.load_format", "of vLLM"),
    implied(f"{_ROLLOUT}.enable_chunked_prefill", "of vLLM"),
    implied(f"{_ROLLOUT}.max_num_batched_tokens", "of vLLM"),
    implied(f"{_ROLLOUT}.max_model_len", "data.max_prompt_tokens and rollout.max_response_tokens"),
    implied(f"{_ROLLOUT}.prompt_length", "data.max_prompt_tokens"),
    implied(f"{_ROLLOUT}.response_length", "rollout.max_response_tokens"),
    implied(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", "train.micro_batch_size"),
    implied(f"{_ROLLOUT}.log_prob_micro_batch_size", "train.micro_batch_size"),
    implied(f"{_ROLLOUT}.log_prob_use_dynamic_bsz", "train.tokens_per_micro_batch"),
    unsupported(f"{_ROLLOUT}.multi_turn.enable", "rollouts are single-turn"),
    unsupported(f"{_ROLLOUT}.ignore_eos", "a completion ends with the end-of-sequence token"),
    implied("actor_rollout_ref.ref.strategy", "the reference model is in the ranks of the actor"),
    implied("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "train.micro_batch_size"),
    same("actor_rollout_ref.ref.megatron.param_offload", "engine.offload.reference", "while it computes nothing", aliases=("actor_rollout_ref.ref.param_offload",)),
    *(implied(f"actor_rollout_ref.ref.megatron.{name}", "the reference model is cut as the actor is")
      for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
                   "sequence_parallel")),
    implied("critic.strategy", "the critic is in the ranks of the actor, in the same engine"),
    same("critic.model.path", "critic.path"),
    same("critic.optim.lr", "critic.optimizer.lr"),
    same("critic.optim.weight_decay", "critic.optimizer.weight_decay"),
    mapped("critic.optim.betas", ("critic.optimizer.beta1", "critic.optimizer.beta2"), "", _betas("critic.optimizer")),
    same("critic.grad_clip", "critic.optimizer.clip_grad_norm"),
    same("critic.cliprange_value", "critic.value_clip"),
    mapped("critic.ppo_epochs", "critic.passes", "", lambda v, g: {"critic.passes": v}, default=None, fill=False),
    implied("critic.ppo_mini_batch_size", "mini-batches are those of the actor"),
    implied("critic.ppo_micro_batch_size_per_gpu", "train.micro_batch_size"),
    *(implied(f"critic.megatron.{name}", "the critic is cut as the actor is")
      for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel")),
    mapped("custom_reward_function.path", "reward.function", "a module on the path, module:function(prompt, completion, record)", _reward, default=None, fill=False),
    mapped("custom_reward_function.name", "reward.function", "with path", _reward, default="compute_score", fill=False),
    mapped("custom_reward_function.reward_kwargs", "reward.args", "with path", _reward, default=None, fill=False),
    unsupported("reward_model.enable", "rewards are functions (reward.function); one that asks a model is an async function"),
    unsupported("reward_model.model.path", "rewards are functions (reward.function); one that asks a model is an async function"),
    implied("reward_model.reward_manager", "reward.function, in reward.workers processes"),
    implied("dag.workflow_path", "the stages are those of the recipe, which everstep plan prints"),
    unsupported("dag.custom_pipeline_fn", "a pipeline's stages have another interface; write one as pipeline=module:function"),
    mapped("trainer.logger", tuple(_LOGGERS.values()), "console is always on", _logger, default=("console", "wandb")),
    same("trainer.project_name", "telemetry.project"),
    implied("trainer.experiment_name", "a run has the name of its folder, run_dir"),
    mapped("trainer.n_gpus_per_node", "layout.replicas", "nodes times GPUs over tp*pp*cp: each copy of the model is a replica, which may fail", _replicas,
           default=8),
    mapped("trainer.nnodes", "layout.replicas", "as n_gpus_per_node; nodes are found by the launcher", _replicas, default=1),
    mapped("trainer.save_freq", "checkpoint.every_steps", "iterations, times the optimizer steps of one; -1 is 0", _save),
    mapped("trainer.test_freq", "rl.eval_every", "-1 is 0", lambda v, g: {"rl.eval_every": max(0, v)}),
    mapped("trainer.total_epochs", "rl.iterations", "passes * (records // train_batch_size); the file is counted, or --records says it", _iterations,
           default=30),
    mapped("trainer.total_training_steps", "rl.iterations", "instead of total_epochs", _iterations, default=None, fill=False),
    mapped("trainer.resume_mode", "resume", "auto; disable is never; resume_path is the path", _resume, default="auto"),
    mapped("trainer.resume_from_path", "resume", "with resume_mode=resume_path", lambda v, g: {}, default=None, fill=False),
    same("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last", default=100),
    implied("trainer.max_critic_ckpt_to_keep", "a checkpoint holds both models"),
    same("trainer.default_local_dir", "run_dir", "checkpoints are in run_dir/checkpoints, with logs and metrics beside them"),
    implied("trainer.default_hdfs_dir", "checkpoint.path writes to s3:// or gs:// itself", only=(None,), otherwise="set checkpoint.path to s3:// or gs://"),
    same("trainer.val_before_train", "rl.eval_before"),
    unsupported("trainer.val_only", "evaluate a checkpoint with everstep generate, or a run with rl.iterations=1"),
    same("trainer.critic_warmup", "critic.warmup"),
    mapped("trainer.seed", "seed", "", _seed, default=1),
    same("trainer.device", "device"),
    implied("trainer.balance_batch", "tokens are shared out evenly with train.tokens_per_micro_batch"),
    implied("trainer.log_val_generations", "telemetry.show_completions, telemetry.sample_table_every"),
    implied("trainer.rollout_data_dir", "tables of samples are in RUN/samples"),
    implied("trainer.del_local_ckpt_after_load", "checkpoint.keep_last"),
    implied("trainer.ray_wait_register_center_timeout", "ray.start_timeout_s"),
)  # fmt: skip
