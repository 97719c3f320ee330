"""The configuration: one typed, frozen tree. A field's description is what ``everstep explain KEY`` prints.

Units are part of the names: ``_s`` seconds, ``_tokens`` tokens, ``samples_per_step`` samples. A default
belongs here and nowhere else. Fields exist only once something obeys them. Files and overrides become a tree
in ``load.py``, combinations are checked in ``check.py``, sizes that follow are computed in ``derive.py``. The
sections of reinforcement learning are in ``rl_schema.py``, that of recovery in ``recovery_schema.py``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from everstep.config.local_schema import LighthouseConfig, LocalConfig, ReplicaConfig
from everstep.config.recovery_schema import RecoveryConfig
from everstep.config.rl_schema import DpoConfig, RewardConfig, RlConfig, RolloutConfig, WarmupConfig
from everstep.config.section import Section, Where
from everstep.config.watch_schema import AlertConfig, LogConfig, WatchConfig


class ModelConfig(Section):
    path: str = Field(
        description="Where the model comes from: a directory with config.json (and safetensors or one "
        "GGUF file), `hf:org/name`, `modelscope:org/name`, or `package:NAME` for a Python "
        "package that ships a GGUF file.",
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="`pretrained` loads weights from model.path; `random` trains from scratch (config.json only).",
    )
    tokenizer: str | None = Field(None, description="Directory, file or hub id of the tokenizer; default: model.path.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type of parameters and activations. bfloat16 keeps float32 master weights and reduces gradients in float32.",
    )


class LayoutConfig(Section):
    replicas: int = Field(
        1,
        ge=1,
        description="Full copies of the model. The replica is the unit that may fail.",
    )
    spares: int = Field(
        0,
        ge=0,
        description="Warm processes, one device each, that take the place of dead ranks (launcher ray).",
    )
    tp: int = Field(1, ge=1, description="Tensor-parallel ranks inside a replica.")
    cp: int = Field(
        1,
        ge=1,
        description="Context-parallel ranks inside a replica: each computes a part of every sequence.",
    )
    pp: int = Field(1, ge=1, description="Pipeline-parallel ranks inside a replica.")
    vpp: int = Field(
        1,
        ge=1,
        description="Model chunks of each pipeline rank (interleaved schedule): a smaller bubble for more communication. "
        "Micro-batches are padded with empty ones to a multiple of layout.pp.",
    )
    layers_per_stage: list[int] | None = Field(
        None,
        description="Layers of each of the layout.pp*layout.vpp stages, from the input to the output; default: balanced, "
        "the first and the last stage taking the fewer.",
    )
    dp: int = Field(1, ge=1, description="Data-parallel ranks inside a replica (inner DP).")
    ep: int = Field(
        1,
        ge=1,
        description="Expert-parallel ranks inside a replica: each holds an equal part of the experts of a layer. They are the data- and "
        "context-parallel ranks in another role, so layout.ep divides layout.dp*layout.cp and adds no ranks. Inside an "
        "expert, matrices are cut over layout.tp like all others.",
    )


class OffloadConfig(Section):
    """What a rank keeps in host memory instead of the device's while the device serves something else."""

    parameters: bool = Field(
        False,
        description="While rollouts are generated, keep the engine's parameters in host memory (page-locked on GPU machines): they "
        "leave the device once the generation engine has the weights, and come back with the first computation that needs them. Also while "
        "a rank that lived on builds its engine again.",
    )
    gradients: bool = Field(
        False,
        description="Free the gradient buffers from the rollout to the next optimizer step (4 bytes per trained parameter of a rank).",
    )
    optimizer: bool = Field(
        False,
        description="From the rollout until the next optimizer step is applied, keep Adam's moments and float32 masters in host memory. "
        "Also while a rank that lived on builds its engine again.",
    )
    idle_model: bool = Field(
        False,
        description="Of actor and critic (recipe=ppo) keep only the one that works on the device: parameters, gradients and optimizer state "
        "of the other are in host memory meanwhile.",
    )
    reference: bool = Field(
        False,
        description="Keep the reference model (rl.kl_coef) in host memory; it is on the device only while its log-probabilities are "
        "computed. Not with LoRA, whose reference shares the frozen weights.",
    )


