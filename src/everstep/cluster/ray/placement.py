"""Which rank and which spare runs on which node. Pure: device counts in, places out; no Ray, no process.

In this order of importance,

    1. a replica lies on as few nodes as it can (its collectives are the frequent ones), ranks of one tensor-parallel group
       on one node where that is possible at all;
    2. no two replicas share a node, if that splits none of them further: one node's death then breaks one replica;
    3. spares, and then rollout engines, lie on nodes without replicas if there are any, else where most devices are free,
       spread evenly.

Replicas are placed one after the other. That is exact if a replica fits on one node or two, or if all nodes
have the same number of devices and suffice without sharing; else it is a good answer, not always the best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.errors import BadInput


@dataclass(frozen=True)
class Placement:
    """``ranks``: (replica, rank) -> node; ``spares``: node of each spare; ``nodes``: devices that were
    offered; ``engine_nodes``: node of each rollout engine, which has ``engine_devices`` there.
    """

    ranks: dict[tuple[int, int], str]
    spare_nodes: list[str]
    nodes: dict[str, int]
    engine_nodes: list[str] = field(default_factory=list)
    engine_devices: int = 1

    @property
    def replica_nodes(self) -> list[list[str]]:
        """For each replica, the node of each of its ranks."""
        replicas = 1 + max((replica for replica, _ in self.ranks), default=-1)
        return [[node for (r, _), node in sorted(self.ranks.items()) if r == replica] for replica in range(replicas)]

    def replicas_on(self, node: str) -> list[int]:
        return sorted({replica for (replica, _), where in self.ranks.items() if where == node})

    def used(self) -> Counter[str]:
        """Devices taken on each node."""
        engines = Counter({node: count * self.engine_devices for node, count in Counter(self.engine_nodes).items()})
        return Counter(self.ranks.values()) + Counter(self.spare_nodes) + engines

    def failure_domains(self) -> str:
        """A table: what each node holds, and what its death would break."""
        replicas = {replica for replica, _ in self.ranks}
        used = self.used()
        rows = [("node", "devices", "holds", "its death breaks")]
        for node, devices in self.nodes.items():
            broken = self.replicas_on(node)
            holds = [
                f"replica {replica} rank{_numbers([k for (r, k), n in self.ranks.items() if (r, n) == (replica, node)])}"
                for replica in broken
            ]
            spares = self.spare_nodes.count(node)
            if spares:
                holds.append(f"{spares} spare{'s' if spares > 1 else ''}")
            engines = self.engine_nodes.count(node)
            if engines:
                holds.append(f"{engines} rollout engine{'s' if engines > 1 else ''}")
            if not broken:
                breaks = "nothing"
            elif set(broken) == replicas:
                breaks = "every replica: the run stops, resumable" if len(replicas) > 1 else "the only replica"
            else:
                breaks = f"replica{_numbers(broken)}; {len(replicas) - len(broken)} of {len(replicas)} go on"
            rows.append((node, f"{used[node]}/{devices}", ", ".join(holds) or "-", breaks))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def place(
    ranks_per_replica: int, replicas: int, spares: int, nodes: Mapping[str, int], together: int = 1,
    engines: int = 0, engine_devices: int = 1,
) -> Placement:
    """Find a node for every rank, spare and rollout engine (``engine_devices`` on one node each).

    ``nodes``: node id -> free devices. ``together``: consecutive ranks that should share a node (layout.tp;
    must divide ranks_per_replica); if they cannot all, the rule is dropped. Deterministic. BadInput if the
    devices do not suffice.
    """
    if together < 1 or ranks_per_replica % together:
        raise ValueError(f"together={together} does not divide {ranks_per_replica} ranks per replica")
    needed, offered = ranks_per_replica * replicas + spares + engines * engine_devices, sum(nodes.values())
    if needed > offered:
        raise BadInput(
            f"the layout needs {needed} devices ({replicas} replicas of {ranks_per_replica} ranks, {spares} spares"
            + (f", {engines} rollout engines of {engine_devices}" if engines else "") + ") "
            f"but the {len(nodes)} node{'s have' if len(nodes) != 1 else ' has'} {offered}; lower layout.replicas, "
            "layout.spares or the ranks of a replica (layout.tp, cp, pp, dp), or add nodes"
        )
    if together > 1 and sum(free // together for free in nodes.values()) * together < ranks_per_replica * replicas:
        together = 1

    free = {node: devices // together for node, devices in nodes.items()}
    holders: Counter[str] = Counter()  # replicas on each node
    ranks: dict[tuple[int, int], str] = {}
    for replica in range(replicas):
        shares = _choose(ranks_per_replica // together, free, holders)
        rank = 0
        for node, units in shares:
            free[node] -= units
            holders[node] += 1
            for _ in range(units * together):
                ranks[replica, rank] = node
                rank += 1

    left = Counter(nodes) - Counter(ranks.values())
    spare_nodes: list[str] = []
    for _ in range(spares):
        node = min(left, key=lambda n: (holders[n] > 0, spare_nodes.count(n), -left[n], n))
        spare_nodes.append(node)
        left -= Counter([node])  # a node without free devices drops out
    engine_nodes: list[str] = []
    for _ in range(engines):
        node = min((n for n in left if left[n] >= engine_devices), key=lambda n: (holders[n] > 0, engine_nodes.count(n), -left[n], n), default="")
        if not node:
            raise BadInput(
                f"no node has {engine_devices} devices left for a rollout engine (rollout.tp); lower rollout.tp, rollout.engines or layout.spares"
            )
        engine_nodes.append(node)
        left -= Counter({node: engine_devices})
    return Placement(ranks, spare_nodes, dict(nodes), engine_nodes, engine_devices)


def _choose(size: int, free: Mapping[str, int], holders: Counter[str]) -> list[tuple[str, int]]:
    """(node, units) for a replica of ``size`` units: fewest nodes first, then nodes that no replica is on."""
    anywhere = _fewest(size, free, holders)
    alone = _fewest(size, {node: units for node, units in free.items() if not holders[node]}, holders)
    assert anywhere is not None  # place() has compared the totals
    return alone if alone is not None and len(alone) <= len(anywhere) else anywhere


def _fewest(size: int, free: Mapping[str, int], holders: Counter[str]) -> list[tuple[str, int]] | None:
    """The largest nodes, and of those that complete the replica the one with fewest replicas, then fewest
    free units.
    """
    largest = sorted((node for node in free if free[node]), key=lambda n: (-free[n], holders[n], n))
    taken: list[tuple[str, int]] = []
    rest = size
    for index, node in enumerate(largest):
        if free[node] >= rest:
            completing = [n for n in largest[index:] if free[n] >= rest]
            last = min(completing, key=lambda n: (holders[n], free[n], n))
            return [*taken, (last, rest)]
        taken.append((node, free[node]))
        rest -= free[node]
    return None


def _numbers(values: list[int]) -> str:
    """`` 3``, ``s 0-3``, ``s 0, 2``: plural s and compact ranges, to follow a noun."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and runs[-1][1] == value - 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'s' if len(values) > 1 else ''} {text}"
