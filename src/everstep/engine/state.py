"""The rank's own part of the training state, found inside Megatron's optimizer: shards, masters, moments, gradients.

A *slot* is one parameter as the optimizer of this rank sees it: with the distributed optimizer the part of the
parameter that lies in this rank's shard (possibly none of it), else the whole parameter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from everstep.engine.hf import Piece
from everstep.engine.logical import LogicalState, Place, logical_state
from everstep.engine.model import Architecture, rank_parameters
from everstep.engine.offload import HostCopy, host_bytes
from everstep.errors import EverstepError


@dataclass
class Slot:
    """``stepped`` is the tensor that torch's AdamW updates: the float32 master, or the float32 parameter itself."""

    name: str
    stepped: Tensor
    has_master: bool
    adam: dict[str, Any]  # exp_avg, exp_avg_sq, step
    start: int = 0  # its first element in the flattened parameter


def parameter_names(chunks: Sequence[torch.nn.Module]) -> dict[torch.nn.Parameter, str]:
    """Parameter -> its name among ``rank_parameters``."""
    return {parameter: name for name, parameter in rank_parameters(chunks).items()}


def adam_slots(chunks: list[DistributedDataParallel], optimizer: Any) -> list[Slot]:
    """This rank's slots in the model's order, Adam's moments created (zero) where they do not exist yet.

    Megatron creates them in the first step; a spare must be able to receive them before it has made one.
    """
    names = parameter_names(chunks)
    slots: dict[str, Slot] = {}
    for inner in optimizer.chained_optimizers:  # expert-parallel parameters have one of their own
        slots |= _slots_of(inner, names)
    return [slots[name] for name in names.values() if name in slots]


def _slots_of(inner: Any, names: Mapping[torch.nn.Parameter, str]) -> dict[str, Slot]:
    pairs: list[tuple[torch.nn.Parameter, Tensor, bool]] = []
    distributed = hasattr(inner, "shard_fp32_from_float16_groups")
    if distributed:
        for params, shards, master in (
            (inner.model_float16_groups, inner.shard_fp32_from_float16_groups, True),
            (inner.model_fp32_groups, inner.shard_fp32_groups, False),
        ):
            for group, shard_group in zip(params, shards, strict=True):
                pairs += [(p, s, master) for p, s in zip(group, shard_group, strict=True)]
    elif hasattr(inner, "fp32_from_float16_groups"):  # bfloat16, one optimizer per rank
        for group, masters in zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True):
            pairs += [(p, m, True) for p, m in zip(group, masters, strict=True)]
        for group in inner.fp32_from_fp32_groups:
            pairs += [(p, p, False) for p in group]
    else:
        pairs = [(p, p, False) for group in inner.optimizer.param_groups for p in group["params"]]

    state = inner.optimizer.state
    slots: dict[str, Slot] = {}
    for parameter, stepped, master in pairs:
        adam = state[stepped]
        if not adam:
            # A fused optimizer reads it on the device.
            where = stepped.device if inner.optimizer.param_groups[0].get("fused") else "cpu"
            adam["step"] = torch.zeros((), dtype=torch.float32, device=where)
            adam["exp_avg"] = torch.zeros_like(stepped, memory_format=torch.preserve_format)
            adam["exp_avg_sq"] = torch.zeros_like(stepped, memory_format=torch.preserve_format)
        start = inner._get_model_param_range_map(parameter)["param"].start if distributed else 0
        slots[names[parameter]] = Slot(names[parameter], stepped, master, adam, start)
    return slots


def _buffers(chunks: Sequence[DistributedDataParallel]) -> Iterator[Any]:
    """Of all gradients of this rank, in a fixed order. With expert parallelism experts have buffers of their own, summed and cut over
    other ranks than the rest."""
    return (buffer for ddp in chunks for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers))


def parameter_memory(chunks: Sequence[DistributedDataParallel]) -> Iterator[Tensor]:
    """Tensors that lie on all memory of this rank's parameters."""
    yield from (parameter.detach() for parameter in rank_parameters(chunks).values())
    yield from (buffer.param_data for buffer in _buffers(chunks) if buffer.param_data is not None)


def gradient_memory(chunks: Sequence[DistributedDataParallel]) -> Iterator[Tensor]:
    """Tensors that lie on all memory of this rank's gradients."""
    return (buffer.grad_data for buffer in _buffers(chunks))


def optimizer_memory(slots: Sequence[Slot]) -> Iterator[Tensor]:
    """Tensors that lie on all memory of this rank's moments and masters. A parameter that has no master is not among them."""
    for slot in slots:
        yield from ([slot.stepped.detach()] if slot.has_master else [])
        yield from (slot.adam["exp_avg"], slot.adam["exp_avg_sq"])


