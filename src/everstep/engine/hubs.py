"""Models of the Hugging Face and the ModelScope hub, fetched once per node: the first process to come takes a file lock, the others wait
for it and find the files."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from everstep.errors import BadInput, first_line

HUBS = ("hf", "modelscope")
#: What is fetched from a hub, by purpose: no .bin, .onnx, .pth or .gguf copies of the same weights.
CONFIG_FILES = ["config.json"]
TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]


def fetch(hub: str, name: str, key: str, files: list[str]) -> Path:
    """The folder, on this node, of a model called ``name`` on ``hub`` (one of :data:`HUBS`), complete as to ``files`` (a list above).
    ``key``: the key of the configuration that named it. ``BadInput``."""
    name, _, revision = name.partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise BadInput(f"{key}={hub}:{name} does not name a model; write {hub}:ORG/NAME, or {hub}:ORG/NAME@REVISION")
    download = _download_hf if hub == "hf" else _download_modelscope
    with lock(f"{hub}--{name.replace('/', '--')}"):
        return download(name, revision or None, key, files)


def cache() -> Path:
    """Where everstep keeps what it fetched or converted on this node."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everstep"


def lock(name: str) -> AbstractContextManager[Any]:
    """A lock between the processes of this node; freed by the operating system if its holder dies."""
    from filelock import FileLock

    folder = cache() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"{folder} cannot be made ({first_line(e)}); set XDG_CACHE_HOME to a place that can") from e
    return FileLock(folder / f"{name}.lock")


def _complete(folder: Path, files: list[str]) -> bool:
    """Whether a snapshot has what ``files`` is for; one that was fetched for less, or cut off, has not."""
    if not (folder / "config.json").is_file():
        return False
    if files == CONFIG_FILES:
        return True
    if files == TOKENIZER_FILES:
        return has_tokenizer(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    return any(folder.glob("*.safetensors"))


def has_tokenizer(folder: Path) -> bool:
    """Whether files of a tokenizer lie there."""
    return any(folder.glob("tokenizer*")) or any(folder.glob("vocab*"))


def _download_hf(name: str, revision: str | None, key: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        cached = Path(snapshot_download(name, revision=revision, local_files_only=True))
        if _complete(cached, files):
            return cached
    except (LocalEntryNotFoundError, HFValidationError):
        pass  # not here yet; a malformed name is reported below
    spec = f"{key}=hf:{name}" + (f"@{revision}" if revision else "")
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except GatedRepoError as e:
        raise BadInput(f"{spec} needs a permission: accept its licence on the hub and log in (hf auth login)") from e
    except RevisionNotFoundError as e:
        raise BadInput(f"{spec}: the hub has the model but not this revision") from e
    except RepositoryNotFoundError as e:
        raise BadInput(f"{spec}: the hub has no such model, or it is private and needs a login (hf auth login)") from e
    except HFValidationError as e:
        raise BadInput(f"{spec} is not a valid name: {first_line(e)}") from e
    except OSError as e:  # offline mode, no network, HTTP errors, a full disk
        raise BadInput(
            f"{spec} is not on this node and could not be fetched ({first_line(e)}); "
            f"connect to the network, or download it elsewhere and give its folder as {key}"
        ) from e
    return folder  # what the hub does not have is missed, by name, where it is needed


def _download_modelscope(name: str, revision: str | None, key: str, files: list[str]) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError as e:
        raise BadInput(f"{key}=modelscope:{name} needs the package modelscope (pip install modelscope)") from e
    try:
        cached = Path(snapshot_download(name, revision=revision, local_files_only=True))
        if _complete(cached, files):
            return cached
    except (OSError, ValueError):
        pass  # not here yet
    try:
        return Path(snapshot_download(name, revision=revision, allow_file_pattern=files))
    except Exception as e:  # a fault boundary: modelscope raises bare Exception subclasses of its own
        raise BadInput(
            f"{key}=modelscope:{name} is not on this node and could not be fetched ({first_line(e)}); "
            f"connect to the network, or download it elsewhere and give its folder as {key}"
        ) from e
