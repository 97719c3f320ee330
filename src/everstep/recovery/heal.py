"""Heal: bring a rank to version k by copying the state of the same position in a contributor, while that one computes.

Between two commits nothing of the state changes, and step k+1 cannot commit before the joiner voted, so the source streams
version k in a thread of its own during its forward/backward of k+1 without copying anything aside (docs/protocol.md, rule 19).
The stream runs over a two-member gloo group of its own; device memory is staged through the host in buckets. Each bucket
carries version and checksum; a bucket that fails either is never written into the joiner's state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash

from everstep.errors import DeadlineExceeded, InvariantViolated, LinkBroken
from everstep.recovery.link import interruptible

BUCKET_BYTES = 64 << 20


class State(Protocol):
    """A rank's versioned state. ``version`` is the last applied step, or None while it is being changed (dirty)."""

    version: int | None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Named views of everything; writing into them changes the state."""

    def scalars(self) -> dict[str, Any]:
        """What is no tensor, as JSON values."""

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """The inverse of scalars()."""


@dataclass(frozen=True)
class Healed:
    nbytes: int
    seconds: float


class HealStream:
    """A one-way stream of bytes between two ranks; ``name`` (epoch, replica, position) is never used twice."""

    def __init__(self, name: str, source: bool, store: dist.Store, timeout_s: float, stop: Callable[[], bool]):
        self._stop, self._end, self._name, self._timeout_s = stop, time.monotonic() + timeout_s, name, timeout_s
        prefixed = dist.PrefixStore(f"heal/{name}", store)
        self._group: Any = interruptible(
            lambda: dist.ProcessGroupGloo(prefixed, 0 if source else 1, 2, timedelta(seconds=timeout_s)),
            stop, timeout_s, f"heal {name}",
        )

    def move(self, data: torch.Tensor, from_joiner: bool = False) -> None:
        """The source's bytes arrive in the joiner's ``data`` (uint8, same size), or the other way round."""
        options = dist.BroadcastOptions()
        options.rootRank = int(from_joiner)
        try:
            work = self._group.broadcast([data], options)
            while not work.is_completed():
                if self._stop():
                    raise LinkBroken(f"heal {self._name} was overtaken by a newer view")
                if time.monotonic() > self._end:
                    raise DeadlineExceeded(f"heal {self._name} took longer than {self._timeout_s:g} s (recovery.heal_timeout_s)")
                time.sleep(0.0002)
            work.wait()
        except RuntimeError as error:
            raise LinkBroken(f"heal {self._name}: {error}") from error

    def close(self) -> None:
        self._group = None  # closes its sockets


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise InvariantViolated(f"a state tensor of shape {tuple(tensor.shape)} is not contiguous: it could not be written into")
    return tensor.detach().view(-1).view(torch.uint8)


def _header(state: Mapping[str, torch.Tensor], version: int, scalars: Mapping[str, Any]) -> bytes:
    tensors = [[name, list(t.shape), str(t.dtype)] for name, t in state.items()]
    return json.dumps({"version": version, "scalars": scalars, "tensors": tensors}).encode()


def _chunks(state: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    """Flat uint8 views of at most BUCKET_BYTES, in order."""
    return [chunk for t in state.values() if t.numel() for chunk in _bytes_of(t).split(BUCKET_BYTES)]


def send(stream: HealStream, state: State, version: int) -> Healed:
    """Stream ``state``, which is at ``version``. Nothing but the handshake moves if the joiner holds that version already.

    Raises LinkBroken if the joiner is gone or a newer view voids the heal.
    """
    start, nbytes = time.monotonic(), 0
    has = torch.zeros(8, dtype=torch.uint8)
    stream.move(has, from_joiner=True)
    if int(has.view(torch.int64)) == version:
        return Healed(0, time.monotonic() - start)
    tensors = state.tensors()
    header = _header(tensors, version, state.scalars())
    stream.move(torch.tensor([len(header), version], dtype=torch.int64).view(torch.uint8))
    stream.move(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    for chunk in _chunks(tensors):
        host = chunk.cpu().contiguous()
        stream.move(torch.tensor([version, _checksum(host)], dtype=torch.int64).view(torch.uint8))
        stream.move(host)
        nbytes += host.numel()
    return Healed(nbytes, time.monotonic() - start)


def receive(stream: HealStream, state: State, version: int) -> Healed:
    """Bring ``state`` to ``version`` from the source; a state that is there already stays as it is.

    The state is dirty from the first chunk until the last one is verified. Raises LinkBroken (the source is gone or a chunk
    is damaged: all chunks are void) or InvariantViolated (the layouts differ).
    """
    start, nbytes = time.monotonic(), 0
    mine = state.version if state.version is not None else -1
    stream.move(torch.tensor([mine], dtype=torch.int64).view(torch.uint8), from_joiner=True)
    if mine == version:
        return Healed(0, time.monotonic() - start)
    size = torch.zeros(16, dtype=torch.uint8)
    stream.move(size)
    length, sent_version = (int(x) for x in size.view(torch.int64))
    header = torch.zeros(length, dtype=torch.uint8)
    stream.move(header)
    said = json.loads(header.numpy().tobytes())
    if sent_version != version or said["version"] != version:
        raise LinkBroken(f"the source streams version {sent_version}, version {version} was asked for")
    tensors = state.tensors()
    expected = json.loads(_header(tensors, version, {}))["tensors"]
    if said["tensors"] != expected:
        odd = [t for t in (*expected, *said["tensors"]) if t not in expected or t not in said["tensors"]]
        raise InvariantViolated(f"the source's state does not fit mine; the first tensor that differs: {odd[:1] or 'their order'}")
    state.version = None
    for chunk in _chunks(tensors):
        mark = torch.zeros(16, dtype=torch.uint8)
        stream.move(mark)
        chunk_version, checksum = (int(x) for x in mark.view(torch.int64))
        host = torch.empty(chunk.numel(), dtype=torch.uint8)
        stream.move(host)
        if chunk_version != version or _checksum(host) != checksum:
            raise LinkBroken(f"a chunk of version {chunk_version} arrived damaged while healing to {version}")
        chunk.copy_(host)
        nbytes += host.numel()
    state.load_scalars(said["scalars"])
    state.version = version
    return Healed(nbytes, time.monotonic() - start)


def _checksum(host: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(host.numpy().data) & 0x7FFF_FFFF_FFFF_FFFF
