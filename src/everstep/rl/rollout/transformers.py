"""Generation with transformers' own ``generate``: any architecture, no further dependency, on CPU and GPU.

Sampling is reproducible per sample: the noise of token t of a sample is a pure function of (seed, sample id, t, token),
so a completion does not depend on which other samples are in the batch, which rank makes it, or how often it is made
again after a fault. It is drawn as Gumbel noise: argmax(log p + Gumbel) is a draw from p. The noise is computed with
integer arithmetic on the device, so it is the same on CPU and GPU.

(Logits themselves may differ in the last bit between batch sizes; that changes a draw about once in a million tokens.)
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

from everstep.cluster.batch import TrainingBatch
from everstep.engine.fused import single_experts
from everstep.errors import WorkerFailed
from everstep.rl.rollout import Sampling, repeat_prompts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = ["Sampling", "TransformersRollout", "gumbel_noise", "repeat_prompts", "sample_keys"]


class TransformersRollout:
    """A transformers model that generates, with weights given from outside.

    It serves nothing before ``load_weights``, and stamps every sample with the version of the weights that made it.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.tokenizer, self.device = tokenizer, torch.device(device)
        self.version: int | None = None
        # The initial weights are overwritten; drawing them must not move the process's random state.
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda), self.device:
            self.model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype).eval().requires_grad_(False)
        # A model's own generation defaults (penalties, top_p, ...) would change the distribution behind our back.
        self.model.generation_config = GenerationConfig()
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.eos = sorted(_ids(tokenizer.eos_token_id) | _ids(hf_config.eos_token_id))
        if not self.eos:
            raise WorkerFailed("neither the tokenizer nor the model names an end-of-sequence token; set eos_token_id")

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights given by their Hugging Face names; ``version`` is the committed step they belong to.

        All must come, each in its full shape (a tied output layer may be left out). WorkerFailed otherwise; the model
        then serves nothing until a complete set has come.
        """
        self.version = None
        config = self.model.config
        getters = {name: functools.partial(_same, p) for name, p in self.model.named_parameters(remove_duplicate=False)}
        saved = single_experts(getters, config.model_type, getattr(config, "num_local_experts", 0))
        parameters = {name: get() for name, get in saved.items()}
        missing = {p.data_ptr(): name for name, p in reversed(parameters.items())}  # tied names share their memory
        for name, tensor in weights:
            target = parameters.get(name)
            if target is None:
                raise WorkerFailed(f"rollout: the model has no weight called {name!r}")
            if target.shape != tensor.shape:
                raise WorkerFailed(f"rollout: weight {name} has shape {list(tensor.shape)}, expected {list(target.shape)}")
            target.copy_(tensor)
            missing.pop(target.data_ptr(), None)
        if missing:
            raise WorkerFailed(f"rollout: {len(missing)} weights did not come, among them {sorted(missing.values())[:3]}")
        self.version = version

    @torch.no_grad()
    def generate(self, batch: TrainingBatch, sampling: Sampling) -> TrainingBatch:
        """One completion per row of ``batch``, whose ``input_ids``/``attention_mask`` (B, P) are right-padded prompts.

        Returns the same samples (ids, columns) on the CPU, right-padded to [prompt, completion, pad], T columns:

            input_ids, attention_mask   int64 (B, T)
            loss_mask                   float32 (B, T): 1 on the completion, its end-of-sequence token included
            rollout_logprobs            float32 (B, T): log p of each completion token at ``temperature`` (1 if greedy),
                                        before top_k and top_p cut the distribution, so that it compares with the
                                        trainer's log-probabilities

        and the columns ``completion`` (text without special tokens), ``finished`` (False: cut at max_response_tokens)
        and ``rollout_s`` (seconds of its batch divided by the batch's size).
        """
        if self.version is None:
            raise WorkerFailed("rollout: asked to generate before it was given weights")
        if not len(batch):
            return batch.slice(0, 0)
        size = sampling.samples_per_batch
        parts = [batch.slice(i, min(i + size, len(batch))) for i in range(0, len(batch), size)]
        return TrainingBatch.concat([self._generate(part, sampling) for part in parts])

    def _generate(self, prompts: TrainingBatch, sampling: Sampling) -> TrainingBatch:
        start = time.monotonic()
        lengths = prompts["attention_mask"].sum(dim=1)
        if int(lengths.min()) == 0:
            raise WorkerFailed(f"rollout: the prompt of sample {prompts.sample_ids[int(lengths.argmin())]} is empty")
        width = int(lengths.max())
        ids, mask = _left_padded(prompts["input_ids"], lengths, width, self._pad)
        draw = _Draw(sampling, prompts.sample_ids, width)
        options: dict[str, Any] = {
            "do_sample": False,  # `draw` samples; generate only takes the argmax of what it returns
            "num_beams": 1,
            "max_new_tokens": sampling.max_response_tokens,
            "eos_token_id": self.eos,
            "pad_token_id": self._pad,
            "use_cache": True,
        }
        out = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            generation_config=GenerationConfig(**options),
            logits_processor=LogitsProcessorList([draw]),
        )
        response = out[:, width:].cpu()  # (B, R): pad tokens after the first end of sequence
        ended = torch.isin(response, torch.tensor(self.eos))
        before = ended.long().cumsum(dim=1) - ended.long()  # ends seen before this token
        response_mask = before == 0
        logprobs = torch.stack(draw.logprobs, dim=1).cpu()
        return self._assemble(prompts, lengths, response, response_mask, logprobs, ended, time.monotonic() - start)

    def _assemble(
        self,
        prompts: TrainingBatch,
        lengths: Tensor,
        response: Tensor,
        response_mask: Tensor,
        logprobs: Tensor,
        ended: Tensor,
        seconds: float,
    ) -> TrainingBatch:
        counts = response_mask.sum(dim=1)
        B, T = len(prompts), int((lengths + counts).max())
        position = torch.arange(T).expand(B, T)
        # Column t of row b is token t of the prompt, or token t - lengths[b] of the response.
        in_prompt = position < lengths.unsqueeze(1)
        offset = position - lengths.unsqueeze(1)
        in_response = (offset >= 0) & (offset < counts.unsqueeze(1))
        from_prompt = prompts["input_ids"].gather(1, position.clamp(max=prompts.width - 1))
        at = offset.clamp(0, response.shape[1] - 1)
        zero = torch.zeros((), dtype=torch.int64)
        texts = [
            self.tokenizer.decode(row[keep], skip_special_tokens=True) for row, keep in zip(response, response_mask, strict=True)
        ]
        return TrainingBatch(
            tensors={
                "input_ids": torch.where(in_prompt, from_prompt, torch.where(in_response, response.gather(1, at), zero)),
                "attention_mask": (in_prompt | in_response).long(),
                "loss_mask": in_response.float(),
                "rollout_logprobs": torch.where(in_response, logprobs.gather(1, at), 0.0),
            },
            columns={
                **prompts.columns,
                "completion": texts,
                "finished": ended.any(dim=1).tolist(),
                "rollout_s": [seconds / B] * B,
            },
            sample_ids=prompts.sample_ids,
        ).with_weight_version(self.version if self.version is not None else -1)


def _same(parameter: Tensor) -> Tensor:
    return parameter


class _Draw(LogitsProcessor):
    """Chooses the next token of every row, and returns scores whose argmax is that choice."""

    def __init__(self, sampling: Sampling, sample_ids: list[str], prompt_width: int):
        self.sampling, self.width = sampling, prompt_width
        self.keys = sample_keys(sampling.seed, sample_ids)
        self.logprobs: list[Tensor] = []  # per step, (B,)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        s = self.sampling
        logp = torch.log_softmax(scores.float() / (s.temperature or 1.0), dim=-1)  # (B, V)
        if s.temperature == 0:
            token = logp.argmax(dim=-1, keepdim=True)
        else:
            step = input_ids.shape[1] - self.width
            noisy = logp + gumbel_noise(self.keys.to(logp.device), step, logp.shape[1])
            token = keep_likely(logp, noisy, s.top_k, s.top_p).argmax(dim=-1, keepdim=True)
        self.logprobs.append(logp.gather(1, token).squeeze(1))
        return torch.full_like(scores, float("-inf")).scatter_(1, token, 0.0)


def keep_likely(logp: Tensor, values: Tensor, top_k: int, top_p: float) -> Tensor:
    """``values`` (B, V), with -inf where a token is not among the ``top_k`` likeliest or the nucleus of mass ``top_p``.

    The nucleus is the smallest set of likeliest tokens whose probability reaches ``top_p``; taken after top_k, over the
    renormalised rest, as transformers and vLLM do. The likeliest token always stays.
    """
    vocabulary = logp.shape[1]
    if top_k == 0 and top_p >= 1.0:
        return values
    count = min(top_k or vocabulary, vocabulary)
    top, index = logp.topk(count, dim=-1)  # sorted, likeliest first
    keep = torch.ones_like(top, dtype=torch.bool)
    if top_p < 1.0:
        # In fixed point, because CUDA has no deterministic running sum of floating-point numbers.
        p = (top.softmax(dim=-1).double() * 2.0**40).long()
        keep = p.cumsum(dim=-1) - p < int(top_p * 2.0**40)  # the mass before this token has not reached top_p yet
        keep[:, 0] = True
    kept = torch.zeros_like(logp, dtype=torch.bool).scatter_(1, index, keep)
    return values.masked_fill(~kept, float("-inf"))


# ------------------------------------------------------------------------------------------------ noise

_INCREMENT = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's constants, as signed 64-bit integers
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLY_2 = 0x94D049BB133111EB - 2**64


def sample_keys(seed: int, sample_ids: list[str]) -> Tensor:
    """One int64 per sample, (B,): the start of its stream of noise."""
    digest = lambda sid: hashlib.blake2b(f"{seed}/{sid}".encode(), digest_size=8).digest()
    return torch.tensor([int.from_bytes(digest(sid), "little", signed=True) for sid in sample_ids], dtype=torch.int64)


def gumbel_noise(keys: Tensor, step: int, vocabulary: int) -> Tensor:
    """Standard Gumbel noise (B, V) float32 of token number ``step`` of each sample; a pure function of its arguments."""
    row = _mix(keys + _wrap(_INCREMENT * (step + 1)))
    column = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=keys.device) * _INCREMENT
    bits = _shift(_mix(row.unsqueeze(1) + column), 11)  # 53 random bits
    # Small uniforms keep their relative precision in float32; they are the exponentials, and so the Gumbels, that win.
    uniform = ((bits.float() + 0.5) * 2.0**-53).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix(x: Tensor) -> Tensor:
    """The output function of splitmix64; int64 arithmetic wraps around like the unsigned one."""
    x = (x ^ _shift(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift(x, 27)) * _MULTIPLY_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _wrap(x: int) -> int:
    """A Python integer as the signed 64-bit integer that it would be after wrapping around."""
    return (x + 2**63) % 2**64 - 2**63


# ------------------------------------------------------------------------------------------------ padding, ids


def _left_padded(ids: Tensor, lengths: Tensor, width: int, pad: int) -> tuple[Tensor, Tensor]:
    """Right-padded (B, P) -> left-padded (B, width) and its mask."""
    source = torch.arange(width).unsqueeze(0) - (width - lengths).unsqueeze(1)
    real = source >= 0
    return torch.where(real, ids.gather(1, source.clamp(min=0)), pad), real.long()


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, (list, tuple)) else {value}
