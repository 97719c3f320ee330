"""Servers that speak S3 and Google Cloud Storage on this machine, and a proxy before one that makes trouble."""

from __future__ import annotations

import contextlib
import functools
import http.client
import http.server
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

BUCKET = "bucket"
# Read when gcsfs is imported: without the storage control API, which is gRPC and not emulated.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
#: What the client libraries read; worker processes inherit it.
S3_ENV = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    kept = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def s3() -> Iterator[str]:
    """moto's S3 server with a bucket; its address (the environment points there)."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    try:
        with environment(**S3_ENV, AWS_ENDPOINT_URL=address):
            boto3.client("s3").create_bucket(Bucket=BUCKET)
            forget()
            yield address
    finally:
        server.stop()


@contextlib.contextmanager
def gcs() -> Iterator[str]:
    """The emulator of Google Cloud Storage with a bucket."""
    from gcp_storage_emulator.handlers import buckets
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    storage = Storage(use_memory_fs=True)
    buckets.create_bucket(BUCKET, storage)
    # Its own server serves one connection at a time, and clients keep several open.
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(RequestHandler, storage))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with environment(STORAGE_EMULATOR_HOST=address, FSSPEC_GS_TOKEN="anon"):
            import fsspec.config

            fsspec.config.set_conf_env(fsspec.config.conf)
            forget()
            yield address
    finally:
        server.shutdown()
        server.server_close()


def forget() -> None:
    """Clients keep their address and credentials; the next one is a new one."""
    import fsspec

    for protocol in ("s3", "gs"):
        with contextlib.suppress(ImportError):
            fsspec.get_filesystem_class(protocol).clear_instance_cache()


#: (method, path, headers) -> what happens to the request: a status, "drop" (the connection closes), "cut" (in the middle of the
#: answer), seconds to wait before it is passed on, or None.
Trouble = Callable[[str, str, "http.client.HTTPMessage"], "int | float | str | None"]


class Proxy:
    """Stands before a server; ``trouble`` decides about every request. ``seen``: (method, path) of those that came."""

    def __init__(self, address: str, trouble: Trouble) -> None:
        host, _, port = address.removeprefix("http://").partition(":")
        self.seen: list[tuple[str, str]] = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                proxy.seen.append((self.command, self.path))
                action = trouble(self.command, self.path, self.headers)
                if action == "drop":
                    self.close_connection = True
                    self.connection.close()
                    return
                if isinstance(action, int) and not isinstance(action, bool):
                    code = {503: "SlowDown", 400: "ExpiredToken", 403: "AccessDenied"}[action]
                    self.answer(action, [("Content-Type", "application/xml")], f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())
                    return
                if isinstance(action, float):
                    time.sleep(action)
                upstream = http.client.HTTPConnection(host, int(port), timeout=60)
                upstream.request(self.command, self.path, body, dict(self.headers.items()))
                answer = upstream.getresponse()
                content = answer.read()
                headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection", "content-length")]
                if self.command == "HEAD":
                    headers.append(("Content-Length", answer.getheader("Content-Length") or "0"))
                self.answer(answer.status, headers, content, cut=action == "cut")
                upstream.close()

            def answer(self, status: int, headers: list[tuple[str, str]], content: bytes, cut: bool = False) -> None:
                self.send_response_only(status)
                for name, value in headers:
                    self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[: len(content) // 2] if cut else content)
                if cut:
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, *args: object) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    super().handle()

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def troubled(address: str, trouble: Trouble) -> Iterator[Proxy]:
    """A proxy before the S3 server at ``address``; the environment points at it."""
    proxy = Proxy(address, trouble)
    try:
        with environment(AWS_ENDPOINT_URL=proxy.address):
            forget()
            yield proxy
    finally:
        proxy.close()
        forget()
