"""A replica's head (its rank 0) and the lighthouse: requests, each with an answer, and torchft's part.

A request that finds no lighthouse is made again until there is one (``lighthouse.wait_s``). One that came back has forgotten everything
but its commit record: it is told first which life of which replica this is, and what is on the board.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from everstep import errors
from everstep.cluster.local.lighthouse import Ports, pack_journal, quieten_torchft
from everstep.errors import CoordinatorLost, EverstepError
from everstep.recovery import wire
from everstep.recovery.board import KEPT_GENERATIONS, Journal

_RETRY_S = 0.2
_STAY_EVERY_S = 0.5
_ANSWER_S = 60.0  # for any answer; a request that takes longer is answered with "wait"
_QUORUM_EVERY_S = 1.0
_LEAVE_S = 5.0  # for a lighthouse to hear that this replica leaves before the end

log = logging.getLogger(__name__)


class Head:
    """``registration``: what says who this is."""

    def __init__(self, address: tuple[str, int], token: str, wait_s: float, registration: dict[str, Any]):
        self._address, self._token, self._wait_s, self._registration = address, token, wait_s, registration
        self._socket: socket.socket | None = None
        self._resume: dict[str, Any] | None = None  # once registered
        self._formed = False
        self._begun: tuple[int, list[list[str]], dict[str, Any]] | None = None  # the step in progress, its samples, and what it is
        self.began: Callable[[], bool] = lambda: False  # whether there has been a view
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self.journals: deque[Journal] = deque([Journal(0, (b"", 0))], maxlen=KEPT_GENERATIONS)  # the last one is of the present generation
        self.has_reference = False

    def register(self) -> dict[str, Any]:
        while "answer" in (reply := self.request("register", **self._registration)[0]):
            pass  # it is to come again
        self._resume = {key: reply[key] for key in ("run", "build", "workers", "attempt", "checkpoint", "step")}
        return reply

    def formed(self) -> None:
        self._formed = True
        self.request("formed")
        threading.Thread(target=self._stay, name="head-stays", daemon=True).start()

    def begin(self, step: int, slots: list[list[str]], about: Mapping[str, Any]) -> bool:
        """The recipe comes to this step; whether it is the next one to be committed."""
        self._begun = step, slots, dict(about)
        return bool(self.request("begin", step=step, slots=slots, about=dict(about))[0]["live"])

    def request(self, kind: str, payload: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Raises what the lighthouse answers with, CoordinatorLost if none answers for ``lighthouse.wait_s``."""
        end = time.monotonic() + self._wait_s
        while True:
            try:
                with self._lock:
                    return self._exchange(self._connected(), {"type": kind, **fields}, payload)
            except (OSError, wire.Closed) as closed:  # a TimeoutError is an OSError
                if self._closed.is_set():
                    raise CoordinatorLost("this replica has left the run") from closed
                with self._lock:
                    self._drop()
                if time.monotonic() > end:
                    host, port = self._address
                    raise CoordinatorLost(
                        f"no lighthouse answered at {host}:{port - 1} (its coordinator: port {port}) for {self._wait_s:g} s (lighthouse.wait_s; {closed}); start one with "
                        "`everstep lighthouse`, and name it in TORCHFT_LIGHTHOUSE or lighthouse.address"
                    ) from closed
                time.sleep(_RETRY_S)

    def mark(self, generation: int, bookmark: tuple[bytes, int]) -> None:
        """The recipe can go on from here."""
        self.journals.append(Journal(generation, bookmark))
        self.request("mark", bookmark[0], generation=generation, step=bookmark[1])

    def finish(self, status: str) -> None:
        """This replica leaves. Before the end no lighthouse is waited for: the next one finds out."""
        if status != "done":
            self._wait_s = min(self._wait_s, _LEAVE_S)
        self.request("finish", status=status)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._drop()

    def _stay(self) -> None:
        """A lighthouse that came back hears of this replica, also while its main thread computes."""
        while not self._closed.wait(_STAY_EVERY_S):
            try:
                self.request("ping")
            except EverstepError:
                return  # the run is over for us; the main thread is told so itself

    def _connected(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        self._socket = socket.create_connection(self._address, timeout=_ANSWER_S)
        try:
            return self._introduced(self._socket)
        except EverstepError:  # refused: whoever asks next is told the same
            self._drop()
            raise

    def _introduced(self, sock: socket.socket) -> socket.socket:
        wire.tune(sock)
        wire.send(sock, {"token": self._token, "head": True})
        welcome = wire.receive(sock)
        if welcome["type"] == "over":
            raise errors.typed(welcome["error"], welcome["message"])
        if self._resume is not None:
            again = self._registration | {"resume": self._resume | {"formed": self._formed, "began": self.began(), "begun": self._begun}}
            reply, _ = self._exchange(sock, {"type": "register", **again}, b"")
            for journal in self.journals:
                if reply["generation"] <= journal.generation + 1:
                    self._exchange(sock, *pack_journal(journal, self.has_reference))
        return sock

    def _exchange(self, sock: socket.socket, request: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        wire.send_with(sock, request, payload)
        reply, answer = wire.receive_with(sock)
        if "error" in reply:
            raise errors.typed(reply["error"], reply["message"])
        return reply, answer

    def _drop(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()


class Presence:
    """This life of the replica as torchft's lighthouse sees it: a manager server that sends heartbeats, and a quorum request whenever
    another step is committed, for its dashboard. Training waits for none of this; ``on_quorum`` gets the members of the first one.

    ``port``: where the manager listens (TORCHFT_MANAGER_PORT), 0: anywhere.
    """

    def __init__(
        self, lighthouse: Ports, replica: int, nonce: str, port: int, store_address: str, wait_s: float, committed: Callable[[], int],
        on_quorum: Callable[[frozenset[int]], None],
    ):
        quieten_torchft()
        from torchft.coordination import ManagerClient, ManagerServer

        self._committed, self._on_quorum, self._wait_s = committed, on_quorum, wait_s
        self._closed = threading.Event()
        end = time.monotonic() + wait_s
        while True:
            try:
                self._server = ManagerServer(
                    replica_id=f"{replica}:{nonce}", lighthouse_addr=lighthouse.url, hostname=socket.gethostname(), bind=f"[::]:{port}",
                    store_addr=store_address, world_size=1, heartbeat_interval=timedelta(seconds=1.0), connect_timeout=timedelta(seconds=10),
                    quorum_retries=0,
                )
                break
            except RuntimeError as error:  # the lighthouse is not up (again) yet
                if time.monotonic() > end:
                    raise CoordinatorLost(f"torchft's lighthouse at {lighthouse.url} cannot be reached ({error}; lighthouse.wait_s)") from error
                time.sleep(_RETRY_S)
        own_port = self._server.address().rstrip("/").rpartition(":")[2]
        self._client = ManagerClient(f"http://127.0.0.1:{own_port}", connect_timeout=timedelta(seconds=10))
        self._thread = threading.Thread(target=self._loop, name="torchft-presence", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        told: int | None = None
        while not self._closed.is_set():
            step = self._committed()
            if step != told:
                try:
                    quorum = self._client._quorum(
                        group_rank=0, step=step, checkpoint_metadata="", shrink_only=False, commit_failures=0, init_sync=False,
                        timeout=timedelta(seconds=self._wait_s if told is None else 60.0),
                    )
                    if told is None:
                        self._on_quorum(frozenset(int(name.partition(":")[0]) for name in quorum.replica_ids))
                    told = step
                except EverstepError:
                    return  # the run is over; the main thread is told so itself
                except (RuntimeError, TimeoutError) as error:  # it is only a hint: the next one will do
                    log.debug("torchft's quorum: %s", error)
            self._closed.wait(_QUORUM_EVERY_S if told is not None else 0.1)

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
