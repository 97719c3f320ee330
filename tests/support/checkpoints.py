"""Checkpoints made by hand, and harm done to them."""

from __future__ import annotations

from pathlib import Path

import xxhash

from everstep.checkpoint.storage import FileEntry


def entries_of(folder: Path) -> dict[str, FileEntry]:
    """What a manifest should say of all files in ``folder``, computed from their contents."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(path.stat().st_size, xxhash.xxh3_128_hexdigest(path.read_bytes()))
        for path in folder.rglob("*") if path.is_file()
    }  # fmt: skip


def flip_a_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
