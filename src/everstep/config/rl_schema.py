"""The sections of the configuration that are about reinforcement learning; see ``schema.py``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from everstep.config.section import Section


class DpoConfig(Section):
    """Direct preference optimisation (recipe=dpo, arXiv 2305.18290)."""

    loss: Literal["sigmoid", "hinge", "ipo"] = Field(
        "sigmoid",
        description="Of a pair's margin: `sigmoid` (DPO), `hinge` (RSO, arXiv 2309.06657), or `ipo` (arXiv 2310.12036: the square of its distance from "
        "a target, so that it is not pushed on). Formulas: docs/algorithms.md.",
    )
    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference model: the factor of log-ratios in the loss.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Assumed probability that a preference is the wrong way round (conservative DPO; dpo.loss=sigmoid)."
    )
    pairs_per_step: int = Field(16, ge=1, description="Pairs of one optimizer step, over all replicas; each is two sequences.")
    steps: int = Field(100, ge=1, description="Optimizer steps.")
    eval_every: int = Field(0, ge=0, description="Steps between evaluations on data.eval_source; 0: only after the last.")
    eval_pairs: int = Field(128, ge=1, description="Pairs of one evaluation (the first ones of the held-out data).")


class WarmupConfig(Section):
    """A short SFT phase before reinforcement learning, in the same run, through the same step transaction."""

    steps: int = Field(0, ge=0, description="Optimizer steps of SFT before RL; 0: none.")
    samples_per_step: int = Field(32, ge=1, description="Samples of one warm-up step.")
    lr: float = Field(1e-3, gt=0, description="Learning rate of the warm-up (constant).")
    source: str | None = Field(
        None,
        description="Data of the warm-up, as data.source with data.format=chat or prompt+completion.",
    )
    source_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the warm-up source.",
    )


class ImportanceConfig(Section):
    """Truncated importance sampling: the difference between the engine that generated and the one that trains (rl/importance.py)."""

    level: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Weigh the policy loss of each token by p(trainer)/p(rollout) of the `token`, or of its whole completion (`sequence`), "
        "truncated. Costs a forward pass over the samples of an iteration. `none`: off.",
    )
    upper: float = Field(2.0, gt=0, description="Greatest weight; larger ones are cut to it.")
    lower: float | None = Field(
        None, ge=0, description="With it, weights below this or above rl.importance.upper become 0 (IcePop); null: none are masked."
    )
    normalise: bool = Field(False, description="Divide the weights by their mean over the iteration (verl's option).")


class RlConfig(Section):
    iterations: int = Field(100, ge=1, description="RL iterations: rollout, reward, advantages, update.")
    prompts_per_step: int = Field(16, ge=1, description="Prompts per iteration, over all replicas.")
    samples_per_prompt: int = Field(8, ge=1, description="Completions per prompt (the group of GRPO).")
    dynamic_sampling_rounds: int = Field(
        0,
        ge=0,
        description="DAPO's dynamic sampling: how many times an iteration generates anew in the place of prompts whose completions all have "
        "the same reward, which are left out and recorded. If too few are left then, the last of those fill the step. 0: off.",
    )
    passes: int = Field(1, ge=1, description="Passes over an iteration's samples.")
    updates_per_pass: int = Field(
        1,
        ge=1,
        description="Optimizer steps per pass; must divide prompts_per_step*samples_per_prompt.",
    )
    advantage: Literal[
        "grpo", "grpo_batch_std", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"
    ] = Field(
        "grpo",
        description="Advantage estimator: `grpo` (reward minus mean of the prompt's completions, over their std), `grpo_batch_std` (over "
        "the std of all rewards), `dr_grpo` (mean only), `rloo` (mean of the others), `reinforce_plus_plus` (rewards to come, "
        "whitened over the batch), `reinforce_plus_plus_baseline` (dr_grpo, whitened), `gae` (from a critic's values; recipe=ppo, which has no other). Formulas: docs/algorithms.md.",
    )
    advantage_eps: float = Field(
        1e-6,
        gt=0,
        description="Added to the std (grpo, grpo_batch_std); verl 1e-6, TRL 1e-4, OpenRLHF 1e-9.",
    )
    lone_completion: Literal["zero", "reward"] = Field(
        "zero",
        description="Advantage of a completion without another of its prompt: `zero` (TRL), or its `reward`, as if the mean were 0 and the "
        "std 1 (verl).",
    )
    whitening: Literal["none", "sample", "population"] = Field(
        "sample",
        description="Whitening of reinforce_plus_plus, its baseline variant and gae over all tokens of the iteration: variance with divisor "
        "N - 1 (`sample`, verl) or N (`population`, OpenRLHF), or `none`.",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount of rewards from token to token (reinforce_plus_plus, gae).")
    lam: float = Field(
        1.0, ge=0, le=1, description="Lambda of gae: 1: rewards to come minus the value; 0: one step's reward and the change of value."
    )
    gaps: Literal["skip", "zero"] = Field(
        "skip",
        description="Tokens inside a completion that do not count (loss_mask 0), for reinforce_plus_plus and gae: `skip`: the next one that counts "
        "is the next token (verl); `zero`: they have reward 0, and discounts run through them (OpenRLHF).",
    )
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        "token-mean",
        description="How token losses become one number: mean over tokens; mean over completions of the mean, the sum, or the sum over "
        "rl.loss_horizon_tokens (Dr.GRPO). Denominators are global over the step.",
    )
    loss_horizon_tokens: int | None = Field(
        None, ge=1, description="Divisor of rl.loss_aggregation=seq-mean-token-sum-norm; default: rollout.max_response_tokens."
    )
    empty_rows: Literal["skip", "count"] = Field(
        "skip",
        description="Completions without a token that counts (dropped ones): left out of the number of completions that the seq-mean "
        "aggregations divide by (verl), or in it (`count`, TRL).",
    )
    ratio: Literal["token", "sequence", "sequence_token"] = Field(
        "token",
        description="Probability ratio that is clipped: of each `token` (PPO, GRPO), or the geometric mean over the completion (GSPO), with "
        "the gradient of all its tokens (`sequence`, TRL) or of each token's own log-probability (`sequence_token`, GSPO-token, verl). "
        "GSPO wants small ranges: 3e-4 and 4e-4.",
    )
    clip_low: float = Field(0.2, ge=0, description="PPO clip range below 1.")
    clip_high: float = Field(0.2, ge=0, description="PPO clip range above 1 (larger: clip-higher).")
    dual_clip: float | None = Field(
        3.0,
        gt=1,
        description="Dual-clip constant for negative advantages; null: off.",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the KL to the reference model (with rl.kl_target: the one to begin with); 0: no reference model is "
        "kept.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="Where KL is subtracted: as a term of the `loss` (GRPO), or from the `reward` of each token (PPO; rl.kl_kind=k1 is the "
        "usual choice there).",
    )
    kl_kind: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = Field(
        "k3",
        description="KL estimator (Schulman): `k1` log-ratio, `k2` half its square, `k3` unbiased and positive, `abs`; `k1+` and `k3+` have the "
        "value of the one and the gradient of k2. In a loss, k1 pulls nowhere.",
    )
    kl_clamp: Literal["k3", "all", "none"] = Field(
        "k3",
        description="Bounds of the KL estimate of a token far from the reference: `k3` clamps the log-ratio of k3 to [-20, 20] and its value to "
        "[-10, 10] (verl); `all` the value of every estimator to [-10, 10] (OpenRLHF); `none` nothing (TRL). A clamped token has no gradient.",
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description="Adapt the coefficient so that the KL per token, in nats, approaches this; null: rl.kl_coef stays what it is.",
    )
    kl_horizon_samples: int = Field(
        10_000, ge=1, description="Completions over which an error of rl.kl_target changes the coefficient by itself (at most 20 %)."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Entropy bonus, aggregated as the policy loss is.")
    importance: ImportanceConfig = ImportanceConfig()
    eval_every: int = Field(
        0,
        ge=0,
        description="Iterations between evaluations on data.eval_source; 0: only before the first and after the last.",
    )
    eval_before: bool = Field(True, description="Evaluate on data.eval_source, if there is one, before the first iteration.")


class RolloutConfig(Section):
    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="What generates: `transformers`, on any device, in the ranks or by rollout.engines; `vllm`, by rollout.engines only."
    )
    tp: int = Field(
        1, ge=1, description="Devices of one of rollout.engines, over which its model is split (tensor parallelism, whatever layout.tp is); more than 1 with "
        "rollout.engine=vllm.",
    )
    gpu_memory_fraction: float | None = Field(
        None, gt=0, le=1, description="Share of a device's memory that a vLLM engine takes for weights and cache; null: vLLM's own default."
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of vLLM's EngineArgs, by its names, such as `enforce_eager`; those that everstep sets itself are refused."
    )
    cuda_graphs: bool = Field(
        True, description="On GPUs, capture the pass that makes a token as CUDA graphs: one launch instead of hundreds. False (vLLM: enforce_eager) saves their memory. "
        "Models with experts do without in rollout.engine=transformers."
    )
    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling mass.")
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0: all.")
    max_response_tokens: int = Field(256, ge=1, description="Longest completion in tokens.")
    samples_per_batch: int = Field(64, ge=1, description="Sequences generated together by one rank, or one engine.")
    engines: int = Field(
        0,
        ge=0,
        description="Processes that only generate, each on a device of its own (launcher=ray). They get the weights after every update, "
        "and one that dies is replaced; nothing it had made is lost. 0: the ranks generate themselves, between updates.",
    )
    colocated: bool = Field(
        False, description="rollout.engines run on the devices of the first ranks, one each, and take turns with training: an engine's weights and cache leave "
        "the device before ranks compute, and ranks give back what engine.offload names while engines generate. False: devices of their own.",
    )
    on_spares: bool = Field(
        False, description="The device of an idle spare (layout.spares) generates as well, by an engine beside rollout.engines, which leaves at once when the spare is "
        "needed as a trainer; what it was at goes on elsewhere.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="Iterations whose samples rollout.engines generate ahead, while earlier ones are trained: their weights are older by so "
        "many iterations at most. 1: one-step-off. From 2 on a completion may be by several versions, each token saying which. Needs rl.importance. "
        "0: generation and training take turns.",
    )
    tokens_per_call: int = Field(
        32, ge=1, description="Tokens that an engine makes for each of its sequences before it says what it has and takes new ones."
    )
    call_timeout_s: float = Field(
        60.0, gt=0, description="Seconds for rollout.tokens_per_call tokens, after which an engine is stuck and is replaced."
    )
    sync_timeout_s: float = Field(120.0, gt=0, description="Seconds for all weights to reach an engine.")
    engine_restarts: int = Field(
        10, ge=0, description="Engines that may be started again in a run. When none is left that lives, the run ends, resumable."
    )
    poison_after: int = Field(
        2,
        ge=1,
        description="A sequence that saw so many engines die is generated by an engine that has nothing else; if that dies too, the sequence "
        "is given up: recorded, and without weight in training. Deaths by fault injection do not count.",
    )
    eval_temperature: float = Field(0.0, ge=0, description="Temperature of evaluation; 0: greedy.")
    eval_samples: int = Field(
        128,
        ge=1,
        description="Prompts of one evaluation (the first ones of the held-out data).",
    )


class RewardTerm(Section):
    """One of several reward functions whose weighted sum is the reward."""

    function: str | None = Field(None, description="As reward.function.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments bound to the function.")
    weight: float = Field(1.0, description="Factor of the function's value in the reward.")


class RewardConfig(Section):
    function: str | None = Field(
        None,
        description="`module:function(prompt, completion, record) -> float` (`async def` is fine), or one of `exact_match`, `number_match`, "
        "`position_match`, `math_verify`, `format_match`, `brevity`; default: the task's own scorer for reasoning_gym sources.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments bound to the reward function.",
    )
    terms: list[RewardTerm] = Field(
        default_factory=list, description="Several functions, instead of reward.function: the reward is the sum of weight times value."
    )
    timeout_s: float = Field(
        30.0, gt=0, description="Time for one call of a reward function. A process that exceeds it is killed, and its sample marked."
    )
    workers: int = Field(
        2, ge=1, description="Processes that call reward functions (built-ins that cannot hang need none)."
    )
    concurrency: int = Field(16, ge=1, description="Calls of `async` reward functions that one process has under way at a time.")
    on_error: Literal["zero", "drop", "stop"] = Field(
        "zero",
        description="A sample whose reward function raises, hangs, crashes or returns no finite number gets reward 0, is `drop`ped (no token "
        "of it counts, in its group neither), or stops the run. It is recorded with the reason. If all samples fail, the run stops.",
    )
    overlong_cache_tokens: int | None = Field(
        None,
        ge=1,
        description="DAPO's soft overlong punishment: in the last so many tokens before rollout.max_response_tokens the reward falls, by "
        "reward.overlong_factor in the end; not in evaluations. null: off.",
    )
    overlong_factor: float = Field(1.0, gt=0, description="Punishment of a completion of the greatest length.")
