"""One start of a run: its folder, and the checkpoint that it begins from. For the one process that leads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from everstep.checkpoint import export, flushed
from everstep.checkpoint.choose import Chosen, adopt, choose
from everstep.checkpoint.saving import inner_layout
from everstep.checkpoint.storage import is_file, read_file, storage_errors
from everstep.config import derive
from everstep.config import load as config_files
from everstep.config.schema import Config
from everstep.errors import BadInput
from everstep.run_dir import RunDir, checkpoints_of, local_folder, prepare_run_dir


def chosen(config: Config) -> Chosen:
    """What config.resume asks for: a checkpoint, or, with auto and must, copies of the nodes' memory that are newer. Raises BadInput."""
    left = None
    if config.resume in ("auto", "must"):
        layout = derive.layout(config)
        left = flushed.newest(local_folder(config.run_dir), layout.ranks_per_replica, inner_layout(layout))
    try:
        found = choose(checkpoints_of(config), "auto" if left and not left.cause else config.resume)
    except BadInput as error:
        raise BadInput(f"{error}{f'{chr(10)}  {left.folder}: {left.cause}' if left else ''}") from None
    if left is None or left.cause or (found.path is not None and found.step >= left.step):
        skipped = [*found.skipped, *([(left.folder, left.cause or "the checkpoint is as new")] if left else [])]
        return dataclasses.replace(found, skipped=skipped)
    return Chosen(config.resume, left.folder, left.step, found.skipped)


def check_alike(config: Config, checkpoint: Path) -> None:
    """BadInput if the checkpoint's state cannot be that of this configuration: before anything is put aside for it, or started. What
    depends on the model's shape its ranks find when they load it."""
    file = checkpoint / export.CONFIG
    with storage_errors("reading", file):
        content = read_file(file) if is_file(file) else b""
    try:
        said = yaml.safe_load(content) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: not readable as YAML ({error})") from None
    mine = config.model_dump()
    for key in ("recipe", "model.dtype", "lora.rank", *(["lora.alpha"] if config.lora.rank else []), "semisync.method"):
        theirs, ours = _value(said, key), _value(mine, key)
        if theirs is not None and theirs != ours:
            raise BadInput(
                f"{checkpoint}: was made with {key}={theirs}, this run has {ours}; resume with {key}={theirs}, or start a new run "
                f"from its weights: everstep export {checkpoint} OUT, and model.path=OUT"
            )


def _value(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def prepare(config: Config, clean: bool) -> tuple[RunDir, Chosen]:
    """Raises BadInput; what is refused leaves no folder."""
    found = chosen(config)
    if found.path is not None and not flushed.is_flushed(found.path):
        check_alike(config, found.path)
    checkpoints_only = dataclasses.replace(found, skipped=[s for s in found.skipped if not flushed.is_flushed(s[0])])  # as long as they are there
    run_dir = prepare_run_dir(config, clean)
    flushed.sweep(run_dir.path, found.path)
    if config.resume != "never":
        adopt(checkpoints_of(config), checkpoints_only)
    config_files.save(config, run_dir.configs / "resolved.yaml")
    return run_dir, found
