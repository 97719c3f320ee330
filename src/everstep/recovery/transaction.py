"""The step transaction of one rank: begin -> compute -> reduce -> vote -> commit -> apply, or redo under a newer view.

    IDLE -> BEGIN -> [HEAL] -> COMPUTE -> EXCHANGE -> REDUCE -> VOTE -> APPLY -> IDLE
              ^                   |        |    ^       |        |
              |                   |        v    |       |        |
              |                   |       SALVAGE       |        |
              +---- newer view ---+----------+----------+--------+

COMPUTE fills the ledger with the slots that the view's deal gives this replica. EXCHANGE tells all members what everybody holds;
slots that nobody holds (their owner died) are divided among the members, computed in SALVAGE, and exchanged again. When all slots
are held once, REDUCE sums them. A newer view ends the attempt, not the ledger: only a new deal empties it, and the coordinator
decides that (:mod:`everstep.recovery.coordinator`). A total that was voted for is kept until the coordinator says what becomes of
it; only the total of the recorded (step, epoch) is applied. Whoever runs this loop learns of views and commits from
:class:`Control` alone and decides nothing.
"""

from __future__ import annotations

import logging
import math
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

import torch

from everstep.config.recovery_schema import RecoveryConfig
from everstep.errors import (
    DeadlineExceeded,
    Fenced,
    Halted,
    InvariantViolated,
    LedgersDiffer,
    LinkBroken,
    ReplicaBroken,
    Superseded,
)
from everstep.recovery import heal
from everstep.recovery.control import Control
from everstep.recovery.custody import Custody
from everstep.recovery.digest import digest_of
from everstep.recovery.healing import Healing, Stage
from everstep.recovery.ledger import Contribution, Inventory, Ledger
from everstep.recovery.link import Link, Links
from everstep.recovery.replica import ReplicaWorld
from everstep.recovery.rerun import looked_at, rerun_of
from everstep.recovery.view import Epoch, Heal, Kind, Outcome, Record, Rerun, View, Vote, assign
from everstep.telemetry.events import EventLog

LOG = logging.getLogger(__name__)
LINK_GRACE_S = 1.0


class Phase(StrEnum):
    IDLE = "idle"
    BEGIN = "begin"
    HEAL = "heal"
    COMPUTE = "compute"
    EXCHANGE = "exchange"
    SALVAGE = "salvage"
    REDUCE = "reduce"
    VOTE = "vote"
    APPLY = "apply"


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
    rerun: Callable[[int], Contribution] | None
    """The gradient of a slot that another replica holds, to be compared with its own; overwrites the buffers. None: not in this step."""

    def ledger(self) -> Ledger:
        """An empty one, for this step."""

    def restart(self) -> None:
        """A deal was opened: nothing computed so far counts. The state is to be that of the last commit."""

    def compute(self, slots: tuple[int, ...]) -> Contribution:
        """Zero the buffers, one forward/backward over these slots, one finalize."""

    def norm(self, gradients: list[torch.Tensor], sums: torch.Tensor) -> float:
        """Global gradient norm over the replica (collective inside the replica only). ``sums``: of all contributions."""

    def apply(self, total: Total) -> None:
        """Local arithmetic, and the inner data-parallel gather of parameters. The total may be in host memory."""

    def skip(self) -> None:
        """The step is committed as a skip: the state is to be that of the last commit."""


@dataclass(frozen=True)
class Kept:
    """A committed total that a healing rank will apply once it holds the state before it. Where it was made, if there is room: everybody
    waits for it to be kept."""

    work: Work
    outcome: Outcome
    total: Total

    @staticmethod
    def of(work: Work, outcome: Outcome, total: Total) -> Kept:
        gradients = _copies(total.gradients) if outcome is Outcome.APPLY else []
        return Kept(work, outcome, replace(total, gradients=gradients))


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """On their device if as much again stays free there for whatever comes next, else in host memory."""
    device = next((t.device for t in tensors if t.is_cuda), None)
    if device is not None:
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if free < 2 * sum(t.nbytes for t in tensors):
            return [t.cpu() for t in tensors]
    return [t.clone() for t in tensors]


@dataclass
class StepReport:
    """What one rank says of a finished step. Times in seconds of this rank. ``metrics``: what the engine reads from committed sums
    beyond the loss's own, which the worker takes out of ``sums``."""

    step: int
    outcome: Outcome
    sums: list[float]
    grad_norm: float
    attempts: int
    slots_redone: int  # computed by this replica beyond what it was first dealt
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    slots_dealt: int = 0  # to this replica, at first
    link_bytes: int = 0  # sent by this rank over the link, in all attempts
    memory_gb: dict[str, float] = field(default_factory=dict)  # of its process and device, by the name of the metric


