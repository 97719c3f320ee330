"""Samples packed into rows: who shares one, and that a packed model says, learns and draws what an unpacked one does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.cluster.batch import TrainingBatch
from everstep.cluster.slots import cut_slots, in_order, micro_batches
from everstep.config.schema import TrainConfig
from everstep.data.packing import pack
from everstep.errors import BadInput
from everstep.layout import Layout
from support.models import Case, NllWithEntropy, batch, settings
from support.processes import join_world, run_ranks

BUDGET = 26
TEMPERATURE = 0.7


# ------------------------------------------------------------------ who shares a row


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 200), st.integers(1, 4))
def test_rows_hold_every_sample_once_within_the_budget_and_are_few(lengths: list[int], budget: int, multiple: int) -> None:
    rows = pack(lengths, budget, multiple)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    tokens = [sum(lengths[i] for i in row) for row in rows]
    assert all(t <= budget for t in tokens) and tokens == sorted(tokens, reverse=True)
    assert len(rows) % multiple == 0
    if lengths:
        most = -(-len(lengths) // (budget // max(lengths)))  # what `everstep plan` promises
        assert len(rows) <= -(-most // multiple) * multiple


def test_tokens_are_even_over_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 400, (128,), generator=generator).tolist()
    tokens = [sum(lengths[i] for i in row) for row in pack(lengths, 2048, 2)]
    assert max(tokens) - min(tokens) <= 0.02 * max(tokens)
    fewest = -(-sum(lengths) // 2048)
    assert len(tokens) == fewest + fewest % 2
    assert pack([3, 3, 2, 2, 2], 6, 1) == [[0, 1], [2, 3, 4]]  # evenly would be 3 + 2, 3 + 2 and no room
    assert pack([3], 8, 2) == [[0], []]


def chats(samples: int = 13) -> TrainingBatch:
    return batch(3, samples, 21)


def test_slots_are_cut_by_the_batch_alone_and_results_come_back_in_order() -> None:
    train, source = TrainConfig(tokens_per_micro_batch=BUDGET), chats()
    slots = cut_slots(source, train, dp=2)
    assert all(len(slot) == 2 for slot in slots)
    micro = [one for slot in slots for one in slot]
    assert Counter(sid for one in micro for sid in one.sample_ids) == Counter(source.sample_ids)
    assert all(sum(one.token_counts()) <= BUDGET for one in micro if len(one))
    again = cut_slots(source.clone(), train, dp=2)
    assert all(a.equal(b) for x, y in zip(slots, again, strict=True) for a, b in zip(x, y, strict=True))

    for settings_ in (train, TrainConfig(micro_batch_size=4)):
        cut = micro_batches(source, settings_)
        values = in_order(source, [rows for rows, _ in cut], [one["input_ids"].float() for _, one in cut])
        assert torch.equal(values, source["input_ids"].float())
    assert micro_batches(source.slice(0, 0), train) == []


def test_a_sample_that_fits_into_no_row_is_refused_by_its_id() -> None:
    source = chats()
    longest = max(source.token_counts())
    first = source.sample_ids[source.token_counts().index(longest)]
    with pytest.raises(BadInput, match=f"sample {first} has {longest} tokens.*train.tokens_per_micro_batch={longest - 1}"):
        cut_slots(source, TrainConfig(tokens_per_micro_batch=longest - 1), 1)


# ------------------------------------------------------------------ what the model makes of it


def dropless(rank: int, case: Case, packed: bool, world: str) -> dict[str, Any]:
    """One training step and log-probabilities (or values) of ``chats``; ``packed`` in rows, or as before."""
    from everstep.engine.step import Engine

    layout, at = case.layout, case.layout.position(rank)
    join_world(rank, layout.ranks_per_replica, world)
    train = {"tokens_per_micro_batch": BUDGET} if packed else {"micro_batch_size": 1}
    config = settings(engine=case.engine, lora=case.lora, train=train)
    source = chats(14)
    slots = cut_slots(source, config.train, layout.dp)
    found: dict[str, Any] = {}
    engine = Engine(config, case.model, at, layout, torch.device("cpu"))
    engine.init_random(3)
    mine = [slot[at.dp] for slot in slots]
    nothing = [source.slice(0, 0)] if packed else []  # a data-parallel rank may be left without a sample
    for work in (mine, [*mine, *nothing]):
        sums = engine.accumulate(work, NllWithEntropy(), [0] * len(work), temperature=TEMPERATURE)
        again = found.get("gradients")
        found |= {"sums": sums, "gradients": [g.clone() for g in engine.gradients()]}
        assert again is None or all(torch.equal(a, b) for a, b in zip(again, found["gradients"], strict=True))
    cut = micro_batches(source, config.train)
    results = engine.logprobs([*nothing, *(one for _, one in cut)], temperature=TEMPERATURE)
    if results is not None:
        assert [len(r) for r in results[: len(nothing)]] == [0] * len(nothing)
        results = results[len(nothing) :]
        found["logprobs"] = in_order(source, [rows for rows, _ in cut], results) * source["attention_mask"]
    engine.close()
    return found


def both(rank: int, cases: list[Case]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    made = [[dropless(rank, case, packed, f"{number}-{packed}") for packed in (False, True)] for number, case in enumerate(cases)]
    return [(plain, packed) for plain, packed in made]


SP = {"sequence_parallel": True}
CASES = {
    1: [Case(Layout(), engine={"recompute": "full"}), Case(Layout(), "llama", False, engine={"logprob_chunk_tokens": 5}, lora={"rank": 4})],
    2: [Case(Layout(pp=2, layers_per_stage=(4, 2))), Case(Layout(cp=2), engine={"recompute": "selective"})],
    4: [
        Case(Layout(tp=2, cp=2), engine={**SP, "logprob_chunk_tokens": 5}),
        Case(Layout(dp=2, pp=2), lora={"rank": 4}),
        Case(Layout(tp=2, dp=2), engine=SP),
        Case(Layout(dp=2, pp=2, vpp=3), "llama", False, engine={"recompute": "full"}),
    ],
}


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.full) if n > 2 else n for n in CASES])
def test_a_packed_step_is_an_unpacked_one(ranks: int) -> None:
    cases = CASES[ranks]
    for rank, results in enumerate(run_ranks(both, ranks, cases, join=False, deadline_s=100)):
        for case, (plain, packed) in zip(cases, results, strict=True):
            where = f"rank {rank} of {case}"
            assert torch.allclose(packed["sums"], plain["sums"], rtol=1e-6, atol=0), where
            for mine, expected in zip(packed["gradients"], plain["gradients"], strict=True):
                assert (mine - expected).norm() <= 1e-5 * expected.norm(), where
            assert ("logprobs" in packed) == ("logprobs" in plain)
            if "logprobs" in plain:
                assert torch.allclose(packed["logprobs"], plain["logprobs"], rtol=1e-5, atol=1e-5), where
                assert packed["logprobs"].abs().sum() > 0
