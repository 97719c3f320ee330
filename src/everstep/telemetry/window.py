"""A run as those see it who do not see its folder: its events, metrics and last state, byte by byte, to whoever shows a token.

    window = Window(run_folder, "10.0.0.5")      # in the run; window.address is what `everstep dashboard` and `status` take
    mirror = Mirror(window.address)              # elsewhere; mirror.path is a folder like the run's, as far as it goes
    mirror.sync()

Bytes of files are all that is served, and only of the files named here: no samples, no weights, no configuration (it may hold secrets),
and no orders. The run does nothing but read what was appended; whoever looks works everything out by himself. Messages are JSON.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import secrets
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep import scratch
from everstep.cluster.endpoint import Endpoint, ask_at
from everstep.errors import BadInput
from everstep.run_dir import open_run_dir

FILE = "watch.json"
CHUNK_BYTES = 1 << 20
PULSE_S = 1.0          # between two looks of one who follows
LAST_LOOK_S = 2.5      # for followers, at the end of a run, to get what was told last
_SERVED = re.compile(r"(events/[\w.@-]+\.jsonl|metrics\.jsonl|status\.json)", re.ASCII)
_ADDRESS = re.compile(r"(?:(?P<token>[0-9a-f]+)@)?(?P<host>\[[0-9a-fA-F:]+\]|[\w.-]+):(?P<port>\d{1,5})", re.ASCII)
ENV = "EVERSTEP_WATCH_TOKEN"

Fetch = Callable[..., dict[str, Any]]


class Files:
    """What is served of one run's folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    def list(self) -> dict[str, Any]:
        """``files``: name -> bytes; ``attempt``; ``folder``; ``now``: this machine's clock, seconds since 1970."""
        paths = [*sorted((self._folder / "events").glob("*.jsonl")), self._folder / "metrics.jsonl", self._folder / "status.json"]
        sizes = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                sizes[str(path.relative_to(self._folder))] = path.stat().st_size
        return {"files": sizes, "attempt": open_run_dir(self._folder).attempt, "folder": str(self._folder), "now": time.time()}

    def read(self, name: str, at: int) -> dict[str, Any]:
        """``data``: at most CHUNK_BYTES of a file from byte ``at`` on, one character a byte. Raises BadInput if it is not served."""
        if not _SERVED.fullmatch(name) or at < 0:
            raise BadInput(f"{name!r} is not served")
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(at)
                return {"data": file.read(CHUNK_BYTES).decode("latin-1")}
        except OSError as error:
            raise BadInput(f"{name}: {error.strerror}") from None


class Window:
    """Serves the folder of a run that goes on, on ``host``; ``address`` (with the token) is in ``RUN/watch.json`` too, for its owner."""

    def __init__(self, folder: Path, host: str):
        self._files, self._over = Files(folder), False
        self._turn = threading.Condition()
        self._seen: dict[str, float] = {}  # followers, and when each looked last
        self._endpoint = Endpoint(folder, host, {"list": self._list, "read": self._files.read, "leave": self._leave}, FILE)
        self.address = self._endpoint.url

    def close(self) -> None:
        """The run is over: followers get what they have not seen yet, if that takes moments only."""
        end = time.monotonic() + LAST_LOOK_S
        with self._turn:
            self._over = True
            while any(now > time.monotonic() - 3 * PULSE_S for now in self._seen.values()) and (left := end - time.monotonic()) > 0:
                self._turn.wait(left)
        self._endpoint.close()

    def _list(self, follower: str = "") -> dict[str, Any]:
        with self._turn:
            over = self._over  # before the sizes are looked at: what they say is then the end of it
            if follower:
                self._seen = {who: at for who, at in self._seen.items() if at > time.monotonic() - 60.0} | {follower: time.monotonic()}
        return self._files.list() | {"over": over}

    def _leave(self, follower: str) -> None:
        with self._turn:
            self._seen.pop(follower, None)
            self._turn.notify_all()


def is_address(text: str) -> bool:
    """Whether this names a run elsewhere, and no folder: `[TOKEN@]HOST:PORT`, or the http address of a dashboard."""
    return text.startswith(("http://", "https://")) or (_ADDRESS.fullmatch(text) is not None and not Path(text).exists())


