"""Generation with a transformers model: any architecture, no further dependency, on CPU and GPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from everstep.cluster.batch import TrainingBatch
from everstep.errors import WorkerFailed
from everstep.rl.rollout import Sampling, assemble, prompt_tokens
from everstep.rl.rollout.decoding import Decoder, Pending
from everstep.rl.rollout.served import Served, checked, weights_of
from everstep.rl.rollout.slots import Slots

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class TransformersRollout(Served):
    """A transformers model that generates, with weights given from outside.

    It serves nothing before ``load_weights``, and stamps every sample with the version of the weights that made it.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        graphs: bool = True,
    ):
        self.tokenizer, self.device, self._graphs = tokenizer, torch.device(device), graphs
        self._slots = weakref.WeakSet[Slots]()  # of the decoders that there are
        self._frozen: dict[str, Tensor] = {}  # with adapters: the weights of the adapted modules without them
        self._adapted = False  # whether there will be any
        self._shapes: list[torch.Size] = []  # of the parameters, while they have no memory
        # No weights are drawn, and none has memory before they come: the device may be somebody else's until then.
        with no_init_weights():
            self.model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype).eval().requires_grad_(False)
        self.model.tie_weights()  # which is part of drawing them
        self._give_up_weights()
        # A model's own generation defaults (penalties, top_p, ...) would change the distribution behind our back.
        self.model.generation_config = GenerationConfig()
        self._pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.eos = end_tokens(tokenizer, hf_config)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int | None) -> None:
        """Copy weights given by their Hugging Face names; ``version`` is the committed step they belong to, None for frozen weights whose
        adapters are still to come (``load_adapter``).

        All must come, each in its full shape (a tied output layer may be left out). WorkerFailed otherwise; the model
        then serves nothing until a complete set has come.
        """
        self.version, self._adapted = None, version is None
        self._frozen.clear()
        self._wake()
        parameters = weights_of(self.model)
        for name, tensor in checked(weights, {name: (p.shape, p.data_ptr()) for name, p in parameters.items()}):  # tied names share their memory
            parameters[name].copy_(tensor)
        self.version = version

    @torch.no_grad()
    def load_adapter(self, adapter: Iterable[tuple[str, Tensor]], scale: float, version: int) -> None:
        """Low-rank adapters beside the frozen weights that ``load_weights(..., None)`` brought: W + scale B A, in float32.

        ``adapter``: ``MODULE.lora_A.weight`` (r, in) and ``MODULE.lora_B.weight`` (out, r) of every adapted matrix. WorkerFailed if one is
        without the other, or fits no weight; the model then serves nothing.
        """
        self.version = None
        self._wake()
        parameters = {name.removesuffix(".weight"): tensor for name, tensor in weights_of(self.model).items()}
        for module, target, a, b in adapters(dict(adapter), parameters):
            frozen = self._frozen.setdefault(module, target.clone()).to(self.device)
            low_rank = b.to(self.device, torch.float32) @ a.to(self.device, torch.float32)
            target.copy_(frozen.float() + scale * low_rank)
        self.version = version

    def sleep(self) -> None:
        """Weights that will come anew have no memory meanwhile; frozen ones go to the host's. See
        :class:`everstep.rl.rollout.engine.RolloutEngine`."""
        self.version = None
        for slots in self._slots:
            slots.release()
        if self._adapted:
            self.model.to("cpu")
            self._frozen = {module: frozen.cpu() for module, frozen in self._frozen.items()}
        elif not self._shapes:
            self._give_up_weights()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for the process that shares the device

    def _give_up_weights(self) -> None:
        self._shapes = [parameter.shape for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.data = parameter.data.new_empty(0)

    def _wake(self) -> None:
        for parameter, shape in zip(self.model.parameters(), self._shapes, strict=False):  # no shapes: it is awake
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=self.device)
        self._shapes = []
        self.model.to(self.device)

    def decoder(self) -> Decoder:
        """For sequences that come and go. WorkerFailed, when asked for a token, before there are weights."""
        slots = Slots(self.model, self.device, self._pad, self._graphs)
        self._slots.add(slots)
        return Decoder(slots, self.eos, self.device, self._serving, self._text)

    def generate(self, batch: TrainingBatch, sampling: Sampling) -> TrainingBatch:
        """One completion per row of ``batch``, whose ``input_ids``/``attention_mask`` (B, P) are right-padded prompts; as
        :func:`everstep.rl.rollout.assemble` lays them out, on the CPU."""
        self._serving()
        if not len(batch):
            return batch.slice(0, 0)
        prompts = prompt_tokens(batch)
        if not all(prompts):
            raise WorkerFailed(f"rollout: the prompt of sample {batch.sample_ids[prompts.index([])]} is empty")
        decoder = self.decoder()  # which goes with the call: its memory is for training again
        sequences = [Pending(sid, prompt) for sid, prompt in zip(batch.sample_ids, prompts, strict=True)]
        decoder.add(sequences, sampling)
        while len(decoder):
            decoder.advance(sampling.max_response_tokens)
        return assemble(batch, {s.sample_id: s.made for s in sequences})


def end_tokens(tokenizer: PreTrainedTokenizerBase, hf_config: PretrainedConfig) -> list[int]:
    """Tokens that end a completion. WorkerFailed if there is none."""
    eos = sorted(_ids(tokenizer.eos_token_id) | _ids(hf_config.eos_token_id))
    if not eos:
        raise WorkerFailed("neither the tokenizer nor the model names an end-of-sequence token; set eos_token_id")
    return eos


def adapters(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(module, its weight (out, in), A (r, in), B (out, r)) of each; ``weights``: by module. WorkerFailed if one is without the other
    half, or fits no weight."""
    for name, a in tensors.items():
        module, low, _ = name.rpartition(".lora_A.weight")
        if not low:
            continue
        b, target = tensors.get(f"{module}.lora_B.weight"), weights.get(module)
        if b is None or target is None or target.shape != (b.shape[0], a.shape[1]):
            raise WorkerFailed(f"rollout: the adapter {module} does not fit: A {list(a.shape)}, B {list(b.shape) if b is not None else None}, "
                               f"weight {list(target.shape) if target is not None else None}")
        yield module, target, a, b
    if 2 * sum(name.endswith(".lora_A.weight") for name in tensors) != len(tensors):
        raise WorkerFailed("rollout: adapters came of which one half is missing")


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, (list, tuple)) else {value}
