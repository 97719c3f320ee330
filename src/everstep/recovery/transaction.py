"""The step transaction of one rank: begin -> compute -> reduce -> vote -> commit -> apply, or redo under a newer view.

    IDLE -> BEGIN -> [HEAL] -> COMPUTE -> REDUCE -> VOTE -> APPLY -> IDLE
              ^                   |          |        |
              +---- newer view ---+----------+--------+

``retry`` form: a newer view voids the attempt and the members recompute all slots together. What is never voided: a total
that was voted for is kept until the coordinator says what becomes of it; only the total of the recorded (step, epoch) is
applied. Whoever runs this loop learns of views and commits from :class:`Control` alone and decides nothing.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch
import torch.distributed as dist

from everstep.config.schema import RecoveryConfig
from everstep.errors import Fenced, LinkBroken, ReplicaBroken
from everstep.recovery import heal
from everstep.recovery.control import Control
from everstep.recovery.link import Link, Links
from everstep.recovery.replica import ReplicaWorld
from everstep.recovery.view import Epoch, Kind, Outcome, Record, View, Vote, assign
from everstep.telemetry.events import EventLog

LINK_GRACE_S = 1.0


class Phase(StrEnum):
    IDLE = "idle"
    BEGIN = "begin"
    HEAL = "heal"
    COMPUTE = "compute"
    REDUCE = "reduce"
    VOTE = "vote"
    APPLY = "apply"


@dataclass(frozen=True)
class Contribution:
    """Raw sums of some slots: ``gradients`` of this rank's optimizer shard, ``sums`` agreed by the replica (weight first)."""

    gradients: list[torch.Tensor]
    sums: torch.Tensor  # float64, CPU


@dataclass(frozen=True)
class Total:
    """The sum of all contributions of one attempt. ``divisor`` is the weight that was really contributed (rule 5)."""

    epoch: Epoch
    gradients: list[torch.Tensor]
    sums: torch.Tensor
    grad_norm: float  # of gradients / divisor, over the whole replica

    @property
    def divisor(self) -> float:
        return float(self.sums[0])


class Work(Protocol):
    """What a step consists of, as the transaction sees it; the worker provides it (no losses, no models here)."""

    step: int
    slots: int

    def compute(self, slots: tuple[int, ...]) -> Contribution:
        """Zero the buffers, one forward/backward over these slots, one finalize."""

    def norm(self, gradients: list[torch.Tensor], divisor: float) -> float:
        """Global gradient norm over the replica (collective inside the replica only)."""

    def apply(self, total: Total) -> None:
        """Local arithmetic, and the inner data-parallel gather of parameters."""


@dataclass
class StepReport:
    """What one rank says of a finished step. Times in seconds of this rank."""

    step: int
    outcome: Outcome
    sums: list[float]
    grad_norm: float
    attempts: int
    slots_computed: int
    seconds: dict[str, float] = field(default_factory=dict)


