"""Sequences that come and go in slots: each one's logits are those that transformers gives for it alone."""

from __future__ import annotations

import random

import pytest
import torch
from tests.support.models import tiny_config
from transformers import AutoModelForCausalLM

from everstep.rl.rollout import Sampling
from everstep.rl.rollout import slots as slots_module
from everstep.rl.rollout.decoding import Decoder, Pending
from everstep.rl.rollout.slots import _COLUMNS, Slots, _Captured, _Graphs


def model_of(family: str, device: str = "cpu"):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval().requires_grad_(False).to(device)


def walk(slots: Slots, model, device: torch.device, moves: int, seed: int) -> int:
    """Random comings and goings; every logit is compared. Returns how many were."""
    choose, running, compared = random.Random(seed), [], 0
    vocabulary = model.config.vocab_size

    def check(logits: torch.Tensor, of: list[list[int]]) -> int:
        for row, sequence in zip(logits, of, strict=True):
            alone = model(input_ids=torch.tensor([sequence], device=device)).logits[0, -1]
            torch.testing.assert_close(row, alone, rtol=1e-4, atol=1e-5)
        return len(of)

    for _ in range(moves):
        kind = choose.choice(["enter", "advance", "advance", "advance", "remove"])
        if kind == "enter" and len(running) < 11:
            prompt = [choose.randrange(vocabulary) for _ in range(choose.choice([1, 3, 60, _COLUMNS - 2]))]
            coming = [list(prompt), list(prompt), [choose.randrange(vocabulary) for _ in range(choose.randrange(1, 9))]]
            compared += check(slots.enter([tuple(sequence) for sequence in coming], longest=400), coming)
            running += coming
        elif kind == "remove" and running:
            gone = choose.sample(range(len(running)), choose.randrange(len(running)) + choose.choice([0, 1]))
            running = [running[row] for row in slots.remove(gone)]
        elif running:
            tokens = [choose.randrange(vocabulary) for _ in running]
            running = [[*sequence, token] for sequence, token in zip(running, tokens, strict=True)]
            compared += check(slots.advance(torch.tensor(tokens, device=device)), running)
        assert len(slots) == len(running)
    return compared


@pytest.fixture(autouse=True)
def few_columns(monkeypatch) -> None:
    """So that buffers grow while tests run."""
    monkeypatch.setattr(slots_module, "_FEWEST", _COLUMNS)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_logits_are_those_of_each_sequence_alone(family) -> None:
    model, device = model_of(family), torch.device("cpu")
    slots = Slots(model, device, 0)
    assert walk(slots, model, device, moves=60, seed=1) > 100
    assert slots._capacity > _COLUMNS, "the buffers have grown"
    slots.release()
    assert walk(slots, model, device, moves=20, seed=2) > 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_captured_passes_are_those_that_are_not_captured(family) -> None:
    model, device = model_of(family, "cuda"), torch.device("cuda")
    slots = Slots(model, device, 0)
    assert slots._graphs is not None
    assert walk(slots, model, device, moves=80, seed=1) > 100
    assert not slots._graphs.refused and any(not captured.unproved for captured in slots._graphs._captured.values())
    made = {}
    for graphs in (True, False):
        decoder = Decoder(Slots(model, device, 0, graphs), [1], device, lambda: 1, str)
        pending = [Pending(f"s{i}", list(range(2, 5 + i % 7))) for i in range(24)]
        decoder.add(pending, Sampling(max_response_tokens=150, samples_per_batch=10, seed=4))
        while len(decoder):
            decoder.advance(8)
        made[graphs] = {p.sample_id: p.made.tokens for p in pending}
    same = sum(made[True][sample] == made[False][sample] for sample in made[True])
    assert same >= 20, "a draw that hangs on the last bit may fall otherwise"


class Pass:
    """A captured pass, as far as this machine has one: a replay is what was true when it was captured, or what is true now."""

    def __init__(self, now: torch.Tensor, frozen: bool):
        self.now, self.frozen, self.logits, self.replays = now, frozen, now.clone(), 0

    def replay(self) -> None:
        self.replays += 1
        if not self.frozen:
            self.logits.copy_(self.now)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_captured_pass_is_compared_twice_before_it_is_believed(monkeypatch, caplog, frozen) -> None:
    graphs, now, eager = _Graphs(), torch.ones(2, 3), []
    held = Pass(now, frozen)
    monkeypatch.setattr(graphs, "_capture", lambda function: _Captured(held, held.logits))

    def function() -> torch.Tensor:
        eager.append(1)
        return now.clone()

    for token in range(5):
        now.fill_(1.0 + token)
        assert torch.equal(graphs.run(2, function, lambda: lambda: True), now)
    assert graphs.refused == frozen and (len(eager), held.replays) == ((6, 2) if frozen else (2, 5))
    assert ("gives other logits when it is captured" in caplog.text) == frozen


