"""A checksum of tensors, computed where they are: equal bits give equal digests on every device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

_COLUMNS = 4096
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """One digest of all of them, in their order."""
    return _combined([value for three in _sums(list(tensors)) for value in three])


def digests_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One digest of each."""
    return [_combined(three) for three in _sums(tensors)]


def _sums(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Of each tensor: sums of its words by column, by row of a table, and of the rest, weighed by their places. It is read twice, and nothing of
    its size is allocated (unless it is not contiguous); each device is waited for once."""
    waiting: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        words = tensor.detach().contiguous().reshape(-1).view(_WORDS[tensor.element_size()])
        whole = words.numel() // _COLUMNS * _COLUMNS
        table, rest = words[:whole].view(-1, _COLUMNS), words[whole:]
        weighed = []
        for sums in (table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64), rest.to(torch.int64)):
            places = torch.arange(1, sums.numel() + 1, device=sums.device, dtype=torch.int64) % 65521
            weighed.append((sums * places).sum())
        waiting.setdefault(tensor.device, []).append((index, torch.stack(weighed)))
    found: dict[int, list[int]] = {}
    for rows in waiting.values():
        found |= dict(zip((index for index, _ in rows), torch.stack([row for _, row in rows]).tolist(), strict=True))
    return [found[index] for index in range(len(tensors))]


def _combined(values: Iterable[int]) -> int:
    """63 bits: an accident is found, a forgery need not be."""
    digest = 0
    for value in values:
        digest = (digest * 1_000_003 + value) & 0x7FFF_FFFF_FFFF_FFFF
    return digest
