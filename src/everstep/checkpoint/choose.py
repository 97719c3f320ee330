"""Which checkpoint a run starts from: ``resume=never|auto|must|PATH|STEP``.

A checkpoint is used only after every byte of it has been read and its checksum found right. Newer folders
that fail are skipped, each with its reason; the choice and the reasons are printed (``Chosen.explain``). Storage that does not let us
look is an error, and no reason to skip: the newest may be whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from everstep.checkpoint.manifest import (
    BEST,
    MANIFEST,
    PARTIAL,
    POINTER,
    checkpoint_folders,
    damage,
    folder_name,
    pointed_at,
    read_manifest,
    set_pointer,
    step_of,
    sweep,
)
from everstep.checkpoint.storage import (
    exists,
    free_name,
    is_file,
    is_folder,
    is_local,
    place,
    rename_folder,
    storage_errors,
)
from everstep.errors import BadInput


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to start from (``path`` None: from the model's own weights) and what was passed over."""

    resume: str
    path: Path | None = None
    step: int = 0
    skipped: list[tuple[Path, str]] = field(default_factory=list)

    def explain(self) -> str:
        """Lines for the user: what was chosen, and why newer folders were not."""
        if self.path is None:
            first = f"resume={self.resume}: starting from the beginning"
            if self.resume != "never":
                first += ", there is no usable checkpoint"
        else:
            first = f"resume={self.resume}: continuing after step {self.step} from {self.path}"
        return "\n".join([first, *(f"  skipped {path.name}: {reason}" for path, reason in self.skipped)])


def choose(checkpoints: Path, resume: str) -> Chosen:
    """Find what ``resume`` asks for in a run's ``checkpoints`` folder (or at the path it names). Changes nothing.

    BadInput if ``must``, a STEP or a PATH finds nothing usable: says what there is instead. CheckpointError if storage refuses.
    """
    if resume == "never":
        return Chosen(resume)
    if resume in ("auto", "must"):
        chosen = _newest_good(checkpoints, resume)
        if resume == "must" and chosen.path is None:
            reasons = "".join(f"\n  {path.name}: {reason}" for path, reason in chosen.skipped)
            raise BadInput(f"resume=must: no usable checkpoint in {checkpoints}{reasons or ' (there is none at all)'}")
        return chosen
    if resume.isdecimal():
        folder = checkpoints / folder_name(int(resume))
        with storage_errors("looking at", folder):
            known = is_folder(folder)
        if not known:
            there = ", ".join(str(step_of(path)) for path in reversed(checkpoint_folders(checkpoints)))
            raise BadInput(f"resume={resume}: no such step in {checkpoints}; there are: {there or 'none'}")
        must_be_whole(folder, f"resume={resume}")
    else:
        folder = at_address(resume, f"resume={resume}", "; give never, auto, must, a step or a checkpoint folder")
    step = read_manifest(folder).step
    return Chosen(resume, folder, step, list(_left(checkpoints, folder, step)))


def _left(checkpoints: Path, folder: Path, step: int) -> Iterator[tuple[Path, str]]:
    """What the run leaves when it goes on from ``folder``, of ``step``: a later save of such a step would be taken for made already."""
    own = _lies_in(folder, checkpoints)
    for path in checkpoint_folders(checkpoints):
        there = step_of(path) or 0
        if there > step:
            yield path, f"newer than step {step}, which was asked for"
        elif there == step and not (own and path.name == folder.name):
            yield path, f"of step {step} too, which was asked for from {folder}"


def at_address(address: str, said: str, hint: str = "") -> Path:
    """The whole checkpoint at ``address``, every byte of it read. BadInput, which begins with ``said``, if there is none."""
    folder = place(address)
    with storage_errors("looking at", folder):
        if not is_folder(folder):
            raise BadInput(f"{said}: no such folder{hint}")
        if folder.name.endswith(PARTIAL):
            raise BadInput(f"{said}: not a checkpoint but a save that died or is on its way; the next save deletes it")
        if not is_file(folder / MANIFEST):
            inside = checkpoint_folders(folder / "checkpoints") or checkpoint_folders(folder)
            hint = f"; did you mean {inside[0]}?" if inside else ", or it was never completed"
            raise BadInput(f"{said}: not a checkpoint (no {MANIFEST}){hint}")
    must_be_whole(folder, said)
    return folder


def must_be_whole(folder: Path, said: str) -> None:
    with storage_errors("reading", folder):
        reason = damage(folder)
    if reason:
        raise BadInput(f"{said}: that checkpoint is not usable: {reason}")


def adopt(checkpoints: Path, chosen: Chosen) -> list[Path]:
    """Make the choice the run's present: ``latest`` names it, and skipped newer folders move to ``set-aside/``.

    Without this a later ``resume=auto`` would return to a future that this run has left. Nothing is deleted
    but unfinished saves, and a pointer to what is moved. Returns the new places. Called once, by the one that trains, after ``choose``.
    """
    moved: list[Path] = []
    with storage_errors("preparing", checkpoints):
        leaves = [path.name for path, _ in chosen.skipped]
        stays = [path for path in checkpoint_folders(checkpoints) if path.name not in leaves]
        if chosen.path is not None and _lies_in(chosen.path, checkpoints) and step_of(chosen.path) is not None:
            set_pointer(chosen.path)
        elif leaves and stays:
            set_pointer(stays[0])
        elif leaves:
            _forget(checkpoints, POINTER)
        if _names(checkpoints, BEST) in leaves:
            _forget(checkpoints, BEST)
        for path, _ in chosen.skipped:
            aside = checkpoints / "set-aside"
            if is_local(aside):
                aside.mkdir(exist_ok=True)
            target = free_name(aside / path.name)
            rename_folder(path, target)
            moved.append(target)
        sweep(checkpoints)
    return moved


def _names(checkpoints: Path, pointer: str) -> str | None:
    try:
        named = pointed_at(checkpoints, pointer)
    except BadInput:  # whoever needs it says so
        return None
    return named.name if named else None


def _forget(checkpoints: Path, pointer: str) -> None:
    if exists(checkpoints / pointer):
        (checkpoints / pointer).unlink()


def _lies_in(folder: Path, checkpoints: Path) -> bool:
    if is_local(folder) and is_local(checkpoints):
        return folder.resolve().parent == checkpoints.resolve()
    return str(folder.parent).rstrip("/") == str(checkpoints).rstrip("/")


def _newest_good(checkpoints: Path, resume: str) -> Chosen:
    skipped: list[tuple[Path, str]] = []
    for folder in checkpoint_folders(checkpoints):
        reason = damage(folder)
        if reason is None:
            return Chosen(resume, folder, read_manifest(folder).step, skipped)
        skipped.append((folder, reason))
    return Chosen(resume, skipped=skipped)
