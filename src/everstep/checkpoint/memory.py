"""Copies of a rank's state in the shared memory of its node: what a run with one replica goes back to after a death.

The memory belongs to the node, not to the process: a copy outlives the rank's SIGKILL, and another process of the node reads it. Each
rank has two places and fills them in turn, so that one is always whole. A copy counts only with its seal, which names its version and
the checksum of every byte, and is written last; the seal of a place is broken before the place is written again. A copy that a death
cut short is therefore none.

    seal (64 bytes): magic, version, bytes of the description, bytes of the data, xxh3 of both
    description: JSON, scalars and tensors (name, shape, dtype)
    data: the tensors, one after the other
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import xxhash

from everstep.engine.offload import host_bytes
from everstep.errors import BadInput, InvariantViolated
from everstep.recovery.heal import State
from everstep.telemetry.events import EventLog

ROOT = Path("/dev/shm")
_SEAL = struct.Struct("<8sqQQQ24x")
_MAGIC, _BROKEN = b"EVERCOPY", b"\0" * 64
_SUFFIX = ".copy"


def folder_of(run_dir: str | Path, attempt: int) -> Path:
    """Where the copies of one start of a run lie, on each of its nodes."""
    key = blake2b(f"{Path(run_dir).resolve()}/{attempt}".encode(), digest_size=8).hexdigest()
    return ROOT / f"everstep-{os.getuid()}-{key}"


def remove(folder: Path) -> None:
    """All copies of a run on this node."""
    shutil.rmtree(folder, ignore_errors=True)


class Keeper:
    """Makes one rank's copies, and says in ``events`` once one counts.

    Raises BadInput where there is no shared memory.
    """

    def __init__(self, folder: Path, replica: int, rank: int, events: EventLog | None = None):
        if not ROOT.is_dir():
            raise BadInput(f"recovery.memory_checkpoint_every: this machine has no {ROOT}; set it to 0")
        folder.mkdir(mode=0o700, exist_ok=True)
        self._paths = [folder / f"{replica}-{rank}.{place}{_SUFFIX}" for place in range(2)]
        self._events, self._thread = events, threading.Thread()
        newest = max((v, place) for place, path in enumerate(self._paths) for v in [_version(path)])
        self._turn = 1 - newest[1]  # the newest copy of whoever had this place before stays until there is a newer one

    def copy(self, version: int, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
        """Take the state, which must not change until this returns: one pass through memory. What follows is in the background.

        Waits for the seal of the copy before. OSError if the node has no room for it.
        """
        self.settle()
        start = time.monotonic()
        path, self._turn = self._paths[self._turn], 1 - self._turn
        described = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]
        description = json.dumps({"scalars": dict(scalars), "tensors": described}).encode()
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        whole = _SEAL.size + len(description) + size
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, whole)  # else a full node would kill us with a signal when the memory is written
            memory = mmap.mmap(fd, whole)
        finally:
            os.close(fd)
        memory[: _SEAL.size] = _BROKEN
        memory[_SEAL.size : _SEAL.size + len(description)] = description
        flat = torch.frombuffer(memory, dtype=torch.uint8, offset=_SEAL.size + len(description)) if size else torch.empty(0)
        at = 0
        for tensor in tensors.values():
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes:
                flat[at : at + nbytes].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
            at += nbytes
        seconds = time.monotonic() - start
        seal: Callable[[], None] = lambda: self._seal(memory, version, len(description), size, seconds)
        self._thread = threading.Thread(target=seal, name="memory-copy", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until the copy in progress counts."""
        if self._thread.ident is not None:
            self._thread.join()

    def _seal(self, memory: mmap.mmap, version: int, description: int, size: int, seconds: float) -> None:
        start = time.monotonic()
        checksum = xxhash.xxh3_64_intdigest(memoryview(memory)[_SEAL.size : _SEAL.size + description + size])
        memory[8 : _SEAL.size] = _SEAL.pack(_MAGIC, version, description, size, checksum)[8:]
        memory[:8] = _MAGIC
        if self._events:
            self._events.emit("memory_copy", step=version, copy_bytes=len(memory), seconds=seconds, background_s=time.monotonic() - start)


def offers(folder: Path, rank: int) -> list[int]:
    """Versions of which this node has a whole copy of a position's state, read to the last byte. Replicas hold equal states, so it does
    not matter whose."""
    return sorted({v for path in _of(folder, rank) if (v := _version(path)) >= 0 and _read(path) is not None})


def restore(folder: Path, rank: int, version: int, state: State) -> Path:
    """Write a copy of ``version`` into the state of a rank of the same position; returns where it was. Its version is the caller's.

    Raises BadInput if there is none, InvariantViolated if it is of another layout.
    """
    for path in _of(folder, rank):
        if _version(path) == version and (read := _read(path)) is not None:
            description, data = read
            state.load_scalars(description["scalars"])  # first: they say which tensors there are
            mine = state.tensors()
            found = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in mine.items()]
            if found != description["tensors"]:
                odd = [t for t in (*found, *description["tensors"]) if t not in found or t not in description["tensors"]]
                raise InvariantViolated(f"{path}: the copy does not fit my state; first difference: {odd[:1]}")
            _fill(mine, data)
            return path
    raise BadInput(f"{folder}: no whole copy of step {version} of rank {rank}")


def _fill(tensors: Mapping[str, torch.Tensor], data: memoryview) -> None:
    at = 0
    for tensor in tensors.values():
        nbytes = tensor.numel() * tensor.element_size()
        if not nbytes:
            continue
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            host_bytes(tensor)[:] = data[at : at + nbytes]
        else:
            tensor.copy_(torch.frombuffer(data[at : at + nbytes], dtype=tensor.dtype).view(tensor.shape))
        at += nbytes


def _of(folder: Path, rank: int) -> Iterator[Path]:
    yield from sorted(folder.glob(f"*-{rank}.[01]{_SUFFIX}"))


def _version(path: Path) -> int:
    """That the seal names; -1 without a seal."""
    try:
        with open(path, "rb") as file:
            head = file.read(_SEAL.size)
    except FileNotFoundError:
        return -1
    if len(head) < _SEAL.size or not head.startswith(_MAGIC):
        return -1
    return int(_SEAL.unpack(head)[1])


def _read(path: Path) -> tuple[dict[str, Any], memoryview] | None:
    """(description, data) of a copy; None if it is not whole."""
    try:
        with open(path, "rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    except (OSError, ValueError):
        return None
    if len(memory) < _SEAL.size:
        return None
    magic, _, described, size, checksum = _SEAL.unpack(memory[: _SEAL.size])
    body = memory[_SEAL.size : _SEAL.size + described + size]
    if magic != _MAGIC or len(body) != described + size or xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    return json.loads(bytes(body[:described])), body[described:]
