"""A dispatch of your own: share samples out so that every data coordinate gets about as many tokens.

    python examples/custom_dispatch.py CONFIG [a.b=c ...]

With completions of very different lengths the built-in ``mesh`` (equal numbers of samples) lets some ranks
wait for the one that drew the long ones. ``balanced`` gives the longest sample left to the rank with the
fewest tokens so far, and puts the results back into the caller's order. The script computes the same
log-probabilities through both, checks that they agree, and prints how evenly the tokens were spread.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

import everstep
from everstep.cluster.batch import TrainingBatch
from everstep.cluster.dispatch import Args, Call, DispatchError, Kwargs, MeshDispatch, Rank, register_dispatch


class BalancedDispatch(MeshDispatch):
    """As ``mesh``, with token counts evened out. The method must return the samples it was given."""

    def __init__(self) -> None:
        self._order: list[str] = []  # sample ids as the caller gave them
        self._width = 0

    def validate(self, ranks: Sequence[Rank], args: Args, kwargs: Kwargs) -> None:
        super().validate(ranks, args, kwargs)
        batches = [value for value in (*args, *kwargs.values()) if isinstance(value, TrainingBatch)]
        if len(batches) != 1:
            raise DispatchError(f"dispatch {self.name}: needs exactly one TrainingBatch argument, got {len(batches)}")

    def dispatch(self, ranks: Sequence[Rank], args: Args, kwargs: Kwargs) -> list[Call]:
        batch = next(value for value in (*args, *kwargs.values()) if isinstance(value, TrainingBatch))
        self._order, self._width = list(batch.sample_ids), batch.width
        return super().dispatch(ranks, args, kwargs)

    def split(self, batch: TrainingBatch, parts: int) -> list[TrainingBatch]:
        chosen = assign(batch.token_counts(), parts)
        # Each part is trimmed to its own longest sample: short samples kept together cost less.
        return [batch.select(indices).trim() for indices in chosen]

    def collect(self, ranks: Sequence[Rank], results: Sequence[Any]) -> TrainingBatch:
        together = super().collect(ranks, results)
        if not isinstance(together, TrainingBatch) or sorted(together.sample_ids) != sorted(self._order):
            raise DispatchError(f"dispatch {self.name}: the method must return a TrainingBatch of the samples it was given")
        place = {sample_id: i for i, sample_id in enumerate(together.sample_ids)}
        ordered = together.select([place[sample_id] for sample_id in self._order])
        return ordered.pad_to(max(ordered.width, self._width))


def assign(tokens: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of the samples of each part: longest first, each to the part with the fewest tokens so far.

    The fullest part exceeds the emptiest by at most the longest sample. Ties go to the lower number, so
    that every rank comes to the same answer.
    """
    chosen: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        lightest = min(range(parts), key=lambda p: (load[p], len(chosen[p]), p))
        chosen[lightest].append(index)
        load[lightest] += tokens[index]
    return [sorted(indices) for indices in chosen]


def uneven_batch(samples: int, longest: int, seed: int = 0) -> TrainingBatch:
    """Random tokens with lengths from 2 to ``longest``, most of them short, as completions are."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (2 + (longest - 2) * torch.rand(samples, generator=generator) ** 3).long()
    mask = (torch.arange(longest)[None, :] < lengths[:, None]).long()  # (B, T)
    tokens = torch.randint(5, 50, (samples, longest), generator=generator) * mask
    return TrainingBatch(
        tensors={"input_ids": tokens, "attention_mask": mask},
        sample_ids=[f"example/{i}" for i in range(samples)],
    )


def main(config: str, *overrides: str) -> None:
    register_dispatch("balanced", BalancedDispatch)
    batch = uneven_batch(samples=24, longest=48)
    group = everstep.launch(config, overrides=list(overrides))
    try:
        plain = group.call("mesh", "logprobs", batch)
        balanced = group.call("balanced", "logprobs", batch)
        parts = group.layout.replicas * group.layout.dp
    finally:
        group.close()

    assert balanced.sample_ids == batch.sample_ids, "results come back in the order of the call"
    real = batch["attention_mask"].bool()  # what a method makes of padding means nothing
    torch.testing.assert_close(balanced["logprobs"][real], plain["logprobs"][real], rtol=1e-4, atol=1e-4)
    tokens = batch.token_counts()
    as_mesh = [sum(part.token_counts()) for part in batch.chunk(parts)]
    as_balanced = [sum(tokens[i] for i in part) for part in assign(tokens, parts)]
    print(f"tokens of each data coordinate: mesh {as_mesh}, balanced {as_balanced}; log-probabilities agree")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