class Transaction:
    def __init__(
        self, config: RecoveryConfig, replica: int, build: int, rank: int, worker: str, control: Control, links: Links,
        world: ReplicaWorld, healing: Healing, state: heal.State, events: EventLog, custody: Custody | None = None, held_s: float = 0.0,
    ):
        """``held_s``: for which the coordinator may decide nothing because there are too few replicas."""
        self._decided_in_s = config.others_timeout_s + held_s
        self._config, self._replica, self._build, self._rank, self._worker = config, replica, build, rank, worker
        self._heal: Heal | None = None  # the heal that I am in, or was in last
        self._join_failure = ""
        self._behind = False            # the state is not that of the last committed step: totals are kept until it is
        self._kept: list[Kept] = []     # committed totals of the steps after the version that the heal brings
        self._entered = False  # some view has had this life of the replica as a member
        self._control, self._links, self._world, self._healing = control, links, world, healing
        self._state, self._events, self._custody = state, events, custody
        self._reruns: list[Rerun] = []    # of slots that are looked at in this attempt
        self._phase = Phase.IDLE
        self._seconds: dict[str, float] = {}
        self._since = 0.0
        self._computed = 0                # slots of the step in progress that this replica computed
        self._dealt: int | None = None    # and those that it was first dealt
        self.holds: tuple[int, Epoch] | None = None  # the total (step, epoch) that was voted for and is kept, until it is applied

    def run(self, work: Work, called: Epoch | None) -> StepReport:
        """One committed step. ``called``: of the view that the controller called it in, which is waited for: it may be slower to come than
        the call. A call beside a coordinator that is gone is given up; None: whoever called outlives coordinators, and the step goes on
        under the next one. Raises ReplicaBroken (a rank of my replica is gone), Fenced (I am expelled
        or the coordinator is lost), Superseded (another controller calls the step anew), DeadlineExceeded."""
        self._seconds, self._since = {}, time.monotonic()
        self._computed, self._dealt = 0, None
        ledger, sent_bytes = work.ledger(), self._links.sent_bytes
        attempts = 0
        try:
            while True:
                self._control.obeys = self._control.epoch  # whatever attempt I was in, I have left it
                self._enter(Phase.BEGIN, work.step)
                record = self._agree_on_view(work.step, called)
                if not record.view.deal.lives:  # nothing is computed until the dead are replaced
                    self._control.after(record.number, self._decided_in_s, "a view that deals slots")
                    continue
                attempts += 1
                try:
                    total = self._attempt(work, record, ledger)
                except LinkBroken as broken:
                    self._void(record, work.step, str(broken))
                    self._await_next_view(record, broken)
                    continue
                if not self._config.enabled and _is_finite(total):
                    # No death is survived, so the commit needs no waiting for: whoever lacks it resumes from a checkpoint.
                    return self._finish(work, Outcome.APPLY, total, attempts, sent_bytes)
                decision = self._control.after(record.number, self._decided_in_s, f"the commit of step {work.step}")
                if decision.kind is Kind.HALT:
                    raise Halted(f"step {work.step} was given up: {decision.cause}")
                if decision.kind is Kind.COMMIT and decision.step == work.step:
                    if decision.epoch != total.epoch:
                        raise Fenced(
                            f"step {work.step} was committed in epoch {decision.epoch}, this rank holds the total of {total.epoch}"
                        )
                    return self._finish(work, decision.outcome, total, attempts, sent_bytes)
                self.holds = None
                if not _is_finite(total):
                    ledger.look_closely()
                self._void(record, work.step, decision.cause)
        finally:
            self.holds = None
            self._enter(Phase.IDLE, work.step)

    def _await_next_view(self, record: Record, broken: LinkBroken) -> None:
        """Most broken links are explained by a death within milliseconds; if none is, the link itself is to blame."""
        void = isinstance(broken, LedgersDiffer)
        if not self._control.hears_within(record.number, 0.0 if void else LINK_GRACE_S):
            self._control.link_failed(record.view.link_id, str(broken), void)
        self._control.after(record.number, self._decided_in_s, "the next view after a broken link")

    def settle(self) -> None:
        """Between steps: nobody reads this rank's state any more once this returns."""
        self._healing.settle()

    def close(self) -> None:
        """The rank leaves its replica; nobody reads or writes its state once this returns."""
        self._kept.clear()
        self._healing.close()

    # -- one attempt -----------------------------------------------------------------------------------------------------

    def _agree_on_view(self, step: int, called: Epoch | None) -> Record:
        """The newest record that any rank of my replica has seen; all ranks of the replica act on this one.

        The call of a step may arrive before the view that lets this life of the replica in: that view is waited for.
        """
        current = self._control.wait_for(
            lambda records: records[-1] if records[-1].view.committed >= step - 1 and self._has_entered(records)
            and (called is None or records[-1].view.epoch.key >= called.key) else None,
            self._decided_in_s, f"the commit of step {step - 1}, and a view with build {self._build} of replica {self._replica}",
        )
        number = max(n for (n,) in self._world.agree((current.number,), f"the view of step {step}"))
        record = self._control.numbered(number, self._config.step_timeout_s)
        if called is not None and record.view.epoch.incarnation > called.incarnation:
            raise Superseded(f"step {step} was called beside coordinator {called.incarnation}, which is gone; the next one calls it anew")
        if cause := self._control.halted(number):
            raise Halted(f"step {step} was given up: {cause}")
        member = record.view.member(self._replica)
        if member is None or member.build != self._build:
            raise ReplicaBroken(f"replica {self._replica} is not in view {record.view.epoch}: {record.cause}")
        if self._worker not in member.workers:
            raise Fenced(f"worker {self._worker} is not in view {record.view.epoch}: replica {self._replica} lives on without it")
        if record.view.committed != step - 1:
            raise Fenced(f"step {step} was called, but {record.view.committed} is the last committed step")
        self._control.obeys = record.view.epoch
        self._tell("obey", step, record.view.epoch)
        return record

    def _has_entered(self, records: list[Record]) -> bool:
        self._entered = self._entered or any(
            (member := r.view.member(self._replica)) is not None and member.build == self._build for r in records
        )
        return self._entered

    def _attempt(self, work: Work, record: Record, ledger: Ledger) -> Total:
        """Fill the ledger, complete it with the others, reduce, vote. Raises LinkBroken if the attempt is void."""
        view = record.view
        stale: Callable[[], bool] = lambda: self._control.newer_than(record.number)
        one = view.heal_of(self._replica)
        if one:
            self._catch_up(work, view, one, stale)
        elif self._behind:
            raise InvariantViolated(f"step {work.step}: replica {self._replica} is to contribute, but rank {self._rank} is not healed")
        else:
            self._healing.serve(view)  # in the background, while I compute
        if ledger.open(view.deal.number):
            work.restart()
            ledger.may_send(view, lambda: self._links.beside(record, stale), stale, self._config.others_timeout_s)
            member = view.member(self._replica)
            mine = view.deal.share(member, work.slots) if member else ()
            mine = tuple(slot for slot in mine if slot not in view.quarantined)
            self._dealt = len(mine) if self._dealt is None else self._dealt
            own, theirs = looked_at(view.deal, member, work.slots, work.step) if member and work.rerun else (None, None)
            self._witness(work, None if theirs in view.quarantined else theirs)
            if own in mine:
                self._fill(Phase.COMPUTE, work, view, ledger, (own,), compare=True)
                mine = tuple(slot for slot in mine if slot != own)
            self._fill(Phase.COMPUTE, work, view, ledger, mine)
        while True:
            link, inventory = self._exchange(work, record, ledger, stale)
            missing = inventory.missing(view.quarantined)
            if not missing:
                break
            share = assign(missing, view.contributors).get(self._replica, ())
            self._fill(Phase.SALVAGE, work, view, ledger, share)
        gradients = self._reduce(work, view, ledger, link, inventory, stale)
        divisor = float(inventory.sums[0])
        norm = work.norm(gradients, inventory.sums) if divisor > 0 else float("nan")
        total = Total(view.epoch, gradients, inventory.sums, norm)
        self._vote(work, view, total, ledger, inventory.held)
        return total

    def _witness(self, work: Work, slot: int | None) -> None:
        """Compute a slot of another replica, before any of mine is in the buffers."""
        self._reruns = []
        if work.rerun and slot is not None:
            self._enter(Phase.COMPUTE, work.step)
            self._control.phase(work.step, Phase.COMPUTE, computing=[slot])
            self._reruns.append(rerun_of(slot, work.rerun(slot).gradients))

    def _fill(self, phase: Phase, work: Work, view: View, ledger: Ledger, slots: tuple[int, ...], compare: bool = False) -> None:
        """Compute slots into the ledger. Salvage of none is none; of a deal, even nothing gives the sizes of gradients and sums.
        ``compare``: this one slot is computed by another replica, too."""
        if not slots and (phase is Phase.SALVAGE or ledger.held):
            return
        self._enter(phase, work.step)
        start = time.monotonic()
        what = {"slots": list(slots), "deal": view.deal.number, "salvage": phase is Phase.SALVAGE}
        self._tell("compute", work.step, view.epoch, **what)

        def compute(portion: tuple[int, ...]) -> Contribution:
            self._control.phase(work.step, phase, computing=list(portion))  # if we die of it, the coordinator knows of what
            contribution = work.compute(portion)
            if compare:
                self._reruns.append(rerun_of(portion[0], contribution.gradients))
            return contribution

        ledger.fill(slots, compute)
        self._computed += len(slots)
        self._tell("computed", work.step, view.epoch, **what, seconds=time.monotonic() - start)

    def _exchange(self, work: Work, record: Record, ledger: Ledger, stale: Callable[[], bool]) -> tuple[Link, Inventory]:
        """What all members hold. The ranks of a replica go on together or leave together, and have seen the same (rule 4)."""
        self._enter(Phase.EXCHANGE, work.step)
        link: Link | None = None
        inventory: Inventory | None = None
        broken: LinkBroken | None = None
        try:
            link, built = self._links.use(record, stale)
            self._tell("link_used", work.step, record.view.epoch, link=link.name, built=built)
            inventory = ledger.exchange(link, work.slots, stale, self._config.others_timeout_s)
        except LedgersDiffer as error:
            broken = error
        except LinkBroken as error:
            broken = error
            if link is not None:
                link.drop()
        seen = zlib.crc32(repr((inventory and inventory.held, ledger.held)).encode())
        said = self._world.agree((int(broken is None), int(isinstance(broken, LedgersDiffer)), seen), f"the ledgers of step {work.step}")
        if any(differ for _, differ, _ in said):
            raise broken if isinstance(broken, LedgersDiffer) else LedgersDiffer("at the position of another rank slots count twice")
        if link is None or inventory is None or not all(ok for ok, _, _ in said):
            raise broken or LinkBroken("another rank of this replica left the attempt")
        if len({digest for _, _, digest in said}) > 1:
            raise LedgersDiffer(f"the ranks of replica {self._replica} hold different slots, or see different ones missing")
        return link, inventory

    def _reduce(
        self, work: Work, view: View, ledger: Ledger, link: Link, inventory: Inventory, stale: Callable[[], bool]
    ) -> list[torch.Tensor]:
        """The total over all members, out of place. The ranks of a replica leave together."""
        issued: Callable[[], None] = lambda: self._tell("reduce", work.step, view.epoch)
        self._enter(Phase.REDUCE, work.step)
        gradients: list[torch.Tensor] | None = None
        broken = "another rank of this replica left the attempt"
        try:
            gradients = ledger.total(link, inventory, stale, self._config.others_timeout_s, issued, in_place=not self._config.enabled)
            self._tell("reduced", work.step, view.epoch)
        except LinkBroken as error:
            link.drop()
            broken = str(error)
        oks = self._world.agree((int(gradients is not None),), f"the reduce of step {work.step}")
        if gradients is None or not all(ok for (ok,) in oks):
            raise LinkBroken(broken)
        return gradients

    def _vote(self, work: Work, view: View, total: Total, ledger: Ledger, slots: tuple[int, ...]) -> None:
        digest = digest_of(total.gradients) if self._config.enabled else 0
        finite = _is_finite(total)
        if self._custody and not self._behind:
            self._custody.check()
        self._enter(Phase.VOTE, work.step)
        self._tell("vote", work.step, view.epoch, deal=view.deal.number, ledger=list(slots), held=list(ledger.held),
                   divisor=total.divisor, finite=finite, grad_norm=total.grad_norm, digest=digest)
        bits = struct.unpack("<q", struct.pack("<d", total.grad_norm))[0]
        self.holds = None if self._behind else (work.step, view.epoch)
        self._control.vote(Vote(self._worker, work.step, view.epoch, digest, total.divisor, bits, finite, not self._behind, slots,
                                () if finite else ledger.spoiled(), tuple(self._reruns)))

    def _finish(self, work: Work, outcome: Outcome, total: Total, attempts: int, sent_bytes: int) -> StepReport:
        self._enter(Phase.APPLY, work.step)
        if self._behind:
            self._kept.append(Kept.of(work, outcome, total))
            self._tell("keep", work.step, total.epoch, kept=len(self._kept))
        else:
            self._healing.before_change()
            self._change_state(work, outcome, total)
        self._enter(Phase.IDLE, work.step)
        return StepReport(work.step, outcome, total.sums.tolist(), total.grad_norm, attempts,
                          self._computed - (self._dealt or 0), dict(self._seconds), slots_dealt=self._dealt or 0,
                          link_bytes=self._links.sent_bytes - sent_bytes)

    def _change_state(self, work: Work, outcome: Outcome, total: Total) -> None:
        if outcome is Outcome.APPLY:
            self._state.version = None  # dirty until every tensor is written
            begun = time.monotonic()
            work.apply(total)
            self._tell("apply", work.step, total.epoch, divisor=total.divisor, seconds=time.monotonic() - begun)
        else:
            work.skip()
            self._tell("skip", work.step, total.epoch)
        self._state.version = work.step
        if self._custody:
            self._custody.seal()

    def _catch_up(self, work: Work, view: View, one: Heal, stale: Callable[[], bool]) -> None:
        """Go on with my heal: begin it, look how far it is, and once it is done apply what was committed meanwhile.

        It is waited for only if I am dealt slots, or have kept as many totals as I may. The ranks of a replica do all of this
        together: applying is a collective of theirs, and one that went on to compute would wait for one that left the attempt.
        Raises LinkBroken.
        """
        self._enter(Phase.HEAL, work.step)
        if one != self._heal:  # another one than before: its pieces and the totals since then are void
            self._heal, self._behind = one, True
            self._kept.clear()
            self._tell("heal_start", one.version, view.epoch, source=one.source)
            self._agree_on_stage(work, one, self._joined(view, one))
        if not self._behind:
            return
        member = view.member(self._replica)
        must = bool(member and view.deal.share(member, work.slots)) or len(self._kept) >= self._config.heal_backlog_steps
        must = must or self._state.island  # rounds are long, and begin with the engine where the state is
        stages = self._agree_on_stage(work, one, self._healing.wait(stale) if must else self._healing.stage())
        if all(stage is Stage.DONE for stage in stages):
            self._state.version = one.version
            healed = self._healing.healed
            self._tell("heal_done", one.version, view.epoch, source=one.source, heal_bytes=healed.nbytes, seconds=healed.seconds,
                       kept=len(self._kept))
            for kept in self._kept:
                self._change_state(kept.work, kept.outcome, kept.total)
            self._kept.clear()
            self._behind = False

    def _joined(self, view: View, one: Heal) -> Stage:
        try:
            self._healing.join(view, one)
        except (LinkBroken, DeadlineExceeded) as error:
            self._join_failure = str(error)
            return Stage.FAILED
        return Stage.GOING_ON

    def _agree_on_stage(self, work: Work, one: Heal, mine: Stage) -> list[Stage]:
        """Of all ranks of my replica. Raises LinkBroken, and tells the coordinator, if the heal of one has failed."""
        stages = [Stage(s) for (s,) in self._world.agree((int(mine),), f"the heal before step {work.step}")]
        if mine is Stage.FAILED:
            self._control.heal_failed(one.number, self._healing.failure or self._join_failure)
        if min(stages) is Stage.FAILED:
            self._heal = None
            if self._state.island:  # the next source is another one, and its local weights are not this one's
                self._state.version = None
            raise LinkBroken(self._healing.failure or self._join_failure or "another rank of this replica was not healed")
        if min(stages) is Stage.OVERTAKEN:
            raise LinkBroken("a newer view came while the heal was waited for")
        return stages

    # -- telling ------------------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, step: int) -> None:
        now = time.monotonic()
        if self._phase is not Phase.IDLE:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        LOG.debug("%s, after %.4f s in %s", phase, now - self._since, self._phase)
        self._phase, self._since = phase, now
        self._control.phase(step, phase)

    def _tell(self, event: str, step: int, epoch: Epoch, **fields: Any) -> None:
        """An event of this rank."""
        self._events.emit(event, step=step, epoch=epoch.key, replica=self._replica, rank=self._rank, **fields)

    def _void(self, record: Record, step: int, cause: str) -> None:
        LOG.info("attempt in epoch %s is void: %s", record.view.epoch, cause)
        self._tell("void", step, record.view.epoch, cause=cause)


def _is_finite(total: Total) -> bool:
    return bool(torch.isfinite(total.sums).all()) and math.isfinite(total.grad_norm)

