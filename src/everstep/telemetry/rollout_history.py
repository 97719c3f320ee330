"""What the history checker looks at in the logs of rollout engines: nobody serves weights that it does not hold whole and unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.telemetry.events import Event, of_kind


def stale_serving(events: Sequence[Event]) -> tuple[int, str]:
    """How many completions were looked at, and the first that was made by weights which its engine did not hold; "" if none was.

    Each process has its own state: no weights at its start, none while it sleeps or from the beginning of a transfer until its end, and
    then those of the committed step that the transfer was of. When the run goes back to an older step, what everybody holds is void; who is in
    the middle of something may complete it, but no step may use it.
    """
    holds: dict[tuple[str, int], int | None] = {}
    outlived = set[tuple[str, int]]()  # processes whose weights are void
    void = dict[str, str]()            # sample -> what is wrong with it, if it is used
    committed, looked_at = 0, 0
    for event in of_kind(events, "run_start", "commit", "rollback", "rollout_sync_begin", "rollout_sync", "rollout_sleep", "rollout_made"):
        process = event.who, event.pid
        if event.event in ("run_start", "commit"):
            committed = event.step or 0  # a start uses nothing: it has no samples
            if used := [said for sample in event.get("samples", ()) if (said := void.get(_of_prompt(sample)))]:
                return looked_at, f"step {event.step} used what {used[0]}"
        elif event.event == "rollback":
            committed, outlived = event.step or 0, set(holds)
        elif event.event in ("rollout_sync_begin", "rollout_sleep"):
            holds[process] = None
            outlived.discard(process)
        elif event.event == "rollout_sync":
            if event["kind"] != "base":
                holds[process] = event.step
        else:
            looked_at += len(event["samples"])
            if holds.get(process) is None or holds[process] != event["version"]:
                return looked_at, (f"{event.who} (process {event.pid}) completed {event['samples'][:2]} by weights of step {event['version']}, "
                                   f"and held {'none' if holds.get(process) is None else f'those of step {holds[process]}'}")
            if process in outlived:
                said = f"{event.who} completed by weights of step {event['version']} from before the run went back"
                void |= dict.fromkeys(map(_of_prompt, event["samples"]), said)
                continue
            for sample in event["samples"]:
                void.pop(_of_prompt(sample), None)
            if event["version"] > committed:
                return looked_at, f"{event.who} served weights of step {event['version']}, when step {committed} was the last committed one"
    return looked_at, ""


def _of_prompt(sample: str) -> str:
    """A completion by its prompt, 0/17#3: a step's samples have iteration and update before it."""
    return "/".join(sample.split("/")[-2:])
