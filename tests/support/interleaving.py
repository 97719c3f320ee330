"""Interleavings of ranks, messages, deaths and repairs, without processes, sockets or clocks.

What runs is the product: :class:`Desk` and :class:`Coordinator`, and for each rank :class:`Transaction`, its ledger, :class:`Links` and
:class:`Link`, on a greenlet of its own. In memory are: the two ordered channels between a rank and the desk, the groups under the
links (a collective of a dead member may fail, hang until a newer view, or have completed), the agreement inside a replica, and the
stream of a heal. At every point where a rank waits or is told something, *what happens next* is a choice among all that could:
a rank goes on, a message arrives, a process dies, a link flaps, a repair is announced.

    World(setting, choose).run()      # raises Violation with the trace
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from everstep.config.recovery_schema import RecoveryConfig
from everstep.errors import CoordinatorLost, EverstepError, Fenced, LinkBroken, ReplicaBroken
from everstep.recovery.control import Control
from everstep.recovery.coordinator import Coordinator, Mode, State
from everstep.recovery.desk import Desk, Listener
from everstep.recovery.heal import Healed
from everstep.recovery.healing import Stage
from everstep.recovery.ledger import Contribution, Ledger, SlotLedger, SumLedger
from everstep.recovery.link import Link, Links
from everstep.recovery.transaction import StepReport, Total, Transaction
from everstep.recovery.view import Epoch, Heal, Kind, Member, Record, View
from everstep.telemetry import history
from everstep.telemetry.events import Event

LIMIT = 6000  # actions; a schedule of these sizes that takes more goes in circles
PIECES = 20   # of a heal: it takes longer than a step, often
QUARANTINE_AFTER = 2  # deaths


class Violation(AssertionError):
    """Something that must never happen did, or nothing can happen any more."""


@dataclass(frozen=True)
class Setting:
    replicas: int = 3
    ranks: int = 1       # of a replica
    spares: int = 1
    steps: int = 3
    slots: int = 5
    mode: Mode = Mode.SALVAGE
    exact: bool = False
    standbys_up_to: int = 4
    min_replicas: int = 1
    kills: int = 2       # at most
    flaps: int = 0
    spoilt: int = 0      # contributions with a wrong bit in one rank's total, at most
    backlog: int = 2     # totals that a healing rank may keep
    poison: tuple[int, int] | None = None  # (step, slot): who computes it dies of it, until it is in quarantine


@dataclass
class Action:
    name: str
    do: Callable[[], None]
    #: ``must``: will happen if nothing else does; ``may``: might never (a collective of a dead member fails); ``harm``: a fault.
    kind: str = "must"


@dataclass
class Pause:
    what: str
    ready: Callable[[], bool]
    fails: Callable[[], bool]


class Rank:
    """One process. ``life``: of the replica it belongs to (None: a spare)."""

    def __init__(self, world: World, worker: str):
        self.world, self.worker = world, worker
        self.down: deque[dict[str, Any]] = deque()  # from the desk, not yet delivered
        self.up: deque[dict[str, Any]] = deque()    # to the desk
        self.control = MemoryControl(self)
        self.state = MemoryState()
        self.member: Member | None = None
        self.position = -1
        self.entered = False
        self.alive = True
        self.noticed = False  # dead, and the desk knows
        self.task: greenlet | None = None
        self.pause: Pause | None = None
        self.said = 0
        self.links: MemoryLinks | None = None
        self.transaction: Transaction | None = None
        self.buffer = torch.zeros(0)

    def __str__(self) -> str:
        return f"{self.worker}({self.member or 'spare'}/{self.position})"

    # the desk's session
    def put(self, message: dict[str, Any]) -> None:
        self.down.append(message)

    def close(self) -> None:
        pass

    def form(self, member: Member) -> None:
        """Take a place: what Worker.form does of it that concerns the protocol."""
        if self.links:
            self.links.drop_all()
        if self.transaction:
            self.transaction.close()
        if self.member is None or self.position != member.workers.index(self.worker):
            self.state = MemoryState()
        self.member, self.position, self.entered, self.said = member, member.workers.index(self.worker), False, 0
        if member.build == 0:
            self.state.version, self.state.weights = 0, torch.zeros(self.world.setting.slots)
        self.links = MemoryLinks(self)
        setting = self.world.setting
        config = RecoveryConfig(mode=setting.mode.value, exact=setting.exact, heal_backlog_steps=setting.backlog)
        events = MemoryEvents(self.world, self.worker)
        self.transaction = self.world.transaction(
            config, member.replica, member.build, self.position, self.worker, self.control, self.links, MemoryWorld(self), MemoryHealing(self),
            self.state, events,
        )
        events.emit("form", replica=member.replica, rank=self.position, build=member.build)

    def on_record(self, record: Record) -> None:
        """What Worker._on_record does."""
        member = record.view.member_of(self.worker)
        if record.kind is Kind.BUILD:
            if member and self.links:
                self.world.builds.append((self, record))
        elif member and self.member and (member.replica, member.build) == (self.member.replica, self.member.build):
            self.entered = True

    def is_broken(self) -> bool:
        self.control.must_not_be_lost()
        return self.member is not None and self.entered and not self.control.includes(self.worker, self.member.build)

    def begin(self, step: int) -> None:
        assert self.transaction is not None
        work = MemoryWork(self, step)
        transaction = self.transaction

        def body(fail: bool) -> None:
            try:
                self.world.reported(self, step, transaction.run(work, Epoch(1, 0)))
            except ReplicaBroken:
                self.world.trace.append(f"{self} is of a broken replica")
            except Fenced as error:
                if self.control.lost is None and self.world.desk.coordinator.view.member_of(self.worker) == self.member:
                    raise Violation(f"{self} is a member, but fenced: {error}") from error
            except EverstepError as error:
                raise Violation(f"{self}, step {step}: {type(error).__name__}: {error}") from error

        self.task = greenlet(body)
        self.pause = Pause(f"begin step {step}", lambda: True, lambda: False)

    def wait(self, what: str, ready: Callable[[], bool] = lambda: True, fails: Callable[[], bool] = lambda: False) -> bool:
        """Called by the rank itself; True if it shall fail what it waited for."""
        self.pause = Pause(what, ready, fails)
        return bool(self.world.hub.switch())

    def resume(self, fail: bool) -> None:
        assert self.task is not None
        self.pause = None
        self.task.switch(fail)
        if self.task is not None and self.task.dead:
            self.task = None


class MemoryState:
    """``weights``: the sum over steps of step times the total; all of it is known in advance."""

    island = False

    def __init__(self) -> None:
        self.version: int | None = None
        self.weights = torch.zeros(0)


class MemoryControl(Control):
    def __init__(self, rank: Rank):
        self.rank, self.worker = rank, rank.worker
        self.on_record, self.on_phase = rank.on_record, lambda step, phase: None
        self._records: list[Record] = []
        self._last_build = 0
        self._lost: str | None = None
        self._progress = {"step": 0, "phase": "idle"}
        self.local_host = ""

    def deliver(self, message: dict[str, Any]) -> None:
        try:
            record = Record.from_json(message["record"], self._records[-1] if self._records else None)
        except ValueError as error:
            raise Violation(f"{self.rank}: {error}") from error
        if record.kind is Kind.BUILD:
            self._last_build = record.number
        else:
            if self._records and record.number <= self._records[-1].number:
                raise Violation(f"{self.rank} receives record {record.number} after {self._records[-1].number}")
            self._records.append(record)
        self.on_record(record)

    def wait_for(self, find: Callable[[list[Record]], Record | None], timeout_s: float, what: str) -> Record:
        look: Callable[[], Record | None] = lambda: find(self._records) if self._records else None
        while (found := look()) is None:
            if self._lost:
                raise CoordinatorLost(self._lost)
            self.rank.wait(what, lambda: look() is not None or self._lost is not None)
        return found

    def hears_within(self, number: int, timeout_s: float) -> bool:
        # Within the grace every death is noticed; only without one does it end.
        world = self.rank.world
        self.rank.wait("a newer view", lambda: self.newer_than(number) or not any(not r.alive and not r.noticed for r in world.ranks.values()))
        return self.newer_than(number)

    def phase(self, step: int, phase: str, **detail: Any) -> None:
        self._progress = {"step": step, "phase": phase}
        if detail.get("computing"):
            self.rank.up.append({"type": "progress", "step": step, "phase": phase, "epoch": self.obeys.key, "detail": detail})
        if getcurrent() is self.rank.task:
            self.rank.wait(f"enters {phase}")

    def _send(self, message: dict[str, Any]) -> None:
        self.must_not_be_lost()
        self.rank.up.append(message)
        if getcurrent() is self.rank.task:
            self.rank.wait(f"has sent {message['type']}")


class MemoryWorld:
    """everstep.recovery.replica.ReplicaWorld"""

    def __init__(self, rank: Rank):
        self.rank = rank

    def agree(self, values: tuple[int, ...], what: str) -> list[tuple[int, ...]]:
        return self.rank.world.meet_in_replica(self.rank, values, what)


@dataclass
class Op:
    kind: str
    arrived: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    root: int = 0
    flapped: bool = False
    given_up: bool = False  # a member left it before all had arrived: nobody can complete it any more


class MemoryGroup:
    """What is under a link: one of its members' ends. Collectives are matched by their order."""

    def __init__(self, rank: Rank, name: str, replicas: Sequence[int]):
        self.rank, self.name, self.replicas = rank, name, tuple(replicas)
        assert rank.member is not None
        self.index = self.replicas.index(rank.member.replica)
        self.count, self.left = 0, False
        rank.world.ends.setdefault((name, rank.position), {})[self.index] = self

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> MemoryCollective:
        return self._start("allreduce", tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> MemoryCollective:
        return self._start("allgather", [inputs[0], *outputs[0]])

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> MemoryCollective:
        return self._start("broadcast", tensors, options.rootRank)

    def _start(self, kind: str, buffers: list[torch.Tensor], root: int = 0) -> MemoryCollective:
        world = self.rank.world
        if any(op.flapped for (name, position, _), op in world.ops.items() if (name, position) == (self.name, self.rank.position)):
            raise RuntimeError("the link has broken before")
        key = (self.name, self.rank.position, self.count)
        self.count += 1
        op = world.ops.setdefault(key, Op(kind, root=root))
        if (op.kind, op.root) != (kind, root) or any(b[0].shape != buffers[0].shape for b in op.arrived.values()):
            raise Violation(f"{self.rank} starts {kind} {tuple(buffers[0].shape)} as collective {key}, which is {op.kind} for others")
        op.arrived[self.index] = buffers
        if len(op.arrived) == len(self.replicas) and not op.given_up:
            _complete(op, len(self.replicas))
        return MemoryCollective(self, op)


def _complete(op: Op, size: int) -> None:
    if op.kind == "allreduce":
        total = torch.zeros_like(op.arrived[0][0])
        for i in range(size):
            total += op.arrived[i][0]
        for i in range(size):
            op.arrived[i][0].copy_(total)
    elif op.kind == "allgather":
        for i in range(size):
            for j in range(size):
                op.arrived[i][1 + j].copy_(op.arrived[j][0])
    else:
        for i in range(size):
            op.arrived[i][0].copy_(op.arrived[op.root][0])


class MemoryCollective:
    def __init__(self, group: MemoryGroup, op: Op):
        self.group, self.op = group, op

    def written(self) -> list[torch.Tensor]:
        """Those of my buffers that the collective writes into."""
        mine = self.op.arrived[self.group.index]
        return {"allreduce": mine, "allgather": mine[1:], "broadcast": mine if self.group.index != self.op.root else []}[self.op.kind]

    def done(self) -> bool:
        return len(self.op.arrived) == len(self.group.replicas) and not self.op.flapped and not self.op.given_up

    def may_fail(self) -> bool:
        """A member is gone, or has given the link up: how the others learn of it depends on their place in the ring."""
        ends = self.group.rank.world.ends[self.group.name, self.group.rank.position]
        return any(end.left or not end.rank.alive for end in ends.values() if end is not self.group)


class MemoryLink(Link):
    def __init__(self, rank: Rank, name: str, replicas: Sequence[int]):
        self.rank, self.name, self.replicas = rank, name, tuple(replicas)
        self._device, self._timeout_s, self._held = torch.device("cpu"), 1.0, []
        self._group: Any = MemoryGroup(rank, name, replicas) if len(replicas) > 1 else None

    def _finish(self, work: MemoryCollective, stop: Callable[[], bool], end: float, timeout_s: float) -> None:
        fail = self.rank.wait(f"link {self.name}, {work.op.kind}", lambda: work.done() or stop() or work.op.flapped, work.may_fail)
        work.op.given_up |= not work.done()
        if stop():
            raise LinkBroken(f"link {self.name} was overtaken by a newer view")
        if fail or work.op.flapped:
            for buffer in work.written():
                buffer.fill_(float("nan"))  # a collective that broke leaves anything behind
            raise LinkBroken(f"link {self.name}: connection closed by peer")
        self.rank.world.spoil(self.rank, work)

    def drop(self) -> None:
        if self._group is not None:
            self._group.left = True
        self._group = None
        self._held = []


class MemoryLinks(Links):
    def __init__(self, rank: Rank):
        super().__init__(lambda name, replicas: MemoryLink(rank, name, replicas), 1.0)
        self.rank = rank

    def acknowledge(self, record: Record) -> None:
        """The link that a BUILD record orders is warm (build_in_background's thread)."""
        if not self._closed:
            self._links[record.view.link_id] = record.number, self._build(record.view.link_id, record.view.replicas)
            self.rank.control.link_ready(record.view.link_id)

    def _form(self, name: str, replicas: Sequence[int], stop: Callable[[], bool]) -> Link:
        here = self.rank.world.forming.setdefault((name, self.rank.position), set())
        if self.rank.member.replica in here:  # type: ignore[union-attr]
            raise Violation(f"{self.rank} forms link {name} a second time")
        here.add(self.rank.member.replica)  # type: ignore[union-attr]
        self.rank.wait(f"forms link {name}", lambda: here >= set(replicas) or stop())
        if stop():
            raise LinkBroken(f"link {name} was overtaken by a newer view while it was being formed")
        return self._build(name, replicas)


@dataclass
class Stream:
    """A heal under way at one position: pieces arrive one by one, of the source's living state until it is copied aside."""

    one: Heal
    source: Rank
    aside: torch.Tensor | None = None
    joiner: Rank | None = None
    arrived: int = 0
    over: bool = False  # one of its ends is gone, or gave it up


class MemoryHealing:
    """everstep.recovery.healing.Healing"""

    def __init__(self, rank: Rank):
        self.rank = rank
        self._stream: Stream | None = None
        self._closed = False
        self.failure = "the source is gone"
        self.healed = Healed(0, 0.0)

    def _key(self, one: Heal) -> Hashable:
        return one.number, self.rank.position

    def join(self, view: View, one: Heal) -> None:
        rank, world, key = self.rank, self.rank.world, self._key(one)
        self._give_up()
        lost: Callable[[], bool] = lambda: not rank.control.wants_heal(one.number)
        gone: Callable[[], bool] = lambda: key in world.streams and (world.streams[key].over or not world.streams[key].source.alive)
        fail = rank.wait("a source", lambda: key in world.streams or lost(), gone)
        if lost() or fail or gone():
            raise LinkBroken("called off, or the source is gone")
        self._stream = stream = world.streams[key]
        if rank.state.version == one.version:
            stream.arrived = PIECES
            return
        rank.state.version, rank.state.weights = None, torch.zeros(world.setting.slots)
        stream.joiner = rank

    def stage(self) -> Stage:
        stream = self._stream
        assert stream is not None
        return Stage.DONE if stream.arrived == PIECES else Stage.FAILED if stream.over else Stage.GOING_ON

    def wait(self, stop: Callable[[], bool]) -> Stage:
        self.rank.wait("the heal", lambda: self.stage() is not Stage.GOING_ON or stop())
        return Stage.OVERTAKEN if self.stage() is Stage.GOING_ON else self.stage()

    def serve(self, view: View) -> None:
        assert self.rank.member is not None
        for one in view.heals:
            if one.source == self.rank.member.replica and self._key(one) not in self.rank.world.streams:
                if self.rank.state.version != one.version:
                    raise Violation(f"{self.rank} at {self.rank.state.version} is to serve {one}")
                self.rank.world.streams[self._key(one)] = Stream(one, self.rank)

    def before_change(self) -> None:
        for stream in self.rank.world.streams.values():
            if stream.source is self.rank and stream.aside is None:
                stream.aside = self.rank.state.weights.clone()

    def close(self) -> None:
        self._give_up()
        for stream in self.rank.world.streams.values():
            stream.over |= stream.source is self.rank

    def _give_up(self) -> None:
        if self._stream is not None and self._stream.arrived < PIECES:
            self._stream.over = True
        self._stream = None


class MemoryEvents:
    """everstep.telemetry.events.EventLog; the hub's trace counts as the clock."""

    def __init__(self, world: World, who: str):
        self.world, self.who = world, who

    def emit(self, event: str, *, step: int | None = None, epoch: tuple[int, int] | None = None, **fields: Any) -> None:
        now = float(len(self.world.events))
        self.world.events.append(Event(now, now, self.who, 0, "here", epoch, step, event, fields))


class MemoryWork:
    """Slot i gives 1 to element i of the gradient (times position + 1) and weighs i + 1."""

    rerun = None

    def __init__(self, rank: Rank, step: int):
        self.rank, self.step, self.slots = rank, step, rank.world.setting.slots
        poison = rank.world.setting.poison
        self.poison = poison[1] if poison and poison[0] == step else None

    def ledger(self) -> Ledger:
        return SlotLedger() if self.rank.world.setting.exact else SumLedger()

    def restart(self) -> None:
        pass

    def skip(self) -> None:
        pass

    def compute(self, slots: tuple[int, ...]) -> Contribution:
        rank = self.rank
        rank.wait(f"computes {list(slots)}")
        if rank.position == 0 and self.poison in slots:
            rank.world.die(rank)
            rank.world.hub.switch()
        rank.world.meet_in_replica(rank, slots, f"computing {slots}")
        if len(rank.buffer) != self.slots:
            rank.buffer = torch.zeros(self.slots)
        rank.buffer.zero_()  # the engine's: every computation overwrites it
        rank.buffer[list(slots)] = rank.position + 1.0
        return Contribution([rank.buffer], torch.tensor([sum(s + 1.0 for s in slots), 0.5 * len(slots)], dtype=torch.float64))

    def norm(self, gradients: list[torch.Tensor], sums: torch.Tensor) -> float:
        (bits,) = struct.unpack("<q", struct.pack("<d", float((gradients[0].double() ** 2).sum())))
        said = self.rank.world.meet_in_replica(self.rank, (bits,), "the norm")
        return sum(struct.unpack("<d", struct.pack("<q", n))[0] for (n,) in said) ** 0.5 / float(sums[0])

    def apply(self, total: Total) -> None:
        rank = self.rank
        right = rank.world.right_total(self.step, rank.position)
        divisor = sum(s + 1.0 for s in range(self.slots) if right[s])
        if not torch.equal(total.gradients[0], right) or total.divisor != divisor:
            raise Violation(f"{rank} applies {total.gradients[0].tolist()} / {total.divisor} in step {self.step}, {right.tolist()} / {divisor} is right")
        if rank.state.version is not None:
            raise Violation(f"{rank} changes a state that it calls {rank.state.version}")
        rank.wait("applies")
        rank.state.weights += self.step * total.gradients[0]
        rank.wait("has applied")


class World:
    def __init__(
        self, setting: Setting, choose: Callable[[list[Action]], Action], transaction: type[Transaction] = Transaction,
        coordinator: type[Coordinator] = Coordinator,
    ):
        self.setting, self.choose, self.transaction = setting, choose, transaction
        self.hub = getcurrent()
        self.trace: list[str] = []
        self.events: list[Event] = []
        self.ops: dict[tuple[str, int, int], Op] = {}
        self.ends: dict[tuple[str, int], dict[int, MemoryGroup]] = {}
        self.forming: dict[tuple[str, int], set[int]] = {}
        self.streams: dict[Hashable, Stream] = {}
        self.builds: list[tuple[Rank, Record]] = []
        self.meetings: dict[Hashable, dict[int, tuple[int, ...]]] = {}
        self.kills, self.flaps, self.spoilt = setting.kills, setting.flaps, setting.spoilt
        self.held = False
        self.struck: set[str] = set()
        self.step = 0
        self.called: set[Member] = set()
        self.reports: dict[tuple[str, Member | None], StepReport] = {}
        self.lead = MemoryEvents(self, "lead")
        made = coordinator(1, 0, setting.min_replicas, setting.mode, setting.standbys_up_to, QUARANTINE_AFTER)
        self.log: list[Record] = []
        self.desk = Desk(made, self, self.lead, Listener(self._place, injected=lambda w: w in self.struck))  # type: ignore[arg-type]
        count = setting.replicas * setting.ranks
        self.ranks = {f"w{i}": Rank(self, f"w{i}") for i in range(count + setting.spares)}
        self.spares = [f"w{count + i}" for i in range(setting.spares)]
        self.members = [
            Member(r, 0, tuple(f"w{r * setting.ranks + i}" for i in range(setting.ranks))) for r in range(setting.replicas)
        ]
        self.lead.emit("run_start", step=0)
        for worker, rank in self.ranks.items():
            assert self.desk.connect(worker, rank, 0, "here")
        for member in self.members:
            for worker in member.workers:
                self.ranks[worker].form(member)
        self.desk.open(list(self.members))

    # the commit log (everstep.recovery.desk.DurableLog)
    def write(self, record: Record) -> None:
        self.log.append(record)

    def _place(self, worker: str) -> tuple[int, int]:
        rank = self.ranks[worker]
        return (rank.member.replica, rank.position) if rank.member else (-1, -1)

    # -- what can happen -----------------------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for rank in self.ranks.values():
            if rank.alive:
                if rank.task is not None and rank.pause:
                    if rank.pause.ready():
                        found.append(Action(f"{rank}: {rank.pause.what}", lambda r=rank: r.resume(False)))  # type: ignore[misc]
                    if rank.pause.fails():
                        found.append(Action(f"{rank}: {rank.pause.what} FAILS", lambda r=rank: r.resume(True), "may"))  # type: ignore[misc]
                if rank.down:
                    found.append(Action(f"{rank} hears", lambda r=rank: self._deliver(r)))  # type: ignore[misc]
            elif not rank.noticed and not (rank.up and rank.worker not in self.struck):  # its last words come before its end
                found.append(Action(f"{rank} is noticed dead", lambda r=rank: self._notice(r)))  # type: ignore[misc]
            if rank.up and not rank.noticed:
                found.append(Action(f"{rank} is heard", lambda r=rank: self._hear(r)))  # type: ignore[misc]
        for index, (rank, record) in enumerate(self.builds):
            if self._warm(rank, record):
                found.append(Action(f"{rank} has link {record.view.link_id}", lambda i=index: self._acknowledge(i)))  # type: ignore[misc]
        for key, stream in self.streams.items():
            if stream.joiner is not None and not stream.over and stream.arrived < PIECES and stream.joiner.alive:
                if stream.source.alive:
                    found.append(Action(f"piece {stream.arrived} of heal {key}", lambda s=stream: self._piece(s)))  # type: ignore[misc]
                else:
                    found.append(Action(f"heal {key} breaks off", lambda s=stream: setattr(s, "over", True)))  # type: ignore[misc]
        found += self._controller() + self._repairs() + self._harm()
        return found

    def run(self) -> World:
        self.hub = getcurrent()
        while not self._finished():
            actions = self.actions()
            if not any(a.kind == "must" for a in actions) and self.desk.coordinator.state is State.HELD:
                self.held = True  # for good: too few are left, and the controller ends the run
                return self
            if not any(a.kind == "must" for a in actions):
                stuck = {str(r): r.pause.what for r in self.ranks.values() if r.alive and r.task is not None and r.pause}
                raise Violation(f"nothing can happen any more in step {self.step}: {stuck}, view {self.desk.coordinator.view}")
            action = self.choose(actions)
            self.trace.append(action.name)
            action.do()
            if self.desk.failure:
                raise Violation(f"the desk failed: {self.desk.failure}")
            if len(self.trace) > LIMIT:
                raise Violation(f"step {self.step} goes in circles")
        self._examine()
        return self

    def _finished(self) -> bool:
        return self.desk.coordinator.state is State.LOST or (self.step == self.setting.steps and self._step_is_over())

    # -- actions ---------------------------------------------------------------------------------------------------------------

    def _deliver(self, rank: Rank) -> None:
        rank.control.deliver(rank.down.popleft())

    def _hear(self, rank: Rank) -> None:
        self.desk.receive(rank.worker, rank.up.popleft())

    def _notice(self, rank: Rank) -> None:
        rank.noticed = True
        self.desk.expel(rank.worker, "killed", ended=True)

    def _piece(self, stream: Stream) -> None:
        """One piece goes from the source to the joiner."""
        assert stream.joiner is not None
        weights = stream.aside if stream.aside is not None else stream.source.state.weights
        if stream.aside is None and stream.source.state.version != stream.one.version:
            raise Violation(f"{stream.source} at {stream.source.state.version} is read for {stream.one}")
        part = slice(stream.arrived * len(weights) // PIECES, (stream.arrived + 1) * len(weights) // PIECES)
        stream.joiner.state.weights[part] = weights[part]
        stream.arrived += 1

    def _warm(self, rank: Rank, record: Record) -> bool:
        """All ranks of the position are at it, and live."""
        if not rank.alive or record.view.member_of(rank.worker) != rank.member:
            return False
        there = {r.worker for r, other in self.builds if other.view.link_id == record.view.link_id}
        done = {r.worker for r in self.ranks.values() if r.links and record.view.link_id in r.links._links}
        peers = {m.workers[rank.position] for m in record.view.members}
        return peers <= there | done and all(self.ranks[w].alive for w in peers)

    def _acknowledge(self, index: int) -> None:
        rank, record = self.builds.pop(index)
        if rank.links and not rank.control.build_after(record.number):
            rank.links.acknowledge(record)

    def _step_is_over(self) -> bool:
        coordinator = self.desk.coordinator
        owing = [(w, m) for m in coordinator.view.members if m in self.called for w in m.workers if (w, m) not in self.reports]
        return coordinator.committed >= self.step and not owing

    def _controller(self) -> list[Action]:
        coordinator = self.desk.coordinator
        if coordinator.state is State.LOST:
            return []
        if self._step_is_over() and self.step < self.setting.steps:
            return [Action(f"step {self.step + 1} begins", self._begin)]
        if coordinator.committed >= self.step:
            return []
        return [
            Action(f"replica {member} is called", lambda m=member: self._call(m))  # type: ignore[misc]
            for member in coordinator.view.members if member not in self.called
        ]

    def _begin(self) -> None:
        self.step += 1
        self.called, self.reports = set(), {}
        self.desk.begin(self.step, tuple((f"0/{self.step}.{slot}",) for slot in range(self.setting.slots)))

    def _call(self, member: Member) -> None:
        self.called.add(member)
        for worker in member.workers:
            if self.ranks[worker].alive and self.ranks[worker].member == member:
                self.ranks[worker].begin(self.step)

    def reported(self, rank: Rank, step: int, report: StepReport) -> None:
        self.reports[rank.worker, rank.member] = report

    def _repairs(self) -> list[Action]:
        found = []
        for index, member in enumerate(self.members):
            gone = [w for w in member.workers if not self.ranks[w].alive]
            ready = all(self.ranks[w].noticed if w in gone else self.ranks[w].task is None for w in member.workers)
            if gone and ready and len(gone) <= len(self.spares):
                found.append(Action(f"replica {member} is repaired", lambda i=index: self._repair(i)))  # type: ignore[misc]
        return found

    def _repair(self, index: int) -> None:
        member = self.members[index]
        workers = tuple(w if self.ranks[w].alive else self.spares.pop(0) for w in member.workers)
        if any(not self.ranks[w].alive for w in workers):  # a spare that had died
            for worker in workers:
                if worker not in member.workers and self.ranks[worker].alive:
                    self.spares.insert(0, worker)
            return
        formed = replace(member, build=member.build + 1, workers=workers)
        self.members[index] = formed
        for worker in workers:
            self.ranks[worker].form(formed)
        self.desk.joiner(formed)

    def _harm(self) -> list[Action]:
        found = []
        if self.kills:
            whole = [m for m in self.desk.coordinator.view.members if m.replica not in self.desk.coordinator.view.healing
                     and all(self.ranks[w].alive for w in m.workers)]
            for rank in self.ranks.values():
                if rank.alive and any(rank.worker not in m.workers for m in whole):
                    found.append(Action(f"KILL {rank}", lambda r=rank: self.kill(r), "harm"))  # type: ignore[misc]
        if self.flaps:
            for key, op in self.ops.items():
                ends = self.ends[key[0], key[1]]
                if not op.flapped and all(e.rank.alive and not e.left for e in ends.values()) and self._in_progress(op):
                    found.append(Action(f"FLAP {key}", lambda o=op: self._flap(o), "harm"))  # type: ignore[misc]
        return found

    def right_total(self, step: int, position: int) -> torch.Tensor:
        total = torch.full((self.setting.slots,), position + 1.0)
        if self.setting.poison and self.setting.poison[0] == step:
            total[self.setting.poison[1]] = 0.0
        return total

    def die(self, rank: Rank) -> None:
        rank.alive, rank.task, rank.pause = False, None, None
        rank.down.clear()

    def kill(self, rank: Rank) -> None:
        self.kills -= 1
        self.struck.add(rank.worker)
        self.die(rank)
        self.lead.emit("fault", step=self.step, replica=self._place(rank.worker)[0], rank=rank.position, kind="kill", phase="any")

    def _in_progress(self, op: Op) -> bool:
        return any(r.pause and r.pause.what.endswith(op.kind) for r in self.ranks.values()) and len(op.arrived) < max(
            len(e.replicas) for ends in self.ends.values() for e in ends.values()
        )

    def _flap(self, op: Op) -> None:
        self.flaps -= 1
        op.flapped = True

    def spoil(self, rank: Rank, work: MemoryCollective) -> None:
        """A bit of what one member received is wrong."""
        if self.spoilt and work.op.kind in ("allreduce", "broadcast") and len(self.trace) % 7 == 0:
            self.spoilt -= 1
            work.op.arrived[work.group.index][0][0] += 1.0

    def meet_in_replica(self, rank: Rank, values: tuple[int, ...], what: str) -> list[tuple[int, ...]]:
        """The values of all ranks of the replica's life, matched by their order. Raises ReplicaBroken once a view excludes it."""
        member = rank.member
        assert member is not None
        key = (member, rank.said)
        rank.said += 1
        here = self.meetings.setdefault((key, "what"), {})
        if here.setdefault(0, (hash(what),)) != (hash(what),):
            raise Violation(f"{rank} agrees on {what}, another rank of its replica on something else")
        there = self.meetings.setdefault(key, {})
        there[rank.position] = values
        peers = [self.ranks[w] for w in member.workers if w != rank.worker]
        gone: Callable[[], bool] = lambda: any(not p.alive or p.member != member for p in peers)
        fail = rank.wait(what, lambda: len(there) == len(member.workers) or rank.is_broken(), gone)
        if fail or len(there) < len(member.workers):
            raise ReplicaBroken(f"{rank}: a peer is gone")
        return [there[i] for i in range(len(member.workers))]

    # -- what must be true at the end --------------------------------------------------------------------------------------------

    def _examine(self) -> None:
        coordinator = self.desk.coordinator
        if coordinator.state is State.LOST:
            raise Violation("the state was lost although a replica that held it was spared")
        hashes = {}
        for member in coordinator.view.members:
            for worker in member.workers:
                rank = self.ranks[worker]
                if member.replica in coordinator.view.healing or not rank.alive:
                    continue
                right = sum((k * self.right_total(k, rank.position) for k in range(1, self.setting.steps + 1)), torch.zeros(self.setting.slots))
                if rank.state.version != self.setting.steps or not torch.equal(rank.state.weights, right):
                    raise Violation(f"{rank} ends at {rank.state.version} with {rank.state.weights.tolist()}")
                hashes[f"{member.replica}/{rank.position}"] = str(rank.state.weights.tolist())
        self.lead.emit("verify", step=self.setting.steps, equal=True, hashes=hashes)
        self.lead.emit("run_end", status="done")
        record = history.Record(Path("/nonexistent"), self.events)
        for number, (text, examine) in history.INVARIANTS.items():
            try:
                looked_at, enough = examine(record)
            except history.Broken as broken:
                raise Violation(f"invariant {number} ({text}): {broken}") from broken
            if not enough and number not in (7, 10, 12):  # no checkpoint, no engines, no configuration
                raise Violation(f"invariant {number} looked at nothing: {looked_at}")
        differ = [e for e in self.events if e.event == "void" and "held by" in e["cause"]]
        if differ:
            raise Violation(f"two members held one slot: {differ[0]}")
        died = [e for e in self.events if e.event == "death" and e["worker"] not in self.struck]
        if self.setting.poison and len({e["replica"] for e in died}) != QUARANTINE_AFTER:
            raise Violation(f"not {QUARANTINE_AFTER} replicas died of slot {self.setting.poison[1]}: {died}")


def at_random(seed: int, harm: float = 0.02) -> Callable[[list[Action]], Action]:
    """Any of what can happen; a fault with this probability, as long as there are any left."""
    rng = random.Random(seed)

    def choose(actions: list[Action]) -> Action:
        harms = [a for a in actions if a.kind == "harm"]
        if harms and rng.random() < harm:
            return rng.choice(harms)
        return rng.choice([a for a in actions if a.kind != "harm"])

    return choose


def explore(setting: Setting, seeds: Sequence[int], harm: float = 0.02, **parts: Any) -> list[World]:
    """One world for each seed. Raises Violation, with the seed and the end of its trace."""
    done = []
    for seed in seeds:
        world = World(setting, at_random(seed, harm), **parts)
        try:
            done.append(world.run())
        except Violation as violation:
            raise Violation(f"{violation}\nseed {seed}, {setting}; the last of {len(world.trace)} actions:\n  " + "\n  ".join(world.trace[-40:])) from violation
    return done
