"""The section of the configuration that says what happens when something dies; see ``schema.py``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from everstep.config.section import Section, Where


class RecoveryConfig(Section):
    enabled: bool = Field(
        True,
        description="false: the first death of a rank ends the run, resumable; nothing is kept apart for a recovery, sums are made in "
        "place, no rank waits for commits.",
    )
    mode: Literal["salvage", "retry", "wait"] = Field(
        "salvage",
        description="After a death in a step, `salvage`: survivors keep what they computed and compute only what died; `retry`: they "
        "compute all of it together, anew; `wait`: they wait for a spare and compute what each would have computed without the death.",
    )
    exact: bool = Field(
        False,
        description="Keep each slot's gradient by itself and add them in a fixed order: the weights are then bitwise independent of "
        "deaths. Costs 4 bytes per parameter and slot; for proofs, not for speed. Needs engine.deterministic on GPUs.",
    )
    standby_links_up_to: int = Field(
        8,
        ge=0,
        description="With at most this many replicas a link is kept ready for each one that may die (one communicator each); with "
        "more, or 0, survivors form a link after the death.",
    )
    quarantine_after: int = Field(
        2,
        ge=0,
        description="Replicas that may die while they compute one and the same slot, before the step goes on without it and its samples "
        "are listed as dropped. A process counts that ended by itself; fault injection and silence do not. Needs as many replicas and "
        "spares besides, to survive that. 0: no limit.",
    )
    non_finite: Literal["skip", "stop"] = Field(
        "skip",
        description="A step whose loss or gradient is not finite is computed once more, slot by slot and by other replicas than before, to "
        "tell a device's fault from bad data. If it is not finite again: `skip` it, with its samples listed and the weights unchanged, or "
        "`stop` the run (exit code 3).",
    )
    min_replicas: int = Field(
        1,
        ge=1,
        description="With fewer living replicas nothing is committed; see recovery.below_minimum.",
    )
    below_minimum: Literal["stop", "wait"] = Field(
        "stop",
        description="With fewer than recovery.min_replicas, and no spare or process that could be started at once: `stop` with a checkpoint "
        "of the committed step (exit code 3), or `wait` for devices to come (back) to the cluster, and stop so after "
        "recovery.below_minimum_wait_s.",
    )
    below_minimum_wait_s: float = Field(
        3600.0,
        gt=0,
        description="How long recovery.below_minimum=wait holds the run.",
    )
    restart_attempts: int = Field(
        5,
        ge=0,
        description="A process is started in the place of each dead one, in the background (launcher ray), and becomes a spare; without "
        "spares its replica comes back so. How often in a row that may fail in one place (the process does not start, or ends by itself "
        "before it took part in a commit) before the place is given up. 0: no process is started.",
    )
    restart_backoff_s: float = Field(
        1.0,
        gt=0,
        description="Seconds before the second try to start a process in a place; doubled for each try after it, up to 60 s.",
    )
    rehearse: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether an idle spare forms a world by itself and makes one step of a single layer, so that libraries are loaded and "
        "kernels compiled before it is needed. `auto`: on GPUs.",
    )
    on_resize: str = Field(
        "keep_batch",
        description="What a step is while fewer replicas take part than layout.replicas: `keep_batch` the same samples, shared out among "
        "them, at the same learning rate. Else each replica's part stays as it is, so the batch is smaller, and the learning rate is "
        "multiplied by the part that is left (`scale_lr_linear`) or its square root (`scale_lr_sqrt`), or is what "
        "`module:function(lr, dealt, replicas)` returns. Counted are the replicas to which the commit of the step before dealt the step. "
        "Recipe sft.",
    )
    preemption_file: Where | None = Field(
        None,
        description="When this file appears on a machine, its ranks are replaced between two steps and no process is started there any more "
        "(launcher ray; looked for every second). SIGTERM does the same to a single process.",
    )
    heartbeat_s: float = Field(1.0, gt=0, description="Seconds between progress reports of a rank.")
    silence_s: float = Field(
        30.0,
        gt=0,
        description="A rank that says nothing for this long (frozen process, lost node) is killed and replaced. While a process comes up, "
        "and takes part in no step yet, it has 30 s at least: loading libraries can hold its interpreter lock for seconds.",
    )
    progress_timeout_s: float = Field(
        120.0,
        gt=0,
        description="A rank that heartbeats but stays in its phase (or owes the result of a call) for this long after its peers, "
        "the ranks of the same position in the other replicas, have left it is killed and replaced; a rank's first step has "
        "recovery.step_timeout_s. Longer than what one replica may lag behind the others (uneven slots).",
    )
    fence_s: float = Field(
        60.0,
        gt=0,
        description="A rank that hears nothing from the coordinator for this long is cut off: it stops contributing, and on a lost "
        "node counts as dead after this time.",
    )
    memory_checkpoint_every: int = Field(
        0,
        ge=0,
        description="Optimizer steps between copies of every rank's state in the shared memory of its node, for when no living replica "
        "holds the last step (with one replica, any death): all go back to the newest copy and repeat the steps since. Costs twice the "
        "state in host memory. 0: none; they go back to the last checkpoint.",
    )
    controller_grace_s: float = Field(
        0.0,
        ge=0,
        description="Seconds for which workers outlive a controller that was killed, keep their state and wait for `everstep train "
        "CONFIG --attach` (or recovery.controller_restarts) to take over; then they end and remove everything. 0: they end with it "
        "(launcher ray).",
    )
    controller_restarts: int = Field(
        0,
        ge=0,
        description="How often `everstep train` starts a new controller by itself when one was killed. Needs "
        "recovery.controller_grace_s.",
    )
    call_timeout_s: float = Field(
        3600.0,
        gt=0,
        description="Deadline of one call of a worker method (rollout, log-probabilities, save), all ranks together (launcher ray).",
    )
    step_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Deadline of one phase of a step (compute, reduce, vote, apply); of what waits for other ranks in it, recovery.progress_timeout_s "
        "more, so that the one that they wait for is found first.",
    )
    link_timeout_s: float = Field(60.0, gt=0, description="Deadline to form a link between replicas.")
    heal_timeout_s: float = Field(
        300.0,
        gt=0,
        description="Deadline to bring one rank to the current step from its peer.",
    )
    heal_backlog_steps: int = Field(
        8,
        ge=0,
        description="A rank that heals takes part in steps meanwhile and keeps their totals (on its device if there is room, else in host memory) to apply "
        "them once it has the state. After so many it makes the others wait for it. 0: they wait from the start. Each costs 4 bytes per trained parameter of "
        "the rank (of its shard).",
    )
    heal_hold_s: float = Field(
        0.05,
        ge=0,
        description="How long the source of a heal waits, before it applies a step, for a heal that may be nearly done; what is not sent "
        "then is copied aside (on its device if there is room, else in host memory).",
    )
    reform_timeout_s: float = Field(
        180.0,
        gt=0,
        description="Deadline to re-form a broken replica around a spare.",
    )

    @property
    def others_timeout_s(self) -> float:
        """For what waits for other ranks in a step: longer than it takes to find, by ``step_timeout_s``, the one that they wait for."""
        return self.step_timeout_s + self.progress_timeout_s
