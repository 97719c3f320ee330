"""Copies of a rank's state in the shared memory of its node: what a run with one replica goes back to after a death.

The memory belongs to the node, not to the process: a copy outlives the rank's SIGKILL, and another process of the node reads it. A rank
of another node may keep one too (:mod:`everstep.checkpoint.shelf`). Each rank has two places and fills them in turn, so that one is
always whole; the ranks of a replica begin a copy only when the one before counts for all of them, so one version is always whole of all. A copy counts only with its seal, which names its version and
the checksum of every byte, and is written last; the seal of a place is broken before the place is written again. A copy that a death
cut short is therefore none.

    seal (64 bytes): magic, version, bytes of the description, bytes of the data, xxh3 of all this, epoch of the version's commit
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import xxhash

from everstep.engine.offload import host_bytes
from everstep.errors import BadInput, InvariantViolated
from everstep.recovery.heal import State
from everstep.telemetry.events import EventLog

ROOT = Path("/dev/shm")
_SEAL = struct.Struct("<8sqQQQqq8x")
SEAL_BYTES = _SEAL.size
_MAGIC, _BROKEN = b"EVERCOPY", b"\0" * 64
_SUFFIX = ".copy"


def folder_of(run_dir: str | Path, attempt: int) -> Path:
    """Where the copies of one start of a run lie, on each of its machines: a folder for each node in it."""
    key = blake2b(f"{Path(run_dir).resolve()}/{attempt}".encode(), digest_size=8).hexdigest()
    return ROOT / f"everstep-{os.getuid()}-{key}"


def remove(folder: Path) -> None:
    """All copies below this folder."""
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, order=True)
class Stamp:
    """Of which committed step a copy is. ``epoch``: in which that was committed, (incarnation, counter); a step that was rolled back is
    committed again in a later one."""

    version: int
    epoch: tuple[int, int]

    def stands(self, rollbacks: Iterable[tuple[tuple[int, int], int]]) -> bool:
        """Whether none of the rollbacks, each (epoch, step), made the step void."""
        return not any(self.epoch < epoch and self.version > step for epoch, step in rollbacks)


class Copy:
    """A place for one copy while it is being written: its seal is broken from the first moment, and set by ``seal``."""

    def __init__(self, path: Path, nbytes: int):
        """``nbytes``: of all that follows the seal. OSError if the node has no room for it."""
        whole = _SEAL.size + nbytes
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, min(whole, os.fstat(fd).st_size))
            os.posix_fallocate(fd, 0, whole)  # else a full node would kill us with a signal when the memory is written
            self._memory = mmap.mmap(fd, whole)
        finally:
            os.close(fd)
        self._memory[: _SEAL.size] = _BROKEN
        self.body = memoryview(self._memory)[_SEAL.size :]

    @property
    def whole(self) -> memoryview:
        """Seal and body; what another node gets."""
        return memoryview(self._memory)

    def seal(self, stamp: Stamp, described: int) -> None:
        """The copy counts from now on. ``described``: bytes of the body that are the description."""
        checksum = _checksum(self.body, stamp, described)
        self._memory[8 : _SEAL.size] = _SEAL.pack(_MAGIC, stamp.version, described, len(self.body) - described, checksum, *stamp.epoch)[8:]
        self._memory[:8] = _MAGIC

    def seal_as(self, seal: bytes) -> bool:
        """The same with the seal of the copy that this is one of; False if what is here is not what was sealed."""
        magic, version, described, size, checksum, *epoch = _SEAL.unpack(seal)
        stamp = Stamp(version, (epoch[0], epoch[1]))
        if magic != _MAGIC or described + size != len(self.body) or _checksum(self.body, stamp, described) != checksum:
            return False
        self.seal(stamp, described)
        return True


def older_place(folder: Path, replica: int, rank: int) -> Path:
    """Of the two places of a rank, the one whose copy is older, or none: the newest copy stays until there is a newer one."""
    places = [folder / f"{replica}-{rank}.{place}{_SUFFIX}" for place in range(2)]
    return min(places, key=_version)


class Keeper:
    """Makes one rank's copies, and says in ``events`` once one counts.

    ``send(copy)``: brings a copy that counts to another node as well, in the background; returns to whom ("" to nobody).
    ``about``: what a copy says of the run beside its state. Raises BadInput where there is no shared memory.
    """

    def __init__(
        self, folder: Path, replica: int, rank: int, events: EventLog | None = None, send: Callable[[Copy], str] = lambda copy: "",
        about: Mapping[str, Any] = MappingProxyType({}),
    ):
        if not ROOT.is_dir():
            raise BadInput(f"recovery.memory_checkpoint_every: this machine has no {ROOT}; set it to 0")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._replica, self._rank, self._about = folder, replica, rank, dict(about)
        self._events, self._send, self._thread = events, send, threading.Thread()

    def copy(self, stamp: Stamp, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
        """Take the state, which must not change until this returns: one pass through memory. What follows is in the background.

        Waits for the copy before (``settle``). OSError if the node has no room for it.
        """
        self.settle()
        start = time.monotonic()
        described = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]
        description = json.dumps(self._about | {"scalars": dict(scalars), "tensors": described}).encode()
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        copy = Copy(older_place(self._folder, self._replica, self._rank), len(description) + size)
        copy.body[: len(description)] = description
        flat = torch.frombuffer(copy.body, dtype=torch.uint8, offset=len(description)) if size else torch.empty(0)
        at = 0
        for tensor in tensors.values():
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes:
                flat[at : at + nbytes].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
            at += nbytes
        seconds = time.monotonic() - start
        finish: Callable[[], None] = lambda: self._finish(copy, stamp, len(description), seconds)
        self._thread = threading.Thread(target=finish, name="memory-copy", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until the copy in progress counts, and another node has it if one is to."""
        if self._thread.ident is not None:
            self._thread.join()

    def _finish(self, copy: Copy, stamp: Stamp, described: int, seconds: float) -> None:
        start = time.monotonic()
        copy.seal(stamp, described)
        sealed = time.monotonic()
        buddy = self._send(copy)
        if self._events:
            self._events.emit("memory_copy", step=stamp.version, copy_bytes=len(copy.whole), seconds=seconds, background_s=sealed - start,
                              buddy=buddy, sent_s=time.monotonic() - sealed)


