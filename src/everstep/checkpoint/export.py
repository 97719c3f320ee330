"""From a checkpoint to what others load: a Hugging Face directory, or low-rank adapters as ``peft`` has them.

Reads the checkpoint's logical tensors; needs no process group and no device. What a checkpoint says of its own making:

    config.yaml     the resolved configuration of the run
    model/          config.json and the tokenizer, as transformers saves them; of a critic in model-critic/
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from everstep import scratch
from everstep.checkpoint.choose import at_address
from everstep.checkpoint.index import Index
from everstep.checkpoint.manifest import read_manifest
from everstep.checkpoint.sharded import CODES, safetensors_header, whole_tensor
from everstep.checkpoint.storage import (
    CheckpointError,
    FileEntry,
    as_json,
    exists,
    folder_entries,
    fsync,
    is_folder,
    is_local,
    place,
    read_file,
    remove_folder,
    storage_errors,
    write_file,
)
from everstep.config import derive
from everstep.config.derive import lora_matrices
from everstep.config.load import dump, load_config
from everstep.config.schema import Config
from everstep.engine import source as sources
from everstep.engine.fused import saved_name, single_experts
from everstep.engine.source import ModelSource
from everstep.errors import BadInput

CONFIG = "config.yaml"
DESCRIBED = {"model": "model", "critic": "model-critic"}  # part of the state -> the folder that describes that model
#: What ``peft`` puts in front of a module's name.
PEFT_PREFIX = "base_model.model."
MOST_BYTES = 4 << 30  # of one file of a Hugging Face directory, about
_SCALE_PARTS = ("lora_A.weight", "lora_B.weight")

Describe = tuple[str, torch.dtype, tuple[int, ...]]  # name, type, shape


def described(config: Config) -> dict[str, bytes]:
    """The files by which a checkpoint describes itself, by their paths in it."""
    files = {CONFIG: ("# Every value of the run that made this checkpoint.\n" + dump(config)).encode()}
    whose = {"model": sources.resolve(config.model).hf_config}
    if config.recipe == "ppo":
        whose["critic"] = sources.resolve(derive.critic(config).model).critic_config()
    for part, hf_config in whose.items():
        hf_config = copy.deepcopy(hf_config)
        hf_config.dtype = getattr(torch, config.model.dtype)  # else a reader would cast to what the original was stored in
        with scratch.folder("model") as folder:
            hf_config.save_pretrained(folder)
            sources.load_tokenizer(config.model).save_pretrained(folder)
            files |= {f"{DESCRIBED[part]}/{path.name}": path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    return files


def read_config(folder: Path) -> Config:
    """The configuration of the run that made a checkpoint."""
    with storage_errors("reading", folder / CONFIG), scratch.folder("config") as temporary:
        copied = temporary / CONFIG
        copied.write_bytes(read_file(folder / CONFIG))
        return load_config(copied)


# ---------------------------------------------------------------- the command


def export(checkpoint: str, out: str, adapter: bool = False, critic: bool = False) -> list[str]:
    """``everstep export``: verify ``checkpoint``, write it to the empty or new folder ``out``; returns the names of the files.

    BadInput if the checkpoint is damaged or has no such thing, or if ``out`` holds something.
    """
    folder, target = at_address(checkpoint, checkpoint), place(out)
    with storage_errors("looking at", target):
        if exists(target) and (not is_folder(target) or folder_entries(target)):
            raise BadInput(f"{out}: holds something already; name a new or empty folder")
    config = read_config(folder)
    if adapter and not config.lora.rank:
        raise BadInput(f"{checkpoint}: has no adapters (lora.rank is 0); export it without --adapter")
    if adapter and config.model.init == "random":
        raise BadInput(
            f"{checkpoint}: its adapters belong to random weights (model.init=random), which nobody can load; export the whole model, without --adapter"
        )
    if critic and config.recipe != "ppo":
        raise BadInput(f"{checkpoint}: has no critic (recipe={config.recipe}); export it without --critic")
    if adapter and critic:
        raise BadInput("--adapter and --critic: peft would not know what a critic's adapters belong to; give one of them")
    try:
        with storage_errors("writing", target):
            if adapter:
                return sorted(write_adapter(folder, target, config))
            part = "critic" if critic else "model"
            return sorted(write_model(folder, target, config, _describing(read_manifest(folder).files, part), part))
    except BaseException:  # Ctrl-C, too: a part of a model is no use to anybody
        with contextlib.suppress(OSError):
            remove_folder(target)
        raise


# ---------------------------------------------------------------- a Hugging Face directory


def write_model(folder: Path, target: Path, config: Config, described: Sequence[str], part: str = "model") -> dict[str, FileEntry]:
    """The whole model (or ``part`` critic) of checkpoint ``folder``, adapters merged in, so that ``from_pretrained(target)`` loads it.
    ``described``: the files in it that describe this model (``_describing``), which come last: nothing loads a part of it. Returns what was written,
    by name in ``target``. At most one tensor is held in memory.
    """
    index = Index(folder)
    if config.lora.rank:
        tensors, read = _merged(index, derive.critic(config) if part == "critic" else config, part)
    else:
        prefix, dtype = _weights(index, part), getattr(torch, config.model.dtype)
        tensors = [(name.removeprefix(prefix), dtype, of.shape) for name, of in index.tensors.items() if name.startswith(prefix)]
        read = lambda name: whole_tensor(index, prefix + name).to(dtype)
    written = write_shards(target, tensors, read)
    return written | {name: write_file(target / name, read_file(folder / DESCRIBED[part] / name)) for name in described}


def _weights(index: Index, part: str) -> str:
    """What the names of the trained weights begin with; islands agree on the global ones, in float32."""
    return f"{part}/param/" if any(name.startswith(f"{part}/param/") for name in index.tensors) else f"{part}/global/"


def _describing(names: Iterable[str], part: str) -> list[str]:
    """Of the ``names`` of a checkpoint's files, those that describe the model ``part``, without their folder: what else lies there
    (a link to somewhere, say) nobody vouches for."""
    return [name.removeprefix(f"{DESCRIBED[part]}/") for name in names if name.startswith(f"{DESCRIBED[part]}/")]


def write_shards(target: Path, tensors: list[Describe], read: Callable[[str], Tensor], most_bytes: int = MOST_BYTES) -> dict[str, FileEntry]:
    """Files with the names that transformers expects, which contain how many there are."""
    shards: list[list[Describe]] = [[]]
    filled = 0
    for tensor in tensors:
        nbytes = prod(tensor[2]) * tensor[1].itemsize
        if shards[-1] and filled + nbytes > most_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += nbytes
    if len(shards) == 1:
        return {"model.safetensors": write_tensors(target / "model.safetensors", shards[0], read)}
    written, where = {}, {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        written[name] = write_tensors(target / name, shard, read)
        where.update({tensor[0]: name for tensor in shard})
    total = sum(prod(shape) * dtype.itemsize for _, dtype, shape in tensors)
    listed = "model.safetensors.index.json"
    return written | {listed: write_file(target / listed, as_json({"metadata": {"total_size": total}, "weight_map": where}))}


def write_tensors(path: Path, tensors: list[Describe], read: Callable[[str], Tensor]) -> FileEntry:
    """A safetensors file, one tensor in memory at a time; durable on return."""
    entries, at = {}, 0
    for name, dtype, shape in tensors:
        nbytes = prod(shape) * dtype.itemsize
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    state, size = xxhash.xxh3_128(), 0
    if is_local(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for piece in _pieces(safetensors_header(entries, {"format": "pt"}), tensors, read):
            file.write(piece)
            state.update(piece)
            size += len(piece)
    if is_local(path):
        fsync(path)
    return FileEntry(size, state.hexdigest())


def _pieces(header: bytes, tensors: list[Describe], read: Callable[[str], Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for name, dtype, shape in tensors:
        tensor = read(name)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name} is {tensor.dtype}{list(tensor.shape)}, {dtype}{list(shape)} was announced")
        if tensor.numel():
            yield tensor.contiguous().view(-1).view(torch.uint8).numpy().data


# ---------------------------------------------------------------- LoRA


def _merged(index: Index, config: Config, part: str) -> tuple[list[Describe], Callable[[str], Tensor]]:
    """The model that LoRA froze with what the adapters add, in its type, as the engine computes with it."""
    from everstep.engine import hf  # Megatron-Core
    from everstep.engine.model import DTYPES as MODEL_DTYPES
    from everstep.engine.model import read_architecture
    from everstep.layout import Layout

    source = sources.resolve(config.model)
    arch = dataclasses.replace(read_architecture(source.hf_config, config.moe.aux_loss_coef), value_head=part == "critic")
    table = hf.pieces(arch, Layout())
    if config.model.init == "random":
        base: Mapping[str, Callable[[], Tensor]] = hf.random_weights(table, arch, config.seed)
    else:
        base = sources.weights(source)
        if arch.tied and "model.embed_tokens.weight" not in base and "lm_head.weight" in base:
            base = {**base, "model.embed_tokens.weight": base["lm_head.weight"]}
        if arch.experts is not None:
            base = single_experts(base, arch.family, arch.experts.count)
    dtype = MODEL_DTYPES[config.model.dtype]
    tensors = [
        (name, dtype, shape) for piece in table if not piece.shared for name, shape in zip(piece.names, piece.shapes, strict=True)
    ]
    scale, prefix = config.lora.alpha / config.lora.rank, _weights(index, part)

    def read(name: str) -> Tensor:
        if prefix + name in index.tensors:  # trained as a whole: a critic's head
            return whole_tensor(index, prefix + name).to(dtype)
        weight = base[name]().to(dtype)
        a, b = (f"{prefix}{name.removesuffix('weight')}{matrix}" for matrix in _SCALE_PARTS)
        if a not in index.tensors:
            return weight
        low, high = (whole_tensor(index, matrix).to(dtype).float() for matrix in (a, b))
        delta = scale * (low.t() @ high.t()).t()
        return (weight.float() + delta).to(dtype)

    return tensors, read


def write_adapter(folder: Path, target: Path, config: Config) -> dict[str, FileEntry]:
    """adapter_config.json and adapter_model.safetensors, nothing of the frozen model, so that
    ``peft.PeftModel.from_pretrained(model, target)`` loads them."""
    index, dtype = Index(folder), getattr(torch, config.model.dtype)
    prefix = _weights(index, "model")
    tensors = [
        (PEFT_PREFIX + name.removeprefix(prefix), dtype, of.shape)
        for name, of in index.tensors.items() if name.startswith(prefix) and name.endswith(_SCALE_PARTS)
    ]  # fmt: skip
    read = lambda name: whole_tensor(index, prefix + name.removeprefix(PEFT_PREFIX)).to(dtype)
    return {
        "adapter_model.safetensors": write_tensors(target / "adapter_model.safetensors", tensors, read),
        "adapter_config.json": write_file(target / "adapter_config.json", as_json(_adapter_config(config, sources.resolve(config.model)))),
    }


def _adapter_config(config: Config, source: ModelSource) -> dict[str, Any]:
    kind, colon, name = source.spec.partition(":")
    hub = colon and kind == "hf"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name.partition("@")[0] if hub else str(source.dir.absolute()),
        "revision": (name.partition("@")[2] or None) if hub else None,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0 if config.lora.experts else config.lora.dropout,  # peft has none for experts, and would not load them
        "target_modules": [saved_name(source.hf_config.model_type, name) for name in lora_matrices(config)],
        "bias": "none",
        "inference_mode": True,
    }


def beside_state(folder: Path, config: Config, names: Iterable[str]) -> dict[str, FileEntry]:
    """``hf/``, with LoRA ``adapter/``, with a critic ``critic/``, of a checkpoint that is being written (checkpoint.hf); by paths in
    ``folder``. ``names``: of ``described``."""
    names = list(names)
    jobs = {"hf": partial(write_model, folder, folder / "hf", config, _describing(names, "model"))}
    if config.lora.rank:
        jobs["adapter"] = partial(write_adapter, folder, folder / "adapter", config)
    if config.recipe == "ppo":
        jobs["critic"] = partial(write_model, folder, folder / "critic", config, _describing(names, "critic"), "critic")
    return {f"{name}/{file}": entry for name, job in jobs.items() for file, entry in job().items()}
