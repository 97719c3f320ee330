"""A Ray that outlives its driver: what a controller that takes over needs to find it and its actors again, and what ends it.

With ``ray.address`` the cluster is somebody else's, and only the actors and their placement group are apart: detached, under a namespace
of this run. Without it the cluster is of this run alone, started by ``ray start`` and ended by the last controller, or by the watch
(:mod:`everstep.cluster.orphans`) once no controller came in time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import ray

from everstep.cluster.orphans import Watch, kill_all
from everstep.cluster.ray.runtime import join_ray, start_head
from everstep.config.schema import Config


class Apart:
    """``namespace``: of the detached actors."""

    def __init__(self, config: Config, processes: int, token: str, handle: Mapping[str, Any] | None):
        """``handle``: of the cluster of a dead controller; None: a new one. ``token``: names what is new."""
        self._joined = not ray.is_initialized()
        self._ours = handle is None  # whether what is of this run alone ends with this process
        self._watch: Watch | None = None
        self.token = str(handle["token"]) if handle else token
        self.namespace = f"everstep-{self.token}"
        self.folder = str(handle["folder"]) if handle else ""
        self.address = str(handle["address"]) if handle else (config.ray.address or "")
        own = bool(self.folder) if handle else self._joined and not config.ray.address
        if own:
            self.folder = self.folder or tempfile.mkdtemp(prefix="evs-")
            self._watch = Watch(self.token, config.run_dir, config.recovery.controller_grace_s, self.folder)
        try:
            if own and not handle:
                self.address = start_head(self.token, self.folder, processes)
            if self._joined:
                join_ray(self.address, **({"_node_ip_address": "127.0.0.1"} if own else {}))
        except BaseException:  # Ctrl-C, too: a Ray of our own is not left behind
            self.close()
            raise

    def handle(self) -> dict[str, Any]:
        return {"kind": "ray", "address": self.address, "token": self.token, "folder": self.folder}

    def keep(self) -> None:
        """The cluster of a dead controller is this one's from now on."""
        self._ours = True

    def close(self) -> None:
        """Leave the cluster, and end it if it is this run's, unless it is a dead controller's that could not be followed."""
        if self._joined and ray.is_initialized():
            ray.shutdown()
        if self._watch and not self._ours:
            self._watch.leave()
        elif self._watch:
            kill_all(self.token, self.folder)
            shutil.rmtree(self.folder, ignore_errors=True)
            self._watch.close()
