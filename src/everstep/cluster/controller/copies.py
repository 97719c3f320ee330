"""What the controller knows of the copies in the nodes' memory: who keeps whose, which node has what, and what becomes of them at the end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence

from everstep.checkpoint import flushed, memory, shelf
from everstep.checkpoint.memory import Stamp
from everstep.checkpoint.shelf import Address, ShelfError
from everstep.cluster import janitor
from everstep.cluster.buddies import BUDDIES, Store, choose_buddies, shelf_of
from everstep.cluster.host import WorkerInfo
from everstep.config.schema import Config
from everstep.recovery.view import Kind, Record
from everstep.run_dir import RunDir


class Copies:
    """``infos``: the workers that were started; ``gone(worker)``: whether it is known to be dead; ``spares()``: the warm ones."""

    def __init__(
        self, config: Config, run_dir: RunDir, infos: Callable[[], Mapping[str, WorkerInfo]], gone: Callable[[str], bool],
        spares: Callable[[], Sequence[str]],
    ):
        self._recovery, self._infos, self._gone, self._spares = config.recovery, infos, gone, spares
        self._folder = memory.folder_of(run_dir.path, run_dir.attempt)
        self._flush_to = flushed.folder_of(run_dir.path, run_dir.attempt)
        self._store: Store | None = None
        self._last: tuple[frozenset[str], frozenset[str]] | None = None
        self._fd: int | None = None
        self.rollbacks: list[tuple[tuple[int, int], int]] = []  # (epoch, step) of each

    @property
    def made(self) -> bool:
        return self._recovery.memory_checkpoint_every > 0

    def open(self, store: Store) -> None:
        """Before workers are started."""
        self._store = store
        if self.made and memory.ROOT.is_dir():
            self._fd = janitor.enter(self._folder, self._flush_to, self._recovery.controller_grace_s)

    def recorded(self, record: Record) -> None:
        """Membership may have changed: say who keeps whose copies."""
        if record.kind is Kind.ROLLBACK:
            self.rollbacks.append((record.view.epoch.key, record.step))
        if not self.made or self._store is None or record.kind is Kind.BUILD:
            return
        infos = self._infos()
        ranks = [w for m in record.view.members for w in m.workers if w in infos and not self._gone(w)]
        spares = [w for w in self._spares() if w in infos and not self._gone(w)]
        now = frozenset(ranks), frozenset(spares)
        if now != self._last:
            self._last = now
            self._store.set(BUDDIES, json.dumps(choose_buddies(ranks, spares, {w: infos[w].node_id for w in (*ranks, *spares)})))

    def found(self) -> dict[int, dict[Stamp, list[str]]]:
        """By rank of a replica and version: workers on whose nodes a whole copy is. One of each node is asked; one that does not answer
        has none."""
        found: dict[int, dict[Stamp, list[str]]] = {}
        for worker, address in self._one_of_each_node():
            with contextlib.suppress(ShelfError):
                for rank, stamp in shelf.copies_at(address, self._recovery.silence_s):
                    if stamp.stands(self.rollbacks):
                        found.setdefault(rank, {}).setdefault(stamp, []).append(worker)
        return found

    def flush(self) -> None:
        """The run ends and cannot go on by itself: write the copies of all nodes to the disk, for resume=auto."""
        if self._fd is None:
            return
        here = socket.gethostname()
        with contextlib.suppress(OSError):  # no room: the run ends all the same, and says from where it goes on
            flushed.write(self._folder, self._flush_to)
        for worker, address in self._one_of_each_node():
            if self._infos()[worker].host != here:
                with contextlib.suppress(ShelfError):
                    shelf.flush(address, self._flush_to, self._recovery.silence_s)

    def close(self) -> None:
        """While workers live still: free the memory of all nodes."""
        if self._fd is None:
            return
        here = socket.gethostname()
        for worker, address in self._one_of_each_node():
            if self._infos()[worker].host != here:
                with contextlib.suppress(ShelfError):  # its janitor will
                    shelf.remove(address, self._recovery.silence_s)

    def closed(self) -> None:
        """Once no worker lives any more: what is on this machine goes, and its janitor."""
        if self._fd is not None:
            memory.remove(self._folder)
        self.leave()

    def leave(self) -> None:
        """They are somebody else's: what there is stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._store = None

    def _one_of_each_node(self) -> list[tuple[str, Address]]:
        chosen: dict[str, tuple[str, Address]] = {}
        for worker, info in dict(self._infos()).items():
            if info.node_id not in chosen and not self._gone(worker) and (address := self.at(worker)):
                chosen[info.node_id] = worker, address
        return list(chosen.values())

    def at(self, worker: str) -> Address | None:
        """Of its shelf."""
        return shelf_of(self._store, worker) if self._store else None

