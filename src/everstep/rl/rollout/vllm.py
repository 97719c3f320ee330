"""Generation with vLLM, in the process of a rollout engine (its extra: ``pip install everstep[vllm]``).

vLLM's engine is stepped by us, one token for every running sequence, so it is asked, watched and requeued like any other engine. It is
built from the model's configuration alone, with whatever weights; the real ones come by Hugging Face names, in buckets, into
vLLM's own reloading on each of its workers (:mod:`everstep.rl.rollout.vllm_worker`).

The draws of a sequence are seeded with (seed, sample, tokens that it had when this engine got it): one that is made again from the same
point by the same weights gets the same seed. vLLM's arithmetic depends on what else is in the batch, so its tokens may still differ
in rare cases, and one that went on elsewhere is another sample than it would have been.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from everstep.config.rl_schema import RolloutConfig
from everstep.errors import WorkerFailed
from everstep.rl.rollout import Pieces, Response, Sampling
from everstep.rl.rollout.decoding import Pending
from everstep.rl.rollout.served import Served, checked, weights_of
from everstep.rl.rollout.transformers import adapters, end_tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

#: Weights are handed to vLLM in buckets of about this size.
BUCKET_BYTES = 256 << 20
#: Matrices that are one in vLLM's models, and what it calls that.
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
#: Steps in which vLLM finishes what was under way when its requests were cancelled (asynchronous scheduling).
_DRAIN_STEPS = 8


class VllmRollout(Served):
    """See :class:`everstep.rl.rollout.engine.RolloutEngine`.

    ``longest``: tokens of a prompt and its completion; ``adapted``: names of the matrices that adapters will come for, whose frozen
    weights stay in host memory, with those that vLLM has in one layer with them. WorkerFailed if vLLM does not start, with what it says.
    """

    def __init__(
        self, config: RolloutConfig, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, longest: int,
        adapted: Collection[str], seed: int, folder: Path,
    ):
        self.tokenizer, self._eos = tokenizer, end_tokens(tokenizer, hf_config)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
        self._expected = _expected_weights(model)
        hf_config.architectures = hf_config.architectures or [type(model).__name__]
        matrices = [name for name in self._expected if name.removesuffix(".weight").rpartition(".")[2] in adapted]
        self._adapted, self._frozen = frozenset(map(_layer, matrices)), dict[str, Tensor]()
        self._asleep: set[str] = set()
        self._llm = _start(config, hf_config, dtype, longest, seed, folder)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int | None) -> None:
        self.version = None
        self._frozen.clear()
        self._wake("weights")
        with self._reloading():
            loaded = self._load(self._kept(checked(weights, self._expected)))
        for lacking in self._llm.collective_rpc("not_among", args=(sorted(loaded),)):
            if lacking:
                raise WorkerFailed(f"rollout: vLLM filled all but {len(lacking)} of its weights, among them {lacking[:3]}")
        self._wake("kv_cache")
        self.version = version

    def _kept(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same; those of layers that adapters will come for stay in host memory."""
        for name, tensor in weights:
            if _layer(name) in self._adapted:
                self._frozen[name] = tensor.cpu()
            yield name, tensor

    def load_adapter(self, adapter: Iterable[tuple[str, Tensor]], scale: float, version: int) -> None:
        self.version = None
        self._wake("weights")
        with self._reloading():
            self._load(self._merged(dict(adapter), scale))
        self._wake("kv_cache")
        self.version = version

    def _merged(self, adapter: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, Tensor]]:
        """All weights of the layers that adapters are for."""
        modules = {name.removesuffix(".weight"): kept for name, kept in self._frozen.items()}
        pairs = {f"{module}.weight": (a, b) for module, _, a, b in adapters(adapter, modules)}
        for name, kept in self._frozen.items():
            if name in pairs:
                a, b = pairs[name]
                yield name, (kept.to(a.device).float() + scale * (b.float() @ a.float())).to(kept.dtype)  # a GPU's, or the host's
            else:
                yield name, kept

    @contextmanager
    def _reloading(self) -> Iterator[None]:
        """Weights are given within. What was half given when it broke off is nothing: :attr:`version` says so, and the next time it begins anew."""
        self._llm.collective_rpc("begin_load")
        try:
            yield
        finally:
            self._llm.collective_rpc("finish_load")

    def decoder(self) -> VllmSequences:
        return VllmSequences(self._llm, self._eos, self._serving, self._text)

    def sleep(self) -> None:
        self.version = None
        if len(self._asleep) == 2:
            return
        for part in list(self._asleep):  # a transfer of weights broke off half-way
            self._wake(part)
        self._llm.sleep(level=1 if self._adapted else 2)  # with adapters the frozen weights are not sent again: they go to host memory
        self._asleep = {"weights", "kv_cache"}

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            self._llm.wake_up([part])
            self._asleep.remove(part)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """In buckets. Returns vLLM's names of what was filled."""
        loaded, bucket, size = set[str](), list[tuple[str, Tensor]](), 0
        for name, tensor in weights:
            bucket.append((name, tensor))
            size += tensor.nbytes
            if size >= BUCKET_BYTES:
                loaded |= self._load_bucket(bucket)
                bucket, size = [], 0
        return loaded | self._load_bucket(bucket)

    def _load_bucket(self, bucket: list[tuple[str, Tensor]]) -> set[str]:
        return {name for worker in self._llm.collective_rpc("load_bucket", args=(bucket,)) for name in worker}


