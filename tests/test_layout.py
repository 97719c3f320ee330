"""Rank arithmetic against its own laws (hypothesis) and against Megatron-Core's RankGenerator."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import ConfigError
from everstep.layout import GROUP_KINDS, Layout, Position

# No deadline for one example: what is tested is arithmetic, not the load of the machine.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

size = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp, cp = draw(size), draw(size)
    ep = draw(st.sampled_from([n for n in range(1, dp * cp + 1) if (dp * cp) % n == 0]))
    return Layout(
        replicas=draw(size), spares=draw(st.integers(0, 3)), tp=draw(size), cp=cp, ep=ep, dp=dp, pp=draw(size)
    )


@given(layouts())
def test_rank_and_position_are_inverse(layout: Layout) -> None:
    positions = [layout.position(rank) for rank in range(layout.ranks_per_replica)]
    assert len(set(positions)) == layout.tp * layout.cp * layout.dp * layout.pp
    assert [layout.rank_of(p) for p in positions] == list(range(layout.ranks_per_replica))


@given(layouts(), st.sampled_from(sorted(GROUP_KINDS)))
def test_groups_partition_the_ranks(layout: Layout, kind: str) -> None:
    groups = layout.groups(kind)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.ranks_per_replica))
    assert len({len(group) for group in groups}) == 1
    assert all(group == sorted(group) for group in groups)
    assert all(layout.group_of(kind, rank) == group for group in groups for rank in group)


@given(layouts(), st.sampled_from(["tp", "cp", "dp", "pp"]))
def test_only_the_named_coordinate_varies_inside_a_group(layout: Layout, kind: str) -> None:
    for group in layout.groups(kind):
        positions = [layout.position(rank) for rank in group]
        assert [getattr(p, kind) for p in positions] == list(range(getattr(layout, kind)))
        for other in {"tp", "cp", "dp", "pp"} - {kind}:
            assert len({getattr(p, other) for p in positions}) == 1


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@given(layouts())
def test_groups_are_megatrons(layout: Layout) -> None:
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=order)
    for kind in ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "tp-dp", "tp-dp-cp", "tp-pp"):
        assert layout.groups(kind) == dense.get_ranks(kind), kind
    assert layout.groups("model-parallel") == dense.get_ranks("tp-pp")

    expert_dp = layout.dp * layout.cp // layout.ep
    expert = RankGenerator(tp=layout.tp, ep=layout.ep, dp=expert_dp, pp=layout.pp, cp=1, order=order)
    for kind in ("ep", "tp-ep", "tp-ep-pp"):
        assert layout.groups(kind) == expert.get_ranks(kind), kind
    assert layout.groups("expert-dp") == expert.get_ranks("dp")


@given(layouts())
def test_peers_are_one_per_replica_at_one_position(layout: Layout) -> None:
    links = {tuple(layout.peers(rank)) for rank in range(layout.ranks_per_replica)}
    assert sorted(member for link in links for member in link) == sorted(layout.ranks())
    for link in links:
        assert [replica for replica, _ in link] == list(range(layout.replicas))
        assert len({layout.position(rank) for _, rank in link}) == 1


@given(layouts())
def test_every_data_coordinate_is_collected_once_from_its_last_stage(layout: Layout) -> None:
    collected = layout.collect_ranks()
    assert [layout.data_coordinate(rank) for rank in collected] == list(range(layout.dp))
    for rank in collected:
        at = layout.position(rank)
        assert (at.pp, at.tp, at.cp) == (layout.pp - 1, 0, 0)


@given(layouts())
def test_global_ranks_number_all_ranks(layout: Layout) -> None:
    assert [layout.global_rank(*rank) for rank in layout.ranks()] == list(range(layout.world_size))
    assert layout.devices == layout.world_size + layout.spares


@given(size, size, st.integers(0, 20), st.data())
def test_stages_hold_every_layer_once_in_order(pp: int, vpp: int, more: int, data: st.DataObject) -> None:
    vpp = vpp if pp > 1 else 1
    layers = pp * vpp + more
    layout = Layout(pp=pp, vpp=vpp)
    stages = layout.stages(layers)
    assert len(stages) == pp and all(len(chunks) == vpp for chunks in stages)
    depth = [stages[stage][chunk] for chunk in range(vpp) for stage in range(pp)]
    assert [layer for chunk in depth for layer in chunk] == list(range(layers))
    sizes = [len(chunk) for chunk in depth]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes), "the stage with the output layer takes no extra layer unless all are equal"
    chosen = tuple(data.draw(st.permutations(sizes)))
    assert [len(c) for c in sum(zip(*Layout(pp=pp, vpp=vpp, layers_per_stage=chosen).stages(layers), strict=True), ())] == list(chosen)


def test_a_known_layout() -> None:
    layout = Layout(replicas=2, spares=1, tp=2, dp=2, pp=2)
    assert layout.ranks_per_replica == 8
    assert layout.position(5) == Position(pp=1, dp=0, tp=1)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.collect_ranks() == [4, 6]
    assert layout.peers(3) == [(0, 3), (1, 3)]


def test_impossible_layouts_and_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layout\.ep=3 does not divide layout\.dp\*layout\.cp=4"):
        Layout(dp=2, cp=2, ep=3)
    with pytest.raises(ConfigError, match=r"layout\.tp is 0"):
        Layout(tp=0)
    with pytest.raises(ConfigError, match=r"layout\.vpp=2 .*layout\.pp=1"):
        Layout(vpp=2)
    with pytest.raises(ConfigError, match=r"layout\.layers_per_stage=\[1, 2\] must be 4 numbers"):
        Layout(pp=2, vpp=2, layers_per_stage=(1, 2))
    layout = Layout(tp=2, dp=2, ep=2)
    with pytest.raises(IndexError):
        layout.position(4)
    with pytest.raises(IndexError):
        layout.rank_of(Position(tp=2))
    with pytest.raises(IndexError, match="ep follows"):
        layout.rank_of(Position(dp=1, ep=0))
    with pytest.raises(ValueError, match="unknown kind of group 'px'"):
        layout.groups("px")
