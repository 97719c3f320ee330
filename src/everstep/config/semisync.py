"""Semi-synchronous training: which settings go together, and how the model is cut into fragments that are synchronised in turn.

Pure; no torch. A fragment is a set of *modules*, by transformers' names: ``model.embed_tokens``, ``model.layers.0``, ..., ``model.norm``, ``lm_head``.
These names do not depend on the layout inside a replica, so a fragment is the same set of weights under every one; a pipeline stage
may well hold nothing of it. Everything inside a layer is synchronised together.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from everstep.config import derive
from everstep.config.schema import Config, SemiSyncConfig
from everstep.engine.shape import ModelShape
from everstep.errors import ConfigError


def check(config: Config, shape: ModelShape) -> None:
    """``ConfigError`` for what semi-synchronous training cannot do, and for settings that the method would not obey."""
    semisync, recovery = config.semisync, config.recovery
    given = {name for name, value in semisync.model_dump().items() if value != SemiSyncConfig.model_fields[name].default}
    method = semisync.method
    obeyed = {
        "none": set(),
        "local_sgd": {"sync_every", "should_quantize"},
        "diloco": {"sync_every", "should_quantize", "outer_lr", "outer_momentum", "outer_nesterov"},
        "streaming_diloco": set(SemiSyncConfig.model_fields),
    }[method]
    if odd := sorted(given - obeyed - {"method"}):
        raise ConfigError(f"semisync.{odd[0]} is given, but semisync.method={method} does not use it; leave it out, or choose another method")
    if method == "none":
        return
    steps = derive.inner_steps(config)
    if semisync.fragment_sync_delay >= steps:
        raise ConfigError(
            f"semisync.fragment_sync_delay={semisync.fragment_sync_delay} must be less than the {steps} inner steps of a round "
            "(semisync.sync_every / fragments)"
        )
    if semisync.outer_nesterov and semisync.outer_momentum == 0 and method != "local_sgd":
        raise ConfigError("semisync.outer_nesterov=true needs momentum, but semisync.outer_momentum=0; set outer_nesterov=false")
    if recovery.exact or recovery.mode == "wait":
        key = "recovery.exact=true" if recovery.exact else "recovery.mode=wait"
        raise ConfigError(
            f"{key} promises weights that do not depend on deaths, but with semisync.method={method} each replica's own optimizer state dies "
            "with it; use recovery.exact=false and recovery.mode=salvage or retry"
        )
    if config.watch.check_state_every or config.watch.rerun_every:
        key = "check_state_every" if config.watch.check_state_every else "rerun_every"
        raise ConfigError(
            f"watch.{key} compares what all replicas hold alike, but with semisync.method={method} each has weights of its own, which it changes "
            "all the time; set it to 0"
        )
    if config.recipe == "grpo" and (config.rl.passes > 1 or config.rl.updates_per_pass > 1):
        raise ConfigError(
            f"semisync.method={method} with recipe=grpo: an inner step is a rollout and one update, so rl.passes={config.rl.passes} and "
            f"rl.updates_per_pass={config.rl.updates_per_pass} must be 1"
        )
    if config.recipe == "ppo" or config.pipeline:
        what = "recipe=ppo" if config.recipe == "ppo" else f"pipeline={config.pipeline}"
        raise ConfigError(
            f"{what} with semisync.method={method}: on islands an iteration is a rollout and one update of one model; use semisync.method=none"
        )
    if config.recipe == "grpo" and config.rollout.engines:
        raise ConfigError(
            f"rollout.engines={config.rollout.engines} generate with the committed weights, but with semisync.method={method} each replica makes "
            "rollouts with its own; set rollout.engines=0"
        )
    if config.recipe == "dpo":
        raise ConfigError(f"semisync.method={method} is for recipe=sft and grpo; with recipe=dpo set semisync.method=none")
    if config.recipe == "grpo" and config.rl.dynamic_sampling_rounds:
        raise ConfigError(
            f"rl.dynamic_sampling_rounds={config.rl.dynamic_sampling_rounds} takes prompts as groups are left out, but with "
            f"semisync.method={method} prompts are dealt to the islands beforehand; set it to 0"
        )
    if config.recipe == "grpo" and config.rl.kl_target:
        raise ConfigError(
            f"rl.kl_target={config.rl.kl_target} adapts one coefficient to the samples of all replicas, which semisync.method={method} leaves on "
            "their islands; leave it out"
        )
    fragments(config, shape)


def trained_modules(config: Config, shape: ModelShape) -> tuple[str, ...]:
    """Modules with weights that are trained, from the input to the output. With LoRA these are layers alone."""
    layers = tuple(f"model.layers.{i}" for i in range(shape.layers))
    if config.lora.rank:
        return layers
    return ("model.embed_tokens", *layers, "model.norm", *(() if shape.tied else ("lm_head",)))


def module_of(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``model.layers.3``; of all others, the name without ``.weight`` or ``.bias``."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return ".".join(parts[:3])
    return name.rsplit(".", 1)[0]


def fragments(config: Config, shape: ModelShape) -> tuple[tuple[str, ...], ...]:
    """The modules of each fragment, in the order in which they are synchronised. ``ConfigError`` unless every module that is trained
    is in exactly one, and every fragment has one.

    A count cuts the layers, from the input to the output, as evenly as it goes; the embedding goes with the first of them, the last
    norm and the output layer with the last.
    """
    modules, wanted = trained_modules(config, shape), config.semisync.fragments
    if isinstance(wanted, int):
        if wanted > shape.layers:
            raise ConfigError(
                f"semisync.fragments={wanted} is more than the {shape.layers} layers of model.path={config.model.path}; lower it"
            )
        groups: list[list[str]] = [[] for _ in range(wanted)]
        at = 0
        for module in modules:
            if module.startswith("model.layers."):
                at = int(module.rsplit(".", 1)[1]) * wanted // shape.layers
            groups[at].append(module)
        return tuple(map(tuple, groups))
    owners: dict[str, list[str]] = {module: [] for module in modules}
    for number, patterns in enumerate(wanted):
        if not patterns:
            raise ConfigError(f"semisync.fragments.{number} is empty: a round would synchronise nothing; leave it out")
        for pattern in patterns:
            found = [m for m in modules if fnmatchcase(m, pattern)]
            if not found:
                raise ConfigError(
                    f"semisync.fragments.{number}: {pattern!r} matches no trained module; there are {_some(modules)}"
                )
            for module in found:
                owners[module].append(f"{number} ({pattern})")
    for module, by in owners.items():
        if not by:
            raise ConfigError(f"semisync.fragments: {module} is in no fragment, and would never be synchronised; add it to one")
        if len(by) > 1:
            raise ConfigError(f"semisync.fragments: {module} is matched more than once, by {' and '.join(by)}; each belongs to exactly one")
    return tuple(tuple(m for m in modules if owners[m][0].split(" ")[0] == str(n)) for n in range(len(wanted)))


def _some(modules: tuple[str, ...]) -> str:
    return ", ".join(modules if len(modules) <= 6 else (*modules[:3], "...", *modules[-2:]))
