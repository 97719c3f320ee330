"""The durable commit record: an append-only file under a lease, fsynced before anybody hears of a commit (rule 7).

One JSON object a line, each with a checksum. A torn last line is no commit; damage anywhere else is an error. Whoever opens
the file holds an exclusive lock on it until the process ends, and writes under a new incarnation, so that epochs grow across
restarts.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from everstep.errors import BadInput, InvariantViolated
from everstep.recovery.view import Kind, Record


@dataclass(frozen=True)
class Past:
    """What an existing record says: the last incarnation and the last committed step (0: none), the records of that incarnation's
    run that are of use to a coordinator that goes on with it (the last ones; none if the run was closed in order)."""

    incarnation: int
    committed: int
    open_records: tuple[Record, ...] = ()


RECENT = 64  # records that a member may have missed while there was no coordinator are far fewer


def _line(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n".encode()


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All intact entries, and the number of bytes they take. Raises InvariantViolated if an entry before the last is damaged."""
    data = path.read_bytes() if path.exists() else b""
    entries: list[dict[str, Any]] = []
    offset = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        digest, _, text = line.decode(errors="replace").rstrip("\n").partition(" ")
        if not line.endswith(b"\n") or xxhash.xxh3_64_hexdigest(text.encode()) != digest:
            if offset + len(line) == len(data):
                break  # torn tail: the write never finished, nobody was told
            raise InvariantViolated(f"{path}, line {number}: damaged commit record; restore the file from a copy")
        entries.append(json.loads(text))
        offset += len(line)
    return entries, offset


class CommitLog:
    """Raises BadInput if another coordinator holds the lease of this run."""

    def __init__(self, path: Path, start_at: int | None = None, go_on: bool = False):
        """``start_at``: the committed step the run starts from (a checkpoint); entries of later steps are of an abandoned past.
        ``go_on``: the members of the last incarnation live, and this one goes on where it ended."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise BadInput(
                f"{path} is in use: another coordinator runs in this folder. Stop it, or choose another run_dir."
            ) from None
        entries, intact = read(path)
        os.ftruncate(self._fd, intact)
        commits = [e["step"] for e in entries if e["kind"] == Kind.COMMIT]
        kinds = [e["kind"] for e in entries]
        began = max((i for i, kind in enumerate(kinds) if kind in ("open", "close")), default=0)
        records = [Record.from_json(e) for e in entries[began:] if e["kind"] in (Kind.VIEW, Kind.COMMIT)]
        self.past = Past(max((e["incarnation"] for e in entries), default=0), commits[-1] if commits else 0, tuple(records[-RECENT:]))
        self.incarnation = self.past.incarnation + 1
        kind = "resume" if go_on else "open"
        self._append({"kind": kind, "incarnation": self.incarnation, "committed": self.past.committed if go_on else start_at or 0})

    def write(self, record: Record) -> None:
        """Returns once the record is on disk."""
        body = record.to_json() | {"incarnation": self.incarnation}
        self._append(body)

    def end(self) -> None:
        """The run ended in order: nobody shall go on with it."""
        self._append({"kind": "close", "incarnation": self.incarnation})

    def _append(self, body: dict[str, Any]) -> None:
        line = _line(body)
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(f"{self.path}: short write of a commit record ({written} of {len(line)} bytes)")
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def is_open(path: Path) -> bool:
    """Whether the record is of a run that was not ended in order, so that members of it may live."""
    entries, _ = read(path)
    kinds = [entry["kind"] for entry in entries]
    return bool(kinds) and kinds[-1] != "close" and any(kind in (Kind.VIEW, Kind.COMMIT) for kind in kinds)