def _buckets(chunks: Sequence[DistributedDataParallel]) -> Iterator[tuple[Any, Any]]:
    """(buffer, bucket) of all gradients of this rank, in a fixed order."""
    return ((buffer, bucket) for buffer in _buffers(chunks) for bucket in buffer.buckets)


def gradient_shards(chunks: list[DistributedDataParallel]) -> list[Tensor]:
    """Flat float32 views of this rank's part of the gradient buffers: its shard, or all without sharding."""
    if not chunks[0].ddp_config.use_distributed_optimizer:
        return [bucket.grad_data for _, bucket in _buckets(chunks)]
    shards = []
    for buffer, bucket in _buckets(chunks):
        length = bucket.grad_data.numel() // buffer.data_parallel_world_size
        rank = buffer.data_parallel_group.rank()
        shards.append(bucket.grad_data[rank * length : (rank + 1) * length])
    return shards


def counted_ranges(chunks: list[DistributedDataParallel], table: list[Piece]) -> list[list[tuple[int, int]]]:
    """Per tensor of ``gradient_shards``: the half-open ranges that this rank counts in the replica's squared norm.

    Together the ranks of a replica count every parameter once: of tensors that all tensor-parallel ranks hold only
    rank 0 counts, the second copy of a tied embedding counts nowhere, and without the distributed optimizer only
    the first of the ranks that hold equal gradients (data and context parallel; of an expert, expert-data parallel) counts at all.
    """
    known = _held_pieces(table)
    names = parameter_names(chunks)
    sharded = chunks[0].ddp_config.use_distributed_optimizer
    result = []
    for buffer, bucket in _buckets(chunks):
        dp_rank = buffer.data_parallel_group.rank()  # among the ranks that hold equal gradients, or share them out
        length = bucket.grad_data.numel()
        low, high = 0, length
        if sharded:
            length //= buffer.data_parallel_world_size
            low, high = dp_rank * length, (dp_rank + 1) * length
        ranges: list[tuple[int, int]] = []
        all_counted = True
        for parameter in bucket.params_list:
            if not _counts(known[names[parameter]], sharded, dp_rank):
                all_counted = False
                continue
            start, end = (at - bucket.offset for at in buffer.param_index_map[parameter][:2])
            start, end = max(start, low) - low, min(end, high) - low
            if start < end:
                ranges.append((start, end))
        # Between parameters there is only padding, which is zero.
        result.append([(0, length)] if all_counted else _merged(ranges))
    return result


def counted_names(chunks: list[DistributedDataParallel], table: list[Piece]) -> frozenset[str]:
    """Parameters whose part in this rank's slots counts in a norm over the replica, so that together every number counts once; as
    ``counted_ranges``, for tensors shaped like slots."""
    known, names = _held_pieces(table), parameter_names(chunks)
    sharded = chunks[0].ddp_config.use_distributed_optimizer
    return frozenset(
        names[parameter]
        for buffer, bucket in _buckets(chunks)
        for parameter in bucket.params_list
        if _counts(known[names[parameter]], sharded, buffer.data_parallel_group.rank())
    )


def _held_pieces(table: list[Piece]) -> dict[str, Piece]:
    """Those of this rank, by local name."""
    stage, ep = mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
    return {piece.local: piece for piece in table if piece.held(stage, ep)}


def _counts(piece: Piece, sharded: bool, dp_rank: int) -> bool:
    """Whether this rank counts what it has of a parameter. ``dp_rank``: among the ranks that hold equal gradients, or share them out."""
    replicated_elsewhere = piece.replicated and mpu.get_tensor_model_parallel_rank() != 0
    return not (piece.shared or replicated_elsewhere or (not sharded and dp_rank != 0))


def stepped(slots: Sequence[Slot]) -> dict[str, Tensor]:
    """name -> what the optimizer steps of this rank's parameters: float32 masters, or the parameters themselves."""
    return {slot.name: slot.stepped.detach() for slot in slots}


def names_inside(slots: Sequence[Slot], table: list[Piece]) -> dict[str, tuple[str, ...]]:
    """name of a slot -> Hugging Face names of the tensors in that parameter."""
    stage = mpu.get_pipeline_model_parallel_rank()
    names: dict[str, tuple[str, ...]] = {}
    for piece in table:
        if piece.stage == stage:
            names[piece.local] = (*names.get(piece.local, ()), *piece.names)
    return {slot.name: names[slot.name] for slot in slots}


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


