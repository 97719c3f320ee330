"""Megatron's pipeline schedules over micro-batches of any shape and number.

The interleaved schedule (layout.vpp) wants a number of micro-batches that the pipeline's ranks divide, so empty ones,
without loss and weight, fill it up. It overlaps its messages with computation, so all have the same shape: micro-batches
are padded to the largest. The plain schedule sends shapes along where they differ.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from everstep.engine.columns import Columns
from everstep.layout import Layout

if TYPE_CHECKING:
    from everstep.cluster.batch import TrainingBatch

#: (batch, logits of this rank's columns) -> (loss sum, Megatron's token count, what to collect)
Finish = Callable[["TrainingBatch", Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


def run_micro_batches(
    chunks: Sequence[torch.nn.Module],
    megatron: TransformerConfig,
    layout: Layout,
    columns: Columns,
    micro_batches: Sequence[TrainingBatch],
    seeds: Sequence[int],
    finish: Finish,
    forward_only: bool,
    device: torch.device,
) -> list[dict[str, Tensor]]:
    """One forward (and backward) of every micro-batch through this rank's ``chunks``.

    Returns what ``finish`` collects, per micro-batch, on the last pipeline rank; an empty list elsewhere. The process's
    random state is left as it was: no stream survives a micro-batch.
    """
    work: list[tuple[TrainingBatch | None, int]] = list(zip(micro_batches, seeds, strict=True))
    if layout.vpp > 1:
        work += [(None, 0)] * (-len(work) % layout.pp)
    shapes = [tuple(batch.tensors["input_ids"].shape) for batch in micro_batches]
    largest = max(samples for samples, _ in shapes), columns.padded(max(tokens for _, tokens in shapes))
    # All stages see the same micro-batches, so they agree on whether shapes must be sent along.
    megatron.variable_seq_lengths = layout.pp > 1 and layout.vpp == 1 and len(set(shapes)) > 1
    precision = {"fp32_output": False} if megatron.bf16 else {}
    number_of = {id(chunk): number for number, chunk in enumerate(chunks)}

    def forward(
        items: Iterator[tuple[TrainingBatch | None, int]], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch, seed = next(items)
        after: Callable[[Tensor], Any]
        _seed(seed, layout, number_of[id(chunk)])
        if batch is None:
            ids, after = torch.zeros(largest, dtype=torch.int64, device=device), _nothing
        else:
            batch = _moved(batch, device)
            ids, after = batch.tensors["input_ids"], functools.partial(_finish_rows, finish, batch)
        samples, width = largest if layout.vpp > 1 else (len(ids), columns.padded(ids.shape[1]))
        positions = torch.arange(width, device=device)[None].expand(samples, -1)
        own = columns.own(F.pad(ids, (0, 0, 0, samples - len(ids))), width)
        return chunk(own, columns.own(positions, width), None, **precision), after

    with _kept_random_state(), _nothing_left_of_a_failed_backward():
        results = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(work) for _ in chunks] if len(chunks) > 1 else iter(work),
            model=list(chunks),
            num_microbatches=len(work),
            seq_length=largest[1],
            micro_batch_size=largest[0],
            forward_only=forward_only,
        )
    return results[: len(micro_batches)]


def _moved(batch: TrainingBatch, device: torch.device) -> TrainingBatch:
    """On ``device``. From page-locked memory, since from any other a copy waits for all kernels that were started before."""
    if device.type != "cuda" or all(tensor.is_cuda for tensor in batch.tensors.values()):
        return batch.to(device)
    pinned = {name: tensor if tensor.is_cuda else tensor.pin_memory() for name, tensor in batch.tensors.items()}
    return batch.with_tensors(**pinned).to(device, non_blocking=True)


def no_tokens(device: torch.device) -> Tensor:
    """Megatron wants a token count with every loss; ours is divided later, by the caller."""
    return torch.zeros((), dtype=torch.int, device=device)


def _finish_rows(finish: Finish, batch: TrainingBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    # Even of all rows a slice's backward would fill a tensor of the logits' size with zeros, and copy their gradient into it.
    return finish(batch, logits if len(batch) == len(logits) else logits[: len(batch)])


def _nothing(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return 0.0 * logits.sum(), no_tokens(logits.device), {}


def _seed(seed: int, layout: Layout, chunk: int) -> None:
    """Streams of one micro-batch: from its seed and the model-parallel position."""
    stage = chunk * layout.pp + mpu.get_pipeline_model_parallel_rank()
    position = stage * layout.cp + mpu.get_context_parallel_rank()
    # Megatron adds 2718 and the tensor-parallel rank for streams that differ between those ranks.
    model_parallel_cuda_manual_seed((seed * layout.pp * layout.vpp * layout.cp + position) % 2**31)


@contextlib.contextmanager
def _nothing_left_of_a_failed_backward() -> Iterator[None]:
    """On the CPU torch keeps the parts of a backward that it did not come to, because one of them raised, in a queue of the calling
    thread. They hold the model, its groups and their open sockets, by which other ranks learn that this one gave up. A backward
    of something recorded earlier, and so due later, makes torch throw them away."""
    with torch.enable_grad():
        earlier = torch.zeros(1, device="cpu", requires_grad=True).clone()
    try:
        yield
    except BaseException:
        earlier.backward()  # type: ignore[no-untyped-call]
        raise


@contextlib.contextmanager
def _kept_random_state() -> Iterator[None]:
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(host)
        torch.cuda.set_rng_state(device)
