"""What may be asked of rollout engines. What vLLM takes is known without importing it: that takes many seconds, and this is checked before
any process starts."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from pathlib import Path

from everstep.config import derive
from everstep.config.schema import Config
from everstep.errors import ConfigError

#: Arguments of vLLM's engine that everstep sets, and where they come from.
_OURS = {
    "model": "model.path", "model_weights": "model.path", "tokenizer": "model.path", "dtype": "model.dtype", "seed": "seed",
    "tensor_parallel_size": "rollout.tp", "gpu_memory_utilization": "rollout.gpu_memory_fraction", "load_format": "the weights, which the ranks send",
    "skip_tokenizer_init": "everstep, which tokenizes", "distributed_executor_backend": "rollout.tp", "worker_extension_cls": "everstep, which loads weights",
    "logprobs_mode": "rollout.temperature", "enable_sleep_mode": "rollout.colocated", "quantization": "model.dtype: the ranks' weights are loaded as they are",
    "enable_lora": "lora.rank: adapters come merged", "data_parallel_size": "rollout.engines", "pipeline_parallel_size": "rollout.tp, the only split inside an engine",
}  # fmt: skip


def check(config: Config) -> None:
    """ConfigError if section ``rollout`` asks for what engines cannot do."""
    rollout = config.rollout
    if rollout.engines and not derive.is_rl(config):
        raise ConfigError(f"rollout.engines={rollout.engines}: recipe={config.recipe} generates nothing; leave it out")
    if rollout.engines and config.semisync.method != "none":
        raise ConfigError(
            f"rollout.engines={rollout.engines}: with semisync.method={config.semisync.method} each replica has weights of its own and generates "
            "with them; leave one of the two out"
        )
    if rollout.engines and rollout.sync_timeout_s >= config.recovery.step_timeout_s:
        raise ConfigError(
            f"rollout.sync_timeout_s={rollout.sync_timeout_s:g} must be less than recovery.step_timeout_s={config.recovery.step_timeout_s:g}: "
            "the ranks of the replica that serves the weights wait for each other so long"
        )
    if rollout.colocated and not rollout.engines:
        raise ConfigError("rollout.colocated=true says where rollout.engines run, and there are none; set rollout.engines, or leave it out")
    if rollout.colocated and rollout.max_staleness:
        raise ConfigError(
            f"rollout.colocated=true lets engines and ranks take turns, and rollout.max_staleness={rollout.max_staleness} lets engines generate while "
            "ranks train; leave one of the two out"
        )
    ranks = config.layout.replicas * derive.layout(config).ranks_per_replica
    if rollout.colocated and (rollout.engines > ranks or rollout.tp > 1):
        raise ConfigError(
            f"rollout.colocated=true: each of rollout.engines={rollout.engines} engines of rollout.tp={rollout.tp} devices runs on the device of one of "
            f"{ranks} ranks; use rollout.tp=1 and at most {ranks} engines, or rollout.colocated=false"
        )
    if rollout.on_spares and (not rollout.engines or not config.layout.spares or rollout.colocated or rollout.tp > 1):
        raise ConfigError(
            f"rollout.on_spares=true lets idle spares help rollout.engines (now {rollout.engines}), an engine of one device (rollout.tp={rollout.tp}) on each of "
            f"layout.spares={config.layout.spares}; set both to 1 or more, rollout.tp=1 and rollout.colocated=false, or leave it out"
        )
    _check_vllm(config)
    if rollout.max_staleness and not rollout.engines:
        raise ConfigError(f"rollout.max_staleness={rollout.max_staleness}: without rollout.engines nobody generates while ranks train; set both")
    if rollout.max_staleness and config.rl.dynamic_sampling_rounds:
        raise ConfigError(
            f"rollout.max_staleness={rollout.max_staleness} draws the prompts of later iterations before rl.dynamic_sampling_rounds="
            f"{config.rl.dynamic_sampling_rounds} knows how many this one takes; set one of the two to 0"
        )
    if rollout.max_staleness and config.rl.importance.level == "none":
        raise ConfigError(
            f"rollout.max_staleness={rollout.max_staleness} trains on samples of older weights, which rl.importance corrects for; set "
            "rl.importance.level"
        )


def _check_vllm(config: Config) -> None:
    """ConfigError if rollout.engine=vllm cannot do what is asked, or is not asked what is asked of it."""
    rollout = config.rollout
    if rollout.engine != "vllm":
        wanted = {"tp": rollout.tp > 1, "gpu_memory_fraction": rollout.gpu_memory_fraction is not None, "engine_args": bool(rollout.engine_args)}
        for name in (name for name, given in wanted.items() if given):
            raise ConfigError(f"rollout.{name} is for rollout.engine=vllm (now {rollout.engine}); leave it out, or set rollout.engine=vllm")
        return
    if not rollout.engines:
        raise ConfigError("rollout.engine=vllm generates in processes of its own: set rollout.engines, with rollout.colocated=true on the ranks' devices")
    if config.recovery.exact:
        raise ConfigError(
            "recovery.exact=true promises weights that depend on no death, but what vLLM draws depends on what else is in its batch; use "
            "rollout.engine=transformers, or recovery.exact=false"
        )
    if rollout.temperature != 1.0 and (rollout.top_k or rollout.top_p < 1.0):
        raise ConfigError(
            f"rollout.temperature={rollout.temperature:g} with rollout.top_k or rollout.top_p: vLLM gives no log-probabilities at that temperature before "
            "the cut; use rollout.temperature=1, or top_k=0 and top_p=1, or rollout.engine=transformers"
        )
    for name in sorted(rollout.engine_args.keys() & _OURS.keys()):
        raise ConfigError(f"rollout.engine_args.{name} is set by everstep, from {_OURS[name]}; leave it out")
    if config.ray.address:
        return  # other machines must have it
    folder = _folder()
    if folder is None:
        raise ConfigError("rollout.engine=vllm: vLLM is not installed here; pip install everstep[vllm], or use rollout.engine=transformers")
    known = _arguments(folder)
    for name in sorted(rollout.engine_args.keys() - known) if known else ():
        near = difflib.get_close_matches(name, known, 1)
        raise ConfigError(f"rollout.engine_args.{name}: the installed vLLM's EngineArgs has no such argument" + (f"; do you mean {near[0]}?" if near else ""))


def _folder() -> Path | None:
    """Where vLLM is installed; None if it is not."""
    found = importlib.util.find_spec("vllm")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def _arguments(folder: Path) -> set[str]:
    """Names of the arguments of its engine, read from its source; empty if that looks otherwise than known."""
    source = folder / "engine" / "arg_utils.py"
    if not source.is_file():
        return set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return {a.target.id for a in node.body if isinstance(a, ast.AnnAssign) and isinstance(a.target, ast.Name)}
    return set()
