"""Heal: bring a rank to version k by copying the state of the same position in a contributor, while that one computes.

Between two commits nothing of the state changes, and step k+1 cannot commit before the joiner voted, so the source streams
version k in a thread of its own during its forward/backward of k+1 without copying anything aside (docs/protocol.md, rule 19).

The stream is one TCP connection from the joiner to the source, found through the run's store and opened with a secret. Host
memory is sent and received in place; device memory goes through pinned buffers on a side stream. Each chunk carries version
and checksum; the joiner's state is dirty from the first chunk until the last one is verified.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash

from everstep.engine.offload import host_bytes
from everstep.errors import DeadlineExceeded, InvariantViolated, LinkBroken

CHUNK_BYTES = 32 << 20
_POLL_S = 0.05
_HAS = struct.Struct("!qQ")    # the joiner's version (-1: dirty), and which tensors it has
MARK = struct.Struct("!qQQ")  # version, bytes, checksum


class State(Protocol):
    """A rank's versioned state. ``version`` is the last applied step, or None while it is being changed (dirty).

    ``island``: a version says only what all replicas agree on, and each has local state beside it. The ranks of a replica must then
    all have it from one source.
    """

    version: int | None
    island: bool

    def tensors(self) -> dict[str, torch.Tensor]:
        """Named views of everything, contiguous; writing into them changes the state."""

    def scalars(self) -> dict[str, Any]:
        """What is no tensor, as JSON values."""

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """The inverse of scalars(). May add or remove tensors."""


@dataclass(frozen=True)
class Healed:
    nbytes: int
    seconds: float


class HealStream:
    """A connection between a source and a joiner. ``name`` (epoch, joiner, position) is used once.

    Every wait ends with LinkBroken when ``stop`` turns true (a newer view) or the other end is gone, and with
    DeadlineExceeded after ``timeout_s`` (recovery.heal_timeout_s).
    """

    def __init__(self, name: str, store: dist.Store, timeout_s: float, stop: Callable[[], bool]):
        self._name, self._store, self._stop, self._timeout_s = name, store, stop, timeout_s
        self._end = time.monotonic() + timeout_s
        self._socket: socket.socket | None = None

    def serve(self, host: str) -> HealStream:
        """The source's end: wait for the joiner. ``host``: the address of this machine that the others can reach."""
        secret = secrets.token_hex(16)
        with socket.create_server((host, 0)) as listener:
            self._store.set(f"heal/{self._name}", json.dumps([host, listener.getsockname()[1], secret]))
            listener.settimeout(_POLL_S)
            while self._socket is None:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    self._check()
                    continue
                self._adopt(connection)
                said = bytearray(len(secret))
                self.receive_into(memoryview(said))
                if not hmac.compare_digest(said.decode(errors="replace"), secret):
                    connection.close()
                    self._socket = None
        return self

    def join(self) -> HealStream:
        """The joiner's end: find the source and connect."""
        key = f"heal/{self._name}"
        while not self._store.check([key]):
            self._check()
            time.sleep(0.002)
        host, port, secret = json.loads(self._store.get(key))
        try:
            self._adopt(socket.create_connection((host, port), timeout=2.0))
        except OSError as error:
            raise LinkBroken(f"heal {self._name}: cannot reach the source at {host}:{port} ({error})") from error
        self.send(memoryview(secret.encode()))
        return self

    def _adopt(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_POLL_S)
        self._socket = connection

    def send(self, data: memoryview) -> None:
        self._move(data, lambda sock, rest: sock.send(rest))

    def receive_into(self, data: memoryview) -> None:
        self._move(data, lambda sock, rest: sock.recv_into(rest))

    def _move(self, data: memoryview, step: Callable[[socket.socket, memoryview], int]) -> None:
        assert self._socket is not None
        done = 0
        while done < len(data):
            try:
                moved = step(self._socket, data[done:])
            except TimeoutError:
                self._check()
                continue
            except OSError as error:
                raise LinkBroken(f"heal {self._name}: the other end is gone ({error})") from error
            if moved == 0:
                raise LinkBroken(f"heal {self._name}: the other end closed the connection")
            done += moved

    def _check(self) -> None:
        if self._stop():
            raise LinkBroken(f"heal {self._name} was overtaken by a newer view")
        if time.monotonic() > self._end:
            raise DeadlineExceeded(f"heal {self._name} took longer than {self._timeout_s:g} s (recovery.heal_timeout_s)")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> HealStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def send(stream: HealStream, state: State, version: int) -> Healed:
    """Stream ``state``, which is at ``version``. Nothing but the handshake moves if the joiner holds that version of the same
    tensors already (it may lack a reference model that was made while its replica was broken)."""
    start, nbytes = time.monotonic(), 0
    has = bytearray(_HAS.size)
    stream.receive_into(memoryview(has))
    tensors = state.tensors()
    if _HAS.unpack(has) == (version, _fingerprint(tensors)):
        stream.send(memoryview(MARK.pack(version, 0, 0)))
        return Healed(0, time.monotonic() - start)
    header = json.dumps({"scalars": state.scalars(), "tensors": _describe(tensors)}).encode()
    stream.send(memoryview(MARK.pack(version, len(header), checksum_of(memoryview(header)))))
    stream.send(memoryview(header))
    for host in on_host(tensors):
        stream.send(memoryview(MARK.pack(version, len(host), checksum_of(host))))
        stream.send(host)
        nbytes += len(host)
    return Healed(nbytes, time.monotonic() - start)


