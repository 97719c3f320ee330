"""What would watch nothing, or tell nobody."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from everstep.config.schema import Config
from everstep.errors import ConfigError
from everstep.layout import Layout


def check(config: Config, layout: Layout, environ: Mapping[str, str]) -> None:
    """ConfigError. ``environ``: of this process."""
    if config.watch.rerun_every and layout.replicas < 2:
        raise ConfigError("watch.rerun_every has slots computed again by another replica, and layout.replicas=1 has none; set it to 0, or use watch.check_state_every")
    if config.watch.replace_stragglers and layout.replicas < 2:
        raise ConfigError("watch.replace_stragglers replaces a rank that is slower than its peers, and layout.replicas=1 has none; leave it out")
    elsewhere = config.replica.id is not None and (config.lighthouse.address or environ.get("TORCHFT_LIGHTHOUSE"))  # it is the lighthouse that tells
    for i, alert in enumerate(config.alerts):
        if alert.command and not elsewhere and shutil.which(alert.command[0]) is None:
            raise ConfigError(f"alerts.{i}.command: there is no program {alert.command[0]!r} here (PATH)")
