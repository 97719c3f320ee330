"""A checksum of tensors, computed where they are: equal bits give equal digests on every device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

_COLUMNS = 4096
_ROW_BYTES = 4 * _COLUMNS


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """One digest of all of them, in their order."""
    return _combined([value for three in _sums(list(tensors)) for value in three])


def digests_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One digest of each."""
    return [_combined(three) for three in _sums(tensors)]


def _sums(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Of each tensor: sums of its words by column, by row of a table, and of the bytes of the rest, weighed by their places. It is read twice, and nothing
    of its size is allocated (unless it is not contiguous, or not aligned); each device is waited for once."""
    waiting: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        table, rest = _table(tensor)
        weighed = []
        for sums in (table.sum(0, dtype=torch.int32), table.sum(1, dtype=torch.int32), rest):  # modulo 2**32: 30 times as fast as in 64 bits on a CPU
            places = torch.arange(1, sums.numel() + 1, device=sums.device, dtype=torch.int64) % 65521
            weighed.append((sums.to(torch.int64) * places).sum())
        waiting.setdefault(tensor.device, []).append((index, torch.stack(weighed)))
    found: dict[int, list[int]] = {}
    for rows in waiting.values():
        found |= dict(zip((index for index, _ in rows), torch.stack([row for _, row in rows]).tolist(), strict=True))
    return [found[index] for index in range(len(tensors))]


def _table(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 32-bit words, and the bytes that do not fill one."""
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = content.numel() // _ROW_BYTES * _ROW_BYTES
    rows, rest = content[:whole], content[whole:]
    if rows.storage_offset() % 4 or rows.data_ptr() % 4:  # a part of something, at an odd place
        rows = rows.clone()
    return rows.view(torch.int32).view(-1, _COLUMNS), rest


def _combined(values: Iterable[int]) -> int:
    """63 bits: an accident is found, a forgery need not be."""
    digest = 0
    for value in values:
        digest = (digest * 1_000_003 + value) & 0x7FFF_FFFF_FFFF_FFFF
    return digest
