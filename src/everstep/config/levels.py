"""How much is logged, as text: ``info,recovery=debug`` is a level for everything, then levels for modules below ``everstep`` (``recovery``,
``cluster.worker``), of which the longest that fits counts."""

from __future__ import annotations

LEVELS = ("debug", "info", "warning", "error")
ROOT = "everstep"


def parse_levels(text: str) -> dict[str, str]:
    """Module -> level; "" is everything. Raises ValueError."""
    levels: dict[str, str] = {"": "info"}
    for part in filter(None, (part.strip() for part in text.split(","))):
        module, equals, level = part.rpartition("=")
        if level.lower() not in LEVELS or (equals and not module):
            raise ValueError(f"{part!r} is no level: use {', '.join(LEVELS)}, or MODULE=LEVEL as in recovery=debug")
        levels[module.removeprefix(ROOT + ".")] = level.lower()
    return levels
