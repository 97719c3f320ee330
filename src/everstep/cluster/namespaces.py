"""Network namespaces for processes of one machine, joined by a bridge: each can be cut off as a node is whose cable is pulled.

Nothing is reset and nobody is told: what was sent is lost, and connections stay open until somebody's deadline. Needs root, or
CAP_NET_ADMIN and CAP_SYS_ADMIN, and the command ``ip``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from everstep.cluster.processes import pid_runs
from everstep.errors import BadInput

_CLONE_NEWNET = 0x40000000
_IP_S = 10.0
_LINKS = Path("/sys/class/net")
_OWNER = "everstep "  # and the number of the process, as the alias of its bridge


def refusal() -> str | None:
    """Why this machine has no network namespaces for us; None if it has."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not installed"
    tried = subprocess.run(["unshare", "--net", "ip", "link", "add", "type", "bridge"], capture_output=True, text=True, check=False, timeout=_IP_S)
    return f"the kernel refuses ({tried.stderr.strip()})" if tried.returncode else None


@dataclass(frozen=True)
class Plug:
    """One process's end. ``enter`` is called by that process itself, before it has threads."""

    outer: str    # interface on the bridge
    inner: str    # interface in the process's namespace
    address: str  # with the length of the prefix

    def enter(self) -> None:
        """Leave the machine's network for a namespace of this process's own. Raises OSError, BadInput."""
        libc = ctypes.CDLL(None, use_errno=True)
        outside = os.open("/proc/self/ns/net", os.O_RDONLY)
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace could be made (unshare)")
        pid = os.getpid()
        _ip("link", "set", self.inner, "netns", str(pid), preexec=lambda: libc.setns(outside, 0))
        os.close(outside)
        _ip("addr", "add", self.address, "dev", self.inner)
        for interface in ("lo", self.inner):
            _ip("link", "set", interface, "up")
        os.environ["GLOO_SOCKET_IFNAME"] = self.inner


class Bridge:
    """``address``: of this process, as the others reach it."""

    def __init__(self) -> None:
        if reason := refusal():
            raise BadInput(f"no network namespaces here: {reason}")
        _remove_orphans()
        used = Path("/proc/net/fib_trie").read_text()
        number = next((n for n in range(1, 255) if f"10.231.{n}.0" not in used and not (_LINKS / f"evs{n}").exists()), None)
        if number is None:
            raise BadInput("no network namespaces here: 254 bridges evs1 to evs254 exist already; remove those that nobody uses (ip link del)")
        self._network, self._name = f"10.231.{number}", f"evs{number}"
        self.address = f"{self._network}.1"
        self._outer: dict[str, str] = {}
        _ip("link", "add", self._name, "type", "bridge")
        try:
            _ip("link", "set", self._name, "alias", f"{_OWNER}{os.getpid()}")
            _ip("addr", "add", f"{self.address}/24", "dev", self._name)
            _ip("link", "set", self._name, "up")
        except BaseException:  # Ctrl-C, too: the interface goes
            self.close()
            raise

    def plug(self, worker: str) -> Plug:
        """For one process that is about to start."""
        index = len(self._outer) + 2
        outer, inner = f"{self._name}o{index}", f"{self._name}i{index}"
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        self._outer[worker] = outer
        _ip("link", "set", outer, "master", self._name, "up")
        return Plug(outer, inner, f"{self._network}.{index}/24")

    def cut(self, worker: str) -> None:
        """From now on nothing reaches the process, and nothing leaves it."""
        _ip("link", "set", self._outer[worker], "down")

    def close(self) -> None:
        for outer in self._outer.values():
            with contextlib.suppress(BadInput):  # it went with the process's namespace
                _ip("link", "del", outer)
        with contextlib.suppress(BadInput):
            _ip("link", "del", self._name)


def _remove_orphans() -> None:
    """Bridges whose owner was killed before it could remove them. Their veth pairs went with the namespaces of its children."""
    for link in _LINKS.glob("evs*"):
        with contextlib.suppress(OSError, ValueError, BadInput):  # not ours, or another process removes it just now
            owner = (link / "ifalias").read_text().strip()
            if owner.startswith(_OWNER) and not pid_runs(int(owner.removeprefix(_OWNER))):
                _ip("link", "del", link.name)


def _ip(*arguments: str, preexec: object = None) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=_IP_S, preexec_fn=preexec)  # type: ignore[call-overload]
    if done.returncode:
        raise BadInput(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
