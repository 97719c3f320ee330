"""What a rollout engine is to the process around it, whichever library generates.

    engine = make(config, hf_config, tokenizer, device, folder)
    engine.load_weights(weights, version=7)                 weights by Hugging Face names, in any order
    sequences = engine.decoder()
    sequences.add([Pending("0/17#3", prompt)], sampling)
    sequences.advance(32)                                   what was made, to be said before the next call

:class:`everstep.rl.rollout.transformers.TransformersRollout` and :class:`everstep.rl.rollout.vllm.VllmRollout` are the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from everstep.config import derive
from everstep.config.schema import Config
from everstep.engine.fused import saved_name
from everstep.rl.rollout import Pieces, Sampling
from everstep.rl.rollout.decoding import Pending

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class Sequences(Protocol):
    """The sequences that an engine is generating."""

    def __len__(self) -> int:
        """Those that are not complete."""

    def add(self, sequences: Sequence[Pending], sampling: Sampling) -> None:
        """They go on from what they have. ``sampling`` may only change when there are none; ValueError."""

    def advance(self, tokens: int) -> Pieces:
        """Up to ``tokens`` tokens for each running sequence."""

    def cancel(self, sample_ids: Collection[str]) -> None:
        """These, if they are there, are not completed."""

    def restart(self) -> None:
        """The weights have changed: what runs goes on from the tokens it has, with keys and values made anew."""


class RolloutEngine(Protocol):
    """``version``: the committed step of the weights it serves; None: it has no complete set, and serves nothing."""

    version: int | None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int | None) -> None:
        """All weights, by their Hugging Face names, each in its full shape (a tied output layer may be left out). ``version`` None: frozen
        ones, whose adapters are still to come. WorkerFailed if they are not those of the model; the engine then serves nothing."""

    def load_adapter(self, adapter: Iterable[tuple[str, Tensor]], scale: float, version: int) -> None:
        """Low-rank adapters beside the frozen weights: W + scale B A."""

    def decoder(self) -> Sequences: ...

    def sleep(self) -> None:
        """Take as little of the device's memory as can be; ``load_weights`` (or ``load_adapter``) ends it. Nothing is served until then."""


def make(config: Config, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device, folder: Path) -> RolloutEngine:
    """The engine that ``rollout.engine`` names. ``folder``: for files that the library wants to read. WorkerFailed if it does not start."""
    dtype = getattr(torch, config.model.dtype)
    if config.rollout.engine == "vllm":
        from everstep.rl.rollout.vllm import VllmRollout

        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        adapted = [saved_name(hf_config.model_type, matrix) for matrix in derive.lora_matrices(config)]
        return VllmRollout(config.rollout, hf_config, tokenizer, dtype, longest, adapted, config.seed, folder)
    from everstep.rl.rollout.transformers import TransformersRollout

    return TransformersRollout(hf_config, tokenizer, device, dtype, config.rollout.cuda_graphs)
