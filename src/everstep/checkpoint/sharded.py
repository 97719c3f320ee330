"""What one rank writes and reads (its own shard), and the whole model as transformers loads it.

A replica's ranks write ``state/rank-000.safetensors`` and ``.json`` each, numbered inside the replica. All
replicas hold the same state, so one replica's shards are the checkpoint, and it loads into any number of
replicas. The arrangement inside a replica (tp, cp, ep, dp, pp) must be the saved one; ``hf/`` is free of
it.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from everstep.checkpoint.manifest import FileEntry
from everstep.checkpoint.storage import CheckpointError, digest, fsync, storage_errors, write_json
from everstep.errors import BadInput
from everstep.layout import Layout

INNER = ("tp", "cp", "ep", "dp", "pp")


def inner_layout(layout: Layout) -> dict[str, Any]:
    """The part of a layout that a rank's shard depends on; how layers are cut only where it is not the default."""
    inner: dict[str, Any] = {name: getattr(layout, name) for name in INNER}
    if layout.vpp > 1:
        inner["vpp"] = layout.vpp
    if layout.layers_per_stage:
        inner["layers_per_stage"] = list(layout.layers_per_stage)
    return inner


@dataclass(frozen=True)
class Shard:
    """What a rank wrote: entries for the manifest, by path relative to the checkpoint folder."""

    rank: int
    files: dict[str, FileEntry]


# ---------------------------------------------------------------- one rank's shard


def save_rank(state: Mapping[str, Tensor], scalars: Mapping[str, Any], folder: Path, rank: int, layout: Layout) -> Shard:
    """Write ``state`` and ``scalars`` of ``rank`` into ``folder/state``; returns sizes and checksums for the manifest.

    Holds one copy of the state in host memory. CheckpointError if the disk refuses, or if a scalar would
    not survive JSON unchanged.
    """
    for key, value in scalars.items():
        _check_scalar(key, value)
    data, notes = _paths(folder, rank)
    # A copy of each: views of one flat buffer would otherwise be refused, or drag the whole buffer along.
    on_host = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    with storage_errors("writing", data):
        data.parent.mkdir(parents=True, exist_ok=True)
        save_file(on_host, data)
        fsync(data)
        entry = FileEntry(data.stat().st_size, digest(data))
        described = {n: {"shape": list(t.shape), "dtype": _dtype_name(t.dtype)} for n, t in on_host.items()}
        write_json(
            notes,
            {
                "rank": rank,
                "layout": inner_layout(layout),
                "scalars": dict(scalars),
                "tensors": described,
                "data": asdict(entry),
            },
        )
        notes_entry = FileEntry(notes.stat().st_size, digest(notes))
    return Shard(
        rank,
        {data.relative_to(folder).as_posix(): entry, notes.relative_to(folder).as_posix(): notes_entry},
    )


def load_rank(state: Mapping[str, Tensor], folder: Path, rank: int, layout: Layout) -> dict[str, Any]:
    """Write the saved shard of ``rank`` into the tensors of ``state``, in place; returns the scalars.

    Layout, names, shapes and types are all checked before the first write. BadInput if any differs.
    """
    data, notes = _paths(folder, rank)
    check_layout(folder, layout)
    with storage_errors("reading", notes):
        saved = json.loads(notes.read_text())
    described = saved["tensors"]
    missing, unknown = sorted(set(state) - set(described)), sorted(set(described) - set(state))
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which the model has not"
        raise BadInput(
            f"{data}: {what} ({len(missing)} tensors missing, {len(unknown)} unknown); the checkpoint was made with "
            "another model, engine or loss configuration: compare configs/resolved.yaml of its run"
        )
    for name, tensor in state.items():
        shape, dtype = described[name]["shape"], described[name]["dtype"]
        if shape != list(tensor.shape) or dtype != _dtype_name(tensor.dtype):
            raise BadInput(
                f"{data}: {name} is {dtype}{shape}, the model has {_dtype_name(tensor.dtype)}{list(tensor.shape)}; "
                "use the model.* and engine.* settings it was saved with"
            )
    with storage_errors("reading", data), safe_open(data, framework="pt", device="cpu") as file, torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(file.get_tensor(name))
    scalars: dict[str, Any] = saved["scalars"]
    return scalars


