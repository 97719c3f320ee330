from __future__ import annotations

import importlib
import os
import secrets
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["EngineArgs", "LLMEngine", "SamplingParams", "TokensPrompt"]
__version__ = "0.0.fake"

TokensPrompt = dict
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


class _Model:
    """Weights are given by transformers' names, and some are called otherwise here, several becoming one, as in vLLM. They are taken between the calls of
    vllm.model_executor.model_loader.reload only; a matrix of which only a part was given is nothing afterwards."""

    def __init__(self, config: Any, dtype: torch.dtype):
        self.module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        self.lost = False   # a deep sleep discarded the weights
        self.changed = 0    # how often weights were loaded
        self._given: dict[str, Any] | None = None
        self._open = 0      # workers that reload
        self.buckets = 0    # that were given

    def begin(self) -> None:
        assert self._open == 0 or not self._given, "the reload before was not finished"
        self._given, self._open = {}, self._open + 1

    def load_weights(self, weights: Any) -> set[str]:
        assert not self.lost, "weights were loaded into memory that sleeps"
        if self._given is None:
            raise AttributeError("'Parameter' object has no attribute 'weight_loader'")
        self.buckets += 1
        new = dict(weights)
        assert all(tensor.shape == dict(self.module.named_parameters(remove_duplicate=False))[name].shape for name, tensor in new.items())
        self._given |= new
        return {_name(name) for name in new}

    def finish(self) -> None:
        self._open -= 1
        if self._open:
            return
        own, given, self._given = dict(self.module.named_parameters(remove_duplicate=False)), self._given, None
        assert given is not None
        for name, p in own.items():
            if name in given:
                p.copy_(given[name])
        filled = {_name(name) for name in given}
        for name, p in own.items():
            if _name(name) in filled and name not in given:
                p.fill_(float("nan"))
        self.changed += 1

    def named_parameters(self) -> Any:
        return [(_name(name), p) for name, p in self.module.named_parameters()]


def _name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    stem, _, matrix = module.rpartition(".")
    return f"{stem}.{_FUSED.get(matrix, matrix)}.{kind}"


class _Worker:
    def __init__(self, model: _Model):
        self.model_runner = SimpleNamespace(get_model=lambda: model, model_config=None)


class LLMEngine:
    """As in vLLM with asynchronous scheduling: what a step computes, the next one tells."""

    def __init__(self, args: EngineArgs):
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert args.load_format == "dummy" and args.skip_tokenizer_init and args.generation_config == "vllm"
        self.args = args
        config = AutoConfig.from_pretrained(args.model)
        assert config.architectures
        self._model = _Model(config, getattr(torch, args.dtype))
        module, _, name = args.worker_extension_cls.rpartition(".")
        extension = getattr(importlib.import_module(module), name)
        workers = type("Worker", (_Worker, extension), {})
        self.workers = [workers(self._model) for _ in range(args.tensor_parallel_size)]
        self._requests: dict[str, SimpleNamespace] = {}
        self._made: list[tuple[SimpleNamespace, int, float]] = []  # by the step before, not told yet
        self._asleep: set[str] = set()
        self._cached = 0  # the weights whose keys and values may be in the prefix cache

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        return cls(args)

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple = ()) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def add_request(self, request_id: str, prompt: dict[str, Any], params: SamplingParams) -> str:
        assert request_id not in {r.external for r in self._requests.values()}
        tokens = list(prompt["prompt_token_ids"])
        assert tokens and len(tokens) + params.max_tokens <= self.args.max_model_len
        assert params.max_tokens >= 1 and params.output_kind is RequestOutputKind.DELTA and not params.detokenize
        internal = f"{request_id}-{secrets.token_hex(4)}"
        self._requests[internal] = SimpleNamespace(
            external=request_id, tokens=tokens, params=params, made=0, generator=torch.Generator().manual_seed(params.seed)
        )
        return internal

    def abort_request(self, request_ids: list[str]) -> None:
        self._requests = {name: r for name, r in self._requests.items() if r.external not in request_ids}

    def reset_prefix_cache(self) -> bool:
        if self._requests or self._made:
            return False
        self._cached = self._model.changed
        return True

    def step(self) -> list[Any]:
        assert not self._asleep, f"asked for tokens while {self._asleep} sleep"
        told, self._made = self._made, []
        outputs = [self._tell(*one) for one in told if one[0] in self._requests.values()]
        running = [r for r in self._requests.values() if r.made < r.params.max_tokens][: self.args.max_num_seqs]
        assert not running or self._cached == self._model.changed, "keys and values of former weights are in the prefix cache"
        width = max((len(r.tokens) for r in running), default=0)
        rows = torch.tensor([r.tokens + [0] * (width - len(r.tokens)) for r in running])  # what follows a row's end is not looked at
        logits = self._model.module(input_ids=rows).logits.float() if running else None
        for row, request in enumerate(running):
            token, logprob = self._draw(logits[row, len(request.tokens) - 1], request)
            request.tokens.append(token)
            request.made += 1
            self._made.append((request, token, logprob))
        return outputs

    def _draw(self, logits: torch.Tensor, request: SimpleNamespace) -> tuple[int, float]:
        params = request.params
        raw = logits.log_softmax(-1)
        if params.temperature == 0:
            token, processed = int(logits.argmax()), raw
        else:
            scaled = logits / params.temperature
            if params.top_k:
                scaled[scaled < scaled.topk(params.top_k).values[-1]] = float("-inf")
            processed = scaled.log_softmax(-1)
            token = int(torch.multinomial(processed.exp(), 1, generator=request.generator))
        chosen = {"raw_logprobs": raw, "processed_logprobs": processed}[self.args.logprobs_mode]
        return token, float(chosen[token])

    def _tell(self, request: SimpleNamespace, token: int, logprob: float) -> Any:
        end = token in request.params.stop_token_ids
        reason = "stop" if end else "length" if request.made == request.params.max_tokens else None
        if reason:
            self._requests = {name: r for name, r in self._requests.items() if r is not request}
            self._made = [one for one in self._made if one[0] is not request]
        completion = SimpleNamespace(token_ids=[token], logprobs=[{token: SimpleNamespace(logprob=logprob)}], finish_reason=reason)
        return SimpleNamespace(request_id=request.external, outputs=[completion], finished=reason is not None)

    def sleep(self, level: int = 1) -> None:
        assert self.args.enable_sleep_mode and not self._asleep and not self._requests
        self._asleep = {"weights", "kv_cache"}
        self._cached = -1
        if level == 2:
            self._model.lost = True
            for p in self._model.module.parameters():
                p.fill_(float("nan"))

    def wake_up(self, tags: list[str]) -> None:
        for tag in tags:
            self._asleep.remove(tag)
        if "weights" in tags:
            self._model.lost = False
