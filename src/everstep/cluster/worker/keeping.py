"""A worker's part in the copies of memory: its own rank's, those that it keeps for ranks of other nodes, and going back to one."""

from __future__ import annotations

import logging
from pathlib import Path

from everstep.checkpoint import flushed, memory, shelf
from everstep.checkpoint.memory import Copy, Stamp
from everstep.checkpoint.saving import inner_layout
from everstep.checkpoint.shelf import Shelf, ShelfError
from everstep.cluster.buddies import announce, buddy_of, shelf_of
from everstep.cluster.worker.run_store import RunStore
from everstep.config.schema import Config
from everstep.layout import Layout
from everstep.recovery.control import Control
from everstep.recovery.heal import State
from everstep.recovery.replica import ReplicaWorld
from everstep.telemetry.events import EventLog

LOG = logging.getLogger(__name__)


class Keeping:
    """``folder``: of this node's copies. Nothing is done unless recovery.memory_checkpoint_every says so."""

    def __init__(self, config: Config, layout: Layout, worker: str, folder: Path, control: Control, store: RunStore, events: EventLog):
        self._every, self._idle_s = config.recovery.memory_checkpoint_every, config.recovery.silence_s
        self._layout, self._worker, self._folder, self._control, self._store, self._events = layout, worker, folder, control, store, events
        self._keeper: memory.Keeper | None = None
        self._shelf: Shelf | None = None
        self._replica, self._rank = -1, -1
        self._world: ReplicaWorld | None = None
        if self._every:
            self._shelf = Shelf(folder, control.local_host, self._idle_s)
            self.announce()

    def announce(self) -> None:
        """Say where this node's copies can be asked for; to the next controller's store too."""
        if self._shelf:
            announce(self._store, self._worker, self._shelf.address)

    def take_place(self, replica: int, rank: int, world: ReplicaWorld) -> None:
        self._replica, self._rank, self._world, self._keeper = replica, rank, world, None
        if self._every:
            about = {"ranks": self._layout.ranks_per_replica, "layout": inner_layout(self._layout)}
            self._keeper = memory.Keeper(self._folder, replica, rank, self._events, self._send, about)

    def is_due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def copy(self, state: State, step: int | None = None) -> None:
        """Called by all ranks of a replica alike. ``step``: only a state of this step. A rank that heals has none to copy.

        No rank begins a copy, and with it breaks its older one, before the last one counts for all of them: one version is always whole
        of every rank. Raises ReplicaBroken.
        """
        if self._keeper is None or self._world is None:
            return
        self._keeper.settle()
        self._world.agree((state.version if state.version is not None else -1,), "a copy in memory")
        if state.version is not None and step in (None, state.version):
            self._keeper.copy(Stamp(state.version, self._control.committed_in(state.version)), state.tensors(), state.scalars())

    def restore(self, state: State, stamp: Stamp, source: shelf.Address | None) -> bool:
        """Go back to a copy: this node's, or one that the shelf at ``source`` has. False if it is there no more; the state is dirty then,
        or as it was."""
        try:
            if source is not None and memory.find(self._folder, self._rank, stamp) is None:
                shelf.get(source, self._rank, stamp, self._folder, self._replica, self._idle_s)
        except ShelfError as error:
            LOG.warning("no copy of step %d: %s", stamp.version, error)
            return False
        if memory.find(self._folder, self._rank, stamp) is None:
            return False
        state.version = None
        path = memory.restore(self._folder, self._rank, stamp, state)
        state.version = stamp.version
        self._events.emit("load", step=stamp.version, path=str(path), fetched_from=source[0] if source else "")
        return True

    def load_flushed(self, folder: Path, state: State) -> bool:
        """Begin from copies that were flushed (:mod:`everstep.checkpoint.flushed`); False if the folder is none of those."""
        if not flushed.is_flushed(folder):
            return False
        stamp = flushed.read(folder).stamp
        assert stamp is not None
        state.version = None
        memory.restore(folder, self._rank, stamp, state)
        state.version = stamp.version
        self._events.emit("load", step=stamp.version, path=str(folder))
        self.copy(state)
        return True

    def _send(self, copy: Copy) -> str:
        """To my buddy, if there is another node; a buddy that is gone has another one named in its place."""
        try:
            buddy = buddy_of(self._store, self._worker)
            address = shelf_of(self._store, buddy) if buddy else None
            if buddy is None or address is None:
                return ""
            shelf.put(address, copy, self._replica, self._rank, self._idle_s)
            return buddy
        except (ShelfError, RuntimeError) as error:  # RuntimeError: the store, which ended with its controller
            LOG.warning("the copy is on this node only: %s", error)
            return ""
