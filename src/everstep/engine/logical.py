"""A rank's state as rectangles of *logical tensors*: whole tensors under their Hugging Face names, whatever the layout.

Every layout holds the same logical tensors, cut differently, so what is saved by them loads under any layout. A logical tensor is
``KIND/NAME``: ``param``, ``master``, ``exp_avg``, ``exp_avg_sq`` or ``reference`` (see ``everstep.engine.state.state_views``; an island has
``global`` and ``momentum`` too), and a Hugging Face name, or ``peft``'s for an adapter. It is seen as a matrix, first dimension by the product of the others.

The optimizer's shards cut through parameters anywhere, in the middle of a row too: such a piece is at most three rectangles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what looks into checkpoints needs neither torch nor Megatron
    from torch import Tensor

    from everstep.engine.hf import Piece
    from everstep.engine.model import Architecture
    from everstep.engine.state import Slot

#: A rectangle is not larger: what somebody who needs a part of it has to read, and to check, is bounded by it.
MOST_ELEMENTS = 2 << 20


@dataclass(frozen=True)
class Box:
    """A rectangle of a matrix."""

    row: int
    rows: int
    col: int
    cols: int

    @property
    def size(self) -> int:
        return self.rows * self.cols

    def overlap(self, other: Box) -> Box | None:
        row, col = max(self.row, other.row), max(self.col, other.col)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        cols = min(self.col + self.cols, other.col + other.cols) - col
        return Box(row, rows, col, cols) if rows > 0 and cols > 0 else None


@dataclass(frozen=True)
class Fragment:
    """Elements of one logical tensor that this rank holds. ``tensor``: a flat view of them, row by row.

    ``holders``: how many ranks of a replica hold the same elements; ``turn``: which of those this one is.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    tensor: Tensor
    holders: int
    turn: int
    shared: bool = False  # another copy of a tensor that other fragments cover: to be loaded, not to be saved


@dataclass
class LogicalState:
    """All of a rank's state. ``padding``: elements that belong to no logical tensor; they are zero."""

    fragments: list[Fragment] = field(default_factory=list)
    padding: list[Tensor] = field(default_factory=list)
    names: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of all ranks: every logical tensor -> its shape
    of_one_replica: bool = False  # other replicas hold another one


@dataclass(frozen=True)
class Place:
    """A rank's coordinates in its replica. ``copies``: (how many ranks hold the same parameters, which of them this one is);
    ``expert_copies``: the same of experts."""

    stage: int
    ep: int
    tp: int
    tp_rank: int
    copies: tuple[int, int]
    expert_copies: tuple[int, int]


def logical_state(
    views: Mapping[str, Tensor], slots: Sequence[Slot], table: Sequence[Piece], kinds: Callable[[Piece], Sequence[str]],
    arch: Architecture, sharded: bool, place: Place,
) -> LogicalState:  # fmt: skip
    """``views``: of ``state_views``; ``table``: of the model and its adapters; ``kinds``: what there is of a parameter, on whatever
    rank; ``sharded``: the distributed optimizer is used."""
    starts = {slot.name: slot.start for slot in slots}
    state = LogicalState()
    for piece in table:
        for kind in kinds(piece):
            for name, shape in zip(piece.names, piece.shapes, strict=True):
                state.names[f"{kind}/{name}"] = shape
        if not piece.held(place.stage, place.ep):
            continue
        size = prod(piece.shape)
        base = 0 if piece.index is None else piece.index * size
        copies, mine = place.copies if piece.ep is None else place.expert_copies
        for kind in kinds(piece):
            view = views.get(f"{kind}/{piece.local}")
            if view is None:  # none of it lies in this rank's shard
                continue
            flat = view.view(-1)
            part_of_shard = sharded and kind not in ("param", "reference")
            start = starts[piece.local] if part_of_shard else 0  # of ``flat`` in the parameter
            holders, turn = (1, 0) if part_of_shard else (copies, mine)
            if piece.replicated:
                holders, turn = holders * place.tp, turn * place.tp + place.tp_rank
            at = base  # in the parameter
            for index, block in blocks(piece, arch, place.tp, place.tp_rank):
                cols = prod(piece.shape[1:])
                for box, low in _within(block, at - start, len(flat)):
                    state.fragments.append(
                        Fragment(
                            f"{kind}/{piece.names[index]}", piece.shapes[index], box, flat[low : low + box.size], holders, turn,
                            piece.shared,
                        )
                    )  # fmt: skip
                at += block.rows * cols
            low, high = max(at - start, 0), min(base + size - start, len(flat))
            if low < high:
                state.padding.append(flat[low:high])
    return state


def blocks(piece: Piece, arch: Architecture, tp: int, rank: int) -> Iterator[tuple[int, Box]]:
    """What tensor-parallel rank ``rank`` of ``tp`` holds of ``piece``, one block of whole local rows after the other: which of its
    tensors, and where in that. Says with indices what ``hf.shard`` does with tensors; what comes after the last one is padding."""
    rows, cols = piece.shape[0], prod(piece.shape[1:])
    if piece.cut == "whole":
        yield 0, Box(0, rows, 0, cols)
    elif piece.cut == "rows":
        yield 0, Box(rank * rows, rows, 0, cols)
    elif piece.cut == "columns":
        yield 0, Box(0, rows, rank * cols, cols)
    elif piece.cut == "vocab":
        real = min(rows, max(0, arch.vocab - rank * rows))
        if real:
            yield 0, Box(rank * rows, real, 0, cols)
    elif piece.cut == "gate_up":
        half = rows // 2
        for index in (0, 1):
            yield index, Box(rank * half, half, 0, cols)
    else:  # qkv: for each key/value head its query heads, the key, the value
        d, groups = arch.head_dim, arch.kv_heads // tp
        heights = (arch.heads // arch.kv_heads * d, d, d)
        for group in range(rank * groups, (rank + 1) * groups):
            for index, height in enumerate(heights):
                yield index, Box(group * height, height, 0, cols)


def _within(block: Box, at: int, length: int) -> Iterator[tuple[Box, int]]:
    """Rectangles of ``block``, whose elements begin at ``at`` of a flat tensor (before it, if negative) of ``length`` elements, that
    lie in that tensor; each with its first element there."""
    low, high = max(at, 0), min(at + block.size, length)
    if low >= high:
        return
    (first, col), (last, rest) = divmod(low - at, block.cols), divmod(high - at, block.cols)
    if first == last:
        yield Box(block.row + first, 1, block.col + col, rest - col), low
        return
    if col:
        yield Box(block.row + first, 1, block.col + col, block.cols - col), low
        first += 1
    most = max(1, MOST_ELEMENTS // block.cols)
    for row in range(first, last, most):
        yield Box(block.row + row, min(most, last - row), block.col, block.cols), at + row * block.cols
    if rest:
        yield Box(block.row + last, 1, block.col, rest), at + last * block.cols

