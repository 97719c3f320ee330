"""Dispatch: samples reach every peer once, results come back in order, misuse is refused with a clear
sentence.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.cluster import dispatch as dispatching
from everstep.cluster.batch import TrainingBatch
from everstep.cluster.dispatch import (
    Dispatch,
    DispatchError,
    MeshDispatch,
    PassThroughDispatch,
    Rank,
    get_dispatch,
    ranks_of,
    register_dispatch,
)
from everstep.layout import Layout


def batch_of(lengths: list[int], prefix: str = "0") -> TrainingBatch:
    width = max([1, *lengths])
    mask = torch.tensor([[int(t < n) for t in range(width)] for n in lengths], dtype=torch.int64)
    mask = mask.reshape(len(lengths), width)
    return TrainingBatch(
        tensors={
            "input_ids": torch.arange(1, 1 + mask.numel()).reshape(mask.shape) * mask,
            "attention_mask": mask,
        },
        columns={"length": list(lengths)},
        sample_ids=[f"{prefix}/{i}" for i in range(len(lengths))],
    )


def run(how: Dispatch, ranks: list[Rank], method, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
    """What a launcher does, without processes: validate, dispatch, call once per rank, collect."""
    how.validate(ranks, args, kwargs)
    calls = how.dispatch(ranks, args, kwargs)
    assert len(calls) == len(ranks)
    results = [method(rank, *a, **k) for rank, (a, k) in zip(ranks, calls, strict=True)]
    return calls, how.collect(ranks, results)


layouts = st.builds(
    Layout,
    replicas=st.integers(1, 4),
    tp=st.integers(1, 2),
    cp=st.integers(1, 2),
    dp=st.integers(1, 3),
    pp=st.integers(1, 2),
)
members = st.integers(1, 15)  # a bit mask of living replicas


def living(layout: Layout, mask: int) -> list[int]:
    return [r for r in range(layout.replicas) if mask >> r & 1] or [0]


@given(layouts, members, st.lists(st.integers(1, 6), max_size=20))
@settings(deadline=None, max_examples=60)
def test_mesh_gives_every_sample_to_exactly_one_data_coordinate_and_all_its_peers(
    layout: Layout, mask: int, lengths: list[int]
) -> None:
    alive = living(layout, mask)
    ranks = ranks_of(layout, alive)
    batch = batch_of(lengths)
    seen: dict[int, TrainingBatch] = {}
    called = []

    def method(rank: Rank, given: TrainingBatch, scale: float) -> TrainingBatch | None:
        called.append((rank.replica, rank.rank))
        assert scale == 2.0, "other arguments travel as they are"
        assert seen.setdefault(rank.data_index, given) is given, "peers share one object, so it is sent once"
        return given.with_tensors(doubled=given["input_ids"] * scale) if rank.collects else None

    _, answer = run(get_dispatch("mesh"), ranks, method, batch, scale=2.0)
    assert called == [(r, k) for r in alive for k in range(layout.ranks_per_replica)], (
        "also with an empty chunk"
    )
    assert sorted(seen) == list(range(len(alive) * layout.dp))
    assert [sid for i in sorted(seen) for sid in seen[i].sample_ids] == batch.sample_ids
    assert answer.equal(batch.with_tensors(doubled=batch["input_ids"] * 2.0))


@given(layouts, members)
@settings(deadline=None, max_examples=60)
def test_one_rank_answers_for_each_data_coordinate(layout: Layout, mask: int) -> None:
    alive = living(layout, mask)
    ranks = ranks_of(layout, alive)
    answering = [rank for rank in ranks if rank.collects]
    assert sorted(rank.data_index for rank in answering) == list(range(len(alive) * layout.dp))
    assert all(
        r.position.pp == layout.pp - 1 and r.position.tp == 0 and r.position.cp == 0 for r in answering
    )
    # Peers in a pipeline, tensor- or context-parallel group share the samples.
    assert len({(r.replica, r.position.dp, r.data_index) for r in ranks}) == len(alive) * layout.dp


def test_mesh_cuts_all_batches_alike_and_lists_other_results_in_data_order() -> None:
    ranks = ranks_of(Layout(replicas=2, tp=2, dp=2))
    first, second = batch_of([1, 2, 3, 4, 5]), batch_of([5, 4, 3, 2, 1], prefix="1")

    def pairs(rank: Rank, a: TrainingBatch, other: TrainingBatch) -> Any:
        return list(zip(a.sample_ids, other.sample_ids, strict=True)) if rank.collects else "not looked at"

    _, answer = run(get_dispatch("mesh"), ranks, pairs, first, other=second)
    assert answer == [
        [("0/0", "1/0"), ("0/1", "1/1")],
        [("0/2", "1/2")],
        [("0/3", "1/3")],
        [("0/4", "1/4")],
    ]


def test_mesh_with_more_coordinates_than_samples_ignores_what_empty_chunks_return() -> None:
    ranks = ranks_of(Layout(replicas=3, dp=2))

    def method(rank: Rank, given: TrainingBatch) -> TrainingBatch:
        if len(given) == 0:
            return given  # has no new tensor, as there was nothing to compute
        return given.with_tensors(score=torch.ones(len(given)))

    _, answer = run(get_dispatch("mesh"), ranks, method, batch_of([3, 1]))
    assert answer.sample_ids == ["0/0", "0/1"] and answer["score"].tolist() == [1.0, 1.0]
    _, nothing = run(get_dispatch("mesh"), ranks, method, batch_of([]))
    assert len(nothing) == 0


def test_pass_through_sends_the_same_to_all_and_returns_all() -> None:
    ranks = ranks_of(Layout(replicas=2, pp=2))
    batch = batch_of([2, 2])
    calls, answer = run(
        get_dispatch("pass_through"), ranks, lambda rank, b, n: (str(rank), len(b), n), batch, n=7
    )
    assert answer == [("0/0", 2, 7), ("0/1", 2, 7), ("1/0", 2, 7), ("1/1", 2, 7)]
    assert all(args[0] is batch for args, _ in calls)


def test_misuse_is_refused_before_anything_is_sent() -> None:
    ranks = ranks_of(Layout(replicas=2))
    mesh = get_dispatch("mesh")
    with pytest.raises(DispatchError, match=r"equally long.*'argument 0': 2, 'other': 1"):
        mesh.validate(ranks, (batch_of([1, 2]),), {"other": batch_of([1], prefix="1")})
    with pytest.raises(DispatchError, match="argument 0 is a list of TrainingBatches"):
        mesh.validate(ranks, ([batch_of([1])],), {})
    with pytest.raises(DispatchError, match="rank 1/0 returned a NoneType"):
        mesh.collect(ranks, [batch_of([1]), None])
    with pytest.raises(DispatchError, match="1 results from 2 ranks"):
        mesh.collect(ranks, [batch_of([1])])
    with pytest.raises(DispatchError, match=r"answered for are \[0\]"):
        mesh.validate(ranks[:1], (), {})


def test_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "_REGISTRY", dict(dispatching._REGISTRY))

    class Mine(PassThroughDispatch):
        pass

    register_dispatch("mine", Mine)
    register_dispatch("mine", Mine)  # the same again is harmless (a module imported twice)
    assert isinstance(get_dispatch("mine"), Mine) and get_dispatch("mine").name == "mine"
    assert get_dispatch("mine") is not get_dispatch("mine"), "one instance serves one call"
    with pytest.raises(DispatchError, match="'mesh'"):
        get_dispatch("mehs")
    with pytest.raises(DispatchError, match="pass_through"):
        get_dispatch("zzz")
    with pytest.raises(DispatchError, match="taken"):
        register_dispatch("mesh", Mine)
    with pytest.raises(DispatchError, match="not a subclass"):
        register_dispatch("bad", MeshDispatch())  # type: ignore[arg-type]
    assert DispatchError.exit_code == 2


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    path = Path(__file__).parents[1] / "examples" / "custom_dispatch.py"
    spec = importlib.util.spec_from_file_location("custom_dispatch", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_dispatch"] = module
    spec.loader.exec_module(module)
    return module


@given(tokens=st.lists(st.integers(0, 50), max_size=40), parts=st.integers(1, 6))
@settings(deadline=None)
def test_balanced_assignment_is_a_partition_and_even(
    example: types.ModuleType, tokens: list[int], parts: int
) -> None:
    chosen = example.assign(tokens, parts)
    assert sorted(i for part in chosen for i in part) == list(range(len(tokens)))
    loads = [sum(tokens[i] for i in part) for part in chosen]
    assert max(loads) - min(loads) <= max(tokens, default=0)


@given(layout=layouts, lengths=st.lists(st.integers(1, 9), max_size=20))
@settings(deadline=None, max_examples=40)
def test_balanced_dispatch_returns_the_callers_order(
    example: types.ModuleType, layout: Layout, lengths: list[int]
) -> None:
    batch = batch_of(lengths).pad_to(12)  # wider than any sample: the width comes back too
    _, answer = run(
        example.BalancedDispatch(),
        ranks_of(layout),
        lambda rank, b: b.with_tensors(twice=b["input_ids"] * 2) if rank.collects else None,
        batch,
    )
    assert answer.equal(batch.with_tensors(twice=batch["input_ids"] * 2))


def test_balanced_is_more_even_than_mesh_on_uneven_lengths(example: types.ModuleType) -> None:
    batch = example.uneven_batch(samples=24, longest=48)
    tokens = batch.token_counts()
    mesh = [sum(part.token_counts()) for part in batch.chunk(4)]
    balanced = [sum(tokens[i] for i in part) for part in example.assign(tokens, 4)]
    assert max(balanced) - min(balanced) < (max(mesh) - min(mesh)) / 4


def test_balanced_refuses_a_method_that_loses_samples(example: types.ModuleType) -> None:
    with pytest.raises(DispatchError, match="samples it was given"):
        run(
            example.BalancedDispatch(),
            ranks_of(Layout(replicas=2)),
            lambda rank, b: b.slice(0, 1),
            batch_of([1] * 5),
        )
    with pytest.raises(DispatchError, match="exactly one TrainingBatch"):
        example.BalancedDispatch().validate(ranks_of(Layout()), (1,), {})


@pytest.mark.parametrize(("samples", "unit", "parts"), [(64, 16, 3), (64, 16, 5), (10, 4, 2), (3, 8, 2), (0, 4, 2), (12, 1, 5)])
def test_a_mesh_with_a_unit_cuts_only_between_whole_units(samples, unit, parts):
    batch = TrainingBatch({"x": torch.arange(samples)}, {}, [str(i) for i in range(samples)])
    dispatch = get_dispatch(f"mesh:{unit}")
    chunks = dispatch.split(batch, parts)
    assert len(chunks) == parts and [s for c in chunks for s in c.sample_ids] == batch.sample_ids
    starts = [sum(len(c) for c in chunks[:i]) for i in range(parts)]
    assert all(start % unit == 0 or start == samples for start in starts)
    assert max(-(-len(c) // unit) for c in chunks) - min(-(-len(c) // unit) for c in chunks) <= 1, "as even as whole units allow"
    for wrong in ("mesh:0", "mesh:-1", "mesh:x"):
        with pytest.raises(DispatchError, match="no dispatch is called"):
            get_dispatch(wrong)
