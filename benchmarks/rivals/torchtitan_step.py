"""torchtitan's step beside ours: the same weights, the same tokens, in the same process, by turns (``benchmarks.throughput --against torchtitan``).

Its own model of Qwen3, its own parallelization of it (torch.compile of each block and of the loss, FSDP2 over data-parallel ranks whose
gathered weights are kept after the forward pass, sequence-parallel tensor parallelism), its own optimizer (fused AdamW), its own clipping,
called as its trainer calls them; no activation checkpointing. Weights, moments and gradient sums are float32 and matrix products bfloat16, as with
ours; but it has no mixed precision for tensor parallelism alone, and is all in bfloat16 there. Known to run: torchtitan 0.2.2.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from everstep.cluster.batch import TrainingBatch
from everstep.layout import Layout

SAME_LOSS = 0.01  # relative; bfloat16 rounds elsewhere


class TitanTrainer:
    """One engine of torchtitan with its batches: one step at a time, timed. ``weights``: (Hugging Face name, whole tensor), on every rank.

    Raises ValueError for a layout or a model that torchtitan's Qwen3 has not.
    """

    deterministic = False

    def __init__(
        self, shape: Any, weights: dict[str, torch.Tensor], batches: Sequence[TrainingBatch], layout: Layout, device: torch.device, compiled: bool,
    ) -> None:  # fmt: skip
        import torchtitan.distributed.parallel_dims as parallel_dims
        from torchtitan.components.loss import build_cross_entropy_loss
        from torchtitan.components.optimizer import build_optimizers
        from torchtitan.config import JobConfig
        from torchtitan.distributed import utils as its
        from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs, Qwen3StateDictAdapter, parallelize_qwen3

        if shape.model_type != "qwen3" or layout.pp > 1 or layout.cp > 1:
            raise ValueError("compared for Qwen3, by data and tensor parallelism alone")
        job = JobConfig()
        job.activation_checkpoint.mode = "none"
        job.compile.enable = compiled
        job.training.seq_len = batches[0].tensors["input_ids"].shape[1]
        job.optimizer.lr = 1e-5
        job.parallelism.fsdp_reshard_after_forward = "never"
        all_low = layout.tp > 1 and layout.dp == 1
        parallel_dims.device_type = device.type  # it looks for an accelerator, and takes CUDA for granted where there is none
        dims = parallel_dims.ParallelDims(
            dp_replicate=1, dp_shard=layout.dp, cp=1, tp=layout.tp, pp=1, ep=1, etp=1, world_size=layout.ranks_per_replica,
        )  # fmt: skip
        dims.build_mesh()
        args = Qwen3ModelArgs(
            dim=shape.hidden_size, n_layers=shape.num_hidden_layers, n_heads=shape.num_attention_heads, n_kv_heads=shape.num_key_value_heads,
            vocab_size=shape.vocab_size, head_dim=shape.head_dim, hidden_dim=shape.intermediate_size, norm_eps=shape.rms_norm_eps,
            max_seq_len=job.training.seq_len, enable_weight_tying=shape.tie_word_embeddings,
        )  # fmt: skip
        cuda = device.type == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        with torch.device("meta"), _default_dtype(torch.bfloat16 if all_low else torch.float32):
            model = Qwen3Model(args)
        model = parallelize_qwen3(model, dims, job)
        model.to_empty(device=device.type)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        if shape.tie_word_embeddings and "lm_head.weight" not in weights:
            weights = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
        its_names = Qwen3StateDictAdapter(args, None).from_hf(weights)
        set_model_state_dict(model, its_names, options=StateDictOptions(full_state_dict=True))
        model.train()
        self._model, self._device, self._dims, self._clip = model, device, dims, its.clip_grad_norm_
        self._loss = build_cross_entropy_loss(job, parallel_dims=dims)
        self._optimizers = build_optimizers([model], job.optimizer, dims)
        self._around = its.get_train_context(dims.tp_enabled)
        self._precision = its.maybe_enable_amp(dims, "bfloat16", device.type)
        self._micro_batches = [(b.tensors["input_ids"], _labels(b)) for b in batches]
        self.resident = (torch.cuda.memory_allocated() if cuda else 0) - before
        self.mean_loss = float("nan")  # of the last step, the mean over its tokens

    def step(self) -> tuple[float, float, int]:
        """(seconds of the step, of its forward and backward, bytes allocated at most)."""
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        self._optimizers.zero_grad()
        tokens = sum((labels >= 0).sum() for _, labels in self._micro_batches).to(self._device) * self._dims.dp_shard  # type: ignore[union-attr]
        losses = []
        for ids, labels in self._micro_batches:
            inputs, wanted = ids.to(self._device), labels.to(self._device)
            with self._around():
                with self._precision:
                    loss = self._loss(self._model(inputs), wanted) / tokens
                loss.backward()
            losses.append(loss.detach())
        if cuda:
            torch.cuda.synchronize()
        computed = time.perf_counter()
        self._clip(list(self._model.parameters()), 1.0, foreach=True)
        self._optimizers.step()
        if cuda:
            torch.cuda.synchronize()
        end = time.perf_counter()
        total = torch.stack([_whole(loss) for loss in losses]).sum()
        torch.distributed.all_reduce(total)  # tensor-parallel ranks have the same, data-parallel ones their part
        self.mean_loss = float(total) / self._dims.tp
        return end - start, computed - start, torch.cuda.max_memory_allocated() if cuda else 0

    def close(self) -> None:
        """Nothing that outlives its tensors."""
        del self._model, self._optimizers


def _whole(loss: torch.Tensor) -> torch.Tensor:
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def _labels(batch: TrainingBatch) -> torch.Tensor:
    """The next token of each position; of the last one, none."""
    ids = batch.tensors["input_ids"]
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
