"""The place of a worker in one life of a replica."""

from __future__ import annotations

from dataclasses import dataclass

Life = tuple[int, int]  # (replica, build): one formation of a replica
Meant = tuple[int, int, int]  # (replica, build, incarnation): whom a call is for, and beside which coordinator it was made


@dataclass(frozen=True)
class Formation:
    """A place in a replica's life number ``build``. ``start``: where the state comes from.

    ``weights``: model.path or the seed (everybody, at the start of a run); ``peer``: a contributor, when the replica joins (a
    rank that lived on keeps its memory and heals only what it missed; weights that LoRA freezes come from model.path).
    """

    replica: int
    rank: int
    build: int
    workers: tuple[str, ...]
    start: str
    reference: bool  # whether the run keeps a reference model by now

    @property
    def world_name(self) -> str:
        return f"replica/{self.replica}/{self.build}"

    @property
    def life(self) -> Life:
        return self.replica, self.build


def called_off(life: Life) -> str:
    """The store's key that says that this formation will never be complete."""
    return f"replica/{life[0]}/{life[1]}/off"