class Mirror:
    """A folder, of this process alone, with the served files of the run at ``address``. Raises BadInput if nobody answers there.

    ``address``: TOKEN@HOST:PORT of a window, or the http address of a dashboard. ``environ``: has the token, if the address has none.
    """

    def __init__(self, address: str, environ: dict[str, str]):
        self._who, self._fetch, self.shown = secrets.token_hex(8), _way_to(address, environ), address.rpartition("@")[2]
        self._skew_s = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.trouble = ""  # why it is not up to date any more
        self._kept = contextlib.ExitStack()
        self.path = self._kept.enter_context(scratch.folder("watch"))
        try:
            (self.path / "events").mkdir()
            self._sync()
        except BaseException:  # the folder goes, whatever went wrong
            self.close()
            raise

    def close(self) -> None:
        self._over.set()
        if self._thread:
            self._thread.join(5.0)
        self._kept.close()

    def now(self) -> float:
        """The clock of the run's machine, seconds since 1970."""
        return time.time() + self._skew_s

    def sync(self) -> None:
        """Get what is new. That nobody answers is noted in ``trouble``."""
        with self._lock:
            if self.trouble == _ENDED:
                return
            try:
                self.trouble = _ENDED if self._sync() else ""
            except BadInput as error:
                self.trouble = str(error)

    def follow(self) -> None:
        """Keep up with the run from now on, in the background, until ``close``."""
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._over.wait(PULSE_S):
            self.sync()

    def _sync(self) -> bool:
        """Whether the run was over, so that nothing more will come."""
        try:
            return self._copy_all(self._fetch("list", follower=self._who if self._thread else ""))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"{self.shown}: what answers there is no run of everstep ({type(error).__name__}: {error})") from error

    def _copy_all(self, said: dict[str, Any]) -> bool:
        self.shown = f"{said['folder']} at {self.shown.rpartition(' at ')[2]}"
        self._skew_s = float(said["now"]) - time.time()
        (self.path / "logs" / f"attempt-{int(said['attempt'])}").mkdir(parents=True, exist_ok=True)
        for name, size in said["files"].items():
            if not _SERVED.fullmatch(name):
                raise BadInput(f"{self.shown}: what answers there is no run of everstep (it serves {name!r})")
            self._copy(name, int(size))
        over = bool(said.get("over"))
        if over and self._thread:
            self._fetch("leave", follower=self._who)
        return over

    def _copy(self, name: str, size: int) -> None:
        path = self.path / name
        if name == "status.json":  # replaced, never appended to
            temporary = path.with_suffix(".new")
            temporary.write_bytes(self._read(name, 0))
            temporary.replace(path)
            return
        have = path.stat().st_size if path.exists() else 0
        if have > size:  # made anew (--clean)
            path.unlink()
            have = 0
        with path.open("ab") as file:
            while have < size and (data := self._read(name, have)):
                file.write(data)
                have += len(data)

    def _read(self, name: str, at: int) -> bytes:
        return str(self._fetch("read", name=name, at=at)["data"]).encode("latin-1")


_ENDED = "the run is over"


def _way_to(address: str, environ: dict[str, str]) -> Fetch:
    if address.startswith(("http://", "https://")):
        base = address.rstrip("/")
        return lambda order, **arguments: _get(base, order, arguments)
    found = _ADDRESS.fullmatch(address)
    token = (found["token"] if found else None) or environ.get(ENV, "")
    if not found or not token:
        raise BadInput(
            f"{address}: the address of a run is TOKEN@HOST:PORT, as the run prints it at its start (and RUN/watch.json has it); "
            f"the token may be in {ENV} instead"
        )
    host, port = found["host"].strip("[]"), int(found["port"])
    return lambda order, **arguments: _ask(host, port, token, order, arguments)


def _ask(host: str, port: int, token: str, order: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = ask_at(host, port, token, order, **arguments)
    except OSError as error:
        raise BadInput(f"{host}:{port}: nobody answers there ({error}); has the run ended, or is the token that of another one?") from error
    return answer if isinstance(answer, dict) else {}


def _get(base: str, order: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if order == "leave":
        return {}
    try:
        with urllib.request.urlopen(f"{base}/{order}?{urllib.parse.urlencode(arguments)}", timeout=30.0) as answer:
            said = json.loads(answer.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BadInput(f"{base}: no dashboard of everstep answers there ({error})") from error
    if not isinstance(said, dict) or not {"files", "data"} & said.keys():
        raise BadInput(f"{base}: no dashboard of everstep answers there")
    return said
