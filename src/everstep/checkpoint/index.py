"""``state/index.json``: which logical tensors a checkpoint holds, and in which files their rectangles lie. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from everstep.checkpoint.storage import CheckpointError, FileEntry, read_file, storage_errors
from everstep.engine.logical import Box
from everstep.errors import BadInput, EverstepError
from everstep.paths import within

INDEX = "state/index.json"


@dataclass(frozen=True)
class Saved:
    """A rectangle in a file: ``offset`` and ``nbytes`` there, xxh3-64 of its bytes."""

    file: str
    box: Box
    offset: int
    nbytes: int
    xxh3_64: str


@dataclass(frozen=True)
class Tensors:
    """All rectangles of one logical tensor. ``dtype``: its name in safetensors."""

    dtype: str
    shape: tuple[int, ...]
    saved: tuple[Saved, ...]


def rectangle_name(name: str, box: Box) -> str:
    return f"{name}[{box.row}:{box.row + box.rows},{box.col}:{box.col + box.cols}]"



@dataclass(frozen=True)
class Receipt:
    """What one rank wrote: of each file its entry for the manifest and its rectangles; and its scalars, by part."""

    rank: int
    replica: int
    files: dict[str, FileEntry]
    rectangles: dict[str, list[dict[str, Any]]]
    scalars: dict[str, dict[str, Any]]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Receipt:
        files = {name: FileEntry(**entry) for name, entry in said["files"].items()}
        return cls(int(said["rank"]), int(said["replica"]), files, said["rectangles"], said["scalars"])


def make_index(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """The content of ``state/index.json``. CheckpointError if the rectangles of a tensor do not cover it exactly once, or if
    replicas disagree: the save is void then."""
    tensors: dict[str, Any] = {}
    area: dict[str, int] = {}
    for receipt in receipts:
        for file, rectangles in receipt.rectangles.items():
            for said in rectangles:
                known = tensors.setdefault(said["name"], {"dtype": said["dtype"], "shape": said["shape"], "boxes": []})
                if (known["dtype"], known["shape"]) != (said["dtype"], said["shape"]):
                    raise CheckpointError(f"{said['name']} is {known['dtype']}{known['shape']} to one rank, {said['dtype']}{said['shape']} to "
                                          f"rank {receipt.rank} of replica {receipt.replica}; the save is void")  # fmt: skip
                known["boxes"].append([file, *said["box"], said["offset"], said["nbytes"], said["xxh3_64"]])
                area[said["name"]] = area.get(said["name"], 0) + said["box"][1] * said["box"][3]
    for name, known in tensors.items():
        corners = {(box[1], box[3]) for box in known["boxes"]}
        if area[name] != prod(known["shape"]) or len(corners) != len(known["boxes"]):
            raise CheckpointError(f"{name}: ranks wrote {area[name]} of its {prod(known['shape'])} elements; the save is void")
    scalars: dict[str, list[Any]] = {}
    said_by: dict[str, int] = {}  # part -> the replica whose ranks are listed
    for receipt in sorted(receipts, key=lambda receipt: (receipt.replica, receipt.rank)):
        for part, values in receipt.scalars.items():
            listed, first = scalars.setdefault(part, []), said_by.setdefault(part, receipt.replica)
            if receipt.replica == first:
                listed.append(values)
            elif values != listed[receipt.rank]:
                raise CheckpointError(f"rank {receipt.rank} of replicas {first} and {receipt.replica} disagree on {part}: {listed[receipt.rank]} "
                                      f"and {values}; the save is void")  # fmt: skip
    return {"tensors": dict(sorted(tensors.items())), "scalars": scalars}


class Index:
    """``state/index.json`` of a checkpoint, read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with storage_errors("reading", folder / INDEX):
            content = read_file(folder / INDEX)
        try:
            said = json.loads(content)
            self.scalars: dict[str, list[dict[str, Any]]] = said["scalars"]
            self.tensors = {
                name: Tensors(
                    of["dtype"], tuple(of["shape"]),
                    tuple(Saved(within(box[0]), Box(*box[1:5]), box[5], box[6], box[7]) for box in of["boxes"]),
                )
                for name, of in said["tensors"].items()
            }  # fmt: skip
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise BadInput(f"{folder / INDEX}: unreadable ({type(error).__name__}: {error}); take another checkpoint") from None

    def scalars_of(self, part: str) -> list[dict[str, Any]]:
        """A part's scalars, by rank. BadInput if the checkpoint lacks that part."""
        if part not in self.scalars:
            raise BadInput(f"{self.folder / INDEX}: has no state of {part}; it has {', '.join(sorted(self.scalars))}")
        return self.scalars[part]

    def island(self, replica: int) -> str:
        """The part of island ``replica``; of another one, if that was not saved."""
        islands = sorted((part for part in self.scalars if part.startswith("island-")), key=lambda part: int(part.partition("-")[2]))
        own = f"island-{replica}"
        return own if own in islands or not islands else islands[0]

    def names(self, part: str) -> dict[str, Tensors]:
        """The tensors of ``part``, without its name."""
        return {name.removeprefix(f"{part}/"): of for name, of in self.tensors.items() if name.startswith(f"{part}/")}


def damaged_tensor(folder: Path, file: str) -> str | None:
    """The first rectangle of a damaged file that is not what was written, by name; None if the damage lies in none."""
    try:
        index = Index(folder)
        for name, of in index.tensors.items():
            for saved in of.saved:
                if saved.file == file:
                    with storage_errors("reading", folder / file):
                        found = read_file(folder / file, saved.offset, saved.offset + saved.nbytes)
                    if xxhash.xxh3_64_hexdigest(found) != saved.xxh3_64:
                        return rectangle_name(name, saved.box)
    except (EverstepError, ValueError, TypeError, IndexError):
        pass  # the index itself is damaged: that it is, the manifest says
    return None


# ---------------------------------------------------------------- scalars


def check_scalar(key: str, value: Any) -> None:
    """Only what JSON gives back exactly: a tuple would return as a list, a numeric key as a string."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise CheckpointError(f"scalar {key} has the key {name!r}; only strings survive a checkpoint")
            check_scalar(f"{key}.{name}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_scalar(f"{key}[{index}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"scalar {key} is {value}; only finite numbers survive a checkpoint")
    elif not (value is None or type(value) in (bool, int, float, str)):
        raise CheckpointError(f"scalar {key} is a {type(value).__name__}; use int, float, str, bool, list or dict")
