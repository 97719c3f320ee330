"""Heal: bring a rank to version k by copying the state of the same position in a contributor, while both go on.

The source sends version k piece by piece from a thread of its own (:class:`Snapshot`), through a buffer, so that nobody waits for the
network: when the state is about to change, what was not sent yet is copied aside. So a heal takes as many steps as it takes, and
nobody waits for it (docs/protocol.md, rule 19).

The stream is one TCP connection from the joiner to the source, found through the run's store and opened with a secret. Device memory
goes through a pinned buffer on a side stream. Each piece carries version and checksum; the joiner's state is dirty from the first piece
until the last one is verified.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash

from everstep.engine.offload import host_bytes
from everstep.errors import DeadlineExceeded, InvariantViolated, LinkBroken

PIECE_BYTES = 32 << 20
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
    """A connection between a source and a joiner. ``name`` (heal, joiner, position) is used once.

    Every wait ends with LinkBroken when ``stop`` turns true (the heal is called off) or the other end is gone, and with
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
            raise LinkBroken(f"heal {self._name} was called off")
        if time.monotonic() > self._end:
            raise DeadlineExceeded(f"heal {self._name} took longer than {self._timeout_s:g} s (recovery.heal_timeout_s)")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> HealStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Snapshot:
    """A state as it is at one version, to be sent while the state goes on.

    Made on the thread that changes the state. ``pieces`` is read on another one; before a change the first calls ``set_aside``.
    """

    def __init__(self, state: State, version: int):
        if state.version != version:
            raise InvariantViolated(f"version {version} was asked for, the state is at {state.version}")
        tensors = state.tensors()
        self.version, self.scalars, self.described, self.fingerprint = version, state.scalars(), _describe(tensors), _fingerprint(tensors)
        self._pieces: list[torch.Tensor | None] = list(_pieces(tensors))
        self._next = 0
        self._lock = threading.Lock()
        self._device = next((p.device for p in self._pieces if p is not None and p.is_cuda), None)
        self._written: torch.cuda.Event | None = None  # what is read on the side stream has been written by then
        self._mark_written()

    def pieces(self) -> Iterator[memoryview]:
        """Each piece as host memory, good until the next one is asked for. It is read under the lock, into a buffer: a change of the
        state waits for that, a few milliseconds, and never for the network."""
        buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._device is not None)
        side = torch.cuda.Stream(self._device) if self._device is not None else None
        while True:
            with self._lock:
                if self._next >= len(self._pieces):
                    return
                piece = self._pieces[self._next]
                assert piece is not None
                host = buffer[: piece.numel()]
                if side is not None and piece.is_cuda:
                    assert self._written is not None
                    with torch.cuda.stream(side):
                        side.wait_event(self._written)
                        host.copy_(piece, non_blocking=True)
                    side.synchronize()
                else:
                    host.copy_(piece)
                self._pieces[self._next] = None
                self._next += 1
            yield host_bytes(host)

    def set_aside(self) -> int:
        """Copy what was not read yet: the state may change once this returns. Bytes copied."""
        copied = 0
        with self._lock:
            for index in range(self._next, len(self._pieces)):
                piece = self._pieces[index]
                assert piece is not None
                self._pieces[index] = _copy_of(piece)
                copied += piece.numel()
            if copied:
                self._mark_written()
        return copied

    def drop(self) -> None:
        """Nobody will read on."""
        with self._lock:
            self._pieces, self._next = [], 0

    def _mark_written(self) -> None:
        if self._device is not None:
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(self._device))


def _copy_of(piece: torch.Tensor) -> torch.Tensor:
    """On the device if it has room, else in host memory."""
    try:
        return piece.clone()
    except torch.cuda.OutOfMemoryError:
        return piece.cpu()


def send(stream: HealStream, snapshot: Snapshot) -> Healed:
    """Stream a snapshot. Nothing but the handshake moves if the joiner holds that version of the same tensors already (it may lack a
    reference model that was made while its replica was broken)."""
    start, nbytes, version = time.monotonic(), 0, snapshot.version
    has = bytearray(_HAS.size)
    stream.receive_into(memoryview(has))
    if _HAS.unpack(has) == (version, snapshot.fingerprint):
        stream.send(memoryview(MARK.pack(version, 0, 0)))
        return Healed(0, time.monotonic() - start)
    header = json.dumps({"scalars": snapshot.scalars, "tensors": snapshot.described}).encode()
    stream.send(memoryview(MARK.pack(version, len(header), checksum_of(memoryview(header)))))
    stream.send(memoryview(header))
    for host in snapshot.pieces():
        stream.send(memoryview(MARK.pack(version, len(host), checksum_of(host))))
        stream.send(host)
        nbytes += len(host)
    return Healed(nbytes, time.monotonic() - start)


def open_state(stream: HealStream, state: State, version: int) -> dict[str, torch.Tensor] | None:
    """The joiner's handshake: takes the source's scalars and makes the state dirty; the tensors that ``receive`` is to fill. None if
    the state is at this version already, and stays as it is.

    Raises LinkBroken (the source is gone, or has another version) or InvariantViolated (the layouts differ).
    """
    mine = state.version if state.version is not None else -1
    stream.send(memoryview(_HAS.pack(mine, _fingerprint(state.tensors()))))
    size, checksum = receive_mark(stream, version)
    if size == 0:
        return None
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
    return tensors


def receive(stream: HealStream, tensors: Mapping[str, torch.Tensor], version: int) -> Healed:
    """Fill the tensors. Nobody else may touch them meanwhile; the state is at ``version`` once this returns, and whoever waits for it
    says so. Raises LinkBroken if the source is gone, or a piece is damaged or of another version: all pieces are void then."""
    start, nbytes = time.monotonic(), 0
    staging: torch.Tensor | None = None
    side: torch.cuda.Stream | None = None
    for piece in _pieces(tensors):
        size, checksum = receive_mark(stream, version)
        if piece.is_cuda:
            if staging is None or side is None:
                staging, side = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Stream(piece.device)
            host = staging[: piece.numel()]
            receive_checked(stream, host_bytes(host), size, checksum)
            with torch.cuda.stream(side):
                piece.copy_(host, non_blocking=True)
            side.synchronize()  # then the buffer may be used again
        else:
            receive_checked(stream, host_bytes(piece), size, checksum)
        nbytes += size
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


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Flat uint8 views of at most PIECE_BYTES, in order."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise InvariantViolated(f"state tensor {name} of shape {tuple(tensor.shape)} is not contiguous")
        if tensor.numel():
            yield from tensor.detach().view(-1).view(torch.uint8).split(PIECE_BYTES)


def on_host(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """Each piece as host memory: in place on CPU; from a device through two pinned buffers on a side stream, the copy of the
    next piece running while the caller sends this one. A yielded view is valid until the next but one is asked for."""
    staged: tuple[torch.Tensor, torch.cuda.Event] | None = None
    copier: _FromDevice | None = None
    for piece in _pieces(tensors):
        if not piece.is_cuda:
            yield host_bytes(piece)
            continue
        copier = copier or _FromDevice(piece.device)
        following = copier.start(piece)
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
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._turn = 0

    def start(self, piece: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        host = self._buffers[self._turn][: piece.numel()]
        self._turn = 1 - self._turn
        with torch.cuda.stream(self._stream):
            host.copy_(piece, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return host, event


def checksum_of(host: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(host)
