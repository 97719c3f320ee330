"""The engine on CUDA over NCCL: the same numbers as on the CPU, bitwise repeatable, and it survives a peer's death."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from everstep.errors import ReplicaBroken
from everstep.layout import Layout
from support.models import NllWithEntropy, batch, hf_model, reference_loss, settings, tiny_config
from support.processes import join_world, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = {"tied": True, "hidden_size": 64, "intermediate_size": 96}


def gpu_engine(rank: int, layout: Layout, world: str, dtype: str, **engine_settings: Any) -> tuple[Any, Any]:
    from everstep.engine.groups import NCCL_ENVIRONMENT
    from everstep.engine.step import Engine

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ.update(NCCL_ENVIRONMENT)
    join_world(rank, layout.ranks_per_replica, world, backend="nccl")
    config = settings(model={"dtype": dtype}, engine=engine_settings)
    engine = Engine(config, tiny_config("qwen3", **MODEL), layout.position(rank), layout, device)
    model = hf_model(tiny_config("qwen3", **MODEL)).eval()
    engine.load_pretrained(model.state_dict())
    return engine, model


def check_both_types(rank: int, cases: list[tuple[Layout, dict[str, Any]]]) -> None:
    for number, (layout, engine_settings) in enumerate(cases):
        for dtype in ("float32", "bfloat16"):
            check_numbers(rank, layout, dtype, f"case{number}", **engine_settings)


def check_numbers(rank: int, layout: Layout, dtype: str, case: str, **engine_settings: Any) -> None:
    tolerance = 1e-4 if dtype == "float32" else 5e-2
    every = [batch(1, 2, 9), batch(2, 1, 12)]
    mine = every[layout.position(rank).dp :: layout.dp]
    digests = []
    for life in range(2):
        engine, model = gpu_engine(rank, layout, f"{case}-{dtype}-{life}", dtype, **engine_settings)
        if dtype == "float32":
            assert all(torch.equal(t.cpu(), model.state_dict()[n]) for n, t in engine.export_hf())
        loss = sum(reference_loss(model, one, 1.0) for one in every)
        loss.backward()
        norm2 = sum(float(p.grad.double().square().sum()) for p in model.parameters())
        for step in range(2):
            sums = engine.accumulate(mine, NllWithEntropy(), [0] * len(mine))
            if step == 0:
                assert float(sums[1]) == pytest.approx(float(loss), rel=tolerance)
                assert engine.squared_norm(engine.gradients()) == pytest.approx(norm2, rel=4 * tolerance)
            engine.apply(engine.gradients(), 0.05, 1e-2)
        digests.append(engine.state_hash())
        engine.close()
    assert digests[0] == digests[1], "two runs of the same seed and layout differ"


def test_one_gpu() -> None:
    run_ranks(check_both_types, 1, [(Layout(), {}), (Layout(), {"recompute": "selective"})], join=False, deadline_s=180, cuda=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus() -> None:
    plain: list[tuple[Layout, dict[str, Any]]] = [(Layout(tp=2), {}), (Layout(pp=2), {}), (Layout(dp=2), {})]
    run_ranks(check_both_types, 2, plain, join=False, deadline_s=240, cuda=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_share_sequences_or_interleave() -> None:
    cases: list[tuple[Layout, dict[str, Any]]] = [
        (Layout(tp=2), {"sequence_parallel": True}),
        (Layout(cp=2), {}),
        (Layout(cp=2), {"recompute": "selective"}),
        (Layout(pp=2, vpp=2), {}),
    ]
    run_ranks(check_both_types, 2, cases, join=False, deadline_s=240, cuda=True)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_four_gpus_combine_them() -> None:
    cases: list[tuple[Layout, dict[str, Any]]] = [
        (Layout(tp=2, cp=2), {"sequence_parallel": True}),
        (Layout(cp=2, pp=2, vpp=2), {"recompute": "full"}),
        (Layout(pp=4), {}),
    ]
    run_ranks(check_both_types, 4, cases, join=False, deadline_s=240, cuda=True)


def check_offload(rank: int) -> None:
    one = [batch(1, 2, 9)]
    digests = []
    for life, moving in enumerate((False, True)):
        engine, _ = gpu_engine(rank, Layout(), f"offload-{life}", "bfloat16", offload={"reference": moving})
        for step in range(2):
            engine.accumulate(one, NllWithEntropy(), [0])
            engine.apply(engine.gradients(), 0.05, 1e-2)
            if step == 0:
                engine.keep_reference()
            engine.logprobs(one, model="reference")
            if moving:
                before = torch.cuda.memory_allocated()
                freed = engine.offload_to_cpu()
                # Blocks are rounded up, so it is not less.
                assert before - torch.cuda.memory_allocated() >= sum(freed.values()) > 0
                assert all(tensor.is_pinned() for tensor in engine.state().values())
                if step == 0:
                    assert engine.backload_to_gpu() == freed
                    assert torch.cuda.memory_allocated() == before
        digests.append(engine.state_hash())
        engine.close()
    assert digests[0] == digests[1]


def test_offload_frees_the_device_and_changes_no_bit() -> None:
    run_ranks(check_offload, 1, join=False, deadline_s=120, cuda=True)


def check_death(rank: int) -> float:
    layout = Layout(tp=2)
    engine, _ = gpu_engine(rank, layout, "before", "bfloat16")
    one = [batch(1, 2, 9)]
    engine.accumulate(one, NllWithEntropy(), [0])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # NCCL does not notice; the control thread, told by the launcher, does.
    told = time.monotonic() + 2
    threading.Thread(target=lambda: (time.sleep(2), engine.abort()), daemon=True).start()
    with pytest.raises(ReplicaBroken):
        for _ in range(1000):
            engine.accumulate(one, NllWithEntropy(), [0])
    engine.close()
    seconds = time.monotonic() - told
    again, _ = gpu_engine(rank, Layout(), "after", "bfloat16")
    again.accumulate(one, NllWithEntropy(), [0])
    again.close()
    return seconds


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_peer_dies() -> None:
    seconds = run_ranks(check_death, 2, join=False, may_die=(1,), deadline_s=120, cuda=True)
    assert seconds[0] < 15, seconds
    print(f"broken, aborted and closed in {seconds[0]:.2f} s")
