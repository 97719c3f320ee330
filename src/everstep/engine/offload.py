"""Offload: parameters, gradients and optimizer state in host memory instead of the device's, and back.

Megatron's parameters are views into contiguous buffers, the distributed optimizer's shards views into those. So it is not tensors
that move but the storages under them: a storage's bytes are copied to the host and the storage is made empty; on return it gets
memory and its bytes again, and every tensor that lies on it, whoever holds it, is what it was. In between such a tensor has no
memory and must not be touched; ``Residence.view`` gives the bytes on the host in its place.

Where there is no accelerator the host's copy is a separate buffer, and the original is freed just the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Part = Literal["parameters", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer")

#: Storages smaller than this share an allocation on the host: page-locking memory costs a system call each time.
BLOCK_BYTES = 256 << 20
_ALIGNMENT = 64  # bytes; of every storage inside a block, so that tensors of any type can lie on it


@dataclass
class _Away:
    """A storage that has been made empty. ``host``: its bytes, uint8 (nbytes,); None if nobody needs them: zeros come back."""

    storage: torch.UntypedStorage
    nbytes: int
    host: Tensor | None


class HostCopy:
    """The storages under some tensors of one device, together: all with their memory, or all away.

    ``tensors`` is asked whenever they go, for it is then that they must be complete. Not thread-safe.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._away: dict[int, _Away] = {}

    def take(self, contents: bool = True) -> int:
        """Move to the host what is not there yet. Returns the bytes freed on the device.

        ``contents=False``: the bytes are not needed any more. MemoryError or RuntimeError if the host has no room: what was
        moved until then can come back, the rest has not moved.
        """
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._tensors()}
        here = [(key, storage) for key, storage in storages.items() if storage.nbytes()]
        freed = 0
        for block in _blocks(here):
            hosts = self._copied([storage for _, storage in block]) if contents else [None] * len(block)
            for (key, storage), host in zip(block, hosts, strict=True):
                nbytes = storage.nbytes()
                storage.resize_(0)
                self._away[key] = _Away(storage, nbytes, host)
                freed += nbytes - storage.nbytes()
        return freed

    def give_back(self) -> int:
        """Bring everything back; the host's copy is forgotten. Returns the bytes taken on the device.

        torch.OutOfMemoryError if it has no room: what came back until then is there, the rest still away.
        """
        taken = self._fill()
        self._away.clear()
        return taken

    @contextlib.contextmanager
    def visiting(self) -> Iterator[None]:
        """Within it, what is away is on the device as well, and only read there: afterwards it is as it was on the host."""
        try:
            self._fill()
            yield
        finally:
            _synchronize(self._device)
            for away in self._away.values():
                away.storage.resize_(0)

    def view(self, tensor: Tensor) -> Tensor | None:
        """``tensor`` on the host, sharing the host's copy; None if it is not away. Writing into it changes what comes back."""
        key = tensor.untyped_storage()._cdata
        away = self._away.get(key)
        if away is None:
            return None
        if away.host is None:
            away.host = torch.zeros(away.nbytes, dtype=torch.uint8, device="cpu")
        start = away.host.storage_offset() // tensor.element_size() + tensor.storage_offset()
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(away.host.untyped_storage(), start, tensor.size(), tensor.stride())

    def _copied(self, storages: list[torch.UntypedStorage]) -> list[Tensor]:
        sizes = [_padded(storage.nbytes()) for storage in storages]
        block = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=self._device.type == "cuda")
        hosts = [piece[: storage.nbytes()] for piece, storage in zip(block.split(sizes), storages, strict=True)]
        for host, storage in zip(hosts, storages, strict=True):
            host.copy_(_bytes_of(storage), non_blocking=True)
        _synchronize(self._device)
        return hosts

    def _fill(self) -> int:
        taken = 0
        for away in self._away.values():
            before = away.storage.nbytes()
            if before == away.nbytes:  # an attempt before this one failed later
                continue
            away.storage.resize_(away.nbytes)
            if away.host is None:
                _bytes_of(away.storage).zero_()
            else:
                _bytes_of(away.storage).copy_(away.host, non_blocking=True)
            taken += away.storage.nbytes() - before
        if taken:
            _synchronize(self._device)  # another thread may read at once, on another stream
        return taken


class Residence:
    """Which parts of an engine are on its device and which on the host. Thread-safe.

    Gradients that an optimizer step has consumed (``gradients_spent``) are not copied: they come back as zeros.
    """

    def __init__(self, tensors: Mapping[Part, Callable[[], Iterable[Tensor]]], device: torch.device) -> None:
        self.lock = threading.RLock()
        self.gradients_spent = True  # none have been computed
        self._device = device
        self._parts = {part: HostCopy(tensors[part], device) for part in PARTS}

    def offload(self, parts: Iterable[Part]) -> dict[Part, int]:
        """Bytes freed on the device, by part."""
        with self.lock:
            freed = {part: self._parts[part].take(part != "gradients" or not self.gradients_spent) for part in parts}
        _give_to_others(self._device)
        return freed

    def backload(self, parts: Iterable[Part]) -> dict[Part, int]:
        """Bytes taken on the device, by part; 0 for those that were there."""
        with self.lock:
            return {part: self._parts[part].give_back() for part in parts}

    def view(self, tensor: Tensor) -> Tensor:
        """``tensor`` where it is at present, good until it moves the next time."""
        with self.lock:
            views = (part.view(tensor) for part in self._parts.values())
            return next((view for view in views if view is not None), tensor)


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, in place. ``Tensor.numpy()`` would forbid its storage to be resized, for good."""
    if not tensor.numel():
        return memoryview(b"")
    nbytes = tensor.numel() * tensor.element_size()
    array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # the memory lives as long as whoever looks at it
    return memoryview(array).cast("B")


def _blocks(storages: list[tuple[int, torch.UntypedStorage]]) -> Iterator[list[tuple[int, torch.UntypedStorage]]]:
    """Neighbours together, up to BLOCK_BYTES; a larger one alone."""
    block: list[tuple[int, torch.UntypedStorage]] = []
    filled = 0
    for key, storage in storages:
        size = _padded(storage.nbytes())
        if block and filled + size > BLOCK_BYTES:
            yield block
            block, filled = [], 0
        block.append((key, storage))
        filled += size
    if block:
        yield block


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _give_to_others(device: torch.device) -> None:
    """Let go of freed memory, so that other processes and libraries can have it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's; others keep little
        trim(0)
