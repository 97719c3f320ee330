"""Models that are one GGUF file: their sizes, and a copy that everything else can read.

Dequantising takes tens of seconds and several copies of the model in memory; every rank and every spare would pay it, each time it
starts. So each node does it once, into a folder of config.json, float32 safetensors and tokenizer.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any, BinaryIO

from everstep.engine import hubs
from everstep.engine.shape import ModelShape
from everstep.errors import BadInput, first_line

#: GGUF names of the architectures that the engine builds.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def read_shape(path: Path) -> ModelShape:
    """The sizes of the model in a GGUF file, from its header. ``BadInput``."""
    try:
        with path.open("rb") as file:
            values, tensors = _header(file)
        kind = values["general.architecture"]
        hidden, heads = values[f"{kind}.embedding_length"], values[f"{kind}.attention.head_count"]
        return ModelShape(
            architecture=_ARCHITECTURES.get(kind, kind),
            layers=values[f"{kind}.block_count"],
            hidden=hidden,
            ffn=values[f"{kind}.feed_forward_length"],
            heads=heads,
            kv_heads=values.get(f"{kind}.attention.head_count_kv", heads),
            head_dim=values.get(f"{kind}.attention.key_length", hidden // heads),
            vocab=tensors["token_embd.weight"][1],
            tied="output.weight" not in tensors,
        )
    except (OSError, struct.error, KeyError, ValueError, IndexError) as e:
        raise BadInput(f"{path} is not a readable GGUF file of a Llama, Qwen2 or Qwen3 model: {first_line(e)}") from e


def _header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """(scalar metadata, tensor shapes innermost first) of a GGUF file; version 2 and 3, little-endian.

    The package ``gguf`` reads the same, but maps every token into an array first: 3.5 s for a 49,152-token
    vocabulary, where ``everstep plan`` has a second in all. The tests compare the two.
    """
    scalars = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    string, array = 8, 9

    def read(code: str) -> Any:
        return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]

    def text() -> str:
        return file.read(read("Q")).decode()

    def value(kind: int) -> Any:
        if kind == string:
            return text()
        if kind != array:
            return read(scalars[kind])
        inner, count = read("I"), read("Q")
        if inner == string:
            for _ in range(count):
                file.seek(read("Q"), 1)
        elif inner == array:
            for _ in range(count):
                value(array)
        else:
            file.seek(count * struct.calcsize("<" + scalars[inner]), 1)
        return None

    magic, version = file.read(4), read("I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"magic {magic!r}, version {version}")
    tensor_count, value_count = read("Q"), read("Q")
    values = {}
    for _ in range(value_count):
        name, kind = text(), read("I")
        values[name] = value(kind)
    tensors = {}
    for _ in range(tensor_count):
        name, dimensions = text(), read("I")
        tensors[name] = tuple(read("Q") for _ in range(dimensions))
        file.seek(12, 1)  # type and offset
    return values, tensors


def converted(path: Path, spec: str) -> Path:
    """The folder of the converted copy of ``path``, made now if it is not there yet. ``spec``: what the user called the model. ``BadInput``."""
    folder = conversion(path)
    with hubs.lock(folder.name):
        if not folder.is_dir():
            partial_folder = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial_folder, ignore_errors=True)  # of a process that was killed here
            try:
                partial_folder.mkdir(parents=True)
                _convert(path, spec, partial_folder)
                partial_folder.rename(folder)
            except OSError as e:
                raise BadInput(
                    f"model.path={spec} cannot be unpacked to {folder}: {first_line(e)}; "
                    "make room there, or set XDG_CACHE_HOME to another place"
                ) from e
    return folder


def conversion(path: Path) -> Path:
    """Where the converted copy belongs; another file, or another transformers, has another place."""
    import hashlib
    from importlib.metadata import version

    facts = path.stat()
    key = f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns} {version('transformers')}"
    return hubs.cache() / "gguf" / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _convert(path: Path, spec: str, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except ImportError as e:
        raise BadInput(f"model.path={spec} is a GGUF file and needs more packages: {first_line(e)}") from e
    except (OSError, ValueError, KeyError) as e:
        raise BadInput(f"transformers cannot read {path}: {first_line(e)}") from e
    # transformers refuses to save a model that it takes for quantised, though its tensors are plain by now.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
