"""The warden of a replica on its machine: in torchrun's agent, it does to ranks what the lighthouse cannot do from elsewhere.

A rank that was expelled ends by itself, if it can. One that is frozen cannot, and its replica would never be started anew: the lighthouse
orders its end here (rule 8). Signals of fault injection come the same way.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import NoReturn

import psutil

from everstep.cluster.orphans import TOKEN
from everstep.cluster.processes import signal_pid
from everstep.recovery import wire

_RETRY_S = 1.0
_CONNECT_S = 10.0


def watch(address: tuple[str, int], token: str, replica: int, launch: str) -> None:
    """Obey the lighthouse, on a thread of its own, as long as this process lives. ``launch``: the token that all processes of this
    replica carry in their environment; no other process is ever touched."""
    threading.Thread(target=_loop, args=(address, token, replica, launch), name="warden", daemon=True).start()


def _loop(address: tuple[str, int], token: str, replica: int, launch: str) -> None:
    while True:
        with contextlib.suppress(OSError, wire.Closed):  # the lighthouse is not there, or not yet again
            _obey(address, {"token": token, "warden": replica, "host": socket.gethostname()}, launch)
        time.sleep(_RETRY_S)


def _obey(address: tuple[str, int], hello: dict[str, object], launch: str) -> NoReturn:
    """Raises OSError or wire.Closed once the connection ends."""
    with socket.create_connection(address, timeout=_CONNECT_S) as sock:
        wire.tune(sock)
        sock.settimeout(None)
        wire.send(sock, hello)
        while True:
            order = wire.receive(sock)
            if order["type"] == "signal" and is_of_launch(int(order["pid"]), launch):
                signal_pid(int(order["pid"]), int(order["number"]))


def is_of_launch(pid: int, launch: str) -> bool:
    try:
        return psutil.Process(pid).environ().get(TOKEN) == launch
    except (psutil.Error, OSError):
        return False  # gone, or somebody else's
