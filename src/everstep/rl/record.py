"""The iteration record: what the stages of an iteration made, complete and on disk before the first update (docs/protocol.md, rule 21).

    RUN/iterations/000012-000240-000248.safetensors    iteration, the committed steps at its begin and at its end

One file: tensors and, in its header, columns, ids, metrics, and a checksum over all of it. It is written under another name, forced
to disk, and renamed, so a file with the right name is whole; it is removed when the iteration's last update has been committed,
unless there is a checkpoint of a step inside it. Whoever goes on with an iteration that was interrupted (a resumed run, another controller) takes the
samples from here and begins at the update that follows the last committed step: nothing is generated again, nothing trained twice.

The column ``record`` is left out: it is the data's own, and nothing after the stages reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from everstep.checkpoint.manifest import checkpoint_folders, step_of
from everstep.checkpoint.storage import storage_errors, write_atomic
from everstep.cluster.batch import TrainingBatch
from everstep.config.schema import Config
from everstep.engine.offload import host_bytes
from everstep.errors import EverstepError

FORMAT = 1
_NOT_KEPT = "record"
#: Of the sections in a digest of settings, what samples that are there do not depend on.
_MAY_CHANGE = {
    "rl": ("iterations", "eval_every", "eval_before"),
    "data": ("eval_source", "eval_source_args"),
    "critic": ("optimizer",),
    "rollout": (
        "tp", "gpu_memory_fraction", "engine_args", "cuda_graphs", "samples_per_batch", "engines", "colocated", "on_spares", "tokens_per_call", "call_timeout_s",
        "sync_timeout_s", "engine_restarts", "poison_after", "eval_temperature", "eval_samples",
    ),
    "reward": ("timeout_s", "workers", "concurrency"),
}  # fmt: skip


class RecordDamaged(EverstepError):
    """The file of an iteration record is not what was written; names the file."""


@dataclass(frozen=True)
class IterationRecord:
    """The samples of one iteration with all columns. ``first_step``: the step that was committed when it began; its updates are
    the ``updates`` transactions after that one. ``prompts_taken``: how far it moved the stream of prompts. ``settings``: a digest of what
    the samples and the updates depend on."""

    iteration: int
    first_step: int
    updates: int
    prompts_taken: int
    settings: str
    samples: TrainingBatch
    metrics: dict[str, float] = field(default_factory=dict)


def settings_digest(config: Config) -> str:
    """Of the sections that say what the samples of an iteration are and how they are cut into updates. How long the run is, how and when it
    is evaluated, learning rates, and how much time and how many processes anything takes, may change."""
    parts = config.model_dump(mode="json", include={"recipe", "pipeline", "seed", "data", "rl", "critic", "rollout", "reward", "model", "lora"})
    for section, keys in _MAY_CHANGE.items():
        for key in keys:
            del parts[section][key]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class IterationRecords:
    """The folder of records of a run. Only the lead writes; the methods are safe to repeat."""

    def __init__(self, folder: Path, checkpoints: Path):
        self._folder, self._checkpoints = folder, checkpoints

    def write(self, record: IterationRecord) -> Path:
        """Durable when it returns. Raises CheckpointError if the disk refuses, EverstepError for a column that JSON cannot hold."""
        first, last = record.first_step, record.first_step + record.updates
        path = self._folder / f"{record.iteration:06d}-{first:06d}-{last:06d}.safetensors"
        with storage_errors("writing", path):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, _encode(record))
        return path

    def find(self, iteration: int, first_step: int, settings: str, note: Callable[[str], None]) -> IterationRecord | None:
        """The record of this very iteration, begun at this step under these settings; None if there is none."""
        for path in self._folder.glob(f"{iteration:06d}-{first_step:06d}-*.safetensors"):
            try:
                record = _decode(path)
            except RecordDamaged as error:
                note(f"{error}; it is not used")
                continue
            if record.settings == settings:
                return record
            note(f"{path} was made with other settings (rl, rollout, reward, data, ...); it is not used")
        return None

    def retire(self, iteration: int, back_to: int) -> None:
        """Delete all records but that of ``iteration``, earlier ones that end after step ``back_to``, which the run may go back to, and those that
        a checkpoint of a step in the middle of them needs."""
        saved = [step for folder in checkpoint_folders(self._checkpoints) if (step := step_of(folder)) is not None]
        with storage_errors("deleting", self._folder):
            for torn in self._folder.glob(".*.tmp"):  # its writer died
                torn.unlink()
            for path in self._folder.glob("*.safetensors"):
                number, first, last = map(int, path.stem.split("-"))
                behind_us = number < iteration and last > back_to
                if number != iteration and not behind_us and not any(first < step < last for step in saved):
                    path.unlink()


def _encode(record: IterationRecord) -> bytes:
    samples = record.samples
    columns = {name: values for name, values in samples.columns.items() if name != _NOT_KEPT}
    said: dict[str, Any] = {}
    for name, values in columns.items():
        try:
            said[name] = json.loads(json.dumps(values))
        except (TypeError, ValueError) as error:
            raise EverstepError(f"iteration {record.iteration}: column {name} holds what JSON cannot ({error}); write a tensor, or plain values") from None
        if said[name] != values:
            raise EverstepError(f"iteration {record.iteration}: column {name} would come back changed from JSON (tuples, keys that are no text); write plain values")
    text = json.dumps({
        "format": FORMAT, "iteration": record.iteration, "first_step": record.first_step, "updates": record.updates, "prompts_taken": record.prompts_taken,
        "settings": record.settings, "metrics": record.metrics, "columns": said, "sample_ids": samples.sample_ids,
        "weight_versions": samples.weight_versions,
    })  # fmt: skip
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in samples.tensors.items()}  # safetensors refuses what shares memory
    return save(tensors, metadata={"everstep": text, "xxh3_128": _checksum(samples, text)})


def _decode(path: Path) -> IterationRecord:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(metadata["everstep"])
        if header["format"] != FORMAT:
            raise RecordDamaged(f"{path}: written in format {header['format']}, this version reads {FORMAT}")
        samples = TrainingBatch(tensors, header["columns"], header["sample_ids"], header["weight_versions"])
        if _checksum(samples, metadata["everstep"]) != metadata["xxh3_128"]:
            raise RecordDamaged(f"{path}: the checksum is wrong")
        return IterationRecord(
            header["iteration"], header["first_step"], header["updates"], header["prompts_taken"], header["settings"], samples, header["metrics"]
        )
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise RecordDamaged(f"{path}: unreadable ({type(error).__name__}: {error})") from error


def _checksum(samples: TrainingBatch, text: str) -> str:
    digest = xxhash.xxh3_128(text.encode())
    for name in sorted(samples.tensors):
        tensor = samples.tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(host_bytes(tensor))
    return digest.hexdigest()
