"""``python -m benchmarks.throughput``: its formulas against torch's own counter, the command, its table and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.throughput import flop_per_token, matrix_weights, peak_flops
from tests.support.runs import ROOT
from torch.utils.flop_counter import FlopCounterMode

from everstep.config import derive
from everstep.config.check import check
from everstep.config.derive import fused_kernels
from everstep.config.schema import Config, EngineConfig
from everstep.engine.model import read_architecture
from everstep.errors import ConfigError
from support.models import hf_model, tiny_config


@pytest.mark.parametrize("tied", [True, False])
def test_flop_are_those_that_torch_counts(tied: bool) -> None:
    config = tiny_config("qwen3", tied=tied)
    arch, tokens = read_architecture(config), 48
    model = hf_model(config)  # eager attention: two matrix products over all pairs of positions
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, tokens, dtype=torch.int64)).logits.sum().backward()
    causal = flop_per_token(arch, tokens) - 6 * matrix_weights(arch)
    counted = counter.get_total_flops() / (2 * tokens)
    # The rotary embedding's own product, of positions and frequencies, is the small rest.
    assert counted == pytest.approx(6 * matrix_weights(arch) + 2 * causal, rel=1e-3)


def test_cards_are_found_by_name() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("CPU") is None


@pytest.mark.full
def test_the_quick_run_measures_and_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.throughput", "--quick", "--samples", "2", "--tokens", "32", "--layout", "1 rank",
            "--only", "engine.recompute", "--switch", "engine.recompute=full", "--switch", "engine.recompute=wrong",
            "--out", f"{tmp_path}/out.json", "--profile", f"{tmp_path}/kernels.txt",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    base, full, wrong = written["rows"]
    assert base["problem"] == full["problem"] == "" and "1 validation error" in wrong["problem"]
    for row in (base, full):
        assert row["tokens_per_s"] == pytest.approx(2 * 32 / row["seconds"]) and 0 < row["compute_s"] < row["seconds"]
    assert base["ratio"] is None and full["ratio"] > 0
    assert "| 1 rank | engine.recompute=full |" in done.stdout and written["about"]["machine"] in done.stdout
    assert "aten::mm" in (tmp_path / "kernels.txt").read_text()


def test_which_kernels_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = derive.FUSED_KERNELS
    has = True
    monkeypatch.setattr(derive, "has_triton", lambda: has)
    auto, free = EngineConfig(), EngineConfig(deterministic=False)
    assert not fused_kernels(auto, cuda=False) and not fused_kernels(EngineConfig(fused_kernels="none"), cuda=True)
    assert fused_kernels(free, cuda=True) == all_of_them
    assert fused_kernels(auto, cuda=True) == all_of_them - {"attention"}  # cuDNN's is not deterministic
    assert fused_kernels(EngineConfig(fused_kernels=["adam"]), cuda=True) == {"adam"}
    for cuda, engine, why in (
        (False, EngineConfig(fused_kernels=["adam"]), "adam, but there is no CUDA device"),
        (True, EngineConfig(fused_kernels=["attention"]), "attention, but cuDNN's attention is not deterministic"),
    ):
        with pytest.raises(ConfigError, match=why):
            fused_kernels(engine, cuda)
    has = False
    assert fused_kernels(free, cuda=True) == {"adam", "attention"}
    with pytest.raises(ConfigError, match="norm, but triton is not installed"):
        fused_kernels(EngineConfig(fused_kernels=["norm", "adam"]), cuda=True)


def test_a_kernel_that_cannot_be_had_is_refused_before_anything_is_started() -> None:
    config = Config(recipe="sft", model={"path": "m"}, device="cpu", engine={"fused_kernels": ["rope"]}, data={"source": "arithmetic"})
    with pytest.raises(ConfigError, match=r"engine\.fused_kernels asks for rope, but there is no CUDA device"):
        check(config, {})