class Recorded:
    """In the place of a captured pass: what it would do, with the columns of when it was captured (``frozen``) or of now."""

    def __init__(self, slots: Slots, rows: int, frozen: bool):
        self._slots, self._rows, self._positions = slots, rows, slots._positions.clone() if frozen else None
        self.logits = slots._pass(rows, slots._capacity).clone()

    def replay(self) -> None:
        now = self._slots._positions
        if self._positions is not None:
            self._slots._positions = self._positions
        self.logits.copy_(self._slots._pass(self._rows, self._slots._capacity))
        self._slots._positions = now


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_pass_that_writes_to_the_column_of_its_capture_is_found(monkeypatch, caplog, frozen, dtype) -> None:
    """Its logits alone would not tell: one token of many at another place changes them by little more than rounding does."""
    model, device = model_of("llama").to(dtype), torch.device("cpu")
    slots, plain = Slots(model, device, 0), Slots(model, device, 0)
    slots._graphs = graphs = _Graphs()
    monkeypatch.setattr(graphs, "_capture", lambda function: _Captured(r := Recorded(slots, 2, frozen), r.logits))
    prompts = [tuple(range(3, 43)), tuple(range(7, 37))]
    slots.enter(prompts, 200), plain.enter(prompts, 200)
    doubtful = []
    for token in range(6):
        tokens = torch.tensor([token + 5, token + 9])
        made, wanted = slots.advance(tokens), plain.advance(tokens)
        doubtful.append(slots.doubtful())
        if not any(doubtful):
            torch.testing.assert_close(made, wanted, rtol=0.05, atol=0.06 if dtype is torch.bfloat16 else 1e-3)  # bfloat16 rounds by what kernels a CPU has
    assert doubtful == [False, frozen, *[False] * 4], "told once, when the second token showed it"
    assert graphs.refused == frozen and ("writes keys and values to another place" in caplog.text) == frozen


def test_sequences_enter_anew_when_a_captured_pass_was_wrong(monkeypatch) -> None:
    """What is generated is what is generated without captured passes."""
    made = {}
    for frozen in (None, True):
        model, device = model_of("llama"), torch.device("cpu")
        slots = Slots(model, device, 0)
        if frozen:
            slots._graphs = graphs = _Graphs()
            monkeypatch.setattr(graphs, "_capture", lambda function, slots=slots: _Captured(r := Recorded(slots, 4, True), r.logits))
        decoder = Decoder(slots, [1], device, lambda: 1, str)
        pending = [Pending(f"s{i}", list(range(2, 20 + i))) for i in range(3)]
        decoder.add(pending, Sampling(max_response_tokens=12, samples_per_batch=4, seed=4))
        while len(decoder):
            decoder.advance(5)
        made[frozen] = {p.sample_id: p.made.tokens for p in pending}
    assert graphs.refused and made[True] == made[None]


def test_many_tokens_are_prefilled_in_several_passes(monkeypatch) -> None:
    model, device = model_of("qwen3"), torch.device("cpu")
    passes, forward = [], Slots._forward
    monkeypatch.setattr(Slots, "_forward", lambda self, ids, *rest: passes.append(tuple(ids.shape)) or forward(self, ids, *rest))
    monkeypatch.setattr(slots_module, "_PREFILLED", 40)
    slots = Slots(model, device, 0)
    sequences = [(5, 6, 7)] * 9 + [tuple(range(3, 23)), tuple(range(3, 53)), (9,), (9, 8)]
    logits = slots.enter(sequences, 100)
    assert passes == [(2, 20), (1, 50), (2, 2)] and len(slots) == len(sequences)
    for row, sequence in zip(logits, sequences, strict=True):
        torch.testing.assert_close(row, model(input_ids=torch.tensor([sequence])).logits[0, -1], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_captured_goes_on_without(monkeypatch, caplog) -> None:
    graphs = _Graphs()

    def capture(function: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "_capture", capture)
    assert float(graphs.run(1, lambda: torch.ones(()), lambda: lambda: True)) == 1 and graphs.refused
    assert "cannot be captured: operation not permitted when stream is capturing;" in caplog.text


def test_what_is_captured() -> None:
    cuda = torch.device("cuda")  # nothing is put there yet
    assert Slots(model_of("llama"), cuda, 0)._graphs and all(Slots(model_of(family), cuda, 0)._graphs is None for family in ("mixtral", "qwen3_moe"))
    assert Slots(model_of("llama"), cuda, 0, graphs=False)._graphs is None and Slots(model_of("llama"), torch.device("cpu"), 0)._graphs is None
