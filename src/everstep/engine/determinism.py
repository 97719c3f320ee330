"""Deterministic kernels: the same seed and layout give bitwise the same weights."""

from __future__ import annotations

import os

import torch


def set_determinism(wanted: bool, device: torch.device) -> None:
    """Deterministic kernels, or not, for the whole process: each rank is a process of its own."""
    if device.type != "cuda":
        return
    if wanted:
        # cuBLAS reads it when its handle is made, which is after this in every launcher.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    # Filling fresh memory costs time, and we read no such memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Their backward adds in an order that varies; flash attention and plain matrix products do not.
    torch.backends.cuda.enable_mem_efficient_sdp(not wanted)
    # Nor does cuDNN's. Torch would prefer it on some cards; where it is wanted, fusion.CudnnAttention asks for it.
    torch.backends.cuda.enable_cudnn_sdp(False)
