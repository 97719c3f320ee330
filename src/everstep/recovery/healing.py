"""The heals of one rank: those that it is the source of, and the one by which it becomes whole itself. Both run beside its steps."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from everstep.config.recovery_schema import RecoveryConfig
from everstep.errors import DeadlineExceeded, EverstepError
from everstep.recovery import heal
from everstep.recovery.view import Heal, View
from everstep.telemetry.events import EventLog

_END_S = 10.0  # for a thread that was called off to notice it; it looks several times a second


class Stage(enum.IntEnum):
    """How far the heal of a rank has come, in an order in which ranks of a replica can compare."""

    FAILED = 0
    OVERTAKEN = 1  # a newer view came while it was waited for
    GOING_ON = 2
    DONE = 3


@dataclass
class _Receiver:
    """One heal of this rank. ``healed`` or ``failure`` once its thread has ended."""

    one: Heal
    thread: threading.Thread | None = None
    called_off: bool = False
    healed: heal.Healed | None = None
    failure: str = ""


class Healing:
    """``host``: the address of this machine that the others can reach. ``wanted(number)``: whether the newest view has this heal."""

    def __init__(
        self, replica: int, rank: int, store: dist.Store, host: str, state: heal.State, config: RecoveryConfig, events: EventLog,
        wanted: Callable[[int], bool],
    ):
        self._replica, self._rank, self._store, self._host = replica, rank, store, host
        self._state, self._timeout_s, self._hold_s = state, config.heal_timeout_s, config.heal_hold_s
        self._events, self._wanted = events, wanted
        self._senders: dict[int, tuple[threading.Thread, heal.Snapshot]] = {}  # by the heal's number
        self._receiver: _Receiver | None = None
        self._closed = False

    # -- as a source -------------------------------------------------------------------------------------------------------

    def serve(self, view: View) -> None:
        """Begin to stream my state to whom the view says, if that has not begun."""
        self._senders = {number: s for number, s in self._senders.items() if self._wanted(number)}
        for one in view.heals:
            if one.source == self._replica and one.number not in self._senders:
                snapshot = heal.Snapshot(self._state, one.version)
                thread = threading.Thread(target=self._send, args=(view, one, snapshot), name="heal-source", daemon=True)
                self._senders[one.number] = thread, snapshot
                thread.start()

    def before_change(self) -> None:
        """The state is about to change: wait a moment for heals that are nearly done, and copy aside what the others lack."""
        end = time.monotonic() + self._hold_s
        for thread, snapshot in self._senders.values():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                snapshot.set_aside()

    def settle(self) -> None:
        """Between steps, before the state moves to other memory: nobody reads it any more once this returns."""
        for thread, snapshot in self._senders.values():
            if thread.is_alive():
                snapshot.set_aside()

    def _send(self, view: View, one: Heal, snapshot: heal.Snapshot) -> None:
        name = self._name(view, one)
        over: Callable[[], bool] = lambda: self._closed or not self._wanted(one.number)
        try:
            with heal.HealStream(name, self._store, self._timeout_s, over) as stream:
                heal.send(stream.serve(self._host, snapshot.lanes), snapshot)
        except Exception as error:  # the end of a thread; the joiner sees its connection close, and reports that
            if not over():
                self._events.emit("error", step=one.version, epoch=view.epoch.key, error=type(error).__name__,
                                  message=f"heal source {name}: {error}")
        finally:
            snapshot.drop()

    # -- as the one that heals -----------------------------------------------------------------------------------------------

    def join(self, view: View, one: Heal) -> None:
        """Begin a heal; one that was in progress is given up. Returns after the handshake. Raises LinkBroken, DeadlineExceeded."""
        self._give_up()
        receiver = self._receiver = _Receiver(one)
        over: Callable[[], bool] = lambda: self._closed or receiver.called_off or not self._wanted(one.number)
        stream = heal.HealStream(self._name(view, one), self._store, self._timeout_s, over)
        try:
            tensors = heal.open_state(stream.join(), self._state, one.version)
        except BaseException:  # the source must not wait for one that stopped reading
            stream.close()
            raise
        if tensors is None:
            stream.close()
            receiver.healed = heal.Healed(0, 0.0)
            return

        def receive() -> None:
            try:
                with stream:
                    receiver.healed = heal.receive(stream, tensors, one.version)
            except EverstepError as error:
                receiver.failure = str(error)
            except Exception as error:  # the end of a thread: the rank that waits for it must learn of it
                receiver.failure = f"{type(error).__name__}: {error}"

        receiver.thread = threading.Thread(target=receive, name="heal-joiner", daemon=True)
        receiver.thread.start()

    def stage(self) -> Stage:
        receiver = self._receiver
        assert receiver is not None
        return Stage.DONE if receiver.healed else Stage.FAILED if receiver.failure else Stage.GOING_ON

    def wait(self, stop: Callable[[], bool]) -> Stage:
        """Until the heal is done or has failed, or ``stop`` turns true."""
        receiver = self._receiver
        assert receiver is not None
        while self.stage() is Stage.GOING_ON:
            if stop():
                return Stage.OVERTAKEN
            assert receiver.thread is not None
            receiver.thread.join(0.002)
        return self.stage()

    @property
    def healed(self) -> heal.Healed:
        assert self._receiver is not None and self._receiver.healed is not None
        return self._receiver.healed

    @property
    def failure(self) -> str:
        return self._receiver.failure if self._receiver else ""

    def close(self) -> None:
        """The rank leaves its replica: nothing writes into its state once this returns. Raises DeadlineExceeded."""
        self._closed = True
        self._give_up()
        for _, snapshot in self._senders.values():
            snapshot.drop()

    def _give_up(self) -> None:
        receiver = self._receiver
        if receiver is None or receiver.thread is None:
            return
        receiver.called_off = True
        receiver.thread.join(_END_S)
        if receiver.thread.is_alive():
            raise DeadlineExceeded(f"heal {receiver.one} was called off, but still writes into the state after {_END_S:g} s")

    def _name(self, view: View, one: Heal) -> str:
        return f"{view.epoch.incarnation}.{one.number}/{view.member(one.replica)}/{self._rank}"
