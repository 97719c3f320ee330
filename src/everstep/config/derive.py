"""Sizes that follow from the configuration: batch arithmetic, steps, ranks, device.

Pure, but for :func:`device`, which looks at the machine. A size that does not
come out whole is a :class:`ConfigError` naming the keys to change.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from everstep.config.schema import Config, EngineConfig, FusedKernel, TrainConfig
from everstep.errors import ConfigError
from everstep.layout import Layout


def is_rl(config: Config) -> bool:
    """Whether the recipe generates, scores and reinforces."""
    return config.recipe in ("grpo", "ppo")


def critic(config: Config) -> Config:
    """``config`` as the critic's engine sees it: its own model and optimizer, the rest shared with the actor."""
    model = config.model.model_copy(update={"path": config.critic.path or config.model.path})
    return config.model_copy(update={"model": model, "optimizer": config.critic.optimizer})


def layout(config: Config) -> Layout:
    """The ranks that the configuration asks for."""
    sizes = config.layout
    return Layout(
        replicas=sizes.replicas,
        spares=sizes.spares,
        tp=sizes.tp,
        cp=sizes.cp,
        ep=sizes.ep,
        dp=sizes.dp,
        pp=sizes.pp,
        vpp=sizes.vpp,
        layers_per_stage=tuple(sizes.layers_per_stage or ()),
    )


#: Megatron's fused matrices, and what they hold under transformers' names.
LORA_MATRICES = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "proj": ("o_proj",),
    "fc1": ("gate_proj", "up_proj"),
    "fc2": ("down_proj",),
}
FEED_FORWARD = LORA_MATRICES["fc1"] + LORA_MATRICES["fc2"]


def engine_devices(config: Config) -> int:
    """Devices that rollout engines have beside those of the layout."""
    return 0 if config.rollout.colocated else config.rollout.engines * config.rollout.tp


def lora_matrices(config: Config) -> tuple[str, ...]:
    """Transformers' names of the matrices with adapters, in the model's order; none without LoRA. ``ConfigError``."""
    if not config.lora.rank:
        return ()
    known = [name for names in LORA_MATRICES.values() for name in names]
    wanted: set[str] = set()
    for target in config.lora.targets:
        if target not in LORA_MATRICES and target not in known:
            raise ConfigError(
                f"lora.targets: {target!r} matches no matrix of the model; there are {', '.join(LORA_MATRICES)} and {', '.join(known)}"
            )
        wanted.update(LORA_MATRICES.get(target, (target,)))
    if not wanted:
        raise ConfigError(
            f"lora.targets is empty, so lora.rank={config.lora.rank} would train nothing; name some of "
            f"{', '.join(LORA_MATRICES)}, or set lora.rank=0 to train all weights"
        )
    return tuple(name for name in known if name in wanted)


def adapted_in(config: Config, experts: bool) -> tuple[str, ...]:
    """Those of ``lora_matrices`` that have adapters in a layer of a model with experts, in one whose feed-forward part they are (``experts``)
    or in another: feed-forward matrices in the one without lora.experts not, with it in the other one not, as ``peft`` has it."""
    return tuple(name for name in lora_matrices(config) if name not in FEED_FORWARD or config.lora.experts == experts)


def refuse_adapted_experts(matrices: Iterable[str]) -> None:
    """``ConfigError`` if there are any ``matrices``: those of ``lora_matrices`` that the model has nowhere but in experts."""
    if found := list(matrices):
        raise ConfigError(
            f"lora.targets: {', '.join(found)} match only matrices of experts, which get no adapters; set lora.experts=true, or name "
            "others, such as lora.targets=[qkv,proj]"
        )


FUSED_KERNELS: frozenset[str] = frozenset(get_args(FusedKernel))
_WITH_TRITON = frozenset({"norm", "rope", "swiglu", "logprobs"})


