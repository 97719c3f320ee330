"""What a configuration will do, worked out without starting anything: ``everstep plan``.

Memory is an estimate in the sense of its formulas (:func:`rank_memory`): what training must hold, not what an allocator
rounds up to, nor the 0.5-1.5 GiB of a device context and its communicators. Every other number is exact arithmetic.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everstep.cluster.environment import detect_launcher
from everstep.config import derive
from everstep.config import semisync as config_semisync
from everstep.config.check import check_plan
from everstep.config.load import Loaded, dump
from everstep.config.schema import Config
from everstep.engine.shape import ModelShape
from everstep.engine.source import describe
from everstep.layout import Layout
from everstep.rl import pipeline

if TYPE_CHECKING:
    from rich.console import Console

    from everstep.cluster.placement import Placement

_BYTES = {"float32": 4, "bfloat16": 2}
#: Rate at which the seconds of a heal are quoted; a fair TCP link. Over NVLink or InfiniBand it is far less.
_QUOTED_BYTES_PER_S = 1e9
_MASTER_BYTES, _MOMENT_BYTES = 4, 8  # of one parameter, float32


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, by purpose."""

    weights: int
    frozen: int  # of the weights what LoRA never trains; it comes from model.path, not from peers or checkpoints
    gradients: int
    optimizer: int  # float32 masters (bfloat16 only) and Adam's two moments
    recovery: int  # the step's total, kept apart from the gradients until it is committed; in exact mode every slot's gradient
    salvage: int  # more than that in a step in which a replica dies
    reference: int  # the reference model of the KL term
    outer: int  # semi-synchronous training: global weights and outer momentum, in host memory
    on_host: int  # of outer and reference what is in host memory while the model is trained
    rollout: int  # the generation engine's copy of the whole model
    critic: int  # weights, gradients and optimizer state of recipe=ppo's second model
    critic_state: int  # of it what a heal sends and a checkpoint writes
    activations: int
    logits: int

    @property
    def state(self) -> int:
        """What a heal sends and a checkpoint writes for this rank."""
        return self.weights - self.frozen + self.optimizer + self.reference + self.outer + self.critic_state

    @property
    def total(self) -> int:
        """On the device, in a step in which nobody dies."""
        own = self.frozen + self.state - self.critic_state - self.on_host + self.gradients
        held = own + self.critic + self.recovery
        return held + self.rollout + self.activations + self.logits


@dataclass(frozen=True)
class Plan:
    """Everything ``everstep plan`` prints."""

    config: Config
    sizes: derive.Sizes
    shape: ModelShape
    launcher: str
    device: str
    memory: tuple[RankMemory, ...]  # by rank inside a replica
    placement: Placement | None  # None: the nodes are known only to the cluster of ray.address

    @property
    def deaths_at_once(self) -> int:
        """Replicas that may be broken at the same time while training goes on."""
        if not self.config.recovery.enabled:
            return 0
        return self.config.layout.replicas - max(1, self.config.recovery.min_replicas)

    @property
    def heal_bytes(self) -> int:
        """Bytes sent to the rank with the largest state, from its peer."""
        return max(memory.state for memory in self.memory)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: what is trained with its optimizer state, and a reference model, each element once; and with
        checkpoint.hf the weights, and adapters, once more in others' formats."""
        config, each = self.config, _BYTES[self.config.model.dtype]
        adapters = adapter_parameters(config, self.shape, Layout(), 0) if config.lora.rank else 0
        trained = adapters or self.shape.parameters
        masters = _MASTER_BYTES if config.model.dtype == "bfloat16" else 0
        if config.recipe == "ppo":  # the critic, trained in the same way
            critic = describe(derive.critic(config).model).parameters
            trained += trained if adapters else critic
        state = trained * (each + masters + _MOMENT_BYTES)
        reference = (adapters or self.shape.parameters) * each if any(memory.reference for memory in self.memory) else 0
        exported = self.shape.parameters + adapters + (describe(derive.critic(config).model).parameters if config.recipe == "ppo" else 0)
        return state + reference + (exported * each if config.checkpoint.hf else 0)