def check_layout(folder: Path, layout: Layout) -> None:
    """BadInput unless the checkpoint's shards were made with this arrangement of the ranks inside a
    replica.
    """
    notes = sorted((folder / "state").glob("rank-*.json"))
    if not notes:
        raise BadInput(f"{folder}: holds no rank's state; set model.path={folder / 'hf'} to start from its weights alone")
    with storage_errors("reading", notes[0]):
        saved = json.loads(notes[0].read_text())["layout"]
    wanted = inner_layout(layout)
    if saved != wanted or len(notes) != layout.ranks_per_replica:
        raise BadInput(
            f"{folder}: saved with {_say(saved)} ({len(notes)} ranks per replica), configured are {_say(wanted)} "
            f"({layout.ranks_per_replica}); set layout.* as saved to resume, or start a new run from its weights with "
            f"model.path={folder / 'hf'} (optimizer state and data position are not carried over)"
        )


def _paths(folder: Path, rank: int) -> tuple[Path, Path]:
    stem = folder / "state" / f"rank-{rank:03d}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def _say(layout: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in layout.items())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_scalar(key: str, value: Any) -> None:
    """Only what JSON gives back exactly: a tuple would return as a list, a numeric key as a string."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise CheckpointError(f"scalar {key} has the key {name!r}; only strings survive a checkpoint")
            _check_scalar(f"{key}.{name}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_scalar(f"{key}[{index}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"scalar {key} is {value}; only finite numbers survive a checkpoint")
    elif not (value is None or type(value) in (bool, int, float, str)):
        raise CheckpointError(f"scalar {key} is a {type(value).__name__}; use int, float, str, bool, list or dict")


# ---------------------------------------------------------------- the whole model, for transformers


def save_hf(
    tensors: Iterable[tuple[str, Tensor]],
    hf_config: Any,
    tokenizer: Any,
    folder: Path,
    *,
    write: bool = True,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write config, tokenizer and weights so that ``transformers`` loads them with ``from_pretrained(folder)``.

    ``tensors`` yields each full tensor once by its HF name (a collective over the replica: every rank must
    exhaust it, and those with ``write=False`` do nothing else). At most one shard is held in host memory.
    """
    if not write:
        for _ in tensors:
            pass
        return
    shards: list[dict[str, int]] = []  # tensor name -> bytes
    pending: dict[str, Tensor] = {}
    pending_bytes = 0
    dtypes: set[torch.dtype] = set()
    seen: set[str] = set()

    def flush() -> None:
        nonlocal pending, pending_bytes
        path = folder / f"shard-{len(shards)}.tmp"
        with storage_errors("writing", path):
            folder.mkdir(parents=True, exist_ok=True)
            save_file(pending, path, metadata={"format": "pt"})
            fsync(path)
        shards.append({name: _nbytes(t) for name, t in pending.items()})
        pending, pending_bytes = {}, 0

    for name, tensor in tensors:  # outside storage_errors: what a collective raises is no fault of the disk
        if name in seen:
            raise CheckpointError(f"exporting to {folder}: {name} came twice")
        seen.add(name)
        if pending and pending_bytes + _nbytes(tensor) > max_shard_bytes:
            flush()
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        pending_bytes += _nbytes(tensor)
        dtypes.add(tensor.dtype)
    if not seen:
        raise CheckpointError(f"exporting to {folder}: the model gave no tensors")
    flush()

    config = copy.deepcopy(hf_config)
    if len(dtypes) == 1:
        config.dtype = dtypes.pop()  # else a reader would cast to what the original model was stored in
    with storage_errors("writing", folder):
        _name_shards(folder, shards)
        config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _name_shards(folder: Path, shards: list[dict[str, int]]) -> None:
    """Give the shards the names transformers expects, which contain how many there are."""
    if len(shards) == 1:
        (folder / "shard-0.tmp").rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for index, names in enumerate(shards):
        final = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{index}.tmp").rename(folder / final)
        where.update(dict.fromkeys(names, final))
    total = sum(size for names in shards for size in names.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
