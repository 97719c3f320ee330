"""Writes the pages of docs/ that are made from code: ``python -m everstep.telemetry.docs DOCS_FOLDER``.

A test compares them with what is in the repository, so a table can never be older than the code it describes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from everstep.config.explain import config_page
from everstep.config.importing.page import migrating_page
from everstep.telemetry.events import EVENTS
from everstep.telemetry.metrics import METRICS

_MADE = "<!-- Made by `make docs`; edit the table in {source} instead. -->\n\n"


def metrics_page() -> str:
    rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in METRICS.items())
    return (
        _MADE.format(source="src/everstep/telemetry/metrics.py")
        + "# Metrics\n\n"
        + "Written to `RUN/metrics.jsonl` (one line per logged step: `step`, `t_wall`, then the names below) and, unless\n"
        + "`telemetry.tensorboard=false`, to `RUN/tensorboard`. Names are verl's where the meaning is the same; `ft/*` is\n"
        + "this project's. A name under one of these prefixes must be in this table; all other prefixes are free for your\n"
        + "own losses and rewards. When a run is resumed and logs a step again, the newest line of a step counts.\n\n"
        + "| name | meaning |\n|---|---|\n"
        + rows
    )


def events_page() -> str:
    rows = ""
    for name, kind in EVENTS.items():
        header = [field for field, needed in (("epoch", kind.needs_epoch), ("step", kind.needs_step)) if needed]
        fields = ", ".join(f"`{field}`" for field in (*header, *kind.required))
        rows += f"| `{name}` | {kind.by} | {fields} | {kind.meaning} |\n"
    return (
        _MADE.format(source="src/everstep/telemetry/events.py")
        + "# Events\n\n"
        + "`RUN/events/<who>.jsonl`: one append-only file per process, one JSON object per line, one `write` per line. Every\n"
        + "event has `t_wall` (seconds since 1970), `t_mono` (seconds, one clock per machine), `who`, `pid`, `host`, `epoch`,\n"
        + "`step`, `event`, and the fields promised below; more fields may follow. `epoch` is (coordinator incarnation,\n"
        + "counter). A process killed while it writes leaves at most one torn line at the end of its file; the reader leaves\n"
        + "it out and reports it, and refuses any other damage. Which events give which number of the report:\n"
        + "[telemetry.md](telemetry.md).\n\n"
        + "| event | written by | promised fields | meaning |\n|---|---|---|---|\n"
        + rows
    )


PAGES: dict[str, Callable[[], str]] = {"config.md": config_page, "metrics.md": metrics_page, "events.md": events_page, "migrating.md": migrating_page}


def main(folder: Path) -> None:
    for name, make in PAGES.items():
        (folder / name).write_text(make())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
