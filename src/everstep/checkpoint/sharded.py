"""State on disk by logical tensors: who writes which part of it, the files, and how any rank of any layout finds its own in them.

    state/ID-REPLICA.RANK-FILE.safetensors   rectangles of logical tensors, each named PART/KIND/NAME[rows,columns]
    state/index.json                         logical tensors (type, shape), and of each rectangle: place, size, xxh3-64

Every element is written once, by one of all the ranks that hold it, in whatever replica. What loads reads what it needs of the
rectangles that overlap its own, and checks each of them. Nothing here is a collective.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from everstep.checkpoint.index import INDEX, Index, Saved, rectangle_name
from everstep.checkpoint.storage import read_file, storage_errors
from everstep.engine.logical import Box, Fragment, LogicalState
from everstep.errors import BadInput

FILE_BYTES = 256 << 20  # of one file, about: files are what is written, and uploaded, in parallel
READ_BYTES = 32 << 20   # of one read, about
READERS = 8
_ALIGNMENT = 64
#: torch's types by their names in safetensors, and back.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


# ---------------------------------------------------------------- who writes what


def my_share(parts: Mapping[str, LogicalState], replica: int, replicas: int) -> list[Fragment]:
    """The fragments that this rank writes, named ``PART/KIND/NAME``; ``replica`` of ``replicas`` numbers those that save.

    Every holder of a rectangle computes the same writer for it, from its number among those of its tensor: the turns go round over
    all holders in all replicas.
    """
    mine: list[Fragment] = []
    for part, state in parts.items():
        counted: dict[str, int] = {}
        for fragment in state.fragments:
            if fragment.shared:
                continue
            name = f"{part}/{fragment.name}"
            number = counted[name] = counted.get(name, -1) + 1
            among, mine_of = (1, 0) if state.of_one_replica else (replicas, replica)
            turns = fragment.holders * among
            if (zlib.crc32(name.encode()) + number) % turns == mine_of * fragment.holders + fragment.turn:
                mine.append(replace(fragment, name=name))
    return mine


class _Content(NamedTuple):
    """A rectangle in a file. ``dtype``: its name in safetensors; ``offset``: from the first rectangle's."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: str
    offset: int
    nbytes: int


class StagedFile:
    """One file to be, in host memory: header and data in one buffer. Filled by ``copy``, which ``release`` ends, sealed by ``finish``."""

    def __init__(self, name: str, fragments: Sequence[Fragment], allocate: Callable[[int], Tensor]) -> None:
        self.name, self._sources = name, [fragment.tensor for fragment in fragments]
        self._contents: list[_Content] = []
        at = 0
        for fragment in fragments:
            nbytes = fragment.tensor.numel() * fragment.tensor.element_size()
            self._contents.append(_Content(fragment.name, fragment.shape, fragment.box, CODES[fragment.tensor.dtype], at, nbytes))
            at += nbytes
        self._start = len(self._header(["0" * 16] * len(self._contents)))
        self.whole_buffer = allocate(self._start + at)  # uint8, on the host; may be longer
        self.buffer = self.whole_buffer[: self._start + at]

    def copy(self) -> None:
        """The fragments' present bytes; from a device, on the current stream, not waiting for it."""
        for tensor, of in zip(self._sources, self._contents, strict=True):
            low = self._start + of.offset
            self.buffer[low : low + of.nbytes].copy_(tensor.reshape(-1).view(torch.uint8), non_blocking=True)

    def release(self) -> None:
        """The copies are made: forget where they came from."""
        self._sources = []

    def finish(self) -> tuple[memoryview, list[dict[str, Any]]]:
        """(the file's content, its rectangles for the index)."""
        content = self.buffer.numpy().data
        entries, digests = [], []
        for of in self._contents:
            low = self._start + of.offset
            digests.append(xxhash.xxh3_64_hexdigest(content[low : low + of.nbytes]))
            entries.append({
                "name": of.name, "dtype": of.dtype, "shape": list(of.shape),
                "box": [of.box.row, of.box.rows, of.box.col, of.box.cols], "offset": low, "nbytes": of.nbytes, "xxh3_64": digests[-1],
            })  # fmt: skip
        header = self._header(digests)
        content[: len(header)] = header
        return content, entries

    def _header(self, digests: Sequence[str]) -> bytes:
        described: dict[str, Any] = {}
        checks: dict[str, str] = {}
        for of, check in zip(self._contents, digests, strict=True):
            name = rectangle_name(of.name, of.box)
            described[name] = {"dtype": of.dtype, "shape": [of.box.rows, of.box.cols], "data_offsets": [of.offset, of.offset + of.nbytes]}
            checks[f"xxh3_64 {name}"] = check
        return safetensors_header(described, checks)