class ReferenceCopy:
    """A reference model with weights of its own: frozen ``chunks`` like those of the model.

    ``host_of``: a device whose memory they are to have only while they compute; they live in host memory then, page-locked where
    that device is a GPU, and ``tensors`` are there.
    """

    def __init__(
        self, chunks: list[torch.nn.Module], model: Sequence[torch.nn.Module], host_of: torch.device | None = None
    ) -> None:
        self._chunks, self._model = chunks, model
        self._home: HostCopy | None = None
        if host_of is not None:
            self._home = HostCopy(lambda: (p.detach() for p in rank_parameters(chunks).values()), host_of)
            self._home.take()
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Take the model's present weights."""
        kept = self.tensors()
        for name, parameter in rank_parameters(self._model).items():
            kept[name].copy_(parameter)

    def tensors(self) -> dict[str, Tensor]:
        own = {name: parameter.detach() for name, parameter in rank_parameters(self._chunks).items()}
        if self._home is None:
            return own
        views = {name: self._home.view(tensor) for name, tensor in own.items()}
        missing = [name for name, view in views.items() if view is None]
        if missing:
            raise EverstepError(f"the reference model's {missing[0]} (and {len(missing) - 1} more) is not in host memory, where all of it lives")
        return {name: view for name, view in views.items() if view is not None}

    @contextlib.contextmanager
    def serving(self) -> Iterator[Sequence[torch.nn.Module]]:
        with self._home.visiting() if self._home else contextlib.nullcontext():
            yield self._chunks


def state_views(
    chunks: list[DistributedDataParallel], slots: list[Slot], reference: Mapping[str, Tensor], frozen: bool
) -> dict[str, Tensor]:
    """name -> view of every tensor of this rank's state; writing into the views restores the state.

    ``param/NAME`` the parameter as the model computes with it; ``master/NAME`` its float32 master (bfloat16 only);
    ``exp_avg/NAME``, ``exp_avg_sq/NAME`` Adam's moments; ``reference/NAME`` the reference model, if there is one.
    With the distributed optimizer masters and moments are flat and only this rank's shard. ``frozen``: also the parameters that
    are never trained (under LoRA, all but the adapters).
    """
    views = {f"param/{name}": p.detach() for name, p in rank_parameters(chunks).items() if frozen or p.requires_grad}
    views |= {f"master/{s.name}": s.stepped.detach() for s in slots if s.has_master}
    for moment in ("exp_avg", "exp_avg_sq"):
        views |= {f"{moment}/{s.name}": s.adam[moment] for s in slots}
    return views | {f"reference/{name}": tensor for name, tensor in reference.items()}


def logical(
    views: Mapping[str, Tensor], trained: Sequence[str], slots: Sequence[Slot], table: list[Piece], adapters: list[Piece],
    arch: Architecture, sharded: bool,
) -> Callable[[], LogicalState]:  # fmt: skip
    """``views``, named as in ``state_views`` and without what LoRA freezes, as rectangles of logical tensors. ``trained``: the kinds of
    views that every trained parameter has; a reference model is seen by itself.

    The rectangles are made by what is returned, which any thread may call, whatever has become of the process groups by then."""
    adapted = {piece.local for piece in adapters}
    reference = any(name.startswith("reference/") for name in views)

    def kinds(piece: Piece) -> list[str]:
        its_own = not adapters or piece.local in adapted
        trains = its_own or piece.names[0].startswith("score.")  # a value head, which is trained beside adapters
        return [*(trained if trains else []), *(["reference"] if reference and its_own else [])]

    place = Place(
        mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_model_parallel_rank(),
        mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank(),
        (mpu.get_data_parallel_world_size(with_context_parallel=True), mpu.get_data_parallel_rank(with_context_parallel=True)),
        (mpu.get_expert_data_parallel_world_size(), mpu.get_expert_data_parallel_rank()),
    )  # fmt: skip
    return lambda: logical_state(views, slots, table + adapters, kinds, arch, sharded, place)


def adam_step(slots: list[Slot]) -> int:
    """Optimizer steps made; equal for all parameters."""
    steps = {int(step) for step in torch.stack([slot.adam["step"] for slot in slots]).tolist()} if slots else set()
    if len(steps) > 1:
        raise EverstepError(f"Adam's step differs between parameters of one rank: {sorted(steps)}")
    return steps.pop() if steps else 0


def set_adam_step(slots: list[Slot], step: int) -> None:
    for slot in slots:
        slot.adam["step"].fill_(float(step))


def hash_state(views: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> str:
    """SHA-256 over names, types, shapes and bytes of ``views`` and over ``scalars``, 64 hexadecimal digits."""
    digest = hashlib.sha256(json.dumps(scalars, sort_keys=True).encode())
    for name, tensor in views.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(host_bytes(tensor.detach().contiguous().cpu()))
    return digest.hexdigest()
