"""Orders to a running controller, from other processes of the same user: ``RUN/control.json`` says where it listens, and the secret.

    ask(run_folder, "drain", target="1/0")   # what the handler of that name returned

One connection for each order: a request and an answer, as messages of :mod:`everstep.recovery.wire`.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everstep.errors import BadInput, EverstepError
from everstep.recovery import wire
from everstep.recovery.door import Door

FILE = "control.json"
TIMEOUT_S = 30.0

Handler = Callable[..., Any]


class Endpoint:
    """``handlers``: by the order's name; called with the order's arguments on a thread of its own, must return JSON, and may raise an
    EverstepError, which the asker gets. ``host``: the address to listen on. ``name``: of the file in ``folder``. ``url``: TOKEN@HOST:PORT."""

    def __init__(self, folder: Path, host: str, handlers: Mapping[str, Handler], name: str = FILE):
        self._handlers, self._token, self._path = dict(handlers), secrets.token_hex(16), folder / name
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        temporary = folder / f".{name}.{os.getpid()}"
        said = {"host": host, "port": listener.getsockname()[1], "token": self._token, "pid": os.getpid()}
        reached = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"{self._token}@{reached}:{said['port']}"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(said, file)
        os.replace(temporary, self._path)
        self._door = Door(listener, self._serve, "endpoint")

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._door.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(TIMEOUT_S)
            try:
                order = wire.receive(connection)
                if hmac.compare_digest(str(order.get("token", "")), self._token):
                    wire.send(connection, self._answer(str(order.get("order")), order.get("arguments")))
            except (wire.Closed, TimeoutError, ValueError):
                return  # whoever asked is gone, or is none of ours

    def _answer(self, name: str, arguments: Any) -> dict[str, Any]:
        handler = self._handlers.get(name)
        if handler is None:
            return {"error": f"this run takes no order {name!r}; it takes {', '.join(sorted(self._handlers))}", "code": BadInput.exit_code}
        try:
            return {"result": handler(**arguments)}
        except EverstepError as error:
            return {"error": str(error), "code": error.exit_code}
        except Exception as error:  # a wrong order must not end the run that it is given to
            return {"error": f"{name} failed: {type(error).__name__}: {error}", "code": BadInput.exit_code}


def ask(folder: Path, order: str, **arguments: Any) -> Any:
    """Give an order to the run in ``folder``; its result. BadInput if no controller listens there, or if it refuses."""
    path = folder / FILE
    try:
        said = json.loads(path.read_text())
        return ask_at(said["host"], said["port"], said["token"], order, **arguments)
    except FileNotFoundError:
        raise BadInput(f"{folder}: no run is under way there that takes orders (no {FILE}; launcher=local takes none)") from None
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{path}: nobody answers there ({error}); has the run ended?") from error


def ask_at(host: str, port: int, token: str, order: str, **arguments: Any) -> Any:
    """Give an order to whoever listens there; its result. BadInput if it refuses, OSError if nobody answers (or not to this token)."""
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
            wire.send(connection, {"token": token, "order": order, "arguments": arguments})
            answer = wire.receive(connection)
    except (wire.Closed, ValueError) as error:
        raise ConnectionError(str(error)) from error
    if "error" in answer:
        raise BadInput(str(answer["error"]))
    return answer["result"]