class Transaction:
    def __init__(
        self, config: RecoveryConfig, replica: int, rank: int, worker: str, control: Control, links: Links,
        world: ReplicaWorld, store: dist.Store, state: heal.State, events: EventLog,
    ):
        self._config, self._replica, self._rank, self._worker = config, replica, rank, worker
        self._control, self._links, self._world, self._store = control, links, world, store
        self._state, self._events = state, events
        self._phase = Phase.IDLE
        self._seconds: dict[str, float] = {}
        self._since = 0.0
        self._sender: threading.Thread | None = None

    def run(self, work: Work) -> StepReport:
        """One committed step. Raises ReplicaBroken (a rank of my replica is gone), Fenced (I am expelled or the coordinator
        is lost), DeadlineExceeded."""
        self._seconds, self._since = {}, time.monotonic()
        attempts = slots_computed = 0
        try:
            while True:
                self._enter(Phase.BEGIN, work.step)
                record = self._agree_on_view(work.step)
                attempts += 1
                try:
                    total, computed = self._attempt(work, record)
                    slots_computed += computed
                    decision = self._control.after(record.number, self._config.step_timeout_s, f"the commit of step {work.step}")
                except LinkBroken as broken:
                    self._void(record, work.step, str(broken))
                    self._await_next_view(record, str(broken))
                    continue
                if decision.kind is Kind.COMMIT and decision.step == work.step:
                    return self._finish(work, decision, total, attempts, slots_computed)
                self._void(record, work.step, decision.cause)
        finally:
            self._sender = None  # a sender of a voided attempt ends by itself: its epoch is over
            self._enter(Phase.IDLE, work.step)

    def _await_next_view(self, record: Record, cause: str) -> None:
        """Most broken links are explained by a death within milliseconds; if none is, the link itself is to blame."""
        end = time.monotonic() + LINK_GRACE_S
        while not self._control.newer_than(record.number) and time.monotonic() < end:
            time.sleep(0.001)
        if not self._control.newer_than(record.number):
            self._control.link_failed(record.view.link_id, cause)
        self._control.after(record.number, self._config.step_timeout_s, "the next view after a broken link")

    # -- one attempt -----------------------------------------------------------------------------------------------------

    def _agree_on_view(self, step: int) -> Record:
        """The newest record that any rank of my replica has seen; all ranks of the replica act on this one."""
        current = self._control.wait_for(
            lambda records: records[-1] if records[-1].view.committed >= step - 1 else None,
            self._config.step_timeout_s, f"the commit of step {step - 1}",
        )
        number = max(n for (n,) in self._world.agree((current.number,), f"the view of step {step}"))
        record = self._control.numbered(number, self._config.step_timeout_s)
        member = record.view.member(self._replica)
        if member is None:
            raise ReplicaBroken(f"replica {self._replica} is not in view {record.view.epoch}: {record.cause}")
        if self._worker not in member.workers:
            raise Fenced(f"worker {self._worker} is not in view {record.view.epoch}: replica {self._replica} lives on without it")
        if record.view.committed != step - 1:
            raise Fenced(f"step {step} was called, but {record.view.committed} is the last committed step")
        self._events.emit("obey", step=step, epoch=record.view.epoch.key, replica=self._replica, rank=self._rank)
        return record

    def _attempt(self, work: Work, record: Record) -> tuple[Total, int]:
        """Compute my slots, reduce, vote. Raises LinkBroken if the attempt is void."""
        view = record.view
        stale: Callable[[], bool] = lambda: self._control.newer_than(record.number)
        if self._replica in view.healing:
            self._heal(view, stale)
        else:
            self._serve_heal(view, stale)
        mine = assign(work.slots, view.contributors).get(self._replica, ())
        contribution = self._compute(work, view, mine)
        self._finish_sending()
        self._enter(Phase.REDUCE, work.step)
        self._events.emit("reduce", step=work.step, epoch=view.epoch.key, replica=self._replica, rank=self._rank)
        reduced, broken = self._reduce(work, view, mine, contribution, stale)
        oks = self._world.agree((int(reduced is not None),), f"the reduce of step {work.step}")
        if reduced is None or not all(ok for (ok,) in oks):
            raise LinkBroken(broken or "another rank of this replica left the attempt")
        ledger, sums, gradients = reduced
        divisor = float(sums[0])
        norm = work.norm(gradients, divisor) if divisor > 0 else float("nan")
        total = Total(view.epoch, gradients, sums, norm)
        self._vote(work, view, total, ledger)
        return total, len(mine)

    def _compute(self, work: Work, view: View, mine: tuple[int, ...]) -> Contribution:
        self._enter(Phase.COMPUTE, work.step)
        epoch, start = view.epoch.key, time.monotonic()
        self._events.emit("compute", step=work.step, epoch=epoch, replica=self._replica, rank=self._rank, slots=list(mine))
        contribution = work.compute(mine)
        self._events.emit("computed", step=work.step, epoch=epoch, replica=self._replica, rank=self._rank, slots=list(mine),
                          seconds=time.monotonic() - start)
        return contribution

    def _reduce(
        self, work: Work, view: View, mine: tuple[int, ...], contribution: Contribution, stale: Callable[[], bool]
    ) -> tuple[tuple[tuple[int, ...], torch.Tensor, list[torch.Tensor]] | None, str]:
        """The ledger first, then the gradients. (None, cause) if the link broke: the ranks of a replica leave together."""
        link: Link | None = None
        try:
            link = self._links.use(view.link_id, view.replicas, stale)
            counts = torch.zeros(work.slots, dtype=torch.float64)
            counts[list(mine)] = 1.0
            head = torch.cat([counts, contribution.sums.to(torch.float64)])
            device = contribution.gradients[0].device if contribution.gradients else torch.device("cpu")
            (head,) = link.sum([head.to(device)], stale, self._config.step_timeout_s)
            head = head.cpu()
            counts, sums = head[: work.slots], head[work.slots :]
            if not bool((counts == 1.0).all()):
                return None, f"slots counted {[int(c) for c in counts]} times instead of once"
            gradients = link.sum(contribution.gradients, stale, self._config.step_timeout_s)
        except LinkBroken as broken:
            if link is not None:
                link.drop()
            return None, str(broken)
        return (tuple(range(work.slots)), sums, gradients), ""

    def _vote(self, work: Work, view: View, total: Total, ledger: tuple[int, ...]) -> None:
        digest = _digest(total.gradients)
        finite = bool(torch.isfinite(total.sums).all()) and math.isfinite(total.grad_norm)
        self._enter(Phase.VOTE, work.step)
        self._events.emit("vote", step=work.step, epoch=view.epoch.key, replica=self._replica, rank=self._rank,
                          ledger=list(ledger), divisor=total.divisor, finite=finite, grad_norm=total.grad_norm, digest=digest)
        bits = struct.unpack("<q", struct.pack("<d", total.grad_norm))[0]
        self._control.vote(Vote(self._worker, work.step, view.epoch, digest, total.divisor, bits, finite, ledger))

    def _finish(self, work: Work, commit: Record, total: Total, attempts: int, slots_computed: int) -> StepReport:
        if commit.epoch != total.epoch:
            raise Fenced(f"step {work.step} was committed in epoch {commit.epoch}, this rank holds the total of {total.epoch}")
        self._enter(Phase.APPLY, work.step)
        assert commit.epoch is not None
        epoch = commit.epoch.key
        if commit.outcome is Outcome.APPLY:
            self._state.version = None  # dirty until every tensor is written
            work.apply(total)
            self._events.emit("apply", step=work.step, epoch=epoch, replica=self._replica, rank=self._rank,
                              divisor=total.divisor)
        else:
            self._events.emit("skip", step=work.step, epoch=epoch, replica=self._replica, rank=self._rank)
        self._state.version = work.step
        self._enter(Phase.IDLE, work.step)
        return StepReport(work.step, commit.outcome, total.sums.tolist(), total.grad_norm, attempts, slots_computed, dict(self._seconds))

    # -- heal ---------------------------------------------------------------------------------------------------------------

    def _heal(self, view: View, stale: Callable[[], bool]) -> None:
        """Receive version ``view.committed`` from my position's peer, unless I hold it. The ranks of a replica heal together
        or not at all: one that went on to compute would wait in a collective for one that left the attempt."""
        source = view.heal_source(self._replica)
        self._enter(Phase.HEAL, view.committed + 1)
        self._events.emit("heal_start", step=view.committed, epoch=view.epoch.key, replica=self._replica, rank=self._rank,
                          source=source)
        name = self._stream_name(view, self._replica)
        broken = ""
        try:
            with heal.HealStream(name, self._store, self._config.heal_timeout_s, stale) as stream:
                healed = heal.receive(stream.join(), self._state, view.committed)
            self._events.emit("heal_done", step=view.committed, epoch=view.epoch.key, replica=self._replica, rank=self._rank,
                              source=source, heal_bytes=healed.nbytes, seconds=healed.seconds)
        except LinkBroken as error:
            broken = str(error)
        healed_all = self._world.agree((int(not broken),), f"the heal before step {view.committed + 1}")
        if not all(ok for (ok,) in healed_all):
            raise LinkBroken(broken or "another rank of this replica was not healed")

    def _serve_heal(self, view: View, stale: Callable[[], bool]) -> None:
        """If I am the source of joiners, stream my state in the background while I compute."""
        joiners = [r for r in sorted(view.healing) if view.heal_source(r) == self._replica]
        if joiners:
            self._sender = threading.Thread(target=self._send_state, args=(view, joiners, stale), name="heal-source", daemon=True)
            self._sender.start()

    def _finish_sending(self) -> None:
        """The joiner reduces only once it is healed, so nothing is lost by waiting here; and no kernel of the link spins on
        this device while the last chunks are copied off it."""
        sender, self._sender = self._sender, None
        if sender:
            sender.join(self._config.heal_timeout_s)

    def _send_state(self, view: View, joiners: list[int], stale: Callable[[], bool]) -> None:
        for joiner in joiners:
            name = self._stream_name(view, joiner)
            try:
                with heal.HealStream(name, self._store, self._config.heal_timeout_s, stale) as stream:
                    heal.send(stream.serve(self._control.local_host), self._state, view.committed)
            except Exception as error:  # the end of a thread; the joiner sees its connection close, and reports that
                if not stale():  # an attempt that is over needs no sender
                    self._events.emit("error", step=view.committed, epoch=view.epoch.key, error=type(error).__name__,
                                      message=f"heal source {name}: {error}")

    def _stream_name(self, view: View, joiner: int) -> str:
        member = view.member(joiner)
        return f"{view.epoch}/{member}/{self._rank}"

    # -- telling ------------------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, step: int) -> None:
        now = time.monotonic()
        if self._phase is not Phase.IDLE:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now
        self._control.phase(step, phase)

    def _void(self, record: Record, step: int, cause: str) -> None:
        self._events.emit("void", step=step, epoch=record.view.epoch.key, replica=self._replica, rank=self._rank, cause=cause)


def _digest(tensors: list[torch.Tensor]) -> int:
    """A checksum of all bits, computed where the tensors are: equal totals give equal digests on every member."""
    digest = 0
    for tensor in tensors:
        words = tensor.detach().contiguous().view(torch.int32).to(torch.int64)
        weights = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64) % 65521
        digest = (digest * 1_000_003 + int((words.reshape(-1) * weights).sum())) & 0x7FFF_FFFF_FFFF_FFFF
    return digest