FusedKernel = Literal["norm", "rope", "swiglu", "logprobs", "adam", "attention"]


class EngineConfig(Section):
    distributed_optimizer: bool = Field(
        True,
        description="Shard optimizer state over the inner data-parallel ranks (Megatron's distributed optimizer).",
    )
    sequence_parallel: bool = Field(
        False,
        description="Between attention and feed-forward, cut activations along the sequence over the tensor-parallel ranks.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activation recomputation in backward, to save memory: `selective` the feed-forward layers and, with "
        "layout.cp, attention with its gathered keys and values; `full` every layer whole.",
    )
    deterministic: bool = Field(
        True,
        description="Deterministic kernels: the same seed and layout give bitwise the same weights (slower on GPU).",
    )
    logprob_chunk_tokens: int = Field(
        0,
        ge=0,
        description="Tokens whose logits exist at one time: the output projection, log-probabilities, entropy and their gradients are "
        "computed chunk by chunk, and logits once more in backward. Saves memory where the vocabulary is large, for one more product "
        "with the output matrix. 0: all tokens of a micro-batch at once, logits kept for backward.",
    )
    fused_kernels: Literal["auto", "none"] | list[FusedKernel] = Field(
        "auto",
        description="Fused GPU kernels: `auto`: all that this device has and engine.deterministic allows; `none`; or a list of them: `norm`, "
        "`rope`, `swiglu`, `logprobs` (need triton), `adam`, `attention` (cuDNN's, not deterministic). Results agree within rounding.",
    )
    offload: OffloadConfig = OffloadConfig()


