"""Random fault schedules, a pure function of configuration and seed.

The schedule is one that the configuration must survive, unless ``reckless``: one replica (drawn from the seed) is never struck, so
that whatever the timing somebody holds the committed state, and no more processes die than there are spares, and replicas
above ``recovery.min_replicas``. Every process is as likely a victim as any other: ranks, idle spares and rollout engines alike, of which
no more die than may be started again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence

from everstep.config import derive
from everstep.config.schema import Config, Fault
from everstep.errors import BadInput
from everstep.recovery.faults import (
    AT_POINT,
    BEFORE_THE_VOTE_IS_COUNTED,
    DEADLY,
    ENGINE_PHASES,
    HELD_KINDS,
    PHASES,
    UNHELD_PHASES,
)

#: Kinds that end a run by design: a failure of user code would fail on every replica.
FATAL = frozenset({"error"})
ANY_PHASE: frozenset[str] = frozenset().union(*PHASES.values())
MAX_DELAY_S = 0.05  # delays are drawn so that a fault comes anywhere within a phase of a small model, and soon after it otherwise


def parse_kinds(text: str, reckless: bool) -> list[str]:
    """``kill,stop,...`` as a list. BadInput names what is unknown, or what no run survives."""
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    unknown = sorted(set(kinds) - PHASES.keys())
    if unknown or not kinds:
        raise BadInput(f"--faults {text}: {', '.join(unknown) or 'nothing'} is no kind of fault; there are {', '.join(PHASES)}")
    fatal = sorted(set(kinds) & FATAL)
    if fatal and not reckless:
        raise BadInput(f"--faults {text}: no run survives {', '.join(fatal)}, nor should it; leave it out, or add --reckless")
    return kinds


def budget(config: Config) -> int:
    """How many processes may die so that the run goes on: one for each spare, and one for each replica above the minimum (all are
    needed with recovery.mode=wait)."""
    needed = config.layout.replicas if config.recovery.mode == "wait" else max(1, config.recovery.min_replicas)
    return config.layout.spares + config.layout.replicas - needed


def draw(
    config: Config, seed: int, rate: float, kinds: Sequence[str], reckless: bool = False, stages: Collection[str] = ("rollout",)
) -> list[Fault]:
    """``stages``: those of an RL iteration that can be struck, before its first step. ``rate``: expected faults per step, before the limit of what is survived. The same arguments give the same schedule.

    Raises BadInput if ``rate`` is no rate, or if nothing may be struck.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise BadInput(f"--rate {rate:g} must be a number above 0: expected faults per step")
    if not reckless and set(kinds) & DEADLY and (config.layout.replicas < 2 or not budget(config)):
        raise BadInput(
            f"layout.replicas={config.layout.replicas} and layout.spares={config.layout.spares} with recovery.min_replicas="
            f"{config.recovery.min_replicas} survive no death; raise layout.*, choose --faults nan, or add --reckless"
        )
    return _Draw(config, random.Random(f"everstep chaos {seed}"), list(kinds), reckless, stages).all(rate)


