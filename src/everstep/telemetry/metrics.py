"""Metrics of a run: names with meanings, written to ``RUN/metrics.jsonl`` and the trackers (TensorBoard, ...).

Names are verl's where the meaning is the same, so that its dashboards and habits carry over; ``ft/*`` is what this
project adds. A name under one of our own prefixes must be in the table (a typo would otherwise start a new curve);
every other prefix is free for user code (custom losses, reward functions).
"""

from __future__ import annotations

import difflib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from everstep.telemetry.events import to_json, torn_bytes
from everstep.telemetry.trackers import SampleRow, Tracker, write_samples

_SPREAD = {"mean": "Mean", "max": "Largest", "min": "Smallest"}


def _spread(name: str, of_what: str) -> dict[str, str]:
    return {f"{name}/{which}": f"{word} {of_what}." for which, word in _SPREAD.items()}


# Averages are over the step's global batch unless said otherwise. "tokens": response tokens that count in the loss.
METRICS: dict[str, str] = {
    "actor/loss": "The whole loss of the update, all terms included, over its global divisor.",
    "actor/pg_loss": "Policy-gradient loss (clipped surrogate), aggregated as rl.loss_aggregation says.",
    "actor/pg_clipfrac": "Fraction of tokens whose probability ratio was clipped.",
    "actor/pg_clipfrac_lower": "Fraction of tokens with negative advantage cut by the dual clip.",
    "actor/ppo_kl": "Mean of old minus new log-probability over tokens: how far the policy moved since the rollout.",
    "actor/kl_loss": "KL estimate to the reference model, before rl.kl_coef.",
    "actor/kl_coef": "Coefficient of the KL in the loss (rl.kl_in=loss).",
    "actor/reward_kl_penalty": "KL estimate to the reference model in the reward, before its coefficient: mean over completions.",
    "actor/reward_kl_penalty_coeff": "Coefficient of the KL in the reward (rl.kl_in=reward).",
    "critic/vf_loss": "Loss of the critic: half its squared error, clipped.",
    "critic/vf_clipfrac": "Fraction of tokens whose value was clipped.",
    "critic/vpred_mean": "Mean value over tokens.",
    "rollout_corr/rollout_is_mean": "Mean importance weight of a token (rl.importance), before normalisation; 1: both engines agree.",
    "rollout_corr/rollout_is_ratio_fraction_high": "Fraction of tokens whose importance weight was above rl.importance.upper.",
    "rollout_corr/kl": "Mean of rollout minus trainer log-probability over tokens, both of the weights that generated.",
    "actor/entropy": "Mean entropy of the policy over tokens, nats.",
    "critic/grad_norm": "Norm of the critic's whole gradient before clipping.",
    "critic/lr": "Learning rate of the critic's update.",
    "actor/grad_norm": "Norm of the whole gradient before clipping.",
    "actor/lr": "Learning rate of the update.",
    "moe/aux_loss": "Auxiliary loss of experts (mean over layers, without its coefficient; k if all get as many tokens).",
    "moe/max_load": "Tokens of a layer's busiest expert over those of an average one, mean over layers; 1: balanced.",
    "moe/idle_experts": "Share of all experts that got no token in the step.",
    "train/num_gen_batches": "Generations of the iteration: 1, and those of dynamic sampling.",
    "train/dropped_groups": "Share of the iteration's prompts that dynamic sampling left out.",
    "train/loss": "Mean next-token loss of SFT, and of the warm-up before RL, over the target tokens, nats.",
    "train/grad_norm": "Norm of the whole gradient before clipping (SFT, the warm-up before RL, DPO).",
    "train/lr": "Learning rate of the update (SFT, the warm-up before RL, DPO).",
    "val/loss": "Loss on held-out data: of the next token, mean, nats (SFT), or of pairs (DPO).",
    "dpo/loss": "Loss of preference pairs (DPO), mean over pairs.",
    "dpo/reward_chosen": "Implicit reward of the preferred completions: dpo.beta times their log-ratio to the reference model.",
    "dpo/reward_rejected": "The same of the rejected ones.",
    "dpo/reward_margin": "The one less the other, mean over pairs.",
    "dpo/accuracy": "Share of pairs with a margin above 0.",
    "val/reward_margin": "dpo/reward_margin on held-out pairs.",
    "val/accuracy": "Share of held-out pairs with a margin above 0 (DPO).",
    "val-core/acc/mean@1": "Share of held-out prompts whose first completion is right (reward of at least 1, before reward.overlong_cache_tokens).",
    "val-core/reward/mean@1": "Mean reward of the first completion on held-out prompts.",
    **_spread("critic/score", "sum of the raw rewards of a sample that counts"),
    **_spread("critic/rewards", "sum of the rewards of a sample that counts after penalties"),
    **_spread("critic/advantages", "advantage over tokens"),
    **_spread("critic/values", "value over tokens, before the updates"),
    **_spread("critic/returns", "return over tokens, the critic's target"),
    **_spread("response_length", "length of a completion that counts, tokens"),
    "response_length/clip_ratio": "Share of completions that reached rollout.max_response_tokens.",
    **_spread("prompt_length", "length of a prompt, tokens"),
    "training/global_step": "Committed optimizer steps so far.",
    "training/iteration": "RL iterations so far.",
    "training/pass": "Passes over the training data so far (verl calls it epoch; here an epoch is a view's number).",
    "perf/throughput": "Tokens (prompts and completions) per second and device, of those that took part.",
    "perf/total_num_tokens": "Tokens (prompts and completions) of the step.",
    "perf/time_per_step": "Seconds of the step, everything included.",
    "perf/max_memory_allocated_gb": "Most device memory that tensors of any rank have taken so far, GB (CUDA).",
    "perf/cpu_memory_used_gb": "Largest resident memory of any rank's process, GB.",
    "timing_s/step": "Seconds of the step (RL: of the whole iteration), everything included.",
    "timing_s/gen": "Seconds of generation.",
    "timing_s/reward": "Seconds of the reward function.",
    "timing_s/old_log_prob": "Seconds for the log-probabilities under the policy that generated.",
    "timing_s/ref": "Seconds for the log-probabilities under the reference model.",
    "timing_s/values": "Seconds for the critic's values.",
    "timing_s/rollout_ahead": "Seconds in which rollout engines got weights and prompts of later iterations.",
    "rollout/staleness": "Optimizer steps by which the oldest weights behind a sample are older than those that its iteration began with, mean.",
    "timing_s/record": "Seconds until the iteration record was on disk.",
    "timing_s/adv": "Seconds for the advantages.",
    "timing_s/update_actor": "Seconds of all optimizer steps of the iteration, from begin to the last commit.",
    "timing_s/update_critic": "Seconds of all optimizer steps of the critic in the iteration.",
    "timing_s/testing": "Seconds of an evaluation.",
    "timing_s/begin": "Seconds until the ranks of a replica agreed on the view, the slowest rank (last optimizer step).",
    "timing_s/heal": "Seconds of healing in the step, the slowest rank.",
    "timing_s/compute": "Seconds of forward and backward, all attempts, the slowest rank (last optimizer step).",
    "timing_s/exchange": "Seconds of telling each other which slots are held, waiting for the slowest replica included.",
    "timing_s/salvage": "Seconds of computing the slots of replicas that died in the step.",
    "timing_s/reduce": "Seconds of summing gradients over the link.",
    "timing_s/vote": "Seconds from a rank's vote to its knowledge of the commit.",
    "timing_s/apply": "Seconds of the optimizer.",
    "dispatch/sent_bytes": "Bytes put into the object store or messages for worker calls of the step.",
    "dispatch/ms": "Milliseconds spent in dispatch (cutting, sending, collecting), without the workers' own time.",
    "ft/goodput": "Share of the time since this start of the run that went into steps (RL: iterations) of one attempt, nothing redone.",
    "ft/live_replicas": "Replicas that contributed to the step.",
    "ft/spares": "Warm spares at the end of the step.",
    "ft/attempts": "Attempts the step took; 1 without faults.",
    "ft/deaths": "Deaths since this start of the run, of ranks and spares.",
    "ft/detect_s": "Seconds from an injected fault to its detection (logged once all replicas are back, as the next three).",
    "ft/stall_s": "Longest time for which a survivor did nothing of use after a death.",
    "ft/full_strength_s": "Seconds from a death until all replicas took part again.",
    "ft/heal_s": "Seconds to bring a rank to the current step from its peer, the slowest rank.",
    "ft/heal_bytes": "Bytes of state that the healed replica received, all its ranks.",
    "ft/link_bytes": "Bytes that the ranks of one replica sent to other replicas for the step (of semi-synchronous training, the round), mean over "
    "replicas: what the bandwidth-optimal algorithm of each collective sends, voided attempts included.",
    "ft/link_bytes_per_inner_step": "ft/link_bytes over the optimizer steps that it served: one, or those of a round.",
    "training/inner_step": "Inner optimizer steps of each replica so far (semi-synchronous training).",
    "ft/microbatches_redone": "Slots of the step that replicas computed beyond those they were first dealt.",
}

