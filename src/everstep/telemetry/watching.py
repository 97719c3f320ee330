"""Everything by which the lead shows and tells a run while it lasts, begun and ended together: alerts, log, dashboard, pulse."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from everstep.config.schema import Config
from everstep.run_dir import RunDir
from everstep.telemetry import logs
from everstep.telemetry.alerts import Alerts
from everstep.telemetry.dashboard.server import Beside
from everstep.telemetry.status import Pulse
from everstep.telemetry.window import Window


class Watching:
    """``begin`` before any process is started, ``follow`` once there is a group. ``alerts`` may be told of events from the first one on."""

    def __init__(self, config: Config):
        self._config = config
        self._stack = contextlib.ExitStack()
        self.alerts = Alerts(config.alerts, config.run_dir)
        self._stack.callback(self.alerts.close)
        self.dashboard = ""  # its address

    def begin(self, run_dir: RunDir, own_log: bool) -> None:
        """``own_log``: this process is no rank, which has a log already. Raises BadInput if the dashboard cannot listen."""
        log, telemetry = self._config.log, self._config.telemetry
        if own_log:
            handler = logs.start(run_dir.logs / "lead.jsonl", "lead", log.level, log.max_bytes, log.keep)
            self._stack.callback(logs.stop, handler)
        if telemetry.dashboard:
            beside = Beside(run_dir.path, telemetry.dashboard_host, telemetry.dashboard_port)
            self._stack.callback(beside.close)
            self.dashboard = beside.address

    def follow(self, run_dir: RunDir, ask: Callable[[], dict[str, Any]], host: str) -> str:
        """``ask``: the group's state, as ``Group.status`` says it. ``host``: the address at which others may look; returns the whole of it."""
        window = Window(run_dir.path, host)
        self._stack.callback(window.close)
        self._stack.callback(Pulse(run_dir.path, run_dir.attempt, ask, lambda: self.dashboard).close)
        return window.address

    def close(self) -> None:
        """What was told last is delivered, within its deadline."""
        self._stack.close()
