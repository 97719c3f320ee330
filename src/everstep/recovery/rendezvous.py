"""Where the workers of a run find a coordinator that took over from a dead one: a small file in the run's folder.

Every controller writes it once its coordinator listens, and removes it when the run ends. A worker whose coordinator is gone reads it
until it names a higher incarnation than the one it obeyed (docs/protocol.md, rule 7). The file holds a secret and is for its owner only.
A lighthouse needs no file: it comes back where it was, and says which incarnation it is (``Announcement`` without one).
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import BadInput

FILE = "controller.json"

Address = tuple[str, int]  # (host, port)


@dataclass(frozen=True)
class Announcement:
    """``incarnation``: None: it says itself when it is asked. ``token``: what a worker must know to be heard. ``host``: what another controller needs to reach the worker processes
    (:meth:`everstep.cluster.host.Host.handle`)."""

    incarnation: int | None
    coordinator: Address
    store: Address
    token: str
    pid: int = 0
    host: dict[str, Any] = field(default_factory=dict)


def announce(folder: Path, announcement: Announcement) -> None:
    """Replace the file of this run, atomically."""
    temporary = folder / f".{FILE}.{os.getpid()}.{threading.get_ident()}"  # threads that start processes announce them at once
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(announcement), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / FILE)


def find(folder: Path) -> Announcement | None:
    """What the newest controller wrote; None if there is none. Raises BadInput if the file is damaged."""
    try:
        read = json.loads((folder / FILE).read_text())
        return Announcement(**(read | {key: (str(read[key][0]), int(read[key][1])) for key in ("coordinator", "store")}))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder / FILE}: unreadable ({type(error).__name__}: {error}); start again with resume=auto") from error


def withdraw(folder: Path) -> None:
    """The run is over: nobody needs to be found any more."""
    (folder / FILE).unlink(missing_ok=True)