class MoeConfig(Section):
    """Models with mixtures of experts (Qwen3-MoE, Mixtral)."""

    aux_loss_coef: float | None = Field(
        None,
        ge=0,
        description="Coefficient of the auxiliary loss that balances experts, of each micro-batch by itself and weighed like its loss; "
        "default: the model's router_aux_loss_coef if its config.json has output_router_logits=true, else 0 (as transformers).",
    )


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685): y = W x + alpha/rank B A x, with W frozen."""

    rank: int = Field(
        0,
        ge=0,
        description="Rank of the LoRA adapters. The model is then frozen and only adapters are trained; 0: off, all weights are "
        "trained.",
    )
    alpha: float = Field(16.0, gt=0, description="Scale of LoRA: adapters add lora.alpha/lora.rank times what they compute.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Probability of dropping an element of an adapter's input in training.")
    targets: list[str] = Field(
        ["qkv", "proj", "fc1", "fc2"],
        description="What gets adapters: `qkv`, `proj` (attention in and out), `fc1`, `fc2` (feed-forward in and out), or single "
        "matrices by their transformers names, such as `q_proj`.",
    )
    experts: bool = Field(
        False,
        description="Mixtures of experts: the feed-forward matrices that lora.targets names get adapters in experts, a pair for each expert. A "
        "model that also has layers without experts has none in those then, since `peft` knows either.",
    )


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of a linear, cosine or wsd schedule.")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant",
        description="Learning rate after warm-up; `wsd` (warm-up, stable, decay) is constant until its last "
        "optimizer.wsd_decay_steps.",
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up from 0 to lr.")
    decay_steps: int | None = Field(
        None,
        ge=1,
        description="Optimizer steps until min_lr; default: all steps of the run.",
    )
    wsd_decay_steps: int | None = Field(
        None,
        ge=1,
        description="Optimizer steps of the decay of optimizer.schedule=wsd; default: a tenth of the steps until min_lr.",
    )
    wsd_decay: Literal["linear", "cosine", "sqrt"] = Field(
        "linear",
        description="Form of the decay of optimizer.schedule=wsd; `sqrt` falls by the root of the part that is done.",
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta2.")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Decoupled weight decay; not applied to norms and biases.",
    )
    clip_grad_norm: float = Field(
        1.0,
        ge=0,
        description="Clip the global gradient norm to this; 0 turns clipping off.",
    )


class DataConfig(Section):
    source: str = Field(
        description="Training data: .parquet or .jsonl (here or at an address such as s3://; * for several), `reasoning_gym:TASK`, or "
        "`module:function` returning a list of records.",
    )
    source_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of a reasoning_gym task or function.",
    )
    eval_source: str | None = Field(
        None,
        description="Held-out data, same forms as data.source; none: no evaluation.",
    )
    eval_source_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of data.eval_source.",
    )
    format: Literal["chat", "text", "prompt", "preference"] = Field(
        "chat",
        description="What a record holds. `chat`: `messages` (list of {role, content}); `text`: `text`; "
        "`prompt`: `prompt` (string or messages), optional `answer` and further fields, "
        "handed to the reward function; `preference`: `prompt`, and two completions, `chosen` and `rejected` (recipe=dpo).",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Fields of a record under other names: `{answer: reward_model.ground_truth}` makes what a record has at that path its "
        "`answer`. For data.source and data.eval_source.",
    )
    shuffle: bool = Field(True, description="Shuffle the order of each pass over the data (from the seed).")
    max_prompt_tokens: int = Field(512, ge=1, description="Longest prompt in tokens (RL).")
    max_tokens: int = Field(1024, ge=2, description="Longest training sequence in tokens (SFT, also the warm-up before RL; DPO: prompt and completion).")
    too_long: Literal["error", "drop", "truncate_left", "truncate_right"] = Field(
        "error",
        description="A record longer than its limit: stop before training, leave it out (reported), or cut off its beginning "
        "(truncate_left) or its end.",
    )


class SftConfig(Section):
    samples_per_step: int = Field(16, ge=1, description="Samples of one optimizer step, over all replicas.")
    steps: int = Field(100, ge=1, description="Optimizer steps.")
    eval_every: int = Field(
        0, ge=0, description="Steps between evaluations on data.eval_source; 0: only before the first and after the last."
    )
    eval_before: bool = Field(True, description="Evaluate on data.eval_source, if there is one, before the first step.")
    eval_samples: int = Field(128, ge=1, description="Samples of one evaluation (the first ones of the held-out data).")


class CriticOptimizerConfig(OptimizerConfig):
    """As optimizer, for the critic; steps are the critic's own."""

    lr: float = Field(1e-5, gt=0, description="Peak learning rate of the critic.")


class CriticConfig(Section):
    """The critic of recipe=ppo: a model beside the actor, in the same ranks, whose one output per token is a value."""

    path: str | None = Field(
        None,
        description="Where the critic's weights come from, in the forms of model.path: a language model, which gets a new value head, or a "
        "critic that was saved (checkpoints/*/critic). Default: model.path. With model.init=random it is a random one of that form.",
    )
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()  # type: ignore[call-arg]
    value_clip: float | None = Field(
        0.5,
        gt=0,
        description="A value may move this far from what it was at the rollout; beyond, it has no gradient (the larger of both losses "
        "counts, as in PPO's code). null: off.",
    )
    warmup: int = Field(
        0, ge=0, description="RL iterations at the start in which only the critic is trained, and the actor is left as it is."
    )
    passes: int | None = Field(None, ge=1, description="The critic's passes over an iteration's samples; default: rl.passes.")


class TrainConfig(Section):
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples of one forward pass on one rank, each padded to the longest of the step. null: 1, unless "
        "train.tokens_per_micro_batch is given.",
    )
    tokens_per_micro_batch: int | None = Field(
        None,
        ge=1,
        description="Instead of train.micro_batch_size: samples are packed, without padding, into one row of at most so many tokens "
        "for each forward pass on one rank. As many rows are made as a step's samples need, with tokens shared out evenly. At least "
        "the greatest length of a sample. null: samples are not packed.",
    )
    verify_every: int = Field(
        0,
        ge=0,
        description="Commits between comparisons of all replicas' state hashes; 0: only at the end of the run.",
    )


