"""The registry of events: what each means, who writes it, and the fields that a reader may rely on (see ``events.py``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EventKind:
    """One line of the registry: what the event means, who writes it, and the fields a reader may rely on."""

    meaning: str
    by: str  # "lead" (the process that decides views and commits), "rank", "agent", or "both"
    required: tuple[str, ...] = ()
    needs_step: bool = False
    needs_epoch: bool = False


def _kind(by: str, meaning: str, required: str = "", *, step: bool = False, epoch: bool = False) -> EventKind:
    return EventKind(meaning, by, tuple(required.split()), needs_step=step, needs_epoch=epoch)


# Units: *_s and `seconds` seconds, *_bytes bytes. `replica`, `rank`: the position concerned (not always the
# writer). `members`: replicas that take part. `samples`: sample ids; a sample used in several passes of one
# RL iteration is told apart by the optional fields `iteration`, `model` (actor, critic), `rl_pass` and `mini_batch` of begin.
EVENTS: dict[str, EventKind] = {
    # a run
    "run_start": _kind(
        "lead",
        "The run begins or resumes; `step` is the last committed step it starts from.",
        "attempt recipe launcher replicas spares",
        step=True,
    ),
    "run_end": _kind("lead", "The run ended; `status` is done, failed or interrupted.", "status"),
    "process_start": _kind("rank", "A worker process is up (imports done, device ready), not yet placed.", "device"),
    "form": _kind(
        "rank",
        "The process took a place in a replica and joined its process groups.",
        "replica rank",
        epoch=True,
    ),
    "release": _kind("rank", "The process left its replica's process groups (broken, or the run ends).", "replica rank"),
    "model_ready": _kind(
        "rank",
        "Model and optimizer hold weights; `source`: pretrained, random, heal, checkpoint.",
        "replica rank source",
    ),
    "call": _kind(
        "lead",
        "A worker method was called through a dispatch; bytes sent and seconds of the whole call.",
        "method dispatch sent_bytes seconds",
    ),
    "stage": _kind(
        "lead",
        "A stage of an RL iteration is over; `on`: it ran on the ranks, or in the lead beside them; `after_s`: when it began, from the "
        "iteration's begin.",
        "name iteration on after_s seconds",
        step=True,
    ),
    "metrics": _kind("lead", "The metrics of a step, as written to metrics.jsonl.", "values", step=True),
    # a step transaction
    "begin": _kind(
        "lead",
        "A step begins; `samples`: all of its samples, over all members; `lr`: its learning rate.",
        "members samples",
        step=True,
        epoch=True,
    ),
    "compute": _kind(
        "rank",
        "The rank starts forward/backward of slots: of those dealt to it, or (`salvage`) of those that died with their owner.",
        "replica rank slots deal salvage",
        step=True,
        epoch=True,
    ),
    "computed": _kind(
        "rank",
        "The rank holds the gradient sums of these slots.",
        "replica rank slots deal salvage seconds",
        step=True,
        epoch=True,
    ),
    "inner_step": _kind(
        "rank",
        "Semi-synchronous training: the rank made inner step `inner` (from 0) of the `of` of a round, on these slots.",
        "replica rank inner of slots seconds",
        step=True,
    ),
    "sent_ahead": _kind(
        "rank",
        "Streaming DiLoCo: what a fragment moved is under way, before inner step `inner` (from 0) of the round.",
        "replica rank inner",
        step=True,
    ),
    "link_used": _kind(
        "rank",
        "The rank takes a link for this view; `built`: it was ready, as a standby or a joiner's (else it was formed now).",
        "replica rank link built",
        step=True,
        epoch=True,
    ),
    "reduce": _kind("rank", "The rank has issued the collectives that sum the gradients.", "replica rank", step=True, epoch=True),
    "reduced": _kind("rank", "These collectives are complete; the rank holds the total.", "replica rank", step=True, epoch=True),
    "vote": _kind(
        "rank",
        "The rank holds the total and says so; `ledger`: the slots in it; `held`: those of this replica.",
        "replica rank ledger held deal divisor finite",
        step=True,
        epoch=True,
    ),
    "void": _kind("both", "An attempt at a step was given up; nothing of it counts.", "cause", step=True, epoch=True),
    "commit": _kind(
        "lead",
        "The step is durably recorded. `kind`: apply, or skip (samples used up, weights unchanged). `members` and those among whom "
        "slots are `dealt` are of the next step, and so are its slots that are `quarantined`. `dropped`: samples of slots that the total "
        "lacks (quarantine).",
        "kind members samples divisor deal dealt",
        step=True,
        epoch=True,
    ),
    "non_finite": _kind(
        "lead",
        "The total of a step was not finite: because of which `slots` and `samples`, computed by which `ranks` (REPLICA/RANK). `verdict`: "
        "again (it is computed once more, by others), transient (it was finite then), data (the same slots, by other ranks), unclear.",
        "verdict slots ranks samples",
        step=True,
        epoch=True,
    ),
    "apply": _kind("rank", "The optimizer applied the committed total, in so many `seconds`.", "replica rank seconds", step=True, epoch=True),
    "skip": _kind("rank", "The rank passed over a commit of kind skip.", "replica rank", step=True, epoch=True),
    "drop": _kind("lead", "Samples that will never be used, and why.", "samples reason"),
    "reward_failed": _kind("both", "Reward functions failed for these samples; `action`: reward.on_error.", "samples reasons action"),
    "tracker_failed": _kind("lead", "A tracker (TensorBoard, wandb, MLflow) failed and is left out from now on.", "tracker reason"),
    "verify": _kind("lead", "The state hashes of all ranks were compared.", "equal hashes", step=True),
    # rollout engines
    "rollout_start": _kind("lead", "A rollout engine was started in the place of a dead one, or (\"\") as one more; it has no weights yet.", "engine instead_of"),
    "rollout_sync_begin": _kind(
        "rank", "A rollout engine begins to get weights of `step`; until it has them all it holds none.", "engine kind", step=True
    ),
    "rollout_made": _kind(
        "rank", "A rollout engine completed samples; `version`: the committed step of the weights it holds.", "engine samples version"
    ),
    "rollout_sync": _kind(
        "rank",
        "A rollout engine got weights. `kind`: all of them, the frozen base (LoRA), or adapters, with which it serves `step`. `way`: from device to "
        "device, or through host memory. `transfer`: of `seconds`, those in which they came; in the others it connects and wakes.",
        "engine kind nbytes seconds transfer way",
        step=True,
    ),
    "rollout_dropped": _kind(
        "lead", "Engines died of these samples, and nobody will complete them: they weigh nothing in the step that they are part of.", "samples reason"
    ),
    "rollout_moved": _kind("lead", "A rollout engine was slow, and idle ones go on with what it had; `seconds`: of its call so far.", "engine samples seconds"),
    "rollout_sleep": _kind("rank", "A rollout engine left the device to the rank it shares it with (rollout.colocated); it holds no weights.", "engine"),
    "rollout_start_failed": _kind("lead", "A rollout engine did not start; another attempt follows after `again_s`, or (null) none.", "engine cause again_s"),
    "rollout_leave": _kind("lead", "A rollout engine was asked to leave: `requeued` sequences go on elsewhere, with what it had made of them.", "engine requeued"),
    "rollout_death": _kind(
        "lead", "A rollout engine died: `requeued` sequences go on elsewhere, with what it had made of them.", "engine cause requeued dropped"
    ),
    # membership
    "view": _kind(
        "lead",
        "A new view is in force. `dealt`: among whom the step's slots are divided (`shift`: by so many places otherwise than usual); a new `deal` number empties all ledgers. "
        "`quarantined`: slots of the step that nobody computes any more.",
        "members cause deal dealt",
        epoch=True,
    ),
    "halt": _kind(
        "lead",
        "Too few members for good: the step after `step` was given up; `members` hold `step`.",
        "members cause",
        step=True,
        epoch=True,
    ),
    "obey": _kind("rank", "The rank saw a new view and switched to it.", "replica rank", epoch=True),
    "fault": _kind(
        "both",
        "A fault is injected now, or a moment later; `done`: what, `found`: where the victim was.",
        "replica rank kind phase done found",
        step=True,
    ),
    "death": _kind(
        "lead",
        "The death or silence of a rank was noticed; epoch and step are those in force at that moment.",
        "replica rank cause",
        step=True,
        epoch=True,
    ),
    "expel": _kind("lead", "A silent rank was killed and confirmed dead.", "replica rank cause"),
    "fenced": _kind(
        "rank",
        "The process heard nothing from the coordinator for recovery.fence_s and stopped contributing.",
        "replica rank",
        epoch=True,
    ),
    "takeover": _kind(
        "lead",
        "Another controller, or lighthouse, took over from a dead one, after `step`. `members`: replicas that hold it, `workers`: those that answered.",
        "members workers incarnation seconds",
        step=True,
        epoch=True,
    ),
    "adopted": _kind("rank", "The process, whose coordinator was gone, obeys another one now.", "incarnation"),
    "rollback": _kind(
        "lead",
        "No living replica held the last committed step: members went back to `step`, commits after it are void and their samples used "
        "again.",
        "members cause",
        step=True,
        epoch=True,
    ),
    "spare_used": _kind("lead", "A spare takes the place of a dead rank.", "replica rank spare"),
    "spare_ready": _kind("lead", "A spare is warm; `spares` counts the warm ones.", "spares"),
    "rehearsed": _kind("rank", "A spare has made a step of one layer by itself: libraries are loaded, kernels compiled.", "seconds"),
    "leave": _kind("lead", "The worker is to leave (drain, preemption notice), between two steps.", "replica rank worker cause"),
    "retire": _kind("lead", "The worker, which belongs to no member any more, ends; that is no death.", "replica rank worker cause"),
    "restart": _kind(
        "lead",
        "A process is being started in the place of the dead worker `after`; `attempt` counts those that failed there in a row.",
        "after attempt",
    ),
    "no_room": _kind("lead", "It is not, for there is no room (`why`); that is looked for again and again, until there is.", "after why"),
    "link_build": _kind("lead", "A link is being built over these members.", "link members"),
    "link_ready": _kind("both", "All members acknowledged the link (lead), or this rank did (rank).", "link members"),
    "heal_start": _kind(
        "rank",
        "The rank begins to receive its peer's state; `source`: the peer's replica.",
        "replica rank source",
        step=True,
    ),
    "heal_done": _kind(
        "rank",
        "The rank holds the state of `step`, verified.",
        "replica rank source heal_bytes seconds",
        step=True,
    ),
    "keep": _kind(
        "rank",
        "A rank that heals keeps the committed total of the step, to apply it later; `kept` counts what it keeps by now.",
        "replica rank kept",
        step=True,
        epoch=True,
    ),
    "join": _kind(
        "lead",
        "Healed replicas take part from the next step on; `members`: all that do, them included.",
        "replica members",
        step=True,
        epoch=True,
    ),
    # disk
    "save": _kind(
        "lead",
        "A checkpoint is complete and its pointer names it; `seconds` since it began, `blocked_s`: training waited for that.",
        "path checkpoint_bytes seconds",
        step=True,
    ),
    "save_begin": _kind("lead", "All `ranks` have begun to save their share of the step; training goes on.", "path ranks seconds", step=True),
    "save_postponed": _kind("lead", "A checkpoint is due, but the one before it is not complete yet.", step=True),
    "save_awaited": _kind("rank", "A rank waited with a change of its state until the copy for a checkpoint was made.", "seconds"),
    "save_retried": _kind("both", "Storage refused something; it is tried again (checkpoint.retry_s). `rank` -1: the lead.", "rank cause", step=True),
    "save_failed": _kind("lead", "A checkpoint was given up; training goes on and another is tried `again_in_s` later.", "cause again_in_s", step=True),
    "load": _kind("both", "State was read from a checkpoint.", "path", step=True),
    "delete": _kind("lead", "An older checkpoint was removed.", "path"),
    "memory_copy": _kind(
        "rank",
        "A copy of this rank's state in its node's memory is whole; `seconds` it stood still for it, `background_s` until it was sealed. "
        "`buddy`: the worker of another node that has it too, after `sent_s`; empty: nobody.",
        "copy_bytes seconds background_s buddy sent_s",
        step=True,
    ),
    # what is seen by watching
    "straggler": _kind(
        "lead",
        "A rank is slower than its peers for watch.straggler_for_s: in which phase, how many times (`ratio`), by how many seconds of a step "
        "(`excess_s`). `action`: reported, or replaced by a spare.",
        "replica rank phase ratio excess_s action",
        step=True,
    ),
    "corruption": _kind(
        "both",
        "What the rank holds or computes is wrong. `found`: comparison (its state differs from that which most replicas have at its position), at rest "
        "(its state changed in memory between two commits; it says so itself), rerun (others computed another gradient of the same slot). "
        "`action`: evicted, or none (the run ends).",
        "replica rank action found",
        step=True,
    ),
    "admitted": _kind("both", "A new process examined its device (watch.admission) and may become a spare, or with launcher=local join with its replica; `checks`: state and numbers of each.", "worker seconds checks"),
    "refused": _kind("both", "A new process was ended, because its device failed a check (`cause`); the next place is tried (launcher=local: its replica stays out).", "worker node checks cause"),
    "spike": _kind("lead", "A loss or gradient norm jumped; `usual`: the median of the steps before.", "metric value usual", step=True),
    "failure": _kind(
        "lead",
        "What the death of a process was: `failure_class` is gpu, host, network, dependency, software, data or maintenance, with the "
        "`evidence` of its node.",
        "replica rank failure_class evidence",
        step=True,
    ),
    "agent": _kind(
        "both", "The agent of a `node` is up, down (it ended in order), or lost; `sees`: what it can read there. By the agent, and by the lead that hears it.",
        "node state sees",
    ),
    "health": _kind(
        "both",
        "A node's agent found `what`; `severity`: warning, bad, or ok: it is not so any more. `failure_class` as of a failure, `device`: GPU, path or "
        "interface concerned. By the agent at once, by the lead when it was told.",
        "node failure_class severity what device",
    ),
    "stuck": _kind(
        "both",
        "A rank does not move, says the agent of its node: because of its `process`, its `device`, or a `collective` (`what`), `why`, for `for_s`. "
        "`sure`: it cannot be slow work; `says`: its progress page.",
        "node worker worker_pid replica rank what sure why for_s says",
        step=True,
    ),
    "rank_end": _kind(
        "agent", "The process of a rank ended; `says`: where it was, by its progress page.", "node worker worker_pid replica rank says", step=True,
    ),
    "quarantine": _kind(
        "both",
        "A `device` (UUID; NVML's `index`) of a node is sick and not used any more: `why`; `workers` on it leave.",
        "node device index why workers",
    ),
    "diagnosis": _kind("lead", "Before a rank was killed, what all ranks were doing was written to `path`.", "replica rank path", step=True),
    # trouble that is no fault of a rank
    "error": _kind("both", "An error ended the work of this process.", "error message"),
    # written by the log itself
    "torn_tail": _kind("both", "The line before this one was cut by a death; `tail_bytes`: its length.", "tail_bytes"),
}
