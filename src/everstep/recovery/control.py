"""A rank's end of the channel: a thread that receives the log while the main thread computes, and sends progress.

The main thread never waits without a deadline; a lost coordinator ends every wait with :class:`CoordinatorLost`. Lost is one
whose connection ended, and one from which nothing came for ``fence_s`` (its heartbeats come more often): this rank may have been
expelled without being told, so it says and contributes nothing more.

With ``grace_s`` such a rank is first an *orphan*: it leaves collectives and says nothing, but keeps what it has and looks for a
coordinator of a higher incarnation (a controller that takes over, a lighthouse that came back), whom it then obeys; what was said in
vain is said again under the view that that one publishes. The coordinator is lost only without one for ``grace_s``, or if the one that
answers will not have this rank back. It also asks the one that it obeyed, which may live: a rank that was expelled learns it there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from everstep import errors
from everstep.errors import BadInput, CoordinatorLost, DeadlineExceeded, EverstepError, Fenced
from everstep.node import page
from everstep.recovery import wire
from everstep.recovery.rendezvous import Announcement
from everstep.recovery.view import Epoch, Kind, Record, View, Vote

LOG = logging.getLogger(__name__)

_LOOK_S = 0.05  # between two looks for another coordinator
_ANSWER_S = 30.0  # for it to say whether this rank is welcome: it may be on its way into the run itself
_ASK_S = 2.0  # between two questions to the coordinator that was obeyed before, and for its answer: it may be frozen, and another one come meanwhile


class Refused(wire.Closed):
    """The coordinator will not have this rank (any more)."""


class Control:
    """``on_record`` is called on the receiving thread for every record, in order, ``on_order`` for every order of fault injection;
    ``on_diagnose`` with the folder to which this process shall write what it did last; they must not block on the main thread. ``on_phase(step, phase)`` is called on the main thread once a phase has been told,
    ``on_fenced(cause)`` on a thread of its own when the coordinator falls silent.

    ``fence_s``: seconds of silence after which the coordinator is lost; None: never (it lives in this process). ``grace_s``: seconds
    in which another coordinator is waited for (``grace_key``: what sets them); ``run``: which one this is, for a
    lighthouse (:class:`everstep.recovery.commitlog.Past`); ``find()``: the newest announcement of one;
    ``on_adopted(it)`` is called once it accepted this rank, before its first record, ``on_abandoned(cause)`` once none came,
    ``on_refused(cause)`` once one that lives will not have this rank: these need not return. ``describe(incarnation)``: what this rank then says of its
    place and state to that coordinator.
    """

    _orphaned: str | None = None  # why this rank has no coordinator at present, but may find another one
    obeys = Epoch(0, 0)  # of the view under which this rank acts: what it says of its progress is meant so, whatever it has heard since

    def __init__(
        self, address: tuple[str, int], token: str, worker: str, heartbeat_s: float, connect_timeout_s: float = 30.0,
        fence_s: float | None = None, grace_s: float = 0.0, grace_key: str = "recovery.controller_grace_s", run: str | None = None,
    ):
        self.worker = worker
        self.on_record: Callable[[Record], None] = lambda record: None
        self.on_order: Callable[[dict[str, Any]], None] = lambda message: None
        self.on_diagnose: Callable[[str], None] = lambda folder: None
        self.on_phase: Callable[[int, str], None] = lambda step, phase: None
        self.on_fenced: Callable[[str], None] = lambda cause: None
        self.find: Callable[[], Announcement | None] = lambda: None
        self.describe: Callable[[int], dict[str, Any]] = lambda incarnation: {}
        self.on_adopted: Callable[[Announcement], None] = lambda announcement: None
        self.on_abandoned: Callable[[str], None] = lambda cause: None
        self.on_refused: Callable[[str], None] = lambda cause: None
        self._heartbeat_s, self._fence_s, self._grace_s, self._grace_key = heartbeat_s, fence_s, grace_s, grace_key
        self._said_first: dict[str, Any] = {"worker": worker, "pid": os.getpid(), "host": socket.gethostname()}
        if run is not None:
            self._said_first["run"] = run
        self._verdict: EverstepError | None = None  # how the coordinator said that it ends for this rank
        self._incarnation = 0  # of the coordinator that is obeyed; 0: the first one, whatever its number
        self._leaving = False
        self._heard = time.monotonic()
        self._main: int | None = None  # the thread that goes through the phases
        self._records: list[Record] = []           # views and commits, in order
        self._last_build = 0
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self._progress: dict[str, Any] = {"type": "progress", "step": 0, "phase": "idle", "detail": {}}
        self._lost: str | None = None
        self._socket = self._connect(address, token, connect_timeout_s)
        self.local_host: str = self._socket.getsockname()[0]  # the address of this machine that the others can reach
        threading.Thread(target=self._receive_loop, name="control-receive", daemon=True).start()
        threading.Thread(target=self._heartbeat_loop, name="control-heartbeat", daemon=True).start()

    def _connect(self, address: tuple[str, int], token: str, timeout_s: float, **more: Any) -> socket.socket:
        sock = socket.create_connection(address, timeout=timeout_s)
        try:
            wire.tune(sock)
            sock.settimeout(None)
            wire.send(sock, {"token": token, **self._said_first, **more})
        except BaseException:  # no connection is left open behind whatever went wrong
            sock.close()
            raise
        return sock

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

    def halted(self, number: int) -> str | None:
        """Why all work was given up, if that was said in a record up to this number."""
        return next((r.cause for r in self._records if r.kind is Kind.HALT and r.number <= number), None)

    def newer_than(self, number: int) -> bool:
        """Without waiting: has a record above ``number`` arrived (or the coordinator gone)?"""
        records = self._records
        return self._lost is not None or self._orphaned is not None or bool(records and records[-1].number > number)

    def hears_within(self, number: int, timeout_s: float) -> bool:
        """Waits for a record above ``number`` (or the loss of the coordinator); whether it came."""
        with self._changed:
            return self._changed.wait_for(lambda: self.newer_than(number), timeout_s)

    def wait_for(self, find: Callable[[list[Record]], Record | None], timeout_s: float, what: str) -> Record:
        end = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = find(self._records) if self._records else None
                if found is not None:
                    return found
                if self._lost is not None:
                    raise self._loss(f" while waiting for {what}")
                if self._orphaned is not None:  # the grace is the deadline then
                    end = time.monotonic() + timeout_s
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(f"worker {self.worker} waited {timeout_s:g} s for {what} from the coordinator")
                self._changed.wait(left)

    @property
    def lost(self) -> str | None:
        """Why the coordinator is lost; None while it is not."""
        return self._lost

    @property
    def orphaned(self) -> bool:
        """Whether this rank has no coordinator at present, and looks for another one."""
        return self._orphaned is not None

    def must_not_be_lost(self) -> None:
        """Raises CoordinatorLost, or what the coordinator ended this rank with; for waits that are not for the coordinator itself."""
        if self._lost is not None:
            raise self._loss()

    def _loss(self, when: str = "") -> EverstepError:
        return self._verdict or CoordinatorLost(f"worker {self.worker} lost the coordinator ({self._lost}){when}")

    @property
    def committed(self) -> int:
        """The last committed step that this rank has heard of."""
        records = self._records
        return records[-1].view.committed if records else 0

    @property
    def view(self) -> View:
        return self.latest.view

    @property
    def epoch(self) -> Epoch:
        """Epoch of the newest view; (0, 0) before the first."""
        records = self._records
        return records[-1].view.epoch if records else Epoch(0, 0)

    def committed_in(self, step: int) -> tuple[int, int]:
        """The epoch in which a recent step was committed last; (0, 0) if it was not (the start, a checkpoint)."""
        found = next((r.epoch for r in reversed(self._records) if r.kind is Kind.COMMIT and r.step == step and r.epoch), None)
        return found.key if found else (0, 0)

    def includes(self, worker: str, build: int) -> bool:
        """Whether the newest view has this life of this worker as a member (True if the coordinator is lost: it cannot say)."""
        records = self._records
        member = records[-1].view.member_of(worker) if records else None
        return self._lost is not None or (member is not None and member.build == build)

    def wants_heal(self, number: int) -> bool:
        """Whether the newest view has this heal (False if the coordinator is lost)."""
        records = self._records
        return self._lost is None and bool(records) and any(h.number == number for h in records[-1].view.heals)

    def build_after(self, number: int) -> bool:
        """Whether a newer link build was ordered, which makes build ``number`` obsolete, or the coordinator is lost."""
        return self._lost is not None or self._last_build > number

    # -- what a rank says -------------------------------------------------------------------------------------------------

    def phase(self, step: int, phase: str, **detail: Any) -> None:
        self._main = threading.get_ident()
        page.phase(step, phase)
        self._progress = {"type": "progress", "step": step, "phase": phase, "epoch": self.obeys.key, "detail": detail}
        self._send(self._progress)
        self.on_phase(step, phase)

    @property
    def where(self) -> tuple[int, str]:
        """(step, phase) that this rank told last."""
        return self._progress["step"], self._progress["phase"]

    def dying(self, cause: str) -> None:
        """This process is about to end itself, and why."""
        self._send({"type": "dying", "cause": cause})

    def leaving(self, cause: str, whole_node: bool) -> None:
        """This process, or its machine, is about to be taken away, and why."""
        with contextlib.suppress(Fenced):  # nobody is left to be told
            self._send({"type": "leaving", "cause": cause, "whole_node": whole_node})

    def fault_word(self, number: int, word: str) -> None:
        self._send({"type": "fault", "number": number, "word": word})

    def vote(self, vote: Vote) -> None:
        self._send({"type": "vote", "vote": vote.to_json()})

    def link_ready(self, link_id: str) -> None:
        self._send({"type": "link_ready", "link_id": link_id})

    def link_failed(self, link_id: str, cause: str, void: bool) -> None:
        self._send({"type": "link_failed", "link_id": link_id, "cause": cause, "void": void})

    def heal_failed(self, number: int, cause: str) -> None:
        self._send({"type": "heal_failed", "number": number, "cause": cause})

    def close(self) -> None:
        """Leave in order: the coordinator is told that this is no death."""
        self._leaving = True
        if self._lost is None:
            with contextlib.suppress(EverstepError):  # the coordinator closed first
                self._send({"type": "bye"})
        self.drop()

    def drop(self) -> None:
        """Leave without a word, as if this process had died."""
        self._leaving = True
        with self._changed:
            self._lost = self._lost or "closed by this process"
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # the coordinator closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # -- threads -----------------------------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        self.must_not_be_lost()
        if self._orphaned is not None:
            return  # nobody to tell: another coordinator is told where this rank is, and takes no other word of before
        try:
            with self._send_lock:
                wire.send(self._socket, message)
        except wire.Closed as closed:
            if self._grace_s > 0:
                return  # the receiving thread sees the same, and looks for another coordinator
            self._lose(str(closed))
            raise CoordinatorLost(f"worker {self.worker} lost the coordinator ({closed})") from closed

    def _receive_loop(self) -> None:
        try:
            while True:
                cause = self._receive()
                if self._leaving or self._lost is not None or not self._find_another(cause):
                    break
            if self._grace_s > 0 and not self._leaving:
                cause = f"no coordinator for {self._grace_s:g} s ({self._grace_key}) after: {cause}"
        except Refused as refused:
            cause = str(refused)
            self._lose(cause)
            self.on_fenced(cause)
            if self._grace_s > 0 and not self._leaving:
                self.on_refused(cause)
            return
        self._lose(cause)
        if self._grace_s > 0 and not self._leaving:
            self.on_abandoned(cause)

    def _receive(self) -> str:
        """Until the connection ends; returns how."""
        try:
            while True:
                message = wire.receive(self._socket)
                self._heard = time.monotonic()
                if message["type"] == "heartbeat":
                    continue
                if message["type"] == "fault":
                    self.on_order(message)
                    continue
                if message["type"] == "diagnose":
                    self.on_diagnose(message["folder"])
                    continue
                if message["type"] == "over":
                    self._refuse(message)
                record = Record.from_json(message["record"], self._records[-1] if self._records else None)
                LOG.debug("record %d: %s of step %s, epoch %s, %s", record.number, record.kind, record.step, record.view.epoch, record.cause or "no cause")
                if record.kind is Kind.BUILD:
                    self._last_build = record.number
                else:
                    with self._changed:
                        if self._records and record.number <= self._records[-1].number:
                            raise wire.Closed(f"record {record.number} after {self._records[-1].number}: not our coordinator")
                        self._incarnation = record.view.epoch.incarnation
                        self._records.append(record)
                        del self._records[:-256]  # only the recent past is ever asked for
                        self._changed.notify_all()
                self.on_record(record)
        except Refused:
            raise
        except wire.Closed as closed:
            return str(closed)
        except Exception as error:  # the end of a thread: a rank that hears nothing more must not go on
            self._lose(f"{type(error).__name__}: {error}")
            raise

    def _refuse(self, message: dict[str, Any]) -> NoReturn:
        """The coordinator says how it ends for this rank."""
        self._verdict = errors.typed(message["error"], message["message"])
        raise Refused(message["message"])

    def _find_another(self, cause: str) -> bool:
        """Look for a coordinator of a higher incarnation; whether one accepted this rank within the grace. Raises Refused, also if the one
        that was obeyed lives and has expelled this rank: its word on it may have been lost with the connection."""
        with self._changed:
            self._orphaned = cause
            self._changed.notify_all()
        end, ask = time.monotonic() + self._grace_s, 0.0
        while time.monotonic() < end and not self._leaving:
            try:
                found = self.find()
                if found is not None and (found.incarnation is None or found.incarnation > self._incarnation):
                    self._adopt(found, _ANSWER_S)
                    return True
                if found is not None and found.incarnation == self._incarnation and time.monotonic() >= ask:
                    ask = time.monotonic() + _ASK_S
                    self._adopt(found, _ASK_S)  # it accepts nobody twice
            except Refused:
                raise
            except (OSError, wire.Closed, BadInput):  # not there yet, or gone again, or its file is being written
                pass
            time.sleep(_LOOK_S)
        return False

    def _adopt(self, found: Announcement, answer_s: float) -> None:
        """Raises OSError, wire.Closed, if it is not there (yet) or is the one that was obeyed, Refused if it will not have this rank."""
        sock = self._connect(found.coordinator, found.token, min(answer_s, 5.0), orphan=self._incarnation)
        try:
            sock.settimeout(answer_s)
            answer = wire.receive(sock)
            if answer["type"] == "over":
                self._refuse(answer)
            if answer["incarnation"] <= self._incarnation:
                raise wire.Closed("it is the one that was obeyed before")
            sock.settimeout(None)
        except BaseException:  # as above
            sock.close()
            raise
        with self._send_lock:
            old, self._socket = self._socket, sock
        with contextlib.suppress(OSError):
            old.close()
        self._heard, self._incarnation, self._last_build = time.monotonic(), answer["incarnation"], 0
        self.on_adopted(dataclasses.replace(found, incarnation=answer["incarnation"]))
        records = self._records
        commit = next((r.to_json() for r in reversed(records) if r.kind is Kind.COMMIT), None)
        state = {"last": records[-1].to_json() if records else None, "commit": commit, **self.describe(answer["incarnation"])}
        with self._changed:
            self._orphaned = None
            self._changed.notify_all()
        with contextlib.suppress(EverstepError):
            self._send({"type": "state", "state": state})  # now that it could obey: whoever hears this may call it at once
            self._send(self._progress)

    def _heartbeat_loop(self) -> None:
        now = time.monotonic()
        while self._lost is None:
            time.sleep(self._heartbeat_s)
            before, now = now, time.monotonic()
            late = now - before - self._heartbeat_s
            if late > self._heartbeat_s:  # this process was suspended itself, or starved: it could not have heard anybody
                self._heard += late
            if self._orphaned is None and self._fence_s is not None and now - self._heard > self._fence_s:
                self._fence(f"nothing was heard from it for {self._fence_s:g} s (recovery.fence_s)")
                if self._grace_s <= 0:
                    return
            try:
                self._send(self._progress | {"waits": self._main is not None and page.waits(self._main)})
            except EverstepError:
                return

    def _fence(self, cause: str) -> None:
        if self._grace_s > 0:
            with self._changed:
                self._orphaned = cause
                self._changed.notify_all()
        else:
            self._lose(cause)
        with contextlib.suppress(OSError):  # if it lives, and hears us, it learns at once that we are out
            self._socket.shutdown(socket.SHUT_RDWR)
        self.on_fenced(cause)

    def _lose(self, cause: str) -> None:
        if self._lost is None:
            LOG.warning("the coordinator is lost: %s", cause)
        with self._changed:
            self._lost = self._lost or cause
            self._changed.notify_all()
