"""TrainingBatch: the one container of samples that travels between controller, ranks and recipes.

Legend: B samples, T token columns. A batch holds

    tensors          name -> Tensor. (B,) is one number per sample; (B, T, ...) is one entry per token;
                     all of these share one T. Sequences are right-padded: [prompt, response, pad].
    columns          name -> list of B Python values (prompt text, the data record, a completion).
    sample_ids       B unique strings. Every operation carries them along, so that the ledger can prove that
                     no sample was lost or used twice.
    weight_versions  B ints: the committed step of the weights that made the sample, -1 if no model made it.

Operations never change a batch; they return a new one, which may share memory with the old one (``slice``,
``chunk``) or not (``select``, ``pad_to``). A batch that came out of Ray's object store lies in memory
that other processes read too (84 MB arrive in 2 ms): ``clone()`` it before writing into its tensors.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everstep.errors import BadInput

# torch dtypes that numpy lacks travel as integers of the same size.
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

NO_MODEL = -1  # weight version of a sample that no model made


class BatchError(BadInput, ValueError):
    """A TrainingBatch was built or combined wrongly; ``key`` is the tensor, column or operation at fault."""

    def __init__(self, key: str, problem: str):
        self.key, self.problem = key, problem
        super().__init__(f"TrainingBatch[{key}]: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.key, self.problem))


@dataclass(eq=False, repr=False)
class TrainingBatch:
    """Samples with their tensors, Python values, ids and weight versions. See the module's docstring.

    Raises BatchError if a first dimension, a list length or a width disagrees with the number of ids, or if
    an id occurs twice.
    """

    tensors: dict[str, Tensor]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    sample_ids: list[str] = field(default_factory=list)
    weight_versions: list[int] | None = None

    def __post_init__(self) -> None:
        self.tensors = dict(self.tensors)
        self.columns = {name: list(values) for name, values in self.columns.items()}
        self.sample_ids = list(self.sample_ids)
        count = len(self.sample_ids)
        if self.weight_versions is None:
            self.weight_versions = [NO_MODEL] * count
        self.weight_versions = list(self.weight_versions)

        if len(set(self.sample_ids)) != count:
            doubled = [sid for sid, n in Counter(self.sample_ids).items() if n > 1]
            raise BatchError("sample_ids", f"ids must be unique; {len(doubled)} occur more than once: {doubled[:3]}")
        if len(self.weight_versions) != count:
            raise BatchError("weight_versions", f"{len(self.weight_versions)} entries for {count} samples")
        for name, values in self.columns.items():
            if len(values) != count:
                raise BatchError(name, f"column of {len(values)} values for {count} samples")
            if name in self.tensors:
                raise BatchError(name, "is both a tensor and a column; use two names")
        width_of: tuple[str, int] | None = None
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, Tensor):
                raise BatchError(name, f"is a {type(tensor).__name__}, not a tensor; Python values belong in columns")
            if tensor.dim() == 0 or tensor.shape[0] != count:
                raise BatchError(name, f"shape {tuple(tensor.shape)}, but the first dimension must be {count} (samples)")
            if tensor.dim() >= 2:
                if width_of is None:
                    width_of = (name, tensor.shape[1])
                elif tensor.shape[1] != width_of[1]:
                    raise BatchError(
                        name,
                        f"shape {tuple(tensor.shape)}, but {width_of[0]} has {width_of[1]} token columns; "
                        "all token tensors of a batch share one width (fixed vectors belong in columns)",
                    )

    # ---------------------------------------------------------------- looking

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise BatchError(name, f"no such tensor; there are {sorted(self.tensors)}") from None

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def column(self, name: str) -> list[Any]:
        """The per-sample Python values called ``name``; BatchError if there are none."""
        try:
            return self.columns[name]
        except KeyError:
            raise BatchError(name, f"no such column; there are {sorted(self.columns)}") from None

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {_describe(tensor)}" for name, tensor in self.tensors.items())
        return f"TrainingBatch({len(self)} samples; {shapes}; columns {sorted(self.columns)})"

    @property
    def width(self) -> int:
        """T, the number of token columns; 0 if no tensor has token columns."""
        return next((tensor.shape[1] for tensor in self.tensors.values() if tensor.dim() >= 2), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data that travel when this batch is sent (Python values are not counted)."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def token_counts(self) -> list[int]:
        """Real tokens of each sample, from ``attention_mask``."""
        return [int(n) for n in self["attention_mask"].sum(dim=1).tolist()]

    def equal(self, other: TrainingBatch) -> bool:
        """Same ids, versions, columns, and bitwise the same tensors of the same dtypes, in the same order."""
        return (
            self.sample_ids == other.sample_ids
            and self.weight_versions == other.weight_versions
            and self.columns == other.columns
            and self.tensors.keys() == other.tensors.keys()
            and all(
                mine.dtype == other.tensors[name].dtype
                and mine.shape == other.tensors[name].shape
                and torch.equal(_as_integers(mine), _as_integers(other.tensors[name]))
                for name, mine in self.tensors.items()
            )
        )

    # ---------------------------------------------------------------- choosing samples

    def select(self, indices: Sequence[int] | Tensor) -> TrainingBatch:
        """The samples at ``indices`` (each at most once), in that order. Copies."""
        chosen = [int(i) for i in indices]
        wrong = [i for i in chosen if not 0 <= i < len(self)]
        if wrong:
            raise BatchError("select", f"index {wrong[0]} is outside 0..{len(self) - 1}")
        index = torch.tensor(chosen, dtype=torch.int64)
        return TrainingBatch(
            tensors={n: t.index_select(0, index.to(t.device)) for n, t in self.tensors.items()},
            columns={n: [values[i] for i in chosen] for n, values in self.columns.items()},
            sample_ids=[self.sample_ids[i] for i in chosen],
            weight_versions=[self._versions[i] for i in chosen],
        )

    def slice(self, start: int, stop: int) -> TrainingBatch:
        """Samples start..stop-1, sharing memory with this batch."""
        if not 0 <= start <= stop <= len(self):
            raise BatchError("slice", f"{start}..{stop} is not inside 0..{len(self)}")
        return TrainingBatch(
            tensors={n: t[start:stop] for n, t in self.tensors.items()},
            columns={n: values[start:stop] for n, values in self.columns.items()},
            sample_ids=self.sample_ids[start:stop],
            weight_versions=self._versions[start:stop],
        )

    def split_sizes(self, sizes: Sequence[int]) -> list[TrainingBatch]:
        """Consecutive slices of the given sizes, which must add up to B. Shares memory."""
        if any(size < 0 for size in sizes) or sum(sizes) != len(self):
            raise BatchError("split_sizes", f"sizes {list(sizes)} do not add up to {len(self)} samples")
        parts, start = [], 0
        for size in sizes:
            parts.append(self.slice(start, start + size))
            start += size
        return parts

    def chunk(self, n: int) -> list[TrainingBatch]:
        """Exactly ``n`` consecutive slices; sizes differ by at most 1, larger first; empty ones if n > B."""
        if n < 1:
            raise BatchError("chunk", f"cannot cut a batch into {n} chunks")
        small, larger = divmod(len(self), n)
        return self.split_sizes([small + 1] * larger + [small] * (n - larger))

    def repeat(self, times: int) -> list[TrainingBatch]:
        """``times`` copies of this batch, sharing memory; the ids of copy k become ``id#k``."""
        if times < 1:
            raise BatchError("repeat", f"cannot repeat a batch {times} times")
        return [self._with(sample_ids=[f"{sid}#{k}" for sid in self.sample_ids]) for k in range(times)]

    @staticmethod
    def concat(batches: Iterable[TrainingBatch]) -> TrainingBatch:
        """All samples in order; token tensors are right-padded with zeros to the widest batch.

        Empty batches add nothing, whatever tensors they lack, unless all are empty. BatchError if two batches
        disagree on names, dtypes, trailing shapes or devices, or share a sample id.
        """
        given = list(batches)
        if not given:
            raise BatchError("concat", "no batches given")
        parts = [batch for batch in given if len(batch)] or given[:1]
        if len(parts) == 1:
            return parts[0]._with()
        first = parts[0]
        for other in parts[1:]:
            for kind, mine, theirs in (
                ("tensors", first.tensors.keys(), other.tensors.keys()),
                ("columns", first.columns.keys(), other.columns.keys()),
            ):
                if mine != theirs:
                    odd = sorted(mine ^ theirs)
                    raise BatchError(odd[0], f"concat: only some batches have the {kind} {odd}")
            for name, a in first.tensors.items():
                b = other.tensors[name]
                if (a.dtype, a.device, a.dim(), a.shape[2:]) != (b.dtype, b.device, b.dim(), b.shape[2:]):
                    raise BatchError(name, f"concat: {_describe(a)} does not go with {_describe(b)}")
        width = max(batch.width for batch in parts)
        return TrainingBatch(
            tensors={n: torch.cat([_padded(batch.tensors[n], width) for batch in parts]) for n in first.tensors},
            columns={n: [v for batch in parts for v in batch.columns[n]] for n in first.columns},
            sample_ids=[sid for batch in parts for sid in batch.sample_ids],
            weight_versions=[v for batch in parts for v in batch._versions],
        )

    # ---------------------------------------------------------------- changing width, content, place

    def pad_to(self, width: int) -> TrainingBatch:
        """Right-pad every token tensor with zeros to ``width`` columns; BatchError if it is wider already."""
        if width < self.width:
            raise BatchError("pad_to", f"{self.width} token columns do not fit into {width}; nothing is cut silently")
        return self._with(tensors={n: _padded(t, width) for n, t in self.tensors.items()})

    def trim(self) -> TrainingBatch:
        """Drop trailing columns without a real token in any sample (``attention_mask``); keep one."""
        real = self["attention_mask"].ne(0).any(dim=0).nonzero()
        if not len(self):
            return self._with()
        width = min(self.width, int(real[-1]) + 1 if len(real) else 1)
        return self._with(tensors={n: t[:, :width] if t.dim() >= 2 else t for n, t in self.tensors.items()})

    def with_tensors(self, **tensors: Tensor) -> TrainingBatch:
        """Add or replace tensors."""
        return self._with(tensors={**self.tensors, **tensors})

    def with_columns(self, **columns: list[Any]) -> TrainingBatch:
        """Add or replace columns."""
        return self._with(columns={**self.columns, **columns})

    def only(self, *names: str) -> TrainingBatch:
        """Keep just these tensors and columns (ids and versions stay), so that nothing travels unneeded."""
        missing = [name for name in names if name not in self.tensors and name not in self.columns]
        if missing:
            raise BatchError(missing[0], f"only: there are tensors {sorted(self.tensors)}, columns {sorted(self.columns)}")
        return self._with(
            tensors={n: t for n, t in self.tensors.items() if n in names},
            columns={n: c for n, c in self.columns.items() if n in names},
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TrainingBatch:
        """Move the tensors; shares memory if they are there already."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def clone(self) -> TrainingBatch:
        """A copy whose tensors own their memory and may be written to."""
        return self._map(lambda t: t.detach().clone())

    # ---------------------------------------------------------------- travelling

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # As numpy arrays: they go out of band under pickle protocol 5 (so that Ray shares the memory
        # instead of copying it), and a slice carries its own bytes only, where torch would pickle the
        # storage behind it.
        packed = {n: _pack(t) for n, t in self.tensors.items()}
        return (_unpack_batch, (packed, self.columns, self.sample_ids, self.weight_versions))

    # ---------------------------------------------------------------- internals

    @property
    def _versions(self) -> list[int]:
        assert self.weight_versions is not None  # set by __post_init__
        return self.weight_versions

    def _map(self, fn: Callable[[Tensor], Tensor]) -> TrainingBatch:
        return self._with(tensors={n: fn(t) for n, t in self.tensors.items()})

    def _with(self, **changes: Any) -> TrainingBatch:
        mine = {
            "tensors": self.tensors,
            "columns": self.columns,
            "sample_ids": self.sample_ids,
            "weight_versions": self.weight_versions,
        }
        return TrainingBatch(**{**mine, **changes})


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _padded(tensor: Tensor, width: int) -> Tensor:
    if tensor.dim() < 2 or tensor.shape[1] == width:
        return tensor
    pad = tensor.new_zeros((tensor.shape[0], width - tensor.shape[1], *tensor.shape[2:]))
    return torch.cat([tensor, pad], dim=1)


def _as_integers(tensor: Tensor) -> Tensor:
    """Reinterpreted as integers, so that comparing and carrying are bitwise (NaN included)."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_AS_INTEGER[tensor.element_size()])


def _pack(tensor: Tensor) -> tuple[np.ndarray, torch.dtype | None]:
    tensor = tensor.detach().cpu().contiguous()
    try:
        return tensor.numpy(), None
    except TypeError:  # bfloat16, float8: numpy has no such type
        return _as_integers(tensor).numpy(), tensor.dtype


def _unpack(array: np.ndarray, dtype: torch.dtype | None) -> Tensor:
    with warnings.catch_warnings():
        # Shared memory is read-only; that is documented above, so torch need not warn once per process.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype)


def _unpack_batch(
    packed: dict[str, tuple[np.ndarray, torch.dtype | None]],
    columns: dict[str, list[Any]],
    sample_ids: list[str],
    weight_versions: list[int],
) -> TrainingBatch:
    tensors = {name: _unpack(array, dtype) for name, (array, dtype) in packed.items()}
    return TrainingBatch(tensors=tensors, columns=columns, sample_ids=sample_ids, weight_versions=weight_versions)