def fused_kernels(engine: EngineConfig, cuda: bool) -> frozenset[str]:
    """The fused kernels that ``engine.fused_kernels`` means, on a CUDA device or not. ConfigError if it names one that cannot be had."""
    wanted = engine.fused_kernels
    possible: frozenset[str] = frozenset()
    if cuda:
        possible = FUSED_KERNELS if has_triton() else FUSED_KERNELS - _WITH_TRITON
        if engine.deterministic:
            possible -= {"attention"}
    if wanted == "auto":
        return possible
    if wanted == "none":
        return frozenset()
    if missing := sorted(set(wanted) - possible):
        why = "triton is not installed" if cuda else "there is no CUDA device"
        if missing == ["attention"] and cuda:
            why = "cuDNN's attention is not deterministic, and engine.deterministic=true"
        raise ConfigError(f"engine.fused_kernels asks for {', '.join(missing)}, but {why}; leave it out, or use auto")
    return frozenset(wanted)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class StepSizes:
    """Batch arithmetic of one kind of optimizer step.

    A slot is what one replica runs at a time: one micro-batch for each inner data-parallel rank. Slots are what
    replicas share out; with ``slots`` not divisible by the replicas, the first ones take one more. If samples are packed,
    ``slots`` and ``slots_per_replica`` are the most that a step can have; it has fewer where samples are shorter.
    """

    samples_per_step: int
    samples_per_slot: int | None  # None: as many as fit (train.tokens_per_micro_batch)
    slots: int
    slots_per_replica: tuple[int, ...]
    max_tokens: int  # of one sample
    steps: int
    tokens_per_row: int | None = None  # if samples are packed

    @property
    def samples_per_replica(self) -> tuple[int, ...] | None:
        """None if samples are packed: then tokens are shared out, not samples."""
        if self.samples_per_slot is None:
            return None
        return tuple(slots * self.samples_per_slot for slots in self.slots_per_replica)

    @property
    def max_tokens_per_step(self) -> int:
        """Tokens of a step if every sample has the greatest length allowed."""
        return self.samples_per_step * self.max_tokens


def micro_batch_size(train: TrainConfig) -> int:
    """Samples of one forward pass where they are not packed."""
    assert train.tokens_per_micro_batch is None
    return train.micro_batch_size or 1


def tokens_of_forward(config: Config, max_tokens: int) -> int:
    """Tokens of one forward pass on one rank (before layout.cp cuts them), at most, if a sample has at most ``max_tokens``."""
    return config.train.tokens_per_micro_batch or micro_batch_size(config.train) * max_tokens


def step_sizes(config: Config, samples_key: str, samples: int, max_tokens: int, steps: int) -> StepSizes:
    """Cut ``samples`` of one step into slots. ``samples_key`` is what the user would change, for the errors."""
    if config.train.tokens_per_micro_batch is not None:
        return _packed_sizes(config, samples_key, samples, max_tokens, steps)
    micro, dp, replicas = micro_batch_size(config.train), config.layout.dp, config.layout.replicas
    per_slot = micro * dp
    if samples % per_slot:
        nearest = max(per_slot, round(samples / per_slot) * per_slot)
        raise ConfigError(
            f"{samples_key}={samples} cannot be cut into micro-batches: it must be a multiple of "
            f"train.micro_batch_size*layout.dp={micro}*{dp}={per_slot} (say {nearest})"
        )
    slots = samples // per_slot
    if slots < replicas:
        raise ConfigError(
            f"{samples_key}={samples} gives {slots} slot{'s' * (slots != 1)} of {per_slot} samples "
            f"(train.micro_batch_size*layout.dp), too few for layout.replicas={replicas}: "
            f"raise it to {replicas * per_slot}, or lower train.micro_batch_size or layout.replicas"
        )
    return StepSizes(samples, per_slot, slots, _shares(slots, replicas), max_tokens, steps)