class CheckpointConfig(Section):
    every_steps: int = Field(
        0,
        ge=0,
        description="Committed steps between checkpoints; 0: only at the end of the run.",
    )
    keep_last: int = Field(
        2,
        ge=1,
        description="Complete checkpoints kept; older ones are deleted after a newer one is complete.",
    )
    keep_every: int = Field(
        0,
        ge=0,
        description="Steps: checkpoints whose step this divides are kept for good. 0: none are.",
    )
    at_end: bool = Field(True, description="Save when the run ends.")
    on_interrupt: bool = Field(
        False,
        description="SIGINT (Ctrl-C) and SIGTERM to `everstep train` end the run after the step in progress, with a checkpoint of it (exit "
        "code 130); a second signal ends it at once. false: at once, without a checkpoint (launcher ray).",
    )
    path: Where | None = Field(
        None,
        description="Where checkpoints go, as an address that fsspec knows: a folder, `s3://BUCKET/FOLDER` (extra `s3`) or "
        "`gs://BUCKET/FOLDER` (extra `gcs`); each run needs one of its own. Credentials and endpoints come from where those libraries look "
        "for them, the environment for example. null: run_dir/checkpoints.",
    )
    asynchronous: bool = Field(
        True,
        description="Copy the state to host memory while the next step computes, and write it in the background. false: training waits "
        "until the checkpoint is complete.",
    )
    hf: bool = Field(
        True,
        description="Each checkpoint also has the model as transformers loads it (`hf/`; with LoRA, `adapter/` too), which the lead "
        "writes in the background from what the ranks wrote. false: `everstep export` makes it when it is wanted.",
    )
    on_failure: Literal["continue", "stop"] = Field(
        "continue",
        description="When a checkpoint could not be written: `continue` training, and try again with pauses that grow from 1 s to 10 "
        "minutes; or `stop` the run, resumable. The checkpoint at the end of a run must succeed in any case.",
    )
    retry_s: float = Field(
        60.0,
        ge=0,
        description="Seconds for which a rank, or the lead, tries again what storage refused, before the checkpoint counts as failed.",
    )
    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Seconds in which all ranks must have written their share, or the checkpoint counts as failed.",
    )
    keep_best: bool = Field(
        False,
        description="Save after each evaluation that is better than all before it (RL: see checkpoint.best_by; SFT, DPO: loss), and keep that "
        "checkpoint, which `checkpoints/best` names, besides checkpoint.keep_last.",
    )
    best_by: Literal["accuracy", "reward"] = Field(
        "accuracy",
        description="What the best is in RL: `accuracy`, the share of held-out completions whose reward is at least 1, or their mean `reward`, for "
        "rewards of another scale.",
    )


class SemiSyncConfig(Section):
    """Local SGD (arXiv 1805.09767), DiLoCo (2311.08105), Streaming DiLoCo (2501.18512) over replicas."""

    method: Literal["none", "local_sgd", "diloco", "streaming_diloco"] = Field(
        "none",
        description="`none`: replicas add their gradients in every optimizer step. Else each makes inner steps by itself, on its share of each "
        "step's samples, and only every so often is something sent. `local_sgd`: the weights are averaged. `diloco`: an outer optimizer "
        "steps along the average of what each replica moved. `streaming_diloco`: the same, a fragment of the model at a time.",
    )
    sync_every: int = Field(
        10,
        ge=1,
        description="Inner steps in which every weight is synchronised once. A round, which is committed as a whole and ends with the "
        "synchronisation of one fragment, has sync_every / number of fragments inner steps. Must divide the steps of the run into whole rounds.",
    )
    fragments: int | list[list[str]] = Field(
        1,
        description="streaming_diloco: into how many parts the model is cut by its layers, or lists of patterns of module names "
        "(`model.embed_tokens`, `model.layers.[0-3]`, `model.norm`, `lm_head`), one list for each fragment, every module in exactly one.",
    )
    fragment_sync_delay: int = Field(
        0,
        ge=0,
        description="streaming_diloco: inner steps before the end of a round at which what a fragment moved is taken and sent, while they go on. "
        "Less than the inner steps of a round.",
    )
    fragment_update_alpha: float = Field(
        0.0,
        ge=0,
        le=1,
        description="streaming_diloco: share of a replica's own weights in what it goes on with after a synchronisation; 0: the new global "
        "weights, 1: its own.",
    )
    should_quantize: bool = Field(
        False,
        description="Send what weights moved as int8 with one float32 scale for 256 numbers: a quarter of the bytes, rounded twice, by at most "
        "1/254 of the largest number of each 256 a time.",
    )
    outer_lr: float = Field(0.7, gt=0, description="Learning rate of the outer SGD (diloco, streaming_diloco).")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of the outer SGD.")
    outer_nesterov: bool = Field(True, description="Nesterov momentum in the outer SGD.")


