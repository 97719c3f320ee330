"""In which order samples are used: endless passes over the data, and a cursor that only trained samples move.

The order of a pass is a pure function of (seed, pass), the same on every machine and with every version of every library:
records are sorted by a hash. A pass is not cut to whole batches: the last, partial batch of a pass is filled with the
first samples of the next, so each sample is used exactly once per pass.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from everstep.errors import BadInput


@dataclass(frozen=True)
class SampleRef:
    """One use of one record. ``id`` is ``pass/index``, with the stream's name before it if it has one."""

    id: str
    index: int  # the sample's number in its Dataset, the same in every pass


def pass_order(size: int, seed: int, pass_number: int, shuffle: bool = True) -> list[int]:
    """The permutation of 0..size-1 in which pass ``pass_number`` (from 0) goes over the samples."""
    if not shuffle:
        return list(range(size))
    digest = lambda i: hashlib.blake2b(f"{seed}/{pass_number}/{i}".encode(), digest_size=16).digest()
    return sorted(range(size), key=digest)


class SampleStream:
    """The endless sequence of samples of a run, with two positions in it.

    ``take`` moves the *read* position: samples handed out. ``mark_trained`` moves the *frontier*: samples whose optimizer
    step was committed. Only the frontier is saved, so a run that resumes uses again what had been read but not trained,
    and nothing else. ``name`` keeps ids of two streams of one run apart (``warmup:0/17``).
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True, name: str = ""):
        if size < 1:
            raise BadInput(f"the data{' of ' + name if name else ''} has no samples left to train on")
        self.size, self.seed, self.shuffle, self.name = size, seed, shuffle, name
        self._read = 0
        self._trained = 0
        self._cached: tuple[int, list[int]] = (-1, [])

    @property
    def trained(self) -> int:
        """Samples trained since the start of the run, over all passes."""
        return self._trained

    @property
    def read(self) -> int:
        """Samples handed out since the start of the run, trained or not."""
        return self._read

    def take(self, count: int) -> list[SampleRef]:
        """The next ``count`` samples. They may span passes."""
        refs = [self._at(self._read + i) for i in range(count)]
        self._read += count
        return refs

    def mark_trained(self, count: int) -> None:
        """The oldest ``count`` samples handed out and not yet trained are now in a committed step."""
        if not 0 <= count <= self._read - self._trained:
            raise ValueError(f"{count} samples marked as trained, but {self._read - self._trained} were handed out")
        self._trained += count

    def rewind(self) -> None:
        """Hand out again what was read but not trained."""
        self._read = self._trained

    def state_dict(self, more: int = 0) -> dict[str, Any]:
        """Plain data: the frontier, and what it is a position in. ``more``: as it will be once so many more are trained."""
        return {"size": self.size, "seed": self.seed, "shuffle": self.shuffle, "name": self.name, "trained": self._trained + more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved frontier. BadInput if it belongs to other data or another order: the same numbers would then
        mean other samples."""
        mine = self.state_dict()
        for field in ("size", "seed", "shuffle", "name"):
            if state[field] != mine[field]:
                raise BadInput(
                    f"the data cursor of the checkpoint is for {field}={state[field]}, but this run has {mine[field]}; "
                    "resume with the same data.* and seed, or start a new run"
                )
        self._trained = self._read = int(state["trained"])

    def _at(self, position: int) -> SampleRef:
        number, offset = divmod(position, self.size)
        if self._cached[0] != number:
            self._cached = (number, pass_order(self.size, self.seed, number, self.shuffle))
        index = self._cached[1][offset]
        prefix = f"{self.name}:" if self.name else ""
        return SampleRef(f"{prefix}{number}/{index}", index)
