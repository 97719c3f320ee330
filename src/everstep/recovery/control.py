"""A rank's end of the channel: a thread that receives the log while the main thread computes, and sends progress.

The main thread never waits without a deadline; a lost coordinator ends every wait with :class:`Fenced`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from everstep.errors import DeadlineExceeded, Fenced
from everstep.recovery import wire
from everstep.recovery.view import Epoch, Kind, Record, View, Vote


class Control:
    """``on_record`` is called on the receiving thread for every record, in order; it must not block on the main thread."""

    def __init__(self, address: tuple[str, int], token: str, worker: str, heartbeat_s: float, connect_timeout_s: float = 30.0):
        self.worker = worker
        self.on_record: Callable[[Record], None] = lambda record: None
        self._heartbeat_s = heartbeat_s
        self._records: list[Record] = []           # views and commits, in order
        self._last_build = 0
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self._progress: dict[str, Any] = {"type": "progress", "step": 0, "phase": "idle", "detail": {}}
        self._lost: str | None = None
        self._socket = socket.create_connection(address, timeout=connect_timeout_s)
        wire.tune(self._socket)
        self._socket.settimeout(None)
        self.local_host: str = self._socket.getsockname()[0]  # the address of this machine that the others can reach
        wire.send(self._socket, {"token": token, "worker": worker, "pid": os.getpid(), "host": socket.gethostname()})
        threading.Thread(target=self._receive_loop, name="control-receive", daemon=True).start()
        threading.Thread(target=self._heartbeat_loop, name="control-heartbeat", daemon=True).start()

    # -- the log ---------------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> Record:
        """The newest view or commit. Raises Fenced if the coordinator is lost, DeadlineExceeded if none ever came."""
        return self.wait_for(lambda records: records[-1], 30.0, "the first view")

    def after(self, number: int, timeout_s: float, what: str) -> Record:
        """The first record with a number above ``number``."""
        return self.wait_for(lambda rs: next((r for r in rs if r.number > number), None), timeout_s, what)

    def numbered(self, number: int, timeout_s: float) -> Record:
        """The record with this number; waits for it if it is still on its way."""
        return self.wait_for(
            lambda rs: next((r for r in reversed(rs) if r.number == number), None), timeout_s, f"record {number}"
        )

    def newer_than(self, number: int) -> bool:
        """Without waiting: has a record above ``number`` arrived (or the coordinator been lost)?"""
        records = self._records
        return self._lost is not None or bool(records and records[-1].number > number)

    def wait_for(self, find: Callable[[list[Record]], Record | None], timeout_s: float, what: str) -> Record:
        end = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = find(self._records) if self._records else None
                if found is not None:
                    return found
                if self._lost is not None:
                    raise Fenced(f"worker {self.worker} lost the coordinator ({self._lost}) while waiting for {what}")
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(f"worker {self.worker} waited {timeout_s:g} s for {what} from the coordinator")
                self._changed.wait(left)

    @property
    def view(self) -> View:
        return self.latest.view

    @property
    def epoch(self) -> Epoch:
        """Epoch of the newest view; (0, 0) before the first."""
        records = self._records
        return records[-1].view.epoch if records else Epoch(0, 0)

    def includes(self, worker: str, build: int) -> bool:
        """Whether the newest view has this life of this worker as a member (True if the coordinator is lost: it cannot say)."""
        records = self._records
        member = records[-1].view.member_of(worker) if records else None
        return self._lost is not None or (member is not None and member.build == build)

    def build_after(self, number: int) -> bool:
        """Whether a newer link build was ordered, which makes build ``number`` obsolete, or the coordinator is lost."""
        return self._lost is not None or self._last_build > number

    # -- what a rank says -------------------------------------------------------------------------------------------------

    def phase(self, step: int, phase: str, **detail: Any) -> None:
        self._progress = {"type": "progress", "step": step, "phase": phase, "detail": detail}
        self._send(self._progress)

    def vote(self, vote: Vote) -> None:
        self._send({"type": "vote", "vote": vote.to_json()})

    def link_ready(self, link_id: str) -> None:
        self._send({"type": "link_ready", "link_id": link_id})

    def link_failed(self, link_id: str, cause: str, void: bool) -> None:
        self._send({"type": "link_failed", "link_id": link_id, "cause": cause, "void": void})

    def close(self) -> None:
        """Leave in order: the coordinator is told that this is no death."""
        if self._lost is None:
            with contextlib.suppress(Fenced):  # the coordinator closed first
                self._send({"type": "bye"})
        with self._changed:
            self._lost = self._lost or "closed by this process"
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # the coordinator closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # -- threads -----------------------------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        try:
            with self._send_lock:
                wire.send(self._socket, message)
        except wire.Closed as closed:
            self._lose(str(closed))
            raise Fenced(f"worker {self.worker} lost the coordinator ({closed})") from closed

    def _receive_loop(self) -> None:
        try:
            while True:
                record = Record.from_json(wire.receive(self._socket)["record"])
                if record.kind is Kind.BUILD:
                    self._last_build = record.number
                else:
                    with self._changed:
                        if self._records and record.number <= self._records[-1].number:
                            raise wire.Closed(f"record {record.number} after {self._records[-1].number}: not our coordinator")
                        self._records.append(record)
                        del self._records[:-256]  # only the recent past is ever asked for
                        self._changed.notify_all()
                self.on_record(record)
        except wire.Closed as closed:
            self._lose(str(closed))
        except Exception as error:  # the end of a thread: a rank that hears nothing more must not go on
            self._lose(f"{type(error).__name__}: {error}")
            raise

    def _heartbeat_loop(self) -> None:
        while self._lost is None:
            time.sleep(self._heartbeat_s)
            try:
                self._send(self._progress)
            except Fenced:
                return

    def _lose(self, cause: str) -> None:
        with self._changed:
            self._lost = self._lost or cause
            self._changed.notify_all()
