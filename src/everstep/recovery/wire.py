"""Messages between a rank and the coordinator: one JSON object with a length in front, over one TCP connection.

One connection per rank is the ordered channel of rule 6. The kernel closes a dead process's sockets, so the other end learns
of a death within milliseconds, on any node, without a heartbeat.
"""

from __future__ import annotations

import functools
import json
import socket
import struct
from typing import Any

import xxhash

MAX_MESSAGE_BYTES = 64 << 20
_HEADER = struct.Struct("!I")
_READ_BYTES = 64 << 10


class Closed(Exception):
    """The other end is gone."""


class Shared(dict[str, Any]):
    """A message for many: encoded once. It must not change any more."""

    @functools.cached_property
    def packed(self) -> bytes:
        return _encode(self)


def _encode(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(len(body)) + body


def packed(message: dict[str, Any]) -> bytes:
    """As it is sent."""
    return message.packed if isinstance(message, Shared) else _encode(message)


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    try:
        sock.sendall(packed(message))
    except OSError as error:
        raise Closed(str(error)) from error


def send_what_fits(sock: socket.socket, data: bytes) -> int:
    """Never blocks: the bytes that the kernel took."""
    try:
        return sock.send(data, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0
    except OSError as error:
        raise Closed(str(error)) from error


def receive(sock: socket.socket) -> dict[str, Any]:
    """Blocks until a whole message is there (or the socket's timeout, which the caller set, passes: TimeoutError). Takes nothing of what follows it."""
    return _decode(_exactly(sock, _size(_exactly(sock, _HEADER.size))))


class Reader:
    """As :func:`receive` for a connection on which nothing but messages comes: what has come together is taken with one call of the system."""

    def __init__(self, sock: socket.socket):
        self._sock, self._came = sock, bytearray()

    def receive(self) -> dict[str, Any]:
        while (message := self.whole()) is None:
            self.read()
        return message

    def read(self) -> None:
        """Blocks until something is there. After a TimeoutError what came of a message before stays."""
        self._came += _some(self._sock, _READ_BYTES)

    def whole(self) -> dict[str, Any] | None:
        """The next message, if all of it was read."""
        if len(self._came) < _HEADER.size or len(self._came) < (end := _HEADER.size + _size(self._came)):
            return None
        body = bytes(self._came[_HEADER.size : end])
        del self._came[:end]
        return _decode(body)


def _size(header: bytes | bytearray) -> int:
    size: int = _HEADER.unpack_from(header)[0]
    if size > MAX_MESSAGE_BYTES:
        raise Closed(f"a message of {size} bytes is no message of ours")
    return size


def _decode(body: bytes) -> dict[str, Any]:
    message = json.loads(body)
    if not isinstance(message, dict):
        raise Closed("a message must be an object")
    return message


def send_with(sock: socket.socket, message: dict[str, Any], payload: bytes) -> None:
    """A message with bytes behind it, under their checksum."""
    send(sock, message | {"payload_bytes": len(payload), "payload_hash": xxhash.xxh3_64_hexdigest(payload)})
    try:
        sock.sendall(payload)
    except OSError as error:
        raise Closed(str(error)) from error


def receive_with(sock: socket.socket) -> tuple[dict[str, Any], bytes]:
    """The inverse of send_with(). Raises Closed, also if the bytes are not those that were sent."""
    message = receive(sock)
    payload = _exactly(sock, int(message.pop("payload_bytes")))
    if xxhash.xxh3_64_hexdigest(payload) != message.pop("payload_hash"):
        raise Closed("bytes arrived damaged")
    return message, payload


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            parts += _some(sock, size - len(parts))
        except TimeoutError:
            if not parts:
                raise
            # else in the middle of a message: the sender is alive and writing
    return bytes(parts)


def _some(sock: socket.socket, most: int) -> bytes:
    try:
        part = sock.recv(most)
    except TimeoutError:
        raise
    except OSError as error:
        raise Closed(str(error)) from error
    if not part:
        raise Closed("connection closed")
    return part


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