class VllmSequences:
    """See :class:`everstep.rl.rollout.engine.Sequences`."""

    def __init__(self, llm: Any, eos: Sequence[int], version: Any, text: Any):
        self._llm, self._eos, self._version, self._text = llm, list(eos), version, text
        self._running: dict[str, Pending] = {}
        self._sampling = Sampling()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, sequences: Sequence[Pending], sampling: Sampling) -> None:
        if self._running and sampling != self._sampling:
            raise ValueError("sequences that are sampled otherwise are still being decoded")
        if sequences:
            self._version()
        self._sampling = sampling
        for sequence in sequences:
            self._running[sequence.sample_id] = sequence
            self._ask(sequence)

    def advance(self, tokens: int) -> Pieces:
        start, gained, complete = time.monotonic(), dict[str, Response](), set[str]()
        version = self._version()
        for _ in range(tokens):
            if not self._running:
                break
            for output in self._llm.step():
                sequence = self._running.get(output.request_id)
                if sequence is None:
                    continue  # it was cancelled while vLLM was at it
                self._take(sequence, output, version, gained)
                if output.finished:
                    complete.add(output.request_id)
                    del self._running[output.request_id]
                    sequence.made.text = gained[output.request_id].text = self._text(sequence.made.tokens)
        seconds = (time.monotonic() - start) / max(len(gained), 1)
        for response in gained.values():
            response.seconds = seconds
        return {sample: (response, sample in complete) for sample, response in gained.items()}

    def cancel(self, sample_ids: Collection[str]) -> None:
        running = [sample for sample in sample_ids if sample in self._running]
        if running:
            self._llm.abort_request(running)
        for sample in running:
            del self._running[sample]

    def restart(self) -> None:
        if self._running:
            self._llm.abort_request(list(self._running))
        for _ in range(_DRAIN_STEPS):
            if self._llm.reset_prefix_cache():
                break
            self._llm.step()
        else:
            raise WorkerFailed(f"vLLM still held keys and values of the weights before, {_DRAIN_STEPS} steps after its requests were cancelled")
        for sequence in self._running.values():
            self._ask(sequence)

    def _take(self, sequence: Pending, output: Any, version: int, gained: dict[str, Response]) -> None:
        [made] = output.outputs
        if made.finish_reason not in (None, "stop", "length"):
            raise WorkerFailed(f"vLLM ended sample {sequence.sample_id} with {made.finish_reason!r}")
        tokens = list(made.token_ids)
        logprobs = [position[token].logprob for token, position in zip(tokens, made.logprobs or (), strict=True)]
        piece = Response(tokens, logprobs, [version] * len(tokens), finished=made.finish_reason == "stop")
        gained.setdefault(sequence.sample_id, Response()).extend(piece)
        sequence.made.extend(piece)

    def _ask(self, sequence: Pending) -> None:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        made, sampling = len(sequence.made.tokens), self._sampling
        params = vllm.SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=_seed(sampling.seed, sequence.sample_id, made),
            max_tokens=sampling.max_response_tokens - made, stop_token_ids=self._eos, ignore_eos=True, logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._llm.add_request(sequence.sample_id, vllm.TokensPrompt(prompt_token_ids=sequence.prompt + sequence.made.tokens), params)


def _start(config: RolloutConfig, hf_config: PretrainedConfig, dtype: torch.dtype, longest: int, seed: int, folder: Path) -> Any:
    """vLLM's engine, with weights that mean nothing yet."""
    # Its scheduler runs in this process, so that what dies with it is one engine; where devices are several, its workers are children.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # of an engine's workers among themselves: they are on one machine
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm

    folder.mkdir(parents=True, exist_ok=True)
    hf_config.save_pretrained(folder)
    arguments: dict[str, Any] = {
        "max_num_seqs": config.samples_per_batch, "generation_config": "vllm", "disable_log_stats": True, "max_model_len": longest,
        "enforce_eager": not config.cuda_graphs,
    } | config.engine_args | {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": str(dtype).removeprefix("torch."), "seed": seed,
        "enable_sleep_mode": config.colocated, "tensor_parallel_size": config.tp, "distributed_executor_backend": "mp" if config.tp > 1 else "uni",
        "worker_extension_cls": "everstep.rl.rollout.vllm_worker.WeightLoader",
        # Log-probabilities are asked for at the sampling temperature, before top_k and top_p: vLLM has one or the other.
        "logprobs_mode": "raw_logprobs" if config.temperature == 1.0 else "processed_logprobs",
    }  # fmt: skip
    if config.gpu_memory_fraction is not None:
        arguments["gpu_memory_utilization"] = config.gpu_memory_fraction
    try:
        return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
    except Exception as error:  # a fault boundary: whatever vLLM raises, it has not started
        raise WorkerFailed(f"vLLM {vllm.__version__} did not start: {type(error).__name__}: {error}; see rollout.engine_args") from error


def _expected_weights(model: PreTrainedModel) -> dict[str, tuple[torch.Size, int | str]]:
    """Name -> (shape, what is the same for names of one weight)."""
    known = dict(model.named_parameters(remove_duplicate=False))
    return {name: (weight.shape, id(known[name]) if name in known else name) for name, weight in weights_of(model).items()}


def _layer(name: str) -> str:
    """Which layer of vLLM's a weight is a part of: those of all experts are one; so are queries, keys and values, and gate and up."""
    module = name.rpartition(".")[0]
    experts, found, _ = module.partition(".experts.")
    if found:
        return f"{experts}.experts"
    stem, _, matrix = module.rpartition(".")
    return f"{stem}.{_FUSED.get(matrix, matrix)}"  # the others keep their names


def _seed(seed: int, sample: str, made: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{sample}/{made}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
