"""What ranks of one replica tell each other besides tensors: bytes over the process group, and what may be made of them.

Collectives of ``torch.distributed`` are not authenticated, and its object collectives unpickle whatever comes. Here a batch travels as safetensors
and JSON, which run nothing; other objects are pickled only with a keyed digest (HMAC-SHA256), which is checked before anything is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load, save

from everstep.cluster.batch import TrainingBatch
from everstep.errors import ReplicaBroken, first_line

_DIGEST_BYTES = 32
_HEADER = struct.Struct("<Q")  # safetensors: the length of its own header


def gather_batches(batch: TrainingBatch | None) -> list[TrainingBatch | None]:
    """Every rank's batch, on the CPU, in the order of ranks. Collective over the replica.

    Columns must hold what JSON can. Raises ReplicaBroken if what came is no batch.
    """
    return [to_batch(data) if data else None for data in _gather(from_batch(batch) if batch is not None else b"")]


def gather_objects(value: Any, secret: str) -> list[Any]:
    """Every rank's ``value``, in the order of ranks. ``secret``: known to all of them. Raises ReplicaBroken if a digest is wrong."""
    return [_opened(data, secret) for data in _gather(_sealed(value, secret))]


def broadcast_object(value: Any, secret: str) -> Any:
    """Rank 0's ``value``. Raises ReplicaBroken if the digest is wrong."""
    data = _sealed(value, secret) if dist.get_rank() == 0 else b""
    size = torch.tensor([len(data)])
    with _together():
        dist.broadcast(size, 0)
        buffer = _tensor(data) if data else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(buffer, 0)
    return value if dist.get_rank() == 0 else _opened(buffer.numpy().tobytes(), secret)


def from_batch(batch: TrainingBatch) -> bytes:
    """One safetensors file; columns, ids and versions in its header."""
    said = json.dumps({"columns": batch.columns, "sample_ids": batch.sample_ids, "weight_versions": batch.weight_versions})
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in batch.tensors.items()}, metadata={"batch": said})


def to_batch(data: bytes) -> TrainingBatch:
    """The batch of :func:`from_batch`. Raises ReplicaBroken if it is none."""
    try:
        (length,) = _HEADER.unpack_from(data)
        said = json.loads(json.loads(data[_HEADER.size : _HEADER.size + length])["__metadata__"]["batch"])
        return TrainingBatch(load(data), said["columns"], said["sample_ids"], said["weight_versions"])
    except (SafetensorError, struct.error, ValueError, KeyError, TypeError) as error:
        raise ReplicaBroken(f"what a rank of this replica sent is no batch ({type(error).__name__}: {error})") from error


def _sealed(value: Any, secret: str) -> bytes:
    body = pickle.dumps(value)
    return hmac.digest(secret.encode(), body, "sha256") + body


def _opened(data: bytes, secret: str) -> Any:
    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if not hmac.compare_digest(digest, hmac.digest(secret.encode(), body, "sha256")):
        raise ReplicaBroken("what a rank of this replica sent does not carry the replica's secret; somebody else may be on its port")
    return pickle.loads(body)


def _gather(data: bytes) -> list[bytes]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    with _together():
        dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(1, max(int(size) for size in sizes))
    mine = torch.zeros(longest, dtype=torch.uint8)
    if data:
        mine[: len(data)] = _tensor(data)
    everybody = [torch.empty_like(mine) for _ in sizes]
    with _together():
        dist.all_gather(everybody, mine)
    return [row[: int(size)].numpy().tobytes() for row, size in zip(everybody, sizes, strict=True)]


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """A rank that dies takes those with it that wait for it; torch has no type for that."""
    try:
        yield
    except RuntimeError as error:
        raise ReplicaBroken(f"a rank of this replica is gone: {first_line(error)}") from error


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def replica_secret() -> str:
    """What ``everstep train``, ``everstep up`` or the operator gave every rank of a replica under torchrun; empty under a plain one."""
    from everstep.cluster.environment import LIGHTHOUSE_TOKEN
    from everstep.cluster.orphans import TOKEN

    return os.environ.get(LIGHTHOUSE_TOKEN) or os.environ.get(TOKEN, "")
