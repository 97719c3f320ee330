"""LoRA in whole runs: both launchers, exports that ``peft`` and ``transformers`` load, resume, a death that a spare heals."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.runs import QUIET, ROOT, config, finish
from tests.test_launchers import ONE, everstep, result, same

from everstep.config.load import load_config
from everstep.driver import run
from everstep.errors import BadInput
from everstep.plan import make_plan

pytestmark = pytest.mark.timeout(200)

LORA = str(ROOT / "examples" / "lora_sft.yaml")
MODEL = f"model.path={ROOT}/examples/models/tiny-qwen3-sums"
SHORT = [MODEL, "sft.steps=6", "optimizer.decay_steps=6"]


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:06d}"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(4, 44)[None]).logits


@pytest.mark.full
def test_both_launchers_train_the_same_adapters(tmp_path: Path, ray_cluster: None) -> None:
    """With pipeline stages and full recomputation; and what the checkpoint holds is the model that was trained."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from everstep.generate import generate

    layout = [*ONE, *SHORT, "layout.pp=2", "engine.recompute=full", "data.eval_source=everstep.data.arithmetic:product_chats"]
    done = everstep(tmp_path, "train", LORA, *layout, "launcher=local", f"run_dir={tmp_path}/local")
    assert done.code == 0, done.err
    local, ray = result(tmp_path / "local"), finish(config(LORA, tmp_path / "ray", *layout))
    same(local, ray)
    losses = [ray.losses[step] for step in sorted(ray.losses) if step]  # before the first one the held-out data is evaluated alone
    assert losses[-1] < 0.7 * losses[0]

    saved = checkpoint(ray.folder, 6)
    base = AutoModelForCausalLM.from_pretrained(ROOT / "examples/models/tiny-qwen3-sums", dtype=torch.float32)
    untrained = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, saved / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(saved / "hf", dtype=torch.float32))
    assert (adapted - merged).abs().max() < 1e-4 < (adapted - untrained).abs().max()
    assert torch.allclose(adapted, logits(PeftModel.from_pretrained(base, checkpoint(local.folder, 6) / "adapter")), atol=1e-5)
    # The state holds adapters and their moments only, and no frozen weight.
    from safetensors import safe_open

    for shard in (saved / "state").glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            assert all(".lora_" in name or name.startswith("rng/") for name in file.keys())  # noqa: SIM118 - not a mapping
    out = io.StringIO()
    assert generate(str(ray.folder), "7*8", 4, 0.0, 0, out) > 0


@pytest.mark.full
def test_a_resumed_run_ends_in_the_same_state_and_only_on_the_same_base(tmp_path: Path, ray_cluster: None) -> None:
    whole = finish(config(LORA, tmp_path / "run", *ONE, *SHORT, "layout.tp=2", "checkpoint.every_steps=3"))
    digest = whole.final_hashes
    again = finish(config(LORA, tmp_path / "run", *ONE, *SHORT, "layout.tp=2", "checkpoint.every_steps=3", "resume=3"))
    assert [e.step for e in again.kind("load")] == [3, 3] and again.final_hashes == digest
    for changes, says in (
        (["model.init=random"], "other frozen weights than those of model.path"),
        (["lora.alpha=8"], r"trained with lora\.alpha=32\.0, configured is 8\.0"),
    ):
        with pytest.raises(BadInput, match=says):
            run(config(LORA, tmp_path / "run", *ONE, *SHORT, "layout.tp=2", "resume=3", *changes))


@pytest.mark.full
def test_a_spare_heals_the_adapters_and_takes_the_rest_from_the_model(tmp_path: Path, ray_cluster: None) -> None:
    faults = "faults=[{step: 3, phase: reduce, kind: kill, replica: 1, rank: 1}]"
    cut = [*SHORT, "layout.tp=2", "engine.sequence_parallel=true", "train.micro_batch_size=10", "sft.steps=10"]
    died = finish(config(LORA, tmp_path / "died", *cut, "layout.spares=1", faults))
    assert len(died.final_hashes) == 2  # one per position: the replicas are equal
    heals = [e for e in died.kind("heal_done") if e["heal_bytes"]]
    assert {e["rank"] for e in heals} >= {1}
    plan = make_plan(load_config(LORA, [*QUIET, *cut]))
    for heal in heals:
        memory = plan.memory[heal["rank"]]
        assert 0.9 < heal["heal_bytes"] / memory.state < 1.1 and memory.frozen > 0
