"""One start of a run: its folder, and the checkpoint that it begins from. For the one process that leads."""

from __future__ import annotations

import dataclasses

from everstep.checkpoint import flushed
from everstep.checkpoint.choose import Chosen, adopt, choose
from everstep.checkpoint.saving import inner_layout
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


def prepare(config: Config, clean: bool) -> tuple[RunDir, Chosen]:
    """Raises BadInput; what is refused leaves no folder."""
    found = chosen(config)
    checkpoints_only = dataclasses.replace(found, skipped=[s for s in found.skipped if not flushed.is_flushed(s[0])])  # as long as they are there
    run_dir = prepare_run_dir(config, clean)
    flushed.sweep(run_dir.path, found.path)
    if config.resume != "never":
        adopt(checkpoints_of(config), checkpoints_only)
    config_files.save(config, run_dir.configs / "resolved.yaml")
    return run_dir, found
