"""What rollout engines add to vLLM's workers (its ``worker_extension_cls``); called with ``collective_rpc``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WeightLoader:
    """Mixed into vLLM's worker class, which has ``model_runner``."""

    model_runner: Any

    @torch.no_grad()
    def load_bucket(self, weights: list[tuple[str, Tensor]]) -> list[str]:
        """Copy weights, by Hugging Face names and whole, into this worker's share of the model. Returns vLLM's names of what was filled."""
        loaded = self.model_runner.model.load_weights(iter(weights))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the caller may free what it gave
        return sorted(loaded)

    def not_among(self, loaded: list[str]) -> list[str]:
        """vLLM's names of this worker's weights that are not among these."""
        return sorted({name for name, _ in self.model_runner.model.named_parameters()} - set(loaded))
