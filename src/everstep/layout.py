"""Rank arithmetic: which rank of which replica sits where. Pure functions of a few integers; no torch.

Ranks are numbered inside their replica: (replica, rank), rank in 0 .. ranks_per_replica - 1. The order is
Megatron-Core's ``tp-cp-ep-dp-pp``: tensor-parallel neighbours are adjacent, pipeline stages farthest apart.

Expert parallelism adds no ranks. Megatron lays the experts over the same ranks a second time, with
``cp * dp = ep * expert_dp``: inside one stage the ranks of equal ``tp``, numbered ``cp + CP * dp``, are cut
into runs of ``ep``. So ``Position.ep`` follows from ``cp`` and ``dp``; it is there for the reader.

Source: ``megatron.core.parallel_state.RankGenerator`` (the tests compare every group with it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from everstep.errors import ConfigError

#: The groups a rank can be asked for, with the coordinates that vary inside them.
GROUP_KINDS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "tp-cp": ("tp", "cp"),
    "dp-cp": ("dp", "cp"),
    "tp-dp": ("tp", "dp"),
    "tp-dp-cp": ("tp", "dp", "cp"),
    "tp-pp": ("tp", "pp"),
    "model-parallel": ("tp", "pp"),
    "ep": ("ep",),
    "tp-ep": ("tp", "ep"),
    "tp-ep-pp": ("tp", "ep", "pp"),
    "expert-dp": ("expert_dp",),
}


@dataclass(frozen=True)
class Position:
    """Coordinates of one rank inside its replica; ``ep`` follows from ``cp`` and ``dp`` (see the module)."""

    pp: int = 0
    dp: int = 0
    ep: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Layout:
    """How many replicas and spares there are, and how the ranks of one replica are arranged.

    A spare is a process without a position until it takes a dead rank's place, so it has no rank here.
    """

    replicas: int = 1
    spares: int = 0
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1  # model chunks of each rank; adds no ranks
    layers_per_stage: tuple[int, ...] = ()  # of the pp*vpp stages from the input to the output; (): balanced

    def __post_init__(self) -> None:
        for name in ("replicas", "tp", "cp", "ep", "dp", "pp", "vpp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"layout.{name} is {getattr(self, name)}; it must be at least 1")
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(
                f"layout.vpp={self.vpp} interleaves the stages of a pipeline, but layout.pp=1; "
                "raise layout.pp, or set layout.vpp=1"
            )
        stages = self.pp * self.vpp
        if self.layers_per_stage and (len(self.layers_per_stage) != stages or min(self.layers_per_stage) < 1):
            raise ConfigError(
                f"layout.layers_per_stage={list(self.layers_per_stage)} must be {stages} numbers of at least 1, one for "
                f"each of layout.pp*layout.vpp={self.pp}*{self.vpp} stages; change it, or leave it out"
            )
        if self.spares < 0:
            raise ConfigError(f"layout.spares is {self.spares}; it must be at least 0")
        if (self.dp * self.cp) % self.ep:
            raise ConfigError(
                f"layout.ep={self.ep} does not divide layout.dp*layout.cp={self.dp * self.cp}; "
                "experts are spread over the data- and context-parallel ranks of one replica: "
                "change layout.ep or layout.dp"
            )

    # ------------------------------------------------------------------ sizes

    @property
    def ranks_per_replica(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def world_size(self) -> int:
        """Ranks that train when every replica is whole; spares not counted."""
        return self.replicas * self.ranks_per_replica

    @property
    def devices(self) -> int:
        """Processes, and devices, in all: ranks and spares."""
        return self.world_size + self.spares

    # -------------------------------------------------------- rank <-> position

    def position(self, rank: int) -> Position:
        """Coordinates of ``rank`` (of any replica). ``IndexError`` if there is no such rank."""
        if not 0 <= rank < self.ranks_per_replica:
            raise IndexError(f"rank {rank} is outside a replica of {self.ranks_per_replica} ranks")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Position(pp=pp, dp=dp, ep=self._expert(cp, dp)[0], cp=cp, tp=tp)

    def rank_of(self, position: Position) -> int:
        """The inverse of :meth:`position`. ``IndexError`` if the position does not exist."""
        for name in ("tp", "cp", "dp", "pp"):
            if not 0 <= getattr(position, name) < getattr(self, name):
                raise IndexError(f"{position} is outside {self}")
        if position.ep != self._expert(position.cp, position.dp)[0]:
            raise IndexError(f"{position} does not exist in {self}: ep follows from cp and dp")
        return ((position.pp * self.dp + position.dp) * self.cp + position.cp) * self.tp + position.tp

    def _expert(self, cp: int, dp: int) -> tuple[int, int]:
        """(ep, expert_dp) of the ranks at ``cp``, ``dp``."""
        expert_dp, ep = divmod(dp * self.cp + cp, self.ep)
        return ep, expert_dp

    # ------------------------------------------------------------------ layers

    def stages(self, layers: int) -> list[list[range]]:
        """The layers of every model chunk: ``[pp][chunk]``, consecutive numbers out of ``range(layers)``.

        Depth runs through chunk 0 of all ranks, then through chunk 1, and so on. Without ``layers_per_stage``
        the sizes differ by at most one; the middle takes the larger ones, then the first stage, which also holds the
        embedding, and last the one with the output layer. ``ConfigError`` if ``layers`` cannot be cut so.
        """
        count = self.pp * self.vpp
        if count > layers:
            raise ConfigError(
                f"layout.pp*layout.vpp={self.pp}*{self.vpp}={count} stages are more than the {layers} layers of the "
                "model; lower layout.pp or layout.vpp"
            )
        sizes = list(self.layers_per_stage)
        if not sizes:
            base, more = divmod(layers, count)
            larger = [*range(1, count - 1), 0, count - 1][:more]
            sizes = [base + (stage in larger) for stage in range(count)]
        if sum(sizes) != layers:
            raise ConfigError(
                f"layout.layers_per_stage={sizes} makes {sum(sizes)} layers, the model has {layers}; "
                "change layout.layers_per_stage, or leave it out"
            )
        ends = list(accumulate(sizes, initial=0))
        depth = [range(a, b) for a, b in pairwise(ends)]
        return [[depth[chunk * self.pp + stage] for chunk in range(self.vpp)] for stage in range(self.pp)]

    # ------------------------------------------------------------------ groups

    def groups(self, kind: str) -> list[list[int]]:
        """The groups of ``kind`` (see ``GROUP_KINDS``) inside one replica, in Megatron-Core's order.

        Every rank is in exactly one group of a kind; ranks ascend in a group, groups ascend by first rank.
        """
        if kind not in GROUP_KINDS:
            raise ValueError(f"unknown kind of group {kind!r}; there are {', '.join(GROUP_KINDS)}")
        varying = GROUP_KINDS[kind]
        # Experts see the same ranks through other coordinates.
        by_expert = "ep" in varying or "expert_dp" in varying
        names = ("tp", "ep", "expert_dp", "pp") if by_expert else ("tp", "cp", "dp", "pp")
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks_per_replica):
            at = self.position(rank)
            ep, expert_dp = self._expert(at.cp, at.dp)
            value = {"tp": at.tp, "cp": at.cp, "dp": at.dp, "pp": at.pp, "ep": ep, "expert_dp": expert_dp}
            groups.setdefault(tuple(value[n] for n in names if n not in varying), []).append(rank)
        return list(groups.values())

    def group_of(self, kind: str, rank: int) -> list[int]:
        """The one group of ``kind`` that holds ``rank``."""
        return next(group for group in self.groups(kind) if rank in group)

    # -------------------------------------------------------- across replicas

    def peers(self, rank: int) -> list[tuple[int, int]]:
        """The members of ``rank``'s link: (replica, rank) of the same position in every replica."""
        self.position(rank)
        return [(replica, rank) for replica in range(self.replicas)]

    def ranks(self) -> Iterator[tuple[int, int]]:
        """Every (replica, rank), in order."""
        for replica in range(self.replicas):
            for rank in range(self.ranks_per_replica):
                yield replica, rank

    def global_rank(self, replica: int, rank: int) -> int:
        """The number of (replica, rank) among all ranks: for file names and logs only."""
        self.position(rank)
        if not 0 <= replica < self.replicas:
            raise IndexError(f"replica {replica} does not exist; there are {self.replicas}")
        return replica * self.ranks_per_replica + rank

    # ------------------------------------------------------------------ data

    def data_coordinate(self, rank: int) -> int:
        """Inner data-parallel coordinate, 0 .. dp - 1. Ranks that share it see the same samples."""
        return self.position(rank).dp

    def collect_ranks(self) -> list[int]:
        """For each data coordinate the rank that answers for it: last pipeline stage, tp 0, cp 0."""
        return [
            self.rank_of(Position(pp=self.pp - 1, dp=dp, ep=self._expert(0, dp)[0], cp=0, tp=0))
            for dp in range(self.dp)
        ]
