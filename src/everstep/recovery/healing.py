"""The heals of one rank: which streams a view asks for, as their source or as the joiner."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from everstep.errors import DeadlineExceeded
from everstep.recovery import heal
from everstep.recovery.view import View
from everstep.telemetry.events import EventLog


class Healing:
    """``host``: the address of this machine that the others can reach."""

    def __init__(
        self, replica: int, rank: int, store: dist.Store, host: str, state: heal.State, timeout_s: float, events: EventLog
    ):
        self._replica, self._rank, self._store, self._host = replica, rank, store, host
        self._state, self._timeout_s, self._events = state, timeout_s, events
        self._sender: threading.Thread | None = None
        self._senders: list[threading.Thread] = []  # of this step and of voided attempts: those that may still read the state

    def receive(self, view: View, stale: Callable[[], bool]) -> heal.Healed:
        """Hold version ``view.committed``, from my position's peer. Raises LinkBroken if the view is overtaken or the source is gone."""
        with heal.HealStream(self._name(view, self._replica), self._store, self._timeout_s, stale) as stream:
            return heal.receive(stream.join(), self._state, view.committed)

    def serve(self, view: View, stale: Callable[[], bool]) -> None:
        """If I am the source of joiners, stream my state in the background."""
        joiners = [r for r in sorted(view.healing) if view.heal_source(r) == self._replica]
        if joiners:
            self._sender = threading.Thread(target=self._send, args=(view, joiners, stale), name="heal-source", daemon=True)
            self._senders = [sender for sender in self._senders if sender.is_alive()] + [self._sender]
            self._sender.start()

    def finish(self) -> None:
        """The joiner reduces only once it is healed, so nothing is lost by waiting here; and no kernel of the link spins on
        this device while the last chunks are copied off it."""
        sender, self._sender = self._sender, None
        if sender:
            sender.join(self._timeout_s)

    def forget(self) -> None:
        """The step is over. A sender of a voided attempt ends by itself: its epoch is over."""
        self._sender = None

    def settle(self) -> None:
        """Between steps, before the state moves to other memory: wait until nobody reads it any more. A sender of a voided attempt
        ends when it sees that; a step need not wait for that. Raises DeadlineExceeded."""
        for sender in self._senders:
            sender.join(self._timeout_s)
            if sender.is_alive():
                raise DeadlineExceeded(
                    f"a heal from this rank was called off, but reads its state after {self._timeout_s:g} s (recovery.heal_timeout_s) still"
                )
        self._senders = []

    def _send(self, view: View, joiners: list[int], stale: Callable[[], bool]) -> None:
        for joiner in joiners:
            name = self._name(view, joiner)
            try:
                with heal.HealStream(name, self._store, self._timeout_s, stale) as stream:
                    heal.send(stream.serve(self._host), self._state, view.committed)
            except Exception as error:  # the end of a thread; the joiner sees its connection close, and reports that
                if not stale():  # an attempt that is over needs no sender
                    self._events.emit("error", step=view.committed, epoch=view.epoch.key, error=type(error).__name__,
                                      message=f"heal source {name}: {error}")

    def _name(self, view: View, joiner: int) -> str:
        return f"{view.epoch}/{view.member(joiner)}/{self._rank}"
