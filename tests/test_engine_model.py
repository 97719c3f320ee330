"""What is refused before any process starts, the loss's vocabulary arithmetic, and the small parts of the engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from everstep.engine import cpu
from everstep.engine.hf import join, pieces, shard
from everstep.engine.loss import LossOutput, LossSpec, pack_sums, unpack_sums
from everstep.engine.model import check_layout, read_architecture
from everstep.engine.vocab import token_logprobs
from everstep.errors import BadInput, WorkerFailed
from everstep.layout import Layout
from support.models import NllWithEntropy, batch, tiny_config


def test_unsupported_configs_name_their_key() -> None:
    from transformers import MistralConfig, Qwen2MoeConfig

    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    cases: list[tuple[Any, str]] = [
        (MistralConfig(), "model_type='mistral'"),
        (Qwen2MoeConfig(), "model_type='qwen2_moe'"),
        (tiny_config("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1), "use_sliding_window"),
        (tiny_config("qwen3", layer_types=["full_attention"] * 3 + ["sliding_attention"]), "layer_types"),
        (tiny_config("llama", rope_parameters=yarn), "rope_scaling.rope_type='yarn'"),
        (tiny_config("llama", hidden_act="gelu"), "hidden_act"),
        (tiny_config("llama", mlp_bias=True), "mlp_bias"),
    ]
    quantised = tiny_config("llama")
    quantised.quantization_config = {"quant_method": "awq"}
    cases.append((quantised, "quantization_config"))
    for config, key in cases:
        with pytest.raises(BadInput) as caught:
            read_architecture(config)
        assert key in str(caught.value) and "config.json" in str(caught.value)


def test_layouts_that_do_not_fit_name_both_keys() -> None:
    arch = read_architecture(tiny_config("llama", num_attention_heads=8, num_key_value_heads=2))
    check_layout(arch, Layout(tp=2, pp=4))
    for layout, keys in (
        (Layout(tp=4), ("layout.tp=4", "num_key_value_heads=2")),
        (Layout(pp=5), ("layout.pp", "4 layers")),
        (Layout(pp=2, vpp=3), ("layout.vpp", "4 layers")),
        (Layout(pp=2, layers_per_stage=(2, 3)), ("layout.layers_per_stage=[2, 3]", "4")),
        (Layout(ep=2, dp=2), ("layout.ep=2",)),
    ):
        with pytest.raises(BadInput) as caught:
            check_layout(arch, layout)
        assert all(key in str(caught.value) for key in keys)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_join_inverts_shard(family: str, tp: int) -> None:
    changes = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    arch = read_architecture(tiny_config(family, num_attention_heads=8, num_key_value_heads=4, **changes))
    for piece in pieces(arch, Layout(tp=tp)):
        whole = [torch.randn(shape) for shape in piece.shapes]
        shards = [shard(piece, whole, arch, tp, rank) for rank in range(tp)]
        assert all(tuple(s.shape) == piece.shape for s in shards), piece.local
        assert all(torch.equal(a, b) for a, b in zip(join(piece, shards, arch), whole, strict=True)), piece.local


def test_the_table_names_transformers_tensors() -> None:
    from transformers import AutoModelForCausalLM

    for family, tied, changes in (("llama", False, {"attention_bias": True}), ("qwen2", True, {}), ("qwen3", False, {})):
        config = tiny_config(family, tied=tied, **changes)
        with torch.device("meta"):
            theirs = {n: tuple(p.shape) for n, p in AutoModelForCausalLM.from_config(config).named_parameters()}
        for pp in (1, 2):
            table = pieces(read_architecture(config), Layout(pp=pp))
            ours = {n: s for piece in table for n, s in zip(piece.names, piece.shapes, strict=True)}
            assert ours == theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_and_their_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.engine import vocab

    monkeypatch.setattr(vocab, "_SLICE_NUMBERS", 40)  # several slices, the last one partial
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 8, 13, generator=generator).mul(5).to(dtype)
    untouched = logits.clone()
    ids = torch.randint(0, 11, (3, 8), generator=generator)
    up = torch.randn(2, 3, 8, generator=generator)

    mine = logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(mine[:, :-1], ids[:, 1:], first=0, valid=11, temperature=0.6, with_entropy=True)
    assert entropy is not None
    (logprobs * up[0][:, 1:] + entropy * up[1][:, 1:]).sum().backward()

    plain = logits.float().requires_grad_()
    log_p = torch.log_softmax(plain[:, :-1, :11] / 0.6, -1)
    wanted = log_p.gather(-1, ids[:, 1:, None])[..., 0]
    spread = -(log_p.exp() * log_p).sum(-1)
    (wanted * up[0][:, 1:] + spread * up[1][:, 1:]).sum().backward()

    assert torch.allclose(logprobs, wanted, atol=1e-5)
    assert torch.allclose(entropy, spread, atol=1e-5)
    assert mine.grad is not None and plain.grad is not None
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(mine.grad.float(), plain.grad, atol=tolerance, rtol=tolerance)
    assert not mine.grad[..., 11:].any(), "padding columns must get no gradient"
    assert torch.equal(logits, untouched)


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_context_ranks_share_the_columns_in_a_zigzag(cp: int) -> None:
    from everstep.engine.columns import Columns

    values = torch.arange(1, 23).view(2, 11)
    every = [Columns(multiple=2 * cp if cp > 1 else 1, cp=cp, rank=rank) for rank in range(cp)]
    width = every[0].padded(11)
    assert width == {1: 11, 2: 12, 3: 12}[cp]
    parts = [columns.own(values, width) for columns in every]
    assert sorted(torch.cat(parts, 1).flatten().tolist()) == [0] * 2 * (width - 11) + list(range(1, 23))
    if cp == 2:
        assert parts[0][0].tolist() == [1, 2, 3, 10, 11, 0] and parts[1][0].tolist() == [4, 5, 6, 7, 8, 9]
    # As much causal attention for every rank: the sum over its positions.
    positions = [columns.own(torch.arange(width)[None], width).sum() for columns in every]
    assert len({int(total) for total in positions}) == 1


def test_losses_are_named_built_and_packed() -> None:
    loss = LossSpec("support.models:NllWithEntropy", {"entropy_coef": 0.5}).build()
    assert isinstance(loss, NllWithEntropy) and loss.entropy_coef == 0.5
    for bad in ("no_colon", "no.such.module:f", "support.models:missing"):
        with pytest.raises(BadInput):
            LossSpec(bad).build()

    one = batch(1, 2, 6)
    tokens = one.tensors["loss_mask"].sum()
    output = loss(torch.full((2, 6), -2.0), torch.full((2, 6), 3.0), one)
    sums = pack_sums(output, loss.metric_names, torch.device("cpu"))
    assert sums.dtype == torch.float64
    named = unpack_sums(sums * 2, loss.metric_names)
    assert named["nll"] == (float(4 * tokens), float(2 * tokens))
    assert named["entropy"] == (float(6 * tokens), float(2 * tokens))
    assert named["loss"] == (float(2 * (2 * tokens - 0.5 * 3 * tokens)), float(2 * tokens))
    with pytest.raises(WorkerFailed, match="surprise"):
        pack_sums(LossOutput(sums[0], sums[0], {"surprise": (0, 0)}), ("nll",), torch.device("cpu"))


@pytest.mark.skipif(not cpu.needed(), reason="there is an accelerator")
def test_cpu_redirection_is_scoped_to_its_thread() -> None:
    cpu.apply()
    cpu.apply()
    assert torch.cuda.current_device() == torch.device("cpu")
    assert not torch.cuda.is_available()

    with cpu.redirected():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.ones(2).to("cuda").cuda().pin_memory().device.type == "cpu"
        assert torch.ones(2).type() == "torch.cuda.FloatTensor"
        with cpu.redirected():  # nested: still one mode, left only once
            pass
        assert torch.zeros(2, device="cuda:0").device.type == "cpu"
    assert torch.ones(2).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")

    seen: list[str] = []

    def other_thread() -> None:
        try:
            torch.zeros(1, device="cuda")
        except (RuntimeError, AssertionError):
            seen.append("refused")
        cpu.enter_thread()
        cpu.enter_thread()
        seen.append(torch.zeros(1, device="cuda").device.type)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert seen == ["refused", "cpu"]
