"""Where others connect: every connection is served on a thread of its own, until the door is closed."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable

LOG = logging.getLogger(__name__)

#: What accept() fails with while the listening socket is well: who came went again, or this process (this machine) has no descriptors or no
#: memory left. That passes. A door that took it for its own end would never open again, without a word.
PASSING = frozenset({errno.ECONNABORTED, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPROTO, errno.EPERM})
_AGAIN_S = 0.1


class Door:
    """``serve(connection)`` owns the connection: it closes it. ``name``: of the threads. ``address``: where it listens (host, port)."""

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], object], name: str):
        self._listener, self._serve, self._name = listener, serve, name
        self._closed = False
        host, port = listener.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True).start()

    def close(self) -> None:
        """No further connection is accepted. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):  # not connected, says the kernel; but it wakes accept(), which close() does not
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                if error.errno not in PASSING:
                    LOG.error("%s: nobody can connect any more: %s", self._name, error)
                    return
                LOG.warning("%s: a connection was not accepted: %s", self._name, error)
                time.sleep(_AGAIN_S)
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name=self._name, daemon=True).start()
            except RuntimeError as error:  # no further thread can be started: that passes, too
                LOG.warning("%s: a connection was not served: %s", self._name, error)
                connection.close()
