"""One start of a run: its folder, and the checkpoint that it begins from. For the one process that leads."""

from __future__ import annotations

from everstep.checkpoint.choose import Chosen, adopt, choose
from everstep.config import load as config_files
from everstep.config.schema import Config
from everstep.run_dir import RunDir, checkpoints_of, prepare_run_dir


def prepare(config: Config, clean: bool) -> tuple[RunDir, Chosen]:
    """Raises BadInput; what is refused leaves no folder."""
    chosen = choose(checkpoints_of(config), config.resume)
    run_dir = prepare_run_dir(config, clean)
    if config.resume != "never":
        adopt(checkpoints_of(config), chosen)
    config_files.save(config, run_dir.configs / "resolved.yaml")
    return run_dir, chosen
