"""What rollout engines have made of iterations that are still to come (rollout.max_staleness), as it is when a checkpoint is made.

    RUN/iterations/ahead-000240.json      the committed step; by iteration, each sample's completion as far as it has come

A run that resumes from that checkpoint goes on with it, in the same order: long completions, which take longest, are not begun anew, and
what is trained on next is not what happens to be short.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import xxhash

from everstep.checkpoint.manifest import checkpoint_folders, step_of
from everstep.checkpoint.storage import storage_errors, write_atomic
from everstep.rl.rollout import Response

FORMAT = 1
Made = Mapping[str, Response]  # sample -> its completion so far; complete ones among them


def write(folder: Path, step: int, settings: str, batches: Sequence[Made]) -> None:
    """Durable when it returns. Raises CheckpointError if the disk refuses."""
    made = [{sample: dataclasses.astuple(response) for sample, response in batch.items()} for batch in batches]
    text = json.dumps({"format": FORMAT, "settings": settings, "batches": made})
    path = _path(folder, step)
    with storage_errors("writing", path):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}".encode())


def read(folder: Path, step: int, settings: str, note: Callable[[str], None]) -> list[dict[str, Response]]:
    """By iteration, the next one first; none if there is no such file, it is damaged, or was made under other settings, which is noted."""
    path = _path(folder, step)
    if not path.is_file():
        return []
    checksum, _, text = path.read_text(errors="replace").partition("\n")
    if xxhash.xxh3_128_hexdigest(text.encode()) != checksum:
        note(f"{path}: the checksum is wrong; its completions are made again")
        return []
    said = json.loads(text)
    if (said["format"], said["settings"]) != (FORMAT, settings):
        note(f"{path} was made with other settings (rl, rollout, reward, data, ...); its completions are made again")
        return []
    return [{sample: Response(*fields) for sample, fields in batch.items()} for batch in said["batches"]]


def retire(folder: Path, checkpoints: Path, step: int) -> None:
    """Delete those that no checkpoint needs. Checkpoints later than the newest one there is, up to ``step``, may be on their way."""
    saved = [number for one in checkpoint_folders(checkpoints) if (number := step_of(one)) is not None]
    newest = max(saved, default=-1)
    with storage_errors("deleting", folder):
        for path in folder.glob("ahead-*.json"):
            number = int(path.stem.removeprefix("ahead-"))
            if number not in saved and not newest < number <= step:
                path.unlink()


def _path(folder: Path, step: int) -> Path:
    return folder / f"ahead-{step:06d}.json"