FaultPhase = Literal[
    "compute", "exchange", "salvage", "reduce", "vote", "commit", "apply", "heal", "spare", "save", "rollout", "send", "generate", "sync",
    "reward", "logprobs", "values", "advantages",
]  # fmt: skip
FaultKind = Literal["kill", "stop", "exit", "segv", "gil", "oom", "nan", "hang", "partition", "error"]


class Fault(Section):
    step: int = Field(
        ge=1,
        description="Global step (as logged) in which the fault happens; heal: the first heal from this step on; save: the step that "
        "is saved; rollout, send, generate, sync, reward, logprobs, values, advantages: the first step of the iteration.",
    )
    phase: FaultPhase = Field(
        "compute",
        description="Where the victim is: a phase of the step transaction (`commit`: the step is recorded, the victim may not have "
        "applied it), `spare`: idle, not placed; `save`, `rollout`, `logprobs`, `values`: in that call; `send`: a rank that serves weights "
        "to rollout engines; `generate`, `sync`: a rollout engine that makes tokens, or gets weights; `reward`, `advantages`: while the "
        "lead is in that stage.",
    )
    kind: FaultKind = Field(
        "kill",
        description="`kill` SIGKILL, `stop` SIGSTOP, from outside. Inside the process: `exit` os._exit, `segv` reads address 0, `gil` a C "
        "call that keeps the interpreter lock for ever, `oom` the main thread takes memory until RLIMIT_AS refuses, `nan` spoils the gradient, `hang` "
        "the main thread never goes on, `error` user code raises. `partition`: the control connection goes silent.",
    )
    replica: int = Field(0, ge=0, description="Victim's replica; not used by phases spare, generate, sync.")
    rank: int = Field(0, ge=0, description="Victim's rank inside its replica; phase spare: which of the idle spares; generate, sync: which of rollout.engines.")
    hold: bool = Field(
        False,
        description="kill, stop, partition: the victim stays where it enters the phase, and the fault comes once a rank of another replica is in the "
        "phase too (5 s at most), so that its peers wait for it there; else it runs on, and may have left the phase by then.",
    )
    delay_s: float = Field(
        0.0,
        ge=0,
        description="Seconds between the victim's entry into the phase (hold: its peer's too) and the fault (not for nan, hang, oom, error).",
    )


class TelemetryConfig(Section):
    tensorboard: bool = Field(True, description="Write metrics for TensorBoard to RUN/tensorboard.")
    wandb: bool = Field(
        False,
        description="Write metrics to Weights & Biases too (its own environment variables apply; WANDB_MODE=offline: into RUN/wandb only).",
    )
    mlflow: bool = Field(False, description="Write metrics to MLflow too, at MLFLOW_TRACKING_URI, by default into RUN/mlruns.")
    project: str = Field("everstep", description="Project (wandb) or experiment (MLflow) that the run belongs to; the run has its folder's name.")
    sample_table_every: int = Field(
        10, ge=0, description="RL iterations between tables of samples (prompt, completion, reward) in RUN/samples and the trackers; 0: none."
    )
    sample_table_rows: int = Field(8, ge=1, description="Rows of a table of samples, spread evenly over the iteration.")
    progress: Literal["auto", "rich", "plain", "none"] = Field(
        "auto",
        description="Progress display: `rich` live table, `plain` one line per step; auto: rich on a terminal.",
    )
    show_completions: int = Field(1, ge=0, description="Completions printed per RL iteration.")
    dashboard: bool = Field(
        False,
        description="Serve the dashboard of this run while it lasts, from a process of its own; its address is printed, and in `everstep "
        "status`.",
    )
    dashboard_host: str = Field("127.0.0.1", description="Address that telemetry.dashboard listens on; 0.0.0.0: everybody who can reach this machine.")
    dashboard_port: int = Field(0, ge=0, le=65535, description="Port of telemetry.dashboard; 0: a free one.")


