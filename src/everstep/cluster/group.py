"""What a recipe sees of the cluster: a group of replicas with a handful of verbs. No process, no socket, no rank.

``launcher=ray`` (:mod:`everstep.cluster.controller.controller`): the recipe runs once, in the controller. ``launcher=local``
(:mod:`everstep.cluster.local.group`): the recipe runs in every rank, each call does this rank's part, and results are exchanged so
that every rank sees the same ones. A recipe written against this module cannot tell the difference, as long as what it does depends on
nothing but its configuration, its state and the results of its calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import Config
from everstep.engine.loss import LossSpec
from everstep.layout import Layout
from everstep.rl.rollout import Response, Sampling

T = TypeVar("T")
Role = Literal["actor", "critic"]  # of the models that a rank may hold


@dataclass(frozen=True)
class StepResult:
    """One committed optimizer step. ``metrics``: the loss's metrics, each divided by its own global weight."""

    step: int
    applied: bool                 # False: the gradient was not finite twice; weights unchanged, samples listed as dropped
    loss: float
    divisor: float                # tokens or sequences, whatever the loss is averaged over
    grad_norm: float              # before clipping
    lr: float
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # per phase, of the slowest rank
    attempts: int = 1
    slots: int = 0
    slots_redone: int = 0
    members: tuple[int, ...] = ()
    link_bytes: float = 0.0       # sent over the link by the ranks of one replica, mean over replicas
    memory_gb: dict[str, float] = field(default_factory=dict)  # by the name of the metric, of the rank that has most in use


