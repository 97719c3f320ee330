"""docs/migrating.md: what becomes of each option of other systems, from the tables that the command uses."""

from __future__ import annotations

from everstep.config.explain import show
from everstep.config.importing import SYSTEMS
from everstep.config.importing.option import Option

_HEAD = """<!-- Made by `make docs`; edit src/everstep/config/importing instead. -->

# Coming from another system

```sh
everstep config import --from siirl run_qwen3-8b-megatron.sh --records 40315 > grpo.yaml
everstep config import --from torchtitan ./train.toml --fault_tolerance.enable --fault_tolerance.group_size=2 > sft.yaml
everstep config import --from ray-example main.py > ppo.yaml
everstep config import --from twinkle lora.py > lora.yaml
everstep plan examples/grpo_qwen3_8b.yaml model.path=benchmarks/shapes/qwen3-8b data.source=examples/data/sums.parquet data.eval_source=examples/data/sums.parquet
```

The command reads a script, a file, or options as `KEY=VALUE`, and prints a configuration in which each key says what it was. Options after
a file win over those in it. Where another system's default is not ours, it is written down, too. Every option that was given is told about: translated,
needing nothing, without counterpart (in the head of the file, with the reason), or unknown. Scripts are read, not run: a value that only
running would tell (the output of a command, a variable that is set inside an `if`) is named, and left to you.

[examples/grpo_qwen3_8b.yaml](../examples/grpo_qwen3_8b.yaml) is siiRL's script for Qwen3-8B, translated; the last command above plans it without
its model and data.

What changes beyond names:

- **Copies of the model are replicas.** Where another system shards over all data-parallel ranks, each copy here is a replica of its own, which may
  fail; `layout.dp` shards optimizer state inside one. One replica alone has no peer: `recovery.memory_checkpoint_every`.
- **Spares.** A warm process more (`layout.spares`) makes a death cost milliseconds instead of a cold start.
- **Steps are optimizer steps.** siiRL and verl save and test every so many iterations; `checkpoint.every_steps` counts optimizer steps, the
  translation multiplies.
- **Nothing restarts from a checkpoint** unless nobody is left who holds the last step: [recovery.md](recovery.md).

Programs, not options:

| there | here |
|---|---|
| `MegatronActorGroup(...)`, `async_init_model` | `everstep.launch(config)` |
| `async_run_ray_method("mesh", method, batch)` | `group.call("mesh", method, batch)` |
| `async_run_ray_method("pass_through", method)` | `group.call("pass_through", method)` |
| `register_dispatch_type(name, Dispatch)` | `register_dispatch`: [examples/custom_dispatch.py](../examples/custom_dispatch.py) |
| `recover_from_failure(backups)`, `load_checkpoint` after it | nothing: the step goes on by itself |
| `offload_to_cpu`, `backload_to_gpu` | `engine.offload.*`; copies against the loss of all replicas: `recovery.memory_checkpoint_every` |
| `anyscale job submit -f job.yaml` | [deploy.md](deploy.md) |
| `twinkle.initialize(mode=...)`, `@remote_class`, `@remote_function` | `launcher=ray` or `local`; worker methods and `register_dispatch` |
| `torchft_lighthouse`, one torchtitan for each replica group | `launcher=ray`: nothing to start. `launcher=local`: see [architecture.md](architecture.md) |
| `python3 -m siirl.client.main_dag` | `everstep train CONFIG` |
| `examples/data_preprocess/deepscaler.py` | `everstep data deepscaler OUT` |
"""


def migrating_page() -> str:
    """Every option of every table."""
    text = _HEAD
    for name, system in SYSTEMS.items():
        text += f"\n## From {system.TITLE}\n\n`everstep config import --from {name}`. {system.ABOUT}\n\n"
        text += "| there | here | how |\n|---|---|---|\n"
        text += "".join(map(_row, system.OPTIONS.values()))
    return text


def _row(option: Option) -> str:
    names = ", ".join(f"`{name}`" for name in (option.name, *option.aliases))
    nothing = {"implied": "nothing to set", "unsupported": "not supported", "mapped": "nothing to set"}[option.kind]
    here = ", ".join(f"`{key}`" for key in option.ours) or nothing
    default = f"default there {show(list(option.default) if isinstance(option.default, tuple) else option.default)}, written down" if option.fill else ""
    how = "; ".join(part for part in (option.how, default) if part)
    return f"| {names} | {here} | " + how.replace("|", "\\|") + " |\n"
