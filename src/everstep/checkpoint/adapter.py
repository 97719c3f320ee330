"""LoRA adapters in the format of ``peft``: adapter_config.json and adapter_model.safetensors, nothing of the frozen model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from everstep.checkpoint.storage import CheckpointError, fsync, storage_errors, write_json
from everstep.config.derive import lora_matrices
from everstep.config.schema import Config
from everstep.engine.source import ModelSource

#: What ``peft`` puts in front of a module's name.
PREFIX = "base_model.model."


def save(
    tensors: Iterable[tuple[str, Tensor]], config: Config, source: ModelSource, folder: Path, *, write: bool = True
) -> None:
    """Write ``tensors`` (of ``Engine.export_adapter``: a collective, every rank must call this) so that
    ``peft.PeftModel.from_pretrained(model, folder)`` loads them; ranks with ``write=False`` write nothing.

    CheckpointError if the disk refuses.
    """
    if not write:
        for _ in tensors:
            pass
        return
    on_host = {PREFIX + name: tensor.to("cpu").contiguous() for name, tensor in tensors}
    if not on_host:
        raise CheckpointError(f"exporting to {folder}: the model has no adapters")
    path = folder / "adapter_model.safetensors"
    with storage_errors("writing", path):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(on_host, path, metadata={"format": "pt"})
        fsync(path)
        write_json(folder / "adapter_config.json", _description(config, source))


def _description(config: Config, source: ModelSource) -> dict[str, object]:
    kind, colon, name = source.spec.partition(":")
    hub = colon and kind == "hf"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name.partition("@")[0] if hub else str(source.dir.absolute()),
        "revision": (name.partition("@")[2] or None) if hub else None,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": config.lora.dropout,
        "target_modules": list(lora_matrices(config)),
        "bias": "none",
        "inference_mode": True,
    }