class _Draw:
    """First who is struck when and how, then which deaths are survived (a random choice of them, not the first), then where."""

    def __init__(self, config: Config, rng: random.Random, kinds: list[str], reckless: bool, stages: Collection[str]):
        self._stages = stages
        self._config, self._rng, self._kinds, self._reckless = config, rng, kinds, reckless
        self._sizes = derive.sizes(config)
        self._layout = self._sizes.layout
        self._spares = config.layout.spares  # that are left, if every death is repaired
        self._mourned: set[int] = set()      # replicas that lose a rank and get a spare: they heal
        self._struck: dict[int, set[int]] = {}  # step -> replicas that lose a rank in it before the vote: their slots are salvaged
        self._engine_restarts = config.rollout.engine_restarts
        self._safe = rng.randrange(config.layout.replicas)
        self._saved, self._rollouts = set(derive.saved_steps(config, self._sizes)), set(derive.rollout_steps(config, self._sizes))

    def all(self, rate: float) -> list[Fault]:
        drawn: list[tuple[int, str, int]] = []  # step, kind, victim: ranks in order, then spares, then rollout engines
        victims = self._layout.devices + self._config.rollout.engines
        for step in range(1, self._sizes.total_steps + 1):
            count = int(rate) + (self._rng.random() < rate % 1)
            drawn += [(step, self._rng.choice(self._kinds), self._rng.randrange(victims)) for _ in range(count)]
        drawn = [d for d in drawn if PHASES[d[1]] & self._phases_of(d[2])]  # an idle spare has no gradient
        if not self._reckless:
            drawn = self._survivable(drawn)
        faults = (self._fault(step, kind, victim) for step, kind, victim in drawn)
        return [fault for fault in faults if fault]

    def _survivable(self, drawn: list[tuple[int, str, int]]) -> list[tuple[int, str, int]]:
        harmless = [i for i, (_, kind, victim) in enumerate(drawn) if kind not in DEADLY or victim >= self._layout.devices]
        deaths = [
            i for i, (_, kind, victim) in enumerate(drawn)
            if i not in harmless and not (victim < self._layout.world_size and victim // self._layout.ranks_per_replica == self._safe)
        ]
        kept = self._rng.sample(deaths, min(len(deaths), budget(self._config)))
        return [drawn[i] for i in sorted(harmless + kept)]

    def _fault(self, step: int, kind: str, victim: int) -> Fault | None:
        """None: a spare that is none any more, an engine that would not be started again, or where this kind cannot strike."""
        if victim >= self._layout.devices:
            return self._engine_fault(step, kind, victim - self._layout.devices)
        idle = victim >= self._layout.world_size
        if idle and not self._spares:
            return None
        replica, rank = (0, (victim - self._layout.world_size) % self._spares) if idle else divmod(victim, self._layout.ranks_per_replica)
        phases = sorted(PHASES[kind] & ({"spare"} if idle else self._possible(step, replica)))
        if not phases:
            return None
        phase = self._rng.choice(phases)
        delay_s = round(self._rng.uniform(0.0, MAX_DELAY_S), 4) if kind not in AT_POINT else 0.0
        if kind in DEADLY and self._spares:
            self._spares -= 1
            if not idle:
                self._mourned.add(replica)
        if kind in DEADLY and phase in BEFORE_THE_VOTE_IS_COUNTED:
            self._struck.setdefault(step, set()).add(replica)
        hold = kind in HELD_KINDS and phase not in UNHELD_PHASES and self._rng.random() < 0.5
        return Fault.model_validate(
            {"step": step, "phase": phase, "kind": kind, "replica": replica, "rank": rank, "hold": hold, "delay_s": delay_s}
        )

    def _engine_fault(self, step: int, kind: str, number: int) -> Fault | None:
        if step not in self._rollouts or not self._engine_restarts:
            return None
        self._engine_restarts -= 1
        phase = self._rng.choice(sorted(PHASES[kind] & ENGINE_PHASES))
        return Fault.model_validate({"step": step, "phase": phase, "kind": kind, "rank": number})

    def _phases_of(self, victim: int) -> frozenset[str]:
        """What kind of phases it can go through at all."""
        if victim >= self._layout.devices:
            return ENGINE_PHASES
        return frozenset({"spare"}) if victim >= self._layout.world_size else ANY_PHASE - ENGINE_PHASES - {"spare"}

    def _possible(self, step: int, replica: int) -> set[str]:
        """Phases that a rank of ``replica`` may go through in ``step``."""
        phases = {"compute", "exchange", "reduce", "vote", "commit", "apply"}
        if replica in self._mourned:
            phases.add("heal")
        if self._struck.get(step, set()) - {replica}:
            phases.add("salvage")
        if step in self._saved and replica == 0:  # the first contributor writes
            phases.add("save")
        if step in self._rollouts:
            engines = bool(self._config.rollout.engines)
            phases |= set(self._stages) - ({"rollout"} if engines else set())
            if engines and replica == 0:  # the first contributor sends
                phases.add("send")
        return phases
