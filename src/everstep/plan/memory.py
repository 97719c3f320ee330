"""Bytes on a rank, by formula: what training must hold (:func:`rank_memory`), not what an allocator rounds up to, nor the 0.5-1.5 GiB of a
device context and its communicators."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.config import derive
from everstep.config.schema import Config
from everstep.engine.shape import ModelShape
from everstep.engine.source import describe
from everstep.layout import Layout

#: Of one number.
BYTES = {"float32": 4, "bfloat16": 2}


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
    output and down projections r (in / tp + out); those of experts (:func:`expert_adapter_parameters`) are among them.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers = _stage_layers(shape, layout, pp)
    everywhere, dense = len(layers), sum(not shape.sparse(layer) for layer in layers) if not config.lora.experts else 0
    sizes = {  # cut over tp, whole, how often
        "q_proj": (q, shape.hidden, everywhere), "k_proj": (kv, shape.hidden, everywhere), "v_proj": (kv, shape.hidden, everywhere),
        "o_proj": (q, shape.hidden, everywhere), "gate_proj": (shape.ffn, shape.hidden, dense), "up_proj": (shape.ffn, shape.hidden, dense),
        "down_proj": (shape.ffn, shape.hidden, dense),
    }  # fmt: skip
    found = (sizes[matrix] for matrix in derive.lora_matrices(config))
    own = config.lora.rank * sum(times * (cut // layout.tp + whole) for cut, whole, times in found)
    return own + expert_adapter_parameters(config, shape, layout, pp)


def expert_adapter_parameters(config: Config, shape: ModelShape, layout: Layout, pp: int) -> int:
    """Those of :func:`adapter_parameters` that belong to experts, of which a rank holds 1/ep of each layer's (lora.experts): r (in + out / tp)
    for each of gate and up, r (in / tp + out) for down."""
    x = shape.experts
    if x is None or not config.lora.experts:
        return 0
    held = sum(shape.sparse(layer) for layer in _stage_layers(shape, layout, pp)) * x.count // layout.ep
    adapted = [name for name in derive.lora_matrices(config) if name in derive.FEED_FORWARD]
    return held * config.lora.rank * len(adapted) * (shape.hidden + x.ffn // layout.tp)


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
    width = BYTES[config.model.dtype]
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
    width, adapters = BYTES[config.model.dtype], adapter_parameters(config, shape, layout, pp)
    trained = shard = adapters or parameters
    if config.engine.distributed_optimizer:
        ranks, experts = layout.dp * layout.cp, expert_adapter_parameters(config, shape, layout, pp) if adapters else expert_parameters(shape, layout, pp)
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
