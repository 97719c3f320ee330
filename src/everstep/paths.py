"""Names of files that come from files: a manifest, an index. They may name what lies beside them, and nothing else."""

from __future__ import annotations

from pathlib import PurePosixPath


def within(name: str) -> str:
    """``name``, a path relative to the folder of the file that has it. ValueError if it would lead out of that folder."""
    path = PurePosixPath(name)
    if not name or "\\" in name or "\0" in name or path.is_absolute() or ".." in path.parts or "://" in name:
        raise ValueError(f"it names {name!r}, which would lead out of its folder; somebody else made it")
    return name
