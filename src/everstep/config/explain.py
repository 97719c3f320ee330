"""``everstep explain KEY`` and docs/config.md: what a key means, its unit, type, default, value and origin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from everstep.config.keys import expected, field_type, fields, options, section_of, sections, unknown
from everstep.config.load import COMMAND_LINE, Loaded
from everstep.config.schema import Config, Section
from everstep.errors import ConfigError

#: Units by the end of a name; the longest that fits counts. A number whose name tells nothing is in ``UNITS``.
UNIT_SUFFIXES = {
    "_s": "seconds",
    "_ms": "milliseconds",
    "_tokens": "tokens",
    "_steps": "optimizer steps",
    "steps": "optimizer steps",
    "iterations": "RL iterations",
    "replicas": "replicas",
    "passes": "passes over an iteration's samples",
    "spares": "processes",
    "_samples": "samples",
}
RATIO = "none (a ratio)"
UNITS = {
    "seed": "none",
    "local.max_restarts": "starts",
    "replica.id": "none (a number from 0)",
    "replica.count": "replicas",
    "recovery.standby_links_up_to": "replicas",
    "recovery.quarantine_after": "replicas",
    "recovery.memory_checkpoint_every": "optimizer steps",
    "recovery.controller_restarts": "starts of a controller",
    "recovery.restart_attempts": "processes in a row",
    "layout.tp": "ranks",
    "layout.pp": "ranks",
    "layout.dp": "ranks",
    "layout.cp": "ranks",
    "layout.ep": "ranks",
    "layout.vpp": "model chunks per rank",
    "layout.layers_per_stage": "layers",
    "moe.aux_loss_coef": RATIO,
    "lora.rank": "rows of A, columns of B",
    "lora.alpha": "none (over lora.rank: a factor)",
    "lora.dropout": "probability",
    "optimizer.lr": "none (step size)",
    "optimizer.min_lr": "none (step size)",
    "warmup.lr": "none (step size)",
    "optimizer.beta1": RATIO,
    "optimizer.beta2": RATIO,
    "optimizer.eps": "none",
    "optimizer.weight_decay": RATIO,
    "optimizer.clip_grad_norm": "norm of the gradient",
    "sft.samples_per_step": "samples per optimizer step",
    "warmup.samples_per_step": "samples per optimizer step",
    "rl.dynamic_sampling_rounds": "generations",
    "rl.prompts_per_step": "prompts per RL iteration",
    "rl.samples_per_prompt": "completions per prompt",
    "rl.updates_per_pass": "optimizer steps per pass",
    "rl.advantage_eps": "units of reward",
    "rl.clip_low": RATIO,
    "rl.clip_high": RATIO,
    "rl.dual_clip": RATIO,
    "rl.kl_coef": RATIO,
    "rl.kl_target": "nats per token",
    "rl.entropy_coef": RATIO,
    "rl.gamma": RATIO,
    "rl.lam": RATIO,
    "critic.value_clip": "units of reward",
    "critic.warmup": "RL iterations",
    "rl.importance.upper": RATIO,
    "rl.importance.lower": RATIO,
    "rl.eval_every": "RL iterations",
    "sft.eval_every": "optimizer steps",
    "dpo.beta": RATIO,
    "dpo.label_smoothing": "probability",
    "dpo.pairs_per_step": "pairs per optimizer step",
    "dpo.eval_every": "optimizer steps",
    "dpo.eval_pairs": "pairs",
    "reward.workers": "processes",
    "reward.concurrency": "calls per process",
    "reward.overlong_factor": "units of reward",
    "reward.terms[].weight": RATIO,
    "rollout.temperature": RATIO,
    "rollout.eval_temperature": RATIO,
    "rollout.top_p": "probability",
    "rollout.top_k": "tokens",
    "rollout.samples_per_batch": "sequences",
    "semisync.sync_every": "inner steps",
    "semisync.fragments": "fragments",
    "semisync.fragment_sync_delay": "inner steps",
    "semisync.fragment_update_alpha": RATIO,
    "semisync.outer_lr": "none (step size)",
    "semisync.outer_momentum": RATIO,
    "rollout.engines": "processes",
    "rollout.tp": "devices",
    "rollout.gpu_memory_fraction": RATIO,
    "rollout.max_staleness": "iterations",
    "rollout.tokens_per_call": "tokens",
    "rollout.engine_restarts": "processes",
    "rollout.poison_after": "deaths",
    "train.micro_batch_size": "samples per forward pass",
    "train.tokens_per_micro_batch": "tokens per forward pass",
    "train.verify_every": "commits",
    "checkpoint.keep_last": "checkpoints",
    "checkpoint.keep_every": "steps",
    "telemetry.show_completions": "completions",
    "telemetry.sample_table_every": "RL iterations",
    "telemetry.sample_table_rows": "samples",
    "local.port": "port number",
    "telemetry.dashboard_port": "port number",
    "log.max_bytes": "bytes",
    "log.keep": "files",
    "watch.straggler_ratio": "none",
    "watch.check_state_every": "steps",
    "watch.rerun_every": "steps",
    "watch.rerun_tolerance": "none",
    "watch.spike_ratio": "none",
    "watch.spike_steps": "optimizer steps",
    "faults[].step": "global step",
    "faults[].replica": "index",
    "faults[].rank": "index",
}


@dataclass(frozen=True)
class Explanation:
    """One key. ``value`` and ``origin`` are None where no configuration was given."""

    key: str
    meaning: str
    kind: str
    unit: str | None
    default: str
    value: str | None = None
    origin: str | None = None


def explain(key: str, loaded: Loaded | None = None) -> list[Explanation]:
    """``key`` itself, or, if it is a section (or a list of entries), every key in it. ``ConfigError`` if unknown.

    Entries of a list are written ``faults[].step``; ``faults.0.step`` is understood too.
    """
    wanted = ".".join("[]" if part.isdigit() else part for part in key.split(".")).replace(".[]", "[]")
    everything = list(_all_fields())
    found = [(name, info) for name, info in everything if name == wanted]
    if not found:
        found = [(name, info) for name, info in everything if name.startswith((wanted + ".", wanted + "[]."))]
    elif any(name.startswith(wanted + "[].") for name, _ in everything):
        found += [(name, info) for name, info in everything if name.startswith(wanted + "[].")]
    if not found:
        found = _inside_mapping(key)
    if not found:
        raise unknown(key, COMMAND_LINE)
    return [_explanation(name, info, loaded, key) for name, info in found]


def _inside_mapping(key: str) -> list[tuple[str, FieldInfo]]:
    """The mapping that a key such as ``env.NCCL_DEBUG`` lies in."""
    try:
        field_type(key)
    except KeyError:
        return []
    return [(key, info) for name, info in fields() if key.startswith(name + ".")]


def _all_fields() -> Iterator[tuple[str, FieldInfo]]:
    for key, info in fields():
        yield key, info
        arguments = get_args(info.annotation)
        entry = section_of(arguments[0]) if arguments else None
        if entry:
            yield from fields(entry, f"{key}[].")


def unit(key: str, info: FieldInfo) -> str | None:
    """The unit of a number; None for what is no number."""
    if not {int, float}.intersection(options(info.annotation)):
        return None
    for name in (key, key.removeprefix("critic.")):  # critic.optimizer has the keys of optimizer
        if name in UNITS:
            return UNITS[name]
    fitting = [suffix for suffix in UNIT_SUFFIXES if key.endswith(suffix)]
    if not fitting:
        raise LookupError(f"the unit of {key} is in neither UNITS nor UNIT_SUFFIXES")
    return UNIT_SUFFIXES[max(fitting, key=len)]


def _explanation(key: str, info: FieldInfo, loaded: Loaded | None, asked: str) -> Explanation:
    value = origin = None
    concrete = asked if "[]" in key and asked.count(".") == key.count(".") + 1 else key
    if loaded is not None and "[]" not in concrete:
        value, origin = show(_value(loaded.config, concrete)), loaded.origins.of(concrete)
    return Explanation(
        key=concrete,
        meaning=info.description or "",
        kind=expected(info.annotation, info.metadata),
        unit=unit(key, info),
        default=_default(info),
        value=value,
        origin=origin,
    )


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if isinstance(value, Section):
            value = getattr(value, part)
        elif isinstance(value, list):
            if int(part) >= len(value):
                raise ConfigError(f"{key}: there are only {len(value)} entries, counted from 0")
            value = value[int(part)]
        else:
            value = value.get(part)
    return value


def _default(info: FieldInfo) -> str:
    if info.default is not PydanticUndefined:
        return show(info.default)
    if info.default_factory is not None:
        return show(info.default_factory())  # type: ignore[call-arg]
    return "none: it must be given"


def show(value: Any) -> str:
    """A value as it would be written in a configuration file."""
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, Section):
        value = value.model_dump()
    elif isinstance(value, list):
        value = [item.model_dump() if isinstance(item, Section) else item for item in value]
    return json.dumps(value, ensure_ascii=False, default=str)


# ---------------------------------------- docs/config.md


def config_page() -> str:
    """docs/config.md: every key, by section."""
    text = (
        "<!-- Made by `make docs`; edit src/everstep/config/schema.py instead. -->\n\n"
        "# Configuration\n\n"
        "One YAML file, and any number of overrides on the command line: `a.b=c`, `--a.b c` or `--a.b=c`. Values are\n"
        "YAML; `${other.key}` takes another key's value. Later overrides win. An unknown key, a wrong type or a\n"
        "combination that cannot work is refused before any process is started.\n\n"
        "`everstep explain KEY CONFIG` says where a value came from; `everstep plan CONFIG` shows what follows from\n"
        "all of them. Each run keeps its own in `RUN/configs/resolved.yaml`, which is again a configuration.\n\n"
        "Relative paths, and modules of `module:function`, are found from the folder where everstep is started.\n"
    )
    groups = {"": [], **{name: [] for name, _ in sections()}}  # type: dict[str, list[tuple[str, FieldInfo]]]
    for key, info in _all_fields():
        groups.setdefault(key.rpartition(".")[0], []).append((key, info))
    docs = {name: section.__doc__ for name, section in sections()}
    for name, entries in groups.items():
        if not entries:
            continue
        text += f"\n## {name or 'Top level'}\n\n"
        about = docs.get(name) or ""
        if about and not about.startswith("!!! abstract"):
            text += " ".join(about.split()) + "\n\n"
        text += "| key | meaning | type | unit | default |\n|---|---|---|---|---|\n"
        for key, info in entries:
            cells = (info.description or "", expected(info.annotation, info.metadata), unit(key, info) or "", _default(info))
            text += f"| `{key}` | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    return text
