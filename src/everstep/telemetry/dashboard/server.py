"""``everstep dashboard``: the page of one run over HTTP, made from its files, and the same numbers for Prometheus.

    GET /               the page
    GET /story?after=N  what it draws, as JSON; 204 if nothing has changed since version N
    GET /status         everstep.status(RUN), as JSON
    GET /metrics        for Prometheus
    GET /list, /read    bytes of the run's files, for another dashboard (:mod:`everstep.telemetry.window`)

Read-only. Whoever can reach the address sees the run (names of hosts and folders, metrics, but no samples): it listens to this
machine alone unless told otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from everstep.errors import BadInput, EverstepError
from everstep.telemetry.dashboard import prometheus
from everstep.telemetry.dashboard.story import Reader, as_page
from everstep.telemetry.events import to_json
from everstep.telemetry.window import Files, Mirror, is_address

_START_S = 30.0


def page(story: dict[str, object] | None = None) -> str:
    """The page; with ``story`` it stands alone and asks no server."""
    text = (files(__package__) / "page.html").read_text()
    if story is None:
        return text
    inline = to_json(story).replace("<", "\\u003c")  # a text with </script> in it must not end the script
    return text.replace('<script id="story" type="application/json">null</script>',
                        f'<script id="story" type="application/json">{inline}</script>', 1)


class Dashboard:
    """Serves one run until it is closed. ``port`` 0: a free one. Raises BadInput if the folder is no run, or the address not to be had."""

    def __init__(self, run_dir: str | os.PathLike[str] | Mirror, host: str = "127.0.0.1", port: int = 0):
        reader = Reader(run_dir)
        try:
            self._server = ThreadingHTTPServer((host, port), type("Handler", (_Handler,), {"reader": reader}))
        except (OSError, OverflowError) as error:
            raise BadInput(f"the dashboard cannot listen on {host}:{port}: {error}; choose another --host or --port") from error
        self._server.daemon_threads = True
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="dashboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


class _Handler(BaseHTTPRequestHandler):
    reader: Reader
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds for a request that does not come

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        try:
            match url.path:
                case "/" | "/index.html":
                    self._answer("text/html; charset=utf-8", page())
                case "/story":
                    self._story(parse_qs(url.query).get("after", ["-1"])[0])
                case "/status":
                    self._answer("application/json", to_json(self.reader.story().status.as_json()))
                case "/metrics":
                    self._answer(prometheus.CONTENT_TYPE, prometheus.exposition(self.reader.story()))
                case "/list":
                    self._answer("application/json", json.dumps(Files(self.reader.folder).list()))
                case "/read":
                    asked = parse_qs(url.query)
                    name, at = asked.get("name", [""])[0], asked.get("at", [""])[0]
                    self._answer("application/json", json.dumps(Files(self.reader.folder).read(name, int(at) if at.isdecimal() else -1)))
                case _:
                    self._answer("text/plain", "not here; see /", HTTPStatus.NOT_FOUND)
        except EverstepError as error:  # a folder that was deleted, a log that was damaged: said to who looks
            self._answer("application/json", json.dumps({"error": str(error)}), HTTPStatus.INTERNAL_SERVER_ERROR)

    def _story(self, after: str) -> None:
        story = self.reader.story()
        version = self.reader.version
        if after == str(version):
            self.send_response(HTTPStatus.NO_CONTENT)
            self.end_headers()
        else:
            self._answer("application/json", to_json(as_page(story) | {"version": version}))

    def _answer(self, kind: str, text: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked did not wait for the answer
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Not one line for each request."""


class Beside:
    """The dashboard of a run that goes on, in a process of its own: however slow it is, training does not wait for it. Raises BadInput
    if it cannot listen."""

    def __init__(self, run_dir: Path, host: str, port: int):
        command = [sys.executable, "-m", "everstep", "dashboard", str(run_dir), "--host", host, "--port", str(port), "--with-parent"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                         start_new_session=True)
        assert self._process.stdout is not None and self._process.stderr is not None
        slow = threading.Timer(_START_S, self._process.kill)
        slow.start()
        said = self._process.stdout.readline().strip()
        slow.cancel()
        if not said.startswith("http"):
            self._process.wait()
            reason = self._process.stderr.read().strip().splitlines()
            raise BadInput(f"telemetry.dashboard: {reason[-1] if reason else f'no answer in {_START_S:g} s'}")
        self.address = said

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()


def serve(run: str, host: str, port: int) -> None:
    """Until SIGINT or SIGTERM. ``run``: a folder, or the address of a run."""
    with contextlib.ExitStack() as last_first:
        mirror: Mirror | None = None
        if is_address(run):
            mirror = last_first.enter_context(contextlib.closing(Mirror(run, dict(os.environ))))
            mirror.follow()
        dashboard = last_first.enter_context(contextlib.closing(Dashboard(mirror or run, host, port)))
        print(dashboard.address, flush=True)
        while True:
            time.sleep(3600.0)
