"""The output projection chunk by chunk: the numbers of the whole one, in every layout, bitwise repeatable, and no logits of all tokens."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from everstep.engine.projection import projected_logprobs
from everstep.engine.vocab import token_logprobs
from everstep.layout import Layout
from support.models import NllWithEntropy, batch, settings, tiny_config
from support.processes import join_world, run_ranks

VOCAB, HIDDEN, CHUNK = 1009, 16, 8  # a prime: padded to be cut
TEMPERATURE = 0.7


class Shapes(TorchDispatchMode):
    """Notes the shape of everything that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, torch.Tensor):
                self.seen.add(tuple(one.shape))
        return out


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_entropy_and_gradients_equal_those_of_whole_logits(dtype: torch.dtype, frozen: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(13, HIDDEN, generator=generator).to(dtype).requires_grad_(not frozen)
    targets = torch.randint(0, 11, (3, 7), generator=generator)
    pull = torch.randn(2, 3, 7, generator=generator)
    how: dict[str, Any] = {"first": 0, "valid": 11, "temperature": TEMPERATURE, "with_entropy": True}
    results = []
    for chunk in (0, 1, 5, 21, 100):
        if chunk:
            outputs = projected_logprobs(hidden, weight, targets, chunk=chunk, **how)
        else:
            outputs = token_logprobs(hidden @ weight.t(), targets, **how)
        wanted = [hidden] if frozen else [hidden, weight]
        grads = torch.autograd.grad((torch.stack(outputs) * pull).sum(), wanted)
        results.append([t.double() for t in (*outputs, *grads)])
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            limit = 1e-6 if dtype == torch.float32 else 1e-2  # chunks of the weight's gradient are rounded one by one
            assert (got - expected).norm() <= limit * expected.norm()
    if not frozen:
        assert not results[1][3][11:].any()  # padding of the vocabulary learns nothing


def numbers(rank: int, layout: Layout, world: str, model: Any, chunk: int, engine: dict[str, Any], lora: dict[str, Any]) -> dict[str, Any]:
    from everstep.engine.step import Engine

    join_world(rank, layout.ranks_per_replica, world)
    config = settings(engine={**engine, "logprob_chunk_tokens": chunk}, lora=lora)
    one = Engine(config, model, layout.position(rank), layout, torch.device("cpu"))
    one.init_random(3)
    batches = [batch(1, 3, 22), batch(2, 2, 17)]
    found: dict[str, Any] = {"sums": [], "norms": []}
    watch = Shapes() if layout.cp == 1 else contextlib.nullcontext()  # torch's causal bias is made under no dispatch mode
    one.keep_reference()
    with watch:
        found["logprobs"] = one.logprobs(batches, temperature=TEMPERATURE, model="reference")
    for _ in range(2):
        with watch:
            sums = one.accumulate(batches, NllWithEntropy(), [0, 0], temperature=TEMPERATURE)
        found["sums"].append(sums)
        found["norms"].append(one.squared_norm(one.gradients()))
        found.setdefault("gradients", [gradient.clone() for gradient in one.gradients()])
        one.apply(one.gradients(), 0.05, 1e-2)
    found["hash"], found["shapes"] = one.state_hash(), getattr(watch, "seen", None)
    one.close()
    return found


def all_numbers(rank: int, cases: list[tuple[Layout, bool, dict[str, Any], dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    results = []
    for number, (layout, tied, engine, lora) in enumerate(cases):
        model = tiny_config("qwen3", tied=tied, vocab_size=VOCAB, hidden_size=HIDDEN)
        lives = enumerate((0, CHUNK, CHUNK))
        results.append([numbers(rank, layout, f"{number}-{life}", model, chunk, engine, lora) for life, chunk in lives])
    return results


SP = {"sequence_parallel": True}
CASES: dict[int, list[tuple[Layout, bool, dict[str, Any], dict[str, Any]]]] = {
    1: [(Layout(), True, {"recompute": "full"}, {}), (Layout(), False, {}, {"rank": 4})],
    2: [(Layout(tp=2), True, SP, {}), (Layout(pp=2, vpp=2), True, {}, {})],
    4: [(Layout(tp=2, pp=2), False, {}, {}), (Layout(cp=2, pp=2), True, {}, {"rank": 4})],
}


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.full) if n > 2 else n for n in CASES])
def test_every_layout_gives_the_numbers_of_whole_logits_and_never_makes_them(ranks: int) -> None:
    cases = CASES[ranks]
    for rank, results in enumerate(run_ranks(all_numbers, ranks, cases, join=False, deadline_s=100)):
        for (layout, *_), (whole, chunked, again) in zip(cases, results, strict=True):
            at = layout.position(rank)
            # Before AdamW, and after it, which turns a gradient near zero into a step of lr, rounding errors included.
            for sums, expected, limit in zip(chunked["sums"], whole["sums"], (1e-6, 1e-4), strict=True):
                assert torch.allclose(sums, expected, rtol=limit, atol=0), (layout, rank)
            for mine, expected in zip(chunked["gradients"], whole["gradients"], strict=True):
                assert (mine - expected).norm() <= 3e-6 * expected.norm(), (layout, rank)
            assert chunked["norms"][0] == pytest.approx(whole["norms"][0], rel=2e-6)
            if whole["logprobs"] is not None:
                assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(chunked["logprobs"], whole["logprobs"], strict=True))
            assert chunked["hash"] == again["hash"]
            if at.pp == layout.pp - 1 and layout.cp == 1:
                assert most_positions(whole["shapes"], layout.tp) >= 3 * 22  # the watch sees logits where they are made
                assert most_positions(chunked["shapes"], layout.tp) == CHUNK


def most_positions(shapes: set[tuple[int, ...]], tp: int) -> int:
    """Of how many positions a tensor of logits was made: one with a dimension of a rank's vocabulary that is no weight."""
    columns = -(-VOCAB // tp)
    logits = [s for s in shapes if len(s) > 1 and {columns, VOCAB - columns * (tp - 1)} & set(s) and HIDDEN not in s]
    return max(math.prod(s) // max(s) for s in logits)
