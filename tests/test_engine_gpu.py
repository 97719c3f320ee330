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


def check_fused_kernels(rank: int) -> None:
    """Rows and columns that fill no block, heads cut out of a projection, against eager float32; and twice the same bits."""
    import torch.nn.functional as F
    from megatron.core.models.common.embeddings import rope_utils

    from everstep.engine import kernels
    from everstep.engine.vocab import token_logprobs

    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")
    angles = torch.outer(torch.arange(37).float(), torch.rand(10)).repeat(1, 2)[:, None, None]
    targets = torch.randint(0, 9999, (3, 7))

    def swiglu(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def logprobs(fused: bool, temperature: float, x: torch.Tensor) -> torch.Tensor:
        values, entropy = token_logprobs(
            x, targets, first=0, valid=9999, temperature=temperature, with_entropy=temperature != 1, fused=fused
        )
        return values if entropy is None else torch.stack([values, entropy])

    one, heads = torch.rand(100) + 0.5, torch.rand(20) + 0.5
    # Of a projection (37, 2, 3, 60), the last 20 channels of each of 3 groups.
    cases: list[tuple[Any, Any, torch.Tensor]] = [
        (lambda x: kernels.rms_norm(x, one.to(x.dtype), 1e-6), lambda x: F.rms_norm(x, (100,), one, 1e-6), torch.randn(37, 3, 100)),
        (lambda x: kernels.rms_norm(x[..., 40:], heads.to(x.dtype), 1e-6), lambda x: F.rms_norm(x[..., 40:], (20,), heads, 1e-6), torch.randn(37, 2, 3, 60)),
        (kernels.swiglu, swiglu, torch.randn(37, 3, 2 * 70)),
        (lambda x: kernels.rotary(x.transpose(0, 1), angles), lambda x: rope_utils._apply_rotary_pos_emb_bshd(x.transpose(0, 1), angles), torch.randn(2, 37, 3, 20)),
        (lambda x: logprobs(True, 1.0, x), lambda x: logprobs(False, 1.0, x), torch.randn(3, 7, 10013) * 5),
        (lambda x: logprobs(True, 0.6, x), lambda x: logprobs(False, 0.6, x), torch.randn(3, 7, 10013) * 5),
    ]  # fmt: skip
    for number, (fused, eager, values) in enumerate(cases):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            x = values.to(dtype)
            mine, again, plain = (x.clone().requires_grad_(), x.clone().requires_grad_(), x.float().clone().requires_grad_())
            outputs = [fused(mine), fused(again), eager(plain)]
            up = torch.randn_like(outputs[2]).to(outputs[0].dtype)
            for output in outputs:
                output.backward(up.to(output.dtype))
            assert torch.equal(outputs[0], outputs[1]) and torch.equal(mine.grad, again.grad), number
            for got, wanted in ((outputs[0], outputs[2]), (mine.grad, plain.grad)):
                error = (got.float() - wanted).norm() / wanted.norm()
                assert error < tolerance, (number, dtype, float(error))
    weights = [one.clone().requires_grad_() for _ in range(2)]
    for weight, norm in zip(weights, (kernels.rms_norm, lambda x, w, eps: F.rms_norm(x, w.shape, w, eps)), strict=True):
        norm(cases[0][2], weight, 1e-6).sin().sum().backward()
    assert torch.allclose(weights[0].grad, weights[1].grad, rtol=1e-4, atol=1e-4)


def test_fused_kernels_compute_what_eager_code_does() -> None:
    run_ranks(check_fused_kernels, 1, join=False, deadline_s=120, cuda=True)


def check_fused_engine(rank: int, layout: Layout) -> None:
    one = [batch(1, 2, 9), batch(2, 3, 16)]
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 4e-2)):
        for deterministic in (True, False):
            gradients = []
            for fused in ("none", "auto"):
                name = f"fused-{layout.tp}-{dtype}-{deterministic}-{fused}"
                engine, _ = gpu_engine(rank, layout, name, dtype, fused_kernels=fused, deterministic=deterministic)
                sums = engine.accumulate(one, NllWithEntropy(), [0, 0])
                gradients.append([total.clone() for total in engine.gradients()])
                engine.apply(engine.gradients(), 0.05, 1e-2)
                assert engine.state_scalars()["adam_step"] == 1
                after = engine.accumulate(one, NllWithEntropy(), [0, 0])
                gradients[-1].append(torch.stack([sums[1], after[1]]))
                engine.close()
            for eager, mine in zip(*gradients, strict=True):
                assert (mine - eager).norm() <= tolerance * eager.norm(), (dtype, deterministic, (mine - eager).norm() / eager.norm())


def test_fused_engine_agrees_with_the_eager_one() -> None:
    run_ranks(check_fused_engine, 1, Layout(), join=False, deadline_s=180, cuda=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_fused_engine_agrees_with_the_eager_one_on_two_gpus() -> None:
    run_ranks(check_fused_engine, 2, Layout(tp=2), join=False, deadline_s=240, cuda=True)


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
