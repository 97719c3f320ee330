"""Combinations that cannot work, refused before any process starts. Each refusal names the keys to change.

:func:`check_plan` costs milliseconds and imports neither torch nor transformers; :func:`check` also fetches the model.
What a file or an override holds by itself is checked by ``load.py``, what records hold by ``everstep.data.check``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from everstep.cluster.environment import (
    check_user_environment,
    detect_launcher,
    inside_torchrun,
    lighthouse_address,
    manager_port,
)
from everstep.cluster.local.torchrun import check_port_free
from everstep.config import derive, rollouts, semisync, unused, watching
from everstep.config.schema import Config, Fault, OptimizerConfig
from everstep.data.functions import check_arguments, load_function
from everstep.data.source import REASONING_GYM, is_path
from everstep.engine.shape import ModelShape
from everstep.engine.source import describe, resolve
from everstep.errors import BadInput, ConfigError
from everstep.layout import Layout
from everstep.recipes.resize import SCALES
from everstep.recovery.faults import (
    AT_POINT,
    BEFORE_THE_VOTE_IS_COUNTED,
    DEADLY,
    ENGINE_PHASES,
    HELD_KINDS,
    PHASES,
    STAGES,
    UNHELD_PHASES,
)
from everstep.rl import pipeline
from everstep.rl.reward_functions import terms
from everstep.telemetry.logs import chosen_levels
from everstep.telemetry.trackers import check_trackers

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM")


def check(config: Config, environ: Mapping[str, str] = os.environ) -> derive.Sizes:
    """What ``everstep train`` refuses besides the data: as :func:`check_plan`, and a model that cannot be had. ``BadInput``."""
    sizes = check_plan(config, environ)
    resolve(config.model)
    if config.recipe == "ppo" and config.critic.path:
        resolve(derive.critic(config).model, "critic.path")
    return sizes


def check_plan(config: Config, environ: Mapping[str, str] = os.environ) -> derive.Sizes:
    """What ``everstep plan`` refuses, cheapest first. Returns the derived sizes."""
    check_user_environment(config.env)
    chosen_levels(config.log.level, environ)
    _check_recovery(config)
    sizes = derive.sizes(config)
    _check_launcher(config, sizes.layout, environ)
    watching.check(config, sizes.layout, environ)
    _check_schedule(config, sizes)
    _check_recipe(config)
    rollouts.check(config)
    _check_validation(config)
    _check_faults(config, sizes, environ)
    if config.engine.sequence_parallel and sizes.layout.tp == 1:
        raise ConfigError(
            "engine.sequence_parallel=true cuts activations over tensor-parallel ranks, but layout.tp=1; "
            "raise layout.tp, or set engine.sequence_parallel=false"
        )
    _check_offload(config)
    derive.lora_matrices(config)
    shape = describe(config.model)
    check_model(shape, sizes.layout, config.model.path)
    _check_experts(config, shape, sizes.layout)
    _check_critic(config, sizes, shape)
    semisync.check(config, shape)
    _check_data_files(config)
    _check_functions(config)
    check_trackers(config)
    return sizes


# ---------------------------------------- layout and model


def check_model(shape: ModelShape, layout: Layout, path: str) -> None:
    """Whether ``shape`` can be cut as ``layout`` says. ``ConfigError``."""
    if shape.architecture not in ARCHITECTURES:
        raise ConfigError(f"model.path={path} is a {shape.architecture}; this version trains {', '.join(ARCHITECTURES)}")
    experts = shape.experts
    counts = [(shape.heads, "attention heads"), (shape.kv_heads, "key-value heads")]
    if experts is None or not all(experts.sparse):
        counts.append((shape.ffn, "channels in its feed-forward layer"))
    if experts is not None:
        counts.append((experts.ffn, "channels in an expert"))
    for count, name in counts:
        if count % layout.tp:
            fits = [n for n in range(1, shape.kv_heads + 1) if not any(count % n for count, _ in counts)]
            raise ConfigError(
                f"layout.tp={layout.tp} does not divide the {count} {name} of model.path={path}; layout.tp can be {_or(fits)}"
            )
    if -(-shape.vocab // layout.tp) * (layout.tp - 1) >= shape.vocab:
        raise ConfigError(
            f"layout.tp={layout.tp} leaves a rank without any of the {shape.vocab} vocabulary entries of model.path={path}; "
            "lower layout.tp"
        )
    layout.stages(shape.layers)
    if layout.ep > 1 and experts is None:
        raise ConfigError(f"layout.ep={layout.ep} shares out experts, but model.path={path} has none; set layout.ep=1")
    if experts is not None and experts.count % layout.ep:
        raise ConfigError(
            f"layout.ep={layout.ep} does not divide the {experts.count} experts of a layer of model.path={path}; layout.ep can be "
            + _or([n for n in range(1, layout.dp * layout.cp + 1) if not (experts.count % n or layout.dp * layout.cp % n)])
        )


def _check_experts(config: Config, shape: ModelShape, layout: Layout) -> None:
    """What mixtures of experts ask of other keys."""
    adapted, experts = derive.lora_matrices(config), shape.experts
    if experts is None:
        if config.moe.aux_loss_coef:
            raise ConfigError(
                f"moe.aux_loss_coef={config.moe.aux_loss_coef} balances experts, but model.path={config.model.path} has none; leave it out"
            )
        if config.lora.experts:
            raise ConfigError(f"lora.experts=true, but model.path={config.model.path} has no experts; leave it out")
        return
    if layout.tp > 1 and not config.engine.sequence_parallel:
        raise ConfigError(
            f"layout.tp={layout.tp} with experts: tensor-parallel ranks must route different tokens; set engine.sequence_parallel=true"
        )
    halves = [name for name in derive.LORA_MATRICES["fc1"] if name in adapted]
    if config.lora.experts and len(halves) == 1:
        raise ConfigError(
            f"lora.experts=true with {halves[0]} alone: gate and up of experts are one tensor for peft; name both in lora.targets (fc1), or none"
        )
    if all(experts.sparse) and not config.lora.experts:
        derive.refuse_adapted_experts(name for name in adapted if name in derive.FEED_FORWARD)


def _check_critic(config: Config, sizes: derive.Sizes, actor: ModelShape) -> None:
    if config.recipe != "ppo":
        return
    critic = config.critic
    shape = describe(derive.critic(config).model, "critic.path" if critic.path else "model.path")
    language_model = dataclasses.replace(shape, architecture=shape.architecture.replace("ForTokenClassification", "ForCausalLM"))
    check_model(language_model, sizes.layout, critic.path or config.model.path)
    if shape.vocab != actor.vocab:
        raise ConfigError(
            f"critic.path={critic.path} has a vocabulary of {shape.vocab}, model.path={config.model.path} one of {actor.vocab}: a critic reads "
            "the actor's tokens; choose models of one family"
        )
    if shape.experts is not None:
        _check_experts(derive.critic(config), shape, sizes.layout)


def _check_launcher(config: Config, layout: Layout, environ: Mapping[str, str]) -> None:
    if detect_launcher(config, environ) == "local":
        how = "launcher=local" if config.launcher == "local" else "launcher=auto under torchrun (local)"
        if layout.replicas > 1 and config.replica.id is None:
            raise ConfigError(
                f"{how} runs one replica, but layout.replicas={layout.replicas}; say which one this is with replica.id and start each of them, "
                "start all with `everstep up`, use launcher=ray, or layout.replicas=1"
            )
        if config.replica.id is not None and config.replica.id >= layout.replicas:
            raise ConfigError(
                f"replica.id={config.replica.id} is not below the number of replicas, {layout.replicas} (replica.count, layout.replicas)"
            )
        if config.replica.id is not None:
            from everstep.cluster.local.lighthouse import Ports

            Ports.parse(lighthouse_address(config, environ))
            manager_port(environ)
            if (least := config.lighthouse.min_replicas or 1) > layout.replicas:
                raise ConfigError(f"lighthouse.min_replicas={least} is more than the {layout.replicas} replicas of the run (layout.replicas)")
        if config.replica.id is not None and importlib.util.find_spec("torchft") is None:
            raise ConfigError("several replicas under torchrun need torchft, which is not installed: pip install torchft==0.2.0")
        _refuse_what_needs_a_controller(config, how)
        if config.recovery.controller_grace_s:
            owner = "rank 0 is the controller, and torchrun restarts it" if config.replica.id is None else "for a lighthouse ranks wait lighthouse.wait_s"
            raise ConfigError(
                f"{how}: {owner}; recovery.controller_grace_s={config.recovery.controller_grace_s:g} is for launcher=ray"
            )
        if config.recovery.memory_checkpoint_every:
            raise ConfigError(
                f"recovery.memory_checkpoint_every={config.recovery.memory_checkpoint_every}: with {how} nobody goes back to copies in memory, "
                "for a rank's death ends its whole replica; use launcher=ray, or leave it out"
            )
        if config.checkpoint.on_interrupt:
            raise ConfigError(
                f"checkpoint.on_interrupt=true: with {how} torchrun ends every rank by itself when one is interrupted; use launcher=ray, or "
                "checkpoint.every_steps"
            )
        if config.rollout.engines:
            raise ConfigError(f"{how} has no place for rollout.engines={config.rollout.engines}; use launcher=ray, or rollout.engines=0")
        if layout.spares:
            raise ConfigError(
                f"{how} has no place for layout.spares={layout.spares}: torchrun restarts processes itself; "
                "use launcher=ray, or layout.spares=0"
            )
        if inside_torchrun(environ):
            started = int(environ.get("WORLD_SIZE", "1"))
            if started != layout.ranks_per_replica:
                raise ConfigError(
                    f"torchrun started {started} processes, but layout.tp*layout.cp*layout.pp*layout.dp="
                    f"{layout.tp}*{layout.cp}*{layout.pp}*{layout.dp}={layout.ranks_per_replica}; "
                    f"start it with --nproc_per_node {layout.ranks_per_replica}, or change the layout"
                )
        elif config.local.port:
            check_port_free(config.local.port, "local.port", host="")
    elif config.replica.id is not None:
        raise ConfigError(
            f"replica.id={config.replica.id} is for launcher=local, where each replica is started by a command of its own; "
            f"launcher={config.launcher} would start all {layout.replicas} of them. Give launcher=local, or leave it out"
        )
    if not config.ray.address:  # else it is other machines that must have them
        derive.fused_kernels(config.engine, cuda=derive.device(config, environ) == "cuda")
    if derive.device(config, environ) == "cuda" and not config.ray.address:
        present = derive.cuda_devices(environ)
        if config.replica.id is not None and layout.ranks_per_replica > present:
            raise ConfigError(
                f"a replica has {layout.ranks_per_replica} ranks, this machine has {present} devices that are visible (CUDA_VISIBLE_DEVICES): "
                "lower layout.tp, layout.cp, layout.pp or layout.dp, or set device=cpu"
            )
        engines = derive.engine_devices(config)
        if config.replica.id is None and layout.devices + engines > present:
            raise ConfigError(
                f"the layout needs {layout.devices + engines} devices ({layout.replicas} replicas of {layout.ranks_per_replica} "
                f"ranks, {layout.spares} spares, and {engines} of rollout engines), this machine has {present}: lower layout.replicas, "
                "layout.spares, rollout.engines, rollout.tp, layout.tp, layout.cp, layout.pp or layout.dp, set device=cpu, or give the address of a cluster as ray.address"
            )


#: What only launcher=ray obeys: its controller starts processes itself.
_OF_THE_CONTROLLER = {
    "recovery": ("preemption_file", "rehearse"),
    "watch": ("replace_stragglers",),
}


def _refuse_what_needs_a_controller(config: Config, how: str) -> None:
    for section, keys in _OF_THE_CONTROLLER.items():
        given = getattr(config, section)
        for key in keys:
            if getattr(given, key) != type(given).model_fields[key].default:
                raise ConfigError(f"{section}.{key} is obeyed by the controller of launcher=ray, and {how} has none; leave it out, or use launcher=ray")


def _check_validation(config: Config) -> None:
    checkpoint, rl = config.checkpoint, derive.is_rl(config)
    if checkpoint.keep_best and not config.data.eval_source:
        raise ConfigError("checkpoint.keep_best=true needs held-out data to find the best by: set data.eval_source, or checkpoint.keep_best=false")
    if checkpoint.best_by != "accuracy" and not (rl and checkpoint.keep_best):
        raise ConfigError(f"checkpoint.best_by={checkpoint.best_by} says what checkpoint.keep_best=true keeps in RL; set that, or leave it out")
    section = "rl" if rl else config.recipe
    if (every := getattr(config, section).eval_every) and not config.data.eval_source:
        raise ConfigError(f"{section}.eval_every={every} needs held-out data: set data.eval_source, or {section}.eval_every=0")


# ---------------------------------------- recovery


def _check_recovery(config: Config) -> None:
    layout, recovery = config.layout, config.recovery
    if layout.spares and not recovery.enabled:
        raise ConfigError(
            f"layout.spares={layout.spares} wait for deaths that recovery.enabled=false does not survive; set one of the two"
        )
    if layout.spares and layout.replicas == 1 and not (recovery.memory_checkpoint_every or config.checkpoint.every_steps):
        raise ConfigError(
            f"layout.spares={layout.spares} with layout.replicas=1: a spare heals from another replica, and there is none; set "
            "recovery.memory_checkpoint_every or checkpoint.every_steps, or use layout.replicas=2 or more, or layout.spares=0"
        )
    if recovery.memory_checkpoint_every and not recovery.enabled:
        raise ConfigError(
            f"recovery.memory_checkpoint_every={recovery.memory_checkpoint_every} makes copies for deaths that recovery.enabled=false "
            "does not survive; set one of the two"
        )
    if recovery.enabled and recovery.mode == "wait" and not layout.spares and config.replica.id is None:
        raise ConfigError(
            "recovery.mode=wait waits for a spare to take a dead rank's place, but layout.spares=0; add spares, or use recovery.mode=salvage"
        )
    if recovery.exact and not config.engine.deterministic:
        raise ConfigError(
            "recovery.exact=true promises equal bits, which engine.deterministic=false does not give; set engine.deterministic=true"
        )
    if recovery.memory_checkpoint_every and config.semisync.method != "none":
        raise ConfigError(
            f"recovery.memory_checkpoint_every={recovery.memory_checkpoint_every} serves ranks of any replica from a copy of another one's, "
            f"but with semisync.method={config.semisync.method} their local states differ; set it to 0"
        )
    if recovery.controller_grace_s and not recovery.enabled:
        raise ConfigError(
            f"recovery.controller_grace_s={recovery.controller_grace_s:g} lets workers wait for another controller, which "
            "recovery.enabled=false does not survive; set one of the two"
        )
    if recovery.controller_grace_s and config.rollout.engines:
        raise ConfigError(
            f"recovery.controller_grace_s={recovery.controller_grace_s:g}: rollout engines end with their controller, and one that takes "
            f"over finds none; use rollout.engines=0 (now {config.rollout.engines}), or recovery.controller_grace_s=0"
        )
    if recovery.controller_restarts and not recovery.controller_grace_s:
        raise ConfigError(
            f"recovery.controller_restarts={recovery.controller_restarts}, but with recovery.controller_grace_s=0 the workers end with "
            "their controller; set recovery.controller_grace_s=60, for example"
        )
    if recovery.min_replicas > layout.replicas:
        raise ConfigError(
            f"recovery.min_replicas={recovery.min_replicas} is more than layout.replicas={layout.replicas}; "
            "the run could never start"
        )
    _check_resize(config)
    if recovery.silence_s <= recovery.heartbeat_s:
        raise ConfigError(
            f"recovery.silence_s={recovery.silence_s} is not longer than recovery.heartbeat_s={recovery.heartbeat_s}; "
            "every rank would be taken for dead"
        )
    if layout.replicas > 1 and recovery.step_timeout_s <= recovery.heal_timeout_s:
        raise ConfigError(
            f"recovery.step_timeout_s={recovery.step_timeout_s} must be longer than recovery.heal_timeout_s={recovery.heal_timeout_s}: "
            "the others wait within a step for a rank that heals, and until it is replaced if it hangs"
        )
    for key, deadline_s in (("progress_timeout_s", recovery.progress_timeout_s), ("fence_s", recovery.fence_s)):
        if deadline_s <= 2 * recovery.heartbeat_s:
            raise ConfigError(
                f"recovery.{key}={deadline_s} must be more than twice recovery.heartbeat_s={recovery.heartbeat_s}: it is judged by heartbeats"
            )


def _check_resize(config: Config) -> None:
    recovery, replicas = config.recovery, config.layout.replicas
    how = f"recovery.on_resize={recovery.on_resize}"
    if recovery.on_resize == "keep_batch":
        return
    if recovery.on_resize not in SCALES:
        if ":" not in recovery.on_resize:
            raise ConfigError(f"{how} is none of keep_batch, {', '.join(SCALES)}, module:function")
        scale = load_function(recovery.on_resize, "recovery.on_resize")
        check_arguments(scale, 3, {}, recovery.on_resize, "recovery.on_resize")
    if config.semisync.method != "none":
        raise ConfigError(f"{how} and semisync.method={config.semisync.method}: rounds have no smaller steps; use keep_batch")
    if config.recipe != "sft":
        raise ConfigError(f"{how} makes smaller steps of recipe=sft alone; use keep_batch with recipe={config.recipe}")
    if recovery.mode == "wait" or recovery.exact:
        key = "recovery.mode=wait" if recovery.mode == "wait" else "recovery.exact=true"
        raise ConfigError(f"{how} lets the weights depend on what died, {key} promises that they do not; use one of the two")
    if config.sft.samples_per_step % replicas:
        raise ConfigError(f"{how}: layout.replicas={replicas} does not divide sft.samples_per_step={config.sft.samples_per_step}; change one of them")


def _check_faults(config: Config, sizes: derive.Sizes, environ: Mapping[str, str]) -> None:
    local = bool(config.faults) and detect_launcher(config, environ) == "local"
    several = config.replica.id is not None
    for i, fault in enumerate(config.faults):
        reason = _no_such_victim(fault, config) or _no_such_moment(fault, config, sizes)
        if reason:
            raise ConfigError(f"faults.{i}.{reason}")
        if local and several and fault.kind == "partition":
            raise ConfigError(
                f"faults.{i}.kind=partition cannot be done under launcher=local, whose processes everstep does not place; use kind=stop, or "
                "launcher=ray"
            )
        if local and not several and fault.kind in ("gil", "hang", "partition"):
            raise ConfigError(
                f"faults.{i}.kind={fault.kind} would stop launcher=local for good: its one replica has no peer that goes on, and its "
                "coordinator lives in rank 0; use launcher=ray, or a kind that ends the process"
            )
        if fault.delay_s and fault.kind in AT_POINT:
            raise ConfigError(f"faults.{i}.delay_s={fault.delay_s:g}: {fault.kind} happens at a point of the program, not after a time")


def _no_such_victim(fault: Fault, config: Config) -> str:
    """Why nobody is where the fault shall strike; empty if somebody is."""
    sizes = derive.layout(config)
    if fault.phase == "spare":
        if fault.rank >= sizes.spares:
            return f"rank={fault.rank} does not exist; layout.spares={sizes.spares}, counted from 0"
        return f"replica={fault.replica}: phase=spare strikes idle spares, which belong to no replica" if fault.replica else ""
    if fault.phase in ENGINE_PHASES:
        if fault.rank >= config.rollout.engines:
            return f"rank={fault.rank} does not exist; rollout.engines={config.rollout.engines}, counted from 0"
        return f"replica={fault.replica}: phase={fault.phase} strikes a rollout engine, which belongs to no replica" if fault.replica else ""
    if fault.replica >= sizes.replicas:
        return f"replica={fault.replica} does not exist; layout.replicas={sizes.replicas}, counted from 0"
    if fault.rank >= sizes.ranks_per_replica:
        return f"rank={fault.rank} does not exist; a replica has {sizes.ranks_per_replica} ranks, counted from 0"
    return ""


def _no_such_moment(fault: Fault, config: Config, sizes: derive.Sizes) -> str:
    """Why the fault could never fire; empty if it could."""
    if fault.step > sizes.total_steps:
        return f"step={fault.step} never comes; the run has {sizes.total_steps} steps"
    if fault.phase not in PHASES[fault.kind]:
        return f"kind={fault.kind} makes no sense with phase={fault.phase}; it can have {', '.join(sorted(PHASES[fault.kind]))}"
    if fault.phase == "rollout" and config.rollout.engines:
        return "phase=rollout: ranks do not generate with rollout.engines; strike an engine in phase=generate"
    if fault.phase == "send" and not config.rollout.engines:
        return "phase=send: without rollout.engines nobody serves weights"
    if fault.phase in STAGES | {"send"} | ENGINE_PHASES and fault.step not in (steps := derive.rollout_steps(config, sizes)):
        return f"phase={fault.phase}: no rollout precedes step {fault.step}" + (
            f"; those of {', '.join(map(str, steps[:3]))}, ... have one" if steps else ", recipe=sft has none"
        )
    if fault.phase in STAGES and fault.phase not in (phases := pipeline.fault_phases(config)):
        return f"phase={fault.phase}: no stage of an iteration does that here; {', '.join(sorted(phases))} can be struck"
    if fault.phase == "save" and config.resume == "never" and fault.step not in (steps := derive.saved_steps(config, sizes)):
        return f"phase=save: step {fault.step} is not saved" + (
            f"; steps {', '.join(map(str, steps[:3]))}{', ...' if len(steps) > 3 else ''} are (checkpoint.*)"
            if steps else ", nor is any other (checkpoint.*)"
        )
    if fault.hold and (fault.kind not in HELD_KINDS or fault.phase in UNHELD_PHASES):
        return f"hold=true: kind={fault.kind} in phase={fault.phase} cannot be held; kill, stop and partition can, in a phase that the victim enters itself"
    if fault.phase == "salvage" and not any(
        f.kind in DEADLY and f.step == fault.step and f.replica != fault.replica and f.phase in BEFORE_THE_VOTE_IS_COUNTED
        for f in config.faults
    ):
        return f"phase=salvage: in step {fault.step} nobody else dies before the vote, so nothing is salvaged"
    if fault.phase == "heal" and not any(
        f.kind in DEADLY and f.phase not in ("spare", "heal") and f.replica == fault.replica and f.step <= fault.step
        for f in config.faults
    ):
        return f"phase=heal: replica {fault.replica} heals only after it lost a rank; plan a fault that kills one before"
    if fault.phase == "heal" and not config.layout.spares and not config.recovery.restart_attempts:
        return "phase=heal: nobody takes a dead rank's place with layout.spares=0 and recovery.restart_attempts=0"
    return ""


# ---------------------------------------- recipe


def _check_recipe(config: Config) -> None:
    if (config.recipe == "dpo") != (config.data.format == "preference"):
        raise ConfigError(
            f"recipe={config.recipe} with data.format={config.data.format}: pairs are for recipe=dpo, and it takes nothing else; set "
            "recipe=dpo and data.format=preference, or neither"
        )
    if config.recipe == "dpo" and config.dpo.label_smoothing and config.dpo.loss != "sigmoid":
        raise ConfigError(f"dpo.label_smoothing={config.dpo.label_smoothing} belongs to dpo.loss=sigmoid (it is {config.dpo.loss}); set it to 0")
    if not derive.is_rl(config):
        return
    rl, warmup = config.rl, config.warmup
    if config.data.format != "prompt":
        raise ConfigError(f"recipe={config.recipe} generates from prompts: set data.format=prompt (it is {config.data.format})")
    if (config.recipe == "ppo") != (rl.advantage == "gae"):
        raise ConfigError(
            f"recipe={config.recipe} with rl.advantage={rl.advantage}: gae estimates from the values of a critic, which recipe=ppo has and "
            "needs for nothing else; set recipe=ppo and rl.advantage=gae, or neither"
        )
    ungrouped = rl.advantage in ("reinforce_plus_plus", "gae")
    if rl.samples_per_prompt < 2 and not ungrouped and rl.lone_completion == "zero":
        raise ConfigError(
            f"rl.samples_per_prompt={rl.samples_per_prompt}: rl.advantage={rl.advantage} compares the completions of "
            "one prompt, and needs at least 2"
        )
    if warmup.steps and not warmup.source:
        raise ConfigError(f"warmup.steps={warmup.steps} needs data: set warmup.source, or warmup.steps=0")
    _check_loss(config)
    unused.check(config)


def _check_loss(config: Config) -> None:
    """Numbers of section ``rl`` that do not go together."""
    rl = config.rl
    if rl.clip_low > 1:
        raise ConfigError(f"rl.clip_low={rl.clip_low} must lie in 0..1")
    if rl.dual_clip is not None and rl.dual_clip <= 1 + rl.clip_high:
        raise ConfigError(f"rl.dual_clip={rl.dual_clip} must be greater than 1 + rl.clip_high = {1 + rl.clip_high}, or null")
    if rl.kl_coef == 0 and (rl.kl_target or rl.kl_in == "reward"):
        key = f"rl.kl_target={rl.kl_target}" if rl.kl_target else "rl.kl_in=reward"
        raise ConfigError(f"{key} has no effect with rl.kl_coef=0, which keeps no reference model; set rl.kl_coef, or leave it out")
    if rl.dynamic_sampling_rounds and rl.samples_per_prompt < 2:
        raise ConfigError(
            f"rl.dynamic_sampling_rounds={rl.dynamic_sampling_rounds} compares the completions of a prompt, but "
            f"rl.samples_per_prompt={rl.samples_per_prompt}; raise it, or set rl.dynamic_sampling_rounds=0"
        )
    cache, longest = config.reward.overlong_cache_tokens, config.rollout.max_response_tokens
    if cache and cache >= longest:
        raise ConfigError(
            f"reward.overlong_cache_tokens={cache} must be less than rollout.max_response_tokens={longest}; lower it, or set it to null"
        )
    if rl.importance.lower is not None and rl.importance.lower >= rl.importance.upper:
        raise ConfigError(
            f"rl.importance.lower={rl.importance.lower} must be below rl.importance.upper={rl.importance.upper}, or null"
        )


def _check_offload(config: Config) -> None:
    """Each key of engine.offload must have something to make room for, or something to move."""
    offload = config.engine.offload
    wanted = [f"engine.offload.{name}" for name, on in offload.model_dump().items() if on]
    if offload.idle_model and config.recipe != "ppo":
        raise ConfigError(f"engine.offload.idle_model=true moves actor and critic, but recipe={config.recipe} has no critic; set it to false")
    if wanted and not derive.is_rl(config):
        raise ConfigError(
            f"{wanted[0]}=true makes room for rollouts or moves a reference model, and recipe={config.recipe} has neither; set it to false"
        )
    if offload.reference and config.lora.rank:
        raise ConfigError(
            f"engine.offload.reference=true, but with lora.rank={config.lora.rank} the reference model shares the frozen weights and has "
            "none of its own; set it to false"
        )
    if offload.reference and config.rl.kl_coef == 0:
        raise ConfigError("engine.offload.reference=true, but with rl.kl_coef=0 there is no reference model; set one of the two")


def _check_schedule(config: Config, sizes: derive.Sizes) -> None:
    _check_optimizer("optimizer", config.optimizer, sizes.main.steps)
    if config.recipe == "ppo" and sizes.rl:
        _check_optimizer("critic.optimizer", config.critic.optimizer, sizes.rl.critic_steps)


def _check_optimizer(key: str, optimizer: OptimizerConfig, steps: int) -> None:
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            f"{key}.min_lr={optimizer.min_lr} is greater than {key}.lr={optimizer.lr}, its peak; change one"
        )
    if optimizer.wsd_decay_steps and optimizer.schedule != "wsd":
        raise ConfigError(
            f"{key}.wsd_decay_steps={optimizer.wsd_decay_steps} belongs to {key}.schedule=wsd, but "
            f"{key}.schedule={optimizer.schedule}; change one"
        )
    if optimizer.schedule == "constant":
        return
    decay = optimizer.decay_steps or steps
    if optimizer.schedule == "wsd" and optimizer.warmup_steps + (optimizer.wsd_decay_steps or 1) > decay:
        raise ConfigError(
            f"{key}.warmup_steps={optimizer.warmup_steps} and {key}.wsd_decay_steps={optimizer.wsd_decay_steps} "
            f"do not fit into the {decay} steps until {key}.min_lr; lower them, or raise {key}.decay_steps"
        )
    if optimizer.warmup_steps >= decay:
        what = f"{key}.decay_steps={decay}" if optimizer.decay_steps else f"the {decay} steps of the run"
        raise ConfigError(
            f"{key}.warmup_steps={optimizer.warmup_steps} leaves no step to decay in before {what}; "
            f"lower it, or set {key}.schedule=constant"
        )


# ---------------------------------------- data, functions, environment


def _sources(config: Config) -> list[tuple[str, str]]:
    """(key, value) of every data source that this recipe reads."""
    found = [("data.source", config.data.source)]
    if config.data.eval_source:
        found.append(("data.eval_source", config.data.eval_source))
    if derive.is_rl(config) and config.warmup.steps and config.warmup.source:
        found.append(("warmup.source", config.warmup.source))
    return found


def _check_data_files(config: Config) -> None:
    for key, spec in _sources(config):
        if not is_path(spec) or "://" in spec or "*" in spec:
            continue  # a task or a function; or read when the data is
        path = Path(spec).expanduser()
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise BadInput(
                f"{key}={spec} {what} ({path.absolute()}); give a .parquet or .jsonl file, reasoning_gym:TASK or module:function"
            )
        if path.name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl"):
            continue
        try:
            with path.open("rb") as file:
                head = file.read(4)
                file.seek(-4, os.SEEK_END)
                tail = file.read(4)
        except OSError as e:
            head, tail = b"", (e.strerror or "").encode()
        if (head, tail) != (b"PAR1", b"PAR1"):
            raise BadInput(f"{key}={spec} is not a parquet file; convert it, or name a module:function that reads it")


def _check_functions(config: Config) -> None:
    for key, spec in _sources(config):
        if not is_path(spec) and not spec.startswith(REASONING_GYM):
            load_function(spec, key)
    if derive.is_rl(config):
        pipeline.resolve(config)
        reward = config.reward
        functions = [term.function for term in reward.terms] or [reward.function]
        if not config.data.source.startswith(REASONING_GYM) or None not in functions:  # a task's own scorer takes seconds to make: with its data
            terms(reward, config.data.source, config.data.source_args)
    elif config.pipeline:
        raise ConfigError(f"pipeline={config.pipeline} makes the iterations of recipe=grpo or ppo, and recipe={config.recipe} has none; leave it out")


def _or(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + (" or " if numbers[:-1] else "") + str(numbers[-1])