def make_plan(config: Config, environ: Mapping[str, str] = os.environ) -> Plan:
    """Check ``config`` and work everything out. ``BadInput`` if it cannot work. Starts nothing, imports no torch."""
    sizes = check_plan(config, environ)
    shape = describe(config.model)
    ranks = range(sizes.layout.ranks_per_replica)
    return Plan(
        config=config,
        sizes=sizes,
        shape=shape,
        launcher=detect_launcher(config, environ),
        device=derive.device(config, environ),
        memory=tuple(rank_memory(config, sizes, shape, rank) for rank in ranks),
        placement=_placement(config, sizes.layout, environ),
    )


def stage_parameters(shape: ModelShape, layout: Layout, pp: int) -> int:
    """Parameters on one rank of pipeline stage ``pp``.

    Layers are cut over the stages as ``Layout.stages`` says, and matrices over the tensor-parallel ranks; norms and routers are whole
    everywhere, experts shared out (:func:`expert_parameters`). The embedding is on the first stage, the output layer on the last: a
    tied model with pp > 1 holds its one tensor twice.
    """
    embedding = -(-shape.vocab // layout.tp) * shape.hidden
    total = sum(shape.layer_parameters(layer, layout.tp) for layer in _stage_layers(shape, layout, pp))
    total += expert_parameters(shape, layout, pp)
    if pp == 0:
        total += embedding
    if pp == layout.pp - 1:
        total += shape.hidden  # the last norm
        if not shape.tied or layout.pp > 1:
            total += embedding
    return total


def expert_parameters(shape: ModelShape, layout: Layout, pp: int) -> int:
    """Those of :func:`stage_parameters` that belong to experts: of each layer 1/ep of the experts, each cut over tp."""
    return sum(shape.expert_parameters(layer) for layer in _stage_layers(shape, layout, pp)) // (layout.ep * layout.tp)


def _stage_layers(shape: ModelShape, layout: Layout, pp: int) -> list[int]:
    return [layer for layers in layout.stages(shape.layers)[pp] for layer in layers]


def adapter_parameters(config: Config, shape: ModelShape, layout: Layout, pp: int) -> int:
    """Parameters of LoRA adapters on one rank of pipeline stage ``pp``; 0 without LoRA.

    A matrix (out, in) has r (in + out): of q, k, v, gate and up a tensor-parallel rank holds r (in + out / tp), of the
    output and down projections r (in / tp + out). Experts have none.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers = _stage_layers(shape, layout, pp)
    everywhere, dense = len(layers), sum(not shape.sparse(layer) for layer in layers)
    sizes = {  # cut over tp, whole, how often
        "q_proj": (q, shape.hidden, everywhere), "k_proj": (kv, shape.hidden, everywhere), "v_proj": (kv, shape.hidden, everywhere),
        "o_proj": (q, shape.hidden, everywhere), "gate_proj": (shape.ffn, shape.hidden, dense), "up_proj": (shape.ffn, shape.hidden, dense),
        "down_proj": (shape.ffn, shape.hidden, dense),
    }  # fmt: skip
    found = (sizes[matrix] for matrix in derive.lora_matrices(config))
    return config.lora.rank * sum(times * (cut // layout.tp + whole) for cut, whole, times in found)


def rank_memory(config: Config, sizes: derive.Sizes, shape: ModelShape, rank: int) -> RankMemory:
    """Bytes on ``rank`` of any replica.

    With P parameters of the model on the rank (:func:`stage_parameters`), L of adapters (:func:`adapter_parameters`), T = P
    trained ones, or T = L with LoRA, b bytes per parameter (model.dtype), and S = T, or with engine.distributed_optimizer
    X ep/(dp cp) + (T - X)/(dp cp), where X of the trained ones are experts' (:func:`expert_parameters`):

        weights      b (P + L)
        gradients    4 T              (summed in float32)
        optimizer    8 S              (Adam's moments), and 4 S more for float32 masters if b = 2
        recovery     4 S              (with recovery.enabled no total is made in place), and 4 S for each slot of the replica with
                                      recovery.exact
        salvage      4 S              (what is salvaged is added to a sum of its own); with recovery.exact 4 S for each
                                      slot more than the replica has, if it were the last one left
        reference    b T              (if rl.kl_coef > 0, or recipe=dpo; with LoRA it shares the frozen weights; with engine.offload.reference not on
                                      the device)
        outer        4 S, and 4 S more with an outer momentum  (semi-synchronous training; in host memory, where a copy of weights and
                                      optimizer state is besides)
        critic       its own weights, gradients and optimizer (recipe=ppo); with engine.offload.idle_model what it has more
                     than the actor; recovery and salvage are those of the larger S
        rollout      b (whole model)  (grpo, ppo; on the ranks that generate: last stage, tp 0, cp 0)

    For one micro-batch of N tokens on this rank (train.micro_batch_size times the longest sample, or train.tokens_per_micro_batch,
    over cp), hidden size h, F the feed-forward size, D = head_dim (2 heads + 2 kv_heads), s = tp with engine.sequence_parallel, else 1, kept
    for backward:

        a layer      b N (6 h / s + (D + 4 F) / tp)
                     residuals and norms 6h; q, k, v and attention output D; gate, up, their activation and product 4F;
                     attention scores are not kept (fused kernels; a CPU without one adds heads N² b for a moment);
                     with cp > 1 the gathered keys and values too: b N cp 2 kv_heads head_dim / tp; with experts, of which a
                     token is sent to k of F' each, k (4 F' / tp + h + 2 h / s) for 4 F / tp, tokens being spread evenly: what
                     the experts take in, and what comes back
        recompute    selective: 4 F, and what cp gathers, for one layer only; full: b N h / s for each layer, and
                     one layer whole
        in flight    pp - stage micro-batches (1F1B), at most those of a step; with vpp > 1 (interleaved)
                     2 (pp - stage - 1) + (vpp - 1) pp + 1 chunks
        logits       12 N vocab / tp  on the last stage (float32: logits, softmax, gradient); with engine.logprob_chunk_tokens
                     that many for N, and, unless frozen, the output matrix's gradient once more in float32
    """
    layout, at = sizes.layout, sizes.layout.position(rank)
    width = _BYTES[config.model.dtype]
    actor = _model_memory(config, shape, layout, at.pp, stage_parameters(shape, layout, at.pp))
    critic = None
    if config.recipe == "ppo":
        judging = describe(derive.critic(config).model, "critic.path" if config.critic.path else "model.path")
        parameters = stage_parameters(judging, layout, at.pp)
        if at.pp == layout.pp - 1:  # a value head in the place of the output layer
            parameters += judging.hidden + 1
            if not judging.tied or layout.pp > 1:
                parameters -= -(-judging.vocab // layout.tp) * judging.hidden
        critic = _model_memory(config, judging, layout, at.pp, parameters)
    beside = critic.held if critic else 0
    if critic and config.engine.offload.idle_model:
        beside = max(0, critic.held - actor.held)
    trained, shard = actor.trained, max(actor.shard, critic.shard if critic else 0)

    steps = [step for step in (sizes.main, sizes.warmup) if step is not None]
    tokens = -(-max(derive.tokens_of_forward(config, step.max_tokens) for step in steps) // layout.cp)
    chunk = min(tokens, config.engine.logprob_chunk_tokens or tokens)
    hidden = shape.hidden // layout.tp if config.engine.sequence_parallel else shape.hidden
    attention = shape.head_dim * 2 * (shape.heads + shape.kv_heads) // layout.tp
    feed_forward = _feed_forward_numbers(shape, layout, at.pp, hidden)
    gathered = layout.cp * 2 * shape.kv_heads * shape.head_dim // layout.tp if layout.cp > 1 else 0
    whole = 6 * hidden + attention + feed_forward + gathered
    kept, again = {
        "none": (whole, 0),
        "selective": (6 * hidden + attention, feed_forward + gathered),
        "full": (hidden, whole),
    }[config.engine.recompute]
    layers = _layers_in_flight(layout, at.pp, shape.layers, max(max(step.slots_per_replica) for step in steps))
    activations = width * tokens * (layers * kept + again)
    last = at.pp == layout.pp - 1
    vocabulary = -(-shape.vocab // layout.tp)
    generates = derive.is_rl(config) and rank in layout.collect_ranks()
    held = max(max(step.slots_per_replica) for step in steps) if config.recovery.exact else 0
    salvaged = max(step.slots for step in steps) - held if config.recovery.exact else 1
    salvages = config.recovery.enabled and config.recovery.mode == "salvage" and layout.replicas > 1
    has_reference = config.recipe == "dpo" or (derive.is_rl(config) and config.rl.kl_coef > 0)
    reference = width * trained if has_reference else 0
    method = config.semisync.method
    outer = 0 if method == "none" else 4 * shard * (2 if method != "local_sgd" and config.semisync.outer_momentum else 1)
    return RankMemory(
        weights=actor.weights,
        frozen=actor.frozen,
        gradients=actor.gradients,
        optimizer=actor.optimizer,
        recovery=4 * shard * (int(config.recovery.enabled) + held),
        salvage=4 * shard * salvaged if salvages else 0,
        reference=reference,
        outer=outer,
        on_host=outer + (reference if config.engine.offload.reference else 0),
        rollout=width * shape.parameters if generates else 0,
        critic=beside,
        critic_state=critic.weights - critic.frozen + critic.optimizer if critic else 0,
        activations=activations,
        logits=12 * chunk * vocabulary + (4 * vocabulary * shape.hidden if config.engine.logprob_chunk_tokens and not actor.frozen else 0)
        if last
        else 0,
    )


@dataclass(frozen=True)
class _ModelMemory:
    """What one trained model holds on a rank, bytes; ``trained`` and ``shard`` (T and S of rank_memory) in parameters."""

    weights: int
    frozen: int
    gradients: int
    optimizer: int
    trained: int
    shard: int

    @property
    def held(self) -> int:
        return self.weights + self.gradients + self.optimizer


def _model_memory(config: Config, shape: ModelShape, layout: Layout, pp: int, parameters: int) -> _ModelMemory:
    width, adapters = _BYTES[config.model.dtype], adapter_parameters(config, shape, layout, pp)
    trained = shard = adapters or parameters
    if config.engine.distributed_optimizer:
        ranks, experts = layout.dp * layout.cp, 0 if adapters else expert_parameters(shape, layout, pp)
        shard = -(-(trained - experts) // ranks) + -(-experts * layout.ep // ranks)
    return _ModelMemory(
        width * (parameters + adapters), width * parameters if adapters else 0, 4 * trained, (8 if width == 4 else 12) * shard, trained, shard
    )


def _feed_forward_numbers(shape: ModelShape, layout: Layout, pp: int, hidden: int) -> int:
    """Numbers that the feed-forward layer of stage ``pp`` that keeps the most keeps of one token; ``hidden``: h / s."""
    layers, x = _stage_layers(shape, layout, pp), shape.experts
    dense = 0 if all(map(shape.sparse, layers)) else 4 * shape.ffn // layout.tp
    if x is None or not any(map(shape.sparse, layers)):
        return dense
    return max(dense, x.per_token * (4 * x.ffn // layout.tp + shape.hidden + 2 * hidden))


def _layers_in_flight(layout: Layout, pp: int, layers: int, micro_batches: int) -> int:
    """Layers of stage ``pp`` whose activations are held at once, counted for every micro-batch that holds them."""
    chunks = layout.stages(layers)[pp]
    if layout.vpp == 1:
        return min(layout.pp - pp, micro_batches) * len(chunks[0])
    padded = -(-micro_batches // layout.pp) * layout.pp
    in_flight = min(2 * (layout.pp - pp - 1) + (layout.vpp - 1) * layout.pp + 1, padded * layout.vpp)
    return in_flight * max(map(len, chunks))


def _placement(config: Config, layout: Layout, environ: Mapping[str, str]) -> Placement | None:
    if config.ray.address:
        return None
    from everstep.cluster.placement import place

    # A CPU has no devices to count: every rank is a process of this machine.
    cuda = derive.device(config, environ) == "cuda"
    here = {socket.gethostname(): derive.cuda_devices(environ) if cuda else layout.devices + derive.engine_devices(config)}
    rollout = config.rollout
    engines = 0 if rollout.colocated else rollout.engines
    return place(layout.ranks_per_replica, layout.replicas, layout.spares, here, layout.tp, engines, rollout.tp)


# ---------------------------------------- on the terminal


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
    return rows


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
    width = _BYTES[plan.config.model.dtype]
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
