"""What the history checker looks at in the logs of rollout engines: nobody serves weights that it does not hold whole and unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.telemetry.events import Event, of_kind


def stale_serving(events: Sequence[Event]) -> tuple[int, str]:
    """How many completions were looked at, and the first that was made by weights which its engine did not hold; "" if none was.

    Each process has its own state: no weights at its start, none while it sleeps or from the beginning of a transfer until its end, and
    then those of the committed step that the transfer was of.
    """
    holds: dict[tuple[str, int], int | None] = {}
    committed, looked_at = 0, 0
    for event in of_kind(events, "run_start", "commit", "rollout_sync_begin", "rollout_sync", "rollout_sleep", "rollout_made"):
        process = event.who, event.pid
        if event.event in ("run_start", "commit"):
            committed = event.step or 0
        elif event.event in ("rollout_sync_begin", "rollout_sleep"):
            holds[process] = None
        elif event.event == "rollout_sync":
            if event["kind"] != "base":
                holds[process] = event.step
        else:
            looked_at += len(event["samples"])
            if holds.get(process) is None or holds[process] != event["version"]:
                return looked_at, (f"{event.who} (process {event.pid}) completed {event['samples'][:2]} by weights of step {event['version']}, "
                                   f"and held {'none' if holds.get(process) is None else f'those of step {holds[process]}'}")
            if event["version"] > committed:
                return looked_at, f"{event.who} served weights of step {event['version']}, when step {committed} was the last committed one"
    return looked_at, ""
