"""The folder of a run: made, refused, cleaned, or entered for another attempt.

    RUN/configs  checkpoints  logs/attempt-2  logs/latest  events  tensorboard  report

A folder that a run has used is refused unless the user says what should happen to it: ``resume=...``
continues in it, ``--clean`` empties it. Only what a run makes is ever deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint.manifest import checkpoint_folders
from everstep.checkpoint.storage import is_local, local_folder, place, remove_folder
from everstep.cluster.processes import pid_runs
from everstep.config.schema import Config
from everstep.errors import BadInput

#: Everything a run makes directly inside its folder.
OWN_ENTRIES = (
    "configs",
    "checkpoints",
    "copies",
    "commits.log",
    "controller.json",
    "control.json",
    "watch.json",
    "logs",
    "events",
    "tensorboard",
    "wandb",
    "mlruns",
    "mlflow_run_id",
    "samples",
    "report",
    "metrics.jsonl",
    "status.json",
    "diagnosis",
    "iterations",
)
_STARTING = ".starting"  # names the process that starts a run there, until the run itself has begun
_ATTEMPT = re.compile(r"attempt-(\d+)")


@dataclass(frozen=True)
class RunDir:
    """Paths of one attempt of a run; ``attempt`` counts the starts in this folder from 1."""

    path: Path
    attempt: int

    @property
    def configs(self) -> Path:
        return self.path / "configs"

    @property
    def logs(self) -> Path:
        return self.path / "logs" / f"attempt-{self.attempt}"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def rank_log(self, number: int) -> Path:
        """Log file of the process with this number (ranks first, then spares), within this attempt."""
        return self.logs / f"rank-{number:03d}.log"

    def engine_log(self, name: str) -> Path:
        """Log file of a rollout engine, within this attempt."""
        return self.logs / f"engine-{name}.log"


def checkpoints_of(config: Config) -> Path:
    """Where the run's checkpoints lie: checkpoint.path, or the folder ``checkpoints`` in run_dir."""
    return place(config.checkpoint.path) if config.checkpoint.path else local_folder(config.run_dir) / "checkpoints"


def checkpoints_in(run: Path) -> Path:
    """Where the checkpoints of the run in folder ``run`` lie; the run need not exist."""
    resolved = run / "configs" / "resolved.yaml"
    if resolved.is_file():  # first: the run may have begun without checkpoint.path
        from everstep.config.load import load_config

        if elsewhere := load_config(resolved).checkpoint.path:
            return place(elsewhere)
    return run / "checkpoints"


def prepare_run_dir(config: Config, clean: bool = False) -> RunDir:
    """Make the folders of a new attempt in ``config.run_dir``; called once per start, by the one process that leads.

    BadInput if the folder has been used and the user did not say what to do with it, if it belongs to
    something else, or if it cannot be written to.
    """
    path = local_folder(config.run_dir)
    check_run_dir(config, clean)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if clean:
            for name in OWN_ENTRIES:
                entry = path / name
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
            for folder in checkpoint_folders(checkpoints_of(config)):
                remove_folder(folder)
        run = RunDir(path, 1 + max(_attempts(path), default=0))
        folders = [run.configs, run.logs, run.events, run.tensorboard, run.report]
        if is_local(checkpoints_of(config)):
            folders.append(checkpoints_of(config))
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        (path / _STARTING).unlink(missing_ok=True)
        # Replaced atomically: whoever follows logs/latest never finds it missing.
        temporary = path / "logs" / f".latest.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(run.logs.name)
        os.replace(temporary, path / "logs" / "latest")
    except OSError as error:
        raise BadInput(f"run_dir={path}: cannot be prepared: {error.strerror} ({error.filename}); choose another") from error
    return run


def check_run_dir(config: Config, clean: bool = False) -> None:
    """The refusals of ``prepare_run_dir``, without touching the disk."""
    path = local_folder(config.run_dir)
    if path.exists() and not path.is_dir():
        raise BadInput(f"run_dir={path}: is a file; choose a folder")
    used = [name for name in OWN_ENTRIES if (path / name).exists()]
    if clean and config.resume != "never":
        raise BadInput(f"--clean deletes what resume={config.resume} would continue from; give one of them")
    if used and config.resume == "never" and not clean:
        raise BadInput(
            f"run_dir={path} has been used by a run (it has {', '.join(used)}); continue it with resume=auto, "
            "delete its results with --clean, or choose another run_dir"
        )
    if config.checkpoint.path and config.resume == "never" and not clean and (there := checkpoint_folders(checkpoints_of(config))):
        raise BadInput(
            f"checkpoint.path={config.checkpoint.path} has checkpoints of a run ({there[0].name}); continue it with resume=auto, delete them "
            "with --clean, or choose another checkpoint.path"
        )
    foreign = [] if used or not path.is_dir() else sorted(entry.name for entry in path.iterdir() if entry.name != _STARTING)
    if foreign:
        raise BadInput(
            f"run_dir={path} holds other things ({', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}); "
            "choose a new or empty folder"
        )


@contextlib.contextmanager
def starting(config: Config) -> Iterator[None]:
    """Until a process below this one prepares the folder, after seconds of imports, whoever looks there finds that a run is being started.

    Whatever of the folder was made here is gone afterwards if no run came to be. BadInput if it cannot be made."""
    path = local_folder(config.run_dir)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    mark = path / _STARTING
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
            mark.write_text(f"{os.getpid()} {socket.gethostname()}")
        except OSError as error:
            raise BadInput(f"run_dir={path}: cannot be prepared: {error.strerror} ({error.filename}); choose another") from error
        yield
    finally:
        with contextlib.suppress(OSError):  # nothing was written, or the run has something in the folder
            mark.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()


def is_starting(path: Path) -> bool:
    """Whether a process of this machine starts a run there that has not begun."""
    try:
        pid, host = (path / _STARTING).read_text().split()
        return host == socket.gethostname() and pid_runs(int(pid))
    except (OSError, ValueError):
        return False


def open_run_dir(path: str | Path) -> RunDir:
    """The latest attempt of an existing run, for looking at it. BadInput if there was none."""
    folder = local_folder(path)
    attempts = _attempts(folder)
    if not folder.exists():
        raise BadInput(f"{folder}: there is no such folder")
    if not attempts:
        raise BadInput(f"{folder}: not a run folder (no logs/attempt-N)")
    return RunDir(folder, max(attempts))


def _attempts(path: Path) -> list[int]:
    logs = path / "logs"
    if not logs.is_dir():
        return []
    return [int(match[1]) for entry in logs.iterdir() if (match := _ATTEMPT.fullmatch(entry.name))]
