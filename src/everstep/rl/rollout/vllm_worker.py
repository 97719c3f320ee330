"""What rollout engines add to vLLM's workers (its ``worker_extension_cls``); called with ``collective_rpc``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class WeightLoader:
    """Mixed into vLLM's worker class, which has ``model_runner``.

    A loaded model has its weights as its kernels want them (packed for a CPU, quantized, experts shuffled), not as they came. So weights are given between
    ``begin_load`` and ``finish_load``, as vLLM itself reloads them: it keeps what is given until a layer has all of its own, and then makes it anew in the
    same memory. **A layer of which only a part was given is nothing afterwards.**
    """

    model_runner: Any

    def begin_load(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model_runner.get_model())

    @torch.no_grad()
    def load_bucket(self, weights: list[tuple[str, Tensor]]) -> list[str]:
        """Weights, by Hugging Face names and whole, for this worker's share of the model; their memory must stay as it is until ``finish_load``.
        Returns vLLM's names of what is filled by them."""
        return sorted(self.model_runner.get_model().load_weights(iter(weights)))

    @torch.no_grad()
    def finish_load(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        runner = self.model_runner
        with _without_warnings("vllm.model_executor.model_loader.reload.layerwise"):  # one for each layer that an adapter leaves as it is
            finalize_layerwise_reload(runner.get_model(), runner.model_config)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the caller may free what it gave

    def not_among(self, loaded: list[str]) -> list[str]:
        """vLLM's names of this worker's weights that are not among these."""
        return sorted({name for name, _ in self.model_runner.get_model().named_parameters()} - set(loaded))


@contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
