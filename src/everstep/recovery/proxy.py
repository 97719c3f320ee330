"""A TCP relay in userspace that can go silent: the partition of one rank from the coordinator, without privileges.

Only a rank that the fault schedule names is given such a relay's address; everybody else connects directly. Cut, it keeps both
connections open and forwards nothing in either direction, not even the end of one: what a dropped route looks like.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from everstep.recovery.door import Door

CONNECT_TIMEOUT_S = 10.0


class Relay:
    """Forwards connections to ``upstream`` (host, port). ``address``: where it listens."""

    def __init__(self, upstream: tuple[str, int]):
        self._upstream = upstream
        self._cut = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._door = Door(socket.create_server((upstream[0], 0)), self._connect, "relay")
        self.address = self._door.address

    def cut(self) -> None:
        """From now on nothing is forwarded. For good."""
        self._cut.set()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sockets, self._sockets = self._sockets, []
        self._door.close()
        for sock in sockets:
            with contextlib.suppress(OSError):  # not connected any more
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._upstream, timeout=CONNECT_TIMEOUT_S)
        except OSError:
            near.close()  # the coordinator is gone: the rank learns it as without a relay
            return
        far.settimeout(None)
        with self._lock:
            if self._closed:
                near.close()
                far.close()
                return
            self._sockets += [near, far]
        for a, b in ((near, far), (far, near)):
            a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pump, args=(a, b), name="relay", daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        while True:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            if self._cut.is_set():
                return  # both sockets stay open, and silent
            try:
                if not data:
                    sink.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(data)
            except OSError:
                with contextlib.suppress(OSError):  # the other end is gone: this one learns it
                    source.shutdown(socket.SHUT_RDWR)
                return
