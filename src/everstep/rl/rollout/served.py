"""What the engines of both libraries have in common: the version that they serve, and weights by Hugging Face names."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from everstep.engine.fused import single_experts
from everstep.errors import WorkerFailed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Served:
    """``version``: the committed step of the weights; None: it has no complete set."""

    version: int | None = None
    tokenizer: PreTrainedTokenizerBase

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _serving(self) -> int:
        if self.version is None:
            raise WorkerFailed("rollout: asked to generate before it was given weights")
        return self.version


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters under all Hugging Face names that they are saved with; of fused experts, views."""
    getters = {name: functools.partial(_same, p) for name, p in model.named_parameters(remove_duplicate=False)}
    saved = single_experts(getters, model.config.model_type, expert_count(model))
    return {name: get() for name, get in saved.items()}


def expert_count(model: PreTrainedModel) -> int:
    """Experts of a layer, of a model whose configuration knows of any; else 0."""
    return int(getattr(model.config, "num_local_experts", 0))


def checked(weights: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[torch.Size, int | str]]) -> Iterator[tuple[str, Tensor]]:
    """``weights`` as they come. ``expected``: name -> (shape, what is the same for names of one weight). WorkerFailed if one is unknown or of
    another shape, or, at the end, if not all came."""
    missing = {key: name for name, (_, key) in reversed(list(expected.items()))}
    for name, tensor in weights:
        if name not in expected:
            raise WorkerFailed(f"rollout: the model has no weight called {name!r}")
        shape, key = expected[name]
        if tensor.shape != shape:
            raise WorkerFailed(f"rollout: weight {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        missing.pop(key, None)
        yield name, tensor
    if missing:
        raise WorkerFailed(f"rollout: {len(missing)} weights did not come, among them {sorted(missing.values())[:3]}")


def _same(parameter: Tensor) -> Tensor:
    return parameter
