"""Twinkle's ``initialize`` and ``DeviceMesh.from_sizes``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.config.importing.option import Given, Option, Untranslatable, implied, mapped, same, table, unsupported

TITLE = "Twinkle"
ABOUT = (
    "Reads a Python script (the keyword arguments of `initialize(...)` and `DeviceMesh.from_sizes(...)`; nothing is run), or overrides such as "
    "`mode=ray megatron_config.tp_size=2`. A script's loop becomes a recipe; model, data and optimizer are to be given."
)
COMMANDS: tuple[str, ...] = ()
PREFIXES: dict[str, str] = {}
ENVIRONMENT: dict[str, str] = {}


def finish(found: dict[str, Any], given: Given) -> None:
    """A script says nothing that a recipe would not say itself."""


def _launcher(value: Any, given: Given) -> Mapping[str, Any]:
    if value not in ("local", "ray"):
        raise Untranslatable("launcher is ray or local")
    return {"launcher": value}


def _device(value: Any, given: Given) -> Mapping[str, Any]:
    if value not in ("cuda", "cpu"):
        raise Untranslatable("device is cuda or cpu")
    return {"device": value}


def _or_one(key: str) -> Any:
    return lambda value, given: {key: value or 1}


_MESH, _MEGATRON = "global_device_mesh", "megatron_config"
_ULYSSES = "sequences are cut by context parallelism, layout.cp"
OPTIONS: dict[str, Option] = table(
    mapped("mode", "launcher", "the same recipe under both", _launcher, default="local"),
    implied("nproc_per_node", "processes follow from layout.*"),
    implied("ncpu_proc_per_node", "processes on the CPU are reward.workers"),
    same("seed", "seed", default=42),
    same("full_determinism", "engine.deterministic", default=False),
    unsupported("groups", "actor, reference and critic share their ranks; generation on devices of its own: rollout.engines"),
    implied("lazy_collect", "what a call returns travels once, to who asked"),
    mapped("name", "run_dir", "runs/NAME", lambda v, g: {"run_dir": f"runs/{v}"} if v else {}),
    unsupported("notifier", "alerts tells a webhook or a program of events by name"),
    implied(f"{_MESH}.world_size", "follows from layout.*"),
    mapped(f"{_MESH}.dp_size", "layout.replicas", "every copy of the model is a replica, which may fail", _or_one("layout.replicas")),
    mapped(f"{_MESH}.fsdp_size", "layout.dp", "optimizer state is sharded over these ranks, parameters are not", _or_one("layout.dp")),
    mapped(f"{_MESH}.tp_size", "layout.tp", "", _or_one("layout.tp")),
    mapped(f"{_MESH}.pp_size", "layout.pp", "", _or_one("layout.pp")),
    mapped(f"{_MESH}.cp_size", "layout.cp", "", _or_one("layout.cp")),
    mapped(f"{_MESH}.ep_size", "layout.ep", "", _or_one("layout.ep")),
    mapped(f"{_MESH}.vpp_size", "layout.vpp", "", _or_one("layout.vpp")),
    implied(f"{_MESH}.ulysses_size", _ULYSSES, only=(None, 1), otherwise=_ULYSSES),
    implied(f"{_MESH}.etp_size", "experts are cut over layout.tp", only=(None, 1), otherwise="experts are cut over layout.tp"),
    implied(f"{_MESH}.ep_fsdp_size", "optimizer state of experts is sharded over the ranks that hold them", only=(None, 1),
            otherwise="optimizer state of experts is sharded over the ranks that hold them"),
    mapped(f"{_MESH}.device_type", "device", "cuda or cpu", _device),
    same(f"{_MESH}.sequence_parallel", "engine.sequence_parallel"),
    mapped(f"{_MEGATRON}.tp_size", "layout.tp", "", _or_one("layout.tp")),
    mapped(f"{_MEGATRON}.pp_size", "layout.pp", "", _or_one("layout.pp")),
    mapped(f"{_MEGATRON}.cp_size", "layout.cp", "", _or_one("layout.cp")),
    mapped(f"{_MEGATRON}.ep_size", "layout.ep", "", _or_one("layout.ep")),
    mapped(f"{_MEGATRON}.vpp_size", "layout.vpp", "", _or_one("layout.vpp")),
    mapped(f"{_MEGATRON}.dp_size", "layout.replicas", "every copy of the model is a replica, which may fail", _or_one("layout.replicas")),
)  # fmt: skip
