"""The sections of launcher local: torchrun, the replica that a command starts, and the lighthouse that it finds the others by."""

from __future__ import annotations

from pydantic import Field

from everstep.config.section import Section

_DAY_MS = 86_400_000


class LocalConfig(Section):
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of torchrun's rendezvous for `launcher=local`; 0: a free one. `everstep up` gives its replicas this one and those after it.",
    )
    max_restarts: int = Field(
        10,
        ge=0,
        description="Times that torchrun starts the ranks of one replica anew after a death, where there are several replicas.",
    )
    restart_delay_s: float = Field(
        1.0,
        ge=0,
        description="Seconds before such a start; twice as long each time a replica dies within a minute of the one before, up to a minute.",
    )


class ReplicaConfig(Section):
    id: int | None = Field(
        None,
        ge=0,
        description="Which replica the processes of this command are, for `launcher=local` with several (REPLICA_GROUP_ID). Each is started "
        "by a command of its own and found through a lighthouse; `everstep up` starts them all on one machine.",
    )
    count: int | None = Field(
        None,
        ge=1,
        description="Number of replicas; another name for layout.replicas, for commands that start one replica each.",
    )


class LighthouseConfig(Section):
    address: str = Field(
        "",
        description="Of the lighthouse, http://HOST:PORT; empty: TORCHFT_LIGHTHOUSE, else http://127.0.0.1:29510.",
    )
    wait_s: float = Field(
        600.0,
        gt=0,
        description="Seconds that a replica waits for the lighthouse to answer (at the start, and if it died), that the start waits for "
        "enough replicas, and that a run with too few waits for others.",
    )
    min_replicas: int | None = Field(
        None,
        ge=1,
        description="Replicas that a run waits for to begin; to go on it needs recovery.min_replicas (`everstep up`; torchft's min_replicas). "
        "Empty: all.",
    )
    join_timeout_ms: int = Field(
        10_000,
        ge=1,
        le=_DAY_MS,
        description="Milliseconds that the start of a run waits for replicas that send heartbeats but have not asked for a quorum "
        "(`everstep up`; torchft's join_timeout_ms). Nobody waits for who comes later.",
    )
    quorum_tick_ms: int = Field(
        100,
        ge=1,
        le=_DAY_MS,
        description="Milliseconds between looks at the quorum (`everstep up`; torchft's quorum_tick_ms).",
    )
    heartbeat_timeout_ms: int = Field(
        5000,
        ge=1,
        le=_DAY_MS,
        description="Milliseconds without a heartbeat after which torchft counts a replica out (`everstep up`; torchft's heartbeat_timeout_ms).",
    )
