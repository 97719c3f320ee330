"""Copies that outlive their node: each worker process keeps copies of ranks of other nodes in its own node's memory, and hands out what its
node has.

A rank sends its copy, once it counts, to its *buddy*: a worker of another node, which the controller names
(:class:`everstep.cluster.controller.copies.Copies`). What a buddy has written it reads again before it seals it, so a copy that the end of either
process cut short is none. Everything is on threads of its own: a worker computes meanwhile.

One request a connection, opened with a secret:

    put     replica, rank, bytes; then the copy, seal first     -> ok
    list                                                        -> every whole copy of this node: rank, version, epoch
    get     rank, version, epoch                                -> bytes; then the copy, seal first
    flush   folder, states, rollbacks                           -> the versions that were written to the disk
    remove                                                      -> ok
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everstep.checkpoint import flushed, memory
from everstep.checkpoint.memory import Copy, Stamp
from everstep.errors import EverstepError
from everstep.recovery import wire
from everstep.recovery.door import Door

LOG = logging.getLogger(__name__)
_PIECE_BYTES = 4 << 20

Address = tuple[str, int, str]  # host, port, secret


class ShelfError(EverstepError):
    """The other end is gone, silent, or does not have what was asked for."""


class Shelf:
    """``folder``: this node's copies. ``host``: the address of this machine that the others can reach; ``idle_s``: for how long
    nothing may move on a connection."""

    def __init__(self, folder: Path, host: str, idle_s: float):
        self._folder, self._idle_s, self._secret = folder, idle_s, secrets.token_hex(16)
        self._door = Door(socket.create_server((host, 0)), self._serve, "shelf")
        self.address: Address = (host, self._door.address[1], self._secret)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(wire.Closed, OSError):  # whoever asked is gone: nothing is owed
            connection.settimeout(self._idle_s)
            asked = wire.receive(connection)
            if not hmac.compare_digest(str(asked.get("secret", "")), self._secret):
                return
            answers: dict[str, Callable[[socket.socket, Mapping[str, Any]], None]] = {
                "put": self._put, "list": self._list, "get": self._get, "flush": self._flush, "remove": self._remove,
            }
            try:
                answers[asked["what"]](connection, asked)
            except (OSError, EverstepError) as error:  # a full disk or memory, a timeout: the one that asked is told
                LOG.warning("%s: %s", asked["what"], error)
                wire.send(connection, {"error": f"{type(error).__name__}: {error}"})

    def _put(self, connection: socket.socket, asked: Mapping[str, Any]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = memory.older_place(self._folder, asked["replica"], asked["rank"])
        ok = _receive(connection, place, asked["bytes"])
        wire.send(connection, {"ok": True} if ok else {"error": "the copy arrived damaged"})

    def _list(self, connection: socket.socket, asked: Mapping[str, Any]) -> None:
        copies = sorted(set(memory.whole_copies(self._folder).values()))
        wire.send(connection, {"copies": [[rank, stamp.version, *stamp.epoch] for rank, stamp in copies]})

    def _get(self, connection: socket.socket, asked: Mapping[str, Any]) -> None:
        stamp = Stamp(asked["version"], (asked["epoch"][0], asked["epoch"][1]))
        path = memory.find(self._folder, asked["rank"], stamp)
        if path is None:
            wire.send(connection, {"error": f"no copy of step {stamp.version} of rank {asked['rank']}"})
            return
        with open(path, "rb") as file:
            size = path.stat().st_size
            wire.send(connection, {"bytes": size - memory.SEAL_BYTES})
            connection.sendfile(file, 0, size)

    def _flush(self, connection: socket.socket, asked: Mapping[str, Any]) -> None:
        wire.send(connection, {"versions": flushed.write(self._folder, Path(asked["folder"]))})

    def _remove(self, connection: socket.socket, asked: Mapping[str, Any]) -> None:
        memory.remove(self._folder)
        wire.send(connection, {"ok": True})


def put(to: Address, copy: Copy, replica: int, rank: int, idle_s: float) -> None:
    """Returns once the other node has a whole copy. Raises ShelfError."""
    with _asking(to, idle_s, "put", replica=replica, rank=rank, bytes=len(copy.body)) as connection:
        for at in range(0, len(copy.whole), _PIECE_BYTES):
            connection.sendall(copy.whole[at : at + _PIECE_BYTES])
        _answer(connection)


def get(at: Address, rank: int, stamp: Stamp, into: Path, replica: int, idle_s: float) -> None:
    """Bring a copy to this node, as one of rank ``rank`` of ``replica``. Raises ShelfError."""
    with _asking(at, idle_s, "get", rank=rank, version=stamp.version, epoch=stamp.epoch) as connection:
        size = int(_answer(connection)["bytes"])
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _receive(connection, memory.older_place(into, replica, rank), size):
            raise ShelfError(f"the copy of step {stamp.version} of rank {rank} arrived damaged from {at[0]}:{at[1]}")


def copies_at(at: Address, idle_s: float) -> list[tuple[int, Stamp]]:
    """(rank, stamp) of every whole copy of that node. Raises ShelfError."""
    with _asking(at, idle_s, "list") as connection:
        return [(rank, Stamp(version, (incarnation, counter))) for rank, version, incarnation, counter in _answer(connection)["copies"]]


def flush(at: Address, folder: Path, idle_s: float) -> None:
    """Let that node write its copies to the disk (:func:`everstep.checkpoint.flushed.write`). Raises ShelfError."""
    with _asking(at, idle_s, "flush", folder=str(folder)) as connection:
        _answer(connection)


def remove(at: Address, idle_s: float) -> None:
    """Free that node's memory of this run. Raises ShelfError."""
    with _asking(at, idle_s, "remove") as connection:
        _answer(connection)


@contextlib.contextmanager
def _asking(to: Address, idle_s: float, what: str, **more: Any) -> Any:
    host, port, secret = to
    try:
        with socket.create_connection((host, port), timeout=idle_s) as connection:
            wire.tune(connection)
            connection.settimeout(idle_s)
            wire.send(connection, {"secret": secret, "what": what, **more})
            yield connection
    except (OSError, wire.Closed) as error:
        raise ShelfError(f"{what} at {host}:{port}: {type(error).__name__}: {error}") from error


def _answer(connection: socket.socket) -> dict[str, Any]:
    said = wire.receive(connection)
    if "error" in said:
        raise ShelfError(str(said["error"]))
    return said


def _receive(connection: socket.socket, place: Path, nbytes: int) -> bool:
    """Take a copy, seal first, whose body has ``nbytes``; whether it is whole."""
    seal = bytearray(memory.SEAL_BYTES)
    _fill(connection, memoryview(seal))
    copy = Copy(place, nbytes)
    _fill(connection, copy.body)
    return copy.seal_as(bytes(seal))


def _fill(connection: socket.socket, data: memoryview) -> None:
    done = 0
    while done < len(data):
        moved = connection.recv_into(data[done : done + _PIECE_BYTES])
        if not moved:
            raise wire.Closed("the other end closed the connection")
        done += moved
