"""How one call on the whole group becomes one call per rank, and how the answers become one answer.

``group.call("mesh", "logprobs", batch)`` names a dispatch and a worker method. The dispatch

    1. ``validate``s the call before anything is sent,
    2. ``dispatch``es it: (args, kwargs) for each rank,
    3. ``collect``s the ranks' results into what ``call`` returns.

Rules that a dispatch of your own must keep:

- It is a pure function of what it is given. With ``launcher=local`` every rank runs it and takes its own
  part, so all ranks must come to the same answer.
- One instance serves one call (also when a death forces the call to be made again), so ``collect`` may use
  what ``dispatch`` noted on ``self``.
- Ranks that share a ``data_index`` (tensor-, context- and pipeline-parallel peers) must get the same
  samples. Give them the very same object: the launcher sends an object once, however many ranks get it.
- Every rank is called, **also with an empty batch** when there are more data coordinates than samples: a
  method may communicate inside its replica, and would hang if a peer were left out. Worker methods accept
  ``len(batch) == 0``.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.cluster.batch import TrainingBatch
from everstep.config.recovery_schema import RecoveryConfig
from everstep.errors import BadInput
from everstep.layout import Layout, Position

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[Args, Kwargs]


class DispatchError(BadInput):
    """A call cannot be dispatched, or its results not collected: names the dispatch and argument or rank."""


@dataclass(frozen=True)
class Rank:
    """One living rank as a dispatch sees it.

    ``data_index`` counts the data coordinates (replica, inner dp) over the *living* replicas, 0 ..
    data_count - 1; ``collects`` marks the one rank that answers for its data coordinate (last pipeline
    stage, tp 0, cp 0).
    """

    replica: int
    rank: int
    position: Position
    data_index: int
    data_count: int
    collects: bool

    def __str__(self) -> str:
        return f"{self.replica}/{self.rank}"


def ranks_of(layout: Layout, members: Sequence[int] | None = None) -> list[Rank]:
    """The ranks of the member replicas (default: all), ordered by (replica, rank)."""
    members = range(layout.replicas) if members is None else sorted(members)
    collecting = set(layout.collect_ranks())
    return [
        Rank(
            replica=replica,
            rank=rank,
            position=layout.position(rank),
            data_index=index * layout.dp + layout.data_coordinate(rank),
            data_count=len(members) * layout.dp,
            collects=rank in collecting,
        )
        for index, replica in enumerate(members)
        for rank in range(layout.ranks_per_replica)
    ]


class Dispatch(ABC):
    """Base class of all dispatches; see the rules in the module's docstring."""

    name = "?"  # set by register_dispatch

    def validate(self, ranks: Sequence[Rank], args: Args, kwargs: Kwargs) -> None:
        """Raise DispatchError if the call cannot work; runs before anything is sent. Default: accept all."""
        return None

    @abstractmethod
    def dispatch(self, ranks: Sequence[Rank], args: Args, kwargs: Kwargs) -> list[Call]:
        """(args, kwargs) for each of ``ranks``, in the same order."""

    @abstractmethod
    def collect(self, ranks: Sequence[Rank], results: Sequence[Any]) -> Any:
        """What ``call`` returns, from one result per rank, in the order of ``ranks``."""


class PassThroughDispatch(Dispatch):
    """The same arguments to every rank; returns the list of all results, ordered by (replica, rank)."""

    def dispatch(self, ranks: Sequence[Rank], args: Args, kwargs: Kwargs) -> list[Call]:
        return [(args, kwargs) for _ in ranks]

    def collect(self, ranks: Sequence[Rank], results: Sequence[Any]) -> list[Any]:
        return list(results)