def _packed_sizes(config: Config, samples_key: str, samples: int, max_tokens: int, steps: int) -> StepSizes:
    """The most slots that ``everstep.data.packing`` can make: as if every sample had the greatest length."""
    budget, dp, replicas = config.train.tokens_per_micro_batch, config.layout.dp, config.layout.replicas
    assert budget is not None
    if config.train.micro_batch_size is not None:
        raise ConfigError(
            f"train.micro_batch_size={config.train.micro_batch_size} and train.tokens_per_micro_batch={budget} exclude each other; "
            "set one of them to null"
        )
    if budget < max_tokens:
        raise ConfigError(
            f"train.tokens_per_micro_batch={budget} is too small for a sample of {max_tokens} tokens, which is what "
            f"{_max_tokens_keys(config, max_tokens)} allows; raise the one, or lower the other"
        )
    if samples < dp * replicas:
        raise ConfigError(
            f"{samples_key}={samples} is too few for layout.dp*layout.replicas={dp}*{replicas}: each of those ranks needs a sample "
            f"of its own; raise it to {dp * replicas}"
        )
    rows = -(-samples // (budget // max_tokens))
    slots = -(-rows // dp)
    if slots < replicas:  # even if every sample had the greatest length
        raise ConfigError(
            f"train.tokens_per_micro_batch={budget} packs {samples_key}={samples} into {slots} slot{'s' * (slots != 1)} at most, too few "
            f"for layout.replicas={replicas}: lower it, or raise {samples_key}"
        )
    return StepSizes(samples, None, slots, _shares(slots, replicas), max_tokens, steps, budget)


def _max_tokens_keys(config: Config, max_tokens: int) -> str:
    if config.recipe == "dpo":
        return "2*data.max_tokens"
    return "data.max_tokens" if max_tokens == config.data.max_tokens else "data.max_prompt_tokens+rollout.max_response_tokens"


def _shares(slots: int, replicas: int) -> tuple[int, ...]:
    base, more = divmod(slots, replicas)
    return tuple(base + (replica < more) for replica in range(replicas))


@dataclass(frozen=True)
class RlSizes:
    """RL iterations, numbered from 1: rollout, then optimizer steps of the actor, and of the critic if there is one.

    In the first ``critic_warmup`` iterations the critic alone is trained.
    """

    samples_per_iteration: int
    updates_per_iteration: int  # of the actor, once it is trained
    iterations: int
    critic_updates_per_iteration: int = 0
    critic_warmup: int = 0

    def actor_steps_before(self, iteration: int) -> int:
        return self.updates_per_iteration * max(0, iteration - 1 - self.critic_warmup)

    def critic_steps_before(self, iteration: int) -> int:
        return self.critic_updates_per_iteration * (iteration - 1)

    def steps_before(self, iteration: int) -> int:
        """Optimizer steps of both models in the iterations before this one; those of a warm-up by SFT do not count."""
        return self.actor_steps_before(iteration) + self.critic_steps_before(iteration)

    @property
    def actor_steps(self) -> int:
        return self.actor_steps_before(self.iterations + 1)

    @property
    def critic_steps(self) -> int:
        return self.critic_steps_before(self.iterations + 1)


@dataclass(frozen=True)
class Sizes:
    """Everything derived. ``main`` is the recipe's own step, ``warmup`` that of the SFT phase before RL, if any."""

    layout: Layout
    main: StepSizes
    warmup: StepSizes | None
    rl: RlSizes | None
    inner_steps: int = 1  # optimizer steps of one transaction: a round of semi-synchronous training, else one

    def updates_of(self, iteration: int) -> int:
        """Optimizer steps of an RL iteration, of either model."""
        return self.rl.steps_before(iteration + 1) - self.rl.steps_before(iteration) if self.rl else 0

    @property
    def warmup_transactions(self) -> int:
        return self.warmup.steps // self.inner_steps if self.warmup else 0

    @property
    def total_steps(self) -> int:
        """Transactions: optimizer steps of either model, or rounds of semi-synchronous training. What is numbered in logs, faults and
        checkpoints."""
        critic = self.rl.critic_steps if self.rl else 0
        return self.main.steps // self.inner_steps + critic + self.warmup_transactions


def inner_steps(config: Config) -> int:
    """Optimizer steps of one transaction. ``ConfigError`` if ``semisync.sync_every`` does not come out."""
    semisync = config.semisync
    if semisync.method == "none":
        return 1
    if semisync.method != "streaming_diloco":
        return semisync.sync_every
    count = semisync.fragments if isinstance(semisync.fragments, int) else len(semisync.fragments)
    if count < 1:
        raise ConfigError(f"semisync.fragments={semisync.fragments}: a model has at least one fragment")
    if semisync.sync_every % count:
        raise ConfigError(
            f"semisync.sync_every={semisync.sync_every} must be a multiple of the {count} fragments of semisync.fragments, which take turns"
        )
    return semisync.sync_every // count


def sizes(config: Config) -> Sizes:
    """All derived sizes. ``ConfigError`` if the batch arithmetic does not come out."""
    found = dataclasses.replace(_sizes(config), inner_steps=inner_steps(config))
    parts = [("sft.steps" if config.recipe == "sft" else "the optimizer steps of rl.iterations", found.main)]
    parts += [("warmup.steps", found.warmup)] if found.warmup else []
    for key, step in parts:
        if step.steps % found.inner_steps:
            raise ConfigError(
                f"{key}={step.steps} are not whole rounds of semisync.method={config.semisync.method}, which have {found.inner_steps} "
                "inner steps (semisync.sync_every / fragments); choose a multiple"
            )
    return found


def _sizes(config: Config) -> Sizes:
    if config.recipe == "sft":
        main = step_sizes(config, "sft.samples_per_step", config.sft.samples_per_step, config.data.max_tokens, config.sft.steps)
        return Sizes(layout(config), main, None, None)
    if config.recipe == "dpo":
        return Sizes(layout(config), _pair_sizes(config), None, None)

    rl, warm = config.rl, config.warmup
    samples = rl.prompts_per_step * rl.samples_per_prompt
    product = f"rl.prompts_per_step*rl.samples_per_prompt={rl.prompts_per_step}*{rl.samples_per_prompt}={samples}"
    if samples % rl.updates_per_pass:
        raise ConfigError(f"rl.updates_per_pass={rl.updates_per_pass} does not divide {product}; change one of them")
    has_critic = config.recipe == "ppo"
    if has_critic and config.critic.warmup >= rl.iterations:
        raise ConfigError(
            f"critic.warmup={config.critic.warmup} leaves none of rl.iterations={rl.iterations} to train the actor in; lower the one, or "
            "raise the other"
        )
    iterations = RlSizes(
        samples, rl.passes * rl.updates_per_pass, rl.iterations,
        (config.critic.passes or rl.passes) * rl.updates_per_pass if has_critic else 0, config.critic.warmup if has_critic else 0,
    )  # fmt: skip
    if config.semisync.method != "none":
        main = _island_sizes(config, product, samples)
    else:
        main = step_sizes(
            config,
            "rl.prompts_per_step*rl.samples_per_prompt" + ("/rl.updates_per_pass" if rl.updates_per_pass > 1 else ""),
            samples // rl.updates_per_pass,
            config.data.max_prompt_tokens + config.rollout.max_response_tokens,
            iterations.actor_steps,
        )
    warmup = None
    if warm.steps:
        warmup = step_sizes(config, "warmup.samples_per_step", warm.samples_per_step, config.data.max_tokens, warm.steps)
    return Sizes(layout(config), main, warmup, iterations)


def _pair_sizes(config: Config) -> StepSizes:
    """A pair is two sequences, which never part: packed, it is one unit of twice the greatest length."""
    dpo, train = config.dpo, config.train
    if train.tokens_per_micro_batch is not None:
        packed = step_sizes(config, "dpo.pairs_per_step", dpo.pairs_per_step, 2 * config.data.max_tokens, dpo.steps)
        return dataclasses.replace(packed, samples_per_step=2 * dpo.pairs_per_step, max_tokens=config.data.max_tokens)
    if micro_batch_size(train) % 2:
        raise ConfigError(
            f"train.micro_batch_size={micro_batch_size(train)} would part pairs of recipe=dpo; give an even number, such as "
            f"{micro_batch_size(train) + 1}"
        )
    return step_sizes(config, "2*dpo.pairs_per_step", 2 * dpo.pairs_per_step, config.data.max_tokens, dpo.steps)


def _island_sizes(config: Config, product: str, samples: int) -> StepSizes:
    """An RL step of islands: a slot is a prompt, with all its completions, for each inner data-parallel rank of one replica."""
    per_slot, replicas = config.rl.samples_per_prompt * config.layout.dp, config.layout.replicas
    if samples % per_slot or samples // per_slot < replicas:
        raise ConfigError(
            f"{product}: with semisync.method={config.semisync.method} each of layout.replicas={replicas} replicas takes whole prompts, as many for "
            f"each of layout.dp={config.layout.dp} ranks; rl.prompts_per_step={config.rl.prompts_per_step} must be a multiple of layout.dp, and at "
            f"least {replicas * config.layout.dp}"
        )
    slots, max_tokens = samples // per_slot, config.data.max_prompt_tokens + config.rollout.max_response_tokens
    budget = config.train.tokens_per_micro_batch
    if budget is not None and budget < max_tokens:
        raise ConfigError(
            f"train.tokens_per_micro_batch={budget} is too small for a sample of {max_tokens} tokens, which is what "
            f"{_max_tokens_keys(config, max_tokens)} allows; raise the one, or lower the other"
        )
    return StepSizes(samples, per_slot, slots, _shares(slots, replicas), max_tokens, config.rl.iterations)


# ---------------------------------------- what depends on where we are


def device(config: Config, environ: Mapping[str, str] = os.environ) -> Literal["cpu", "cuda"]:
    """``auto`` is ``cuda`` if this machine has a device that torch can use."""
    if config.device == "auto":
        return "cuda" if cuda_devices(environ) else "cpu"
    return config.device


def cuda_devices(environ: Mapping[str, str] = os.environ) -> int:
    """CUDA devices of this machine that are visible to us, counted without importing torch or touching a device."""
    if not _torch_has_cuda():
        return 0
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0  # no driver
    try:
        present: int = pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # CUDA ignores what comes after the first entry that is no device.
    count = 0
    for entry in (part.strip() for part in visible.split(",")):
        if not entry or entry == "-1" or (entry.isdecimal() and int(entry) >= present):
            break
        count += 1
    return count


def _torch_has_cuda() -> bool:
    """Whether torch was built with CUDA; its version.py says so, and imports nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = importlib.util.spec_from_file_location("_torch_version", Path(spec.origin).with_name("version.py"))
    if version is None or version.loader is None:
        return False
    module = importlib.util.module_from_spec(version)
    version.loader.exec_module(module)
    return getattr(module, "cuda", None) is not None


def saved_steps(config: Config, sizes: Sizes) -> list[int]:
    """Steps after which a run from its start writes a checkpoint: a recipe may save after each of its iterations, or steps."""
    warm = sizes.warmup_transactions
    ends: Iterable[int] = range(1, sizes.total_steps - warm + 1)
    if sizes.rl and sizes.inner_steps == 1:
        ends = [sizes.rl.steps_before(n + 1) for n in range(1, sizes.rl.iterations + 1)]
    saved, last = [], 0
    for step in (*range(1, warm + 1), *(warm + end for end in ends)):
        every, at_end = config.checkpoint.every_steps, config.checkpoint.at_end and step == sizes.total_steps
        if (every and step - last >= every) or at_end:
            saved.append(step)
            last = step
    return saved


def rollout_steps(config: Config, sizes: Sizes) -> list[int]:
    """Steps that a rollout of training prompts precedes: the first update, of whichever model, of each RL iteration. None in
    semi-synchronous training, where they are a part of the round."""
    if not sizes.rl or config.semisync.method != "none":
        return []
    warm = sizes.warmup.steps if sizes.warmup else 0
    return [warm + sizes.rl.steps_before(n) + 1 for n in range(1, sizes.rl.iterations + 1)]


def held_s(config: Config) -> float:
    """Seconds that a run with fewer replicas than recovery.min_replicas waits for others; 0: only for those that are on their way."""
    if not config.recovery.enabled:
        return 0.0
    if config.recovery.below_minimum == "wait":
        return config.recovery.below_minimum_wait_s
    return config.lighthouse.wait_s if config.replica.id is not None else 0.0