class Group(Protocol):
    """A running group of replicas."""

    config: Config
    layout: Layout
    recipe_state: dict[str, Any]  # the recipe's at the step from which the group went on (checkpoint, takeover, rollback); empty at the start
    dispatch_bytes: int           # sent to the workers for calls and steps so far
    dispatch_seconds: float       # spent in sending it
    closing: contextlib.ExitStack  # what else ends with the group, after it
    address: str                  # of this machine, as those reach it who look at the run

    @property
    def is_lead(self) -> bool:
        """Whether this process prints, logs and writes files for the run."""

    @property
    def bookmarked(self) -> dict[str, Any]:
        """What was last marked, in a life that joined a running recipe; else empty."""

    @property
    def unfired_faults(self) -> list[str]:
        """Faults of the schedule that have not happened (so far), one line each; the lead knows."""

    @property
    def committed_step(self) -> int:
        """The last committed optimizer step."""

    @property
    def dealt_replicas(self) -> int:
        """To how many replicas the next step was dealt by the commit record of the last one (at first: by the first view). Later deaths
        do not change it."""

    def call(self, dispatch: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a public method of every worker through a dispatch (``mesh``, ``pass_through`` or a registered one).

        The method must be safe to repeat: if a rank dies meanwhile, the call is made again on the replicas that are left.
        Raises WorkerFailed if the method raises, NotEnoughReplicas if nobody is left.
        """

    def rollout(self, prompts: TrainingBatch, sampling: Sampling) -> TrainingBatch:
        """A completion for every row of ``prompts``, by the committed weights, laid out as :func:`everstep.rl.rollout.assemble` says.

        By the ranks themselves, or by rollout engines (``rollout.engines``). Samples that no engine could complete are
        recorded, and have an empty completion, which weighs nothing in training.
        """

    def rollout_so_far(self, prompts: TrainingBatch) -> dict[str, Response]:
        """What rollout engines have made of these since ``rollout_ahead``, complete or not."""

    def rollout_ahead(self, prompts: TrainingBatch, sampling: Sampling, made: Mapping[str, Response] | None = None) -> None:
        """Let rollout engines begin with these, by the weights that are committed now; :meth:`rollout` of the same prompts takes
        what they made. What is unfinished when newer weights come goes on under them, each token saying which made it. ``made``: what
        they have already (``rollout_so_far``, before the run was resumed). Without engines nothing happens."""

    def train_step(
        self, batch: TrainingBatch, loss: LossSpec, lr: float, temperature: float = 1.0, role: Role = "actor",
        about: Mapping[str, Any] | None = None, state: dict[str, Any] | None = None,
    ) -> StepResult:
        """One step transaction over ``batch`` (all of it, over all replicas). Returns after its commit was applied.

        ``role``: the model that is trained; ``critic`` only with recipe=ppo, its loss is given values. Transactions of both have one
        sequence of numbers. ``about``: what the step is to the recipe (iteration, pass, mini-batch), for the event log. ``state``: what
        ``recipe_state`` shall be for whoever goes on after exactly this step without a checkpoint (JSON, small: it is part of the commit
        record). Raises RolledBack, which is the driver's business.
        """

    def enter_stage(self, name: str) -> None:
        """Say that the recipe enters this stage of an RL iteration: for whoever watches, and for fault injection."""

    def train_round(
        self, batches: Sequence[TrainingBatch], loss: LossSpec, lrs: Sequence[float], temperature: float = 1.0, rollout: LossSpec | None = None,
        state: dict[str, Any] | None = None,
    ) -> StepResult:
        """One round of semi-synchronous training (``semisync.method``), which is one transaction: a batch, over all replicas, and a
        learning rate for each inner step. Each replica makes the steps on its share; then a fragment of the weights is synchronised.

        ``rollout``: a factory of an everstep.cluster.worker.island.Rollout; ``batches`` are then prompts, of which each replica makes its samples
        with the weights that it has by then. ``state``: as in ``train_step``. Loss and metrics are over all inner steps, ``grad_norm`` is the mean pseudo-gradient's.
        """

    def once(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` computed in one place, its result known everywhere (rewards, files, anything not repeatable)."""

    def save(self, recipe_state: dict[str, Any], wait: bool = True) -> Path | None:
        """A checkpoint of the committed step. ``wait``: until it is complete, and return where it is; else it is completed while
        training goes on, and None is returned. One that is on its way already is waited for. Raises CheckpointError."""

    def save_wanted(self, due: bool) -> bool:
        """Whether a checkpoint should begin now: it is ``due``, or one failed and it is time to try again; and none is on its way.
        Raises CheckpointError if one failed and checkpoint.on_failure=stop."""

    def finish_saves(self) -> None:
        """Wait until the checkpoint on its way is complete. Raises CheckpointError."""

    def told_of_saves(self) -> list[str]:
        """What became of checkpoints since the last call, one line each; the lead knows."""

    def load(self, path: Path) -> dict[str, Any]:
        """Restore every rank from a checkpoint, before the first step; returns the recipe state that was saved with it."""

    def interrupt(self, name: str) -> bool:
        """A signal came that is to end the run: whether KeyboardInterrupt is raised by itself once the step in progress is over; else
        there is none, or somebody asks for the second time. On the thread of the recipe."""

    def save_interrupted(self, saved_step: int) -> Path | None:
        """After KeyboardInterrupt: a checkpoint of the last committed step, from which a resumed recipe goes on; None if that is
        ``saved_step``, or a step is half done. Raises CheckpointError, NotEnoughReplicas."""

    def flush_copies(self) -> None:
        """The run ends before it is done: copies in memory (recovery.memory_checkpoint_every) are written to the run's folder."""

    def verify(self) -> str:
        """Compare the state hashes of all ranks; returns a digest over all positions. Raises InvariantViolated."""

    def status(self) -> dict[str, Any]:
        """Replicas, spares, epoch, committed step, and what each rank last reported."""

    def mark(self, state: dict[str, Any]) -> None:
        """The recipe could go on from here with ``state`` (JSON) and the calls that follow: a replica that joins later does
        (launcher local). Of several without a step in between the first counts."""

    def close(self, status: str = "done") -> None:
        """Stop every process of the group. ``status``: how the run ended (done, failed, interrupted)."""


class InOnePlace:
    """Of a group whose recipe runs in one process: that one leads, and nobody has to come to where it is."""

    is_lead = True

    @property
    def bookmarked(self) -> dict[str, Any]:
        return {}

    def mark(self, state: dict[str, Any]) -> None:
        pass
