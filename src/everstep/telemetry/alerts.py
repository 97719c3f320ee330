"""Tell somebody: a webhook or a command for typed events, from the lead, on threads of their own.

Whatever a hook does, training goes on: events are put into a bounded queue without waiting; each hook has one thread, each delivery a
deadline; what fails is logged and counted, never raised.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import queue
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.config.watch_schema import AlertConfig
from everstep.telemetry.events import to_json

LOG = logging.getLogger(__name__)
QUEUED = 256     # events that wait for one hook; of more the newest are left out, and counted
CLOSE_S = 10.0   # for what is still queued at the end of a run, all hooks together


class Alerts:
    """``offer`` takes the events of the lead as they are written (rows of the event log); it never waits."""

    def __init__(self, configs: Sequence[AlertConfig], run_dir: str):
        self._hooks = [_Hook(config, run_dir) for config in configs]

    def offer(self, row: Mapping[str, Any]) -> None:
        for hook in self._hooks:
            hook.offer(row)

    def close(self) -> None:
        """What is queued is delivered, as far as it can be in :data:`CLOSE_S`."""
        end = time.monotonic() + CLOSE_S
        for hook in self._hooks:
            hook.finish()
        for hook in self._hooks:
            hook.join(max(0.0, end - time.monotonic()))


class _Hook:
    def __init__(self, config: AlertConfig, run_dir: str):
        self._config, self._run_dir = config, run_dir
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(QUEUED)
        self._told_at: dict[str, float] = {}
        self._skipped: dict[str, int] = {}
        self._lost = 0
        self._over = threading.Event()   # nothing more is offered
        self._given_up = False           # what is queued still is left out
        self._thread = threading.Thread(target=self._loop, name="alerts", daemon=True)
        self._thread.start()

    def offer(self, row: Mapping[str, Any]) -> None:
        if row["event"] not in self._config.events:
            return
        try:
            self._queue.put_nowait(dict(row))
        except queue.Full:
            self._lost += 1

    def finish(self) -> None:
        self._over.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        self._given_up = True
        if (left := self._queue.qsize()) or self._lost or self._thread.is_alive():
            LOG.warning("alerts to %s: %d were left out because it was too slow", self._name, left + self._lost + self._thread.is_alive())

    @property
    def _name(self) -> str:
        return self._config.url or " ".join(self._config.command or ())

    def _loop(self) -> None:
        while not self._given_up:
            try:
                row = self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._over.is_set():
                    return
                continue
            kind, now = row["event"], time.monotonic()
            if self._config.every_s and now - self._told_at.get(kind, float("-inf")) < self._config.every_s:
                self._skipped[kind] = self._skipped.get(kind, 0) + 1
                continue
            self._told_at[kind] = now
            told = row | {"run_dir": self._run_dir, "skipped": self._skipped.pop(kind, 0)}
            told["text"] = text(told)
            deliver: Callable[[dict[str, Any]], None] = self._post if self._config.url else self._run
            try:
                deliver(told)
            except (OSError, http.client.HTTPException, subprocess.SubprocessError, ValueError) as error:  # URLError is an OSError
                LOG.warning("alert %s to %s failed: %s", kind, self._name, error)

    def _post(self, told: dict[str, Any]) -> None:
        assert self._config.url is not None
        request = urllib.request.Request(self._config.url, to_json(told).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self._config.timeout_s):
            pass

    def _run(self, told: dict[str, Any]) -> None:
        assert self._config.command is not None
        env = os.environ | {"EVERSTEP_EVENT": told["event"], "EVERSTEP_TEXT": told["text"]}
        done = subprocess.run(self._config.command, input=json.dumps(told), text=True, env=env, timeout=self._config.timeout_s,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        if done.returncode:
            raise ValueError(f"exit code {done.returncode}: {done.stderr.strip()[-200:]}")


def text(row: Mapping[str, Any]) -> str:
    """One line for people: chat webhooks show the field ``text``."""
    header = ("t_wall", "t_mono", "who", "pid", "host", "epoch", "step", "event", "run_dir", "skipped")
    facts = ", ".join(f"{name} {str(value)[:120]}" for name, value in row.items() if name not in header and not isinstance(value, list | dict))
    where = "" if row.get("step") is None else f" in step {row['step']}"
    more = f" (and {row['skipped']} before it)" if row.get("skipped") else ""
    return f"everstep {row.get('run_dir', '')}: {row['event']}{where}{': ' + facts if facts else ''}{more}"