class MeshDispatch(Dispatch):
    """Cut every TrainingBatch argument over the data coordinates, one chunk for all model-parallel peers.

    Other arguments go to every rank as they are. Returns the results of the collecting ranks in data order:
    one TrainingBatch if they returned TrainingBatches (empty ones add nothing), a list otherwise.

    ``mesh:N`` cuts only at multiples of N samples (coordinates may get none): a rank that takes its samples N at a time then forms
    the same groups of N, whoever is there, and computes bitwise the same.
    """

    unit = 1  # samples

    def validate(self, ranks: Sequence[Rank], args: Args, kwargs: Kwargs) -> None:
        batches = batch_arguments(args, kwargs)
        lengths = {where: len(batch) for where, batch in batches.items()}
        if len(set(lengths.values())) > 1:
            raise DispatchError(
                f"dispatch {self.name}: all batches of one call must be equally long, got {lengths}"
            )
        for where, value in _arguments(args, kwargs):
            items = value.values() if isinstance(value, dict) else value
            inside = items if isinstance(value, (dict, list, tuple)) else ()
            if any(isinstance(item, TrainingBatch) for item in inside):
                raise DispatchError(
                    f"dispatch {self.name}: {where} is a {type(value).__name__} of TrainingBatches, which "
                    "would go to every rank uncut; pass each batch as an argument, or use pass_through"
                )
        answering = sorted(rank.data_index for rank in ranks if rank.collects)
        if answering != list(range(ranks[0].data_count if ranks else 0)):
            raise DispatchError(f"dispatch {self.name}: data coordinates answered for are {answering}")

    def dispatch(self, ranks: Sequence[Rank], args: Args, kwargs: Kwargs) -> list[Call]:
        parts = {
            where: self.split(batch, ranks[0].data_count)
            for where, batch in batch_arguments(args, kwargs).items()
        }
        calls: dict[int, Call] = {}
        for index in {rank.data_index for rank in ranks}:
            chunk = {where: pieces[index] for where, pieces in parts.items()}
            calls[index] = (
                tuple(chunk.get(_position_name(i), value) for i, value in enumerate(args)),
                {name: chunk.get(name, value) for name, value in kwargs.items()},
            )
        return [calls[rank.data_index] for rank in ranks]

    def split(self, batch: TrainingBatch, parts: int) -> list[TrainingBatch]:
        """The chunk of each data coordinate. Override this alone for another way of cutting."""
        if self.unit == 1:
            return batch.chunk(parts)
        few, more = divmod(-(-len(batch) // self.unit), parts)
        ends = [min(len(batch), self.unit * ((i + 1) * few + min(i + 1, more))) for i in range(parts)]
        return [batch.slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def collect(self, ranks: Sequence[Rank], results: Sequence[Any]) -> Any:
        if len(results) != len(ranks):
            raise DispatchError(f"dispatch {self.name}: {len(results)} results from {len(ranks)} ranks")
        answering = sorted(
            ((rank, result) for rank, result in zip(ranks, results, strict=True) if rank.collects),
            key=lambda pair: pair[0].data_index,
        )
        batches = [result for _, result in answering if isinstance(result, TrainingBatch)]
        if not batches:
            return [result for _, result in answering]
        for rank, result in answering:
            if not isinstance(result, TrainingBatch):
                raise DispatchError(
                    f"dispatch {self.name}: rank {rank} returned a {type(result).__name__} where others "
                    "returned a TrainingBatch"
                )
        return TrainingBatch.concat(batches)


def mesh_of(recovery: RecoveryConfig, unit: int) -> str:
    """The name of the mesh that deals samples to ranks which compute ``unit`` of them at a time. With recovery.exact whole such groups are
    dealt: in the last bits a sample's numbers depend on what it is computed with, and would else depend on who is alive."""
    return f"mesh:{unit}" if recovery.exact else "mesh"


def batch_arguments(args: Args, kwargs: Kwargs) -> dict[str, TrainingBatch]:
    """The arguments that are TrainingBatches, by name (``argument 0``, ... for positional ones)."""
    return {where: value for where, value in _arguments(args, kwargs) if isinstance(value, TrainingBatch)}


def _position_name(index: int) -> str:
    return f"argument {index}"  # has a space, so it is never a keyword's name


def _arguments(args: Args, kwargs: Kwargs) -> list[tuple[str, Any]]:
    return [(_position_name(i), value) for i, value in enumerate(args)] + list(kwargs.items())


# ---------------------------------------------------------------- the registry

_REGISTRY: dict[str, Callable[[], Dispatch]] = {}


def register_dispatch(name: str, dispatch: type[Dispatch]) -> None:
    """Make ``dispatch`` (a class, instantiated without arguments for each call) available as ``name``.

    Where ``group.call`` runs is where it must be registered: the controller with launcher ray, every rank
    with launcher local. Registering a name again for another class is an error, so that two libraries
    cannot silently swap theirs.
    """
    if not (isinstance(dispatch, type) and issubclass(dispatch, Dispatch)):
        raise DispatchError(f"register_dispatch({name!r}): {dispatch!r} is not a subclass of Dispatch")
    known = _REGISTRY.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (
        dispatch.__module__,
        dispatch.__qualname__,
    ):  # type: ignore[attr-defined]
        raise DispatchError(f"register_dispatch({name!r}): the name is taken by {known!r}; choose another")
    _REGISTRY[name] = dispatch


def get_dispatch(name: str) -> Dispatch:
    """A fresh instance of the dispatch called ``name``; DispatchError naming the nearest if there is none."""
    base, colon, unit = name.partition(":")
    if colon and base == "mesh" and unit.isdecimal() and int(unit) > 0:
        mesh = MeshDispatch()
        mesh.name, mesh.unit = name, int(unit)
        return mesh
    if name not in _REGISTRY:
        near = difflib.get_close_matches(name, _REGISTRY, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise DispatchError(
            f"no dispatch is called {name!r}; {hint}there are {', '.join(sorted(_REGISTRY))} "
            "(add your own with register_dispatch)"
        )
    instance = _REGISTRY[name]()
    instance.name = name
    return instance


register_dispatch("mesh", MeshDispatch)
register_dispatch("pass_through", PassThroughDispatch)