def receive(stream: HealStream, state: State, version: int) -> Healed:
    """Bring ``state`` to ``version`` from the source; a state that is there already stays as it is.

    Raises LinkBroken (the source is gone, or a chunk is damaged or of another version: all chunks are void and the state
    stays dirty) or InvariantViolated (the layouts differ).
    """
    start, nbytes = time.monotonic(), 0
    mine = state.version if state.version is not None else -1
    stream.send(memoryview(_HAS.pack(mine, _fingerprint(state.tensors()))))
    size, checksum = receive_mark(stream, version)
    if size == 0:
        return Healed(0, time.monotonic() - start)
    header = bytearray(size)
    receive_checked(stream, memoryview(header), size, checksum)
    said = json.loads(bytes(header))
    state.version = None
    state.load_scalars(said["scalars"])  # first: they say whether there is a reference model, and it has tensors
    tensors = state.tensors()
    expected = _describe(tensors)
    if said["tensors"] != expected:
        odd = [t for t in (*expected, *said["tensors"]) if t not in expected or t not in said["tensors"]]
        raise InvariantViolated(f"the source's state does not fit mine; first difference: {odd[:1] or 'the order of tensors'}")
    staging: torch.Tensor | None = None
    for chunk in _chunks(tensors):
        size, checksum = receive_mark(stream, version)
        if chunk.is_cuda:
            staging = staging if staging is not None else torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            host = staging[: chunk.numel()]
            receive_checked(stream, host_bytes(host), size, checksum)
            chunk.copy_(host)  # returns when the buffer may be used again
        else:
            receive_checked(stream, host_bytes(chunk), size, checksum)
        nbytes += size
    state.version = version
    return Healed(nbytes, time.monotonic() - start)


def receive_mark(stream: HealStream, version: int) -> tuple[int, int]:
    """(bytes, checksum) of what comes next; LinkBroken if it is of another version."""
    mark = bytearray(MARK.size)
    stream.receive_into(memoryview(mark))
    sent_version, size, checksum = MARK.unpack(mark)
    if sent_version != version:
        raise LinkBroken(f"the source streams version {sent_version}, version {version} was asked for")
    return size, checksum


def receive_checked(stream: HealStream, host: memoryview, expected: int, checksum: int) -> None:
    if len(host) != expected:
        raise LinkBroken(f"a chunk of {expected} bytes came where {len(host)} were expected")
    stream.receive_into(host)
    if checksum_of(host) != checksum:
        raise LinkBroken("a chunk arrived damaged: its checksum is wrong")


def _describe(tensors: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    return [[name, list(t.shape), str(t.dtype)] for name, t in tensors.items()]


def _fingerprint(tensors: Mapping[str, torch.Tensor]) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(_describe(tensors)).encode())


def _chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Flat uint8 views of at most CHUNK_BYTES, in order."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise InvariantViolated(f"state tensor {name} of shape {tuple(tensor.shape)} is not contiguous")
        if tensor.numel():
            yield from tensor.detach().view(-1).view(torch.uint8).split(CHUNK_BYTES)


def on_host(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """Each chunk as host memory: in place on CPU; from a device through two pinned buffers on a side stream, the copy of the
    next chunk running while the caller sends this one. A yielded view is valid until the next but one is asked for."""
    staged: tuple[torch.Tensor, torch.cuda.Event] | None = None
    copier: _FromDevice | None = None
    for chunk in _chunks(tensors):
        if not chunk.is_cuda:
            yield host_bytes(chunk)
            continue
        copier = copier or _FromDevice(chunk.device)
        following = copier.start(chunk)
        if staged:
            staged[1].synchronize()
            yield host_bytes(staged[0])
        staged = following
    if staged:
        staged[1].synchronize()
        yield host_bytes(staged[0])


class _FromDevice:
    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._turn = 0

    def start(self, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        host = self._buffers[self._turn][: chunk.numel()]
        self._turn = 1 - self._turn
        with torch.cuda.stream(self._stream):
            host.copy_(chunk, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return host, event


def checksum_of(host: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(host)
