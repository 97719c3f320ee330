"""A plan as text for the terminal: tables of sizes and memory, and sentences about stages, recovery and deaths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.config import derive
from everstep.config import semisync as config_semisync
from everstep.config.load import Loaded, dump
from everstep.layout import Layout
from everstep.plan import Plan
from everstep.plan.memory import BYTES, adapter_parameters
from everstep.rl import pipeline

if TYPE_CHECKING:
    from rich.console import Console

    from everstep.config.schema import Config

#: Rate at which the seconds of a heal are quoted; a fair TCP link. Over NVLink or InfiniBand it is far less.
_QUOTED_BYTES_PER_S = 1e9


def print_plan(plan: Plan, loaded: Loaded, console: Console) -> None:
    """All of it, as tables: configuration, sizes, layout with memory, recovery, failure domains."""
    from rich.table import Table

    console.print(f"[bold]Configuration[/] ({loaded.path or 'no file'}; everstep explain KEY says where a value came from)")
    console.print(dump(plan.config).rstrip(), markup=False, highlight=False, soft_wrap=True)

    table = Table(title="Derived sizes", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in size_rows(plan):
        table.add_row(name, value)
    console.print(table)

    columns = ("replica", "rank", "pp", "dp", "cp", "tp", "weights", "grads", "optim", "recov", "other", "total")
    most = max(memory.total for memory in plan.memory)
    scale, unit = (2**30, "GiB") if most >= 2**28 else (2**20, "MiB")
    table = Table(title=f"Layout, and estimated memory of each rank ({unit})", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    layout = plan.sizes.layout
    for replica, rank in layout.ranks():
        at, memory = layout.position(rank), plan.memory[rank]
        held = (memory.weights, memory.gradients, memory.optimizer, memory.recovery)
        numbers = (*held, memory.total - sum(held), memory.total)
        table.add_row(*map(str, (replica, rank, at.pp, at.dp, at.cp, at.tp)), *(f"{n / scale:.2f}" for n in numbers))
    for spare in range(layout.spares):
        table.add_row("spare", str(spare), *["-"] * 4, *["-"] * 5, f"≤{most / scale:.2f}")
    console.print(table)
    console.print(
        "other: activations of the longest samples, logits, reference model, rollout copy" + (", critic" if plan.config.recipe == "ppo" else "")
    )
    for line in stage_lines(plan):
        console.print(line, highlight=False)

    if derive.is_rl(plan.config):
        console.print("[bold]Stages of an iteration[/]")
        for line in pipeline.resolve(plan.config).lines():
            console.print(line, markup=False, highlight=False)
    console.print("[bold]Recovery[/]")
    for line in recovery_lines(plan):
        console.print(line, highlight=False)
    console.print("[bold]Failure domains[/]")
    if plan.placement is None:
        console.print(f"decided when the nodes of the cluster at {plan.config.ray.address} are known")
    else:
        console.print(plan.placement.failure_domains(), markup=False, highlight=False, soft_wrap=True)


def size_rows(plan: Plan) -> list[tuple[str, str]]:
    """(name, value) of the derived sizes."""
    sizes, layout, shape = plan.sizes, plan.sizes.layout, plan.shape
    engines = plan.config.rollout.engines
    rows = [
        ("model", f"{shape.architecture}, {shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers"),
        *_expert_rows(plan),
        *_lora_rows(plan),
        ("launcher, device", f"{plan.launcher}, {plan.device}"),
        (
            "ranks",
            f"{layout.replicas} x {layout.ranks_per_replica}, {_count(layout.spares, 'spare')}"
            + (f", {_count(engines, 'rollout engine')}" if engines else "") + ": " + _count(layout.devices + engines, "process"),
        ),
    ]
    if engines:
        ahead = plan.config.rollout.max_staleness
        when = f"up to {_count(ahead, 'iteration')} ahead, while ranks train" if ahead else "while ranks wait"
        rows.append(("generation", f"{_count(engines, 'rollout engine')}, {when}; weights after every update"))
    if sizes.rl:
        rl = plan.config.rl
        made = f"{rl.prompts_per_step} prompts x {rl.samples_per_prompt} = {sizes.rl.samples_per_iteration} samples"
        rows.append(
            (
                "one iteration",
                f"{made}, {_count(sizes.rl.updates_per_iteration, 'optimizer step')}"
                + (f" of the actor, {sizes.rl.critic_updates_per_iteration} of the critic" if sizes.rl.critic_updates_per_iteration else ""),
            )
        )
        if sizes.rl.critic_warmup:
            rows.append(("critic alone in", f"the first {_count(sizes.rl.critic_warmup, 'iteration')}"))
        rows.append(("iterations", str(sizes.rl.iterations)))
    if sizes.warmup:
        rows += [(f"warm-up {name}", value) for name, value in _step_rows(sizes.warmup)]
    rows += _step_rows(sizes.main)
    rows += _island_rows(plan)
    steps = sizes.main.steps + (sizes.warmup.steps if sizes.warmup else 0)
    rows.append(("optimizer steps in all", str(steps) + (f", in {sizes.total_steps} rounds" if plan.config.semisync.method != "none" else "")))
    if unread := unread_keys(plan.config):
        rows.append((f"not read by recipe={plan.config.recipe}", ", ".join(unread)))
    return rows


#: Sections that only some recipes read.
_READERS: dict[str, tuple[str, ...]] = {"sft": ("sft",), "dpo": ("dpo",), "critic": ("ppo",), **dict.fromkeys(("warmup", "rl", "rollout", "reward"), ("grpo", "ppo"))}


def unread_keys(config: Config) -> list[str]:
    """Keys that are not at their default, in sections that the recipe does not read. A file may serve several recipes, so that is no error."""
    found = []
    for section, recipes in _READERS.items():
        values, usual = getattr(config, section), type(getattr(config, section))()
        if config.recipe not in recipes:
            found += [f"{section}.{key}" for key in type(values).model_fields if getattr(values, key) != getattr(usual, key)]
    return found


def _island_rows(plan: Plan) -> list[tuple[str, str]]:
    """Semi-synchronous training: the batch of all islands and of one, and what goes over the link."""
    config, sizes = plan.config, plan.sizes
    if config.semisync.method == "none":
        return []
    main, replicas, inner = sizes.main, sizes.layout.replicas, sizes.inner_steps
    mean = main.samples_per_step / replicas
    a_round = round_bytes(plan)
    synchronous = _ring(4 * sum(_trained(plan)), replicas)
    cut = config_semisync.fragments(config, plan.shape)
    return [
        ("semi-synchronous", f"{config.semisync.method}: {_count(len(cut), 'fragment')}, each synchronised every {config.semisync.sync_every} inner steps"),
        ("global batch", f"{main.samples_per_step} samples in an inner step, over all {replicas} islands"),
        ("inner global batch", f"{mean:g} samples in an inner step of one island" + ("" if mean.is_integer() else ", on average")),
        ("a round", f"{_count(inner, 'inner step')}: {inner * main.samples_per_step} samples, committed together"),
        ("in host memory", f"{size_text(max(memory.state for memory in plan.memory))} a rank: the last commit, and the outer optimizer"),
        ("over the link", f"{size_text(a_round)} a replica and round, {size_text(a_round // inner)} an inner step; synchronous: {size_text(synchronous)}"),
    ]


def _trained(plan: Plan) -> list[int]:
    """Trained numbers on each rank of a replica, in its optimizer shard."""
    width = BYTES[plan.config.model.dtype]
    return [memory.optimizer // (8 if width == 4 else 12) for memory in plan.memory]


def _ring(nbytes: int, members: int) -> int:
    """Sent by each member in an all-reduce."""
    return 2 * nbytes * (members - 1) // members


def round_bytes(plan: Plan) -> int:
    """Sent over the link by the ranks of one replica in an average round, without the ledgers."""
    semisync = plan.config.semisync
    fragments = len(config_semisync.fragments(plan.config, plan.shape))
    numbers = sum(_trained(plan)) // fragments
    nbytes = numbers + 4 * numbers // 256 if semisync.should_quantize else 4 * numbers
    return _ring(nbytes, plan.sizes.layout.replicas)


def _expert_rows(plan: Plan) -> list[tuple[str, str]]:
    x, layout = plan.shape.experts, plan.sizes.layout
    if x is None:
        return []
    held = f"; a rank holds {x.count // layout.ep} of each layer" if layout.ep > 1 else ""
    return [("experts", f"{x.count} in each of {sum(x.sparse)} layers, {x.per_token} take a token{held}")]


def _lora_rows(plan: Plan) -> list[tuple[str, str]]:
    matrices = derive.lora_matrices(plan.config)
    if not matrices:
        return []
    count = adapter_parameters(plan.config, plan.shape, Layout(), 0)
    said = f"{count:,} parameters of rank {plan.config.lora.rank} beside {', '.join(matrices)}; the model is frozen"
    return [("adapters", said)]


def _step_rows(step: derive.StepSizes) -> list[tuple[str, str]]:
    share = step.samples_per_replica
    if share is None:
        cut = f"{step.samples_per_step} packed into rows of at most {step.tokens_per_row} tokens: at most {_count(step.slots, 'slot')}, fewer where samples are shorter"
        shares = "as many as make the tokens even"
    else:
        cut = f"{step.samples_per_step} in {step.slots} slots of {step.samples_per_slot}"
        shares = str(share[0]) if share[0] == share[-1] else ", ".join(map(str, share))
    return [
        ("samples per step", cut),
        ("samples per replica", shares),
        ("tokens per step", f"at most {step.max_tokens_per_step:,}"),
        ("steps", str(step.steps)),
    ]


def stage_lines(plan: Plan) -> list[str]:
    """Which layers each pipeline rank holds, and what the interleaved schedule pads; nothing without a pipeline."""
    layout, main = plan.sizes.layout, plan.sizes.main
    if layout.pp == 1:
        return []

    def said(layers: range) -> str:
        return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])

    stages = layout.stages(plan.shape.layers)
    lines = ["layers: " + "; ".join(f"pp {pp}: {', '.join(map(said, chunks))}" for pp, chunks in enumerate(stages))]
    empty = -max(main.slots_per_replica) % layout.pp
    if layout.vpp > 1 and main.samples_per_slot is None:
        lines.append(
            f"interleaved schedule: up to {_count(layout.pp - 1, 'empty micro-batch')} a step, for a multiple of layout.pp={layout.pp}"
        )
    elif layout.vpp > 1 and empty:
        lines.append(
            f"interleaved schedule: {_count(empty, 'empty micro-batch')} a step, for a multiple of layout.pp={layout.pp}"
        )
    return lines


def recovery_lines(plan: Plan) -> list[str]:
    """Deaths survivable, bytes per heal and per checkpoint, in sentences."""
    config, layout = plan.config, plan.sizes.layout
    if not config.recovery.enabled:
        first = "recovery.enabled=false: any death ends the run"
    elif layout.replicas == 1:
        first = "one replica has no peer: any death ends the run, which resumes from its last checkpoint"
    else:
        first = (
            f"{plan.deaths_at_once} of {layout.replicas} replicas may be broken at once "
            f"(recovery.min_replicas={config.recovery.min_replicas}); spares replace {_count(layout.spares, 'dead rank')}"
        )
    heal = plan.heal_bytes
    checkpoint = config.checkpoint
    every = f"every {checkpoint.every_steps} steps" if checkpoint.every_steps else ""
    when = " and ".join(part for part in (every, "at the end" if checkpoint.at_end else "") if part) or "never"
    lines = [first]
    if config.recovery.enabled and layout.replicas > 1:
        lines += death_lines(plan)
        lines.append(f"a heal sends {size_text(heal)} to one rank: {heal / _QUOTED_BYTES_PER_S:.1f} s at 1 GB/s")
    kept = f"{checkpoint.keep_last} are kept" + (f", and every {checkpoint.keep_every} steps one for good" if checkpoint.keep_every else "")
    lines.append(f"a checkpoint ({when}) writes {size_text(plan.checkpoint_bytes)}; {kept}")
    return lines


def death_lines(plan: Plan) -> list[str]:
    """What survivors of a death in a step do, and on which link."""
    recovery, replicas = plan.config.recovery, plan.config.layout.replicas
    extra = max(memory.salvage for memory in plan.memory)
    lines = {
        "salvage": [f"after a death survivors compute only what died (recovery.mode=salvage), with {size_text(extra)} a rank for that step"],
        "retry": ["after a death survivors compute the whole step anew (recovery.mode=retry)"],
        "wait": ["after a death the step waits for a spare (recovery.mode=wait)"],
    }[recovery.mode]
    if recovery.mode == "wait" or replicas == 2:
        return lines  # one survivor, or none, goes on: no link
    if replicas <= recovery.standby_links_up_to:
        lines.append(f"{_count(replicas - 1, 'standby link')} a rank: one death at a time costs survivors no new link")
    else:
        lines.append(
            f"no standby links: recovery.standby_links_up_to={recovery.standby_links_up_to} and {replicas} replicas; survivors form a link "
            "after each death"
        )
    return lines


def _count(number: int, thing: str) -> str:
    """``1 spare``, ``2 spares``, ``3 processes``."""
    return f"{number} {thing}" + ("" if number == 1 else "es" if thing.endswith(("s", "ch")) else "s")


def size_text(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
