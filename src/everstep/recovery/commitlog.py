"""The durable commit record: an append-only file under a lease, fsynced before anybody hears of a commit (rule 7).

One JSON object a line, each with a checksum. A torn last line is no commit; damage anywhere else is an error. Whoever opens
the file holds an exclusive lock on it until the process ends, and writes under a new incarnation, so that epochs grow across
restarts.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from everstep.errors import BadInput, InvariantViolated
from everstep.recovery.view import Kind, Member, Record


@dataclass(frozen=True)
class Past:
    """What an existing record says: the last incarnation and the last committed step (0: none). The rest is of the newest start of
    the run (``run``: what tells it from others in the same folder, or nothing), over all coordinators that took over since: its newest record and newest commit, the newest life of each replica, and the
    recipe's state after each step that stands, and what was rolled back. Nothing of it is there if the run was ended in order."""

    incarnation: int
    committed: int
    last: Record | None = None
    commit: Record | None = None
    members: dict[int, Member] = field(default_factory=dict)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    rollbacks: list[tuple[tuple[int, int], int]] = field(default_factory=list)  # (epoch, step) of each
    run: str = ""


def past(path: Path) -> Past:
    """Of a record that may be another process's. Raises InvariantViolated."""
    return _past(read(path)[0])


def _past(entries: list[dict[str, Any]]) -> Past:
    start = max((i for i, e in enumerate(entries) if e["kind"] == "close" or (e["kind"] == "open" and not e.get("takeover"))), default=0)
    last = commit = None
    members: dict[int, Member] = {}
    states: dict[int, dict[str, Any]] = {}
    rollbacks: list[tuple[tuple[int, int], int]] = []
    for entry in entries[start:]:
        if entry["kind"] in ("open", "close"):
            continue
        last = Record.from_json(entry)
        members |= {m.replica: m for m in last.view.members}
        if last.kind is Kind.COMMIT:
            commit = last
        elif last.kind is Kind.ROLLBACK:
            states = {step: state for step, state in states.items() if step <= last.step}
            rollbacks.append((last.view.epoch.key, last.step))
            commit = None
        if last.state is not None:
            states[last.view.committed] = last.state
    commits = [e["step"] for e in entries if e["kind"] == Kind.COMMIT]
    incarnation = max((e["incarnation"] for e in entries), default=0)
    run = entries[start].get("run", "") if entries else ""
    return Past(incarnation, commits[-1] if commits else 0, last, commit, members, states, rollbacks, run)


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

    def __init__(self, path: Path, takeover: bool = False, run: str = ""):
        """``takeover``: the log goes on where a dead coordinator left it; else ``run`` starts anew, maybe from a checkpoint, and what is
        there is of an abandoned past."""
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
        try:
            entries, intact = read(path)
            os.ftruncate(self._fd, intact)
            self.past = _past(entries)
            self.incarnation = self.past.incarnation + 1
            self._append({"kind": "open", "incarnation": self.incarnation, "takeover": takeover} | ({"run": run} if run and not takeover else {}))
        except BaseException:  # whatever went wrong, the lock is given back
            self.close()
            raise

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
        """Give the lease back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_open(path: Path) -> bool:
    """Whether the record is of a run that was not ended in order, so that members of it may live."""
    entries, _ = read(path)
    return _past(entries).last is not None