OWN_PREFIXES = frozenset(name.split("/", 1)[0] for name in METRICS)


def check_name(name: str) -> None:
    """Raises ``ValueError`` for an unknown name under one of our prefixes, with the nearest known one."""
    if name in METRICS or name.split("/", 1)[0] not in OWN_PREFIXES:
        return
    near = difflib.get_close_matches(name, METRICS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown metric {name!r}{hint} (table: everstep.telemetry.metrics.METRICS)")


class Metrics:
    """Writes the metrics of one run. Used by the lead process only.

    Args:
        run_dir: the run's folder; lines go to ``metrics.jsonl``, tables of samples to ``samples/``.
        trackers: where else they go (``trackers.open_trackers``); closed with this.

    Lines are only ever appended: of a step that is made again, after a resume or a rollback, both stay (:func:`read_metrics`).
    """

    def __init__(self, run_dir: str | os.PathLike[str], trackers: Sequence[Tracker] = ()):
        self._root = Path(run_dir)
        self._root.mkdir(parents=True, exist_ok=True)
        self.path = self._root / "metrics.jsonl"
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if torn := torn_bytes(self._fd):  # a killed lead left half a line
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - torn)
        self._trackers = list(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line and one point per curve. Values are numbers (0-d tensors and arrays too). Readable at once."""
        row: dict[str, float] = {}
        for name, value in values.items():
            check_name(name)
            row[name] = float(value)
        line = to_json({"step": step, "t_wall": round(time.time(), 3), **row}).encode() + b"\n"
        done = os.write(self._fd, line)
        if done < len(line):
            raise OSError(f"{self.path} took {done} of {len(line)} bytes: is the disk full?")
        for tracker in self._trackers:
            tracker.log(step, row)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """A table of samples: ``samples/step-000120.parquet``, and in every tracker."""
        path = self._root / "samples" / f"step-{step:06}.parquet"
        write_samples(rows, path)
        for tracker in self._trackers:
            tracker.samples(step, rows, path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        while self._trackers:
            self._trackers.pop().close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """The rows of a ``metrics.jsonl``, one per step in order of steps.

    What was logged of a step in several lines, one after the other, is one row (an evaluation after the step's own); of a metric that is in
    several of them the last value counts. A step that was made again has its newest row, for that is what the weights went on from, and
    nothing of the one before, as lines of other steps stand between.

    Rows hold ``step`` and ``t_wall`` beside the metrics; numbers that are not finite come back as floats.
    """
    rows: dict[int, dict[str, float]] = {}
    last: int | None = None
    for line in Path(path).read_bytes().split(b"\n")[:-1]:  # what follows the last newline is torn, or nothing
        said = json.loads(line)
        step = said["step"]
        before = rows[step] if step == last else {}
        rows[step] = before | {name: value if name == "step" else float(value) for name, value in said.items()}
        last = step
    return [rows[step] for step in sorted(rows)]
