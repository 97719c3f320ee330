"""Which samples share a packed row: a pure function of their lengths. No torch, no process."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Rows of at most ``budget`` tokens that together hold every sample once, as few as first-fit-decreasing finds, rounded up to
    ``multiple``; each a list of indices into ``lengths``, ascending. Rows with more tokens come first.

    Tokens are shared out evenly: each sample, from the longest down, goes to the row with the fewest tokens (LPT, Graham 1969).
    Should that overfill a row, first-fit-decreasing's own rows are taken. With fewer samples than ``multiple`` some rows are
    empty. Every length must be within ``budget``; the caller refuses what is not.

    Each row but the last of first-fit-decreasing holds at least ``budget // max(lengths)`` samples, which bounds their number.
    """
    assert all(0 < length <= budget for length in lengths), (budget, lengths)
    if not lengths:
        return []
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    fewest = _first_fit(order, lengths, budget)
    count = -(-len(fewest) // multiple) * multiple
    rows = _evenly(order, lengths, budget, count) or fewest + [[] for _ in range(count - len(fewest))]
    return sorted((sorted(row) for row in rows), key=lambda row: (-sum(lengths[i] for i in row), row))


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    rows: list[list[int]] = []
    left: list[int] = []
    for i in order:
        at = next((row for row, room in enumerate(left) if lengths[i] <= room), len(rows))
        if at == len(rows):
            rows.append([])
            left.append(budget)
        rows[at].append(i)
        left[at] -= lengths[i]
    return rows


def _evenly(order: Sequence[int], lengths: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """None if a sample fits into no row any more."""
    rows: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, row) for row in range(count)]
    for i in order:
        tokens, row = heap[0]
        if tokens + lengths[i] > budget:
            return None
        rows[row].append(i)
        heapq.heapreplace(heap, (tokens + lengths[i], row))
    return rows