def safetensors_header(described: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON header of a safetensors file, padded so that the data begins at a multiple of 64 bytes."""
    text = json.dumps({"__metadata__": dict(metadata), **described}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def staged_files(
    fragments: Iterable[Fragment], stem: str, allocate: Callable[[int], Tensor], file_bytes: int = FILE_BYTES
) -> list[StagedFile]:
    """``fragments`` shared out to files of about ``file_bytes``; larger elements first, so that all lie aligned."""
    ordered = sorted(fragments, key=lambda fragment: -fragment.tensor.element_size())
    groups: list[list[Fragment]] = []
    filled = file_bytes
    for fragment in ordered:
        nbytes = fragment.tensor.numel() * fragment.tensor.element_size()
        if filled and filled + nbytes > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(fragment)
        filled += nbytes
    return [StagedFile(f"state/{stem}-{number:03d}.safetensors", group, allocate) for number, group in enumerate(groups)]


# ---------------------------------------------------------------- reading


def check_fits(index: Index, part: str, state: LogicalState) -> None:
    """BadInput unless ``part`` of the checkpoint has exactly the tensors of ``state``'s model, of its shapes and types."""
    saved = index.names(part)
    where = index.folder / INDEX
    missing, unknown = sorted(set(state.names) - set(saved)), sorted(set(saved) - set(state.names))
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which the model has not"
        raise BadInput(
            f"{where}: {what} ({len(missing)} tensors missing, {len(unknown)} unknown); the checkpoint was made with "
            "another model, engine or loss configuration: compare config.yaml beside its manifest"
        )
    for name, shape in state.names.items():
        if saved[name].shape != shape:
            raise BadInput(f"{where}: {name} has shape {list(saved[name].shape)}, the model's has {list(shape)}; use the model it was saved with")
    for fragment in state.fragments:
        mine = CODES[fragment.tensor.dtype]
        if saved[fragment.name].dtype != mine:
            raise BadInput(f"{where}: {fragment.name} is {saved[fragment.name].dtype}, the model's is {mine}; set model.dtype as saved")


def load_part(index: Index, part: str, state: LogicalState) -> None:
    """Write a part's saved state into the tensors of ``state``, in place. Everything is checked before the first write, except what
    only reading shows: then BadInput names file and tensor, and the state is undefined."""
    check_fits(index, part, state)
    for padding in state.padding:
        padding.zero_()
    read_into(index, [replace(fragment, name=f"{part}/{fragment.name}") for fragment in state.fragments])


def read_into(index: Index, wanted: Sequence[Fragment]) -> None:
    """Fill the fragments from all saved rectangles that overlap them."""
    uses: dict[Saved, list[tuple[str, Fragment, Box]]] = {}
    for fragment in wanted:
        found = 0
        for saved in index.tensors[fragment.name].saved:
            if overlap := saved.box.overlap(fragment.box):
                uses.setdefault(saved, []).append((fragment.name, fragment, overlap))
                found += overlap.size
        if found != fragment.box.size:
            raise BadInput(f"{index.folder / INDEX}: {rectangle_name(fragment.name, fragment.box)} is covered by {found} of its {fragment.box.size} elements")
    runs: list[list[Saved]] = []
    for saved in sorted(uses, key=lambda s: (s.file, s.offset)):
        last = runs[-1][-1] if runs else None
        near = last is not None and last.file == saved.file and last.offset + last.nbytes == saved.offset
        if near and saved.offset + saved.nbytes - runs[-1][0].offset <= READ_BYTES:
            runs[-1].append(saved)
        else:
            runs.append([saved])
    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-read") as pool:
        for _ in pool.map(partial(_read_run, index, uses), runs):
            pass


def _read_run(index: Index, uses: Mapping[Saved, list[tuple[str, Fragment, Box]]], run: list[Saved]) -> None:
    path, low, high = index.folder / run[0].file, run[0].offset, run[-1].offset + run[-1].nbytes
    with storage_errors("reading", path):
        content = memoryview(bytearray(read_file(path, low, high)))
    if len(content) != high - low:
        raise BadInput(f"{path}: ends after {low + len(content)} bytes, {high} were expected")
    for saved in run:
        mine = content[saved.offset - low : saved.offset - low + saved.nbytes]
        name = uses[saved][0][0]
        if xxhash.xxh3_64_hexdigest(mine) != saved.xxh3_64:
            raise BadInput(f"{path}: damaged in {rectangle_name(name, saved.box)}; resume from another checkpoint")
        if not saved.nbytes:
            continue
        whole = torch.frombuffer(mine, dtype=DTYPES[index.tensors[name].dtype]).view(saved.box.rows, saved.box.cols)
        for _, fragment, overlap in uses[saved]:
            _part(fragment.tensor.view(fragment.box.rows, fragment.box.cols), fragment.box, overlap).copy_(_part(whole, saved.box, overlap))


def _part(matrix: Tensor, of: Box, box: Box) -> Tensor:
    row, col = box.row - of.row, box.col - of.col
    return matrix[row : row + box.rows, col : col + box.cols]


def whole_tensor(index: Index, name: str) -> Tensor:
    """One logical tensor, on the host. BadInput if a part of it is damaged."""
    of = index.tensors[name]
    tensor = torch.empty(of.shape, dtype=DTYPES[of.dtype], device="cpu")
    box = Box(0, of.shape[0], 0, prod(of.shape[1:]))
    read_into(index, [Fragment(name, of.shape, box, tensor.view(-1), 1, 0)])
    return tensor


def rng_states(index: Index, replica: int, rank: int) -> dict[str, Tensor]:
    """What ``everstep.checkpoint.rng`` captured in this rank; of a rank that there was not, in one that takes its place."""
    saved = [tuple(map(int, name.split("/")[1].split("."))) for name in index.tensors if name.startswith("rng/")]
    if not saved:
        return {}
    replicas, ranks = (1 + max(numbers) for numbers in zip(*saved, strict=True))
    prefix = f"rng/{replica % replicas}.{rank % ranks}/"
    return {name.removeprefix(prefix): whole_tensor(index, name) for name in index.tensors if name.startswith(prefix)}
