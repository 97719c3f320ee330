"""Offload: what is moved to host memory frees the device's, and comes back so that nobody can tell."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from everstep.errors import EverstepError
from everstep.layout import Layout
from support import models
from support.models import NllWithEntropy, batch, settings
from support.processes import join_world, run_ranks

CPU = torch.device("cpu")
PARTS = ("parameters", "gradients", "optimizer")
ALONE = [{part: part == one for part in PARTS} for one in PARTS]


def engine_of(rank: int, case: models.Case, dtype: str, moving: bool, seed: int | None = 3) -> Any:
    from everstep.engine.step import Engine

    offload = {"offload": {"reference": moving and not case.lora}}
    config = settings(engine=case.engine | offload, lora=case.lora, model={"dtype": dtype})
    engine = Engine(config, case.model, case.layout.position(rank), case.layout, CPU)
    if seed is not None:
        engine.init_random(seed)
    return engine


def data(layout: Layout, rank: int, step: int) -> list[Any]:
    return [batch(10 * step + i, 2, 9) for i in range(2)][layout.position(rank).dp :: layout.dp]


def accumulate(engine: Any, rank: int, step: int) -> tuple[Tensor, float]:
    batches = data(engine.layout, rank, step)
    return engine.accumulate(batches, NllWithEntropy(), [0] * len(batches)), engine.squared_norm(engine.gradients())


def apply(engine: Any) -> None:
    engine.apply(engine.gradients(), 0.05, 1e-2)


def storages(engine: Any) -> dict[int, int]:
    """Bytes of every storage that the model, its gradients and its optimizer lie on, found without what offloads them."""
    found: dict[int, int] = {}
    for ddp in engine._ddps:
        tensors = [*ddp.parameters(), *(p.main_grad for p in ddp.parameters() if p.requires_grad)]
        tensors += [buffer.param_data for buffer in ddp.buffers if buffer.param_data is not None]
        for inner in engine._optimizer.chained_optimizers:
            tensors += [t for state in inner.optimizer.state.values() for n, t in state.items() if n != "step"]
            tensors += [p for group in inner.optimizer.param_groups for p in group["params"]]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def run(rank: int, case: models.Case, world: str, dtype: str, moving: bool) -> list[Any]:
    """Two and a half steps with a reference model. ``moving``: with all kinds of moves in between, which nobody may notice."""
    join_world(rank, case.layout.ranks_per_replica, world)
    engine = engine_of(rank, case, dtype, moving)
    said: list[Any] = []
    accumulate(engine, rank, 0)
    apply(engine)
    engine.keep_reference()
    said.append(engine.state_hash())
    if moving:
        whole = storages(engine)
        freed = engine.offload_to_cpu()
        assert set(storages(engine).values()) == {0} and sum(freed.values()) == sum(whole.values())
        assert set(freed) == set(PARTS) and all(freed.values()), freed
        assert engine.offload_to_cpu() == dict.fromkeys(PARTS, 0), "what is away cannot go"
        assert engine.state_hash() == said[0], "of what is away the state can be read"
        assert set(storages(engine).values()) == {0}
        taken = engine.backload_to_gpu()
        assert taken == freed and storages(engine) == whole
        assert engine.backload_to_gpu() == dict.fromkeys(PARTS, 0)
        assert engine.state_hash() == said[0]
        # By parts; and each act brings back what it needs, and not more.
        for part, alone in zip(PARTS, ALONE, strict=True):
            assert engine.offload_to_cpu(**alone) == {part: freed[part]}
        engine.logprobs(data(case.layout, rank, 1))
        assert sum(storages(engine).values()) == freed["parameters"]
        engine.offload_to_cpu(**ALONE[0])
    said += accumulate(engine, rank, 1)
    if moving:
        assert sum(storages(engine).values()) == freed["parameters"] + freed["gradients"]
        kept = [gradient.clone() for gradient in engine.gradients()]
        assert engine.offload_to_cpu() == {**freed, "optimizer": 0}
        assert all(torch.equal(a, b) for a, b in zip(kept, engine.gradients(), strict=True)), "gradients in use are kept"
        engine.offload_to_cpu()
    apply(engine)
    if moving:
        assert storages(engine) == whole
        engine.offload_to_cpu()
        assert not any(gradient.any() for gradient in engine.gradients()), "gradients that were used up come back as zeros"
    exported = dict(engine.export_hf())
    reference = engine.logprobs(data(case.layout, rank, 0), model="reference")
    if moving:
        engine.offload_to_cpu()
        assert equal(engine.logprobs(data(case.layout, rank, 0), model="reference"), reference)
        assert sum(storages(engine).values()) == (freed["parameters"] if case.lora else 0)
    if moving and not case.lora:
        assert all(p.untyped_storage().nbytes() == 0 for chunk in engine._reference._chunks for p in chunk.parameters())
    said += [engine.state_hash(), exported, reference]
    if moving:  # the collective half of apply works on masters that were away
        engine.offload_to_cpu()
        engine.gather_parameters()
        assert engine.state_hash() == said[3]
    said += accumulate(engine, rank, 2)

    if moving:  # a rank whose replica broke while it was offloaded builds again and restores from its own host copy
        engine.offload_to_cpu()
        views, scalars = engine.state(), engine.state_scalars()
        engine.close()
        join_world(rank, case.layout.ranks_per_replica, world + "-again")
        engine = engine_of(rank, case, dtype, moving, seed=3 if case.lora else None)
        engine.load_scalars(scalars)
        engine.offload_to_cpu()  # what is written into views on the host is what comes back
        with torch.no_grad():
            for name, view in engine.state().items():
                view.copy_(views[name])
        engine.backload_to_gpu()
        assert engine.state_hash() == said[3]
        accumulate(engine, rank, 2)
    apply(engine)
    said.append(engine.state_hash())
    engine.close()
    with pytest.raises(EverstepError, match="closed"):
        engine.offload_to_cpu()
    return said


def check(rank: int, cases: list[tuple[models.Case, str]]) -> None:
    for number, (case, dtype) in enumerate(cases):
        still = run(rank, case, f"{number}-still", dtype, moving=False)
        moved = run(rank, case, f"{number}-moved", dtype, moving=True)
        assert len(still) == len(moved)
        for at, (a, b) in enumerate(zip(still, moved, strict=True)):
            assert equal(a, b), f"{case} in {dtype}: {at} of what the run said: {a} became {b}"


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return all(torch.equal(a[name], b[name]) for name in a) if isinstance(a, dict) else a == b


SP = {"sequence_parallel": True}
NOT_SHARDED = {"distributed_optimizer": False}


CASES = {
    1: [(models.Case(Layout()), "bfloat16"), (models.Case(Layout(), "llama", False, NOT_SHARDED), "float32")],
    2: [(models.Case(Layout(dp=2)), "float32"), (models.Case(Layout(tp=2), lora={"rank": 2}, engine=SP), "bfloat16")],
    4: [
        (models.Case(Layout(tp=2, dp=2), engine=SP), "bfloat16"),
        (models.Case(Layout(cp=2, pp=2)), "float32"),
        (models.Case(Layout(dp=2, pp=2, vpp=2), engine=NOT_SHARDED), "bfloat16"),
    ],
}


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_nobody_notices_that_memory_moved(ranks: int) -> None:
    run_ranks(check, ranks, CASES[ranks], join=False, deadline_s=150)


# ------------------------------------------------------------------ somebody reads


def test_memory_moves_from_under_a_heal_that_reads_it_and_the_joiner_gets_what_was_there() -> None:
    """The joiner is slow; the source offloads its state, computes, and changes it."""
    from everstep.config.recovery_schema import RecoveryConfig
    from everstep.recovery.heal import PIECE_BYTES, Snapshot
    from everstep.recovery.healing import Healing

    class State:
        version: int | None = 3

        def __init__(self) -> None:
            self.weights = torch.arange(float(PIECE_BYTES))  # four pieces

        def tensors(self) -> dict[str, torch.Tensor]:
            return {"weights": self.weights}

        def scalars(self) -> dict[str, Any]:
            return {}

        def load_scalars(self, scalars: dict[str, Any]) -> None: ...

    state, nothing = State(), cast(Any, None)
    before = state.weights.clone()
    healing = Healing(0, 0, nothing, "", state, RecoveryConfig(heal_hold_s=0.0), nothing, lambda number: True)
    snapshot, first, go_on, got = Snapshot(state, 3), threading.Event(), threading.Event(), []

    def slow_joiner() -> None:
        for piece in snapshot.pieces():
            got.append(torch.frombuffer(bytearray(piece), dtype=torch.float32))
            first.set()
            go_on.wait(10.0)

    reader = threading.Thread(target=slow_joiner)
    reader.start()
    healing._senders[1] = reader, snapshot
    assert first.wait(10.0)
    start = time.monotonic()
    healing.settle()
    assert time.monotonic() - start < 5.0  # it does not wait for the joiner
    state.weights.untyped_storage().resize_(0)
    go_on.set()
    reader.join(10.0)
    assert torch.equal(torch.cat(got), before)


# ------------------------------------------------------------------ memory of the process


def resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_memory(rank: int) -> None:
    """24 million parameters: 90 MB of them, as much of gradients, twice as much of moments."""
    from everstep.engine.step import Engine

    hf = models.tiny_config("qwen3", hidden_size=512, intermediate_size=1536, vocab_size=20_000, head_dim=128,
                            num_hidden_layers=1)  # fmt: skip
    layout = Layout()
    engine = Engine(settings(engine={"offload": {"reference": True}}), hf, layout.position(0), layout, CPU)
    engine.init_random(0)
    accumulate(engine, rank, 0)
    apply(engine)
    digest, before = engine.state_hash(), resident()
    freed = engine.offload_to_cpu()
    moved = freed["parameters"] + freed["optimizer"]
    assert freed["gradients"] > 80 << 20 and moved > 240 << 20
    # The host's copies are here too, so only the gradients, which nobody needs, are gone. Were the originals not freed, it would
    # be MORE by what moved.
    assert before - resident() == pytest.approx(freed["gradients"], rel=0.1)
    kept = engine.state()
    engine.backload_to_gpu(gradients=False)
    del kept
    assert before - resident() == pytest.approx(freed["gradients"], rel=0.1), "the host's copies outlive their use"
    engine.keep_reference()
    engine.logprobs(data(layout, rank, 0), model="reference")
    once = resident() - before + freed["gradients"]
    assert once == pytest.approx(freed["parameters"], rel=0.1), "a reference model at rest is held once"

    # The host refuses in the middle: what went can come back, the rest has not moved, and it can be tried again.
    digest = engine.state_hash()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (120 << 20), old[1]))
    with pytest.raises(RuntimeError, match="allocate memory"):
        engine.offload_to_cpu()
    resource.setrlimit(resource.RLIMIT_AS, old)
    assert engine.state_hash() == digest
    assert sum(engine.offload_to_cpu().values()) == freed["optimizer"], "all but the optimizer had gone"
    engine.backload_to_gpu()
    assert engine.state_hash() == digest
    engine.close()


def test_the_process_holds_what_was_moved_once() -> None:
    run_ranks(check_memory, 1, deadline_s=120)
