"""Megatron's pipeline schedules over micro-batches of any shape and number.

The interleaved schedule (layout.vpp) wants a number of micro-batches that the pipeline's ranks divide, and ranks that exchange
tokens (layout.ep) must run as many as each other, so empty ones, without loss and weight, fill it up. The former overlaps its messages
with computation, so all have the same shape: micro-batches are padded to the largest. The plain schedule sends shapes along where
they differ. A micro-batch without samples, which a data-parallel rank may be given when samples are packed, runs as an empty one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from everstep.engine.arrange import MULTIPLE, Grid, Packed
from everstep.engine.columns import Columns
from everstep.layout import Layout
from everstep.node import page

if TYPE_CHECKING:
    from everstep.cluster.batch import TrainingBatch

#: (the arranged micro-batch, what the model gave at this rank's columns) -> (loss sum, Megatron's token count, what to collect)
Finish = Callable[[Grid | Packed, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


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
    packed: bool,
    count: int,
    shares: Callable[[TrainingBatch], Tensor] | None,
) -> list[dict[str, Tensor]]:
    """One forward (and backward) of every micro-batch through this rank's ``chunks``; empty ones make them ``count``.

    ``packed``: samples lie in one row. ``shares``: of a micro-batch's tokens (B, T), what routers are told
    (``everstep.engine.moe.token_shares``); None: nothing.

    Returns what ``finish`` collects, per micro-batch, on the last pipeline rank (nothing for one without samples); an empty list
    elsewhere. The process's random state is left as it was: no stream survives a micro-batch.
    """
    kind = Packed if packed else Grid
    empty = Packed(None, columns, (), columns.padded(MULTIPLE), device) if packed else Grid(None, columns, 1, columns.padded(1), device)
    work = [kind.of(_moved(batch, device), columns, device) if len(batch) else empty for batch in micro_batches]
    seeds = list(seeds)
    if len(work) != len(seeds):
        raise AssertionError(f"{len(work)} micro-batches, {len(seeds)} seeds")
    missing = count - len(work)
    if layout.vpp > 1:
        missing += -(len(work) + missing) % layout.pp
    work, seeds = work + [empty] * missing, seeds + [0] * missing
    largest = max(one.shape[0] for one in work), max(one.shape[1] for one in work)
    # All stages see the same micro-batches, so they agree on whether shapes must be sent along.
    megatron.variable_seq_lengths = layout.pp > 1 and layout.vpp == 1 and len({one.shape for one in work}) > 1
    if layout.vpp > 1:
        work = [one.widened(*largest) for one in work]
    precision = {"fp32_output": False} if megatron.bf16 else {}
    number_of = {id(chunk): number for number, chunk in enumerate(chunks)}

    def forward(items: Iterator[tuple[int, Grid | Packed, int]], chunk: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        index, arranged, seed = next(items)
        page.micro_batch(index, len(work))
        _seed(seed, layout, number_of[id(chunk)])
        ids, positions, more = arranged.inputs()
        if shares is not None:
            more["padding_mask"] = arranged.spread(None if arranged.batch is None else shares(arranged.batch))
        after: Callable[[Tensor], Any] = functools.partial(_finish_rows, finish, arranged) if arranged.batch is not None else _nothing
        return chunk(ids, positions, None, **precision, **more), after

    numbered = lambda: zip(range(len(work)), work, seeds, strict=True)
    with _kept_random_state(), _nothing_left_of_a_failed_backward():
        results = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[numbered() for _ in chunks] if len(chunks) > 1 else numbered(),
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


def _finish_rows(finish: Finish, arranged: Grid | Packed, outputs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return finish(arranged, arranged.of_samples(outputs))


def _nothing(outputs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return 0.0 * outputs.sum(), no_tokens(outputs.device), {}


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
    except BaseException:  # whatever it is, it is raised again
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
