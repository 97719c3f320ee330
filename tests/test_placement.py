"""Placement: everything placed once, capacity kept, replicas compact and apart, spares out of the way."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everstep.cluster.ray.placement import Placement, place
from everstep.errors import BadInput

clusters = st.lists(st.integers(0, 9), min_size=1, max_size=8).map(lambda c: {f"n{i}": d for i, d in enumerate(c)})


def spans(placement: Placement, replicas: int) -> list[int]:
    return [len(set(nodes)) for nodes in placement.replica_nodes[:replicas]]


def shared(placement: Placement) -> list[str]:
    return [node for node in placement.nodes if len(placement.replicas_on(node)) > 1]


@given(clusters, st.integers(1, 10), st.integers(1, 5), st.integers(0, 4))
@settings(deadline=None, max_examples=200)
def test_every_rank_once_and_capacity_kept_or_a_clear_refusal(
    nodes: dict[str, int], size: int, replicas: int, spares: int
) -> None:
    needed = size * replicas + spares
    if needed > sum(nodes.values()):
        with pytest.raises(BadInput, match=rf"needs {needed} devices .* ha(s|ve) {sum(nodes.values())};"):
            place(size, replicas, spares, nodes)
        return
    placement = place(size, replicas, spares, nodes)
    assert sorted(placement.ranks) == [(r, k) for r in range(replicas) for k in range(size)]
    assert len(placement.spare_nodes) == spares
    assert all(placement.used()[node] <= devices for node, devices in nodes.items())
    assert sum(placement.used().values()) == needed
    assert place(size, replicas, spares, nodes) == placement, "deterministic"
    assert [len(where) for where in placement.replica_nodes] == [size] * replicas
    for replica, where in enumerate(placement.replica_nodes):  # a node's ranks are consecutive
        assert where == [placement.ranks[replica, k] for k in range(size)]
        assert len(list(itertools.groupby(where))) == len(set(where))


@given(clusters, st.integers(1, 5), st.integers(1, 6))
@settings(deadline=None, max_examples=200)
def test_replicas_that_fit_whole_are_whole_and_share_only_when_nodes_run_out(
    nodes: dict[str, int], size: int, replicas: int
) -> None:
    whole = {node: devices // size for node, devices in nodes.items()}
    assume(sum(whole.values()) >= replicas)
    placement = place(size, replicas, 0, nodes)
    assert spans(placement, replicas) == [1] * replicas
    hosts = sum(1 for count in whole.values() if count)
    assert len({nodes[0] for nodes in placement.replica_nodes}) == min(hosts, replicas)


@given(st.integers(1, 8), st.integers(1, 10), st.integers(1, 24), st.integers(1, 4))
@settings(deadline=None, max_examples=200)
def test_equal_nodes_that_suffice_are_not_shared(devices: int, count: int, size: int, replicas: int) -> None:
    fewest = -(-size // devices)
    assume(count >= fewest * replicas)
    placement = place(size, replicas, 0, {f"n{i}": devices for i in range(count)})
    assert spans(placement, replicas) == [fewest] * replicas and shared(placement) == []


@given(st.lists(st.integers(1, 7), min_size=2, max_size=7), st.integers(2, 12), st.integers(1, 3))
@settings(deadline=None, max_examples=200)
def test_unequal_nodes_against_exhaustive_search(devices: list[int], size: int, replicas: int) -> None:
    """Where a replica needs two nodes at most, apart and compact is found whenever it exists."""
    largest = sorted(devices, reverse=True)
    fewest = next((k for k in range(1, len(devices) + 1) if sum(largest[:k]) >= size), None)
    assume(fewest is not None and fewest <= 2 and sum(devices) >= size * replicas)
    assert fewest is not None

    @cache
    def possible(free: frozenset[int], left: int) -> bool:
        if left == 0:
            return True
        return any(
            sum(devices[i] for i in chosen) >= size and possible(free - set(chosen), left - 1)
            for chosen in itertools.combinations(sorted(free), fewest)
        )

    placement = place(size, replicas, 0, {f"n{i}": d for i, d in enumerate(devices)})
    if possible(frozenset(range(len(devices))), replicas):
        assert spans(placement, replicas) == [fewest] * replicas and shared(placement) == []


@given(clusters, st.integers(1, 6), st.integers(1, 3), st.integers(1, 5))
@settings(deadline=None, max_examples=200)
def test_spares_prefer_nodes_without_replicas_and_spread(nodes: dict[str, int], size: int, replicas: int, spares: int) -> None:
    assume(size * replicas + spares <= sum(nodes.values()))
    placement = place(size, replicas, spares, nodes)
    empty = {node for node, devices in nodes.items() if devices and not placement.replicas_on(node)}
    room = sum(nodes[node] for node in empty)
    on_empty = [node for node in placement.spare_nodes if node in empty]
    assert len(on_empty) == min(spares, room)
    counts = Counter(on_empty)
    for fuller, emptier in itertools.permutations(empty, 2):  # even, unless the emptier one is full
        assert counts[fuller] <= counts[emptier] + 1 or counts[emptier] == nodes[emptier]


@given(clusters, st.integers(1, 4), st.sampled_from([2, 4]), st.integers(1, 3))
@settings(deadline=None, max_examples=200)
def test_tensor_parallel_neighbours_stay_on_one_node_if_they_can(
    nodes: dict[str, int], groups: int, tp: int, replicas: int
) -> None:
    size = groups * tp
    assume(size * replicas <= sum(nodes.values()))
    placement = place(size, replicas, 0, nodes, together=tp)
    assert len(placement.ranks) == size * replicas
    if sum(devices // tp for devices in nodes.values()) >= groups * replicas:
        for (replica, rank), node in placement.ranks.items():
            assert node == placement.ranks[replica, rank - rank % tp]


def test_the_table_of_failure_domains_says_what_a_node_takes_along() -> None:
    text = place(4, 2, 2, {"a": 4, "b": 4, "c": 2}).failure_domains()
    assert text.splitlines() == [
        "node  devices  holds                its death breaks",
        "a     4/4      replica 0 ranks 0-3  replica 0; 1 of 2 go on",
        "b     4/4      replica 1 ranks 0-3  replica 1; 1 of 2 go on",
        "c     2/2      2 spares             nothing",
    ]
    laptop = place(1, 2, 1, {"laptop": 4}).failure_domains()
    assert "3/4" in laptop and "replica 0 rank 0, replica 1 rank 0, 1 spare" in laptop
    assert "every replica: the run stops, resumable" in laptop
    assert "the only replica" in place(2, 1, 0, {"laptop": 2}).failure_domains()


def test_two_replicas_on_one_big_node_rather_than_split_over_small_ones() -> None:
    placement = place(8, 2, 1, {"big": 16, "s1": 4, "s2": 4, "s3": 1})
    assert spans(placement, 2) == [1, 1] and placement.spare_nodes == ["s1"]
