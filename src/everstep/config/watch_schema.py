"""Sections of the configuration about watching a run: logs, alerts, stragglers, spikes, corruption, diagnosis."""

from __future__ import annotations

import urllib.parse
from typing import Literal

from pydantic import Field, field_validator, model_validator

from everstep.config.levels import parse_levels
from everstep.config.section import Section


class LogConfig(Section):
    """The structured logs, RUN/logs/attempt-N/*.jsonl."""

    level: str = Field(
        "info",
        description="What is logged: one of debug, info, warning, error, then levels of modules, as in `info,recovery=debug,engine=error`. "
        "The environment variable EVERSTEP_LOG replaces it.",
    )
    max_bytes: int = Field(16 << 20, ge=4096, description="A process's structured log is rotated when it reaches this size.")
    keep: int = Field(3, ge=1, description="Rotated log files kept of each process, besides the one that is written.")

    @field_validator("level")
    @classmethod
    def _known(cls, value: str) -> str:
        parse_levels(value)
        return value


class AlertConfig(Section):
    """Whom to tell of what. The lead tells; a hook that is slow or fails never holds training up."""

    events: list[str] = Field(
        min_length=1,
        description="Kinds of events (docs/events.md) that are told, such as death, error, run_end, straggler, corruption, spike, health, stuck, quarantine.",
    )
    url: str | None = Field(None, description="Webhook (http or https): gets a POST with the event as JSON, and a line of `text` in it.")
    command: list[str] | None = Field(
        None, min_length=1, description="Program with its arguments: gets the event as JSON on its standard input, EVERSTEP_EVENT and EVERSTEP_TEXT."
    )
    timeout_s: float = Field(10.0, gt=0, description="Seconds after which one delivery is given up.")
    every_s: float = Field(0.0, ge=0, description="At least so many seconds between two deliveries of one kind; what comes sooner is counted in the next.")

    @field_validator("events")
    @classmethod
    def _kinds(cls, value: list[str]) -> list[str]:
        from everstep.telemetry.events import EVENTS

        unknown = [kind for kind in value if kind not in EVENTS]
        if unknown:
            raise ValueError(f"unknown kind of event {unknown[0]!r}; docs/events.md lists them")
        return value

    @model_validator(mode="after")
    def _one_way(self) -> AlertConfig:
        if (self.url is None) == (self.command is None):
            raise ValueError("an alert needs a url or a command, and not both")
        if self.url is not None:
            _check_url(self.url)
        if self.command is not None and not all(self.command):
            raise ValueError(f"command={self.command}: it has an empty part")
        return self


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is none
        fine = False
    if not fine or any(c.isspace() or not c.isprintable() for c in url):
        raise ValueError(f"url={url}: not a http:// or https:// address")


class WatchConfig(Section):
    """What the lead looks for while a run goes on."""

    straggler_ratio: float = Field(
        1.2, gt=1, description="A rank whose own work takes more than this times the median of its peers' (the ranks of the same position in "
        "the other replicas) is a straggler, once that has gone on for watch.straggler_for_s.",
    )
    straggler_for_s: float = Field(
        60.0, ge=0, description="Seconds for which a rank must have been slow, in the median of its steps, before it is reported.",
    )
    replace_stragglers: bool = Field(
        False,
        description="Replace a reported straggler by a warm spare, at a step boundary; without a spare it stays. Its process ends.",
    )
    spike_ratio: float = Field(
        3.0, ge=0, description="A loss or gradient norm is a spike if it is more than this many times the median of the last steps, more than all of them, and "
        "far outside their spread (six scaled median deviations). 0: off.",
    )
    spike_steps: int = Field(50, ge=8, description="Steps that a spike is compared with.")
    evict_corrupt: bool = Field(
        True,
        description="When train.verify_every finds that the states of replicas differ, and most of them agree: replace the ranks that differ "
        "and go on. false, no majority, or launcher=local: the run ends (exit code 4).",
    )
    check_state_every: int = Field(
        0, ge=0, description="In every so many-th step a rank sums up its state after the commit before, and again before it votes: what changed in between, "
        "changed in its memory. Such a rank is evicted (watch.evict_corrupt) before anything that it computed counts. Costs two readings of "
        "the state. 1: every step; 0: never.",
    )
    rerun_every: int = Field(
        0, ge=0, description="In every so many-th step one slot of each replica is computed by another one, too, and the gradients are compared before the "
        "commit; who computes wrongly is found by computing the step once more, and evicted. Costs one slot more for each replica in such a step, and "
        "a second gradient buffer. 0: never.",
    )
    rerun_tolerance: float = Field(
        1e-3, gt=0, description="Relative difference of the gradient norms of one slot that counts as none, with engine.deterministic=false; else they are "
        "compared bit by bit.",
    )
    admission: Literal["restarts", "all", "never"] = Field(
        "restarts",
        description="`restarts`: a process that is started while the run goes on (in the place of a dead one, on whatever node) first examines its device, as "
        "`everstep doctor` does; one that is unfit is ended, and the next place is tried. `all`: the ranks and spares at the start, too; one that is unfit ends the run then. `never`: devices are taken as they are. With launcher=local the ranks of a replica do it before it joins, and one that is unfit keeps it out.",
    )
    admission_s: float = Field(0.2, ge=0, description="Seconds for each measurement of watch.admission, beside one round of each check.")
    agent_every_s: float = Field(
        1.0, ge=0, description="Seconds between two looks of a node's agent at its ranks, devices, memory, disks, network links and the kernel's log, "
        "at least 0.05. 0: no agents; a death on another node has no evidence of its node then.",
    )
    stuck_after_s: float = Field(
        10.0, gt=0, description="An agent reports a rank as stuck when no thread of its Python has run for so many seconds, or its device has not answered for "
        "so long. Time in which a thread of it was ready to run and got no CPU is added. A report only: whoever is to be replaced is found by recovery.silence_s and recovery.progress_timeout_s.",
    )
    diagnose: bool = Field(
        True,
        description="Before a rank that hangs or is silent is killed, write the Python stacks of all ranks, and torch's record of their last "
        "collectives, to RUN/diagnosis.",
    )

    @field_validator("agent_every_s")
    @classmethod
    def _not_all_the_time(cls, value: float) -> float:
        if 0 < value < 0.05:
            raise ValueError("below 0.05 an agent would take much of a core; give 0 for none")
        return value