def _checksum(body: memoryview, stamp: Stamp, described: int) -> int:
    """Of the body, and of what the seal says of it: a copy of one step must not pass for one of another."""
    said = struct.pack("<qqqQ", stamp.version, *stamp.epoch, described)
    return xxhash.xxh3_64_intdigest(body, seed=xxhash.xxh3_64_intdigest(said))


def whole_copies(folder: Path) -> dict[Path, tuple[int, Stamp]]:
    """(rank, stamp) of every whole copy in a folder, read to the last byte. Replicas hold equal states, so it does not matter whose."""
    found: dict[Path, tuple[int, Stamp]] = {}
    for path in sorted(folder.glob(f"*-*.*{_SUFFIX}")):
        stamp = _stamp(path)
        if stamp and _read(path) is not None:
            found[path] = int(path.name.partition(".")[0].partition("-")[2]), stamp
    return found


def restore(folder: Path, rank: int, stamp: Stamp, state: State) -> Path:
    """Write a copy of this version into the state of a rank of the same position; returns where it was. Its version is the caller's.

    Raises BadInput if there is none, InvariantViolated if it is of another layout.
    """
    for path in _of(folder, rank):
        if _stamp(path) == stamp and (read := _read(path)) is not None:
            description, data = read
            state.load_scalars(description["scalars"])  # first: they say which tensors there are
            mine = state.tensors()
            found = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in mine.items()]
            if found != description["tensors"]:
                odd = [t for t in (*found, *description["tensors"]) if t not in found or t not in description["tensors"]]
                raise InvariantViolated(f"{path}: the copy does not fit my state; first difference: {odd[:1]}")
            _fill(mine, data)
            return path
    raise BadInput(f"{folder}: no whole copy of step {stamp.version} of rank {rank}")


def described(path: Path) -> dict[str, Any]:
    """What a whole copy says of itself: scalars, tensors, and what its keeper was told to say of the run."""
    read = _read(path)
    if read is None:
        raise BadInput(f"{path}: no whole copy")
    return read[0]


def find(folder: Path, rank: int, stamp: Stamp) -> Path | None:
    """A whole copy of this version of a position's state."""
    return next((path for path in _of(folder, rank) if _stamp(path) == stamp and _read(path) is not None), None)


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
    yield from sorted(folder.glob(f"*-{rank}.*{_SUFFIX}"))


def _version(path: Path) -> int:
    """That the seal names; -1 without a seal."""
    stamp = _stamp(path)
    return stamp.version if stamp else -1


def _stamp(path: Path) -> Stamp | None:
    """Of the seal, if there is one; what it seals may be damaged."""
    try:
        with open(path, "rb") as file:
            head = file.read(_SEAL.size)
    except FileNotFoundError:
        return None
    if len(head) < _SEAL.size or not head.startswith(_MAGIC):
        return None
    _, version, _, _, _, incarnation, counter = _SEAL.unpack(head)
    return Stamp(version, (incarnation, counter))


def _read(path: Path) -> tuple[dict[str, Any], memoryview] | None:
    """(description, data) of a copy; None if it is not whole."""
    try:
        with open(path, "rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    except (OSError, ValueError):
        return None
    if len(memory) < _SEAL.size:
        return None
    magic, version, described, size, checksum, *epoch = _SEAL.unpack(memory[: _SEAL.size])
    body = memory[_SEAL.size : _SEAL.size + described + size]
    if magic != _MAGIC or len(body) != described + size or _checksum(body, Stamp(version, (epoch[0], epoch[1])), described) != checksum:
        return None
    return json.loads(bytes(body[:described])), body[described:]