class RayConfig(Section):
    address: str | None = Field(
        None,
        description="Address of a running Ray cluster (`auto`, `HOST:PORT`); default: start one for this run.",
    )
    start_timeout_s: float = Field(
        180.0,
        gt=0,
        description="Deadline for all ranks and spares to be placed and ready.",
    )


class Config(Section):
    recipe: Literal["sft", "grpo", "ppo", "dpo"] = Field(
        description="What to do: supervised fine-tuning, GRPO and its relatives (no critic), PPO with a critic, or direct preference "
        "optimisation.",
    )
    run_dir: Where = Field(
        "runs/default",
        description="Folder of this run: configs, checkpoints, logs, events, tensorboard, report.",
    )
    launcher: Literal["auto", "ray", "local"] = Field(
        "auto",
        description="`ray`: controller and actors; `local`: torchrun, one instance for each replica; auto: local under torchrun, else ray.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if a device is present.")
    seed: int = Field(0, ge=0, description="Seed of data order, initialisation, dropout and sampling.")
    resume: str = Field(
        "never",
        description="`never`, `auto` (newest complete checkpoint, if any), `must`, a checkpoint folder, or a step number.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables for every rank and spare (NCCL settings, ...); reserved names are refused.",
    )
    pipeline: str | None = Field(
        None,
        description="`module:function(config) -> everstep.rl.pipeline.Pipeline`: the stages of an RL iteration; default: those of the recipe "
        "(everstep.rl.pipeline.standard), which everstep plan prints.",
    )
    model: ModelConfig
    layout: LayoutConfig = LayoutConfig()
    engine: EngineConfig = EngineConfig()
    moe: MoeConfig = MoeConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig
    sft: SftConfig = SftConfig()
    dpo: DpoConfig = DpoConfig()
    warmup: WarmupConfig = WarmupConfig()
    rl: RlConfig = RlConfig()
    critic: CriticConfig = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    semisync: SemiSyncConfig = SemiSyncConfig()
    faults: list[Fault] = Field(
        default_factory=list,
        description="Faults to inject, for tests and demonstrations.",
    )
    telemetry: TelemetryConfig = TelemetryConfig()
    watch: WatchConfig = WatchConfig()
    log: LogConfig = LogConfig()
    alerts: list[AlertConfig] = Field(default_factory=list, description="Whom to tell of which events.")
    ray: RayConfig = RayConfig()
    local: LocalConfig = LocalConfig()
    replica: ReplicaConfig = ReplicaConfig()
    lighthouse: LighthouseConfig = LighthouseConfig()

    @model_validator(mode="before")
    @classmethod
    def _one_number_of_replicas(cls, given: Any) -> Any:
        """``replica.count`` is ``layout.replicas`` under another name."""
        if not isinstance(given, dict) or not isinstance(given.get("replica"), dict):
            return given
        count, layout = given["replica"].get("count"), given.get("layout") or {}
        if count is None or not isinstance(layout, dict):
            return given
        if layout.get("replicas", count) != count:
            raise ValueError(f"replica.count={count} and layout.replicas={layout['replicas']} are two names of one number; give layout.replicas={count}, or leave replica.count out")
        return given | {"layout": layout | {"replicas": count}}
